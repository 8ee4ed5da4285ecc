"""blocksparse-attn on DTensors: how tensors of each public function may be shared, and functions on local shards.

DTensor has no rules for its ops, whose lists and pages are not told apart by their shapes: :func:`sharded` runs a
public function on the shards of each rank. Nothing is sent unless a tensor lies otherwise than :func:`placements` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import blocksparse_attn
from kernel_reference.checks import fail
from kernel_reference.dtensors import Placements, on_shards

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
    if function == "selected_attention":
        keys = 1 if page_layout == "HND" else 2
        inputs = {"q": 1, "k_cache": keys, "v_cache": keys, "indices": 1, "sinks": 0, "out": 1}
        return Placements(inputs, (1, 0) if return_lse else (1,), ("out",))
    if function == "select_blocks":
        return Placements({"q": 1, "k_summary": 2}, (1,))
    fail("function", '"blocksparse_attention", "selected_attention" or "select_blocks"', repr(function))


def sharded(function: str, mesh: Any) -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its heads.

    Args:
        function: as for :func:`placements`.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments, without a plan; a layout is that of all heads. What is written must lie as
        :func:`placements` says; others are redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`; heads that the mesh does not divide.
    """
    placements(function)
    whole = getattr(blocksparse_attn, function)

    @wraps(whole)
    def local(*args: Any, **kwargs: Any) -> Any:
        own = [_of_rank(x, mesh) if isinstance(x, blocksparse_attn.BlockLayout) else x for x in args]
        if isinstance(kwargs.get("layout"), blocksparse_attn.BlockLayout):
            kwargs = kwargs | {"layout": _of_rank(kwargs["layout"], mesh)}
        return whole(*own, **kwargs)

    def call(*args: Any, plan: None = None, **kwargs: Any) -> Any:
        if plan is not None:
            fail("plan", "None on DTensors: it is of a rank's own heads", type(plan).__name__)
        q = args[0] if args else kwargs["q"]
        in_pages = function == "selected_attention" or kwargs.get("block_table") is not None
        page_layout = kwargs.get("page_layout", "NHD") if in_pages else None
        lse = bool(kwargs.get("return_lse", False))
        how = placements(function, page_layout=page_layout, padded=q.ndim == 4, return_lse=lse)
        return on_shards(local, mesh, how)(*args, **kwargs)

    return call


def _of_rank(layout: blocksparse_attn.BlockLayout, mesh: Any) -> blocksparse_attn.BlockLayout:
    if layout.num_heads == 1:
        return layout
    each, rest = divmod(layout.num_heads, mesh.size())
    if rest:
        fail("layout", f"of a multiple of {mesh.size()} heads", layout.num_heads)
    rank = mesh.get_local_rank()
    return layout.heads(rank * each, (rank + 1) * each)
