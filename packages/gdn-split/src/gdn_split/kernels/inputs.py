"""Device code: what a program of a decode step loads beside its state."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.layer import Gate, load_filter_of_two, load_taps, two_blocks
from gdn_split.kernels.split import columns_of_b_and_a, columns_of_group


class Layer(NamedTuple):
    """Pointers to the convolution's weights and bias, the learned numbers of V heads and the norm's weight."""

    weight: Any
    bias: Any
    a_log: Any
    dt_bias: Any
    norm: Any


class Given(NamedTuple):
    """Pointers to a sequence's rows of mixed_qkvz and mixed_ba and to its path, or None, and how many tokens it has."""

    x: Any
    ba: Any
    path: Any
    tokens: Any


class Place(NamedTuple):
    """Where a program works: channels, columns and masks of its q and k as one block, and of v and z.

    m_v: of v alone. c_z: the column of its head's first z.
    """

    o_qk: Any
    c_qk: Any
    m_qk: Any
    o_vz: Any
    c_vz: Any
    m_vz: Any
    m_v: Any
    c_z: Any
    c_b: Any
    c_a: Any


class Inputs(NamedTuple):
    """What a program's first tokens bring, and what is done with it."""

    qk_taps: Any
    vz_taps: Any
    w_qk: Any
    w_v: Any
    gate: Any
    b_norm: Any
    x_qk: Any
    x_vz: Any
    b: Any
    a: Any


@triton.jit
def row_of_token(p_path, t, tokens, TOKENS: tl.constexpr):
    """Which of a sequence's rows is its token t: itself, or node t of the accepted path, clamped."""
    t = tl.maximum(tl.minimum(t, tokens - 1), 0)
    if p_path is not None:
        t = tl.minimum(tl.maximum(tl.load(p_path + t), 0), TOKENS - 1)
    return tl.cast(t, tl.int64)


@triton.jit
def token_offsets(step: tl.constexpr):
    """Of a chunk's tokens, as a vector where there are several."""
    o = 0
    if step.CHUNK > 1:
        o = tl.arange(0, step.CHUNK)
    return o


@triton.jit
def load_rows(p, p_path, first, tokens, c, m, stride, conv: tl.constexpr, step: tl.constexpr):
    """Elements c of a sequence's rows of CHUNK tokens from the first on."""
    CHUNK: tl.constexpr = step.CHUNK
    rows = ()
    for j in tl.static_range(CHUNK):
        i_t = row_of_token(p_path, first + j, tokens, conv.TOKENS)
        rows = rows + (tl.load(p + i_t * stride + c, mask=m, other=0.0),)
    return rows


@triton.jit
def load_gates(p_ba, p_path, first, tokens, c_b, c_a, stride, conv: tl.constexpr, step: tl.constexpr):
    """b and a of a V head, of a chunk's tokens."""
    p = p_ba + row_of_token(p_path, first + token_offsets(step), tokens, conv.TOKENS) * stride
    return tl.load(p + c_b), tl.load(p + c_a)


@triton.jit
def load_inputs(layer, given, p_slot, head, first_v, takes, strides, sizes: tl.constexpr, conv: tl.constexpr,
                step: tl.constexpr):  # fmt: skip
    """All that is small: a program's place, and what its first tokens bring.

    takes: whether the slot may be read, where that is not known yet; None: it may.
    """
    NQK: tl.constexpr = sizes.NQK
    R: tl.constexpr = sizes.R
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    BLOCK_K: tl.constexpr = step.BLOCK_K
    BLOCK_V: tl.constexpr = step.BLOCK_V
    GATED: tl.constexpr = layer.norm is not None and step.SLICES == 1
    i_g = head // R
    c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
    c_v += head % R * HV
    c_z += head % R * HV
    c_b, c_a = columns_of_b_and_a(head, sizes)
    # q and k as one block, and v and z: of fewer elements than threads the compiler would load each as often as it is
    # used.
    o_qk, c_qk, m_qk = two_blocks(i_g * HQ, (NQK + i_g) * HQ, c_q, c_k, HQ, BLOCK_K)
    first_channel = 2 * NQK * HQ + head * HV + first_v
    o_vz, c_vz, m_vz = two_blocks(first_channel, 0, c_v + first_v, c_z + first_v, HV - first_v, BLOCK_V)
    m_v = m_vz & (tl.arange(0, 2 * BLOCK_V) < BLOCK_V)
    if not GATED:
        m_vz = m_v
    # Where the slot is there already, its inputs are the first that are computed with.
    if takes is None:
        qk_taps = load_taps(p_slot, o_qk, m_qk, conv)
        vz_taps = load_taps(p_slot, o_vz, m_v, conv)
    w_qk = load_filter_of_two(layer.weight, layer.bias, i_g * HQ, (NQK + i_g) * HQ, HQ, o_qk, m_qk, conv, BLOCK_K)
    w_v = load_filter_of_two(layer.weight, layer.bias, first_channel, 0, HV - first_v, o_vz, m_v, conv, BLOCK_V)
    gate = Gate(tl.load(layer.a_log + head).to(tl.float32), tl.load(layer.dt_bias + head).to(tl.float32))
    b_norm = 1.0
    if GATED:
        o_z = tl.arange(0, 2 * BLOCK_V) - BLOCK_V
        b_norm = tl.load(layer.norm + o_z, mask=(o_z >= 0) & m_vz, other=1.0).to(tl.float32)
    x_qk = load_rows(given.x, given.path, 0, given.tokens, c_qk, m_qk, strides.qkvz, conv, step)
    x_vz = load_rows(given.x, given.path, 0, given.tokens, c_vz, m_vz, strides.qkvz, conv, step)
    b, a = load_gates(given.ba, given.path, 0, given.tokens, c_b, c_a, strides.ba, conv, step)
    # Else what waits for it is asked for last.
    if takes is not None:
        qk_taps = load_taps(p_slot, o_qk, m_qk & takes, conv)
        vz_taps = load_taps(p_slot, o_vz, m_v & takes, conv)
    place = Place(o_qk, c_qk, m_qk, o_vz, c_vz, m_vz, m_v, c_z, c_b, c_a)
    return place, Inputs(qk_taps, vz_taps, w_qk, w_v, gate, b_norm, x_qk, x_vz, b, a)
