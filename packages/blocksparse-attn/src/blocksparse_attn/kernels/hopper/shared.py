"""Attention of neighbouring tokens to the blocks that their lists share, for NVIDIA's sm_90, in 16 bits.

A tile is 128 rows: the query heads of a kv head for neighbouring tokens, 64 rows for each of two consumers, which
multiply as those of ``kernel`` do (consumers.py). What a tile walks was written down by ``share_entries``: blocks that
many of its tokens list and see whole, so that no key is masked but for rows of a token that does not list the block.
Partial results are merged with those of the tokens' other blocks by ``combine_blocks``.

One program per SM takes one tile after the other. Nobody schedules: all roles know which are next.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from blocksparse_attn.kernels.hopper.consumers import (
    TINY,
    Tile,
    issue_scores,
    issue_values,
    rescaled,
    wait_for_values,
)
from blocksparse_attn.kernels.hopper.memory import COLUMNS, ROWS, Ring, barriers_of_rings, ring_of
from blocksparse_attn.kernels.hopper.pieces import Source, load_piece
from blocksparse_attn.kernels.hopper.softmax import sums_of_threads, weigh
from blocksparse_attn.kernels.softmax import LOG2_E


class SharedConfig(NamedTuple):
    """What the kernel is compiled for; fields of ``HopperConfig`` mean the same. LISTED: the most blocks of a tile.

    A step has the keys of a whole block, BLOCK_N and PIECE.
    """

    GROUP: int
    HEADS_KV: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGE: int
    BOX: int
    LISTED: int
    BLOCK_N: int
    PIECE: int
    STAGES: int
    Q_STAGES: int
    IN_TURN: bool = False
    SLACK: int = 0
    SOFTCAP: bool = False
    TAIL_D: int = 0
    TAIL_DV: int = 0
    TABLE: bool = False


class Channels(NamedTuple):
    q: Any
    k: Any
    v: Any


class Walk(NamedTuple):
    """What is the same in all roles: the tiles and what they list, see ``share_entries``."""

    shared: Any
    tiles: Any


@gluon.jit
def make_channels(dtype: gl.constexpr, config: gl.constexpr):
    """Allocate shared memory and initialise barriers."""
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = config.Q_STAGES
    TOKENS: gl.constexpr = ROWS // config.GROUP
    k_boxes, k_tiles, k_tail_boxes, k_tails = ring_of(dtype, STAGES, config.BLOCK_N, config.BOX, config.BLOCK_D, 0)
    v_boxes, v_tiles, v_tail_boxes, v_tails = ring_of(dtype, STAGES, config.BLOCK_N, config.BOX, config.BLOCK_DV, 0)
    CHUNKS: gl.constexpr = config.BLOCK_D // COLUMNS
    q_boxes = gl.allocate_shared_memory(dtype, [Q_STAGES * 2 * CHUNKS, TOKENS, 1, config.GROUP, COLUMNS], box_layout)
    q_tiles = q_boxes._reinterpret(dtype, [Q_STAGES * 2, ROWS, config.BLOCK_D], tile_layout)
    k_full, k_empty, v_full, v_empty, q_full, q_empty = barriers_of_rings(STAGES, Q_STAGES, 2, 0)
    fence_async_shared()
    return Channels(
        Ring(q_boxes, q_tiles, q_boxes, q_tiles, q_full, q_empty),
        Ring(k_boxes, k_tiles, k_tail_boxes, k_tails, k_full, k_empty),
        Ring(v_boxes, v_tiles, v_tail_boxes, v_tails, v_full, v_empty),
    )


@gluon.jit
def listed_by(walk, work, config: gl.constexpr):
    """What a tile walks, and how many blocks that are."""
    p_tile = walk.shared + work * (2 * config.LISTED + 1)
    return p_tile, gl.load(p_tile + 2 * config.LISTED)


@gluon.jit
def load(
    d_q, d, channels, walk, p_table, blocks, all_blocks, num_pages, s_table, config: gl.constexpr, VALUES: gl.constexpr
):
    """Load the queries and keys, or the values, of one tile after the other; by one warp."""
    ring = channels.v if VALUES else channels.k
    q = channels.q
    STAGES: gl.constexpr = config.STAGES
    WIDTH: gl.constexpr = config.BLOCK_DV if VALUES else config.BLOCK_D
    CHUNKS: gl.constexpr = config.BLOCK_D // COLUMNS
    gl.assume(s_table >= 0)
    work = gl.program_id(0)
    n = work * 0
    i = work * 0
    while work < walk.tiles * config.HEADS_KV:
        p_tile, count = listed_by(walk, work, config)
        if count > 0:
            i_kv = work % config.HEADS_KV
            if not VALUES:
                i_q = n % config.Q_STAGES
                mbarrier.wait(q.empty.index(i_q), (n // config.Q_STAGES & 1) ^ 1)
                full = q.full.index(i_q)
                mbarrier.expect(full, 2 * ROWS * config.BLOCK_D * 2)
                first = work // config.HEADS_KV * (2 * ROWS // config.GROUP)
                for i_half in gl.static_range(2):
                    for i_c in gl.static_range(CHUNKS):
                        tma.async_copy_global_to_shared(
                            d_q, [first + i_half * (ROWS // config.GROUP), i_kv, 0, i_c * COLUMNS], full,
                            q.boxes.index((i_q * 2 + i_half) * CHUNKS + i_c),
                        )  # fmt: skip
            for i_block in range(0, count):
                block = gl.load(p_tile + i_block) % all_blocks
                p_pages = p_table + (block // blocks).to(gl.int64) * s_table
                at = block % blocks * config.BLOCK_N
                source = Source(p_pages, 0, i_kv, 0, at + config.BLOCK_N, 0, num_pages)
                stage = i % STAGES
                mbarrier.wait(ring.empty.index(stage), (i // STAGES & 1) ^ 1)
                landed = ring.full.index(stage)
                mbarrier.expect(landed, config.BLOCK_N * WIDTH * 2)
                load_piece(d, ring, landed, stage, at, 0, source, WIDTH, 0, config)
                i += 1
            n += 1
        work += gl.num_programs(0)


@gluon.jit
def weights_of_tile(scores, running_max, row_sums, bits, i_half, factor, config: gl.constexpr, dtype: gl.constexpr):
    """``weigh``, of keys that all tokens of a consumer list, or else of those that do. In branches of their own, see
    ``softmax_of_tile``."""
    TOKENS: gl.constexpr = ROWS // config.GROUP
    ALL: gl.constexpr = 2**TOKENS - 1
    own = bits >> (i_half * TOKENS) & ALL
    if own == ALL:
        weights, new_max, new_sums, rescale = weigh(scores, running_max, row_sums, factor, config, dtype)
    else:
        o_row = gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout))
        listed = (own >> (o_row // config.GROUP)) & 1
        scores = gl.where((listed != 0)[:, None], scores, float("-inf"))
        weights, new_max, new_sums, rescale = weigh(scores, running_max, row_sums, factor, config, dtype)
    return weights, new_max, new_sums, rescale


@gluon.jit
def store_tile(acc, tile, p_part, first, i_kv, tokens, config: gl.constexpr):
    """Store 64 rows of partial results, through the tile in shared memory where their queries were."""
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # All warps are done with the queries before they are overwritten.
    tl.debug_barrier()
    tile.store(acc.to(tile.dtype))
    tl.debug_barrier()
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, L_IO))
    token = first + o_row // config.GROUP
    row = (token * config.HEADS_KV + i_kv).to(gl.int64) * config.GROUP + o_row % config.GROUP
    p_rows = p_part + row[:, None] * config.BLOCK_DV + o_d[None, :]
    gl.store(p_rows, tile.load(L_IO), mask=(token < tokens)[:, None])


@gluon.jit
def consume(channels, i_half, walk, p_part, p_part_lse, tokens, scale, value_factor, config: gl.constexpr):
    """One consumer's 64 rows of one tile after the other: A is ``i_half`` 0, B is 1."""
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_DV, 16])
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_DV: gl.constexpr = config.BLOCK_DV
    STAGES: gl.constexpr = config.STAGES
    TOKENS: gl.constexpr = ROWS // config.GROUP
    q, k, v = channels.q, channels.k, channels.v
    dtype: gl.constexpr = q.tiles.dtype
    factor = scale * LOG2_E
    factor = gl.where(factor < TINY, TINY, factor)
    work = gl.program_id(0)
    n = work * 0
    i = work * 0
    while work < walk.tiles * config.HEADS_KV:
        p_tile, count = listed_by(walk, work, config)
        if count > 0:
            p_bits = p_tile + config.LISTED
            i_q = n % config.Q_STAGES
            tile = q.tiles.index(i_q * 2 + i_half)
            q_tile = Tile(tile, tile)
            b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, L_S)
            running_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
            zeros = gl.zeros([ROWS, BLOCK_DV], gl.float32, L_O)
            acc = Tile(zeros, zeros)
            row_sums = sums_of_threads(b_zero, BLOCK_N)
            mbarrier.wait(q.full.index(i_q), n // config.Q_STAGES & 1)
            stage = i % STAGES
            mbarrier.wait(k.full.index(stage), i // STAGES & 1)
            scores = issue_scores(q_tile, k, stage, b_zero, config)
            b_scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k.empty.index(stage))
            weights, running_max, row_sums, rescale = weights_of_tile(
                b_scores, running_max, row_sums, gl.load(p_bits), i_half, factor, config, dtype
            )
            b_p = gl.convert_layout(weights, L_P)
            i += 1
            for i_block in range(1, count):
                bits = gl.load(p_bits + i_block)
                stage = i % STAGES
                mbarrier.wait(k.full.index(stage), i // STAGES & 1)
                scores = issue_scores(q_tile, k, stage, b_zero, config)
                product = issue_values(b_p, acc, v, i - 1, config)
                # Wait for the scores alone: the product runs on beside their softmax.
                b_scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k.empty.index(stage))
                weights, running_max, row_sums, rescale = weights_of_tile(
                    b_scores, running_max, row_sums, bits, i_half, factor, config, dtype
                )
                acc = wait_for_values(product, v, i - 1, config)
                b_p = gl.convert_layout(weights, L_P)
                acc = rescaled(acc, rescale, config)
                i += 1
            acc = wait_for_values(issue_values(b_p, acc, v, i - 1, config), v, i - 1, config)
            row_sum = gl.convert_layout(gl.sum(row_sums, 1), gl.SliceLayout(1, L_S))
            safe = gl.where(row_sum == 0, 1.0, row_sum)
            acc = rescaled(acc, value_factor / safe, config)
            first = work // config.HEADS_KV * (2 * TOKENS) + i_half * TOKENS
            i_kv = work % config.HEADS_KV
            o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L_S))
            token = first + o_row // config.GROUP
            row = (token * config.HEADS_KV + i_kv).to(gl.int64) * config.GROUP + o_row % config.GROUP
            log_sum = gl.where(row_sum == 0, float("-inf"), running_max + gl.log2(safe))
            gl.store(p_part_lse + row, log_sum, mask=token < tokens)
            store_tile(acc.main, tile, p_part, first, i_kv, tokens, config)
            # TMA will write the next queries where outputs were staged: the fence orders the two.
            fence_async_shared()
            tl.debug_barrier()
            mbarrier.arrive(q.empty.index(i_q))
            n += 1
        work += gl.num_programs(0)


@gluon.jit(do_not_specialize=["tokens", "tiles", "blocks", "all_blocks", "num_pages", "s_table"])
def attend_shared(
    d_q, d_k, d_v, p_table, p_shared, p_part, p_part_lse, tokens, tiles, blocks, all_blocks, num_pages, s_table,
    factors, config: gl.constexpr,
):  # fmt: skip
    """Partial results of what tiles of tokens share: part [tokens, heads, DV], part_lse [tokens, heads] in base 2.

    Rows of tiles that share nothing are not written. Queries are TMA descriptors over (token; kv head; query head of
    it; element), keys and values over (page; head; slot; element). ``factors``: of scores and of values.
    """
    channels = make_channels(d_k.dtype, config)
    walk = Walk(p_shared, tiles)
    i_half = gl.program_id(0) * 0
    gl.warp_specialize([
        (consume, (channels, i_half, walk, p_part, p_part_lse, tokens, factors[0], factors[1], config)),
        (consume, (channels, i_half + 1, walk, p_part, p_part_lse, tokens, factors[0], factors[1], config)),
        (load, (d_q, d_k, channels, walk, p_table, blocks, all_blocks, num_pages, s_table, config, False)),
        (load, (d_q, d_v, channels, walk, p_table, blocks, all_blocks, num_pages, s_table, config, True)),
    ], [4, 1, 1], [240, 40, 40])  # fmt: skip
