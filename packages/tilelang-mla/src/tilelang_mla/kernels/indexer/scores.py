"""The kernel of the indexer's scores: of each query token and key, the sum over heads of weight * relu(q . k).

A program has a tile of query tokens of one sequence, their heads packed into rows, and some chunks of its keys: those
of a tile go round-robin to a number of programs that does not depend on lengths. A producer
warp issues TMA loads of blocks of keys and of their scales into a ring; consumer warpgroups multiply keys by q, so that
a thread has the products of a key with many heads in its registers: it weighs and sums them there. Few tokens share a
block's keys by key, many by token. Numbers of tokens, sequences, pages and lengths are not specialised on.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import GROUP, WARP, macro

# Elements of a key. Rows of q in one TMA load.
DIM, _Q_ROWS = 128, 128
# Of WGMMA's accumulators: columns that four threads hold, and rows, which are keys, of a warp.
_COLUMNS, _KEYS = 8, 16
# What is told of a program's tile, in shared memory.
_SEQUENCE, _FIRST, _ROWS = 0, 1, 2
# Registers of a consumer's thread where these are four warpgroups, and of the producer's then: together no more than
# the 96 of each of 640 threads that the program begins with, or it waits for them forever.
_CONSUMER, _PRODUCER = 112, 24


class Sizes(NamedTuple):
    """What the kernel is compiled for; see :func:`score`."""

    heads: int
    tile_tokens: int
    block_n: int
    num_stages: int
    piece: int
    warpgroups: int
    chunk: int
    serial: bool

    @property
    def rows(self) -> int:
        """Rows of q: tokens x heads of a tile."""
        return self.tile_tokens * self.heads

    @property
    def consumers(self) -> int:
        """Threads of the consumers."""
        return self.warpgroups * GROUP

    @property
    def slot(self) -> int:
        """Floats from the scales of a piece to those of the next: TMA writes to multiples of 128 bytes."""
        return max(self.piece, 32)

    @property
    def groups_share_keys(self) -> bool:
        """Whether each consumer warpgroup has tokens of its own, not keys of its own."""
        return self.block_n < 64 * self.warpgroups

    @property
    def own_tokens(self) -> int:
        """Tokens of a consumer warpgroup."""
        return self.tile_tokens // self.warpgroups if self.groups_share_keys else self.tile_tokens

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 1 if self.serial else self.consumers + GROUP

    def owner_of_column(self, i: Any, token: Any, column: Any) -> Any:
        """A thread and its register, as in WGMMA's accumulators: four threads have two rows of 8 columns."""
        thread = i // _KEYS * WARP + i % 8 * 4 + column // 2
        if self.groups_share_keys:
            thread = thread + token // self.own_tokens * GROUP
        return thread, token % self.own_tokens * 4 + i % _KEYS // 8 * 2 + column % 2


class Inputs(NamedTuple):
    """Tensors that are read; keys and scales lie side by side in the cache's pages."""

    q: Any
    keys: Any
    scales: Any
    weights: Any
    lengths: Any
    block_table: Any
    cu_seqlens_q: Any


class Launch(NamedTuple):
    """Numbers of a launch: whether sequences are ragged, else tokens of each; whether to clean; and the program's own
    among those of its tile."""

    ragged: Any
    each: Any
    clean: Any
    i_program: Any
    num_programs: Any


class Memory(NamedTuple):
    """Shared memory: q, rings of keys and their scales, what is told of the tile, keys its tokens see, and sums."""

    q: Any
    k: Any
    scales: Any
    told: Any
    seen: Any
    sums: Any


class Registers(NamedTuple):
    """Of the consumers: products of keys and rows of q, the rows' weights, sums of a token by column, and whole."""

    products: Any
    weights: Any
    columns: Any
    sums: Any


def score(
    T: Any, *, heads: int, tile_tokens: int, block_n: int, num_stages: int, piece: int, warpgroups: int, chunk: int,
    dtype: Any, serial: bool = False,
) -> Any:  # fmt: skip
    """The kernel. piece: keys that lie together in a page, at most a block. chunk: of blocks. dtype: of q and keys."""
    S = Sizes(heads, tile_tokens, block_n, num_stages, piece, warpgroups, chunk, serial)
    tokens, rows, pages, page_size = (T.dynamic(name) for name in ("tokens", "rows", "pages", "page_size"))
    batch, columns, bounds, width = (T.dynamic(name) for name in ("batch", "columns", "bounds", "width"))
    kv_page, scales_page, weights_token = (T.dynamic(name) for name in ("kv_page", "scales_page", "weights_token"))
    table_row, out_row = T.dynamic("table_row"), T.dynamic("out_row")

    @T.prim_func
    def score_keys(
        q: T.Tensor((rows, DIM), dtype),
        keys: T.StridedTensor((pages, page_size, DIM), (kv_page, DIM, 1), dtype),
        scales: T.StridedTensor((pages, page_size), (scales_page, 1), T.float32),
        weights: T.StridedTensor((tokens, heads), (weights_token, 1), T.float32),
        lengths: T.Tensor((tokens,), T.int32),
        block_table: T.StridedTensor((batch, columns), (table_row, 1), T.int32),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((tokens, width), (out_row, 1), T.float32),
        ragged: T.int32,
        each: T.int32,
        clean: T.int32,
        num_slots: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_slots, num_programs, threads=S.threads) as (i_slot, i_program):
            T.assume(kv_page % 16 == 0)
            T.assume(scales_page % 4 == 0)
            inputs = Inputs(q, keys, scales, weights, lengths, block_table, cu_seqlens_q)
            launch = Launch(ragged, each, clean, i_program, num_programs)
            run_program(T, S, inputs, out, launch, i_slot)

    return score_keys


@macro
def run_program(T, S, inputs, out, launch, i_slot):
    q_shared = T.alloc_shared((S.rows, DIM), inputs.q.dtype)
    k_shared = T.alloc_shared((S.num_stages, S.block_n, DIM), inputs.q.dtype)
    scales_shared = T.alloc_shared((S.num_stages, S.block_n // S.piece, S.slot), T.float32)
    told = T.alloc_shared((4,), T.int32)
    seen = T.alloc_shared((S.tile_tokens,), T.int32)
    sums_shared = T.alloc_shared((S.tile_tokens, S.block_n), T.float32)
    memory = Memory(q_shared, k_shared, scales_shared, told, seen, sums_shared)
    products = T.alloc_fragment((S.block_n, S.rows), T.float32)
    weights = T.alloc_fragment((S.rows,), T.float32)
    sums = T.alloc_fragment((S.block_n, S.tile_tokens), T.float32)
    columns = T.alloc_fragment((S.block_n, S.tile_tokens, _COLUMNS), T.float32)
    registers = Registers(products, weights, columns, sums)
    if not S.serial:
        T.annotate_layout({columns: T.Fragment((S.block_n, S.tile_tokens, _COLUMNS), forward_fn=S.owner_of_column)})
    thread = T.get_thread_binding()
    find_tile(T, S, inputs, out, memory, launch, i_slot, thread)
    most = T.alloc_var(T.int32, init=0)
    for i in T.serial(S.tile_tokens):
        most = T.max(most, seen[i])
    blocks = T.alloc_var(T.int32, init=T.truncdiv(most + (S.block_n - 1), S.block_n))
    # Chunks of all, and blocks of the program's last turn, which others may have in part or whole.
    turns = T.alloc_var(T.int32, init=T.truncdiv(blocks, launch.num_programs * S.chunk))
    rest = T.alloc_var(T.int32, init=blocks - (turns * launch.num_programs + launch.i_program) * S.chunk)
    steps = T.alloc_var(T.int32, init=turns * S.chunk + T.max(T.min(rest, S.chunk), 0))
    if S.serial:
        score_serially(T, S, inputs, out, memory, registers, launch, steps)
        clean_rest(T, S, out, memory, launch, blocks, 0, 1)
    else:
        q_full = T.alloc_barrier(1)
        k_full = T.alloc_barrier([1] * S.num_stages)
        k_empty = T.alloc_barrier([S.consumers // WARP] * S.num_stages)
        if thread >= S.consumers:
            if S.warpgroups == 4:
                T.set_max_nreg(_PRODUCER, 0)
            if thread - S.consumers < WARP:
                produce(T, S, inputs, memory, (q_full, k_full, k_empty), launch, steps, thread - S.consumers)
        else:
            if S.warpgroups == 4:
                T.set_max_nreg(_CONSUMER, 1)
            consume(T, S, inputs, out, memory, registers, (q_full, k_full, k_empty), launch, steps, thread)
            clean_rest(T, S, out, memory, launch, blocks, thread, S.consumers)


@macro
def find_tile(T, S, inputs, out, memory, launch, i_slot, thread):
    """Tell which tokens of which sequence a slot has, and how many keys each of them sees.

    Without bounds each sequence has as many slots as its tokens fill. With them, sequence b has slots from its
    first token // tile_tokens + b on, and so have the tokens before the first and behind the last, who see nothing.
    """
    told, seen = memory.told, memory.seen
    tokens, bounds = inputs.lengths.shape[0], inputs.cu_seqlens_q.shape[0]
    if thread == 0:
        told[_ROWS] = 0
        told[_SEQUENCE] = 0
    if not S.serial:
        T.sync_threads()
    if launch.ragged != 0:
        for turn in T.serial(T.truncdiv(bounds + S.threads, S.threads)):
            i = T.alloc_var(T.int32, init=turn * S.threads + thread)
            begin = T.alloc_var(T.int32, init=0)
            end = T.alloc_var(T.int32, init=tokens)
            if i > 0 and i <= bounds:
                begin = T.max(T.min(inputs.cu_seqlens_q[i - 1], tokens), 0)
            if i < bounds:
                end = T.max(T.min(inputs.cu_seqlens_q[i], tokens), 0)
            slot = T.alloc_var(T.int32, init=i_slot - T.truncdiv(begin, S.tile_tokens) - i)
            begin = begin + slot * S.tile_tokens
            if i <= bounds and slot >= 0 and begin < end:
                told[_SEQUENCE] = T.if_then_else(i < bounds, i - 1, -1)
                told[_FIRST] = begin
                told[_ROWS] = T.min(end - begin, S.tile_tokens)
    else:
        if thread == 0:
            of_each = T.alloc_var(T.int32, init=T.truncdiv(launch.each + (S.tile_tokens - 1), S.tile_tokens))
            i_batch = T.alloc_var(T.int32, init=T.truncdiv(i_slot, of_each))
            inside = T.alloc_var(T.int32, init=(i_slot - i_batch * of_each) * S.tile_tokens)
            told[_SEQUENCE] = i_batch
            told[_FIRST] = i_batch * launch.each + inside
            told[_ROWS] = T.min(launch.each - inside, S.tile_tokens)
    if not S.serial:
        T.sync_threads()
    for turn in T.serial(S.tile_tokens if S.serial else 1):
        i = T.alloc_var(T.int32, init=turn + thread)
        if i < S.tile_tokens:
            length = T.alloc_var(T.int32, init=0)
            if i < told[_ROWS] and told[_SEQUENCE] >= 0:
                length = inputs.lengths[told[_FIRST] + i]
            # What cannot be is nothing: keys beyond the table, or beyond what is to be written.
            room = T.cast(inputs.block_table.shape[1], T.int64) * T.cast(inputs.keys.shape[1], T.int64)
            if length < 0 or length > out.shape[1] or T.cast(length, T.int64) > room:
                length = 0
            seen[i] = length
    if not S.serial:
        T.sync_threads()


def key_of(S: Sizes, launch: Launch, step: Any) -> Any:
    """The first key of a block of a program's."""
    turn = step // S.chunk
    return ((turn * launch.num_programs + launch.i_program) * S.chunk + step % S.chunk) * S.block_n


@macro
def page_of(T, inputs, sequence, key):
    """The page of a key; none behind the table's last."""
    page = T.alloc_var(T.int32, init=-1)
    column = T.alloc_var(T.int32, init=T.truncdiv(key, inputs.keys.shape[1]))
    if column < inputs.block_table.shape[1]:
        page = inputs.block_table[sequence, column]
    return page


@macro
def produce(T, S, inputs, memory, barriers, launch, steps, lane):
    """A warp's: loads the tile's q, then keys and scales block by block. A page that is none is zeros to TMA.

    Each lane looks up the page of one of the next 32 pieces, a turn ahead.
    """
    q_full, k_full, k_empty = barriers
    q, keys, scales = inputs.q, inputs.keys, inputs.scales
    pieces = S.block_n // S.piece
    page_size = keys.shape[1]
    sequence = T.alloc_var(T.int32, init=memory.told[_SEQUENCE])
    row = T.alloc_var(T.int32, init=memory.told[_FIRST] * S.heads)
    if steps > 0:
        ahead = T.alloc_var(T.int32, init=-1)
        page = T.alloc_var(T.int32, init=-1)
        ahead = page_of(T, inputs, sequence, key_of(S, launch, lane // pieces) + lane % pieces * S.piece)
        for i in T.unroll(-(-S.rows // _Q_ROWS)):
            own = min(S.rows, _Q_ROWS)
            T.tma_copy(
                q[row + i * own : row + (i + 1) * own, 0:DIM], memory.q[i * own : (i + 1) * own, :], barrier=q_full
            )
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(q_full)
        for step in T.serial(steps):
            stage = step % S.num_stages
            if step % (WARP // pieces) == 0:
                page = ahead
                later = step + WARP // pieces + lane // pieces
                ahead = page_of(T, inputs, sequence, key_of(S, launch, later) + lane % pieces * S.piece)
            T.barrier_wait(k_empty[stage], step // S.num_stages % 2 ^ 1)
            for i in T.unroll(pieces):
                own_page = T.alloc_var(T.int32, init=T.shfl_sync(page, step % (WARP // pieces) * pieces + i))
                key = T.alloc_var(T.int32, init=T.truncmod(key_of(S, launch, step) + i * S.piece, page_size))
                T.tma_copy(
                    keys[own_page, key : key + S.piece, 0:DIM],
                    memory.k[stage, i * S.piece : (i + 1) * S.piece, :],
                    barrier=k_full[stage],
                )
                T.tma_copy(
                    scales[own_page, key : key + S.piece],
                    memory.scales[stage, i, 0 : S.piece],
                    barrier=k_full[stage],
                )
            T.sync_warp()
            if lane == 0:
                T.barrier_arrive(k_full[stage])


@macro
def consume(T, S, inputs, out, memory, registers, barriers, launch, steps, thread):
    """The consumers': products of a block, then their sums; warpgroups take turns at the tensor cores by themselves."""
    q_full, k_full, k_empty = barriers
    if steps > 0:
        load_weights(T, S, inputs, memory, registers)
        T.barrier_wait(q_full, 0)
        for step in T.serial(steps):
            stage = step % S.num_stages
            T.barrier_wait(k_full[stage], step // S.num_stages % 2)
            T.wgmma_gemm(
                memory.k[stage, :, :], memory.q, registers.products, transpose_B=True, clear_accum=True,
                policy=T.GemmWarpPolicy.FullCol if S.groups_share_keys else T.GemmWarpPolicy.FullRow,
            )  # fmt: skip
            T.wait_wgmma(0)
            sum_heads(T, S, registers)
            store_scores(T, S, out, memory, registers, stage, key_of(S, launch, step), thread)
            T.sync_warp()
            if thread % WARP == 0:
                T.barrier_arrive(k_empty[stage])


@macro
def load_weights(T, S, inputs, memory, registers):
    """Half of each weight: relu(x) is summed as x + |x|, which the FP32 pipes add at twice the rate of a maximum."""
    for j in T.Parallel(S.rows):
        token = T.min(memory.told[_FIRST] + j // S.heads, inputs.lengths.shape[0] - 1)
        registers.weights[j] = inputs.weights[token, j % S.heads] * 0.5


@macro
def sum_heads(T, S, registers):
    """Sums of weighted products, first those of the columns that a thread holds: one addition and one FMA a product."""
    columns, pieces = registers.columns, S.heads // _COLUMNS
    products = T.reshape(registers.products, (S.block_n, S.tile_tokens, pieces, _COLUMNS))
    weights = T.reshape(registers.weights, (S.tile_tokens, pieces, _COLUMNS))
    T.clear(columns)
    for piece in T.unroll(pieces):
        for i, j, c in T.Parallel(S.block_n, S.tile_tokens, _COLUMNS):
            product = products[i, j, piece, c]
            columns[i, j, c] = columns[i, j, c] + (product + T.abs(product)) * weights[j, piece, c]
    T.reduce_sum(columns, registers.sums, dim=2)


@macro
def store_scores(T, S, out, memory, registers, stage, first_key, thread):
    """A block's scores, times its keys' scales; -inf of keys that a token does not see.

    A warp's sums, of 16 keys, go by shared memory, so that each of its threads stores one and not four each of eight.
    """
    for i, j in T.Parallel(S.block_n, S.tile_tokens):
        memory.sums[j, i] = registers.sums[i, j]
    if S.serial:
        for j in T.serial(S.tile_tokens):
            for i in T.serial(S.block_n):
                store_score(T, S, out, memory, stage, first_key, i, j)
    else:
        T.sync_warp()
        group, lane = thread // GROUP, thread % WARP
        i = T.alloc_var(T.int32, init=thread % GROUP // WARP * _KEYS + lane % _KEYS)
        j = T.alloc_var(T.int32, init=lane // _KEYS)
        if S.groups_share_keys:
            j = j + group * S.own_tokens
        else:
            i = i + group * 64
        for turn in T.unroll(-(-S.own_tokens // 2)):
            if lane // _KEYS + 2 * turn < S.own_tokens:
                store_score(T, S, out, memory, stage, first_key, i, j + 2 * turn)


@macro
def store_score(T, S, out, memory, stage, first_key, i, j):
    if j < memory.told[_ROWS] and first_key + i < out.shape[1]:
        scale = memory.scales[stage, i // S.piece, i % S.piece]
        out[memory.told[_FIRST] + j, first_key + i] = T.if_then_else(
            first_key + i < memory.seen[j], memory.sums[j, i] * scale, -T.infinity(T.float32)
        )


@macro
def clean_rest(T, S, out, memory, launch, blocks, thread, threads):
    """-inf behind the last block of a tile, by all of its programs."""
    if launch.clean != 0:
        begin = T.alloc_var(T.int32, init=T.min(blocks * S.block_n, out.shape[1]) + launch.i_program * threads + thread)
        apart = T.alloc_var(T.int32, init=launch.num_programs * threads)
        for j in T.serial(memory.told[_ROWS]):
            for i in T.serial(T.truncdiv(T.max(out.shape[1] - begin, 0) + (apart - 1), apart)):
                out[memory.told[_FIRST] + j, begin + i * apart] = -T.infinity(T.float32)


@macro
def score_serially(T, S, inputs, out, memory, registers, launch, steps):
    """The steps of the roles, one after the other in one thread: for TileLang's C target, in tests."""
    block = T.alloc_shared((S.block_n, DIM), inputs.q.dtype)
    load_weights(T, S, inputs, memory, registers)
    for i, j in T.Parallel(S.rows, DIM):
        memory.q[i, j] = T.if_then_else(
            memory.told[_FIRST] * S.heads + i < inputs.q.shape[0], inputs.q[memory.told[_FIRST] * S.heads + i, j], 0
        )
    for step in T.serial(steps):
        for i in T.serial(S.block_n):
            key = T.alloc_var(T.int32, init=key_of(S, launch, step) + i)
            page = page_of(T, inputs, memory.told[_SEQUENCE], key)
            row = T.alloc_var(T.int32, init=T.truncmod(key, inputs.keys.shape[1]))
            there = page >= 0 and page < inputs.keys.shape[0]
            for j in T.serial(DIM):
                block[i, j] = T.if_then_else(there, inputs.keys[T.max(page, 0), row, j], 0)
            memory.scales[0, i // S.piece, i % S.piece] = T.if_then_else(there, inputs.scales[T.max(page, 0), row], 0)
        T.gemm(block, memory.q, registers.products, transpose_B=True, clear_accum=True)
        sum_heads(T, S, registers)
        store_scores(T, S, out, memory, registers, 0, key_of(S, launch, step), 0)
