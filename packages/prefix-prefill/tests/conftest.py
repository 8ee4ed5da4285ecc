"""What several of these tests need: ragged batches over paged caches in guarded memory, the oracle and a plain version.

Tests are imported one by one (``--import-mode=importlib``), so that what they share reaches them as a fixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import cascade
from kernel_reference.attention import attention
from kernel_reference.paging import gather, paged_cache
from kernel_reference.testing import gluon
from kernel_reference.testing.guards import Canaried, assert_bitwise_equal, canaried, guarded, movable, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.plain import Wanted, assert_rounded, moved, plain_rows
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.cascade.arguments import (
    CascadeLevel,
    CascadeNumbers,
    CascadeTensors,
    check_cascade,
    tensors_of_levels,
)

Tensor = torch.Tensor
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# Rows that the oracle computes of a sequence, beside its first and its last two.
_SAMPLE = 12
# Of fewer rows of heads, or lse, plain PyTorch's largest error is luck.
_FEW_NUMBERS = 64


@pytest.fixture(scope="module")
def hopper() -> SimpleNamespace:
    """The kernels for sm_90, and those launched beside them, over the simulator's language."""
    own = (f"hopper.{name}" for name in (
        "config", "joined", "items", "drafts", "memory", "softmax", "capped", "gather", "producers", "rows", "levels",
        "epilogue", "values", "rescaling", "consumers", "merging", "kernel",
    ))  # fmt: skip
    names = ("softmax", "schedule", "batch", "costs", "balance", "merge", "widen", "join", *own)
    kernels = gluon.shadow(*(f"prefix_prefill.kernels.{name}" for name in names))
    beside = {"merge_pieces": kernels[-2].merge_pieces, "widen": kernels[6].widen, "join": kernels[7].join}
    return SimpleNamespace(**{**vars(kernels[-1]), **beside})


def quantised(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values in a dtype; out of the range of an 8-bit float, its largest number."""
    limit = torch.finfo(dtype).max
    return values.double().clamp(-limit, limit).to(dtype)


class Batch:
    """Sequences of new tokens behind ``ctx`` older ones, packed one after another, over a paged cache.

    ``lengths``: (ctx, new tokens) of each. Whatever a call has no business with is NaN: rows of padding, pages of no
    sequence, the unused tails of pages, what lies round the inputs, and the outputs before they are written; the block
    table goes on past each sequence with pages of NaN, and past its columns with pages that do not exist.
    :meth:`check` then holds everything to the oracle.

    head_dim_v: of values, that of keys without it. cached: the new tokens are in the cache and k, v None. k_scale,
    v_scale: "number", "tensor", "heads", "tokens" (per token and head), a number, or None. window, softcap,
    softmax_scale, causal, skip_decode, out_scale (a number or a float32 tensor): as
    :func:`prefix_prefill.prefix_prefill` takes them. sinks, alibi: tensors, or whether to make some. draft_mask: a
    tensor, or whether to make trees. rows_after: rows of padding. fused: q, k and v are slices of one tensor.
    interleaved: pages of keys and values alternate in one tensor. size: of the inputs' values, 1 the unit scale.
    offset: what is added to q and to the keys.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[tuple[int, int]], *, heads: tuple[int, int] = (4, 2),
        head_dim: int = 64, head_dim_v: int | None = None, page: int = 16, page_layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        cache_dtype: torch.dtype | None = None, cached: bool = False, causal: bool = True,
        window: tuple[int, int] | None = None, softcap: float = 0.0, softmax_scale: float | None = None,
        sinks: bool | Tensor = False, alibi: bool | Tensor = False, k_scale: str | float | None = None,
        v_scale: str | float | None = None, out_scale: float | Tensor | None = None,
        out_dtype: torch.dtype | None = None, lse: bool = True, skip_decode: bool = False, rows_after: int = 0,
        fused: bool = False, interleaved: bool = False, index_dtype: torch.dtype = torch.int32,
        extra_columns: int = 1, size: float = 1.0, offset: tuple[float, float] = (0.0, 0.0),
        draft_mask: bool | Tensor = False, quantize_q: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.lengths, self.page_layout, self.page = device, list(lengths), page_layout, page
        self.heads, self.head_dim, self.dtype, self.cached = heads, head_dim, dtype, cached
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.causal, self.window, self.softcap, self.softmax_scale = causal, window, softcap, softmax_scale
        self.skip_decode, self.out_scale, self.quantize_q = skip_decode, out_scale, quantize_q
        self.begins = list(accumulate([new for _, new in lengths], initial=0))
        self.totals = [ctx + new for ctx, new in lengths]
        self.max_seqlen_q = max([new for _, new in lengths], default=0)
        self._inputs: list[tuple[str, Canaried, Tensor]] = []
        num_heads, heads_kv = heads
        rows = self.begins[-1] + rows_after

        q = self._packed([new for _, new in lengths], num_heads, size, head_dim)
        keys, values = (self._packed(self.totals, heads_kv, size, of) for of in (head_dim, self.head_dim_v))
        q, keys = (x + by if by else x for x, by in zip((q, keys), offset, strict=True))
        stored = [total if cached else ctx for (ctx, _), total in zip(lengths, self.totals, strict=True)]
        in_cache = self._chosen([range(n) for n in stored])
        new = self._chosen([range(n, total) for n, total in zip(stored, self.totals, strict=True)])
        self._fill_cache(keys[in_cache], values[in_cache], stored, cache_dtype or dtype, k_scale, v_scale, interleaved)
        # What the cache holds is what the keys and values are, rounding and all.
        self.keys, self.values = keys.double(), values.double()
        self.keys[in_cache], self.values[in_cache] = self._held

        self._hold_new(q, None if cached else (keys[new], values[new]), rows, fused)
        indices = {"dtype": index_dtype, "device": device}
        self._hold_lengths(extra_columns, indices)
        self.alibi_slopes = self._per_head(alibi, lambda h: 2.0 ** -(1 + h % 8), "alibi_slopes")
        self.sinks = self._per_head(sinks, lambda h: 1.5 * (h % 3) - 1, "sinks")
        self.draft_mask = self._masks(draft_mask, rows)
        self.out_dtype = out_dtype or (dtype if out_scale is None else torch.float8_e4m3fn)
        self.out: Canaried = canaried((rows, num_heads, self.head_dim_v), self.out_dtype, device, row_padding=8)
        self.lse: Canaried | None = canaried((num_heads, rows), torch.float32, device, row_padding=5) if lse else None
        self._before = (self.out.tensor.clone(), None if self.lse is None else self.lse.tensor.clone())
        self._wanted: tuple[Tensor, Wanted, Wanted] | None = None

    def _packed(self, lengths: Sequence[int], heads: int, size: float, head_dim: int) -> Tensor:
        return (torch.randn(sum(lengths), heads, head_dim, device=self.device) * size).to(self.dtype)

    def _chosen(self, positions: Sequence[range]) -> Tensor:
        """These positions of each sequence as rows of its packed keys."""
        begins = accumulate(self.totals, initial=0)
        rows = [begin + position for begin, chosen in zip(begins, positions, strict=False) for position in chosen]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _guard(self, name: str, tensor: Tensor, **how: Any) -> Tensor:
        place = guarded(tensor, **how)
        self._inputs.append((name, place, tensor.clone()))
        return place.tensor

    def _fill_cache(
        self, keys: Tensor, values: Tensor, stored: Sequence[int], dtype: torch.dtype, k_scale: str | float | None,
        v_scale: str | float | None, interleaved: bool,
    ) -> None:  # fmt: skip
        # Without sequences, the pages of one that is empty.
        cu = torch.tensor([0, *accumulate(stored or [0])], dtype=torch.int64, device=self.device)
        scales = [self._make_scale(kind, keys.shape[0]) for kind in (k_scale, v_scale)]
        paged = paged_cache(
            keys, values, cu, self.page, self.page_layout, dtype=dtype, k_scale=scales[0], v_scale=scales[1],
            seed=int(torch.randint(2**31, ())),
        )  # fmt: skip
        self.block_table = paged.block_table[: len(stored)]
        self._held = [self._dequantised(x, dtype, s) for x, s in zip((keys, values), scales, strict=True)]
        self.k_scale, self.v_scale = (
            self._guard(name, s) if isinstance(s, Tensor) and s.ndim else s
            for name, s in (("k_scale", paged.k_scale), ("v_scale", paged.v_scale))
        )
        caches = [paged.k_cache, paged.v_cache]
        if interleaved:
            whole = torch.stack([movable(cache) for cache in caches], dim=1).view(dtype)
            self.k_cache, self.v_cache = self._guard("the cache", whole).unbind(1)
        else:
            self.k_cache = self._guard("k_cache", caches[0])
            self.v_cache = self._guard("v_cache", caches[1], offset=16)

    def _make_scale(self, kind: str | float | None, tokens: int) -> float | Tensor | None:
        if not isinstance(kind, str):
            return kind
        if kind == "number":
            return 0.037
        shape = {"tensor": (1,), "heads": (self.heads[1],), "tokens": (tokens, self.heads[1])}[kind]
        return torch.rand(shape, device=self.device) * 0.05 + 0.01

    def _dequantised(self, x: Tensor, dtype: torch.dtype, scale: float | Tensor | None) -> Tensor:
        if dtype == x.dtype and scale is None:
            return x.double()
        by = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=x.device)
        by = by.reshape(()) if by.numel() == 1 else by[..., None]
        return quantised(x.double() / by, dtype).double() * by

    def _hold_new(self, q: Tensor, new: tuple[Tensor, Tensor] | None, rows: int, fused: bool) -> None:
        parts = [q, *(new or ())]
        whole = [poison_(torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=x.device)) for x in parts]
        for x, place in zip(parts, whole, strict=True):
            place[: x.shape[0]] = x
        if fused:
            widths = [x.shape[1] for x in whole]
            held: Sequence[Tensor] = self._guard("qkv", torch.cat(whole, dim=1)).split(widths, dim=1)
        else:
            held = [self._guard(name, x, row_padding=8) for name, x in zip("qkv", whole, strict=False)]
        self.q: Tensor = held[0]
        self.k: Tensor | None
        self.v: Tensor | None
        self.k, self.v = (None, None) if new is None else (held[1], held[2])

    def _hold_lengths(self, extra_columns: int, indices: dict[str, Any]) -> None:
        # A page of NaN, wherever one may look past a sequence; columns past those, pages that are none.
        table = self.block_table
        used = set(table.flatten().tolist())
        spare = [p for p in range(self.k_cache.shape[0]) if p not in used]
        padding = table.new_full((table.shape[0], extra_columns), spare[-1] if spare else 0)
        table = torch.cat([table, padding], dim=1)
        wide = torch.full((table.shape[0], table.shape[1] + 3), 2**31 - 1, **indices)
        wide[:, : table.shape[1]] = table
        self.block_table = self._guard("block_table", wide)[:, : table.shape[1]]
        self.cu_seqlens_q = self._guard("cu_seqlens_q", torch.tensor(self.begins, **indices))
        self.seqlens_k = self._guard("seqlens_k", torch.tensor(self.totals, **indices))

    def _per_head(self, given: bool | Tensor, made: Any, name: str) -> Tensor | None:
        if isinstance(given, Tensor):
            return given
        if not given:
            return None
        return self._guard(name, torch.tensor([made(h) for h in range(self.heads[0])], device=self.device))

    def _masks(self, given: bool | Tensor, rows: int) -> Tensor | None:
        """Of each new token's path in a tree, one in four of which begins anew; rows of padding see nothing."""
        if not isinstance(given, Tensor):
            if not given:
                return None
            masks = [0] * rows
            for begin, (_, new) in zip(self.begins, self.lengths, strict=False):
                parents = torch.stack([torch.randint(-1 - i // 3, i, ()) for i in range(new)]).tolist() if new else []
                for i, parent in enumerate(parents):
                    masks[begin + i] = 1 << i | (masks[begin + parent] if parent >= 0 else 0)
            given = torch.tensor(masks, dtype=torch.int64, device=self.device)
        return self._guard("draft_mask", given)

    def _drafted(self, sequence: Tensor, q_position: Tensor, k_position: Tensor) -> Tensor:
        """What the oracle is told of ``draft_mask``."""
        assert self.draft_mask is not None
        context = self.lengths[int(sequence)][0]
        masks = self.draft_mask[self.begins[int(sequence)] + q_position - context]
        bits = ((masks >> (k_position - context).clamp(0, 62)) & 1).bool()
        return (k_position < context) | (bits & (k_position < context + 63))

    def forget_inputs(self) -> None:
        """Take what the inputs hold now for what they must hold after the call."""
        self._inputs = [(name, place, place.tensor.clone()) for name, place, _ in self._inputs]
        self._wanted = None

    def spoil(self, sequence: int, positions: Sequence[int]) -> None:
        """NaN in the cache at positions of a sequence, as far as it is in the cache."""
        stored = self.totals[sequence] if self.cached else self.lengths[sequence][0]
        chosen = torch.tensor([p for p in positions if p < stored], dtype=torch.int64, device=self.device)
        pages = self.block_table[sequence, chosen // self.page].long()
        for cache in (self.k_cache, self.v_cache):
            tokens = movable(cache).movedim({"NHD": 1, "HND": 2, "x-packed": 3}[self.page_layout], 1)
            place = (pages, chosen % self.page)
            tokens[place] = movable(poison_(torch.empty_like(tokens[place]).view(cache.dtype)))
        self.forget_inputs()

    # What a call is given

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the public function, its result and plan left out."""
        return {
            "max_seqlen_q": self.max_seqlen_q, "page_layout": self.page_layout, "softmax_scale": self.softmax_scale,
            "causal": self.causal, "window": self.window, "softcap": self.softcap, "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks, "k_scale": self.k_scale, "v_scale": self.v_scale, "out_scale": self.out_scale,
            "skip_decode": self.skip_decode, "draft_mask": self.draft_mask, "quantize_q": self.quantize_q,
        }  # fmt: skip

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments of the public function."""
        return (
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, self.seqlens_k
        )  # fmt: skip

    @property
    def tensors(self) -> PrefillTensors:
        """The tensors of the op."""
        scales = [s if isinstance(s, Tensor) else None for s in (self.k_scale, self.v_scale, self.out_scale)]
        lse = None if self.lse is None else self.lse.tensor
        return PrefillTensors(
            *self.inputs, self.alibi_slopes, self.sinks, *scales, self.out.tensor, lse, self.draft_mask
        )

    def numbers(self, num_splits: int = 0) -> PrefillNumbers:
        """The numbers of the op, the plan left out."""
        left, right = (-1, -1) if self.window is None else self.window
        factors = [
            1.0 if s is None or isinstance(s, Tensor) else s for s in (self.k_scale, self.v_scale, self.out_scale)
        ]
        return PrefillNumbers(
            self.max_seqlen_q, self.page_layout, self.scale, left, 0 if self.causal else right, self.softcap,
            self.skip_decode, *factors, num_splits, quantize_q=self.quantize_q,
        )  # fmt: skip

    def attend(self, given: Sequence[Any], plan: Any, num_splits: int = 0) -> None:
        """The launches of a plan, or of the device's, on these tensors in place of the batch's."""
        from prefix_prefill import launch

        tensors = PrefillTensors(*given)
        launch.prepare_prefill(check_prefill(tensors, self.numbers(num_splits)), plan, tensors)(*tensors)

    @property
    def queries(self) -> Tensor:
        """q, or what it is rounded to: q's dtype holds that exactly."""
        if not self.quantize_q:
            return self.q
        largest = self.q.double().abs().amax(-1, keepdim=True)
        unit = 2.0 ** (largest.clamp(min=2.0**-100).log2().floor() - 7)
        return (quantised(self.q.double() / unit, FP8[0]).double() * unit).to(self.dtype)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def run(self, **options: Any) -> Any:
        """The public function, into the guarded output; lse is copied into its guarded place."""
        from prefix_prefill import prefix_prefill

        given = {**self.options, "out": self.out.tensor, "return_lse": self.lse is not None, **options}
        got = prefix_prefill(*self.inputs, **given)
        if given["return_lse"]:
            if given["out"] is self.out.tensor:
                assert got.out is self.out.tensor
            if self.lse is not None:
                self.take_lse(got.lse)
        return got

    def take_lse(self, lse: Tensor) -> None:
        """Keep a new lse where the checks look for it; of rows that are to be left, what was there."""
        assert self.lse is not None
        assert lse.dtype == torch.float32
        assert lse.shape == self.lse.tensor.shape
        untouched = self.untouched
        self.lse.tensor[:, ~untouched] = lse[:, ~untouched]

    # What it must give

    @property
    def possible(self) -> list[int]:
        """The sequences whose lengths, as they stand in the tensors, can be, in the pages that there are."""
        capacity = self.block_table.shape[1] * self.page
        found = []
        for i, total in enumerate(self.seqlens_k.tolist()):
            new = self.begins[i + 1] - self.begins[i]
            if new <= total and (total if self.cached else total - new) <= capacity:
                found.append(i)
        return found

    @property
    def untouched(self) -> Tensor:
        """Which rows are to be left as they are."""
        rows = torch.zeros(self.q.shape[0], dtype=torch.bool, device=self.device)
        if self.skip_decode:
            for i in self.possible:
                if self.lengths[i][1] == 1:
                    rows[self.begins[i]] = True
        return rows

    @property
    def live(self) -> Tensor:
        """Which rows belong to sequences that can be, and are to be written."""
        rows = torch.zeros(self.q.shape[0], dtype=torch.bool, device=self.device)
        for i in self.possible:
            rows[self.begins[i] : self.begins[i + 1]] = True
        return rows & ~self.untouched

    def sample(self, most: int | None = None) -> Tensor:
        """Live rows: all, or where these are many the first, the last two and some others of each sequence."""
        live = self.live
        some = _SAMPLE if most is None else most
        chosen = []
        for i in self.possible:
            own = torch.arange(self.begins[i], self.begins[i + 1])
            own = own[live[own.to(self.device)].cpu()]
            if len(own) > some + 3:
                between = 1 + torch.randperm(len(own) - 3)[:some].sort().values
                own = own[torch.cat([torch.tensor([0]), between, torch.tensor([len(own) - 2, len(own) - 1])])]
            chosen.append(own)
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *chosen])
        return rows.to(self.device)

    def wanted(self, rows: Tensor) -> tuple[Wanted, Wanted]:
        """out [R, H, D] and lse [H, R] of these live rows; out before it is scaled and rounded to 8 bits."""
        exact = attention(
            self.queries.double(), self.keys, self.values, cu_seqlens_q=self.cu_seqlens_q.new_tensor(self.begins),
            cu_seqlens_k=self.cu_seqlens_q.new_tensor([0, *accumulate(self.totals)]), softmax_scale=self.scale,
            causal=self.causal, window=self.window, sinks=self.sinks, softcap=self.softcap,
            alibi_slopes=self.alibi_slopes, rows=rows,
            mask=None if self.draft_mask is None else lambda i, _, row, key: self._drafted(i, row, key),
        )  # fmt: skip
        out, lse = self._plain(rows)
        return Wanted(exact.out, out), Wanted(exact.lse, lse)

    def _units(self, rows: Tensor) -> float:
        """The error of a score in float32, in units in the last place of 1: as many as the score is large.

        It is that of a weight. Of 1200 emulated batches like random case 67, one row over 128 keys of an 8-bit cache,
        one was above the bound of one unit, by 1.04, as cases 67 and 70 were on a GPU by 1.17; plain PyTorch that
        multiplies scores by both scales in one number was in 14, by up to 2.2. Of so many units the most was 0.76.
        """
        if not 0 < rows.numel() * self.heads[0] <= _FEW_NUMBERS:
            return 1
        begins = list(accumulate(self.totals, initial=0))
        own = [
            i for i, begin in enumerate(self.begins[:-1]) if bool(((rows >= begin) & (rows < self.begins[i + 1])).any())
        ]
        keys = torch.cat([self.keys[begins[i] : begins[i + 1]] for i in own])
        keys = keys.repeat_interleave(self.heads[0] // self.heads[1], dim=1).transpose(0, 1)
        scores = self.q[rows].double().transpose(0, 1) @ keys.mT
        return max(1.0, float(scores.nan_to_num().abs().max()) * abs(self.scale))

    def _plain(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, heads_kv = self.heads
        out = torch.zeros(len(rows), num_heads, self.head_dim_v, device=self.device)
        lse = torch.full((num_heads, len(rows)), -torch.inf, device=self.device)
        begins_k = list(accumulate(self.totals, initial=0))
        left, right = (-1, -1) if self.window is None else self.window
        right = 0 if self.causal else right
        for i, total in enumerate(self.totals):
            places = ((rows >= self.begins[i]) & (rows < self.begins[i + 1])).nonzero()[:, 0]
            own = slice(begins_k[i], begins_k[i + 1])
            k, v = (
                x[own].to(self.dtype).repeat_interleave(num_heads // heads_kv, dim=1) for x in (self.keys, self.values)
            )
            if not len(places):
                continue
            for some in places.split(max(1, 2**22 // max(1, total * num_heads))):
                position = rows[some] - self.begins[i + 1] + total
                distance = torch.arange(total, device=self.device) - position[:, None]
                seen = torch.ones_like(distance, dtype=torch.bool)
                if left >= 0:
                    seen &= distance >= -left
                if right >= 0:
                    seen &= distance <= right
                if self.draft_mask is not None:
                    seen &= self._drafted(torch.tensor(i), position[:, None], torch.arange(total, device=self.device))
                slopes = self.alibi_slopes
                # Tensor cores cut sums off: of 192 products a score is twice as far off as in float32 at the most, of
                # 512 three times, and so is the lse of a row that sees one key.
                result = plain_rows(
                    self.queries[rows[some]], k, v, seen, self.scale, softcap=self.softcap, sinks=self.sinks,
                    bias=None if slopes is None else slopes.float()[:, None, None] * distance,
                    on_tensor_cores=self.dtype.itemsize == 2 and self.device.type != "cpu",
                )  # fmt: skip
                out[some], lse[:, some] = result
        return out, lse

    def check(self, *, most: int | None = None, again: bool = False) -> None:
        """Outputs are the oracle's, padding is zero, what is to be left is left and nothing else has changed.

        most: rows to look at of each sequence, beside its first and its last two. again: use the oracle's last answer.
        """
        self.check_out(self.out.tensor, None if self.lse is None else self.lse.tensor, most=most, again=again)
        self.check_guards()

    def check_guards(self, *, all_written: bool = True) -> None:
        """Nothing beside the outputs has been written, and every row of them has been, or else left as it was.

        all_written False: rows may be left, but what is written must be finite, -inf in lse aside.
        """
        untouched = self.untouched
        for name, place, before in zip(("out", "lse"), (self.out, self.lse), self._before, strict=True):
            if place is None or before is None:
                continue
            place.check(written=all_written and not bool(untouched.any()))
            if not all_written:
                changed = movable(place.tensor).view(torch.uint8) != movable(before).view(torch.uint8)
                changed = changed.unflatten(-1, (place.tensor.shape[-1], -1)).any(-1)
                values = place.tensor.double()[changed]
                assert bool((values.isfinite() | (values == -torch.inf)).all()), f"{name} holds what is no number"
            now = [movable(x)[untouched] if name == "out" else x[:, untouched] for x in (place.tensor, before)]
            assert_bitwise_equal(now[0], now[1], what=f"rows of {name} that are to be left")
        for name, place, original in self._inputs:
            place.check(written=False)
            assert_bitwise_equal(place.tensor, original, what=f"{name} after the call")

    def check_out(
        self, out: Tensor, lse: Tensor | None = None, *, most: int | None = None, again: bool = False
    ) -> None:
        """[T, Hq, D] and [Hq, T]: the oracle's in rows of sequences, 0 and -inf in all others."""
        live, untouched = self.live, self.untouched
        assert out.dtype == self.out_dtype
        none = ~live & ~untouched
        assert not bool((movable(out)[none] != 0).any()), "rows of no sequence are not zero"
        if lse is not None:
            assert bool((lse[:, none] == -torch.inf).all()), "lse of rows of no sequence is not -inf"
        if self._wanted is None or not again:
            rows = self.sample(most)
            self._wanted = (rows, *self.wanted(rows))
        rows, (want, beside), lse_wanted = self._wanted
        if self.out_dtype in FP8:
            divisor = torch.as_tensor(self.out_scale, dtype=torch.float64, device=self.device)
            limit = torch.finfo(self.out_dtype).max
            want = (want / divisor).clamp(-limit, limit)
            beside = quantised(beside.double() / divisor, self.out_dtype)
        else:
            beside = beside.to(self.out_dtype)
        units = self._units(rows) if self.dtype == torch.float32 else 1
        assert_rounded(movable(out)[rows].view(out.dtype), Wanted(want, beside), units=units)
        if lse is not None and self.quantize_q and self.device.type != "cpu":
            # A GPU's sums of 8-bit products keep some 14 bits.
            torch.testing.assert_close(lse[:, rows].double(), lse_wanted.exact, rtol=2**-11, atol=2**-11)
        elif lse is not None:
            if lse_wanted.exact.numel() <= _FEW_NUMBERS:
                lse_wanted = moved(lse_wanted, logarithm=True)
            assert_close_to_oracle(lse[:, rows], *lse_wanted, what="lse")

    def check_merged(self, got: Any, *parts: Any) -> None:
        """The whole, merged from two parts: its errors may be those of the parts merged in float64, and twice as much.

        What the parts lost to rounding no merging brings back, so that they stand for the plain version here.
        """
        from kernel_reference.attention import merge_attention_states

        rows = self.sample()
        out, lse = self.wanted(rows)
        merged = merge_attention_states(*parts[0], *parts[1])
        beside = merged.out[rows].to(self.dtype).double()
        # The parts may be lucky where the plain version of the whole is not.
        worse = (beside - out.exact).abs() > (out.plain.to(self.dtype).double() - out.exact).abs()
        beside = torch.where(worse, beside, out.plain.to(self.dtype).double())
        assert_rounded(got.out[rows], Wanted(out.exact, beside.to(self.dtype)))
        assert_close_to_oracle(got.lse[:, rows], *moved(lse, logarithm=True), what="lse")


# Of each level the rows and the keys of its groups; of the last the new tokens are among the keys.
Cuts = Sequence[tuple[Sequence[int], Sequence[int]]]


class Cascade:
    """The tensors of a call: what no row sees is NaN, what lies round the results is watched."""

    def __init__(
        self, device: torch.device, cuts: Cuts, *, heads: tuple[int, int] = (4, 2), head_dim: int = 32, page: int = 8,
        page_layout: str = "NHD", dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None,
        rows_after: int = 0, sinks: bool = False, draft: bool = False, softcap: float = 0.0,
        out_scale: float | None = None, head_dim_v: int | None = None, k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:  # fmt: skip
        head_dim_v = head_dim_v or head_dim
        rows = sum(cuts[-1][0]) + rows_after
        self.device, self.page_layout, self.softcap, self.out_scale = device, page_layout, softcap, out_scale
        self.k_scale, self.v_scale = k_scale, v_scale
        self.max_seqlen_q = max(cuts[-1][0])
        self.q = torch.randn(rows, heads[0], head_dim, device=device).to(dtype)
        poison_(self.q[rows - rows_after :])
        self.levels: list[CascadeLevel] = []
        self.plain: list[cascade.Level] = []
        for of_rows, of_keys in cuts:
            bounds = [torch.tensor([0, *accumulate(each)], device=device) for each in (of_rows, of_keys)]
            k, v = (
                torch.randn(sum(of_keys), heads[1], size, device=device).to(dtype) for size in (head_dim, head_dim_v)
            )
            paged = paged_cache(
                k, v, bounds[1], page, page_layout, dtype=cache_dtype or dtype, k_scale=k_scale, v_scale=v_scale
            )
            lengths = bounds[1].diff().int()
            level = (paged.k_cache, paged.v_cache, paged.block_table, bounds[0].int(), lengths)
            self.levels.append(CascadeLevel(*(guarded(x).tensor for x in level)))
            held = [
                gather(cache, paged.block_table, lengths, page_layout, scale=scale, dtype=torch.float64).tokens
                for cache, scale in ((paged.k_cache, k_scale), (paged.v_cache, v_scale))
            ]
            self.plain.append(cascade.Level(*held, *bounds))
        self.sinks = torch.linspace(-1, 2, heads[0], device=device) if sinks else None
        self.draft_mask: Tensor | None = None
        self.mask: Tensor | None = None
        if draft:
            self._make_masks(*cuts[-1], rows)
        out_dtype = dtype if out_scale is None else torch.float8_e4m3fn
        self.out = canaried((rows, heads[0], head_dim_v), out_dtype, device, row_padding=8)
        self.lse = canaried((heads[0], rows), torch.float32, device, row_padding=5)

    def _make_masks(self, new: Sequence[int], keys: Sequence[int], rows: int) -> None:
        """Each new token sees itself and those before it of its own parity."""
        masks = torch.zeros(rows, dtype=torch.int64)
        self.mask = torch.ones(rows, sum(keys), dtype=torch.bool, device=self.device)
        for begin, end_k, count in zip(accumulate(new, initial=0), accumulate(keys), new, strict=False):
            for i in range(count):
                masks[begin + i] = sum(1 << j for j in range(i % 2, i + 1, 2))
                for j in range(1 - i % 2, count, 2):
                    self.mask[begin + i, end_k - count + j] = False
        self.draft_mask = masks.to(self.device)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "max_seqlen_q": self.max_seqlen_q, "page_layout": self.page_layout, "softcap": self.softcap,
            "sinks": self.sinks, "draft_mask": self.draft_mask, "k_scale": self.k_scale, "v_scale": self.v_scale,
            "out_scale": self.out_scale,
        }  # fmt: skip

    def run(self, **options: Any) -> Any:
        """The public function."""
        from prefix_prefill import cascade_attention

        given = {**self.options, "out": self.out.tensor, "return_lse": True, **options}
        got = cascade_attention(self.q, self.levels, **given)
        self.lse.tensor.copy_(got.lse)
        return got

    def attend(self, *plans: Any, num_splits: int = 0) -> None:
        """The launches themselves."""
        from prefix_prefill.cascade.launch import prepare_cascade

        problems, each = self.problems(num_splits)
        prepare_cascade(problems, plans, each)(each)

    def problems(self, num_splits: int = 0) -> tuple[Any, Any]:
        """The problem of each level, and its tensors."""
        tensors = CascadeTensors(
            self.q, tuple(self.levels), self.sinks, None, None, None, self.out.tensor, self.lse.tensor, self.draft_mask
        )
        scales = (1.0 if x is None else x for x in (self.k_scale, self.v_scale, self.out_scale))
        scale = self.q.shape[2] ** -0.5
        numbers = CascadeNumbers(self.max_seqlen_q, self.page_layout, scale, self.softcap, *scales, num_splits)
        return check_cascade(tensors, numbers), tensors_of_levels(tensors)

    def wanted(self, dtype: torch.dtype = torch.float64) -> Any:
        return cascade.cascade_attention(
            self.q.nan_to_num(), self.plain, softcap=self.softcap, sinks=self.sinks, mask=self.mask, compute_dtype=dtype
        )

    def check(self) -> None:
        exact, plain = self.wanted(), self.wanted(torch.float32)
        out = self.out.tensor
        if out.dtype == torch.float8_e4m3fn:
            exact, plain = (type(x)((x.out / self.out_scale).clamp(-448, 448), x.lse) for x in (exact, plain))
        assert_close_to_oracle(out, exact.out, plain.out.to(out.dtype))
        finite = exact.lse.isfinite()
        assert bool((self.lse.tensor[~finite] == -torch.inf).all())
        lse = self.lse.tensor.double()[finite]
        torch.testing.assert_close(lse, exact.lse[finite], rtol=2e-6, atol=2e-5)
        for result in (self.out, self.lse):
            result.check(written=True)


class Tensors:
    """Makes and compares tensors on the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    Batch = Batch
    Wanted = Wanted
    moved = staticmethod(moved)
    assert_rounded = staticmethod(assert_rounded)
    guarded = staticmethod(guarded)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def cascade(self, cuts: Cuts, **options: Any) -> Cascade:
        return Cascade(self.device, cuts, **options)

    def batch(self, lengths: Sequence[tuple[int, int]], **options: Any) -> Batch:
        return Batch(self.device, lengths, **options)


@pytest.fixture(scope="session", autouse=True)
def computing_on_one_thread(one_thread: None) -> None:
    """As the plugin has it."""


@pytest.fixture(scope="session")
def tensors(device: torch.device) -> Tensors:
    return Tensors(device)


class Kernels:
    """The launches themselves, with plans of the caller's: on a GPU, or in Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prefill(self, batch: Batch, plan: Any, num_splits: int = 0) -> None:
        """A batch, into its guarded output and lse."""
        batch.attend(batch.tensors, plan, num_splits)

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """Two parts, into guarded memory."""
        from prefix_prefill import launch

        out = canaried(tuple(out_a.shape), out_a.dtype, self.device, row_padding=8)
        lse = canaried(tuple(lse_a.shape), torch.float32, self.device, row_padding=5)
        tensors = MergeTensors(out_a, lse_a, out_b, lse_b, out.tensor, lse.tensor)
        launch.prepare_merge(tensors)(*tensors)
        for result in (out, lse):
            result.check(written=True)
        return out.tensor, lse.tensor


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Kernels:
    return Kernels(device)
