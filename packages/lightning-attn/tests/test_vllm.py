"""Do vLLM's lightning layers take this package's recurrence, with the states that vLLM keeps?

Where vLLM is not installed its interface is the one that was recorded of version 0.33.0: names and parameters.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.recurrence import linear_attention
from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("vllm-0.33.0.json")
# The kernels of vLLM that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("vllm.v1.attention.backend")
HEADS, DIM, SLOTS = 4, 16, 9
LAYERS = {"MiniMaxLayer": "minimax", "BailingLayer": "bailing"}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06]).view(HEADS, 1, 1)
# Tokens of sequences: two that decode come first, then a chunk behind others and a prompt.
DECODING, PREFILLS = 2, (5, 9)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def adapter(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("lightning_attn.integrations.vllm", recording, INSTALLED) as module:
        yield module


def test_without_vllm_the_extra_is_named(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning_attn.integrations.vllm")
    monkeypatch.setitem(sys.modules, "vllm.model_executor.custom_op", None)
    with pytest.raises(ImportError, match=r"this needs vLLM 0\.33: lightning-attn\[vllm\]"):
        importlib.import_module("lightning_attn.integrations.vllm")


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


@pytest.mark.parametrize("layer", LAYERS)
def test_every_method_can_be_called_as_the_engine_calls_it(
    adapter: ModuleType, recording: Recording, layer: str
) -> None:
    module = f"vllm.model_executor.layers.mamba.linear.{LAYERS[layer]}_linear_attn"
    [entry] = recording[module].values()
    theirs = {"_decode_infer", "_prefill_and_mix_infer"}
    assert theirs <= entry["methods"].keys()
    assert misfits(getattr(adapter, layer), entry) == []


def test_the_engine_learns_of_the_layers_once_and_only_where_its_plugins_name_them(
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
    settings.VLLM_PLUGINS = ["another", "lightning_attn"]
    adapter.register()
    oot.register_oot = None
    adapter.register()
    assert made == {
        "MiniMaxText01LinearAttention": adapter.MiniMaxLayer, "BailingMoELinearAttention": adapter.BailingLayer
    }  # fmt: skip


def make_layer(adapter: ModuleType, name: str, device: torch.device) -> Any:
    cls = getattr(adapter, name)
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer) if INSTALLED else None
    layer.tp_slope = SLOPES.to(device)
    return layer


def metadata(starts: Tensor, slots: Tensor, decoding: int, **more: Any) -> Any:
    """vLLM's own class, or what was recorded of it; Bailing's with more."""
    module = importlib.import_module("vllm.v1.attention.backends.linear_attn")
    prefills = len(slots) - decoding
    cls = module.BailingLinearAttentionMetadata if more else module.LinearAttentionMetadata
    lengths = starts.diff() + 20
    return cls(prefills, int(starts[-1]) - decoding, decoding, decoding, starts, lengths, slots, **more)


def rows(tokens: int, device: torch.device) -> list[Tensor]:
    """q, k and v of a step, slices of one tensor as in vLLM's layers; and the states of a server's requests."""
    fused = torch.randn(tokens, HEADS, 3 * DIM, device=device)
    return [*fused.split(DIM, -1), torch.randn(SLOTS, HEADS, DIM, DIM, device=device)]


def wanted(given: list[Tensor], starts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: results, and the states of all slots."""
    q, k, v, states = (x.double().cpu() for x in given)
    found = linear_attention(q, k, v, SLOPES.double(), cu_seqlens=starts.cpu(), initial_state=states[slots.cpu()])
    return found.out.flatten(1), states.index_copy(0, slots.cpu().long(), found.state)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_mixed_step_is_the_recurrence_of_each_sequence(adapter: ModuleType, device: torch.device, layer: str) -> None:
    starts = torch.tensor([0, *[1] * DECODING, *PREFILLS]).cumsum(0).int().to(device)
    # A column of a block table: every third element.
    slots = torch.randperm(SLOTS)[:12].int().to(device)[: DECODING + len(PREFILLS)].repeat_interleave(3)[::3]
    given = rows(int(starts[-1]), device)
    exact, states = wanted(given, starts, slots)
    step = metadata(starts, slots, DECODING)
    out = make_layer(adapter, layer, device)._prefill_and_mix_infer(*given, slots, step)
    assert torch.allclose(out.double().cpu(), exact, rtol=1e-4, atol=1e-4)
    assert torch.allclose(given[3].double().cpu(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_decoding_takes_the_first_rows_and_slots_and_leaves_the_others(
    adapter: ModuleType, device: torch.device, layer: str
) -> None:
    starts = torch.arange(4).int().to(device)
    slots = torch.tensor([3, 8, 1, 2]).int().to(device)
    given = rows(5, device)
    exact, states = wanted([*(x[:3] for x in given[:3]), given[3]], starts, slots[:3])
    out = make_layer(adapter, layer, device)._decode_infer(*given, slots, metadata(starts, slots[:3], 3))
    assert out.shape == (3, HEADS * DIM)
    assert torch.allclose(out.double().cpu(), exact, rtol=1e-4, atol=1e-4)
    assert torch.allclose(given[3].double().cpu(), states, rtol=1e-4, atol=1e-4)


def test_padding_of_a_graph_is_zero_and_writes_no_state(adapter: ModuleType, device: torch.device) -> None:
    starts, slots = torch.arange(4).int().to(device), torch.tensor([3, -1, -1]).int().to(device)
    given = rows(3, device)
    before = given[3].clone()
    out = make_layer(adapter, "BailingLayer", device)._decode_infer(*given, slots, metadata(starts, slots, 3))
    assert not out[1:].any()
    assert out[0].any()
    changed = (given[3] != before).flatten(1).any(1).nonzero()[:, 0]
    assert changed.tolist() == [3]


@pytest.mark.parametrize("call", ["_decode_infer", "_prefill_and_mix_infer"])
def test_steps_with_drafts_stay_vllms_own(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    given: list[Any] = []
    monkeypatch.setattr(adapter.BailingMoELinearAttention, call, lambda self, *rest: given.append(rest))
    starts, slots = torch.tensor([0, 2, 4]).int(), torch.tensor([[3, 4], [5, 6]]).int()
    step = metadata(starts, slots[:, 0], 2, state_indices_tensor_d=slots)
    tensors = rows(4, torch.device("cpu"))
    getattr(make_layer(adapter, "BailingLayer", torch.device("cpu")), call)(*tensors, slots[:, 0], step)
    assert given[0][-1] is step


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
@pytest.mark.parametrize("name", ["MiniMaxText01LinearAttention", "BailingMoELinearAttention"])
def test_the_engines_own_layer_continues_its_states_by_this_package(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.forward_context import set_forward_context

    monkeypatch.setattr(adapter, "envs", SimpleNamespace(VLLM_PLUGINS=["lightning_attn"]))
    adapter.register()
    config, prefix = VllmConfig(device_config=DeviceConfig(device="cpu")), "model.layers.1.attn"
    sizes = {
        "hidden_size": 32, "num_attention_heads": HEADS, "num_hidden_layers": 3, "head_dim": DIM, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "use_bias": False, "use_qkv_bias": False,
    }  # fmt: skip
    theirs = getattr(adapter, name)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        # The class that the model names.
        layer = theirs(SimpleNamespace(**sizes), config, prefix)
    assert type(layer) in (adapter.MiniMaxLayer, adapter.BailingLayer)
    if name == "BailingMoELinearAttention":
        # vLLM's norm of it is a Triton kernel.
        layer.g_norm = torch.nn.RMSNorm(HEADS * DIM)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    hidden, positions = torch.randn(11, 32), torch.arange(11)

    def run(rows: slice, starts: list[int], decoding: int) -> Tensor:
        step = metadata(torch.tensor(starts).int(), torch.tensor([2]).int(), decoding)
        step.seq_lens = torch.tensor([rows.stop])
        out = torch.full_like(hidden[rows], torch.nan)
        with set_forward_context({prefix: step}, config), torch.no_grad():
            layer._forward(hidden[rows], out, positions[rows])
        return out

    layer.kv_cache = (torch.full((SLOTS, HEADS, DIM, DIM), 7.0),)
    whole = run(slice(0, 11), [0, 11], 0)
    end = layer.kv_cache[0][2].clone()
    # A prompt of a slot that another request had, a chunk behind it, and tokens one at a time.
    parts = [run(slice(0, 6), [0, 6], 0), run(slice(6, 9), [0, 3], 0)]
    parts += [run(slice(i, i + 1), [0, 1], 1) for i in (9, 10)]
    assert whole.isfinite().all()
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
    assert torch.allclose(layer.kv_cache[0][2], end, rtol=1e-4, atol=1e-4)
    assert (layer.kv_cache[0][[0, 1, 3]] == 7).all()
