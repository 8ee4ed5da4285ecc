"""The roles of decoding over records for up to 64 rows: keys are the rows of WGMMA, widened in registers.

A producer loads records as they are, 64 to a stage, and before an item's first ones its rows of q, 32 to a stage. One
warpgroup makes the weights of a stage, two more multiply half of the latents each by them while the first is at the
next one, by the functions of ``records.cuh``. All else is as in keys.py.
"""

from typing import Any

from tilelang_mla.kernels.common import GROUP, macro
from tilelang_mla.kernels.decode.groups import SHARED, Launch, Work, read_work
from tilelang_mla.kernels.decode.items import find_work, note_limits
from tilelang_mla.kernels.decode.keys import (
    STAGE,
    KeyBarriers,
    KeyMemory,
    alloc_key_barriers,
    alloc_key_memory,
    await_work,
    call,
    join_halves,
    load_key,
    name_of,
    store_latents,
    store_logarithms,
)
from tilelang_mla.kernels.decode.loads import row_of
from tilelang_mla.kernels.decode.rows import at
from tilelang_mla.kernels.decode.schedule import Owner, owner_of
from tilelang_mla.kernels.decode.shares import find_share, turns_of

# Registers of a thread that makes weights, of one that multiplies latents, which has more to hold where two programs
# join what they have accumulated, and of the producer.
_REGISTERS, _REGISTERS_JOINED = (128, 176, 32), (112, 184, 32)
# The named barrier of the warpgroup that makes weights, as records.cuh has it.
_OF_WEIGHTS = 5
# Stages that q comes by, before an item's blocks.
_HALVES = 2


def registers_of(S: Any) -> tuple[int, int, int]:
    """Registers of a thread of each role: of four warpgroups all start with 128."""
    return _REGISTERS_JOINED if S.joined else _REGISTERS


@macro
def run_records(T, S, serial, inputs, outputs, numbers, i_program, num_programs):
    """What a program does, in shared memory and with barriers of its own."""
    memory = KeyMemory(*alloc_key_memory(T, S))
    thread = T.get_thread_binding()
    rows, heads = inputs.q.shape[1], numbers[1]
    row_tiles = T.alloc_var(T.int32, init=T.truncdiv(rows + (S.rows - 1), S.rows))
    tokens = T.alloc_var(T.int32, init=T.truncdiv(rows, heads))
    launch = Launch(*numbers, tokens, row_tiles, i_program, num_programs)
    if S.joined:
        # TileLang starts clusters before what is ahead of them has ended.
        T.pdl_sync()
    if not S.known:
        if launch.scheduled == SHARED:
            find_share(T, S, launch, inputs, memory, thread, serial)
    # The combine kernel may start; it waits for the end of this one itself.
    T.pdl_trigger()
    barriers = KeyBarriers(*alloc_key_barriers(T, S))
    with T.ws(3):
        produce_records(T, S, launch, inputs, outputs.pieces, memory, barriers, thread - 3 * GROUP)
    with T.ws(0):
        make_weights(T, S, launch, inputs, outputs, memory, barriers, thread)
    with T.ws(1, 2):
        multiply_latents(T, S, launch, inputs, outputs, memory, barriers, thread - GROUP)


@macro
def produce_records(T, S, launch, inputs, pieces, memory, barriers, thread):
    """Finds the work items and loads their keys, which a warp or two look up."""
    T.set_max_nreg(registers_of(S)[2], 0)
    done = T.alloc_var(T.int32, init=0)
    own = None if S.known else Owner(*owner_of(T, launch, inputs, thread))
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_empty[slot], turn // 2 % 2 ^ 1)
        work = Work(*find_work(T, S, launch, inputs, memory, pieces, own, slot, turn, thread))
        T.barrier_arrive(barriers.work_full[slot])
        if thread < STAGE:
            for half in T.serial(_HALVES):
                load_q(T, S, inputs, memory, barriers, work, half, done + half, thread)
            done = done + _HALVES
            first_page, first_row = row_of(T, inputs, work.sequence, work.first * S.block_n + thread, work.length)
            i_page = T.alloc_var(T.int32, init=first_page)
            row = T.alloc_var(T.int32, init=first_row)
            for step in T.serial(work.steps):
                # Where the next block's keys are is looked up while this one's stage may still be taken.
                next_key = (work.first + step + 1) * S.block_n + thread
                next_page, next_row = row_of(T, inputs, work.sequence, next_key, work.length)
                stage = T.alloc_var(T.int32, init=(done + step) % S.num_stages)
                T.barrier_wait(barriers.empty[stage], T.truncdiv(done + step, S.num_stages) % 2 ^ 1)
                if S.joined:
                    if step == 1:
                        # All of the first block comes before any of the second, or both come late.
                        T.barrier_wait(barriers.full[_HALVES], 0)
                left = T.alloc_var(T.int32, init=work.length - (work.first + step) * S.block_n - thread)
                load_key(T, S, inputs, memory, barriers, i_page, row, stage, thread, left)
                i_page = next_page
                row = next_row
            done = done + work.steps
    if S.joined:
        # As the others do.
        T.cluster_sync()
        T.cluster_sync()


@macro
def load_q(T, S, inputs, memory, barriers, work, half, entry, thread):
    """Half of an item's rows of q, as they are, to the stage whose turn it is."""
    stage = T.alloc_var(T.int32, init=entry % S.num_stages)
    row = T.alloc_var(T.int32, init=work.first_row + half * (S.rows // _HALVES) + thread)
    T.barrier_wait(barriers.empty[stage], T.truncdiv(entry, S.num_stages) % 2 ^ 1)
    if thread < S.rows // _HALVES and row < inputs.q.shape[1]:
        call(
            T, name_of(S, "load_row"), at(T, memory.matrices[0]), stage, thread,
            at(T, inputs.q[work.sequence, row, 0]), barriers.full[stage],
        )  # fmt: skip
    else:
        T.barrier_arrive(barriers.full[stage])


@macro
def make_weights(T, S, launch, inputs, outputs, memory, barriers, thread):
    """A warpgroup's part: scores and weights, sums and their logarithms."""
    T.set_max_nreg(registers_of(S)[0], int(not S.joined))
    is_bf16 = S.dtype == T.bfloat16
    s = T.alloc_local((S.rows // 2,), T.float32)
    up = T.alloc_local((2,), T.float32)
    sums = T.alloc_local((S.rows // 4,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    done = T.alloc_var(T.int32, init=0)
    rows = inputs.q.shape[1]
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        work = Work(*await_work(T, memory, barriers, turn))
        # All are done with the item before.
        T.sync_threads(_OF_WEIGHTS, GROUP)
        own_rows = T.alloc_var(T.int32, init=T.min(rows - work.first_row, S.rows))
        unmasked = note_limits(T, S, launch, inputs, memory, work, thread)
        # q has two stages, those before the blocks'.
        entry = T.alloc_var(T.int32, init=done + _HALVES * turn)
        low = T.alloc_var(T.int32, init=entry % S.num_stages)
        high = T.alloc_var(T.int32, init=(entry + 1) % S.num_stages)
        T.barrier_wait(barriers.full[low], T.truncdiv(entry, S.num_stages) % 2)
        T.barrier_wait(barriers.full[high], T.truncdiv(entry + 1, S.num_stages) % 2)
        call(T, name_of(S, "lift_q", is_bf16), matrices, of_rows, low, high, own_rows, launch.scale, thread)
        call(T, name_of(S, "free"), barriers.empty[low], barriers.empty[high], thread)
        for i in T.unroll(S.rows // 4):
            sums[i] = 0
        T.sync_threads(_OF_WEIGHTS, GROUP)
        for step in T.serial(work.steps):
            block = T.alloc_var(T.int32, init=done + step)
            entry = T.alloc_var(T.int32, init=block + _HALVES * (turn + 1))
            stage = T.alloc_var(T.int32, init=entry % S.num_stages)
            first_key = T.alloc_var(T.int32, init=(work.first + step) * S.block_n)
            T.barrier_wait(barriers.full[stage], T.truncdiv(entry, S.num_stages) % 2)
            call(T, name_of(S, "scores", is_bf16), at(T, s[0]), at(T, up[0]), matrices, stage, thread)
            T.barrier_wait(barriers.weights_empty[block % 2], T.truncdiv(block, 2) % 2 ^ 1)
            call(
                T, name_of(S, "weigh", S.sparse), at(T, s[0]), at(T, up[0]), at(T, sums[0]), matrices, stage, of_rows,
                at(T, memory.limits[0]), at(T, memory.valid[stage, 0]), first_key, first_key + S.block_n > unmasked,
                step % 2, block % 2, thread,
            )  # fmt: skip
            call(T, "mla::arrive", barriers.weights_full[block % 2], thread)
            call(T, "mla::arrive", barriers.empty[stage], thread)
        done = done + work.steps
        call(T, name_of(S, "total"), at(T, sums[0]), of_rows, work.steps % 2, slot, thread)
        T.barrier_arrive(barriers.sums_full[slot])
        # Told again: what an item is takes no registers while its blocks are worked on.
        ended = Work(*read_work(T, memory.told, slot))
        if S.joined:
            T.cluster_sync()
        store_logarithms(T, S, launch, outputs, memory, ended, slot, thread)
        if S.joined:
            T.cluster_sync()
        T.barrier_arrive(barriers.work_empty[slot])


@macro
def multiply_latents(T, S, launch, inputs, outputs, memory, barriers, thread):
    """Two warpgroups' part: half of the latents each, by the weights of all keys."""
    T.set_max_nreg(registers_of(S)[1], 1)
    acc = T.alloc_local((2 * S.rows,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    done = T.alloc_var(T.int32, init=0)
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        work = Work(*await_work(T, memory, barriers, turn))
        for i in T.unroll(2 * S.rows):
            acc[i] = 0
        for step in T.serial(work.steps):
            block = T.alloc_var(T.int32, init=done + step)
            entry = T.alloc_var(T.int32, init=block + _HALVES * (turn + 1))
            stage = T.alloc_var(T.int32, init=entry % S.num_stages)
            T.barrier_wait(barriers.weights_full[block % 2], T.truncdiv(block, 2) % 2)
            call(T, f"mla::rescale<{S.rows}, true>", at(T, acc[0]), of_rows, block % 2, thread)
            T.barrier_wait(barriers.full[stage], T.truncdiv(entry, S.num_stages) % 2)
            call(
                T, name_of(S, "values"), at(T, acc[0]), matrices, stage, block % 2, barriers.empty[stage], thread
            )  # fmt: skip
            call(T, "mla::arrive", barriers.weights_empty[block % 2], thread)
        done = done + work.steps
        T.barrier_wait(barriers.sums_full[slot], turn // 2 % 2)
        ended = Work(*read_work(T, memory.told, slot))
        if S.joined:
            join_halves(T, S, inputs, outputs, ended, memory, acc, slot, thread)
        else:
            store_latents(T, S, inputs, outputs, ended, acc, of_rows, slot, thread)
        T.barrier_arrive(barriers.work_empty[slot])
