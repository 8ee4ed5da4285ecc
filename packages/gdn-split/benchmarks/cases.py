"""What gdn-split is timed on: real models' projections, beside torch, torch.compile, sglang and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import floors
import torch
import triton
import triton.language as tl
from steps import prefill_cases, step_cases

from gdn_split import fused_qkvzba_split_reshape_cat, merge_qkvzba, split_conv1d_update
from gdn_split.kernels.convolution import Convolution, convolve, load_slots
from gdn_split.kernels.split import Rows, wait_for_inputs
from gdn_split.launch import device_limits
from gdn_split.plan import GroupShape, plan_conv, plan_split
from kernel_reference import projection
from kernel_reference.bench import Case, Requirement
from kernel_reference.models import QWEN3_NEXT_80B, GatedDeltaNet

OURS = "gdn-split"
DTYPE = torch.bfloat16


def shape_of(model: GatedDeltaNet) -> GroupShape:
    return GroupShape(model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v)


MODELS = {
    "Qwen3-Next": shape_of(QWEN3_NEXT_80B),
    **{f"Qwen3-Next TP{ranks}": shape_of(QWEN3_NEXT_80B.tensor_parallel(ranks)) for ranks in (2, 4, 8)},
    # No model has it yet; kernels that assume a power of two fail on it.
    "ratio 3": GroupShape(16, 48, 128, 128),
    "64 V heads of 96": GroupShape(16, 64, 96, 96),
}


@dataclass
class Projected:
    """One layer's projections, and for a decode step the state of its convolution."""

    qkvz: torch.Tensor
    ba: torch.Tensor
    state: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slots: torch.Tensor | None = None


def sizes(shape: GroupShape) -> tuple[int, int, int, int]:
    return shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v


def projected(device: torch.device, rows: int, shape: GroupShape) -> Projected:
    return Projected(
        torch.randn(rows, shape.qkvz_width, device=device, dtype=DTYPE),
        torch.randn(rows, shape.ba_width, device=device, dtype=DTYPE),
    )


def is_exact(outputs: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """0 for equal bits; an engine's kernel may return the parts flat."""
    for got, want in zip(outputs, wanted, strict=True):
        if not torch.equal(*(x.reshape(want.shape).contiguous().view(torch.int16) for x in (got, want))):
            raise AssertionError("differs from the reference")
    return 0.0


def torch_split(inputs: Projected, shape: GroupShape, layout: str) -> tuple[torch.Tensor, ...]:
    return projection.split(inputs.qkvz, inputs.ba, *sizes(shape), layout)


def compiled_split(shape: GroupShape, layout: str) -> Callable[[Projected], object]:
    # Every case compiles the same line anew, and torch counts that against a limit.
    torch._dynamo.reset()
    compiled = torch.compile(lambda qkvz, ba: tuple(projection.split(qkvz, ba, *sizes(shape), layout)), dynamic=False)
    return lambda inputs: compiled(inputs.qkvz, inputs.ba)


def sglang_split(shape: GroupShape) -> Callable[[Projected], object]:
    from sglang.jit_kernel.triton.gdn_fused_proj import fused_qkvzba_split_reshape_cat as theirs

    return lambda inputs: theirs(inputs.qkvz, inputs.ba, *sizes(shape))


def split_case(device: torch.device, model: str, rows: int, layout: str, requirement: Requirement) -> Case:
    shape = MODELS[model]
    peers: dict[str, Callable[[], Callable[[Projected], object]]] = {
        "torch": lambda: partial(torch_split, shape=shape, layout=layout),
        "torch.compile": partial(compiled_split, shape, layout),
    }
    # sglang's kernel takes the interleaved layout, and ratios that are powers of two.
    if layout == "interleaved" and shape.ratio & (shape.ratio - 1) == 0:
        peers["sglang"] = partial(sglang_split, shape)
    return Case(
        name=f"split {model} {layout} N={rows}",
        shape={"model": model, "tokens": rows, "layout": layout},
        make_inputs=partial(projected, device, rows, shape),
        ours={OURS: lambda i: fused_qkvzba_split_reshape_cat(i.qkvz, i.ba, *sizes(shape), layout=layout)},
        peers=peers,
        check=lambda outputs, i: is_exact(outputs, projection.split(i.qkvz, i.ba, *sizes(shape), layout)),
        bytes_moved=2 * rows * (shape.qkvz_width + shape.ba_width) * DTYPE.itemsize,
        requirements=[requirement],
    )


def merge_case(device: torch.device, model: str, rows: int) -> Case:
    shape = MODELS[model]

    def make_inputs() -> projection.Parts:
        inputs = projected(device, rows, shape)
        return projection.split(inputs.qkvz, inputs.ba, *sizes(shape))

    return Case(
        name=f"merge (backward) {model} interleaved N={rows}",
        shape={"model": model, "tokens": rows, "layout": "interleaved"},
        make_inputs=make_inputs,
        ours={OURS: lambda parts: merge_qkvzba(*parts, *sizes(shape))},
        peers={"torch": lambda: lambda parts: projection.merge(*parts, *sizes(shape))},
        check=lambda outputs, parts: is_exact(outputs, projection.merge(*parts, *sizes(shape))),
        bytes_moved=2 * rows * (shape.qkvz_width + shape.ba_width) * DTYPE.itemsize,
        requirements=[Requirement(OURS, speed_at_least=0.97)],
    )


@triton.jit
def copy_block(p_x, p_y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < n), mask=o < n)


def bare_launch(inputs: Projected) -> torch.Tensor:
    """The least that a Triton kernel with one output costs the host."""
    out = torch.empty_like(inputs.qkvz)
    copy_block[(triton.cdiv(out.numel(), 1024),)](inputs.qkvz, out, out.numel(), 1024)
    return out


def host_case(device: torch.device) -> Case:
    shape = MODELS["Qwen3-Next"]

    def check(outputs: object, inputs: Projected) -> float:
        if isinstance(outputs, torch.Tensor):
            return is_exact((outputs,), (inputs.qkvz,))
        return is_exact(outputs, projection.split(inputs.qkvz, inputs.ba, *sizes(shape)))

    return Case(
        name="host time of one call, N=4",
        shape={"model": "Qwen3-Next", "tokens": 4, "layout": "interleaved"},
        make_inputs=partial(projected, device, 4, shape),
        ours={OURS: lambda i: fused_qkvzba_split_reshape_cat(i.qkvz, i.ba, *sizes(shape))},
        peers={"bare Triton launch": lambda: bare_launch},
        check=check,
        bytes_moved=2 * 4 * (shape.qkvz_width + shape.ba_width) * DTYPE.itemsize,
        requirements=[Requirement(OURS, "bare Triton launch", time_at_most=1.5, quantity="host")],
    )


@triton.jit(do_not_specialize=["sequences", "num_slots"])
def convolve_split(
    p_x, p_state, p_weight, p_bias, p_slots, p_y, sequences, num_slots, s_x, s_slot, s_y, conv: tl.constexpr,
    CHANNELS: tl.constexpr, SEQUENCES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The convolution of gdn_split.kernels.convolution alone, over a mixed_qkv that a split has written."""
    BLOCK: tl.constexpr = conv.BLOCK
    wait_for_inputs(DEPENDENT)
    o_c = tl.program_id(0) % (CHANNELS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    o_seq = (tl.program_id(0) // (CHANNELS // BLOCK)).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    m_seq = o_seq < sequences
    o_slot, m_live = load_slots(p_slots, o_seq, m_seq, num_slots)
    p_slot = p_state + (o_slot * s_slot)[:, None]
    x, y = Rows(p_x, s_x), Rows(p_y, s_y)
    convolve(x, y, p_slot, p_weight, p_bias, o_seq, m_seq, m_live, o_c, o_c < CHANNELS, conv)


# The fastest (sequences a program, warps, block) of 1-8 x 1-4 x 128-256, by (sequences, packed state), on an H200.
UNFUSED_TILE = {
    (1, True): (1, 4, 128), (1, False): (1, 2, 128), (16, True): (1, 4, 128), (16, False): (1, 4, 128),
    (64, True): (1, 4, 256), (64, False): (2, 1, 128), (256, True): (1, 4, 256), (256, False): (2, 1, 256),
}  # fmt: skip


def unfused(inputs: Projected, shape: GroupShape, packed: bool, overlapped: bool) -> tuple[torch.Tensor, ...]:
    """Our split, then our convolution as a kernel of its own, tuned for itself.

    ``overlapped``: both started by dependent launches, as ours are; else each waits for the one before to end.
    """
    row_bytes = (shape.qkvz_width + shape.ba_width) * DTYPE.itemsize
    plan = plan_split(len(inputs.qkvz), shape, row_bytes, device_limits(inputs.qkvz.device))
    hopper = plan.dependent_launch
    dependent = overlapped and hopper
    plan = replace(plan, dependent_launch=dependent)
    parts = fused_qkvzba_split_reshape_cat(inputs.qkvz, inputs.ba, *sizes(shape), plan=plan)
    out = torch.empty_like(parts.mixed_qkv)
    sequences, channels = out.shape
    tile, warps, block = UNFUSED_TILE[sequences, packed]
    conv = Convolution(
        *inputs.state.stride()[1:], *inputs.weight.stride(), 1, inputs.weight.shape[1], True, True, block,
        HOPPER=hopper,
    )  # fmt: skip
    convolve_split[(triton.cdiv(sequences, tile) * (channels // block),)](
        parts.mixed_qkv, inputs.state, inputs.weight, inputs.bias, inputs.slots, out, sequences, len(inputs.state),
        channels, inputs.state.stride(0), channels, conv, channels, tile, dependent, num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return (out, *parts[1:], inputs.state)


@triton.jit(do_not_specialize=["sequences"])
def copy_rows_and_slots(
    p_x, p_state, p_slots, p_y, sequences, ROW: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A row of each sequence is copied, and what lies in its slot is read and written back, one bit changed."""
    wait_for_inputs(DEPENDENT)
    TILES: tl.constexpr = (ROW + STATE) // BLOCK
    i_n = (tl.program_id(0) // TILES).to(tl.int64)
    i_t = tl.program_id(0) % TILES
    o = tl.arange(0, BLOCK)
    if i_t < STATE // BLOCK:
        slot = tl.load(p_slots + i_n).to(tl.int64)
        p = p_state + slot * STATE + i_t * BLOCK + o
        tl.store(p, tl.load(p) ^ 1)
    else:
        o_y = i_n * ROW + (i_t - STATE // BLOCK) * BLOCK + o
        tl.store(p_y + o_y, tl.load(p_x + o_y))


def copied_through_slots(inputs: Projected, shape: GroupShape) -> torch.Tensor:
    """The least that any kernel of this update can do: its bytes, of which those of states are found by a slot."""
    # Of 1024, 2048 and 4096 by 4, 4 and 8 warps the fastest.
    block, state = 4096, shape.qkv_width * (QWEN3_NEXT_80B.conv_width - 1)
    qkvz, pool, out = (x.view(torch.int16) for x in (inputs.qkvz, inputs.state, torch.empty_like(inputs.qkvz)))
    dependent = device_limits(inputs.qkvz.device).dependent_launch
    copy_rows_and_slots[(len(qkvz) * (shape.qkvz_width + state) // block,)](
        qkvz, pool, inputs.slots, out, len(qkvz), shape.qkvz_width, state, block, dependent, num_warps=8,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out


def launched_alone(inputs: Projected, shape: GroupShape, packed: bool) -> torch.Tensor:
    limits = device_limits(inputs.qkvz.device)
    plan = plan_conv(len(inputs.qkvz), 1, shape, limits, packed, True)
    return floors.launch_alone(inputs.qkvz.device, plan.programs, plan.num_warps)


def conv_case(device: torch.device, sequences: int, packed: bool) -> Case:
    shape, width = MODELS["Qwen3-Next"], QWEN3_NEXT_80B.conv_width
    channels = shape.qkv_width

    def make_inputs() -> Projected:
        inputs = projected(device, sequences, shape)
        state = torch.randn(sequences, channels, width - 1, device=device, dtype=DTYPE)
        inputs.state = state if packed else state.transpose(1, 2).contiguous().transpose(1, 2)
        inputs.weight = torch.randn(channels, width, device=device, dtype=DTYPE)
        inputs.bias = torch.randn(channels, device=device, dtype=DTYPE)
        inputs.slots = torch.randperm(sequences, device=device, dtype=torch.int32)
        return inputs

    def ours(i: Projected) -> tuple[torch.Tensor, ...]:
        return (*split_conv1d_update(i.qkvz, i.ba, i.state, i.weight, i.bias, i.slots, *sizes(shape)), i.state)

    def least(i: Projected) -> tuple[torch.Tensor, ...]:
        return floors.convolution_by_ors(i.qkvz, i.state, i.weight, i.bias, i.slots, 2 if sequences >= 64 else 1)

    def check(outputs: torch.Tensor | tuple[torch.Tensor, ...], i: Projected) -> float:
        if not isinstance(outputs, torch.Tensor) and len(outputs) == 3:
            return floors.check_ors(outputs, i.qkvz, i.state, i.weight, i.bias, i.slots)
        if isinstance(outputs, torch.Tensor):
            if outputs.dtype == torch.int32:
                return floors.check(outputs, i.qkvz)
            return is_exact((outputs.view(DTYPE),), (i.qkvz,))
        state = i.state.clone()
        wanted = projection.split_conv1d_update(i.qkvz, i.ba, state, i.weight, i.bias, i.slots, *sizes(shape))
        is_exact(outputs[1:], (*wanted[1:], state))
        # In units of bfloat16's rounding: half a unit in the last place of the result, or of 1 for small ones.
        return ((outputs[0].double() - wanted[0]).abs() / wanted[0].abs().clamp(min=1) / 2**-8).max().item()

    requirements = [Requirement(OURS, "ours, unfused", time_at_most=0.6)]
    if packed and sequences >= 64:
        requirements.append(Requirement(OURS, speed_at_least=0.85))
    state_bytes = 2 * channels * (width - 1) * DTYPE.itemsize
    row_bytes = 2 * (shape.qkvz_width + shape.ba_width) * DTYPE.itemsize
    return Case(
        name=f"split + convolution, {sequences} sequences, {'packed' if packed else 'channel-last'} state",
        shape={"model": "Qwen3-Next", "sequences": sequences, "state": "packed" if packed else "channel-last"},
        make_inputs=make_inputs,
        ours={OURS: ours},
        peers={
            "ours, unfused": lambda: partial(unfused, shape=shape, packed=packed, overlapped=True),
            "ours, unfused, not overlapped": lambda: partial(unfused, shape=shape, packed=packed, overlapped=False),
            "copy through slots": lambda: partial(copied_through_slots, shape=shape),
            floors.ORS: lambda: least,
            floors.LAUNCH: lambda: partial(launched_alone, shape=shape, packed=packed),
        },
        check=check,
        tolerance=1.05,
        bytes_moved=sequences * (row_bytes + state_bytes) + channels * (width + 1) * DTYPE.itemsize,
        requirements=requirements,
    )


def further_splits(device: torch.device) -> Iterator[Case]:
    """Sizes between the others."""
    for model, rows in (("Qwen3-Next", 2000), ("64 V heads of 96", 8192)):
        yield split_case(device, model, rows, "interleaved", Requirement(OURS, speed_at_least=0.98))


def conv_host_case(device: torch.device) -> Case:
    case = conv_case(device, 2, True)
    targets = [Requirement(OURS, us_at_most=20.0, quantity="host")]
    return replace(case.without(*case.peers), name=f"host time of {case.name}", requirements=targets)


def cases(device: torch.device) -> Iterator[Case]:
    for rows in (1, 64, 256, 1024):
        yield split_case(device, "Qwen3-Next", rows, "interleaved", Requirement(OURS, time_at_most=1.12))
    for rows in (8192, 65536):
        yield split_case(device, "Qwen3-Next", rows, "interleaved", Requirement(OURS, speed_at_least=0.97))
    yield split_case(device, "Qwen3-Next", 8192, "contiguous", Requirement(OURS, speed_at_least=0.97))
    # 100 MB and more in each: below 64 MB the L2 cache has a part in both sides.
    for model, rows in (
        ("Qwen3-Next TP2", 8192),
        ("Qwen3-Next TP4", 16384),
        ("Qwen3-Next TP8", 32768),
        ("ratio 3", 8192),
    ):
        yield split_case(device, model, rows, "interleaved", Requirement(OURS, speed_at_least=0.92))
    yield from further_splits(device)
    yield merge_case(device, "Qwen3-Next", 8192)
    for sequences in (1, 16, 64, 256):
        for packed in (True, False):
            yield conv_case(device, sequences, packed)
    yield host_case(device)
    yield conv_host_case(device)
    yield from step_cases(device, MODELS["Qwen3-Next"])
    yield from prefill_cases(device, MODELS["Qwen3-Next"])
