"""The three warpgroups of decoding.

Barriers and the rings go on from part to part: ``done`` are the blocks of those before.
"""

from typing import Any

from tilelang_mla.kernels.common import GROUP, LOG2_E, ROWS, macro, row_owners
from tilelang_mla.kernels.decode.boxes import load_boxes, page_of
from tilelang_mla.kernels.decode.groups import SHARED, Work, read_work
from tilelang_mla.kernels.decode.joins import is_whole, join_halves, join_sums, weigh_part
from tilelang_mla.kernels.decode.limits import find_limits, find_limits_of_tokens, is_per_token, unmasked_keys
from tilelang_mla.kernels.decode.loads import gather_block, load_left, load_q, load_right, row_of
from tilelang_mla.kernels.decode.rows import Held, alloc_held, at, begin_rows, load_by_rows
from tilelang_mla.kernels.decode.schedule import Owner, find_part, owner_of, part_of, tell_own
from tilelang_mla.kernels.decode.shares import tell_share, turns_of
from tilelang_mla.kernels.decode.stores import store_lse, store_max, store_part, store_part_by_rows, store_part_lse
from tilelang_mla.kernels.decode.widen import begin_raw, load_widened
from tilelang_mla.kernels.softmax import (
    any_moved,
    clear,
    exponentiate,
    invert_sums,
    mask,
    raise_highest,
    raise_max,
    scale_rows,
    zero_tail,
)

# Named barriers of one warpgroup; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
_OF_SCORES, _OF_VALUES = 5, 6
# Elements of 16 bytes that a thread stores where a row sees no key.
_ZEROS = 8


def free(T: Any, S: Any, empty: Any) -> Any:
    """A thread is done with what is in a stage: tell who loads it, by its empty barrier, of a pair both programs."""
    if S.paired:
        return T.call_extern("handle", "mla::rows::free_both", empty, T.get_thread_binding())
    return T.barrier_arrive(empty)


@macro
def produce(T, S, launch, inputs, pieces, memory, barriers, thread):
    """Finds the work items and loads their q and key blocks, the first while the one before is being finished."""
    T.set_max_nreg(S.registers[2], 0)
    done = T.alloc_var(T.int32, init=0)
    # Loads that wait for none of the others first.
    if not S.known:
        begin, end, length = owner_of(T, launch, inputs, thread)
        own = Owner(begin, end, length)
        first_part, first_tile = part_of(T, S, launch, inputs, memory, 0)
        part = T.alloc_var(T.int32, init=first_part)
        tile = T.alloc_var(T.int32, init=first_tile)
    turns = turns_of(T, S, launch, inputs, memory)
    if S.by_rows:
        held = Held(*alloc_held(T, S))
        place = T.alloc_var(T.int64, init=T.int64(-1))
        entry = T.alloc_var(T.int32, init=-1)
    for turn in T.serial(turns):
        slot = turn % 2
        if S.known:
            work = Work(*tell_own(T, S, launch, inputs, memory, slot, thread))
        else:
            if launch.scheduled == SHARED:
                tell_share(T, S, launch, inputs, memory, pieces, slot, turn, thread)
            else:
                find_part(T, S, launch, inputs, memory, slot, part, tile, own, thread, S.producers)
            work = Work(*read_work(T, memory.told, slot))
        if S.even:
            load_q(T, S, inputs.q, memory, barriers.work_full, work.sequence, work.first_row)
        # The page of the next block is looked up a block ahead: that takes as long as half a block.
        i_page = T.alloc_var(T.int32, init=-1)
        i_row = T.alloc_var(T.int32, init=0)
        if S.boxes:
            first_page = page_of(T, S, inputs, work, 0, thread)
            i_page = first_page
        elif not S.gather:
            if work.steps > 0:
                first_column = T.alloc_var(T.int32, init=T.truncdiv(work.first * S.block_n, inputs.kv.shape[1]))
                i_page = inputs.block_table[work.sequence, first_column]
        if S.by_rows:
            first_place, next_entry = begin_rows(T, S, inputs, work, held, thread)
            place = first_place
            entry = next_entry
        elif S.is_8bit:
            begin_raw(T, S, inputs, memory, work, thread)
        elif S.gather:
            own_page, own_row = row_of(T, inputs, work.sequence, work.first * S.block_n + thread, work.length)
            i_page = own_page
            i_row = own_row
        for step in T.serial(work.steps):
            stage = (done + step) % S.num_stages
            phase = (done + step) // S.num_stages % 2 ^ 1
            first_key = (work.first + step) * S.block_n
            if S.by_rows:
                at_hand = (place, entry)
                next_place, next_entry = load_by_rows(
                    T, S, inputs, memory, barriers, work, held, at_hand, step, stage, phase, thread
                )
                place = next_place
                entry = next_entry
            elif S.is_8bit:
                load_widened(T, S, inputs, memory, barriers, work, step, stage, phase, thread)
            elif S.gather:
                at_hand = (i_page, i_row)
                next_page, next_row = gather_block(
                    T, S, inputs, memory, barriers, work, at_hand, step, stage, phase, thread
                )
                i_page = next_page
                i_row = next_row
            elif S.boxes:
                page_behind = load_boxes(T, S, inputs, memory, barriers, work, i_page, step, stage, phase, thread)
                i_page = page_behind
            else:
                row = T.alloc_var(T.int32, init=T.truncmod(first_key, inputs.kv.shape[1]))
                T.barrier_wait(barriers.left_empty[stage], phase)
                load_left(T, S, inputs.kv, memory, barriers.left_full, i_page, row, stage)
                T.barrier_wait(barriers.right_empty[stage], phase)
                load_right(T, S, inputs.kv, memory, barriers.right_full, i_page, row, stage)
                if step + 1 < work.steps:
                    column = T.alloc_var(T.int32, init=T.truncdiv(first_key + S.block_n, inputs.kv.shape[1]))
                    i_page = inputs.block_table[work.sequence, column]
            if not S.even:
                if step == 0:
                    # Behind the first keys, which the part before does not keep from coming.
                    T.barrier_wait(barriers.work_empty, slot ^ 1)
                    load_q(T, S, inputs.q, memory, barriers.work_full, work.sequence, work.first_row)
        if not S.even:
            if work.steps == 0:
                T.barrier_wait(barriers.work_empty, slot ^ 1)
                T.barrier_arrive(barriers.work_full)
        done = done + work.steps
        if not S.known:
            next_part, next_tile = part_of(T, S, launch, inputs, memory, turn + 1)
            part = next_part
            tile = next_tile
    if S.joined:
        # As the others do.
        T.cluster_sync()
        T.cluster_sync()


@macro
def score(T, S, launch, inputs, outputs, memory, barriers, s, acc):
    """Multiplies q by the keys, makes and shares the weights, and multiplies the left half of the latents by them.

    The scores of a block are made while the other consumer multiplies the right half of the one before.
    """
    T.set_max_nreg(S.registers[0], 1)
    done = T.alloc_var(T.int32, init=0)
    scale = T.alloc_var(T.float32, init=scale_of(S, launch, inputs))
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_full, slot)
        work = Work(*read_work(T, memory.told, slot))
        if S.sparse:
            # What is no key is hidden by itself.
            unmasked = None
        else:
            unmasked = unmasked_keys(T, launch, inputs, work)
        T.clear(acc)
        clear(T, s)
        if is_per_token(inputs):
            find_limits_of_tokens(T, s.limit, launch, inputs, work)
        elif not S.sparse:
            find_limits(T, s.limit, work.first_row, launch.heads, launch.tokens, work.length, launch.causal)
        # A loop of one step at most: an `if` would be put round each product by itself.
        for _ in T.serial(T.min(work.steps, 1)):
            score_block(T, S, memory, barriers, s, done % S.num_stages, done // S.num_stages % 2)
        if S.ahead:
            # The sums of the item before have been read.
            T.barrier_wait(barriers.sums_empty, slot ^ 1)
        for step in T.serial(work.steps - 1):
            stage = (done + step) % S.num_stages
            after = (done + step + 1) % S.num_stages
            phase = (done + step + 1) // S.num_stages % 2
            hide_invalid(T, S, memory, s, stage)
            weigh(T, s, (work.first + step) * S.block_n, scale, unmasked)
            share_weights(T, memory, barriers, s, done + step)
            if any_moved(T, s.rescale):
                scale_rows(T, acc, s.rescale)
            T.wgmma_gemm(s.weights, memory.k_l[stage, :, :], acc)
            if not S.early:
                # Free the stage first: the next block may not be here yet, and that behind it is to be on its way.
                T.wait_wgmma(0)
                free(T, S, barriers.left_empty[stage])
            score_block(T, S, memory, barriers, s, after, phase, stage if S.early else None)
        if S.ahead:
            T.barrier_arrive(barriers.work_empty)
        for _ in T.serial(T.min(work.steps, 1)):
            last = done + work.steps - 1
            stage = last % S.num_stages
            first_key = (work.first + work.steps - 1) * S.block_n
            hide_invalid(T, S, memory, s, stage)
            weigh(T, s, first_key, scale, unmasked)
            share_weights(T, memory, barriers, s, last)
            if S.early:
                T.barrier_arrive(barriers.scored)
            if any_moved(T, s.rescale):
                scale_rows(T, acc, s.rescale)
            if not S.gather:
                if first_key + S.block_n > work.length:
                    zero_tail(T, memory.k_l, stage, first_key, work.length)
                    T.fence_proxy_async()
                    T.sync_threads(_OF_SCORES, GROUP)
            T.wgmma_gemm(s.weights, memory.k_l[stage, :, :], acc)
            T.wait_wgmma(0)
            if not S.ahead:
                free(T, S, barriers.left_empty[stage])
            elif work.num_parts != 1:
                free(T, S, barriers.left_empty[stage])
        done = done + work.steps
        T.reduce_sum(s.partial_sum, s.row_sum, dim=1)
        if S.joined:
            # Weights of the last block have been read: sums take their place.
            T.barrier_wait(barriers.weights_empty, done % 2 ^ 1)
            join_sums(T, memory, s)
        invert_sums(T, s)
        scale_values(T, S, inputs, s)
        add_sink(T, S, inputs, s, work)
        if S.joined:
            weigh_part(T, s)
        else:
            T.barrier_wait(barriers.weights_empty, done % 2 ^ 1)
        put_rows(T, memory.rescale, s.rescale)
        T.barrier_arrive(barriers.sums_full)
        scale_rows(T, acc, s.rescale)
        if S.joined:
            join_halves(T, acc, memory.k_l, 0)
        if S.ahead:
            if work.num_parts == 1:
                stage = (done + S.num_stages - 1) % S.num_stages
                store_ahead(T, S, outputs.out, acc, work, memory.k_l, barriers.left_empty, stage, 0, _OF_SCORES)
                if launch.wants_lse != 0:
                    store_lse(T, launch, outputs.lse, s, work, outputs.out.shape[1])
        elif is_whole(T, S, work, 0):
            T.copy(acc, memory.q_l)
            T.fence_proxy_async()
            T.sync_threads(_OF_SCORES, GROUP)
            T.tma_copy(memory.q_l, outputs.out[work.sequence, work.first_row : work.first_row + ROWS, 0 : S.half])
            if launch.wants_lse != 0:
                store_lse(T, launch, outputs.lse, s, work, outputs.out.shape[1])
            if S.whole:
                store_max(T, outputs.max_logits, s, work)
            T.tma_store_wait()
        if not (S.whole or S.joined):
            if work.num_parts > 1:
                put_part(T, S, outputs.parts, acc, work, 0)
                store_part_lse(T, launch, outputs.part_lse, s, work)
        if not S.ahead:
            T.barrier_arrive(barriers.work_empty)


@macro
def value(T, S, launch, inputs, outputs, memory, barriers, rescale, acc):
    """Multiplies the right half of the latents by the weights that it is given."""
    T.set_max_nreg(S.registers[1], 1)
    done = T.alloc_var(T.int32, init=0)
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_full, slot)
        work = Work(*read_work(T, memory.told, slot))
        if S.ahead:
            T.barrier_arrive(barriers.work_empty)
        T.clear(acc)
        for step in T.serial(work.steps):
            stage = (done + step) % S.num_stages
            first_key = (work.first + step) * S.block_n
            T.barrier_wait(barriers.weights_full, (done + step) % 2)
            put_rows(T, rescale, memory.rescale)
            if any_moved(T, rescale):
                scale_rows(T, acc, rescale)
            if not S.gather:
                if first_key + S.block_n > work.length:
                    zero_tail(T, memory.k_r, stage, first_key, work.length)
                    T.fence_proxy_async()
                    T.sync_threads(_OF_VALUES, GROUP)
            if S.early:
                T.barrier_wait(barriers.scored, (done + step) % 2)
            T.wgmma_gemm(memory.weights, memory.k_r[stage, :, :], acc)
            T.wait_wgmma(0)
            T.barrier_arrive(barriers.weights_empty)
            if not S.ahead:
                free(T, S, barriers.right_empty[stage])
            elif work.num_parts != 1 or step + 1 < work.steps:
                free(T, S, barriers.right_empty[stage])
        done = done + work.steps
        if S.joined:
            T.cluster_sync()
        T.barrier_wait(barriers.sums_full, slot)
        put_rows(T, rescale, memory.rescale)
        if S.ahead:
            T.barrier_arrive(barriers.sums_empty)
        scale_rows(T, acc, rescale)
        if S.joined:
            join_halves(T, acc, memory.k_r, 1)
        if S.ahead:
            if work.num_parts == 1:
                stage = (done + S.num_stages - 1) % S.num_stages
                store_ahead(T, S, outputs.out, acc, work, memory.k_r, barriers.right_empty, stage, S.half, _OF_VALUES)
        elif is_whole(T, S, work, 1):
            T.copy(acc, memory.q_r)
            T.fence_proxy_async()
            T.sync_threads(_OF_VALUES, GROUP)
            T.tma_copy(
                memory.q_r,
                outputs.out[work.sequence, work.first_row : work.first_row + ROWS, S.half : S.dim_nope],
            )
            T.tma_store_wait()
        if not (S.whole or S.joined):
            if work.num_parts > 1:
                put_part(T, S, outputs.parts, acc, work, S.half)
        if not S.ahead:
            T.barrier_arrive(barriers.work_empty)


@macro
def store_ahead(T, S, out, acc, work, ring, empty, stage, begin, of_role):
    """Half of the latents of a result, by the stage that the last keys have left: q is the next item's already."""
    if work.steps > 0:
        T.copy(acc, ring[stage, :, :])
        T.fence_proxy_async()
        T.sync_threads(of_role, GROUP)
        T.tma_copy(
            ring[stage, :, :], out[work.sequence, work.first_row : work.first_row + ROWS, begin : begin + S.half]
        )
        T.tma_store_wait()
        free(T, S, empty[stage])
    else:
        # No key, no result: a thread has a row, whose stores are not unrolled.
        thread = T.get_thread_binding() % GROUP
        if thread < T.min(out.shape[1] - work.first_row, S.rows):
            for i in T.serial(S.half // _ZEROS):
                for j in T.vectorized(_ZEROS):
                    out[work.sequence, work.first_row + thread, begin + i * _ZEROS + j] = 0


@macro
def put_part(T, S, parts, acc, work, begin):
    """Half of the latents of a partial result."""
    if S.paired and S.even:
        store_part_by_rows(T, parts, acc, work, begin)
    else:
        store_part(T, parts, acc, work, begin)


def scale_of(S: Any, launch: Any, inputs: Any) -> Any:
    """What scores are multiplied by: the softmax's scale, and that of a cache which has one."""
    return launch.scale * inputs.scales[0, 0, 0] if S.one_scale else launch.scale


@macro
def hide_invalid(T, S, memory, s, stage):
    """Hide from all rows the entries of a list that are no keys."""
    if S.told:
        # Seldom: a warp looks at the whole block at once.
        if T.call_extern("int32", "mla::rows::any_missing", at(T, memory.valid[stage, 0])) != 0:
            hide_each(T, memory, s, stage)
    elif S.sparse:
        hide_each(T, memory, s, stage)


@macro
def hide_each(T, memory, s, stage):
    for i, j in T.Parallel(*s.scores.shape):
        s.scores[i, j] = T.if_then_else(memory.valid[stage, j] != 0, s.scores[i, j], -T.infinity(T.float32))


@macro
def add_sink(T, S, inputs, s, work):
    """The last rescale of a list of one part with its heads' sinks, logits without a value, in the sum of weights."""
    if S.sparse:
        if inputs.sinks != 0 and (S.joined or work.num_parts == 1):
            for i in T.Parallel(*s.row_sum.shape):
                if s.row_sum[i] != 0:
                    logit = inputs.sink[T.min(work.first_row + i, inputs.q.shape[1] - 1)] * LOG2_E
                    s.rescale[i] = 1 / (s.row_sum[i] + T.exp2(logit - s.running_max[i]))


@macro
def scale_values(T, S, inputs, s):
    """The last rescale, by the scale of a cache that has one too."""
    if S.one_scale:
        for i in T.Parallel(*s.row_sum.shape):
            s.rescale[i] = s.rescale[i] * inputs.scales[0, 0, 0]


@macro
def score_block(T, S, memory, barriers, s, stage, phase, before=None):
    """Scores of the block in a stage, as soon as each piece of it is there.

    before: the stage of values that were asked for just now, which is to be freed when they are there. Then it is told,
    too, when all scores have been asked for.
    """
    T.barrier_wait(barriers.left_full[stage], phase)
    T.wgmma_gemm(memory.q_l, memory.k_l[stage, :, :], s.scores, transpose_B=True, clear_accum=True)
    if S.dim_rope:
        T.wgmma_gemm(memory.q_rope, memory.k_rope[stage, :, :], s.scores, transpose_B=True)
    if before is not None:
        T.wait_wgmma(2 if S.dim_rope else 1)
        free(T, S, barriers.left_empty[before])
    T.barrier_wait(barriers.right_full[stage], phase)
    T.wgmma_gemm(memory.q_r, memory.k_r[stage, :, :], s.scores, transpose_B=True)
    if before is not None:
        T.barrier_arrive(barriers.scored)
    T.wait_wgmma(0)


@macro
def weigh(T, s, first_key, scale, unmasked):
    """A block's scores to weights; the running maximum and the row sums follow."""
    if unmasked is not None:
        mask(T, s, first_key, unmasked)
    raise_max(T, s, scale)
    raise_highest(T, s)
    exponentiate(T, s, scale)


@macro
def share_weights(T, memory, barriers, s, block):
    """Hand a block's weights, and what rescales the accumulators, to the other consumer."""
    T.barrier_wait(barriers.weights_empty, block % 2 ^ 1)
    put_rows(T, memory.rescale, s.rescale)
    T.copy(s.weights, memory.weights)
    T.fence_proxy_async()
    T.barrier_arrive(barriers.weights_full)


@macro
def put_rows(T, to, of):
    """A number of each row, to shared memory or from it, by the threads that have the row's accumulators.

    Of a ``T.copy`` TileLang would look for the layout once for every operation of the kernel, a second in all.
    """
    for i in T.Parallel(to.shape[0], loop_layout=row_owners(T, to.shape[0])):
        to[i] = of[i]
