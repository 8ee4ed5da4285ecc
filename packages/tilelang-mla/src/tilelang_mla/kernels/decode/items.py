"""What kernels with keys of 8 bits as rows begin a work item with: which it is, and what its rows see."""

from tilelang_mla.kernels.common import GROUP, macro
from tilelang_mla.kernels.decode.groups import SHARED, read_work
from tilelang_mla.kernels.decode.limits import is_per_token, limit_of, seen_by, unmasked_keys
from tilelang_mla.kernels.decode.schedule import find_part, part_of, tell_own
from tilelang_mla.kernels.decode.shares import tell_share


@macro
def find_work(T, S, launch, inputs, memory, pieces, own, slot, turn, thread):
    """The fields of a turn's :class:`Work`, told to all; whose part it is, ``own`` helps to find."""
    if S.known:
        fields = tell_own(T, S, launch, inputs, memory, slot, thread)
    else:
        if launch.scheduled == SHARED:
            tell_share(T, S, launch, inputs, memory, pieces, slot, turn, thread)
        else:
            part, tile = part_of(T, S, launch, inputs, memory, turn)
            find_part(T, S, launch, inputs, memory, slot, part, tile, own, thread, GROUP)
        fields = read_work(T, memory.told, slot)
    return fields


@macro
def note_limits(T, S, launch, inputs, memory, work, thread):
    """The first key that each row does not see, unless keys are listed; returns how many all rows see."""
    unmasked = T.alloc_var(T.int32, init=2**31 - 1)
    if not S.sparse:
        first_limit = unmasked_keys(T, launch, inputs, work)
        unmasked = first_limit
        if thread < S.rows:
            own_row = T.alloc_var(T.int32, init=work.first_row + thread)
            if is_per_token(inputs):
                memory.limits[thread] = seen_by(T, launch, inputs, work, own_row)
            else:
                memory.limits[thread] = limit_of(T, own_row, launch.heads, launch.tokens, work.length, launch.causal)
    return unmasked
