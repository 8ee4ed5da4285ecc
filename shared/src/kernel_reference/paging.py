"""Where tokens lie: packed one after another, padded to a rectangle, or in the pages of a cache; and the ways between.

Packed tokens are ``[T, H, D]`` with ``cu_seqlens`` [B + 1]: sequence b is rows
``cu_seqlens[b] .. cu_seqlens[b + 1] - 1``.

A paged cache holds position p of sequence b in page ``block_table[b, p // page]`` at offset ``p % page``. Layouts:

- ``NHD``: ``[blocks, page, H, D]``; a latent cache ``[pages, page, 1, dim]`` is this one with one head;
- ``HND``: ``[blocks, H, page, D]``;
- ``x-packed``: keys ``[blocks, H, D / x, page, x]``, values ``[blocks, H, D, page]``, told apart by their rank.

What only the tensors' contents tell (lengths, page ids) is checked on a CPU, and elsewhere inside
:func:`kernel_reference.checks.validate_values`. Unchecked, as inside ``validate_values(False)``, a sequence of
impossible length has no tokens, and a page that does not exist reads as zeros and is not written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from .checks import as_int, check_float, check_tensors, describe, fail, values_are_checked

LAYOUTS = ("NHD", "HND", "x-packed")

Scale = float | torch.Tensor
"""One number, ``[H]`` (per kv head) or ``[blocks, page, H]`` (per token and head); value = stored * scale."""


class Packed(NamedTuple):
    """Packed tokens [T, ...] and cu_seqlens [B + 1] int32."""

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor


Values = TypeVar("Values", bound=torch.Tensor | None)


class PagedCache(NamedTuple, Generic[Values]):
    """A cache as :func:`paged_cache` builds it; ``v_cache`` is None where the keys hold the values too (a latent)."""

    k_cache: torch.Tensor
    v_cache: Values
    block_table: torch.Tensor
    seqlens_k: torch.Tensor
    k_scale: Scale | None
    v_scale: Scale | None


def check_integers(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless ``tensor`` is int32 or int64 of ``shape``, in which None stands for any size."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        fail(name, "an int32 or int64 tensor", describe(tensor), TypeError)
    if tensor.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        fail(name, f"of shape [{wanted}]", list(tensor.shape))


def _check_device(cache: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != cache.device:
            fail(name, f"on {cache.device}, as cache", tensor.device)


def sequence_ranges(name: str, cu_seqlens: torch.Tensor | None, tokens: int) -> list[tuple[int, int]]:
    """The rows (begin, end) of each packed sequence; without ``cu_seqlens`` one sequence holds all ``tokens`` rows.

    A range that does not lie in ``0 <= begin <= end <= tokens`` raises ValueError where values are checked
    (``values_are_checked``), and is given as (0, 0) elsewhere. Rows past the last sequence belong to none.
    """
    if cu_seqlens is None:
        return [(0, tokens)]
    check_integers(name, cu_seqlens, (None,))
    if cu_seqlens.numel() == 0:
        fail(name, "of at least 1 element", 0)
    bounds: list[int] = cu_seqlens.tolist()
    ranges = list(pairwise(bounds))
    if values_are_checked(cu_seqlens.device):
        if bounds[0] != 0:
            fail(f"{name}[0]", "0", bounds[0])
        for i, (begin, end) in enumerate(ranges):
            if not begin <= end <= tokens:
                fail(f"{name}[{i + 1}]", f"from {name}[{i}] = {begin} to {tokens} (the rows given)", end)
    return [(begin, end) if 0 <= begin <= end <= tokens else (0, 0) for begin, end in ranges]


def cumulative(seqlens: torch.Tensor) -> torch.Tensor:
    """Lengths [B] to cu_seqlens [B + 1] int32."""
    check_integers("seqlens", seqlens, (None,))
    return torch.nn.functional.pad(seqlens.cumsum(0), (1, 0)).to(torch.int32)


def _padded_rows(size: torch.Size, starts: torch.Tensor | None, ends: torch.Tensor | None) -> torch.Tensor:
    batch, length = size[:2]
    positions = torch.arange(length, device="cpu")
    rows = torch.ones(batch, length, dtype=torch.bool, device="cpu")
    if starts is not None:
        check_integers("starts", starts, (batch,))
        rows &= positions >= starts.cpu()[:, None]
    if ends is not None:
        check_integers("ends", ends, (batch,))
        rows &= positions < ends.cpu()[:, None]
    return rows


def pack(padded: torch.Tensor, starts: torch.Tensor | None = None, ends: torch.Tensor | None = None) -> Packed:
    """The tokens of a padded batch ``[B, S, ...]``, of which row b holds positions ``starts[b] .. ends[b] - 1``.

    ``starts`` None means 0 and ``ends`` None means S. Rows whose end is not past their start hold nothing.
    """
    check_tensors(padded=padded)
    if padded.ndim < 2:
        fail("padded", "of shape [B, S, ...]", list(padded.shape))
    rows = _padded_rows(padded.shape, starts, ends)
    return Packed(padded[rows.to(padded.device)], cumulative(rows.sum(1)).to(padded.device))


def unpack(
    tokens: torch.Tensor,
    length: int,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    *,
    batch: int,
    fill: float = 0.0,
) -> torch.Tensor:
    """The inverse of :func:`pack`: tokens ``[T, ...]`` to ``[batch, length, ...]``, padding set to ``fill``."""
    check_tensors(tokens=tokens)
    if tokens.ndim < 1:
        fail("tokens", "of shape [T, ...]", list(tokens.shape))
    for name, size in (("batch", batch), ("length", length)):
        if as_int(name, size) < 0:
            fail(name, "0 or more", size)
    rows = _padded_rows(torch.Size((batch, length)), starts, ends)
    if int(rows.sum()) != tokens.shape[0]:
        fail("tokens", f"of {int(rows.sum())} rows, as starts and ends say", tokens.shape[0])
    padded = tokens.new_full((batch, length, *tokens.shape[1:]), fill)
    padded[rows.to(tokens.device)] = tokens
    return padded


def append(prefix: Packed, new: Packed) -> Packed:
    """Each sequence of ``prefix`` followed by the same one of ``new``; ValueError unless both have as many."""
    before = sequence_ranges("prefix.cu_seqlens", prefix.cu_seqlens, prefix.tokens.shape[0])
    after = sequence_ranges("new.cu_seqlens", new.cu_seqlens, new.tokens.shape[0])
    if len(before) != len(after):
        fail("new.cu_seqlens", f"of {len(before)} sequences, as in prefix", len(after))
    parts = [prefix.tokens[:0]]
    for (begin, end), (new_begin, new_end) in zip(before, after, strict=True):
        parts += [prefix.tokens[begin:end], new.tokens[new_begin:new_end]]
    lengths = [end - begin + e - b for (begin, end), (b, e) in zip(before, after, strict=True)]
    cu_seqlens = cumulative(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
    return Packed(torch.cat(parts), cu_seqlens.to(prefix.tokens.device))


def _pages(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of ``cache`` indexed [block, offset, head, then what makes D up]."""
    check_tensors(cache=cache)
    if layout not in LAYOUTS:
        fail("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    if cache.ndim != 4 and not (layout == "x-packed" and cache.ndim == 5):
        fail("cache", "5-D (keys) or 4-D (values)" if layout == "x-packed" else "4-D", f"{cache.ndim}-D")
    if layout == "NHD":
        return cache
    if layout == "HND":
        return cache.transpose(1, 2)
    return cache.permute(0, 3, 1, 2, 4) if cache.ndim == 5 else cache.permute(0, 3, 1, 2)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Indexing is not implemented for every 8-bit float on every device; their bytes can always be moved.
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _slots(
    block_table: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor, blocks: int, page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page, offset in the page, and whether both exist, of each (sequence, position)."""
    column = position // page
    fits = (position >= 0) & (column < block_table.shape[1])
    block = block_table[sequence, torch.where(fits, column, 0)].to(torch.int64)
    fits &= (block >= 0) & (block < blocks)
    if values_are_checked(block_table.device) and not bool(fits.all()):
        worst = int(torch.nonzero(~fits)[0])
        name = f"block_table[{int(sequence[worst])}, {int(column[worst])}]"
        fail(name, f"a page from 0 to {blocks - 1}", int(block[worst]))
    return torch.where(fits, block, 0), position % page, fits


def _expand_scale(name: str, scale: Scale, heads: int, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The scale of each token, broadcastable to [T, H, 1], in float64."""
    if not isinstance(scale, torch.Tensor):
        check_float(name, scale, f"a number, [{heads}] or [blocks, page, {heads}]")
        return torch.tensor(float(scale), dtype=torch.float64, device=block.device)
    if scale.ndim == 3 and scale.shape[2] == heads:
        return scale[block, offset].to(torch.float64)[..., None]
    if scale.numel() == 1:
        return scale.reshape(()).to(torch.float64)
    if scale.shape == (heads,):
        return scale.to(torch.float64)[:, None]
    fail(name, f"a number, [{heads}] or [blocks, page, {heads}]", list(scale.shape))


def gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    layout: str = "NHD",
    *,
    scale: Scale | None = None,
    dtype: torch.dtype | None = None,
) -> Packed:
    """Read the first ``seqlens[b]`` tokens of each sequence out of the pages.

    Args:
        cache: keys or values in ``layout``, any dtype, any strides.
        block_table: [B, max_blocks] int32 or int64; entries past a sequence's last page are not read.
        seqlens: [B] int32 or int64, tokens.
        scale: what stored values are multiplied by, in float64: a number, [H] or [blocks, page, H].
        dtype: of the result; without it the cache's own, or float64 with a scale.

    Returns tokens [T, H, D] and cu_seqlens [B + 1] int32. Nothing but those tokens is read, so NaN elsewhere stays
    there. Raises TypeError or ValueError for a wrong layout, rank, dtype or shape.
    """
    pages = _pages(cache, layout)
    blocks, page, heads = pages.shape[:3]
    check_integers("block_table", block_table, (None, None))
    check_integers("seqlens", seqlens, (block_table.shape[0],))
    _check_device(cache, block_table=block_table, seqlens=seqlens)
    capacity = block_table.shape[1] * page
    possible = (seqlens >= 0) & (seqlens <= capacity)
    if values_are_checked(seqlens.device) and not bool(possible.all()):
        worst = int(torch.nonzero(~possible)[0])
        fail(f"seqlens[{worst}]", f"from 0 to {capacity} (block_table's columns x page)", int(seqlens[worst]))
    lengths = torch.where(possible, seqlens, 0).to(torch.int64)
    cu_seqlens = cumulative(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(len(sequence), device=lengths.device) - cu_seqlens.to(torch.int64)[sequence]
    if blocks == 0 or page == 0:
        if len(sequence):
            fail("cache", "of at least one page", list(cache.shape))
        return Packed(pages.new_zeros((0, heads, *pages.shape[3:])).flatten(2), cu_seqlens)
    block, offset, exists = _slots(block_table, sequence, position, blocks, page)
    tokens = _raw(pages)[block, offset].flatten(2)
    tokens = torch.where(exists[:, None, None], tokens, 0).to(tokens.dtype)
    if tokens.dtype != cache.dtype:
        # A view as another dtype has no gradient.
        tokens = tokens.view(cache.dtype)
    if scale is not None:
        tokens = tokens.to(torch.float64) * _expand_scale("scale", scale, heads, block, offset)
        # A page that does not exist has no scale either, and the one read in its stead may be NaN.
        tokens = torch.where(exists[:, None, None], tokens, 0.0)
    return Packed(tokens if dtype is None else tokens.to(dtype), cu_seqlens)


def _quantise(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == tokens.dtype or dtype.itemsize > 1 or not dtype.is_floating_point:
        return tokens.to(dtype)
    # A cast to an 8-bit float turns what is out of its range into NaN or infinity; caches hold the greatest number.
    limit = torch.finfo(dtype).max
    return tokens.to(torch.float64).clamp(-limit, limit).to(dtype)


def scatter(
    tokens: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    layout: str = "NHD",
    *,
    starts: torch.Tensor | None = None,
    scale: Scale | None = None,
) -> None:
    """Write packed tokens [T, H, D] into the pages of ``cache``, in place; the inverse of :func:`gather`.

    Sequence b's first token goes to position ``starts[b]`` ([B], 0 without it). What is stored is ``tokens / scale``,
    held within the cache's range where that is of an 8-bit float. Errors as :func:`gather`; ``tokens`` must have the
    cache's heads and D.
    """
    pages = _pages(cache, layout)
    blocks, page, heads = pages.shape[:3]
    dim = pages.shape[3:].numel()
    check_tensors(tokens=tokens)
    if tokens.ndim != 3 or tokens.shape[1:] != (heads, dim):
        fail("tokens", f"of shape [T, {heads}, {dim}]", list(tokens.shape))
    check_integers("block_table", block_table, (None, None))
    check_integers("cu_seqlens", cu_seqlens, (block_table.shape[0] + 1,))
    _check_device(cache, tokens=tokens, block_table=block_table)
    ranges = sequence_ranges("cu_seqlens", cu_seqlens, tokens.shape[0])
    if starts is None:
        starts = torch.zeros(len(ranges), dtype=torch.int64, device="cpu")
    check_integers("starts", starts, (len(ranges),))
    for b, (begin, end) in enumerate(ranges):
        position = torch.arange(end - begin, device=cache.device) + int(starts[b])
        sequence = torch.full_like(position, b)
        block, offset, exists = _slots(block_table, sequence, position, blocks, page)
        block, offset = block[exists], offset[exists]
        new = _raw(tokens[begin:end])[exists].view(tokens.dtype)
        if scale is not None:
            new = new.to(torch.float64) / _expand_scale("scale", scale, heads, block, offset)
        stored = _quantise(new, cache.dtype).reshape(-1, heads, *pages.shape[3:])
        _raw(pages)[block, offset] = _raw(stored)


def accumulate(
    tokens: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    layout: str = "NHD",
) -> None:
    """Add packed tokens [T, H, D] to what the pages of ``cache`` hold, in place: the gradient of :func:`gather`.

    A page of several sequences takes those of all. Errors as :func:`gather`.
    """
    pages = _pages(cache, layout)
    blocks, page, heads = pages.shape[:3]
    check_tensors(tokens=tokens)
    check_integers("block_table", block_table, (None, None))
    check_integers("cu_seqlens", cu_seqlens, (block_table.shape[0] + 1,))
    _check_device(cache, tokens=tokens, block_table=block_table)
    for b, (begin, end) in enumerate(sequence_ranges("cu_seqlens", cu_seqlens, tokens.shape[0])):
        if begin < end:
            position = torch.arange(end - begin, device=cache.device)
            block, offset, exists = _slots(block_table, torch.full_like(position, b), position, blocks, page)
            new = tokens[begin:end][exists].to(cache.dtype).reshape(-1, heads, *pages.shape[3:])
            pages.index_put_((block[exists], offset[exists]), new, accumulate=True)


def _empty_cache(
    blocks: int, page_size: int, heads: int, dim: int, layout: str, x: int | None, dtype: torch.dtype
) -> torch.Tensor:
    shapes = {
        "NHD": (blocks, page_size, heads, dim),
        "HND": (blocks, heads, page_size, dim),
        "x-packed": (blocks, heads, dim, page_size) if x is None else (blocks, heads, dim // x, page_size, x),
    }
    if layout not in shapes:
        fail("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    return torch.full(shapes[layout], torch.nan, dtype=torch.float32, device="cpu").to(dtype)


def _page_scale(
    name: str, scale: Scale | None, tokens: torch.Tensor, paged: PagedCache[Any], page_size: int
) -> Scale | None:
    if not isinstance(scale, torch.Tensor) or scale.ndim < 2:
        return scale
    if scale.shape != tokens.shape[:2]:
        fail(name, f"a number, [{tokens.shape[1]}] or {list(tokens.shape[:2])}", list(scale.shape))
    pages = scale.new_full((paged.k_cache.shape[0], page_size, tokens.shape[1], 1), torch.nan)
    scatter(scale[..., None], pages, paged.block_table, cumulative(paged.seqlens_k))
    return pages[..., 0]


def paged_cache(
    k: torch.Tensor,
    v: Values,
    cu_seqlens: torch.Tensor,
    page_size: int,
    layout: str = "NHD",
    *,
    dtype: torch.dtype | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    x: int | None = None,
    unused_pages: int = 2,
    padding: int | None = None,
    seed: int = 0,
) -> PagedCache[Values]:
    """Deal packed keys and values out to pages in random order; whatever no token fills is NaN.

    Args:
        k, v: packed [T, H, D] and [T, H, Dv]; v None for a latent cache.
        cu_seqlens: [B + 1] of k and v.
        page_size: tokens a page, 1 or more.
        dtype: stored dtype, k's own without it.
        k_scale, v_scale: a number, [H] or [T, H]; stored = value / scale. The last comes back as [blocks, page, H].
        x: of x-packed keys; without it 16 bytes of elements. Must divide D.
        unused_pages: pages, scattered among the others, that belong to no sequence; 1 or more.
        padding: what block_table holds past a sequence's last page; without it a page that belongs to no sequence, so
            that a kernel which reads too far meets NaN.
        seed: of the order of the pages.

    ``seqlens_k`` and ``block_table`` are int32, on k's device. Raises ValueError for sizes that do not fit.
    """
    check_tensors(k=k, **({} if v is None else {"v": v}))
    if k.ndim != 3:
        fail("k", "3-D [T, H, D]", f"{k.ndim}-D")
    if v is not None and (v.ndim != 3 or v.shape[:2] != k.shape[:2]):
        fail("v", f"of shape [{k.shape[0]}, {k.shape[1]}, Dv]", list(v.shape))
    if as_int("page_size", page_size) < 1:
        fail("page_size", "at least 1", page_size)
    if as_int("unused_pages", unused_pages) < 1:
        fail("unused_pages", "at least 1", unused_pages)
    dtype = dtype or k.dtype
    x = x or 16 // dtype.itemsize
    if layout == "x-packed" and k.shape[2] % x:
        fail("x", f"a divisor of D = {k.shape[2]}", x)

    lengths = [end - begin for begin, end in sequence_ranges("cu_seqlens", cu_seqlens, k.shape[0])]
    counts = [-(-length // page_size) for length in lengths]
    blocks = sum(counts) + unused_pages
    order: list[int] = torch.randperm(blocks, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    spare = order.pop() if padding is None else padding
    rows = []
    for count in counts:
        rows.append([order.pop() for _ in range(count)] + [spare] * (max(counts, default=0) - count))
    block_table = torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(counts), -1).to(k.device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=k.device)

    k_cache = _empty_cache(blocks, page_size, k.shape[1], k.shape[2], layout, x, dtype).to(k.device)
    v_cache = None
    if v is not None:
        v_cache = _empty_cache(blocks, page_size, v.shape[1], v.shape[2], layout, None, dtype).to(k.device)
    paged = PagedCache(k_cache, cast("Values", v_cache), block_table, seqlens, None, None)
    paged = paged._replace(
        k_scale=_page_scale("k_scale", k_scale, k, paged, page_size),
        v_scale=None if v is None else _page_scale("v_scale", v_scale, v, paged, page_size),
    )
    scatter(k, k_cache, block_table, cu_seqlens, layout, scale=paged.k_scale)
    if v is not None and v_cache is not None:
        scatter(v, v_cache, block_table, cu_seqlens, layout, scale=paged.v_scale)
    return paged
