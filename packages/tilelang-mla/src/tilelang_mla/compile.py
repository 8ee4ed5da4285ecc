"""Build kernels before they are needed: ``python -m tilelang_mla.compile``.

It needs TileLang and nvcc but no GPU. Kernels go to TileLang's cache, ``$TILELANG_CACHE_DIR`` or ``~/.tilelang/cache``,
where a process on any machine with the same versions of TileLang and CUDA finds them. Without options it builds what
DeepSeek V2 and V3 need, as many kernels at a time as there are cores, up to 8; after that no call compiles, whatever
the batch, lengths, heads, pages, scale or plan.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tilelang_mla.gradients.plan import plan_backward
from tilelang_mla.indexer.plan import INDEX_HEADS, MOST_POSITIONS, IndexProblem, TopkProblem, plan_index_scores
from tilelang_mla.plan import (
    DecodeProblem,
    DecodeTiles,
    DeviceLimits,
    PrefillProblem,
    decode_tiles,
    plan_prefill,
    tiles_8bit,
)
from tilelang_mla.sparse.tiles import knows_parts, sparse_prefill_tiles

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# The kernels are for sm_90, whose blocks of keys do not depend on how many SMs there are.
_LIMITS = DeviceLimits(132)


def wanted(
    dtypes: list[str], latents: list[tuple[int, int]], heads: list[tuple[int, int]], parallel: bool = False,
    caches: Sequence[str] = (), sparse: bool = False, indexer: Sequence[int] = (),
    gradients: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Names and constants of the kernels for these dtypes, (latent, rope) of decoding and (q and k, v) of prefill.

    caches: formats of 8 bits. sparse: whether keys are listed too. indexer: numbers of its heads.
    gradients: whether prefill's are asked for too.
    """
    # Here, so that an error among the options need not wait for TileLang.
    from tilelang_mla.launch import decode_8bit_constants, decode_constants, prefill_constants
    from tilelang_mla.sparse.launch import prefill_sparse_constants

    for dtype in map(_DTYPES.__getitem__, dtypes):
        for dim_nope, dim_rope in latents:
            tiles, many = (decode_tiles(rows, dim_nope, dim_rope, None, _LIMITS) for rows in (1, 256))
            # Pages of whole blocks, of less that TMA brings in boxes, and others; many rows where these have their own.
            problem = DecodeProblem(1, dim_nope, dim_rope, 1, 1, 1, 1)
            pages = (tiles.block_n, *([16] if tiles.loads_boxes(replace(problem, page_size=16)) else []), 1)
            every = itertools.product((tiles, *([many] if many.early else [])), pages)
            for own, page_size in every:
                problem = replace(problem, page_size=page_size)
                yield "decode", decode_constants(problem, own, dtype)
                if parallel:
                    yield "decode", decode_constants(replace(problem, per_token=True), own, dtype)
            for cache in caches:
                if cache == "656" and (dtype, dim_nope, dim_rope) != (torch.bfloat16, 512, 64):
                    continue
                for problem, own in _tiles_8bit(dim_nope, dim_rope, cache):
                    yield "decode_8bit", decode_8bit_constants(problem, own, dtype)
            if sparse:
                yield from _of_lists(DecodeProblem(1, dim_nope, dim_rope, 1, 1, 1, 1), tiles, dtype)
                # Of prompts, whose heads may have no rope.
                for rope, rows in itertools.product(sorted({dim_rope, 0}, reverse=True), (16, 64)):
                    listed = DecodeProblem(rows, dim_nope, rope, 1, 1, 1, 1)
                    own = sparse_prefill_tiles(listed, _LIMITS)
                    yield "prefill_sparse", prefill_sparse_constants(listed, own, dtype)
                if (dtype, dim_nope, dim_rope) == (torch.bfloat16, 512, 64):
                    for problem, own in _tiles_8bit(dim_nope, dim_rope, "656"):
                        yield from _of_lists(problem, own, dtype)
        for dim_nope in sorted({dim_nope for dim_nope, _ in latents}):
            for sink in (False, True) if sparse else (False,):
                yield "merge", {"dim_nope": dim_nope, "dtype": dtype, **({"sink": True} if sink else {})}
            if parallel:
                yield "merge_ranks", {"dim_nope": dim_nope, "dtype": dtype}
        for head_dim, head_dim_v in heads:
            prompt = PrefillProblem(1, 1, head_dim, head_dim_v, 1, 1, 1)
            own_plan = plan_prefill(prompt, _LIMITS)
            yield "prefill", prefill_constants(prompt, own_plan, dtype)
            # Of few tiles.
            yield "prefill", prefill_constants(prompt, replace(own_plan, num_splits=2), dtype)
            yield "merge_ranks", {"dim_nope": head_dim_v, "dtype": dtype, "of_float32": True}
            if gradients:
                yield from wanted_of_gradients(prompt, dtype)
    yield from wanted_of_indexer(indexer)


def _of_lists(problem: DecodeProblem, tiles: DecodeTiles, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernels over lists: of any parts, of as many of each list, and of two that their programs merge."""
    from tilelang_mla.launch import sparse_constants

    joins = replace(tiles, num_splits=2, spare_parts=0).joins(problem)
    for known in ("", *(["even"] if knows_parts(tiles) else []), *(["joined"] if joins else [])):
        yield "decode_sparse", sparse_constants(problem, tiles, dtype, known)


def _tiles_8bit(dim_nope: int, dim_rope: int, cache: str) -> list[tuple[DecodeProblem, DecodeTiles]]:
    """Tiles over a cache of 8 bits, of few rows, of more, of a tile and of two, where these are others."""
    found: list[tuple[DecodeProblem, DecodeTiles]] = []
    for rows in (1, 32, 64, 128):
        problem = DecodeProblem(rows, dim_nope, dim_rope, 1, 1, 1, 1, cache=cache)
        tiles = tiles_8bit(problem, decode_tiles(rows, dim_nope, dim_rope, None, _LIMITS), _LIMITS)
        if tiles not in [other for _, other in found]:
            found.append((problem, tiles))
    return found


def wanted_of_indexer(heads: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and constants of the indexer's kernels for so many heads, any numbers of tokens, and pages of 64."""
    from tilelang_mla.indexer.launch import scores_constants, topk_constants

    for number in heads:
        # Tokens of a sequence fill a tile of 512 rows, or one of fewer.
        for each in (2**i for i in range((512 // number).bit_length())):
            problem = IndexProblem(number, each, 1, each, 64, 1, 64, 64, True)
            yield "index_scores", scores_constants(problem, plan_index_scores(problem, _LIMITS))
    for tokens in (1, 1 + _LIMITS.cores) if heads else ():
        for width in (1, MOST_POSITIONS):
            yield "index_topk", topk_constants(TopkProblem(tokens, width, 1, 1, 0), _LIMITS)


def wanted_of_gradients(prompt: PrefillProblem, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and constants of the kernels of gradients; none for heads that are too wide for them."""
    from tilelang_mla.gradients.launch import keys_constants, queries_constants

    if (plan := plan_backward(prompt, _LIMITS)) is not None:
        yield "delta", {"head_dim_v": prompt.head_dim_v, "dtype": dtype}
        yield "backward_of_keys", keys_constants(prompt, plan, dtype)
        yield "backward_of_queries", queries_constants(prompt, plan, dtype)


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split(",")
    return int(first), int(second)


def _build(wanted: tuple[str, dict[str, Any]]) -> str:
    """Build one kernel; what is to be printed of it."""
    from tilelang_mla import launch

    name, constants = wanted
    start = time.perf_counter()
    launch.kernel(name, **constants)
    values = " ".join(f"{key}={value}" for key, value in constants.items())
    return f"{time.perf_counter() - start:6.1f} s  {name} {values}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m tilelang_mla.compile", description=__doc__)
    parser.add_argument("--dtype", nargs="+", choices=[*_DTYPES], default=[*_DTYPES])
    parser.add_argument("--decode", nargs="*", type=_pair, default=[(512, 64)], metavar="LATENT,ROPE")
    parser.add_argument("--prefill", nargs="*", type=_pair, default=[(192, 128)], metavar="QK,V")
    parser.add_argument("--parallel", action="store_true", help="what decoding on several GPUs asks for, too")
    parser.add_argument("--cache", nargs="*", choices=("e4m3", "656"), default=[], help="caches of 8 bits, too")
    parser.add_argument("--sparse", action="store_true", help="attention to listed keys, too")
    parser.add_argument("--indexer", nargs="*", type=int, choices=INDEX_HEADS, default=[], help="of so many heads, too")
    parser.add_argument("--gradients", action="store_true", help="gradients of prefill, too")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=min(cores, 8), metavar="N", help="kernels at a time, %(default)s here"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, got {options.jobs}")
    found = wanted(
        options.dtype, options.decode, options.prefill, options.parallel, options.cache, options.sparse,
        options.indexer, options.gradients,
    )  # fmt: skip
    # TileLang lowers kernels without Python's lock.
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(_build, found):
            print(line, flush=True)


if __name__ == "__main__":
    main()
