"""``recurrent.decode`` and ``trees.verify_tree`` for NVIDIA's sm_90: each warp has columns of a state to itself.

A token's output is a sum over the rows of a state, which here lie within a warp, so that no warp waits for another
after the rows of q, k and v have come. Those are widened once, into shared memory, for all tokens of a call.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.decay import base_two_rate
from lightning_attn.kernels.recurrent import accepted_tokens, advance, locate_head
from lightning_attn.kernels.schedule import States, rows_of_head
from lightning_attn.kernels.trees import lowest, path_to


@gluon.constexpr_function
def columns_layout(BLOCK_D, BLOCK_E, WARPS):
    """A state's tile [BLOCK_D, BLOCK_E]: a warp has all rows of its columns, a thread adjacent rows, 16 bytes each."""
    vector = min(4, BLOCK_E // WARPS)
    across = BLOCK_E // WARPS // vector
    along = 32 // across
    return gl.BlockedLayout([max(1, BLOCK_D // along), vector], [along, across], [1, WARPS], [1, 0])


@gluon.constexpr_function
def summed_lines_layout(BLOCK_D, BLOCK_E, WARPS):
    """Whole lines, four elements a thread, for sums over rows with the bits of columns_layout.

    There the threads of a column have as many adjacent rows each, of which those furthest apart are added first, then
    halves of that distance. Here it is the same threads' parts, in the same order: lanes first, then warps.
    """
    lanes = [[0, 4 << i] for i in range((BLOCK_E // 4).bit_length() - 1)]
    within, across = 5 - len(lanes), WARPS.bit_length() - 1
    halves = [[BLOCK_D >> (1 + i), 0] for i in range(within + across)]
    rows = [[1 << i, 0] for i in range((BLOCK_D >> (within + across)).bit_length() - 1)]
    lanes = lanes + halves[:within][::-1]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]] + rows, lanes, halves[within:][::-1], [], [BLOCK_D, BLOCK_E])


@gluon.constexpr_function
def state_layout(sizes, WRITES):
    """A state's tile, as decode loads it."""
    of = summed_lines_layout if sizes.LINES and WRITES else columns_layout
    return of(sizes.BLOCK_D, sizes.BLOCK_E, sizes.WARPS)


@gluon.constexpr_function
def lines_layout(BLOCK_E, WARPS):
    """The tile as it is stored: a warp has whole rows."""
    across = min(32, BLOCK_E // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(BLOCK_D, BLOCK_E, WARPS):
    """The tile between the two: of a warp's columns, rows that lie in adjacent threads differ in their banks."""
    columns = BLOCK_E // WARPS
    along = 32 // max(1, columns // 4)
    return gl.SwizzledSharedLayout(columns, max(1, BLOCK_D // along), min(2, WARPS), [1, 0])


@gluon.constexpr_function
def rows_layout(WIDTH, WARPS):
    """Rows of q, k or v, four elements a thread."""
    across = min(32, WIDTH // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def row_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def tokens_of(TOKENS):
    """TOKENS, rounded up to a power of two."""
    return 1 << (TOKENS - 1).bit_length()


@gluon.jit
def load_rows(rows, first, tokens, TOKENS: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Rows of so many tokens, elements ``first`` on, 0 where there are none: [tokens_of(TOKENS), WIDTH]."""
    layout: gl.constexpr = rows_layout(WIDTH, WARPS)
    o_t = gl.arange(0, tokens_of(TOKENS), gl.SliceLayout(1, layout)).to(gl.int64)
    o = first + gl.arange(0, WIDTH, gl.SliceLayout(0, layout)).to(gl.int64)
    p_tile = rows.p + o_t[:, None] * rows.stride + o[None, :] * rows.element
    return gl.load(p_tile, mask=(o_t[:, None] < tokens) & (o[None, :] < SIZE), other=0.0)


@gluon.jit
def widened(b_rows, TOKENS: gl.constexpr, WIDTH: gl.constexpr):
    """Rows in float32 in shared memory: a ring of tokens."""
    shape: gl.constexpr = [tokens_of(TOKENS), WIDTH]
    smem = gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    smem.store(b_rows.to(gl.float32))
    return smem._reinterpret(gl.float32, shape, row_layout())


@gluon.jit
def offsets(column, sizes: gl.constexpr, layout: gl.constexpr):
    """Of a tile's rows, and of its columns from ``column`` on."""
    o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(1, layout)).to(gl.int64)
    return o_d, (column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(0, layout))).to(gl.int64)


@gluon.jit
def tile_pointers(states, slot, i_h, o_d, o_e, sizes: gl.constexpr):
    """With strides along d and e that are constants, so that no row needs an address of its own."""
    p_tile = states.p + slot * states.strides.slot + i_h * states.strides.head
    return p_tile + (o_d[:, None] * sizes.STATE_D + o_e[None, :] * sizes.STATE_E)


@gluon.jit
def load_tile(states, slot, i_h, o_d, o_e, sizes: gl.constexpr):
    """A state's columns o_e, [BLOCK_D, BLOCK_E] in float32, 0 outside the state."""
    p_tile = tile_pointers(states, slot, i_h, o_d, o_e, sizes)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        b_S = gl.load(p_tile, mask=(o_d[:, None] < sizes.D) & (o_e[None, :] < sizes.E), other=0.0)
    else:
        b_S = gl.load(p_tile)
    return b_S.to(gl.float32)


@gluon.jit
def store_tile(states, slot, i_h, column, b_S, sizes: gl.constexpr):
    """The reverse of load_tile, for columns from ``column`` on.

    Through shared memory: a warp's own columns are half of a cache line. On an H200 32 x 64 heads took 80 us when each
    warp stored those, where loading alone takes 44, and the portable kernel, which stores lines, 70.
    """
    dtype: gl.constexpr = states.p.dtype.element_ty
    b_S = b_S.to(dtype)
    if sizes.LINES:
        layout: gl.constexpr = summed_lines_layout(sizes.BLOCK_D, sizes.BLOCK_E, sizes.WARPS)
    else:
        layout: gl.constexpr = lines_layout(sizes.BLOCK_E, sizes.WARPS)
        shared: gl.constexpr = shared_layout(sizes.BLOCK_D, sizes.BLOCK_E, sizes.WARPS)
        smem = gl.allocate_shared_memory(dtype, [sizes.BLOCK_D, sizes.BLOCK_E], shared)
        smem.store(b_S)
        tl.debug_barrier()
        b_S = smem.load(layout)
    o_d, o_e = offsets(column, sizes, layout)
    p_tile = tile_pointers(states, slot, i_h, o_d, o_e, sizes)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        gl.store(p_tile, b_S, mask=(o_d[:, None] < sizes.D) & (o_e[None, :] < sizes.E))
    else:
        gl.store(p_tile, b_S)


@gluon.jit
def walk(
    smem, o, tile, b_S, tokens, rate, scale, TOKENS: gl.constexpr, sizes: gl.constexpr, WRITES: gl.constexpr,
    SEES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Take tokens one by one from this state on. smem: rows of q, k and v. SEES: outputs are wanted."""
    q_smem, k_smem, v_smem = smem
    pool, slot, i_h, column, o_e = tile
    for i_t in range(tokens):
        b_k = k_smem.index(i_t).load(gl.SliceLayout(1, layout))
        b_v = v_smem.index(i_t).load(gl.SliceLayout(0, layout))
        b_S = advance(b_S, b_k, b_v, rate)
        if WRITES and TOKENS == 1:
            # On its way while the output is summed.
            store_tile(pool, slot, i_h, column, b_S, sizes)
        if SEES:
            b_q = q_smem.index(i_t).load(gl.SliceLayout(1, layout))
            store_output(o, i_t, o_e, gl.sum(b_S * b_q[:, None], axis=0) * scale, sizes)
        if TOKENS > 1:
            # What the next token would read, had decoding stored it.
            b_S = b_S.to(pool.p.dtype.element_ty).to(gl.float32)
    if WRITES and TOKENS > 1:
        store_tile(pool, slot, i_h, column, b_S, sizes)


@gluon.jit
def store_output(o, i_t, o_e, b_o, sizes: gl.constexpr):
    p_row = o.p + (o_e * 0 + i_t) * o.stride + o_e * o.element
    gl.store(p_row, b_o.to(o.p.dtype.element_ty), mask=o_e < sizes.E)


@gluon.jit
def store_zero_rows(o, tokens, o_e, sizes: gl.constexpr, layout: gl.constexpr):
    """The outputs of a sequence whose slot is padding."""
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    b_zero = gl.zeros([BLOCK_E], gl.float32, gl.SliceLayout(0, layout))
    for i_t in range(tokens):
        store_output(o, i_t, o_e, b_zero, sizes)


@gluon.jit(do_not_specialize=["num_slots"])
def decode(
    p_q, p_k, p_v, p_pool, p_slots, p_slopes, p_accepted, p_o, num_slots, scale, strides,
    TOKENS: gl.constexpr, sizes: gl.constexpr, WRITES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    """``recurrent.decode``."""
    D: gl.constexpr = sizes.D
    E: gl.constexpr = sizes.E
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    WARPS: gl.constexpr = sizes.WARPS
    layout: gl.constexpr = state_layout(sizes, WRITES)
    i_e, i_h, i_n, slot = locate_head(p_slots, sizes, DEPENDENT_LAUNCH)
    tokens = accepted_tokens(p_accepted, i_n, TOKENS)
    rate = base_two_rate(p_slopes, i_h)
    column = i_e * BLOCK_E
    o_d, o_e = offsets(column, sizes, layout)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = k
    if p_q is not None:
        q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
        o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    # Loaded while the slot, and then the state, is waited for.
    b_k = load_rows(k, 0, TOKENS, TOKENS, D, BLOCK_D, WARPS)
    b_v = load_rows(v, column, TOKENS, TOKENS, E, BLOCK_E, WARPS)
    if p_q is not None:
        b_q = load_rows(q, 0, TOKENS, TOKENS, D, BLOCK_D, WARPS)
    if (slot < 0) | (slot >= num_slots):
        if p_q is not None:
            store_zero_rows(o, TOKENS, o_e, sizes, layout)
    elif tokens > 0:
        pool = States(p_pool, strides.pool)
        b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
        k_smem = widened(b_k, TOKENS, BLOCK_D)
        # Where there are no outputs, nothing reads these.
        q_smem = k_smem
        if p_q is not None:
            q_smem = widened(b_q, TOKENS, BLOCK_D)
        smem = (q_smem, k_smem, widened(b_v, TOKENS, BLOCK_E))
        tile = (pool, slot, i_h, column, o_e)
        tl.debug_barrier()
        walk(smem, o, tile, b_S, tokens, rate, scale, TOKENS, sizes, WRITES, p_q is not None, layout)


@gluon.jit(do_not_specialize=["nodes", "num_slots"])
def verify_tree(
    p_q, p_k, p_v, p_pool, p_slots, p_slopes, p_parents, p_o, nodes, num_slots, scale, strides,
    sizes: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr, NODES: gl.constexpr,
):  # fmt: skip
    """``trees.verify_tree``, of NODES nodes at most."""
    D: gl.constexpr = sizes.D
    E: gl.constexpr = sizes.E
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    WARPS: gl.constexpr = sizes.WARPS
    layout: gl.constexpr = columns_layout(BLOCK_D, BLOCK_E, WARPS)
    i_e, i_h, i_n, slot = locate_head(p_slots, sizes, DEPENDENT_LAUNCH)
    column = i_e * BLOCK_E
    o_d, o_e = offsets(column, sizes, layout)
    q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    b_q_rows = load_rows(q, 0, nodes, NODES, D, BLOCK_D, WARPS)
    b_k_rows = load_rows(k, 0, nodes, NODES, D, BLOCK_D, WARPS)
    b_v_rows = load_rows(v, column, nodes, NODES, E, BLOCK_E, WARPS)
    if (slot < 0) | (slot >= num_slots):
        store_zero_rows(o, nodes, o_e, sizes, layout)
    else:
        pool = States(p_pool, strides.pool)
        rate = base_two_rate(p_slopes, i_h)
        p_parents += i_n * nodes
        # All of these loads are under way before the first is waited for.
        b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
        parents = packed_parents(p_parents, nodes, NODES, WARPS)
        rest = packed_path_to(parents, p_parents, nodes - 1, NODES)
        rows = (widened(b_q_rows, NODES, BLOCK_D), widened(b_k_rows, NODES, BLOCK_D), widened(b_v_rows, NODES, BLOCK_E))
        tl.debug_barrier()
        # Most paths begin with node 0, of which registers have room for the state: only once is it made.
        b_first = take_node(rows, o, o_e, 0, b_S, rate, scale, True, p_pool.dtype.element_ty, sizes, layout)
        done = rest * 0 + 1
        for i in range(nodes):
            # From the last node on, one that no walk has passed is a leaf.
            leaf = nodes - 1 - i
            if ((done >> leaf) & 1) == 0:
                if i > 0:
                    rest = packed_path_to(parents, p_parents, leaf, NODES)
                fresh = rest & ~done
                done |= rest
                rest_of_path = rest & ~1
                if (rest & 1) == 0:
                    b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
                else:
                    # By itself, so that the first node's state is read where it is.
                    i_t = lowest(rest_of_path).to(gl.int32)
                    rest_of_path &= rest_of_path - 1
                    is_fresh = ((fresh >> i_t) & 1) == 1
                    b_S = take_node(
                        rows, o, o_e, i_t, b_first, rate, scale, is_fresh, p_pool.dtype.element_ty, sizes, layout
                    )
                while rest_of_path != 0:
                    i_t = lowest(rest_of_path).to(gl.int32)
                    rest_of_path &= rest_of_path - 1
                    is_fresh = ((fresh >> i_t) & 1) == 1
                    b_S = take_node(
                        rows, o, o_e, i_t, b_S, rate, scale, is_fresh, p_pool.dtype.element_ty, sizes, layout
                    )


@gluon.jit
def packed_parents(p_parents, nodes, NODES: gl.constexpr, WARPS: gl.constexpr):
    """Four bits a node: its parent, or itself where it has none. Of more than 16 nodes, nothing."""
    parents = gl.to_tensor(0).to(gl.int64)
    if NODES <= 16:
        o_node = gl.arange(0, NODES, gl.BlockedLayout([1], [32], [WARPS], [0]))
        b_parent = gl.load(p_parents + o_node, mask=o_node < nodes, other=-1)
        b_parent = gl.where((b_parent >= 0) & (b_parent < o_node), b_parent, o_node)
        parents = gl.sum(b_parent.to(gl.int64) << (4 * o_node).to(gl.int64), axis=0)
    return parents


@gluon.jit
def packed_path_to(parents, p_parents, node, NODES: gl.constexpr):
    """``path_to``, of what ``packed_parents`` gave: without a load for each node on the way."""
    if NODES > 16:
        bits = path_to(p_parents, node)
    else:
        bits = node * 0
        while node >= 0:
            bits |= (node * 0 + 1) << node
            parent = ((parents >> (4 * node).to(gl.int64)) & 15).to(gl.int32)
            node = gl.where(parent < node, parent, -1)
    return bits


@gluon.jit
def take_node(
    rows, o, o_e, i_t, b_S, rate, scale, is_fresh, pool_dtype: gl.constexpr, sizes: gl.constexpr, layout: gl.constexpr
):
    """The state after a node, as a pool would have it, and the node's output if none is stored yet."""
    q_smem, k_smem, v_smem = rows
    b_k = k_smem.index(i_t).load(gl.SliceLayout(1, layout))
    b_v = v_smem.index(i_t).load(gl.SliceLayout(0, layout))
    b_S = advance(b_S, b_k, b_v, rate)
    if is_fresh:
        b_q = q_smem.index(i_t).load(gl.SliceLayout(1, layout))
        store_output(o, i_t, o_e, gl.sum(b_S * b_q[:, None], axis=0) * scale, sizes)
    return b_S.to(pool_dtype).to(gl.float32)
