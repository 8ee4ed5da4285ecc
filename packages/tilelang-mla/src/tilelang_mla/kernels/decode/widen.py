"""Caches of 8 bits: their bytes come to shared memory as they are, and are widened there to q's dtype for the MMAs.

Copies are asynchronous, a row each, into a ring of the producer's own: while a block is widened the next ones are on
their way. Where their rows are is looked up a block ahead of that. Whatever pages hold, a key lies anywhere.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, macro
from tilelang_mla.kernels.decode.loads import load_rows, row_of, tell_row
from tilelang_mla.kernels.decode.schedule import OF_PRODUCER

# Blocks in flight, that which is widened counted.
STAGES = 3
# Latents that share a scale in a record.
TILE = 128


class Raw(NamedTuple):
    """Rings of what the cache holds: latents of 8 bits, ropes of 8 bits or as wide as q, scales of TILE latents; and of
    a list, which entries are keys.
    """

    latent: Any
    rope: Any
    scales: Any
    valid: Any


@macro
def alloc_raw(T, S):
    latent = T.alloc_shared((STAGES, S.block_n, S.dim_nope), T.float8_e4m3fn)
    rope = T.alloc_shared((STAGES, S.block_n, S.held_rope), S.rope_dtype(T))
    scales = T.alloc_shared((STAGES, S.block_n, S.scales), T.float32)
    valid = T.alloc_shared((STAGES, S.block_n), T.uint8)
    return latent, rope, scales, valid


@macro
def copy_raw(T, S, inputs, memory, i_raw, slot):
    """Issue the copies of a block whose rows are told of."""
    raw = memory.raw
    load_rows(T, inputs.kv, memory, raw.latent, i_raw, 0, slot)
    if S.dim_rope:
        load_rows(T, inputs.rope, memory, raw.rope, i_raw, 0, slot)
    if S.scales > 1:
        load_rows(T, inputs.scales, memory, raw.scales, i_raw, 0, slot)


@macro
def note_valid(T, S, memory, i_raw, slot, thread):
    """Which entries of a list are keys: known where they are copied, and told when their block is."""
    if S.sparse:
        if thread < S.block_n:
            memory.raw.valid[i_raw, thread] = T.cast(memory.at_page[slot, thread] >= 0, T.uint8)


@macro
def widen(T, S, raw, ring, stage, i_raw, begin):
    """Half of the latents of a block, from element ``begin`` on, each times its tile's scale if they have any."""
    for i, j in T.Parallel(*ring.shape[1:]):
        wide = T.cast(raw.latent[i_raw, i, begin + j], T.float32)
        if S.scales > 1:
            ring[stage, i, j] = T.cast(wide * raw.scales[i_raw, i, (begin + j) // TILE], ring.dtype)
        else:
            ring[stage, i, j] = T.cast(wide, ring.dtype)


@macro
def widen_rope(T, S, raw, ring, stage, i_raw):
    if S.dim_rope:
        for i, j in T.Parallel(*ring.shape[1:]):
            ring[stage, i, j] = T.cast(raw.rope[i_raw, i, j], ring.dtype)


@macro
def begin_raw(T, S, inputs, memory, work, thread):
    """Before a work item's first block: issue the copies of as many as the ring holds but one, tell of the next."""
    first_key = work.first * S.block_n
    for i in T.unroll(STAGES):
        # What was told of before has been read by all.
        T.sync_threads(OF_PRODUCER, GROUP)
        if thread < S.block_n:
            tell_row(T, inputs, memory, work.sequence, first_key + i * S.block_n + thread, work.length, i % 2, thread)
        T.sync_threads(OF_PRODUCER, GROUP)
        if i < STAGES - 1:
            if i < work.steps:
                copy_raw(T, S, inputs, memory, i, i % 2)
                note_valid(T, S, memory, i, i % 2, thread)
            T.ptx_commit_group()


@macro
def load_widened(T, S, inputs, memory, barriers, work, step, stage, phase, thread):
    """A block, widened as soon as its stage is free; the copies of a later one are issued first."""
    ahead = step + STAGES - 1
    T.ptx_wait_group(STAGES - 2)
    # This block is here, all have widened the one before, whose stage is free, and rows of the one ahead are told of.
    T.sync_threads(OF_PRODUCER, GROUP)
    if ahead < work.steps:
        copy_raw(T, S, inputs, memory, ahead % STAGES, ahead % 2)
        note_valid(T, S, memory, ahead % STAGES, ahead % 2, thread)
    # Of no copies too: groups are counted.
    T.ptx_commit_group()
    i_page = T.alloc_var(T.int32, init=-1)
    row = T.alloc_var(T.int32, init=0)
    if thread < S.block_n:
        next_key = (work.first + ahead + 1) * S.block_n + thread
        next_page, next_row = row_of(T, inputs, work.sequence, next_key, work.length)
        i_page = next_page
        row = next_row
    i_raw = step % STAGES
    T.barrier_wait(barriers.left_empty[stage], phase)
    widen(T, S, memory.raw, memory.k_l, stage, i_raw, 0)
    widen_rope(T, S, memory.raw, memory.k_rope, stage, i_raw)
    if S.sparse:
        if thread < S.block_n:
            memory.valid[stage, thread] = memory.raw.valid[i_raw, thread]
    T.fence_proxy_async()
    T.barrier_arrive(barriers.left_full[stage])
    T.barrier_wait(barriers.right_empty[stage], phase)
    widen(T, S, memory.raw, memory.k_r, stage, i_raw, S.half)
    T.fence_proxy_async()
    T.barrier_arrive(barriers.right_full[stage])
    if thread < S.block_n:
        memory.at_page[(ahead + 1) % 2, thread] = i_page
        memory.at_row[(ahead + 1) % 2, thread] = row
