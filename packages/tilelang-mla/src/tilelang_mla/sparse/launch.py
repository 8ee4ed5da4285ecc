"""The launch of sparse prefill; see launch.py, which has those of all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_reference.lasting import nothing
from kernel_reference.launching import launch_nothing, on_device
from tilelang_mla import launch
from tilelang_mla.forms import LINE, form_of
from tilelang_mla.plan import DecodeProblem, DecodeTiles
from tilelang_mla.sparse.arguments import SparsePrefillTensors
from tilelang_mla.sparse.tiles import of_few_heads, sparse_prefill_tiles

Tensor = torch.Tensor


def prefill_sparse_constants(problem: DecodeProblem, tiles: DecodeTiles, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of sparse prefill is compiled for."""
    constants = {
        "dim_nope": problem.dim_nope, "dim_rope": problem.dim_rope, "dtype": dtype, "block_n": tiles.block_n,
        "num_stages": tiles.num_stages, "by_rows": tiles.loads_by_rows(problem), "early": tiles.early,
    }  # fmt: skip
    return constants | {"by_rows": True, "block_m": tiles.block_m} if of_few_heads(tiles, problem) else constants


def prepare_prefill_sparse(
    problem: DecodeProblem, plan: DecodeTiles | None, tensors: SparsePrefillTensors
) -> Callable[..., None]:
    """What attends to the keys that each query token lists, called with the tensors."""
    q, kv, indices, topk_length, attn_sink, out, _, _ = tensors
    if out.numel() == 0:
        return launch_nothing
    if indices.numel() == 0 or problem.pages == 0:
        return _see_nothing
    limits = launch.device_limits(q.device)
    tiles = sparse_prefill_tiles(problem, limits) if plan is None else plan
    launch.check_fits(problem, tiles, limits)
    attend = launch.kernel("prefill_sparse", **prefill_sparse_constants(problem, tiles, q.dtype))
    # A persistent kernel: a list's first keys are loaded while the one before is finished.
    programs = min(problem.sequences * tiles.row_tiles(problem.num_heads), limits.cores)
    scale = max(abs(problem.softmax_scale), launch.ZERO_SCALE) * launch.LOG2_E
    negated, flags = problem.softmax_scale < 0, (int(topk_length is not None), int(attn_sink is not None))
    q_form, kv_form, out_form = (form_of(tensor.shape, tensor.stride()) for tensor in (q, kv, out))
    lines = all(stride % LINE == 0 for stride in out_form[1][:-1])
    # Stands in for lengths and sinks; nobody reads it.
    device, unread = q.device, nothing(q.device)

    def run(q, kv, indices, topk_length, attn_sink, out, max_logits, lse):  # type: ignore[no-untyped-def]
        q = q.contiguous() if 0 in q_form[1] else q.as_strided(*q_form)
        launch.check_aligned(q=q, kv=kv)
        if negated:
            q = -q
        copied = not lines or out.data_ptr() % 16
        packed = torch.empty(out.shape, dtype=out.dtype, device=device) if copied else out.as_strided(*out_form)
        table = indices.view(indices.shape[0], -1)
        attend(
            q, kv.as_strided(*kv_form), table, table.view(-1) if topk_length is None else topk_length,
            unread if attn_sink is None else attn_sink, packed, max_logits, lse[:, :, None], scale, *flags, programs,
        )  # fmt: skip
        if copied:
            out.copy_(packed)

    return on_device(device, run)


def _see_nothing(*tensors: Tensor | None) -> None:
    """Where there are no keys."""
    out, max_logits, lse = tensors[-3:]
    out.zero_()  # type: ignore[union-attr]
    for logits in (max_logits, lse):
        logits.fill_(-torch.inf)  # type: ignore[union-attr]
