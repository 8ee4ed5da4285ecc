"""Do calls that skip torch's dispatcher give what the op gives, and does nothing skip it that needs it?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_split
from gdn_split import launch, straight
from gdn_split.plan import DeviceLimits
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches

SIZES = (1, 2, 16, 16)
CHANNELS = 2 * 16 + 2 * 16


def layer(device: torch.device) -> dict[str, Any]:
    """Two sequences' projections, the convolution and its state, and for a step what follows."""
    normal = lambda *size: torch.randn(*size, device=device)  # noqa: E731
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    conv_state, weight = normal(3, CHANNELS, 3), normal(CHANNELS, 4)
    convolution = {"mixed_qkvz": normal(2, 96), "mixed_ba": normal(2, 4), "conv_state": conv_state}
    convolution |= {"conv_weight": weight, "conv_bias": None}
    rest = {"A_log": normal(2), "dt_bias": normal(2)}
    return {**convolution, "state_pool": normal(3, 2, 16, 16), "slots": slots, **rest}


def step(given: dict[str, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    return gdn_split.gdn_decode_step(*given.values(), *SIZES, **options), given["conv_state"], given["state_pool"]


def convolve(given: dict[str, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    names = ("mixed_qkvz", "mixed_ba", "conv_state", "conv_weight", "conv_bias", "slots")
    parts = gdn_split.split_conv1d_update(*[given[name] for name in names], *SIZES, **options)
    return *parts, given["conv_state"]


@pytest.fixture
def as_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls on a CPU go straight too, to interpreted kernels; what went is noted."""
    went: list[str] = []
    monkeypatch.setattr(straight, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(straight, "launches", PreparedLaunches())
    if device.type == "cpu":
        monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(132, 232448, 8))
    for name in ("split_conv1d_update", "decode_step"):
        function = getattr(straight, name)
        noted = lambda *given, name=name, function=function: (went.append(name), function(*given))[1]  # noqa: E731
        monkeypatch.setattr(straight, name, noted)
    return went


@pytest.mark.parametrize("function", [step, convolve])
def test_a_straight_call_gives_what_the_op_gives(device: torch.device, function: Any, as_on_a_gpu: list[str]) -> None:
    given = layer(device)
    copy = {name: None if t is None else t.clone() for name, t in given.items()}
    versions = given["conv_state"]._version
    got = function(given)
    assert len(as_on_a_gpu) == 1
    assert given["conv_state"]._version > versions
    shapes = [(tuple(t.shape), t.dtype) for t in got]
    new = gdn_split.api.new_parts(copy["mixed_qkvz"], copy["mixed_ba"], gdn_split.plan.GroupShape(*SIZES))
    wanted = function(copy, out=new if function is convolve else torch.empty_like(got[0]))
    assert len(as_on_a_gpu) == 1
    assert shapes == [(tuple(t.shape), t.dtype) for t in wanted]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("function", [step, convolve])
def test_a_straight_call_checks_its_arguments_in_every_call(
    device: torch.device, function: Any, as_on_a_gpu: list[str]
) -> None:
    given = layer(device)
    function(given)
    shared = given | {"conv_weight": given["conv_state"].view(-1)[: CHANNELS * 4].view(CHANNELS, 4)}
    with pytest.raises(ValueError, match=r"^conv_state must be a tensor that shares no memory with conv_weight"):
        function(shared)
    for name, value, error in (("mixed_ba", given["mixed_ba"][:1], ValueError), ("slots", [2, 0], TypeError)):
        with pytest.raises(error, match=f"^{name}"):
            function(given | {name: value})
    with pytest.raises(TypeError, match=r"^tokens_per_sequence must be an int"):
        function(given, tokens_per_sequence=1.0)


@pytest.mark.parametrize("function", [step, convolve])
def test_a_call_like_the_last_one_is_begun_at_once_and_checks_the_same(
    device: torch.device, function: Any, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, other = layer(device), layer(device)
    copy = {name: None if t is None else t.clone() for name, t in other.items()}
    function(given)
    with monkeypatch.context() as patch:
        patch.setattr(straight, "is_possible", lambda *given: pytest.fail("the tensors are looked at one by one"))
        versions = [other[name]._version for name in ("conv_state", "state_pool")]
        got = function(other)
        written = [
            other[name]._version > version for name, version in zip(("conv_state", "state_pool"), versions, strict=True)
        ]
        assert written == [True, function is step]
        shared = given | {"conv_weight": given["conv_state"].view(-1)[: CHANNELS * 4].view(CHANNELS, 4)}
        with pytest.raises(ValueError, match=r"^conv_state must be a tensor that shares no memory with conv_weight"):
            function(shared)
    assert len(as_on_a_gpu) == 1
    new = gdn_split.api.new_parts(copy["mixed_qkvz"], copy["mixed_ba"], gdn_split.plan.GroupShape(*SIZES))
    wanted = function(copy, out=new if function is convolve else torch.empty_like(got[0]))
    for one, its in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, its, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"^mixed_qkvz must be without gradient"):
        function(given | {"mixed_qkvz": given["mixed_qkvz"].clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"^slots"), validate_values():
        function(given | {"slots": given["slots"] + 5})
    with pytest.raises(TypeError, match=r"^tokens_per_sequence must be an int"):
        function(given, tokens_per_sequence=1.0)


def test_a_step_on_tensors_that_it_was_given_before_is_begun_at_their_addresses(
    device: torch.device, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdn_split.step.launch import StepLaunch

    begun: list[Any] = []
    monkeypatch.setattr(
        StepLaunch, "at", lambda self, pool, starts: lambda out: begun.append((pool, starts, out)) is None
    )  # fmt: skip
    given, other = layer(device), layer(device)
    for tensors in (given, given, other):
        step(tensors)
    assert begun == []
    for tensors in (given, other):
        out, *_ = step(tensors)
        starts = tuple([t if t is None else t.data_ptr() for t in (*tensors.values(), None)])
        assert begun.pop() == (tensors["conv_state"], starts, out.data_ptr())
    # Other addresses are looked at for what they share.
    shared = given | {"conv_weight": given["conv_state"].view(-1)[: CHANNELS * 4].view(CHANNELS, 4)}
    with pytest.raises(ValueError, match=r"^conv_state must be a tensor that shares no memory with conv_weight"):
        step(shared)
    assert begun == []


def test_addresses_that_are_kept_are_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight, "_MOST_ADDRESSES", 2)
    at: dict[Any, Any] = {}
    for start in range(3):
        straight._keep(at, (start,), bool)
    straight._keep(at, (7,), None)
    assert at == {(2,): bool}


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("function", [step, convolve])
def test_modes_subclasses_and_tangents_go_by_the_dispatcher(
    device: torch.device, function: Any, as_on_a_gpu: list[str]
) -> None:
    given = layer(device)
    with Nothing():
        function(given)
    function(given | {"mixed_ba": given["mixed_ba"].as_subclass(Own)})
    with torch.autograd.forward_ad.dual_level():
        function(given)
    assert as_on_a_gpu == []
