"""Launches: ask the plan, set the grid, start the kernel on the tensors' device and its current stream.

Nothing here checks arguments (arguments.py does). Each ``prepare_`` function makes ready what its calls have in common,
from tensors that look like those of the calls. On CPU tensors a call works only under Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported) and with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton

from blocksparse_attn.arguments import check_attend
from blocksparse_attn.kernels import portable, softmax, tiles
from blocksparse_attn.plan import (
    AttentionPlan,
    DeviceLimits,
    Problem,
    cdiv,
    heads_per_tile,
    hopper_size,
    num_places,
    plan_attention,
    power_of_two_at_least,
    power_of_two_in,
    query_stages,
)
from kernel_reference.checks import fail

Tensor = torch.Tensor
Strides = tuple[int, ...]

# Rows that one program of a merging launch takes.
_MERGED_TOKENS = 16


class Launch:
    """One launch made ready: a kernel, its grid and every argument but the tensors, which are the kernel's first.

    Called with tensors, or None where the kernel takes none, of the dtypes, strides and device it was made for. From
    the second call on Triton's binding of arguments is skipped (half of a launch's host time): all that it would
    specialise on is fixed here but the pointers' alignment; tensors that are not 16-byte aligned go through it again.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device, **options: Any
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._rest = rest
        self._options = options
        # Triton launches on the current device; with one device there is nothing to ask.
        self._guarded = device if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if self._guarded is None or self._guarded.index == torch.cuda.current_device():
            self._start(tensors)
        else:
            with torch.cuda.device(self._guarded):
                self._start(tensors)

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not any([pointer & 15 for pointer in pointers if pointer is not None])
        if self._run is not None and aligned:
            self._run(*pointers, *self._rest)
            return
        compiled = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        # The interpreter compiles nothing and returns None.
        if compiled is not None and aligned:
            self._run = compiled[self._grid]


class HopperLaunch(Launch):
    """A launch whose first tensors, queries, keys and values, travel as descriptors for the tensor memory accelerator.

    ``forms``: sizes, strides and box of each, in the order of a descriptor.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device,
        forms: list[tuple[list[int], list[int], list[int]]],
    ) -> None:  # fmt: skip
        from blocksparse_attn.kernels.hopper import TensorDescriptor, descriptor_layout

        super().__init__(kernel, grid, rest, device, num_warps=4)
        self._descriptor = TensorDescriptor
        self._forms = [(*form, descriptor_layout(form[2])) for form in forms]

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        count = len(self._forms)
        descriptors = [self._descriptor(x, *form) for x, form in zip(tensors[:count], self._forms, strict=True)]
        others = tensors[count:]
        pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in others]
        aligned = not any([pointer & 15 for pointer in pointers if pointer is not None])
        if self._run is not None and aligned:
            self._run(*descriptors, *pointers, *self._rest)
            return
        compiled = self._kernel[self._grid](*descriptors, *others, *self._rest, **self._options)
        if aligned:
            self._run = compiled[self._grid]


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on, from its Triton driver."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    capability = torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
    return DeviceLimits(
        cores=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        hopper=capability == (9, 0) and _has_gluon(),
    )


def _has_gluon() -> bool:
    try:
        from blocksparse_attn.kernels import hopper  # noqa: F401
    except ImportError:
        return False
    return True


class _Keys:
    """How keys or values lie: sizes, and strides by (page or sequence, place, head, element / x, element % x).

    ``outer`` sequences or pages, of which a ragged batch has one, of ``places`` each.
    """

    def __init__(self, keys: Tensor, paged: bool, layout: str) -> None:
        s = keys.stride()
        self.x = keys.shape[-1]
        if keys.ndim == 3:
            self.outer, self.places, self.heads = 1, *keys.shape[:2]
            self.strides: Strides = (0, s[0], s[1], 0, s[2])
        elif not paged or layout == "NHD":
            self.outer, self.places, self.heads = keys.shape[:3]
            self.strides = (s[0], s[1], s[2], 0, s[3])
        elif layout == "HND":
            self.outer, self.heads, self.places = keys.shape[:3]
            self.strides = (s[0], s[2], s[1], 0, s[3])
        elif keys.ndim == 5:
            self.outer, self.heads, _, self.places, self.x = keys.shape
            self.strides = (s[0], s[3], s[1], s[2], s[4])
        else:
            self.outer, self.heads, self.x, self.places = keys.shape
            self.strides = (s[0], s[3], s[1], 0, s[2])

    def reach(self, head_size: int) -> int:
        """Elements from a head's first element to its last."""
        return (head_size - 1) // self.x * self.strides[3] + (self.x - 1) * self.strides[4]

    def described(self, head_size: int, box: int) -> tuple[list[int], list[int], list[int]]:
        """Sizes, strides and box of a descriptor over (page or sequence, head, place, element)."""
        # What has one sequence has no stride from one to the next; a descriptor's is of whole 16 bytes.
        outer = self.strides[0] if self.outer > 1 else 8
        strides = [outer, self.strides[2], self.strides[1], 1]
        # A box is 128 bytes wide, over which shared memory is swizzled.
        return [self.outer, self.heads, self.places, head_size], strides, [1, 1, box, 64]


def _box(values: _Keys, block_n: int) -> int:
    """Places that are loaded together where places, not elements, lie next to each other; 0 where elements do."""
    box = min(block_n, power_of_two_in(values.places))
    across = values.strides[1] == 1 and values.strides[4] != 1
    # Fewer than 16 bytes are no gain.
    return box if across and box >= 8 else 0


def _batched(strides: Strides) -> Strides:
    """Strides by (sequence, ...), of what has one row of tokens by (0, ...)."""
    return strides if len(strides) == 4 else (0, *strides)


def _lse_strides(lse: Tensor | None) -> Strides:
    """Strides by (sequence, head, token), of what is not there and of what has one row of tokens by (0, ...)."""
    if lse is None:
        return 0, 0, 0
    return lse.stride() if lse.ndim == 3 else (0, *lse.stride())


def _form(tensor: Tensor | None) -> Tensor | None:
    """A tensor of the same form without memory: what is made ready must not keep the first call's tensors alive."""
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def prepare_attend(
    q: Tensor, k: Tensor, v: Tensor, crow: Tensor, col: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, block_table: Tensor | None, seqlens_k: Tensor | None, q_starts: Tensor | None,
    q_ends: Tensor | None, k_starts: Tensor | None, k_ends: Tensor | None, sinks: Tensor | None, out: Tensor,
    lse: Tensor | None, max_seqlen_q: int, q_block: int, k_block: int, layout: str, softmax_scale: float, left: int,
    right: int, softcap: float, num_splits: int, plan: AttentionPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What attends, called with the sixteen tensors.

    Two plans are kept: slices of a tensor may come aligned or not.
    """
    if q.numel() == 0:
        return _nothing
    problem = check_attend(
        q, k, v, crow, col, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, q_starts, q_ends, k_starts, k_ends,
        sinks, out, lse, max_seqlen_q, q_block, k_block, layout, softmax_scale, left, right, softcap, num_splits,
    )  # fmt: skip
    device = q.device
    forms = [*map(_form, (q, k, v, crow, col, block_table, out, lse)), device]
    numbers = (softmax_scale, softcap, left, layout)
    made: dict[bool, Callable[..., None]] = {}

    def make(aligned: bool) -> Callable[..., None]:
        chosen = plan
        here = replace(problem, described=problem.described and aligned)
        if chosen is None:
            chosen = plan_attention(here, device_limits(device), num_splits)
        elif chosen.hopper and not here.described:
            wanted = "without hopper where there is a window, softmax_scale is below 0, or queries, keys or values are"
            fail("plan", f"{wanted} not 16-byte aligned and of strides of whole 16 bytes", chosen)
        return _in_parts(_prepare(here, chosen, forms, numbers), here, chosen, forms)

    def run(*tensors: Tensor | None) -> None:
        aligned = not any([tensor.data_ptr() & 15 for tensor in tensors[:3] if tensor is not None])
        if aligned not in made:
            made[aligned] = make(aligned)
        made[aligned](*tensors)

    return run


def _prepare(problem: Problem, plan: AttentionPlan, forms: list[Any], numbers: tuple[Any, ...]) -> Callable[..., None]:
    """What leaves results or their parts, called with the sixteen tensors and the two parts."""
    q, k, v, crow, col, block_table, out, lse, device = forms
    softmax_scale, softcap, left, layout = numbers
    paged, padded = problem.page_size > 0, problem.padded
    kind = tiles.PADDED if padded else tiles.PAGED if paged else tiles.RAGGED
    keys, values = _Keys(k, paged, layout), _Keys(v, paged, layout)
    size, size_v = problem.head_size, problem.head_size_v
    s_q, s_out = _batched(q.stride()), _batched(out.stride())
    s_lse = _lse_strides(lse)
    places = num_places(problem, plan)
    head_tiles = problem.group
    if plan.packed:
        head_tiles = cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    grid = (places * problem.num_heads_kv * head_tiles * plan.num_splits, 1, 1)
    lengths = (
        q.shape[-3], problem.sequences, problem.capacity, keys.outer, block_table.stride()[0] if paged else 0,
        *(x.stride()[0] if x.shape[0] > 1 else 0 for x in (crow, col)), problem.rows, problem.entries, places,
        softmax_scale, softcap, left,
    )  # fmt: skip
    start: Callable[..., None]
    last = (problem.q_block, problem.k_block, plan.block_m, plan.block_n, plan.num_splits, softcap > 0)
    if plan.hopper:
        from blocksparse_attn.kernels import hopper

        box = min(64, power_of_two_in(problem.page_size)) if paged else 64
        rest = (
            *lengths, s_out, s_lse, kind, problem.group, problem.num_heads_kv, hopper_size(size), size_v,
            hopper_size(size_v), problem.page_size, box, *last, plan.num_stages, query_stages(problem, plan),
        )  # fmt: skip
        queries = _Keys(q, False, layout)
        described = [queries.described(size, 64), keys.described(size, box), values.described(size_v, box)]
        start = HopperLaunch(hopper.attend, (min(grid[0], _cores(device)), 1, 1), rest, device, described)

    else:
        reach = max(keys.reach(size), values.reach(size_v), (size - 1) * s_q[3], (size_v - 1) * s_out[3])
        rest = (
            *lengths, s_q, keys.strides, values.strides, s_out, s_lse, kind, problem.group, problem.num_heads_kv, size,
            max(16, power_of_two_at_least(size)), size_v, max(16, power_of_two_at_least(size_v)), problem.page_size,
            _box(values, plan.block_n) if paged else 0, keys.x, keys.strides[1] if keys.x < size else 0, *last,
            left >= 0, reach >= 2**31, plan.num_stages, *((plan.packed,) if plan.packed else ()),
        )  # fmt: skip
        kernel = portable.attend_packed if plan.packed else portable.attend_lists
        start = Launch(kernel, grid, rest, device, num_warps=plan.num_warps)

    def run(  # type: ignore[no-untyped-def]
        q, k, v, crow, col, cu_q, cu_k, table, seqlens, q_starts, q_ends, k_starts, k_ends, sinks, *results
    ):
        if not padded:
            q_starts, k_starts, k_ends = cu_q, cu_k, seqlens
        start(q, k, v, crow, col, table, q_starts, q_ends, k_starts, k_ends, sinks, *results)

    return run


def _cores(device: torch.device) -> int:
    """Programs that stay; where there is no GPU so few that each has several tiles, as it has there."""
    return device_limits(device).cores if device.type == "cuda" else 3


def _in_parts(
    attend: Callable[..., None], problem: Problem, plan: AttentionPlan, forms: list[Any]
) -> Callable[..., None]:
    """One launch, or, with splits, one that leaves parts and one that merges them; called with the sixteen tensors."""
    if plan.num_splits == 1:
        return lambda *sixteen: attend(*sixteen, None, None)
    q, _, _, _, _, _, out, lse, device = forms
    heads, size_v = problem.num_heads, problem.head_size_v
    s_out = _batched(out.stride())
    s_lse = _lse_strides(lse)
    rest = (
        problem.tokens, q.shape[-3], s_out, s_lse, heads, size_v, max(16, power_of_two_at_least(size_v)),
        _MERGED_TOKENS, plan.num_splits, problem.padded, (size_v - 1) * s_out[3] >= 2**31,
    )  # fmt: skip
    grid = (cdiv(problem.tokens, _MERGED_TOKENS) * heads, 1, 1)
    finish = Launch(softmax.merge, grid, rest, device, num_warps=4)
    size = (plan.num_splits, problem.tokens, heads, size_v)
    lse_size = (plan.num_splits, heads, problem.tokens)

    def run(*sixteen: Tensor | None) -> None:
        parts = torch.empty(size, dtype=torch.float32, device=device)
        # Rows that no sequence claims, as where cu_seqlens_q falls, are merged too: as such, and not from old memory.
        part_lse = torch.full(lse_size, torch.inf, dtype=torch.float32, device=device)
        *inputs, sinks, out, lse = sixteen
        attend(*inputs, None, None, None, parts, part_lse)
        finish(sinks, out, lse, parts, part_lse)

    return run


def _nothing(*_: object) -> None:
    """The launch over nothing."""
