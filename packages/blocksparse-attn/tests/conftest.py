"""Shared by these tests: batches of every kind in guarded memory, the oracle and a plain version.

Tests are imported one by one (``--import-mode=importlib``), so that what they share reaches them as a fixture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from kernel_reference import blocks, selection
from kernel_reference.attention import attention
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.paging import paged_cache
from kernel_reference.testing.guards import Canaried, assert_bitwise_equal, canaried, guarded, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.plain import Wanted, assert_rounded, moved, plain_rows

Tensor = torch.Tensor

# Rows and heads up to which numbers are too few to tell a version's errors.
_TOO_FEW = 64
# Rows that the oracle computes of a sequence, beside its first and its last two.
_SAMPLE = 12


def random_mask(heads: int, rows: int, columns: int) -> Tensor:
    """A block mask of random rows: empty, of a single block, full, and of any blocks."""
    shape = (heads, rows, columns)
    kind = torch.randint(6, (heads, rows, 1))
    single = torch.arange(columns) == torch.randint(max(1, columns), (heads, rows, 1))
    some = torch.rand(shape) < torch.rand(heads, rows, 1)
    return torch.where(kind == 0, False, torch.where(kind == 1, single, torch.where(kind == 2, True, some)))


def layout_of(mask: Tensor, q_block: int, k_block: int, device: torch.device) -> Any:
    """A layout with the reference's lists of a block mask, and wrong columns in the entries that must not be read."""
    from blocksparse_attn import BlockLayout

    crow, col = blocks.mask_to_csr(mask)
    # Valid columns where none may be read: past the lists of the shorter heads, and past all.
    col = torch.nn.functional.pad(col, (0, 3), value=-1)
    spare = torch.arange(col.shape[1]) >= crow[:, -1:]
    col = torch.where(spare, torch.randint(max(1, mask.shape[2]), col.shape), col).to(torch.int32)
    return BlockLayout(crow.to(device), col.to(device), q_block, k_block, mask.shape[2])


class Batch:
    """Sequences of new tokens after ``ctx`` older ones: ragged, paged or padded, under a block mask.

    ``lengths``: (ctx, new tokens) of each; keys and values are those of all ctx + new. Whatever a call has no business
    with is NaN: rows of padding, pages of no sequence, the unused tails of pages, what lies round the inputs, and the
    outputs before they are written; block tables go on past each sequence with pages of NaN. :meth:`check` then holds
    everything to the oracle, which is given the mask itself and no layout.

    kind: "ragged", "paged", "padded". side: of the padding: "left", "right", "both", or "none" where all lengths are
    one. mask: bool [heads or 1, rows, columns]; random rows without it, one_layout the same of all heads. blocks:
    (q_block, k_block). rows_after: rows of q behind the last sequence, and of ragged keys. window, softcap,
    softmax_scale: as :func:`blocksparse_attn.blocksparse_attention` takes them. sinks: a tensor, or whether to make
    some. fused: q, k and v are slices of one tensor (as many new tokens as keys). size: of the inputs' values.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[tuple[int, int]], *, kind: str = "ragged",
        heads: tuple[int, int] = (4, 2), head_dim: int = 32, head_dim_v: int | None = None,
        blocks: tuple[int, int] = (16, 16), mask: Tensor | None = None, one_layout: bool = False, page: int = 16,
        page_layout: str = "NHD", side: str = "left", dtype: torch.dtype = torch.bfloat16,
        window: tuple[int, int] | None = None, softcap: float = 0.0, softmax_scale: float | None = None,
        sinks: bool | Tensor = False, lse: bool = True, rows_after: int = 0, fused: bool = False,
        index_dtype: torch.dtype = torch.int32, extra_columns: int = 1, size: float = 1.0,
    ) -> None:  # fmt: skip
        self.device, self.lengths, self.kind, self.page = device, list(lengths), kind, page
        self.heads, self.head_dim, self.dtype, self.page_layout = heads, head_dim, dtype, page_layout
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.window, self.softcap, self.softmax_scale = window, softcap, softmax_scale
        self.blocks = blocks
        self.begins = list(accumulate([new for _, new in lengths], initial=0))
        self.totals = [ctx + new for ctx, new in lengths]
        self.begins_k = list(accumulate(self.totals, initial=0))
        self.max_seqlen_q = max([new for _, new in lengths], default=0)
        # Sequences of impossible lengths, which must give 0 and -inf.
        self.dead: set[int] = set()
        self._inputs: list[tuple[str, Canaried, Tensor]] = []
        longest = max(self.totals, default=0)
        if mask is None:
            rows, columns = -(-longest // blocks[0]), -(-longest // blocks[1])
            mask = random_mask(1 if one_layout else heads[0], rows, columns)
        self.mask = mask.to(device)
        self.layout = layout_of(mask, *blocks, device)
        self.max_seqlen_q = min(self.max_seqlen_q, self.layout.rows * blocks[0])

        q = self._values(self.begins[-1], heads[0], head_dim, size)
        keys, values = (self._values(self.begins_k[-1], heads[1], n, size) for n in (head_dim, self.head_dim_v))
        self.keys, self.values = keys.double(), values.double()
        self._indices: dict[str, Any] = {"dtype": index_dtype, "device": device}
        self.q: Tensor
        self.k: Tensor
        self.v: Tensor
        self.positional: dict[str, Tensor | None] = dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "q_starts", "q_ends", "k_starts", "k_ends")
        )
        if kind == "padded":
            self._hold_padded(q, keys, values, side)
        elif kind == "paged":
            self._hold_rows(q, None, None, rows_after, False)
            self._hold_pages(keys, values, extra_columns)
        else:
            self._hold_rows(q, keys, values, rows_after, fused)
        self.sinks = sinks if isinstance(sinks, Tensor) else None
        if sinks is True:
            self.sinks = self._guard("sinks", torch.tensor([1.5 * (h % 3) - 1 for h in range(heads[0])], device=device))
        shape = (*self.q.shape[:-1], self.head_dim_v)
        self.out: Canaried = canaried(shape, dtype, device, row_padding=8)
        lse_shape = (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])
        self.lse: Canaried | None = canaried(lse_shape, torch.float32, device, row_padding=5) if lse else None
        self._before = (self.out.tensor.clone(), None if self.lse is None else self.lse.tensor.clone())
        self._wanted: tuple[Tensor, Wanted, Wanted] | None = None

    def _values(self, tokens: int, heads: int, head_dim: int, size: float) -> Tensor:
        return (torch.randn(tokens, heads, head_dim, device=self.device) * size).to(self.dtype)

    def _guard(self, name: str, tensor: Tensor, **how: Any) -> Tensor:
        place = guarded(tensor, **how)
        self._inputs.append((name, place, tensor.clone()))
        return place.tensor

    def _integers(self, name: str, values: Sequence[int]) -> None:
        self.positional[name] = self._guard(name, torch.tensor(values, **self._indices))

    def _hold_rows(self, q: Tensor, keys: Tensor | None, values: Tensor | None, rows_after: int, fused: bool) -> None:
        parts = {"q": q} if keys is None or values is None else {"q": q, "k": keys, "v": values}
        whole = {}
        for name, x in parts.items():
            empty = torch.empty(x.shape[0] + rows_after, *x.shape[1:], dtype=x.dtype, device=x.device)
            whole[name] = poison_(empty)
            whole[name][: x.shape[0]] = x
        if fused:
            assert all(ctx == 0 for ctx, _ in self.lengths)
            widths = [x.shape[1] for x in whole.values()]
            held = self._guard("qkv", torch.cat([*whole.values()], dim=1)).split(widths, dim=1)
        else:
            held = tuple(self._guard(name, x, row_padding=8) for name, x in whole.items())
        for name, x in zip(whole, held, strict=True):
            setattr(self, name, x)
        self._integers("cu_seqlens_q", self.begins)
        if keys is not None:
            self._integers("cu_seqlens_k", self.begins_k)

    def _hold_pages(self, keys: Tensor, values: Tensor, extra_columns: int) -> None:
        # Without sequences, the pages of one that is empty.
        cu = torch.tensor([0, *accumulate(self.totals or [0])], dtype=torch.int64, device=self.device)
        seed = int(torch.randint(2**31, ()))
        paged = paged_cache(keys, values, cu, self.page, self.page_layout, seed=seed)
        self.k, self.v = self._guard("k", paged.k_cache), self._guard("v", paged.v_cache, offset=16)
        # A page of NaN past each sequence; in the columns after that, pages out of bounds.
        table = paged.block_table[: len(self.lengths)]
        spare = [page for page in range(self.k.shape[0]) if page not in set(table.flatten().tolist())]
        table = torch.cat([table, table.new_full((table.shape[0], extra_columns), spare[-1] if spare else 0)], dim=1)
        wide = torch.full((table.shape[0], table.shape[1] + 3), 2**31 - 1, **self._indices)
        wide[:, : table.shape[1]] = table
        self.positional["block_table"] = self._guard("block_table", wide)[:, : table.shape[1]]
        self._integers("seqlens_k", self.totals)

    def _hold_padded(self, q: Tensor, keys: Tensor, values: Tensor, side: str) -> None:
        new = [n for _, n in self.lengths]
        slack = 0 if side == "none" else 3
        held = {}
        for name, lengths, parts in (("q", new, {"q": q}), ("k", self.totals, {"k": keys, "v": values})):
            room = max(lengths, default=0) + slack
            free = [room - n for n in lengths]
            first = {"left": free, "right": [0] * len(free), "none": free}.get(side, [n // 2 for n in free])
            begins = list(accumulate(lengths, initial=0))
            for part, x in parts.items():
                padded = poison_(torch.empty(len(lengths), room, *x.shape[1:], dtype=x.dtype, device=x.device))
                for i, (start, n) in enumerate(zip(first, lengths, strict=True)):
                    padded[i, start : start + n] = x[begins[i] : begins[i + 1]]
                setattr(self, part, self._guard(part, padded, row_padding=8))
            held[name] = first
            if side in ("left", "both"):
                self._integers(f"{name}_starts", first)
            if side in ("right", "both"):
                self._integers(f"{name}_ends", [start + n for start, n in zip(first, lengths, strict=True)])
        self.first_q = held["q"]

    def forget_inputs(self) -> None:
        """Expect after the call what the inputs hold now."""
        self._inputs = [(name, place, place.tensor.clone()) for name, place, _ in self._inputs]
        self._wanted = None

    def spoil(self, sequence: int, positions: Sequence[int]) -> None:
        """NaN in the keys and values at these positions of a sequence of a ragged or paged batch."""
        for position in positions:
            if self.kind == "ragged":
                for x in (self.k, self.v):
                    poison_(x[self.begins_k[sequence] + position])
                continue
            assert self.kind == "paged"
            table = self.positional["block_table"]
            assert table is not None
            page, place = int(table[sequence, position // self.page]), position % self.page
            for cache in (self.k, self.v):
                at = {"NHD": (page, place), "HND": (page, slice(None), place)}.get(
                    self.page_layout, (page, slice(None), slice(None), place)
                )
                poison_(cache[at])
        self.forget_inputs()

    # What a call is given

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the public function, its result and plan left out."""
        most = {} if self.kind == "padded" else {"max_seqlen_q": self.max_seqlen_q}
        paged = {"page_layout": self.page_layout} if self.kind == "paged" else {}
        given = {name: tensor for name, tensor in self.positional.items() if tensor is not None}
        return {
            **given, **most, **paged, "softmax_scale": self.softmax_scale, "window": self.window,
            "softcap": self.softcap, "sinks": self.sinks,
        }  # fmt: skip

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The sixteen tensors of the op."""
        lse = None if self.lse is None else self.lse.tensor
        lists = (self.layout.crow, self.layout.col)
        return (self.q, self.k, self.v, *lists, *self.positional.values(), self.sinks, self.out.tensor, lse)

    def numbers(self, num_splits: int = 0) -> tuple[Any, ...]:
        """The numbers of the op, the plan left out."""
        left = -1 if self.window is None else self.window[0]
        padded = min(self.q.shape[1], self.layout.rows * self.blocks[0])
        most = padded if self.kind == "padded" else self.max_seqlen_q
        return (most, *self.blocks, self.page_layout, self.scale, left, 0, self.softcap, num_splits)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def prepare(
        self, plan: Any, tensors: Sequence[Any] | None = None, numbers: Sequence[Any] | None = None
    ) -> Callable[..., None]:
        """The prepared launch of this plan for the batch, or for other tensors and numbers of the op."""
        from blocksparse_attn import launch
        from blocksparse_attn.arguments import Options, Tensors, check_attend

        given = Tensors(*(self.tensors if tensors is None else tensors))
        problem = check_attend(given, Options(*(self.numbers() if numbers is None else numbers)))
        return launch.prepare_attend(problem, plan, given)

    def run(self, layout: Any = None, **options: Any) -> Any:
        """The public function, into the guarded output; lse is copied into its guarded place."""
        from blocksparse_attn import blocksparse_attention

        given = {**self.options, "out": self.out.tensor, "return_lse": self.lse is not None, **options}
        got = blocksparse_attention(self.q, self.k, self.v, self.layout if layout is None else layout, **given)
        if given["return_lse"]:
            if given["out"] is self.out.tensor:
                assert got.out is self.out.tensor
            if self.lse is not None:
                assert got.lse.dtype == torch.float32
                self.lse.tensor.copy_(got.lse)
        return got

    # What it must give

    def packed(self, out: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Results as [T, Hq, Dv] and [Hq, T], one sequence after another without padding."""
        if self.kind != "padded":
            tokens = self.begins[-1]
            return out[:tokens], None if lse is None else lse[:, :tokens]
        rows = [slice(start, start + new) for start, (_, new) in zip(self.first_q, self.lengths, strict=True)]
        none = out.new_zeros(0, *out.shape[2:])
        whole = torch.cat([none, *(out[i, own] for i, own in enumerate(rows))])
        if lse is None:
            return whole, None
        return whole, torch.cat([lse.new_zeros(lse.shape[1], 0), *(lse[i, :, own] for i, own in enumerate(rows))], 1)

    def _empty_rows(self) -> Tensor:
        """The rows of the result of no sequence, or of one of impossible lengths: [T] or [B, T]."""
        empty = torch.ones(self.q.shape[:-2], dtype=torch.bool, device=self.device)
        for i, (_, new) in enumerate(self.lengths):
            if i not in self.dead:
                if self.kind == "padded":
                    empty[i, self.first_q[i] : self.first_q[i] + new] = False
                else:
                    empty[self.begins[i] : self.begins[i + 1]] = False
        return empty

    def sample(self, most: int | None = None) -> Tensor:
        """Packed rows to look at: all, or where these are many the first, the last two and others of each sequence."""
        some = _SAMPLE if most is None else most
        chosen = [torch.zeros(0, dtype=torch.int64)]
        for i in range(len(self.lengths)):
            own = torch.arange(self.begins[i], self.begins[i + 1])
            if i in self.dead:
                continue
            if len(own) > some + 3:
                between = 1 + torch.randperm(len(own) - 3)[:some].sort().values
                own = own[torch.cat([torch.tensor([0]), between, torch.tensor([len(own) - 2, len(own) - 1])])]
            chosen.append(own)
        return torch.cat(chosen).to(self.device)

    @property
    def queries(self) -> Tensor:
        """q without padding: [T, Hq, D]."""
        return self.packed(self.q)[0]

    def wanted(self, rows: Tensor) -> tuple[Wanted, Wanted]:
        """out [R, H, Dv] and lse [H, R] of these packed rows, under the mask itself."""
        exact = attention(
            self.queries.double(), self.keys, self.values, cu_seqlens_q=self._cu(self.begins),
            cu_seqlens_k=self._cu(self.begins_k), softmax_scale=self.scale, causal=True, window=self.window,
            sinks=self.sinks, softcap=self.softcap, rows=rows, mask=blocks.mask_function(self.mask, *self.blocks),
        )  # fmt: skip
        out, lse = self._plain(rows)
        return Wanted(exact.out, out), Wanted(exact.lse, lse)

    def _units(self, rows: Tensor) -> float:
        """The error of a score in float32, in units in the last place of 1: as many as the score is large.

        It is that of a weight in float32, and of every lse: tensor cores cut off the sums of 16-bit inputs. Of 24 lse
        of float16 that had no other error, 3 of 3000 draws were above the bound of one unit, by up to 1.32, as one on
        an H200 was by 1.16; none was above 0.68 of the bound of so many.
        """
        if rows.numel() * self.heads[0] > _TOO_FEW or not rows.numel():
            return 1
        heads_first = self.queries[rows].double().transpose(0, 1)
        keys = self.keys.repeat_interleave(self.heads[0] // self.heads[1], dim=1).transpose(0, 1)
        return max(1.0, float((heads_first @ keys.mT).nan_to_num().abs().max()) * abs(self.scale))

    def _cu(self, bounds: list[int]) -> Tensor:
        return torch.tensor(bounds, dtype=torch.int64, device=self.device)

    def _plain(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, heads_kv = self.heads
        out = torch.zeros(len(rows), num_heads, self.head_dim_v, device=self.device)
        lse = torch.full((num_heads, len(rows)), -torch.inf, device=self.device)
        queries, visible = self.queries, blocks.mask_function(self.mask, *self.blocks)
        left = -1 if self.window is None else self.window[0]
        each = torch.arange(num_heads, device=self.device)[:, None, None]
        for i, total in enumerate(self.totals):
            places = ((rows >= self.begins[i]) & (rows < self.begins[i + 1])).nonzero()[:, 0]
            if not len(places):
                continue
            own = slice(self.begins_k[i], self.begins_k[i + 1])
            k, v = (
                x[own].to(self.dtype).repeat_interleave(num_heads // heads_kv, dim=1) for x in (self.keys, self.values)
            )
            position = (rows[places] - self.begins[i + 1] + total)[:, None]
            key = torch.arange(total, device=self.device)
            seen = visible(torch.zeros_like(each), each, position, key) & (key <= position)
            if left >= 0:
                seen = seen & (key >= position - left)
            result = plain_rows(queries[rows[places]], k, v, seen, self.scale, softcap=self.softcap, sinks=self.sinks)
            out[places], lse[:, places] = result
        return out, lse

    def check(self, *, most: int | None = None, again: bool = False) -> None:
        """Outputs are the oracle's, padding is zero, and nothing else has changed.

        most: rows to look at of each sequence, beside its first and its last two. again: use the oracle's last answer.
        """
        self.check_out(self.out.tensor, None if self.lse is None else self.lse.tensor, most=most, again=again)
        self.check_guards()

    def check_guards(self, *, all_written: bool = True) -> None:
        """Nothing beside the outputs has been written, and every row of them has been.

        all_written False: rows may be left, but what is written must be finite, -inf in lse aside.
        """
        for name, place, before in zip(("out", "lse"), (self.out, self.lse), self._before, strict=True):
            if place is None or before is None:
                continue
            place.check(written=all_written)
            if not all_written:
                changed = place.tensor.view(torch.uint8) != before.view(torch.uint8)
                changed = changed.unflatten(-1, (place.tensor.shape[-1], -1)).any(-1)
                values = place.tensor.double()[changed]
                assert bool((values.isfinite() | (values == -torch.inf)).all()), f"{name} holds what is no number"
        for name, place, original in self._inputs:
            place.check(written=False)
            assert_bitwise_equal(place.tensor, original, what=f"{name} after the call")

    def check_out(
        self, out: Tensor, lse: Tensor | None = None, *, most: int | None = None, again: bool = False
    ) -> None:
        """The oracle's in rows of sequences, 0 and -inf in all others."""
        assert out.dtype == self.dtype
        assert out.shape == (*self.q.shape[:-1], self.head_dim_v)
        empty = self._empty_rows()
        assert not bool((out[empty] != 0).any()), "rows of no sequence are not zero"
        if lse is not None:
            heads_last = lse.transpose(-1, -2)
            assert bool((heads_last[empty] == -torch.inf).all()), "lse of rows of no sequence is not -inf"
        if self._wanted is None or not again:
            rows = self.sample(most)
            self._wanted = (rows, *self.wanted(rows))
        rows, (want, beside), lse_wanted = self._wanted
        got, got_lse = self.packed(out, lse)
        units = self._units(rows)
        in_float32 = self.dtype == torch.float32
        assert_rounded(got[rows], Wanted(want, beside.to(self.dtype)), units=units if in_float32 else 1)
        assert not bool((got[rows] != 0)[~(want != 0).any(-1)].any()), "rows that see nothing are not zero"
        if got_lse is not None:
            if lse_wanted.exact.numel() <= _TOO_FEW:
                lse_wanted = moved(lse_wanted, logarithm=True, units=units)
            assert_close_to_oracle(got_lse[:, rows], *lse_wanted, what="lse")


class Tensors:
    """Makes and compares tensors on the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    Batch = Batch
    Wanted = Wanted
    moved = staticmethod(moved)
    assert_rounded = staticmethod(assert_rounded)
    guarded = staticmethod(guarded)
    random_mask = staticmethod(random_mask)
    layout_of = staticmethod(layout_of)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def integers(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def batch(self, lengths: Sequence[tuple[int, int]], **options: Any) -> Batch:
        return Batch(self.device, lengths, **options)


class SelectedBatch:
    """A batch of selected attention: pages in random order, of no sequence and unused slots of others NaN.

    ``lengths``: (older, new) tokens of each sequence. share: of the lists, what neighbouring tokens have alike."""

    def __init__(
        self, device: torch.device, lengths: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2),
        head_dim: int = 32, head_dim_v: int | None = None, block: int = 16, topk: int = 3, page: int = 16,
        dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None, scales: str = "", sinks: bool = False,
        causal: bool = True, page_layout: str = "NHD", share: float = 0.5, rows_after: int = 2,
    ) -> None:  # fmt: skip
        self.lengths, self.dtype, self.heads = lengths, dtype, heads
        self.totals = [older + new for older, new in lengths]
        begins = list(accumulate([new for _, new in lengths], initial=0))
        tokens = begins[-1] + rows_after
        q = torch.randn(tokens, heads[0], head_dim).to(dtype)
        poison_(q[begins[-1] :])
        size_v = head_dim if head_dim_v is None else head_dim_v
        keys, values = (torch.randn(sum(self.totals), heads[1], n).to(dtype) for n in (head_dim, size_v))
        k_scale, v_scale = {
            "": (None, None), "numbers": (0.5, 2.0), "one": (torch.tensor([0.5]), torch.tensor([2.0])),
            "heads": (torch.linspace(0.3, 0.7, heads[1]), torch.linspace(1.2, 2.0, heads[1])),
        }[scales]  # fmt: skip
        cu = torch.tensor([0, *accumulate(self.totals)])
        paged = paged_cache(
            keys, values, cu, page, page_layout, dtype=cache, k_scale=k_scale, v_scale=v_scale,
            seed=int(torch.randint(2**31, ())),
        )  # fmt: skip
        self.q = q.to(device)
        self.k, self.v = paged.k_cache.to(device), paged.v_cache.to(device)
        self.indices = self._lists(begins, tokens, block, topk, share).to(device)
        scale_k, scale_v = (x.to(device) if isinstance(x, Tensor) else x for x in (k_scale, v_scale))
        self.options: dict[str, Any] = {
            "block_size": block, "block_table": paged.block_table.to(device), "page_layout": page_layout,
            "cu_seqlens_q": torch.tensor(begins, dtype=torch.int32, device=device), "k_scale": scale_k,
            "seqlens_k": paged.seqlens_k.to(device), "causal": causal, "v_scale": scale_v,
            "sinks": torch.linspace(-1, 1, heads[0], device=device) if sinks else None,
        }  # fmt: skip
        self.out = canaried((tokens, heads[0], size_v), dtype, device, row_padding=8)
        self.own = torch.arange(tokens, device=device) < begins[-1]

    def _lists(self, begins: list[int], tokens: int, block: int, topk: int, share: float) -> Tensor:
        """Blocks of the sequence, its last ones more often than not, in any order, with -1 between them."""
        indices = torch.full((tokens, self.heads[1], topk), -1, dtype=torch.int32)
        for (_, new), begin, total in zip(self.lengths, begins, self.totals, strict=False):
            blocks = -(-total // block)
            for i, head in product(range(new), range(self.heads[1])):
                fresh = torch.randperm(blocks)[:topk]
                some = torch.cat([fresh, fresh.new_full((topk - len(fresh),), -1)])
                if i and float(torch.rand(())) < share:
                    some = indices[begin + i - 1, head].clone()
                some = some[torch.randperm(topk)]
                some[torch.rand(topk) < 0.1] = -1
                indices[begin + i, head] = some.int()
        return indices

    def call(self, **options: Any) -> Any:
        from blocksparse_attn import selected_attention

        return selected_attention(self.q, self.k, self.v, self.indices, **{**self.options, **options})

    def wanted(self, *, moved: float = 0.0) -> tuple[Any, Any]:
        """In float64, and in float32 of rounded inputs with one rounding at the end.

        moved: of other inputs, each some such part of itself larger; a cache of 8 bits stays.
        """
        keys = ("block_size", "block_table", "cu_seqlens_q", "seqlens_k", "page_layout", "causal", "sinks")
        given = {**{key: self.options[key] for key in keys}}
        given |= {key: self.options[key] for key in ("k_scale", "v_scale")}
        inputs = [torch.where(self.own[:, None, None], self.q, 0), self.k, self.v]
        if moved:
            inputs = [
                x if x.element_size() == 1 else x * (1 + moved * torch.randn(x.shape, device=x.device)).to(x.dtype)
                for x in inputs
            ]
        with validate_values(False):
            return (
                selection.selected_attention(*inputs, self.indices, **given),
                selection.selected_attention(*inputs, self.indices, **given, compute_dtype=torch.float32),
            )

    def _forms(self, exact: Any, plain: Any) -> tuple[Tensor, Tensor]:
        """The rows of sequences in float64, and what a plain version makes of them.

        Weights are rounded to the dtype once before the second product: twice a plain rounding of all values.
        """
        unit = torch.finfo(self.dtype).eps
        rounded = plain.out * (1 + unit)
        return exact.out[self.own], rounded[self.own].to(self.dtype)

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        exact, plain = self.wanted()
        rest = ~self.own
        assert not out[rest].any()
        # Of few rows, or of few that see a few keys, the plain version's largest error is luck.
        assert_close_to_oracle(
            out[self.own], *self._forms(exact, plain), again=lambda: self._forms(*self.wanted(moved=0.03))
        )
        if lse is not None:
            assert bool((lse[:, rest] == -torch.inf).all())
            got, want = lse[:, self.own], exact.lse[:, self.own]
            assert torch.equal(got == -torch.inf, want == -torch.inf)
            seen = want != -torch.inf
            torch.testing.assert_close(got[seen].double(), want[seen], atol=2e-5, rtol=2e-5)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[Any]]]:
    """What a prepared launch starts on tensors, and what on their addresses: kernels, grids and arguments.

    Nothing runs, and room for partial results is the same each time.
    """
    from blocksparse_attn import launch
    from blocksparse_attn.selected import launch as selected_launch
    from kernel_reference.launching import Launch
    from kernel_reference.starting import Starter

    seen: list[Any] = []

    def find(self: Launch, _: Any) -> None:
        def start(*given: Any) -> None:
            seen.append((self.kernel.fn.__name__, *given))

        self._kept.take(("compiled", Starter(start, lambda *_: (), lambda: False)))

    def allocator_of(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
        room = torch.empty(size, dtype=dtype, device=device)
        return lambda: room

    monkeypatch.setattr(Launch, "_find", find)
    for module in (launch, selected_launch):
        monkeypatch.setattr(module, "allocator_of", allocator_of)

    def both(run: Any, tensors: Sequence[Tensor | None]) -> list[list[Any]]:
        run(*tensors)
        by_tensors = seen.copy()
        seen.clear()
        assert run.at(*[tensor if tensor is None else tensor.data_ptr() for tensor in tensors])
        return [by_tensors, seen]

    return both


@pytest.fixture(scope="session", autouse=True)
def on_one_thread(one_thread: None) -> None:
    """Products are so small here that a second thread costs more than it saves."""


@pytest.fixture(scope="session")
def tensors(device: torch.device) -> Tensors:
    return Tensors(device)


class Kernels:
    """The launches themselves, with plans of the caller's: on a GPU, or in Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def attend(self, batch: Batch, plan: Any, num_splits: int = 0) -> None:
        """A batch, into its guarded output and lse."""
        batch.prepare(plan, numbers=batch.numbers(num_splits))(*batch.tensors)


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Kernels:
    return Kernels(device)


@pytest.fixture
def interpreted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``with interpreted(op, run, ops, launch, cores=..)``: without a GPU, the op runs its kernels on CPU tensors.

    run: what it runs on a GPU; ops, launch: the modules with the table of launches and with the device's limits.
    """

    @contextmanager
    def interpreted(op: str, run: Callable[..., Any], ops: Any, launch: Any, *, cores: int) -> Iterator[None]:
        from blocksparse_attn import straight
        from blocksparse_attn.plan import DeviceLimits
        from blocksparse_attn.selected import straight as selected_straight

        if device.type == "cuda":
            yield
            return
        library = torch.library.Library("blocksparse_attn", "IMPL", "CPU")
        monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(cores))
        for module in (ops, straight, selected_straight):
            monkeypatch.setattr(module, "launches", PreparedLaunches())
        with warnings.catch_warnings():
            # torch says once that an implementation is replaced.
            warnings.simplefilter("ignore")
            library.impl(op, run, allow_override=True)
        yield
        library._destroy()

    return interpreted


@pytest.fixture(scope="session")
def selected(device: torch.device) -> Callable[..., SelectedBatch]:
    """Makes batches of selected attention."""
    return partial(SelectedBatch, device)
