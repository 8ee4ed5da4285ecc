"""How ops find their implementations, and what was made ready for calls that look alike."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module

Tensor = torch.Tensor


def prepare(tensors: Sequence[Tensor], numbers: tuple[Any, ...]) -> object:
    return object()


def prepare_another(tensors: Sequence[Tensor], numbers: tuple[Any, ...]) -> object:
    return object()


def test_the_table_is_emptied_at_its_bound_and_each_entry_made_once_until_then() -> None:
    table = PreparedLaunches(most=4)
    made: list[int] = []

    def noted(tensors: Sequence[Tensor], numbers: tuple[int, ...]) -> int:
        made.append(numbers[0])
        return numbers[0]

    tensor = torch.empty(2, 3)
    for number in (*range(20), 19, 19):
        assert table.find(noted, (tensor,), (number,)) == number
        assert 1 <= len(table) <= 4
    assert made == list(range(20))


def test_a_launch_is_found_again_only_for_the_same_sizes_strides_dtypes_device_and_numbers() -> None:
    table = PreparedLaunches()
    tensor = torch.empty(2, 3)
    others = [torch.empty(3, 3), torch.empty(2, 4)[:, :3], tensor.double(), tensor.to("meta"), None]
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


def test_a_plan_that_torch_passes_as_a_list_is_handed_on_as_a_tuple() -> None:
    given = PreparedLaunches().find(lambda tensors, numbers: numbers, (None,), (2.5, [16, 4]))
    assert given == (2.5, (16, 4))


def test_the_table_keeps_no_tensor_alive() -> None:
    table = PreparedLaunches()
    tensor = torch.empty(5)
    alive = weakref.ref(tensor)
    table.find(prepare, (tensor,), ())
    del tensor
    gc.collect()
    assert alive() is None


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
