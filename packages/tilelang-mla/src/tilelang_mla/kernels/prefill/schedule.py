"""The tile scheduler of prefill: which tile a slot of the schedule is, found from the bounds of the sequences.

A head has more slots than tiles, as many as sequences of any lengths can need; some are nobody's.
"""

from tilelang_mla.kernels.common import macro

# What is found of a slot, in shared memory: its first row, -1 where it has none, and where its sequence's queries and
# keys begin and end. Beside it, the number of the next tile.
FIRST, _END, _BEGIN_K, _END_K, NEXT = 0, 1, 2, 3, 4


@macro
def slot_of(T, launch, i_tile):
    """Some heads after others, as many as have room for their keys in L2; later tiles of all of them see more keys, and
    start first."""
    each, num_slots = launch.heads_each, launch.num_slots
    group = T.alloc_var(T.int32, init=T.truncdiv(i_tile, each * num_slots))
    rest = T.alloc_var(T.int32, init=i_tile - group * each * num_slots)
    heads = T.alloc_var(T.int32, init=T.min(each, T.truncdiv(launch.tiles, num_slots) - group * each))
    before = T.alloc_var(T.int32, init=T.truncdiv(rest, heads))
    i_head = T.alloc_var(T.int32, init=group * each + rest - before * heads)
    slot = T.alloc_var(T.int32, init=num_slots - 1 - before)
    return i_head, slot


@macro
def owner(T, S, inputs, i_owner, num_slots):
    """Of what may have rows: where its queries and keys begin and end, and the last + 1 of its slots.

    Those are the rows before the first sequence, if its begin is no 0 as it must be, the sequences, and the rows
    behind the last. Each has slots from begin // block_m + its index on, which are at least as many as its tiles.
    """
    tokens, bounds = inputs.q.shape[0], inputs.cu_seqlens_q.shape[0]
    begin = T.alloc_var(T.int32, init=0)
    end = T.alloc_var(T.int32, init=tokens)
    begin_k = T.alloc_var(T.int32, init=0)
    end_k = T.alloc_var(T.int32, init=0)
    until = T.alloc_var(T.int32, init=num_slots)
    if i_owner > bounds:
        until = -1
    if i_owner > 0 and i_owner <= bounds:
        begin = T.max(T.min(inputs.cu_seqlens_q[i_owner - 1], tokens), 0)
        begin_k = inputs.cu_seqlens_k[i_owner - 1]
        end_k = begin_k
    if i_owner < bounds:
        end = T.max(T.min(inputs.cu_seqlens_q[i_owner], tokens), 0)
        until = T.truncdiv(end, S.block_m) + i_owner + 1
        if i_owner > 0:
            end_k = inputs.cu_seqlens_k[i_owner]
    return begin, end, begin_k, end_k, until


@macro
def note_if(T, S, found, slot, i_owner, begin, end, begin_k, end_k, until):
    """Whoever has the slot notes all there is to know of it: loads in a row take a microsecond each."""
    if T.truncdiv(begin, S.block_m) + i_owner <= slot and slot < until:
        found[FIRST] = begin + (slot - i_owner - T.truncdiv(begin, S.block_m)) * S.block_m
        found[_END] = end
        found[_BEGIN_K] = begin_k
        found[_END_K] = end_k


@macro
def tile_of(T, S, found, tokens_k, causal):
    """Of a :class:`Tile` all but its head, and where its sequence's keys begin."""
    first_row = T.alloc_var(T.int32, init=found[FIRST])
    rows_here = T.alloc_var(T.int32, init=T.min(found[_END] - first_row, S.block_m))
    if first_row < 0:
        rows_here = 0
    k_begin = T.alloc_var(T.int32, init=found[_BEGIN_K])
    k_end = T.alloc_var(T.int32, init=found[_END_K])
    # Before they are subtracted: 5 to -2^31 would wrap to a length of 2^31 - 5.
    if k_begin < 0 or k_end < k_begin or k_end > tokens_k:
        k_begin = 0
        k_end = 0
    num_keys = T.alloc_var(T.int32, init=k_end - k_begin)
    unmasked = T.alloc_var(T.int32, init=num_keys)
    most = T.alloc_var(T.int32, init=num_keys)
    if causal != 0:
        unmasked = num_keys - found[_END] + first_row + 1
        most = unmasked + rows_here - 1
    steps = T.alloc_var(T.int32, init=T.truncdiv(T.max(most, 0) + (S.block_n - 1), S.block_n))
    return first_row, rows_here, num_keys, unmasked, steps, k_begin


@macro
def cut_tile(T, S, num_parts, tile, k_begin):
    """A head of the queries, and what it has of a tile; of one in parts the part that the tile's head says."""
    head = T.alloc_var(T.int32, init=T.truncdiv(tile.head, num_parts))
    part = T.alloc_var(T.int32, init=tile.head - head * num_parts)
    first = T.alloc_var(T.int32, init=T.truncdiv(tile.steps * part, num_parts))
    steps = T.alloc_var(T.int32, init=T.truncdiv(tile.steps * (part + 1), num_parts) - first)
    begin = T.alloc_var(T.int32, init=first * S.block_n)
    num_keys = T.alloc_var(T.int32, init=T.max(T.min(tile.num_keys - begin, steps * S.block_n), 0))
    return head, num_keys, tile.unmasked - begin, steps, k_begin + begin
