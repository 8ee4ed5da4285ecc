"""What a launch hands to Triton, what it skips from the second call on, and on which device it starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference import launching
from kernel_reference.launching import (
    DeviceProperties,
    Launch,
    Run,
    TmaBox,
    TmaLaunch,
    by_alignment,
    device_properties,
    has_gluon,
    launch_nothing,
    on_device,
    without_memory,
)
from kernel_reference.packing import Late
from kernel_reference.starting import Starter, ensure_context
from kernel_reference.testing.forks import run_alone

CPU = torch.device("cpu")
CUDA_1 = torch.device("cuda", 1)


class Compiled:
    """Stands for a kernel, and for what compiling it gives: remembers what it is started with, and how."""

    def __init__(self, on_start: Callable[[], object] = lambda: None) -> None:
        self.started: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.on_start = on_start

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        assert grid == (3, 1, 1)

        def start(*given: Any, **options: Any) -> Any:
            # Options come with what binds arguments, the whole way; the short one knows them.
            self.started.append(("whole" if options else "short", given, options))
            self.on_start()
            return self

        return start


def aligned(count: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    room = torch.empty(count + 16, dtype=dtype)
    first = (-room.data_ptr() % 16) // room.element_size()
    return room[first : first + count]


def test_from_the_second_call_on_pointers_alone_are_passed_and_unaligned_ones_go_the_whole_way() -> None:
    kernel = Compiled()
    made = Launch(kernel, (3, 1, 1), (7, 2.5), CPU, num_warps=4)
    one, two, three = (aligned() for _ in range(3))
    odd = one[1:5]
    assert odd.data_ptr() % 16
    calls = [(odd, None), (one, None), (two, three), (three, odd), (one, None)]
    for call in calls:
        made(*call)
    assert [way for way, _, _ in kernel.started] == ["whole", "whole", "short", "whole", "short"]
    for (way, given, options), call in zip(kernel.started, calls, strict=True):
        wanted = call if way == "whole" else tuple(x if x is None else x.data_ptr() for x in call)
        assert all(got is want or got == want for got, want in zip(given[:2], wanted, strict=True))
        assert given[2:] == (7, 2.5)
        assert options == ({"num_warps": 4} if way == "whole" else {})


@pytest.mark.parametrize(("name", "what"), [("shared memory", "bytes of shared memory"), ("threads", "threads")])
def test_what_a_gpu_has_too_little_of_is_an_error_of_the_plan_each_time(name: str, what: str) -> None:
    """Triton raises it once it has compiled the kernel."""

    class OutOfResources(Exception):
        required, limit = 262144, 232448

    OutOfResources.name = name

    def start() -> None:
        raise OutOfResources

    made = Launch(Compiled(start), (3, 1, 1), (), CPU, num_warps=4)
    wanted = f"plan must be one whose kernels need 232448 {what} at most, .*, got one that needs 262144 in a kernel$"
    for _ in range(2):
        with pytest.raises(ValueError, match=wanted):
            made(aligned())


def test_what_compiles_to_nothing_as_in_the_interpreter_is_always_handed_tensors() -> None:
    seen: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: seen.append(given)

    made = Launch(Interpreted(), (3, 1, 1), (), CPU, num_warps=4)
    tensor = aligned()
    made(tensor)
    made(tensor)
    assert [given[0] is tensor for given in seen] == [True, True]


def test_tensors_reach_a_kernel_in_groups_and_so_do_their_pointers() -> None:
    kernel = Compiled()

    class Outputs(NamedTuple):
        out: Any
        lse: Any

    made = Launch(kernel, (3, 1, 1), (7,), CPU, group=lambda q, out, lse: (q, Outputs(out, lse)), num_warps=4)
    q, out = aligned(), aligned()
    made(q, out, None)
    made(q, out, None)
    (_, (first, outputs, seven), _), (way, short, _) = kernel.started
    assert (first is q, outputs.out is out, outputs.lse, seven) == (True, True, None, 7)
    assert (way, short) == ("short", (q.data_ptr(), Outputs(out.data_ptr(), None), 7))


def test_addresses_in_other_groups_than_tensors_are_refused_before_the_first_launch() -> None:
    kernel = Compiled()
    group = lambda q, out: (q, (out, None)) if torch.is_tensor(q) else (q, (out,))  # noqa: E731
    with pytest.raises(TypeError, match=r"same arguments.*\(True, \(True, False\)\), was \(True, \(True,\)\)"):
        Launch(kernel, (3, 1, 1), (), CPU, group=group)(aligned(), aligned())
    assert not kernel.started


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2fnuz, torch.complex64])
def test_chosen_tensors_travel_as_integers_of_their_size(dtype: torch.dtype) -> None:
    kernel = Compiled()
    made = Launch(kernel, (3, 1, 1), (), CPU, as_integers=[1, 2], num_warps=4)
    plain, chosen = aligned(), torch.zeros(64, dtype=dtype)
    made(plain, chosen, None)
    _, (first, second, third), _ = kernel.started[0]
    assert first is plain
    assert second.data_ptr() == chosen.data_ptr()
    assert (second.element_size(), second.dtype.is_floating_point) == (chosen.element_size(), False)
    assert third is None


@pytest.mark.parametrize("grouped", [False, True])
def test_a_launch_at_known_addresses_asks_for_the_last_one_alone_and_whether_it_is_watched(grouped: bool) -> None:
    started: list[Any] = []
    hooks: list[str] = []
    made = Launch(Compiled(), (3, 1, 1), (7,), CPU, group=(lambda *x: (x,)) if grouped else None)
    made._kept.starter = Starter(lambda *given: started.append(given), lambda *given: (), lambda: bool(hooks))
    begin = made.but_last(16, None)
    assert begin(32)
    assert begin(48)
    assert started == [
        ((3, 1, 1), ((16, None, last), 7) if grouped else (16, None, last, 7)) for last in (32, 48)
    ]  # fmt: skip
    hooks.append("a profiler's")
    assert not begin(32)
    assert len(started) == 2


def test_a_launch_at_addresses_that_come_again_asks_for_late_ones_alone_and_whether_it_is_watched() -> None:
    started: list[Any] = []
    hooks: list[str] = []
    made = Launch(Compiled(), (3, 1, 1), (7,), CPU, group=lambda q, *parts: (q, parts))
    late = Late(0), Late(1)
    # Nothing is compiled.
    assert made.again(16, *late) is None
    made._kept.starter = Starter(lambda *given: started.append(given), lambda *given: (), lambda: bool(hooks))
    run = by_alignment(lambda aligned: Run(made, made.at, made.again), slice(1))
    assert run.again(16, *late) is None
    assert run.at(16)
    begin = run.again(16, None, *late, late[0])
    assert begin is not None
    assert begin(32, 48)
    assert begin(64, 80)
    assert started == [((3, 1, 1), (16, parts, 7)) for parts in ((), (None, 32, 48, 32), (None, 64, 80, 64))]
    hooks.append("a profiler's")
    assert not begin(32, 48)
    assert made.again(16) is None
    assert len(started) == 3
    assert by_alignment(lambda aligned: launch_nothing, slice(1)).again(16) is None


def test_a_dependent_launch_is_an_option_of_the_compiler_and_other_launches_know_none() -> None:
    options = {"num_warps": 2, "enable_fp_fusion": False}
    assert Launch(Compiled(), (3, 1, 1), (), CPU, dependent_launch=True, **options).options == {
        **options, "launch_pdl": True,
    }  # fmt: skip
    assert Launch(Compiled(), (3, 1, 1), (), CPU, **options).options == options


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two devices, as far as a launch asks; ``current`` and the times that it was changed."""
    state = SimpleNamespace(current=0, changed=0)

    @contextmanager
    def device(chosen: torch.device) -> Any:
        before, state.current = state.current, chosen.index
        state.changed += 1
        yield
        state.current = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device", device)
    return state


def test_a_launch_starts_on_its_tensors_device_and_leaves_the_current_one_as_it_was(two_gpus) -> None:
    seen: list[int] = []
    made = Launch(Compiled(lambda: seen.append(two_gpus.current)), (3, 1, 1), (), CUDA_1, num_warps=4)
    made(aligned())
    two_gpus.current = 1
    made(aligned())
    assert seen == [1, 1]
    assert (two_gpus.current, two_gpus.changed) == (1, 1)


def test_with_one_device_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    Launch(Compiled(), (3, 1, 1), (), torch.device("cuda", 0), num_warps=4)(aligned())

    def run() -> None: ...

    assert on_device(torch.device("cuda", 0), run) is run


def test_any_function_can_be_run_on_its_tensors_device(two_gpus) -> None:
    seen: list[tuple[int, Any]] = []
    on_device(CUDA_1, lambda *given: seen.append((two_gpus.current, given)))(7, None)
    assert seen == [(1, (7, None))]
    assert two_gpus.current == 0


def test_each_alignment_has_a_launch_of_its_own_made_when_it_is_first_wanted() -> None:
    made: list[bool] = []
    ran: list[bool] = []

    def make(is_aligned: bool) -> Callable[..., None]:
        made.append(is_aligned)
        return lambda *given: ran.append(is_aligned)

    run = by_alignment(make, slice(1, 3))
    one = aligned()
    odd = one[1:]
    for call in ((odd, one, None), (odd, one, one), (one, odd, one), (one, one, odd), (one, one, one, odd)):
        run(*call)
    assert made == [True, False]
    assert ran == [True, True, False, False, True]


def test_nothing_is_launched_over_nothing() -> None:
    assert launch_nothing(torch.empty(0), None, 3) is None  # type: ignore[func-returns-value]


def test_a_form_without_memory_tells_all_that_plans_ask() -> None:
    tensor = torch.empty(4, 6, dtype=torch.float16)[:, ::2]
    form: Any = without_memory(tensor)
    assert (form.shape, form.stride(), form.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert form.device.type == "meta"
    assert without_memory(None) is None


def test_importing_it_imports_no_kernel_language() -> None:
    run_alone("""
        import sys, kernel_reference.launching, kernel_reference.dispatch

        assert "triton" not in sys.modules
    """)


# Limits of a device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    device_properties.cache_clear()
    yield monkeypatch
    device_properties.cache_clear()


def test_a_gpu_of_nvidia_is_described_by_torch_and_asked_once(asked: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        calls.append(device)
        return SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)

    asked.setattr(torch.version, "hip", None)
    asked.setattr(torch.cuda, "get_device_properties", properties)
    asked.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    wanted = DeviceProperties("cuda", 132, 232448, (9, 0))
    assert device_properties(device) == device_properties(torch.device("cuda", 0)) == wanted
    assert calls == [device]


@pytest.mark.parametrize(
    ("device", "properties", "wanted"),
    [
        ("cuda:0", {"multiprocessor_count": 304, "max_shared_mem": 65536}, DeviceProperties("hip", 304, 65536)),
        ("meta", {"num_vectorcore": 40}, DeviceProperties("npu", 40, 0)),
    ],
    ids=["hip", "npu"],
)
def test_other_devices_are_described_by_their_triton_driver(asked, device, properties, wanted) -> None:
    triton = pytest.importorskip("triton")
    driver = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda index: properties))
    asked.setattr(torch.version, "hip", "6.4")
    asked.setattr(triton.runtime.driver, "_active", driver, raising=False)
    asked.setattr(type(triton.runtime.driver), "active", property(lambda self: driver))
    assert device_properties(torch.device(device)) == wanted


# Descriptors


def test_without_gluon_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gluon.cache_clear()
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.nvidia.hopper", None)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia", None)
    assert not has_gluon()
    has_gluon.cache_clear()


needs_gluon = pytest.mark.skipif(not has_gluon(), reason="no Gluon")


@needs_gluon
@pytest.mark.parametrize("columns", [8, 16, 32, 48, 64, 128])
def test_boxes_are_swizzled_as_gluon_would_by_default(columns: int) -> None:
    from triton.experimental.gluon import language as gl

    box = [1, 1, 64, columns]
    for bits, dtype in ((16, gl.bfloat16), (8, gl.float8e4nv)):
        made = TmaBox([2, 3, 999, 999], [8, 8, 8, 1], box, bits)
        assert made.layout == gl.NVMMASharedLayout.get_default_for(box, dtype)
        assert made._replace(swizzled=False).swizzle_bytes == 0


@needs_gluon
def test_the_first_tensors_travel_as_descriptors_and_the_short_way_gets_new_ones_each_time() -> None:
    kernel = Compiled()
    boxes = [TmaBox([8, 64], [64, 1], [4, 64]), TmaBox([64, 8], [8, 1], [16, 8]), TmaBox([8, 64], [64, 1], [4, 64])]
    made = TmaLaunch(kernel, (3, 1, 1), (7,), CPU, boxes, num_warps=4)
    one, two, pointer = (aligned(512, torch.bfloat16) for _ in range(3))
    made(one.view(8, 64), two.view(64, 8), None, pointer, None)
    made(two.view(8, 64), one.view(64, 8), None, pointer[8:], None)
    made(two.view(8, 64), one.view(64, 8), None, pointer[1:], None)
    assert made.arguments(one, two, None, pointer, None) == (one, two, None, pointer, None, 7)
    assert [way for way, _, _ in kernel.started] == ["whole", "short", "whole"]
    for (way, given, _), (first, second) in zip(kernel.started, [(one, two), (two, one), (two, one)], strict=True):
        assert [one.base.data_ptr() for one in given[:2]] == [first.data_ptr(), second.data_ptr()]
        assert given[2] is given[0], "what is not there travels as the first"
        for descriptor, box in zip(given[:2], boxes, strict=False):
            assert (descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.layout) == (
                box.sizes, box.strides, box.box, box.layout,
            )  # fmt: skip
        behind = given[3] if way == "short" else given[3].data_ptr()
        assert behind in {pointer.data_ptr(), pointer[8:].data_ptr(), pointer[1:].data_ptr()}
        assert given[4:] == (None, 7)


@needs_gluon
def test_each_thread_has_a_context_before_it_describes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's driver encodes descriptors for a thread with a context alone, and autograd's may have launched nothing."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given: list[torch.device] = []
    monkeypatch.setattr(launching, "ensure_context", given.append)
    TmaLaunch(Compiled(), (3, 1, 1), (), CPU, [TmaBox([8, 64], [64, 1], [4, 64])], num_warps=4)(
        aligned(512, torch.bfloat16)
    )
    assert set(given) == {CPU}

    def twice() -> None:
        ensure_context(torch.device("cuda"))
        ensure_context(torch.device("cuda"))

    threads = [threading.Thread(target=twice) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 2
    ensure_context(CPU)
    assert len(asked) == 2


def test_arguments_are_what_the_kernel_gets_in_its_order() -> None:
    made = Launch(Compiled(), (3, 1, 1), (7, (1, 2)), CPU, as_integers=[1], group=lambda x, y: (y, x), num_warps=4)
    flags = torch.zeros(4, dtype=torch.bool)
    first, second, *rest = made.arguments(None, flags)
    assert (first.dtype, first.data_ptr(), second, rest) == (torch.int8, flags.data_ptr(), None, [7, (1, 2)])
