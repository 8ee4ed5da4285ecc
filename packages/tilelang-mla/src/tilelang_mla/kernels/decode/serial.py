"""The steps of the three roles of decoding, one after the other in one thread: for TileLang's C target, in tests."""

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.decode.groups import SHARED, Work, read_work
from tilelang_mla.kernels.decode.limits import find_limits, find_limits_of_tokens, is_per_token, unmasked_keys
from tilelang_mla.kernels.decode.loads import load_rows, tell_row
from tilelang_mla.kernels.decode.roles import add_sink, hide_invalid, scale_of, scale_values, weigh
from tilelang_mla.kernels.decode.schedule import Owner, find_part, owner_of, part_of, tell_even
from tilelang_mla.kernels.decode.shares import tell_share, turns_of
from tilelang_mla.kernels.decode.stores import store_lse, store_max, store_part, store_part_lse
from tilelang_mla.kernels.decode.widen import STAGES, copy_raw, widen, widen_rope
from tilelang_mla.kernels.softmax import clear, invert_sums, scale_rows, zero_tail


@macro
def attend_serially(T, S, launch, inputs, outputs, memory, s, acc_l, acc_r):
    """All work items of a program."""
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        if S.even:
            tell_even(T, S, launch, inputs, memory, 0, 0)
        elif launch.scheduled == SHARED:
            tell_share(T, S, launch, inputs, memory, outputs.pieces, 0, turn, 0)
        else:
            own = Owner(*owner_of(T, launch, inputs, 0))
            part, tile = part_of(T, S, launch, inputs, memory, turn)
            find_part(T, S, launch, inputs, memory, 0, part, tile, own, 0, 1)
        work = Work(*read_work(T, memory.told, 0))
        if S.sparse:
            unmasked = None
        else:
            unmasked = unmasked_keys(T, launch, inputs, work)
        T.clear(acc_l)
        T.clear(acc_r)
        clear(T, s)
        if is_per_token(inputs):
            find_limits_of_tokens(T, s.limit, launch, inputs, work)
        elif not S.sparse:
            find_limits(T, s.limit, work.first_row, launch.heads, launch.tokens, work.length, launch.causal)
        copy_q(T, S, inputs.q, memory, work)
        for step in T.serial(work.steps):
            stage = step % S.num_stages
            first_key = (work.first + step) * S.block_n
            # TMA loads whole blocks; only rows that are gathered stop at the length.
            length = T.if_then_else(S.gather, work.length, 2**31 - 1)
            for i in T.serial(S.block_n):
                tell_row(T, inputs, memory, work.sequence, first_key + i, length, 0, i)
            if S.is_8bit:
                i_raw = step % STAGES
                copy_raw(T, S, inputs, memory, i_raw, 0)
                widen(T, S, memory.raw, memory.k_l, stage, i_raw, 0)
                widen(T, S, memory.raw, memory.k_r, stage, i_raw, S.half)
                widen_rope(T, S, memory.raw, memory.k_rope, stage, i_raw)
            else:
                load_rows(T, inputs.kv, memory, memory.k_l, stage, 0, 0)
                load_rows(T, inputs.kv, memory, memory.k_r, stage, S.half, 0)
                if S.dim_rope:
                    load_rows(T, inputs.kv, memory, memory.k_rope, stage, S.dim_nope, 0)
            T.gemm(memory.q_l, memory.k_l[stage, :, :], s.scores, transpose_B=True, clear_accum=True)
            T.gemm(memory.q_r, memory.k_r[stage, :, :], s.scores, transpose_B=True)
            if S.dim_rope:
                T.gemm(memory.q_rope, memory.k_rope[stage, :, :], s.scores, transpose_B=True)
            hide_serially(T, S, memory, s)
            weigh(T, s, first_key, scale_of(S, launch, inputs), unmasked)
            scale_rows(T, acc_l, s.rescale)
            scale_rows(T, acc_r, s.rescale)
            if not S.gather:
                zero_tail(T, memory.k_l, stage, first_key, work.length)
                zero_tail(T, memory.k_r, stage, first_key, work.length)
            T.gemm(s.weights, memory.k_l[stage, :, :], acc_l)
            T.gemm(s.weights, memory.k_r[stage, :, :], acc_r)
        T.reduce_sum(s.partial_sum, s.row_sum, dim=1)
        invert_sums(T, s)
        scale_values(T, S, inputs, s)
        add_sink(T, S, inputs, s, work)
        scale_rows(T, acc_l, s.rescale)
        scale_rows(T, acc_r, s.rescale)
        store(T, S, launch, outputs, s, acc_l, acc_r, work)


@macro
def hide_serially(T, S, memory, s):
    """Entries are known from where they were told of, a block at a time."""
    if S.sparse:
        for i in T.serial(S.block_n):
            memory.valid[0, i] = T.cast(memory.at_page[0, i] >= 0, T.uint8)
        hide_invalid(T, S, memory, s, 0)


@macro
def copy_q(T, S, q, memory, work):
    for i, j in T.Parallel(S.rows, S.half):
        there = work.first_row + i < q.shape[1]
        memory.q_l[i, j] = T.if_then_else(there, q[work.sequence, work.first_row + i, j], 0)
        memory.q_r[i, j] = T.if_then_else(there, q[work.sequence, work.first_row + i, S.half + j], 0)
    if S.dim_rope:
        for i, j in T.Parallel(S.rows, S.dim_rope):
            there = work.first_row + i < q.shape[1]
            memory.q_rope[i, j] = T.if_then_else(there, q[work.sequence, work.first_row + i, S.dim_nope + j], 0)


@macro
def store(T, S, launch, outputs, s, acc_l, acc_r, work):
    out = outputs.out
    if work.num_parts == 1:
        for i, j in T.Parallel(S.rows, S.half):
            if work.first_row + i < out.shape[1]:
                out[work.sequence, work.first_row + i, j] = acc_l[i, j]
                out[work.sequence, work.first_row + i, S.half + j] = acc_r[i, j]
        if launch.wants_lse != 0:
            store_lse(T, launch, outputs.lse, s, work, out.shape[1])
        if S.whole:
            store_max(T, outputs.max_logits, s, work)
    if not S.whole:
        if work.num_parts > 1:
            store_part(T, outputs.parts, acc_l, work, 0)
            store_part(T, outputs.parts, acc_r, work, S.half)
            store_part_lse(T, launch, outputs.part_lse, s, work)
