"""What gdn_prefill_inputs gives is what flash-linear-attention's chunked kernel of the gated delta rule takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from gdn_split import gdn_prefill_inputs
from gdn_split.plan import GroupShape
from kernel_reference import gated_delta

pytestmark = pytest.mark.gpu

LENGTHS = (1, 70, 200)
SHAPE = GroupShape(2, 4, 64, 64)


@pytest.fixture
def chunk_gated_delta_rule(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Its kernels in the first configuration of each: the autotuner would compile dozens, which takes minutes."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    from triton.runtime.autotuner import Autotuner

    for kernel in [each for name, module in [*sys.modules.items()] if name.startswith("fla.")
                   for each in vars(module).values()]:  # fmt: skip
        while hasattr(kernel, "fn"):
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
            kernel = kernel.fn
    return fla.chunk_gated_delta_rule


def test_its_chunked_kernel_gives_the_outputs_and_states_of_the_layers_definition(
    device: torch.device, chunk_gated_delta_rule: Callable[..., Any]
) -> None:
    sizes = (SHAPE.num_heads_qk, SHAPE.num_heads_v, SHAPE.head_qk, SHAPE.head_v)
    rows = sum(LENGTHS)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device)

    qkvz, ba = normal(rows, SHAPE.qkvz_width).bfloat16(), normal(rows, SHAPE.ba_width).bfloat16()
    weight = (normal(SHAPE.qkv_width, 4) / 2).bfloat16()
    a_log, dt_bias = normal(SHAPE.num_heads_v) - 2, normal(SHAPE.num_heads_v)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    q, k, v, _, g, beta = (
        part[None] for part in gdn_prefill_inputs(qkvz, ba, weight, None, bounds, a_log, dt_bias, *sizes)
    )
    out, states = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True, cu_seqlens=bounds)

    layer = gated_delta.Layer(weight, None, a_log, dt_bias)
    for i, (begin, end) in enumerate(pairwise(bounds.tolist())):
        conv = torch.zeros(1, SHAPE.qkv_width, 3, dtype=torch.float64, device=device)
        pool = torch.zeros(1, SHAPE.num_heads_v, SHAPE.head_qk, SHAPE.head_v, dtype=torch.float64, device=device)
        wanted = gated_delta.decode_step(
            qkvz[begin:end], ba[begin:end], conv, pool, torch.zeros(1, dtype=torch.int64, device=device),
            gated_delta.Sizes(*sizes), layer, tokens_per_sequence=end - begin,
        )  # fmt: skip
        for got, exact in ((out[0, begin:end], wanted), (states[i], pool[0])):
            assert (got.double() - exact).norm() / exact.norm() < 0.02, (i, got.shape)
