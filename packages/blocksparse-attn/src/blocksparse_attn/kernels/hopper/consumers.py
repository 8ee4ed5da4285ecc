"""The consumer warpgroups of the kernel for sm_90: WGMMA, online softmax, and the epilogue, for 64 rows each.

While the values of a tile are being multiplied, the scores of the next one are made and their softmax is taken
(FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second product runs

A consumer skips a tile that none of its rows lists, and begins anew behind it.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocksparse_attn.kernels.groups import Scoring
from blocksparse_attn.kernels.hopper.memory import (
    ALL_ROWS,
    BATCH,
    CONTEXT,
    HEAD,
    ITEM_SIZE,
    LENGTH,
    NO_TILE,
    POSSIBLE,
    QUEUE,
    ROW,
    ROWS,
    SKIPPED,
    SPLIT,
    START,
    TOKEN,
    VALID,
    get,
)
from blocksparse_attn.kernels.hopper.softmax import natural_logarithm, softmax_of_tile, sums_of_threads
from blocksparse_attn.kernels.softmax import LN_2, LOG2_E, finite, log_sum_exp

# The least normal number of float32, or a little more.
TINY: tl.constexpr = tl.constexpr(1.2e-38)
# Of PTX's 16 barriers those on which consumers wait for their turn: A on the first, B on the second. Triton numbers its
# own from 0 on.
TURNS: tl.constexpr = tl.constexpr(12)


# The main loop


class Tile(NamedTuple):
    """A tile of shared memory, or of an accumulator, in the two pieces of a head size."""

    main: Any
    tail: Any


@gluon.jit
def next_mode(channels, i, i_half, config: gl.constexpr):
    """Wait for tile i of keys, and see what it is for this consumer."""
    stage = i % config.STAGES
    mbarrier.wait(channels.k.full.index(stage), i // config.STAGES & 1)
    return get(channels.modes, stage * 2 + i_half)


@gluon.jit
def issue_scores(q, k, stage, b_zero, config: gl.constexpr):
    """Issue the products of queries and of a tile of keys."""
    b_k = k.tiles.index(stage).permute((1, 0))
    scores = warpgroup_mma(q.main, b_k, b_zero, use_acc=False, is_async=True)
    if config.TAIL_D:
        b_tail = k.tails.index(stage).slice(0, config.TAIL_D, 1).permute((1, 0))
        scores = warpgroup_mma(q.tail.slice(0, config.TAIL_D, 1), b_tail, scores, is_async=True)
    return scores


@gluon.jit
def issue_values(weights, acc, v, i, config: gl.constexpr):
    """Wait for tile i of values, and issue the products that add them, weighted, to both pieces of ``acc``."""
    stage = i % config.STAGES
    mbarrier.wait(v.full.index(stage), i // config.STAGES & 1)
    main = warpgroup_mma(weights, v.tiles.index(stage), acc.main, is_async=True)
    tail = acc.tail
    if config.TAIL_DV:
        tail = warpgroup_mma(weights, v.tails.index(stage).slice(0, config.TAIL_DV, 1), acc.tail, is_async=True)
    return Tile(main, tail)


@gluon.jit
def wait_for_values(product, v, i, config: gl.constexpr):
    """Wait for what ``issue_values`` issued, and hand the stage back."""
    if config.TAIL_DV:
        main, tail = warpgroup_mma_wait(0, deps=[product.main, product.tail])
    else:
        main = warpgroup_mma_wait(0, deps=[product.main])
        tail = product.tail
    mbarrier.arrive(v.empty.index(i % config.STAGES))
    return Tile(main, tail)


@gluon.constexpr_function
def numbers_together(columns):
    """How many of a thread's numbers of [ROWS, columns] the text below takes."""
    return min(32, columns // 2)


@gluon.constexpr_function
def registers_of_rescaling(count):
    return ",".join(["=f"] * count + ["f"] * (2 * count))


@gluon.constexpr_function
def text_of_rescaling(count):
    """PTX: so many numbers times as many others, which a warp skips where all of its rows' are 1.

    A thread has two rows of an accumulator, two columns of each in turn: the first and the third factor are both.
    """
    kept = [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    asked = [
        f"setp.neu.f32 first, ${2 * count}, 0f3F800000;", f"setp.neu.f32 either, ${2 * count + 2}, 0f3F800000;",
        "or.pred either, either, first;", "vote.sync.any.pred either, either, 0xffffffff;", "@!either bra.uni DONE;",
    ]  # fmt: skip
    scaled = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "{ .reg .pred first, either; " + " ".join([*kept, *asked, *scaled]) + " DONE: }"


@gluon.jit
def rescaled_piece(acc, rescale, config: gl.constexpr):
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    if config.SLACK:
        COUNT: gl.constexpr = numbers_together(acc.shape[1])
        TEXT: gl.constexpr = text_of_rescaling(COUNT)
        REGISTERS: gl.constexpr = registers_of_rescaling(COUNT)
        acc = gl.inline_asm_elementwise(TEXT, REGISTERS, [acc, factor], dtype=gl.float32, is_pure=False, pack=COUNT)
    else:
        acc = acc * factor
    return acc


@gluon.jit
def rescaled(acc, rescale, config: gl.constexpr):
    """Both pieces of an accumulator, times a number for each row."""
    main = rescaled_piece(acc.main, rescale, config)
    tail = acc.tail
    if config.TAIL_DV:
        tail = rescaled_piece(acc.tail, rescale, config)
    return Tile(main, tail)


@gluon.jit
def take_turn(i_half, config: gl.constexpr):
    """Wait until it is a consumer's turn to issue the products of a tile, A first.

    One's products then run beside the other's softmax: left to themselves both tend to do the same at a time.
    """
    if config.IN_TURN:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [i_half + TURNS], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def give_turn(i_half, config: gl.constexpr):
    """Let the other consumer issue products. In PTX: an arrival in shared memory would wait for all warps first."""
    if config.IN_TURN:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [1 - i_half + TURNS], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def skip_tile(channels, i, n, STAGES: gl.constexpr):
    """Hand back the stages of a tile that no row of this consumer lists."""
    # All warps have read what the tile is.
    tl.debug_barrier()
    mbarrier.arrive(channels.k.empty.index(i % STAGES))
    # Before the values are there, their stage may still be another tile's.
    i_v = i - n
    mbarrier.wait(channels.v.full.index(i_v % STAGES), i_v // STAGES & 1)
    mbarrier.arrive(channels.v.empty.index(i_v % STAGES))


@gluon.jit
def attend_tiles(q, channels, i, n, i_half, scoring, config: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr):
    """All tiles of a work item for 64 of its rows: the accumulator, the running max and the row sum.

    Weights are relative to that max, which carries a factor log2(e). Tile i of keys is the item's first; the number of
    the next item's first is returned too. Each of the n items before ended with a header without a tile, for which
    there are no values: to tile i of keys belongs tile i - n of values.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    BLOCK_DV: gl.constexpr = config.BLOCK_DV
    TAIL: gl.constexpr = config.TAIL_DV if config.TAIL_DV else 16
    PRODUCTS: gl.constexpr = 2 if config.TAIL_DV else 1
    k, v = channels.k, channels.v
    dtype: gl.constexpr = q.main.dtype
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    L_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    running_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
    acc = Tile(gl.zeros([ROWS, BLOCK_DV], gl.float32, L_O), gl.zeros([ROWS, TAIL], gl.float32, L_TAIL))
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, L_S)
    row_sums = sums_of_threads(b_zero, BLOCK_N)
    mode = next_mode(channels, i, i_half, config)
    while mode != NO_TILE:
        if mode == SKIPPED:
            take_turn(i_half, config)
            give_turn(i_half, config)
            skip_tile(channels, i, n, STAGES)
            i += 1
            mode = next_mode(channels, i, i_half, config)
        else:
            # Prologue: there is no product yet for the softmax of the first tile to overlap with.
            stage = i % STAGES
            take_turn(i_half, config)
            scores = issue_scores(q, k, stage, b_zero, config)
            give_turn(i_half, config)
            b_scores = warpgroup_mma_wait(0, deps=[scores])
            weights, running_max, row_sums, rescale = softmax_of_tile(
                b_scores, running_max, row_sums, channels, stage, i_half, mode, scoring, config, dtype
            )
            b_p = gl.convert_layout(weights, L_P)
            acc = rescaled(acc, rescale, config)
            i += 1
            mode = next_mode(channels, i, i_half, config)
            while mode > SKIPPED:
                stage = i % STAGES
                take_turn(i_half, config)
                scores = issue_scores(q, k, stage, b_zero, config)
                product = issue_values(b_p, acc, v, i - 1 - n, config)
                give_turn(i_half, config)
                # Wait for the scores alone: the product runs on beside their softmax.
                b_scores = warpgroup_mma_wait(PRODUCTS, deps=[scores])
                weights, running_max, row_sums, rescale = softmax_of_tile(
                    b_scores, running_max, row_sums, channels, stage, i_half, mode, scoring, config, dtype
                )
                acc = wait_for_values(product, v, i - 1 - n, config)
                b_p = gl.convert_layout(weights, L_P)
                acc = rescaled(acc, rescale, config)
                i += 1
                mode = next_mode(channels, i, i_half, config)
            acc = wait_for_values(issue_values(b_p, acc, v, i - 1 - n, config), v, i - 1 - n, config)
    # All warps have read the last header before it is overwritten.
    tl.debug_barrier()
    mbarrier.arrive(k.empty.index(i % STAGES))
    return acc, running_max, gl.convert_layout(gl.sum(row_sums, 1), gl.SliceLayout(1, L_S)), i + 1


# The epilogue


@gluon.jit
def pointers(p, i_b, token, i_h, o_d, s):
    """To rows of a head [ROWS, BLOCK_DV], by strides of (sequence, token, head, element); None is an element's 1."""
    off = i_b.to(gl.int64) * s[0] + token.to(gl.int64) * s[1] + i_h.to(gl.int64) * s[2]
    o_d = o_d.to(gl.int64)
    if s[3] is not None:
        o_d = o_d * s[3]
    return p + off[:, None] + o_d[None, :]


@gluon.jit
def staged(acc, tile):
    """Outputs as a warp stores whole lines of them, by way of a tile of shared memory."""
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # All warps are done with what the tile held, before that is overwritten.
    tl.debug_barrier()
    tile.store(acc.to(tile.dtype))
    # All warps have stored their rows, before others load them.
    tl.debug_barrier()
    return tile.load(L_IO)


@gluon.jit
def store_rows(rows, p_out, s_out, i_b, i_h, token, start, context, length, first: gl.constexpr, config: gl.constexpr):
    """Store the outputs of 64 positions from ``start``, where those are the sequence's queries, from a column on."""
    L_IO: gl.constexpr = rows.type.layout
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = first + gl.arange(0, rows.shape[1], gl.SliceLayout(0, L_IO))
    m_row = (position >= context) & (position < length)
    p_tile = pointers(p_out, i_b, token + position, i_h, o_d, s_out)
    gl.store(p_tile, rows, mask=m_row[:, None] & (o_d < config.DV)[None, :])


@gluon.jit
def store_part(acc, p_part, items, base, i_h, start, context, length, first: gl.constexpr, config: gl.constexpr):
    """Store a split's partial outputs, in float32, of the same positions as ``store_rows``."""
    L_O: gl.constexpr = acc.type.layout
    H: gl.constexpr = config.GROUP * config.HEADS_KV
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_O))
    o_d = first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L_O))
    m_row = (position >= context) & (position < length)
    row = get(items, base + SPLIT).to(gl.int64) * get(items, base + ALL_ROWS)
    row = row + get(items, base + ROW) + position
    p_tile = p_part + (row * H + i_h)[:, None] * config.DV + o_d[None, :]
    gl.store(p_tile, acc, mask=m_row[:, None] & (o_d < config.DV)[None, :])


@gluon.jit
def hand_back(channels, i_q):
    """Hand back the queries, where outputs were staged, before those are stored: the fence would wait for stores."""
    # TMA will write the next queries there: the fence orders the two.
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(channels.q.empty.index(i_q))


class Results(NamedTuple):
    """Where results go, see ``Outputs``, with the logits that stand in the denominator only."""

    sinks: Any
    outputs: Any
    strides: Any
    num_splits: Any


@gluon.jit
def epilogue(acc, running_max, row_sum, tile, channels, i_q, base, i_half, results, config: gl.constexpr):
    """Normalise what ``attend_tiles`` summed for 64 rows, and store outputs and lse, or a split's partial ones.

    As in ``softmax.store``: partial results are without the sink, which the merge kernel adds once.
    """
    H: gl.constexpr = config.GROUP * config.HEADS_KV
    outputs, strides = results.outputs, results.strides
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
    rescale = row_sum * 0 + 1.0
    if results.num_splits == 1:
        if results.sinks is not None:
            running_max = running_max * LN_2
            b_sink = gl.load(results.sinks + i_h).to(gl.float32)
            b_sink = gl.where(possible, b_sink, float("-inf"))
            new_max = gl.maximum(running_max, b_sink)
            rescale = gl.exp(running_max - finite(new_max))
            row_sum = row_sum * rescale + gl.exp(b_sink - finite(new_max))
            log_sum = log_sum_exp(new_max, row_sum)
    acc = rescaled(acc, rescale / gl.where(row_sum == 0, 1.0, row_sum), config)
    if results.num_splits == 1:
        rows = staged(acc.main, tile.main)
        tail = rows
        if config.TAIL_DV:
            tail = staged(acc.tail, tile.tail.slice(0, config.TAIL_DV, 1))
        hand_back(channels, i_q)
        if outputs.lse is not None:
            s_lse = strides.lse
            # Tests for negative strides would take registers through the main loop.
            for i_s in gl.static_range(3):
                gl.assume(s_lse[i_s] >= 0)
            off = i_b.to(gl.int64) * s_lse[0] + i_h.to(gl.int64) * s_lse[1] + (token + position).to(gl.int64) * s_lse[2]
            gl.store(outputs.lse + off, log_sum, mask=m_row)
        store_rows(rows, outputs.out, strides.out, i_b, i_h, token, start, context, length, 0, config)
        if config.TAIL_DV:
            store_rows(
                tail, outputs.out, strides.out, i_b, i_h, token, start, context, length, config.BLOCK_DV, config
            )  # fmt: skip
    else:
        hand_back(channels, i_q)
        i_part = get(items, base + SPLIT).to(gl.int64) * H + i_h
        i_part = i_part * get(items, base + ALL_ROWS) + get(items, base + ROW) + position
        gl.store(outputs.part_lse + i_part, gl.where(possible, log_sum, float("inf")), mask=m_row)
        store_part(acc.main, outputs.part, items, base, i_h, start, context, length, 0, config)
        if config.TAIL_DV:
            store_part(acc.tail, outputs.part, items, base, i_h, start, context, length, config.BLOCK_DV, config)


# The role


@gluon.jit
def consume(channels, i_half, softcap, left, results, config: gl.constexpr):
    """One consumer's 64 rows of one work item after the other: A is ``i_half`` 0, B is 1."""
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_DV, 16])
    queue = channels.queue
    # Numbers of the work item and of the tile of keys; each item ends with a header without a tile, which counts.
    n = i_half * 0
    i = i_half * 0
    if i_half == 1:
        give_turn(i_half, config)
    mbarrier.wait(queue.full.index(0), 0)
    valid = get(queue.items, VALID) != 0
    while valid:
        i_q = n % config.Q_STAGES
        base = n % QUEUE * ITEM_SIZE
        q_tile = Tile(channels.q.tiles.index(i_q * 2 + i_half), channels.q.tails.index(i_q * 2 + i_half))
        mbarrier.wait(channels.q.full.index(i_q), n // config.Q_STAGES & 1)
        factor = get(channels.scale, 0)
        if not config.SOFTCAP:
            # The softmax is in base 2. Masked scores are -inf, of which a factor of 0 would make NaN.
            factor = factor * LOG2_E
            factor = gl.where(factor < TINY, TINY, factor)
        acc, running_max, row_sum, i = attend_tiles(
            q_tile, channels, i, n, i_half, Scoring(factor, softcap, left), config, L_S, L_O
        )
        out_tile = q_tile
        if (config.BLOCK_DV != config.BLOCK_D) | (config.TAIL_DV != config.TAIL_D):
            out_tile = Tile(channels.out_tiles.index(i_half), channels.out_tails.index(i_half))
        epilogue(acc, running_max, row_sum, out_tile, channels, i_q, base, i_half, results, config)
        mbarrier.arrive(queue.empty.index(n % QUEUE))
        n += 1
        mbarrier.wait(queue.full.index(n % QUEUE), n // QUEUE & 1)
        valid = get(queue.items, n % QUEUE * ITEM_SIZE + VALID) != 0
