"""From a checked problem and its plan to launches; called with the tensors of the op, in their order.

On CPU tensors a launch works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and
with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.integers import power_of_two_at_least, power_of_two_in
from kernel_reference.launching import (
    Launch,
    Run,
    TmaBox,
    TmaLaunch,
    by_alignment,
    device_properties,
    has_gluon,
    without_memory,
)
from prefix_prefill.addressing import Batch, Pages, chunk_of_keys, contiguous_tokens, largest_of, scaling
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.kernels import groups, portable
from prefix_prefill.merging.launch import LAUNCH_NOTHING, Sized, with_pieces, with_splits
from prefix_prefill.merging.launch import prepare_merge as prepare_merge
from prefix_prefill.plan import (
    DeviceLimits,
    PrefillPlan,
    Problem,
    has_values_split,
    is_gathered,
    is_packed,
    kind_of_batch,
    may_be_in_parts,
    multiplies_8_bits,
    plan_prefill,
    programs_of,
)
from prefix_prefill.tiles import (
    column_tiles,
    head_tiles,
    heads_per_tile,
    num_slots,
    stages_of_values,
    tokens_per_tile,
    units_of_keys,
    value_tiles,
)
from prefix_prefill.widening import with_widening

Tensor = torch.Tensor
Start = Callable[..., None]

# Kernels read 8-bit floats as integers: not every target knows the types.
_FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
# Of the largest soft cap whose weights bfloat16 holds without a running max: see kernels/hopper/capped.py.
_MOST_CAP = 55.0


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on."""
    found = device_properties(device)
    return DeviceLimits(
        cores=found.cores,
        shared_memory=found.shared_memory,
        hopper=found.capability == (9, 0) and has_gluon(),
        turing=found.capability == (7, 5),
        gaps=takes_gaps(),
    )


@lru_cache
def takes_gaps() -> bool:
    """``DeviceLimits.gaps``: from 3.8 on, a view of shared memory is as large as what it is a view of."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


class Layer:
    """What attends, batch after batch, with tensors that look like these but for the sizes of a batch.

    Kernels, their groups of arguments and descriptors' boxes are made once for each plan; :meth:`of_batch` adds a
    batch's integers and grids.
    """

    def __init__(self, problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> None:
        self.problem, self._plan, self._device = problem, plan, tensors.q.device
        self._forms = PrefillTensors(*map(without_memory, tensors))  # type: ignore[arg-type]
        self._first = Batch.of(problem, self._forms)
        self._plans: dict[Any, PrefillPlan] = {}
        self._sized: dict[PrefillPlan, Sized] = {}

    def of_batch(self, batch: Batch | None = None) -> Run:
        """What attends to a batch; without one to that of the tensors that the layer was made with."""
        batch = batch or self._first
        # Slices of a cache may come aligned or not: k, v and the caches must be for TMA.
        return by_alignment(lambda aligned: self._make(batch, aligned), slice(1, 5))

    def _make(self, batch: Batch, aligned: bool) -> Run:
        plan = self._plan or self._plan_of(batch.problem, self.problem.tma and aligned)
        if plan.hopper and not (self.problem.tma and aligned):
            wanted = "without hopper where the cache has scales, softmax_scale is below 0, or keys or values are not"
            fail("plan", f"{wanted} 16-byte aligned and of strides of whole 16 bytes", plan)
        sized = self._sized.get(plan)
        if sized is None:
            given = batch, plan, self._forms, self._device
            sized = with_widening(_attending, *given) if plan.widened else _attending(*given)
            self._sized[plan] = sized
        return sized(batch)

    def _plan_of(self, problem: Problem, tma: bool) -> PrefillPlan:
        kind = tma and kind_of_batch(problem, device_limits(self._device))
        plan = self._plans.get(kind)
        if plan is None:
            plan = plan_prefill(replace(problem, tma=tma), device_limits(self._device), problem.num_splits)
            if plan.hopper:
                self._plans[kind] = plan
        return plan


def _attending(batch: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """The plan's kernel, and the merge of its parts."""
    given = batch, plan, forms, device
    return with_pieces(_hopper(*given), *given) if plan.hopper else with_splits(_portable(*given), *given)


def prepare_prefill(problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> Run:
    """What attends, called with tensors that look like these."""
    if problem.tokens == 0:
        return LAUNCH_NOTHING
    return Layer(problem, plan, tensors).of_batch()


def _grid(problem: Problem, plan: PrefillPlan) -> tuple[int, int, int]:
    """Of the portable kernel: a slot for every tile."""
    slots = num_slots(problem, tokens_per_tile(problem.group, plan.block_m))
    return slots * problem.num_heads_kv * head_tiles(problem.group, plan.block_m) * plan.num_splits, 1, 1


# The tensors, or their pointers, as the kernels take them, what belongs together in one group. Named one by one, which
# is the quickest way that Python has.


def _for_portable(q, k, v, k_cache, v_cache, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, *rows):  # type: ignore[no-untyped-def]
    out, lse, draft, workspace, *levels = rows
    scales, results = (k_s, v_s, out_s), groups.Results(out, lse, workspace)
    batch = (table, cu, lengths, draft)
    return q, k, v, k_cache, v_cache, batch, (alibi, sinks), scales, results, tuple(levels) or None


def _for_hopper(q, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, out, lse, draft, *parts):  # type: ignore[no-untyped-def]
    return (q, out, lse), (table, cu, lengths, draft), (alibi, sinks), (k_s, v_s, out_s), parts


def _for_hopper_gathered(k_cache, v_cache, *given):  # type: ignore[no-untyped-def]
    rows, batch, *rest = _for_hopper(*given)  # type: ignore[no-untyped-call]
    return rows, (*batch, k_cache, v_cache), *rest


def _for_hopper_gathered_without_tails(*given):  # type: ignore[no-untyped-def]
    return None, None, None, None, *_for_hopper_gathered(*given)  # type: ignore[no-untyped-call]


def _for_hopper_without_tails(*given):  # type: ignore[no-untyped-def]
    return None, None, None, None, *_for_hopper(*given)  # type: ignore[no-untyped-call]


def _portable(
    first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device
) -> Callable[[Batch], Launch]:
    """The kernel for every target."""
    problem = first.problem
    q, k, v, out = forms.q, forms.k, forms.v, forms.out
    d, d_v, nothing = problem.head_dim, problem.head_dim_v, (0, 0, 0)
    k_pages, v_pages = (Pages.of(cache, problem.page_layout) for cache in (forms.k_cache, forms.v_cache))
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = scaling(forms.k_scale), scaling(forms.v_scale)
    s_k, s_v = (nothing if new is None else new.stride() for new in (k, v))
    reach = max(
        k_pages.reach(d), v_pages.reach(d_v), *((d - 1) * s[2] for s in (q.stride(), s_k)),
        *((d_v - 1) * s[2] for s in (out.stride(), s_v)),
    )  # fmt: skip
    strides = groups.Strides(
        q=q.stride(), k=s_k, v=s_v, k_cache=k_pages.strides, v_cache=v_pages.strides, k_scale=s_k_scale,
        v_scale=s_v_scale, out=out.stride(),
    )  # fmt: skip
    scores = groups.Scores(problem.softmax_scale, problem.softcap)
    numbers = groups.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, strides)
    config = groups.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=d,
        BLOCK_D=max(16, power_of_two_at_least(d)),
        DV=d_v,
        BLOCK_DV=max(16, power_of_two_at_least(d_v)),
        PAGE=problem.page_size,
        BOX=contiguous_tokens(problem, v_pages, plan.block_n),
        X=k_pages.x,
        CHUNK=chunk_of_keys(problem, k_pages, plan.block_m),
        STEP=k_pages.strides[1] if k_pages.x < d else 0,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        STAGES=plan.num_stages,
        NEW_KV=problem.new_kv,
        FP8=_FP8.get(forms.k_cache.dtype, 0),
        QUANTIZED_Q=problem.quantize_q,
        K_SCALED=k_scaled,
        V_SCALED=v_scaled,
        LIMIT=0 if problem.shared else largest_of(out),
        SOFTCAP=problem.softcap > 0,
        DRAFT=problem.draft,
        HAS_LEFT=problem.left >= 0,
        HAS_RIGHT=problem.right >= 0,
        SKIP_DECODE=problem.skip_decode,
        SHARED=problem.shared,
        CARRIED=problem.carried,
        WIDE=reach >= 2**31,
    )

    def counts(batch: Batch) -> tuple[int, ...]:
        return *batch.counts, num_slots(batch.problem, config.TOKENS), plan.num_splits

    attend = Launch(
        portable.attend,
        _grid(problem, plan),
        (*counts(first), problem.left, problem.right, scores, numbers, config),
        device,
        # The caches, where their dtype is not every target's.
        as_integers=(3, 4) if config.FP8 else (),
        group=_for_portable,
        num_warps=plan.num_warps,
    )

    return lambda batch: attend if batch is first else attend.resized(_grid(batch.problem, plan), counts(batch))


def prepare_kernel(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Start:
    """The plan's kernel alone, called with the op's tensors and what it has beside them."""
    batch = Batch.of(problem, forms)
    return (_hopper if plan.hopper else _portable)(batch, plan, forms, device)(batch)


def _boxes(
    problem: Problem, forms: PrefillTensors, box: int, new_box: int, k_columns: int, v_columns: int
) -> list[TmaBox]:
    """Of the caches, and of new keys and values, whose rows are as one page; for tiles of so many columns.

    A box is at most 128 bytes wide, over which shared memory is swizzled. Of caches L2 fetches no whole lines of 128
    bytes, which hold other heads' rows too: 64 that decode behind 8000 take 583 us on an H100, so 737, with heads of
    80, and 586, so 739, with 96.
    """
    boxes = []
    for cache, size, columns in (
        (forms.k_cache, problem.head_dim, k_columns), (forms.v_cache, problem.head_dim_v, v_columns)
    ):  # fmt: skip
        page, token, head, _, _ = Pages.of(cache, problem.page_layout).strides
        sizes, strides = [problem.num_blocks, problem.num_heads_kv, problem.page_size, size], [page, head, token, 1]
        if is_gathered(problem):
            # The kernel takes descriptors, and does not use these: any that can be encoded.
            sizes, strides = [1, problem.num_heads_kv, problem.num_blocks, size], [8, head, page, 1]
        width = min(columns, 1024 // problem.cache_bits)
        boxes.append(TmaBox(sizes, strides, [1, 1, box, width], problem.cache_bits, promotion=0))
    if is_packed(problem):
        boxes = _packed_boxes(problem, forms, box)
    if forms.k is None or forms.v is None:
        return 2 * boxes
    for new, size, columns in ((forms.k, problem.head_dim, k_columns), (forms.v, problem.head_dim_v, v_columns)):
        token, head, _ = new.stride()
        rows = [1, problem.num_heads_kv, problem.tokens, size]
        boxes.append(TmaBox(rows, [8, head, token, 1], [1, 1, new_box, min(columns, 64)]))
    return boxes


def _packed_boxes(problem: Problem, forms: PrefillTensors, box: int) -> list[TmaBox]:
    """Of caches whose tokens lie side by side: of keys 8 tokens by 8 elements, as in WGMMA's core matrices; of values
    so many tokens of each element.
    """
    boxes = []
    for cache, size, beside, tokens in (
        (forms.k_cache, problem.head_dim, 8, 8), (forms.v_cache, problem.head_dim_v, 1, box)
    ):  # fmt: skip
        page, head = cache.stride()[:2]
        sizes = [problem.num_blocks, problem.num_heads_kv, size // beside, problem.page_size * beside]
        shape = [1, 1, size // beside, tokens * beside]
        strides = [page, head, problem.page_size * beside, 1]
        boxes.append(TmaBox(sizes, strides, shape, promotion=0, swizzled=beside == 1))
    return boxes


def _is_weighed_by_a_constant(problem: Problem, forms: PrefillTensors) -> bool:
    """Whether weights of capped scores are relative to a constant: bfloat16 holds them, and lse need not be exact."""
    plain = not (problem.alibi or problem.shared or problem.carried)
    in_bfloat16 = forms.q.dtype == torch.bfloat16 and problem.cache_bits == 16
    return 0 < problem.softcap <= _MOST_CAP and plain and in_bfloat16 and forms.lse is None


def _hopper(first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """The kernel for sm_90, called like the portable one."""
    from prefix_prefill.kernels import hopper

    problem = first.problem
    # Where cached rows are gathered, boxes are those of new ones.
    gathered = is_gathered(problem)
    v_stages, v_keys = stages_of_values(problem, plan.block_n, plan.num_stages)
    box = min(v_keys, 64 if gathered else power_of_two_in(problem.page_size))
    if is_packed(problem):
        # Tokens of 128 bytes, over which shared memory is swizzled: of one element they lie side by side.
        box = min(box, 64)
    k_tiles = column_tiles(problem.head_dim, problem.cache_bits)
    v_tiles = value_tiles(problem.head_dim_v, plan.block_m, problem.cache_bits)
    if plan.q_in_registers or (plan.per_core > 1 and problem.head_dim_v > 192):
        # One of 256 columns would take more registers than there are, or than ptxas gives a product of two an SM.
        k_tiles, v_tiles = ((128, 128) if tiles == (256,) else tiles for tiles in (k_tiles, v_tiles))
    # By 16 rows, as pages are, prompts of 8192, 16384 and 65536 take 1033, 3955 and 68416 us on an H100, not 995, 3822,
    # 65999.
    new_box = max(box, min(plan.block_n, 64))
    boxes = _boxes(problem, forms, box, new_box, k_tiles[0], v_tiles[0])
    # A second tile whose boxes are as wide as those of the first comes by the same descriptor.
    k_tail, v_tail = (
        tiles[-1] * problem.cache_bits < min(1024, tiles[0] * problem.cache_bits) for tiles in (k_tiles, v_tiles)
    )
    if k_tail or v_tail:
        boxes += _boxes(problem, forms, box, new_box, k_tiles[-1], v_tiles[-1])
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = scaling(forms.k_scale), scaling(forms.v_scale)
    # In units of 8, and None for 1: of strides of 72 Triton would not know that, and 1 it forgets in partitions (3.6).
    all_strides = (forms.q.stride(), forms.out.stride())
    of_rows = [(s[0] // 8, s[1] // 8, None) if s[2] == 1 and not (s[0] | s[1]) % 8 else s for s in all_strides]
    s_caches: list[tuple[int, ...] | None] = [None, None]
    if gathered:
        caches = (Pages.of(cache, problem.page_layout) for cache in (forms.k_cache, forms.v_cache))
        s_caches = [tuple(stride // 8 for stride in pages.strides[:3]) for pages in caches]
    s_scales = s_k_scale[2], s_v_scale[2], s_k_scale[:2], s_v_scale[:2]
    strides = hopper.Strides(*s_scales, of_rows[0], of_rows[1], s_caches[0], s_caches[1])
    scores = hopper.Scores(problem.softmax_scale, problem.softcap)
    numbers = hopper.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, strides)
    config = hopper.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=problem.head_dim,
        DV=problem.head_dim_v,
        K_TILES=k_tiles,
        V_TILES=v_tiles,
        PAGE=problem.page_size,
        BOX=box,
        NEW_BOX=new_box if problem.new_kv else box,
        BLOCK_N=plan.block_n,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        HEAD_TILES=head_tiles(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        CONSUMERS=2 if has_values_split(problem) else plan.block_m // 64,
        GROUPS=plan.block_m // 64,
        STAGES=plan.num_stages,
        K_UNITS=units_of_keys(problem, plan.block_n),
        V_STAGES=v_stages,
        V_KEYS=v_keys,
        Q_IN_REGISTERS=plan.q_in_registers,
        IN_PARTS=problem.shared or may_be_in_parts(plan),
        IS_FP8=problem.cache_bits == 8 or bool(plan.widened),
        WIDENED=bool(plan.widened),
        QUANTIZED_Q=problem.quantize_q,
        K_FP8=multiplies_8_bits(problem),
        K_TOKENS=k_scaled == 2,
        V_TOKENS=v_scaled == 2,
        PACKED=is_packed(problem),
        NEW_KV=problem.new_kv,
        LIMIT=0 if problem.shared else largest_of(forms.out),
        ALIBI=problem.alibi,
        SOFTCAP=problem.softcap > 0,
        CAPPING=plan.capping * _is_weighed_by_a_constant(problem, forms),
        LOADING=plan.loading,
        DRAFT=problem.draft,
        HAS_LEFT=problem.left >= 0,
        HAS_RIGHT=problem.right >= 0,
        SKIP_DECODE=problem.skip_decode,
        SHARED=problem.shared,
        CARRIED=problem.carried,
        JOINED=problem.joined,
    )
    fixed = (plan.num_splits, problem.left, problem.right, (scores, numbers), config)
    group = _for_hopper if len(boxes) > 4 else _for_hopper_without_tails
    if gathered:
        group = _for_hopper_gathered if len(boxes) > 4 else _for_hopper_gathered_without_tails
    grid = (programs_of(problem, plan), 1, 1)
    # Of programs that share an SM, each of eight warps, none may have more than its part of the registers.
    registers = {"maxnreg": 65536 // (8 * 32 * plan.per_core)} if plan.per_core > 1 else {}
    arguments = (*first.counts, *fixed)
    attend = TmaLaunch(hopper.attend, grid, arguments, device, boxes, group=group, num_warps=4, **registers)
    # New keys and values are as long as the batch.
    new = [] if forms.k is None else [position for position in range(len(boxes)) if position & 2]

    def in_order(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, *others: Any) -> tuple[Any, ...]:
        others = (k_cache, v_cache, q, *others) if gathered else (q, *others)
        if len(boxes) == 4:
            return k_cache, v_cache, k, v, *others
        tails = (k_cache if k_tail else None, v_cache if v_tail else None, k if k_tail else None, v if v_tail else None)
        return k_cache, v_cache, k, v, *tails, *others

    def sized(batch: Batch) -> Run:
        own = attend
        if batch is not first:
            grid = (programs_of(batch.problem, plan), 1, 1)
            tokens, blocks = batch.problem.tokens, batch.problem.num_blocks
            longer = {at: boxes[at]._replace(sizes=[1, boxes[at].sizes[1], tokens, boxes[at].sizes[3]]) for at in new}
            if plan.widened:
                # So is what the cache is widened to; no keys are new then.
                longer = {at: box._replace(sizes=[blocks, *box.sizes[1:]]) for at, box in enumerate(boxes)}
            own = attend.resized(grid, batch.counts, longer)
        return Run(
            lambda *tensors: own(*in_order(*tensors)),
            lambda *pointers: own.at(*in_order(*pointers)),
            lambda *pointers: own.again(*in_order(*pointers)),
        )

    return sized
