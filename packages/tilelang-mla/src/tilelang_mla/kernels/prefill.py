"""Attention of a ragged batch with separate heads.

A program takes one tile after the other, each of ``block_m`` queries of one head of one sequence. A warpgroup for each
64 of them multiplies: the scores of a block while the weights of the one before meet their values. A warp more finds
the tiles and brings their q, and keys and values to shared memory, rings of ``num_stages`` blocks each; the first keys
of a tile come while the tile before is being finished. Numbers of tokens, sequences and heads, lengths and scale are no
constants.
"""

from typing import Any

from tilelang_mla.kernels.common import FLOOR, GROUP, HEADROOM, LN_2, ROWS, WARP, log_of_sum, row_owners

# Registers of a thread: of those that multiply, by the number of warpgroups that do, and of the one that copies.
_MANY, _FEW = {1: 240, 2: 224}, 56
# Columns of a matrix product's accumulators before a thread has columns again.
_COLUMNS = 8
# What is found of a place: its first row, -1 where it has none, and where its sequence's queries and keys begin and
# end. Beside it, the number of the next tile.
_FIRST, _END, _BEGIN_K, _END_K, _NEXT = 0, 1, 2, 3, 4
# What those that multiply are told of a tile; fewer than 0 blocks, that there is none.
_HEAD, _ROW, _ROWS_HERE, _KEYS, _SEES_ALL, _STEPS = 0, 1, 2, 3, 4, 5
# The named barrier of those that multiply; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
_OF_CONSUMERS = 5


def attend(
    T: Any, *, head_size: int, head_size_v: int, dtype: Any, block_m: int, block_n: int, num_stages: int,
    serial: bool = False,
) -> Any:  # fmt: skip
    """The kernel. ``scale`` is that of a softmax of powers of two, and above 0."""
    tokens, heads, tokens_k, heads_kv, bounds = (
        T.dynamic(name) for name in ("tokens", "heads", "tokens_k", "heads_kv", "bounds")
    )
    q_token, q_head, k_token, k_head = (T.dynamic(name) for name in ("q_token", "q_head", "k_token", "k_head"))
    v_token, v_head, out_token, out_head = (T.dynamic(name) for name in ("v_token", "v_head", "out_token", "out_head"))
    lse_heads, lse_tokens = T.dynamic("lse_heads"), T.dynamic("lse_tokens")
    s_lse_head, s_lse_token = T.dynamic("s_lse_head"), T.dynamic("s_lse_token")
    consumers = block_m // ROWS * GROUP
    threads = 1 if serial else consumers + GROUP
    of_rows = None if serial else row_owners(T, block_m)

    def place_of_sum(i: Any, j: Any) -> Any:
        """A thread and its register, as in a matrix product's accumulators: four threads have two rows of 8 columns."""
        return i // 16 * WARP + i % 8 * 4 + j // 2, i % 16 // 8 * 2 + j % 2

    @T.macro
    def hide(scores, limit, first_key, sees_all):
        if first_key + block_n > sees_all:
            for i, j in T.Parallel(block_m, block_n):
                scores[i, j] = T.if_then_else(first_key + j < limit[i], scores[i, j], -T.infinity(T.float32))

    @T.macro
    def raise_top(scores, top, block_top, factor, limit, first_key, scale, sees_all):
        """The maximum of each row, and the factor that brings what was summed before to it."""
        hide(scores, limit, first_key, sees_all)
        T.reduce_max(scores, block_top, dim=1)
        for i in T.Parallel(block_m):
            block_top[i] = block_top[i] * scale
            factor[i] = 1
            if block_top[i] > top[i] + HEADROOM:
                factor[i] = T.exp2(top[i] - block_top[i])
                top[i] = block_top[i]

    @T.macro
    def weigh(scores, weights, top, factor, sums, scale):
        """Scores to weights, and their sums: each thread has those of its own columns until the rows are finished."""
        for i, j in T.Parallel(block_m, block_n):
            scores[i, j] = T.exp2(scores[i, j] * scale - top[i])
        for i, j in T.Parallel(block_m, _COLUMNS):
            sums[i, j] = sums[i, j] * factor[i]
        for i_piece in T.unroll(block_n // _COLUMNS):
            for i, j in T.Parallel(block_m, _COLUMNS):
                sums[i, j] = sums[i, j] + scores[i, i_piece * _COLUMNS + j]
        T.copy(scores, weights)

    @T.macro
    def scale_rows(acc, factor):
        for i, j in T.Parallel(block_m, head_size_v):
            acc[i, j] = acc[i, j] * factor[i]

    @T.macro
    def bring_to_maximum(acc, factor):
        """Scale rows, but for warps whose rows all kept their maximum, and wait for the product that sums them.

        ptxas moves a wait for products up to the last branch: this one, which hangs on the maximum, keeps it behind it.
        """
        moved = T.alloc_var(T.int32, init=0)
        for i in T.Parallel(block_m, loop_layout=of_rows):
            if factor[i] != 1:
                moved = 1
        if T.any_sync(moved != 0) != 0:
            T.wait_wgmma(0)
            scale_rows(acc, factor)
        T.wait_wgmma(0)

    @T.macro
    def zero_tail(v_shared, stage, first_key, k_len):
        """A weight of 0 times the NaN that the next sequence's values may hold would be NaN."""
        for i, j in T.Parallel(block_n, head_size_v):
            if first_key + i >= k_len:
                v_shared[stage, i, j] = T.cast(0, dtype)

    @T.macro
    def store_lse(lse, top, total, i_head, first_row, rows_here):
        for i in T.Parallel(block_m, loop_layout=of_rows):
            if i < rows_here:
                lse[i_head, first_row + i] = T.if_then_else(
                    total[i] == 0, -T.infinity(T.float32), log_of_sum(T, top[i], total[i], LN_2)
                )

    @T.macro
    def arrive(barrier, i, lane):
        """One arrival of a warp, for all that its threads have read or written."""
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(barrier[i])

    @T.macro
    def load_keys(k, k_shared, k_here, k_free, i_block, row, i_head_kv, lane):
        stage = i_block % num_stages
        T.barrier_wait(k_free[stage], i_block // num_stages % 2 ^ 1)
        T.tma_copy(k[row : row + block_n, i_head_kv, 0:head_size], k_shared[stage, :, :], barrier=k_here[stage])
        arrive(k_here, stage, lane)

    @T.macro
    def tell(told, lane, i_head, first_row, rows_here, k_len, sees_all, steps):
        if lane == 0:
            told[_HEAD] = i_head
            told[_ROW] = first_row
            told[_ROWS_HERE] = rows_here
            told[_KEYS] = k_len
            told[_SEES_ALL] = sees_all
            told[_STEPS] = steps

    @T.macro
    def place_of(i_tile, num_places):
        """Heads in order, so that those at work at once share few keys; later tiles see more and start first."""
        i_head = T.alloc_var(T.int32, init=T.truncdiv(i_tile, num_places))
        place = T.alloc_var(T.int32, init=num_places - 1 - (i_tile - i_head * num_places))
        return i_head, place

    @T.macro
    def candidate(i_owner, cu_seqlens_q, cu_seqlens_k, tokens, bounds, num_places):
        """Of what may have rows: where its queries and keys begin and end, and the first and last + 1 of its places.

        That are those before the first sequence, if its begin is no 0 as it must be, the sequences, and the rows behind
        the last. Each has places from begin // block_m + its index on, which are at least as many as its tiles.
        """
        begin = T.alloc_var(T.int32, init=0)
        end = T.alloc_var(T.int32, init=tokens)
        begin_k = T.alloc_var(T.int32, init=0)
        end_k = T.alloc_var(T.int32, init=0)
        until = T.alloc_var(T.int32, init=num_places)
        if i_owner > bounds:
            until = -1
        if i_owner > 0 and i_owner <= bounds:
            begin = T.max(T.min(cu_seqlens_q[i_owner - 1], tokens), 0)
            begin_k = cu_seqlens_k[i_owner - 1]
            end_k = begin_k
        if i_owner < bounds:
            end = T.max(T.min(cu_seqlens_q[i_owner], tokens), 0)
            until = T.truncdiv(end, block_m) + i_owner + 1
            if i_owner > 0:
                end_k = cu_seqlens_k[i_owner]
        return begin, end, begin_k, end_k, until

    @T.macro
    def note_if(found, place, i_owner, begin, end, begin_k, end_k, until):
        """Whoever has the place notes all there is to know of it: loads in a row take a microsecond each."""
        if T.truncdiv(begin, block_m) + i_owner <= place and place < until:
            found[_FIRST] = begin + (place - i_owner - T.truncdiv(begin, block_m)) * block_m
            found[_END] = end
            found[_BEGIN_K] = begin_k
            found[_END_K] = end_k

    @T.macro
    def tile_of(found, tokens_k, causal):
        """Its rows, of which there may be none, its sequence's keys, how many its first row sees, and its blocks."""
        first_row = T.alloc_var(T.int32, init=found[_FIRST])
        rows_here = T.alloc_var(T.int32, init=T.min(found[_END] - first_row, block_m))
        if first_row < 0:
            rows_here = 0
        k_begin = T.alloc_var(T.int32, init=found[_BEGIN_K])
        k_end = T.alloc_var(T.int32, init=found[_END_K])
        # Before they are subtracted: 5 to -2^31 would wrap to a length of 2^31 - 5.
        if k_begin < 0 or k_end < k_begin or k_end > tokens_k:
            k_begin = 0
            k_end = 0
        k_len = T.alloc_var(T.int32, init=k_end - k_begin)
        sees_all = T.alloc_var(T.int32, init=k_len)
        most = T.alloc_var(T.int32, init=k_len)
        if causal != 0:
            sees_all = k_len - found[_END] + first_row + 1
            most = sees_all + rows_here - 1
        steps = T.alloc_var(T.int32, init=T.truncdiv(T.max(most, 0) + (block_n - 1), block_n))
        return first_row, rows_here, k_begin, k_len, sees_all, steps

    @T.macro
    def begin_rows(acc, top, sums, limit, sees_all, k_len, causal):
        T.clear(acc)
        T.clear(sums)
        T.fill(top, FLOOR)
        for i in T.Parallel(block_m):
            limit[i] = T.min(sees_all + i * causal, k_len)

    @T.macro
    def finish_rows(acc, factor, total, sums):
        """A sum of NaN is not hidden."""
        T.reduce_sum(sums, total, dim=1)
        for i in T.Parallel(block_m):
            factor[i] = T.if_then_else(total[i] == 0, 0, 1 / total[i])
        scale_rows(acc, factor)

    @T.macro
    def store_rows(out, acc, i_head, first_row, rows_here):
        for i, j in T.Parallel(block_m, head_size_v):
            if i < rows_here:
                out[first_row + i, i_head, j] = acc[i, j]

    @T.macro
    def bring(inputs, taken, found, memory, barriers, lane, tiles, num_places, num_programs, i_program, causal):
        """A warp's: finds the tiles and brings what they need; behind the last it tells that there is none."""
        q, k, v, cu_seqlens_q, cu_seqlens_k = inputs
        q_shared, k_shared, v_shared, told = memory
        q_here, q_free, k_here, v_here, k_free, v_free = barriers
        own_begin, own_end, own_begin_k, own_end_k, own_until = candidate(
            lane, cu_seqlens_q, cu_seqlens_k, tokens, bounds, num_places
        )
        # Barriers and the rings go on from tile to tile: ``done`` are the blocks of those before.
        done = T.alloc_var(T.int32, init=0)
        turn = T.alloc_var(T.int32, init=0)
        i_tile = T.alloc_var(T.int32, init=i_program)
        upcoming = T.alloc_var(T.int32, init=tiles)
        if lane == 0:
            found[_FIRST] = -1
        T.sync_warp()
        while i_tile < tiles:
            # Asked for long before it is needed; programs that are as many as tiles ask for none.
            if lane == 0 and num_programs < tiles:
                upcoming = num_programs + T.atomic_add(taken[0], 1, return_prev=True)
            i_head, place = place_of(i_tile, num_places)
            note_if(found, place, lane, own_begin, own_end, own_begin_k, own_end_k, own_until)
            for i in T.unroll(T.truncdiv(bounds, WARP), unroll_factor=1):
                i_other = (i + 1) * WARP + lane
                begin, end, begin_k, end_k, until = candidate(
                    i_other, cu_seqlens_q, cu_seqlens_k, tokens, bounds, num_places
                )
                note_if(found, place, i_other, begin, end, begin_k, end_k, until)
            T.sync_warp()
            first_row, rows_here, k_begin, k_len, sees_all, steps = tile_of(found, tokens_k, causal)
            if rows_here > 0:
                i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(i_head, T.truncdiv(heads, heads_kv)))
                for step in T.serial(steps):
                    if step == 0:
                        load_keys(k, k_shared, k_here, k_free, done, k_begin, i_head_kv, lane)
                        # Behind the first keys, which the tile before does not keep from coming.
                        T.barrier_wait(q_free, turn % 2 ^ 1)
                        T.tma_copy(q[first_row : first_row + block_m, i_head, 0:head_size], q_shared, barrier=q_here)
                        tell(told, lane, i_head, first_row, rows_here, k_len, sees_all, steps)
                        arrive(q_here, 0, lane)
                    # Keys go ahead of values: they are free a product earlier.
                    if step + 1 < steps:
                        next_row = k_begin + (step + 1) * block_n
                        load_keys(k, k_shared, k_here, k_free, done + step + 1, next_row, i_head_kv, lane)
                    stage = (done + step) % num_stages
                    row = T.alloc_var(T.int32, init=k_begin + step * block_n)
                    T.barrier_wait(v_free[stage], (done + step) // num_stages % 2 ^ 1)
                    T.tma_copy(
                        v[row : row + block_n, i_head_kv, 0:head_size_v], v_shared[stage, :, :], barrier=v_here[stage]
                    )
                    arrive(v_here, stage, lane)
                if steps == 0:
                    T.barrier_wait(q_free, turn % 2 ^ 1)
                    tell(told, lane, i_head, first_row, rows_here, k_len, sees_all, steps)
                    arrive(q_here, 0, lane)
                done = done + steps
                turn = turn + 1
            # What was found has been read by all.
            T.sync_warp()
            if lane == 0:
                found[_FIRST] = -1
                found[_NEXT] = upcoming
            T.sync_warp()
            i_tile = found[_NEXT]
        T.barrier_wait(q_free, turn % 2 ^ 1)
        tell(told, lane, 0, 0, 0, 0, 0, -1)
        arrive(q_here, 0, lane)

    @T.macro
    def multiply(memory, barriers, fragments, out, lse, lane, scale, causal, wants_lse):
        """The other warpgroups': each its own rows of the tiles that it is told of."""
        q_shared, k_shared, v_shared, told = memory
        q_here, q_free, k_here, v_here, k_free, v_free = barriers
        scores, weights, acc, top, block_top, factor, total, sums, limit = fragments
        done = T.alloc_var(T.int32, init=0)
        turn = T.alloc_var(T.int32, init=0)
        T.barrier_wait(q_here, 0)
        steps = T.alloc_var(T.int32, init=told[_STEPS])
        while steps >= 0:
            i_head = T.alloc_var(T.int32, init=told[_HEAD])
            first_row = T.alloc_var(T.int32, init=told[_ROW])
            rows_here = T.alloc_var(T.int32, init=told[_ROWS_HERE])
            k_len = T.alloc_var(T.int32, init=told[_KEYS])
            sees_all = T.alloc_var(T.int32, init=told[_SEES_ALL])
            begin_rows(acc, top, sums, limit, sees_all, k_len, causal)
            # A loop of one step at most: an `if` would be put round each product by itself.
            for _ in T.serial(T.min(steps, 1)):
                stage = done % num_stages
                T.barrier_wait(k_here[stage], done // num_stages % 2)
                T.wgmma_gemm(
                    q_shared, k_shared[stage, :, :], scores, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )  # fmt: skip
                T.wait_wgmma(0)
                arrive(k_free, stage, lane)
                raise_top(scores, top, block_top, factor, limit, 0, scale, sees_all)
                weigh(scores, weights, top, factor, sums, scale)
            for step in T.serial(steps - 1):
                stage = (done + step) % num_stages
                after = (done + step + 1) % num_stages
                T.barrier_wait(k_here[after], (done + step + 1) // num_stages % 2)
                T.wgmma_gemm(
                    q_shared, k_shared[after, :, :], scores, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )  # fmt: skip
                T.barrier_wait(v_here[stage], (done + step) // num_stages % 2)
                T.wgmma_gemm(weights, v_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                T.wait_wgmma(1)
                arrive(k_free, after, lane)
                raise_top(scores, top, block_top, factor, limit, (step + 1) * block_n, scale, sees_all)
                bring_to_maximum(acc, factor)
                arrive(v_free, stage, lane)
                weigh(scores, weights, top, factor, sums, scale)
            T.barrier_arrive(q_free)
            for _ in T.serial(T.min(steps, 1)):
                last = done + steps - 1
                stage = last % num_stages
                T.barrier_wait(v_here[stage], last // num_stages % 2)
                if steps * block_n > k_len:
                    zero_tail(v_shared, stage, (steps - 1) * block_n, k_len)
                    T.fence_proxy_async()
                    T.sync_threads(_OF_CONSUMERS, consumers)
                T.wgmma_gemm(weights, v_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                T.wait_wgmma(0)
                arrive(v_free, stage, lane)
            done = done + steps
            finish_rows(acc, factor, total, sums)
            if wants_lse != 0:
                store_lse(lse, top, total, i_head, first_row, rows_here)
            store_rows(out, acc, i_head, first_row, rows_here)
            turn = turn + 1
            T.barrier_wait(q_here, turn % 2)
            steps = told[_STEPS]

    @T.macro
    def do_all(
        inputs, found, memory, fragments, out, lse, scale, tiles, num_places, num_programs, i_program, causal, wants_lse
    ):  # fmt: skip
        """The steps of both roles, one after the other, in memory that none is told of."""
        q, k, v, cu_seqlens_q, cu_seqlens_k = inputs
        q_shared, k_shared, v_shared = memory
        scores, weights, acc, top, block_top, factor, total, sums, limit = fragments
        for turn in T.serial(T.truncdiv(tiles - i_program + (num_programs - 1), num_programs)):
            i_tile = T.alloc_var(T.int32, init=i_program + turn * num_programs)
            i_head, place = place_of(i_tile, num_places)
            i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(i_head, T.truncdiv(heads, heads_kv)))
            found[_FIRST] = -1
            for i_owner in T.serial(bounds + 1):
                begin, end, begin_k, end_k, until = candidate(
                    i_owner, cu_seqlens_q, cu_seqlens_k, tokens, bounds, num_places
                )
                note_if(found, place, i_owner, begin, end, begin_k, end_k, until)
            first_row, rows_here, k_begin, k_len, sees_all, steps = tile_of(found, tokens_k, causal)
            if rows_here > 0:
                begin_rows(acc, top, sums, limit, sees_all, k_len, causal)
                for i, j in T.Parallel(block_m, head_size):
                    q_shared[i, j] = T.if_then_else(i < rows_here, q[first_row + i, i_head, j], 0)
                for step in T.serial(steps):
                    stage = step % num_stages
                    row = T.alloc_var(T.int32, init=k_begin + step * block_n)
                    for i, j in T.Parallel(block_n, head_size):
                        k_shared[stage, i, j] = k[row + i, i_head_kv, j]
                    for i, j in T.Parallel(block_n, head_size_v):
                        v_shared[stage, i, j] = v[row + i, i_head_kv, j]
                    T.gemm(q_shared, k_shared[stage, :, :], scores, transpose_B=True, clear_accum=True)
                    raise_top(scores, top, block_top, factor, limit, step * block_n, scale, sees_all)
                    weigh(scores, weights, top, factor, sums, scale)
                    scale_rows(acc, factor)
                    zero_tail(v_shared, stage, step * block_n, k_len)
                    T.gemm(weights, v_shared[stage, :, :], acc)
                finish_rows(acc, factor, total, sums)
                store_rows(out, acc, i_head, first_row, rows_here)
                if wants_lse != 0:
                    store_lse(lse, top, total, i_head, first_row, rows_here)

    @T.prim_func
    def attend_prefill(
        q: T.StridedTensor((tokens, heads, head_size), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((tokens_k, heads_kv, head_size), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((tokens_k, heads_kv, head_size_v), (v_token, v_head, 1), dtype),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        cu_seqlens_k: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((tokens, heads, head_size_v), (out_token, out_head, 1), dtype),
        lse: T.StridedTensor((lse_heads, lse_tokens), (s_lse_head, s_lse_token), T.float32),
        taken: T.Tensor((1,), T.int32),
        scale: T.float32,
        causal: T.int32,
        num_places: T.int32,
        wants_lse: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_programs, threads=threads) as i_program:
            # Arguments are made such: rows may be written in lines of 16 bytes.
            T.assume(out_token % 8 == 0)
            T.assume(out_head % 8 == 0)
            q_shared = T.alloc_shared((block_m, head_size), dtype)
            k_shared = T.alloc_shared((num_stages, block_n, head_size), dtype)
            v_shared = T.alloc_shared((num_stages, block_n, head_size_v), dtype)
            found = T.alloc_shared((5,), T.int32)
            told = T.alloc_shared((6,), T.int32)

            scores = T.alloc_fragment((block_m, block_n), T.float32)
            weights = T.alloc_fragment((block_m, block_n), dtype)
            acc = T.alloc_fragment((block_m, head_size_v), T.float32)
            top = T.alloc_fragment((block_m,), T.float32)
            block_top = T.alloc_fragment((block_m,), T.float32)
            factor = T.alloc_fragment((block_m,), T.float32)
            total = T.alloc_fragment((block_m,), T.float32)
            sums = T.alloc_fragment((block_m, _COLUMNS), T.float32)
            limit = T.alloc_fragment((block_m,), T.int32)
            if not serial:
                T.annotate_layout({sums: T.Fragment((block_m, _COLUMNS), forward_fn=place_of_sum)})

            thread = T.get_thread_binding()
            tiles = T.alloc_var(T.int32, init=num_places * heads)
            inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
            fragments = (scores, weights, acc, top, block_top, factor, total, sums, limit)
            if serial:
                memory = (q_shared, k_shared, v_shared)
                do_all(
                    inputs, found, memory, fragments, out, lse, scale, tiles, num_places, num_programs, i_program,
                    causal, wants_lse,
                )  # fmt: skip
            else:
                # A tile's q, and what those that multiply are told of it.
                q_here = T.alloc_barrier(1)
                # Every thread arrives here for itself: racecheck does not know of a warp that arrives as one.
                q_free = T.alloc_barrier(consumers)
                k_here = T.alloc_barrier([1] * num_stages)
                v_here = T.alloc_barrier([1] * num_stages)
                k_free = T.alloc_barrier([consumers // WARP] * num_stages)
                v_free = T.alloc_barrier([consumers // WARP] * num_stages)
                # Unpacked again by the same names, which are those of the compiled text.
                memory = (q_shared, k_shared, v_shared, told)
                barriers = (q_here, q_free, k_here, v_here, k_free, v_free)
                if thread >= consumers:
                    T.set_max_nreg(_FEW, 0)
                    if thread - consumers < WARP:
                        bring(
                            inputs, taken, found, memory, barriers, thread - consumers, tiles, num_places, num_programs,
                            i_program, causal,
                        )  # fmt: skip
                else:
                    T.set_max_nreg(_MANY[block_m // ROWS], 1)
                    multiply(memory, barriers, fragments, out, lse, thread % WARP, scale, causal, wants_lse)

    return attend_prefill
