"""tilelang-mla on DTensors: how the tensors of each public function may be shared, and the functions on local shards.

Most ops write into memory that they are given, so that DTensor has no rules for them: :func:`sharded` runs a public
function on each rank's shards. Importing this registers rules for those that do not: ``flash_mla_varlen_func`` takes
DTensors that ask for gradients, and so does its backward. Nothing is sent unless a tensor lies otherwise than
:func:`placements` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

import tilelang_mla
from kernel_reference.checks import fail
from kernel_reference.dtensors import Placements, on_shards_of_calls, register_sharding
from tilelang_mla.gradients.ops import attention

By = Literal["heads", "sequences"]

_CACHE = {"q": 0, "seqlens_k": 0, "block_table": 0, "indices": 0, "topk_length": 0, "out": 0}
_INDEXER = {
    "index_scores": Placements({"q": 0, "weights": 0, "lengths": 0, "block_table": 0, "out": 0}, (0,), ("out",)),
    "index_topk": Placements({"scores": 0, "lengths": 0, "block_table": 0, "out": 0}, (0,), ("out",)),
}
_QUANTIZED = {
    "quantize_kv": Placements({"kv": 0}, (0,)),
    "dequantize_kv": Placements({"cache": 0}, (0,)),
    "quantize_index_k": Placements({"k": 0}, (0,)),
}


def placements(function: str, by: By = "heads", *, return_lse: bool = False) -> Placements:
    """How the tensors of a public function may lie on a mesh of one dimension.

    >>> placements("flash_mla_with_kvcache").inputs["q"]
    2

    Args:
        function: its name.
        by: what is shared: query heads, of every attention, where the one kv head of a latent cache lies on all ranks;
            or the sequences of ``flash_mla_with_kvcache`` and of the indexer's functions with as many query tokens of
            each, whose pages every rank has, and what is quantised, by its first dimension.
        return_lse: whether the function returns lse too.

    Returns:
        kernel_reference.dtensors.Placements: by argument the dimension that is shared, and of each result; other
        tensors are replicated.

    Raises:
        ValueError: there is no such way to share the function's tensors.
    """
    decoded = {"heads": ({"q": 2, "attn_sink": 0, "out": 2}, (2, 1)), "sequences": (_CACHE, (0, 0))}
    if function == "flash_mla_with_kvcache" and by in decoded:
        inputs, outputs = decoded[by]
        return Placements(inputs, outputs if return_lse else outputs[:1], ("out",))
    if function == "flash_mla_varlen_func" and by == "heads":
        return Placements({"q": 1, "k": 1, "v": 1, "out": 1}, (1, 0) if return_lse else (1,), ("out",))
    if function == "flash_mla_sparse_fwd" and by == "heads":
        return Placements({"q": 1, "attn_sink": 0, "out": 1}, (1, 1, 1), ("out",))
    by_sequences = _INDEXER | _QUANTIZED
    if function in by_sequences and by == "sequences":
        return by_sequences[function]
    known = "flash_mla_with_kvcache by heads or sequences, flash_mla_varlen_func or flash_mla_sparse_fwd by heads"
    fail("function", f"{known}, {', '.join(by_sequences)} by sequences", (function, by))


def sharded(function: str, mesh: Any, by: By = "heads") -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its shards.

    Args:
        function, by: as for :func:`placements`.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments, without a plan. ``out`` must lie as :func:`placements` says; others are
        redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`; heads or sequences that the mesh does not divide.
    """
    placements(function, by)

    def how(*_: Any, **kwargs: Any) -> Placements:
        return placements(function, by, return_lse=bool(kwargs.get("return_lse", False)))

    return on_shards_of_calls(getattr(tilelang_mla, function), mesh, how)


def _register() -> None:
    heads = {"q": 1, "k": 1, "v": 1}
    register_sharding(attention, [Placements(heads, (1, 0))])
    of_results = {"out": 1, "lse": 0, "d_out": 1, "d_lse": 0}
    register_sharding(torch.ops.tilelang_mla.attention_backward.default, [Placements(heads | of_results, (1, 1, 1))])


_register()
