"""Which rows a program has, found from the bounds of the sequences; slots are those of prefill's schedule."""

from tilelang_mla.kernels.backward.groups import BEGIN, BEGIN_MET, END, END_MET, FIRST, Bounds
from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.prefill.schedule import owner


@macro
def find_slot(T, S, launch, inputs, found, slot, thread, threads):
    """Whoever has the slot notes what there is to know of it; ``found[FIRST]`` is -1 before."""
    if S.of_keys:
        bounds = Bounds(inputs.k, inputs.cu_seqlens_k, inputs.cu_seqlens_q)
    else:
        bounds = Bounds(inputs.q, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    # Sequences, and rows before the first and behind the last.
    owners = inputs.cu_seqlens_q.shape[0] + 1
    for i in T.serial(T.truncdiv(owners + (threads - 1), threads)):
        i_owner = i * threads + thread
        begin, end, begin_met, end_met, until = owner(T, S, bounds, i_owner, launch.num_slots)
        before = T.truncdiv(begin, S.block_m) + i_owner
        if before <= slot and slot < until:
            found[FIRST] = begin + (slot - before) * S.block_m
            found[BEGIN] = begin
            found[END] = end
            found[BEGIN_MET] = begin_met
            found[END_MET] = end_met
            if S.of_keys:
                # As prefill has it: a sequence of impossible bounds of keys sees none of them.
                if i_owner > 0 and i_owner < owners - 1:
                    if inputs.cu_seqlens_k[i_owner - 1] != begin or inputs.cu_seqlens_k[i_owner] != end:
                        found[END_MET] = begin_met


@macro
def tile_of(T, S, launch, inputs, found, head):
    """The fields of a :class:`Tile`."""
    group = T.alloc_var(T.int32, init=T.truncdiv(inputs.q.shape[1], inputs.k.shape[1]))
    first_row = T.alloc_var(T.int32, init=found[FIRST])
    begin = T.alloc_var(T.int32, init=found[BEGIN])
    end = T.alloc_var(T.int32, init=found[END])
    rows = T.alloc_var(T.int32, init=T.min(end - first_row, S.block_m))
    met = T.alloc_var(T.int32, init=found[BEGIN_MET])
    met_end = T.alloc_var(T.int32, init=found[END_MET])
    if first_row < 0:
        rows = 0
    if S.of_keys:
        met = T.max(T.min(met, inputs.q.shape[0]), 0)
        met_end = T.max(T.min(met_end, inputs.q.shape[0]), 0)
    elif met < 0 or met_end < met or met_end > inputs.k.shape[0]:
        met = 0
        met_end = 0
    left = T.alloc_var(T.int32, init=T.max(met_end - met, 0))
    seen = T.alloc_var(T.int32, init=left)
    most = T.alloc_var(T.int32, init=left)
    if S.of_keys:
        seen = -S.block_m
        if launch.causal != 0:
            # Aligned to the right: key p is seen from query p - (keys - queries) on.
            seen = first_row - begin - (end - begin - left)
            met = met + T.max(seen, 0)
            left = T.max(left - T.max(seen, 0), 0)
            seen = T.min(seen, 0)
        most = left
    elif launch.causal != 0:
        seen = left - end + first_row + 1
        most = T.max(T.min(seen + rows - 1, left), 0)
    steps = T.alloc_var(T.int32, init=T.truncdiv(most + (S.block_n - 1), S.block_n))
    if rows <= 0:
        steps = 0
    turns = T.alloc_var(T.int32, init=1)
    if S.of_keys:
        turns = group
    return head, first_row, rows, met, left, seen, steps, turns
