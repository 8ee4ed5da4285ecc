"""Does the backend for vLLM fit into vLLM, and does it attend to what vLLM's latent cache holds?

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

from kernel_reference.testing import contract, recorded
from kernel_reference.testing.recorded import Recording, installed, misfits

Tensor = torch.Tensor

RECORDED = Path(__file__).with_name("vllm-0.33.0.json")
MLA = "vllm.model_executor.layers.attention.mla_attention"
SPARSE, FLASH_MLA = "tilelang_mla.integrations.flashmla_sparse", "vllm.v1.attention.backends.mla.flashmla_sparse"
# The kernels of vLLM that a benchmark finds on PYTHONPATH come without the rest.
INSTALLED = installed("vllm.v1.attention.backend")
HEADS, LATENT, ROPE, PAGE, PAGES, SCALE = 16, 512, 64, 64, 9, 192**-0.5
LENGTHS = (70, 3, 129)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded.read(RECORDED)


@pytest.fixture(scope="module")
def backend(recording: Recording) -> Iterator[ModuleType]:
    with recorded.adapter("tilelang_mla.integrations.vllm", recording, INSTALLED) as module:
        yield module


@pytest.fixture(scope="module")
def sparse(backend: ModuleType) -> Iterator[ModuleType]:
    yield importlib.import_module(SPARSE)
    # Its engine goes with the recording.
    sys.modules.pop(SPARSE)


def test_without_vllm_the_extra_is_named(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tilelang_mla.integrations.vllm")
    monkeypatch.setitem(sys.modules, MLA, None)
    with pytest.raises(ImportError, match=r"this needs vLLM 0\.33: tilelang-mla\[vllm\]"):
        importlib.import_module("tilelang_mla.integrations.vllm")


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_recorded_interface_is_that_of_the_engine(recording: Recording) -> None:
    assert recorded.again(recording) == recording


@pytest.mark.parametrize(
    ("ours", "module", "theirs"),
    [
        ("TilelangMLABackend", "vllm.v1.attention.backend", "AttentionBackend"),
        ("TilelangMLABackend", MLA, "MLACommonBackend"),
        ("Implementation", MLA, "MLACommonImpl"),
        ("MetadataBuilder", MLA, "MLACommonMetadataBuilder"),
    ],
)
def test_every_method_can_be_called_as_the_engine_calls_it(
    backend: ModuleType, recording: Recording, ours: str, module: str, theirs: str
) -> None:
    entry = recording[module][theirs]
    # vLLM's own backends take what is MLA's alone in one, by name.
    methods = {name: one for name, one in entry["methods"].items() if name != "__init__"}
    found = misfits(getattr(backend, ours), {"methods": methods})
    # What vLLM's base classes give need not be here again.
    assert [words for words in found if not words.endswith("is missing")] == []
    assert not getattr(backend, ours).__abstractmethods__


def test_the_engine_learns_of_the_backend_by_name_once_however_often_it_asks(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    members: dict[str, str] = {}
    monkeypatch.setattr(backend, "register_backend", members.__setitem__)
    monkeypatch.setattr(backend, "AttentionBackendEnum", SimpleNamespace(__members__=members))
    monkeypatch.setattr(backend, "envs", SimpleNamespace(VLLM_PLUGINS=None))
    backend.register()
    monkeypatch.setattr(backend, "register_backend", None)
    backend.register()
    [(name, path)] = members.items()
    assert name == backend.NAME == backend.TilelangMLABackend.get_name()
    module, _, cls = path.rpartition(".")
    assert getattr(importlib.import_module(module), cls) is backend.TilelangMLABackend


def test_it_takes_what_the_kernels_take(backend: ModuleType) -> None:
    cls = backend.TilelangMLABackend
    gpus = [SimpleNamespace(major=major, minor=0) for major in (8, 9, 10)]
    assert list(map(cls.supports_compute_capability, gpus)) == [False, True, False]
    assert cls.supports_batch_invariance()
    assert cls.get_preferred_block_size(16) == cls.get_supported_kernel_block_sizes()[0] == 64
    assert (cls.get_impl_cls(), cls.get_builder_cls()) == (backend.Implementation, backend.MetadataBuilder)


def make_layer(backend: ModuleType, kv_cache_dtype: str = "auto", **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_heads": HEADS, "head_size": LATENT + ROPE, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": kv_cache_dtype, "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": ROPE, "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None,
    }  # fmt: skip
    arguments.update(options)
    if INSTALLED:
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            return backend.Implementation(**arguments)
    layer = backend.Implementation(**arguments)
    # Of vLLM's own constructor the names alone were recorded.
    layer.kv_lora_rank, layer.scale, layer.kv_cache_dtype = LATENT, SCALE, kv_cache_dtype
    return layer


def make_step(device: torch.device, tokens: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor, Tensor]:
    """Metadata as vLLM makes it for a step of decoding; the cache; the absorbed queries."""
    pages = torch.randperm(PAGES)[: sum(-(-n // PAGE) for n in LENGTHS)]
    counts = [-(-n // PAGE) for n in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    module = importlib.import_module(MLA)
    decode = module.MLACommonDecodeMetadata(table.to(device), torch.tensor(LENGTHS).int().to(device), None)
    rows = tokens * len(LENGTHS)
    bounds = torch.arange(0, rows + 1, tokens).int().to(device)
    step = module.MLACommonMetadata(
        num_reqs=len(LENGTHS), max_query_len=tokens, max_seq_len=max(LENGTHS), num_actual_tokens=rows,
        query_start_loc=bounds, slot_mapping=bounds[:-1], num_decodes=len(LENGTHS), num_decode_tokens=rows,
        num_prefills=0, causal=True, decode=decode,
    )  # fmt: skip
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, device=device).to(dtype)
    return step, cache, torch.randn(rows, HEADS, LATENT + ROPE, device=device).bfloat16()


def wanted(step: Any, cache: Tensor, q: Tensor, scale: float = 1.0) -> Tensor:
    """Each token by itself, in float64."""
    tokens, outs = len(q) // len(LENGTHS), []
    for i, (length, row) in enumerate(zip(LENGTHS, step.decode.block_table.cpu(), strict=True)):
        keys = cache.float().cpu()[row.long()].flatten(0, 1).double() * scale
        for j in range(tokens):
            seen = keys[: length - tokens + j + 1]
            weights = torch.softmax(q[i * tokens + j].cpu().double() @ seen.T * SCALE, -1)
            outs.append(weights @ seen[:, :LATENT])
    return torch.stack(outs)


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape
    assert float(((out.cpu().double() - exact).abs() / exact.abs().amax(-1, keepdim=True)).max()) < 0.015


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("apart", [False, True], ids=["joined", "latent and rope apart"])
def test_a_step_of_decoding_sees_what_the_cache_holds(
    backend: ModuleType, device: torch.device, tokens: int, apart: bool
) -> None:
    step, cache, q = make_step(device, tokens)
    given = q.split((LATENT, ROPE), -1) if apart else q
    out, lse = make_layer(backend).forward_mqa(given, cache, step, SimpleNamespace(_k_scale=None))
    assert lse is None
    assert_near(out, wanted(step, cache, q))


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_read_with_the_layers_scale(backend: ModuleType, device: torch.device, kind: str) -> None:
    step, cache, q = make_step(device, dtype=torch.float8_e4m3fn)
    scale = SimpleNamespace(_k_scale=torch.tensor(0.5, device=device))
    layer = make_layer(backend, kind)
    # vLLM would round queries to 8 bits else.
    assert layer.supports_quant_query_input is False
    assert_near(layer.forward_mqa(q, cache, step, scale)[0], wanted(step, cache, q, 0.5))


def test_bits_that_must_not_depend_on_neighbours_are_asked_for_in_one_piece(
    backend: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    whole = backend.flash_mla_with_kvcache
    monkeypatch.setattr(
        backend, "flash_mla_with_kvcache", lambda *a, plan, **n: given.append(plan) or whole(*a, plan=plan, **n)
    )
    step, cache, q = make_step(device, 3)
    layer = make_layer(backend)
    layer.forward_mqa(q, cache, step, None)
    monkeypatch.setattr(backend, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    assert_near(layer.forward_mqa(q, cache, step, None)[0], wanted(step, cache, q))
    assert given[0] is None
    # A part for each sequence.
    assert given[1].first_part.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_graph_of_decoding_replays_other_lengths_and_pages(backend: ModuleType, device: torch.device) -> None:
    layer = make_layer(backend)

    def inputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        lengths, table = torch.randint(1, 3 * PAGE, (4,)).int(), torch.randint(PAGES, (4, 3)).int()
        cache = torch.randn(PAGES, PAGE, LATENT + ROPE).bfloat16()
        return [x.to(device) for x in (torch.randn(4, HEADS, LATENT + ROPE).bfloat16(), cache, lengths, table)]

    def attend(q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        step = SimpleNamespace(causal=True, decode=SimpleNamespace(seq_lens=lengths, block_table=table))
        out: Tensor = layer.forward_mqa(q, cache, step, None)[0]
        return out

    contract.check_cuda_graph(attend, inputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes must be None"),
        ({"sliding_window": 8}, "sliding_window must be None, got 8"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap must be None"),
        ({"attn_type": "encoder"}, "attn_type must be 'decoder', got 'encoder'"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(backend: ModuleType, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_layer(backend, **options)


def test_queries_that_are_not_as_many_of_each_sequence_are_refused(backend: ModuleType) -> None:
    step, cache, q = make_step(torch.device("cpu"), 3)
    with pytest.raises(ValueError, match="q must be as many tokens of each of 3 sequences, got 8 tokens"):
        make_layer(backend).forward_mqa(q[:8], cache, step, None)


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_the_engine_finds_a_reason_against_it_in_what_is_not_covered_alone(backend: ModuleType) -> None:
    from vllm.platforms.interface import DeviceCapability

    cls = backend.TilelangMLABackend
    layer = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "use_batch_invariant": True,
    }  # fmt: skip
    assert cls.validate_configuration(**layer) == []
    others: dict[str, Any] = {"use_mla": False, "use_sparse": True, "has_sink": True, "use_dcp": True}
    for name, value in {**others, "device_capability": DeviceCapability(10, 0)}.items():
        assert len(cls.validate_configuration(**{**layer, name: value})) == 1


def test_sparse_mla_is_taken_where_plugins_name_it_alone(
    backend: ModuleType, sparse: ModuleType, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[Any, str] = {}
    settings = SimpleNamespace(VLLM_PLUGINS=["another"])
    monkeypatch.setattr(backend, "register_backend", made.__setitem__)
    monkeypatch.setattr(backend, "envs", settings)
    monkeypatch.setattr(backend, "NAME", "FLASH_ATTN")
    backend.register()
    assert made == {}
    settings.VLLM_PLUGINS = ["tilelang_mla"]
    backend.register()
    assert made == {backend.AttentionBackendEnum.FLASHMLA_SPARSE: f"{SPARSE}.{sparse.SparseBackend.__name__}"}
    gpus = [SimpleNamespace(major=major, minor=0) for major in (8, 9, 10)]
    assert list(map(sparse.SparseBackend.supports_compute_capability, gpus)) == [False, True, False]
    own, entries = sparse.SparseBackend.get_impl_cls(), recording[FLASH_MLA]
    assert own is sparse.SparseImplementation
    assert "_bf16_flash_mla_kernel" in entries["FlashMLASparseImpl"]["methods"]
    for cls, entry in ((own, "FlashMLASparseImpl"), (sparse.SparseBackend, "FlashMLASparseBackend")):
        assert misfits(cls, entries[entry]) == []


@pytest.mark.parametrize("padded", [HEADS, 64], ids=["all heads", "padded heads"])
@pytest.mark.parametrize("given", [False, True], ids=["a new result", "a result of padded heads"])
def test_each_token_sees_the_rows_of_the_cache_that_are_listed_for_it(
    sparse: ModuleType, device: torch.device, padded: int, given: bool
) -> None:
    tokens, topk, rows = 5, 64, PAGES * PAGE
    layer = sparse.SparseImplementation.__new__(sparse.SparseImplementation)
    layer.softmax_scale, layer.kv_lora_rank = SCALE, LATENT
    cache = torch.randn(rows, LATENT + ROPE, device=device).bfloat16()
    # What lies in heads that are padding is whatever was there.
    q = torch.full((tokens, padded, LATENT + ROPE), torch.nan, device=device).bfloat16()
    q[:, :HEADS] = torch.randn(tokens, HEADS, LATENT + ROPE, device=device).bfloat16()
    lists = torch.stack([torch.randperm(rows)[:topk] for _ in range(tokens)]).int().to(device)
    lists[1, 7:] = -1
    lengths = torch.tensor([topk, 7, topk, 3, 1]).int().to(device)
    memory = torch.full((tokens, 64, LATENT), 7.0, device=device).bfloat16() if given else None
    out, lse = layer._bf16_flash_mla_kernel(q, cache, lists, lengths, HEADS, out=memory)
    keys = [cache[one[:n].long()].double().cpu() for one, n in zip(lists, lengths.tolist(), strict=True)]
    scores = [x[:HEADS].double().cpu() @ seen.T * SCALE for x, seen in zip(q, keys, strict=True)]
    exact = [torch.softmax(score, -1) @ seen[:, :LATENT] for score, seen in zip(scores, keys, strict=True)]
    assert_near(out, torch.stack(exact))
    assert torch.allclose(lse.double().cpu(), torch.stack([x.logsumexp(-1) for x in scores]), atol=0.02)
    if memory is not None:
        assert torch.equal(memory[:, :HEADS], out)
        assert (memory[:, HEADS:] == 7).all()
