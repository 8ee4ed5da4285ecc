"""Attention of packed query tokens x heads to a paged latent cache, and the merging of its parts.

A program takes one place of a schedule after the other, or without a schedule one place: a tile of 64 rows of a
sequence and the part of its keys that is walked for it. Three warpgroups have a role each:

========  ====================================================================================================
scores    multiplies q by the keys, makes the weights, shares them, and multiplies the left half of the latents
values    multiplies the right half of the latents by the weights that it is given
producer  finds what a place is, brings q, and blocks of keys to shared memory, a ring of ``num_stages`` of them;
          the first keys of a part come while the other two still finish the part before
========  ====================================================================================================

A block is kept as left half, right half and rope, so that each goes as soon as its reader is through with it. What
depends on lengths, batch, heads, tokens, pages, scale or parts is no constant: one compiled kernel serves all of them.
``T`` is TileLang's language, handed in, so that a test may hand in one for machines without warpgroups, where the roles
are the steps of one loop (``serial``).
"""

from typing import Any

from tilelang_mla.kernels.common import FLOOR, GROUP, HEADROOM, LN_2, ROWS, WARP, log_of_sum, row_owners

# Registers of a thread of those that multiply and of the one that copies: 65536 in all.
_REGISTERS = 216, 72
# Named barriers of one warpgroup; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
_OF_SCORES, _OF_VALUES, _OF_PRODUCER = 5, 6, 7
# What is found of a part's sequence: its first part, the one behind its last, and its length.
_SEQUENCE, _FIRST, _END, _LENGTH = 0, 1, 2, 3
# What the roles are told, beside sequence and length; the number of parts is 0 where there is no part.
_TOLD = 8
_PARTS, _PART, _ROW, _BLOCK, _STEPS = 2, 4, 5, 6, 7
# For copies that nothing waits for but a barrier.
_ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}
# Parts that a merging thread has on their way at once, and elements of a row that it merges.
_AT_ONCE, _MERGED = 8, 4


def attend(
    T: Any, *, dim_nope: int, dim_rope: int, dtype: Any, block_n: int, num_stages: int, gather: bool,
    serial: bool = False,
) -> Any:  # fmt: skip
    """The kernel of parts.

    gather: rows of a block may lie in many pages and are copied one by one; else a block is one piece of a page of a
    multiple of ``block_n`` tokens. A page that the pool does not have reads as zeros either way. The kernel's
    ``scale`` is that of a softmax of powers of two, and above 0.
    """
    half, width = dim_nope // 2, dim_nope + dim_rope
    batch, rows, pages, page_size = (T.dynamic(name) for name in ("batch", "rows", "pages", "page_size"))
    columns, bounds, places, room = (T.dynamic(name) for name in ("columns", "bounds", "places", "room"))
    q_batch, q_row, kv_page, kv_row = (T.dynamic(name) for name in ("q_batch", "q_row", "kv_page", "kv_row"))
    out_batch, out_row, table_row = (T.dynamic(name) for name in ("out_batch", "out_row", "table_row"))
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))
    threads = 1 if serial else 3 * GROUP
    many, few = _REGISTERS
    of_rows = None if serial else row_owners(T, ROWS)

    def place_of(turn: Any, i_program: Any, num_programs: Any) -> Any:
        """Places are in falling order of their cost and are dealt out to the programs, to and fro."""
        return turn * num_programs + T.if_then_else(turn % 2 == 0, i_program, num_programs - 1 - i_program)

    @T.macro
    def turns_of(i_program, num_programs, row_tiles, first_part, num_parts, scheduled):
        """How many places a program takes."""
        places = T.alloc_var(T.int32, init=num_parts * row_tiles)
        if scheduled != 0:
            places = T.min(T.max(first_part[batch], 0), num_parts) * row_tiles
        turns = T.alloc_var(T.int32, init=T.truncdiv(places, num_programs))
        if place_of(turns, i_program, num_programs) < places:
            turns = turns + 1
        return turns

    @T.macro
    def part_of(turn, i_program, num_programs, row_tiles, order, ordered):
        """The part at a place, and its tile of rows; what is not there is found to be none."""
        place = T.alloc_var(T.int32, init=place_of(turn, i_program, num_programs))
        part = T.alloc_var(T.int32, init=T.truncdiv(place, row_tiles))
        tile = T.alloc_var(T.int32, init=place - part * row_tiles)
        if ordered != 0:
            part = order[part]
        return part, tile

    @T.macro
    def candidate(i_b, first_part, cache_seqlens, scheduled):
        """Of a sequence: its first part, the one behind its last, and its length."""
        begin = T.alloc_var(T.int32, init=0)
        end = T.alloc_var(T.int32, init=0)
        length = T.alloc_var(T.int32, init=0)
        if scheduled != 0 and i_b < batch:
            begin = first_part[i_b]
            end = first_part[i_b + 1]
            length = cache_seqlens[i_b]
        return begin, end, length

    @T.macro
    def note(found, i_b, begin, end, length):
        found[_SEQUENCE] = i_b
        found[_FIRST] = begin
        found[_END] = end
        found[_LENGTH] = length

    @T.macro
    def find_part(
        told, found, slot, part, tile, begin, end, length, thread, count, first_part, cache_seqlens, num_parts,
        num_splits, scheduled,
    ):  # fmt: skip
        """What the roles are told of a part, found by ``count`` threads. Each brings the candidate of its own number.

        What is in device memory leads out of no tensor. Loads that wait for each other take a microsecond each, so that
        what finds a sequence has read all there is to know of it.
        """
        # What was found before has been read by all.
        T.sync_threads(_OF_PRODUCER, GROUP)
        if thread == 0:
            found[_SEQUENCE] = -1
        T.sync_threads(_OF_PRODUCER, GROUP)
        if scheduled != 0:
            if begin <= part and part < end:
                note(found, thread, begin, end, length)
            # Not unrolled: one who copies row by row has no registers to spare.
            for i in T.unroll(T.truncdiv(batch - 1, count), unroll_factor=1):
                i_other = (i + 1) * count + thread
                other_begin, other_end, other_length = candidate(i_other, first_part, cache_seqlens, scheduled)
                if other_begin <= part and part < other_end:
                    note(found, i_other, other_begin, other_end, other_length)
        else:
            if thread == 0:
                i_own = T.alloc_var(T.int32, init=T.truncdiv(part, num_splits))
                if part >= 0 and i_own < batch:
                    note(found, i_own, i_own * num_splits, (i_own + 1) * num_splits, cache_seqlens[i_own])
        T.sync_threads(_OF_PRODUCER, GROUP)
        if thread == 0:
            # Clamped to the grid, as where parts are merged, before they are subtracted: far bounds would wrap.
            own_first = T.alloc_var(T.int32, init=T.max(found[_FIRST], 0))
            i_share = T.alloc_var(T.int32, init=part - own_first)
            own_parts = T.alloc_var(T.int32, init=T.min(found[_END], num_parts) - own_first)
            own_length = T.alloc_var(T.int32, init=found[_LENGTH])
            # Of bounds that do not rise two threads may have found something.
            if found[_SEQUENCE] < 0 or part < 0 or part >= num_parts or i_share < 0 or i_share >= own_parts:
                own_parts = 0
            if own_length < 0 or T.cast(own_length, T.int64) > T.cast(columns, T.int64) * page_size:
                own_length = 0
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32, init=0)
            if own_parts > 0:
                # blocks * i_share / own_parts, rounded down, without a product of more than 32 bits.
                blocks = T.alloc_var(T.int32, init=T.truncdiv(own_length, block_n))
                if own_length > blocks * block_n:
                    blocks = blocks + 1
                share = T.alloc_var(T.int32, init=T.truncdiv(blocks, own_parts))
                rest = T.alloc_var(T.int32, init=blocks - share * own_parts)
                first = share * i_share + T.truncdiv(rest * i_share, own_parts)
                last = share * (i_share + 1) + T.truncdiv(rest * (i_share + 1), own_parts)
                # Of more parts of a sequence than a plan makes, 46340, the products above may wrap.
                first = T.max(T.min(first, blocks), 0)
                last = T.max(T.min(last, blocks), first)
            told[slot, _SEQUENCE] = T.max(found[_SEQUENCE], 0)
            told[slot, _PARTS] = own_parts
            told[slot, _LENGTH] = own_length
            told[slot, _PART] = part
            told[slot, _ROW] = tile * ROWS
            told[slot, _BLOCK] = first
            told[slot, _STEPS] = last - first
        T.sync_threads(_OF_PRODUCER, GROUP)

    @T.macro
    def load_left(kv, k_l, k_rope, left_here, i_page, row, stage):
        """Of a block that lies in one page; the copy engine gives zeros for a page outside the pool."""
        T.tma_copy(kv[i_page, row : row + block_n, 0:half], k_l[stage, :, :], barrier=left_here[stage])
        T.tma_copy(kv[i_page, row : row + block_n, dim_nope:width], k_rope[stage, :, :], barrier=left_here[stage])
        T.barrier_arrive(left_here[stage])

    @T.macro
    def load_right(kv, k_r, right_here, i_page, row, stage):
        T.tma_copy(kv[i_page, row : row + block_n, half:dim_nope], k_r[stage, :, :], barrier=right_here[stage])
        T.barrier_arrive(right_here[stage])

    @T.macro
    def find_rows(block_table, at_page, at_row, i_b, first_key, length):
        """Where the keys of a block are; those behind the last, and those of no page, are on page -1."""
        for i in T.Parallel(block_n):
            i_page = T.if_then_else(first_key + i < length, block_table[i_b, T.truncdiv(first_key + i, page_size)], -1)
            at_page[i] = T.if_then_else(i_page < pages, i_page, -1)
            at_row[i] = T.truncmod(first_key + i, page_size)

    @T.macro
    def load_rows(kv, at_page, at_row, k_piece, stage, begin, size):
        """Elements ``begin`` .. ``begin + size`` of each key, 0 on page -1."""
        # Pieces of a power of two, or what tells a line's place takes more registers than the producer has.
        piece = size if size & (size - 1) == 0 else 32
        for i_piece in T.serial(size // piece):
            for i, j in T.Parallel(block_n, piece, annotations=_ASYNC):
                k_piece[stage, i, i_piece * piece + j] = T.if_then_else(
                    at_page[i] >= 0, kv[T.max(at_page[i], 0), at_row[i], begin + i_piece * piece + j], T.cast(0, dtype)
                )

    @T.macro
    def hidden_from(limit, first_row, heads, tokens, length, causal):
        """The first key that each row does not see."""
        for i in T.Parallel(ROWS):
            i_token = T.min(T.truncdiv(first_row + i, heads), tokens - 1)
            limit[i] = T.if_then_else(causal != 0, length - tokens + i_token + 1, length)

    @T.macro
    def softmax(scores, weights, top, block_top, factor, total, block_total, limit, first_key, scale, sees_all):
        """Scores to weights, and the factor that brings what was summed before to the new maximum."""
        if first_key + block_n > sees_all:
            for i, j in T.Parallel(ROWS, block_n):
                scores[i, j] = T.if_then_else(first_key + j < limit[i], scores[i, j], -T.infinity(T.float32))
        T.reduce_max(scores, block_top, dim=1)
        for i in T.Parallel(ROWS):
            block_top[i] = block_top[i] * scale
            factor[i] = 1
            if block_top[i] > top[i] + HEADROOM:
                factor[i] = T.exp2(top[i] - block_top[i])
                top[i] = block_top[i]
        for i, j in T.Parallel(ROWS, block_n):
            scores[i, j] = T.exp2(scores[i, j] * scale - top[i])
        T.reduce_sum(scores, block_total, dim=1)
        for i in T.Parallel(ROWS):
            total[i] = total[i] * factor[i] + block_total[i]
        T.copy(scores, weights)

    @T.macro
    def scale_rows(acc, factor):
        for i, j in T.Parallel(ROWS, half):
            acc[i, j] = acc[i, j] * factor[i]

    @T.macro
    def bring_to_maximum(acc, factor):
        """Scale rows, but for warps whose rows all kept their maximum."""
        moved = T.alloc_var(T.int32, init=0)
        for i in T.Parallel(ROWS, loop_layout=of_rows):
            if factor[i] != 1:
                moved = 1
        if T.any_sync(moved != 0) != 0:
            scale_rows(acc, factor)

    @T.macro
    def zero_tail(k_piece, stage, first_key, length):
        """A weight of 0 times the NaN that an unused row may hold would be NaN."""
        for i, j in T.Parallel(block_n, half):
            if first_key + i >= length:
                k_piece[stage, i, j] = T.cast(0, dtype)

    @T.macro
    def finish_rows(factor, total):
        """From sums to what divides them. A sum of NaN is not hidden."""
        for i in T.Parallel(ROWS):
            factor[i] = T.if_then_else(total[i] == 0, 0, 1 / total[i])

    @T.macro
    def store_lse(lse, top, total, i_b, first_row, heads):
        for i in T.Parallel(ROWS, loop_layout=of_rows):
            if first_row + i < rows:
                lse[i_b, T.truncmod(first_row + i, heads), T.truncdiv(first_row + i, heads)] = T.if_then_else(
                    total[i] == 0, -T.infinity(T.float32), log_of_sum(T, top[i], total[i], LN_2)
                )

    @T.macro
    def store_part(parts, acc, part, first_row, begin):
        for i, j in T.Parallel(ROWS, half):
            if first_row + i < rows:
                parts[part, first_row + i, begin + j] = acc[i, j]

    @T.macro
    def store_part_lse(part_lse, top, total, part, first_row, wants_lse):
        """Of 2. The quick logarithm is near enough to weigh parts, but not for a sum that is asked for."""
        for i in T.Parallel(ROWS, loop_layout=of_rows):
            log_of = T.alloc_var(T.float32, init=-T.infinity(T.float32))
            if total[i] != 0:
                log_of = top[i] + T.log2(total[i])
                if wants_lse != 0:
                    log_of = log_of_sum(T, top[i], total[i])
            if first_row + i < rows:
                part_lse[part, first_row + i] = log_of

    @T.prim_func
    def attend_decode(
        q: T.StridedTensor((batch, rows, width), (q_batch, q_row, 1), dtype),
        kv: T.StridedTensor((pages, page_size, width), (kv_page, kv_row, 1), dtype),
        cache_seqlens: T.Tensor((batch,), T.int32),
        block_table: T.StridedTensor((batch, columns), (table_row, 1), T.int32),
        first_part: T.Tensor((bounds,), T.int32),
        order: T.Tensor((places,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        scale: T.float32,
        heads: T.int32,
        causal: T.int32,
        num_parts: T.int32,
        num_splits: T.int32,
        scheduled: T.int32,
        ordered: T.int32,
        wants_lse: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_programs, threads=threads) as i_program:
            # Arguments are checked for it: rows may be read in lines of 16 bytes.
            T.assume(kv_page % 8 == 0)
            T.assume(kv_row % 8 == 0)
            q_l = T.alloc_shared((ROWS, half), dtype)
            q_r = T.alloc_shared((ROWS, half), dtype)
            q_rope = T.alloc_shared((ROWS, dim_rope), dtype)
            k_l = T.alloc_shared((num_stages, block_n, half), dtype)
            k_r = T.alloc_shared((num_stages, block_n, half), dtype)
            k_rope = T.alloc_shared((num_stages, block_n, dim_rope), dtype)
            weights_shared = T.alloc_shared((ROWS, block_n), dtype)
            factor_shared = T.alloc_shared((ROWS,), T.float32)
            at_page = T.alloc_shared((block_n,), T.int32)
            at_row = T.alloc_shared((block_n,), T.int32)
            found = T.alloc_shared((4,), T.int32)
            told = T.alloc_shared((2, _TOLD), T.int32)

            scores = T.alloc_fragment((ROWS, block_n), T.float32)
            weights = T.alloc_fragment((ROWS, block_n), dtype)
            acc_l = T.alloc_fragment((ROWS, half), T.float32)
            acc_r = T.alloc_fragment((ROWS, half), T.float32)
            top = T.alloc_fragment((ROWS,), T.float32)
            block_top = T.alloc_fragment((ROWS,), T.float32)
            factor = T.alloc_fragment((ROWS,), T.float32)
            factor_r = T.alloc_fragment((ROWS,), T.float32)
            total = T.alloc_fragment((ROWS,), T.float32)
            block_total = T.alloc_fragment((ROWS,), T.float32)
            limit = T.alloc_fragment((ROWS,), T.int32)

            thread = T.get_thread_binding()
            row_tiles = T.alloc_var(T.int32, init=T.truncdiv(rows + (ROWS - 1), ROWS))
            tokens = T.alloc_var(T.int32, init=T.truncdiv(rows, heads))
            if not serial:
                # The merging kernel may be brought up; it waits for the end of this one by itself.
                T.pdl_trigger()

            if serial:
                turns = turns_of(i_program, num_programs, row_tiles, first_part, num_parts, scheduled)
                for turn in T.serial(turns):
                    begin, end, found_length = candidate(thread, first_part, cache_seqlens, scheduled)
                    new_part, new_tile = part_of(turn, i_program, num_programs, row_tiles, order, ordered)
                    find_part(
                        told, found, 0, new_part, new_tile, begin, end, found_length, thread, 1, first_part,
                        cache_seqlens, num_parts, num_splits, scheduled,
                    )  # fmt: skip
                    i_b = T.alloc_var(T.int32, init=told[0, _SEQUENCE])
                    own_parts = T.alloc_var(T.int32, init=told[0, _PARTS])
                    length = T.alloc_var(T.int32, init=told[0, _LENGTH])
                    part = T.alloc_var(T.int32, init=told[0, _PART])
                    first_row = T.alloc_var(T.int32, init=told[0, _ROW])
                    first = T.alloc_var(T.int32, init=told[0, _BLOCK])
                    steps = T.alloc_var(T.int32, init=told[0, _STEPS])
                    sees_all = T.alloc_var(T.int32, init=length)
                    if causal != 0:
                        sees_all = length - tokens + T.truncdiv(first_row, heads) + 1
                    T.clear(acc_l)
                    T.clear(acc_r)
                    T.clear(total)
                    T.fill(top, FLOOR)
                    hidden_from(limit, first_row, heads, tokens, length, causal)
                    for i, j in T.Parallel(ROWS, half):
                        q_l[i, j] = T.if_then_else(first_row + i < rows, q[i_b, first_row + i, j], 0)
                        q_r[i, j] = T.if_then_else(first_row + i < rows, q[i_b, first_row + i, half + j], 0)
                    for i, j in T.Parallel(ROWS, dim_rope):
                        q_rope[i, j] = T.if_then_else(first_row + i < rows, q[i_b, first_row + i, dim_nope + j], 0)
                    for step in T.serial(steps):
                        stage = step % num_stages
                        first_key = (first + step) * block_n
                        find_rows(
                            block_table, at_page, at_row, i_b, first_key, T.if_then_else(gather, length, 2**31 - 1)
                        )
                        load_rows(kv, at_page, at_row, k_l, stage, 0, half)
                        load_rows(kv, at_page, at_row, k_r, stage, half, half)
                        load_rows(kv, at_page, at_row, k_rope, stage, dim_nope, dim_rope)
                        T.gemm(q_l, k_l[stage, :, :], scores, transpose_B=True, clear_accum=True)
                        T.gemm(q_r, k_r[stage, :, :], scores, transpose_B=True)
                        T.gemm(q_rope, k_rope[stage, :, :], scores, transpose_B=True)
                        softmax(
                            scores, weights, top, block_top, factor, total, block_total, limit, first_key,
                            scale, sees_all,
                        )  # fmt: skip
                        scale_rows(acc_l, factor)
                        scale_rows(acc_r, factor)
                        if not gather:
                            zero_tail(k_l, stage, first_key, length)
                            zero_tail(k_r, stage, first_key, length)
                        T.gemm(weights, k_l[stage, :, :], acc_l)
                        T.gemm(weights, k_r[stage, :, :], acc_r)
                    finish_rows(factor, total)
                    scale_rows(acc_l, factor)
                    scale_rows(acc_r, factor)
                    if own_parts == 1:
                        for i, j in T.Parallel(ROWS, half):
                            if first_row + i < rows:
                                out[i_b, first_row + i, j] = acc_l[i, j]
                                out[i_b, first_row + i, half + j] = acc_r[i, j]
                        if wants_lse != 0:
                            store_lse(lse, top, total, i_b, first_row, heads)
                    if own_parts > 1:
                        store_part(parts, acc_l, part, first_row, 0)
                        store_part(parts, acc_r, part, first_row, half)
                        store_part_lse(part_lse, top, total, part, first_row, wants_lse)

            else:
                # A part's q, and what the roles are told of it; both groups are through with these.
                part_here = T.alloc_barrier(GROUP)
                part_free = T.alloc_barrier(2 * GROUP)
                left_here = T.alloc_barrier([GROUP] * num_stages)
                right_here = T.alloc_barrier([GROUP] * num_stages)
                left_free = T.alloc_barrier([GROUP] * num_stages)
                right_free = T.alloc_barrier([GROUP] * num_stages)
                weights_here = T.alloc_barrier(GROUP)
                weights_free = T.alloc_barrier(GROUP)
                totals_here = T.alloc_barrier(GROUP)

                # Barriers and the ring go on from part to part: ``done`` are the blocks of those before.
                with T.ws(2):
                    T.set_max_nreg(few, 0)
                    done = T.alloc_var(T.int32, init=0)
                    # Loads that wait for none of the others first.
                    worker = thread - 2 * GROUP
                    begin, end, found_length = candidate(worker, first_part, cache_seqlens, scheduled)
                    first_found, first_tile = part_of(0, i_program, num_programs, row_tiles, order, ordered)
                    new_part = T.alloc_var(T.int32, init=first_found)
                    new_tile = T.alloc_var(T.int32, init=first_tile)
                    turns = turns_of(i_program, num_programs, row_tiles, first_part, num_parts, scheduled)
                    for turn in T.serial(turns):
                        slot = turn % 2
                        find_part(
                            told, found, slot, new_part, new_tile, begin, end, found_length, worker, GROUP, first_part,
                            cache_seqlens, num_parts, num_splits, scheduled,
                        )  # fmt: skip
                        i_b = T.alloc_var(T.int32, init=told[slot, _SEQUENCE])
                        length = T.alloc_var(T.int32, init=told[slot, _LENGTH])
                        first_row = T.alloc_var(T.int32, init=told[slot, _ROW])
                        first = T.alloc_var(T.int32, init=told[slot, _BLOCK])
                        steps = T.alloc_var(T.int32, init=told[slot, _STEPS])
                        # The page of the next block is looked up a block ahead: that takes as long as half a block.
                        i_page = T.alloc_var(T.int32, init=-1)
                        if not gather:
                            if steps > 0:
                                first_column = T.alloc_var(T.int32, init=T.truncdiv(first * block_n, page_size))
                                i_page = block_table[i_b, first_column]
                        for step in T.serial(steps):
                            stage = (done + step) % num_stages
                            phase = (done + step) // num_stages % 2 ^ 1
                            first_key = (first + step) * block_n
                            if gather:
                                T.sync_threads(_OF_PRODUCER, GROUP)
                                find_rows(block_table, at_page, at_row, i_b, first_key, length)
                                T.sync_threads(_OF_PRODUCER, GROUP)
                                T.barrier_wait(left_free[stage], phase)
                                load_rows(kv, at_page, at_row, k_l, stage, 0, half)
                                load_rows(kv, at_page, at_row, k_rope, stage, dim_nope, dim_rope)
                                T.cp_async_barrier_noinc(left_here[stage])
                                T.barrier_wait(right_free[stage], phase)
                                load_rows(kv, at_page, at_row, k_r, stage, half, half)
                                T.cp_async_barrier_noinc(right_here[stage])
                            else:
                                row = T.alloc_var(T.int32, init=T.truncmod(first_key, page_size))
                                T.barrier_wait(left_free[stage], phase)
                                load_left(kv, k_l, k_rope, left_here, i_page, row, stage)
                                T.barrier_wait(right_free[stage], phase)
                                load_right(kv, k_r, right_here, i_page, row, stage)
                                if step + 1 < steps:
                                    column = T.alloc_var(T.int32, init=T.truncdiv(first_key + block_n, page_size))
                                    i_page = block_table[i_b, column]
                            if step == 0:
                                # Behind the first keys, which the part before does not keep from coming.
                                T.barrier_wait(part_free, slot ^ 1)
                                T.tma_copy(q[i_b, first_row : first_row + ROWS, 0:half], q_l, barrier=part_here)
                                T.tma_copy(q[i_b, first_row : first_row + ROWS, half:dim_nope], q_r, barrier=part_here)
                                T.tma_copy(
                                    q[i_b, first_row : first_row + ROWS, dim_nope:width], q_rope, barrier=part_here
                                )
                                T.barrier_arrive(part_here)
                        if steps == 0:
                            T.barrier_wait(part_free, slot ^ 1)
                            T.barrier_arrive(part_here)
                        done = done + steps
                        next_part, next_tile = part_of(turn + 1, i_program, num_programs, row_tiles, order, ordered)
                        new_part = next_part
                        new_tile = next_tile

                with T.ws(0):
                    T.set_max_nreg(many, 1)
                    done = T.alloc_var(T.int32, init=0)
                    turns = turns_of(i_program, num_programs, row_tiles, first_part, num_parts, scheduled)
                    for turn in T.serial(turns):
                        slot = turn % 2
                        T.barrier_wait(part_here, slot)
                        i_b = T.alloc_var(T.int32, init=told[slot, _SEQUENCE])
                        own_parts = T.alloc_var(T.int32, init=told[slot, _PARTS])
                        length = T.alloc_var(T.int32, init=told[slot, _LENGTH])
                        part = T.alloc_var(T.int32, init=told[slot, _PART])
                        first_row = T.alloc_var(T.int32, init=told[slot, _ROW])
                        first = T.alloc_var(T.int32, init=told[slot, _BLOCK])
                        steps = T.alloc_var(T.int32, init=told[slot, _STEPS])
                        # Keys that the first row sees, and the others do too.
                        sees_all = T.alloc_var(T.int32, init=length)
                        if causal != 0:
                            sees_all = length - tokens + T.truncdiv(first_row, heads) + 1
                        T.clear(acc_l)
                        T.clear(total)
                        T.fill(top, FLOOR)
                        hidden_from(limit, first_row, heads, tokens, length, causal)
                        # A loop of one step at most: an `if` would be put round each product by itself.
                        for _ in T.serial(T.min(steps, 1)):
                            stage = done % num_stages
                            phase = done // num_stages % 2
                            T.barrier_wait(left_here[stage], phase)
                            T.wgmma_gemm(q_l, k_l[stage, :, :], scores, transpose_B=True, clear_accum=True)
                            T.wgmma_gemm(q_rope, k_rope[stage, :, :], scores, transpose_B=True)
                            T.barrier_wait(right_here[stage], phase)
                            T.wgmma_gemm(q_r, k_r[stage, :, :], scores, transpose_B=True)
                            T.wait_wgmma(0)
                        for step in T.serial(steps - 1):
                            stage = (done + step) % num_stages
                            after = (done + step + 1) % num_stages
                            phase = (done + step + 1) // num_stages % 2
                            softmax(
                                scores, weights, top, block_top, factor, total, block_total, limit,
                                (first + step) * block_n, scale, sees_all,
                            )  # fmt: skip
                            T.barrier_wait(weights_free, (done + step) % 2 ^ 1)
                            T.copy(factor, factor_shared)
                            T.copy(weights, weights_shared)
                            T.fence_proxy_async()
                            T.barrier_arrive(weights_here)
                            bring_to_maximum(acc_l, factor)
                            T.wgmma_gemm(weights, k_l[stage, :, :], acc_l)
                            # Room first: the next block may not be here yet, and that behind it is to be on its way.
                            T.wait_wgmma(0)
                            T.barrier_arrive(left_free[stage])
                            T.barrier_wait(left_here[after], phase)
                            T.wgmma_gemm(q_l, k_l[after, :, :], scores, transpose_B=True, clear_accum=True)
                            T.wgmma_gemm(q_rope, k_rope[after, :, :], scores, transpose_B=True)
                            T.barrier_wait(right_here[after], phase)
                            T.wgmma_gemm(q_r, k_r[after, :, :], scores, transpose_B=True)
                            T.wait_wgmma(0)
                        for _ in T.serial(T.min(steps, 1)):
                            last = done + steps - 1
                            stage = last % num_stages
                            first_key = (first + steps - 1) * block_n
                            softmax(
                                scores, weights, top, block_top, factor, total, block_total, limit, first_key,
                                scale, sees_all,
                            )  # fmt: skip
                            T.barrier_wait(weights_free, last % 2 ^ 1)
                            T.copy(factor, factor_shared)
                            T.copy(weights, weights_shared)
                            T.fence_proxy_async()
                            T.barrier_arrive(weights_here)
                            bring_to_maximum(acc_l, factor)
                            if not gather:
                                if first_key + block_n > length:
                                    zero_tail(k_l, stage, first_key, length)
                                    T.fence_proxy_async()
                                    T.sync_threads(_OF_SCORES, GROUP)
                            T.wgmma_gemm(weights, k_l[stage, :, :], acc_l)
                            T.wait_wgmma(0)
                            T.barrier_arrive(left_free[stage])
                        done = done + steps
                        finish_rows(factor, total)
                        T.barrier_wait(weights_free, done % 2 ^ 1)
                        T.copy(factor, factor_shared)
                        T.barrier_arrive(totals_here)
                        scale_rows(acc_l, factor)
                        if own_parts == 1:
                            T.copy(acc_l, q_l)
                            T.fence_proxy_async()
                            T.sync_threads(_OF_SCORES, GROUP)
                            T.tma_copy(q_l, out[i_b, first_row : first_row + ROWS, 0:half])
                            if wants_lse != 0:
                                store_lse(lse, top, total, i_b, first_row, heads)
                            T.tma_store_wait()
                        if own_parts > 1:
                            store_part(parts, acc_l, part, first_row, 0)
                            store_part_lse(part_lse, top, total, part, first_row, wants_lse)
                        T.barrier_arrive(part_free)

                with T.ws(1):
                    T.set_max_nreg(many, 1)
                    done = T.alloc_var(T.int32, init=0)
                    turns = turns_of(i_program, num_programs, row_tiles, first_part, num_parts, scheduled)
                    for turn in T.serial(turns):
                        slot = turn % 2
                        T.barrier_wait(part_here, slot)
                        i_b = T.alloc_var(T.int32, init=told[slot, _SEQUENCE])
                        own_parts = T.alloc_var(T.int32, init=told[slot, _PARTS])
                        length = T.alloc_var(T.int32, init=told[slot, _LENGTH])
                        part = T.alloc_var(T.int32, init=told[slot, _PART])
                        first_row = T.alloc_var(T.int32, init=told[slot, _ROW])
                        first = T.alloc_var(T.int32, init=told[slot, _BLOCK])
                        steps = T.alloc_var(T.int32, init=told[slot, _STEPS])
                        T.clear(acc_r)
                        for step in T.serial(steps):
                            stage = (done + step) % num_stages
                            first_key = (first + step) * block_n
                            T.barrier_wait(weights_here, (done + step) % 2)
                            T.copy(factor_shared, factor_r)
                            bring_to_maximum(acc_r, factor_r)
                            if not gather:
                                if first_key + block_n > length:
                                    zero_tail(k_r, stage, first_key, length)
                                    T.fence_proxy_async()
                                    T.sync_threads(_OF_VALUES, GROUP)
                            T.wgmma_gemm(weights_shared, k_r[stage, :, :], acc_r)
                            T.wait_wgmma(0)
                            T.barrier_arrive(weights_free)
                            T.barrier_arrive(right_free[stage])
                        done = done + steps
                        T.barrier_wait(totals_here, slot)
                        T.copy(factor_shared, factor_r)
                        scale_rows(acc_r, factor_r)
                        if own_parts == 1:
                            T.copy(acc_r, q_r)
                            T.fence_proxy_async()
                            T.sync_threads(_OF_VALUES, GROUP)
                            T.tma_copy(q_r, out[i_b, first_row : first_row + ROWS, half:dim_nope])
                            T.tma_store_wait()
                        if own_parts > 1:
                            store_part(parts, acc_r, part, first_row, half)
                        T.barrier_arrive(part_free)

    return attend_decode


def merge(T: Any, *, dim_nope: int, dtype: Any, serial: bool = False) -> Any:
    """The kernel that merges the parts of a row; rows of sequences of one part are left alone.

    A program merges one of ``pieces`` pieces, a power of two, of each of ``rows_each`` rows. Its threads are in as many
    groups, which take turns at the parts: the more parts there are, the fewer elements a program should have.
    """
    batch, rows, bounds, room = (T.dynamic(name) for name in ("batch", "rows", "bounds", "room"))
    out_batch, out_row = T.dynamic("out_batch"), T.dynamic("out_row")
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))
    # Whole warps, some of whose threads may have no elements.
    width = -(-dim_nope // (_MERGED * WARP)) * WARP
    threads = 1 if serial else width

    @T.macro
    def highest(part_lse, own_first, own_parts, i_row):
        """The highest logarithm of a row's parts; each warp asks for all of them."""
        # A finite floor, as everywhere.
        top = T.alloc_var(T.float32, init=FLOOR)
        if serial:
            for s in T.serial(own_parts):
                top = T.max(top, part_lse[own_first + s, i_row])
        else:
            lane = T.get_thread_binding() % WARP
            for i in T.serial(T.truncdiv(own_parts + (WARP - 1), WARP)):
                if i * WARP + lane < own_parts:
                    top = T.max(top, part_lse[own_first + i * WARP + lane, i_row])
            for i in T.unroll(5):
                top = T.max(top, T.shfl_xor(top, T.shift_left(1, i)))
        return top

    @T.macro
    def merge_elements(
        part_lse, parts, merged, loaded, factors, own_first, own_parts, i_row, top, begin, group, groups
    ):
        """Elements ``begin`` .. ``begin + _MERGED`` of a row over a group's parts, and the sum of their shares."""
        T.assume(begin >= 0)
        T.assume(begin + _MERGED <= dim_nope)
        T.assume(begin % _MERGED == 0)
        for j in T.unroll(_MERGED):
            merged[j] = 0
        sum_of = T.alloc_var(T.float32, init=0)
        for chunk in T.serial(T.truncdiv(own_parts - group + (_AT_ONCE * groups - 1), _AT_ONCE * groups)):
            for s in T.unroll(_AT_ONCE):
                i_part = T.alloc_var(T.int32, init=group + (chunk * _AT_ONCE + s) * groups)
                factors[s] = -T.infinity(T.float32)
                for j in T.vectorized(_MERGED):
                    loaded[s * _MERGED + j] = T.cast(0, T.float32)
                if i_part < own_parts:
                    factors[s] = part_lse[own_first + i_part, i_row]
                    for j in T.vectorized(_MERGED):
                        loaded[s * _MERGED + j] = parts[own_first + i_part, i_row, begin + j]
            for s in T.unroll(_AT_ONCE):
                # What a part that saw nothing holds does not count, whatever it is.
                if factors[s] == -T.infinity(T.float32):
                    for j in T.unroll(_MERGED):
                        loaded[s * _MERGED + j] = T.cast(0, T.float32)
                factors[s] = T.exp2(factors[s] - top)
                sum_of = sum_of + factors[s]
                for j in T.unroll(_MERGED):
                    merged[j] = merged[j] + factors[s] * loaded[s * _MERGED + j]
        return sum_of

    @T.prim_func
    def merge_parts(
        first_part: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        heads: T.int32,
        num_splits: T.int32,
        rows_each: T.int32,
        pieces: T.int32,
        scheduled: T.int32,
        wants_lse: T.int32,
    ):
        with T.Kernel(batch * T.ceildiv(rows, rows_each) * pieces, threads=threads) as i_program:
            T.assume(out_batch % 8 == 0)
            T.assume(out_row % 8 == 0)
            if not serial:
                T.pdl_sync()
            merged = T.alloc_local((_MERGED,), T.float32)
            loaded = T.alloc_local((_AT_ONCE * _MERGED,), T.float32)
            factors = T.alloc_local((_AT_ONCE,), T.float32)
            of_groups = T.alloc_shared((width, _MERGED), T.float32)
            sum_of_groups = T.alloc_shared((width,), T.float32)
            thread = T.get_thread_binding()
            i_all = T.alloc_var(T.int32, init=T.truncdiv(i_program, pieces))
            i_piece = T.alloc_var(T.int32, init=i_program - i_all * pieces)
            programs = T.alloc_var(T.int32, init=T.truncdiv(rows + rows_each - 1, rows_each))
            i_b = T.alloc_var(T.int32, init=T.truncdiv(i_all, programs))
            first_row = T.alloc_var(T.int32, init=(i_all - i_b * programs) * rows_each)
            own_first = T.alloc_var(T.int32, init=i_b * num_splits)
            own_parts = T.alloc_var(T.int32, init=num_splits)
            if scheduled != 0:
                # As where parts are found.
                own_first = T.max(T.min(first_part[i_b], room), 0)
                own_parts = T.max(T.min(first_part[i_b + 1], room), 0) - own_first
            if own_parts > 1:
                for i in T.serial(T.min(rows_each, rows - first_row)):
                    i_row = T.alloc_var(T.int32, init=first_row + i)
                    top = highest(part_lse, own_first, own_parts, i_row)
                    sum_of = T.alloc_var(T.float32, init=0)
                    if serial:
                        for begin in T.serial(dim_nope // _MERGED):
                            sum_of = merge_elements(
                                part_lse, parts, merged, loaded, factors, own_first, own_parts, i_row, top,
                                begin * _MERGED, 0, 1,
                            )  # fmt: skip
                            for j in T.unroll(_MERGED):
                                out[i_b, i_row, begin * _MERGED + j] = T.if_then_else(
                                    sum_of == 0, 0, merged[j] / sum_of
                                )
                    else:
                        of_group = T.alloc_var(T.int32, init=T.truncdiv(threads, pieces))
                        group = T.alloc_var(T.int32, init=T.truncdiv(thread, of_group))
                        place = T.alloc_var(T.int32, init=thread - group * of_group)
                        begin = T.min(i_piece * of_group + place, dim_nope // _MERGED - 1) * _MERGED
                        sum_of = merge_elements(
                            part_lse, parts, merged, loaded, factors, own_first, own_parts, i_row, top, begin, group,
                            pieces,
                        )  # fmt: skip
                        # The row before has been read.
                        T.sync_threads()
                        for j in T.vectorized(_MERGED):
                            of_groups[thread, j] = merged[j]
                        sum_of_groups[thread] = sum_of
                        T.sync_threads()
                        if group == 0:
                            for i_group in T.serial(pieces - 1):
                                sum_of = sum_of + sum_of_groups[place + (i_group + 1) * of_group]
                                for j in T.vectorized(_MERGED):
                                    merged[j] = merged[j] + of_groups[place + (i_group + 1) * of_group, j]
                            for j in T.vectorized(_MERGED):
                                out[i_b, i_row, begin + j] = T.if_then_else(sum_of == 0, 0, merged[j] / sum_of)
                    if wants_lse != 0:
                        if thread == 0 and i_piece == 0:
                            lse[i_b, T.truncmod(i_row, heads), T.truncdiv(i_row, heads)] = T.if_then_else(
                                sum_of == 0, -T.infinity(T.float32), log_of_sum(T, top, sum_of, LN_2)
                            )

    return merge_parts
