"""Launches: ask the plan, set the grid, start the kernel on the tensors' device and its current stream.

Arguments are checked in arguments.py, but for what their addresses tell. Each ``prepare_`` function makes ready what
its calls have in common, from tensors that look like those of the calls. On CPU tensors a call works only under
Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and with a plan given: that is how kernels are
tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from kernel_reference.checks import fail
from lightning_attn.kernels import chunked, recurrent
from lightning_attn.plan import (
    DecodePlan,
    DeviceLimits,
    Heads,
    PrefillPlan,
    cdiv,
    fits_hopper,
    plan_decode,
    plan_prefill,
    power_of_two_at_least,
)

Tensor = torch.Tensor
Strides = tuple[int, ...]


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
    """A launch whose first four tensors, q, k, v and o, travel as descriptors for the tensor memory accelerator."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device,
        boxes: tuple[tuple[int, ...], ...], strides: tuple[Strides, ...], blocks: tuple[tuple[int, int], ...],
    ) -> None:  # fmt: skip
        from lightning_attn.kernels.hopper import TensorDescriptor, descriptor_layout

        super().__init__(kernel, grid, rest, device, num_warps=4)
        self._descriptor = TensorDescriptor
        shapes = [[1, 1, *block] for block in blocks]
        layouts = [descriptor_layout(shape) for shape in shapes]
        self._forms = [
            [list(box), list(stride), shape, layout]
            for box, stride, shape, layout in zip(boxes, strides, shapes, layouts, strict=True)
        ]

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        described = tensors[:4]
        descriptors = [self._descriptor(tensor, *form) for tensor, form in zip(described, self._forms, strict=True)]
        # o travels twice: the rows of a last, short chunk are stored one by one.
        others = tensors[3:]
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
        blackwell=capability >= (10, 0),
        dependent_launch=capability >= (9, 0),
    )


def _has_gluon() -> bool:
    try:
        from lightning_attn.kernels import hopper  # noqa: F401
    except ImportError:
        return False
    return True


class _Operand(NamedTuple):
    """A tensor's sizes and strides as (sequence, row, head, element)."""

    box: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @classmethod
    def dense(cls, tensor: Tensor) -> _Operand:
        """Of a tensor [sequences, heads, rows, elements]."""
        (b, h, n, d), (s_b, s_h, s_n, s_d) = tensor.shape, tensor.stride()
        return cls((b, n, h, d), (s_b, s_n, s_h, s_d))

    @classmethod
    def packed(cls, tensor: Tensor) -> _Operand:
        """Of a tensor [rows, heads, elements]."""
        (n, h, d), (s_n, s_h, s_d) = tensor.shape, tensor.stride()
        return cls((1, n, h, d), (0, s_n, s_h, s_d))

    def suits_descriptors(self) -> bool:
        """Whether the tensor memory accelerator can address it: packed elements, other strides of whole 16 bytes."""
        outer = zip(self.box[:3], self.strides[:3], strict=True)
        return self.strides[3] == 1 and all(
            size == 1 or (stride > 0 and stride % 8 == 0 and stride < 2**39) for size, stride in outer
        )

    def described(self) -> tuple[tuple[int, ...], Strides]:
        """Sizes and strides in a descriptor's order: [sequences, heads, rows, elements]."""
        (b, n, h, d), (s_b, s_n, s_h, s_d) = self.box, self.strides
        # What a dimension of one element strides is never used, but must be a whole 16 bytes.
        strides = [8 if size == 1 else stride for size, stride in ((b, s_b), (h, s_h), (n, s_n))]
        return (b, h, n, d), (*strides, s_d)


class _Walk(NamedTuple):
    """One chunked walk: what is read and written, and how states are addressed, by (slot, head, d, e).

    ``initial`` and ``final`` are strides, or None where there is no such state.
    """

    q: _Operand
    k: _Operand
    v: _Operand
    o: _Operand
    initial: Strides | None
    final: Strides | None
    heads: Heads
    rows: int
    sequences: int
    num_slots: int
    snapshots: int
    ragged: bool
    scale: float
    dtype: torch.dtype
    device: torch.device
    backwards: bool = False

    def plan(self, aligned: bool, pinned: PrefillPlan | None, is_gradient: bool) -> PrefillPlan:
        """The caller's if it has pinned one, else the device's.

        How a gradient comes is nobody's choice: one that the kernel for sm_90 cannot address takes the device's plan.
        """
        hopper = aligned and all(operand.suits_descriptors() for operand in (self.q, self.k, self.v, self.o))
        if pinned is not None and (hopper or not pinned.hopper):
            return pinned
        if pinned is not None and not is_gradient:
            wanted = "without hopper where q, k, v and out are not 16-byte aligned, with strides of whole 16 bytes"
            fail("plan", wanted, pinned)
        limits = device_limits(self.device)
        return plan_prefill(self.heads, self.dtype == torch.bfloat16, limits, hopper, self.snapshots > 0)


def _prepare_walk(walk: _Walk, plan: PrefillPlan | None, is_gradient: bool = False) -> Callable[..., None]:
    """What walks, called with q, k, v, o, slopes, cu_seqlens, slots, has, initial, final, positions, snapshot_slots.

    All but the first five may be None. Two plans are kept: slices of fused tensors may come aligned or not.
    """
    made: dict[bool, Callable[..., None]] = {}

    def run(*tensors: Tensor | None) -> None:
        aligned = not any([tensor.data_ptr() & 15 for tensor in tensors[:4] if tensor is not None])
        if aligned not in made:
            made[aligned] = _make_walk(walk, walk.plan(aligned, plan, is_gradient))
        made[aligned](*tensors)

    return run


def _make_walk(walk: _Walk, plan: PrefillPlan) -> Callable[..., None]:
    heads, segment = walk.heads, plan.segment
    # Heads, and how many of them share one of q and k, and of v.
    ratios = (heads.num_heads, heads.num_heads // heads.num_heads_qk, heads.num_heads // heads.num_heads_v)
    sizes = (heads.head_qk, heads.head_v)
    blocks = (plan.block_d, plan.block_e)
    tiles = cdiv(heads.head_v, plan.block_e)
    if not segment:
        places = walk.sequences + walk.ragged
    elif walk.ragged:
        places = walk.rows // segment + walk.sequences + 1
    else:
        places = walk.sequences * cdiv(walk.rows, segment)
    grid = (tiles * heads.num_heads * places, 1, 1)
    no_state = (0, 0, 0, 0)
    initial, final = walk.initial or no_state, walk.final or no_state
    carried = (heads.num_heads * heads.head_qk * heads.head_v, heads.head_qk * heads.head_v, 1, heads.head_qk)
    counts = (walk.rows, walk.sequences, walk.num_slots)
    operands = (walk.q, walk.k, walk.v, walk.o)
    # Of rows within a chunk and of elements within a row.
    furthest = max(
        max(plan.chunk * o.strides[1], max(blocks[0], heads.head_qk, heads.head_v) * o.strides[3]) for o in operands
    )
    arithmetic = (walk.backwards, furthest >= 2**31)
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}

    if plan.chunk == 1:
        rest: tuple[Any, ...] = (
            *counts, walk.snapshots, walk.scale, walk.q.strides, walk.k.strides, walk.v.strides, walk.o.strides,
            initial, final, *ratios, *sizes, *blocks, walk.backwards,
        )  # fmt: skip
        return Launch(recurrent.walk, grid, rest, walk.device, num_warps=plan.num_warps)
    if plan.hopper:
        from lightning_attn.kernels import hopper

        boxes, strides = zip(*[operand.described() for operand in operands], strict=True)
        tile_blocks = tuple((plan.chunk, columns) for columns in (blocks[0], blocks[0], plan.block_e, plan.block_e))
        rest = (
            *counts, walk.snapshots, walk.scale, walk.o.strides, initial, final, carried,
            *ratios, *sizes, plan.block_e, plan.chunk, segment, plan.num_stages, walk.backwards,
        )  # fmt: skip
        main: Launch = HopperLaunch(hopper.walk, grid, rest, walk.device, boxes, strides, tile_blocks)
    else:
        rest = (
            *counts, walk.snapshots, walk.scale, walk.q.strides, walk.k.strides, walk.v.strides, walk.o.strides,
            initial, final, carried, *ratios, *sizes, *blocks, plan.chunk, segment, plan.num_stages, *arithmetic,
        )  # fmt: skip
        main = Launch(chunked.walk, grid, rest, walk.device, **options)
    finish = _prepare_finish(walk, plan, ratios, final) if walk.snapshots else _nothing

    if not segment:

        def run(q, k, v, o, slopes, cu, slots, has, first, last, positions, targets):  # type: ignore[no-untyped-def]
            main(q, k, v, o, slopes, cu, slots, has, first, last, None, positions, targets)
            finish(k, v, slopes, cu, slots, last, positions, targets)

        return run

    whole = walk.rows // segment
    # A sequence has states to carry if it is longer than a segment: see chunked.carried_place.
    if walk.rows <= segment:
        states = 0
    elif walk.ragged:
        states = whole + min(walk.sequences, whole)
    else:
        states = walk.sequences * cdiv(walk.rows, segment)
    # Half the products of the walk itself: the portable kernel serves.
    block_e = min(plan.block_e, 64)
    own = Launch(
        chunked.segment_states, grid,
        (*counts, walk.scale, walk.k.strides, walk.v.strides, carried, *ratios, *sizes, blocks[0], block_e, plan.chunk,
         segment, min(3, plan.num_stages), *arithmetic),
        walk.device, num_warps=plan.num_warps, num_stages=min(3, plan.num_stages),
    )  # fmt: skip
    carried_tiles = cdiv(heads.head_v, 16) * cdiv(heads.head_qk, plan.block_d)
    carry = Launch(
        chunked.carry_states, (carried_tiles * heads.num_heads * walk.sequences, 1, 1),
        (*counts, initial, carried, heads.num_heads, *sizes, blocks[0], 16, segment, walk.backwards), walk.device,
        num_warps=4,
    )  # fmt: skip
    size = (states, heads.num_heads, heads.head_v, heads.head_qk)

    def run_segments(  # type: ignore[no-untyped-def]
        q, k, v, o, slopes, cu, slots, has, first, last, positions, targets
    ):
        between = torch.empty(size, dtype=torch.float32, device=walk.device)
        if walk.rows > segment:
            own(k, v, slopes, cu, slots, between)
            carry(slopes, cu, slots, has, first, between)
        main(q, k, v, o, slopes, cu, slots, has, first, last, between, positions, targets)
        finish(k, v, slopes, cu, slots, last, positions, targets)

    return run_segments


def _prepare_finish(walk: _Walk, plan: PrefillPlan, ratios: tuple[int, ...], pool: Strides) -> Callable[..., None]:
    heads = walk.heads
    grid = (cdiv(heads.head_v, 64) * heads.num_heads * walk.sequences * walk.snapshots, 1, 1)
    rest = (
        walk.rows, walk.num_slots, walk.snapshots, walk.k.strides, walk.v.strides, pool, *ratios, heads.head_qk,
        heads.head_v, max(16, power_of_two_at_least(heads.head_qk)), 64, plan.chunk,
    )  # fmt: skip
    return Launch(recurrent.finish_snapshots, grid, rest, walk.device, num_warps=8)


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, out: Tensor, kv: Tensor, scale: float,
    plan: PrefillPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What runs the dense prefill, called with (q, k, v, ed, kv_history, out, kv)."""
    walk = _Walk(
        _Operand.dense(q), _Operand.dense(k), _Operand.dense(v), _Operand.dense(out),
        None if kv_history is None else kv_history.stride(), kv[:, :, 0].stride(),
        Heads(q.shape[1], q.shape[1], q.shape[3], v.shape[3]), q.shape[2], q.shape[0], q.shape[0], 0, False, scale,
        q.dtype, q.device,
    )  # fmt: skip
    if q.shape[2] == 0:
        return lambda q, k, v, ed, kv_history, out, kv: _keep_state(kv_history, kv[:, :, 0])
    if kv.numel() == 0:
        return _nothing
    run = _prepare_walk(walk, plan)
    return lambda q, k, v, ed, kv_history, out, kv: run(q, k, v, out, ed, None, None, None, kv_history, kv, None, None)


def _fitted(plan: PrefillPlan | None, heads: Heads) -> PrefillPlan | None:
    """A plan that a caller has pinned, for a walk over other head sizes than the forward's."""
    if plan is None or plan.covers(heads):
        return plan
    if plan.chunk == 1:
        return replace(plan, block_d=max(16, power_of_two_at_least(heads.head_qk)))
    if fits_hopper(heads):
        return replace(plan, block_d=heads.head_qk)
    return replace(plan, chunk=32, block_e=16, block_d=64, num_stages=1, hopper=False)


def prepare_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, d_out: Tensor, d_kv: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, d_history: Tensor, scale: float, plan: PrefillPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What makes the gradients, called with all the tensors.

    Three walks: dq as the outputs of queries do, keys v and values k from the transposed initial state; dk (queries v,
    keys do, values q) and dv (queries k, keys q, values do) backwards from the final state's gradient. The state that
    the last one ends in is the initial state's gradient.
    """
    if q.shape[2] == 0:
        return lambda *tensors: _keep_state(None if tensors[6] is None else tensors[6][:, :, 0], tensors[10])
    if d_history.numel() == 0:
        return _nothing
    b, h, n, d = q.shape
    e = v.shape[3]
    of = {
        name: _Operand.dense(t)
        for name, t in zip(["q", "k", "v", "do", "dq", "dk", "dv"], (q, k, v, d_out, dq, dk, dv), strict=True)
    }

    def transposed(strides: Sequence[int]) -> Strides:
        return (*strides[:2], strides[3], strides[2])

    history = None if kv_history is None else kv_history.stride()
    end = None if d_kv is None else d_kv[:, :, 0].stride()
    common = (n, b, b, 0, False, scale, q.dtype, q.device)
    by_v, by_k = Heads(h, h, e, d), Heads(h, h, d, e)
    plan_by_v = _fitted(plan, by_v)
    walk_dq = _prepare_walk(
        _Walk(of["do"], of["v"], of["k"], of["dq"], history and transposed(history), None, by_v, *common),
        plan_by_v, is_gradient=True,
    )  # fmt: skip
    walk_dk = _prepare_walk(
        _Walk(of["v"], of["do"], of["q"], of["dk"], end and transposed(end), None, by_v, *common, backwards=True),
        plan_by_v, is_gradient=True,
    )  # fmt: skip
    walk_dv = _prepare_walk(
        _Walk(of["k"], of["q"], of["do"], of["dv"], end, d_history.stride(), by_k, *common, backwards=True),
        plan, is_gradient=True,
    )  # fmt: skip

    def run(q, k, v, ed, kv_history, d_out, d_kv, dq, dk, dv, d_history):  # type: ignore[no-untyped-def]
        walk_dq(d_out, v, k, dq, ed, None, None, None, kv_history, None, None, None)
        walk_dk(v, d_out, q, dk, ed, None, None, None, d_kv, None, None, None)
        walk_dv(k, q, d_out, dv, ed, None, None, None, d_kv, d_history, None, None)

    return run


def prepare_varlen(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor,
    has_initial_state: Tensor | None, all_have_initial_state: bool, snapshot_positions: Tensor | None,
    snapshot_slots: Tensor | None, out: Tensor, scale: float, plan: PrefillPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What runs the ragged prefill, called with the tensors; has_initial_state None: as the bool says."""
    del slopes, cu_seqlens, snapshot_slots
    if out.numel() == 0:
        return _nothing
    reads = has_initial_state is not None or all_have_initial_state
    pool = state_pool.stride()
    snapshots = 0 if snapshot_positions is None else snapshot_positions.shape[1]
    walk = _Walk(
        _Operand.packed(q), _Operand.packed(k), _Operand.packed(v), _Operand.packed(out), pool if reads else None, pool,
        Heads(q.shape[1], v.shape[1], q.shape[2], v.shape[2]), q.shape[0], slots.shape[0], state_pool.shape[0],
        snapshots, True, scale, q.dtype, q.device,
    )  # fmt: skip
    run = _prepare_walk(walk, plan)

    def run_varlen(  # type: ignore[no-untyped-def]
        q, k, v, slopes, cu_seqlens, pool, slots, has, positions, targets, out
    ):
        if not snapshots:
            positions = targets = None
        run(q, k, v, out, slopes, cu_seqlens, slots, has, pool if reads else None, pool, positions, targets)

    return run_varlen


def prepare_decode(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: DecodePlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What decodes one token a sequence, called with the tensors."""
    del slots, slopes
    q, k, v, out = (tensor[:, None] for tensor in (q, k, v, out))
    return _prepare_recur(q, k, v, state_pool, out, scale, True, plan)


def prepare_verify(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: DecodePlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What makes the outputs of draft tokens, called with the tensors."""
    del slots, slopes
    return _prepare_recur(q, k, v, state_pool, out, scale, False, plan)


def prepare_commit(
    k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, accepted: Tensor,
    plan: DecodePlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What advances states by the accepted of the draft tokens, called with the tensors."""
    del slots, slopes, accepted
    run = _prepare_recur(None, k, v, state_pool, None, 1.0, True, plan)
    return lambda k, v, pool, slots, slopes, accepted: run(None, k, v, pool, slots, slopes, None, accepted)


def _prepare_recur(
    q: Tensor | None, k: Tensor, v: Tensor, pool: Tensor, out: Tensor | None, scale: float, writes: bool,
    plan: DecodePlan | None,
) -> Callable[..., None]:  # fmt: skip
    """What walks token by token, called with (q, k, v, pool, slots, slopes, out) and the accepted, if there are any.

    q, k, v and out are [sequences, tokens, heads, elements] here.
    """
    sequences, tokens, heads_qk, head_qk = k.shape
    heads = Heads(heads_qk, v.shape[2], head_qk, v.shape[3])
    if sequences == 0 or tokens == 0:
        return _nothing
    if plan is None:
        plan = plan_decode(heads, device_limits(k.device))
    no_tensor = (0, 0, 0, 0)
    rest = (
        pool.shape[0], scale, no_tensor if q is None else q.stride(), k.stride(), v.stride(), pool.stride(),
        no_tensor if out is None else out.stride(), tokens, heads.num_heads, heads.num_heads // heads_qk,
        heads.num_heads // v.shape[2], head_qk, v.shape[3], max(16, power_of_two_at_least(head_qk)), plan.block_e,
        writes, plan.dependent_launch,
    )  # fmt: skip
    grid = (cdiv(v.shape[3], plan.block_e) * heads.num_heads * sequences, 1, 1)
    # A draft's results have the bits of decoding: what is fused in one of these kernels must be in the others.
    options: dict[str, Any] = {"enable_fp_fusion": False}
    if plan.dependent_launch:
        options["launch_pdl"] = True
    launch = Launch(recurrent.recur, grid, rest, k.device, num_warps=plan.num_warps, **options)

    def run(q, k, v, pool, slots, slopes, out, accepted=None):  # type: ignore[no-untyped-def]
        launch(q, k, v, pool, slots, slopes, accepted, out)

    return run


def _keep_state(history: Tensor | None, state: Tensor) -> None:
    """The state after no tokens."""
    if history is None:
        state.zero_()
    else:
        state.copy_(history)


def _nothing(*_: object) -> None:
    """The launch over nothing."""
