"""The torch ops of ranks that share a cache, on a CPU, on a GPU, and while torch.compile traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.sharing import reference
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.sharding import Interleave

Tensor = torch.Tensor

_library = torch.library.Library("blocksparse_attn", "FRAGMENT")
for _schema in (
    "own_lists(Tensor indices, Tensor table, Tensor cu_seqlens_q, Tensor seqlens_k, Tensor(a!) own,"
    " Tensor(b!) own_table, Tensor(c!) seen, Tensor(d!) bounds, Tensor(e!) inside, int world, int rank, int size,"
    " int block_size, bool causal) -> ()",
    "pack_parts(Tensor out, Tensor lse, Tensor(a!) parts) -> ()",
    "merge_parts(Tensor parts, Tensor? sinks, Tensor inside, Tensor(a!) out, Tensor(b!) lse) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
launches = PreparedLaunches()


class Own(NamedTuple):
    """Of query tokens, each as a sequence: what a rank holds of their lists.

    indices: [T, Hkv, topk], its blocks, -1 where another rank has one. block_table: [T, columns]. seen: [T], how many
    of its tokens are seen, 1 where none are, -1 for an impossible length. bounds: [T + 1], 0, 1, ... inside: [T] int32,
    whether a token is one of a sequence that can be.
    """

    indices: Tensor
    block_table: Tensor
    seen: Tensor
    bounds: Tensor
    inside: Tensor


def own_lists(
    layout: Interleave, indices: Tensor, table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, block_size: int,
    causal: bool,
) -> Own:  # fmt: skip
    """The lists of whole sequences as those of what the layout's rank holds."""
    rows = len(indices)
    own = Own(
        torch.empty_like(indices, memory_format=torch.contiguous_format),
        table.new_empty(rows, max(1, table.shape[1])), seqlens_k.new_empty(rows), cu_seqlens_q.new_empty(rows + 1),
        torch.empty(rows, dtype=torch.int32, device=indices.device),
    )  # fmt: skip
    numbers = (layout.world, layout.rank, layout.size, block_size, causal)
    torch.ops.blocksparse_attn.own_lists(indices, table, cu_seqlens_q, seqlens_k, *own, *numbers)
    return own


def pack_parts(out: Tensor, lse: Tensor, world: int) -> Tensor:
    """A message a rank, of its heads: [world, T, H / world, D + 4 bytes], of out [T, H, D] and lse [H, T]."""
    rows, heads, size = out.shape
    parts = out.new_empty(world, rows, heads // world, size + 4 // out.element_size())
    torch.ops.blocksparse_attn.pack_parts(out, lse, parts)
    return parts


def merge_parts(parts: Tensor, sinks: Tensor | None, inside: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of all ranks' messages for this one, and of sinks [H]."""
    _, rows, heads, width = parts.shape
    out = parts.new_empty(rows, heads, width - 4 // parts.element_size())
    lse = torch.empty(heads, rows, dtype=torch.float32, device=parts.device)
    torch.ops.blocksparse_attn.merge_parts(parts, sinks, inside, out, lse)
    return out, lse


def _prepare_own(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    if not given[1].shape[1]:
        return lambda *nine: reference.own_lists(*nine, *numbers)
    return launch_module("blocksparse_attn.sharing").prepare_own_lists(given, numbers)


def _prepare_pack(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    if not _fits(given[0]):
        return reference.pack_parts
    return launch_module("blocksparse_attn.sharing").prepare_pack_parts(given)


def _prepare_merge(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    if not _fits(given[3]):
        return reference.merge_parts
    return launch_module("blocksparse_attn.sharing").prepare_merge_parts(given)


def _fits(out: Tensor) -> bool:
    """Whether the logarithms behind rows lie where 4 bytes may."""
    return out.shape[2] * out.element_size() % 4 == 0 and out.is_contiguous()


def _own_kernel(*given: Any) -> None:
    launches.find(_prepare_own, given[:9], given[9:])(*given[:9])


def _pack_kernel(*given: Any) -> None:
    launches.find(_prepare_pack, given, ())(*given)


def _merge_kernel(*given: Any) -> None:
    launches.find(_prepare_merge, given, ())(*given)


def _fake(*given: Any) -> None:
    pass


implement(_library, "own_lists", reference=reference.own_lists, kernel=_own_kernel, fake=_fake)
implement(_library, "pack_parts", reference=reference.pack_parts, kernel=_pack_kernel, fake=_fake)
implement(_library, "merge_parts", reference=reference.merge_parts, kernel=_merge_kernel, fake=_fake)
