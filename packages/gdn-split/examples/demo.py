"""What the demo runs for gdn-split: both kernels at the sizes of Qwen3-Next-80B, 4096 tokens and 256 sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gdn_split import fused_qkvzba_split_reshape_cat, split_conv1d_update
from gdn_split.plan import DeviceLimits, GroupShape, plan_conv, plan_split
from gdn_split.reference import new_parts
from gdn_split.tensors import Convolve, Split
from kernel_reference import projection
from kernel_reference.bench.demo import INTERPRETED_KERNEL, Row, median_ms, plain_ms, ran_on
from kernel_reference.models import QWEN3_NEXT_80B, GatedDeltaNet

Tensors = Sequence[torch.Tensor]
_RELATIVE = "error relative to the largest value"
_LIMIT = torch.finfo(torch.bfloat16).eps


def real_size(device: torch.device) -> Iterator[Row]:
    """4096 tokens through the split, 256 sequences through the convolution: GPU kernels or the CPU implementation."""
    model = QWEN3_NEXT_80B
    sizes = _sizes(model)
    how = ran_on(device)

    fused = _projections(model, 4096, device)
    parts = fused_qkvzba_split_reshape_cat(*fused, *sizes)
    error = _copy_error(fused, parts, model)
    duration = median_ms(lambda: fused_qkvzba_split_reshape_cat(*fused, *sizes), device)
    shape = f"{model.name}, 4096 tokens, bfloat16"
    plain = plain_ms(lambda: projection.split(*fused, *sizes), device)
    yield Row("fused_qkvzba_split_reshape_cat", *how, shape, error, duration, plain_ms=plain)

    fused, state, weight, slots = _decode_step(model, 256, device)
    before = state.clone()
    parts = split_conv1d_update(*fused, state, weight, None, slots, *sizes)
    error = _convolution_error(fused, before, weight, slots, parts, state, model)
    duration = median_ms(lambda: split_conv1d_update(*fused, state, weight, None, slots, *sizes), device)
    inputs = (*fused, before, weight, None, slots, *sizes)
    plain = plain_ms(lambda: projection.split_conv1d_update(*inputs, compute_dtype=torch.float32), device)
    shape = f"{model.name}, 256 sequences, bfloat16"
    yield Row("split_conv1d_update", *how, shape, error, duration, _RELATIVE, limit=_LIMIT, plain_ms=plain)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, in Triton's interpreter, launched as they would be on a GPU."""
    from gdn_split import arguments, launch

    model = QWEN3_NEXT_80B.tensor_parallel(8)
    shape = GroupShape(*_sizes(model))
    how = (INTERPRETED_KERNEL, "cpu")
    device = torch.device("cpu")
    a_gpu = DeviceLimits(cores=132, on_chip_bytes=227 * 1024, programs_per_core=8)

    fused = _projections(model, 16, device)
    parts = new_parts(*fused, shape)
    split_plan = plan_split(16, shape, 2 * (shape.qkvz_width + shape.ba_width), a_gpu)
    tensors = Split(*fused, *parts)
    problem = arguments.check_split(tensors, *_sizes(model), "interleaved")
    run = launch.prepare_move(problem, split_plan, tensors)
    duration = median_ms(lambda: run(*fused, *parts), device)
    yield Row("split_by_group", *how, f"{model.name}, 16 tokens, bfloat16", _copy_error(fused, parts, model), duration)

    fused, state, weight, slots = _decode_step(model, 4, device)
    parts = new_parts(*fused, shape)
    convolution_plan = plan_conv(4, 1, shape, a_gpu)
    step = Convolve(*fused, state, weight, None, slots, *parts)
    run = launch.prepare_split_conv1d_update(
        arguments.check_convolve(step, 1, True, *_sizes(model), "interleaved"), convolution_plan, step
    )
    before = state.clone()
    run(*fused, state, weight, weight, slots, *parts)
    error = _convolution_error(fused, before, weight, slots, parts, state, model)
    duration = median_ms(lambda: run(*fused, state, weight, weight, slots, *parts), device)
    yield Row(
        "split_and_convolve", *how, f"{model.name}, 4 sequences, bfloat16", error, duration, _RELATIVE, limit=_LIMIT
    )


def _sizes(model: GatedDeltaNet) -> tuple[int, int, int, int]:
    return model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v


def _projections(model: GatedDeltaNet, tokens: int, device: torch.device) -> list[torch.Tensor]:
    shape = GroupShape(*_sizes(model))
    widths = (shape.qkvz_width, shape.ba_width)
    return [torch.randn(tokens, width, device=device).to(torch.bfloat16) for width in widths]


def _decode_step(
    model: GatedDeltaNet, sequences: int, device: torch.device
) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor]:
    channels = GroupShape(*_sizes(model)).qkv_width
    state = torch.randn(2 * sequences, channels, model.conv_width - 1, device=device).to(torch.bfloat16)
    weight = torch.randn(channels, model.conv_width, device=device).to(torch.bfloat16)
    slots = torch.randperm(2 * sequences, device=device)[:sequences].to(torch.int32)
    return _projections(model, sequences, device), state, weight, slots


def _copy_error(fused: Tensors, parts: Tensors, model: GatedDeltaNet) -> float:
    """The largest difference from the parts taken out head by head in float64."""
    ratio, head_qk, head_v = model.num_heads_v // model.num_heads_qk, model.head_qk, model.head_v
    runs = [head_qk, head_qk, ratio * head_v, ratio * head_v]
    qkvz, ba = (tensor.double().chunk(model.num_heads_qk, dim=1) for tensor in fused)
    q, k, v, z = (torch.cat(part, dim=1) for part in zip(*[head.split(runs, dim=1) for head in qkvz], strict=True))
    b, a = (torch.cat(part, dim=1) for part in zip(*[head.split(ratio, dim=1) for head in ba], strict=True))
    wanted = (torch.cat([q, k, v], dim=1), z, b, a)
    return max(float((one.flatten(1) - other).abs().max()) for one, other in zip(parts, wanted, strict=True))


def _convolution_error(
    fused: Tensors, before: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, parts: Tensors,
    after: torch.Tensor, model: GatedDeltaNet,
) -> float:  # fmt: skip
    """The largest difference from the convolution in float64, in results and state, over the largest value."""
    oracle = projection.split_conv1d_update(*fused, before, weight, None, slots, *_sizes(model))
    pairs = zip((*parts, after), (*oracle, before), strict=True)
    differences = [float((one.double() - other.double()).abs().max()) for one, other in pairs]
    return max(differences) / float(oracle.mixed_qkv.abs().max())
