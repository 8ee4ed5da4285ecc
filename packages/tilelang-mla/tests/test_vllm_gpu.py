"""Does vLLM's own MLA layer give the same with this package's backend and with vLLM's, on a GPU?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.testing.recorded import installed

if not installed("vllm.v1.attention.backend"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm import _custom_ops
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace

from kernel_reference.testing import vllm
from tilelang_mla.integrations.flashmla_sparse import SparseBackend
from tilelang_mla.integrations.vllm import NAME, register

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

HEADS, NOPE, ROPE, LATENT, V, PAGE, PAGES, SCALE = 16, 128, 64, 512, 128, 64, 12, 192**-0.5


class Projection(torch.nn.Linear):
    """vLLM's linear layers give a bias beside the result."""

    quant_method = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def layer(name: str, cls: Any, spec: Any, cache: Tensor, config: Any, projection: Any, **options: Any) -> vllm.Side:
    """vLLM's layer with this backend, over a cache of its own."""
    made = MLAAttention(
        HEADS, SCALE, NOPE, ROPE, V, None, LATENT, projection, prefix=name, attn_backend=cls,
        prefill_backend_cls=CPUSDPAMLAPrefillBackend, **options,
    )  # fmt: skip
    made.process_weights_after_loading(torch.bfloat16)
    return vllm.side(made, cls, spec, cache, config)


def inputs(step: Any, device: torch.device) -> list[Any]:
    """Queries, latents and ropes of new tokens, and the shape of the result."""
    tokens, widths = step.num_actual_tokens, ((HEADS, NOPE + ROPE), (LATENT,), (1, ROPE))
    given = [torch.randn(tokens, *width, device=device).bfloat16() for width in widths]
    return [*given, torch.Size((tokens, HEADS * V))]


@pytest.mark.parametrize("new", [(1, 1, 9, 20), (1, 1, 1, 1)], ids=["mixed", "decoding"])
@pytest.mark.parametrize("backend", ["TRITON_MLA", "FLASHMLA"])
def test_a_layer_gives_the_same_with_either_backend_eagerly_and_in_a_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, new: tuple[int, ...], backend: str
) -> None:
    vllm.write_by_triton(monkeypatch)
    register()
    monkeypatch.setattr("vllm.v1.attention.backends.mla.flashmla.FlashMLAMetadataBuilder.reorder_batch_threshold", 1)
    asked = {"get_num_attention_heads": lambda *_: HEADS, "get_head_size": lambda: LATENT + ROPE}
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, device=device).bfloat16()
    with vllm.configured(device, **asked) as config:
        projection = Projection(LATENT, HEADS * (NOPE + V), bias=False, device=device, dtype=torch.bfloat16)
        ours, theirs = (
            layer(name, AttentionBackendEnum[name].get_class(), spec, cache, config, projection)
            for name in (NAME, backend)
        )
    table = torch.randperm(PAGES).view(4, -1).int().to(device)
    # Prompts have nothing cached: vLLM's C++ extension would gather it.
    step = vllm.step((100, 63, 0, 0), new, table, PAGE)
    other = vllm.step((5, 160, 41, 0), new, table.roll(1, 0).contiguous(), PAGE) if len(set(new)) == 1 else None
    vllm.assert_sides_alike(ours, theirs, step, config, inputs(step, device), heads=HEADS, within=0.02, other=other)


TOPK = 128


def lists(older: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """Positions that each token sees, up to its own, at random and in any order; -1 behind them."""
    listed = torch.full((sum(new), TOPK), -1, dtype=torch.int32)
    own = [begin + i for begin, count in zip(older, new, strict=True) for i in range(count)]
    for row, position in zip(listed, own, strict=True):
        chosen = torch.randperm(position + 1)[:TOPK]
        row[: len(chosen)] = chosen.int()
    return listed


def join(latent: Tensor, rope: Tensor, out: Tensor) -> None:
    """In place of vLLM's C++ extension: of as many heads as there are."""
    out[:, : latent.shape[1]] = torch.cat((latent, rope), -1)


@pytest.mark.parametrize("new", [(1, 1, 9, 20), (1, 1, 1, 1)], ids=["mixed", "decoding"])
def test_a_layer_of_sparse_mla_gives_the_same_with_either_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, new: tuple[int, ...]
) -> None:
    vllm.write_by_triton(monkeypatch)
    monkeypatch.setattr(_custom_ops, "concat_mla_q", join)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(device)
    sizes = SimpleNamespace(
        index_topk=TOPK, q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=V,
    )  # fmt: skip
    asked = {
        "get_num_attention_heads": lambda *_: HEADS, "get_head_size": lambda: LATENT + ROPE, "hf_text_config": sizes,
        "hf_config": sizes, "model_arch_config": SimpleNamespace(total_num_attention_heads=HEADS),
    }  # fmt: skip
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, device=device).bfloat16()
    older = (150, 140, 70, 0)
    listed = lists(older, new).to(device)
    with vllm.configured(device, **asked) as config:
        projection = Projection(LATENT, HEADS * (NOPE + V), bias=False, device=device, dtype=torch.bfloat16)
        sides = [
            layer(name, cls, spec, cache, config, projection, use_sparse=True, topk_indices_buffer=listed.clone())
            for name, cls in (("ours", SparseBackend), ("theirs", FlashMLASparseBackend))
        ]
    for side in sides:
        # Prompts by their lists too, and not with separate heads.
        side.layer._use_sparse_mha = lambda metadata: False
    table = torch.randperm(PAGES).view(4, -1).int().to(device)
    step = vllm.step(older, new, table, PAGE)
    vllm.assert_sides_alike(*sides, step, config, inputs(step, device), heads=HEADS, within=0.02)
