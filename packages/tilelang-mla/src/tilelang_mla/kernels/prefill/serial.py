"""The steps of prefill's roles, one after the other in one thread: for TileLang's C target, in tests."""

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.prefill.groups import Tile
from tilelang_mla.kernels.prefill.roles import begin_rows, finish_rows, store_lse, store_rows
from tilelang_mla.kernels.prefill.schedule import FIRST, cut_tile, note_if, owner, slot_of, tile_of
from tilelang_mla.kernels.softmax import exponentiate, mask, raise_max, scale_rows, zero_tail


@macro
def attend_serially(T, S, launch, inputs, memory, s, acc, out, lse):
    """All tiles of a program."""
    found = memory.found
    of_program = launch.tiles - launch.i_program + (launch.num_programs - 1)
    for turn in T.serial(T.truncdiv(of_program, launch.num_programs)):
        i_tile = T.alloc_var(T.int32, init=launch.i_program + turn * launch.num_programs)
        i_head, slot = slot_of(T, launch, i_tile)
        found[FIRST] = -1
        for i_owner in T.serial(inputs.cu_seqlens_q.shape[0] + 1):
            begin, end, begin_k, end_k, until = owner(T, S, inputs, i_owner, launch.num_slots)
            note_if(T, S, found, slot, i_owner, begin, end, begin_k, end_k, until)
        first_row, rows, num_keys, unmasked, steps, k_begin = tile_of(T, S, found, inputs.k.shape[0], launch.causal)
        if rows > 0:
            tile = Tile(i_head, first_row, rows, num_keys, unmasked, steps)
            if S.in_parts:
                head, own_keys, own_unmasked, own_steps, own_begin_k = cut_tile(T, S, launch.num_parts, tile, k_begin)
                tile = Tile(i_head, first_row, rows, own_keys, own_unmasked, own_steps)
                attend_tile(T, S, launch, inputs, memory, s, acc, tile, head, own_begin_k)
            else:
                attend_tile(T, S, launch, inputs, memory, s, acc, tile, i_head, k_begin)
            store_rows(T, out, acc, i_head, first_row, rows)
            if launch.wants_lse != 0:
                store_lse(T, lse, s, i_head, first_row, rows)


@macro
def attend_tile(T, S, launch, inputs, memory, s, acc, tile, head, k_begin):
    q, k, v = inputs.q, inputs.k, inputs.v
    group = T.truncdiv(q.shape[1], v.shape[1])
    i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(head, group))
    begin_rows(T, s, acc, tile.unmasked, tile.num_keys, launch.causal)
    for i, j in T.Parallel(S.block_m, S.head_dim):
        memory.q[i, j] = T.if_then_else(i < tile.rows, q[tile.first_row + i, head, j], 0)
    for step in T.serial(tile.steps):
        stage = step % S.num_stages
        first_key = T.alloc_var(T.int32, init=(tile.steps - 1 - step) * S.block_n)
        row = T.alloc_var(T.int32, init=k_begin + first_key)
        for i, j in T.Parallel(S.block_n, S.head_dim):
            memory.k[stage, i, j] = k[row + i, i_head_kv, j]
        for i, j in T.Parallel(S.block_n, S.head_dim_v):
            memory.v[stage, i, j] = v[row + i, i_head_kv, j]
        T.gemm(memory.q, memory.k[stage, :, :], s.scores, transpose_B=True, clear_accum=True)
        mask(T, s, first_key, tile.unmasked)
        raise_max(T, s, launch.scale)
        exponentiate(T, s, launch.scale)
        scale_rows(T, acc, s.rescale)
        zero_tail(T, memory.v, stage, first_key, tile.num_keys)
        T.gemm(s.weights, memory.v[stage, :, :], acc)
    finish_rows(T, s, acc)
