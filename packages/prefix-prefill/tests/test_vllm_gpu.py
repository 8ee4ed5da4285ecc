"""Do vLLM's own layers give the same with this package's backend and with vLLM's, on a GPU?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_reference.testing.recorded import installed

if not installed("vllm.v1.attention.backend"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kernel_reference.testing import vllm
from prefix_prefill.integrations.vllm import NAME, register

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 24


@pytest.mark.parametrize("new", [(7, 1, 18, 3), (3, 3, 3, 3), (1, 1, 1, 1)], ids=["mixed", "drafts", "decoding"])
@pytest.mark.parametrize("options", [{}, {"per_layer_sliding_window": 20}, {"logits_soft_cap": 5.0}], ids=str)
def test_a_layer_gives_the_same_with_either_backend_eagerly_and_in_a_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, new: tuple[int, ...], options: Any
) -> None:
    vllm.write_by_triton(monkeypatch)
    register()
    asked = {"get_num_attention_heads": HEADS, "get_num_kv_heads": KV_HEADS, "get_head_size": DIM}
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, KV_HEADS, PAGE, 2 * DIM, device=device).bfloat16()
    with vllm.configured(device, **{name: lambda *_, value=value: value for name, value in asked.items()}) as config:
        sides = []
        for name in (NAME, "TRITON_ATTN"):
            cls = AttentionBackendEnum[name].get_class()
            layer = Attention(HEADS, DIM, 0.1, KV_HEADS, prefix=name, attn_backend=cls, **options)
            sides.append(vllm.side(layer, cls, spec, cache, config))
    table = torch.randperm(PAGES).view(4, -1).int().to(device)
    given = [torch.randn(sum(new), n * DIM, device=device).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]
    step = vllm.step((20, 33, 0, 60), new, table, PAGE)
    other = vllm.step((5, 80, 41, 0), new, table.roll(1, 0).contiguous(), PAGE) if len(set(new)) == 1 else None
    vllm.assert_sides_alike(*sides, step, config, given, heads=HEADS, within=0.015, other=other)
