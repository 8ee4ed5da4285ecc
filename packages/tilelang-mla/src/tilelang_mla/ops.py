"""The torch ops: schemas, fake implementations, the CPU implementations.

=======  =============================================================================
prefill  writes the outputs, and the logarithms of the sums, that it is given; ragged
decode   the same over a paged latent cache
=======  =============================================================================

Every implementation, the fake one included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from kernel_reference.attention import attention
from kernel_reference.checks import MemoryOverlap, check_no_overlap, fail, values_are_checked
from kernel_reference.paging import gather
from tilelang_mla import arguments
from tilelang_mla.plan import DecodeProblem, DecodeTiles, PrefillPlan, PrefillProblem

Tensor = torch.Tensor

_library = torch.library.Library("tilelang_mla", "DEF")
_library.define(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor(a!) out, Tensor(b!)? lse,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "decode(Tensor q, Tensor kv, Tensor cache_seqlens, Tensor block_table, Tensor? first_part, Tensor? order,"
    " Tensor(a!) out, Tensor(b!)? lse, int dim_nope, float softmax_scale, bool causal, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# Below, the tensors come first, then the numbers; a plan is one as ints, which torch leaves out where it is None.
_PREFILL, _DECODE = (7, 4), (8, 3)
_PREFILL_NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse")
_DECODE_NAMES = ("q", "kv", "cache_seqlens", "block_table", "plan.first_part", "plan.order", "out", "lse")
_WRITTEN = ("out", "lse")


def _split(arguments_of_op: tuple[Any, ...], counts: tuple[int, int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors, and the numbers with the plan even where torch left it out."""
    tensors, numbers = counts
    if len(arguments_of_op) == tensors + numbers:
        arguments_of_op = (*arguments_of_op, None)
    return arguments_of_op[:tensors], arguments_of_op[tensors:]


def _checked_prefill(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> PrefillProblem:
    *others, plan = numbers
    problem = arguments.check_prefill(*tensors, *others)
    made = prefill_plan(plan)
    if made is not None and not made.covers(problem):
        fail("plan", f"one made for {problem}", made)
    return problem


def _checked_decode(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> DecodeProblem:
    return arguments.check_decode(*tensors, *numbers)


def prefill_plan(ints: list[int] | tuple[int, ...] | None) -> PrefillPlan | None:
    """A plan as the op takes it, as a value."""
    return None if ints is None else PrefillPlan(*ints)


def decode_plan(ints: list[int] | tuple[int, ...] | None) -> DecodeTiles | None:
    """Tiles as the op takes them, as a value."""
    return None if ints is None else DecodeTiles(*ints)


def _check_prefill_values(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """What only device memory tells, on a CPU and inside validate_values."""
    if values_are_checked(tensors[0].device):
        problem = arguments.check_prefill(*tensors, *numbers[:-1])
        q, k, _, cu_seqlens_q, cu_seqlens_k = tensors[:5]
        arguments.check_prefill_values(q, k, cu_seqlens_q, cu_seqlens_k, problem, numbers[1])


def _check_decode_values(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    if values_are_checked(tensors[0].device):
        problem = _checked_decode(tensors, numbers)
        _, kv, cache_seqlens, block_table, first_part, order = tensors[:6]
        made = decode_plan(numbers[-1])
        arguments.check_decode_values(cache_seqlens, block_table, first_part, order, kv.shape[0], problem, made)


def _fake_prefill(*arguments_of_op: Any) -> None:
    _checked_prefill(*_split(arguments_of_op, _PREFILL))


def _fake_decode(*arguments_of_op: Any) -> None:
    _checked_decode(*_split(arguments_of_op, _DECODE))


# The kernels

_launches: dict[tuple[object, ...], Any] = {}
# Room for the sizes of a server's life; past it all are made anew, which costs one slow call each.
_MOST_LAUNCHES = 8192


def _ready(prepare: Callable[..., Any], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Any:
    """What ``prepare(tensors, numbers)`` made the last time that tensors and numbers looked like this."""
    if numbers and type(numbers[-1]) is list:
        # A plan, as torch passes it: a key wants it hashable.
        numbers = (*numbers[:-1], tuple(numbers[-1]))
    key = (prepare, numbers, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    found = _launches.get(key)
    if found is None:
        found = prepare(tensors, numbers)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    return found


def _launches_of_gpu() -> Any:
    """The launches, imported when a tensor on a GPU first asks for them: all else works without TileLang."""
    try:
        from tilelang_mla import launch
    except ImportError as error:
        raise RuntimeError(
            "tensors on a GPU need TileLang, which tilelang-mla[tilelang] brings; here it is missing"
        ) from error
    return launch


def _prepare_prefill(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_prefill(tensors, numbers)
    *others, plan = numbers
    run = launch.prepare_prefill(*tensors, *others, prefill_plan(plan))
    return run, MemoryOverlap(dict(zip(_PREFILL_NAMES, tensors, strict=True)), _WRITTEN)


def _prepare_decode(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_decode(tensors, numbers)
    *others, plan = numbers
    run = launch.prepare_decode(*tensors, *others, decode_plan(plan))
    return run, MemoryOverlap(dict(zip(_DECODE_NAMES, tensors, strict=True)), _WRITTEN)


def _kernel_prefill(*arguments_of_op: Any) -> None:
    tensors, numbers = _split(arguments_of_op, _PREFILL)
    run, refuse_overlap = _ready(_prepare_prefill, tensors, numbers)
    refuse_overlap(*tensors)
    _check_prefill_values(tensors, numbers)
    run(*tensors)


def _kernel_decode(*arguments_of_op: Any) -> None:
    tensors, numbers = _split(arguments_of_op, _DECODE)
    run, refuse_overlap = _ready(_prepare_decode, tensors, numbers)
    refuse_overlap(*tensors)
    _check_decode_values(tensors, numbers)
    run(*tensors)


# The reference


def _reference_prefill(*arguments_of_op: Any) -> None:
    """Each sequence in float32."""
    tensors, numbers = _split(arguments_of_op, _PREFILL)
    _checked_prefill(tensors, numbers)
    check_no_overlap(dict(zip(_PREFILL_NAMES, tensors, strict=True)), _WRITTEN)
    _check_prefill_values(tensors, numbers)
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = tensors
    _, _, softmax_scale, causal, _ = numbers
    _write_nothing(out, lse)
    # Queries within the rows there are, whatever cu_seqlens_q holds.
    bounds = [min(max(bound, 0), q.shape[0]) for bound in cu_seqlens_q.tolist()]
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(cu_seqlens_k.tolist()), strict=True):
        if begin < end and 0 <= first <= last <= k.shape[0]:
            rows = slice(begin, end)
            own = None if lse is None else lse[:, rows]
            _attend(q[rows], k[first:last], v[first:last], out[rows], own, softmax_scale, causal)


def _reference_decode(*arguments_of_op: Any) -> None:
    """Each sequence in float32, its latents keys, with the rope behind them, and values."""
    tensors, numbers = _split(arguments_of_op, _DECODE)
    problem = _checked_decode(tensors, numbers)
    check_no_overlap(dict(zip(_DECODE_NAMES, tensors, strict=True)), _WRITTEN)
    _check_decode_values(tensors, numbers)
    q, kv, cache_seqlens, block_table, _, _, out, lse = tensors
    dim_nope, softmax_scale, causal, _ = numbers
    _write_nothing(out, lse)
    for i, length in enumerate(cache_seqlens.tolist()):
        if 0 < length <= problem.capacity:
            latents = _latents(kv, block_table[i : i + 1], length)
            own = None if lse is None else lse[i]
            _attend(q[i], latents, latents[..., :dim_nope], out[i], own, softmax_scale, causal)


def _write_nothing(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, softmax_scale: float, causal: bool
) -> None:
    result = attention(q, k, v, softmax_scale=softmax_scale, causal=causal, compute_dtype=torch.float32)
    out.copy_(result.out)
    if lse is not None:
        lse.copy_(result.lse)


def _latents(kv: Tensor, pages: Tensor, length: int) -> Tensor:
    # No page exists, and one that does not exist reads as zeros.
    pool, table = (kv, pages) if len(kv) else (kv.new_zeros(1, *kv.shape[1:]), pages * 0 - 1)
    # Lengths and pages have been checked, in the caller's words, where they are to be.
    return gather(pool, table, torch.tensor([length], device=pool.device), "NHD").tokens


def _batched_prefill(*arguments_of_op: Any) -> None:
    _refuse_vmap(_PREFILL_NAMES, arguments_of_op)


def _batched_decode(*arguments_of_op: Any) -> None:
    _refuse_vmap(_DECODE_NAMES, arguments_of_op)


def _refuse_vmap(names: tuple[str, ...], arguments_of_op: tuple[Any, ...]) -> None:
    """Torch would look for a rule of batches, and tell its users to write one."""
    arguments.check_no_vmap(**dict(zip(names, arguments_of_op, strict=False)))
    fail("tensors", "outside torch.vmap", "a batched one")


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "prefill": (_reference_prefill, _kernel_prefill, _fake_prefill, _batched_prefill),
    "decode": (_reference_decode, _kernel_decode, _fake_decode, _batched_decode),
}
for _name, (_reference, _kernel, _fake, _batched) in _IMPLEMENTATIONS.items():
    _library.impl(_name, _reference, "CPU")
    _library.impl(_name, _batched, "FuncTorchBatched")
    # CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices such as Ascend's NPUs.
    for _key in ("CUDA", "PrivateUse1"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"tilelang_mla::{_name}", _fake, lib=_library)
