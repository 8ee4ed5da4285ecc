"""Does sglang's Gated DeltaNet backend take this package's decode step, with the states that sglang keeps?

Where sglang is not installed its interface is the one that was recorded of version 0.5.23: names and parameters.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import gated_delta
from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, installed

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("sglang-0.5.23.json")
BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
# The kernels of sglang that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("sglang.srt")
HEADS_QK, HEADS, DIM, WIDTH, SLOTS = 2, 4, 16, 4, 7
CHANNELS = (2 * HEADS_QK + HEADS) * DIM


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def adapter(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("gdn_split.integrations.sglang", recording, INSTALLED) as module:
        yield module


def test_without_sglang_the_extra_is_named(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gdn_split.integrations.sglang")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(ImportError, match=r"this needs sglang 0\.5\.23: gdn-split\[sglang\]"):
        importlib.import_module("gdn_split.integrations.sglang")


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


def test_the_hook_takes_what_the_engines_method_takes(adapter: ModuleType, recording: Recording) -> None:
    theirs = recording[BACKEND]["GDNAttnBackend"]["methods"]["forward_decode"]["parameters"]
    named = [*inspect.signature(adapter.decode).parameters]
    # In front of them stand the engine's function and its backend.
    assert named[2:] == [one.lstrip("*") for one in theirs[1:]]
    assert f"{BACKEND}.GDNAttnBackend.forward_decode" == adapter.THEIRS


def test_the_engine_learns_of_the_hook_once_and_only_where_its_plugins_name_it(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(adapter, "HookRegistry", SimpleNamespace(register=lambda *rest: made.append(rest)))
    monkeypatch.setattr(adapter, "_registered", [])
    for named in ("", "another"):
        monkeypatch.setenv("SGLANG_PLUGINS", named)
        adapter.register()
        assert made == []
    monkeypatch.setenv("SGLANG_PLUGINS", "another, gdn_split")
    adapter.register()
    adapter.register()
    assert made == [(adapter.THEIRS, adapter.decode, adapter.HookType.AROUND)]


def make_layer(device: torch.device, **options: Any) -> Any:
    own = {
        "layer_id": 3, "num_q_heads": HEADS_QK, "num_k_heads": HEADS_QK, "num_v_heads": HEADS, "head_q_dim": DIM,
        "head_k_dim": DIM, "head_v_dim": DIM, "v_dim": HEADS * DIM, "activation": "silu", "bias": None,
        "conv_weights": torch.randn(CHANNELS, WIDTH, device=device).bfloat16(),
        "A_log": torch.rand(HEADS, device=device), "dt_bias": torch.randn(HEADS, device=device),
    }  # fmt: skip
    return SimpleNamespace(**{**own, **options})


def make_backend(device: torch.device, slots: Tensor, taps: int = WIDTH - 1, **options: Any) -> Any:
    cache = SimpleNamespace(
        conv=[torch.randn(SLOTS, CHANNELS, taps, device=device).bfloat16()],
        temporal=torch.randn(SLOTS, HEADS, DIM, DIM, device=device), **{"replayssm_d": None, **options},
    )  # fmt: skip
    tracked: list[Any] = []
    return SimpleNamespace(
        cache=cache, tracked=tracked, req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer_id: cache),
        forward_metadata=SimpleNamespace(mamba_cache_indices=slots),
        _track_mamba_state_decode=lambda *given: tracked.append(given),
    )  # fmt: skip


def projections(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = CHANNELS + HEADS * DIM
    return torch.randn(rows, width, device=device).bfloat16(), torch.randn(rows, 2 * HEADS, device=device).bfloat16()


def wanted(layer: Any, cache: Any, qkvz: Tensor, ba: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: outputs before the norm, and both states afterwards."""
    conv_state, state = cache.conv[0].double().cpu(), cache.temporal.double().cpu()
    sizes = gated_delta.Sizes(HEADS_QK, HEADS, DIM, DIM, "contiguous")
    learned = gated_delta.Layer(layer.conv_weights.cpu(), None, layer.A_log.cpu(), layer.dt_bias.cpu())
    options = gated_delta.Options(state_layout="VK")
    out = gated_delta.decode_step(qkvz.cpu(), ba.cpu(), conv_state, state, slots.cpu(), sizes, learned, options)
    return out, conv_state, state


def never(*given: Any, **options: Any) -> Any:
    raise AssertionError("this step is not sglang's own")


@torch.no_grad()
def test_a_step_of_decoding_is_one_step_of_the_delta_rule(adapter: ModuleType, device: torch.device) -> None:
    slots = torch.tensor([5, 2, -1]).int().to(device)
    layer, backend = make_layer(device), make_backend(device, slots)
    qkvz, ba = projections(3, device)
    exact, conv_state, state = wanted(layer, backend.cache, qkvz, ba, slots)
    out, z = adapter.decode(never, backend, layer, "batch", (qkvz, ba), ba, ba)
    assert out.shape == (1, 3, HEADS, DIM)
    assert float((out[0].double().cpu() - exact).abs().max() / exact.abs().max()) < 0.01
    assert torch.equal(z.flatten(1), qkvz[:, CHANNELS:])
    assert torch.equal(backend.cache.conv[0].double().cpu(), conv_state)
    assert torch.allclose(backend.cache.temporal.double().cpu(), state, rtol=1e-4, atol=1e-4)
    # Then the prefix cache takes what it keeps.
    [(batch, conv, states, indices, layer_id)] = backend.tracked
    assert (batch, layer_id) == ("batch", 3)
    assert (conv is backend.cache.conv[0], states is backend.cache.temporal, indices is slots) == (True,) * 3


@pytest.mark.parametrize("of", ["split projections", "replayed states", "no activation", "states for drafts"])
def test_other_layers_stay_sglangs_own(adapter: ModuleType, of: str) -> None:
    device, given = torch.device("cpu"), []
    layer = make_layer(device, activation=None) if of == "no activation" else make_layer(device)
    slots = torch.tensor([5, 2]).int()
    backend = make_backend(
        device, slots, WIDTH if of == "states for drafts" else WIDTH - 1,
        replayssm_d=torch.ones(1) if of == "replayed states" else None,
    )  # fmt: skip
    qkvz, ba = projections(2, device)
    mixed = qkvz if of == "split projections" else (qkvz, ba)
    before = backend.cache.temporal.clone()
    adapter.decode(lambda *rest, **more: given.append((rest, more)), backend, layer, "batch", mixed, ba, ba, extra=1)
    assert given == [((backend, layer, "batch", mixed, ba, ba), {"extra": 1})]
    assert torch.equal(backend.cache.temporal, before)


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@torch.no_grad()
def test_the_engines_own_backend_calls_the_hook_that_its_registry_has_put_round_it(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = importlib.import_module(BACKEND).GDNAttnBackend
    # Kept as it was for other tests.
    theirs = engine.forward_decode
    monkeypatch.setattr(engine, "forward_decode", theirs)
    monkeypatch.setattr(adapter, "_registered", [])
    monkeypatch.setenv("SGLANG_PLUGINS", "gdn_split")
    adapter.register()
    adapter.HookRegistry.apply_hooks()
    assert engine.forward_decode is not theirs
    device, slots = torch.device("cpu"), torch.tensor([5, 2]).int()
    layer, made = make_layer(device), make_backend(device, slots)
    backend = engine.__new__(engine)
    backend.req_to_token_pool, backend.forward_metadata = made.req_to_token_pool, made.forward_metadata
    qkvz, ba = projections(2, device)
    exact, _, state = wanted(layer, made.cache, qkvz, ba, slots)
    # Nothing is kept for the prefix cache.
    out, _ = backend.forward_decode(layer, SimpleNamespace(mamba_track_mask=None), (qkvz, ba), ba, ba)
    assert float((out[0].double() - exact).abs().max() / exact.abs().max()) < 0.01
    assert torch.allclose(made.cache.temporal.double(), state, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@torch.no_grad()
def test_a_step_gives_the_same_as_sglangs_own_kernels(adapter: ModuleType, device: torch.device) -> None:
    engine, kinds = importlib.import_module(BACKEND), importlib.import_module(BACKEND.replace("gdn_backend", "utils"))
    slots = torch.tensor([5, 2, 4]).int().to(device)
    sizes = {"q_dim": HEADS_QK * DIM, "k_dim": HEADS_QK * DIM}
    layer, ours = make_layer(device, **sizes), make_backend(device, slots)
    theirs = engine.GDNAttnBackend.__new__(engine.GDNAttnBackend)
    cache = SimpleNamespace(
        conv=[ours.cache.conv[0].clone()], temporal=ours.cache.temporal.clone(), replayssm_d=None, replayssm_k=None,
        replayssm_g=None,
    )  # fmt: skip
    theirs.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer_id: cache)
    theirs.forward_metadata = SimpleNamespace(
        query_start_loc=torch.arange(4).int().to(device), mamba_cache_indices=slots, replayssm_write_pos=None,
        replayssm_force_flush=None,
    )  # fmt: skip
    triton = kinds.LinearAttnKernelBackend.TRITON
    theirs.kernel_dispatcher = engine.GDNKernelDispatcher(triton, triton)
    qkvz, ba = projections(3, device)
    batch = SimpleNamespace(mamba_track_mask=None, batch_size=3)
    expected, expected_z = theirs.forward_decode(layer, batch, (qkvz, ba), ba, ba)
    out, z = adapter.decode(never, ours, layer, batch, (qkvz, ba), ba, ba)
    assert float((out - expected.view(out.shape)).abs().max() / expected.abs().max()) < 0.02
    assert torch.equal(z, expected_z.view(z.shape))
    assert torch.equal(ours.cache.conv[0], cache.conv[0])
    off = (ours.cache.temporal - cache.temporal).abs().max() / cache.temporal.abs().max()
    assert float(off) < 0.005
