"""Where gdn-split's speed falls off: grids round its cases, beside torch, sglang and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from cases import OURS, Projected, is_exact, sglang_split, sizes, torch_split
from steps import FLA_CHAIN, Setup, prefill_case, step_case

from gdn_split import fused_qkvzba_split_reshape_cat, merge_qkvzba, split_conv1d_update
from gdn_split.plan import GroupShape
from kernel_reference import projection
from kernel_reference.bench import Axis, Case, Map, Point

LAYOUTS = ("interleaved", "contiguous")
# Ranks of Qwen3-Next's 16 and 32 heads, value heads of a QK head that are no power of two, and smaller heads.
MODELS = {
    "16/32x128": GroupShape(16, 32, 128, 128),
    "8/16x128": GroupShape(8, 16, 128, 128),
    "4/8x128": GroupShape(4, 8, 128, 128),
    "2/4x128": GroupShape(2, 4, 128, 128),
    "1/2x128": GroupShape(1, 2, 128, 128),
    "16/48x128": GroupShape(16, 48, 128, 128),
    "16/64x128": GroupShape(16, 64, 128, 128),
    "16/32x96": GroupShape(16, 32, 96, 96),
    "8/8x256": GroupShape(8, 8, 256, 256),
}
# Of decode steps more sizes and ratios, in ranks of a node, since states are many.
STEP_MODELS = {
    "16/32x128": MODELS["16/32x128"],
    "2/4x128": MODELS["2/4x128"],
    "8/8x128": GroupShape(8, 8, 128, 128),
    "4/12x128": GroupShape(4, 12, 128, 128),
    "2/16x128": GroupShape(2, 16, 128, 128),
    "16/32x64": GroupShape(16, 32, 64, 64),
    "8/16x96": GroupShape(8, 16, 96, 96),
    "4/8x192": GroupShape(4, 8, 192, 192),
    "4/8x256": GroupShape(4, 8, 256, 256),
    "4/8x128/256": GroupShape(4, 8, 128, 256),
}
LENGTHS = {
    "one": (1.0,),
    "seven": (0.0002, 0.49, 0.002, 0.11, 0.0004, 0.25, 0.1474),
    "64": (1 / 64,) * 64,
    "512": (1 / 512,) * 512,
}
WIDTH = 4


def inputs(device: torch.device, rows: int, shape: GroupShape, dtype: torch.dtype, padded: bool = False) -> Projected:
    """``padded``: rows of mixed_qkvz further apart than they are long, as in the output of a larger projection."""
    wide = shape.qkvz_width + (128 if padded else 0)
    qkvz = torch.randn(rows, wide, device=device, dtype=dtype)[:, : shape.qkvz_width]
    return Projected(qkvz, torch.randn(rows, shape.ba_width, device=device, dtype=dtype))


def split_point(device: torch.device, point: Point) -> Case:
    shape, rows, layout = MODELS[point["heads"]], point["tokens"], point["layout"]
    dtype = getattr(torch, point["dtype"])
    peers: dict[str, Callable[[], Callable[[Projected], object]]] = {
        "torch": lambda: partial(torch_split, shape=shape, layout=layout)
    }
    if layout == "interleaved" and shape.ratio & (shape.ratio - 1) == 0 and point["rows"] == "packed":
        peers["sglang"] = partial(sglang_split, shape)
    return Case(
        name="split",
        shape={},
        make_inputs=partial(inputs, device, rows, shape, dtype, point["rows"] == "padded"),
        ours={OURS: lambda i: fused_qkvzba_split_reshape_cat(i.qkvz, i.ba, *sizes(shape), layout=layout)},
        peers=peers,
        check=lambda outputs, i: is_exact(outputs, projection.split(i.qkvz, i.ba, *sizes(shape), layout)),
        bytes_moved=2 * rows * (shape.qkvz_width + shape.ba_width) * dtype.itemsize,
    )


def merge_point(device: torch.device, point: Point) -> Case:
    shape, rows, layout = MODELS[point["heads"]], point["tokens"], point["layout"]
    dtype = getattr(torch, point["dtype"])

    def make_inputs() -> projection.Parts:
        i = inputs(device, rows, shape, dtype)
        return projection.split(i.qkvz, i.ba, *sizes(shape), layout)

    return Case(
        name="merge",
        shape={},
        make_inputs=make_inputs,
        ours={OURS: lambda parts: merge_qkvzba(*parts, *sizes(shape), layout=layout)},
        peers={"torch": lambda: lambda parts: projection.merge(*parts, *sizes(shape), layout)},
        check=lambda outputs, parts: is_exact(outputs, projection.merge(*parts, *sizes(shape), layout)),
        bytes_moved=2 * rows * (shape.qkvz_width + shape.ba_width) * dtype.itemsize,
    )


def conv_inputs(
    device: torch.device, sequences: int, shape: GroupShape, dtype: torch.dtype, tokens: int, state: str
) -> Projected:
    i = inputs(device, sequences * tokens, shape, dtype)
    channels = shape.qkv_width
    i.state = torch.randn(sequences, channels, WIDTH - 1, device=device, dtype=dtype)
    if state == "channel-last":
        i.state = i.state.transpose(1, 2).contiguous().transpose(1, 2)
    i.weight = torch.randn(channels, WIDTH, device=device, dtype=dtype)
    i.bias = torch.randn(channels, device=device, dtype=dtype)
    i.slots = torch.randperm(sequences, device=device, dtype=torch.int32)
    return i


def conv_point(device: torch.device, point: Point) -> Case:
    shape, sequences, tokens = MODELS[point["heads"]], point["sequences"], point["tokens each"]
    dtype, layout = getattr(torch, point["dtype"]), point["layout"]
    options = {"tokens_per_sequence": tokens, "layout": layout}

    def ours(i: Projected) -> tuple[torch.Tensor, ...]:
        given = (i.qkvz, i.ba, i.state, i.weight, i.bias, i.slots)
        return (*split_conv1d_update(*given, *sizes(shape), **options), i.state)

    def check(outputs: tuple[torch.Tensor, ...], i: Projected) -> float:
        state = i.state.clone()
        given = (i.qkvz, i.ba, state, i.weight, i.bias, i.slots)
        wanted = projection.split_conv1d_update(*given, *sizes(shape), **options)
        is_exact(outputs[1:], (*wanted[1:], state))
        # In units of the rounding of the result's dtype, of 1 for small results.
        unit = torch.finfo(dtype).eps
        return ((outputs[0].double() - wanted[0]).abs() / wanted[0].abs().clamp(min=1) / unit).max().item()

    channels = shape.qkv_width
    row_elements = 2 * tokens * (shape.qkvz_width + shape.ba_width)
    elements = sequences * (row_elements + 2 * channels * (WIDTH - 1)) + channels * (WIDTH + 1)
    return Case(
        name="split and convolution",
        shape={},
        make_inputs=partial(conv_inputs, device, sequences, shape, dtype, tokens, point["state"]),
        ours={OURS: ours},
        peers={},
        check=check,
        # In float32 the sums' own rounding is no longer far below that of the result.
        tolerance=1.05 if dtype != torch.float32 else 8.0,
        bytes_moved=elements * dtype.itemsize,
    )


def step_setup(point: Point) -> Setup:
    dtype = getattr(torch, point["states"])
    return Setup(point["sequences"], STEP_MODELS[point["heads"]], point["tokens each"], dtype, point["layout"])


def prefill_point(device: torch.device, point: Point) -> Case:
    shape, rows = MODELS[point["heads"]], point["tokens"]
    bounds = torch.tensor([0.0, *LENGTHS[point["sequences"]]], dtype=torch.float64).cumsum(0)
    ends = (bounds * rows).round().long()
    # The peer brings kernels of its own, which each of these would compile.
    return prefill_case(device, shape, ends.diff().tolist()).without(FLA_CHAIN)


def maps(device: torch.device) -> Iterator[Map]:
    heads = Axis("heads", tuple(MODELS))
    dtypes = Axis("dtype", ("bfloat16", "float32"))
    layouts = Axis("layout", LAYOUTS)
    tokens = Axis("tokens", (1, 4, 33, 256, 1000, 8192, 30000))
    yield Map(
        name="split",
        axes=(heads, tokens, layouts, dtypes, Axis("rows", ("packed", "padded"))),
        case=partial(split_point, device),
        points=36,
    )
    yield Map(
        name="merge",
        axes=(Axis("heads", tuple(MODELS)[::2]), tokens, layouts, dtypes),
        case=partial(merge_point, device),
        points=14,
    )
    yield Map(
        name="convolution",
        axes=(
            Axis("heads", tuple(MODELS)[:6]),
            Axis("sequences", (1, 3, 16, 64, 100, 256, 1000)),
            Axis("tokens each", (1, 2, 4)),
            Axis("state", ("packed", "channel-last")),
            layouts,
            dtypes,
        ),
        case=partial(conv_point, device),
        known=[
            {
                "heads": "16/32x128",
                "sequences": sequences,
                "tokens each": 1,
                "state": "packed",
                "layout": "interleaved",
                "dtype": "bfloat16",
            }
            for sequences in (64, 256)
        ],
        points=22,
    )
    yield Map(
        name="decode step",
        axes=(
            Axis("heads", tuple(STEP_MODELS)),
            Axis("sequences", (1, 3, 9, 16, 33, 64, 100, 256, 512)),
            Axis("tokens each", (1, 2, 4)),
            Axis("states", ("float32", "bfloat16", "float16")),
            Axis("layout", ("KV", "VK")),
        ),
        case=lambda point: step_case(device, step_setup(point)),
        points=30,
    )
    yield Map(
        name="inputs of prefill",
        axes=(Axis("heads", tuple(MODELS)), Axis("tokens", (64, 1000, 8192, 30000)), Axis("sequences", tuple(LENGTHS))),
        case=partial(prefill_point, device),
        points=12,
    )


def sweep(device: torch.device, batch: int) -> Callable[[], object]:
    """A decode step of Qwen3-Next."""
    shape = MODELS["16/32x128"]
    i = conv_inputs(device, batch, shape, torch.bfloat16, 1, "packed")
    given = (i.qkvz, i.ba, i.state, i.weight, i.bias, i.slots)
    return lambda: split_conv1d_update(*given, *sizes(shape))
