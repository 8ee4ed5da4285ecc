"""Launches: ask the plan, choose the kernel, start it on the tensors' device and its current stream.

Nothing here checks what arguments.py does. Each ``prepare_`` function makes ready what calls with tensors that look
alike have in common. A kernel is compiled once for each set of constants: head sizes, dtype, the blocks of the plan,
whether pages hold whole blocks, whether programs merge the two parts of a list; never for a batch, a length, heads,
tokens or pages, a scale or other numbers of parts. TileLang's cache has what the module ``compile`` has built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import tilelang
import torch

from kernel_reference.checks import fail
from kernel_reference.dispatch import allocator
from kernel_reference.lasting import nothing
from kernel_reference.launching import device_properties, launch_nothing, on_device
from tilelang_mla.arguments import Decode8bitTensors, DecodeTensors, MergeTensors, PrefillTensors
from tilelang_mla.caches import views_of
from tilelang_mla.forms import LINE, form_of, is_addressed, packed_form
from tilelang_mla.kernels.build import executable_of, quick_links, quick_proofs, side_by_side
from tilelang_mla.kernels.cuda import text_of
from tilelang_mla.kernels.passes import fewer_passes
from tilelang_mla.plan import (
    STAGES_OF_RECORDS,
    DecodeProblem,
    DecodeTiles,
    DeviceLimits,
    PrefillPlan,
    PrefillProblem,
    merge_grid,
    plan_of_call,
    plan_prefill,
    tiles_8bit,
)
from tilelang_mla.prompts import prefill_in_parts
from tilelang_mla.replays import DecodeRun
from tilelang_mla.sparse.arguments import SparseTensors
from tilelang_mla.sparse.tiles import has_a_part_each, plan_of_lists
from tilelang_mla.waves import finds_long

Tensor = torch.Tensor

# "cuda" alone would be read as sm_50.
TARGET = {"kind": "cuda", "arch": "sm_90a"}
# Roles run side by side: what one is done with is not free for another, and TileLang's own thread barriers do not know
# of the kernels' barriers.
PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}
LOG2_E = 1.4426950408889634
# Kernels take a scale above 0. Times this one any score is 0, and a masked one still minus infinity.
ZERO_SCALE = 1e-30
# As the kernels have it: programs cut sequences themselves.
_SHARED = 2
# And take those of more blocks than one first.
_LONG_FIRST = 2


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on. The kernels are those of sm_90 alone."""
    properties = device_properties(device)
    if properties.capability != (9, 0):
        got = f"{torch.cuda.get_device_name(device)}, {properties.capability}"
        raise RuntimeError(f"q.device must be of compute capability 9.0 (H100, H200, GH200), got {got}")
    return DeviceLimits(properties.cores, properties.shared_memory)


@lru_cache
def compiled(name: str, **constants: Any) -> Any:
    """A compiled kernel, from TileLang's cache if it is there; it takes seconds otherwise."""
    text = text_of(name, **constants)
    with quick_proofs(), quick_links(), fewer_passes(name):
        # The cython backend would let all kernels of a stream overlap, not only those that wait for each other.
        return tilelang.compile(text, target=TARGET, execution_backend="tvm_ffi", pass_configs=PASS_CONFIGS)


@lru_cache
def kernel(name: str, **constants: Any) -> Any:
    """What starts a compiled kernel: its function itself, without TileLang's 3 us of Python round each call."""
    return executable_of(compiled(name, **constants))["main"]


# Those that :func:`kernels` has been asked for.
_known: set[Any] = set()


def kernels(*wanted: tuple[str, dict[str, Any]] | None) -> list[Any]:
    """What starts the kernels of a call, None for None; those that are new are compiled side by side."""
    keys = {(one[0], *one[1].items()): one for one in wanted if one is not None}
    side_by_side(lambda one: kernel(one[0], **one[1]), [one for key, one in keys.items() if key not in _known])
    _known.update(keys)
    return [None if one is None else kernel(one[0], **one[1]) for one in wanted]


# Decoding


def decode_constants(problem: DecodeProblem, tiles: DecodeTiles, dtype: torch.dtype) -> dict[str, Any]:
    """What the decoding kernel is compiled for."""
    gather = problem.page_size % tiles.block_n != 0
    boxes = gather and tiles.loads_boxes(problem)
    return {
        "dim_nope": problem.dim_nope, "dim_rope": problem.dim_rope, "dtype": dtype, "block_n": tiles.block_n,
        "num_stages": tiles.num_stages, "gather": gather, "per_token": problem.per_token,
        "by_rows": gather and tiles.loads_by_rows(problem), "early": tiles.asks_early(problem),
        **({"boxes": True} if boxes else {}),
    }  # fmt: skip


def decode_8bit_constants(problem: DecodeProblem, tiles: DecodeTiles, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel over a cache of 8 bits is compiled for, or over lists; keys lie anywhere."""
    constants = {**decode_constants(problem, tiles, dtype), "cache": problem.cache}
    for of_pages in ("gather", "early", "boxes"):
        constants.pop(of_pages, None)
    constants["by_rows"] = tiles.loads_by_rows(problem)
    if tiles.keys_are_rows(problem):
        constants["block_m"] = tiles.block_m
    if tiles.paired and tiles.widens_by_rows(problem):
        constants["paired"] = True
    if tiles.narrow and dtype == torch.bfloat16:
        constants["narrow"] = True
    if tiles.records_are_rows(problem):
        constants |= {"by_rows": False, "num_stages": STAGES_OF_RECORDS}
    return constants


def prepare_decode_8bit(
    problem: DecodeProblem, plan: DecodeTiles | None, tensors: Decode8bitTensors
) -> Callable[..., None]:
    """What attends over a cache of 8 bits, called with the tensors."""
    q, kv, seqlens_k, block_table, first_part, order, _, out, lse = tensors
    attend = prepare_decode(problem, plan, DecodeTensors(q, kv, seqlens_k, block_table, first_part, order, out, lse))

    def run(q, kv, seqlens_k, block_table, first_part, order, kv_scale, out, lse):  # type: ignore[no-untyped-def]
        attend(q, (kv, kv_scale), seqlens_k, block_table, first_part, order, out, lse)

    return run


def _keys_of(problem: DecodeProblem, kv: Tensor) -> tuple[Callable[[Any], tuple[Tensor, ...]], bool]:
    """What makes the kernel's tensors of a cache, and whether TMA descriptors can address it."""
    pages, page_size, width = max(problem.pages, 1), problem.page_size, kv.shape[3]
    form = form_of((pages, page_size, width), (kv.stride(0), kv.stride(1), 1))

    def keys(kv: Tensor) -> tuple[Tensor, ...]:
        if kv.data_ptr() & 15:
            check_aligned(kv=kv)
        return (kv.as_strided(*form) if problem.pages else kv.new_zeros(form[0]),)

    def keys_8bit(given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        cache, kv_scale = given
        [kv] = keys(cache)
        latent, rope, scales = views_of(kv, problem.dim_nope)
        rope = rope if problem.dim_rope else latent
        return latent, rope, scales if kv_scale is None else kv_scale.view(1, 1, 1)  # type: ignore[return-value]

    return keys_8bit if problem.cache else keys, 0 not in form[1]


def prepare_decode(problem: DecodeProblem, plan: DecodeTiles | None, tensors: DecodeTensors) -> Callable[..., None]:
    """What attends, called with the tensors; over a cache of 8 bits, with it and its scale in kv's place."""
    q, kv, _, block_table, first_part, order, out, lse = tensors
    if out.numel() == 0:
        return launch_nothing
    if block_table.shape[1] == 0:
        return _see_nothing
    limits = device_limits(q.device)
    tiles, shared = plan_of_call(problem, limits) if plan is None else (plan, False)
    if problem.cache:
        tiles = tiles_8bit(problem, tiles, limits)
    check_fits(problem, tiles, limits)
    batch, rows, heads, width = problem.sequences, problem.rows, problem.num_heads, q.shape[3]
    dim_nope, causal, softmax_scale = problem.dim_nope, int(problem.causal), problem.softmax_scale
    per_token = problem.per_token
    columns = block_table.shape[1]
    keys, by_tma = _keys_of(problem, kv)
    if problem.cache:
        constants = decode_8bit_constants(problem, tiles, q.dtype)
    else:
        constants = decode_constants(problem, tiles, q.dtype)
        if not by_tma:
            by_rows = tiles.loads_by_rows(problem)
            constants.pop("boxes", None)
            constants |= {"gather": True, "by_rows": by_rows, "early": by_rows and constants["early"]}
    num_parts = tiles.num_parts(batch)
    merged = num_parts > batch
    q_form = packed_form(q)
    table_form = form_of((batch, columns), (block_table.stride(0), 1))
    table_as_it_is = block_table.stride() == table_form[1]
    out_form = packed_form(out)
    attend, merge = kernels(
        ("decode_8bit" if problem.cache else "decode", constants),
        ("merge", {"dim_nope": dim_nope, "dtype": q.dtype}) if merged else None,
    )
    merging = merge_grid(batch, rows, problem.capacity, tiles, limits.cores)
    # The workspace of partial results, in float32; of one that is not used where there is one part.
    partials = num_parts if merged else 1
    device, dtype = q.device, q.dtype
    make_parts, make_part_lse, make_pieces, make_packed = (
        allocator(torch.empty(shape, dtype=of, device=device))
        for shape, of in (
            ((partials, rows, dim_nope), torch.float32), ((partials, rows), torch.float32), ((2 * batch,), torch.int32),
            ((batch, rows, dim_nope), dtype),
        )
    )  # fmt: skip
    # Stands in for an lse that nobody wants; nobody writes it.
    no_lse = nothing(device).view(1, 1, 1)
    scale = max(abs(softmax_scale), ZERO_SCALE) * LOG2_E
    by = _SHARED if shared else int(first_part is not None)
    programs = tiles.num_programs(problem, by == _SHARED, first_part is not None or plan is None, limits.cores)
    ordered, places = int(order is not None), num_parts * tiles.row_tiles(rows)
    if plan is None and not (shared or problem.cache):
        ordered = _LONG_FIRST if finds_long(problem.capacity, tiles.block_n, rows, places, programs) else 0
    flags = (by, ordered, int(lse is not None))

    def arguments(q, kv, seqlens_k, block_table, first_part, order, out, lse):  # type: ignore[no-untyped-def]
        """Of both kernels, and what is to be copied, and where to."""
        q = q.contiguous().view(batch, rows, width) if q_form is None else q.as_strided(*q_form)
        address = out.data_ptr()
        if q.data_ptr() & 15:
            check_aligned(q=q)
        if softmax_scale < 0:
            q = -q
        copied = out_form is None or address & 15
        packed = make_packed() if out_form is None or copied else out.as_strided(*out_form)
        parts, part_lse = make_parts(), make_part_lse()
        own_lse = no_lse if lse is None else lse
        table = block_table if table_as_it_is else block_table.as_strided(*table_form)
        # Tensors of one dimension that stand in for those of a schedule, or for what programs cut.
        stand_in = seqlens_k.view(-1) if per_token else seqlens_k
        pieces = make_pieces() if shared else stand_in
        bounds = stand_in if first_part is None else first_part
        of_attend = (
            q, *keys(kv), seqlens_k, table, bounds, stand_in if order is None else order, packed, own_lse, parts,
            part_lse, pieces, scale, heads, causal, num_parts, tiles.num_splits, *flags, programs,
        )  # fmt: skip
        cuts = pieces if shared else bounds
        of_merge = (cuts, packed, own_lse, parts, part_lse, heads, tiles.num_splits, *merging, by, flags[2])
        return of_attend, of_merge, [(out, packed.view(out.shape))] if copied else []

    work = [4 * partials * rows * dim_nope, 4 * partials * rows, 8 * batch]
    return on_device(device, DecodeRun(arguments, (attend, merge), work, [no_lse]))


# Sparse decoding


def sparse_constants(problem: DecodeProblem, tiles: DecodeTiles, dtype: torch.dtype, known: str = "") -> dict[str, Any]:
    """What the kernel over lists of keys is compiled for; known: "joined", "even", where programs know their parts."""
    constants = decode_8bit_constants(problem, tiles, dtype) | ({known: True} if known else {})
    del constants["per_token"]
    return constants


def prepare_sparse(problem: DecodeProblem, plan: DecodeTiles | None, tensors: SparseTensors) -> Callable[..., None]:
    """What attends to lists of keys, called with the tensors; a list is a sequence of one query token."""
    q, kv, indices, topk_length, attn_sink, first_part, order, out, lse = tensors
    if out.numel() == 0:
        return launch_nothing
    if indices.shape[2] == 0:
        return _see_nothing
    limits = device_limits(q.device)
    counted = topk_length is not None
    tiles, shared = plan_of_lists(problem, limits, counted) if plan is None else (plan, False)
    if problem.cache:
        tiles = tiles_8bit(problem, tiles, limits)
    check_fits(problem, tiles, limits)
    lists, heads, width, dim_nope = problem.sequences, problem.num_heads, q.shape[3], problem.dim_nope
    keys, _ = _keys_of(problem, kv)
    joined = first_part is None and not shared and tiles.joins(problem)
    num_parts = tiles.num_parts(lists)
    merged = num_parts > lists and not joined and not (shared and problem.capacity <= tiles.block_n)
    sinking = {} if attn_sink is None else {"sink": True}
    # Programs take lists that are alike by turns, if there are more of these than SMs.
    programs = tiles.num_programs(problem, shared, first_part is not None or plan is None, limits.cores)
    even = not shared and first_part is None and has_a_part_each(tiles, problem, programs)
    attend, merge = kernels(
        ("decode_sparse", sparse_constants(problem, tiles, q.dtype, "joined" if joined else "even" if even else "")),
        ("merge", {"dim_nope": dim_nope, "dtype": q.dtype, **sinking}) if merged else None,
    )
    merging = merge_grid(lists, heads, problem.capacity, tiles, limits.cores)
    partials = num_parts if merged else 1
    device, dtype, softmax_scale = q.device, q.dtype, problem.softmax_scale
    make_parts, make_part_lse, make_pieces, make_packed, make_lse = (
        allocator(torch.empty(shape, dtype=of, device=device))
        for shape, of in (
            ((partials, heads, dim_nope), torch.float32), ((partials, heads), torch.float32),
            ((2 * lists,), torch.int32), ((lists, heads, dim_nope), dtype), ((lists, heads, 1), torch.float32),
        )
    )  # fmt: skip
    # Stand in for sinks and scales, and for an lse; nobody reads them.
    unread = nothing(device)
    no_lse = unread.view(1, 1, 1)
    scale = max(abs(softmax_scale), ZERO_SCALE) * LOG2_E
    by = _SHARED if shared else int(first_part is not None)
    flags = (by, int(order is not None), int(lse is not None))
    in_place, by_token = out.is_contiguous(), lse is not None and lse.transpose(1, 2).is_contiguous()
    each = 0 if topk_length is None else q.shape[1]
    q_form = form_of((lists, heads, width), q.reshape(lists, heads, width).stride())
    addressed = is_addressed(q_form)

    def arguments(q, kv, indices, topk_length, attn_sink, first_part, order, out, lse):  # type: ignore[no-untyped-def]
        """Of both kernels, and what is to be copied, and where to."""
        flat = q.reshape(lists, heads, width)
        flat = flat.as_strided(*q_form) if addressed else flat.contiguous()
        check_aligned(q=flat)
        if softmax_scale < 0:
            flat = -flat
        held = keys((kv, None) if problem.cache else kv)
        if not problem.cache:
            held = (*held, held[0][..., dim_nope if problem.dim_rope else 0 :], unread)
        copied = not in_place or out.data_ptr() & 15
        packed = make_packed() if copied else out.view(lists, heads, dim_nope)
        parts, part_lse = make_parts(), make_part_lse()
        own_lse = no_lse
        if lse is not None:
            own_lse = lse.transpose(1, 2).view(lists, heads, 1) if by_token else make_lse()
        table = indices.view(lists, -1)
        stand_in = table.view(-1)
        lengths = stand_in if topk_length is None else topk_length
        pieces = make_pieces() if shared else stand_in
        bounds = stand_in if first_part is None else first_part
        of_attend = (
            flat, *held, lengths, table, unread if attn_sink is None else attn_sink, bounds,
            stand_in if order is None else order, packed, own_lse, parts, part_lse, pieces, scale, num_parts,
            tiles.num_splits, *flags, each, int(attn_sink is not None), programs,
        )  # fmt: skip
        sinks = () if attn_sink is None else (attn_sink,)
        cuts = pieces if shared else bounds
        of_merge = (cuts, packed, own_lse, parts, part_lse, *sinks, heads, tiles.num_splits, *merging, by, flags[2])
        copies = [(out, packed.view(out.shape))] if copied else []
        if lse is not None and not by_token:
            copies.append((lse, own_lse.view(out.shape[:3]).transpose(1, 2)))
        return of_attend, of_merge, copies

    work = [4 * partials * heads * dim_nope, 4 * partials * heads, 8 * lists]
    return on_device(device, DecodeRun(arguments, (attend, merge), work, [unread]))


# Merging


def prepare_merge(tensors: MergeTensors) -> Callable[..., None]:
    """What merges the parts of ranks, called with the tensors."""
    parts = tensors.parts
    if tensors.lse.numel() == 0:
        return launch_nothing
    device_limits(parts.device)
    merge = kernel("merge_ranks", dim_nope=parts.shape[2], dtype=parts.dtype)
    return on_device(parts.device, merge)


# Prefill


def prefill_constants(problem: PrefillProblem, plan: PrefillPlan, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of prefill is compiled for."""
    return {
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "dtype": dtype, "block_m": plan.block_m,
        "block_n": plan.block_n, "num_stages": plan.num_stages, **({"in_parts": True} if plan.num_splits > 1 else {}),
    }  # fmt: skip


def prepare_prefill(problem: PrefillProblem, plan: PrefillPlan | None, tensors: PrefillTensors) -> Callable[..., None]:
    """What attends, called with the tensors."""
    q, k, v, _, _, out, lse = tensors
    if out.numel() == 0:
        return launch_nothing
    if problem.tokens_k == 0:
        return _see_nothing
    limits = device_limits(q.device)
    chosen = plan_prefill(problem, limits) if plan is None else plan
    check_fits(problem, chosen, limits)
    causal, softmax_scale = int(problem.causal), problem.softmax_scale
    forms = [form_of(tensor.shape, tensor.stride()) for tensor in (q, k, v)]
    out_form = form_of(out.shape, out.stride())
    lines = all(stride % LINE == 0 for stride in out_form[1][:-1])
    of_merge = {"dim_nope": problem.head_dim_v, "dtype": q.dtype, "of_float32": True}
    attend, merge = kernels(
        ("prefill", prefill_constants(problem, chosen, q.dtype)),
        ("merge_ranks", of_merge) if chosen.num_splits > 1 else None,
    )
    if merge is not None:
        attend = prefill_in_parts(attend, merge, chosen.num_splits)
    num_slots = chosen.num_slots(problem)
    tiles = num_slots * problem.num_heads * chosen.num_splits
    programs, heads_each = chosen.num_programs(problem, limits.cores), chosen.heads_at_once(problem)
    # Programs that are as many as tiles ask for no more.
    make_count = torch.zeros if programs < tiles else torch.empty
    scale = max(abs(softmax_scale), ZERO_SCALE) * LOG2_E
    wants_lse = int(lse is not None)
    device = q.device

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse):  # type: ignore[no-untyped-def]
        q, k, v = [
            tensor.contiguous() if 0 in form[1] else tensor.as_strided(*form)
            for tensor, form in zip((q, k, v), forms, strict=True)
        ]
        check_aligned(q=q, k=k, v=v)
        if softmax_scale < 0:
            q = -q
        copied = not lines or out.data_ptr() % 16
        packed = torch.empty(out.shape, dtype=out.dtype, device=device) if copied else out.as_strided(*out_form)
        own_lse = torch.empty((1, 1), dtype=torch.float32, device=device) if lse is None else lse
        taken = make_count((1,), dtype=torch.int32, device=device)
        attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, packed, own_lse, taken, scale, causal, num_slots, wants_lse,
            programs, heads_each,
        )  # fmt: skip
        if copied:
            out.copy_(packed)

    return on_device(device, run)


# What both have


def check_fits(problem: DecodeProblem | PrefillProblem, plan: DecodeTiles | PrefillPlan, limits: DeviceLimits) -> None:
    needed = plan.shared_memory(problem)  # type: ignore[arg-type]
    if needed > limits.shared_memory:
        fail("plan", f"of blocks that fit in {limits.shared_memory} bytes of shared memory", f"{plan}, of {needed}")


def check_aligned(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            fail(name, "at an address that is a multiple of 16", hex(tensor.data_ptr()))


def _see_nothing(*tensors: Tensor | None) -> None:
    """Where there are no keys."""
    out, lse = tensors[-2:]
    if out is not None:
        out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
