"""What the decoding kernel hands from macro to macro: sizes, tensors, shared memory, barriers, work."""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, ROWS, WARP, macro
from tilelang_mla.kernels.softmax import COLUMNS

# Warps of a warpgroup.
_WARPS = GROUP // WARP
# What a work item says of the part at hand: places in ``told``, one of whose two slots the producer fills while the
# consumers still read the other.
_TOLD = 8
_SEQUENCE, _PARTS, _LENGTH, _PART, _ROW, _BLOCK, _STEPS = 0, 2, 3, 4, 5, 6, 7
# Registers of a thread that makes weights, of one that multiplies the right half and of the producer, 65536 in all less
# 1024; where the producer widens keys, and where they are in its registers until then.
_REGISTERS, _REGISTERS_8BIT, _WIDENED_BY_ROWS = (216, 216, 72), (208, 208, 88), (216, 176, 112)
_TWO_LOADERS = (208, 160, 72)
# Who says how sequences are cut: a number of parts for all of them, the schedule of a plan, or the programs themselves.
EVENLY, PLANNED, SHARED = 0, 1, 2
# Who says in which order parts are taken: their numbers, a plan, or the programs, that of more blocks than one first.
AS_NUMBERED, AS_PLANNED, LONG_FIRST = 0, 1, 2
# Where in ``share`` the sequences are that a program takes by turns, long ones first, and how many at most.
TAKEN, MOST_TURNS = 7, 32


class Sizes(NamedTuple):
    """What the kernel is compiled for; see :func:`tilelang_mla.kernels.decode.attend`.

    narrow: keys of 8 bits are multiplied as they are.

    whole: a work item is a whole list, whose result nobody merges, and largest scores are wanted beside it.

    early: scores of a block are asked of the tensor cores before the values of the one before it are there, and values
    of the right half wait until they have been asked for: with ``told`` sparse prefill is 1.07 to 1.10 times as fast on
    an H200. A stage is free later, so that this is for work whose time is that of products.

    paired: two programs, of tiles of rows side by side, are a cluster; each widens half of a block's keys, for both.

    boxes: keys of a page that is no whole block come by TMA, 16 at once.

    joined: two programs are a cluster that have the two parts of a list: they exchange halves of what they have
    accumulated, and no other kernel merges parts.

    even: all lists have as many parts, and each program has one.
    """

    dim_nope: int
    dim_rope: int
    dtype: Any
    block_n: int
    num_stages: int
    gather: bool
    cache: str = ""
    sparse: bool = False
    rows: int = ROWS
    by_rows: bool = False
    whole: bool = False
    narrow: bool = False
    early: bool = False
    paired: bool = False
    joined: bool = False
    boxes: bool = False
    even: bool = False

    @property
    def known(self) -> bool:
        """Whether a program has one work item, which it knows by its number."""
        return self.joined or self.even

    @property
    def clustered(self) -> bool:
        """Whether two programs are a cluster."""
        return self.paired or self.joined

    @property
    def ahead(self) -> bool:
        """Whether the next item's q comes as soon as the last scores are there: results leave by a stage of keys."""
        return not (self.is_8bit or self.sparse or self.whole or self.clustered) and self.block_n == self.rows

    @property
    def half(self) -> int:
        """Elements of half a latent, which one consumer multiplies."""
        return self.dim_nope // 2

    @property
    def is_8bit(self) -> bool:
        """Whether keys are of 8 bits, to be widened."""
        return self.cache != ""

    @property
    def keys_are_rows(self) -> bool:
        """Whether keys, widened in registers, are the rows of WGMMA: rows_of_keys.cuh has blocks of as many."""
        return self.is_8bit and self.block_n == 128

    @property
    def records_are_rows(self) -> bool:
        """Whether records are, for 64 rows: records.cuh has blocks of 64, and :attr:`loaders` are by rows else."""
        return self.cache == "656" and not self.by_rows and (self.rows, self.block_n) == (ROWS, 64)

    @property
    def told(self) -> bool:
        """Whether a list is looked at key by key only where a block has an entry that is no key."""
        return self.sparse and self.by_rows

    @property
    def loaders(self) -> int:
        """Warpgroups of the producer: with one scale two widen keys by rows, in 0.86 to 0.89 of the time on an H200; of
        records they take as long as one."""
        return 2 if self.by_rows and self.cache == "e4m3" and not self.paired else 1

    @property
    def units(self) -> int:
        """Parts of a block that a thread of a loader by rows has in registers, to be widened."""
        if not self.is_8bit:
            return 0
        if self.paired:
            return 5 if self.cache == "656" else 9
        return 4 if self.cache == "656" else 3

    @property
    def lines(self) -> bool:
        """Whether L2 asks memory for lines of 128 bytes: on an H100 prompts of 16 and 32 heads take 0.99 and 0.98 of
        their time, of 64 as long, of 128 1.01."""
        return self.whole and not self.early

    @property
    def producers(self) -> int:
        """Threads of the producer."""
        return self.loaders * GROUP

    @property
    def keys_of_warp(self) -> int:
        """Keys of a block that a warp of a producer by rows loads."""
        return 8 if self.paired else 16 // self.loaders

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of each role, unless keys are rows."""
        if not self.is_8bit:
            return _REGISTERS
        if not self.by_rows:
            return _REGISTERS_8BIT
        return _TWO_LOADERS if self.loaders == 2 else _WIDENED_BY_ROWS

    @property
    def slots(self) -> int:
        """Blocks of which shared memory tells where their keys are."""
        return 2 if self.is_8bit and not self.by_rows else 1

    @property
    def tells_valid(self) -> bool:
        """Whether threads arrive a second time where a block is here, for what they have written of it themselves."""
        return self.sparse and not self.is_8bit or self.by_rows and self.cache == "656" and not self.paired

    @property
    def one_scale(self) -> bool:
        """Whether all latents and ropes of the cache have the same scale."""
        return self.cache == "e4m3"

    @property
    def scales(self) -> int:
        """Scales of a key's latents: one of all of them, in memory or none, unless the cache is of records."""
        return self.dim_nope // 128 if self.cache == "656" else 1

    def rope_dtype(self, T: Any) -> Any:
        """Of the rope in the cache, which records keep as wide as q."""
        return T.float8_e4m3fn if self.cache == "e4m3" else self.dtype

    @property
    def held_rope(self) -> int:
        """Elements of a rope in shared memory; where there is none some that nobody uses."""
        return self.dim_rope or 32

    @property
    def rope_columns(self) -> int:
        """Elements of the tensor of ropes, for which without any that of latents stands in."""
        return self.dim_rope or self.dim_nope

    @property
    def width(self) -> int:
        """Elements of a key: latent and rope."""
        return self.dim_nope + self.dim_rope


class Inputs(NamedTuple):
    """Tensors that are read; without a schedule, or an order, another one stands in for them.

    seqlens_k: [batch], or the keys that each query token sees, [batch, tokens]. rope, scales: of caches of 8 bits,
    whose latents are in kv: ropes [pages, page_size, rope], and scales of each key's tiles, [pages, page_size, tiles],
    or one of the cache, [1, 1, 1]. Of sparse attention block_table is [batch, entries], lists of positions in the pool;
    lists, sink and sinks are as :func:`tilelang_mla.kernels.decode.attend_sparse` has them.
    """

    q: Any
    kv: Any
    seqlens_k: Any
    block_table: Any
    first_part: Any
    order: Any
    rope: Any = None
    scales: Any = None
    lists: Any = None
    sink: Any = None
    sinks: Any = None


class Outputs(NamedTuple):
    """Tensors that are written: a sequence of one part to ``out``, partial results of others to ``parts``.

    pieces: of each sequence, where programs cut them, its first partial result and how many. max_logits: each row's
    largest score, [batch, rows], of whole lists.
    """

    out: Any
    lse: Any
    parts: Any = None
    part_lse: Any = None
    pieces: Any = None
    max_logits: Any = None


class Launch(NamedTuple):
    """Numbers of a launch that all programs share, and the program's own."""

    scale: Any
    heads: Any
    causal: Any
    num_parts: Any
    num_splits: Any
    scheduled: Any
    ordered: Any
    wants_lse: Any
    tokens: Any
    row_tiles: Any
    i_program: Any
    num_programs: Any


class Memory(NamedTuple):
    """Shared memory: q and rings of key blocks, as left and right half of the latent and rope; what roles exchange.

    raw: what comes from a cache of 8 bits, before it is widened. valid: whether the keys of a stage are any, of lists.
    counts: of sequences by their lengths, where programs sort them.
    """

    q_l: Any
    q_r: Any
    q_rope: Any
    k_l: Any
    k_r: Any
    k_rope: Any
    weights: Any
    rescale: Any
    at_page: Any
    at_row: Any
    found: Any
    told: Any
    share: Any
    raw: Any = None
    valid: Any = None
    counts: Any = None


class Barriers(NamedTuple):
    """Full and empty barriers: of a work item and its q, of the rings' left part (with rope) and right part, of a
    block's weights; ``sums_full`` once a work item. scored: of early scores, those of the next block are asked for.
    sums_empty: the sums of an item have been read, where the next one begins before."""

    work_full: Any
    work_empty: Any
    left_full: Any
    left_empty: Any
    right_full: Any
    right_empty: Any
    weights_full: Any
    weights_empty: Any
    sums_full: Any
    scored: Any = None
    sums_empty: Any = None


class Work(NamedTuple):
    """A work item: tile ``first_row`` of a sequence's packed rows, and ``steps`` blocks of its keys from ``first`` on.

    num_parts: of the sequence; 0 where there is no such part, and nothing to do.
    """

    sequence: Any
    num_parts: Any
    length: Any
    part: Any
    first_row: Any
    first: Any
    steps: Any


@macro
def alloc_memory(T, S):
    q_l = T.alloc_shared((S.rows, S.half), S.dtype)
    q_r = T.alloc_shared((S.rows, S.half), S.dtype)
    q_rope = T.alloc_shared((S.rows, S.held_rope), S.dtype)
    k_l = T.alloc_shared((S.num_stages, S.block_n, S.half), S.dtype)
    k_r = T.alloc_shared((S.num_stages, S.block_n, S.half), S.dtype)
    k_rope = T.alloc_shared((S.num_stages, S.block_n, S.held_rope), S.dtype)
    weights_shared = T.alloc_shared((S.rows, S.block_n), S.dtype)
    factor_shared = T.alloc_shared((S.rows,), T.float32)
    at_page = T.alloc_shared((S.slots, S.block_n), T.int32)
    at_row = T.alloc_shared((S.slots, S.block_n), T.int32)
    found = T.alloc_shared((5,), T.int32)
    told = T.alloc_shared((2, _TOLD), T.int32)
    # One more than are taken: the next one is looked up with each.
    share = T.alloc_shared((TAKEN + MOST_TURNS + 1,), T.int32)
    return q_l, q_r, q_rope, k_l, k_r, k_rope, weights_shared, factor_shared, at_page, at_row, found, told, share


@macro
def alloc_softmax(T, S):
    scores = T.alloc_fragment((S.rows, S.block_n), T.float32)
    weights = T.alloc_fragment((S.rows, S.block_n), S.dtype)
    running_max = T.alloc_fragment((S.rows,), T.float32)
    block_max = T.alloc_fragment((S.rows,), T.float32)
    rescale = T.alloc_fragment((S.rows,), T.float32)
    row_sum = T.alloc_fragment((S.rows,), T.float32)
    column_sums = T.alloc_fragment((S.rows, COLUMNS), T.float32)
    limit = T.alloc_fragment((S.rows,), T.int32)
    if S.whole:
        highest = T.alloc_fragment((S.rows,), T.float32)
    else:
        highest = None
    return scores, weights, running_max, block_max, rescale, row_sum, column_sums, limit, highest


@macro
def alloc_barriers(T, S):
    work_full = T.alloc_barrier(S.producers)
    work_empty = T.alloc_barrier(2 * GROUP)
    left_full = T.alloc_barrier([2 * S.producers if S.tells_valid else S.producers] * S.num_stages)
    right_full = T.alloc_barrier([S.producers] * S.num_stages)
    if S.paired:
        left_empty = T.alloc_cluster_barrier([2 * _WARPS] * S.num_stages)
        right_empty = T.alloc_cluster_barrier([2 * _WARPS] * S.num_stages)
    else:
        left_empty = T.alloc_barrier([GROUP] * S.num_stages)
        right_empty = T.alloc_barrier([GROUP] * S.num_stages)
    weights_full = T.alloc_barrier(GROUP)
    weights_empty = T.alloc_barrier(GROUP)
    sums_full = T.alloc_barrier(GROUP)
    return (
        work_full, work_empty, left_full, left_empty, right_full, right_empty, weights_full, weights_empty, sums_full
    )  # fmt: skip


@macro
def write_work(S, told, slot, sequence, num_parts, length, part, tile, first, last):
    told[slot, _SEQUENCE] = sequence
    told[slot, _PARTS] = num_parts
    told[slot, _LENGTH] = length
    told[slot, _PART] = part
    told[slot, _ROW] = tile * S.rows
    told[slot, _BLOCK] = first
    told[slot, _STEPS] = last - first


@macro
def read_work(T, told, slot):
    """The fields of a :class:`Work`."""
    sequence = T.alloc_var(T.int32, init=told[slot, _SEQUENCE])
    num_parts = T.alloc_var(T.int32, init=told[slot, _PARTS])
    length = T.alloc_var(T.int32, init=told[slot, _LENGTH])
    part = T.alloc_var(T.int32, init=told[slot, _PART])
    first_row = T.alloc_var(T.int32, init=told[slot, _ROW])
    first = T.alloc_var(T.int32, init=told[slot, _BLOCK])
    steps = T.alloc_var(T.int32, init=told[slot, _STEPS])
    return sequence, num_parts, length, part, first_row, first, steps
