"""Assertions about operators: each is shown an operator that keeps the contract and one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_reference
from kernel_reference.lasting import lasting
from kernel_reference.testing import contract

library = torch.library.Library("kernel_reference_contract_test", "DEF")
library.define("double(Tensor x, int times=1) -> Tensor")
library.define("wrong_fake(Tensor x) -> Tensor")
library.define("hidden_write(Tensor x) -> Tensor")
OPS = torch.ops.kernel_reference_contract_test


def _double(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x * 2**times


def _hidden_write(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


for _key in ("CPU", "CUDA"):
    library.impl("double", _double, _key)
    library.impl("wrong_fake", lambda x: x * 2, _key)
    library.impl("hidden_write", _hidden_write, _key)
torch.library.register_fake(f"{library.ns}::double", lambda x, times=1: torch.empty_like(x), lib=library)
torch.library.register_fake(f"{library.ns}::wrong_fake", lambda x: x.new_empty(x.shape[0]), lib=library)
torch.library.register_fake(f"{library.ns}::hidden_write", torch.empty_like, lib=library)


def tokens(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 64, device=device), torch.randn(64, device=device)


def test_an_op_with_a_right_fake_passes_opcheck(device: torch.device) -> None:
    contract.check_opcheck(
        OPS.double.default, [(torch.randn(4, 8, device=device),), (torch.randn(0, 8, device=device), 3)]
    )


@pytest.mark.parametrize("name", ["wrong_fake", "hidden_write"])
def test_an_op_that_lies_about_shapes_or_writes_fails_opcheck_and_names_the_case(
    name: str, device: torch.device
) -> None:
    op = getattr(OPS, name).default
    with pytest.raises(AssertionError, match=r"fails opcheck on case 0, \(float32\[4, 8\]\)"):
        contract.check_opcheck(op, [(torch.randn(4, 8, device=device),)])


def test_opcheck_of_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match="cases must be"):
        contract.check_opcheck(OPS.double.default, [])


def test_a_function_of_any_number_of_tokens_compiles_once(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return OPS.double(x), {"scaled": x * weight}

    contract.check_compiles(fn, tokens(16, device), tokens(48, device))
    contract.check_compiles(fn, tokens(16, device), tokens(48, device), dynamic={0: 0})


def test_a_function_that_branches_on_the_number_of_tokens_fails(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight if x.shape[0] > 32 else x + weight

    with pytest.raises(AssertionError, match="second size is compiled again"):
        contract.check_compiles(fn, tokens(16, device), tokens(48, device))


def test_a_function_that_specialises_on_its_size_fails(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view(16, 64) * weight

    with pytest.raises(AssertionError, match="the first size does not compile"):
        contract.check_compiles(fn, tokens(16, device), tokens(48, device))


def test_a_graph_break_fails(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * weight

    with pytest.raises(AssertionError, match="the first size does not compile"):
        contract.check_compiles(fn, tokens(16, device), tokens(48, device))


def test_a_compiled_result_with_other_bits_fails(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x * weight

    with pytest.raises(AssertionError, match="compiled, the first size: tensor 0 is not bit for bit"):
        contract.check_compiles(fn, tokens(16, device), tokens(48, device))


def test_a_compiled_call_that_does_not_write_its_output_fails(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            x.mul_(weight)

    with pytest.raises(AssertionError, match="after the call: input tensor 0"):
        contract.check_compiles(fn, tokens(16, device), tokens(48, device))


def test_two_equal_sizes_show_nothing_and_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="inputs_large"):
        contract.check_compiles(torch.mul, tokens(16, device), tokens(16, device))


def test_a_deterministic_function_passes_and_another_fails(device: torch.device) -> None:
    x = torch.randn(32, device=device)
    contract.check_deterministic(lambda: (x * 2, [x + 1]))
    with pytest.raises(AssertionError, match="call 1: tensor 1"):
        contract.check_deterministic(lambda: (x, torch.rand(4, device=device)))


def test_a_result_kept_in_one_buffer_is_compared_with_what_it_was(device: torch.device) -> None:
    buffer = torch.zeros(4, device=device)
    with pytest.raises(AssertionError, match="call 1"):
        contract.check_deterministic(lambda: buffer.add_(1))


def test_a_version_of_other_metadata_fails() -> None:
    contract.check_version(kernel_reference, "kernel-reference")
    with pytest.raises(AssertionError, match="'kernel-reference'"):
        contract.check_version(kernel_reference, "another")


def test_rows_that_depend_on_their_neighbours_fail(device: torch.device) -> None:
    x = torch.randn(16, 64, device=device)
    contract.check_batch_invariant(lambda rows: x[rows] * 3, 16)
    with pytest.raises(AssertionError, match="rows 0:1 of 16, alone"):
        contract.check_batch_invariant(lambda rows: x[rows] - x[rows].mean(0), 16)


def gather(multiply: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of rows that computes its own offsets from the first element on, as a kernel does."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        rows = torch.arange(x.shape[0], device=x.device)
        offsets = multiply(rows, x.stride(0)).long()[:, None] + torch.arange(x.shape[1], device=x.device)
        return storage[offsets + x.storage_offset()]

    return fn


def test_offsets_of_32_bits_fail_and_those_of_64_pass(device: torch.device) -> None:
    x = torch.randint(1, 100, (5, 32), dtype=torch.int8, device=device)
    contract.check_int64_offsets(gather(lambda rows, stride: rows * stride), [x], {0: 0})
    wrapping = gather(lambda rows, stride: rows.int() * torch.tensor(stride).int().to(rows.device))
    with pytest.raises(AssertionError, match="argument 0 with a stride of"):
        contract.check_int64_offsets(wrapping, [x], {0: 0})


def scatter(
    place: Callable[[torch.Tensor, int], torch.Tensor], dim: int = 1
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Writes ``2 * x`` to out by offsets of its own, those of ``dim`` made by ``place`` from indices and the stride."""

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        storage = torch.as_strided(out, (out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
        offsets = torch.full((), out.storage_offset(), device=x.device)
        for d, (size, stride) in enumerate(zip(out.shape, out.stride(), strict=True)):
            index = torch.arange(size, device=x.device)
            offsets = offsets[..., None] + (place(index, stride) if d == dim else index * stride)
        storage[offsets.clamp(0, len(storage) - 1)] = 2 * x

    return fn


def wrap(index: torch.Tensor, stride: int) -> torch.Tensor:
    return (index.int() * torch.tensor(stride).int().to(index.device)).long()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_written_argument_is_stretched_in_every_dimension(dim: int, device: torch.device) -> None:
    x = torch.randint(1, 60, (5, 32), dtype=torch.int8, device=device)
    contract.check_int64_offsets(scatter(lambda index, stride: index * stride), [x, -x], written=[1])
    with pytest.raises(
        AssertionError, match=rf"argument 1 .* in dimension {dim}: \d+ elements beside it were overwritten"
    ):
        contract.check_int64_offsets(scatter(wrap, dim), [x, -x], written=[1])
    with pytest.raises(AssertionError, match=rf"in dimension {dim}: .* one is \d+ before its first"):
        contract.check_int64_offsets(scatter(wrap, dim), [x, -x], {1: [1, 0]})


def test_elements_of_several_bytes_are_guarded_too(device: torch.device) -> None:
    x = torch.randn(3, 20, device=device).bfloat16()
    contract.check_int64_offsets(scatter(lambda index, stride: index * stride), [x, -x], written=[1])
    with pytest.raises(AssertionError, match="before its first"):
        contract.check_int64_offsets(scatter(wrap), [x, -x], written=[1])


def test_a_stray_write_beside_the_right_ones_fails(device: torch.device) -> None:
    x = torch.randint(1, 60, (5, 32), dtype=torch.int8, device=device)

    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        scatter(wrap)(x, out)
        scatter(lambda index, stride: index * stride)(x, out)

    with pytest.raises(AssertionError, match="elements beside it were overwritten"):
        contract.check_int64_offsets(twice, [x, -x], {1: 1})


def test_one_or_more_dimensions_are_to_be_named() -> None:
    with pytest.raises(ValueError, match="dims must be at least one argument's dimension, got none"):
        contract.check_int64_offsets(lambda x: x, [torch.ones(3, 3)])


def test_rows_far_apart_hold_the_same_values_and_their_alignment(device: torch.device) -> None:
    x = torch.randint(1, 100, (3, 2, 40), dtype=torch.int8, device=device)
    for dim in (0, 1):
        far = contract.far_apart(x, dim, beyond=2**20)
        assert torch.equal(far, x)
        assert far.stride(dim) * (x.shape[dim] - 1) >= 2**20
        assert far.stride(dim) % 16 == 0
        assert far.data_ptr() % 16 == 0


@pytest.mark.gpu
def test_a_captured_function_replays_on_new_inputs() -> None:
    def make_inputs(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return [torch.randn(32, 64, device="cuda", generator=generator) for _ in range(2)]

    contract.check_cuda_graph(lambda x, y: (x * y, x.add_(y)), make_inputs)


@pytest.mark.gpu
def test_a_captured_function_that_depends_on_the_host_fails() -> None:
    calls = iter(range(100))
    with pytest.raises(AssertionError, match="replay 1: tensor 0"):
        contract.check_cuda_graph(lambda x: x * next(calls), lambda seed: [torch.full((8,), seed + 1.0, device="cuda")])


@pytest.mark.gpu
def test_a_copy_to_the_host_fails() -> None:
    x = torch.ones(8, device="cuda")
    contract.check_no_host_sync(lambda: x * 2)
    with pytest.raises(AssertionError, match="waits for the GPU"):
        contract.check_no_host_sync(lambda: x.sum().item())
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
@pytest.mark.torch_compile
def test_memory_that_a_call_keeps_is_refused_by_graphs_of_torch_compile_unless_it_lasts() -> None:
    def keeping(name: str, make: Callable[..., torch.Tensor]) -> Any:
        kept: list[torch.Tensor] = []

        @torch.library.custom_op(f"{library.ns}::{name}", mutates_args=())
        def add_kept(x: torch.Tensor) -> torch.Tensor:
            if not kept:
                kept.append(make(lambda: torch.ones(1, device=x.device), x.device))
            return x + kept[0]

        add_kept.register_fake(torch.empty_like)
        return add_kept

    calls = [[torch.randn(rows, 8, device="cuda")] for rows in (2, 3)]
    contract.check_compiled_graphs(keeping("add_lasting", lasting), *calls)
    with pytest.raises(RuntimeError, match="in the cudagraph pool not tracked as outputs"):
        contract.check_compiled_graphs(keeping("add_kept", lambda make, device: make()), *calls)


@pytest.mark.gpu
@pytest.mark.torch_compile
def test_a_call_of_which_nothing_is_captured_fails() -> None:
    calls = [[torch.randn(rows, 8, device="cuda")] for rows in (2, 2)]
    contract.check_compiled_graphs(lambda x: x.add_(1), *calls, static=[0])
    with pytest.raises(AssertionError, match="captured nothing"):
        contract.check_compiled_graphs(lambda x: x.flatten(), *calls)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_checks_of_the_gpu_say_so_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        contract.check_no_host_sync(lambda: None)
