"""Kernels under names that transformers knows: hooks that are taken back, and lengths in place of a mask.

transformers makes one mask a step and hands it to each layer's attention. A kernel over a cache wants the sequences'
lengths instead, on the device: :func:`lengths_mask` makes those, of four dimensions, which transformers passes on as it
finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import describe, fail

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
    from transformers.monkey_patching import get_patch_mapping, register_patch_mapping, unregister_patch_mapping
except ImportError as missing:
    raise ImportError(
        "this needs transformers 5.21 or newer: the extra of the package's name, as in gdn-split[transformers]"
    ) from missing

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


class Attention(NamedTuple):
    """A function for ``AttentionInterface``, and the one that makes its masks, for ``AttentionMaskInterface``."""

    function: Callable[..., tuple[torch.Tensor, None]]
    mask: Callable[..., torch.Tensor | None]


def enabled(layers: Mapping[str, type] | None = None, attention: Mapping[str, Attention] | None = None) -> ExitStack:
    """Register layers and attention functions with transformers, until the result is closed or its ``with`` ends.

    Args:
        layers: subclasses by the name of the class that each replaces, in models that are made by ``from_pretrained``
            and ``from_config`` meanwhile. Those models keep them.
        attention: functions by the name that ``attn_implementation`` gives.

    Raises:
        ValueError: one of the names is taken.
    """
    layers, attention = dict(layers or {}), dict(attention or {})
    taken = sorted(layers.keys() & get_patch_mapping().keys())
    taken += sorted(attention.keys() & AttentionInterface._global_mapping.keys())
    if taken:
        fail(
            "a call of enable()", "the only one at a time, or after the last was closed", f"{taken[0]}, which is taken"
        )
    undo = ExitStack()
    if layers:
        register_patch_mapping(layers)
        undo.callback(_restore, layers)
        undo.callback(unregister_patch_mapping, list(layers))
    for name, functions in attention.items():
        # transformers has no call that takes a name back.
        for interface, value in zip((AttentionInterface, AttentionMaskInterface), functions, strict=True):
            interface.register(name, value)
            undo.callback(interface._global_mapping.pop, name)
    return undo


def _restore(layers: Mapping[str, type]) -> None:
    """Put classes back where making a model failed: transformers restores them only after one that was made."""
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
        for name, layer in layers.items():
            if vars(module).get(name) is layer:
                setattr(module, name, next(base for base in layer.__mro__ if base.__name__ == name))


def lengths_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """In place of a mask, the keys of each sequence, the new ones counted: int32 [batch_size, 1, 1, window or 1].

    Arguments are those of ``transformers.masking_utils.sdpa_mask``. A window's size is in the shape, so that the layer,
    which is told of its own, can tell it from another pattern. None where new tokens are all that there is, and no
    window.

    Raises:
        ValueError: the mask is another than a causal one, with or without a window: padding, packed sequences, tokens
            that see later ones; or the mask's values cannot be looked at, inside torch.compile.
    """
    customised = use_vmap or (q_length > 1 and not allow_is_causal_skip)
    if customised or (local_size is None and mask_function is not causal_mask_function):
        fail(
            "the attention mask", "causal, with or without a sliding window", "a pattern of the model's or caller's own"
        )
    if attention_mask is not None:
        if torch.compiler.is_compiling():
            fail("attention_mask", "None inside torch.compile, where it cannot be looked at", describe(attention_mask))
        if not attention_mask.all():
            fail("attention_mask", "all ones (sequences of one length, without padding)", "one with padding")
    if local_size is None and isinstance(q_offset, int) and q_offset == 0:
        return None
    lengths = torch.full((batch_size, 1, 1, local_size or 1), q_length - kv_offset, dtype=torch.int32, device=device)
    return lengths + q_offset


def key_lengths(
    attention_mask: torch.Tensor | None, batch: int, tokens: int, window: int | None
) -> torch.Tensor | None:
    """The lengths [batch] that :func:`lengths_mask` made for a layer with this window; None where it made none.

    Raises:
        ValueError: the mask is not of its making, or is for another pattern.
    """
    if attention_mask is None and window is None:
        return None
    wanted = "None or a 2-D mask of ones in the model's call"
    if attention_mask is None or attention_mask.dtype != torch.int32 or attention_mask.ndim != 4:
        fail("attention_mask", wanted, "None" if attention_mask is None else describe(attention_mask))
    if attention_mask.shape[:3] != (batch, 1, 1):
        fail("attention_mask", wanted, describe(attention_mask))
    if attention_mask.shape[3] != (window or 1):
        fail("the layer's sliding_window", f"{attention_mask.shape[3]} as its mask's", window)
    return attention_mask[:, 0, 0, 0].contiguous()


# What changes the result, and no kernel here does unless it says so. transformers passes many more, such as positions.
_UNKNOWN_TO_KERNELS = {
    "position_bias": "relative positions",
    "cache": "continuous batching",
    "cu_seq_lens_q": "packed sequences",
    "output_attentions": "attention weights",
    "indices": "sparse attention",
    "block_indices": "selected attention",
}


def refuse_options(
    module: torch.nn.Module, dropout: float, options: Mapping[str, Any], *more: str, computed: Collection[str] = ()
) -> None:
    """Raise for what would change the result of an attention and is not computed.

    ``more`` are names of options that are refused too, ``computed`` of those that the caller, unlike others, computes.
    """
    if dropout:
        fail("dropout", "0 (call model.eval())", dropout)
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        fail("is_causal", "True", False)
    for name in (*_UNKNOWN_TO_KERNELS, *more):
        value = options.get(name)
        if value is not None and value is not False and name not in computed:
            fail(name, "None", f"one ({_UNKNOWN_TO_KERNELS[name]})" if name in _UNKNOWN_TO_KERNELS else value)
