"""Device code: prefetch what later programs need into the L2 cache (NVIDIA from sm_90 on)."""

import triton
import triton.language as tl

from gdn_split.kernels.layer import two_blocks
from gdn_split.kernels.split import columns_of_group


@triton.jit
def fetch(p, wanted, bytes_):
    """Prefetch what lies at each thread's p into the L2 cache or, by one thread, bytes from p on.

    No branch: loads behind one would not be issued before it.
    """
    if bytes_ is None:
        tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [p, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred one;
                .reg .b32 thread;
                .reg .b64 from;
                mov.u32 thread, %tid.x;
                setp.lt.u32 one, thread, $2;
                and.b64 from, $1, -16;
                @one cp.async.bulk.prefetch.L2.global [from], $3;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r", [p, wanted, bytes_], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def slot_ahead(p_slots, sequences, num_slots, sizes: tl.constexpr, step: tl.constexpr):
    """The slot that the program AHEAD of this one works on, or -1."""
    i_n = (tl.program_id(0) + step.AHEAD) // (sizes.NQK * sizes.R * step.SLICES)
    slot = tl.load(p_slots + tl.minimum(i_n, sequences - 1)).to(tl.int64)
    return tl.where((i_n < sequences) & (slot < num_slots), slot, -1)


@triton.jit
def fetch_ahead(p_x, p_conv, p_pool, slot, strides, sizes: tl.constexpr, conv: tl.constexpr, step: tl.constexpr):
    """Prefetch what that program needs into the L2 cache, so that it waits less for memory.

    Of a head that is taken in slices the first one prefetches all: with Dv inner a slice is not one piece of memory.
    """
    NQK: tl.constexpr = sizes.NQK
    NV: tl.constexpr = NQK * sizes.R
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    TOKENS: tl.constexpr = conv.TOKENS
    TAPS: tl.constexpr = conv.WIDTH - 1
    BYTES: tl.constexpr = HQ * HV * p_pool.dtype.element_ty.primitive_bitwidth // 8 // 16 * 16
    i_p = tl.program_id(0) + step.AHEAD
    head = i_p // step.SLICES % NV
    i_g = head // sizes.R
    wanted = ((slot >= 0) & (i_p % step.SLICES == 0)).to(tl.int32)
    fetch(p_pool + slot * strides.slot + head * strides.head, wanted, BYTES)
    c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
    o_qk, c_qk, _ = two_blocks(i_g * HQ, (NQK + i_g) * HQ, c_q, c_k, HQ, step.BLOCK_K)
    c_v += head % sizes.R * HV
    c_z += head % sizes.R * HV
    first = 2 * NQK * HQ + head * HV
    o_vz, c_vz, _ = two_blocks(first, first, c_v, c_z, HV, sizes.BLOCK_V)
    p_x += (i_p // (NV * step.SLICES)).to(tl.int64) * TOKENS * strides.qkvz
    for t in tl.static_range(TOKENS):
        fetch(p_x + t * strides.qkvz + c_qk, wanted, None)
        fetch(p_x + t * strides.qkvz + c_vz, wanted, None)
    p_slot = p_conv + slot * strides.conv_slot
    for i in tl.static_range(TAPS):
        fetch(p_slot + o_qk.to(tl.int64) * conv.S_CHANNEL + i * conv.S_TAP, wanted, None)
        fetch(p_slot + o_vz.to(tl.int64) * conv.S_CHANNEL + i * conv.S_TAP, wanted, None)
