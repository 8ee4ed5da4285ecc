"""The torch ops: their schemas and their implementations on a CPU, on a GPU, and while torch.compile traces.

===========  =============================================================================
prefill      writes the outputs, and the logarithms of the sums, that it is given; ragged
decode       the same over a paged latent cache
decode_8bit  the same over one of 8 bits
decode_sparse  the same over keys that each query token lists
prefill_sparse  the same of a prompt's tokens, and their largest scores
merge        writes the whole of an attention from the parts that ranks have of its keys
===========  =============================================================================

Every implementation checks its arguments. On a GPU checks, plan and launch are made once for each set of shapes,
strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import MemoryOverlap, check_no_overlap, fail, values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.transforms import check_no_transforms
from tilelang_mla import reference
from tilelang_mla.arguments import (
    Decode8bitTensors,
    DecodeOptions,
    DecodeTensors,
    MergeTensors,
    PrefillOptions,
    PrefillTensors,
    check_decode,
    check_decode_values,
    check_merge,
    check_prefill,
    check_prefill_values,
)
from tilelang_mla.sparse.arguments import (
    SparseOptions,
    SparsePrefillOptions,
    SparsePrefillTensors,
    SparseTensors,
    check_sparse,
    check_sparse_prefill,
)

_library = torch.library.Library("tilelang_mla", "DEF")
_library.define(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor(a!) out, Tensor(b!)? lse,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "decode(Tensor q, Tensor kv, Tensor seqlens_k, Tensor block_table, Tensor? first_part, Tensor? order,"
    " Tensor(a!) out, Tensor(b!)? lse, int dim_nope, float softmax_scale, bool causal, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "decode_8bit(Tensor q, Tensor kv, Tensor seqlens_k, Tensor block_table, Tensor? first_part, Tensor? order,"
    " Tensor? kv_scale, Tensor(a!) out, Tensor(b!)? lse, int dim_nope, float softmax_scale, bool causal,"
    " int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "decode_sparse(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, Tensor? first_part,"
    " Tensor? order, Tensor(a!) out, Tensor(b!)? lse, int dim_nope, float softmax_scale, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "prefill_sparse(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, Tensor(a!) out,"
    " Tensor(b!) max_logits, Tensor(c!) lse, int d_v, float sm_scale, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "merge(Tensor parts, Tensor part_lse, Tensor(a!) out, Tensor(b!) lse) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The tensors come first, and torch leaves out a plan that is None.
_PREFILL, _DECODE, _DECODE_8BIT = (len(kind._fields) for kind in (PrefillTensors, DecodeTensors, Decode8bitTensors))
_DECODE_SPARSE, _PREFILL_SPARSE = len(SparseTensors._fields), len(SparsePrefillTensors._fields)
_WRITTEN = ("out", "lse")
_WRITTEN_SPARSE = ("out", "max_logits", "lse")

launches = PreparedLaunches()


def _launch_module() -> Any:
    return launch_module("tilelang_mla", "TileLang, which tilelang-mla[tilelang] brings")


# Prefill


def _fake_prefill(*given: Any) -> None:
    check_prefill(PrefillTensors(*given[:_PREFILL]), PrefillOptions(*given[_PREFILL:]))


def _reference_prefill(*given: Any) -> None:
    tensors = PrefillTensors(*given[:_PREFILL])
    problem, _ = check_prefill(tensors, PrefillOptions(*given[_PREFILL:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_prefill_values(problem, tensors)
    reference.prefill(problem, tensors)


def _prepare_prefill(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = PrefillTensors(*given)
    problem, plan = check_prefill(tensors, PrefillOptions(*numbers))
    return launch.prepare_prefill(problem, plan, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN), problem


def prefill_now(*given: Any) -> None:
    """The op on a GPU, called at once: see ``kernel_reference.dispatch.runs_now``."""
    tensors = given[:_PREFILL]
    run, check_overlap, problem = launches.find(_prepare_prefill, tensors, given[_PREFILL:])
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        check_prefill_values(problem, PrefillTensors(*tensors))
    run(*tensors)


# Decoding


def _fake_decode(*given: Any) -> None:
    check_decode(DecodeTensors(*given[:_DECODE]), DecodeOptions(*given[_DECODE:]))


def _reference_decode(*given: Any) -> None:
    tensors = DecodeTensors(*given[:_DECODE])
    problem, plan = check_decode(tensors, DecodeOptions(*given[_DECODE:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_decode_values(problem, plan, tensors)
    reference.decode(problem, tensors)


def _prepare_decode(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = DecodeTensors(*given)
    problem, plan = check_decode(tensors, DecodeOptions(*numbers))
    run = launch.prepare_decode(problem, plan, tensors)
    return run, MemoryOverlap(tensors._asdict(), _WRITTEN), problem, plan


def decode_now(*given: Any) -> None:
    """The op on a GPU, called at once: see ``kernel_reference.dispatch.runs_now``."""
    tensors = given[:_DECODE]
    run, check_overlap, problem, plan = launches.find(_prepare_decode, tensors, given[_DECODE:])
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        check_decode_values(problem, plan, DecodeTensors(*tensors))
    run(*tensors)


# Decoding over a cache of 8 bits


def _fake_decode_8bit(*given: Any) -> None:
    check_decode(Decode8bitTensors(*given[:_DECODE_8BIT]), DecodeOptions(*given[_DECODE_8BIT:]))


def _reference_decode_8bit(*given: Any) -> None:
    tensors = Decode8bitTensors(*given[:_DECODE_8BIT])
    problem, plan = check_decode(tensors, DecodeOptions(*given[_DECODE_8BIT:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_decode_values(problem, plan, tensors)
    reference.decode_8bit(problem, tensors)


def _prepare_decode_8bit(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = Decode8bitTensors(*given)
    problem, plan = check_decode(tensors, DecodeOptions(*numbers))
    run = launch.prepare_decode_8bit(problem, plan, tensors)
    return run, MemoryOverlap(tensors._asdict(), _WRITTEN), problem, plan


def decode_8bit_now(*given: Any) -> None:
    """The same of the op over a cache of 8 bits."""
    tensors = given[:_DECODE_8BIT]
    run, check_overlap, problem, plan = launches.find(_prepare_decode_8bit, tensors, given[_DECODE_8BIT:])
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        check_decode_values(problem, plan, Decode8bitTensors(*tensors))
    run(*tensors)


# Sparse decoding


def _fake_decode_sparse(*given: Any) -> None:
    check_sparse(SparseTensors(*given[:_DECODE_SPARSE]), SparseOptions(*given[_DECODE_SPARSE:]))


def _reference_decode_sparse(*given: Any) -> None:
    tensors = SparseTensors(*given[:_DECODE_SPARSE])
    problem, _ = check_sparse(tensors, SparseOptions(*given[_DECODE_SPARSE:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    reference.decode_sparse(problem, tensors)


def _prepare_decode_sparse(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = SparseTensors(*given)
    problem, plan = check_sparse(tensors, SparseOptions(*numbers))
    return launch.prepare_sparse(problem, plan, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN)


def decode_sparse_now(*given: Any) -> None:
    """The same of the op over lists of keys."""
    tensors = given[:_DECODE_SPARSE]
    run, check_overlap = launches.find(_prepare_decode_sparse, tensors, given[_DECODE_SPARSE:])
    check_overlap(*tensors)
    run(*tensors)


# Sparse prefill


def _fake_prefill_sparse(*given: Any) -> None:
    check_sparse_prefill(SparsePrefillTensors(*given[:_PREFILL_SPARSE]), SparsePrefillOptions(*given[_PREFILL_SPARSE:]))


def _reference_prefill_sparse(*given: Any) -> None:
    tensors = SparsePrefillTensors(*given[:_PREFILL_SPARSE])
    problem, _ = check_sparse_prefill(tensors, SparsePrefillOptions(*given[_PREFILL_SPARSE:]))
    check_no_overlap(tensors._asdict(), _WRITTEN_SPARSE)
    reference.prefill_sparse(problem, tensors)


def _prepare_prefill_sparse(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    _launch_module()
    from tilelang_mla.sparse.launch import prepare_prefill_sparse

    tensors = SparsePrefillTensors(*given)
    problem, plan = check_sparse_prefill(tensors, SparsePrefillOptions(*numbers))
    run = prepare_prefill_sparse(problem, plan, tensors)
    return run, MemoryOverlap(tensors._asdict(), _WRITTEN_SPARSE)


def prefill_sparse_now(*given: Any) -> None:
    """The same of the op of sparse prefill."""
    tensors = given[:_PREFILL_SPARSE]
    run, check_overlap = launches.find(_prepare_prefill_sparse, tensors, given[_PREFILL_SPARSE:])
    check_overlap(*tensors)
    run(*tensors)


# Merging


def _reference_merge(*given: torch.Tensor) -> None:
    tensors = MergeTensors(*given)
    check_merge(tensors)
    check_no_overlap(tensors._asdict(), _WRITTEN)
    reference.merge(tensors)


def _prepare_merge(given: tuple[Any, ...], _: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = MergeTensors(*given)
    check_merge(tensors)
    return launch.prepare_merge(tensors), MemoryOverlap(tensors._asdict(), _WRITTEN)


def _kernel_merge(*tensors: torch.Tensor) -> None:
    run, check_overlap = launches.find(_prepare_merge, tensors, ())
    check_overlap(*tensors)
    run(*tensors)


def _fake_merge(*given: torch.Tensor) -> None:
    check_merge(MergeTensors(*given))


def _refuse_vmap(kind: Any) -> Any:
    """Torch would look for a rule of batches, and tell its users to write one."""

    def refuse(*given: Any) -> None:
        check_no_transforms(**dict(zip(kind._fields, given, strict=False)))
        fail("tensors", "outside torch.vmap", "a batched one")

    return refuse


implement(_library, "prefill", reference=_reference_prefill, kernel=prefill_now, fake=_fake_prefill)
implement(_library, "decode", reference=_reference_decode, kernel=decode_now, fake=_fake_decode)
implement(_library, "decode_8bit", reference=_reference_decode_8bit, kernel=decode_8bit_now, fake=_fake_decode_8bit)
implement(
    _library, "decode_sparse", reference=_reference_decode_sparse, kernel=decode_sparse_now, fake=_fake_decode_sparse
)
implement(
    _library, "prefill_sparse", reference=_reference_prefill_sparse, kernel=prefill_sparse_now,
    fake=_fake_prefill_sparse,
)  # fmt: skip
implement(_library, "merge", reference=_reference_merge, kernel=_kernel_merge, fake=_fake_merge)
_library.impl("prefill", _refuse_vmap(PrefillTensors), "FuncTorchBatched")
_library.impl("decode", _refuse_vmap(DecodeTensors), "FuncTorchBatched")
_library.impl("decode_sparse", _refuse_vmap(SparseTensors), "FuncTorchBatched")
_library.impl("prefill_sparse", _refuse_vmap(SparsePrefillTensors), "FuncTorchBatched")
_library.impl("decode_8bit", _refuse_vmap(Decode8bitTensors), "FuncTorchBatched")
