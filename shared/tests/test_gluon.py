"""Do Gluon kernels run on a CPU, and does what is wrong in them show?"""

from __future__ import annotations

import math
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.launching import TmaBox
from kernel_reference.testing import gluon
from kernel_reference.testing.gluon.pipeline import Program
from kernel_reference.testing.gluon.ptx import execute
from kernel_reference.testing.gluon.values import Value
from kernel_reference.testing.guards import assert_bitwise_equal
from kernel_reference.testing.numerics import assert_close_to_oracle

pytestmark = pytest.mark.simulated

M, N, BLOCK_K = 64, 64, 32


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        [module] = gluon.shadow("gluon_kernels")
    return module


def multiply(kernels: ModuleType, inner: int = 100, fault: str = "") -> None:
    a, b = torch.randn(M, inner).bfloat16(), torch.randn(inner, N).bfloat16()
    c = torch.full((M, N), torch.nan)
    boxes = [
        gluon.Descriptor(x, list(x.shape), list(x.stride()), block, kernels.descriptor_layout(block))
        for x, block in ((a, [M, BLOCK_K]), (b, [BLOCK_K, N]))
    ]
    gluon.launch(kernels.matmul, 1, *boxes, c, -(-inner // BLOCK_K), c.stride(), M, N, BLOCK_K, fault)
    assert_close_to_oracle(c, a.double() @ b.double(), a.float() @ b.float())


@pytest.mark.parametrize("inner", [32, 100, 320])
def test_partitions_that_hand_tiles_over_multiply_matrices(kernels: ModuleType, inner: int) -> None:
    """100: what a box has beyond the tensor is zero, and not what comes after it in memory."""
    multiply(kernels, inner)


def test_a_stage_that_is_freed_before_the_product_is_done_holds_the_next_tile(kernels: ModuleType) -> None:
    with pytest.raises(AssertionError, match="further from float64"):
        multiply(kernels, fault="freed too early")


def test_sums_are_cut_off_toward_zero_as_on_tensor_cores_where_a_test_wants_that(kernels: ModuleType) -> None:
    """Of 2^24 and three times 1.5, in columns of 16 each, nothing but 2^24 is left: the next float32 is 2^24 + 2."""
    a, b = torch.ones(M, 64).bfloat16(), torch.full((64, N), 1.5 / 16).bfloat16()
    b[:16] = 2.0**20
    b[:, 1] *= -1
    sums = []
    for truncates in (False, True):
        c = torch.full((M, N), torch.nan)
        boxes = [
            gluon.Descriptor(x, list(x.shape), list(x.stride()), block, kernels.descriptor_layout(block))
            for x, block in ((a, [M, BLOCK_K]), (b, [BLOCK_K, N]))
        ]
        with gluon.truncated_sums() if truncates else nullcontext():
            gluon.launch(kernels.matmul, 1, *boxes, c, 64 // BLOCK_K, c.stride(), M, N, BLOCK_K, "")
        sums.append(c[0, :2].tolist())
    rounded, cut_off = sums
    assert rounded[0] == -rounded[1] > 2.0**24
    assert cut_off == [2.0**24, -(2.0**24)]


@pytest.mark.parametrize(("fault", "error", "message"), [
    ("read too early", RuntimeError, "read while its product is in flight"),
    # Whichever comes first.
    ("half the bytes", RuntimeError, "by more bytes|in flight"),
    ("freed twice", RuntimeError, "more often"),
    ("stored too far", IndexError, "elements 64 to 4159 of memory that holds 4096"),
    ("never freed", RuntimeError, "a deadlock"),
])  # fmt: skip
def test_what_would_hang_or_corrupt_on_a_gpu_is_an_error(
    kernels: ModuleType, fault: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        multiply(kernels, fault=fault)


def test_partitions_meet_in_the_same_order_whenever_the_random_numbers_are_the_same(kernels: ModuleType) -> None:
    ends = []
    for seed in (1, 1, 2):
        random.seed(seed)
        multiply(kernels, 320)
        ends.append(Program.current.now)
    assert ends[0] == ends[1] != ends[2]


def gather(kernels: ModuleType, fault: str = "") -> None:
    x, out = torch.randn(4, 8).bfloat16(), torch.full((4, 8), torch.nan, dtype=torch.bfloat16)
    gluon.launch(kernels.gathered, 1, x, out, fault)
    assert_bitwise_equal(out, torch.cat([x[[3, 1, 0]], torch.zeros(1, 8).bfloat16()]))


def test_elements_are_copied_one_by_one_and_counted_once_they_have_arrived(kernels: ModuleType) -> None:
    for seed in range(20):
        random.seed(seed)
        gather(kernels)


def test_elements_whose_arrival_nobody_awaits_are_an_error(kernels: ModuleType) -> None:
    failed = 0
    for seed in range(20):
        random.seed(seed)
        try:
            gather(kernels, "not awaited")
        except (AssertionError, RuntimeError):
            failed += 1
    assert failed


def test_integers_divide_as_in_c(kernels: ModuleType) -> None:
    out = torch.zeros(2, dtype=torch.int32)
    gluon.launch(kernels.quotients, 1, torch.tensor([-7], dtype=torch.int32), out, 2)
    assert out.tolist() == [-3, -1]


def test_tensors_within_tuples_and_named_tuples_are_pointers_too(kernels: ModuleType) -> None:
    class Group(NamedTuple):
        pair: tuple[torch.Tensor, int]
        out: torch.Tensor
        absent: None

    out = torch.zeros(1)
    gluon.launch(kernels.copy_in_group, 1, Group((torch.full((1,), 5.0), 7), out, None))
    assert out.tolist() == [5.0]


def test_products_of_what_was_divided_wrap_at_2_to_the_31_as_on_a_gpu() -> None:
    for number, wanted in ((Value(2**30), -(2**31)), (Value(torch.tensor(2**30)), 2**31)):
        assert int((number // 1) * 2) == wanted
        assert int((number % (2**30 + 1)) * 2) == wanted


def test_programs_that_stay_share_the_work_and_what_they_assume_is_looked_at(kernels: ModuleType) -> None:
    filled = torch.full((5,), -1, dtype=torch.int32)
    gluon.launch(kernels.in_turns, 2, filled, 5)
    assert filled.tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(RuntimeError, match="assumes"):
        gluon.launch(kernels.in_turns, 2, filled, 0)


def test_pieces_of_shared_memory_are_a_tile_where_their_bytes_are_its(kernels: ModuleType) -> None:
    x = torch.randn(64, 128).bfloat16()
    y = torch.zeros_like(x)
    gluon.launch(kernels.in_pieces, 1, x, y, 64)
    assert torch.equal(x, y)


def test_shadows_leave_triton_and_the_modules_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    before = {name: module for name, module in sys.modules.items() if name.startswith(("triton", "gluon_kernels"))}
    gluon.shadow("gluon_kernels")
    after = {name: module for name, module in sys.modules.items() if name.startswith(("triton", "gluon_kernels"))}
    assert after == before


def test_a_module_that_there_is_not_is_named() -> None:
    with pytest.raises(ImportError, match="there is no module no_such_kernels"):
        gluon.shadow("no_such_kernels")


def test_a_launch_with_descriptors_runs_here_in_place_of_the_one_on_a_gpu(kernels: ModuleType) -> None:
    class Group(NamedTuple):
        out: torch.Tensor

    seen: list[tuple[Any, ...]] = []

    def copy(first: Any, second: Any, group: Any, n: Any) -> None:
        seen.append((first, second, group, n))

    def stand_in() -> None: ...

    kernel = SimpleNamespace(fn=stand_in)
    module = ModuleType("shadow")
    module.stand_in = copy  # type: ignore[attr-defined]
    box = TmaBox([8, 64], [64, 1], [4, 64])
    out = torch.zeros(3)
    start = gluon.tma_launch(module)(
        kernel, (2, 1, 1), (7,), torch.device("cpu"), [box, box], group=lambda out: (Group(out),), num_warps=4
    )
    start(torch.zeros(8, 64), None, out)
    assert len(seen) == 2, "a run for each program"
    first, second, group, _ = seen[0]
    assert first is second
    assert (first.sizes, first.strides, first.block_type.shape) == ([8, 64], [64, 1], [4, 64])
    assert group.out.tensor is out


def test_lines_of_ptx_are_carried_out_a_thread_s_elements_at_a_time() -> None:
    text = """{
        .reg .f32 p; mul.f32 p, $2, $3; rcp.approx.ftz.f32 p, p;
        min.f32 $0, p, 0f3F000000; min.NaN.f32 $1, p, $3;
    }"""
    nan = math.nan
    (found,) = execute(text, 2, torch.tensor([[4.0, 0.5, 4.0, 1.0], [nan, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(
        found, torch.tensor([[0.5, 0.5, 0.25, 0.25], [0.5, nan, 0.5, 1.0]]), rtol=0, atol=0, equal_nan=True
    )
    # An element that has no others beside it is not lost.
    (moved,) = execute("mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $6; mov.f32 $3, $7;", 4, torch.ones(5))
    assert moved.shape == (5,)
    # Numbers of two tensors, one of integers.
    text = "{ .reg .pred seen; setp.le.s32 seen, $2, 3; selp.f32 $0, $1, 0fFF800000, seen; }"
    (masked,) = execute(text, 1, torch.ones(2), torch.tensor([3, 4], dtype=torch.int32))
    assert masked.tolist() == [1, -math.inf]
    # Where a warp votes, each thread goes where it would as a warp of its own.
    text = (
        "{ .reg .pred p; setp.neu.f32 p, $1, 0f3F800000; vote.sync.any.pred p, p, -1; @!p bra D; mov.f32 $0, $1; D: }"
    )
    assert execute(text, 1, torch.full((2,), 3.0))[0].tolist() == [3, 3]
    text = (
        "{ .reg .pred p; setp.gtu.f32 p, $1, 0f40000000; vote.sync.any.pred p, p, -1; @p bra.uni FAR; "
        "add.f32 $0, $1, $1; bra.uni DONE; FAR: mul.f32 $0, $1, $1; DONE: }"
    )
    assert execute(text, 1, torch.tensor([1.0, 3.0, 2.0, 5.0]))[0].tolist() == [2, 9, 4, 25]
    with pytest.raises(NotImplementedError, match=r"no sin\.approx\.f32"):
        execute("sin.approx.f32 $0, $1;", 1, torch.ones(1))


def test_ptx_makes_pairs_of_bfloat16_and_takes_them_apart_bit_by_bit() -> None:
    """Each result has a register for two elements, the first in its lower half."""
    text = """{
        .reg .b32 even, odd; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 even, $0, 16; and.b32 odd, $0, 0xffff0000;
        sub.f32 even, $2, even; sub.f32 odd, $3, odd; cvt.rn.bf16x2.f32 $1, odd, even;
    }"""
    numbers = torch.cat([torch.randn(8), torch.tensor([-0.0, 2.0**-130, math.inf, 3e38])]).view(3, 4)
    first, rest = execute(text, 2, numbers, dtypes=(torch.bfloat16, torch.bfloat16))
    assert_bitwise_equal(first, numbers.bfloat16())
    torch.testing.assert_close(rest, (numbers - numbers.bfloat16().float()).bfloat16(), rtol=0, atol=0, equal_nan=True)
    # One element alone.
    assert execute(text, 2, torch.full((1,), 1.5), dtypes=(torch.bfloat16, torch.bfloat16))[0].tolist() == [1.5]
