"""The steps of the roles, one after the other in one thread: for TileLang's C target, in tests."""

from tilelang_mla.kernels.backward.roles import begin_rows, load_numbers, mask, slope, weigh
from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.softmax import zero_tail


@macro
def walk_serially(T, S, launch, inputs, memory, r, acc, acc_v, tile):
    own, met = (inputs.keys, inputs.queries) if S.of_keys else (inputs.queries, inputs.keys)
    group = T.alloc_var(T.int32, init=T.truncdiv(inputs.q.shape[1], inputs.k.shape[1]))
    load(T, memory.own_first, own.first, tile.first_row, tile.head, tile.rows)
    load(T, memory.own_second, own.second, tile.first_row, tile.head, tile.rows)
    begin_rows(T, S, launch, inputs, r, acc, acc_v, tile)
    for step in T.serial(tile.steps * tile.turns):
        stage = step % S.num_stages
        turn = T.alloc_var(T.int32, init=T.truncdiv(step, tile.steps))
        begin = T.alloc_var(T.int32, init=(step - turn * tile.steps) * S.block_n)
        row = T.alloc_var(T.int32, init=tile.met + begin)
        i_head = T.alloc_var(T.int32, init=tile.head * group + turn if S.of_keys else T.truncdiv(tile.head, group))
        load_stage(T, memory.first, met.first, stage, row, i_head)
        load_stage(T, memory.second, met.second, stage, row, i_head)
        if S.of_keys:
            for i in T.serial(S.block_n):
                load_numbers(T, inputs, memory, tile, i_head, stage, begin, i)
        zero_tail(T, memory.first, stage, begin, tile.left)
        zero_tail(T, memory.second, stage, begin, tile.left)
        T.gemm(memory.own_first, memory.first[stage, :, :], r.scores, transpose_B=True, clear_accum=True)
        mask(T, S, r, tile, begin)
        weigh(T, S, launch, memory, r, stage)
        T.gemm(memory.own_second, memory.second[stage, :, :], r.products, transpose_B=True, clear_accum=True)
        if S.of_keys:
            T.gemm(r.weights, memory.second[stage, :, :], acc_v)
        slope(T, S, memory, r, stage)
        T.copy(r.products, r.slopes)
        T.gemm(r.slopes, memory.first[stage, :, :], acc)


@macro
def load(T, there, tensor, row, i_head, rows):
    for i, j in T.Parallel(*there.shape):
        there[i, j] = T.if_then_else(i < rows, tensor[row + i, i_head, j], 0)


@macro
def load_stage(T, there, tensor, stage, row, i_head):
    """TMA loads whole blocks, of the next sequence too, and zeros behind the tensor's end."""
    for i, j in T.Parallel(*there.shape[1:]):
        there[stage, i, j] = T.if_then_else(row + i < tensor.shape[0], tensor[row + i, i_head, j], 0)
