"""Eager calls of decoding on a GPU past torch's dispatcher: what looks like the last call is begun at once.

Results are new tensors, which overlap nothing. All else that arguments.py checks depends on what
:class:`.PreparedLaunches` compares, so that it is checked once for each form of a call.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches, allocator_of
from tilelang_mla import arguments, ops
from tilelang_mla.arguments import Decode8bitTensors, DecodeOptions, DecodeTensors
from tilelang_mla.caches import format_of
from tilelang_mla.plan import DecodeTiles

Tensor = torch.Tensor
# q, kv, seqlens_k, block_table, first_part, order, kv_scale.
Inputs = tuple[Any, ...]
# dim_nope, softmax_scale, causal, return_lse, the tiles of a plan.
Numbers = tuple[Any, ...]

launches = PreparedLaunches()
# Whether launches that were found once are started again by the driver alone.
BY_DRIVER = False


def decoded_again(tensors: Inputs, numbers: Numbers) -> tuple[Tensor, Tensor | None] | None:
    """What :func:`decode` does for a call that looks like the last one, if it can be said at once; else None."""
    dim_nope, scale, causal, return_lse, tiles = numbers
    # True and 1.0 would be found in the table as 1.
    if not (
        type(dim_nope) is int
        and type(causal) is bool
        and type(return_lse) is bool
        and (scale is None or type(scale) is float)
        and (tiles is None or type(tiles) is DecodeTiles)
    ):
        return None
    found = launches.again(_prepare_decode, tensors, numbers)
    if found is None:
        return None
    make_out, make_lse, run = found[:3]
    out: Tensor = make_out()
    lse: Tensor | None = None if make_lse is None else make_lse()
    run(tensors, out, lse)
    return out, lse


def decode(tensors: Inputs, numbers: Numbers) -> tuple[Tensor, Tensor | None]:
    """The op's work, into new tensors. The caller has seen that nothing is lost without the dispatcher."""
    make_out, make_lse, run, problem, plan = launches.find(_prepare_decode, tensors, numbers)
    out: Tensor = make_out()
    lse: Tensor | None = None if make_lse is None else make_lse()
    if values_are_checked(tensors[0].device):
        arguments.check_decode_values(problem, plan, _of_op(tensors, out, lse))
    run(tensors, out, lse)
    return out, lse


def _of_op(tensors: Inputs, out: Tensor, lse: Tensor | None) -> DecodeTensors | Decode8bitTensors:
    if format_of(tensors[1]) is None:
        return DecodeTensors._make((*tensors[:6], out, lse))
    return Decode8bitTensors._make((*tensors, out, lse))


def _prepare_decode(tensors: Inputs, numbers: Numbers) -> Any:
    launch = ops._launch_module()
    dim_nope, scale, causal, return_lse, tiles = numbers
    q = tensors[0]
    batch, tokens, heads = q.shape[:3]
    out = q.new_empty((batch, tokens, heads, max(0, dim_nope)))
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32) if return_lse else None
    of_op = _of_op(tensors, out, lse)
    ints = None if tiles is None else tiles.as_ints()
    options = DecodeOptions(dim_nope, q.shape[3] ** -0.5 if scale is None else scale, causal, ints)
    problem, plan = arguments.check_decode(of_op, options)
    start = launch.prepare_decode(problem, plan, DecodeTensors._make((*tensors[:6], out, lse)))
    by_driver, in_8bit = BY_DRIVER and hasattr(start, "again"), bool(problem.cache)

    def run(tensors: Inputs, out: Tensor, lse: Tensor | None) -> None:
        if by_driver and start.again(tensors, out, lse):
            return
        q, kv, seqlens_k, block_table, first_part, order, kv_scale = tensors
        start(q, (kv, kv_scale) if in_8bit else kv, seqlens_k, block_table, first_part, order, out, lse)
        if by_driver:
            start.learn(tensors, out, lse)

    new = [None if x is None else allocator_of(x.shape, x.stride(), x.dtype, x.device) for x in (out, lse)]
    return *new, run, problem, plan
