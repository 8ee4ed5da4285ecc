"""The roles of decoding over 8-bit caches with keys as the rows of WGMMA, which are widened in registers.

A producer warpgroup loads keys as they are, 64 to a stage; a thread of it looks a key up. Two consumer warpgroups take
two stages at a time, as ``rows_of_keys.cuh`` says, whose functions they call. What a work item is, and its partial
results, are those of the other decoding kernels.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tilelang.language import macro

from tilelang_mla.kernels.common import GROUP, LN_2, log_of_sum
from tilelang_mla.kernels.decode.groups import SHARED, Launch, Work, read_work
from tilelang_mla.kernels.decode.loads import row_of
from tilelang_mla.kernels.decode.roles import is_per_token, limit_of, scale_of, seen_by, unmasked_keys
from tilelang_mla.kernels.decode.schedule import Owner, find_part, owner_of, part_of
from tilelang_mla.kernels.decode.shares import find_share, tell_share, turns_of

TEXT = Path(__file__).with_name("rows_of_keys.cuh").read_text()
# Registers of a thread of the consumers and of the producer.
_REGISTERS = (216, 72)
# The named barrier of both consumers, as rows_of_keys.cuh has it.
_OF_CONSUMERS = 5
# Keys of a stage, and those that lie side by side and are copied at once.
STAGE, TOGETHER = 64, 8
# Floats of a row beside its elements, and bytes that align the matrices.
_OF_ROW, _ALIGNED = 12, 1024


class KeyMemory(NamedTuple):
    """Shared memory: the matrices and stages, what is known of rows, and what roles tell each other.

    valid: whether the keys of a stage are any, of lists. at_page, at_row: for lengths that are added up.
    """

    matrices: Any
    of_rows: Any
    limits: Any
    valid: Any
    at_page: Any
    at_row: Any
    found: Any
    told: Any
    share: Any


class KeyBarriers(NamedTuple):
    """Full and empty barriers of two work items and of the stages."""

    work_full: Any
    work_empty: Any
    full: Any
    empty: Any


def bytes_of_key(S: Any) -> int:
    """Bytes of a key in the cache, all of which are loaded."""
    return S.dim_nope + 16 + 2 * S.dim_rope if S.cache == "656" else S.width


def bytes_of_matrices(S: Any) -> int:
    """q, weights of 128 keys, and the stages."""
    return S.rows * 2 * (S.width + S.block_n) + S.num_stages * STAGE * bytes_of_key(S) + _ALIGNED


@macro
def alloc_key_memory(T, S):
    matrices = T.alloc_shared((bytes_of_matrices(S),), T.uint8)
    of_rows = T.alloc_shared((_OF_ROW * S.rows,), T.float32)
    limits = T.alloc_shared((S.rows,), T.int32)
    valid = T.alloc_shared((S.num_stages, STAGE), T.uint8)
    at_page = T.alloc_shared((1, S.block_n), T.int32)
    at_row = T.alloc_shared((1, S.block_n), T.int32)
    found = T.alloc_shared((4,), T.int32)
    told = T.alloc_shared((2, 8), T.int32)
    share = T.alloc_shared((4,), T.int32)
    return matrices, of_rows, limits, valid, at_page, at_row, found, told, share


@macro
def alloc_key_barriers(T, S):
    work_full = T.alloc_barrier([GROUP] * 2)
    work_empty = T.alloc_barrier([2 * GROUP] * 2)
    full = T.alloc_barrier([STAGE] * S.num_stages)
    empty = T.alloc_barrier([2 * GROUP] * S.num_stages)
    return work_full, work_empty, full, empty


def prelude_of(S: Any, serial: bool) -> dict[str, str]:
    """What a kernel with keys as rows is compiled with."""
    return {"prelude": TEXT} if S.keys_are_rows and not serial else {}


@macro
def run_keys(T, S, serial, inputs, outputs, numbers, i_program, num_programs):
    """What a program does, in shared memory and with barriers of its own."""
    memory = KeyMemory(*alloc_key_memory(T, S))
    thread = T.get_thread_binding()
    rows, heads = inputs.q.shape[1], numbers[1]
    row_tiles = T.alloc_var(T.int32, init=T.truncdiv(rows + (S.rows - 1), S.rows))
    tokens = T.alloc_var(T.int32, init=T.truncdiv(rows, heads))
    launch = Launch(*numbers, tokens, row_tiles, i_program, num_programs)
    if launch.scheduled == SHARED:
        find_share(T, S, launch, inputs, memory, thread, serial)
    # The combine kernel may start; it waits for the end of this one itself.
    T.pdl_trigger()
    barriers = KeyBarriers(*alloc_key_barriers(T, S))
    with T.ws(2):
        produce_keys(T, S, launch, inputs, outputs.pieces, memory, barriers, thread - 2 * GROUP)
    with T.ws(0, 1):
        consume_keys(T, S, launch, inputs, outputs, memory, barriers, thread)


def name_of(S: Any, name: str, *constants: Any) -> str:
    """A function of rows_of_keys.cuh for these sizes."""
    shape = (S.rows, S.dim_rope, S.cache == "656", *constants)
    return f"mla::{name}<{', '.join(str(value).lower() for value in shape)}>"


def at(T: Any, place: Any) -> Any:
    """The address of an element."""
    return T.access_ptr(place, "rw")


def call(T: Any, name: str, *arguments: Any) -> Any:
    """Call a function of rows_of_keys.cuh."""
    return T.call_extern("handle", name, *arguments)


@macro
def produce_keys(T, S, launch, inputs, pieces, memory, barriers, thread):
    """Finds the work items and loads their keys."""
    T.set_max_nreg(_REGISTERS[1], 0)
    done = T.alloc_var(T.int32, init=0)
    begin, end, length = owner_of(T, launch, inputs, thread)
    own = Owner(begin, end, length)
    turns = turns_of(T, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_empty[slot], turn // 2 % 2 ^ 1)
        if launch.scheduled == SHARED:
            tell_share(T, S, launch, inputs, memory, pieces, slot, turn, thread)
        else:
            part, tile = part_of(T, launch, inputs, turn)
            find_part(T, S, launch, inputs, memory, slot, part, tile, own, thread, GROUP)
        T.barrier_arrive(barriers.work_full[slot])
        work = Work(*read_work(T, memory.told, slot))
        first_page, first_row = row_of(T, inputs, work.sequence, work.first * S.block_n + thread, work.length)
        i_page = T.alloc_var(T.int32, init=first_page)
        row = T.alloc_var(T.int32, init=first_row)
        for step in T.serial(work.steps):
            # Where the next block's keys are is looked up while this one's stages may still be taken.
            next_key = (work.first + step + 1) * S.block_n + thread
            next_page, next_row = row_of(T, inputs, work.sequence, next_key, work.length)
            i_stage = T.alloc_var(T.int32, init=2 * (done + step) + T.truncdiv(thread, STAGE))
            stage = T.alloc_var(T.int32, init=i_stage % S.num_stages)
            T.barrier_wait(barriers.empty[stage], T.truncdiv(i_stage, S.num_stages) % 2 ^ 1)
            key = T.alloc_var(T.int32, init=thread % STAGE)
            left = T.alloc_var(T.int32, init=work.length - (work.first + step) * S.block_n - thread)
            load_key(T, S, inputs, memory, barriers, i_page, row, stage, key, left)
            i_page = next_page
            row = next_row
        done = done + work.steps


@macro
def load_key(T, S, inputs, memory, barriers, i_page, row, stage, key, left):
    """A thread's: its key, or if rows lie side by side all that it is the first of; zeros where there is none."""
    page_size = inputs.kv.shape[1]
    count = T.alloc_var(T.int32, init=1)
    if not S.sparse:
        if inputs.kv.strides[1] == bytes_of_key(S) and T.truncmod(page_size, TOGETHER) == 0:
            count = T.if_then_else(key % TOGETHER == 0, T.min(left, TOGETHER), 0)
    if S.sparse:
        memory.valid[stage, key] = T.cast(i_page >= 0, T.uint8)
    if i_page < 0:
        call(T, name_of(S, "zero_key"), at(T, memory.matrices[0]), stage, key)
    if i_page >= 0 and count > 0:
        call(
            T, name_of(S, "load_keys"), at(T, memory.matrices[0]), stage, key,
            at(T, inputs.kv[i_page, row, 0]), count, barriers.full[stage],
        )  # fmt: skip
    else:
        T.barrier_arrive(barriers.full[stage])


@macro
def consume_keys(T, S, launch, inputs, outputs, memory, barriers, thread):
    """Scores, weights and values of both consumer warpgroups."""
    T.set_max_nreg(_REGISTERS[0], 1)
    is_bf16 = S.dtype == T.bfloat16
    s = T.alloc_local((S.rows // 2,), T.float32)
    acc = T.alloc_local((2 * S.rows,), T.float32)
    sums = T.alloc_local((2,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    group = T.alloc_var(T.int32, init=T.truncdiv(thread, GROUP))
    done = T.alloc_var(T.int32, init=0)
    scale = T.alloc_var(T.float32, init=scale_of(S, launch, inputs))
    rows = inputs.q.shape[1]
    turns = turns_of(T, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_full[slot], turn // 2 % 2)
        work = Work(*read_work(T, memory.told, slot))
        T.barrier_arrive(barriers.work_empty[slot])
        # Both are done with the item before.
        T.sync_threads(_OF_CONSUMERS, 2 * GROUP)
        own_rows = T.alloc_var(T.int32, init=T.min(rows - work.first_row, S.rows))
        unmasked = T.alloc_var(T.int32, init=2**31 - 1)
        if not S.sparse:
            first_limit = unmasked_keys(T, launch, inputs, work)
            unmasked = first_limit
            if thread < S.rows:
                own_row = T.alloc_var(T.int32, init=work.first_row + thread)
                if is_per_token(inputs):
                    memory.limits[thread] = seen_by(T, launch, inputs, work, own_row)
                else:
                    memory.limits[thread] = limit_of(
                        T, own_row, launch.heads, launch.tokens, work.length, launch.causal
                    )
        call(
            T, name_of(S, "load_q", is_bf16), matrices, of_rows, at(T, inputs.q[work.sequence, work.first_row, 0]),
            inputs.q.strides[1], own_rows, scale, thread,
        )  # fmt: skip
        for i in T.unroll(2 * S.rows):
            acc[i] = 0
        for i in T.unroll(2):
            sums[i] = 0
        T.sync_threads(_OF_CONSUMERS, 2 * GROUP)
        for step in T.serial(work.steps):
            i_stage = T.alloc_var(T.int32, init=2 * (done + step))
            first_key = T.alloc_var(T.int32, init=(work.first + step) * S.block_n)
            own = T.alloc_var(T.int32, init=(i_stage + group) % S.num_stages)
            T.barrier_wait(barriers.full[own], T.truncdiv(i_stage + group, S.num_stages) % 2)
            call(T, name_of(S, "scores", is_bf16), at(T, s[0]), matrices, own, of_rows, thread)
            call(
                T, name_of(S, "weigh", is_bf16, S.sparse), at(T, s[0]), at(T, acc[0]),
                at(T, sums[0]), matrices, of_rows, at(T, memory.limits[0]),
                at(T, memory.valid[own, 0]), first_key, first_key + S.block_n > unmasked, step % 2, thread,
            )  # fmt: skip
            for half in T.unroll(2):
                stage = T.alloc_var(T.int32, init=(i_stage + half) % S.num_stages)
                T.barrier_wait(barriers.full[stage], T.truncdiv(i_stage + half, S.num_stages) % 2)
                call(T, name_of(S, "values", is_bf16), at(T, acc[0]), matrices, stage, half, thread)
                T.barrier_arrive(barriers.empty[stage])
        done = done + work.steps
        call(T, f"mla::total<{S.rows}>", at(T, sums[0]), of_rows, work.steps % 2, thread)
        store_keys(T, S, launch, inputs, outputs, memory, work, acc, own_rows, is_bf16, thread)


@macro
def store_keys(T, S, launch, inputs, outputs, memory, work, acc, own_rows, is_bf16, thread):
    """Rows of a work item: results, or partial ones, and their logarithms."""
    of_rows = at(T, memory.of_rows[0])
    by = T.alloc_var(T.float32, init=1)
    if S.one_scale:
        by = inputs.scales[0, 0, 0]
    kind = f"mla::store<{S.rows}, {str(is_bf16).lower()}"
    sinks = (at(T, inputs.sink[0]), inputs.sinks, work.first_row) if S.sparse else (of_rows, 0, 0)
    if work.num_parts == 1:
        place, stride = at(T, outputs.out[work.sequence, work.first_row, 0]), outputs.out.strides[1]
        call(T, f"{kind}, false>", at(T, acc[0]), of_rows, place, stride, own_rows, by, *sinks, thread)
    if work.num_parts > 1:
        place = at(T, outputs.parts[work.part, work.first_row, 0])
        call(T, f"{kind}, true>", at(T, acc[0]), of_rows, place, S.dim_nope, own_rows, by, of_rows, 0, 0, thread)
    if thread < own_rows:
        highest = T.alloc_var(T.float32, init=memory.of_rows[10 * S.rows + thread])
        row_sum = T.alloc_var(T.float32, init=memory.of_rows[11 * S.rows + thread])
        row = T.alloc_var(T.int32, init=work.first_row + thread)
        if work.num_parts == 1 and launch.wants_lse != 0:
            outputs.lse[work.sequence, T.truncmod(row, launch.heads), T.truncdiv(row, launch.heads)] = T.if_then_else(
                row_sum == 0, -T.infinity(T.float32), log_of_sum(T, highest, row_sum, LN_2)
            )
        if work.num_parts > 1:
            log_of = T.alloc_var(T.float32, init=-T.infinity(T.float32))
            if row_sum != 0:
                log_of = highest + T.log2(row_sum)
                if launch.wants_lse != 0:
                    log_of = log_of_sum(T, highest, row_sum)
            outputs.part_lse[work.part, row] = log_of
