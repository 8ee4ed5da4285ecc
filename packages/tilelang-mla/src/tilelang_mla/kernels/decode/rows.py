"""Loads of key blocks by rows.cuh, wherever keys are: a lane of the producer knows where one of its warp's 16 keys is.

Where the block behind the next has its keys is asked for while this one is loaded, and looked at a block later: a page
table's entry takes longer than copies to be issued. Keys of 8 bits come to L2 as soon as that is known.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tilelang_mla.kernels.common import WARP, macro

TEXT = Path(__file__).with_name("rows.cuh").read_text()
# Chunks of half the latents of 512.
_CHUNKS = 4
# Elements of half a latent.
_HALF = 256


class Held(NamedTuple):
    """Registers: parts of the two keys of a thread that are still to be widened, and a scale of each key."""

    words: Any
    scales: Any


def alloc_held(T: Any, S: Any) -> tuple[Any, Any]:
    """The fields of a :class:`Held`; a part has 4 words."""
    return T.alloc_local((max(4 * S.units, 1),), T.uint32), T.alloc_local((2,), T.float32)


def own_key(T: Any, S: Any, thread: Any) -> Any:
    """The key of a block that a lane looks up; several lanes of a warp have the same.

    Of a pair the first lanes have those of this program's half, and the next ones the same of the other's.
    """
    key = T.truncdiv(thread, WARP) * S.keys_of_warp + thread % S.keys_of_warp
    if S.paired:
        half = T.block_rank_in_cluster() ^ T.truncdiv(thread, S.keys_of_warp) % 2
        key = half * (S.block_n // 2) + key
    return key


def call(T: Any, name: str, *arguments: Any, constants: tuple[Any, ...] = ()) -> Any:
    """Call a function of rows.cuh."""
    shape = ", ".join(str(value).lower() for value in constants)
    return T.call_extern("handle", f"mla::rows::{name}<{shape}>", *arguments)


def at(T: Any, place: Any) -> Any:
    """The address of an element."""
    return T.access_ptr(place, "rw")


def of_warp(S: Any) -> int:
    """Keys of a block that a warp is told of: those that it loads, and of a pair those that the other's does."""
    return S.keys_of_warp * (2 if S.paired else 1)


def sent_to(S: Any, full: Any) -> tuple[Any, ...]:
    """Of a pair, what counts the keys that the other program sends."""
    return (full,) if S.paired else ()


@macro
def entry_of(T, inputs, i_b, key, length):
    """What is told of a key, in the table or a list; -1 of one behind the last."""
    entry = T.alloc_var(T.int32, init=-1)
    if key < length:
        entry = inputs.block_table[i_b, key if inputs.lists is not None else T.truncdiv(key, inputs.kv.shape[1])]
    return entry


@macro
def place_of(T, inputs, entry, key):
    """Elements before a key in the cache, by what is told of it; -1 of none, and of one beyond the pool."""
    pages, page_size = inputs.kv.shape[:2]
    i_page = T.alloc_var(T.int32, init=entry)
    row = T.alloc_var(T.int32, init=0)
    if inputs.lists is not None:
        if entry >= 0:
            row = T.truncmod(entry, page_size)
            i_page = T.truncdiv(entry, page_size)
    else:
        row = T.truncmod(key, page_size)
    place = T.alloc_var(T.int64, init=T.int64(-1))
    if i_page >= 0 and i_page < pages:
        place = T.cast(i_page, T.int64) * inputs.kv.strides[0] + T.cast(row, T.int64) * inputs.kv.strides[1]
    return place


def key_at(T: Any, inputs: Any, place: Any) -> Any:
    """The address of a key; that of the first one for none.

    To be given a name before it is handed to a function: TileLang would guard the call, as the last dimension is
    exceeded, and lanes of a warp must call together.
    """
    return at(T, inputs.kv[0, 0, T.max(place, T.int64(0))])


def key_of(T: Any, S: Any, work: Any, step: Any, thread: Any) -> Any:
    """The number of a lane's key in a block of a work item."""
    return T.alloc_var(T.int32, init=(work.first + step) * S.block_n + own_key(T, S, thread))


def end_of(T: Any, S: Any, work: Any) -> Any:
    """The key behind a work item's last: those that follow are another program's."""
    return T.min(work.length, (work.first + work.steps) * S.block_n)


@macro
def begin_rows(T, S, inputs, work, held, thread):
    """Of a work item's first block: where its keys are, of the second what is told of them; loads of 8 bits begin."""
    key = key_of(T, S, work, 0, thread)
    entry = entry_of(T, inputs, work.sequence, key, end_of(T, S, work))
    next_entry = entry_of(T, inputs, work.sequence, key_of(T, S, work, 1, thread), end_of(T, S, work))
    place = place_of(T, inputs, entry, key)
    if S.is_8bit:
        own = key_at(T, inputs, place)
        call(
            T, "begin_keys", at(T, held.words[0]), at(T, held.scales[0]), own, place >= 0, thread,
            constants=(S.keys_of_warp, S.scales > 1, S.paired, S.units),
        )  # fmt: skip
    return place, next_entry


@macro
def load_by_rows(T, S, inputs, memory, barriers, work, held, at_hand, step, stage, phase, thread):
    """A block; ``at_hand`` is where its keys are, and what is told of the next one's. Returns these of the next."""
    place, told = at_hand
    next_place = place_of(T, inputs, told, key_of(T, S, work, step + 1, thread))
    entry = entry_of(T, inputs, work.sequence, key_of(T, S, work, step + 2, thread), end_of(T, S, work))
    kind = (S.keys_of_warp, S.scales > 1, S.dtype == T.bfloat16, S.units)
    if S.is_8bit:
        following = key_at(T, inputs, next_place)
        call(T, "fetch_key", following, next_place >= 0, thread, constants=kind[:2])
    own = key_at(T, inputs, place)
    k_l, k_r, k_rope = (at(T, ring[stage, 0, 0]) for ring in (memory.k_l, memory.k_r, memory.k_rope))
    T.barrier_wait(barriers.left_empty[stage], phase)
    if S.sparse:
        if thread % WARP < of_warp(S):
            memory.valid[stage, own_key(T, S, thread)] = T.cast(place >= 0, T.uint8)
    if S.is_8bit:
        call(
            T, "widen_left", at(T, held.words[0]), at(T, held.scales[0]), k_l, k_rope, own, place >= 0, following,
            next_place >= 0, thread, *sent_to(S, barriers.left_full[stage]), constants=kind,
        )  # fmt: skip
        T.fence_proxy_async()
        if S.tells_valid:
            T.cp_async_barrier_noinc(barriers.left_full[stage])
        T.barrier_arrive(barriers.left_full[stage])
    else:
        call(T, "copy_rows", k_l, 0, own, place >= 0, thread, constants=(S.keys_of_warp, _CHUNKS, S.lines))
        if S.dim_rope:
            call(T, "copy_rows", k_rope, 4 * _HALF, own, place >= 0, thread, constants=(S.keys_of_warp, 1, S.lines))
        T.cp_async_barrier_noinc(barriers.left_full[stage])
        if S.tells_valid:
            T.barrier_arrive(barriers.left_full[stage])
    T.barrier_wait(barriers.right_empty[stage], phase)
    if S.is_8bit:
        call(
            T, "widen_right", at(T, held.words[0]), at(T, held.scales[0]), k_r, own, place >= 0, following,
            next_place >= 0, thread, *sent_to(S, barriers.right_full[stage]), constants=kind,
        )  # fmt: skip
        T.fence_proxy_async()
        T.barrier_arrive(barriers.right_full[stage])
    else:
        call(T, "copy_rows", k_r, 2 * _HALF, own, place >= 0, thread, constants=(S.keys_of_warp, _CHUNKS, S.lines))
        T.cp_async_barrier_noinc(barriers.right_full[stage])
    return next_place, entry
