"""Do vLLM's Gated DeltaNet layers give the same with this package in them and with vLLM's kernels, on a GPU?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_reference.testing.recorded import installed

if not installed("vllm.v1.attention.backend"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from transformers import Qwen3NextConfig
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from gdn_split.integrations.vllm import GatedDeltaNetLayer
from kernel_reference.bench.engines import captured
from kernel_reference.testing import vllm

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

HEADS_QK, HEADS, DIM, WIDTH, SLOTS, HIDDEN = 4, 8, 128, 4, 9, 256
CHANNELS = (2 * HEADS_QK + HEADS) * DIM
MODEL = Qwen3NextConfig(
    hidden_size=HIDDEN, linear_num_key_heads=HEADS_QK, linear_num_value_heads=HEADS, linear_key_head_dim=DIM,
    linear_value_head_dim=DIM, num_hidden_layers=2,
)  # fmt: skip


@pytest.mark.parametrize("new", [(1, 1, 70, 5), (1, 1, 1, 1)], ids=["mixed", "decoding"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["Qwen3-Next", "Qwen3.5"])
def test_a_layer_gives_the_same_with_vllms_kernels_eagerly_and_in_a_graph(
    device: torch.device, tmp_path: Path, new: tuple[int, ...], interleaved: bool
) -> None:
    made = []
    states = ((WIDTH - 1, CHANNELS), (HEADS, DIM, DIM))
    spec = MambaSpec(block_size=4096, shapes=states, dtypes=(torch.bfloat16, torch.float32))
    first = [
        torch.randn(SLOTS, *shape, device=device).to(dtype)
        for shape, dtype in zip(states, (torch.bfloat16, torch.float32), strict=True)
    ]
    with vllm.configured(device) as config:
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        config.model_config.hf_text_config = MODEL
        # On sm_90 vLLM takes FlashInfer's kernels of prompts, which are compiled at the first call, or else these.
        config.additional_config = {"gdn_prefill_backend": "triton"}
        for cls in (GatedDeltaNetLayer, QwenGatedDeltaNetAttention):
            name = f"layers.0.{cls.__name__}"
            layer = cls(MODEL, config, name, gqa_interleaved_layout=interleaved)
            layer.layer_name, layer.kv_cache = name, tuple(state.clone() for state in first)
            made.append((layer, GDNAttentionMetadataBuilder(spec, [name], config, device)))
    (ours, _), (theirs, _) = made
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    theirs.load_state_dict(ours.state_dict())
    table = torch.randperm(SLOTS - 1)[: len(new), None].add(1).int().to(device)
    step = vllm.step((40, 33, 0, 12), new, table, spec.block_size)
    hidden = torch.randn(sum(new), HIDDEN, device=device).bfloat16()

    def call(layer: Any, metadata: Any) -> Tensor:
        with torch.no_grad(), set_forward_context({layer.layer_name: metadata}, config):
            out: Tensor = layer(hidden)
        return out

    def assert_alike(own: Tensor, engine: Tensor) -> None:
        assert off(own, engine) < 0.02
        assert torch.equal(ours.kv_cache[0], theirs.kv_cache[0])
        assert off(ours.kv_cache[1], theirs.kv_cache[1]) < 0.005

    assert_alike(*(call(layer, builder.build(0, step)) for layer, builder in made))
    if len(set(new)) > 1:
        return
    # As vLLM captures: metadata made anew for the call before it and for the captured one.
    both = iter([made[0][1].build(0, step) for _ in range(2)])
    replay = captured(lambda: call(ours, next(both)))
    for own, engine, state in zip(ours.kv_cache, theirs.kv_cache, first, strict=True):
        own.copy_(state)
        engine.copy_(state)
    vllm.overwrite(step, vllm.step((7, 8, 9, 10), new, table.roll(1, 0), spec.block_size))
    made[0][1].build(0, step)
    hidden.normal_()
    assert_alike(replay(), call(theirs, made[1][1].build(0, step)))


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
