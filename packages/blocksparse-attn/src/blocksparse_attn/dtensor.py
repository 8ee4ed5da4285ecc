"""blocksparse-attn on DTensors: how tensors of each public function may be shared, and functions on local shards.

Most ops write into memory that they are given, so that DTensor has no rules for them: :func:`sharded` runs a public
function on the shards of each rank. Importing this registers rules for those that do not: attention that asks for
gradients, and its backward, take DTensors by heads. Nothing is sent unless a tensor lies otherwise than
:func:`placements` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal

import torch

import blocksparse_attn
from blocksparse_attn.gradients.ops import attention
from blocksparse_attn.selected.gradients.ops import attention as selected_attention
from kernel_reference.checks import fail
from kernel_reference.dtensors import Placements, on_shards_of_calls, register_sharding

PageLayout = Literal["NHD", "HND"]


def placements(
    function: str, *, page_layout: PageLayout | None = None, padded: bool = False, return_lse: bool = False
) -> Placements:
    """How the tensors of a public function lie on a mesh of one dimension whose ranks share the heads.

    >>> placements("selected_attention", page_layout="NHD").inputs["k_cache"]
    2

    Args:
        function: its name.
        page_layout: of the pages that it is called with; None where keys and values lie in none.
        padded: whether ``blocksparse_attention`` is called with a padded batch [B, T, H, D].
        return_lse: whether the function returns lse too.

    Returns:
        kernel_reference.dtensors.Placements: by argument the dimension that is shared, and of each result; other
        tensors are replicated, scales of a cache too, which are one number then.

    Raises:
        ValueError: the function is none whose heads may be shared.
    """
    rows = 2 if padded else 1
    keys = rows if page_layout is None else 2 if page_layout == "NHD" else 1
    outputs = (rows, rows - 1) if return_lse else (rows,)
    if function == "blocksparse_attention":
        return Placements({"q": rows, "k": keys, "v": keys, "sinks": 0, "out": rows}, outputs, ("out",))
    if function == "blocksparse_flash_attn_varlen_fwd":
        return Placements({"q": 1, "k": 1, "v": 1}, (1,))
    if function == "selected_attention":
        keys = 1 if page_layout == "HND" else 2
        inputs = {"q": 1, "k_cache": keys, "v_cache": keys, "indices": 1, "sinks": 0, "out": 1}
        return Placements(inputs, (1, 0) if return_lse else (1,), ("out",))
    if function == "select_blocks":
        return Placements({"q": 1, "k_summary": 2}, (1,))
    known = '"blocksparse_attention", "blocksparse_flash_attn_varlen_fwd", "selected_attention" or "select_blocks"'
    fail("function", known, repr(function))


def sharded(function: str, mesh: Any) -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its heads.

    Args:
        function: as for :func:`placements`.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments, without a plan; a layout is a BlockLayout, of all heads. What is written
        must lie as :func:`placements` says; others are redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`; heads that the mesh does not divide.
    """
    placements(function)
    whole = getattr(blocksparse_attn, function)

    @wraps(whole)
    def local(*args: Any, **kwargs: Any) -> Any:
        own = [_of_rank(x, mesh) if isinstance(x, blocksparse_attn.BlockLayout) else x for x in args]
        layouts = {name: x for name, x in kwargs.items() if isinstance(x, blocksparse_attn.BlockLayout)}
        return whole(*own, **kwargs | {name: _of_rank(layout, mesh) for name, layout in layouts.items()})

    def how(*args: Any, **kwargs: Any) -> Placements:
        q = args[0] if args else kwargs["q"]
        in_pages = function == "selected_attention" or kwargs.get("block_table") is not None
        page_layout = kwargs.get("page_layout", "NHD") if in_pages else None
        lse = bool(kwargs.get("return_lse", False))
        return placements(function, page_layout=page_layout, padded=q.ndim == 4, return_lse=lse)

    return on_shards_of_calls(local, mesh, how)


def _of_rank(layout: blocksparse_attn.BlockLayout, mesh: Any) -> blocksparse_attn.BlockLayout:
    if layout.num_heads == 1:
        return layout
    each, rest = divmod(layout.num_heads, mesh.size())
    if rest:
        fail("layout", f"of a multiple of {mesh.size()} heads", layout.num_heads)
    rank = mesh.get_local_rank()
    return layout.heads(rank * each, (rank + 1) * each)


def _register() -> None:
    lists = dict.fromkeys(("crow", "col", "crow_t", "col_t"), 0)
    by_heads = [
        ({**placements("blocksparse_attention", padded=padded).inputs, **of_heads}, 2 if padded else 1)
        for padded in (False, True) for of_heads in ({}, lists)
    ]  # fmt: skip
    by_pages = [(placements("selected_attention", page_layout=layout).inputs, 1) for layout in ("NHD", "HND")]
    for op, backward, known, offers in (
        (attention, "attention_backward", by_heads, _tells_lists),
        (selected_attention, "selected_attention_backward", by_pages, _tells_pages),
    ):
        forward = [Placements(inputs, (rows, rows - 1)) for inputs, rows in known]
        of_gradients = [
            Placements({**inputs, "out": rows, "lse": rows - 1, "d_out": rows, "d_lse": rows - 1}, _gradients(inputs))
            for inputs, rows in known
        ]
        register_sharding(op, forward, offers)
        register_sharding(getattr(torch.ops.blocksparse_attn, backward).default, of_gradients, offers)


def _gradients(inputs: Mapping[str, int]) -> tuple[int, ...]:
    """Of q, keys, values and sinks."""
    keys = inputs["k" if "k" in inputs else "k_cache"]
    return inputs["q"], keys, keys, 0


def _tells_lists(sharding: Placements, tensors: Mapping[str, Any]) -> bool:
    """Whether q has such rows, and heads have lists of their own where these are shared."""
    of_heads = len(tensors["crow"].shape) == 2 and tensors["crow"].shape[0] > 1
    return len(tensors["q"].shape) == sharding.inputs["q"] + 2 and of_heads == ("crow" in sharding.inputs)


def _tells_pages(sharding: Placements, tensors: Mapping[str, Any]) -> bool:
    """Whether the shape says where a page's heads are, and no head has a scale of its own."""
    heads, shape = tensors["indices"].shape[1], tensors["k_cache"].shape
    scales = [tensors[name].shape[0] for name in ("k_scale", "v_scale") if name in tensors]
    return all(n == 1 for n in scales) and [n == heads for n in shape[1:3]] == [
        dim == sharding.inputs["k_cache"] for dim in (1, 2)
    ]


_register()
