"""Device code: the outputs of drafts that branch, along every path of a tree.

A program walks from the pools' states to each leaf. Of the nodes on its way that an earlier walk has passed it makes
the state again, which costs less than to keep it.
"""

import triton
import triton.language as tl

from gdn_split.kernels.layer import (
    Gate,
    Out,
    Token,
    activated,
    advance_taps,
    as_values,
    convolved,
    delta_step,
    gated,
    halves,
    load_filter,
    load_state,
    load_taps,
    log_decay,
    normed,
    offsets_of_values,
    sigmoid,
    tile_of_state,
    two_blocks,
    values_and_gates,
)
from gdn_split.kernels.split import columns_of_b_and_a, columns_of_group, wait_for_inputs
from gdn_split.kernels.step import norm_of_slices, store_nothing


@triton.jit
def path_to(p_parents, node):
    """The nodes from a root to this one as bits: a parent is before its child; one that is not counts as -1."""
    bits = node * 0
    while node >= 0:
        bits |= tl.full([], 1, tl.int32) << node
        parent = tl.load(p_parents + node).to(tl.int64)
        node = tl.where(parent < node, tl.maximum(parent, -1), -1).to(tl.int32)
    return bits


@triton.jit
def lowest(bits):
    """The index of the lowest bit that is set, of at most 16; 0 if none is."""
    # The exponent of a power of two.
    exponent = ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent, 0).to(tl.int64)


@triton.jit(do_not_specialize=["num_slots"])
def verify_tree(
    p_qkvz, p_ba, p_conv, p_weight, p_bias, p_pool, p_slots, p_a_log, p_dt_bias, p_norm, p_parents, p_raw, p_out,
    num_slots, scale, eps, strides, sizes: tl.constexpr, conv: tl.constexpr, step: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """TOKENS nodes of a sequence's tree through one V head. p_raw as for a step."""
    NQK: tl.constexpr = sizes.NQK
    R: tl.constexpr = sizes.R
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    TOKENS: tl.constexpr = conv.TOKENS
    BLOCK_K: tl.constexpr = step.BLOCK_K
    BLOCK_V: tl.constexpr = step.BLOCK_V
    SLICES: tl.constexpr = step.SLICES
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    head = i_p % (NQK * R)
    i_g = head // R
    i_n = (i_p // (NQK * R)).to(tl.int64)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    p_x = p_qkvz + i_n * TOKENS * strides.qkvz
    p_ba += i_n * TOKENS * strides.ba
    p_out += i_n * TOKENS * strides.out + head * strides.out_head
    p_parents += i_n * TOKENS
    if (slot >= 0) & (slot < num_slots):
        c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
        c_v += head % R * HV
        c_z += head % R * HV
        c_b, c_a = columns_of_b_and_a(head, sizes)
        p_slot = p_conv + slot * strides.conv_slot
        gate = Gate(tl.load(p_a_log + head).to(tl.float32), tl.load(p_dt_bias + head).to(tl.float32))
        o_qk, c_qk, m_qk = two_blocks(i_g * HQ, (NQK + i_g) * HQ, c_q, c_k, HQ, BLOCK_K)
        for i in range(SLICES):
            first_v = i * BLOCK_V
            first_channel = 2 * NQK * HQ + head * HV + first_v
            o_vz, c_vz, m_vz = two_blocks(first_channel, 0, c_v + first_v, c_z + first_v, HV - first_v, BLOCK_V)
            m_v = m_vz & (tl.arange(0, 2 * BLOCK_V) < BLOCK_V)
            o_v = first_v + offsets_of_values(step)
            b_norm = 1.0
            if p_norm is not None and SLICES == 1:
                o_z = tl.arange(0, 2 * BLOCK_V) - BLOCK_V
                b_norm = tl.load(p_norm + o_z, mask=(o_z >= 0) & m_vz, other=1.0).to(tl.float32)
            p_tile, m_tile = tile_of_state(p_pool + slot * strides.slot + head * strides.head, first_v, sizes, step)
            done = i_g * 0
            for back in range(TOKENS):
                # From the last node on, one that no walk has passed is a leaf.
                leaf = TOKENS - 1 - back
                if ((done >> leaf) & 1) == 0:
                    rest = path_to(p_parents, done * 0 + leaf)
                    fresh = rest & ~done
                    done |= rest
                    i_t = lowest(rest)
                    qk_taps = load_taps(p_slot, o_qk, m_qk, conv)
                    vz_taps = load_taps(p_slot, o_vz, m_v, conv)
                    qk_taps = advance_taps(qk_taps, p_x + i_t * strides.qkvz, c_qk, m_qk)
                    vz_taps = advance_taps(vz_taps, p_x + i_t * strides.qkvz, c_vz, m_vz)
                    b_S = load_state(p_tile, m_tile, sizes, step).to(tl.float32)
                    while rest != 0:
                        beta = sigmoid(tl.load(p_ba + i_t * strides.ba + c_b).to(tl.float32))
                        a = tl.load(p_ba + i_t * strides.ba + c_a).to(tl.float32)
                        decay = tl.exp(log_decay(a, gate))
                        w_qk = load_filter(p_weight, p_bias, o_qk, m_qk, conv, 2 * BLOCK_K)
                        w_v = load_filter(p_weight, p_bias, o_vz, m_v, conv, 2 * BLOCK_V)
                        b_q, b_k = halves(normed(activated(convolved(qk_taps, w_qk, conv), conv), scale, step))
                        b_v, b_gate = halves(values_and_gates(vz_taps, w_v, b_norm, m_v, conv, BLOCK_V))
                        b_S, b_o = delta_step(b_S, Token(b_q, b_k, b_v, decay, beta), step, True, False)
                        if ((fresh >> i_t) & 1) == 1:
                            if p_norm is not None and SLICES > 1:
                                p_head = p_raw + ((i_n * TOKENS + i_t) * (NQK * R) + head) * HV
                                tl.store(p_head + o_v, b_o, mask=o_v < HV)
                            else:
                                if p_norm is not None:
                                    b_o = gated(b_o, as_values(b_gate, step), eps, sizes)
                                p_row = p_out + i_t * strides.out + o_v
                                tl.store(p_row, b_o.to(p_out.dtype.element_ty), mask=o_v < HV)
                        rest &= rest - 1
                        i_t = lowest(rest)
                        qk_taps = advance_taps(qk_taps, p_x + i_t * strides.qkvz, c_qk, m_qk)
                        vz_taps = advance_taps(vz_taps, p_x + i_t * strides.qkvz, c_vz, m_vz)
        if p_norm is not None and SLICES > 1:
            out = Out(p_out, strides.out, p_raw + (i_n * TOKENS * (NQK * R) + head) * HV, NQK * R * HV)
            norm_of_slices(out, p_x + c_z, strides.qkvz, p_norm, TOKENS, eps, sizes)
    else:
        store_nothing(p_out, strides.out, TOKENS, sizes)
