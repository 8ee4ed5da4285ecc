"""Does the backend for sglang fit into sglang, and does it attend to what sglang's pool holds?

Where sglang is not installed its interface is the one that was recorded of version 0.5.23: names and parameters.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.testing import contract, recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("sglang-0.5.23.json")
# The kernels of sglang that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("sglang.srt")
HEADS, KV_HEADS, DIM, PAGE, SLOTS, CONTEXT = 4, 2, 32, 16, 192, 64
# Sequences of (older, new) tokens: a chunk behind a prefix, one that decodes, a prompt.
CHUNKS = ((20, 7), (33, 1), (0, 18))
DECODING = ((19, 1), (33, 1), (7, 1))
DRAFTS = ((20, 3), (33, 3), (12, 3))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def backend(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("prefix_prefill.integrations.sglang", recording, INSTALLED) as module:
        yield module


@pytest.fixture(autouse=True)
def settings(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a server would have been told."""
    own = SimpleNamespace(attn_cp_size=1, attn_dcp_size=1, enable_deterministic_inference=False)
    monkeypatch.setattr(backend, "get_exec", lambda: SimpleNamespace(deterministic=own))
    monkeypatch.setattr(backend, "get_parallel", lambda: own)
    return own


class Mode(str):
    """A ForwardMode by name, with the questions that a backend asks of it."""

    name = property(str.__str__)

    def is_idle(self) -> bool:
        return self == "IDLE"

    def is_decode(self) -> bool:
        return self == "DECODE"

    def is_decode_or_idle(self) -> bool:
        return self in ("DECODE", "IDLE")

    def is_target_verify(self) -> bool:
        return self == "TARGET_VERIFY"

    def is_dllm_extend(self) -> bool:
        return self == "DLLM_EXTEND"

    def is_extend_without_speculative(self) -> bool:
        return self in ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")


def mode_of(name: str) -> Any:
    if not INSTALLED:
        return Mode(name)
    return importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode[name]


class Pool:
    """What the backend asks of an MHATokenToKVPool of one layer."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.k_buffer, self.v_buffer = torch.zeros(2, SLOTS, KV_HEADS, DIM, device=device).to(dtype).unbind()

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k_buffer, self.v_buffer

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> None:
        for rows, scale, buffer in ((k, k_scale, self.k_buffer), (v, v_scale, self.v_buffer)):
            written = (rows if scale is None else rows / scale).to(self.dtype)
            # Not every device assigns floats of 8 bits by index.
            stored = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
            buffer.view(stored)[where.loc] = written.view(stored)


def make_pool(dtype: torch.dtype, device: torch.device) -> Any:
    if not INSTALLED:
        return Pool(dtype, device)
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    return pools.MHATokenToKVPool(SLOTS - PAGE, PAGE, dtype, KV_HEADS, DIM, 1, str(device), False)


def make_layer(**options: Any) -> Any:
    layer = {
        "layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": DIM, "v_head_dim": DIM,
        "scaling": 0.2, "logit_cap": 0.0, "logit_capping_method": "tanh", "sliding_window_size": -1,
        "k_scale": None, "v_scale": None, "is_cross_attention": False, "use_irope": False, "xai_temperature_len": -1,
    }  # fmt: skip
    types = importlib.import_module("sglang.srt.layers.radix_attention").AttentionType
    return SimpleNamespace(**{**layer, "attn_type": types.DECODER, **options})


def make_runner(device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """What the backend reads of a ModelRunner. Slot 0's page is the one for padding, as in sglang."""
    runner = {
        "token_to_kv_pool": make_pool(dtype, device), "use_mla_backend": False, "is_draft_worker": False,
        "kv_index_translator": SimpleNamespace(is_translating=False), "kv_cache_dtype_str": "auto", "page_size": PAGE,
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(9, CONTEXT, dtype=torch.int32, device=device)),
        "device": str(device),
    }  # fmt: skip
    return SimpleNamespace(**{**runner, **options})


class Batch(NamedTuple):
    """What the backend reads of a ForwardBatch."""

    forward_mode: Any
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    extend_seq_lens: Tensor
    extend_seq_lens_cpu: Sequence[int]
    out_cache_loc: Tensor
    out_cache_loc_is_physical: bool = True
    spec_info: Any = None


class Rows(NamedTuple):
    """New tokens of a batch, and older ones by sequence, as a layer has them."""

    query: Tensor
    key: Tensor
    value: Tensor
    older: list[Tensor]


def make_batch(runner: Any, layer: Any, mode: str, lengths: Any, host: bool = True) -> tuple[Batch, Rows]:
    """Sequences with pages of their own, whose older tokens are in the pool."""
    table = runner.req_to_token_pool.req_to_token
    counts = [-(-(ctx + n) // PAGE) for ctx, n in lengths]
    pages = (1 + torch.randperm(SLOTS // PAGE - 1)[: sum(counts)]).split(counts)
    requests = torch.randperm(8)[: len(lengths)] + 1
    slots, older, total = [], [], sum(n for _, n in lengths)
    for request, own, (ctx, n) in zip(requests.tolist(), pages, lengths, strict=True):
        every = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[: ctx + n].to(table.device)
        table[request, : ctx + n] = every.int()
        slots.append(every[ctx:])
        older.append(torch.randn(2, ctx, KV_HEADS, DIM, device=table.device).bfloat16())
        where = SimpleNamespace(loc=every[:ctx]) if not INSTALLED else every[:ctx]
        runner.token_to_kv_pool.set_kv_buffer(layer, where, *older[-1].clone(), layer.k_scale, layer.v_scale)
    new = torch.tensor([n for _, n in lengths])
    # sglang counts the tokens of a batch, but for drafts.
    known = torch.tensor([ctx + (0 if mode == "TARGET_VERIFY" else n) for ctx, n in lengths])
    batch = Batch(
        mode_of(mode), len(lengths), requests.to(table.device), known.to(table.device), known if host else None,
        new.to(table.device), new.tolist(), torch.cat(slots),
        spec_info=SimpleNamespace(tree_topk=1, draft_token_num=lengths[0][1]) if mode == "TARGET_VERIFY" else None,
    )  # fmt: skip
    new_rows = (torch.randn(total, heads, DIM, device=table.device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    return batch, Rows(*new_rows, older)


def wanted(rows: Rows, lengths: Any, rounded: Any = lambda x, i: x, **options: Any) -> Tensor:
    """Each sequence by itself, in float64, over keys and values that were never in pages."""
    outs, begin = [], 0
    for older, (ctx, n) in zip(rows.older, lengths, strict=True):
        own = slice(begin, begin + n)
        keys, values = (
            rounded(torch.cat([older[i], new[own]]).cpu(), i) for i, new in enumerate((rows.key, rows.value))
        )
        outs.append(
            attention(
                rows.query[own].cpu(), keys, values, cu_seqlens_q=torch.tensor([0, n]),
                cu_seqlens_k=torch.tensor([0, ctx + n]), softmax_scale=0.2, causal=True, **options,
            ).out
        )  # fmt: skip
        begin += n
    return torch.cat(outs)


def attend(own: Any, batch: Any, rows: Rows, layer: Any, **more: Any) -> Tensor:
    """As a layer of the model calls the backend, whose metadata is made already."""
    forward = own.forward_decode if batch.forward_mode.is_decode() else own.forward_extend
    out: Tensor = forward(rows.query.flatten(1), rows.key, rows.value, layer, batch, save_kv_cache=True, **more)
    return out.unflatten(1, (HEADS, -1))


def assert_near(out: Tensor, exact: Tensor, at_most: float = 0.01) -> None:
    assert out.shape == exact.shape
    size = exact.abs().amax(-1, keepdim=True)
    assert float(((out.cpu().double() - exact).abs() / size).max()) < at_most


def test_without_sglang_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "prefix_prefill.integrations.sglang")
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    with pytest.raises(ImportError, match=r"this needs sglang 0\.5\.23: prefix-prefill\[sglang\]"):
        importlib.import_module("prefix_prefill.integrations.sglang")


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


def test_every_method_can_be_called_as_the_engine_calls_it(backend: ModuleType, recording: Recording) -> None:
    entry = recording["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]
    assert misfits(backend.PrefixPrefillBackend, entry) == []


def test_the_engine_learns_of_the_backend_by_name_once_however_often_it_asks(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    choices = ["fa3"]
    monkeypatch.setattr(backend, "register_attention_backend", lambda name: lambda cls: made.update({name: cls}))
    monkeypatch.setattr(backend, "ATTENTION_BACKEND_CHOICES", choices)
    monkeypatch.setattr(backend, "add_attention_backend_choices", choices.extend)
    backend.register()
    backend.register()
    assert made == {"prefix_prefill": backend.PrefixPrefillBackend}
    assert choices == ["fa3", "prefix_prefill"]


@pytest.mark.parametrize("of", ["plain", "a window", "a soft cap and sinks"])
@pytest.mark.parametrize(
    ("mode", "lengths"),
    [("EXTEND", CHUNKS), ("MIXED", CHUNKS), ("DECODE", DECODING), ("TARGET_VERIFY", DRAFTS)],
    ids=["chunks", "mixed", "decoding", "drafts"],
)
def test_a_step_sees_what_the_pool_holds(
    backend: ModuleType, device: torch.device, mode: str, lengths: Any, of: str
) -> None:
    sinks = torch.randn(HEADS, device=device)
    # A window of sglang's counts the tokens before one's own.
    layer = make_layer(
        **{"a window": {"sliding_window_size": 8}, "a soft cap and sinks": {"logit_cap": 3.0}}.get(of, {})
    )
    runner = make_runner(device)
    own = backend.PrefixPrefillBackend(runner)
    batch, rows = make_batch(runner, layer, mode, lengths)
    own.init_forward_metadata(batch)
    more = {"sinks": sinks} if "sinks" in of else {}
    out = attend(own, batch, rows, layer, **more)
    options: Any = {"a window": {"window": (8, 0)}, "a soft cap and sinks": {"softcap": 3.0, "sinks": sinks.cpu()}}
    assert_near(out, wanted(rows, lengths, **options.get(of, {})))


def test_the_width_of_the_table_is_the_batchs_where_the_host_knows_lengths_and_else_the_contexts(
    backend: ModuleType, device: torch.device
) -> None:
    layer, runner = make_layer(), make_runner(device)
    own = backend.PrefixPrefillBackend(runner)
    for mode, lengths, host, pages in [
        ("DECODE", DECODING, True, 3), ("DECODE", DECODING, False, CONTEXT // PAGE),
        # 45 tokens and 4 drafts, which begin another page.
        ("TARGET_VERIFY", ((45, 4), (3, 4)), True, 4),
    ]:  # fmt: skip
        batch, rows = make_batch(runner, layer, mode, lengths, host)
        own.init_forward_metadata(batch)
        assert own.forward_metadata.block_table.shape == (len(lengths), pages)
        assert own.forward_metadata.block_table.dtype is torch.int32
        assert_near(attend(own, batch, rows, layer), wanted(rows, lengths))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [(0.5, 0.25), None])
def test_a_pool_of_8_bits_is_read_with_the_layers_scales_or_1(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, scales: tuple[float, float] | None
) -> None:
    given = {} if scales is None else {"k_scale": torch.tensor(scales[0]), "v_scale": torch.tensor(scales[1])}
    layer = make_layer(**{name: scale.to(device) for name, scale in given.items()})
    runner = make_runner(device, dtype, kv_cache_dtype_str="fp8_e4m3")
    own = backend.PrefixPrefillBackend(runner)
    batch, rows = make_batch(runner, layer, "EXTEND", CHUNKS)
    own.init_forward_metadata(batch)
    # A pool may scale what it is given in place.
    out = attend(own, batch, rows._replace(key=rows.key.clone(), value=rows.value.clone()), layer)
    by = scales or (1.0, 1.0)
    assert_near(out, wanted(rows, CHUNKS, lambda x, i: (x / by[i]).to(dtype).to(x.dtype) * by[i]), at_most=0.03)


def test_a_pool_with_heads_before_tokens_is_read_as_it_is(backend: ModuleType, device: torch.device) -> None:
    layer, runner = make_layer(), make_runner(device)
    batch, rows = make_batch(runner, layer, "DECODE", DECODING)
    own = backend.PrefixPrefillBackend(runner)
    own.init_forward_metadata(batch)
    expected = attend(own, batch, rows, layer)
    in_pages = [
        buffer.unflatten(0, (-1, PAGE)).transpose(1, 2).contiguous()
        for buffer in runner.token_to_kv_pool.get_kv_buffer(0)
    ]
    own.pool = SimpleNamespace(get_kv_buffer=lambda _: in_pages)
    out = own.forward_decode(rows.query.flatten(1), None, None, layer, batch)
    assert torch.equal(out, expected.flatten(1))


@pytest.mark.parametrize(("mode", "lengths"), [("DECODE", DECODING), ("TARGET_VERIFY", DRAFTS)])
def test_replays_refill_what_a_graph_reads_in_place(
    backend: ModuleType, device: torch.device, mode: str, lengths: Any
) -> None:
    layer, runner = make_layer(), make_runner(device)
    own = backend.PrefixPrefillBackend(runner)
    own.init_cuda_graph_state(4, 16)
    batch, _ = make_batch(runner, layer, mode, [(0, n) for _, n in lengths])
    own.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = own.forward_metadata
    # Twice: a longer batch leaves pages behind that a shorter one must not see.
    for each in (lengths, tuple((ctx // 3, n) for ctx, n in lengths)):
        batch, rows = make_batch(runner, layer, mode, each)
        own.forward_metadata = None
        own.init_forward_metadata_out_graph(batch)
        assert own.forward_metadata is captured
        assert captured.block_table.shape[1] == CONTEXT // PAGE
        assert_near(attend(own, batch, rows, layer), wanted(rows, each))
    assert own.get_cuda_graph_seq_len_fill_value() == 1


@pytest.mark.gpu
def test_a_graph_of_decoding_replays_other_lengths_and_pages(backend: ModuleType, device: torch.device) -> None:
    layer, runner = make_layer(), make_runner(device)
    own = backend.PrefixPrefillBackend(runner)

    def inputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        pool = torch.randn(2, SLOTS, KV_HEADS, DIM).bfloat16()
        starts, lengths = torch.arange(5).int(), torch.randint(1, CONTEXT, (4,)).int()
        table = torch.randint(SLOTS // PAGE, (4, CONTEXT // PAGE)).int()
        return [x.to(device) for x in (torch.randn(4, HEADS * DIM).bfloat16(), pool, starts, lengths, table)]

    def step(query: Tensor, pool: Tensor, starts: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        own.pool = SimpleNamespace(get_kv_buffer=lambda _: pool.unbind())
        own.forward_metadata = backend.Step(starts, lengths, table, 1)
        out: Tensor = own.forward_decode(query, None, None, layer, None)
        return out

    contract.check_cuda_graph(step, inputs)


def test_an_idle_rank_and_a_layer_that_shares_anothers_keys_write_nothing(
    backend: ModuleType, device: torch.device
) -> None:
    layer, runner = make_layer(), make_runner(device)
    own = backend.PrefixPrefillBackend(runner)
    own.init_forward_metadata(SimpleNamespace(forward_mode=mode_of("IDLE"), batch_size=0))
    assert own.forward_metadata is None
    batch, rows = make_batch(runner, layer, "EXTEND", CHUNKS)
    own.init_forward_metadata(batch)
    before = [buffer.clone() for buffer in runner.token_to_kv_pool.get_kv_buffer(0)]
    own.forward_extend(rows.query.flatten(1), rows.key, rows.value, layer, batch, save_kv_cache=False)
    own.forward_extend(rows.query.flatten(1), None, None, layer, batch)
    assert all(map(torch.equal, runner.token_to_kv_pool.get_kv_buffer(0), before))


def test_bits_that_must_not_depend_on_neighbours_are_asked_for_in_one_piece(
    backend: ModuleType, settings: SimpleNamespace, device: torch.device
) -> None:
    assert backend.PrefixPrefillBackend(make_runner(device)).num_splits is None
    settings.enable_deterministic_inference = True
    assert backend.PrefixPrefillBackend(make_runner(device)).num_splits == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_mla_backend": True}, "attention_backend must be one for MLA"),
        ({"is_draft_worker": True}, "speculative_draft_attention_backend must be one of sglang's own"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "enable_unified_memory must be False"),
        ({"kv_cache_dtype_str": "mxfp8"}, r"kv_cache_dtype must be one of auto, .*, got 'mxfp8'"),
    ],
)
def test_a_server_that_asks_for_what_is_not_covered_does_not_start(
    backend: ModuleType, device: torch.device, options: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        backend.PrefixPrefillBackend(make_runner(device, **options))


def test_pools_of_windows_and_context_parallelism_are_refused(
    backend: ModuleType, settings: SimpleNamespace, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(device)
    settings.attn_dcp_size = 2
    with pytest.raises(ValueError, match="attention_context_parallel_size must be 1, got 2"):
        backend.PrefixPrefillBackend(runner)
    settings.attn_dcp_size = 1
    monkeypatch.setattr(backend, "BaseSWAKVPool", type(runner.token_to_kv_pool))
    with pytest.raises(ValueError, match="disable_hybrid_swa_memory must be True"):
        backend.PrefixPrefillBackend(runner)


@pytest.mark.parametrize(
    ("layer", "more", "words"),
    [
        ({"is_cross_attention": True}, {}, "is_cross_attention must be False"),
        ({"use_irope": True}, {}, "use_irope and xai_temperature_len must be off"),
        ({"xai_temperature_len": 8}, {}, "use_irope and xai_temperature_len must be off"),
        ({"logit_cap": 2.0, "logit_capping_method": "other"}, {}, "logit_capping_method must be 'tanh'"),
        ({}, {"k_rope": torch.ones(1)}, "k_rope must be None, got a tensor"),
        ({}, {"return_lse": True}, "return_lse must be None, got True"),
    ],
)
def test_what_a_layer_asks_beyond_is_refused_by_name(
    backend: ModuleType, device: torch.device, layer: Any, more: Any, words: str
) -> None:
    own = backend.PrefixPrefillBackend(make_runner(device))
    with pytest.raises(ValueError, match=words):
        own.forward_extend(torch.zeros(1, HEADS * DIM), None, None, make_layer(**layer), None, **more)


@pytest.mark.parametrize(
    ("call", "mode", "topk", "words"),
    [
        ("init_forward_metadata", "DRAFT_EXTEND_V2", 1, "forward_mode must be EXTEND, .*, got DRAFT_EXTEND_V2"),
        ("init_forward_metadata", "DLLM_EXTEND", 1, "forward_mode must be EXTEND, .*, got DLLM_EXTEND"),
        ("init_forward_metadata", "TARGET_VERIFY", 4, "speculative_eagle_topk must be 1, got 4"),
        (
            "init_forward_metadata_out_graph",
            "EXTEND",
            1,
            "forward_mode must be DECODE or TARGET_VERIFY in a CUDA graph",
        ),
    ],
)
def test_batches_of_other_modes_are_refused(
    backend: ModuleType, device: torch.device, call: str, mode: str, topk: int, words: str
) -> None:
    own = backend.PrefixPrefillBackend(make_runner(device))
    batch = SimpleNamespace(forward_mode=mode_of(mode), batch_size=1, spec_info=SimpleNamespace(tree_topk=topk))
    with pytest.raises(ValueError, match=words):
        getattr(own, call)(batch)


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@pytest.mark.parametrize(("mode", "lengths"), [("EXTEND", CHUNKS), ("DECODE", DECODING)])
@pytest.mark.parametrize("window", [-1, 8])
def test_the_engines_own_layer_batch_and_pools_give_what_its_own_backend_gives(
    backend: ModuleType, mode: str, lengths: Any, window: int
) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    device = torch.device("cpu")
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, sliding_window_size=window)
    runner = make_runner(device, req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False))
    batch, rows = make_batch(runner, layer, mode, lengths)
    prefixes = torch.tensor([ctx for ctx, _ in lengths])
    named = {name: value for name, value in batch._asdict().items() if name not in ("spec_info",)}
    real = ForwardBatch(
        input_ids=torch.zeros(len(rows.query), dtype=torch.int64), seq_lens_sum=int(batch.seq_lens.sum()),
        extend_prefix_lens=prefixes, **named,
    )  # fmt: skip
    outs = []
    for own in (backend.PrefixPrefillBackend(runner), TorchNativeAttnBackend(runner)):
        own.init_forward_metadata(real)
        with forward_context(ForwardContext(own)):
            outs.append(layer(rows.query.flatten(1), rows.key.flatten(1), rows.value.flatten(1), real))
    assert outs[0].shape == outs[1].shape
    exact = wanted(rows, lengths, window=None if window < 0 else (window, 0))
    assert_near(outs[0].unflatten(1, (HEADS, DIM)), exact)
    assert_near(outs[1].unflatten(1, (HEADS, DIM)), exact, at_most=0.03)


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
def test_the_engines_registry_makes_the_backend_that_it_is_asked_for(backend: ModuleType) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    backend.register()
    assert "prefix_prefill" in ATTENTION_BACKEND_CHOICES
    assert ATTENTION_BACKENDS["prefix_prefill"](make_runner(torch.device("cpu"))).page_size == PAGE


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@pytest.mark.parametrize(("mode", "lengths"), [("EXTEND", CHUNKS), ("DECODE", DECODING)], ids=["chunks", "decoding"])
def test_a_step_gives_the_same_as_sglangs_own_backend_on_the_same_pool(
    backend: ModuleType, device: torch.device, mode: str, lengths: Any
) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    layer, runner = make_layer(sliding_window_size=12), make_runner(device)
    batch, rows = make_batch(runner, layer, mode, lengths)
    older = torch.tensor([ctx for ctx, _ in lengths], device=device)
    batch = SimpleNamespace(**batch._asdict(), extend_prefix_lens=older, encoder_lens=None)
    results, pools = [], []
    for cls in (backend.PrefixPrefillBackend, TorchNativeAttnBackend):
        own = cls(runner)
        own.init_forward_metadata(batch)
        results.append(attend(own, batch, rows, layer))
        pools.append([buffer.clone() for buffer in runner.token_to_kv_pool.get_kv_buffer(0)])
    assert_near(results[0], results[1].double().cpu(), at_most=0.015)
    assert all(map(torch.equal, *pools))
