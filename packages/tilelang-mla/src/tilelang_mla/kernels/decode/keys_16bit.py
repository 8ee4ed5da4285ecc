"""The roles of sparse prefill with few heads: keys of 16 bits are the rows of WGMMA, and heads its columns.

The producer copies listed keys as for the other kernels (rows.cuh), and the q of an item while the one before is worked
on. One warpgroup makes a block's weights, two more multiply half of the latents each by them while the first is at the
next block, by the functions of ``keys_16bit.cuh``.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, LN_2, WARP, log_of_sum, macro
from tilelang_mla.kernels.decode.groups import Barriers, Launch, Work, read_work
from tilelang_mla.kernels.decode.keys import TEXT as TEXT_OF_KEYS
from tilelang_mla.kernels.decode.keys import await_work, call
from tilelang_mla.kernels.decode.rows import TEXT as TEXT_BY_ROWS
from tilelang_mla.kernels.decode.rows import (
    Held,
    alloc_held,
    at,
    begin_rows,
    end_of,
    entry_of,
    key_at,
    key_of,
    own_key,
    place_of,
)
from tilelang_mla.kernels.decode.schedule import Owner, find_part, owner_of, part_of
from tilelang_mla.kernels.decode.shares import turns_of

TEXT = TEXT_BY_ROWS + TEXT_OF_KEYS + Path(__file__).with_name("keys_16bit.cuh").read_text()
# The named barrier of the warpgroup that makes weights, as keys_16bit.cuh has it, and warps of a warpgroup.
_OF_WEIGHTS, _WARPS = 5, 4
# Floats that are known of a row, and bytes that align the matrices.
_OF_ROW, _ALIGNED = 42, 1024


class KeyMemory(NamedTuple):
    """Shared memory: the matrices and stages, what is known of rows, which keys of a stage are any, and what roles tell
    each other."""

    matrices: Any
    of_rows: Any
    valid: Any
    found: Any
    told: Any
    share: Any


def bytes_of_matrices(S: Any) -> int:
    """Two of q, weights of two blocks, and the stages."""
    return 2 * (2 * S.rows * S.width + 2 * S.rows * S.block_n + S.num_stages * S.block_n * S.width) + _ALIGNED


@macro
def alloc_key_memory(T, S):
    matrices = T.alloc_shared((bytes_of_matrices(S),), T.uint8)
    of_rows = T.alloc_shared((_OF_ROW * S.rows,), T.float32)
    valid = T.alloc_shared((S.num_stages, S.block_n), T.uint8)
    found = T.alloc_shared((5,), T.int32)
    told = T.alloc_shared((2, 8), T.int32)
    share = T.alloc_shared((4,), T.int32)
    return matrices, of_rows, valid, found, told, share


@macro
def alloc_key_barriers(T, S):
    """Of two items and their q, of the stages' left halves with ropes, right halves, and of two blocks' weights."""
    work_full = T.alloc_barrier([2 * GROUP] * 2)
    work_empty = T.alloc_barrier([3 * GROUP] * 2)
    left_full = T.alloc_barrier([2 * GROUP] * S.num_stages)
    left_empty = T.alloc_barrier([_WARPS] * S.num_stages)
    right_full = T.alloc_barrier([GROUP] * S.num_stages)
    right_empty = T.alloc_barrier([_WARPS] * S.num_stages)
    weights_full = T.alloc_barrier([_WARPS] * 2)
    weights_empty = T.alloc_barrier([2 * _WARPS] * 2)
    sums_full = T.alloc_barrier([GROUP] * 2)
    return (
        work_full, work_empty, left_full, left_empty, right_full, right_empty, weights_full, weights_empty, sums_full
    )  # fmt: skip


def name_of(S: Any, name: str, *constants: Any) -> str:
    """A function of keys_16bit.cuh for these sizes."""
    shape = (S.rows, S.dim_rope, S.num_stages, *constants)
    return f"mla::bits16::{name}<{', '.join(str(value).lower() for value in shape)}>"


@macro
def run_keys_16bit(T, S, inputs, outputs, numbers, i_program, num_programs):
    """What a program does, in shared memory and with barriers of its own."""
    memory = KeyMemory(*alloc_key_memory(T, S))
    thread = T.get_thread_binding()
    rows, heads = inputs.q.shape[1], numbers[1]
    row_tiles = T.alloc_var(T.int32, init=T.truncdiv(rows + (S.rows - 1), S.rows))
    tokens = T.alloc_var(T.int32, init=T.truncdiv(rows, heads))
    launch = Launch(*numbers, tokens, row_tiles, i_program, num_programs)
    barriers = Barriers(*alloc_key_barriers(T, S))
    with T.ws(3):
        produce_keys(T, S, launch, inputs, memory, barriers, thread - 3 * GROUP)
    with T.ws(0):
        make_weights(T, S, launch, inputs, outputs, memory, barriers, thread)
    with T.ws(1):
        multiply_half(T, S, launch, inputs, outputs, memory, barriers, barriers.left_empty, 0, thread - GROUP)
    with T.ws(2):
        multiply_half(T, S, launch, inputs, outputs, memory, barriers, barriers.right_empty, 1, thread - 2 * GROUP)


@macro
def produce_keys(T, S, launch, inputs, memory, barriers, thread):
    """Finds the work items and loads their q and keys."""
    done = T.alloc_var(T.int32, init=0)
    begin, end, length = owner_of(T, launch, inputs, thread)
    own = Owner(begin, end, length)
    matrices = at(T, memory.matrices[0])
    held = Held(*alloc_held(T, S))
    place = T.alloc_var(T.int64, init=T.int64(-1))
    told = T.alloc_var(T.int32, init=-1)
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_empty[slot], turn // 2 % 2 ^ 1)
        part, tile = part_of(T, S, launch, inputs, memory, turn)
        find_part(T, S, launch, inputs, memory, slot, part, tile, own, thread, GROUP)
        work = Work(*read_work(T, memory.told, slot))
        own_rows = T.alloc_var(T.int32, init=T.min(inputs.q.shape[1] - work.first_row, S.rows))
        call(
            T, name_of(S, "load_q"), matrices, slot, at(T, inputs.q[work.sequence, work.first_row, 0]),
            inputs.q.strides[1], own_rows, thread,
        )  # fmt: skip
        T.cp_async_barrier_noinc(barriers.work_full[slot])
        T.barrier_arrive(barriers.work_full[slot])
        first_place, next_entry = begin_rows(T, S, inputs, work, held, thread)
        place = first_place
        told = next_entry
        for step in T.serial(work.steps):
            stage = (done + step) % S.num_stages
            phase = (done + step) // S.num_stages % 2 ^ 1
            next_place = place_of(T, inputs, told, key_of(T, S, work, step + 1, thread))
            entry = entry_of(T, inputs, work.sequence, key_of(T, S, work, step + 2, thread), end_of(T, S, work))
            address = key_at(T, inputs, place)
            T.barrier_wait(barriers.left_empty[stage], phase)
            if thread % WARP < S.keys_of_warp:
                memory.valid[stage, own_key(T, S, thread)] = T.cast(place >= 0, T.uint8)
            call(T, name_of(S, "copy_left"), matrices, stage, address, place >= 0, thread)
            T.cp_async_barrier_noinc(barriers.left_full[stage])
            T.barrier_arrive(barriers.left_full[stage])
            T.barrier_wait(barriers.right_empty[stage], phase)
            call(T, name_of(S, "copy_right"), matrices, stage, address, place >= 0, thread)
            T.cp_async_barrier_noinc(barriers.right_full[stage])
            place = next_place
            told = entry
        done = done + work.steps


@macro
def make_weights(T, S, launch, inputs, outputs, memory, barriers, thread):
    """A warpgroup's part: scores and weights, sums and their logarithms."""
    is_bf16 = S.dtype == T.bfloat16
    s = T.alloc_local((S.rows // 2,), T.float32)
    state = T.alloc_local((3 * S.rows // 4,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    done = T.alloc_var(T.int32, init=0)
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        work = Work(*await_work(T, memory, barriers, turn))
        call(T, f"mla::bits16::begin_rows<{S.rows}>", at(T, state[0]))
        # All have read what the item before ended with.
        T.sync_threads(_OF_WEIGHTS, GROUP)
        for step in T.serial(work.steps):
            block = T.alloc_var(T.int32, init=done + step)
            stage = T.alloc_var(T.int32, init=block % S.num_stages)
            phase = T.alloc_var(T.int32, init=T.truncdiv(block, S.num_stages) % 2)
            T.barrier_wait(barriers.left_full[stage], phase)
            call(T, name_of(S, "score_half", is_bf16, False), at(T, s[0]), matrices, slot, stage)
            T.barrier_wait(barriers.right_full[stage], phase)
            call(T, name_of(S, "score_half", is_bf16, True), at(T, s[0]), matrices, slot, stage)
            T.barrier_wait(barriers.weights_empty[block % 2], T.truncdiv(block, 2) % 2 ^ 1)
            call(
                T, name_of(S, "weigh", is_bf16), at(T, s[0]), at(T, state[0]), matrices, of_rows,
                at(T, memory.valid[stage, 0]), launch.scale, step % 2, block % 2, thread,
            )  # fmt: skip
            call(T, "mla::arrive", barriers.weights_full[block % 2], thread)
        done = done + work.steps
        call(T, f"mla::bits16::total<{S.rows}>", at(T, state[0]), of_rows, slot, thread)
        T.barrier_arrive(barriers.sums_full[slot])
        if thread < T.min(inputs.q.shape[1] - work.first_row, S.rows):
            row = T.alloc_var(T.int32, init=work.first_row + thread)
            row_sum = T.alloc_var(T.float32, init=memory.of_rows[(24 + slot) * S.rows + thread])
            log_of = T.alloc_var(T.float32, init=memory.of_rows[(22 + slot) * S.rows + thread])
            outputs.lse[work.sequence, row, 0] = T.if_then_else(
                row_sum == 0, -T.infinity(T.float32), log_of_sum(T, log_of, row_sum, LN_2)
            )
            outputs.max_logits[work.sequence, row] = memory.of_rows[(16 + slot) * S.rows + thread] * LN_2
        T.barrier_arrive(barriers.work_empty[slot])


@macro
def multiply_half(T, S, launch, inputs, outputs, memory, barriers, empty, half, thread):
    """A warpgroup's part: half of the latents by the weights of all keys."""
    is_bf16 = S.dtype == T.bfloat16
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
            stage = T.alloc_var(T.int32, init=block % S.num_stages)
            buffer = T.alloc_var(T.int32, init=block % 2)
            T.barrier_wait(barriers.weights_full[buffer], T.truncdiv(block, 2) % 2)
            call(T, f"mla::rescale<{S.rows}, false>", at(T, acc[0]), of_rows, buffer, thread)
            call(T, name_of(S, "values", is_bf16), at(T, acc[0]), matrices, half, stage, buffer)
            call(T, "mla::arrive", barriers.weights_empty[buffer], thread)
            call(T, "mla::arrive", empty[stage], thread)
        done = done + work.steps
        T.barrier_wait(barriers.sums_full[slot], turn // 2 % 2)
        own_rows = T.alloc_var(T.int32, init=T.min(inputs.q.shape[1] - work.first_row, S.rows))
        call(
            T, f"mla::bits16::store<{S.rows}, {str(is_bf16).lower()}>", at(T, acc[0]), of_rows, half, slot,
            at(T, outputs.out[work.sequence, work.first_row, 0]), outputs.out.strides[1], own_rows,
            at(T, inputs.sink[0]), inputs.sinks, work.first_row, thread,
        )  # fmt: skip
        T.barrier_arrive(barriers.work_empty[slot])
