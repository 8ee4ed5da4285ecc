"""Do eager calls that look alike go past torch's dispatcher, and are they the same calls there?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference import dispatch
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.testing.guards import assert_bitwise_equal
from prefix_prefill import launch, ops
from prefix_prefill.plan import DeviceLimits

Tensor = torch.Tensor
ROWS, H, HKV, D, PAGE = 6, 4, 2, 16, 16


@pytest.fixture
def dispatched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """How often the op was called; on a CPU its tensors stand for a GPU's, in Triton's interpreter."""
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    state, op = SimpleNamespace(count=0), ops._prefill

    def counted(*given: Any) -> None:
        state.count += 1
        op(*given)

    monkeypatch.setattr(ops, "_prefill", counted)
    library = None
    if device.type == "cpu":
        monkeypatch.setattr(dispatch, "has_kernel", lambda device: True)
        monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
        library = torch.library.Library("prefix_prefill", "IMPL", "CPU")
        with warnings.catch_warnings():
            # torch says once that an implementation is replaced.
            warnings.simplefilter("ignore")
            library.impl("prefill", ops._kernel_prefill, allow_override=True)
    with validate_values(False):
        yield state
    if library is not None:
        library._destroy()


def given(device: torch.device) -> dict[str, Any]:
    def make(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16()

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {
        "q": make(ROWS, H, D), "k": None, "v": None, "k_cache": make(3, PAGE, HKV, D), "v_cache": make(3, PAGE, HKV, D),
        "block_table": integers([1], [2]), "cu_seqlens_q": integers(0, 2, 5), "seqlens_k": integers(9, 16),
        "max_seqlen_q": 3,
    }  # fmt: skip


def test_the_second_call_that_looks_like_the_first_is_not_dispatched_and_gives_the_same(device, dispatched) -> None:
    first, second = given(device), given(device)
    wanted = [prefix_prefill.prefix_prefill(**second, return_lse=True), prefix_prefill.prefix_prefill(**second)]
    assert dispatched.count == 2
    for arguments in (first, second):
        got = [prefix_prefill.prefix_prefill(**arguments, return_lse=True), prefix_prefill.prefix_prefill(**arguments)]
    assert dispatched.count == 2
    assert_bitwise_equal(got[0].out, wanted[0].out)
    assert_bitwise_equal(got[0].lse, wanted[0].lse)
    assert_bitwise_equal(got[1], wanted[1])
    assert len({x.data_ptr() for x in (*got[0], *wanted[0], got[1], wanted[1])}) == 6


def test_calls_with_other_options_are_not_taken_for_one_another(device, dispatched) -> None:
    arguments = given(device)
    sinks = torch.zeros(H, device=device)
    options: list[dict[str, Any]] = [
        {}, {"sinks": sinks}, {"alibi_slopes": sinks}, {"window": (1, 0)}, {"out_scale": 1.0},
        {"out": torch.empty_like(arguments["q"])}, {"return_lse": True},
    ]  # fmt: skip
    for option in options:
        before = dispatched.count
        wanted = prefix_prefill.prefix_prefill(**arguments, **option)
        got = prefix_prefill.prefix_prefill(**arguments, **option)
        assert dispatched.count == before + 1, option
        assert_bitwise_equal(getattr(got, "out", got), getattr(wanted, "out", wanted))
    assert prefix_prefill.prefix_prefill(**arguments, out_scale=1.0).dtype == torch.float8_e4m3fn


def test_an_out_that_shares_memory_is_refused_there_too(device, dispatched) -> None:
    arguments = given(device)
    out = torch.empty_like(arguments["q"])
    for _ in range(2):
        assert prefix_prefill.prefix_prefill(**arguments, out=out) is out
    before = arguments["q"].clone()
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got"):
        prefix_prefill.prefix_prefill(**arguments, out=arguments["q"][:])
    assert dispatched.count == 1
    assert_bitwise_equal(arguments["q"], before)


def test_bounds_of_keys_up_to_a_power_of_two_are_one_call_of_the_engine(device, dispatched) -> None:
    arguments = given(device)
    q = arguments["q"]
    k_cache = arguments["k_cache"].permute(0, 2, 3, 1).reshape(3, HKV, D // 8, 8, PAGE).transpose(3, 4).contiguous()
    v_cache = arguments["v_cache"].permute(0, 2, 3, 1).contiguous()
    tensors = (q, q[:, :HKV], q[:, :HKV], torch.empty_like(q), "auto", k_cache, v_cache)
    lengths = [arguments[name] for name in ("block_table", "cu_seqlens_q", "seqlens_k")]
    for most in (17, 20, 32):
        prefix_prefill.context_attention_fwd(*tensors, *lengths, most, 3, None, None)
    assert dispatched.count == 1
    prefix_prefill.context_attention_fwd(*tensors, *lengths, 33, 3, None, None)
    assert dispatched.count == 2


def test_where_values_are_checked_each_call_checks_them(device, dispatched) -> None:
    arguments = given(device)
    for _ in range(2):
        prefix_prefill.prefix_prefill(**arguments)
    arguments["seqlens_k"][1] = 99
    with validate_values(), pytest.raises(ValueError, match=r"^seqlens_k\[1\] must be"):
        prefix_prefill.prefix_prefill(**arguments)
