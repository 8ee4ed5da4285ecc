"""The lists of a tile's tokens, united: what any of them lists, each block once, and who lists it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch
from blocksparse_attn.kernels.tiles import PAGED, keys_of_sequence, locate

# Of a tile of several tokens the workspace holds how many blocks there are and, from here on, the blocks; then which
# tokens list each, as bits, with the number of the last of them above.
HEADER: tl.constexpr = tl.constexpr(4)
LAST: tl.constexpr = tl.constexpr(16)


class Part(NamedTuple):
    """Of a united list of ``pieces``: its numbers, and the first of some tiles of it and that behind the last."""

    numbers: Any
    first: Any
    end: Any
    pieces: Any


@triton.jit
def last_of(bits):
    """The number of the last token that bits tell of, the exponent of the bits as a float."""
    return (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def entries_of(p_lists, s_token, i_tile, q_len, blocks, context, config: tl.constexpr):
    """All entries of a tile's lists: the block, and the token in the tile.

    Blocks that are not there, and those whose keys all come after the token, are no entries: -1.
    """
    TOKENS: tl.constexpr = config.TOKENS
    o_e = tl.arange(0, TOKENS * config.TOPK_P)
    o_token = o_e // config.TOPK_P
    o_t = i_tile * TOKENS + o_token
    there = (o_e % config.TOPK_P < config.TOPK) & (o_t < q_len)
    block = tl.load(p_lists + o_t.to(tl.int64) * s_token + o_e % config.TOPK_P, mask=there, other=-1)
    there = (block >= 0) & (block < blocks)
    if config.CAUSAL:
        there = there & (block.to(tl.int64) * config.BLOCK <= context + o_t)
    return tl.where(there, block, -1), o_token


@triton.jit
def size_of_work(keys, TOKENS: tl.constexpr, config: tl.constexpr):
    """Numbers that a tile of so many tokens has in the workspace."""
    size = HEADER + 2 * TOKENS * config.TOPK_P
    if config.MAPPED:
        size = HEADER + (keys + (config.BLOCK - 1)) // config.BLOCK
    return size


@triton.jit
def write_lists(p_tile, p_lists, s_token, i_tile, q_len, blocks, context, config: tl.constexpr):
    """Unite short lists: each entry is compared with each."""
    ENTRIES: tl.constexpr = config.TOKENS * config.TOPK_P
    block, o_token = entries_of(p_lists, s_token, i_tile, q_len, blocks, context, config)
    # Each token lists a block once, so that the bits of all add up.
    bits = tl.sum((block[:, None] == block[None, :]).to(tl.int32) << o_token[None, :], 1)
    first = (block >= 0) & ((bits & ((1 << o_token) - 1)) == 0)
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    last = last_of(bits)
    tl.store(p_tile, tl.sum(first.to(tl.int32), 0))
    tl.store(p_tile + HEADER + rank, block, mask=first)
    tl.store(p_tile + HEADER + ENTRIES + rank, bits | last << LAST, mask=first)


@triton.jit
def write_map(p_tile, p_lists, s_token, i_tile, q_len, blocks, context, columns, config: tl.constexpr):
    """Unite long lists: a number for each of the sequence's blocks has the bits of the tokens that list it; then those
    that any lists, one after the other, above their bits.
    """
    TOKENS: tl.constexpr = config.TOKENS
    CHUNK: tl.constexpr = 1024
    p_map = p_tile + HEADER
    o_c, o_e = tl.arange(0, CHUNK), tl.arange(0, config.TOPK_P)
    for first in range(0, columns, CHUNK):
        tl.store(p_map + first + o_c, tl.zeros([CHUNK], tl.int32), mask=first + o_c < columns)
    tl.debug_barrier()
    for i_token in range(0, TOKENS):
        o_t = i_tile * TOKENS + i_token
        there = (o_e < config.TOPK) & (o_t < q_len)
        block = tl.load(p_lists + tl.cast(o_t, tl.int64) * s_token + o_e, mask=there, other=-1)
        there = (block >= 0) & (block < blocks)
        if config.CAUSAL:
            there = there & (block.to(tl.int64) * config.BLOCK <= context + o_t)
        tl.atomic_or(p_map + block, block * 0 + (1 << i_token), mask=there, sem="relaxed")
    tl.debug_barrier()
    count = 0
    for first in range(0, columns, CHUNK):
        # From where the atomics were, not from a cache that they pass by.
        bits = tl.load(p_map + first + o_c, mask=first + o_c < columns, other=0, cache_modifier=".cg")
        tl.debug_barrier()
        found = (bits != 0).to(tl.int32)
        rank = count + tl.cumsum(found, 0) - 1
        tl.store(p_map + rank, (first + o_c) << TOKENS | bits, mask=bits != 0)
        count += tl.sum(found, 0)
    tl.store(p_tile, count)


@triton.jit(do_not_specialize=["rows", "sequences", "keys"])
def unite_lists(p_indices, bounds, p_work, rows, sequences, keys, s_indices, config: tl.constexpr):
    """Write down what the tokens of a tile list, each block once: by one program for a tile and kv head.

    The kernel that attends could not load keys ahead of a list that it makes itself.
    """
    batch = Batch(bounds, sequences, rows, keys)
    pid = tl.program_id(0)
    i_kv = (pid % config.HEADS_KV).to(tl.int64)
    i_n, i_slot, begin, q_len = locate(batch, pid // config.HEADS_KV, config.TOKENS, 1, PAGED)
    _, length, possible = keys_of_sequence(batch, i_n, q_len, PAGED)
    i_tile = (q_len - 1) // config.TOKENS - i_slot
    if (q_len > 0) & (i_slot >= 0) & (i_tile >= 0):
        blocks = tl.where(possible, (length - 1) // config.BLOCK + 1, 0)
        p_lists = p_indices + begin * s_indices[0] + i_kv * s_indices[1]
        p_tile = p_work + pid.to(tl.int64) * size_of_work(keys, config.TOKENS, config)
        if config.MAPPED:
            columns = (keys + (config.BLOCK - 1)) // config.BLOCK
            write_map(p_tile, p_lists, s_indices[0], i_tile, q_len, blocks, length - q_len, columns, config)
        else:
            write_lists(p_tile, p_lists, s_indices[0], i_tile, q_len, blocks, length - q_len, config)


@triton.jit
def piece_of(i, config: tl.constexpr):
    """Which pieces of a list's blocks tile i has: one number where a tile lies within a block."""
    if config.BLOCK_N > config.PIECE:
        i = i * (config.BLOCK_N // config.PIECE) + tl.arange(0, config.BLOCK_N) // config.PIECE
    return i


@triton.jit
def numbers_of(p_tile, i, pieces, config: tl.constexpr):
    """Those of the blocks of tile i in a united list, see ``write_map``, 0 behind its end, which no token lists."""
    i_piece = piece_of(i, config)
    return tl.load(p_tile + i_piece // (config.BLOCK // config.PIECE), mask=i_piece < pieces, other=0)


@triton.jit
def keys_of_numbers(number, i, whole, p_pages, EDGE: tl.constexpr, config: tl.constexpr):
    """Keys of tile i of a united list, the tokens that see each, as bits, and its page.

    EDGE: there may be keys from ``whole`` on, which not all see that list them.
    """
    at = (number >> config.TOKENS) * config.BLOCK
    at += piece_of(i, config) % (config.BLOCK // config.PIECE) * config.PIECE
    o_key = at + tl.arange(0, config.BLOCK_N) % config.PIECE
    tokens = number & (2**config.TOKENS - 1)
    if EDGE:
        if config.CAUSAL:
            tokens = tokens & (-1 << tl.minimum(tl.maximum(o_key - (whole - 1), 0), 31))
        else:
            tokens = tl.where(o_key < whole, tokens, 0)
    else:
        tokens += o_key * 0
    return o_key, tokens, tl.load(p_pages + o_key // config.PAGE, mask=tokens != 0, other=-1)
