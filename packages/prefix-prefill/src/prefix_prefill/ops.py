"""The torch ops: schemas, and what implements them.

=======  =============================================================================
prefill  writes the outputs, and the logarithms of the sums, that it is given
cascade  the same over keys that groups of rows share, level by level
merge    writes likewise the whole of an attention from two parts of its keys
=======  =============================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it. Eager calls of a batch of new sizes take what
was made for another batch of the same layer: see batches.py.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import check_choice, values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.paging import LAYOUTS
from prefix_prefill import arguments, reference
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, prefill_arguments
from prefix_prefill.batches import (
    Batches,
    Kind,
    direct_call,
    direct_cascade,
    direct_merge,
    free_sizes,
    has_free_sizes,
    of_any_batch,
)
from prefix_prefill.cascade import arguments as levels
from prefix_prefill.cascade.arguments import CascadeNumbers, CascadeTensors
from prefix_prefill.plan import MOST_TOKENS, PrefillPlan, Problem
from prefix_prefill.values import check_values

Tensor = torch.Tensor

_library = torch.library.Library("prefix_prefill", "DEF")
for _schema in (
    "prefill(Tensor q, Tensor? k, Tensor? v, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? out_scale,"
    " Tensor(a!) out, Tensor(b!)? lse, Tensor? draft_mask, SymInt max_seqlen_q, str page_layout,"
    " float softmax_scale, SymInt left, SymInt right, float softcap, bool skip_decode, float k_factor, float v_factor,"
    " float out_factor, SymInt num_splits, SymInt max_seqlen_k=2147483647, bool quantize_q=False, int[]? plan=None,"
    " SymInt widen_bytes=0) -> ()",
    "cascade(Tensor q, Tensor[] k_cache, Tensor[] v_cache, Tensor[] block_table, Tensor[] cu_seqlens_q,"
    " Tensor[] seqlens_k, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? out_scale, Tensor(a!) out,"
    " Tensor(b!)? lse, Tensor? draft_mask, SymInt max_seqlen_q, str page_layout, float softmax_scale, float softcap,"
    " float k_factor, float v_factor, float out_factor, SymInt num_splits) -> ()",
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

launches = PreparedLaunches()
_TENSORS = len(PrefillTensors._fields)
_OUT, _LSE = PrefillTensors._fields.index("out"), PrefillTensors._fields.index("lse")
_MERGE = ("merge",)
_CASCADE_OUT = CascadeTensors._fields.index("out")
_prefill = torch.ops.prefix_prefill.prefill.default
_cascade = torch.ops.prefix_prefill.cascade.default
_merge = torch.ops.prefix_prefill.merge.default


def _fake_prefill(*given: Any) -> Problem:
    return arguments.check_prefill(*prefill_arguments(given))


def _prepare_prefill(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("prefix_prefill")
    given, options = PrefillTensors(*tensors), PrefillNumbers(*numbers)
    problem = arguments.check_prefill(given, options)
    plan = PrefillPlan.from_ints(options.plan)
    check_overlap = arguments.overlap_of_prefill(given)
    if not problem.tokens:
        return check_overlap, launch.prepare_prefill(problem, plan, given), None
    layer = launch.Layer(problem, plan, given)
    return check_overlap, layer.of_batch(), layer


def rounded(most: Any) -> Any:
    """A bound of keys as launches know it, a power of two: sequences grow with every step of a server."""
    # Of a symbolic size, which only tracing has, nothing is asked.
    if type(most) is not int or not 1 < most < MOST_TOKENS:
        return most
    return min(1 << (most - 1).bit_length(), MOST_TOKENS)


def _rounded(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    options = PrefillNumbers(*numbers)
    return options._replace(max_seqlen_k=rounded(options.max_seqlen_k))


def asked(*options: Any) -> Kind:
    """What tells apart calls whose options nobody has looked at, tensors aside. True is not 1."""
    types = (*map(type, options),)
    # To look for tuples one by one takes 0.4 us.
    inside = [tuple(map(type, option)) for option in options if type(option) is tuple] if tuple in types else ()
    return *options, *types, *inside


def _has_hash(kind: Kind) -> bool:
    try:
        hash(kind)
    except TypeError:
        # Of a window that is a list, say.
        return False
    return True


def _kernel_prefill(*given: Any) -> None:
    tensors, numbers = given[:_TENSORS], _rounded(given[_TENSORS:])
    check_overlap, run, _ = launches.find(_prepare_prefill, tensors, numbers)
    if values_are_checked(tensors[0].device):
        check_values(*prefill_arguments(given))
    check_overlap(*tensors)
    run(*tensors)


def _fake_cascade(*given: Any) -> list[Problem]:
    return levels.check_cascade(*levels.cascade_arguments(given))


def _prepare_cascade(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("prefix_prefill")
    from prefix_prefill.cascade import launch

    given = levels.from_flat(tensors)
    problems = levels.check_cascade(given, CascadeNumbers(*numbers))
    run = launch.prepare_cascade(problems, [None] * len(problems), levels.tensors_of_levels(given))
    return levels.overlap_of_cascade(given), run


def _kernel_cascade(*given: Any) -> None:
    tensors, numbers = levels.cascade_arguments(given)
    flat = levels.flat(tensors)
    check_overlap, run = launches.find(_prepare_cascade, flat, numbers)
    if values_are_checked(tensors.q.device):
        levels.check_cascade_values(tensors, numbers)
    check_overlap(*flat)
    run(levels.tensors_of_levels(tensors))


def prefill(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], return_lse: bool = False, out_dtype: Any = None,
    asked: Kind | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Call the op with these tensors and all numbers; by the short way where there is one.

    An ``out`` of None is made, of q's dtype or another, and ``lse``, which is None, if it is wanted. ``asked``: how
    calls like this one are known that nothing serves yet.
    """
    if not torch.compiler.is_dynamo_compiling():
        kind = ("prefill", return_lse, out_dtype, *_rounded(numbers))
        direct = None
        if asked is None or not _has_hash(asked):
            asked = kind
            direct = launches.direct(tensors, asked)
        if direct is None:
            of_batch = launches.direct(tensors, of_any_batch(kind))
            direct = None if of_batch is None else of_batch(tensors, kind, asked)
        if direct is not None:
            return direct(*tensors)  # type: ignore[no-any-return]
    q, out = tensors[0], tensors[_OUT]
    if out is None:
        out = q.new_empty(arguments.out_size(q, tensors[4], numbers[1]), dtype=out_dtype)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    given = (*tensors[:_OUT], out, lse, *tensors[_LSE + 1 :])
    _prefill(*given, *numbers)
    if asked is not None:
        layers: list[Any] = []

        def prepared() -> Any:
            check_overlap, run, layer = launches.find(_prepare_prefill, given, _rounded(numbers))
            layers.append(layer)
            return direct_call(check_overlap, run, tensors, out, lse)

        launches.keep_direct(tensors, asked, prepared)
        if layers and layers[0] is not None and of_batch is None and has_free_sizes(tensors):
            batches = Batches(layers[0], launches, tensors, out, lse)
            launches.keep_direct(tensors, of_any_batch(kind), lambda: batches, free_sizes(tensors))
    return out, lse


def cascade(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], return_lse: bool = False, out_dtype: Any = None,
    asked: Kind | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same of the op ``cascade``, with the tensors of ``CascadeTensors``. No sizes are free: a step of other ones
    takes the long way once. ``asked``: what :func:`cascade_again` was asked for.
    """
    q, given, *behind, out, lse, draft_mask = tensors
    first = given[0]
    if out is None:
        check_choice("page_layout", numbers[1], LAYOUTS)
        size = (*q.shape[:2], arguments.value_dim(first.v_cache, numbers[1]))
        out = q.new_empty(size, dtype=out_dtype)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    whole = CascadeTensors._make((q, given, *behind, out, lse, draft_mask))
    _cascade(q, *[list(each) for each in zip(*given, strict=True)], *whole[2:], *numbers)
    if asked is not None and _has_hash(asked):

        def prepared() -> Any:
            check_overlap, run = launches.find(_prepare_cascade, levels.flat(whole), numbers)
            return direct_cascade(check_overlap, run, tensors[_CASCADE_OUT] is None, out, lse)

        guarded, _, same = _one_cache(tensors)
        launches.keep_direct(guarded, (*asked, same), prepared)
    return out, lse


def cascade_again(tensors: tuple[Any, ...], asked: Kind) -> tuple[Tensor, Tensor | None] | None:
    """The same by the short way, of options that nobody has looked at; None where there is none."""
    guarded, flat, same = _one_cache(tensors)
    direct = launches.direct(guarded, (*asked, same))
    return None if direct is None else direct(flat)


def _one_cache(tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any], tuple[tuple[bool, bool], ...]]:
    """The tensors that tell a cascade from others; all of them in one list; and whether each level has the first one's
    keys, and values.

    Levels have one cache, mostly, and nothing looks like tensors of which two are one.
    """
    q, given, *behind, out, lse, draft_mask = tensors
    k_cache, v_cache = given[0][:2]
    flat, guarded = [q], [q, k_cache, v_cache]
    same: list[tuple[bool, bool]] = []
    for level in given:
        flat += level
        k, v = alike = level[0] is k_cache, level[1] is v_cache
        same.append(alike)
        guarded += level[2:] if k and v else [x for x in level if x is not k_cache and x is not v_cache]
    flat += (*behind, out, lse, draft_mask)
    return (*guarded, *behind, out, draft_mask), flat, (*same,)


def _prepare_merge(tensors: tuple[Any, ...], _: tuple[Any, ...]) -> Any:
    launch = launch_module("prefix_prefill")
    arguments.check_merge(*tensors)
    given = MergeTensors(*tensors)
    return arguments.overlap_of_merge(given), launch.prepare_merge(given)


def _kernel_merge(*tensors: Tensor) -> None:
    check_overlap, run = launches.find(_prepare_merge, tensors, ())
    check_overlap(*tensors)
    run(*tensors)


def merge(tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Call the op with out_a, lse_a, out_b, lse_b and out, which is made if it is None; or the short way."""
    if not torch.compiler.is_dynamo_compiling():
        direct = launches.direct(tensors, _MERGE)
        if direct is not None:
            return direct(*tensors)  # type: ignore[no-any-return]
    *parts, out = tensors
    result = parts[0].new_empty(parts[0].shape) if out is None else out
    lse = parts[1].new_empty(parts[1].shape)
    given = (*parts, result, lse)
    _merge(*given)
    if not torch.compiler.is_dynamo_compiling():

        def prepared() -> Any:
            check_overlap, run = launches.find(_prepare_merge, given, ())
            return direct_merge(check_overlap, run, out is None, result, lse)

        launches.keep_direct(tensors, _MERGE, prepared)
    return result, lse


implement(_library, "prefill", reference=reference.prefill, kernel=_kernel_prefill, fake=_fake_prefill)
implement(_library, "cascade", reference=reference.cascade, kernel=_kernel_cascade, fake=_fake_cascade)
implement(_library, "merge", reference=reference.merge, kernel=_kernel_merge, fake=arguments.check_merge)
