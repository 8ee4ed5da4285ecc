"""Build kernels before they are needed: ``python -m tilelang_mla.compile``.

It needs TileLang and nvcc but no GPU. Kernels go to TileLang's cache, ``$TILELANG_CACHE_DIR`` or ``~/.tilelang/cache``,
where a process on any machine with the same versions of TileLang and CUDA finds them. Without options it builds what
DeepSeek V2 and V3 need; after that no call compiles, whatever the batch, lengths, heads, pages, scale or plan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

from tilelang_mla.plan import DeviceLimits, PrefillProblem, decode_tiles, plan_prefill

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# The kernels are for sm_90, whose blocks of keys do not depend on how many multiprocessors there are.
_LIMITS = DeviceLimits(132)


def wanted(
    dtypes: list[str], latents: list[tuple[int, int]], heads: list[tuple[int, int]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and constants of the kernels for these dtypes, (latent, rope) of decoding and (q and k, v) of prefill."""
    for dtype in map(_DTYPES.__getitem__, dtypes):
        for dim_nope, dim_rope in latents:
            tiles = decode_tiles(1, dim_nope, dim_rope, None, _LIMITS)
            for gather in (False, True):
                yield "decode", {
                    "dim_nope": dim_nope, "dim_rope": dim_rope, "dtype": dtype, "block_n": tiles.block_n,
                    "num_stages": tiles.num_stages, "gather": gather,
                }  # fmt: skip
        for dim_nope in sorted({dim_nope for dim_nope, _ in latents}):
            yield "merge", {"dim_nope": dim_nope, "dtype": dtype}
        for head_size, head_size_v in heads:
            plan = plan_prefill(PrefillProblem(1, 1, head_size, head_size_v, 1, 1, 1), _LIMITS)
            yield "prefill", {
                "head_size": head_size, "head_size_v": head_size_v, "dtype": dtype, "block_m": plan.block_m,
                "block_n": plan.block_n, "num_stages": plan.num_stages,
            }  # fmt: skip


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split(",")
    return int(first), int(second)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m tilelang_mla.compile", description=__doc__)
    parser.add_argument("--dtype", nargs="+", choices=[*_DTYPES], default=[*_DTYPES])
    parser.add_argument("--decode", nargs="*", type=_pair, default=[(512, 64)], metavar="LATENT,ROPE")
    parser.add_argument("--prefill", nargs="*", type=_pair, default=[(192, 128)], metavar="QK,V")
    options = parser.parse_args()
    # After the options: an error among them need not wait for TileLang.
    from tilelang_mla import launch

    for name, constants in wanted(options.dtype, options.decode, options.prefill):
        start = time.perf_counter()
        launch.kernel(name, **constants)
        print(f"{time.perf_counter() - start:6.1f} s  {name}", *(f"{key}={value}" for key, value in constants.items()))


if __name__ == "__main__":
    main()
