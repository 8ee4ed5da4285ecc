"""How ops find their implementations, and what was made ready for calls that look alike."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_reference import dispatch
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import Free, PreparedLaunches, allocator, allocator_of, implement, launch_module

Tensor = torch.Tensor


def prepare(tensors: Sequence[Tensor], numbers: tuple[Any, ...]) -> object:
    return object()


def prepare_another(tensors: Sequence[Tensor], numbers: tuple[Any, ...]) -> object:
    return object()


def test_of_a_day_of_new_sizes_the_last_are_kept_and_what_comes_again_longest() -> None:
    table = PreparedLaunches(most=4)
    made: list[tuple[int, int]] = []

    def noted(tensors: Sequence[Tensor], numbers: tuple[int, ...]) -> tuple[int, int]:
        made.append((len(tensors[0]), numbers[0]))
        return made[-1]

    for size in range(10, 30):
        # Chunks of one size, which come again, beside prompts of new ones; each has two kinds of layers.
        for look in (7, 1), (size, 1), (size, 2):
            assert table.find(noted, (torch.empty(look[0], 3),), look[1:]) == look
            assert len(table._latest) <= 2
            assert len(table) <= 4
    assert made == [(7, 1), *[(size, kind) for size in range(10, 30) for kind in (1, 2)]]
    assert table.find(noted, (torch.empty(10, 3),), (1,)) == made.pop() == (10, 1)
    # Numbers that are new with each call leave nothing behind either.
    for kind in range(20):
        table.find(noted, (torch.empty(1, 3),), (kind,))
        assert len(table._latest) <= len(table) == table.most


def test_a_launch_is_found_again_only_for_the_same_sizes_strides_dtypes_device_and_numbers() -> None:
    table = PreparedLaunches()
    tensor = torch.empty(2, 3)
    others = [torch.empty(3, 3), torch.empty(2, 4)[:, :3], tensor.double(), tensor.to("meta"), None]
    others += [torch.empty(1, 3), torch.empty(1, 3).as_strided((1, 3), (7, 1)), torch.empty(0, 3)]
    looks: list[tuple[Any, ...]] = [
        (prepare, (tensor,), (1.0, None)), (prepare, (tensor,), (2.0, None)), (prepare, (tensor,), (1.0, [16, 4])),
        (prepare, (tensor,), (1.0, [32, 4])), (prepare, (tensor,), ()), (prepare_another, (tensor,), (1.0, None)),
        (prepare, (tensor, None), (1.0, None)), *[(prepare, (other,), (1.0, None)) for other in others],
    ]  # fmt: skip
    made = [table.find(*look) for look in looks]
    assert len(set(map(id, made))) == len(looks)
    assert [table.find(*look) for look in looks] == made


def test_other_tensors_that_look_alike_find_what_the_first_ones_made() -> None:
    table = PreparedLaunches()
    assert table.find(prepare, (torch.ones(4, 2),), (1,)) is table.find(prepare, (torch.zeros(4, 2),), (1,))


def test_what_looks_like_the_last_one_is_found_without_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PreparedLaunches()
    tensors = (torch.ones(4, 2), None, torch.ones(3))
    made = table.find(prepare, tensors, (1, [2]))
    monkeypatch.setattr(table, "_look_up", None)
    assert table.find(prepare, (torch.zeros(4, 2), None, torch.zeros(3)), (1, [2])) is made
    with pytest.raises(TypeError):
        table.find(prepare, (torch.zeros(4, 2), torch.ones(3), None), (1, [2]))


def test_only_what_looks_like_the_last_one_is_had_again() -> None:
    table = PreparedLaunches()
    x = torch.ones(4, 2)
    assert table.again(prepare, (x, None), (1,)) is None
    made = table.find(prepare, (x, None), (1,))
    assert table.again(prepare, (x.clone(), None), (1,)) is made
    wanting = torch.ones(4, 2).requires_grad_()
    for other in (x.t(), x.double(), x.to("meta"), x.as_subclass(Subclass), torch._neg_view(x), wanting):
        assert table.again(prepare, (other, None), (1,)) is None
    assert table.again(prepare, (x, x.clone()), (1,)) is None
    assert table.again(prepare, (x, None), (2,)) is None
    for around in ROUND_A_CALL.values():
        with around():
            assert table.again(prepare, (x, None), (1,)) is None
    assert table.again(prepare, (x, None), (1,)) is made


def test_what_was_had_without_gradients_is_not_had_again_with_them() -> None:
    """A parameter requires a gradient either way."""
    table, x = PreparedLaunches(), torch.nn.Parameter(torch.ones(4, 2))
    with torch.no_grad():
        made = table.find(prepare, (x, None), (1,))
    assert table.again(prepare, (x, None), (1,)) is None
    with torch.no_grad():
        assert table.again(prepare, (x, None), (1,)) is made


def test_one_tensor_given_twice_is_found_as_any() -> None:
    table = PreparedLaunches()
    tensor = torch.ones(3)
    assert table.find(prepare, (tensor, tensor), ()) is table.find(prepare, (tensor, tensor), ())
    assert table.find(prepare, (tensor, tensor), ()) is table.find(prepare, (tensor, tensor.clone()), ())


def test_a_plan_that_torch_passes_as_a_list_is_handed_on_as_a_tuple() -> None:
    for numbers, wanted in (((2.5, [16, 4]), (2.5, (16, 4))), ((2.5, [16, 4], True), (2.5, (16, 4), True))):
        assert PreparedLaunches().find(lambda tensors, numbers: numbers, (None,), numbers) == wanted


def test_the_table_keeps_no_tensor_alive() -> None:
    table = PreparedLaunches()
    tensor = torch.empty(5)
    alive = weakref.ref(tensor)
    table.find(prepare, (tensor,), ())
    del tensor
    gc.collect()
    assert alive() is None


def test_a_tensor_that_is_to_be_negated_when_it_is_read_is_refused_by_name() -> None:
    """Its memory holds the numbers that it does not stand for."""
    table = PreparedLaunches()
    x = torch.ones(3, 4)
    for _ in range(2):
        assert table.find(lambda tensors, numbers: "a launch", (x, None), (1,)) == "a launch"
        with pytest.raises(ValueError, match=r"^every tensor must be materialised .* got a lazy view, torch.float32"):
            table.find(lambda tensors, numbers: "a launch", (torch._neg_view(x), None), (1,))


def test_tables_of_two_packages_are_apart() -> None:
    one, other = PreparedLaunches(), PreparedLaunches()
    one.find(prepare, (torch.empty(2),), ())
    assert (len(one), len(other)) == (1, 0)


@pytest.fixture
def package(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An importable package of this name, without a launch.py."""
    name = "glue_test_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_launches_are_imported_by_the_packages_name(package: Any) -> None:
    (package / "launch.py").write_text("prepare = 7\n")
    assert launch_module(package.name).prepare == 7


def test_a_missing_kernel_language_is_named_with_what_brings_it(package: Any) -> None:
    (package / "launch.py").write_text("import no_such_language\n")
    message = r"^tensors on a GPU need Triton, which torch's GPU builds bring; here it is missing$"
    with pytest.raises(RuntimeError, match=message) as raised:
        launch_module(package.name)
    assert isinstance(raised.value.__cause__, ImportError)
    with pytest.raises(RuntimeError, match=r"^tensors on a GPU need TileLang; here it is missing$"):
        launch_module(package.name, "TileLang")


def test_an_op_runs_its_reference_on_a_cpu_and_its_fake_under_a_trace() -> None:
    library = torch.library.Library("glue_test_ops", "DEF")
    calls: list[str] = []
    try:
        library.define("double(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.define("fill(Tensor(a!) x) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

        def double(x: Tensor) -> Tensor:
            calls.append("reference")
            return 2 * x

        def kernel(x: Tensor) -> None:
            raise AssertionError

        def check(x: Tensor) -> str:
            calls.append("check")
            return "a Problem"

        implement(library, "double", reference=double, kernel=kernel, fake=torch.empty_like)
        implement(library, "fill", reference=lambda x: x.fill_(1) and None, kernel=kernel, fake=check)
        ops: Any = torch.ops.glue_test_ops
        assert torch.equal(ops.double(torch.ones(2)), torch.full((2,), 2.0))
        assert ops.double(torch.empty(2, device="meta")).device.type == "meta"
        assert calls == ["reference"]
        # What a check returns is no result of an op that has none.
        assert ops.fill(torch.empty(2, device="meta")) is None
        assert calls == ["reference", "check"]
        for key in ("CUDA", "PrivateUse1"):
            for name in ("double", "fill"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(f"glue_test_ops::{name}", key)
    finally:
        library._destroy()


def test_autocast_does_not_lower_the_precision_of_a_reference() -> None:
    library = torch.library.Library("autocast_test_ops", "DEF")
    try:
        library.define("product(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        implement(library, "product", reference=lambda x: x @ x, kernel=torch.mm, fake=torch.empty_like)
        x = torch.full((2, 2), 1.001)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
            product = torch.ops.autocast_test_ops.product(x)
        assert torch.equal(product, x @ x)
    finally:
        library._destroy()


def test_what_allocates_on_a_gpu_is_given_tuples_even_of_a_tensors_shape(monkeypatch) -> None:
    """torch 2.11's private allocator checks for the very type; torch.Size is a class of its own."""
    given = []
    monkeypatch.setattr(dispatch, "_empty_strided_cuda", lambda *call: given.append(call))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    x = torch.empty(2, 3)
    allocator_of(x.shape, x.stride(), x.dtype, torch.device("cuda"))()
    ((size, stride, _),) = given
    assert type(size) is type(stride) is tuple
    assert (size, stride) == ((2, 3), (3, 1))


def test_an_allocator_makes_new_tensors_of_the_same_form_and_keeps_none_alive() -> None:
    like = torch.empty(4, 6, dtype=torch.bfloat16)[:, ::2]
    alive = weakref.ref(like)
    make = allocator(like)
    one, other = make(), make()
    for made in (one, other):
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            like.shape, like.stride(), like.dtype, like.device,
        )  # fmt: skip
    assert one.data_ptr() != other.data_ptr()
    del like
    gc.collect()
    assert alive() is None


# The short way past torch's dispatcher


class Scaled:
    """An op, ``factor * x (+ y)``, called the short way where there is one; CPU tensors stand for a GPU's."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.launches = PreparedLaunches(most=4)
        self.op: Any = torch.ops.glue_test_direct.scaled.default

    def __call__(self, x: Any, y: Any, factor: float) -> Any:
        run = self.launches.direct((x, y), ("scaled", factor))
        if run is not None:
            self.seen.append("direct")
            return run(x, y)
        result = self.op(x, y, factor)
        self.seen.append("op")
        self.launches.keep_direct((x, y), ("scaled", factor), lambda: lambda x, y: scaled(x, y, factor))
        return result

    def went(self, *given: Any) -> str:
        self(*given)
        return self.seen[-1]


def scaled(x: Tensor, y: Tensor | None, factor: float) -> Tensor:
    return factor * x if y is None else factor * x + y


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scaled]:
    monkeypatch.setattr(dispatch, "has_kernel", lambda device: device.type == "cpu")
    library = torch.library.Library("glue_test_direct", "DEF")
    library.define("scaled(Tensor x, Tensor? y, float factor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    implement(library, "scaled", reference=scaled, kernel=scaled, fake=scaled)
    yield Scaled()
    library._destroy()


def test_eager_calls_that_look_alike_go_past_the_dispatcher_from_the_second_on(call) -> None:
    x, y = torch.ones(2, 3), torch.ones(3)
    assert [call.went(x, y, 2.0) for _ in range(3)] == ["op", "direct", "direct"]
    assert torch.equal(call(x + 1, y, 2.0), torch.full((2, 3), 5.0))
    assert call.seen[-1] == "direct"
    parameter = torch.nn.Parameter(x, requires_grad=False)
    others = [
        (x[:1], y, 2.0), (x.T.contiguous().T, y, 2.0), (x.double(), y, 2.0), (parameter, y, 2.0), (x, None, 2.0),
        (x, y, 3.0), (x, y[:1], 2.0),
    ]  # fmt: skip
    for other in others:
        assert [call.went(*other) for _ in range(2)] == ["op", "direct"]
    assert len(call.launches._direct) <= 4


def test_what_is_absent_in_one_place_is_not_taken_for_what_is_absent_in_another(call) -> None:
    x = torch.ones(3)
    assert [call.went(x, None, 2.0) for _ in range(2)] == ["op", "direct"]
    with pytest.raises(TypeError):
        call(None, x, 2.0)
    assert torch.equal(call(x, x.clone(), 2.0), 3 * x)


def test_calls_whose_free_sizes_differ_are_found_and_no_others(call) -> None:
    table, rows, more, wide = PreparedLaunches(), torch.ones(8, 3), torch.ones(8, 3), torch.ones(8, 5)
    sizes = {0: Free(sizes=(0,)), 1: Free(sizes=(0, 1), strides=(0,))}
    table.keep_direct((rows, more, None), ("any",), lambda: str, sizes)
    for alike in ((rows, more, None), (rows[:2], rows[:4], None), (rows[:5], wide[:2, :4], None)):
        assert table.direct(alike, ("any",)) is str
    others = [
        (rows[:, :2], more, None), (wide[:, :3], more, None), (rows, more.T.contiguous().T, None), (rows, more, wide),
        (rows.double(), more, None), (rows, None, None), (rows[0], more, None),
    ]  # fmt: skip
    for other in others:
        assert table.direct(other, ("any",)) is None
    # Of two forms both are found.
    table.keep_direct((wide, more, None), ("any",), lambda: int, sizes)
    assert [table.direct((x[:7], more, None), ("any",)) for x in (wide, rows)] == [int, str]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


ROUND_A_CALL: dict[str, Callable[[], Any]] = {
    "a mode of dispatch": Watching,
    "a mode of functions": Overriding,
    "a default device": lambda: torch.device("cpu"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "a profiler": torch.profiler.profile,
    "forward derivatives": torch.autograd.forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu"),
    "checks of values": validate_values,
}


@pytest.mark.parametrize("around", ROUND_A_CALL.values(), ids=ROUND_A_CALL)
def test_whoever_looks_on_sees_the_op(call, around) -> None:
    x = torch.ones(3)
    assert [call.went(x, None, 2.0) for _ in range(2)] == ["op", "direct"]
    with around():
        assert call.went(x, None, 2.0) == "op"
    # It left nothing behind by which a later one of its kind would be passed over.
    with around():
        seen = call.went(x, None, 2.0)
    assert seen == ("direct" if around is ROUND_A_CALL["autocast"] else "op")


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [lambda x: x.as_subclass(Subclass), torch._neg_view, lambda x: x.requires_grad_(), lambda x: x.to("meta")],
    ids=["a subclass", "a view that negates", "one that wants a gradient", "one without memory"],
)
def test_tensors_that_are_more_than_memory_are_the_dispatchers(call, make) -> None:
    assert [call.went(torch.ones(3), None, 2.0) for _ in range(2)] == ["op", "direct"]
    x = make(torch.ones(3))
    assert [call.went(x, None, 2.0) for _ in range(2)] == ["op", "op"]


def test_a_trace_holds_the_op(call) -> None:
    x = torch.ones(3)
    call(x, None, 2.0)
    graph = make_fx(lambda x: call(x, None, 2.0))(x)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [call.op]
    assert call.went(x, None, 2.0) == "direct"


def test_a_batch_of_vmap_reaches_the_op(call) -> None:
    x = torch.ones(2, 3)
    call(x[0], None, 2.0)
    torch.vmap(lambda x: call(x, None, 2.0))(x)
    assert call.seen == ["op", "op"]
    assert call.went(x[0], None, 2.0) == "direct"


@pytest.mark.parametrize("looks_on", [False, True])
def test_a_kernel_with_gradients_is_called_at_once_where_nobody_looks_on(monkeypatch, looks_on) -> None:
    def remember(ctx: Any, given: tuple[Any, ...], output: object) -> None:
        x, _, ctx.factor = given
        ctx.save_for_backward(x)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return 2 * ctx.factor * ctx.saved_tensors[0] * gradient, None, None

    served: list[str] = []
    kernel = dispatch.with_gradients(lambda x, y, factor: served.append("kernel") or factor * x**2, remember, backward)
    call = dispatch.past_dispatcher(lambda x, y, factor: served.append("op"), kernel, 2)
    monkeypatch.setattr(dispatch, "runs_now", lambda tensors: not looks_on and len(tensors) == 2)
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    result = call(x, None, 5.0)
    assert served == ["op" if looks_on else "kernel"]
    if not looks_on:
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.tensor([10.0, 30.0]))
    # What is no tensor is the op's to refuse.
    call(None, x, 5.0)
    assert served[1:] == ["op"]


def test_on_a_cpu_there_is_no_short_way(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [call.went(torch.ones(3), None, 2.0) for _ in range(2)] == ["op", "op"]


def test_inside_inference_mode_the_short_way_is_another_than_outside(call) -> None:
    x = torch.ones(3)
    for first in ("op", "direct"):
        with torch.inference_mode():
            assert [call.went(x, None, 2.0) for _ in range(2)] == [first, "direct"]
        assert [call.went(x, None, 2.0) for _ in range(2)] == [first, "direct"]


def test_a_torch_without_such_guards_calls_the_op(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_TensorGuards", None)
    assert [call.went(torch.ones(3), None, 2.0) for _ in range(2)] == ["op", "op"]


def test_this_torch_has_them() -> None:
    assert dispatch._TensorGuards is not None


def test_a_sparse_tensor_goes_to_the_op_which_refuses_it_and_never_to_a_kernel(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "runs_now", lambda tensors: True)
    call = dispatch.past_dispatcher(lambda *given: "op", lambda *given: "kernel", 3)
    x = torch.ones(2, 2)
    assert call(x, x, None, 0.5) == "kernel"
    assert call(x, x.to_sparse(), None, 0.5) == "op"
