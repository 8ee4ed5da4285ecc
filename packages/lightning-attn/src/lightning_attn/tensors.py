"""The tensors of each op, in its order: what checks, references and launches take as one argument."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Attention(NamedTuple):
    """q, k [b, h, n, d], v [b, h, n, e], decay rates, initial states [b, h, d, e]; results if allocated."""

    q: Tensor
    k: Tensor
    v: Tensor
    ed: Tensor
    kv_history: Tensor | None
    out: Tensor | None = None
    kv: Tensor | None = None


class AttentionBackward(NamedTuple):
    """The tensors of an attention, the gradients of its results and, if allocated, those of its inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    ed: Tensor
    kv_history: Tensor | None
    d_out: Tensor
    d_kv: Tensor | None
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    d_v: Tensor | None = None
    d_history: Tensor | None = None

    def asks_for_states(self) -> bool:
        """Whether d_history is made: with a loss on outputs alone, from zeros, it is not, and one kernel makes dk and
        dv, where head sizes are equal.
        """
        return self.kv_history is not None or self.d_kv is not None


class Varlen(NamedTuple):
    """q, k [T, Hqk, D], v [T, Hv, E], packed; the pool of states [num_slots, H, D, E]; snapshots [B, P]."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    cu_seqlens: Tensor
    state_pool: Tensor
    slots: Tensor
    has_initial_state: Tensor | None
    positions: Tensor | None
    snapshot_slots: Tensor | None
    out: Tensor


class Prefill(NamedTuple):
    """What one prefill reads and writes, whatever op it is of.

    ``initial`` and ``final``: states before and after, of a pool the same one, by ``slots``. Last are snapshots.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    # None until it is allocated.
    out: Any
    slopes: Tensor
    initial: Tensor | None = None
    final: Any = None
    cu_seqlens: Tensor | None = None
    slots: Tensor | None = None
    has_initial: Tensor | None = None
    positions: Tensor | None = None
    snapshot_slots: Tensor | None = None


class MainPrefill(Protocol):
    """What runs the launch of a prefill that makes its outputs, of segments with the states ``between`` them."""

    def __call__(self, t: Prefill, between: Tensor | None = None) -> None: ...


class Decode(NamedTuple):
    """q, k [B, Hqk, D], v [B, Hv, E], one token each, or with T drafts behind B; the pool of states."""

    q: Tensor
    k: Tensor
    v: Tensor
    state_pool: Tensor
    slots: Tensor
    slopes: Tensor
    out: Tensor


class Commit(NamedTuple):
    """Keys and values of drafts, the pool of states, and how many drafts are accepted [B]."""

    k: Tensor
    v: Tensor
    state_pool: Tensor
    slots: Tensor
    slopes: Tensor
    accepted: Tensor


class TreeVerify(NamedTuple):
    """Drafts [B, T, H, D|E] that branch, parents [B, T] of them; the pool of states."""

    q: Tensor
    k: Tensor
    v: Tensor
    state_pool: Tensor
    slots: Tensor
    slopes: Tensor
    parents: Tensor
    out: Tensor


class PathCommit(NamedTuple):
    """Keys and values of drafts that branch, how many are accepted [B], and which: the path [B, P]."""

    k: Tensor
    v: Tensor
    state_pool: Tensor
    slots: Tensor
    slopes: Tensor
    accepted: Tensor
    path: Tensor


class Packed(NamedTuple):
    """q, k [T, H, D], v [T, H, E] of packed sequences, states before them [N, H, D, E]; results if allocated."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    cu_seqlens: Tensor
    initial_state: Tensor | None
    out: Tensor | None = None
    final_state: Tensor | None = None


class PackedBackward(NamedTuple):
    """The tensors of packed sequences, the gradients of their results and, if allocated, those of their inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    cu_seqlens: Tensor
    initial_state: Tensor | None
    d_out: Tensor
    d_final: Tensor | None
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    d_v: Tensor | None = None
    d_initial: Tensor | None = None

    def asks_for_states(self) -> bool:
        """Whether d_initial is made: as of a batch of one length."""
        return self.initial_state is not None or self.d_final is not None


class State(NamedTuple):
    """k [T, Hk, D], v [T, Hv, E], packed, or without cu_seqlens [b, h, n, D|E]; states before and after them."""

    k: Tensor
    v: Tensor
    slopes: Tensor
    cu_seqlens: Tensor | None
    initial_state: Tensor | None
    final_state: Tensor | None = None
