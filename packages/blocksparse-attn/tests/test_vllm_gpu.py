"""Does vLLM's attention of MiniMax-M3 give the same with these kernels and with vLLM's, on a GPU?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.testing.recorded import installed

if not installed("vllm.v1.attention.backend"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.forward_context import set_forward_context
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseMetadataBuilder, MiniMaxM3SparseTritonImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from blocksparse_attn.integrations.minimax_m3 import Implementation
from kernel_reference.testing import vllm
from kernel_reference.testing.layers import assert_alike

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, BLOCK, TOPK, PAGES, LAYER = 16, 2, 128, 128, 4, 32, "model.layers.3.attn"


def lists(step: Any, device: torch.device) -> Tensor:
    """Blocks of each token and kv head as the indexer leaves them: its own, others before it, and -1."""
    positions = torch.cat(
        [
            torch.arange(length - count, length)
            for length, count in zip(step.seq_lens.tolist(), step.query_start_loc_cpu.diff().tolist(), strict=True)
        ]
    )
    found = torch.full((len(positions), KV_HEADS, TOPK), -1, dtype=torch.int32)
    for row, own in zip(found, (positions // BLOCK).tolist(), strict=True):
        for head in row:
            seen = [own, *torch.randperm(own)[: TOPK - 1].tolist()]
            head[: len(seen)] = torch.tensor(seen)
    return found.to(device)


@pytest.mark.parametrize("new", [(1, 1, 200, 37), (1, 1, 1, 1)], ids=["mixed", "decoding"])
def test_a_step_gives_the_same_with_vllms_kernels_eagerly_and_in_a_graph(
    device: torch.device, new: tuple[int, ...]
) -> None:
    given: dict[str, Any] = {"num_kv_heads": KV_HEADS, "topk_blocks": TOPK, "sparse_block_size": BLOCK}
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.bfloat16)
    with vllm.configured(device) as config:
        builder = MiniMaxM3SparseMetadataBuilder(spec, [LAYER], config, device)
        ours, theirs = (cls(HEADS, DIM, 0.1, **given) for cls in (Implementation, MiniMaxM3SparseTritonImpl))
    table = torch.randperm(PAGES).view(4, -1).int().to(device)
    cache = torch.randn(PAGES, KV_HEADS, BLOCK, 2 * DIM, device=device).bfloat16()
    step = vllm.step((300, 900, 0, 600), new, table, BLOCK)
    query = torch.randn(sum(new), HEADS * DIM, device=device).bfloat16()
    layer = SimpleNamespace(layer_name=LAYER, topk_indices_buffer=lists(step, device))

    def run(by: Any, metadata: Any) -> Tensor:
        with torch.no_grad(), set_forward_context({LAYER: metadata}, config):
            out: Tensor = by.forward(layer, query, cache, torch.empty_like(query))
        return out

    def renew() -> None:
        vllm.overwrite(step, vllm.step((5, 700, 41, 130), new, table.roll(1, 0).contiguous(), BLOCK))
        layer.topk_indices_buffer.copy_(lists(step, device))
        query.normal_()

    metadata = builder.build(0, step)
    assert_alike(
        lambda: run(ours, metadata), lambda: run(theirs, builder.build(0, step)), heads=HEADS, within=0.02,
        renew=renew if len(set(new)) == 1 else None,
    )  # fmt: skip
