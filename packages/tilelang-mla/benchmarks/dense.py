"""DeepSeek-V3's dense decoding over a paged latent cache and its prefill, beside others.

FlashMLA and FlashAttention-3 are those that vLLM ships; their schedules are made outside of what is timed, as ours is,
since an engine makes one for all layers of a step. FlashAttention-3 takes the rope and the latent of q apart, copied
outside too. vLLM's Triton kernel knows neither several query tokens nor causal order: it stands in the cases of one
token. Results are compared to float64 on sampled sequences. Ours must keep the house's bound there; a peer's error is
recorded beside its time, and must only be no garbage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.models import DEEPSEEK_V3, LatentAttention
from kernel_reference.paging import cumulative
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import DecodePlan, flash_mla_varlen_func, flash_mla_with_kvcache, plan_decode

OURS, OURS_UNPLANNED = "tilelang-mla", "tilelang-mla, no plan"
FLASH_MLA, FA3, VLLM = "FlashMLA", "FA3", "vLLM Triton"
DTYPE = torch.bfloat16
PAGE = 64
# Whatever a peer does, no element is further off than this, of a row's largest.
ERROR_AT_MOST = 0.05
# Sequences, and of a long prompt rows, that are looked at.
SAMPLE = 4
SAMPLE_ROWS = 64
# Of a call without a plan, beside one with a plan; and what it takes the host, in us.
UNPLANNED_AT_MOST, HOST_AT_MOST = 1.1, 25.0
# Parts of vLLM's Triton kernel: what it is launched with in vLLM.
VLLM_SPLITS = 4


@dataclass(frozen=True)
class Shape:
    """Sequences of these lengths, as many query tokens each."""

    model: LatentAttention
    lengths: tuple[int, ...]
    tokens: int = 1
    name: str = ""
    dtype: torch.dtype = DTYPE

    @property
    def words(self) -> str:
        tokens = f", {self.tokens} query tokens" if self.tokens > 1 else ""
        return f"{self.name or f'B{len(self.lengths)} n{self.lengths[0]}'} h{self.model.num_heads}{tokens}"

    @property
    def entry(self) -> dict[str, int | str]:
        """For the record."""
        sizes = {"sequences": len(self.lengths), "keys": sum(self.lengths), "tokens": self.tokens}
        return {"model": self.model.name, "page": PAGE, **sizes}

    @property
    def scale(self) -> float:
        return float(self.model.head_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Of a query token and a key that it sees."""
        return sum(max(0, n - self.tokens + j + 1) for n in self.lengths for j in range(self.tokens))

    @property
    def flops(self) -> int:
        """Of decoding: two products over each pair."""
        return 2 * self.pairs * self.model.num_heads * (2 * self.model.latent + self.model.rope)

    @property
    def bytes_moved(self) -> int:
        """Of decoding: the cache, q and the output."""
        m = self.model
        rows = len(self.lengths) * self.tokens * m.num_heads
        elements = sum(self.lengths) * (m.latent + m.rope) + rows * (2 * m.latent + m.rope)
        return elements * self.dtype.itemsize


class Ours(NamedTuple):
    """An output that must keep the house's bound."""

    out: torch.Tensor


class Theirs(NamedTuple):
    """One of a peer, which is timed if it is no garbage."""

    out: torch.Tensor


class Reference(NamedTuple):
    """Sampled sequences or rows; in float64, and as plain PyTorch gives them."""

    which: torch.Tensor
    exact: torch.Tensor
    plain: torch.Tensor


@dataclass(eq=False)
class Batch:
    """A batch that decodes. q_rope, q_nope: q as FA3 takes it, [B x Sq, H, ...]. plan: ours; held: the peers'."""

    shape: Shape
    q: torch.Tensor
    kv: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_rope: torch.Tensor
    q_nope: torch.Tensor
    plan: DecodePlan
    page: int = PAGE
    held: dict[str, Any] = field(default_factory=dict)


def make_batch(device: torch.device, shape: Shape, page: int = PAGE) -> Batch:
    """Random pages in random order, all of them used."""
    m = shape.model
    counts = [-(-n // page) for n in shape.lengths]
    pages = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    # Past a sequence's last page stands page 0, as in an engine's tables.
    block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, own in zip(block_table, pages.split(counts), strict=True):
        row[: len(own)] = own
    q = torch.randn(len(counts), shape.tokens, m.num_heads, m.latent + m.rope, device=device, dtype=shape.dtype)
    flat = q.flatten(0, 1)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    return Batch(
        shape=shape,
        q=q,
        kv=torch.randn(sum(counts), page, 1, m.latent + m.rope, device=device, dtype=shape.dtype),
        seqlens_k=lengths,
        block_table=block_table,
        cu_seqlens_q=torch.arange(len(counts) + 1, device=device, dtype=torch.int32) * shape.tokens,
        q_rope=flat[..., m.latent :].contiguous(),
        q_nope=flat[..., : m.latent].contiguous(),
        plan=plan_decode(lengths, m.num_heads, shape.tokens, max_seqlen_k=max(shape.lengths)),
        page=page,
    )


def ours(i: Batch, *, planned: bool = True) -> Ours:
    given = (i.q, i.kv, i.seqlens_k, i.block_table, i.shape.model.latent, i.shape.scale, True)
    return Ours(flash_mla_with_kvcache(*given, plan=i.plan if planned else None))


def flash_mla() -> Callable[[Batch], Theirs]:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache as run
    from vllm.third_party.flashmla.flash_mla_interface import get_mla_metadata

    def call(i: Batch) -> Theirs:
        # It makes its schedule in the first call with such metadata.
        metadata = i.held.setdefault("flash_mla", get_mla_metadata()[0])
        given = (i.q, i.kv, i.block_table, i.seqlens_k, i.shape.model.latent, metadata, None, i.shape.scale, True)
        return Theirs(run(*given)[0])

    return call


def fa3(num_splits: int = 0) -> Callable[[Batch], Theirs]:
    """num_splits: into how many pieces keys are cut; 0: as FA3 sees fit."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    def schedule(i: Batch) -> torch.Tensor:
        m = i.shape.model
        made: torch.Tensor = get_scheduler_metadata(
            len(i.shape.lengths),
            i.shape.tokens,
            max(i.shape.lengths),
            m.num_heads,
            1,
            m.rope,
            i.seqlens_k,
            i.shape.dtype,
            headdim_v=m.latent,
            cu_seqlens_q=i.cu_seqlens_q,
            page_size=i.page,
            causal=True,
            num_splits=num_splits,
        )
        return made

    def call(i: Batch) -> Theirs:
        latent = i.shape.model.latent
        if "fa3" not in i.held:
            i.held["fa3"] = schedule(i)
        out = flash_attn_varlen_func(
            i.q_rope,
            i.kv[..., latent:],
            i.kv[..., :latent],
            i.shape.tokens,
            i.cu_seqlens_q,
            max(i.shape.lengths),
            seqused_k=i.seqlens_k,
            q_v=i.q_nope,
            softmax_scale=i.shape.scale,
            causal=True,
            block_table=i.block_table,
            scheduler_metadata=i.held["fa3"],
            num_splits=num_splits,
            fa_version=3,
        )
        return Theirs(out.view(i.q.shape[:3] + (latent,)))

    return call


def vllm_triton() -> Callable[[Batch], Theirs]:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    def call(i: Batch) -> Theirs:
        m, batch = i.shape.model, len(i.shape.lengths)
        out = i.q.new_empty(batch, m.num_heads, m.latent)
        lse = i.q.new_empty(batch, m.num_heads)
        between = torch.empty(batch, m.num_heads, VLLM_SPLITS, m.latent + 1, device=i.q.device)
        decode_attention_fwd(
            i.q[:, 0],
            i.kv,
            i.kv[..., : m.latent],
            out,
            lse,
            i.block_table,
            i.seqlens_k,
            between,
            VLLM_SPLITS,
            i.shape.scale,
            i.page,
            is_mla=True,
        )
        return Theirs(out[:, None])

    return call


_references: WeakKeyDictionary[Any, Reference] = WeakKeyDictionary()


def reference_of(i: Batch) -> Reference:
    if i not in _references:
        lengths = torch.tensor(i.shape.lengths)
        # The shortest and the longest among them.
        which = torch.unique(torch.cat([lengths.argsort()[[0, -1]], torch.randperm(len(lengths))[:SAMPLE]]))
        exact, plain = [], []
        for b in which.tolist():
            n, latent = i.shape.lengths[b], i.shape.model.latent
            keys = i.kv[i.block_table[b, : -(-n // i.page)].long()].flatten(0, 1)[:n]
            given = {"softmax_scale": i.shape.scale, "causal": True}
            exact.append(attention(i.q[b].double(), keys.double(), keys[..., :latent].double(), **given).out)
            plain.append(plain_attention(i.q[b], keys, keys[..., :latent], i.shape.scale))
        _references[i] = Reference(which, torch.stack(exact), torch.stack(plain))
    return _references[i]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last ``len(q)`` rows of a sequence as plain PyTorch: products of 16 bits summed in float32."""
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().expand(-1, q.shape[1], -1)) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = torch.einsum("hqk,khd->qhd", weights.to(q.dtype).float(), v.float().expand(-1, q.shape[1], -1))
    return (out / weights.sum(-1).mT[..., None]).to(q.dtype)


def check(outputs: Ours | Theirs, i: Any) -> float:
    which, exact, plain = (reference_of if isinstance(i, Batch) else reference_of_prompt)(i)
    got = outputs.out[which.to(outputs.out.device)]
    if isinstance(outputs, Ours):
        assert_close_to_oracle(got, exact, plain)
    error = float(((got.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
    if not error < ERROR_AT_MOST:
        raise AssertionError(f"off by {error:.3g} of a row's largest value")
    return error


def decode_case(device: torch.device, shape: Shape, *, targets: dict[str, float]) -> Case:
    """``targets``: the least speed beside each of these peers."""
    peers: dict[str, Callable[[], Callable[[Batch], Theirs]]] = {FLASH_MLA: flash_mla, FA3: fa3}
    if shape.tokens == 1:
        peers[VLLM] = vllm_triton
    requirements = [Requirement(OURS, peer, speed_at_least=speed) for peer, speed in targets.items()]
    requirements += [
        Requirement(OURS_UNPLANNED, OURS, time_at_most=UNPLANNED_AT_MOST),
        Requirement(OURS_UNPLANNED, OURS, us_at_most=HOST_AT_MOST, quantity="host"),
    ]
    return Case(
        name=f"decode {shape.words}",
        shape=shape.entry,
        make_inputs=partial(make_batch, device, shape),
        ours={OURS: ours, OURS_UNPLANNED: partial(ours, planned=False)},
        peers=peers,
        check=check,
        # The bound is the check's own, which raises; of all cases here.
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved,
        flops=shape.flops,
        copy=False,
        baseline=FLASH_MLA,
        requirements=requirements,
    )


# Prefill


@dataclass(eq=False)
class Prompt:
    """Prompts of the same length, with separate heads."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def most(self) -> int:
        return max(self.shape.lengths)


def make_prompt(device: torch.device, shape: Shape) -> Prompt:
    m, rows = shape.model, sum(shape.lengths)
    sizes = (m.head_qk, m.head_qk, m.head_v)
    q, k, v = (torch.randn(rows, m.num_heads, size, device=device, dtype=DTYPE) for size in sizes)
    return Prompt(shape, q, k, v, cumulative(torch.tensor(shape.lengths)).to(device))


def ours_prompt(i: Prompt) -> Ours:
    bounds = (i.cu_seqlens, i.cu_seqlens, i.most, i.most)
    return Ours(flash_mla_varlen_func(i.q, i.k, i.v, *bounds, i.shape.scale, True))


def fa3_prompt() -> Callable[[Prompt], Theirs]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call(i: Prompt) -> Theirs:
        bounds = (i.most, i.cu_seqlens, i.most, i.cu_seqlens)
        return Theirs(
            flash_attn_varlen_func(i.q, i.k, i.v, *bounds, softmax_scale=i.shape.scale, causal=True, fa_version=3)
        )

    return call


def reference_of_prompt(i: Prompt) -> Reference:
    """Rows of the last prompt, its first and its last among them."""
    if i not in _references:
        n, rows = i.shape.lengths[-1], sum(i.shape.lengths)
        own = torch.unique(torch.cat([torch.tensor([0, n - 1]), torch.randperm(n)[:SAMPLE_ROWS]])).to(i.q.device)
        which = own + rows - n
        exact = attention(
            i.q.double(), i.k, i.v, cu_seqlens_q=i.cu_seqlens, cu_seqlens_k=i.cu_seqlens,
            softmax_scale=i.shape.scale, causal=True, rows=which,
        ).out  # fmt: skip
        plain = [
            plain_attention(i.q[w : w + 1], i.k[rows - n : w + 1], i.v[rows - n : w + 1], i.shape.scale)
            for w in which.tolist()
        ]
        _references[i] = Reference(which, exact, torch.cat(plain))
    return _references[i]


def prefill_case(device: torch.device, shape: Shape, speed: float = 0.9) -> Case:
    m, pairs = shape.model, sum(n * (n + 1) // 2 for n in shape.lengths)
    elements = sum(shape.lengths) * m.num_heads * 2 * (m.head_qk + m.head_v)
    return Case(
        name=f"prefill {shape.words}",
        shape={**shape.entry, "tokens": sum(shape.lengths)},
        make_inputs=partial(make_prompt, device, shape),
        ours={OURS: ours_prompt},
        peers={FA3: fa3_prompt},
        check=check,
        tolerance=math.inf,
        bytes_moved=elements * DTYPE.itemsize,
        flops=2 * pairs * m.num_heads * (m.head_qk + m.head_v),
        copy=False,
        baseline=FA3,
        requirements=(Requirement(OURS, FA3, speed_at_least=speed),),
    )


# What is measured

BOUND_BY_MEMORY, BOUND_BY_PRODUCTS, BESIDE_FLASH_MLA = (
    {FLASH_MLA: 1.0, FA3: 1.0},
    {FLASH_MLA: 0.9, FA3: 0.9},
    {FLASH_MLA: 1.0},
)
# (heads, sequences, keys of each, query tokens), and the target speeds.
DECODING = (
    (128, 1, 8192, 1, BOUND_BY_PRODUCTS),
    (16, 1, 65536, 1, BOUND_BY_MEMORY),
    (16, 32, 8192, 1, BOUND_BY_MEMORY),
    (16, 128, 8192, 1, BOUND_BY_MEMORY),
    (64, 64, 16384, 1, BOUND_BY_MEMORY),
    (128, 128, 4096, 1, BOUND_BY_PRODUCTS),
    (128, 128, 4096, 2, BOUND_BY_PRODUCTS),
    (16, 16, 8192, 4, BESIDE_FLASH_MLA),
)
RAGGED = ((16, 16), (16, 64), (16, 128), (128, 128))
# Heads of a batch of 64 of which one has 100000 keys.
ONE_LONG = (8, 16, 64, 128)
PROMPTS = ((128, 1, 8192), (128, 8, 2048), (16, 1, 32768))


def share(heads: int) -> LatentAttention:
    """The heads of one rank."""
    return DEEPSEEK_V3.tensor_parallel(DEEPSEEK_V3.num_heads // heads)


def ragged(heads: int, sequences: int) -> Shape:
    """Lengths uniform in 1..8192, always the same."""
    generator = torch.Generator().manual_seed(sequences)
    lengths = torch.randint(1, 8193, (sequences,), generator=generator).tolist()
    return Shape(share(heads), tuple(lengths), name=f"B{sequences} n1..8192")


def one_long(heads: int) -> Shape:
    """Lengths to 1000, and one of 100000, as where a long document arrives among chats."""
    generator = torch.Generator().manual_seed(64)
    lengths = torch.randint(1, 1001, (63,), generator=generator).tolist()
    return Shape(share(heads), (100_000, *lengths), name="B64 one of 100k")


def dense_cases(device: torch.device) -> Iterator[Case]:
    for heads, sequences, keys, tokens, targets in DECODING:
        yield decode_case(device, Shape(share(heads), (keys,) * sequences, tokens), targets=targets)
    for heads, sequences in RAGGED:
        yield decode_case(device, ragged(heads, sequences), targets=BESIDE_FLASH_MLA)
    for heads in ONE_LONG:
        yield decode_case(device, one_long(heads), targets=BESIDE_FLASH_MLA)
    for heads, sequences, tokens in PROMPTS:
        yield prefill_case(device, Shape(share(heads), (tokens,) * sequences))
