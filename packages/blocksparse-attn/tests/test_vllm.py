"""Does MiniMax-M3's layer in vLLM take this package's selected attention, with the cache and lists that vLLM keeps?

Where vLLM is not installed its interface is the one that was recorded of version 0.33.0: names and parameters.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.selection import selected_attention as oracle
from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("vllm-0.33.0.json")
# The kernels of vLLM that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("vllm.v1.attention.backend")
NAME, ADAPTER = "blocksparse_attn.integrations.vllm", "blocksparse_attn.integrations.minimax_m3"
M3 = "vllm.models.minimax_m3.common.sparse_attention"
LAYER, HEADS, KV_HEADS, DIM, BLOCK, PAGES, TOPK = "model.layers.3.self_attn.attn", 4, 2, 16, 128, 14, 2
# Sequences of (older, new) tokens: two that decode a token and two drafts each; a chunk behind others and a prompt.
DECODING, PREFILLS = ((300, 3), (2, 3)), ((140, 7), (0, 9))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def plugin(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter(NAME, recording, INSTALLED) as module:
        yield module


@pytest.fixture(scope="module")
def adapter(plugin: ModuleType) -> Iterator[ModuleType]:
    yield importlib.import_module(ADAPTER)
    # Its engine goes with the recording.
    sys.modules.pop(ADAPTER)


def test_without_vllm_the_extra_is_named(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"this needs vLLM 0\.33: blocksparse-attn\[vllm\]"):
        importlib.import_module(NAME)


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


def test_every_method_can_be_called_as_the_engine_calls_it(adapter: ModuleType, recording: Recording) -> None:
    entry = recording[M3][adapter.THEIRS]
    assert "forward" in entry["methods"]
    assert misfits(adapter.Implementation, entry) == []


def test_the_engine_makes_layers_of_it_only_where_its_plugins_name_it(
    plugin: ModuleType, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, settings = importlib.import_module(M3), SimpleNamespace(VLLM_PLUGINS=None)
    theirs = module.MiniMaxM3SparseTritonImpl
    monkeypatch.setattr(module, adapter.THEIRS, theirs)
    monkeypatch.setattr(plugin, "envs", settings)
    for settings.VLLM_PLUGINS in (None, ["another"]):
        plugin.register()
        assert module.MiniMaxM3SparseTritonImpl is theirs
    settings.VLLM_PLUGINS = ["another", "blocksparse_attn"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    plugin.register()
    assert module.MiniMaxM3SparseTritonImpl is theirs
    monkeypatch.setattr(torch.version, "hip", None)
    for _ in range(2):
        plugin.register()
        assert module.MiniMaxM3SparseTritonImpl is adapter.Implementation


class Step(NamedTuple):
    layer: Any
    query: Tensor
    cache: Tensor
    metadata: Any
    lengths: tuple[tuple[int, int], ...]


def make_step(device: torch.device, decoding: Any, prefills: Any, cache_dtype: torch.dtype = torch.bfloat16) -> Step:
    """A step as vLLM's builder lays it out, and the lists of its indexer in the buffer that all layers share."""
    module, lengths = importlib.import_module(M3), (*decoding, *prefills)
    new, seq_lens = ([n for _, n in lengths], torch.tensor([sum(both) for both in lengths]).int().to(device))
    tokens, decoded = sum(new), sum(n for _, n in decoding)
    table = torch.randperm(PAGES)[: 3 * len(lengths)].view(-1, 3).int().to(device)
    rows = len(decoding)
    starts = torch.tensor([0, *(n for _, n in prefills)]).cumsum(0).int().to(device)
    decode = module.MiniMaxM3SparseDecodeMetadata(seq_lens[:rows], table[:rows], new[0]) if decoding else None
    prefill = (
        module.MiniMaxM3SparsePrefillMetadata(
            starts, seq_lens[rows:], seq_lens[rows:], seq_lens[rows:] - starts.diff(), table[rows:], 9, 512, 8
        )
        if prefills
        else None
    )
    metadata = module.MiniMaxM3SparseMetadata(
        seq_lens, 512, torch.arange(tokens), tokens, rows, decoded, len(prefills), tokens - decoded, prefill, decode
    )
    # Rows of a larger batch lie behind, and blocks that a token cannot see are -1.
    lists = torch.full((tokens + 4, KV_HEADS, TOPK), 77, dtype=torch.int32)
    positions = torch.cat([torch.arange(old, old + n) for old, n in lengths])
    for token, own in enumerate((positions // BLOCK).tolist()):
        for head in range(KV_HEADS):
            seen = [own, *torch.randperm(own)[: TOPK - 1].tolist()]
            lists[token, head] = torch.tensor([*seen, *[-1] * TOPK][:TOPK])
    # Values and keys of vLLM's memory have tokens before heads.
    memory = torch.randn(PAGES, BLOCK, KV_HEADS, 2 * DIM, device=device).to(cache_dtype).transpose(1, 2)
    layer = SimpleNamespace(
        layer_name=LAYER, topk_indices_buffer=lists.to(device), _k_scale=torch.tensor(0.5, device=device),
        _v_scale=torch.tensor(0.25, device=device),
    )  # fmt: skip
    query = torch.randn(tokens + 4, HEADS * DIM, device=device).bfloat16()
    return Step(layer, query, memory, metadata, lengths)


def make_implementation(adapter: ModuleType, kv_cache_dtype: str = "auto") -> Any:
    own = adapter.Implementation.__new__(adapter.Implementation)
    given = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": DIM, "scale": 0.3, "block_size": BLOCK,
        "kv_cache_dtype": kv_cache_dtype,
    }  # fmt: skip
    for name, value in given.items():
        setattr(own, name, value)
    return own


@pytest.fixture
def run(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The layer's attention of a step: [T, Hq, D] with rows behind it that nothing may write."""

    def run(step: Step, kv_cache_dtype: str = "auto") -> Tensor:
        context = SimpleNamespace(attn_metadata={LAYER: step.metadata})
        monkeypatch.setattr(adapter, "get_forward_context", lambda: context)
        out = torch.full_like(step.query, 7.0)
        # Of 8 bits vLLM's caches are bytes.
        cache = step.cache if step.cache.element_size() > 1 else step.cache.view(torch.uint8)
        assert make_implementation(adapter, kv_cache_dtype).forward(step.layer, step.query, cache, out) is out
        return out.unflatten(1, (HEADS, DIM))

    return run


def wanted(step: Step, factors: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """In float64."""
    m, tokens = step.metadata, step.metadata.num_actual_tokens
    parts = [part.block_table.cpu() for part in (m.decode, m.prefill) if part is not None]
    keys, values = ((x.cpu().double() * by) for x, by in zip(step.cache.split(DIM, -1), factors, strict=True))
    return oracle(
        step.query[:tokens].cpu().double().unflatten(1, (HEADS, DIM)), keys, values,
        step.layer.topk_indices_buffer[:tokens].cpu(), block_size=BLOCK, block_table=torch.cat(parts),
        cu_seqlens_q=torch.tensor([0, *(n for _, n in step.lengths)]).cumsum(0).int(), seqlens_k=m.seq_lens.cpu(),
        page_layout="HND", softmax_scale=0.3,
    ).out  # fmt: skip


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert float((out[: len(exact)].cpu().double() - exact).abs().max() / exact.abs().max()) < 0.01
    assert (out[len(exact) :] == 7).all()


@pytest.mark.parametrize(
    ("decoding", "prefills"),
    [(DECODING, PREFILLS), (DECODING, ()), (((5, 1), (127, 1)), ()), ((), PREFILLS)],
    ids=["mixed", "drafts", "decoding", "prompts"],
)
def test_each_token_sees_the_blocks_that_the_indexer_listed_for_it(
    run: Any, device: torch.device, decoding: Any, prefills: Any
) -> None:
    step = make_step(device, decoding, prefills)
    assert_near(run(step), wanted(step))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_read_with_the_layers_scales(run: Any, device: torch.device, name: str) -> None:
    step = make_step(device, DECODING, PREFILLS, torch.float8_e4m3fn)
    assert_near(run(step, name), wanted(step, (0.5, 0.25)))


def test_caches_that_the_kernels_do_not_read_stay_vllms_own(
    run: Any, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    given: list[Any] = []
    theirs = adapter.Implementation.__mro__[1]
    monkeypatch.setattr(theirs, "forward", lambda self, *rest: given.append(rest) or rest[-1])
    step = make_step(device, DECODING, PREFILLS, torch.float8_e5m2)
    assert (run(step, "fp8_e5m2") == 7).all()
    assert given[0][0] is step.layer


def test_before_there_are_caches_nothing_is_read(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(adapter, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    out = torch.ones(3, HEADS * DIM, device=device)
    own = make_implementation(adapter)
    assert own.forward(SimpleNamespace(), out.clone(), torch.tensor([]), out) is out
    with pytest.raises(ValueError, match="query_fp8 must be None, got a tensor"):
        own.forward(SimpleNamespace(), out, torch.tensor([]), out, query_fp8=out)
