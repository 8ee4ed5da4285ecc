"""vLLM's own objects for tests inside it: a configuration, layers, and a step's metadata, without its model runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import _custom_ops
from vllm.config import CompilationConfig, CUDAGraphMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kernel_reference.testing.layers import assert_alike

Tensor = torch.Tensor


@contextmanager
def configured(device: torch.device, dtype: torch.dtype = torch.bfloat16, **model: Any) -> Iterator[Any]:
    """The configuration under which layers are made: on ``device``, of ``dtype``.

    ``model``: what builders of metadata ask of a model's config, which vLLM reads from a checkpoint.
    """
    # A test captures its graphs itself.
    options = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    config = VllmConfig(device_config=DeviceConfig(device=device.type), compilation_config=options)
    before = torch.get_default_dtype()
    with set_current_vllm_config(config), device:
        # Not in the constructor, which asks it about a checkpoint.
        asked = {
            "dtype": dtype, "rswa_window": None, "is_mm_prefix_lm": False, "max_model_len": 4096, "is_moe": False,
        }  # fmt: skip
        config.model_config = SimpleNamespace(**asked | model)
        torch.set_default_dtype(dtype)
        try:
            yield config
        finally:
            torch.set_default_dtype(before)


def step(older: Sequence[int], new: Sequence[int], table: Tensor, page: int) -> Any:
    """What vLLM's model runner tells builders: sequences with so many older and new tokens, and their pages."""
    device = table.device
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor([sum(both) for both in zip(older, new, strict=True)]).int()
    places = [torch.arange(begin, begin + count) for begin, count in zip(older, new, strict=True)]
    pages = [row[at // page].long() * page for row, at in zip(table.cpu(), places, strict=True)]
    slots = torch.cat([own + at % page for own, at in zip(pages, places, strict=True)])
    return CommonAttentionMetadata(
        query_start_loc=bounds.to(device), query_start_loc_cpu=bounds, seq_lens=lengths.to(device), num_reqs=len(new),
        num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=int(lengths.max()), block_table_tensor=table,
        slot_mapping=slots.to(device), seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip


def overwrite(step: Any, other: Any) -> None:
    """Another step's tensors in those of a step, where a graph reads them."""
    for field in fields(step):
        value, new = getattr(step, field.name), getattr(other, field.name)
        if isinstance(value, Tensor) and new is not None:
            value.copy_(new)
        else:
            # What builders add to a step on the host belongs to that step alone.
            setattr(step, field.name, new)


def call(layer: Any, metadata: Any, slots: Tensor, config: Any, *given: Any) -> Tensor:
    """A layer's result in a step with this metadata."""
    name = layer.layer_name
    with torch.no_grad(), set_forward_context({name: metadata}, config, slot_mapping={name: slots}):
        out: Tensor = layer(*given)
    return out


class Side(NamedTuple):
    """A layer with a cache of its own, and what makes metadata for it."""

    layer: Any
    builder: Any


def side(layer: Any, backend: Any, spec: Any, cache: Tensor, config: Any) -> Side:
    """A layer over a copy of the cache, with the builder of its backend's metadata."""
    layer.kv_cache = cache.clone()
    return Side(layer, backend.get_builder_cls()(spec, [layer.layer_name], config, cache.device))


def assert_sides_alike(
    ours: Side,
    theirs: Side,
    step: Any,
    config: Any,
    given: Sequence[Any],
    *,
    heads: int,
    within: float,
    other: Any = None,
) -> None:
    """Compare a step of two layers, and the caches it leaves, which must be the same to the bit.

    Args:
        given: what the layers are called with.
        heads, within: see :func:`assert_alike`.
        other: another step of as many rows and tokens; ours is then replayed from a graph over its metadata and other
            inputs.

    Raises:
        AssertionError: they differ, or no key was written.
    """
    if other is not None:
        # As vLLM captures: for the longest sequence that a replay may bring.
        step.max_seq_len = max(step.max_seq_len, other.max_seq_len)
    metadata = ours.builder.build(0, step)
    before = ours.layer.kv_cache.clone()

    def run(layer: Any, metadata: Any) -> Tensor:
        return call(layer, metadata, step.slot_mapping, config, *given)

    def renew() -> None:
        overwrite(step, other)
        for one in given:
            if isinstance(one, Tensor):
                one.normal_()

    assert_alike(
        lambda: run(ours.layer, metadata), lambda: run(theirs.layer, theirs.builder.build(0, step)), heads=heads,
        within=within, renew=None if other is None else renew,
    )  # fmt: skip
    if not torch.equal(ours.layer.kv_cache, theirs.layer.kv_cache):
        raise AssertionError("the caches differ")
    if torch.equal(ours.layer.kv_cache, before):
        raise AssertionError("nothing was written to the cache")


def write_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Triton kernel and torch write its caches where its C++ extension is not there."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    def of_latents(latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, **_: Any) -> None:
        rows = torch.cat((latent, rope.view(len(rope), -1)), 1)
        cache.view(-1, cache.shape[-1]).index_copy_(0, slots.long(), rows[: len(slots)])

    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", triton_reshape_and_cache_flash)
        monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", of_latents)
