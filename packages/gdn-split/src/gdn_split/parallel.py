"""Gated DeltaNet's projections and convolution on several ranks: by tokens (context parallelism) or by heads.

=============  ============================================  =======================================================
function       what a rank holds                             what it sends
=============  ============================================  =======================================================
conv_halo      a run of the tokens of each of N sequences,   (world - 1) (N (width - 1) C elements + 4 N bytes), and
               [T_r, C]                                      (world - 1) N (width - 1) C elements backward
head_shard     whole groups: QK heads and their V heads      nothing: its parts of weights and states are views
=============  ============================================  =======================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from gdn_split.api import Layout
from gdn_split.arguments import check_sizes
from kernel_reference.checks import (
    check_dense,
    check_dtype,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    given,
    values_are_checked,
)
from kernel_reference.collectives import all_gather, world_and_rank
from kernel_reference.ragged import check_cu_seqlens

Tensor = torch.Tensor


class ConvHalo(NamedTuple):
    """The inputs of a convolution just before and at the end of a rank's tokens, [N, C, width - 1], newest last."""

    before: Tensor
    after: Tensor


class HeadShard(NamedTuple):
    """What a rank has of a layer whose heads are shared: its ``sizes``, and where its parts stand.

    sizes: (num_heads_qk, num_heads_v, head_qk, head_v), as the package's functions take them on this rank.
    qkvz, ba: rows of the weights, and columns of the projections: one slice where layouts are interleaved, else those
    of q, k, v, z, and of b, a. qkv: of the convolution's channels, those of q, k and v. heads_v: V heads.
    """

    sizes: tuple[int, int, int, int]
    qkvz: tuple[slice, ...]
    ba: tuple[slice, ...]
    qkv: tuple[slice, ...]
    heads_v: tuple[slice, ...]


def conv_halo(
    x: Tensor, cu_seqlens: Tensor, *, group: Any, width: int, initial_state: Tensor | None = None
) -> ConvHalo:
    """The inputs that a causal convolution needs of the ranks before, where ranks share the tokens of sequences.

    A rank has a run of each sequence, the next rank the run behind it; runs may be empty, or shorter than the
    convolution is wide. ``before`` is then what ``conv_state`` is to a later step, and ``after`` what to keep for
    decoding: on the last rank that of the whole sequence. Exact copies.

    Args:
        x: [T_r, C], this rank's inputs of the convolution, packed (``mixed_qkv``): bfloat16, float16, float32 or
            float64, any strides.
        cu_seqlens: [N + 1] int32 or int64, of this rank's rows; N is the same on every rank.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        width: taps of the convolution, 2 or more.
        initial_state: what comes before the first tokens of all, [N, C, width - 1] in the dtype of x, newest last; 0
            without it. Read on rank 0; what other ranks give is not looked at.

    Returns:
        ConvHalo(before, after), [N, C, width - 1] each. Differentiable in x and in rank 0's initial_state, where every
        rank takes part.

    Raises:
        TypeError, ValueError: an argument is not as said above. Bounds are checked on a CPU, and elsewhere inside
            ``kernel_reference.checks.validate_values``; unchecked they are clamped.
    """
    _, rank = world_and_rank(group)
    _check_halo(x, cu_seqlens, width, initial_state if rank == 0 else None)
    taps, channels, sequences = width - 1, x.shape[1], cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.to(torch.int64).clamp(0, x.shape[0])
    lengths = (bounds[1:] - bounds[:-1]).clamp(min=0)
    zeros = x.new_zeros(sequences, taps, channels)
    if x.shape[0] == 0:
        # x is in the graph all the same: the others would wait for a rank that does not come backward.
        tail = zeros + x.sum(0)
    else:
        age = torch.arange(taps, 0, -1, device=x.device)
        rows = (bounds[1:, None] - age).clamp(0, x.shape[0] - 1)
        tail = torch.where((age <= lengths[:, None])[..., None], x[rows], zeros)
    # Elsewhere it is in the graph too: a gradient of 0 for those that are replicated.
    initial = zeros if initial_state is None else initial_state.transpose(1, 2)
    apply: Any = _Exchange.apply
    before, after = apply(tail, initial, lengths, group)
    return ConvHalo(before.transpose(1, 2), after.transpose(1, 2))


def head_shard(
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    world: int,
    rank: int,
    layout: Layout = "interleaved",
) -> HeadShard:
    """Where the parts of a rank stand in a layer whose QK heads, each with its V heads, ``world`` ranks share.

    >>> shard = head_shard(16, 32, 128, 128, world=4, rank=1)
    >>> shard.sizes, shard.qkvz, shard.ba
    ((4, 8, 128, 128), (slice(3072, 6144, None),), (slice(16, 32, None),))

    Args:
        num_heads_qk, num_heads_v, head_qk, head_v: sizes of the whole layer; world divides num_heads_qk.
        world, rank: ranks that share the heads, and which one this is.
        layout: of the projections, "interleaved" or "contiguous".

    Returns:
        HeadShard, for :func:`shard_views`.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    check_sizes(num_heads_qk, num_heads_v, head_qk, head_v, layout)
    check_int("world", world, 1)
    check_int("rank", rank, 0, world - 1)
    if num_heads_qk % world:
        fail("world", f"a divisor of the {num_heads_qk} QK heads", world)
    groups, ratio = num_heads_qk // world, num_heads_v // num_heads_qk
    first, last = rank * groups, (rank + 1) * groups

    def of(begin: int, width: int) -> slice:
        """Of a part that begins there and has so many columns a group, those of the rank's groups."""
        return slice(begin + first * width, begin + last * width)

    widths = [head_qk, head_qk, ratio * head_v, ratio * head_v]
    begins = [sum(widths[:i]) * num_heads_qk for i in range(4)]
    parts = tuple([of(begin, width) for begin, width in zip(begins, widths, strict=True)])
    sizes = (groups, groups * ratio, head_qk, head_v)
    rest = (parts[:3], (of(0, ratio),))
    if layout == "interleaved":
        return HeadShard(sizes, (of(0, sum(widths)),), (of(0, 2 * ratio),), *rest)
    return HeadShard(sizes, parts, (of(0, ratio), of(num_heads_v, ratio)), *rest)


def shard_views(tensor: Tensor, slices: Sequence[slice], dim: int = 0) -> tuple[Tensor, ...]:
    """A rank's parts of a tensor along a dimension, as views: of a weight, a scale, a convolution's state ...

    >>> shard = head_shard(16, 32, 128, 128, world=4, rank=1)
    >>> weight = torch.randn(12288, 2048)  # the rows of mixed_qkvz
    >>> [view.shape for view in shard_views(weight, shard.qkvz)]
    [torch.Size([3072, 2048])]

    Args:
        tensor: of any dtype and strides.
        slices: of a :class:`HeadShard`. Parts of several slices, such as a convolution's channels (``qkv``), are what
            ``torch.cat`` makes one tensor of, once, where one is needed.
        dim: the dimension that the slices are of.

    Returns:
        A view for each slice.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    check_dense(tensor=tensor)
    check_int("dim", dim, -tensor.ndim, tensor.ndim - 1)
    most = max(part.stop for part in slices)
    if tensor.shape[dim] < most:
        fail("tensor", f"of at least {most} along dimension {dim}", describe(tensor))
    return tuple([tensor.narrow(dim, part.start, part.stop - part.start) for part in slices])


def _check_halo(x: Tensor, cu_seqlens: Tensor, width: int, initial_state: Tensor | None) -> None:
    check_dense(x=x, cu_seqlens=cu_seqlens, **given(initial_state=initial_state))
    check_int("width", width, 2)
    if x.ndim != 2:
        fail("x", "[T, C]", describe(x))
    check_dtype("x", x, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    check_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        fail("cu_seqlens", "[N + 1]", describe(cu_seqlens))
    check_same_device("cu_seqlens", cu_seqlens, "x", x)
    if initial_state is not None:
        check_shape("initial_state", initial_state, (cu_seqlens.shape[0] - 1, x.shape[1], width - 1))
        check_same_dtype("initial_state", initial_state, "x", x)
        check_same_device("initial_state", initial_state, "x", x)
    if values_are_checked(x.device):
        check_cu_seqlens("cu_seqlens", cu_seqlens.tolist(), x.shape[0], "x")


class _Exchange(torch.autograd.Function):
    """From each rank's last tokens [N, taps, C], 0 where it has fewer, to what is before its tokens, and at their end.

    Every rank gathers, forward and backward, whatever of its results is used.
    """

    @staticmethod
    def forward(ctx: Any, tail: Tensor, initial: Tensor, lengths: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        _, rank = world_and_rank(group)
        before = initial.clone() if rank == 0 else tail
        # The first rank's tokens begin with the initial state, as nobody is before it.
        sent = _behind(before, tail, lengths) if rank == 0 else tail
        # One collective for both: the bits of the lengths travel as those of elements.
        bits = torch.int64 if tail.element_size() == 8 else torch.int32
        gathered = all_gather(torch.cat([sent.flatten(), lengths.to(bits).view(tail.dtype)]), group)
        tails = gathered[:, : tail.numel()].unflatten(1, tail.shape)
        all_lengths = gathered[:, tail.numel() :].contiguous().view(bits).to(torch.int64)
        if rank > 0:
            before = _before(tails[:rank], all_lengths[:rank])
        ctx.save_for_backward(lengths, all_lengths)
        ctx.group = group
        return before, sent.clone() if rank == 0 else _behind(before, tail, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_before: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        lengths, all_lengths = ctx.saved_tensors
        world, rank = world_and_rank(ctx.group)
        own = d_before if rank == 0 else d_before + _moved(d_after, -lengths)
        gathered = all_gather(own, ctx.group)
        d_sent = torch.zeros_like(d_before)
        between = torch.zeros_like(lengths)
        for later in range(rank + 1, world):
            d_sent = d_sent + _moved(gathered[later], -between)
            between = between + all_lengths[later]
        d_end = d_after + d_sent
        taps = d_before.shape[1]
        is_own = torch.arange(taps, 0, -1, device=lengths.device) <= lengths[:, None]
        d_tail = torch.where(is_own[..., None], d_end, torch.zeros_like(d_end))
        d_initial = d_before + _moved(d_end, -lengths) if rank == 0 else torch.zeros_like(d_before)
        return d_tail, d_initial, None, None


def _moved(tokens: Tensor, by: Tensor) -> Tensor:
    """Tokens [N, taps, C], moved so many positions [N] towards the oldest, or below 0 the newest; 0 where none is."""
    taps = tokens.shape[1]
    place = torch.arange(taps, device=tokens.device) + by[:, None]
    found = tokens.take_along_dim(place.clamp(0, taps - 1)[..., None], 1)
    return torch.where(((place >= 0) & (place < taps))[..., None], found, torch.zeros_like(tokens))


def _behind(before: Tensor, tail: Tensor, lengths: Tensor) -> Tensor:
    """The newest tokens [N, taps, C] of what is before and then a rank's own."""
    is_own = torch.arange(tail.shape[1], 0, -1, device=tail.device) <= lengths[:, None]
    return torch.where(is_own[..., None], tail, _moved(before, lengths))


def _before(tails: Tensor, lengths: Tensor) -> Tensor:
    """The newest tokens [N, taps, C] of the ranks before: of what each sent [ranks, N, taps, C] and lengths [ranks, N].

    What the first one sent counts whole: it begins with the initial state.
    """
    before = tails[0]
    for tail, own in zip(tails[1:], lengths[1:], strict=True):
        before = _behind(before, tail, own)
    return before
