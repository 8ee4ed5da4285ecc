"""Eager calls of decoding on a GPU past torch's dispatcher: what looks like the last call is begun at once.

Results are new tensors, which overlap nothing. All else that arguments.py checks depends on what
:class:`.PreparedLaunches` compares, so that it is checked once for each form of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches, allocator_of
from tilelang_mla import arguments, ops
from tilelang_mla.arguments import Decode8bitTensors, DecodeOptions, DecodeTensors
from tilelang_mla.caches import format_of
from tilelang_mla.plan import DecodeTiles
from tilelang_mla.sparse.arguments import SparseOptions, SparseTensors, check_sparse

Tensor = torch.Tensor
# Of decoding q, kv, seqlens_k, block_table, first_part, order, kv_scale; over lists q, kv, indices, topk_length,
# attn_sink, first_part, order.
Inputs = tuple[Any, ...]
# dim_nope, softmax_scale, causal, return_lse, the tiles of a plan; over lists causal is None.
Numbers = tuple[Any, ...]
Result = tuple[Tensor, Tensor | None]

launches = PreparedLaunches()


def decoded_again(tensors: Inputs, numbers: Numbers) -> Result | None:
    """What :func:`decode` does for a call that looks like the last one, if it can be said at once; else None."""
    dim_nope, scale, causal, return_lse, tiles = numbers
    # True and 1.0 would be found in the table as 1.
    if not (
        type(dim_nope) is int
        and (causal is None or type(causal) is bool)
        and type(return_lse) is bool
        and (scale is None or type(scale) is float)
        and (tiles is None or type(tiles) is DecodeTiles)
    ):
        return None
    found = launches.again(_prepare_lists if causal is None else _prepare, tensors, numbers)
    if found is None:
        return None
    return _run(found, tensors)


def decode(tensors: Inputs, numbers: Numbers) -> Result:
    """The op's work, into new tensors. The caller has seen that nothing is lost without the dispatcher."""
    make_out, make_lse, run, problem, plan = launches.find(_prepare, tensors, numbers)
    out: Tensor = make_out()
    lse: Tensor | None = None if make_lse is None else make_lse()
    if values_are_checked(tensors[0].device):
        arguments.check_decode_values(problem, plan, _of_op(tensors, out, lse))
    run(tensors, out, lse)
    return out, lse


def decode_lists(tensors: Inputs, numbers: Numbers) -> Result:
    """The same of the op over lists of keys."""
    return _run(launches.find(_prepare_lists, tensors, numbers), tensors)


def _run(found: Any, tensors: Inputs) -> Result:
    """Start a prepared launch into new tensors."""
    make_out, make_lse, run = found[:3]
    out: Tensor = make_out()
    lse: Tensor | None = None if make_lse is None else make_lse()
    run(tensors, out, lse)
    return out, lse


def _of_op(tensors: Inputs, out: Tensor, lse: Tensor | None) -> DecodeTensors | Decode8bitTensors:
    if format_of(tensors[1]) is None:
        return DecodeTensors._make((*tensors[:6], out, lse))
    return Decode8bitTensors._make((*tensors, out, lse))


def _prepare(tensors: Inputs, numbers: Numbers) -> Any:
    launch = ops._launch_module()
    dim_nope, scale, causal, return_lse, tiles = numbers
    q = tensors[0]
    batch, tokens, heads = q.shape[:3]
    out = q.new_empty((batch, tokens, heads, max(0, dim_nope)))
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32) if return_lse else None
    ints = None if tiles is None else tiles.as_ints()
    options = DecodeOptions(dim_nope, q.shape[3] ** -0.5 if scale is None else scale, causal, ints)
    problem, plan = arguments.check_decode(_of_op(tensors, out, lse), options)
    start = launch.prepare_decode(problem, plan, DecodeTensors._make((*tensors[:6], out, lse)))
    in_8bit = bool(problem.cache)

    def of_call(tensors: Inputs, out: Tensor, lse: Tensor | None) -> Inputs:
        q, kv, seqlens_k, block_table, first_part, order, kv_scale = tensors
        return q, (kv, kv_scale) if in_8bit else kv, seqlens_k, block_table, first_part, order, out, lse

    return *_made_of(out, lse), _starting(start, of_call), problem, plan


def _prepare_lists(tensors: Inputs, numbers: Numbers) -> Any:
    launch = ops._launch_module()
    dim_nope, scale, _, return_lse, tiles = numbers
    q = tensors[0]
    out = q.new_empty((*q.shape[:3], max(0, dim_nope)))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32).transpose(1, 2) if return_lse else None
    ints = None if tiles is None else tiles.as_ints()
    given = SparseTensors._make((*tensors, out, lse))
    options = SparseOptions(dim_nope, q.shape[3] ** -0.5 if scale is None else scale, ints)
    problem, plan = check_sparse(given, options)
    start = launch.prepare_sparse(problem, plan, given)
    return *_made_of(out, lse), _starting(start, lambda tensors, out, lse: (*tensors, out, lse))


def _made_of(*results: Tensor | None) -> list[Any]:
    """What makes tensors like these."""
    return [None if x is None else allocator_of(x.shape, x.stride(), x.dtype, x.device) for x in results]


def _starting(start: Any, of_call: Callable[..., Inputs]) -> Callable[..., None]:
    """What starts the kernels: by the driver alone, or called with what ``of_call`` makes of tensors."""
    by_driver = hasattr(start, "again")

    def run(tensors: Inputs, out: Tensor, lse: Tensor | None) -> None:
        if by_driver and start.again(tensors, out, lse):
            return
        call = of_call(tensors, out, lse)
        start(*call)
        if by_driver:
            start.learn(tensors, out, lse, call)

    return run
