"""Do blocks that neighbouring tokens share, multiplied for all of them at once on sm_90, make the same result?

Simulated on a CPU, as test_hopper.py says.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from blocksparse_attn.selected import by_blocks
from blocksparse_attn.selected import launch as selected_launch
from blocksparse_attn.selected.arguments import Options, Tensors, check_selected
from blocksparse_attn.selected.plan import SelectedPlan
from kernel_reference.testing import gluon

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def shared() -> ModuleType:
    modules = ("softmax", "hopper.memory", "hopper.pieces", "hopper.softmax", "hopper.consumers", "hopper.shared")
    return gluon.shadow(*(f"blocksparse_attn.kernels.{name}" for name in modules))[-1]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, shared: ModuleType, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(by_blocks, "TmaLaunch", gluon.tma_launch(shared))


CASES: dict[str, dict[str, Any]] = {
    "two steps a block": {"heads": (32, 2), "block": 128, "page": 64, "topk": 5, "share": 0.8},
    "pages across": {"heads": (16, 1), "block": 64, "page": 16, "topk": 6, "share": 0.9, "sinks": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_what_neighbours_share_is_multiplied_for_all_at_once(selected, options) -> None:
    lengths = [(700, 21), (0, 3), (500, 40)]
    batch = selected(lengths, head_dim=64, **options)
    plan = SelectedPlan(64, options["block"], 1, 4, 1, by_blocks=32, shared=True)
    o = batch.options
    lse = torch.full((batch.heads[0], len(batch.q)), torch.nan, device=batch.q.device)
    tensors = Tensors(
        batch.q, batch.k, batch.v, batch.indices, o["block_table"], o["cu_seqlens_q"], o["seqlens_k"], o["sinks"],
        None, None, batch.out.tensor, lse,
    )  # fmt: skip
    problem = check_selected(
        tensors, Options(o["block_size"], o["page_layout"], o["causal"], batch.q.shape[2] ** -0.5, 1.0, 1.0)
    )
    selected_launch.prepare_selected(problem, plan, tensors)(*tensors)
    batch.out.check()
    batch.check(batch.out.tensor, lse)
