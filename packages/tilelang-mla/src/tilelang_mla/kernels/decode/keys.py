"""The roles of decoding over 8-bit caches with keys as the rows of WGMMA, which are widened in registers.

A producer warpgroup loads keys as they are, 64 to a stage; a thread of it looks a key up. Two warpgroups make the
weights of two stages at a time, two more multiply the latents by them while the first are at the next two, all by the
functions of ``rows_of_keys.cuh``, ``weights_of_keys.cuh`` and ``values_of_keys.cuh``. What a work item is, and its
partial results, are those of the other decoding kernels.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, LN_2, log_of_sum, macro
from tilelang_mla.kernels.decode.boxes import TEXT as TEXT_OF_BOXES
from tilelang_mla.kernels.decode.groups import SHARED, TAKEN, Launch, Work, read_work
from tilelang_mla.kernels.decode.items import find_work, note_limits
from tilelang_mla.kernels.decode.loads import row_of
from tilelang_mla.kernels.decode.roles import scale_of
from tilelang_mla.kernels.decode.rows import TEXT as TEXT_BY_ROWS
from tilelang_mla.kernels.decode.rows import at
from tilelang_mla.kernels.decode.schedule import Owner, owner_of
from tilelang_mla.kernels.decode.shares import find_share, turns_of

_FILES = ("rows_of_keys.cuh", "weights_of_keys.cuh", "values_of_keys.cuh", "narrow.cuh")
TEXT = "".join(Path(__file__).with_name(name).read_text() for name in _FILES)
TEXT_OF_RECORDS = TEXT + Path(__file__).with_name("records.cuh").read_text()
TEXT_OF_HALVES = Path(__file__).with_name("halves.cuh").read_text()
# Registers of a thread that makes weights, of one that multiplies latents and of the producer, by rows and whether keys
# are records: five warpgroups start with 96.
_AT_FIRST = 96
_REGISTERS = {
    (16, False): (104, 112, 48), (16, True): (104, 112, 48), (32, False): (88, 128, 48), (32, True): (96, 120, 48)
}  # fmt: skip
_REGISTERS_NARROW = (96, 120, 48)
# The named barrier of those that make weights, as rows_of_keys.cuh has it, and warps of a warpgroup.
_OF_WEIGHTS, _WARPS = 5, 4
# Keys of a stage, and those that lie side by side and are copied at once.
STAGE, TOGETHER = 64, 8
# Elements of a line of q.
_LINE = 128
# Floats of a row beside its elements, bytes that align the matrices, and of two blocks' scales.
_OF_ROW, _ALIGNED, _SCALES = 42, 1024, 1024


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
    """Full and empty barriers of two work items, of the stages and of two blocks' weights; ``sums_full`` when a work
    item's are known, whose place is free again with the item's."""

    work_full: Any
    work_empty: Any
    full: Any
    empty: Any
    weights_full: Any
    weights_empty: Any
    sums_full: Any


def registers_of(S: Any) -> tuple[int, int, int]:
    """Registers of a thread of each role."""
    return _REGISTERS_NARROW if S.narrow else _REGISTERS[S.rows, S.cache == "656"]


def bytes_of_key(S: Any) -> int:
    """Bytes of a key in the cache, all of which are loaded."""
    return S.dim_nope + 16 + 2 * S.dim_rope if S.cache == "656" else S.width


def groups_of(S: Any) -> int:
    """Groups of latents whose scales keys are widened without, as in rows_of_keys.cuh and records.cuh."""
    return 4 if S.cache == "656" and S.rows != 32 else 1


def bytes_of_matrices(S: Any) -> int:
    """q, weights of two blocks, with scales beside them if they have none in them, and the stages."""
    width = S.width if S.cache == "656" else -(-S.width // _LINE) * _LINE
    weights, scales = (1, _SCALES) if S.records_are_rows else (groups_of(S), 0)
    held = S.rows * 2 * (width + 2 * weights * S.block_n) + scales
    return held + S.num_stages * STAGE * bytes_of_key(S) + _ALIGNED


def makers_of(S: Any) -> int:
    """Warpgroups that make weights, of a stage of keys each."""
    return 1 if S.records_are_rows else 2


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
    share = T.alloc_shared((TAKEN,), T.int32)
    return matrices, of_rows, limits, valid, at_page, at_row, found, told, share


@macro
def alloc_key_barriers(T, S):
    makers = makers_of(S)
    work_full = T.alloc_barrier([GROUP] * 2)
    work_empty = T.alloc_barrier([(2 + makers) * GROUP] * 2)
    full = T.alloc_barrier([STAGE] * S.num_stages)
    # A warpgroup has read a stage's keys, and two its latents.
    empty = T.alloc_barrier([3 * _WARPS] * S.num_stages)
    weights_full = T.alloc_barrier([makers * _WARPS] * 2)
    weights_empty = T.alloc_barrier([2 * _WARPS] * 2)
    sums_full = T.alloc_barrier([makers * GROUP] * 2)
    return work_full, work_empty, full, empty, weights_full, weights_empty, sums_full


def options_of(S: Any, serial: bool) -> dict[str, Any]:
    """Of a kernel: threads of a program, one in C, else three warpgroups, or five or four where keys are rows; what it
    is compiled with, unless in C; and programs of a cluster."""
    if serial:
        return {"threads": 1}
    options: dict[str, Any] = {"threads": (5 if S.keys_are_rows else 2 + S.loaders) * GROUP}
    if S.records_are_rows:
        options |= {"threads": 4 * GROUP, "prelude": TEXT_OF_RECORDS}
    elif S.boxes:
        options["prelude"] = TEXT_OF_BOXES
    elif S.keys_are_rows or S.by_rows:
        options["prelude"] = TEXT if S.keys_are_rows else (TEXT_OF_HALVES if S.loaders == 2 else "") + TEXT_BY_ROWS
    if S.clustered:
        options["cluster_dims"] = 2
    return options


@macro
def run_keys(T, S, serial, inputs, outputs, numbers, i_program, num_programs):
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
    with T.ws(4):
        produce_keys(T, S, launch, inputs, outputs.pieces, memory, barriers, thread - 4 * GROUP)
    with T.ws(0, 1):
        make_weights(T, S, launch, inputs, outputs, memory, barriers, thread)
    with T.ws(2, 3):
        multiply_latents(T, S, launch, inputs, outputs, memory, barriers, thread - 2 * GROUP)


def grouped(S: Any) -> str:
    return str(groups_of(S) > 1).lower()


def name_of(S: Any, name: str, *constants: Any) -> str:
    """A function of the texts for widened keys, or of narrow.cuh, for these sizes."""
    if S.records_are_rows:
        return f"mla::records::{name}" + (
            f"<{', '.join(str(value).lower() for value in constants)}>" if constants else ""
        )
    shape = (S.rows, S.dim_rope, S.cache == "656", *constants)
    return f"mla::{'narrow::' if S.narrow else ''}{name}<{', '.join(str(value).lower() for value in shape)}>"


def call(T: Any, name: str, *arguments: Any) -> Any:
    """Call a function of these texts."""
    return T.call_extern("handle", name, *arguments)


@macro
def produce_keys(T, S, launch, inputs, pieces, memory, barriers, thread):
    """Finds the work items and loads their keys."""
    T.set_max_nreg(registers_of(S)[2], 0)
    done = T.alloc_var(T.int32, init=0)
    own = None if S.known else Owner(*owner_of(T, launch, inputs, thread))
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        T.barrier_wait(barriers.work_empty[slot], turn // 2 % 2 ^ 1)
        work = Work(*find_work(T, S, launch, inputs, memory, pieces, own, slot, turn, thread))
        T.barrier_arrive(barriers.work_full[slot])
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
            if S.joined:
                if step == 1:
                    # All of the first block comes before any of the second, or both come late.
                    T.barrier_wait(barriers.full[T.truncdiv(thread, STAGE)], 0)
            left = T.alloc_var(T.int32, init=work.length - (work.first + step) * S.block_n - thread)
            load_key(T, S, inputs, memory, barriers, i_page, row, stage, key, left)
            i_page = next_page
            row = next_row
        done = done + work.steps
    if S.joined:
        # As the others do.
        T.cluster_sync()
        T.cluster_sync()


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
def await_work(T, memory, barriers, turn):
    """The fields of a turn's :class:`Work`, when the producer has told them; a slot has every other turn's."""
    T.barrier_wait(barriers.work_full[turn % 2], turn // 2 % 2)
    return read_work(T, memory.told, turn % 2)


@macro
def make_weights(T, S, launch, inputs, outputs, memory, barriers, thread):
    """Two warpgroups' part: scores and weights, sums and their logarithms."""
    of_weights = registers_of(S)[0]
    T.set_max_nreg(of_weights, int(of_weights > _AT_FIRST))
    is_bf16 = S.dtype == T.bfloat16
    s = T.alloc_local((S.rows // 2,), T.float32)
    own_sums = S.rows // 4 if S.narrow else 2
    sums = T.alloc_local((own_sums,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    group = T.alloc_var(T.int32, init=T.truncdiv(thread, GROUP))
    done = T.alloc_var(T.int32, init=0)
    rows = inputs.q.shape[1]
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        work = Work(*await_work(T, memory, barriers, turn))
        # Both are done with the item before.
        T.sync_threads(_OF_WEIGHTS, 2 * GROUP)
        own_rows = T.alloc_var(T.int32, init=T.min(rows - work.first_row, S.rows))
        unmasked = note_limits(T, S, launch, inputs, memory, work, thread)
        call(
            T, name_of(S, "load_q", is_bf16), matrices, of_rows, at(T, inputs.q[work.sequence, work.first_row, 0]),
            inputs.q.strides[1], own_rows, scale_of(S, launch, inputs), thread,
        )  # fmt: skip
        for i in T.unroll(own_sums):
            sums[i] = 0
        T.sync_threads(_OF_WEIGHTS, 2 * GROUP)
        for step in T.serial(work.steps):
            block = T.alloc_var(T.int32, init=done + step)
            i_stage = T.alloc_var(T.int32, init=2 * block + group)
            stage = T.alloc_var(T.int32, init=i_stage % S.num_stages)
            first_key = T.alloc_var(T.int32, init=(work.first + step) * S.block_n)
            T.barrier_wait(barriers.full[stage], T.truncdiv(i_stage, S.num_stages) % 2)
            call(T, name_of(S, "scores", is_bf16), at(T, s[0]), matrices, stage, of_rows, thread)
            T.barrier_wait(barriers.weights_empty[block % 2], T.truncdiv(block, 2) % 2 ^ 1)
            call(
                T, name_of(S, "weigh", is_bf16, S.sparse), at(T, s[0]), at(T, sums[0]), matrices,
                *(() if S.narrow else (stage,)), of_rows, at(T, memory.limits[0]), at(T, memory.valid[stage, 0]),
                first_key, first_key + S.block_n > unmasked, step % 2, block % 2, thread,
            )  # fmt: skip
            call(T, "mla::arrive", barriers.weights_full[block % 2], thread)
            call(T, "mla::arrive", barriers.empty[stage], thread)
        done = done + work.steps
        kind = f"mla::narrow::total<{S.rows}>" if S.narrow else f"mla::total<{S.rows}, {grouped(S)}>"
        call(T, kind, at(T, sums[0]), of_rows, work.steps % 2, slot, thread)
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
    # Beside the accumulators of all blocks, if they are added up block by block, those of one.
    acc = T.alloc_local((2 * S.rows * (2 if S.narrow else 1),), T.float32)
    of_rows = at(T, memory.of_rows[0])
    done = T.alloc_var(T.int32, init=0)
    turns = turns_of(T, S, launch, inputs, memory)
    for turn in T.serial(turns):
        slot = turn % 2
        work = Work(*await_work(T, memory, barriers, turn))
        for i in T.unroll(2 * S.rows):
            acc[i] = 0
        for step in T.serial(work.steps):
            multiply_block(T, S, memory, barriers, acc, done + step, thread)
        done = done + work.steps
        T.barrier_wait(barriers.sums_full[slot], turn // 2 % 2)
        ended = Work(*read_work(T, memory.told, slot))
        if S.joined:
            join_halves(T, S, inputs, outputs, ended, memory, acc, slot, thread)
        else:
            store_latents(T, S, inputs, outputs, ended, acc, of_rows, slot, thread)
        # With it the place of its sums.
        T.barrier_arrive(barriers.work_empty[slot])


@macro
def multiply_block(T, S, memory, barriers, acc, number, thread):
    """The latents of a block's two stages, which are added up by themselves if keys are not widened."""
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    block = T.alloc_var(T.int32, init=number)
    first = T.alloc_var(T.int32, init=2 * block % S.num_stages)
    second = T.alloc_var(T.int32, init=(2 * block + 1) % S.num_stages)
    buffer = T.alloc_var(T.int32, init=block % 2)
    T.barrier_wait(barriers.weights_full[buffer], T.truncdiv(block, 2) % 2)
    call(T, f"mla::rescale<{S.rows}, {grouped(S)}>", at(T, acc[0]), of_rows, buffer, thread)
    T.barrier_wait(barriers.full[first], T.truncdiv(2 * block, S.num_stages) % 2)
    T.barrier_wait(barriers.full[second], T.truncdiv(2 * block + 1, S.num_stages) % 2)
    call(
        T, name_of(S, "values", S.dtype == T.bfloat16), at(T, acc[0]), matrices, first, second, buffer,
        barriers.empty[first], barriers.empty[second], thread,
    )  # fmt: skip
    if S.narrow:
        call(T, f"mla::narrow::add_block<{S.rows}>", at(T, acc[0]), of_rows, buffer, thread)
    call(T, "mla::arrive", barriers.weights_empty[buffer], thread)


@macro
def join_halves(T, S, inputs, outputs, work, memory, acc, slot, thread):
    """Rows of half of the latents of both parts of a list, in each of the two programs that have them."""
    by_rows = T.alloc_local((S.rows // 4,), T.float32)
    matrices, of_rows = at(T, memory.matrices[0]), at(T, memory.of_rows[0])
    own_rows = T.alloc_var(T.int32, init=T.min(inputs.q.shape[1] - work.first_row, S.rows))
    place, stride = at(T, outputs.out[work.sequence, work.first_row, 0]), outputs.out.strides[1]
    T.cluster_sync()
    call(
        T, name_of(S, "give_half"), at(T, acc[0]), at(T, by_rows[0]), matrices, of_rows, slot, own_rows, T.float32(1),
        at(T, inputs.sink[0]), inputs.sinks, work.first_row, thread,
    )  # fmt: skip
    T.cluster_sync()
    call(
        T, name_of(S, "store_half", S.dtype == T.bfloat16), at(T, acc[0]), at(T, by_rows[0]), matrices, place, stride,
        own_rows, thread,
    )  # fmt: skip


@macro
def store_latents(T, S, inputs, outputs, work, acc, of_rows, slot, thread):
    """Rows of a work item: results, or partial ones."""
    by = T.alloc_var(T.float32, init=1)
    if S.one_scale:
        by = inputs.scales[0, 0, 0]
    kind = f"mla::store<{S.rows}, {grouped(S)}, {str(S.dtype == T.bfloat16).lower()}"
    own_rows = T.alloc_var(T.int32, init=T.min(inputs.q.shape[1] - work.first_row, S.rows))
    sinks = (at(T, inputs.sink[0]), inputs.sinks, work.first_row) if S.sparse else (of_rows, 0, 0)
    if work.num_parts == 1:
        place, stride = at(T, outputs.out[work.sequence, work.first_row, 0]), outputs.out.strides[1]
        call(T, f"{kind}, false>", at(T, acc[0]), of_rows, slot, place, stride, own_rows, by, *sinks, thread)
    if work.num_parts > 1:
        place = at(T, outputs.parts[work.part, work.first_row, 0])
        call(T, f"{kind}, true>", at(T, acc[0]), of_rows, slot, place, S.dim_nope, own_rows, by, of_rows, 0, 0, thread)


@macro
def store_logarithms(T, S, launch, outputs, memory, work, slot, thread):
    """Of a work item's rows; who writes one has added its sum up."""
    if thread < T.min(outputs.out.shape[1] - work.first_row, S.rows):
        highest = T.alloc_var(T.float32, init=end_of_row(T, S, memory, "log", 22, slot, thread))
        row_sum = T.alloc_var(T.float32, init=end_of_row(T, S, memory, "sum", 24, slot, thread))
        row = T.alloc_var(T.int32, init=work.first_row + thread)
        if has_result(T, S, work) and launch.wants_lse != 0:
            outputs.lse[work.sequence, T.truncmod(row, launch.heads), T.truncdiv(row, launch.heads)] = T.if_then_else(
                row_sum == 0, -T.infinity(T.float32), log_of_sum(T, highest, row_sum, LN_2)
            )
        if not S.joined and work.num_parts > 1:
            log_of = T.alloc_var(T.float32, init=-T.infinity(T.float32))
            if row_sum != 0:
                log_of = highest + T.log2(row_sum)
                if launch.wants_lse != 0:
                    log_of = log_of_sum(T, highest, row_sum)
            outputs.part_lse[work.part, row] = log_of


def end_of_row(T: Any, S: Any, memory: Any, name: str, place: int, slot: Any, row: Any) -> Any:
    """Of a row of the work item in a slot its sum, or the logarithm that it is relative to; of both parts if joined."""
    if S.joined:
        return T.call_extern("float32", f"mla::joined_{name}<{S.rows}>", at(T, memory.of_rows[0]), slot, row)
    return memory.of_rows[(place + slot) * S.rows + row]


def has_result(T: Any, S: Any, work: Any) -> Any:
    """Whether the logarithms of a work item are results: of two parts that are joined one program writes them."""
    return T.block_rank_in_cluster() == 0 if S.joined else work.num_parts == 1
