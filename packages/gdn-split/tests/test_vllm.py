"""Does vLLM's Gated DeltaNet layer give the same with this package between its projections?

Where vLLM is not installed its interface is the one that was recorded of version 0.33.0: names and parameters.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import gated_delta
from kernel_reference.projection import split
from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("vllm-0.33.0.json")
GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
# The kernels of vLLM that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("vllm.v1.attention.backend")
HEADS_QK, HEADS, DIM, WIDTH, SLOTS, PREFIX = 2, 4, 16, 4, 7, "model.layers.1.linear_attn"
CHANNELS = (2 * HEADS_QK + HEADS) * DIM
SIZES = (HEADS_QK, HEADS, DIM, DIM)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def adapter(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("gdn_split.integrations.vllm", recording, INSTALLED) as module:
        yield module


def test_without_vllm_the_extra_is_named(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gdn_split.integrations.vllm")
    monkeypatch.setitem(sys.modules, GDN, None)
    with pytest.raises(ImportError, match=r"this needs vLLM 0\.33: gdn-split\[vllm\]"):
        importlib.import_module("gdn_split.integrations.vllm")


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


def test_every_method_can_be_called_as_the_engine_calls_it(adapter: ModuleType, recording: Recording) -> None:
    entry = recording[GDN]["QwenGatedDeltaNetAttention"]
    assert {"forward_cuda", "_forward_core", "_forward_core_fused_norm_packed"} <= entry["methods"].keys()
    assert misfits(adapter.GatedDeltaNetLayer, entry) == []


def test_the_engine_learns_of_the_layer_once_and_only_where_its_plugins_name_it(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    settings = SimpleNamespace(VLLM_PLUGINS=None)
    oot = SimpleNamespace(register_oot=lambda name: lambda layer: made.update({name: layer}))
    monkeypatch.setattr(adapter, "envs", settings)
    monkeypatch.setattr(adapter, "op_registry_oot", made)
    monkeypatch.setattr(adapter, "PluggableLayer", oot)
    for settings.VLLM_PLUGINS in (None, ["another"]):
        adapter.register()
        assert made == {}
    settings.VLLM_PLUGINS = ["another", "gdn_split"]
    adapter.register()
    oot.register_oot = None
    adapter.register()
    assert made == {adapter.QwenGatedDeltaNetAttention.__name__: adapter.GatedDeltaNetLayer}


def gated_norm(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """vLLM's RMSNormGated, in float32."""

    def norm(x: Tensor, gate: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (scaled * weight.float() * torch.nn.functional.silu(gate.float())).to(x.dtype)

    norm.weight, norm.eps, norm.activation = weight, 1e-6, "silu"  # type: ignore[attr-defined]
    return norm


def make_layer(adapter: ModuleType, device: torch.device, interleaved: bool, **options: Any) -> Any:
    cls = adapter.GatedDeltaNetLayer
    layer = cls.__new__(cls)
    if INSTALLED:
        torch.nn.Module.__init__(layer)
    own = {
        "prefix": PREFIX, "tp_size": 1, "num_k_heads": HEADS_QK, "num_v_heads": HEADS, "head_k_dim": DIM,
        "head_v_dim": DIM, "conv_kernel_size": WIDTH, "gqa_interleaved_layout": interleaved,
        "disable_tp_for_ba_proj": False, "enable_fused_gdn_spec_decode": False,
        "A_log": torch.rand(HEADS, device=device), "dt_bias": torch.randn(HEADS, device=device),
        "norm": gated_norm(torch.rand(DIM, device=device).bfloat16() + 0.5),
        "conv1d": SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, device=device).bfloat16(), bias=None),
        # States as vLLM lays them out: inputs of the convolution by time, the recurrence's values first.
        "kv_cache": (
            torch.randn(SLOTS, WIDTH - 1, CHANNELS, device=device).bfloat16(),
            torch.randn(SLOTS, HEADS, DIM, DIM, device=device),
        ),
    }  # fmt: skip
    for name, value in {**own, **options}.items():
        setattr(layer, name, value)
    return layer


def projections(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = CHANNELS + HEADS * DIM
    return torch.randn(rows, width, device=device).bfloat16(), torch.randn(rows, 2 * HEADS, device=device).bfloat16()


def make_step(slots: Tensor, decodes: int, prefills: int = 0, **options: Any) -> SimpleNamespace:
    """What the layer reads of vLLM's GDNAttentionMetadata."""
    own = {
        "num_decodes": decodes, "num_prefills": prefills, "num_actual_tokens": len(slots),
        "non_spec_state_indices_tensor": slots, "spec_sequence_masks": None,
    }  # fmt: skip
    return SimpleNamespace(**{**own, **options})


@pytest.fixture
def within(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Take what it is given for the step under way."""

    def begin(step: Any) -> None:
        steps = None if step is None else {PREFIX: step}
        monkeypatch.setattr(adapter, "get_forward_context", lambda: SimpleNamespace(attn_metadata=steps))
        monkeypatch.setattr(adapter, "is_conv_state_dim_first", lambda: False)

    return begin


def wanted(layer: Any, qkvz: Tensor, ba: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: outputs, and both states afterwards."""
    conv_state, state = (x.double().cpu() for x in layer.kv_cache)
    conv_state = conv_state.transpose(1, 2).contiguous()
    sizes = gated_delta.Sizes(*SIZES, "interleaved" if layer.gqa_interleaved_layout else "contiguous")
    learned = gated_delta.Layer(layer.conv1d.weight[:, 0].cpu(), None, layer.A_log.cpu(), layer.dt_bias.cpu())
    options = gated_delta.Options(norm_weight=layer.norm.weight.cpu(), state_layout="VK")
    out = gated_delta.decode_step(qkvz.cpu(), ba.cpu(), conv_state, state, slots.cpu(), sizes, learned, options)
    return out, conv_state.transpose(1, 2), state


@pytest.mark.parametrize("interleaved", [True, False], ids=["Qwen3-Next", "Qwen3.5"])
@torch.no_grad()
def test_a_step_of_decoding_is_one_step_of_the_delta_rule(
    adapter: ModuleType, device: torch.device, within: Callable[[Any], None], interleaved: bool
) -> None:
    layer, slots = make_layer(adapter, device, interleaved), torch.tensor([5, 2, 0, 0]).int().to(device)
    step = make_step(slots, decodes=4)
    within(step)
    # Two sequences, two rows that pad a graph, and one past the step's tokens.
    qkvz, ba = projections(5, device)
    live = torch.tensor([5, 2, -1, -1])
    exact, conv_state, state = wanted(layer, qkvz[:4], ba[:4], live)
    out = torch.full((5, HEADS, DIM), 7.0, device=device).bfloat16()
    layer._forward_core_fused_norm_packed(qkvz, ba, out)
    assert float((out[:4].double().cpu() - exact).abs().max() / exact.abs().max()) < 0.01
    assert (out[4] == 7).all()
    assert torch.allclose(layer.kv_cache[0].double().cpu(), conv_state, rtol=0, atol=0)
    assert torch.allclose(layer.kv_cache[1].double().cpu(), state, rtol=1e-4, atol=1e-4)
    # The step's other layers take the slots that the first has made.
    layer._forward_core_fused_norm_packed(qkvz, ba, out)
    assert step.gdn_split_slots.tolist() == live.tolist()


@pytest.mark.parametrize("interleaved", [True, False], ids=["Qwen3-Next", "Qwen3.5"])
@pytest.mark.parametrize(
    "options", [{"prefills": 1}, {"spec_sequence_masks": torch.ones(1)}], ids=["prompts", "drafts"]
)
@torch.no_grad()
def test_other_steps_are_split_bit_for_bit_and_go_through_vllms_own_core_and_norm(
    adapter: ModuleType,
    device: torch.device,
    within: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    interleaved: bool,
    options: Any,
) -> None:
    given: list[Tensor] = []

    def core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        given.extend((mixed_qkv, b, a))
        core_attn_out.fill_(2)

    monkeypatch.setattr(adapter.QwenGatedDeltaNetAttention, "_forward_core", core)
    layer, slots = make_layer(adapter, device, interleaved), torch.tensor([5, 2, 3]).int().to(device)
    within(make_step(slots, decodes=2, **options))
    qkvz, ba = projections(4, device)
    out = torch.zeros(4, HEADS, DIM, device=device).bfloat16()
    layer._forward_core_fused_norm_packed(qkvz, ba, out)
    parts = split(qkvz, ba, *SIZES, "interleaved" if interleaved else "contiguous")
    assert all(map(torch.equal, given, (parts.mixed_qkv, parts.b, parts.a)))
    assert torch.equal(out[:3], layer.norm(torch.full_like(out[:3], 2), parts.z[:3]))
    assert (out[3] == 2).all()


@torch.no_grad()
def test_while_vllm_measures_its_memory_its_own_warm_up_runs(
    adapter: ModuleType, device: torch.device, within: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        adapter.QwenGatedDeltaNetAttention, "_forward_core", lambda self, qkv, b, a, out: called.append(len(qkv))
    )
    within(None)
    out = torch.full((3, HEADS, DIM), 7.0, device=device).bfloat16()
    make_layer(adapter, device, True)._forward_core_fused_norm_packed(*projections(3, device), out)
    assert called == [3]
    assert (out == 7).all()


@pytest.mark.parametrize(
    "options",
    [
        {"enable_fused_gdn_spec_decode": True}, {"disable_tp_for_ba_proj": True, "tp_size": 2},
        {"norm": SimpleNamespace(activation="sigmoid")},
    ],
    ids=["fused drafts", "projections on every rank", "another gate"],
)  # fmt: skip
def test_layers_of_other_kinds_stay_vllms_own(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    called: list[str] = []
    for name in ("forward_cuda", "_forward_core_fused_norm_packed"):
        monkeypatch.setattr(
            adapter.QwenGatedDeltaNetAttention, name, lambda *_, name=name: called.append(name), raising=True
        )
    device = torch.device("cpu")
    layer = make_layer(adapter, device, True, **options)
    layer.forward_cuda(torch.zeros(2, 8))
    layer._forward_core_fused_norm_packed(*projections(2, device), torch.zeros(2, HEADS, DIM))
    assert called == ["forward_cuda", "_forward_core_fused_norm_packed"]


@torch.no_grad()
def test_convolutions_that_keep_more_for_drafts_are_left_to_vllm(
    adapter: ModuleType, device: torch.device, within: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        adapter.QwenGatedDeltaNetAttention, "_forward_core", lambda self, qkv, b, a, out: called.append(len(qkv))
    )
    layer = make_layer(adapter, device, True)
    layer.kv_cache = (torch.zeros(SLOTS, WIDTH + 1, CHANNELS, device=device).bfloat16(), layer.kv_cache[1])
    within(make_step(torch.tensor([5, 2]).int().to(device), decodes=2))
    layer._forward_core_fused_norm_packed(*projections(2, device), torch.zeros(2, HEADS, DIM, device=device))
    assert called == [2]


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_vllm_gpu.py does it there")
@pytest.mark.parametrize("interleaved", [True, False], ids=["Qwen3-Next", "Qwen3.5"])
def test_the_engines_own_layer_calls_the_op_that_its_graphs_know(
    adapter: ModuleType, within: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    interleaved: bool,
) -> None:  # fmt: skip
    from transformers import Qwen3NextConfig
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CompilationConfig
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.forward_context import set_forward_context

    theirs = importlib.import_module(GDN)
    monkeypatch.setattr(type(theirs.current_platform), "current_device", lambda self: "cpu", raising=False)
    monkeypatch.setattr(adapter, "envs", SimpleNamespace(VLLM_PLUGINS=["gdn_split"]))
    adapter.register()
    model = Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=HEADS_QK, linear_num_value_heads=HEADS, linear_key_head_dim=DIM,
        linear_value_head_dim=DIM, num_hidden_layers=2,
    )  # fmt: skip
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        config.model_config = SimpleNamespace(hf_text_config=model, dtype=torch.bfloat16)
        layer = theirs.QwenGatedDeltaNetAttention(model, config, PREFIX, gqa_interleaved_layout=interleaved)
    assert type(layer) is adapter.GatedDeltaNetLayer
    assert "vllm::qwen_gdn_attention_core_fused_norm_packed" in CompilationConfig._attention_ops
    layer.bfloat16()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer.kv_cache = make_layer(adapter, torch.device("cpu"), interleaved).kv_cache
    hidden, slots = torch.randn(3, 32).bfloat16(), torch.tensor([5, 2, 1]).int()
    step = make_step(slots, decodes=3)
    within(step)
    with torch.no_grad(), set_forward_context({PREFIX: step}, config):
        qkvz, ba = layer.in_proj_qkvz(hidden)[0], layer.in_proj_ba(hidden)[0]
        exact, conv_state, state = wanted(layer, qkvz, ba, slots)
        out = layer(hidden)
        expected = layer.out_proj(exact.bfloat16().flatten(1))[0]
    assert torch.allclose(out.float(), expected.float(), rtol=0.02, atol=0.02)
    assert torch.equal(layer.kv_cache[0].double(), conv_state)
    assert torch.allclose(layer.kv_cache[1].double(), state, rtol=1e-4, atol=1e-4)
