"""Loads of key blocks to shared memory, by TMA where a block lies in one page, else row by row."""

from tilelang_mla.kernels.common import GROUP, macro
from tilelang_mla.kernels.decode.schedule import OF_PRODUCER

# For copies that nothing waits for but a barrier.
_ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


@macro
def load_q(T, S, q, memory, full, i_b, first_row):
    """A tile of q; TMA gives zeros for rows behind the last."""
    rows = memory.q_l.shape[0]
    T.tma_copy(q[i_b, first_row : first_row + rows, 0 : S.half], memory.q_l, barrier=full)
    T.tma_copy(q[i_b, first_row : first_row + rows, S.half : S.dim_nope], memory.q_r, barrier=full)
    if S.dim_rope:
        T.tma_copy(q[i_b, first_row : first_row + rows, S.dim_nope : S.width], memory.q_rope, barrier=full)
    T.barrier_arrive(full)


@macro
def load_left(T, S, kv, memory, full, i_page, row, stage):
    """Left half and rope of a block that lies in one page; TMA gives zeros for a page outside the pool."""
    T.tma_copy(kv[i_page, row : row + S.block_n, 0 : S.half], memory.k_l[stage, :, :], barrier=full[stage])
    if S.dim_rope:
        T.tma_copy(
            kv[i_page, row : row + S.block_n, S.dim_nope : S.width], memory.k_rope[stage, :, :], barrier=full[stage]
        )
    T.barrier_arrive(full[stage])


@macro
def load_right(T, S, kv, memory, full, i_page, row, stage):
    T.tma_copy(kv[i_page, row : row + S.block_n, S.half : S.dim_nope], memory.k_r[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])


@macro
def row_of(T, inputs, i_b, key, length):
    """Where a key is; one behind the last, and one of no page, is on page -1."""
    pages, page_size = inputs.kv.shape[:2]
    i_page = T.alloc_var(T.int32, init=-1)
    row = T.alloc_var(T.int32, init=0)
    if inputs.lists is not None:
        # An entry of a list is a position in the pool.
        if key < length:
            i_page = inputs.block_table[i_b, key]
        if i_page >= 0:
            row = T.truncmod(i_page, page_size)
            i_page = T.truncdiv(i_page, page_size)
    else:
        row = T.truncmod(key, page_size)
        if key < length:
            i_page = inputs.block_table[i_b, T.truncdiv(key, page_size)]
    if i_page >= pages or i_page < 0:
        i_page = -1
    return i_page, row


@macro
def tell_row(T, inputs, memory, i_b, key, length, slot, i):
    """Write down where key ``i`` of a block is."""
    i_page, row = row_of(T, inputs, i_b, key, length)
    memory.at_page[slot, i] = i_page
    memory.at_row[slot, i] = row


@macro
def load_rows(T, kv, memory, ring, stage, begin, slot):
    """Elements from ``begin`` on of each key of a block, as many as the ring holds of it; 0 on page -1."""
    at_page, at_row = memory.at_page, memory.at_row
    block_n, size = ring.shape[1], int(ring.shape[2])
    # Pieces of a power of two, or what tells a line's place takes more registers than the producer has.
    piece = size if size & (size - 1) == 0 else 32
    for i_piece in T.serial(size // piece):
        for i, j in T.Parallel(block_n, piece, annotations=_ASYNC):
            ring[stage, i, i_piece * piece + j] = T.if_then_else(
                at_page[slot, i] >= 0,
                kv[T.max(at_page[slot, i], 0), at_row[slot, i], begin + i_piece * piece + j],
                T.cast(0, ring.dtype),
            )


@macro
def gather_block(T, S, inputs, memory, barriers, work, at_hand, step, stage, phase, thread):
    """A block whose keys lie anywhere, by asynchronous copies of a row each; returns where the next block's are.

    A thread looks one of them up while this block comes: a table's entries take longer than copies to be issued.
    """
    T.sync_threads(OF_PRODUCER, GROUP)
    if thread < S.block_n:
        memory.at_page[0, thread] = at_hand[0]
        memory.at_row[0, thread] = at_hand[1]
    T.sync_threads(OF_PRODUCER, GROUP)
    next_key = (work.first + step + 1) * S.block_n + thread
    next_page, next_row = row_of(T, inputs, work.sequence, next_key, work.length)
    T.barrier_wait(barriers.left_empty[stage], phase)
    load_rows(T, inputs.kv, memory, memory.k_l, stage, 0, 0)
    if S.dim_rope:
        load_rows(T, inputs.kv, memory, memory.k_rope, stage, S.dim_nope, 0)
    T.cp_async_barrier_noinc(barriers.left_full[stage])
    if S.tells_valid:
        if thread < S.block_n:
            memory.valid[stage, thread] = T.cast(memory.at_page[0, thread] >= 0, T.uint8)
        T.barrier_arrive(barriers.left_full[stage])
    T.barrier_wait(barriers.right_empty[stage], phase)
    load_rows(T, inputs.kv, memory, memory.k_r, stage, S.half, 0)
    T.cp_async_barrier_noinc(barriers.right_full[stage])
    return next_page, next_row
