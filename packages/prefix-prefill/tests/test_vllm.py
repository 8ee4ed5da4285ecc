"""Does the backend for vLLM fit into vLLM, and does it attend to what vLLM's cache holds?

Where vLLM is not installed its interface is the one that was recorded of version 0.33.0: names and parameters.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.testing import contract, recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("vllm-0.33.0.json")
# The kernels of vLLM that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("vllm.v1.attention.backend")
HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 12
# Sequences of (older, new) tokens: a chunk behind a prefix, one that decodes, a prompt; and drafts.
LENGTHS = ((20, 7), (33, 1), (0, 18), (15, 3))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def backend(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("prefix_prefill.integrations.vllm", recording, INSTALLED) as module:
        yield module


def named(recording: Recording, name: str) -> Any:
    return recording["vllm.v1.attention.backend"][name]


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named() -> None:
    with pytest.raises(ImportError, match=r"this needs vLLM 0\.33: prefix-prefill\[vllm\]"):
        importlib.import_module("prefix_prefill.integrations.vllm")


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("PrefixPrefillBackend", "AttentionBackend"),
        ("Implementation", "AttentionImpl"),
        ("MetadataBuilder", "AttentionMetadataBuilder"),
    ],
)
def test_every_method_can_be_called_as_the_engine_calls_it(
    backend: ModuleType, recording: Recording, ours: str, theirs: str
) -> None:
    cls = getattr(backend, ours)
    assert misfits(cls, named(recording, theirs)) == []
    assert not cls.__abstractmethods__


def test_the_engine_learns_of_the_backend_by_name_once_however_often_it_asks(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    members: dict[str, str] = {}

    def note(name: str, path: str) -> None:
        asked.append((name, path))
        members[name] = path

    monkeypatch.setattr(backend, "register_backend", note)
    monkeypatch.setattr(backend, "AttentionBackendEnum", SimpleNamespace(__members__=members))
    backend.register()
    backend.register()
    [(name, path)] = asked
    assert name == backend.NAME == backend.PrefixPrefillBackend.get_name()
    module, _, cls = path.rpartition(".")
    assert getattr(importlib.import_module(module), cls) is backend.PrefixPrefillBackend


def test_it_takes_what_the_kernels_take(backend: ModuleType) -> None:
    cls = backend.PrefixPrefillBackend
    assert [cls.supports_head_size(size) for size in (8, 16, 80, 512, 576)] == [False, True, True, True, False]
    gpus = [SimpleNamespace(major=major, minor=0) for major in (7, 8, 9)]
    assert list(map(cls.supports_compute_capability, gpus)) == [False, True, True]
    assert (cls.supports_sink(), cls.supports_sliding_window(), cls.supports_batch_invariance()) == (True,) * 3
    assert cls.get_impl_cls() is backend.Implementation
    assert cls.get_builder_cls() is backend.MetadataBuilder
    assert [size.base for size in cls.get_supported_kernel_block_sizes()] == [16]


class Common(NamedTuple):
    """What the builder reads of vLLM's CommonAttentionMetadata."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True


@dataclass
class Step:
    """A step of a server: the new tokens' rows, as a layer of the model has them, and older keys and values."""

    common: Common
    query: Tensor
    key: Tensor
    value: Tensor
    older: list[tuple[Tensor, ...]]
    older_slots: list[Tensor]
    scales: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    )


def make_step(device: torch.device) -> Step:
    new = [n for _, n in LENGTHS]
    counts = [-(-(ctx + n) // PAGE) for ctx, n in LENGTHS]
    pages = torch.randperm(PAGES)[: sum(counts)].split(counts)
    table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    slots, older_slots = [], []
    for row, own, (ctx, n) in zip(table, pages, LENGTHS, strict=True):
        row[: len(own)] = own
        every = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()
        older_slots.append(every[:ctx])
        slots.append(every[ctx : ctx + n])
    bounds = torch.tensor([0, *new]).cumsum(0)
    totals = torch.tensor([ctx + n for ctx, n in LENGTHS])
    query, key, value = (torch.randn(sum(new), heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    common = Common(
        sum(new), max(new), int(totals.max()), bounds.int().to(device), totals.int().to(device), table.to(device),
        torch.cat(slots).to(device),
    )  # fmt: skip
    older = [tuple(torch.randn(2, ctx, KV_HEADS, DIM).bfloat16()) for ctx, _ in LENGTHS]
    return Step(common, query.to(device), key, value, older, older_slots)


def written(backend: ModuleType, step: Step, layer: Any, layout: str = "HND") -> Tensor:
    """The cache with the older tokens and then the new ones; what nothing was written to is zero."""
    dtype = torch.uint8 if layer.kv_cache_dtype in backend.FP8 else torch.bfloat16
    # By its shape the engine's cache is [pages, heads, page, both]; in memory tokens may come before heads.
    cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=dtype)
    if layout == "NHD":
        cache = torch.zeros(PAGES, PAGE, KV_HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)
    for (key, value), slots in zip(step.older, step.older_slots, strict=True):
        layer.do_kv_cache_update(step.scales, key, value, cache, slots)
    layer.do_kv_cache_update(step.scales, step.key, step.value, cache, step.common.slot_mapping.cpu())
    return cache


def run(
    backend: ModuleType,
    step: Step,
    device: torch.device,
    layer: Any,
    layout: str = "HND",
    output: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Attend, as the engine's layer does, over a cache to which it has written."""
    cache = written(backend, step, layer, layout)
    if output is None:
        output = torch.full_like(step.query, torch.nan)
    builder = backend.MetadataBuilder(None, ["layer"], None, device)
    metadata = builder.build(0, step.common)
    scales = SimpleNamespace(_k_scale=step.scales._k_scale.to(device), _v_scale=step.scales._v_scale.to(device))
    returned = layer.forward(scales, step.query, None, None, cache.to(device), metadata, output, output_scale)
    assert returned is output
    return output


def make_layer(backend: ModuleType, **options: Any) -> Any:
    return backend.Implementation(HEADS, DIM, 0.2, KV_HEADS, **options)


def wanted(step: Step, rounded: Any = lambda x, scale: x, **options: Any) -> Tensor:
    """Each sequence by itself, in float64, over keys and values that were never in pages."""
    outs = []
    begins = step.common.query_start_loc.tolist()
    for (key, value), begin, (ctx, n) in zip(step.older, begins, LENGTHS, strict=False):
        own = slice(begin, begin + n)
        keys = rounded(torch.cat([key, step.key[own]]), step.scales._k_scale)
        values = rounded(torch.cat([value, step.value[own]]), step.scales._v_scale)
        outs.append(
            attention(
                step.query[own].cpu(), keys, values, cu_seqlens_q=torch.tensor([0, n]),
                cu_seqlens_k=torch.tensor([0, ctx + n]), softmax_scale=0.2, causal=True, **options,
            ).out
        )  # fmt: skip
    return torch.cat(outs)


def assert_near(out: Tensor, exact: Tensor, at_most: float = 0.01) -> None:
    size = exact.abs().amax(-1, keepdim=True)
    assert float(((out[: len(exact)].cpu().double() - exact).abs() / size).max()) < at_most


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("of", ["plain", "a window", "a soft cap and sinks", "alibi"])
def test_a_mixed_step_sees_what_the_cache_holds(
    backend: ModuleType, device: torch.device, layout: str, of: str
) -> None:
    step, sinks, slopes = make_step(device), torch.randn(HEADS), [0.5, 0.25, 0.1, 0.01]
    theirs: dict[str, Any] = {
        "plain": {}, "a window": {"sliding_window": 9}, "alibi": {"alibi_slopes": slopes},
        "a soft cap and sinks": {"logits_soft_cap": 3.0, "sinks": sinks.to(device)},
    }[of]  # fmt: skip
    options: dict[str, Any] = {
        "plain": {}, "a window": {"window": (8, 0)}, "alibi": {"alibi_slopes": torch.tensor(slopes)},
        "a soft cap and sinks": {"softcap": 3.0, "sinks": sinks},
    }[of]  # fmt: skip
    # The engine makes layers with its device as torch's default.
    with device:
        layer = make_layer(backend, **theirs)
    out = run(backend, step, device, layer, layout)
    assert_near(out, wanted(step, **options))


def test_padding_of_a_graph_is_not_written_to_the_cache_and_changes_no_row(
    backend: ModuleType, device: torch.device
) -> None:
    step, layer = make_step(device), make_layer(backend)
    plain, cache = run(backend, step, device, layer), written(backend, step, layer)
    step.common = step.common._replace(
        query_start_loc=torch.cat([step.common.query_start_loc, step.common.query_start_loc[-1:]]),
        seq_lens=torch.cat([step.common.seq_lens, step.common.seq_lens.new_zeros(1)]),
        block_table_tensor=torch.cat([step.common.block_table_tensor, step.common.block_table_tensor.new_zeros(1, 4)]),
        slot_mapping=torch.cat([step.common.slot_mapping, step.common.slot_mapping.new_full((3,), -1)]),
        num_actual_tokens=step.common.num_actual_tokens,
    )
    for name in ("query", "key", "value"):
        rows = getattr(step, name)
        setattr(step, name, torch.cat([rows, torch.full_like(rows[:3], torch.nan)]))
    assert torch.equal(written(backend, step, layer), cache)
    out = run(backend, step, device, layer)
    assert torch.equal(out[: len(plain)], plain)
    assert out[len(plain) :].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_8_bits_is_written_and_read_with_the_layers_scales(
    backend: ModuleType, device: torch.device, kind: str
) -> None:
    step, dtype = make_step(device), torch.float8_e5m2 if kind.endswith("e5m2") else torch.float8_e4m3fn
    out = run(backend, step, device, make_layer(backend, kv_cache_dtype=kind))
    assert_near(out, wanted(step, lambda x, scale: (x / scale).to(dtype).to(x.dtype) * scale), at_most=0.03)


def test_a_result_of_8_bits_is_divided_by_the_scale_that_comes_with_it(
    backend: ModuleType, device: torch.device
) -> None:
    step = make_step(device)
    output = torch.empty(step.query.shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.tensor([0.01], device=device)
    out = run(backend, step, device, make_layer(backend), output=output, output_scale=scale)
    assert_near(out.float() * 0.01, wanted(step), at_most=0.07)


@pytest.mark.gpu
def test_a_graph_of_a_uniform_batch_replays_other_lengths_and_pages(backend: ModuleType, device: torch.device) -> None:
    layer = make_layer(backend)

    def inputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        query, cache = torch.randn(12, HEADS, DIM), torch.randn(PAGES, KV_HEADS, PAGE, 2 * DIM)
        lengths, table = torch.randint(3, 4 * PAGE, (4,)), torch.randint(PAGES, (4, 4))
        bounds = torch.arange(0, 13, 3)
        return [x.to(device) for x in (query.bfloat16(), cache.bfloat16(), bounds.int(), lengths.int(), table.int())]

    def attend(query: Tensor, cache: Tensor, bounds: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        # No new tokens are written to the cache, so that no slots are read.
        metadata = backend.Metadata(12, 3, 4 * PAGE, bounds, lengths, table, slot_mapping=lengths)
        out: Tensor = layer.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
        return out

    contract.check_cuda_graph(attend, inputs)


def test_without_metadata_the_result_is_zero(backend: ModuleType) -> None:
    output = torch.full((3, HEADS, DIM), torch.nan)
    cache = torch.empty(0)
    assert make_layer(backend).forward(None, output, None, None, cache, None, output) is output
    assert not output.any()


def test_bits_that_must_not_depend_on_neighbours_are_asked_for_in_one_piece(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_layer(backend).num_splits is None
    monkeypatch.setattr(backend, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    assert make_layer(backend).num_splits == 1


def test_another_groups_pages_take_the_place_of_a_steps_own(backend: ModuleType, device: torch.device) -> None:
    common = make_step(device).common
    builder = backend.MetadataBuilder(None, ["layer"], None, device)
    metadata = builder.build(0, common)
    table, slots = torch.ones_like(common.block_table_tensor), torch.zeros_like(common.slot_mapping)
    other = builder.update_block_table(metadata, table, slots)
    assert (other.block_table is table, other.slot_mapping is slots, other.seq_lens is common.seq_lens) == (True,) * 3
    assert metadata.block_table is common.block_table_tensor


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda b, c: b.MetadataBuilder(None, [], None, None).build(0, c._replace(causal=False)),
            "causal must be True",
        ),
        (lambda b, c: make_layer(b, attn_type="encoder"), "attn_type must be 'decoder', got 'encoder'"),
        (
            lambda b, c: make_layer(b).forward(None, None, None, None, None, None, None, output_block_scale=1),
            "output_block_scale must be None",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(backend: ModuleType, call: Any, words: str) -> None:
    common = make_step(torch.device("cpu")).common
    with pytest.raises(ValueError, match=words):
        call(backend, common)


def test_on_a_gpu_vllms_own_kernel_writes_the_cache_which_it_is_given_token_by_token(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    given: list[Any] = []
    ops = importlib.import_module("vllm._custom_ops")
    takes = inspect.signature(ops.reshape_and_cache_flash)
    monkeypatch.setattr(ops, "reshape_and_cache_flash", lambda *rest: given.append(takes.bind(*rest).args))
    cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM).as_subclass(OnGpu)
    new, slots = torch.zeros(5, KV_HEADS, DIM), torch.arange(5)
    scales = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(2.0))
    make_layer(backend, kv_cache_dtype="auto").do_kv_cache_update(scales, new, new, cache, slots)
    [(key, _, keys, values, where, kind, k_scale, v_scale)] = given
    assert (key is new, where is slots, kind, k_scale, v_scale) == (True, True, "auto", 1.0, 2.0)
    assert keys.shape == values.shape == (PAGES, PAGE, KV_HEADS, DIM)
    assert keys.data_ptr() == cache.data_ptr()
    assert values.data_ptr() == cache.data_ptr() + 4 * DIM


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_engine_finds_a_reason_against_it_in_what_is_not_covered_alone(backend: ModuleType) -> None:
    from vllm.platforms.interface import DeviceCapability

    cls = backend.PrefixPrefillBackend
    layer = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
        "use_batch_invariant": True, "use_kv_connector": True, "use_adaptive_verification": True,
    }  # fmt: skip
    assert cls.validate_configuration(**layer) == []
    others = {"use_mla": True, "use_sparse": True, "use_mm_prefix": True, "attn_type": "encoder", "use_dcp": True}
    for name, value in others.items():
        assert len(cls.validate_configuration(**{**layer, name: value})) == 1


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_engines_own_layer_writes_its_cache_and_attends_by_the_backend(backend: ModuleType) -> None:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = torch.device("cpu")
    step, name = make_step(device), "model.layers.0.attn"
    backend.register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        options = {"attn_backend": backend.PrefixPrefillBackend, "per_layer_sliding_window": 9}
        layer = Attention(HEADS, DIM, 0.2, KV_HEADS, prefix=name, **options)
    assert layer.backend.get_class() is backend.PrefixPrefillBackend
    layer.kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM).bfloat16()
    for (key, value), slots in zip(step.older, step.older_slots, strict=True):
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    common = CommonAttentionMetadata(
        query_start_loc_cpu=step.common.query_start_loc, num_reqs=len(LENGTHS), **step.common._asdict()
    )
    metadata = backend.MetadataBuilder(None, [name], config, device).build(0, common)
    with set_forward_context({name: metadata}, config, slot_mapping={name: common.slot_mapping}):
        out = layer(step.query.flatten(1), step.key.flatten(1), step.value.flatten(1))
    assert_near(out.unflatten(1, (HEADS, DIM)), wanted(step, window=(8, 0)))
