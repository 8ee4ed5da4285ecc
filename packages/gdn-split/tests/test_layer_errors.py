"""Do steps, drafts and the inputs of prefill say which argument is wrong, and write nothing?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn_split
from gdn_split.plan import StepPlan
from gdn_split.prefill.plan import PrefillPlan

SIZES = {"num_heads_qk": 1, "num_heads_v": 2, "head_qk": 8, "head_v": 4}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "step": gdn_split.gdn_decode_step,
    "verify": gdn_split.gdn_verify,
    "commit": gdn_split.gdn_commit,
    "prefill": gdn_split.gdn_prefill_inputs,
}


def good(function: str, device: torch.device) -> dict[str, Any]:
    normal = lambda *size: torch.randn(*size, device=device)  # noqa: E731
    slots = torch.tensor([2, 0], device=device)
    layer = {"mixed_qkvz": normal(4, 32), "mixed_ba": normal(4, 4), "conv_weight": normal(24, 4), "conv_bias": None}
    layer |= {"conv_state": normal(3, 24, 3), "slots": slots, "A_log": normal(2), "dt_bias": normal(2), **SIZES}
    if function == "prefill":
        return layer | {"cu_seqlens": torch.tensor([0, 3, 4], device=device)}
    layer |= {"state_pool": normal(3, 2, 8, 4), "tokens_per_sequence": 2}
    if function == "commit":
        return layer | {"accepted": torch.tensor([1, 2], device=device)}
    return layer | {"norm_weight": normal(4), "out": normal(4, 2, 4)}


to_int = lambda tensor: tensor.int()  # noqa: E731
wider = lambda tensor: torch.cat([tensor, tensor[..., :1]], -1)  # noqa: E731
TABLE: list[tuple[str, str, Any, str]] = [
    ("step", "state_pool", wider, r"state_pool must be \[num_slots, 2, 8, 4\]"),
    ("step", "state_pool", lambda t: t.mT, r'state_pool must be .*; state_layout="VK" would fit'),
    ("step", "state_pool", to_int, r"state_pool.dtype must be bfloat16, float16 or float32"),
    ("step", "state_pool", lambda t: t[:1].expand(3, -1, -1, -1), r"state_pool must be a tensor whose elements do not"),
    ("step", "conv_state", lambda t: t.mT, r"conv_state must be \[num_slots, 24, 3\]"),
    ("step", "A_log", wider, r"A_log must be \[2\], contiguous"),
    ("step", "dt_bias", lambda t: None, r"dt_bias must be a torch.Tensor"),
    ("step", "norm_weight", wider, r"norm_weight must be \[4\], contiguous"),
    ("step", "out", wider, r"out must be \[4, 2, 4\]"),
    ("step", "slots", lambda t: t * 2, r"slots\[0\] must be -1 \(padding\) or a slot below 3"),
    ("step", "state_layout", lambda t: "KQ", r'state_layout must be one of "KV", "VK"'),
    ("step", "qk_norm", lambda t: 1, r"qk_norm must be a bool"),
    ("step", "activation", lambda t: "gelu", r'activation must be "silu" or None'),
    ("step", "scale", lambda t: float("nan"), r"scale must be finite"),
    ("step", "plan", lambda t: StepPlan(3, 1, 4), r"plan must be one made for"),
    ("step", "head_qk", lambda t: 300, r"mixed_qkvz must be"),
    ("verify", "tokens_per_sequence", lambda t: 17, r"mixed_qkvz must be|tokens_per_sequence must be at most 16"),
    ("verify", "parents", lambda t: torch.tensor([[-1, 0], [-1, 1]]), r"parents\[1, 1\] must be from -1"),
    ("verify", "parents", lambda t: torch.tensor([[-1, 0]]), r"parents must be \[2, 2\], contiguous"),
    ("commit", "accepted", lambda t: t + 1, r"accepted\[1\] must be from 0 to 2"),
    ("commit", "path", lambda t: torch.tensor([[0, 1], [1, 0]]), r"path\[1, 1\] must be from 2 to 1"),
    ("commit", "path", lambda t: torch.tensor([[0, 1, 1], [0, 1, 1]]), r"path must be \[2, P\] with at most 2"),
    ("prefill", "cu_seqlens", lambda t: t + 1, r"cu_seqlens\[0\] must be 0"),
    ("prefill", "cu_seqlens", lambda t: t.float(), r"cu_seqlens.dtype must be int32 or int64"),
    ("prefill", "slots", lambda t: None, r"slots must be given with conv_state"),
    ("prefill", "has_initial_state", lambda t: "yes", r"has_initial_state must be a bool"),
    ("prefill", "has_initial_state", lambda t: torch.ones(3, dtype=torch.bool), r"has_initial_state must be \[2\]"),
    ("prefill", "chunk_size", lambda t: 48, r"chunk_size must be None or a power of two up to 256"),
    ("prefill", "conv_weight", wider, r"conv_weight must be \[24, width\] with width 2, 3 or 4"),
    ("prefill", "plan", lambda t: PrefillPlan(3, 64, 4), r"plan must be one made for"),
]


@pytest.mark.parametrize(("function", "name", "change", "said"), TABLE, ids=[f"{row[0]} {row[3]}" for row in TABLE])
def test_what_is_wrong_is_named_and_nothing_is_written(
    device: torch.device, function: str, name: str, change: Callable[[Any], Any], said: str
) -> None:
    arguments = good(function, device)
    FUNCTIONS[function](**arguments)
    value = change(arguments.get(name))
    arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    from kernel_reference.checks import validate_values

    with validate_values(), pytest.raises((ValueError, TypeError), match=f"^({said})"):
        FUNCTIONS[function](**arguments)
    assert all(torch.equal(arguments[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("function", "written", "name"),
    [("step", "state_pool", "out"), ("step", "conv_state", "norm_weight"), ("commit", "state_pool", "A_log")],
)
def test_what_is_written_shares_no_memory(device: torch.device, function: str, written: str, name: str) -> None:
    arguments = good(function, device)
    other = arguments[name]
    arguments[name] = arguments[written].view(-1)[: other.numel()].view(other.shape)
    with pytest.raises(ValueError, match=f"^{written} must be a tensor that shares no memory with {name}"):
        FUNCTIONS[function](**arguments)
