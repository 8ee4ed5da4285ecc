"""The groups of arguments that kernels and their helpers take.

What differs between calls of one compiled kernel, such as the number of rows, is no element of a group that a launch
passes: Triton specialises on each element of a tuple, whatever ``do_not_specialize`` says. Such numbers are arguments
of the kernel, which puts them into :class:`Batch`, :class:`Layout` and :class:`Scoring` itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Passed by launches: pointers


class Lists(NamedTuple):
    """A block layout: ``crow`` [heads or 1, rows + 1] and ``col`` [heads or 1, nnz]; and memory of the call: room for
    the lists that each program merges, see ``portable.merged``, or how many work items were taken beside each program's
    first, see ``next_work``."""

    crow: Any
    col: Any
    memory: Any = None


class Bounds(NamedTuple):
    """Where sequences begin and end.

    Ragged: ``q_starts`` and ``k_starts`` are cu_seqlens. Paged: ``q_starts`` is cu_seqlens_q, ``k_ends`` seqlens_k.
    Padded: all four, or None where the sequences take their whole rows.
    """

    q_starts: Any
    q_ends: Any
    k_starts: Any
    k_ends: Any


class Outputs(NamedTuple):
    """Results, or the partial results of split-KV: part [SPLITS, rows, H, DV] and part_lse [SPLITS, H, rows].

    ``part_lse`` is +inf, which no logarithm of a sum is, in rows of no sequence. lse may be None.
    """

    out: Any
    lse: Any
    part: Any
    part_lse: Any


# Passed by launches: strides, in elements


class Strides(NamedTuple):
    """Of q and out (sequence, token, head, element), of k and v (page or sequence, slot, head, element // X, element %
    X). Of lse that of tokens; a kernel adds those of sequences and heads, which differ from batch to batch."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class OutputStrides(NamedTuple):
    """The last two of :class:`Strides`, for kernels that read q, k and v by descriptors or not at all."""

    out: Any
    lse: Any


# Passed by launches: compile-time constants


class PortableConfig(NamedTuple):
    """What the portable kernels are compiled for.

    KIND: RAGGED, PADDED or PAGED. GROUP: query heads of a kv head. D and DV: head sizes, BLOCK_D and BLOCK_DV those of
    tiles. PAGE: slots of a page, 0 without pages. BOX: slots of a page that are loaded together where slots, and not a
    head's elements, lie side by side in v; otherwise 0. X: elements of a key that lie together, STEP: the stride of
    slots where that is less than a head; otherwise 0. Q_BLOCK and K_BLOCK: of the layout. WIDE: elements of one head
    lie 2^31 or more apart. STAGES: of the pipelined loop over keys. TOKENS: of a packed tile; 0 for lists. PIECE: keys
    of one block that a tile gathers together. HELD: keys of ``backward_keys`` are in registers. THIRDS: a packed tile's
    float32 is multiplied in three parts, see ``thirds``.
    """

    KIND: int
    GROUP: int
    HEADS_KV: int
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    PAGE: int
    BOX: int
    X: int
    STEP: int
    Q_BLOCK: int
    K_BLOCK: int
    BLOCK_M: int
    BLOCK_N: int
    SOFTCAP: bool
    HAS_LEFT: bool
    WIDE: bool
    STAGES: int
    TOKENS: int
    PIECE: int
    HELD: bool = False
    THIRDS: bool = False


class HopperConfig(NamedTuple):
    """What the kernel for sm_90 is compiled for, see :class:`PortableConfig`.

    BLOCK_D and TAIL_D, BLOCK_DV and TAIL_DV: the pieces of head sizes, the second 0 where there is one. BLOCK_M: rows
    of a work item, 64 for each consumer. BLOCK_N: keys of a tile, 64 or 128. BOX: keys that one TMA load brings.
    LIST_ROWS: rows that share a list, 64 or less, PIECE: keys of a block that lie together, 64 or less. TABLE: either
    is less than 64, so that consumers need a table of where each key of a tile is. UNIFORM: how producers walk
    lists, see hopper/walks.py. STAGES: of the rings of keys and values; Q_STAGES: of queries. TOGETHER: heads whose
    work items come in turn, see ``place_of``. IN_TURN: consumers issue products in turn, see ``take_turn``.
    SLACK: powers of two by which scores may exceed the running max, see ``larger``. AS_FREE: programs take work items
    as they come free, see ``next_work``.
    """

    KIND: int
    GROUP: int
    HEADS_KV: int
    BLOCK_D: int
    TAIL_D: int
    DV: int
    BLOCK_DV: int
    TAIL_DV: int
    PAGE: int
    BOX: int
    Q_BLOCK: int
    K_BLOCK: int
    LIST_ROWS: int
    PIECE: int
    TABLE: bool
    UNIFORM: bool
    BLOCK_M: int
    BLOCK_N: int
    SOFTCAP: bool
    HAS_LEFT: bool
    STAGES: int
    Q_STAGES: int
    TOGETHER: int
    IN_TURN: bool
    SLACK: int
    AS_FREE: bool


# Made in kernels


class Batch(NamedTuple):
    """The bounds of all sequences, and how much there is.

    ``rows``: of q; in a padded batch, of one sequence. ``keys``: of k; in a padded batch, of one sequence; in a paged
    cache, those that a row of the block table has slots for.
    """

    bounds: Any
    sequences: Any
    rows: Any
    keys: Any


class Layout(NamedTuple):
    """A block layout with the strides of its heads, its rows and the width of ``col``."""

    lists: Any
    s_crow: Any
    s_col: Any
    rows: Any
    entries: Any


class Scoring(NamedTuple):
    """``score = scale * q.k``, then ``softcap * tanh(score / softcap)``; keys up to ``left`` before a query."""

    scale: Any
    softcap: Any
    left: Any


class Cache(NamedTuple):
    """The keys and values of one kv head: pointers, its row of the block table, its first key, the pool's pages."""

    k: Any
    v: Any
    pages: Any
    begin: Any
    num_pages: Any


class Visible(NamedTuple):
    """The keys that rows see: those up to ``position`` [BLOCK_M], none outside of ``low`` to ``high`` - 1."""

    position: Any
    low: Any
    high: Any


class Rows(NamedTuple):
    """The rows of a tile [BLOCK_M]: number, head, token within its sequence's row of the batch; and which there are.

    ``i_b``: the sequence of a padded batch, otherwise 0. ``total``: rows of q in all. ``possible``: whether the lengths
    of the sequence are.
    """

    row: Any
    head: Any
    i_b: Any
    token: Any
    total: Any
    possible: Any
    mask: Any
