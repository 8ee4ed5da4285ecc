"""Is a call compiled once for all values of a number, and for sizes that only the device knows?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lightning_attn
from kernel_reference.testing.guards import assert_same_bits
from lightning_attn import Snapshots

pytestmark = pytest.mark.torch_compile

Tensor = torch.Tensor
BF16 = torch.bfloat16
HEADS, D, E, SLOTS = 4, 32, 48, 9
BATCH, TOKENS = 6, 5


class Calls:
    """Calls of every public function, each with the numbers it takes and with sizes cut on the device."""

    def __init__(self, device: torch.device) -> None:
        def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        def integers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.slopes = torch.tensor([0.02, 0.0, 0.9, 0.2], device=device)
        self.qkv = normal(BATCH, TOKENS, HEADS, D), normal(BATCH, TOKENS, HEADS, D), normal(BATCH, TOKENS, HEADS, E)
        self.history = normal(BATCH, HEADS, D, E, dtype=torch.float32)
        self.pool = normal(SLOTS, HEADS, D, E, dtype=torch.float32)
        self.slots = integers(3, 8, -1, 0, 5, 1)
        self.accepted = integers(5, 0, 2, 1, 3, 0)
        self.cu = integers(0, 7, 8, 8, 13, 20, 24)
        self.has = torch.tensor([True, False, True, True, False, True], device=device)
        self.positions, self.targets = (
            integers(3, -1, -1, -1, -1, -1)[:, None],
            integers(2, -1, -1, -1, -1, -1)[:, None],
        )
        self.sequences = torch.tensor([True, True, False, True, True, True], device=device)
        self.length = torch.tensor(3, device=device)

    def inputs(self) -> list[Tensor]:
        return [*self.qkv, self.pool.clone()]


Call = Callable[..., Any]


def attention(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    heads_first = [x[rows][:, :n].transpose(1, 2) for x in (q, k, v)]
    return lightning_attn.lightning_attention(
        *heads_first, calls.slopes, kv_history=calls.history[rows], scale=scale
    )  # fmt: skip


def varlen(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    packed = [x[rows].flatten(0, 1) for x in (q, k, v)]
    cu = torch.cat([calls.cu[:1], calls.cu[1:][rows]])
    out = lightning_attn.lightning_attention_varlen(
        *packed, calls.slopes, cu, state_pool=pool, slots=calls.slots[rows], has_initial_state=calls.has[rows],
        scale=scale, snapshot=Snapshots(calls.positions[rows], calls.targets[rows]),
    )  # fmt: skip
    return out, pool


def packed(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    flat = [x[rows].flatten(0, 1) for x in (q, k, v)]
    cu = torch.cat([calls.cu[:1], calls.cu[1:][rows]])
    states = calls.history[rows]
    out, final = lightning_attn.lightning_attention_packed(*flat, calls.slopes, cu, initial_state=states, scale=scale)
    return out, final, lightning_attn.lightning_state(*flat[1:], calls.slopes, cu, initial_state=states)


def decode(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    tokens = [x[rows][:, 0] for x in (q, k, v)]
    return lightning_attn.lightning_decode(*tokens, pool, calls.slots[rows], calls.slopes, scale=scale), pool


def decode_as_engines_do(
    calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor
) -> Any:
    tokens = [x[rows][:, :1].transpose(1, 2) for x in (q, k, v)]
    return lightning_attn.linear_decode_forward_triton(*tokens, pool, calls.slopes, calls.slots[rows]), pool


def verify(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    drafts = [x[rows][:, :n] for x in (q, k, v)]
    return lightning_attn.lightning_verify(*drafts, pool, calls.slots[rows], calls.slopes, scale=scale)


def verify_into(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    drafts = [x[rows][:, :n] for x in (q, k, v)]
    out = torch.empty(drafts[2].shape, dtype=BF16, device=q.device)
    lightning_attn.lightning_verify(*drafts, pool, calls.slots[rows], calls.slopes, scale=scale, out=out)
    return out


def commit(calls: Calls, scale: float, rows: Tensor, n: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> Any:
    drafts = [x[rows][:, :n] for x in (k, v)]
    accepted = calls.accepted[rows].clamp(max=n)
    lightning_attn.lightning_commit(*drafts, pool, calls.slots[rows], calls.slopes, accepted)
    return pool


CALLS = [attention, varlen, packed, decode, decode_as_engines_do, verify, verify_into, commit]
of_every_function = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def compiler(device: torch.device) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")


@pytest.mark.parametrize("dynamic", [None, True], ids=["dynamic=None", "dynamic=True"])
def test_every_value_of_a_scale_compiles_whole(device, dynamic) -> None:
    """Torch specialises on a float that an op takes; what is compiled for the second one must not break."""
    calls, counter = Calls(device), compiler(device)
    rows = torch.arange(BATCH, device=device)

    def run(scale: float, *tensors: Tensor) -> Any:
        # In one graph, which costs little more than one of them.
        return [call(calls, scale, rows, TOKENS, *tensors) for call in (attention, decode, verify, varlen)]

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for scale in (0.5, 0.7, 1.3):
        assert_same_bits(compiled(scale, *calls.inputs()), run(scale, *calls.inputs()))


@of_every_function
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_sizes_that_only_the_device_knows_compile_whole_and_once(device, call) -> None:
    calls, counter = Calls(device), compiler(device)

    def run(sequences: Tensor, length: Tensor, *tensors: Tensor) -> Any:
        n = length.item()
        torch._check(n >= 1)
        torch._check(n <= TOKENS)
        return call(calls, 0.5, sequences.nonzero()[:, 0], n, *tensors)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for length, sequences in ((5, calls.sequences | True), (3, calls.sequences), (2, ~calls.sequences)):
        given = (sequences, calls.length * 0 + length)
        if call in (varlen, packed):
            # No more rows than the sequences that are left have.
            calls.cu.clamp_(max=int(sequences.sum()) * TOKENS)
        assert_same_bits(compiled(*given, *calls.inputs()), run(*given, *calls.inputs()))
    assert counter.frame_count == 1
