"""The torch op ``choose``: the best columns of rows of scores, on a CPU, on a GPU, and while torch.compile traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.choosing import reference
from kernel_reference.dispatch import PreparedLaunches, fresh, implement, launch_module, runs_now

Tensor = torch.Tensor

_library = torch.library.Library("blocksparse_attn", "FRAGMENT")
_library.define(
    "choose(Tensor scores, Tensor? possible, Tensor(a!) indices, Tensor(b!) counts, int topk, int local, int sink,"
    " bool within, int rows, int q_block, int k_block) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "pack(Tensor indices, Tensor counts, Tensor(a!) crow, Tensor(b!) col) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
launches = PreparedLaunches()


class Reach(NamedTuple):
    """Which columns a row may choose from: those of ``k_block`` keys up to the end of its own ``q_block`` queries, the
    ``rows`` of each head counted anew."""

    rows: int = 1
    q_block: int = 1
    k_block: int = 1


def chosen(
    scores: Tensor, possible: Tensor | Reach, topk: int, local: int, sink: int, within: bool
) -> tuple[Tensor, Tensor]:
    """Of scores [R, C] the ``topk`` best columns of each row, among its first ``possible`` [R] int32.

    Beside these, or ``within`` them, the last ``local`` of those and the first ``sink``. -inf and NaN are not chosen;
    of equal scores the lower column is. Returns rising indices [R, width] int32, padded with -1, and counts [R] int32.
    """
    width = min(scores.shape[1], topk if within else topk + local + sink)
    rows, device = scores.shape[0], scores.device
    now = runs_now((scores, None if isinstance(possible, Reach) else possible))
    new = fresh if now else torch.empty
    indices, counts = (new(size, dtype=torch.int32, device=device) for size in ((rows, width), (rows,)))
    reach = possible if isinstance(possible, Reach) else Reach()
    given = None if isinstance(possible, Reach) else possible
    tensors = (scores, given, indices, counts)
    choose = _kernel if now else torch.ops.blocksparse_attn.choose
    choose(*tensors, topk, local, sink, within, *reach)
    return indices, counts


def packed(indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Lists [heads, rows, width], the first ``counts`` of each row's entries, one behind the other: crow and col."""
    heads, rows, width = indices.shape
    now = runs_now((indices, counts))
    new = fresh if now else torch.empty
    crow, col = (new((heads, count), dtype=torch.int32, device=indices.device) for count in (rows + 1, rows * width))
    pack = _pack_kernel if now else torch.ops.blocksparse_attn.pack
    pack(indices, counts, crow, col)
    return crow, col


def _prepare(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    return launch_module("blocksparse_attn.choosing").prepare_choose(given, numbers)


def _kernel(*given: Any) -> None:
    launches.find(_prepare, given[:4], given[4:])(*given[:4])


def _prepare_pack(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    return launch_module("blocksparse_attn.choosing").prepare_pack(given)


def _pack_kernel(*given: Any) -> None:
    launches.find(_prepare_pack, given, ())(*given)


def _fake(*given: Any) -> None:
    pass


implement(_library, "choose", reference=reference.choose, kernel=_kernel, fake=_fake)
implement(_library, "pack", reference=reference.pack, kernel=_pack_kernel, fake=_fake)
