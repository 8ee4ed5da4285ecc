"""The prefill kernel: its tensors, its memory, and which threads have which role.

A persistent kernel: a program takes one tile after the other, each of ``block_m`` queries of one head of one sequence.
A consumer warpgroup for each 64 of them issues WGMMA: the scores of a block while the weights of the one before meet
their values. A producer warp finds the tiles, and issues TMA loads of their q and of keys and values, ring buffers of
``num_stages`` blocks each; the first keys of a tile are loaded while the tile before is being finished. Numbers of
tokens, sequences and heads, lengths and scale are not specialised on.
"""

from pathlib import Path
from typing import Any

from tilelang_mla.kernels.common import GROUP, ROWS, WARP
from tilelang_mla.kernels.prefill.groups import (
    Barriers,
    Inputs,
    Launch,
    Memory,
    Sizes,
    alloc_barriers,
    alloc_memory,
    alloc_softmax,
)
from tilelang_mla.kernels.prefill.roles import consume, produce
from tilelang_mla.kernels.prefill.serial import attend_serially
from tilelang_mla.kernels.softmax import COLUMNS, Softmax, owner_of_sum

TEXT = Path(__file__).with_name("stores.cuh").read_text()
# Registers of a consumer's thread, by the number of consumer warpgroups, and of the producer's.
_CONSUMER, _PRODUCER = {1: 240, 2: 224}, 56


def attend(
    T: Any, *, head_dim: int, head_dim_v: int, dtype: Any, block_m: int, block_n: int, num_stages: int,
    serial: bool = False, in_parts: bool = False,
) -> Any:  # fmt: skip
    """The kernel. ``scale`` is that of a softmax of powers of two, and above 0; groups.py tells of ``in_parts``."""
    S = Sizes(head_dim, head_dim_v, dtype, block_m, block_n, num_stages, in_parts)
    tokens, heads, tokens_k, heads_kv, bounds = (
        T.dynamic(name) for name in ("tokens", "heads", "tokens_k", "heads_kv", "bounds")
    )
    q_token, q_head, k_token, k_head = (T.dynamic(name) for name in ("q_token", "q_head", "k_token", "k_head"))
    v_token, v_head, out_token, out_head = (T.dynamic(name) for name in ("v_token", "v_head", "out_token", "out_head"))
    lse_heads, lse_tokens = T.dynamic("lse_heads"), T.dynamic("lse_tokens")
    out_heads, out_dtype = (T.dynamic("out_heads"), T.float32) if in_parts else (heads, dtype)
    s_lse_head, s_lse_token = T.dynamic("s_lse_head"), T.dynamic("s_lse_token")

    @T.prim_func
    def attend_prefill(
        q: T.StridedTensor((tokens, heads, head_dim), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((tokens_k, heads_kv, head_dim), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((tokens_k, heads_kv, head_dim_v), (v_token, v_head, 1), dtype),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        cu_seqlens_k: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((tokens, out_heads, head_dim_v), (out_token, out_head, 1), out_dtype),
        lse: T.StridedTensor((lse_heads, lse_tokens), (s_lse_head, s_lse_token), T.float32),
        taken: T.Tensor((1,), T.int32),
        scale: T.float32,
        causal: T.int32,
        num_slots: T.int32,
        wants_lse: T.int32,
        num_programs: T.int32,
        heads_each: T.int32,
    ):
        options = {"threads": 1} if serial else {"threads": S.consumers + GROUP, "prelude": TEXT}
        with T.Kernel(num_programs, **options) as i_program:
            # As launch.py prepares them: rows may be written in vectors of 16 bytes.
            T.assume(out_token % 8 == 0)
            T.assume(out_head % 8 == 0)
            memory = Memory(*alloc_memory(T, S))
            s = Softmax(*alloc_softmax(T, S))
            acc = T.alloc_fragment((block_m, head_dim_v), T.float32)
            if not serial:
                T.annotate_layout({s.partial_sum: T.Fragment((block_m, COLUMNS), forward_fn=owner_of_sum)})
            thread = T.get_thread_binding()
            tiles = T.alloc_var(T.int32, init=num_slots * out_heads)
            inputs = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
            launch = Launch(scale, causal, wants_lse, num_slots, tiles, taken, i_program, num_programs, heads_each)
            if in_parts:
                launch = launch._replace(num_parts=T.truncdiv(out_heads, heads))
            if serial:
                attend_serially(T, S, launch, inputs, memory, s, acc, out, lse)
            else:
                barriers = Barriers(*alloc_barriers(T, S))
                if thread >= S.consumers:
                    T.set_max_nreg(_PRODUCER, 0)
                    if thread - S.consumers < WARP:
                        produce(T, S, launch, inputs, memory, barriers, thread - S.consumers)
                else:
                    T.set_max_nreg(_CONSUMER[block_m // ROWS], 1)
                    consume(T, S, launch, memory, barriers, s, acc, out, lse, thread % WARP)

    return attend_prefill
