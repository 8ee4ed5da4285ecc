"""What several of these tests need: batches in guarded memory, the oracle and a plain version.

Tests are imported one by one (``--import-mode=importlib``), so that what they share reaches them as a fixture.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.paging import paged_cache
from kernel_reference.testing.guards import Canaried, assert_bitwise_equal, canaried, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.plain import Wanted, assert_rounded, moved, plain_rows

Tensor = torch.Tensor

# Numbers of this many rows and heads or fewer do not tell a version's errors: one weight may be exact by chance.
_TOO_FEW = 64
# Rows that the oracle computes of a sequence, beside its first and its last two.
_SAMPLE = 12
# Entries of a block table behind its last column: not to be read.
_NO_PAGE = 2**31 - 1


class Guarded:
    """Inputs between guards of NaN, outputs full of it, and what the rows under test must be.

    Made by the classes below, which give, of packed rows: ``queries`` [T, H, D], ``keys`` [Tk, Hkv, D] and ``values``
    [Tk, Hkv, Dv] in float64, ``begins`` and ``begins_k``, and how rows lie in outputs.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, device: torch.device, dtype: torch.dtype, causal: bool, scale: float) -> None:
        self.device, self.dtype, self.causal, self.scale = device, dtype, causal, scale
        self.begins: list[int] = []
        self.begins_k: list[int] = []
        # Sequences that are to give 0 and -inf, because their lengths cannot be; and those that nobody looks at.
        self.dead: set[int] = set()
        self.unseen: set[int] = set()
        self._inputs: list[tuple[str, Canaried, Tensor]] = []
        self._wanted: tuple[Tensor, Wanted, Wanted] | None = None

    def guard(self, name: str, tensor: Tensor, **how: Any) -> Tensor:
        """The same bits inside a guarded buffer; :meth:`check` sees that they stay."""
        place = canaried(tensor.shape, tensor.dtype, tensor.device, **how)
        place.tensor.copy_(tensor)
        self._inputs.append((name, place, tensor.clone()))
        return place.tensor

    def forget_inputs(self) -> None:
        """Take what the inputs hold now for what they must hold after the call."""
        self._inputs = [(name, place, place.tensor.clone()) for name, place, _ in self._inputs]
        self._wanted = None

    def integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def make_outputs(self, shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> None:
        self.out = canaried(shape, self.dtype, self.device, row_padding=8)
        self.lse = canaried(lse_shape, torch.float32, self.device, row_padding=5)

    def packed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results as [T, H, Dv] and [H, T]."""
        return out, lse

    def sample(self, most: int | None = None) -> Tensor:
        """Packed rows to look at: all, or where these are many the first, the last two and others of each sequence."""
        some = _SAMPLE if most is None else most
        chosen = [torch.zeros(0, dtype=torch.int64)]
        for i in range(len(self.begins) - 1):
            own = torch.arange(self.begins[i], self.begins[i + 1])
            if i in self.dead or i in self.unseen:
                continue
            if len(own) > some + 3:
                between = 1 + torch.randperm(len(own) - 3)[:some].sort().values
                own = own[torch.cat([torch.tensor([0]), between, torch.tensor([len(own) - 2, len(own) - 1])])]
            chosen.append(own)
        return torch.cat(chosen).to(self.device)

    def wanted(self, rows: Tensor) -> tuple[Wanted, Wanted]:
        """out [R, H, Dv] and lse [H, R] of these packed rows."""
        exact = attention(
            self.queries.double(), self.keys, self.values, cu_seqlens_q=self.integers(self.begins),
            cu_seqlens_k=self.integers(self.begins_k), softmax_scale=self.scale, causal=self.causal, rows=rows,
        )  # fmt: skip
        out, lse = self._plain(rows)
        return Wanted(exact.out, out), Wanted(exact.lse, lse)

    def _plain(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, size_v = self.queries.shape[1], self.values.shape[2]
        group = num_heads // self.keys.shape[1]
        out = torch.zeros(len(rows), num_heads, size_v, device=self.device)
        lse = torch.full((num_heads, len(rows)), -torch.inf, device=self.device)
        for i in range(len(self.begins) - 1):
            places = ((rows >= self.begins[i]) & (rows < self.begins[i + 1])).nonzero()[:, 0]
            own = slice(self.begins_k[i], self.begins_k[i + 1])
            k, v = (x[own].to(self.dtype) for x in (self.keys, self.values))
            if k.shape[1] > 1:
                k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            position = (rows[places] - self.begins[i + 1] + len(k))[:, None]
            seen = torch.ones(len(places), len(k), dtype=torch.bool, device=self.device)
            if self.causal:
                seen &= torch.arange(len(k), device=self.device) <= position
            # On a CPU the kernels' text sums in float32.
            out[places], lse[:, places] = plain_rows(
                self.queries[rows[places]], k, v, seen, self.scale, on_tensor_cores=self.device.type != "cpu"
            )
        return out, lse

    def check(self, *, most: int | None = None) -> None:
        """Outputs are the oracle's, rows of no sequence 0 and -inf, and nothing else has changed."""
        self.check_out(self.out.tensor, self.lse.tensor, most=most)
        self.check_guards()

    def check_guards(self) -> None:
        """Nothing beside the outputs has been written, and every row of them has been."""
        # NaN that a sequence of NaN gives may be the very bits that were there.
        self.out.check(written=not self.unseen)
        self.lse.check(written=not self.unseen)
        self.check_inputs()

    def check_inputs(self) -> None:
        for name, place, original in self._inputs:
            place.check(written=False)
            assert_bitwise_equal(place.tensor, original, what=f"{name} after the call")

    def check_out(self, out: Tensor, lse: Tensor | None = None, *, most: int | None = None) -> None:
        """The oracle's in rows of sequences, 0 and -inf in all others."""
        assert out.dtype == self.dtype
        assert out.shape == self.out.tensor.shape
        if lse is not None:
            assert lse.dtype == torch.float32
            assert lse.shape == self.lse.tensor.shape
        got, got_lse = self.packed(out, self.lse.tensor if lse is None else lse)
        empty = torch.ones(len(got), dtype=torch.bool, device=self.device)
        for i in range(len(self.begins) - 1):
            if i not in self.dead:
                empty[self.begins[i] : self.begins[i + 1]] = False
        assert not bool((got[empty] != 0).any()), "rows of no sequence are not zero"
        if self._wanted is None or most is not None:
            rows = self.sample(most)
            self._wanted = (rows, *self.wanted(rows))
        rows, (want, beside), lse_wanted = self._wanted
        assert_rounded(got[rows], Wanted(want, beside.to(self.dtype)))
        assert not bool((got[rows] != 0)[~(want != 0).any(-1)].any()), "rows that see nothing are not zero"
        if lse is not None:
            assert bool((got_lse[:, empty] == -torch.inf).all()), "lse of rows of no sequence is not -inf"
            again = None
            if self.scale == 0:
                # Kernels take a scale above 0, in its place 1e-30: what a row of one key has for 0 is times its score.
                got_lse = got_lse.masked_fill(got_lse.abs() < 1e-26, 0)
            if lse_wanted.exact.numel() <= _TOO_FEW:
                lse_wanted = moved(lse_wanted, logarithm=True)
                # The score of a single key, as tensor cores sum it, is off by luck.
                again = partial(self._lse_of_others, rows)
            assert_close_to_oracle(got_lse[:, rows], *lse_wanted, what="lse", again=again)

    def _lse_of_others(self, rows: Tensor) -> Wanted:
        """That of queries each of whose numbers is a few hundredths of itself off."""
        other = copy(self)
        other.queries = (self.queries * (1 + 0.03 * torch.randn_like(self.queries))).to(self.dtype)
        return moved(other.wanted(rows)[1], logarithm=True)


class Decode(Guarded):
    """``seqlen_q`` query tokens of sequences of ``lengths`` tokens in a paged latent cache.

    Whatever a call has no business with is NaN: pages of no sequence, the unused tails of pages, what lies round the
    inputs, and the outputs before they are written; block tables go on past each sequence with pages of NaN.

    of_nan: sequences whose whole cache is NaN; their own rows are not looked at. page_gap: elements between pages.
    extra_columns: columns of the block table behind the longest sequence.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[int], *, seqlen_q: int = 1, heads: int = 16, dim_nope: int = 512,
        dim_rope: int = 64, page: int = 64, dtype: torch.dtype = torch.bfloat16, causal: bool = True,
        softmax_scale: float | None = None, of_nan: Collection[int] = (), page_gap: int = 0, extra_columns: int = 1,
    ) -> None:  # fmt: skip
        width = dim_nope + dim_rope
        super().__init__(device, dtype, causal, width**-0.5 if softmax_scale is None else softmax_scale)
        self.lengths, self.page, self.dim_nope, self.softmax_scale = list(lengths), page, dim_nope, softmax_scale
        self.seqlen_q, self.heads, self.dim_rope = seqlen_q, heads, dim_rope
        self.unseen = set(of_nan)
        batch = len(self.lengths)
        self.begins = [i * seqlen_q for i in range(batch + 1)]
        self.begins_k = list(accumulate(self.lengths, initial=0))
        self.q = self.guard("q", self.normal(batch, seqlen_q, heads, width), row_padding=8)
        latents = self.normal(self.begins_k[-1], 1, width)
        for i in of_nan:
            poison_(latents[self.begins_k[i] : self.begins_k[i + 1]])
        self.queries = self.q.flatten(0, 1)
        self.keys = latents.double()
        self.values = self.keys[..., :dim_nope]
        self._hold_pages(latents, page_gap, extra_columns)
        self.seqlens_k = self.guard("seqlens_k", self.integers(self.lengths))
        self.make_outputs((batch, seqlen_q, heads, dim_nope), (batch, heads, seqlen_q))

    def _hold_pages(self, latents: Tensor, page_gap: int, extra_columns: int) -> None:
        # Without sequences, the pages of one that is empty.
        cu = self.integers(self.begins_k if self.lengths else [0, 0])
        paged = paged_cache(latents, None, cu, self.page, seed=int(torch.randint(2**31, ())))
        width = latents.shape[2]
        self.kv = self.guard("kv", paged.k_cache, strides=(self.page * width + page_gap, width, width, 1))
        # A page of NaN, wherever one may look past a sequence; columns past those, pages that are none.
        table = paged.block_table[: len(self.lengths)]
        used = set(table.flatten().tolist())
        spare = [page for page in range(self.kv.shape[0]) if page not in used]
        table = torch.cat([table, table.new_full((table.shape[0], extra_columns), spare[-1] if spare else 0)], dim=1)
        wide = table.new_full((table.shape[0], table.shape[1] + 3), _NO_PAGE)
        wide[:, : table.shape[1]] = table
        self.block_table = self.guard("block_table", wide)[:, : table.shape[1]]

    def packed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    @property
    def given(self) -> tuple[Any, ...]:
        """The positional arguments of the public function."""
        tensors = (self.q, self.kv, self.seqlens_k, self.block_table)
        return (*tensors, self.dim_nope, self.softmax_scale, self.causal)

    def op_arguments(self, plan: Any = None) -> tuple[Any, ...]:
        """Those of the op."""
        parts, ints = ((None, None), None) if plan is None else (plan[1:], plan.tiles.as_ints())
        tensors = (self.q, self.kv, self.seqlens_k, self.block_table, *parts, self.out.tensor, self.lse.tensor)
        return (*tensors, self.dim_nope, self.scale, self.causal, ints)

    def run(self, **options: Any) -> Any:
        """The public function, into the guarded output; lse is copied into its guarded place."""
        from tilelang_mla import flash_mla_with_kvcache

        got = flash_mla_with_kvcache(*self.given, **{"out": self.out.tensor, "return_lse": True, **options})
        if options.get("return_lse", True):
            self.lse.tensor.copy_(got.lse)
        return got

    def plan(self, **options: Any) -> Any:
        """A plan made from these lengths, for a device of 132 SMs unless it is said."""
        return self.plan_of(self.seqlens_k, **options)

    def plan_of(self, seqlens_k: Tensor, **options: Any) -> Any:
        """The same from other lengths."""
        from tilelang_mla import plan_decode

        options = {"dim_nope": self.dim_nope, "dim_rope": self.dim_rope, "cores": 132, **options}
        return plan_decode(seqlens_k, self.heads, self.seqlen_q, **options)

    def alone(self, token: int, seqlens_k: Tensor) -> Decode:
        """One of the query tokens over the same cache, of which it sees so many keys; outputs are not guarded."""
        other = copy(self)
        other.q, other.seqlen_q, other.seqlens_k, other.causal = self.q[:, token : token + 1], 1, seqlens_k, False
        batch, _, heads, _ = self.q.shape
        other._inputs = []
        other.make_outputs((batch, 1, heads, self.dim_nope), (batch, heads, 1))
        return other


class Prefill(Guarded):
    """Sequences of ``lengths`` (queries, keys), one behind another; NaN round them and in the outputs.

    heads: (H, Hkv). sizes: (dqk, dv). rows_after: rows of NaN behind the last sequence. of_nan: sequences of NaN, whose
    own rows are not looked at. fused: v is a part of a wider tensor, as where one projection makes keys and values.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[tuple[int, int]], *, heads: tuple[int, int] = (4, 4),
        sizes: tuple[int, int] = (192, 128), dtype: torch.dtype = torch.bfloat16, causal: bool = True,
        softmax_scale: float | None = None, rows_after: int = 0, of_nan: Collection[int] = (), fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(device, dtype, causal, sizes[0] ** -0.5 if softmax_scale is None else softmax_scale)
        self.lengths, self.softmax_scale, self.unseen = list(lengths), softmax_scale, set(of_nan)
        self.begins = list(accumulate((q for q, _ in self.lengths), initial=0))
        self.begins_k = list(accumulate((k for _, k in self.lengths), initial=0))
        held = {}
        for name, begins, num_heads, size in (
            ("q", self.begins, heads[0], sizes[0]), ("k", self.begins_k, heads[1], sizes[0]),
            ("v", self.begins_k, heads[1], sizes[1]),
        ):  # fmt: skip
            rows = self.normal(begins[-1] + rows_after, num_heads, size)
            poison_(rows[begins[-1] :])
            for i in of_nan:
                poison_(rows[begins[i] : begins[i + 1]])
            held[name] = rows
        self.q = self.guard("q", held["q"], row_padding=8)
        self.k = self.guard("k", held["k"], row_padding=16)
        if fused:
            beside = poison_(torch.empty_like(held["v"]))
            self.v = self.guard("kv", torch.cat([beside, held["v"]], dim=2))[..., sizes[1] :]
        else:
            self.v = self.guard("v", held["v"], row_padding=8)
        self.queries = self.q[: self.begins[-1]]
        self.keys, self.values = (held[name][: self.begins_k[-1]].double() for name in ("k", "v"))
        self.cu_seqlens_q = self.guard("cu_seqlens_q", self.integers(self.begins))
        self.cu_seqlens_k = self.guard("cu_seqlens_k", self.integers(self.begins_k))
        self.most = [max((pair[side] for pair in self.lengths), default=0) for side in (0, 1)]
        self.make_outputs((len(self.q), heads[0], sizes[1]), (heads[0], len(self.q)))

    @property
    def given(self) -> tuple[Any, ...]:
        """The positional arguments of the public function."""
        tensors = (self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k)
        return (*tensors, *self.most, self.softmax_scale, self.causal)

    def op_arguments(self, plan: Any = None) -> tuple[Any, ...]:
        """Those of the op."""
        tensors = (self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.out.tensor, self.lse.tensor)
        return (*tensors, *self.most, self.scale, self.causal, None if plan is None else plan.as_ints())

    def run(self, **options: Any) -> Any:
        """The public function, into the guarded output; lse is copied into its guarded place."""
        from tilelang_mla import flash_mla_varlen_func

        got = flash_mla_varlen_func(*self.given, **{"out": self.out.tensor, "return_lse": True, **options})
        if options.get("return_lse", True):
            self.lse.tensor.copy_(got.lse)
        return got


class Tensors:
    """Makes and compares tensors on the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    Wanted = Wanted
    moved = staticmethod(moved)
    assert_rounded = staticmethod(assert_rounded)

    def integers(self, *values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def decode(self, lengths: Sequence[int], **options: Any) -> Decode:
        return Decode(self.device, lengths, **options)

    def prefill(self, lengths: Sequence[tuple[int, int]], **options: Any) -> Prefill:
        return Prefill(self.device, lengths, **options)


@pytest.fixture(scope="session", autouse=True)
def on_one_thread(one_thread: None) -> None:
    """On the CPU most products here are so small that a second thread costs more than it does."""


@pytest.fixture
def launch() -> Any:
    """launch.py, which imports TileLang: without it a test is skipped, in CI it fails."""
    try:
        from tilelang_mla import launch
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    return launch


@pytest.fixture(scope="session")
def tensors(device: torch.device) -> Tensors:
    return Tensors(device)
