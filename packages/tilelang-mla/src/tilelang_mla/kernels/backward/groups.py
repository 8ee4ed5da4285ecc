"""What the kernels of gradients hand from macro to macro.

Both have one form. A program has a tile of its own rows and walks the rows that meet them, a block at a time. Of the
kernel of keys its own are those of k and v, and it walks q and the gradient of the output; of the kernel of queries it
is the other way round. Scores are a product of the first of the pairs, gradients of weights one of the second.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilelang_mla.kernels.common import WARP, macro
from tilelang_mla.kernels.prefill import groups as prefill

# What is found of a slot, in shared memory: its first row, -1 where it has none, where its sequence begins and ends,
# and where what meets it does.
FIRST, BEGIN, END, BEGIN_MET, END_MET = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Sizes(prefill.Sizes):
    """Those of prefill's kernel, and which of the two this is."""

    of_keys: bool = False


class Pair(NamedTuple):
    """Tensors whose rows belong together: what scores are a product of, and what gradients of weights are."""

    first: Any
    second: Any


class Inputs(NamedTuple):
    """lse, delta: [heads, tokens], of the sums of weights and of products of outputs with their gradients."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any
    delta: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any

    @property
    def queries(self) -> Pair:
        return Pair(self.q, self.d_out)

    @property
    def keys(self) -> Pair:
        return Pair(self.k, self.v)


class Bounds(NamedTuple):
    """Bounds of the own rows, as queries, and of those that meet them, as keys."""

    q: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class Launch(NamedTuple):
    """Numbers of a launch; grad_scale: the scale of scores as they are, which the gradients of q and k are times."""

    scale: Any
    grad_scale: Any
    causal: Any
    num_slots: Any


class Memory(NamedTuple):
    """Shared memory: the own pair, rings of the other one, its rows' logarithms and deltas, and what is found.

    first: keys or queries. second: values or gradients of outputs. logs, in powers of two, and deltas: of the kernel of
    keys, whose columns are queries.
    """

    own_first: Any
    own_second: Any
    first: Any
    second: Any
    logs: Any
    deltas: Any
    found: Any


class Barriers(NamedTuple):
    """Full barrier of the own pair, and full and empty ones of the rings."""

    own_full: Any
    full: Any
    empty: Any


class Registers(NamedTuple):
    """Of a tile: [own rows, rows of a block], or of a row; the weights and slopes that are multiplied are of 16 bits.

    limit, logs, deltas: of the kernel of queries, the first key that a row does not see, its logarithm and its delta.
    """

    scores: Any
    products: Any
    weights: Any
    slopes: Any
    limit: Any
    logs: Any
    deltas: Any


class Tile(NamedTuple):
    """Own rows, and those that meet them: ``steps`` blocks of each of ``turns`` heads from row ``met`` on.

    rows: how many there are of ``block_m``. left: rows that meet them. seen: of the kernel of queries, how many keys
    the first row sees; of that of keys, the first query that sees the first key, below 0 if all do and more would.
    """

    head: Any
    first_row: Any
    rows: Any
    met: Any
    left: Any
    seen: Any
    steps: Any
    turns: Any


@macro
def alloc_memory(T, S):
    own_first = T.alloc_shared((S.block_m, S.head_dim), S.dtype)
    own_second = T.alloc_shared((S.block_m, S.head_dim_v), S.dtype)
    first = T.alloc_shared((S.num_stages, S.block_n, S.head_dim), S.dtype)
    second = T.alloc_shared((S.num_stages, S.block_n, S.head_dim_v), S.dtype)
    logs = T.alloc_shared((S.num_stages, S.block_n), T.float32)
    deltas = T.alloc_shared((S.num_stages, S.block_n), T.float32)
    found = T.alloc_shared((5,), T.int32)
    return own_first, own_second, first, second, logs, deltas, found


@macro
def alloc_registers(T, S):
    scores = T.alloc_fragment((S.block_m, S.block_n), T.float32)
    products = T.alloc_fragment((S.block_m, S.block_n), T.float32)
    weights_of = T.alloc_fragment((S.block_m, S.block_n), S.dtype)
    slopes = T.alloc_fragment((S.block_m, S.block_n), S.dtype)
    limit = T.alloc_fragment((S.block_m,), T.int32)
    row_logs = T.alloc_fragment((S.block_m,), T.float32)
    row_deltas = T.alloc_fragment((S.block_m,), T.float32)
    return scores, products, weights_of, slopes, limit, row_logs, row_deltas


@macro
def alloc_barriers(T, S):
    own_full = T.alloc_barrier(1)
    full = T.alloc_barrier([1] * S.num_stages)
    empty = T.alloc_barrier([S.consumers // WARP] * S.num_stages)
    return own_full, full, empty
