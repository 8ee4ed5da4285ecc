"""The kernels in TileLang's C target, one thread in float32: indices, masks, pages, parts and clamps without a GPU.

TileLang's language is mapped to what its C target has: no races, no TMA, no rounding to 16 bits, and no roles, whose
steps follow each other in one loop. It is slow: for tests and the demo.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import tilelang
import tilelang.language as tl
from tilelang.cpu.language import Kernel
from tilelang.utils.language import to_buffer_region

from tilelang_mla.kernels.passes import fewer_passes

# Imported when one is asked for: TileLang rewrites a module's functions as it is imported, in tenths of a second.
_BUILDERS = {
    "decode": "decode:attend", "decode_8bit": "decode:attend_8bit", "decode_sparse": "decode:attend_sparse",
    "merge": "merge:merge", "merge_ranks": "ranks:merge_ranks", "prefill": "prefill:attend",
    "prefill_sparse": "decode:attend_sparse_prefill",
    "index_scores": "indexer:score", "index_topk": "indexer:select", "delta": "backward:delta",
    "backward_of_keys": "backward:of_keys", "backward_of_queries": "backward:of_queries",
}  # fmt: skip


@lru_cache
def kernel(name: str, **constants: Any) -> Any:
    """A compiled kernel, which takes contiguous tensors: float32, or int32 where they hold bits or integers."""
    dtype = tl.int32 if name == "index_topk" else tl.float32
    module, _, builder = _BUILDERS[name].partition(":")
    build = getattr(import_module(f"tilelang_mla.kernels.{module}"), builder)
    text = build(Language(), dtype=dtype, serial=True, **constants)
    # With the earlier solver of ``quick_proofs`` TileLang stops at some, by a check of its own.
    with fewer_passes(in_c=True):
        return tilelang.compile(text, target="c", execution_backend="cython")


@tl.macro
def _product(a, b, c, first, rows, columns, depth, transposed, clear):
    for i, j in tl.grid(rows, columns):
        if clear:
            c[i, j] = 0
        for k in tl.serial(depth):
            if transposed:
                c[i, j] = c[i, j] + a[i, k] * b[*first, j, k]
            else:
                c[i, j] = c[i, j] + a[i, k] * b[*first, k, j]


@tl.macro
def _add(buffer, i, value):
    before = tl.alloc_var(tl.int32, init=buffer[i])
    buffer[i] = before + value
    return before


class Language:
    """One thread, with local arrays for shared memory and fragments."""

    bfloat16 = float16 = float8_e4m3fn = tl.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def alloc_shared(shape, dtype):
        return tl.alloc_local(shape, dtype)

    alloc_fragment = alloc_shared

    @staticmethod
    def StridedTensor(shape, strides, dtype):
        # The C target's wrapper passes no strides.
        return tl.Tensor(shape, dtype)

    @staticmethod
    def Parallel(*extents, **_):
        return tl.serial(extents[0]) if len(extents) == 1 else tl.grid(*extents)

    @staticmethod
    def Kernel(*blocks, threads):
        return Kernel(*blocks)

    @staticmethod
    def gemm(a, b, c, transpose_B=False, clear_accum=False):
        region = to_buffer_region(b)
        first = [part.min for part in region.region[:-2]]
        return _product(a, region.buffer, c, first, *c.shape, a.shape[1], transpose_B, clear_accum)

    @staticmethod
    def abs(number):
        return tl.if_then_else(number < 0, -number, number)

    @staticmethod
    def atomic_add(place, value, return_prev=False):
        return _add(place.buffer, place.indices[0], value)

    @staticmethod
    def get_thread_binding():
        return 0

    @staticmethod
    def sync_threads(*_):
        return None

    @staticmethod
    def assume(_):
        return None
