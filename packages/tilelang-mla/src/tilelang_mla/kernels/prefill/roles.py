"""The producer warp and the consumer warpgroups of prefill.

Barriers and the rings go on from tile to tile: ``done`` are the blocks of those before. Keys are walked from the last a
tile sees to the first: tiles of a head that begin at once then have other keys at a time, and find in L2 what the one
ahead has brought. From the first one on 512 tokens of 32 heads behind 8192 took 170 us for 148 on an H100, 148 for 127
with one kv head, of which all lie in L2.
"""

from tilelang_mla.kernels.common import FLOOR, WARP, macro, number_of_sum, row_owners
from tilelang_mla.kernels.prefill.groups import (
    HEAD,
    KEYS,
    ROW,
    ROWS_HERE,
    STEPS,
    UNMASKED,
    Progress,
    Tile,
    tell,
)
from tilelang_mla.kernels.prefill.schedule import FIRST, NEXT, cut_tile, note_if, owner, slot_of, tile_of
from tilelang_mla.kernels.softmax import (
    any_moved,
    exponentiate,
    invert_sums,
    mask,
    natural_lse,
    raise_max,
    scale_rows,
    zero_tail,
)

# The named barrier of the consumers; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
_OF_CONSUMERS = 5
# A program asks for its next tile early if it has so many blocks or fewer to load, so that the answer is there in time;
# else behind its last load, while the consumers still have two blocks to multiply. Asked for a whole tile ahead, tiles
# of one head would run at times of their own, and its keys come from memory for each: slots that are nobody's are
# passed at once, and what they asked for then starts long before what programs with a tile hold.
_SHORT = 2


@macro
def produce(T, S, launch, inputs, memory, barriers, lane):
    """A warp's: finds the tiles and loads what they need; behind the last it tells that there is none."""
    found = memory.found
    own_begin, own_end, own_begin_k, own_end_k, own_until = owner(T, S, inputs, lane, launch.num_slots)
    done = T.alloc_var(T.int32, init=0)
    turn = T.alloc_var(T.int32, init=0)
    i_tile = T.alloc_var(T.int32, init=launch.i_program)
    upcoming = T.alloc_var(T.int32, init=launch.tiles)
    if lane == 0:
        found[FIRST] = -1
    T.sync_warp()
    while i_tile < launch.tiles:
        i_head, slot = slot_of(T, launch, i_tile)
        note_if(T, S, found, slot, lane, own_begin, own_end, own_begin_k, own_end_k, own_until)
        for i in T.unroll(T.truncdiv(inputs.cu_seqlens_q.shape[0], WARP), unroll_factor=1):
            i_other = (i + 1) * WARP + lane
            begin, end, begin_k, end_k, until = owner(T, S, inputs, i_other, launch.num_slots)
            note_if(T, S, found, slot, i_other, begin, end, begin_k, end_k, until)
        T.sync_warp()
        first_row, rows, num_keys, unmasked, steps, k_begin = tile_of(T, S, found, inputs.k.shape[0], launch.causal)
        # Programs that are as many as tiles ask for none.
        asks = T.alloc_var(T.int32, init=0)
        if lane == 0 and launch.num_programs < launch.tiles:
            asks = 1
        if asks != 0 and steps <= _SHORT:
            upcoming = launch.num_programs + T.atomic_add(launch.taken[0], 1, return_prev=True)
        if rows > 0:
            tile = Tile(i_head, first_row, rows, num_keys, unmasked, steps)
            if S.in_parts:
                head, own_keys, own_unmasked, own_steps, own_begin_k = cut_tile(T, S, launch.num_parts, tile, k_begin)
                tile = Tile(i_head, first_row, rows, own_keys, own_unmasked, own_steps)
                load_tile(T, S, inputs, memory, barriers, tile, head, own_begin_k, Progress(done, turn), lane)
                done = done + own_steps
            else:
                load_tile(T, S, inputs, memory, barriers, tile, i_head, k_begin, Progress(done, turn), lane)
                done = done + steps
            turn = turn + 1
        if asks != 0 and steps > _SHORT:
            upcoming = launch.num_programs + T.atomic_add(launch.taken[0], 1, return_prev=True)
        # What was found has been read by all.
        T.sync_warp()
        if lane == 0:
            found[FIRST] = -1
            found[NEXT] = upcoming
        T.sync_warp()
        i_tile = found[NEXT]
    T.barrier_wait(barriers.q_empty, turn % 2 ^ 1)
    tell(memory.told, lane, 0, 0, 0, 0, 0, -1)
    arrive(T, barriers.q_full, 0, lane)


@macro
def load_tile(T, S, inputs, memory, barriers, tile, head, k_begin, past, lane):
    """A tile's q, keys and values, of a head of the queries."""
    q, v = inputs.q, inputs.v
    group = T.truncdiv(q.shape[1], v.shape[1])
    i_head_kv = T.alloc_var(T.int32, init=T.truncdiv(head, group))
    for step in T.serial(tile.steps):
        if step == 0:
            last_row = k_begin + (tile.steps - 1) * S.block_n
            load_keys(T, S, inputs.k, memory, barriers, past.done, last_row, i_head_kv, lane)
            # Behind the first keys, which the tile before does not keep from coming.
            T.barrier_wait(barriers.q_empty, past.turn % 2 ^ 1)
            T.tma_copy(
                q[tile.first_row : tile.first_row + S.block_m, head, 0 : S.head_dim], memory.q,
                barrier=barriers.q_full,
            )  # fmt: skip
            tell(memory.told, lane, *tile)
            arrive(T, barriers.q_full, 0, lane)
        # Keys go ahead of values: they are free a product earlier.
        if step + 1 < tile.steps:
            next_row = k_begin + (tile.steps - 2 - step) * S.block_n
            load_keys(T, S, inputs.k, memory, barriers, past.done + step + 1, next_row, i_head_kv, lane)
        stage = (past.done + step) % S.num_stages
        row = T.alloc_var(T.int32, init=k_begin + (tile.steps - 1 - step) * S.block_n)
        T.barrier_wait(barriers.v_empty[stage], (past.done + step) // S.num_stages % 2 ^ 1)
        T.tma_copy(
            v[row : row + S.block_n, i_head_kv, 0 : S.head_dim_v], memory.v[stage, :, :],
            barrier=barriers.v_full[stage],
        )  # fmt: skip
        arrive(T, barriers.v_full, stage, lane)
    if tile.steps == 0:
        T.barrier_wait(barriers.q_empty, past.turn % 2 ^ 1)
        tell(memory.told, lane, *tile)
        arrive(T, barriers.q_full, 0, lane)


@macro
def load_keys(T, S, k, memory, barriers, i_block, row, i_head_kv, lane):
    stage = i_block % S.num_stages
    T.barrier_wait(barriers.k_empty[stage], i_block // S.num_stages % 2 ^ 1)
    T.tma_copy(
        k[row : row + S.block_n, i_head_kv, 0 : S.head_dim], memory.k[stage, :, :], barrier=barriers.k_full[stage]
    )
    arrive(T, barriers.k_full, stage, lane)


@macro
def consume(T, S, launch, memory, barriers, s, acc, out, lse, lane):
    """Each consumer warpgroup multiplies its own rows of the tiles that it is told of."""
    told = memory.told
    own = T.alloc_local((acc.shape[1] // 2,), T.float32)
    done = T.alloc_var(T.int32, init=0)
    turn = T.alloc_var(T.int32, init=0)
    T.barrier_wait(barriers.q_full, 0)
    steps = T.alloc_var(T.int32, init=told[STEPS])
    while steps >= 0:
        i_head = T.alloc_var(T.int32, init=told[HEAD])
        first_row = T.alloc_var(T.int32, init=told[ROW])
        rows = T.alloc_var(T.int32, init=told[ROWS_HERE])
        num_keys = T.alloc_var(T.int32, init=told[KEYS])
        unmasked = T.alloc_var(T.int32, init=told[UNMASKED])
        begin_rows(T, s, acc, unmasked, num_keys, launch.causal)
        # A loop of one step at most: an `if` would be put round each product by itself.
        for _ in T.serial(T.min(steps, 1)):
            stage = done % S.num_stages
            T.barrier_wait(barriers.k_full[stage], done // S.num_stages % 2)
            multiply_keys(T, memory, s, stage)
            T.wait_wgmma(0)
            arrive(T, barriers.k_empty, stage, lane)
            mask(T, s, (steps - 1) * S.block_n, unmasked)
            raise_max(T, s, launch.scale)
            exponentiate(T, s, launch.scale)
            if steps * S.block_n > num_keys:
                T.barrier_wait(barriers.v_full[stage], done // S.num_stages % 2)
                zero_tail(T, memory.v, stage, (steps - 1) * S.block_n, num_keys)
                T.fence_proxy_async()
                T.sync_threads(_OF_CONSUMERS, S.consumers)
        for step in T.serial(steps - 1):
            stage = (done + step) % S.num_stages
            after = (done + step + 1) % S.num_stages
            T.barrier_wait(barriers.k_full[after], (done + step + 1) // S.num_stages % 2)
            multiply_keys(T, memory, s, after)
            T.barrier_wait(barriers.v_full[stage], (done + step) // S.num_stages % 2)
            T.wgmma_gemm(s.weights, memory.v[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
            T.wait_wgmma(1)
            arrive(T, barriers.k_empty, after, lane)
            mask(T, s, (steps - 2 - step) * S.block_n, unmasked)
            raise_max(T, s, launch.scale)
            rescale(T, acc, s)
            arrive(T, barriers.v_empty, stage, lane)
            exponentiate(T, s, launch.scale)
        T.barrier_arrive(barriers.q_empty)
        for _ in T.serial(T.min(steps, 1)):
            last = done + steps - 1
            stage = last % S.num_stages
            T.barrier_wait(barriers.v_full[stage], last // S.num_stages % 2)
            T.wgmma_gemm(s.weights, memory.v[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
            T.wait_wgmma(0)
            arrive(T, barriers.v_empty, stage, lane)
        done = done + steps
        finish_rows(T, s, acc)
        if launch.wants_lse != 0:
            store_lse(T, lse, s, i_head, first_row, rows)
        if S.in_parts:
            store_rows(T, out, acc, i_head, first_row, rows)
        else:
            store_lines(T, S, out, acc, own, i_head, first_row, rows)
        turn = turn + 1
        T.barrier_wait(barriers.q_full, turn % 2)
        steps = told[STEPS]


@macro
def begin_rows(T, s, acc, unmasked, num_keys, causal):
    T.clear(acc)
    T.clear(s.partial_sum)
    T.fill(s.running_max, FLOOR)
    for i in T.Parallel(acc.shape[0]):
        s.limit[i] = T.min(unmasked + i * causal, num_keys)


@macro
def multiply_keys(T, memory, s, stage):
    T.wgmma_gemm(
        memory.q, memory.k[stage, :, :], s.scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
    )


@macro
def rescale(T, acc, s):
    """Rescale rows, but for warps whose rows all kept their maximum, and wait for the WGMMA that sums them.

    ptxas moves a wait for WGMMA up to the last branch: this one, which depends on the maximum, keeps it behind it.
    """
    if any_moved(T, s.rescale):
        T.wait_wgmma(0)
        scale_rows(T, acc, s.rescale)
    T.wait_wgmma(0)


@macro
def finish_rows(T, s, acc):
    T.reduce_sum(s.partial_sum, s.row_sum, dim=1)
    invert_sums(T, s)
    scale_rows(T, acc, s.rescale)


@macro
def store_lse(T, lse, s, i_head, first_row, rows):
    for i in T.Parallel(s.row_sum.shape[0], loop_layout=row_owners(T, s.row_sum.shape[0])):
        if i < rows:
            lse[i_head, first_row + i] = natural_lse(T, s, i)


@macro
def assume_tile(T, out, i_head, first_row, rows):
    """Where a tile lies, as the scheduler sees to it: asked about by each store it took 4 to 5 % of 8 x 1024 tokens."""
    T.assume(i_head >= 0)
    T.assume(i_head < out.shape[1])
    T.assume(first_row >= 0)
    T.assume(first_row + rows <= out.shape[0])


@macro
def store_rows(T, out, acc, i_head, first_row, rows):
    """Rows of a tile."""
    assume_tile(T, out, i_head, first_row, rows)
    for i, j in T.Parallel(*acc.shape):
        if i < rows:
            out[first_row + i, i_head, j] = acc[i, j]


@macro
def store_lines(T, S, out, acc, own, i_head, first_row, rows):
    """Rows of a tile of 16 bits, by stores.cuh."""
    assume_tile(T, out, i_head, first_row, rows)
    for i, j in T.Parallel(*acc.shape):
        T.call_extern("handle", "mla::tiles::keep", T.access_ptr(own[0], "rw"), number_of_sum(i, j), acc[i, j])
    T.call_extern(
        "handle", f"mla::tiles::store_rows<{S.head_dim_v}, {str(S.dtype == T.bfloat16).lower()}>",
        T.access_ptr(own[0], "r"), T.access_ptr(out[first_row, i_head, 0], "w"), out.strides[0], rows,
        T.get_thread_binding(),
    )  # fmt: skip


@macro
def arrive(T, barrier, i, lane):
    """One arrival of a warp, for all that its threads have read or written."""
    T.sync_warp()
    if lane == 0:
        T.barrier_arrive(barrier[i])
