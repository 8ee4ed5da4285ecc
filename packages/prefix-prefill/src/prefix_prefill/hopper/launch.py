"""Launches of the kernel for sm_90: of a problem and its plan its constants, TMA's descriptors, and its groups of
arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.integers import power_of_two_in
from kernel_reference.launching import Run, TmaBox, TmaLaunch
from prefix_prefill.addressing import Batch, Pages, largest_of, scaling
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.merging.launch import Sized
from prefix_prefill.plan import (
    PrefillPlan,
    Problem,
    has_values_split,
    is_gathered,
    is_packed,
    may_be_in_parts,
    multiplies_8_bits,
    programs_of,
)
from prefix_prefill.tiles import (
    column_tiles,
    head_tiles,
    heads_per_tile,
    stages_of_values,
    tokens_per_tile,
    units_of_keys,
    value_tiles,
)

# Of the largest soft cap whose weights bfloat16 holds without a running max: see kernels/hopper/capped.py.
_MOST_CAP = 55.0


class _Loads(NamedTuple):
    """How TMA brings keys and values: tiles of columns, tokens of a box of cached and of new ones, the boxes, and
    whether the last tile of keys, and of values, has a descriptor of its own.
    """

    k_tiles: tuple[int, ...]
    v_tiles: tuple[int, ...]
    box: int
    new_box: int
    boxes: list[TmaBox]
    k_tail: bool
    v_tail: bool


def prepare_hopper(first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """The kernel for sm_90, called like the portable one."""
    from prefix_prefill.kernels import hopper

    problem = first.problem
    loads = _loads_of(problem, plan, forms)
    boxes, k_tail, v_tail = loads.boxes, loads.k_tail, loads.v_tail
    gathered = is_gathered(problem)
    group = _for_hopper if len(boxes) > 4 else _for_hopper_without_tails
    if gathered:
        group = _for_hopper_gathered if len(boxes) > 4 else _for_hopper_gathered_without_tails
    numbers = hopper.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, _strides_of(problem, forms))
    scores = hopper.Scores(problem.softmax_scale, problem.softcap)
    config = _config_of(problem, plan, forms, loads)
    fixed = (plan.num_splits, problem.left, problem.right, (scores, numbers), config)
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


def _loads_of(problem: Problem, plan: PrefillPlan, forms: PrefillTensors) -> _Loads:
    # Where cached rows are gathered, boxes are those of new ones.
    _, v_keys = stages_of_values(problem, plan.block_n, plan.num_stages)
    box = min(v_keys, 64 if is_gathered(problem) else power_of_two_in(problem.page_size))
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
    return _Loads(k_tiles, v_tiles, box, new_box, boxes, k_tail, v_tail)


def _strides_of(problem: Problem, forms: PrefillTensors) -> Any:
    from prefix_prefill.kernels import hopper

    (_, s_k_scale), (_, s_v_scale) = scaling(forms.k_scale), scaling(forms.v_scale)
    # In units of 8, and None for 1: of strides of 72 Triton would not know that, and 1 it forgets in partitions (3.6).
    all_strides = (forms.q.stride(), forms.out.stride())
    of_rows = [(s[0] // 8, s[1] // 8, None) if s[2] == 1 and not (s[0] | s[1]) % 8 else s for s in all_strides]
    s_caches: list[tuple[int, ...] | None] = [None, None]
    if is_gathered(problem):
        caches = (Pages.of(cache, problem.page_layout) for cache in (forms.k_cache, forms.v_cache))
        s_caches = [tuple(stride // 8 for stride in pages.strides[:3]) for pages in caches]
    s_scales = s_k_scale[2], s_v_scale[2], s_k_scale[:2], s_v_scale[:2]
    return hopper.Strides(*s_scales, of_rows[0], of_rows[1], s_caches[0], s_caches[1])


def _config_of(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, loads: _Loads) -> Any:
    from prefix_prefill.kernels import hopper

    v_stages, v_keys = stages_of_values(problem, plan.block_n, plan.num_stages)
    return hopper.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=problem.head_dim,
        DV=problem.head_dim_v,
        K_TILES=loads.k_tiles,
        V_TILES=loads.v_tiles,
        PAGE=problem.page_size,
        BOX=loads.box,
        NEW_BOX=loads.new_box if problem.new_kv else loads.box,
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
        K_TOKENS=scaling(forms.k_scale)[0] == 2,
        V_TOKENS=scaling(forms.v_scale)[0] == 2,
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


# The tensors, or their pointers, as the kernel takes them, what belongs together in one group. Named one by one: so
# Python is quickest.


def _for_hopper(q, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, out, lse, draft, *parts):  # type: ignore[no-untyped-def]
    return (q, out, lse), (table, cu, lengths, draft), (alibi, sinks), (k_s, v_s, out_s), parts


def _for_hopper_gathered(k_cache, v_cache, *given):  # type: ignore[no-untyped-def]
    rows, batch, *rest = _for_hopper(*given)  # type: ignore[no-untyped-call]
    return rows, (*batch, k_cache, v_cache), *rest


def _for_hopper_gathered_without_tails(*given):  # type: ignore[no-untyped-def]
    return None, None, None, None, *_for_hopper_gathered(*given)  # type: ignore[no-untyped-call]


def _for_hopper_without_tails(*given):  # type: ignore[no-untyped-def]
    return None, None, None, None, *_for_hopper(*given)  # type: ignore[no-untyped-call]


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
