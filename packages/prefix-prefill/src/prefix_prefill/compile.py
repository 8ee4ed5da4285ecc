"""Compile a layer's kernels before they are needed: ``python -m prefix_prefill.compile``.

It needs Triton and no GPU. Kernels go to Triton's cache, ``$TRITON_CACHE_DIR`` or ``~/.triton/cache``, where a process
with the same versions of Triton and of this package finds them, whatever its batches, lengths and tables are: a layer
needs four on sm_90, one that attends for decoding, two for prefill, and one that merges; elsewhere four, for decoding,
for drafts and for prompts one that attends, and one that merges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from kernel_reference.ahead import TARGETS, Call, Kernel, compile_calls
from prefix_prefill.arguments import PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.cascade.arguments import (
    CascadeLevel,
    CascadeNumbers,
    CascadeTensors,
    check_cascade,
    tensors_of_levels,
)
from prefix_prefill.plan import DeviceLimits, plan_prefill

Tensor = torch.Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# SMs and shared memory of GPUs that are not here.
LIMITS = {
    "sm_80": DeviceLimits(108, 166912),
    "sm_86": DeviceLimits(84, 101376),
    "sm_89": DeviceLimits(142, 101376),
    "sm_90": DeviceLimits(132, 232448, hopper=True),
    "sm_100": DeviceLimits(148, 232448),
    "sm_120": DeviceLimits(170, 101376),
    "gfx942": DeviceLimits(304, 65536),
}


@dataclass(frozen=True)
class Layer:
    """What the calls of a layer have in common, as ``prefix_prefill`` takes it. levels: of cascades, 0 for none."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page_size: int
    page_layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int = -1
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    new_kv: bool = False
    lse: bool = False
    drafts: bool = False
    skip_decode: bool = False
    scales: str = "number"
    quantize_q: bool = False
    levels: int = 0
    widen_bytes: int = 0


def calls_of(
    layer: Layer, limits: DeviceLimits, sequences: Sequence[int], capacities: Sequence[int], tokens: Sequence[int]
) -> Iterator[Call]:
    """Calls that ask for every kernel of a layer, over batches of so many sequences of so many new tokens."""
    for longest, count, capacity in product(tokens, sequences, capacities):
        name = f"{count} x {longest} new, tables for {capacity}"
        if layer.drafts and longest > 63:
            continue
        if layer.levels:
            yield f"cascade, {name}", _cascade(layer, limits, count, longest, capacity)
        else:
            yield name, _prefill(layer, limits, count, longest, capacity)


def _empty(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _caches(layer: Layer) -> tuple[Tensor, Tensor]:
    (_, heads), page, dtype, blocks = layer.heads, layer.page_size, layer.cache_dtype or layer.dtype, 64
    size, size_v = layer.head_dims
    if layer.page_layout == "x-packed":
        x = 16 // dtype.itemsize
        keys = _empty(blocks, heads, size // x, page, x, dtype=dtype)
        return keys, _empty(blocks, heads, size_v, page, dtype=dtype)
    if layer.page_layout == "HND":
        return _empty(blocks, heads, page, size, dtype=dtype), _empty(blocks, heads, page, size_v, dtype=dtype)
    return _empty(blocks, page, heads, size, dtype=dtype), _empty(blocks, page, heads, size_v, dtype=dtype)


def _lengths(layer: Layer, sequences: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, cu_seqlens_q and seqlens_k."""
    columns = max(capacity // max(layer.page_size, 1), 1)
    sizes: tuple[tuple[int, ...], ...] = ((sequences, columns), (sequences + 1,), (sequences,))
    table, cu, lengths = (_empty(*size, dtype=torch.int32) for size in sizes)
    return table, cu, lengths


def _rows(layer: Layer, rows: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """q, out, lse, sinks and the mask of drafts."""
    heads, (size, size_v) = layer.heads[0], layer.head_dims
    q, out = (_empty(rows, heads, each, dtype=layer.dtype) for each in (size, size_v))
    lse = _empty(heads, rows, dtype=torch.float32) if layer.lse else None
    sinks = _empty(heads, dtype=torch.float32) if layer.sinks else None
    return q, out, lse, sinks, _empty(rows, dtype=torch.int64) if layer.drafts else None


def _scales(layer: Layer) -> tuple[Tensor | None, Tensor | None]:
    shapes = {"tensor": (1,), "heads": (layer.heads[1],), "tokens": (64, layer.page_size, layer.heads[1])}
    if layer.scales not in shapes:
        return None, None
    first, second = (_empty(*shapes[layer.scales], dtype=torch.float32) for _ in range(2))
    return first, second


def _prefill(layer: Layer, limits: DeviceLimits, sequences: int, longest: int, capacity: int) -> Callable[[], object]:
    rows = sequences * longest
    q, out, lse, sinks, draft_mask = _rows(layer, rows)
    k, v = (_empty(rows, layer.heads[1], each, dtype=layer.dtype) if layer.new_kv else None for each in layer.head_dims)
    alibi = _empty(layer.heads[0], dtype=torch.float32) if layer.alibi else None
    tensors = PrefillTensors(
        q, k, v, *_caches(layer), *_lengths(layer, sequences, capacity), alibi, sinks, *_scales(layer), None, out, lse,
        draft_mask,
    )  # fmt: skip
    numbers = PrefillNumbers(
        longest, layer.page_layout, q.shape[2] ** -0.5, layer.window, 0, 30.0 * layer.softcap, layer.skip_decode, 1.0,
        1.0, 1.0, 0, quantize_q=layer.quantize_q, widen_bytes=layer.widen_bytes,
    )  # fmt: skip
    problem = check_prefill(tensors, numbers)

    def run() -> None:
        from prefix_prefill.launch import prepare_prefill

        prepare_prefill(problem, plan_prefill(problem, limits), tensors)(*tensors)

    return run


def _cascade(layer: Layer, limits: DeviceLimits, sequences: int, longest: int, capacity: int) -> Callable[[], object]:
    q, out, lse, sinks, draft_mask = _rows(layer, sequences * longest)
    groups = [1] * (layer.levels - 1) + [sequences]
    levels = tuple(CascadeLevel(*_caches(layer), *_lengths(layer, count, capacity)) for count in groups)
    tensors = CascadeTensors(q, levels, sinks, *_scales(layer), None, out, lse, draft_mask)
    softcap = 30.0 * layer.softcap
    numbers = CascadeNumbers(longest, layer.page_layout, q.shape[2] ** -0.5, softcap, 1.0, 1.0, 1.0, 0)
    problems = check_cascade(tensors, numbers)

    def run() -> None:
        from prefix_prefill.cascade.launch import prepare_cascade

        each = tensors_of_levels(tensors)
        prepare_cascade(problems, [plan_prefill(problem, limits) for problem in problems], each)(each)

    return run


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return int(first), int(second or first)


def _parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser("python -m prefix_prefill.compile", description=about, epilog=more)
    add = parser.add_argument
    add("--heads", type=_pair, default=(32, 8), metavar="Q,KV", help="of queries and of keys on one GPU (32,8)")
    add("--head-size", type=_pair, default=(128, 128), metavar="D[,DV]", help="of keys, and of values if another (128)")
    add("--page", type=int, default=16, help="tokens of a page (16)")
    add("--layout", choices=("NHD", "HND", "x-packed"), default="NHD")
    add("--dtype", choices=[*DTYPES], default="bfloat16")
    add("--cache", choices=[*FP8], help="an 8-bit cache")
    scales = ("number", "tensor", "heads", "tokens")
    add("--scales", choices=scales, default="number", help="k_scale and v_scale of the cache (number)")
    add("--quantize-q", action="store_true", help="queries rounded to 8 bits too")
    add("--widen-bytes", type=int, default=0, help="what a cache that is widened before may take (0)")
    add("--window", type=int, nargs="?", const=1024, default=0, help="a sliding window of so many tokens (1024)")
    add("--softcap", action="store_true", help="a soft cap, of any size")
    add("--sinks", action="store_true")
    add("--alibi", action="store_true")
    add("--new-kv", action="store_true", help="the new keys and values in tensors of their own, not in the cache")
    add("--lse", action="store_true", help="return_lse")
    add("--drafts", action="store_true", help="draft_mask")
    add("--skip-decode", action="store_true")
    add("--levels", type=int, default=0, help="cascade_attention over so many levels, in place of prefix_prefill")
    add("--sequences", type=int, nargs="+", default=[1, 16, 256], help="batch sizes")
    add("--capacity", type=int, nargs="+", default=[131072], help="keys that a block table has room for")
    add("--tokens", type=int, nargs="+", default=[1, 256, 2048], help="new tokens of a sequence: decoding, prefill")
    add("--target", choices=[*LIMITS], help="a GPU that is not here (the one that is)")
    add("--dry-run", action="store_true", help="say which kernels, and compile none")
    return parser


def _layer(options: argparse.Namespace) -> Layer:
    return Layer(
        options.heads, options.head_size, options.page, options.layout, DTYPES[options.dtype],
        FP8[options.cache] if options.cache else None, options.window - 1, options.softcap, options.sinks,
        options.alibi, options.new_kv, options.lse, options.drafts, options.skip_decode,
        options.scales if options.cache else "number", options.quantize_q, options.levels,
        options.widen_bytes,
    )  # fmt: skip


def _show(kernel: Kernel, number: int, count: int) -> None:
    """A line for the kernel, and under it, in a terminal, how far it all is."""
    seconds = f"{kernel.seconds:6.1f} s  " if kernel.seconds else ""
    if not sys.stdout.isatty():
        print(f"[{number}/{count}] {seconds}{kernel.name}: {kernel.call}")
        return
    width = 40
    done = width * number // count
    bar = "" if number == count else f"[{'#' * done}{'.' * (width - done)}] {number}/{count}"
    print(f"\r\033[K{seconds}{kernel.name}: {kernel.call}\n{bar}", end="", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    target = options.target
    if target is None:
        if not torch.cuda.is_available():
            parser.error(f"--target must be given where there is no GPU: one of {', '.join(TARGETS)}")
        from prefix_prefill.launch import device_limits

        limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    else:
        limits = LIMITS[target]
        if limits.hopper:
            from kernel_reference.launching import has_gluon
            from prefix_prefill.launch import takes_gaps

            limits = replace(limits, hopper=has_gluon(), gaps=takes_gaps())
    try:
        calls = [*calls_of(_layer(options), limits, options.sequences, options.capacity, options.tokens)]
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    kernels = compile_calls(calls, target, dry_run=options.dry_run, report=_show)
    print(f"{len(kernels)} kernels{' to compile' if options.dry_run else ''}")


if __name__ == "__main__":
    main()
