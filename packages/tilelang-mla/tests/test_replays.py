"""Is a launch that is started again by the driver alone the launch of a call? The driver is stood in for."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from tilelang_mla import driver, replays
from tilelang_mla.arguments import DecodeOptions, DecodeTensors, check_decode
from tilelang_mla.plan import DecodeTiles, DeviceLimits

Tensor = torch.Tensor
BF16 = torch.bfloat16
NUMBERS = 7


class Driver:
    """Notes what it is to launch; a kernel's first two tensors travel as descriptors, and it has one number."""

    def __init__(self) -> None:
        self.found: driver.Found | None = None
        self.called: list[tuple[str, tuple[int, ...]]] = []
        self.launched: list[tuple[int, tuple[int, ...], int]] = []
        self.attributes: list[dict[int, tuple[int, ...]]] = []
        self.code = 0
        self.unknown = b""

    def kernel(self, name: str, paired: bool = False, **_: Any) -> Any:
        def start(*given: Any) -> None:
            addresses = tuple(x.data_ptr() for x in given if isinstance(x, Tensor))
            self.called.append((name, addresses))
            maps = [b"\1" * 8 + struct.pack("<Q", at) + b"\2" * 112 for at in addresses[:2]]
            pointers = [struct.pack("<Q", at) for at in addresses[2:]]
            parameters = [*pointers[:3], *maps, struct.pack("<i", NUMBERS), *pointers[3:], self.unknown]
            cluster = (2 * paired, paired, paired)
            given_bytes = [value for value in parameters if value]
            self.found = driver.Found(len(name), (5, 1, 1, 384, 1, 1, 1000), given_bytes, cluster)

        return start

    def find(self, start: Any) -> driver.Found:
        before = len(self.called)
        start()
        del self.called[before:]
        assert self.found is not None
        return self.found

    def readdress(self, place: int, address: int) -> None:
        assert place % 64 == 0
        ctypes.memmove(place + 8, struct.pack("<Q", address), 8)

    def launch(self, config: Any, function: Any, parameters: Any, _: None) -> int:
        if self.code:
            return self.code
        values = [ctypes.string_at(at, 128) for at in parameters]
        words = [struct.unpack_from("<Q", value)[0] for value in values]
        assert struct.unpack_from("<i", values[5]) == (NUMBERS,)
        assert values[3][:8] == b"\1" * 8
        assert values[3][16:] == b"\2" * 112
        maps = [struct.unpack_from("<Q", value, 8)[0] for value in values[3:5]]
        own = (driver.Attribute * config._obj.count).from_address(config._obj.attributes)
        self.attributes.append({attribute.id: tuple(attribute.value[:3]) for attribute in own})
        self.launched.append((function.value, (*maps, *words[:3], *words[6:]), config._obj.stream))
        return 0


@pytest.fixture
def stand_in(launch: Any, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "driver", lambda: made)
    monkeypatch.setattr(launch, "kernel", made.kernel)
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(132))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def batch(planned: bool = False, lse: bool = True, cache: str = "", heads: int = 16) -> tuple[list[Any], Tensor, Any]:
    """q, kv, seqlens_k, block_table, first_part, order, kv_scale; out and lse."""
    width, dtype = (656, torch.uint8) if cache == "656" else (576, torch.float8_e4m3fn if cache else BF16)
    kv = torch.zeros(9, 64, 1, width, dtype=torch.uint8 if cache else BF16).view(dtype)
    scale = torch.ones(1) if cache == "e4m3" else None
    parts = [torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)] if planned else [None, None]
    integers = [torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)]
    out, of_lse = torch.zeros(3, 2, heads, 512, dtype=BF16), torch.zeros(3, heads, 2)
    return [torch.zeros(3, 2, heads, 576, dtype=BF16), kv, *integers, *parts, scale], out, of_lse if lse else None


def prepared(tensors: list[Any], out: Tensor, lse: Any, scale: float = 0.1) -> replays.DecodeRun:
    from tilelang_mla import launch
    from tilelang_mla.arguments import Decode8bitTensors

    tiles = DecodeTiles(64, 64, 2, 1, 5, True) if tensors[4] is not None else None
    given: Any = DecodeTensors(*tensors[:6], out, lse)
    eight = tensors[1].element_size() == 1
    checked: Any = Decode8bitTensors(*tensors, out, lse) if eight else given
    problem, plan = check_decode(checked, DecodeOptions(512, scale, True, None if tiles is None else tiles.as_ints()))
    run = launch.prepare_decode(problem, plan, given)
    assert isinstance(run, replays.DecodeRun)
    return run


def called(tensors: list[Any], out: Tensor, lse: Any) -> list[Any]:
    q, kv, *others, scale = tensors
    return [q, (kv, scale) if kv.element_size() == 1 else kv, *others, out, lse]


def learn(run: replays.DecodeRun, *given: Any) -> None:
    run.learn(*given, called(*given))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache", ["", "e4m3", "656"])
@pytest.mark.parametrize(("planned", "lse"), [(False, False), (True, True), (False, True)])
def test_the_driver_is_handed_what_the_kernels_would_be(stand_in, planned, lse, cache, heads) -> None:
    first, other = batch(planned, lse, cache, heads), batch(planned, lse, cache, heads)
    run = prepared(*first)
    assert not run.again(*first)
    learn(run, *first)
    for given in (other, first, other):
        stand_in.called.clear()
        stand_in.launched.clear()
        run(*called(*given))
        assert run.again(*given)
        assert [len(name) for name, _ in stand_in.called] == [function for function, _, _ in stand_in.launched]
        assert {stream for _, _, stream in stand_in.launched} == {77}
        (_, wanted), *merged = stand_in.called
        (_, handed, _), *of_merge = stand_in.launched
        # Parts, their logarithms and pieces are each call's own, and lie apart.
        assert handed[:-3] == wanted[:-3]
        assert handed[-3] + 2 * heads * 512 * 4 <= handed[-2]
        assert planned or handed[-2] < handed[-1]
        assert (handed[-1] == wanted[-1]) == planned
        assert len(merged) == len(of_merge) == 1
        cuts = given[0][4].data_ptr() if planned else handed[-1]
        assert of_merge[0][1] == (cuts, *handed[-5:-1])
    # Pairs of programs are a cluster; the combine kernel may start before the one ahead of it has ended.
    assert stand_in.attributes[-2:] == [{4: (2, 1, 1)} if cache and heads == 128 else {}, {6: (1, 0, 0)}]


@pytest.mark.parametrize("cache", ["", "656"])
@pytest.mark.parametrize("more", [False, True])
def test_the_driver_is_handed_what_kernels_over_lists_would_be(stand_in, cache, more) -> None:
    from tilelang_mla import launch
    from tilelang_mla.sparse.arguments import SparseOptions, SparseTensors, check_sparse

    def lists() -> tuple[list[Any], Tensor, Any]:
        (q, kv, *_), out, _ = batch(cache=cache)
        beside = [torch.zeros(3, dtype=torch.int32), torch.zeros(16)] if more else [None, None]
        lse = torch.zeros(3, 2, 16).transpose(1, 2) if more else None
        return [q, kv, torch.zeros(3, 2, 300, dtype=torch.int32), *beside, None, None], out, lse

    first, other = lists(), lists()
    given = SparseTensors(*first[0], *first[1:])
    problem, plan = check_sparse(given, SparseOptions(512, 0.1))
    run = launch.prepare_sparse(problem, plan, given)
    run.learn(*first, given)
    for tensors, out, lse in (other, first):
        stand_in.called.clear()
        stand_in.launched.clear()
        run(*tensors, out, lse)
        assert run.again(tensors, out, lse)
        (_, wanted), (_, to_merge) = stand_in.called
        (_, handed, _), (_, merged, _) = stand_in.launched
        assert handed[:-3] == wanted[:-3]
        assert merged == (handed[-1], *handed[-5:-1], *to_merge[5:])


def test_what_is_no_launch_of_the_tensors_alone_stays_a_call(stand_in, monkeypatch) -> None:
    tensors, out, lse = batch()
    below = prepared(tensors, out, lse, scale=-0.1)
    apart = torch.zeros(3, 2, 16, 516, dtype=BF16)[..., :512]
    copied = prepared(tensors, apart, lse)
    unknown = prepared(tensors, out, lse)
    for run, result, parameter in ((below, out, b""), (copied, apart, b""), (unknown, out, struct.pack("<Q", 12345))):
        stand_in.unknown = parameter
        learn(run, tensors, result, lse)
        assert not run.again(tensors, result, lse)
    stand_in.unknown = b""
    run = prepared(tensors, out, lse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    learn(run, tensors, out, lse)
    assert not run.again(tensors, out, lse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    learn(run, tensors, out, lse)
    assert run.again(tensors, out, lse)
    # A tensor at another alignment, and a driver that fails.
    odd = torch.zeros(out.numel() + 1, dtype=BF16)[1:].view(out.shape)
    assert not run.again(tensors, odd, lse)
    stand_in.code = 700
    assert not run.again(tensors, out, lse)
