"""Do vLLM's lightning layers give the same with this package's recurrence and with vLLM's kernels, on a GPU?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_reference.testing.recorded import installed

if not installed("vllm.v1.attention.backend"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from kernel_reference.bench.engines import captured
from kernel_reference.recurrence import linear_attention
from kernel_reference.testing import vllm
from lightning_attn.integrations.vllm import MiniMaxLayer

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

HEADS, DIM, SLOTS = 8, 128, 9
SPEC = MambaSpec(block_size=4096, shapes=((HEADS, DIM, DIM),), dtypes=(torch.float32,))


class Case:
    """A step's rows and states, vLLM's metadata of it, and its layer without projections."""

    def __init__(self, device: torch.device, older: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.layer = MiniMaxLayer.__new__(MiniMaxLayer)
        torch.nn.Module.__init__(self.layer)
        self.layer.tp_slope = MiniMaxText01LinearAttention._build_slope_tensor(HEADS).to(device)
        self.layer.layer_idx, self.layer.BLOCK = 0, 256
        table = torch.randperm(SLOTS)[: len(new), None].int().to(device)
        with vllm.configured(device) as config:
            self.builder = LinearAttentionMetadataBuilder(SPEC, ["layer"], config, device)
        self.step = vllm.step(older, new, table, SPEC.block_size)
        fused = torch.nn.functional.silu(torch.randn(sum(new), HEADS, 3 * DIM, device=device))
        self.qkv = fused.split(DIM, -1)
        self.states = torch.randn(SLOTS, HEADS, DIM, DIM, device=device)
        for slot, begin in zip(table[:, 0].tolist(), older, strict=True):
            # As vLLM clears those of new sequences.
            if not begin:
                self.states[slot] = 0

    def run(self, cls: Any, states: Tensor) -> Tensor:
        metadata = self.builder.build(0, self.step)
        method = cls._prefill_and_mix_infer if metadata.num_prefills else cls._decode_infer
        out: Tensor = method(self.layer, *self.qkv, states, metadata.state_indices_tensor, metadata)
        return out


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max() / exact.abs().max())


@pytest.mark.parametrize("new", [(1, 1, 100, 250), (1, 1, 1, 1)], ids=["mixed", "decoding"])
def test_a_step_gives_the_same_with_vllms_kernels_eagerly_and_in_a_graph(
    device: torch.device, new: tuple[int, ...]
) -> None:
    case = Case(device, (40, 33, 0, 0), new)
    own, engine = case.states.clone(), case.states.clone()
    assert off(case.run(MiniMaxLayer, own), case.run(MiniMaxText01LinearAttention, engine)) < 0.005
    assert off(own, engine) < 0.005
    if len(set(new)) > 1:
        return
    replay = captured(lambda: case.run(MiniMaxLayer, own))
    other = Case(device, (7, 8, 9, 10), new)
    vllm.overwrite(case.step, other.step)
    for into, source in zip((*case.qkv, own, engine), (*other.qkv, other.states, other.states), strict=True):
        into.copy_(source)
    assert off(replay(), case.run(MiniMaxText01LinearAttention, engine)) < 0.005
    assert off(own, engine) < 0.005


def test_a_prompt_of_several_blocks_is_right_where_vllms_counts_the_past_too_often(device: torch.device) -> None:
    case = Case(device, (0,), (600,))
    q, k, v = (x.double().cpu() for x in case.qkv)
    exact = linear_attention(q, k, v, case.layer.tp_slope.double().cpu(), cu_seqlens=torch.tensor([0, 600])).out
    ours, theirs = (
        case.run(cls, case.states.clone()).cpu().unflatten(1, (HEADS, DIM))
        for cls in (MiniMaxLayer, MiniMaxText01LinearAttention)
    )
    print(f"off by: ours {off(ours, exact):.2e}, vLLM's {off(theirs, exact):.2e}")
    assert off(ours, exact) < 1e-3
    # Up to the first block's end vLLM's is right.
    assert off(theirs[:256], exact[:256]) < 0.005
    # The first head forgets soonest, so that what it should have forgotten shows.
    assert off(theirs[:, 0], exact[:, 0]) > 0.05
