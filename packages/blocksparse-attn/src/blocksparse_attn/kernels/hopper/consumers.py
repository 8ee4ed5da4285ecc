"""The consumer warpgroups of the kernel for sm_90: WGMMA, online softmax, and the epilogue, for 64 rows each.

While the values of a tile are being multiplied, the scores of the next one are made and their softmax is taken
(FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second product runs
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocksparse_attn.kernels.hopper.memory import (
    ALL_ROWS,
    BATCH,
    CONTEXT,
    HEAD,
    HEADER_SIZE,
    HEADER_VALID,
    ITEM_SIZE,
    KEYS,
    LENGTH,
    POSSIBLE,
    QUEUE,
    ROW,
    ROWS,
    SPLIT,
    START,
    TOKEN,
    VALID,
    get,
)
from blocksparse_attn.kernels.softmax import LN_2, LOG2_E, finite, log_sum_exp, soft_capped

# The least normal number of float32, or a little more.
TINY: tl.constexpr = tl.constexpr(1.2e-38)


# Softmax


@gluon.jit
def sums_of_threads(weights, BLOCK_N: gl.constexpr):
    """Four sums a row, each of the columns that one thread has: those are added up once, after the last tile.

    Sums over threads are shuffles, for which each tile's softmax would wait.
    """
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(
    scores, running_max, row_sums, at, second, factor, softcap, config: gl.constexpr, MASKED: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Weights relative to the new running max, that max, the new row sums, and what the past is rescaled by.

    Keys are counted from the first row: a row sees those up to its own number.
    """
    L_S: gl.constexpr = scores.type.layout
    if config.SOFTCAP:
        scores = soft_capped(scores * factor, softcap, False) * LOG2_E
    if MASKED:
        o_n = gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, L_S))
        o_key = at + o_n
        if config.BLOCK_N > KEYS:
            o_key = gl.where(o_n < KEYS, o_key, second + (o_n - KEYS))
        o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L_S))
        scores = gl.where(o_key[None, :] <= o_row[:, None], scores, float("-inf"))
    most = gl.max(scores, 1)
    if config.SOFTCAP:
        new_max = gl.maximum(running_max, most)
        weights = gl.exp2(scores - finite(new_max)[:, None])
    else:
        # A factor of 0 or more keeps the order; multiplied here, it costs no instruction.
        new_max = gl.maximum(running_max, most * factor)
        weights = gl.exp2(scores * factor - finite(new_max)[:, None])
    rescale = gl.exp2(running_max - finite(new_max))
    L_T: gl.constexpr = gl.SliceLayout(1, row_sums.type.layout)
    row_sums = row_sums * gl.convert_layout(rescale, L_T)[:, None] + sums_of_threads(weights, config.BLOCK_N)
    return weights.to(dtype), new_max, row_sums, rescale


@gluon.jit
def softmax_of_tile(
    scores, running_max, row_sums, at, second, factor, softcap, config: gl.constexpr, dtype: gl.constexpr
):
    """``softmax_step``, masked only where some row does not see the whole tile.

    Both are branches of their own: in straight code ptxas moves the softmax past the wait for the product that it is
    to overlap with.
    """
    last = at
    if config.BLOCK_N > KEYS:
        last = gl.maximum(at, second)
    if last < 0:
        weights, new_max, new_sums, rescale = softmax_step(
            scores, running_max, row_sums, at, second, factor, softcap, config, False, dtype
        )
    else:
        weights, new_max, new_sums, rescale = softmax_step(
            scores, running_max, row_sums, at, second, factor, softcap, config, True, dtype
        )
    return weights, new_max, new_sums, rescale


@gluon.jit
def natural_logarithm(running_max, row_sum, unit):
    """log(2^running_max row_sum), and -inf for a row that saw nothing; the max is a score in units of ``unit`` log2(e)
    as rounded.

    What undoes that factor is taken in two parts, so that a large score is rounded once.
    """
    rounded = unit * LOG2_E
    rounded = gl.where(rounded == 0, 1.0, rounded)
    ratio = unit / rounded
    rest = gl.fma(-ratio, rounded, unit) / rounded
    log_sum = gl.log(gl.where(row_sum == 0, 1.0, row_sum))
    top = finite(running_max)
    return gl.where(row_sum == 0, float("-inf"), gl.fma(top, ratio, gl.fma(top, rest, log_sum)))


# The main loop


@gluon.jit
def next_header(channels, i, i_half, config: gl.constexpr):
    """Wait for tile i of keys: where its halves are, from this consumer's first row, and whether it is a tile."""
    stage = i % config.STAGES
    mbarrier.wait(channels.k.full.index(stage), i // config.STAGES & 1)
    at = get(channels.headers, stage * HEADER_SIZE + i_half * 2)
    second = at
    if config.BLOCK_N > KEYS:
        second = get(channels.headers, stage * HEADER_SIZE + i_half * 2 + 1)
    return at, second, get(channels.headers, stage * HEADER_SIZE + HEADER_VALID) != 0


@gluon.jit
def issue_values(b_p, acc, v, i, STAGES: gl.constexpr):
    """Wait for tile i of values, and issue the product that adds them, weighted, to ``acc``."""
    stage = i % STAGES
    mbarrier.wait(v.full.index(stage), i // STAGES & 1)
    return warpgroup_mma(b_p, v.tiles.index(stage), acc, is_async=True)


@gluon.jit
def attend_tiles(
    q_tile, channels, i, n, i_half, scale, softcap, config: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr
):
    """All tiles of a work item for 64 of its rows: the accumulator, the running max and the row sum.

    Weights are relative to that max, which carries a factor log2(e). Tile i of keys is the item's first; the number of
    the next item's first is returned too. Each of the n items before ended with a header without a tile, for which
    there are no values: to tile i of keys belongs tile i - n of values.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_DV: gl.constexpr = config.BLOCK_DV
    STAGES: gl.constexpr = config.STAGES
    k, v = channels.k, channels.v
    dtype: gl.constexpr = q_tile.dtype
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    factor = scale
    if not config.SOFTCAP:
        # Masked scores are -inf, of which a factor of 0 would make NaN.
        factor = factor * LOG2_E
        factor = gl.where(factor < TINY, TINY, factor)
    running_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, L_O)
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, L_S)
    row_sums = sums_of_threads(b_zero, BLOCK_N)
    at, second, valid = next_header(channels, i, i_half, config)
    if valid:
        # Prologue: there is no product yet for the softmax of the first tile to overlap with.
        stage = i % STAGES
        scores = warpgroup_mma(q_tile, k.tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k.empty.index(stage))
        weights, running_max, row_sums, rescale = softmax_of_tile(
            b_scores, running_max, row_sums, at, second, factor, softcap, config, dtype
        )
        b_p = gl.convert_layout(weights, L_P)
        i += 1
        at, second, valid = next_header(channels, i, i_half, config)
        while valid:
            stage = i % STAGES
            scores = warpgroup_mma(q_tile, k.tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            product = issue_values(b_p, acc, v, i - 1 - n, STAGES)
            # Wait for the scores alone: the product runs on beside their softmax.
            b_scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k.empty.index(stage))
            weights, running_max, row_sums, rescale = softmax_of_tile(
                b_scores, running_max, row_sums, at, second, factor, softcap, config, dtype
            )
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v.empty.index((i - 1 - n) % STAGES))
            b_p = gl.convert_layout(weights, L_P)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
            i += 1
            at, second, valid = next_header(channels, i, i_half, config)
        product = issue_values(b_p, acc, v, i - 1 - n, STAGES)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v.empty.index((i - 1 - n) % STAGES))
    # All warps have read the last header before it is overwritten.
    tl.debug_barrier()
    mbarrier.arrive(k.empty.index(i % STAGES))
    return acc, running_max, gl.convert_layout(gl.sum(row_sums, 1), gl.SliceLayout(1, L_S)), i + 1


# The epilogue


@gluon.jit
def pointers(p, i_b, token, i_h, o_d, s):
    """To rows of a head [ROWS, BLOCK_DV], by strides of (sequence, token, head, element)."""
    off = i_b.to(gl.int64) * s[0] + token.to(gl.int64) * s[1] + i_h.to(gl.int64) * s[2]
    return p + off[:, None] + o_d.to(gl.int64)[None, :] * s[3]


@gluon.jit
def store_rows(acc, tile, p_out, s_out, i_b, i_h, token, start, context, length, config: gl.constexpr):
    """Store the outputs of 64 positions from ``start``, where those are the sequence's queries.

    They are staged in a tile of shared memory, so that each row is stored in whole lines.
    """
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # All warps are done with what the tile held, before that is overwritten.
    tl.debug_barrier()
    tile.store(acc.to(tile.dtype))
    # All warps have stored their rows, before others load them.
    tl.debug_barrier()
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, L_IO))
    m_row = (position >= context) & (position < length)
    p_tile = pointers(p_out, i_b, token + position, i_h, o_d, s_out)
    gl.store(p_tile, tile.load(L_IO), mask=m_row[:, None] & (o_d < config.DV)[None, :])


@gluon.jit
def store_part(acc, p_part, items, base, i_h, start, context, length, config: gl.constexpr):
    """Store a split's partial outputs, in float32, of the same positions as ``store_rows``."""
    L_O: gl.constexpr = acc.type.layout
    H: gl.constexpr = config.GROUP * config.HEADS_KV
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_O))
    o_d = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, L_O))
    m_row = (position >= context) & (position < length)
    row = get(items, base + SPLIT).to(gl.int64) * get(items, base + ALL_ROWS)
    row = row + get(items, base + ROW) + position
    p_tile = p_part + (row * H + i_h)[:, None] * config.DV + o_d[None, :]
    gl.store(p_tile, acc, mask=m_row[:, None] & (o_d < config.DV)[None, :])


@gluon.jit
def epilogue(acc, running_max, row_sum, tile, channels, base, i_half, p_sinks, outputs, strides, config: gl.constexpr):
    """Normalise what ``attend_tiles`` summed for 64 rows, and store outputs and lse, or a split's partial ones.

    As in ``softmax.store``: partial results are without the sink, which the merge kernel adds once.
    """
    H: gl.constexpr = config.GROUP * config.HEADS_KV
    L_O: gl.constexpr = acc.type.layout
    items, scale = channels.queue.items, get(channels.scale, 0)
    start = get(items, base + START) + i_half * ROWS
    context = get(items, base + CONTEXT)
    length = get(items, base + LENGTH)
    token = get(items, base + TOKEN)
    i_b = get(items, base + BATCH)
    i_h = get(items, base + HEAD)
    possible = get(items, base + POSSIBLE) != 0
    position = start + gl.arange(0, ROWS, running_max.type.layout)
    m_row = (position >= context) & (position < length)
    log_sum = natural_logarithm(running_max, row_sum, 1.0 if config.SOFTCAP else scale)
    if config.SPLITS == 1:
        if p_sinks is not None:
            running_max = running_max * LN_2
            b_sink = gl.load(p_sinks + i_h).to(gl.float32)
            b_sink = gl.where(possible, b_sink, float("-inf"))
            new_max = gl.maximum(running_max, b_sink)
            rescale = gl.exp(running_max - finite(new_max))
            row_sum = row_sum * rescale + gl.exp(b_sink - finite(new_max))
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
            log_sum = log_sum_exp(new_max, row_sum)
        if outputs.lse is not None:
            s_lse = strides.lse
            # Tests for negative strides would take registers through the main loop.
            for i_s in gl.static_range(3):
                gl.assume(s_lse[i_s] >= 0)
            off = i_b.to(gl.int64) * s_lse[0] + i_h.to(gl.int64) * s_lse[1] + (token + position).to(gl.int64) * s_lse[2]
            gl.store(outputs.lse + off, log_sum, mask=m_row)
    else:
        i_part = get(items, base + SPLIT).to(gl.int64) * H + i_h
        i_part = i_part * get(items, base + ALL_ROWS) + get(items, base + ROW) + position
        gl.store(outputs.part_lse + i_part, gl.where(possible, log_sum, float("inf")), mask=m_row)
    acc = acc * gl.convert_layout(1.0 / gl.where(row_sum == 0, 1.0, row_sum), gl.SliceLayout(1, L_O))[:, None]
    if config.SPLITS == 1:
        store_rows(acc, tile, outputs.out, strides.out, i_b, i_h, token, start, context, length, config)
    else:
        store_part(acc, outputs.part, items, base, i_h, start, context, length, config)


# The role


@gluon.jit
def consume(channels, i_half, p_sinks, outputs, softcap, strides, config: gl.constexpr):
    """One consumer's 64 rows of one work item after the other: A is ``i_half`` 0, B is 1."""
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_DV, 16])
    queue = channels.queue
    # Numbers of the work item and of the tile of keys; each item ends with a header without a tile, which counts.
    n = i_half * 0
    i = i_half * 0
    mbarrier.wait(queue.full.index(0), 0)
    valid = get(queue.items, VALID) != 0
    while valid:
        i_q = n % config.Q_STAGES
        base = n % QUEUE * ITEM_SIZE
        q_tile = channels.q.tiles.index(i_q * 2 + i_half)
        mbarrier.wait(channels.q.full.index(i_q), n // config.Q_STAGES & 1)
        acc, running_max, row_sum, i = attend_tiles(
            q_tile, channels, i, n, i_half, get(channels.scale, 0), softcap, config, L_S, L_O
        )
        out_tile = q_tile
        if config.BLOCK_DV != config.BLOCK_D:
            out_tile = channels.out_tiles.index(i_half)
        epilogue(acc, running_max, row_sum, out_tile, channels, base, i_half, p_sinks, outputs, strides, config)
        # TMA will write the next queries where outputs were staged: the fence orders the two.
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(channels.q.empty.index(i_q))
        mbarrier.arrive(queue.empty.index(n % QUEUE))
        n += 1
        mbarrier.wait(queue.full.index(n % QUEUE), n // QUEUE & 1)
        valid = get(queue.items, n % QUEUE * ITEM_SIZE + VALID) != 0
