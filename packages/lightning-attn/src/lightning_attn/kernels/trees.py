"""Drafts that branch: outputs along every path of a tree, and states advanced along the accepted one.

Tokens go one by one, by ``recurrent.advance``, so that a draft's output and a committed state have the bits of decoding
its path alone. A program walks from the pool's state to each leaf; of the nodes on the way that an earlier walk has
passed only the state is made again, which costs less than to keep it: a tree of 32 nodes has some 50 on all its paths.
"""

import triton
import triton.language as tl

from lightning_attn.kernels.recurrent import advance, load_row, load_tile, locate_tile, store_tile, store_zero_rows
from lightning_attn.kernels.schedule import rows_of_head


@triton.jit
def path_to(p_parents, node):
    """The nodes from a root to this one as bits: a parent's index is below its child's, so that they are in order.

    A parent that is not below its child counts as -1.
    """
    bits = node * 0
    while node >= 0:
        bits |= (node * 0 + 1) << node
        parent = tl.load(p_parents + node)
        node = tl.where(parent < node, parent, -1).to(tl.int32)
    return bits


@triton.jit
def lowest(bits):
    """The index of the lowest bit that is set, of at most 32; 0 if none is."""
    low = (bits & -bits).to(tl.float32)
    # The exponent of a power of two; of the highest bit, which is a sign, of minus one.
    exponent = ((low.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    return tl.maximum(exponent, 0).to(tl.int64)


@triton.jit(do_not_specialize=["nodes", "num_slots"])
def verify_tree(
    p_q, p_k, p_v, p_pool, p_slots, p_slopes, p_parents, p_o, nodes, num_slots, scale, strides,
    sizes: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """The outputs of all nodes of one sequence's tree, for one head and BLOCK_E columns of its state."""
    E: tl.constexpr = sizes.E
    i_n, i_h, pool, slot, o_d, o_e, rate = locate_tile(p_slots, p_slopes, p_pool, strides, sizes, DEPENDENT_LAUNCH)
    q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    if (slot < 0) | (slot >= num_slots):
        store_zero_rows(o, nodes, i_h, o_e, sizes)
    else:
        p_parents += i_n * nodes
        done = i_n.to(tl.int32) * 0
        for i in range(nodes):
            # From the last node on, one that no walk has passed is a leaf.
            leaf = nodes - 1 - i
            if ((done >> leaf) & 1) == 0:
                rest = path_to(p_parents, leaf)
                fresh = rest & ~done
                done |= rest
                b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
                i_t = lowest(rest)
                b_q = load_row(q, i_t, o_d, sizes.D)
                b_k = load_row(k, i_t, o_d, sizes.D)
                b_v = load_row(v, i_t, o_e, E)
                while rest != 0:
                    rest &= rest - 1
                    # The next token's rows are loaded while this one is computed.
                    ahead = lowest(rest)
                    b_next_q = load_row(q, ahead, o_d, sizes.D)
                    b_next_k = load_row(k, ahead, o_d, sizes.D)
                    b_next_v = load_row(v, ahead, o_e, E)
                    b_S = advance(b_S, b_k, b_v, rate)
                    if ((fresh >> i_t) & 1) == 1:
                        b_o = tl.sum(b_S * b_q[:, None], axis=0) * scale
                        p_row = o.p + (i_h * 0 + i_t) * o.stride + o_e * o.element
                        tl.store(p_row, b_o.to(p_o.dtype.element_ty), mask=o_e < E)
                    # What the next token would read, had decoding stored it.
                    b_S = b_S.to(p_pool.dtype.element_ty).to(tl.float32)
                    b_q = b_next_q
                    b_k = b_next_k
                    b_v = b_next_v
                    i_t = ahead


@triton.jit(do_not_specialize=["nodes", "most", "num_slots"])
def commit_path(
    p_k, p_v, p_pool, p_slots, p_slopes, p_accepted, p_path, nodes, most, num_slots, strides,
    sizes: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Advance one head's state by the first accepted nodes of a path of at most ``most``, BLOCK_E columns of it.

    Indices that are no node's are clamped.
    """
    E: tl.constexpr = sizes.E
    i_n, i_h, pool, slot, o_d, o_e, rate = locate_tile(p_slots, p_slopes, p_pool, strides, sizes, DEPENDENT_LAUNCH)
    accepted = tl.load(p_accepted + i_n)
    count = tl.where((accepted >= 0) & (accepted <= most), accepted, 0).to(tl.int32)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    if (slot >= 0) & (slot < num_slots) & (count > 0):
        p_path += i_n * most
        b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
        first = node_at(p_path, 0, nodes)
        b_k = load_row(k, first, o_d, sizes.D)
        b_v = load_row(v, first, o_e, E)
        for i in range(count):
            ahead = node_at(p_path, tl.minimum(i + 1, count - 1), nodes)
            b_next_k = load_row(k, ahead, o_d, sizes.D)
            b_next_v = load_row(v, ahead, o_e, E)
            b_S = advance(b_S, b_k, b_v, rate)
            b_S = b_S.to(p_pool.dtype.element_ty).to(tl.float32)
            b_k = b_next_k
            b_v = b_next_v
        store_tile(pool, slot, i_h, o_d, o_e, b_S, sizes)


@triton.jit
def node_at(p_path, i, nodes):
    """Node i of a path, clamped."""
    node = tl.load(p_path + i)
    return tl.minimum(tl.maximum(node, 0), nodes - 1).to(tl.int64)
