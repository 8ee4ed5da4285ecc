"""Is a result that shares memory with an argument refused, before anything is written, on the way to each kernel?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.testing.guards import assert_bitwise_equal
from prefix_prefill import launch, ops
from prefix_prefill.plan import DeviceLimits

Tensor = torch.Tensor
ROWS, H, HKV, D, PAGE = 6, 4, 2, 32, 16


@pytest.fixture(params=["reference", "kernels"])
def implementation(request, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU: the reference, then the kernels in Triton's interpreter, which CPU tensors are sent to."""
    if request.param == "reference" or device.type == "cuda":
        yield
        return
    library = torch.library.Library("prefix_prefill", "IMPL", "CPU")
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    with warnings.catch_warnings():
        # torch says once that an implementation is replaced.
        warnings.simplefilter("ignore")
        for name in ("prefill", "merge"):
            library.impl(name, getattr(ops, f"_kernel_{name}"), allow_override=True)
    yield
    library._destroy()


def arguments_of(device: torch.device) -> dict[str, Any]:
    def make(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16()

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {
        "q": make(ROWS, H, D), "k": make(ROWS, HKV, D), "v": make(ROWS, HKV, D), "k_cache": make(7, PAGE, HKV, D),
        "v_cache": make(7, PAGE, HKV, D), "block_table": integers([3, 0], [5, 2], [6, 6]),
        "cu_seqlens_q": integers(0, 2, 2, 5), "seqlens_k": integers(22, 16, 3), "max_seqlen_q": 3,
    }  # fmt: skip


def within(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor shaped as another, over the first elements of one of any shape."""
    return tensor.flatten()[: like.numel()].view(like.shape) if tensor.numel() >= like.numel() else tensor


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_an_out_that_lies_in_an_argument_is_refused_by_name(device, name: str) -> None:
    given = arguments_of(device)
    before = {key: value.clone() for key, value in given.items() if isinstance(value, Tensor)}
    # Twice: the second call finds its launch in the table.
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^out must be a tensor that shares no memory with {name}, got "):
            prefix_prefill.prefix_prefill(**given, out=within(given[name], given["q"]))
        prefix_prefill.prefix_prefill(**given, out=torch.empty_like(given["q"]))
    for key, value in before.items():
        assert_bitwise_equal(given[key], value, what=key)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", ["k", "v"])
def test_an_out_that_meets_new_tokens_in_one_fused_tensor_is_refused_and_one_beside_them_is_not(
    device, name: str
) -> None:
    given = arguments_of(device)
    fused = torch.randn(ROWS, 2 * H + 2 * HKV, D, device=device).bfloat16()
    given["q"], given["k"], given["v"], room = fused.split([H, HKV, HKV, H], dim=1)
    wanted = prefix_prefill.prefix_prefill(**given)
    begin = {"k": H + HKV - 1, "v": H + 2 * HKV - 1}[name]
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with k"):
        prefix_prefill.prefix_prefill(**given, out=fused[:, H : 2 * H])
    with pytest.raises(ValueError, match=f"^out must be a tensor that shares no memory with {name}, got "):
        prefix_prefill.prefix_prefill(**given, out=fused[:, begin : begin + H])
    got = prefix_prefill.prefix_prefill(**given, out=room)
    assert_bitwise_equal(got, wanted)


@pytest.mark.usefixtures("implementation")
def test_lse_and_results_of_a_merge_are_looked_at_where_they_are_given_to_the_ops(device) -> None:
    out, lse = torch.randn(ROWS, H, D, device=device), torch.randn(H, ROWS, device=device)
    for place, name in enumerate(("out_a", "lse_a", "out_b", "lse_b")):
        given = [out.clone(), lse.clone(), out.clone(), lse.clone()]
        results = [torch.empty_like(out), torch.empty_like(lse)]
        results[place % 2] = given[place]
        said = ("out", "lse")[place % 2]
        with pytest.raises(ValueError, match=f"^{said} must be a tensor that shares no memory with {name}, got "):
            torch.ops.prefix_prefill.merge(*given, *results)
    given = [*arguments_of(device).values()][:-1]
    both = torch.empty(ROWS * H * D, device=device).bfloat16()
    result, log_sum = both.view(ROWS, H, D), both.view(torch.float32)[: H * ROWS].view(H, ROWS)
    numbers = (3, "NHD", 0.2, -1, 0, 0.0, False, 1.0, 1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with lse, got "):
        torch.ops.prefix_prefill.prefill(*given, *[None] * 5, result, log_sum, None, *numbers)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", ["q", "v_cache"])
def test_the_drop_in_refuses_it_under_the_names_of_engines(device, name: str) -> None:
    given = arguments_of(device)
    k_cache = given["k_cache"].permute(0, 2, 3, 1).unflatten(2, (-1, 8)).mT.contiguous()
    v_cache = given["v_cache"].permute(0, 2, 3, 1).contiguous()
    o = within({**given, "v_cache": v_cache}[name], given["q"])
    tensors = (given["q"], given["k"], given["v"], o, "auto", k_cache, v_cache)
    lengths = (given["block_table"], given["cu_seqlens_q"], given["seqlens_k"])
    with pytest.raises(ValueError, match=f"^o must be a tensor that shares no memory with {name}, got "):
        prefix_prefill.context_attention_fwd(*tensors, *lengths, 22, 3, None, None)
