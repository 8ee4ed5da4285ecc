"""The producer warp and the consumer warpgroups of the kernels of gradients."""

from tilelang_mla.kernels.common import LOG2_E, WARP, macro, row_owners
from tilelang_mla.kernels.prefill.roles import arrive

# The named barrier of the consumers; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
_OF_CONSUMERS = 5
# Elements that a thread clears at once.
_VECTOR = 8


@macro
def produce(T, S, inputs, memory, barriers, tile, lane):
    """A warp's: loads the own rows and, a block at a time, those that meet them."""
    own = inputs.keys if S.of_keys else inputs.queries
    row = tile.first_row
    group = T.alloc_var(T.int32, init=T.truncdiv(inputs.q.shape[1], inputs.k.shape[1]))
    T.tma_copy(own.first[row : row + S.block_m, tile.head, 0 : S.head_dim], memory.own_first, barrier=barriers.own_full)
    T.tma_copy(
        own.second[row : row + S.block_m, tile.head, 0 : S.head_dim_v], memory.own_second, barrier=barriers.own_full
    )
    arrive(T, barriers.own_full, 0, lane)
    if S.of_keys:
        for turn in T.serial(tile.turns):
            for step in T.serial(tile.steps):
                i_head = T.alloc_var(T.int32, init=tile.head * group + turn)
                load_block(T, S, inputs, memory, barriers, tile, i_head, turn * tile.steps + step, step, lane)
    else:
        i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(tile.head, group))
        for step in T.serial(tile.steps):
            load_block(T, S, inputs, memory, barriers, tile, i_head_kv, step, step, lane)


@macro
def load_block(T, S, inputs, memory, barriers, tile, i_head, i_block, step, lane):
    """A block of the rows of a head that meet the own ones."""
    met = inputs.queries if S.of_keys else inputs.keys
    stage = i_block % S.num_stages
    begin = T.alloc_var(T.int32, init=step * S.block_n)
    row = T.alloc_var(T.int32, init=tile.met + begin)
    T.barrier_wait(barriers.empty[stage], i_block // S.num_stages % 2 ^ 1)
    T.tma_copy(
        met.first[row : row + S.block_n, i_head, 0 : S.head_dim], memory.first[stage, :, :],
        barrier=barriers.full[stage],
    )  # fmt: skip
    T.tma_copy(
        met.second[row : row + S.block_n, i_head, 0 : S.head_dim_v], memory.second[stage, :, :],
        barrier=barriers.full[stage],
    )  # fmt: skip
    if S.of_keys:
        for i in T.unroll(S.block_n // WARP):
            load_numbers(T, inputs, memory, tile, i_head, stage, begin, i * WARP + lane)
    arrive(T, barriers.full, stage, lane)


@macro
def load_numbers(T, inputs, memory, tile, i_head, stage, begin, i):
    """Of a query of a block its logarithm and its delta; of one behind the last, nothing that may be NaN."""
    log_of = T.alloc_var(T.float32, init=0)
    delta_of = T.alloc_var(T.float32, init=0)
    if begin + i < tile.left:
        log_of = in_powers_of_two(T, inputs.lse[i_head, tile.met + begin + i])
        delta_of = inputs.delta[i_head, tile.met + begin + i]
    memory.logs[stage, i] = log_of
    memory.deltas[stage, i] = delta_of


def in_powers_of_two(T, lse):
    """A row's logarithm; of one that sees nothing a finite one, whose weights are masked: else they were NaN."""
    return T.if_then_else(lse == -T.infinity(T.float32), 0, lse * LOG2_E)


@macro
def consume(T, S, launch, inputs, memory, barriers, r, acc, acc_v, tile, thread):
    """Each consumer warpgroup has 64 of the own rows, and multiplies them by the blocks as they come.

    Of the kernel of keys both accumulators leave no registers for scores and products at once: weights are rounded
    before the products are asked for.
    """
    begin_rows(T, S, launch, inputs, r, acc, acc_v, tile)
    T.barrier_wait(barriers.own_full, 0)
    # One loop: of two, what the inner one does not change would take registers all along.
    begin = T.alloc_var(T.int32, init=0)
    for i_block in T.serial(tile.steps * tile.turns):
        consume_block(T, S, launch, memory, barriers, r, (acc, acc_v), tile, i_block, begin, thread)
        begin = begin + S.block_n
        if begin >= tile.steps * S.block_n:
            begin = 0


@macro
def consume_block(T, S, launch, memory, barriers, r, accs, tile, i_block, begin, thread):
    """A block that is the ``i_block``-th of the ring, of rows from ``begin`` on of those that meet the own ones."""
    acc, acc_v = accs
    stage = i_block % S.num_stages
    T.barrier_wait(barriers.full[stage], i_block // S.num_stages % 2)
    clear_behind(T, S, memory, tile, stage, begin, thread)
    multiply(T, memory.own_first, memory.first, stage, r.scores)
    if S.of_keys:
        T.wait_wgmma(0)
        mask(T, S, r, tile, begin)
        weigh(T, S, launch, memory, r, stage)
        multiply(T, memory.own_second, memory.second, stage, r.products)
        T.wgmma_gemm(r.weights, memory.second[stage, :, :], acc_v, policy=T.GemmWarpPolicy.FullRow)
        T.wait_wgmma(1)
    else:
        multiply(T, memory.own_second, memory.second, stage, r.products)
        T.wait_wgmma(1)
        mask(T, S, r, tile, begin)
        weigh(T, S, launch, memory, r, stage)
        T.wait_wgmma(0)
    slope(T, S, memory, r, stage)
    T.copy(r.products, r.slopes)
    T.wgmma_gemm(r.slopes, memory.first[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
    T.wait_wgmma(0)
    arrive(T, barriers.empty, stage, thread % WARP)


@macro
def multiply(T, own, ring, stage, products):
    """The own rows by a block of those that meet them."""
    T.wgmma_gemm(own, ring[stage, :, :], products, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)


@macro
def clear_behind(T, S, memory, tile, stage, begin, thread):
    """Rows of a block behind the last that meets the own ones: NaN of the next sequence times 0 would be NaN."""
    if begin + S.block_n > tile.left:
        kept = T.alloc_var(T.int32, init=tile.left - begin)
        clear_tail(T, S, memory.first, stage, kept, thread)
        clear_tail(T, S, memory.second, stage, kept, thread)
        T.fence_proxy_async()
        T.sync_threads(_OF_CONSUMERS, S.consumers)


@macro
def clear_tail(T, S, ring, stage, kept, thread):
    """As ``zero_tail``, in a loop that stays one: addresses of all rows of a block would take registers all along."""
    # Threads of a row, and rows at once.
    of_row = ring.shape[2] // _VECTOR
    at_once = S.consumers // of_row
    own = T.alloc_var(T.int32, init=T.truncdiv(thread, of_row))
    column = T.alloc_var(T.int32, init=(thread - own * of_row) * _VECTOR)
    if own < at_once:
        for i in T.serial(T.truncdiv(S.block_n - kept + (at_once - 1), at_once)):
            row = T.alloc_var(T.int32, init=T.min(kept + i * at_once + own, S.block_n - 1))
            for j in T.unroll(_VECTOR):
                ring[stage, row, column + j] = T.cast(0, ring.dtype)


@macro
def begin_rows(T, S, launch, inputs, r, acc, acc_v, tile):
    T.clear(acc)
    if S.of_keys:
        T.clear(acc_v)
    else:
        for i in T.Parallel(S.block_m):
            r.limit[i] = T.min(tile.seen + i * launch.causal, tile.left)
        for i in T.Parallel(S.block_m, loop_layout=row_owners(T, S.block_m)):
            r.logs[i] = 0
            r.deltas[i] = 0
            if i < tile.rows:
                r.logs[i] = in_powers_of_two(T, inputs.lse[tile.head, tile.first_row + i])
                r.deltas[i] = inputs.delta[tile.head, tile.first_row + i]


@macro
def mask(T, S, r, tile, begin):
    """Hide what queries do not see, in the blocks where there is any."""
    if S.of_keys:
        if begin < tile.seen + (S.block_m - 1) or begin + S.block_n > tile.left:
            for i, j in T.Parallel(S.block_m, S.block_n):
                r.scores[i, j] = T.if_then_else(
                    begin + j >= tile.seen + i and begin + j < tile.left, r.scores[i, j], -T.infinity(T.float32)
                )
    elif begin + S.block_n > T.min(tile.seen, tile.left):
        for i, j in T.Parallel(S.block_m, S.block_n):
            r.scores[i, j] = T.if_then_else(begin + j < r.limit[i], r.scores[i, j], -T.infinity(T.float32))


@macro
def weigh(T, S, launch, memory, r, stage):
    """Scores to weights as the softmax had them."""
    for i, j in T.Parallel(S.block_m, S.block_n):
        if S.of_keys:
            r.scores[i, j] = T.exp2(r.scores[i, j] * launch.scale - memory.logs[stage, j])
        else:
            r.scores[i, j] = T.exp2(r.scores[i, j] * launch.scale - r.logs[i])
    if S.of_keys:
        T.copy(r.scores, r.weights)


@macro
def slope(T, S, memory, r, stage):
    """The gradients of scores: weights times what products are above their rows' mean."""
    for i, j in T.Parallel(S.block_m, S.block_n):
        if S.of_keys:
            r.products[i, j] = T.cast(r.weights[i, j], T.float32) * (r.products[i, j] - memory.deltas[stage, j])
        else:
            r.products[i, j] = r.scores[i, j] * (r.products[i, j] - r.deltas[i])


@macro
def store_rows(T, result, acc, factor, tile):
    for i, j in T.Parallel(*acc.shape):
        if i < tile.rows:
            result[tile.first_row + i, tile.head, j] = acc[i, j] * factor
