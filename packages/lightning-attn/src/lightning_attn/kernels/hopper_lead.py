"""How a program by roles comes to its own chunks, where several share a segment: past those of the ones ahead of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lightning_attn.kernels.decay import base_two_rate, decay_over, entering, rest_of_rate
from lightning_attn.kernels.hopper_ring import is_copied
from lightning_attn.kernels.hopper_states import add_chunk, values_of


@gluon.constexpr_function
def is_shared(sizes):
    """Whether a segment may have several programs: none whose short chunk is the first."""
    return sizes.SHARED and not sizes.REVERSED


@gluon.jit
def lead_up(stages, work, S, p_slopes, scale, o_k, sizes: gl.constexpr):
    """The state before a program's own chunks, with the bits that whoever takes the others gives it."""
    rate = base_two_rate(p_slopes, work.i_h)
    decay = decay_over(rate, rest_of_rate(p_slopes, work.i_h, rate), gl.to_tensor(sizes.CHUNK))
    b_entering = entering(rate, o_k, sizes.CHUNK, scale, sizes.REVERSED)
    b_v = values_of(stages.v, stages.full_v, 0, work.lead > 0, b_entering, sizes)
    for i in range(work.lead):
        stage = i % sizes.STAGES
        mbarrier.wait(stages.full.index(stage), (i // sizes.STAGES) & 1)
        if is_copied(sizes):
            fence_async_shared()
        has_next = i + 1 < work.lead
        S, b_v = add_chunk(stages.k, stages.v, stages.full_v, i, S, b_v, decay, has_next, b_entering, sizes)
        mbarrier.arrive(stages.empty.index(stage))
        # Values are free a chunk later, as where outputs are stored from them.
        mbarrier.arrive(stages.empty_v.index((i + sizes.STAGES - 1) % sizes.STAGES), pred=i > 0)
    return S
