"""What the prefill kernel hands from macro to macro: sizes, tensors, shared memory, barriers, tiles."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, ROWS, WARP, macro
from tilelang_mla.kernels.softmax import COLUMNS

# What consumers are told of a tile; fewer than 0 blocks, that there is none.
HEAD, ROW, ROWS_HERE, KEYS, UNMASKED, STEPS = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for. ``block_m``: own rows of a program; ``block_n``: rows of a stage.

    in_parts: keys of a tile are cut in parts, whose results somebody merges: those of head h are heads h * parts on of
    out and lse.
    """

    head_dim: int
    head_dim_v: int
    dtype: Any
    block_m: int
    block_n: int
    num_stages: int
    in_parts: bool = False

    @property
    def consumers(self) -> int:
        """Threads of the consumer warpgroups."""
        return self.block_m // ROWS * GROUP


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class Launch(NamedTuple):
    """Numbers of a launch that all programs share, the count of tiles taken, and the program's own number."""

    scale: Any
    causal: Any
    wants_lse: Any
    num_slots: Any
    tiles: Any
    taken: Any
    i_program: Any
    num_programs: Any
    heads_each: Any
    num_parts: Any = 1


class Memory(NamedTuple):
    """Shared memory: a tile of q, rings of key and value blocks, and what the producer finds and tells."""

    q: Any
    k: Any
    v: Any
    found: Any
    told: Any


class Barriers(NamedTuple):
    """Full and empty barriers: of a tile's q and what is told of it, and of the rings."""

    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any


class Progress(NamedTuple):
    """Blocks that have gone through the rings, and tiles that have been told of: their barriers' phases follow."""

    done: Any
    turn: Any


class Tile(NamedTuple):
    """A tile of a head; its first row sees ``unmasked`` keys, and the others do too.

    rows: how many there are of ``block_m``; none where a slot is nobody's. steps: blocks of keys.
    """

    head: Any
    first_row: Any
    rows: Any
    num_keys: Any
    unmasked: Any
    steps: Any


@macro
def alloc_memory(T, S):
    q_shared = T.alloc_shared((S.block_m, S.head_dim), S.dtype)
    k_shared = T.alloc_shared((S.num_stages, S.block_n, S.head_dim), S.dtype)
    v_shared = T.alloc_shared((S.num_stages, S.block_n, S.head_dim_v), S.dtype)
    found = T.alloc_shared((5,), T.int32)
    told = T.alloc_shared((6,), T.int32)
    return q_shared, k_shared, v_shared, found, told


@macro
def alloc_softmax(T, S):
    scores = T.alloc_fragment((S.block_m, S.block_n), T.float32)
    weights = T.alloc_fragment((S.block_m, S.block_n), S.dtype)
    running_max = T.alloc_fragment((S.block_m,), T.float32)
    block_max = T.alloc_fragment((S.block_m,), T.float32)
    rescale = T.alloc_fragment((S.block_m,), T.float32)
    row_sum = T.alloc_fragment((S.block_m,), T.float32)
    column_sums = T.alloc_fragment((S.block_m, COLUMNS), T.float32)
    limit = T.alloc_fragment((S.block_m,), T.int32)
    return scores, weights, running_max, block_max, rescale, row_sum, column_sums, limit


@macro
def alloc_barriers(T, S):
    q_full = T.alloc_barrier(1)
    # Every thread arrives here for itself: racecheck does not know of a warp that arrives as one.
    q_empty = T.alloc_barrier(S.consumers)
    k_full = T.alloc_barrier([1] * S.num_stages)
    v_full = T.alloc_barrier([1] * S.num_stages)
    k_empty = T.alloc_barrier([S.consumers // WARP] * S.num_stages)
    v_empty = T.alloc_barrier([S.consumers // WARP] * S.num_stages)
    return q_full, q_empty, k_full, v_full, k_empty, v_empty


@macro
def tell(told, lane, head, first_row, rows, num_keys, unmasked, steps):
    if lane == 0:
        told[HEAD] = head
        told[ROW] = first_row
        told[ROWS_HERE] = rows
        told[KEYS] = num_keys
        told[UNMASKED] = unmasked
        told[STEPS] = steps
