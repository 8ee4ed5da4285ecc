"""Does sglang's lightning backend take this package's recurrence, with the states and snapshots that sglang keeps?

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

from kernel_reference.recurrence import linear_attention
from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, installed

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("sglang-0.5.23.json")
LINEAR = "sglang.srt.layers.attention.linear"
# The kernels of sglang that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("sglang.srt")
HEADS, DIM, SLOTS, SCALE = 4, 32, 9, 0.3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06]).view(HEADS, 1, 1)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def adapter(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("lightning_attn.integrations.sglang", recording, INSTALLED) as module:
        yield module


def test_without_sglang_the_extra_is_named(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning_attn.integrations.sglang")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(ImportError, match=r"this needs sglang 0\.5\.23: lightning-attn\[sglang\]"):
        importlib.import_module("lightning_attn.integrations.sglang")


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


def test_the_hook_takes_what_the_engines_method_takes(adapter: ModuleType, recording: Recording) -> None:
    theirs = recording[f"{LINEAR}.lightning_backend"]["LightningAttentionBackend"]["methods"]["_linear_attention_entry"]
    ours = inspect.signature(adapter.recurrence).parameters.values()
    named = [f"{one.name}{'' if one.default is one.empty else '='}" for one in ours]
    # In front of them stand the engine's function and its backend.
    assert named[2:] == theirs["parameters"][1:]
    assert f"{LINEAR}.lightning_backend.LightningAttentionBackend._linear_attention_entry" == adapter.THEIRS


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
    monkeypatch.setenv("SGLANG_PLUGINS", "another, lightning_attn")
    adapter.register()
    adapter.register()
    assert made == [(adapter.THEIRS, adapter.recurrence, adapter.HookType.AROUND)]


def make_metadata(starts: Tensor, slots: Tensor, prefills: int, has_state: Tensor) -> Any:
    return SimpleNamespace(
        query_start_loc=starts, mamba_cache_indices=slots, num_prefills=prefills, has_initial_states=has_state,
        batch_size=len(slots), num_decodes=len(slots) - prefills,
    )  # fmt: skip


def rows(tokens: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """q, k and v of a step, and the states of a server's requests."""
    fused = torch.randn(tokens, 3, HEADS, DIM, device=device)
    return [*fused.unbind(1)], torch.randn(SLOTS, HEADS, DIM, DIM, device=device)


def wanted(given: list[Tensor], states: Tensor, starts: Tensor, slots: Tensor, has_state: Tensor) -> Any:
    """In float64."""
    q, k, v = (x.double().cpu() for x in given)
    initial = states.double().cpu()[slots.cpu().long()] * has_state.cpu().view(-1, 1, 1, 1)
    return linear_attention(q, k, v, SLOPES.double(), cu_seqlens=starts.cpu(), initial_state=initial, scale=SCALE)


def never(*given: Any, **options: Any) -> Tensor:
    raise AssertionError("this step is not sglang's own")


def backend_and_layer(device: torch.device) -> tuple[Any, Any]:
    slopes = SLOPES.to(device)
    return SimpleNamespace(tp_slope=[slopes * 2, slopes]), SimpleNamespace(layer_id=1, scaling=SCALE)


def near(ours: Tensor, exact: Tensor) -> bool:
    return torch.allclose(ours.double().cpu(), exact, rtol=1e-4, atol=1e-4)


def test_prompts_and_chunks_are_the_recurrence_with_a_state_kept_on_the_way(
    adapter: ModuleType, device: torch.device
) -> None:
    starts, slots = torch.tensor([0, 7, 8, 20]).int().to(device), torch.tensor([3, 8, 1]).int().to(device)
    has_state = torch.tensor([True, True, False], device=device)
    given, states = rows(20, device)
    exact = wanted(given, states, starts, slots, has_state)
    kept = wanted([x[8:16] for x in given], states, torch.tensor([0, 8]), slots[2:], has_state[2:]).state[0]
    out = adapter.recurrence(
        never, *backend_and_layer(device)[:1], *given, states, slots, make_metadata(starts, slots, 3, has_state),
        backend_and_layer(device)[1], track_lens=torch.tensor([0, 0, 8]).int().to(device),
        track_state_indices=torch.tensor([-1, -1, 5], device=device),
    )  # fmt: skip
    assert near(out, exact.out)
    assert near(states[slots.long()], exact.state)
    assert near(states[5], kept)


def test_decoding_takes_a_slot_a_row_and_leaves_padding_alone(adapter: ModuleType, device: torch.device) -> None:
    slots = torch.tensor([3, 8, -1]).int().to(device)
    given, states = rows(3, device)
    ones = torch.ones(2)
    exact = wanted([x[:2] for x in given], states, torch.arange(3), slots[:2], ones)
    before = states.clone()
    backend, layer = backend_and_layer(device)
    # Captured graphs have a number for each sequence where others have a bool.
    step = make_metadata(torch.arange(4).int().to(device), slots, 0, torch.ones(3, dtype=torch.int64, device=device))
    out = adapter.recurrence(never, backend, *given, states, slots, step, layer)
    assert near(out[:2], exact.out)
    assert not out[2].any()
    assert near(states[slots[:2].long()], exact.state)
    assert (states != before).flatten(1).any(1).nonzero()[:, 0].tolist() == [3, 8]


@pytest.mark.parametrize("name", ["mask", "temp_cache"])
def test_steps_that_verify_drafts_stay_sglangs_own(adapter: ModuleType, name: str) -> None:
    given: list[Any] = []
    one = torch.ones(1)
    options = {name: one, "intermediate_state_indices": torch.zeros(1)}
    adapter.recurrence(lambda *rest: given.append(rest), "backend", "q", "k", "v", "s", "i", "m", "l", **options)
    [arguments] = given
    assert arguments[:8] == ("backend", "q", "k", "v", "s", "i", "m", "l")
    assert arguments[8 if name == "mask" else 9] is one
    assert arguments[10] is options["intermediate_state_indices"]


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
def test_the_engines_own_backend_calls_the_hook_that_its_registry_has_put_round_it(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
    from sglang.srt.layers.attention.linear.linear_metadata import BailingLinearMetadata

    # Kept as it was for other tests.
    theirs = LightningAttentionBackend._linear_attention_entry
    monkeypatch.setattr(LightningAttentionBackend, "_linear_attention_entry", theirs)
    monkeypatch.setattr(adapter, "_registered", [])
    monkeypatch.setenv("SGLANG_PLUGINS", "lightning_attn")
    adapter.register()
    adapter.HookRegistry.apply_hooks()
    assert LightningAttentionBackend._linear_attention_entry is not theirs
    given, states = rows(9, torch.device("cpu"))
    starts, slots, has_state = torch.tensor([0, 4, 9]), torch.tensor([3, 8]), torch.tensor([True, False])
    batch = SimpleNamespace(
        extend_num_tokens=9, extend_seq_lens=torch.tensor([4, 5]), seq_lens=torch.tensor([7, 5]),
        extend_prefix_lens=torch.tensor([3, 0]), batch_size=2, mamba_track_mask=None,
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )  # fmt: skip
    backend = LightningAttentionBackend.__new__(LightningAttentionBackend)
    backend.linear_backend, backend.kv_cache_dtype_str = "seg_la", "auto"
    backend.tp_slope = backend_and_layer(torch.device("cpu"))[0].tp_slope
    backend.forward_metadata = BailingLinearMetadata.prepare_mixed(starts, slots, batch)
    backend.forward_metadata.has_mamba_track_mask = False
    pool = SimpleNamespace(temporal=states, conv=[None])
    backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer_id: pool)
    exact = wanted(given, states, starts, slots, has_state)
    layer = SimpleNamespace(layer_id=1, scaling=SCALE, tp_q_head_num=HEADS, v_head_dim=DIM, k_scale=None)
    out = backend.forward_extend(*given, layer, batch)
    assert near(out, exact.out.flatten(1))
    assert near(states[slots], exact.state)


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@pytest.mark.parametrize("counts", [(7, 1, 140), (1, 1, 1)], ids=["mixed", "decoding"])
def test_a_step_gives_the_same_as_sglangs_own_kernels(
    adapter: ModuleType, device: torch.device, counts: tuple[int, ...]
) -> None:
    from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend

    size = 128
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    slots, has_state = torch.tensor([3, 8, 1]).int().to(device), torch.tensor([True, True, False], device=device)
    decodes = max(counts) == 1
    step = make_metadata(starts, slots, 0 if decodes else 3, has_state | decodes)
    given = [torch.randn(sum(counts), HEADS, size, device=device).bfloat16() for _ in range(3)]
    states = torch.randn(SLOTS, HEADS, size, size, device=device)
    backend, layer = backend_and_layer(device)
    own = states.clone()
    out = adapter.recurrence(never, backend, *given, own, slots, step, layer)
    expected = LightningAttentionBackend._linear_attention_entry(backend, *given, states, slots, step, layer)
    assert float((out - expected).abs().max() / expected.abs().max()) < 0.01
    assert float((own - states).abs().max() / states.abs().max()) < 0.005
