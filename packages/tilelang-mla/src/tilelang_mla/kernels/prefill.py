"""Attention of a ragged batch with separate heads.

A program takes a tile of ``block_m`` queries of one head of one sequence: a warpgroup for each 64 of them, and one more
that brings keys and values to shared memory, rings of ``num_stages`` blocks each. The scores of a block are multiplied
while the weights of the one before meet their values. Numbers of tokens, sequences and heads, lengths and scale are no
constants.
"""

from typing import Any

# Rows of a warpgroup's matrix product, and its threads.
ROWS = 64
GROUP = 128
# Registers of a thread: of those that multiply, by the number of warpgroups that do, and of those that copy.
_MANY, _FEW = {1: 240, 2: 240, 3: 160}, 24
_FLOOR = -1e30
_LN_2 = 0.6931471805599453
# What is found of a place in the grid: what has its rows, and where its queries and keys begin and end.
_OWNER, _BEGIN, _END, _BEGIN_K, _END_K = 0, 1, 2, 3, 4
# The named barrier of those that multiply; TileLang keeps 1 and 2 for itself.
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
    # The next keys are waited for before the products, not behind them: ptxas moves a wait for products up to the last
    # branch, and so away from the softmax that it is to stand behind. With room for one block they only come behind it.
    # On an H200 the loop was no faster for it; what limits it instead is not known yet.
    waits_early = num_stages > 1
    # The output goes through the shared memory of q, which is done with, where it has room.
    staged = head_size_v <= head_size and not serial

    @T.macro
    def hide(scores, limit, first_key, sees_all):
        if first_key + block_n > sees_all:
            for i, j in T.Parallel(block_m, block_n):
                scores[i, j] = T.if_then_else(first_key + j < limit[i], scores[i, j], -T.infinity(T.float32))

    @T.macro
    def softmax(scores, top, block_top, factor, total, block_total, limit, first_key, scale, sees_all):
        """Scores to weights, and the factor that brings what was summed before to the new maximum."""
        hide(scores, limit, first_key, sees_all)
        T.reduce_max(scores, block_top, dim=1)
        for i in T.Parallel(block_m):
            factor[i] = top[i]
            top[i] = T.max(top[i], block_top[i] * scale)
            factor[i] = T.exp2(factor[i] - top[i])
        for i, j in T.Parallel(block_m, block_n):
            scores[i, j] = T.exp2(scores[i, j] * scale - top[i])
        T.reduce_sum(scores, block_total, dim=1)
        for i in T.Parallel(block_m):
            total[i] = total[i] * factor[i] + block_total[i]

    @T.macro
    def scale_rows(acc, factor):
        for i, j in T.Parallel(block_m, head_size_v):
            acc[i, j] = acc[i, j] * factor[i]

    @T.macro
    def zero_tail(v_shared, stage, first_key, k_len):
        """A weight of 0 times the NaN that the next sequence's values may hold would be NaN."""
        for i, j in T.Parallel(block_n, head_size_v):
            if first_key + i >= k_len:
                v_shared[stage, i, j] = T.cast(0, dtype)

    @T.macro
    def store_lse(lse, top, i_head, first_row, rows_here):
        for i in T.Parallel(block_m):
            if i < rows_here:
                lse[i_head, first_row + i] = top[i] * _LN_2

    @T.prim_func
    def attend_prefill(
        q: T.StridedTensor((tokens, heads, head_size), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((tokens_k, heads_kv, head_size), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((tokens_k, heads_kv, head_size_v), (v_token, v_head, 1), dtype),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        cu_seqlens_k: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((tokens, heads, head_size_v), (out_token, out_head, 1), dtype),
        lse: T.StridedTensor((lse_heads, lse_tokens), (s_lse_head, s_lse_token), T.float32),
        scale: T.float32,
        causal: T.int32,
        num_places: T.int32,
        wants_lse: T.int32,
    ):
        with T.Kernel(num_places * heads, threads=threads) as i_program:
            # Arguments are made such: rows may be written in lines of 16 bytes.
            T.assume(out_token % 8 == 0)
            T.assume(out_head % 8 == 0)
            q_shared = T.alloc_shared((block_m, head_size), dtype)
            k_shared = T.alloc_shared((num_stages, block_n, head_size), dtype)
            v_shared = T.alloc_shared((num_stages, block_n, head_size_v), dtype)
            found = T.alloc_shared((5,), T.int32)

            scores = T.alloc_fragment((block_m, block_n), T.float32)
            weights = T.alloc_fragment((block_m, block_n), dtype)
            acc = T.alloc_fragment((block_m, head_size_v), T.float32)
            top = T.alloc_fragment((block_m,), T.float32)
            block_top = T.alloc_fragment((block_m,), T.float32)
            factor = T.alloc_fragment((block_m,), T.float32)
            total = T.alloc_fragment((block_m,), T.float32)
            block_total = T.alloc_fragment((block_m,), T.float32)
            limit = T.alloc_fragment((block_m,), T.int32)

            thread = T.get_thread_binding()
            # Later tiles see more keys: they start first.
            i_head = T.alloc_var(T.int32, init=T.truncdiv(i_program, num_places))
            place = T.alloc_var(T.int32, init=num_places - 1 - (i_program - i_head * num_places))
            i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(i_head, T.truncdiv(heads, heads_kv)))
            # What has rows: those before the first sequence, if its begin is no 0 as it must be, the sequences, and the
            # rows behind the last. Each has places of the grid from begin // block_m + its index on, which are at least
            # as many as its tiles.
            if thread == 0:
                found[_OWNER] = -1
            T.sync_threads()
            for i in T.serial(T.truncdiv(bounds + threads, threads)):
                i_owner = i * threads + thread
                if i_owner <= bounds:
                    # Whoever finds the place notes all there is to know of it: loads in a row take a microsecond each.
                    begin = T.alloc_var(T.int32, init=0)
                    begin_k = T.alloc_var(T.int32, init=0)
                    if i_owner > 0:
                        begin = T.max(T.min(cu_seqlens_q[i_owner - 1], tokens), 0)
                        begin_k = cu_seqlens_k[i_owner - 1]
                    until = T.alloc_var(T.int32, init=num_places)
                    end = T.alloc_var(T.int32, init=tokens)
                    end_k = T.alloc_var(T.int32, init=begin_k)
                    if i_owner < bounds:
                        end = T.max(T.min(cu_seqlens_q[i_owner], tokens), 0)
                        until = T.truncdiv(end, block_m) + i_owner + 1
                        if i_owner > 0:
                            end_k = cu_seqlens_k[i_owner]
                    if T.truncdiv(begin, block_m) + i_owner <= place and place < until:
                        found[_OWNER] = i_owner
                        found[_BEGIN] = begin
                        found[_END] = end
                        found[_BEGIN_K] = begin_k
                        found[_END_K] = end_k
            T.sync_threads()
            owner = T.alloc_var(T.int32, init=T.max(found[_OWNER], 0))
            q_begin = T.alloc_var(T.int32, init=found[_BEGIN])
            q_end = T.alloc_var(T.int32, init=found[_END])
            k_begin = T.alloc_var(T.int32, init=found[_BEGIN_K])
            k_len = T.alloc_var(T.int32, init=found[_END_K] - k_begin)
            if k_begin < 0 or k_len < 0 or found[_END_K] > tokens_k:
                k_begin = 0
                k_len = 0
            first_row = T.alloc_var(T.int32, init=q_begin + (place - owner - T.truncdiv(q_begin, block_m)) * block_m)
            rows_here = T.alloc_var(T.int32, init=T.max(T.min(q_end - first_row, block_m), 0))
            if found[_OWNER] < 0:
                rows_here = 0

            # Keys that the tile's first row and its last row see.
            sees_all = T.alloc_var(T.int32, init=k_len)
            most = T.alloc_var(T.int32, init=k_len)
            if causal != 0:
                sees_all = k_len - q_end + first_row + 1
                most = k_len - q_end + first_row + rows_here
            steps = T.alloc_var(T.int32, init=T.truncdiv(T.max(most, 0) + (block_n - 1), block_n))
            if rows_here == 0:
                steps = 0

            if serial:
                T.clear(acc)
                T.clear(total)
                T.fill(top, _FLOOR)
                for i in T.Parallel(block_m):
                    limit[i] = T.min(sees_all + i * causal, k_len)
                for i, j in T.Parallel(block_m, head_size):
                    q_shared[i, j] = T.if_then_else(i < rows_here, q[first_row + i, i_head, j], 0)
                for step in T.serial(steps):
                    stage = step % num_stages
                    for i, j in T.Parallel(block_n, head_size):
                        k_shared[stage, i, j] = k[k_begin + step * block_n + i, i_head_kv, j]
                    for i, j in T.Parallel(block_n, head_size_v):
                        v_shared[stage, i, j] = v[k_begin + step * block_n + i, i_head_kv, j]
                    T.gemm(q_shared, k_shared[stage, :, :], scores, transpose_B=True, clear_accum=True)
                    softmax(scores, top, block_top, factor, total, block_total, limit, step * block_n, scale, sees_all)
                    T.copy(scores, weights)
                    scale_rows(acc, factor)
                    zero_tail(v_shared, stage, step * block_n, k_len)
                    T.gemm(weights, v_shared[stage, :, :], acc)
                for i in T.Parallel(block_m):
                    factor[i] = T.if_then_else(total[i] == 0, 0, 1 / total[i])
                    top[i] = T.if_then_else(total[i] == 0, -T.infinity(T.float32), top[i] + T.log2(total[i]))
                scale_rows(acc, factor)
                for i, j in T.Parallel(block_m, head_size_v):
                    if i < rows_here:
                        out[first_row + i, i_head, j] = acc[i, j]
                if wants_lse != 0:
                    store_lse(lse, top, i_head, first_row, rows_here)

            else:
                q_here = T.alloc_barrier(GROUP)
                k_here = T.alloc_barrier([GROUP] * num_stages)
                v_here = T.alloc_barrier([GROUP] * num_stages)
                k_free = T.alloc_barrier([consumers] * num_stages)
                v_free = T.alloc_barrier([consumers] * num_stages)

                if thread >= consumers:
                    T.set_max_nreg(_FEW, 0)
                    if steps > 0:
                        T.tma_copy(q[first_row : first_row + block_m, i_head, 0:head_size], q_shared, barrier=q_here)
                        T.barrier_arrive(q_here)
                    for step in T.serial(steps):
                        stage = step % num_stages
                        row = T.alloc_var(T.int32, init=k_begin + step * block_n)
                        T.barrier_wait(k_free[stage], step // num_stages % 2 ^ 1)
                        T.tma_copy(
                            k[row : row + block_n, i_head_kv, 0:head_size], k_shared[stage, :, :], barrier=k_here[stage]
                        )
                        T.barrier_arrive(k_here[stage])
                        T.barrier_wait(v_free[stage], step // num_stages % 2 ^ 1)
                        T.tma_copy(
                            v[row : row + block_n, i_head_kv, 0:head_size_v], v_shared[stage, :, :],
                            barrier=v_here[stage],
                        )  # fmt: skip
                        T.barrier_arrive(v_here[stage])
                else:
                    T.set_max_nreg(_MANY[block_m // ROWS], 1)
                    T.clear(acc)
                    T.clear(total)
                    T.fill(top, _FLOOR)
                    for i in T.Parallel(block_m):
                        limit[i] = T.min(sees_all + i * causal, k_len)
                    # A loop of one step at most: an `if` would be put round each product by itself.
                    for _ in T.serial(T.min(steps, 1)):
                        T.barrier_wait(q_here, 0)
                        T.barrier_wait(k_here[0], 0)
                        T.wgmma_gemm(
                            q_shared, k_shared[0, :, :], scores, transpose_B=True, clear_accum=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )  # fmt: skip
                        T.wait_wgmma(0)
                        T.barrier_arrive(k_free[0])
                        softmax(scores, top, block_top, factor, total, block_total, limit, 0, scale, sees_all)
                        T.copy(scores, weights)
                    if waits_early:
                        if steps > 1:
                            T.barrier_wait(k_here[1], 0)
                    for step in T.serial(steps - 1):
                        stage = step % num_stages
                        after = (step + 1) % num_stages
                        if not waits_early:
                            T.barrier_wait(k_here[after], (step + 1) // num_stages % 2)
                        T.wgmma_gemm(
                            q_shared, k_shared[after, :, :], scores, transpose_B=True, clear_accum=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )  # fmt: skip
                        T.barrier_wait(v_here[stage], step // num_stages % 2)
                        T.wgmma_gemm(weights, v_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                        T.wait_wgmma(1)
                        T.barrier_arrive(k_free[after])
                        softmax(
                            scores, top, block_top, factor, total, block_total, limit, (step + 1) * block_n, scale,
                            sees_all,
                        )  # fmt: skip
                        if waits_early:
                            if step + 2 < steps:
                                T.barrier_wait(k_here[(step + 2) % num_stages], (step + 2) // num_stages % 2)
                        T.wait_wgmma(0)
                        T.barrier_arrive(v_free[stage])
                        scale_rows(acc, factor)
                        T.copy(scores, weights)
                    for _ in T.serial(T.min(steps, 1)):
                        stage = (steps - 1) % num_stages
                        T.barrier_wait(v_here[stage], (steps - 1) // num_stages % 2)
                        if steps * block_n > k_len:
                            zero_tail(v_shared, stage, (steps - 1) * block_n, k_len)
                            T.fence_proxy_async()
                            T.sync_threads(_OF_CONSUMERS, consumers)
                        T.wgmma_gemm(weights, v_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                        T.wait_wgmma(0)
                    for i in T.Parallel(block_m):
                        factor[i] = T.if_then_else(total[i] == 0, 0, 1 / total[i])
                        top[i] = T.if_then_else(total[i] == 0, -T.infinity(T.float32), top[i] + T.log2(total[i]))
                    scale_rows(acc, factor)
                    if wants_lse != 0:
                        store_lse(lse, top, i_head, first_row, rows_here)
                    if staged:
                        # No warpgroup may still multiply the q that another writes over.
                        T.sync_threads(_OF_CONSUMERS, consumers)
                        T.copy(acc, q_shared[:, 0:head_size_v])
                        T.sync_threads(_OF_CONSUMERS, consumers)
                        for i, j in T.Parallel(block_m, head_size_v):
                            if i < rows_here:
                                out[first_row + i, i_head, j] = q_shared[i, j]
                    else:
                        for i, j in T.Parallel(block_m, head_size_v):
                            if i < rows_here:
                                out[first_row + i, i_head, j] = acc[i, j]

    return attend_prefill
