"""The kernels of gradients: their tensors, their memory, and which threads have which role.

A program has one tile, of ``block_m`` rows of one head of one sequence, and nobody else adds to its rows: results are
the same bits each time. A consumer warpgroup for each 64 rows issues WGMMA; a producer warp issues TMA loads. Numbers
of tokens, sequences and heads, lengths and scale are not specialised on.
"""

from typing import Any

from tilelang_mla.kernels.backward.groups import (
    FIRST,
    Barriers,
    Inputs,
    Launch,
    Memory,
    Registers,
    Sizes,
    Tile,
    alloc_barriers,
    alloc_memory,
    alloc_registers,
)
from tilelang_mla.kernels.backward.roles import consume, produce, store_rows
from tilelang_mla.kernels.backward.schedule import find_slot, tile_of
from tilelang_mla.kernels.backward.serial import walk_serially
from tilelang_mla.kernels.common import GROUP, WARP, macro

# Registers of a consumer's thread and of the producer's.
_CONSUMER, _PRODUCER = 240, 24


def of_keys(
    T: Any, *, head_dim: int, head_dim_v: int, dtype: Any, block_m: int, block_n: int, num_stages: int,
    serial: bool = False,
) -> Any:  # fmt: skip
    """The kernel of the gradients of k and v. ``scale`` is that of a softmax of powers of two, and above 0."""
    S = Sizes(head_dim, head_dim_v, dtype, block_m, block_n, num_stages, of_keys=True)
    # A macro that gives a dynamic size a name of its own renames it: prefill's calls own rows tokens.
    tokens_q, heads, tokens, heads_kv, bounds = (
        T.dynamic(name) for name in ("tokens_q", "heads", "tokens", "heads_kv", "bounds")
    )
    q_token, q_head, k_token, k_head = (T.dynamic(name) for name in ("q_token", "q_head", "k_token", "k_head"))
    v_token, v_head = T.dynamic("v_token"), T.dynamic("v_head")

    @T.prim_func
    def backward_of_keys(
        q: T.StridedTensor((tokens_q, heads, head_dim), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((tokens, heads_kv, head_dim), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((tokens, heads_kv, head_dim_v), (v_token, v_head, 1), dtype),
        d_out: T.Tensor((tokens_q, heads, head_dim_v), dtype),
        lse: T.Tensor((heads, tokens_q), T.float32),
        delta: T.Tensor((heads, tokens_q), T.float32),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        cu_seqlens_k: T.Tensor((bounds,), T.int32),
        d_k: T.Tensor((tokens, heads_kv, head_dim), dtype),
        d_v: T.Tensor((tokens, heads_kv, head_dim_v), dtype),
        scale: T.float32,
        grad_scale: T.float32,
        causal: T.int32,
        num_slots: T.int32,
    ):
        with T.Kernel(num_slots * heads_kv, threads=1 if serial else S.consumers + GROUP) as i_program:
            inputs = Inputs(q, k, v, d_out, lse, delta, cu_seqlens_q, cu_seqlens_k)
            launch = Launch(scale, grad_scale, causal, num_slots)
            acc = T.alloc_fragment((block_m, head_dim), T.float32)
            acc_v = T.alloc_fragment((block_m, head_dim_v), T.float32)
            run_roles(T, S, serial, launch, inputs, (d_k, d_v), acc, acc_v, i_program)

    return backward_of_keys


def of_queries(
    T: Any, *, head_dim: int, head_dim_v: int, dtype: Any, block_m: int, block_n: int, num_stages: int,
    serial: bool = False,
) -> Any:  # fmt: skip
    """The kernel of the gradient of q."""
    S = Sizes(head_dim, head_dim_v, dtype, block_m, block_n, num_stages)
    tokens, heads, tokens_k, heads_kv, bounds = (
        T.dynamic(name) for name in ("tokens", "heads", "tokens_k", "heads_kv", "bounds")
    )
    q_token, q_head, k_token, k_head = (T.dynamic(name) for name in ("q_token", "q_head", "k_token", "k_head"))
    v_token, v_head = T.dynamic("v_token"), T.dynamic("v_head")

    @T.prim_func
    def backward_of_queries(
        q: T.StridedTensor((tokens, heads, head_dim), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((tokens_k, heads_kv, head_dim), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((tokens_k, heads_kv, head_dim_v), (v_token, v_head, 1), dtype),
        d_out: T.Tensor((tokens, heads, head_dim_v), dtype),
        lse: T.Tensor((heads, tokens), T.float32),
        delta: T.Tensor((heads, tokens), T.float32),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        cu_seqlens_k: T.Tensor((bounds,), T.int32),
        d_q: T.Tensor((tokens, heads, head_dim), dtype),
        scale: T.float32,
        grad_scale: T.float32,
        causal: T.int32,
        num_slots: T.int32,
    ):
        with T.Kernel(num_slots * heads, threads=1 if serial else S.consumers + GROUP) as i_program:
            inputs = Inputs(q, k, v, d_out, lse, delta, cu_seqlens_q, cu_seqlens_k)
            launch = Launch(scale, grad_scale, causal, num_slots)
            acc = T.alloc_fragment((block_m, head_dim), T.float32)
            run_roles(T, S, serial, launch, inputs, (d_q,), acc, None, i_program)

    return backward_of_queries


@macro
def run_roles(T, S, serial, launch, inputs, results, acc, acc_v, i_program):
    """What a program does, in shared memory and with barriers of its own."""
    memory = Memory(*alloc_memory(T, S))
    r = Registers(*alloc_registers(T, S))
    thread = T.get_thread_binding()
    i_head = T.alloc_var(T.int32, init=T.truncdiv(i_program, launch.num_slots))
    slot = T.alloc_var(T.int32, init=i_program - i_head * launch.num_slots)
    if not S.of_keys:
        # Later queries see more, and start first; so do earlier keys, which more queries see.
        slot = launch.num_slots - 1 - slot
    if thread == 0:
        memory.found[FIRST] = -1
    if serial:
        find_slot(T, S, launch, inputs, memory.found, slot, 0, 1)
        tile = Tile(*tile_of(T, S, launch, inputs, memory.found, i_head))
        if tile.rows > 0:
            walk_serially(T, S, launch, inputs, memory, r, acc, acc_v, tile)
            store(T, S, launch, results, acc, acc_v, tile)
    else:
        barriers = Barriers(*alloc_barriers(T, S))
        T.sync_threads()
        find_slot(T, S, launch, inputs, memory.found, slot, thread, S.consumers + GROUP)
        T.sync_threads()
        tile = Tile(*tile_of(T, S, launch, inputs, memory.found, i_head))
        if thread >= S.consumers:
            T.set_max_nreg(_PRODUCER, 0)
            if thread - S.consumers < WARP and tile.rows > 0:
                produce(T, S, inputs, memory, barriers, tile, thread - S.consumers)
        else:
            T.set_max_nreg(_CONSUMER, 1)
            if tile.rows > 0:
                consume(T, S, launch, inputs, memory, barriers, r, acc, acc_v, tile, thread)
                store(T, S, launch, results, acc, acc_v, tile)


@macro
def store(T, S, launch, results, acc, acc_v, tile):
    store_rows(T, results[0], acc, launch.grad_scale, tile)
    if S.of_keys:
        store_rows(T, results[1], acc_v, 1.0, tile)
