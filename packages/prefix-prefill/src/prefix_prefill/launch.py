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

from kernel_reference.checks import fail
from prefix_prefill.arguments import MOST_TOKENS, is_described
from prefix_prefill.kernels import merge, paged
from prefix_prefill.plan import (
    DeviceLimits,
    PrefillPlan,
    Problem,
    cdiv,
    heads_per_tile,
    num_places,
    plan_prefill,
    power_of_two_at_least,
    power_of_two_in,
    tokens_per_tile,
)

Tensor = torch.Tensor
Strides = tuple[int, ...]

# Kernels read 8-bit floats as bytes: not every target knows the types.
_FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
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
    """A launch whose first tensors travel as descriptors for the tensor memory accelerator.

    ``forms``: sizes, strides and box of each, in the order of a descriptor, and bits of an element. A tensor that is
    None travels as the first.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device,
        forms: list[tuple[list[int], list[int], list[int]]], element_bits: list[int],
    ) -> None:  # fmt: skip
        from prefix_prefill.kernels.hopper import TensorDescriptor, descriptor_layout

        super().__init__(kernel, grid, rest, device, num_warps=4)
        self._descriptor = TensorDescriptor
        self._forms = [
            (*form, descriptor_layout(form[2], bits)) for form, bits in zip(forms, element_bits, strict=True)
        ]

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        count = len(self._forms)
        descriptors: list[Any] = []
        for tensor, form in zip(tensors[:count], self._forms, strict=True):
            descriptors.append(descriptors[0] if tensor is None else self._descriptor(tensor, *form))
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
        turing=capability == (7, 5),
    )


def _has_gluon() -> bool:
    try:
        from prefix_prefill.kernels import hopper  # noqa: F401
    except ImportError:
        return False
    return True


class _Cache:
    """How keys or values lie in pages: sizes, and strides by (page, place, head, element / x, element % x)."""

    def __init__(self, cache: Tensor, layout: str) -> None:
        self.blocks, self.bits = cache.shape[0], 8 * cache.element_size()
        s = cache.stride()
        if layout == "NHD":
            self.page, self.heads, self.x = cache.shape[1], cache.shape[2], cache.shape[3]
            self.strides: Strides = (s[0], s[1], s[2], 0, s[3])
        elif layout == "HND":
            self.page, self.heads, self.x = cache.shape[2], cache.shape[1], cache.shape[3]
            self.strides = (s[0], s[2], s[1], 0, s[3])
        elif cache.ndim == 5:
            self.page, self.heads, self.x = cache.shape[3], cache.shape[1], cache.shape[4]
            self.strides = (s[0], s[3], s[1], s[2], s[4])
        else:
            self.page, self.heads, self.x = cache.shape[3], cache.shape[1], cache.shape[2]
            self.strides = (s[0], s[3], s[1], 0, s[2])

    def reach(self, head_size: int) -> int:
        """Elements from a head's first element to its last."""
        return (head_size - 1) // self.x * self.strides[3] + (self.x - 1) * self.strides[4]

    def described(self, head_size: int, box: int) -> tuple[list[int], list[int], list[int]]:
        """Sizes, strides and box of a descriptor over (page, head, place, element)."""
        strides = [self.strides[0], self.strides[2], self.strides[1], 1]
        # A box is at most 128 bytes wide, over which shared memory is swizzled.
        width = 64 if self.bits == 16 else min(128, max(64, power_of_two_at_least(head_size)))
        return [self.blocks, self.heads, self.page, head_size], strides, [1, 1, box, width]


def _described_rows(tensor: Tensor, box: int) -> tuple[list[int], list[int], list[int]]:
    """Sizes, strides and box of new keys or values [tokens, heads, elements], as one page."""
    rows, heads, head_size = tensor.shape
    row, head, _ = tensor.stride()
    return [1, heads, rows, head_size], [8, head, row, 1], [1, 1, box, 64]


def _box(values: _Cache, block_n: int) -> int:
    """Places that are loaded together where places, not elements, lie next to each other; 0 where elements do."""
    box = min(block_n, power_of_two_in(values.page))
    across = values.strides[1] == 1 and values.strides[4] != 1
    # Fewer than 16 bytes are no gain.
    return box if across and box * values.bits >= 128 else 0


def _scaling(scale: Tensor | None) -> tuple[int, Strides]:
    """How scales vary, 1 with the kv head at most and 2 with the token too, and strides by (page, place, head)."""
    if scale is None:
        return 0, (0, 0, 0)
    if scale.ndim == 3:
        return 2, scale.stride()
    return 1, (0, 0, scale.stride()[0] if scale.ndim and scale.shape[0] > 1 else 0)


def _limit(out: Tensor) -> int:
    """The largest number of an 8-bit result; others are not clamped."""
    return int(torch.finfo(out.dtype).max) if out.dtype.itemsize == 1 else 0


def _form(tensor: Tensor | None) -> Tensor | None:
    """A tensor of the same form without memory: what is made ready must not keep the first call's tensors alive."""
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _FP8 else tensor


def prepare_prefill(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    cu_seqlens_q: Tensor, seqlens_k: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, out_scale: Tensor | None, out: Tensor, lse: Tensor | None,
    max_seqlen_q: int, layout: str, softmax_scale: float, left: int, right: int, softcap: float, skip_decode: bool,
    k_factor: float, v_factor: float, out_factor: float, num_splits: int, plan: PrefillPlan | None = None,
    max_seqlen_k: int = MOST_TOKENS,
) -> Callable[..., None]:  # fmt: skip
    """What attends, called with the fifteen tensors.

    ``max_seqlen_k`` bounds the keys that a plan reckons with, and nothing else. Two plans are kept: slices of a cache
    may come aligned or not.
    """
    keys, values = _Cache(k_cache, layout), _Cache(v_cache, layout)
    if q.shape[0] == 0:
        return _nothing
    suits = is_described(k, v, k_cache, v_cache, layout, k_scale, v_scale, softmax_scale, k_factor, v_factor)
    problem = Problem(
        q.shape[1], keys.heads, q.shape[2], keys.page, q.shape[0], seqlens_k.shape[0], max_seqlen_q,
        block_table.shape[1] * keys.page, 8 * q.element_size(), 8 * k_cache.element_size(), k is not None,
        alibi_slopes is not None,
    )  # fmt: skip
    device, cache_dtype = q.device, k_cache.dtype
    tensors = (*map(_form, (q, k, v, out, lse, block_table, k_scale, v_scale)), device)
    numbers = (softmax_scale, softcap, left, right, skip_decode, k_factor, v_factor, out_factor)
    made: dict[bool, Callable[..., None]] = {}

    def make(aligned: bool) -> Callable[..., None]:
        chosen = plan
        if chosen is None:
            expected = replace(problem, described=suits and aligned, capacity=min(problem.capacity, max_seqlen_k))
            chosen = plan_prefill(expected, device_limits(device), num_splits)
        elif chosen.hopper and not (suits and aligned):
            wanted = "without hopper where the cache has scales, softmax_scale is below 0, or keys or values are not"
            fail("plan", f"{wanted} 16-byte aligned and of strides of whole 16 bytes", chosen)
        attend = _prepare_hopper if chosen.hopper else _prepare_portable
        ready = attend(problem, chosen, keys, values, tensors, numbers, cache_dtype)
        return _in_parts(ready, problem, chosen, tensors, numbers)

    def run(*tensors: Tensor | None) -> None:
        aligned = not any([tensor.data_ptr() & 15 for tensor in tensors[1:5] if tensor is not None])
        if aligned not in made:
            made[aligned] = make(aligned)
        made[aligned](*tensors)

    return run


def _grid(problem: Problem, plan: PrefillPlan) -> tuple[int, int, int]:
    head_tiles = cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    places = num_places(problem, tokens_per_tile(problem.group, plan.block_m))
    return places * problem.num_heads_kv * head_tiles * plan.num_splits, 1, 1


def _prepare_portable(  # type: ignore[no-untyped-def]
    problem: Problem, plan: PrefillPlan, keys: _Cache, values: _Cache, tensors, numbers, cache_dtype: torch.dtype
) -> Callable[..., None]:
    """The kernel for every target, called with the seventeen tensors of its signature."""
    q, k, v, out, lse, block_table, k_scale, v_scale, device = tensors
    softmax_scale, softcap, left, right, skip_decode, k_factor, v_factor, out_factor = numbers
    head_size, nothing = problem.head_size, (0, 0, 0)
    own = (nothing, nothing) if k is None else (k.stride(), v.stride())
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = _scaling(k_scale), _scaling(v_scale)
    element_strides = [s[2] for s in (q.stride(), out.stride(), *own)]
    reach = max(keys.reach(head_size), values.reach(head_size), *((head_size - 1) * s for s in element_strides))
    rest = (
        problem.tokens, problem.sequences, keys.blocks, problem.capacity, block_table.stride()[0],
        num_places(problem, tokens_per_tile(problem.group, plan.block_m)), softmax_scale, softcap, left, right,
        k_factor, v_factor, out_factor, q.stride(), *own, keys.strides, values.strides, s_k_scale, s_v_scale,
        out.stride(), (0, 0) if lse is None else lse.stride(),
        problem.group, keys.heads, head_size, max(16, power_of_two_at_least(head_size)), keys.page,
        _box(values, plan.block_n), keys.x, keys.strides[1] if keys.x < head_size else 0, plan.block_m, plan.block_n,
        plan.num_splits, _FP8.get(cache_dtype, 0), k_scaled, v_scaled, _limit(out), softcap > 0, left >= 0, right >= 0,
        skip_decode, reach >= 2**31, plan.num_stages,
    )  # fmt: skip
    attend = Launch(paged.attend, _grid(problem, plan), rest, device, num_warps=plan.num_warps)

    def run(q, k, v, k_cache, v_cache, *others):  # type: ignore[no-untyped-def]
        attend(q, k, v, _bytes(k_cache), _bytes(v_cache), *others)

    return run


def _prepare_hopper(  # type: ignore[no-untyped-def]
    problem: Problem, plan: PrefillPlan, keys: _Cache, values: _Cache, tensors, numbers, cache_dtype: torch.dtype
) -> Callable[..., None]:
    """The kernel for sm_90, called like the portable one."""
    from prefix_prefill.kernels import hopper

    q, k, v, out, lse, block_table, k_scale, v_scale, device = tensors
    softmax_scale, softcap, left, right, skip_decode, k_factor, v_factor, out_factor = numbers
    head_size = problem.head_size
    box = min(plan.block_n, power_of_two_in(keys.page))
    forms = [keys.described(head_size, box), values.described(head_size, box)]
    forms += forms if k is None else [_described_rows(k, box), _described_rows(v, box)]
    element_bits = [keys.bits, keys.bits] + ([keys.bits, keys.bits] if k is None else [16, 16])
    (_, s_k_scale), (_, s_v_scale) = _scaling(k_scale), _scaling(v_scale)
    rest = (
        problem.tokens, problem.sequences, keys.blocks, problem.capacity, block_table.stride()[0],
        num_places(problem, tokens_per_tile(problem.group, plan.block_m)), softmax_scale, softcap, left, right,
        k_factor, v_factor, out_factor, s_k_scale[2], s_v_scale[2], q.stride(), out.stride(),
        (0, 0) if lse is None else lse.stride(),
        problem.group, keys.heads, head_size, max(64, power_of_two_at_least(head_size)), keys.page, box, plan.block_m,
        plan.block_n, plan.num_splits, _limit(out), softcap > 0, left >= 0, right >= 0, skip_decode, plan.num_stages,
        problem.apart,
    )  # fmt: skip
    attend = HopperLaunch(hopper.attend, _grid(problem, plan), rest, device, forms, element_bits)

    def run(  # type: ignore[no-untyped-def]
        q, k, v, k_cache, v_cache, table, cu, seqlens, alibi, sinks, k_scale, v_scale, out_scale, *results
    ):
        attend(k_cache, v_cache, k, v, q, table, cu, seqlens, alibi, sinks, k_scale, v_scale, out_scale, *results)

    return run


def _in_parts(  # type: ignore[no-untyped-def]
    attend: Callable[..., None], problem: Problem, plan: PrefillPlan, tensors, numbers
) -> Callable[..., None]:
    """One launch, or, with splits, one that leaves parts and one that merges them; called with the fifteen tensors."""
    if plan.num_splits == 1:
        return lambda *fifteen: attend(*fifteen, None, None)
    _, _, _, out, lse, _, _, _, device = tensors
    skip_decode, out_factor = numbers[4], numbers[7]
    places = num_places(problem, _MERGED_TOKENS)
    rest = (
        problem.tokens, problem.sequences, problem.capacity, places, out_factor, out.stride(),
        (0, 0) if lse is None else lse.stride(), problem.num_heads, problem.head_size,
        max(16, power_of_two_at_least(problem.head_size)), _MERGED_TOKENS, plan.num_splits, problem.apart,
        _limit(out), skip_decode, (problem.head_size - 1) * out.stride()[2] >= 2**31,
    )  # fmt: skip
    finish = Launch(merge.merge_splits, (places * problem.num_heads, 1, 1), rest, device, num_warps=4)
    size = (plan.num_splits, problem.tokens, problem.num_heads, problem.head_size)
    lse_size = (plan.num_splits, problem.num_heads, problem.tokens)

    def run(  # type: ignore[no-untyped-def]
        q, k, v, k_cache, v_cache, table, cu, seqlens, alibi, sinks, k_scale, v_scale, out_scale, out, lse
    ):
        parts = torch.empty(size, dtype=torch.float32, device=device)
        part_lse = torch.empty(lse_size, dtype=torch.float32, device=device)
        attend(q, k, v, k_cache, v_cache, table, cu, seqlens, alibi, None, k_scale, v_scale, None, None, None,
               parts, part_lse)  # fmt: skip
        finish(cu, seqlens, sinks, out_scale, out, lse, parts, part_lse)

    return run


def prepare_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> Callable[..., None]:
    """What merges two results, called with the six tensors."""
    rows, num_heads, head_size = out_a.shape
    if out_a.numel() == 0:
        return _nothing
    rest = (
        rows, out_a.stride(), lse_a.stride(), out_b.stride(), lse_b.stride(), out.stride(), lse.stride(), num_heads,
        head_size, max(16, power_of_two_at_least(head_size)), _MERGED_TOKENS,
    )  # fmt: skip
    grid = (cdiv(rows, _MERGED_TOKENS) * num_heads, 1, 1)
    return Launch(merge.merge_states, grid, rest, out_a.device, num_warps=4)


def _nothing(*_: object) -> None:
    """The launch over nothing."""
