"""Context parallelism over a process group: the ranks share the tokens of a sequence, each a run of them.

===========================  =====================================  ===============================================
function                     what a rank holds                      what it sends, (world - 1) times
===========================  =====================================  ===============================================
lightning_attention_cp       [b, h, n_r, d], n_r of the n tokens    4 (b h d e + b) bytes, and 4 b h d e backward
lightning_attention_         [T_r, H, D], its tokens of each of N   4 (N H D E + N) bytes, and 4 N H D E backward
packed_cp                    sequences
===========================  =====================================  ===============================================

Lengths, the 4 bytes a sequence, are sent by more than two ranks alone: between two lie no tokens. A rank makes the
state that its own tokens leave (``lightning_state``), the states and the lengths are gathered, and each decays by the
tokens that lie between: ``h_r = sum over p < r of exp(-s (n_{p+1} + .. + n_{r-1})) S_p``. From that
state the ordinary call goes on. Gradients are the mirror image, from the last rank to the first.

Functions over a ``torch.distributed.ProcessGroup`` (None: the default one). Every rank of the group makes the same
calls, forward and backward; its tensors differ from another's in the number of tokens alone. A group of one makes the
plain call. Collectives are torch's functional ones; the host waits for nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from kernel_reference.checks import as_float, check_bool, check_choice, check_dense, check_no_tangents, fail
from kernel_reference.collectives import all_gather, world_and_rank
from kernel_reference.peers import gather_states
from kernel_reference.transforms import are_active, check_no_transforms
from lightning_attn.api import LightningResult, lightning_attention
from lightning_attn.arguments import check_slopes
from lightning_attn.packed.api import PackedResult, lightning_attention_packed

Tensor = torch.Tensor
Exchange = Literal["all_gather", "symmetric"]

_ops: Any = torch.ops.lightning_attn
_GATHERS = {"all_gather": all_gather, "symmetric": gather_states}


def lightning_attention_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ed: Tensor,
    *,
    group: Any,
    kv_history: Tensor | None = None,
    scale: float = 1.0,
    exact: bool = False,
    exchange: Exchange = "all_gather",
) -> LightningResult:
    """:func:`lightning_attn.lightning_attention` over sequences whose tokens the ranks of a group share.

    Rank 0 has the first tokens, rank 1 the next ones: ``kernel_reference.sharding.Contiguous(world, rank).tokens(n)``,
    as ``torch.chunk`` and DTensor's ``Shard(2)`` cut them, or any other runs. A rank may have none.

    Args:
        q, k: [b, h, n_r, d]; v: [b, h, n_r, e], this rank's tokens; otherwise as there.
        ed: the decay rates of the h heads, as there.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        kv_history: the states before the first token of all, [b, h, d, e] float32. Read on rank 0; what other ranks
            give is not looked at.
        scale: factor of the outputs.
        exact: whether a rank's state is made of all its tokens, and not only of the last ``ceil(24 / slope)`` of each
            head (see :func:`lightning_attn.lightning_state`): of those before, no more than 4e-11 is left. So are
            gradients, of the first ones.
        exchange: how states are gathered: by a collective, or "symmetric", by a kernel that writes to the peers'
            memory, which takes GPUs of one host. Call that once before a CUDA graph is captured, for its workspace;
            streams that run beside each other need a group each.

    Returns:
        LightningResult(out [b, h, n_r, e], kv [b, h, 1, d, e]): this rank's rows, and the state after its last token,
        which on the last rank is that of the whole sequence. Differentiable once, in reverse mode, in q, k, v and
        kv_history (rank 0's; 0 elsewhere), through both, where every rank takes part.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there.
    """
    named = {"q": q, "k": k, "v": v, "ed": ed, "kv_history": kv_history}
    world = _check(group, exact, exchange, "ed", named, "[b, h, n, d]")
    if world == 1:
        return lightning_attention(q, k, v, ed, kv_history=kv_history, scale=scale)
    apply: Any = _ContextParallel.apply
    out, kv = apply(q, k, v, ed, None, kv_history, group, as_float("scale", scale), exact, exchange)
    return LightningResult(out, kv[:, :, None])


def lightning_attention_packed_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    *,
    group: Any,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    exact: bool = False,
    exchange: Exchange = "all_gather",
) -> PackedResult:
    """:func:`lightning_attn.lightning_attention_packed` over packed sequences whose tokens the ranks of a group share.

    A rank has a run of each of the N sequences, the next rank the run behind it; runs may be empty. Sequences may be
    cut one by one (``kernel_reference.sharding.shard(x, Contiguous(world, rank), cu_seqlens)``), or all rows at once,
    in which case a rank's ``cu_seqlens`` are the whole ones, less its first row and clamped to its rows.

    Args:
        q, k: [T_r, H, D]; v: [T_r, H, E], this rank's rows; otherwise as there.
        slopes: the decay rates of the H heads, as there.
        cu_seqlens: [N + 1], of this rank's rows; N is the same on every rank.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        initial_state: the states before the sequences' first tokens, [N, H, D, E] float32. Read on rank 0; what other
            ranks give is not looked at.
        scale: factor of the outputs.
        exact, exchange: as for :func:`lightning_attention_cp`.

    Returns:
        PackedResult(out [T_r, H, E], final_state [N, H, D, E]): this rank's rows, and the states after its runs, which
        on the last rank are those of the sequences. Differentiable as :func:`lightning_attention_cp` is.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there.
    """
    named = {"q": q, "k": k, "v": v, "slopes": slopes, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    world = _check(group, exact, exchange, "slopes", named, "[T, H, D]")
    if world == 1:
        return lightning_attention_packed(q, k, v, slopes, cu_seqlens, initial_state=initial_state, scale=scale)
    apply: Any = _ContextParallel.apply
    numbers = (as_float("scale", scale), exact, exchange)
    return PackedResult(*apply(q, k, v, slopes, cu_seqlens, initial_state, group, *numbers))


def _check(group: Any, exact: bool, exchange: str, rates: str, tensors: dict[str, Any], layout: str) -> int:
    """What must be refused before anything is sent, in the names of q's ``layout``; the ranks of the group."""
    check_bool("exact", exact)
    check_choice("exchange", exchange, tuple(_GATHERS))
    optional = ("kv_history", "initial_state")
    check_dense(**{name: tensor for name, tensor in tensors.items() if tensor is not None or name not in optional})
    if tensors["q"].ndim == layout.count(",") + 1:
        check_slopes(rates, tensors[rates], tensors["q"].shape[1], "q", tensors["q"], layout)
    if are_active():
        check_no_transforms(**tensors)
        check_no_tangents(**tensors)
    if torch.is_grad_enabled() and tensors[rates].requires_grad:
        fail(rates, f"without gradient (decay rates have none here; pass {rates}.detach())", "requires_grad=True")
    return world_and_rank(group)[0]


class _ContextParallel(torch.autograd.Function):
    """Both forms: without cu_seqlens [b, h, n, d], of one length, and with them packed rows."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor | None, initial: Tensor | None,
        group: Any, scale: float, exact: bool, exchange: Exchange,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        world, rank = world_and_rank(group)
        history = initial if rank == 0 else None
        own = _own_state(k, v, slopes, cu_seqlens, history, (1.0, exact, False), is_read=rank < world - 1)
        lengths = own.new_empty(0, dtype=torch.int32) if world == 2 else _lengths(k, cu_seqlens)
        states, all_lengths = _gathered(own, lengths, group, exchange)
        before = history if rank == 0 else _carried(states[:rank], all_lengths[:rank], slopes, nearest=-1)
        if cu_seqlens is None:
            out, kv = _ops.attention_inference(q, k, v, slopes, before, scale)
            final = kv[:, :, 0]
        else:
            out, final = _ops.packed(q, k, v, slopes, cu_seqlens, before, scale)
        ctx.save_for_backward(q, k, v, slopes, cu_seqlens, before, all_lengths)
        ctx.group, ctx.scale, ctx.exact, ctx.exchange = group, scale, exact, exchange
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slopes, cu_seqlens, before, all_lengths = ctx.saved_tensors
        world, rank = world_and_rank(ctx.group)
        if d_out is None:
            d_out = q.new_zeros(()).expand(*q.shape[:-1], v.shape[-1])
        numbers = (ctx.scale, ctx.exact, True)
        own = _own_state(q, d_out, slopes, cu_seqlens, d_final, numbers, is_read=rank > 0)
        gradients = _GATHERS[ctx.exchange](own, ctx.group)
        d_after = d_final
        if rank < world - 1:
            d_after = _carried(gradients[rank + 1 :], all_lengths[rank + 1 :], slopes, nearest=0)
            if d_final is not None:
                d_after = d_after + d_final
        given_tensors = (q, k, v, slopes)
        if cu_seqlens is None:
            d_kv = None if d_after is None else d_after[:, :, None]
            found = _ops.attention_backward(*given_tensors, before, d_out, d_kv, ctx.scale)
        else:
            found = _ops.packed_backward(*given_tensors, cu_seqlens, before, d_out, d_after, ctx.scale)
        d_q, d_k, d_v, d_before = found
        d_initial = d_before if rank == 0 else torch.zeros_like(d_before)
        return d_q, d_k, d_v, None, None, d_initial if ctx.needs_input_grad[5] else None, None, None, None, None


def _own_state(
    k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor | None, initial: Tensor | None, numbers: tuple[Any, ...],
    *, is_read: bool,
) -> Tensor:  # fmt: skip
    """What the op ``state`` gives, [N, H, D, E]; zeros where no rank reads it."""
    if not is_read:
        initial = None
        if cu_seqlens is None:
            k, v = k[:, :, :0], v[:, :, :0]
        else:
            k, v, cu_seqlens = k[:0], v[:0], torch.zeros_like(cu_seqlens)
    state: Tensor = _ops.state(k, v, slopes, cu_seqlens, initial, *numbers)
    return state


def _gathered(own: Tensor, lengths: Tensor, group: Any, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The states of all ranks [world, N, H, D, E], and the lengths [world, ...]; of no length states alone are sent."""
    if not lengths.numel():
        states = _GATHERS[exchange](own, group)
        return states, lengths.expand(len(states), 0)
    # One collective for both: the bits of the lengths travel as those of float32.
    gathered = _GATHERS[exchange](torch.cat([own.flatten(), lengths.view(torch.float32)]), group)
    states = gathered[:, : own.numel()].unflatten(1, own.shape)
    return states, gathered[:, own.numel() :].contiguous().view(torch.int32)


def _lengths(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Tokens of this rank, int32 by sequence, on the device."""
    if cu_seqlens is None:
        return torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)
    bounds = cu_seqlens.clamp(0, k.shape[0])
    return (bounds[1:] - bounds[:-1]).clamp(min=0).to(torch.int32)


def _carried(states: Tensor, lengths: Tensor, slopes: Tensor, nearest: int) -> Tensor:
    """The sum of other ranks' states [ranks, N, H, D, E], each decayed by the tokens between.

    lengths: [ranks, N], of those ranks, where there are several. nearest: 0 or -1, the first or the last of them.
    """
    if states.shape[0] == 1:
        # Nothing lies between.
        return states[0]
    if nearest == -1:
        states, lengths = states.flip(0), lengths.flip(0)
    # Those of the ranks that are nearer: 0 for the nearest.
    between = (lengths.cumsum(0) - lengths).to(torch.float32)
    rates = torch.where(slopes > 0, slopes, 0).clamp(max=256).reshape(-1)
    weights = torch.exp(-rates * between[..., None])
    return (weights[..., None, None] * states).sum(0)
