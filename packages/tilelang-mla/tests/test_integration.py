"""Does the package do what engines take for granted: torch.compile, CUDA graphs, streams, large batches, equal bits?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tilelang_mla
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.testing import contract
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal, assert_same_bits, poison_, tensors_in
from kernel_reference.testing.memory import check_far_apart
from tilelang_mla import (
    DecodePlan,
    DecodeTiles,
    PrefillPlan,
    calls,
    flash_mla,
    flash_mla_with_kvcache,
    ops,
    reference,
    straight,
)

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32
gpu = pytest.mark.gpu
HEADS, NOPE, ROPE, PAGE, COLUMNS, POOL = 4, 64, 32, 16, 4, 40
WIDTH, LONGEST = NOPE + ROPE, COLUMNS * PAGE
# For plans: on a CPU, which counts as one SM, nothing would be cut.
CORES = 132


class Maker:
    """Makes the inputs of the public functions from a number of sequences and a seed: lengths follow from both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, seed: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(BF16)

    def integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def lengths(self, sequences: int, most: int) -> list[int]:
        return torch.randint(most + 1, (sequences,), generator=self.host).tolist()

    def decoding(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, kv, seqlens_k, block_table."""
        self.start(seed)
        q, kv = self.normal(sequences, 2, HEADS, WIDTH), self.normal(POOL, PAGE, 1, WIDTH)
        table = torch.randint(POOL, (sequences, COLUMNS), generator=self.host).tolist()
        return [q, kv, self.integers(self.lengths(sequences, LONGEST)), self.integers(table)]

    def planned(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, kv, seqlens_k, block_table, the tensors of a plan, out."""
        tensors = self.decoding(sequences, seed)
        return [*tensors, *plan_of(tensors[2])[1:], torch.zeros_like(tensors[0])[..., :NOPE].contiguous()]

    def of_engines(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, kv, seqlens_k, block_table, metadata and splits."""
        tensors = self.decoding(sequences, seed)
        return [*tensors, *flash_mla.get_mla_metadata(tensors[2], 2 * HEADS, 1)]

    def ragged(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, cu_seqlens_q, cu_seqlens_k."""
        self.start(seed)
        rows = 9 * sequences
        q, k, v = self.normal(rows, HEADS, 192), self.normal(2 * rows, 2, 192), self.normal(2 * rows, 2, 128)
        bounds = [list(accumulate(self.lengths(sequences, most), initial=0)) for most in (9, 18)]
        return [q, k, v, *map(self.integers, bounds)]

    def lengths_alone(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """seqlens_k."""
        self.start(seed)
        return [self.integers(self.lengths(sequences, 8192))]


@pytest.fixture
def make(device: torch.device) -> Maker:
    return Maker(device)


def plan_of(seqlens_k: Tensor, **options: Any) -> DecodePlan:
    sizes = {"dim_nope": NOPE, "dim_rope": ROPE, "cores": CORES}
    return tilelang_mla.plan_decode(seqlens_k, HEADS, 2, **sizes, **options)


# The most queries follow from a shape, so that they are a symbol to torch.compile where that is one.


def decode(q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    return tilelang_mla.flash_mla_with_kvcache(q, kv, seqlens_k, block_table, NOPE, 0.2, True, return_lse=True)


def plan_and_decode(q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    plan = plan_of(seqlens_k)
    return tilelang_mla.flash_mla_with_kvcache(q, kv, seqlens_k, block_table, NOPE, None, False, plan=plan)


def decode_in_parts(q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    plan = plan_of(seqlens_k, num_splits=3)
    return tilelang_mla.flash_mla_with_kvcache(
        q, kv, seqlens_k, block_table, NOPE, 0.2, True, plan=plan, return_lse=True
    )


def decode_with_a_plan(
    q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor, first_part: Tensor, order: Tensor, out: Tensor
) -> Any:
    plan = DecodePlan(plan_of(torch.zeros(1, dtype=torch.int32)).tiles, first_part, order)
    return tilelang_mla.flash_mla_with_kvcache(
        q, kv, seqlens_k, block_table, NOPE, 0.2, True, out=out, return_lse=True, plan=plan
    )


def decode_as_engines_do(
    q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor, metadata: Tensor, num_splits: Tensor
) -> Any:
    return flash_mla.flash_mla_with_kvcache(
        q, kv, block_table, seqlens_k, NOPE, metadata, num_splits, softmax_scale=0.2, causal=True
    )


def decode_as_engines_do_now(q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    made, none = flash_mla.get_mla_metadata()
    given = (q, kv, block_table, seqlens_k, NOPE, made, none, 0.2, True)
    return flash_mla.flash_mla_with_kvcache(*given), flash_mla.flash_mla_with_kvcache(*given)


def prefill(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    most = q.shape[0], k.shape[0]
    return tilelang_mla.flash_mla_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *most, None, True, return_lse=True)


def prefill_by_a_plan(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    given, most = (q, k, v, cu_seqlens_q, cu_seqlens_k), (q.shape[0], k.shape[0])
    return tilelang_mla.flash_mla_varlen_func(
        *given, *most, None, True, return_lse=True, plan=PrefillPlan(64, 32, 1, 3)
    )


def plan_alone(seqlens_k: Tensor) -> Any:
    return tilelang_mla.plan_decode(seqlens_k, 16, 1, max_seqlen_k=8192, cores=CORES)[1:]


def metadata_alone(seqlens_k: Tensor) -> Any:
    return flash_mla.get_mla_metadata(seqlens_k, 16, 1)


PUBLIC: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "prefill": (prefill, Maker.ragged),
    "decode": (decode, Maker.decoding),
    "plan and decode": (plan_and_decode, Maker.decoding),
    "decode in parts": (decode_in_parts, Maker.decoding),
    "decode with a plan, out=": (decode_with_a_plan, Maker.planned),
    "decode as engines do": (decode_as_engines_do, Maker.of_engines),
    "decode as engines do now": (decode_as_engines_do_now, Maker.decoding),
    "plan_decode": (plan_alone, Maker.lengths_alone),
    "get_mla_metadata": (metadata_alone, Maker.lengths_alone),
}
every_public_function = pytest.mark.parametrize(("function", "inputs"), PUBLIC.values(), ids=PUBLIC)


# The ops


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("tilelang_mla::") for name in names if name.startswith("tilelang_mla::"))


def test_there_is_one_op_a_kind_of_attention_two_of_gradients_two_of_the_indexer_and_one_of_ranks() -> None:
    of_attention = ["decode", "decode_8bit", "decode_sparse", "prefill", "prefill_sparse"]
    of_gradients = ["attention", "attention_backward"]
    assert op_names() == sorted([*of_attention, *of_gradients, "index_scores", "index_topk", "merge"])


def test_decoding_of_8_bits_and_of_lists_passes_opcheck(make) -> None:
    q, kv, lengths, table = make.decoding(3)
    out, lse = q.new_zeros(3, 2, HEADS, NOPE), q.new_zeros(3, HEADS, 2, dtype=FP32)
    wide = q.new_zeros(3, 2, HEADS, 576)
    records = tilelang_mla.quantize_kv(kv.new_ones(*kv.shape[:3], 576), "656")
    indices = table[:, None].repeat(1, 2, 1)
    # Of records: opcheck computes with its inputs, which torch cannot do with e4m3.
    given = (wide, records, lengths, table, None, None, None)
    contract.check_opcheck(
        torch.ops.tilelang_mla.decode_8bit.default,
        [
            (*given, wide[..., :512].clone(), lse, 512, 0.2, True),
            (*given, wide[..., :512].clone(), None, 512, 0.2, False, None),
        ],
    )
    contract.check_opcheck(
        torch.ops.tilelang_mla.decode_sparse.default,
        [
            (q, kv, indices, None, None, None, None, out, lse, NOPE, 0.2),
            (q, kv, indices, lengths, lse.new_ones(HEADS), None, None, out, None, NOPE, 0.2, None),
        ],
    )


def test_decode_passes_opcheck(make) -> None:
    q, kv, lengths, table = make.decoding(3)
    out, lse = q.new_zeros(3, 2, HEADS, NOPE), q.new_zeros(3, HEADS, 2, dtype=FP32)
    plan = plan_of(lengths)
    fixed = DecodeTiles(64, 64, 2, 3).as_ints()
    contract.check_opcheck(
        torch.ops.tilelang_mla.decode.default,
        [
            (q, kv, lengths, table, None, None, out, lse, NOPE, 0.2, True),
            (q, kv, lengths, table, None, None, out, None, NOPE, 0.2, False, None),
            (q, kv, lengths, table, *plan[1:], out, lse, NOPE, 0.2, True, plan.tiles.as_ints()),
            (q, kv, lengths, table, plan[1], None, out, lse, NOPE, 0.2, True, plan.tiles.as_ints()),
            (q, kv, lengths, table, None, None, out, lse, NOPE, 0.2, True, fixed),
            (q, kv, lengths[:, None].repeat(1, 2), table, None, None, out, lse, NOPE, 0.2, False),
            (q[:0], kv, lengths[:0], table[:0], None, None, out[:0], lse[:0], NOPE, 0.2, True, fixed),
        ],
    )


def test_merge_passes_opcheck_over_parts_with_their_lse_behind_them(make) -> None:
    packed = torch.randn(2, 6, NOPE + 2, device=make.device).bfloat16()
    lse = packed.view(FP32)[..., -1]
    parts = (packed[..., :NOPE], lse)
    contract.check_opcheck(
        torch.ops.tilelang_mla.merge.default,
        [
            (*parts, packed.new_zeros(6, NOPE), lse.new_zeros(6)),
            (*(x[:, :0] for x in parts), packed.new_zeros(0, NOPE), lse.new_zeros(0)),
        ],
    )  # fmt: skip


def test_prefill_passes_opcheck(make) -> None:
    q, k, v, *bounds = make.ragged(3)
    out, lse = q.new_zeros(27, HEADS, 128), q.new_zeros(HEADS, 27, dtype=FP32)
    plan = PrefillPlan(128, 64, 2).as_ints()
    none = (q[:0], k[:0], v[:0], *(x[:1] for x in bounds), out[:0], lse[:, :0])
    contract.check_opcheck(
        torch.ops.tilelang_mla.prefill.default,
        [
            (q, k, v, *bounds, out, lse, 27, 54, 0.2, True), (q, k, v, *bounds, out, None, 27, 54, 0.2, False, plan),
            (*none, 0, 0, 0.2, True, plan),
        ],
    )  # fmt: skip


# torch.compile


def backend_of(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_whole_and_once_for_two_sizes(make, function, inputs) -> None:
    contract.check_compiles(function, inputs(make, 3), inputs(make, 5, seed=1))


@pytest.mark.torch_compile
@every_public_function
def test_other_lengths_in_as_many_rows_compile_once(make, function, inputs) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend_of(make.device), dynamic=False)
    for seed in range(3):
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_same_bits(compiled(*inputs(make, 4, seed)), function(*inputs(make, 4, seed)))


@pytest.mark.torch_compile
@pytest.mark.parametrize("function", [decode, plan_and_decode])
def test_trap_pages_tables_and_tokens_of_other_numbers_compile_nothing_anew(make, function) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend_of(make.device))
    q, kv, lengths, table = make.decoding(3)
    looks = [
        (q, kv, lengths, table), (q, kv[:30].contiguous(), lengths, table % 30),
        (q, kv, lengths, torch.cat([table, table], 1)), tuple(make.decoding(7)),
    ]  # fmt: skip
    dims: tuple[tuple[int, ...], ...] = ((0,), (0,), (0,), (0, 1))
    if function is decode:
        # The tiles of a plan follow from the tokens.
        looks.append((torch.cat([q, q, q], 1), kv, lengths, table))
        dims = ((0, 1), *dims[1:])
    for i, look in enumerate(looks):
        for tensor, own in zip(look, dims, strict=True):
            for dim in own:
                torch._dynamo.mark_dynamic(tensor, dim)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert_same_bits(compiled(*look), function(*look))


@pytest.mark.torch_compile
def test_a_plan_may_be_an_argument_and_a_result_of_what_is_compiled(make) -> None:
    torch.compiler.reset()

    def run(plan: DecodePlan, q: Tensor, kv: Tensor, lengths: Tensor, table: Tensor) -> Any:
        return tilelang_mla.flash_mla_with_kvcache(q, kv, lengths, table, NOPE, 0.2, True, plan=plan)

    compiled = torch.compile(run, fullgraph=True, backend=backend_of(make.device))
    planned = torch.compile(plan_of, fullgraph=True, backend=backend_of(make.device))
    for seed in range(3):
        tensors = make.decoding(4, seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            plan = planned(tensors[2])
            assert type(plan) is DecodePlan
            assert plan.tiles == plan_of(tensors[2]).tiles
            assert_same_bits([*plan[1:]], [*plan_of(tensors[2])[1:]])
            assert_same_bits(compiled(plan, *tensors), run(plan, *tensors))


def tracer_of(device: torch.device) -> str:
    """Where graphs are looked at, not what is made of them, which opcheck does with every size a symbol too."""
    return "inductor" if device.type == "cuda" else "eager"


# Numbers that are symbols while torch.compile traces: floats, and sizes that only the device knows


def compiled(function: Callable[..., Any], device: torch.device, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **{"backend": backend_of(device)} | options)


def whole(run: Callable[..., Any], *given: Any) -> Any:
    """What a compiled call gives; one that breaks the graph, or compiles again where it must not, is a failure."""
    try:
        return run(*given)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise AssertionError(f"does not compile whole: {error}") from error


def scaled_prefill(scale: float, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    most = q.shape[0], k.shape[0]
    return tilelang_mla.flash_mla_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *most, scale, return_lse=True)


def scaled_decode(scale: float, q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    return tilelang_mla.flash_mla_with_kvcache(q, kv, seqlens_k, block_table, NOPE, scale, True, return_lse=True)


def scaled_drop_in(scale: float, q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    made = flash_mla.get_mla_metadata(seqlens_k, q.shape[1] * q.shape[2], 1)
    return flash_mla.flash_mla_with_kvcache(q, kv, block_table, seqlens_k, NOPE, *made, softmax_scale=scale)


# The drop-in's metadata is a plan, whose tracing with every size a symbol takes seconds and has a test of its own.
@pytest.mark.torch_compile
@pytest.mark.parametrize(
    ("function", "inputs", "dynamic"),
    [
        (scaled_prefill, Maker.ragged, None),
        (scaled_prefill, Maker.ragged, True),
        (scaled_decode, Maker.decoding, None),
        (scaled_decode, Maker.decoding, True),
        (scaled_drop_in, Maker.decoding, None),
    ],
)
def test_a_scale_of_another_value_compiles_and_has_the_bits_of_a_plain_call(make, function, inputs, dynamic) -> None:
    run = compiled(function, make.device, dynamic=dynamic, backend=tracer_of(make.device))
    # The second value is what makes a number a symbol; torch compiles anew for each, as for any op that takes a float.
    for scale in (0.1, 0.25, -0.3):
        assert_same_bits(whole(run, scale, *inputs(make, 3)), function(scale, *inputs(make, 3)))


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_with_every_size_a_symbol(make, function, inputs) -> None:
    run = compiled(function, make.device, dynamic=True, backend=tracer_of(make.device))
    # Of no size that another dimension has: torch takes equal sizes for one symbol.
    for sequences in (6, 9):
        with torch._dynamo.config.patch(error_on_recompile=sequences > 6):
            assert_same_bits(whole(run, *inputs(make, sequences)), function(*inputs(make, sequences)))


def prefill_of_some(rows: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    """Of as many queries and keys as the device counts, and of as many at the most."""
    chosen = rows.nonzero()[:, 0]
    some_q, some_k, some_v = q[chosen], k[chosen], v[chosen]
    bounds = torch.nn.functional.pad(rows.sum().to(torch.int32)[None], (1, 0))
    most = bounds.amax().item()
    return tilelang_mla.flash_mla_varlen_func(
        some_q, some_k, some_v, bounds, bounds, most, most, causal=True, return_lse=True
    )


def some_sequences(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(rows: Tensor, q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
        chosen = rows.nonzero()[:, 0]
        return function(q[chosen], kv, seqlens_k[chosen], block_table[chosen])

    return run


def plan_of_the_longest(q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor) -> Any:
    return plan_of(seqlens_k, max_seqlen_k=seqlens_k.amax().item() + 128)[1:]


UNKNOWN: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "prefill": (prefill_of_some, Maker.ragged),
    "decode": (some_sequences(decode), Maker.decoding),
    "plan and decode": (some_sequences(plan_and_decode), Maker.decoding),
    "decode in parts": (some_sequences(decode_in_parts), Maker.decoding),
    "drop-in": (some_sequences(partial(scaled_drop_in, 0.2)), Maker.decoding),
    "a plan of the longest": (some_sequences(plan_of_the_longest), Maker.decoding),
}


@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), UNKNOWN.values(), ids=UNKNOWN)
def test_sizes_that_only_the_device_knows_compile_whole(make, function, inputs) -> None:
    tensors = inputs(make, 4)
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        # Of torch 2.11's inductor, what makes the tensors here fails by itself ("Cannot convert symbols to int").
        run = compiled(function, make.device, backend="aot_eager")
        for few in (2, 3):
            rows = torch.arange(len(tensors[0]), device=make.device) % 4 < few
            with torch._dynamo.config.patch(error_on_recompile=few > 2):
                assert_same_bits(whole(run, rows, *tensors), function(rows, *tensors))


@pytest.mark.torch_compile
def test_the_first_call_of_a_process_may_be_inside_torch_compile(device: torch.device) -> None:
    run_alone(
        f"""
        import torch
        from tilelang_mla import flash_mla_with_kvcache
        q = torch.zeros(1, 1, 2, 96, device={device.type!r}).bfloat16()
        kv = torch.ones(2, 16, 1, 96, device={device.type!r}).bfloat16()
        table = torch.tensor([[1, 0]], dtype=torch.int32, device={device.type!r})
        def attend(q, kv, lengths, table):
            return flash_mla_with_kvcache(q, kv, lengths, table, 64)
        out = torch.compile(attend, fullgraph=True, backend={backend_of(device)!r})(q, kv, table[0, :1] + 19, table)
        torch.testing.assert_close(out, torch.ones_like(out))
        """
    )


# Imports


def test_importing_the_package_imports_neither_tilelang_nor_triton_and_initialises_no_gpu() -> None:
    run_alone(
        """
        import sys
        import torch
        before = set(sys.modules)
        import tilelang_mla
        for name in ("triton", "tilelang", "tvm"):
            assert name not in set(sys.modules) - before, name + " was imported"
        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        """
    )


def test_cpu_tensors_need_neither_tilelang_nor_triton() -> None:
    run_alone(
        """
        import sys
        sys.modules["triton"] = sys.modules["tilelang"] = None
        import torch
        from tilelang_mla import flash_mla_varlen_func, flash_mla_with_kvcache, plan_decode
        x = torch.ones(3, 2, 64).half()
        cu = torch.tensor([0, 3], dtype=torch.int32)
        assert (flash_mla_varlen_func(x, x, x, cu, cu, 3, 3, None, True) == 1).all()
        lengths = torch.tensor([3], dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        q, kv = torch.ones(1, 1, 2, 96).half(), torch.ones(1, 16, 1, 96).half()
        assert (flash_mla_with_kvcache(q, kv, lengths, table, 64, plan=plan_decode(lengths, 2)) == 1).all()
        """
    )


def test_importing_the_package_costs_little_beside_torch() -> None:
    """It takes the time of its own few files: not of SymPy's 400, which torch brings when it meets symbolic sizes."""
    run_alone(
        """
        import sys
        import torch
        import torch._subclasses, torch.utils._pytree, einops  # what the first definition of an op brings
        before = set(sys.modules)
        import tilelang_mla
        brought = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert brought - sys.stdlib_module_names <= {"kernel_reference", "tilelang_mla"}, brought
        """
    )


def test_the_version_is_that_of_the_metadata_or_says_that_there_is_none() -> None:
    contract.check_version(tilelang_mla, "tilelang-mla")


def test_all_names_that_are_exported_are_there() -> None:
    assert sorted(tilelang_mla.__all__) == tilelang_mla.__all__
    wanted = {"flash_mla_varlen_func", "flash_mla_with_kvcache", "get_splits", "plan_decode", "flash_mla"}
    assert wanted <= set(tilelang_mla.__all__)
    for module in (tilelang_mla, flash_mla):
        for name in module.__all__:
            assert getattr(module, name).__doc__


# What no call may do


@every_public_function
def test_trap_no_call_looks_at_what_is_in_device_memory(make, function, inputs) -> None:
    """Tensors without contents are all that a call needs: a copy to the host would have nothing to copy."""
    tensors = inputs(make, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            results = tensors_in(function(*[mode.from_tensor(tensor) for tensor in tensors]))
        except DataDependentOutputException as error:
            raise AssertionError(f"the host asks the device: {error}") from error
    for got, wanted in zip(results, tensors_in(function(*inputs(make, 4))), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@every_public_function
def test_public_functions_run_under_inference_mode(make, function, inputs) -> None:
    expected = function(*inputs(make, 4))
    with torch.inference_mode():
        for tensors in (inputs(make, 4), [tensor.clone() for tensor in inputs(make, 4)]):
            assert_same_bits(function(*tensors), expected)


@every_public_function
def test_the_same_call_gives_the_same_bits(make, function, inputs) -> None:
    contract.check_deterministic(lambda: function(*inputs(make, 4)))


def test_the_static_rule_asks_the_device_for_its_cores(device: torch.device) -> None:
    from tilelang_mla.waves import get_splits

    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    for given in ((1, 16, 1, 8192), (32, 16, 1, 8192)):
        for which in (device, str(device)):
            assert tilelang_mla.get_splits(*given, device=which) == get_splits(*given, cores=cores)


# What is made ready once and found again


class Recorder:
    """Stands in for the launches: keeps what they are made ready with, and runs the reference."""

    def __init__(self) -> None:
        self.prepared: list[tuple[Any, ...]] = []
        self.ran = 0

    def _prepare(self, attend: Callable[..., None], problem: Any, plan: Any, first: Any) -> Callable[..., None]:
        self.prepared.append((problem, plan))

        def run(*tensors: Any) -> None:
            self.ran += 1
            attend(problem, type(first)(*tensors))

        return run

    def prepare_prefill(self, *given: Any) -> Callable[..., None]:
        return self._prepare(reference.prefill, *given)

    def prepare_decode(self, *given: Any) -> Callable[..., None]:
        return self._prepare(reference.decode, *given)


def test_a_launch_that_is_found_again_still_refuses_an_output_in_its_input(tensors, monkeypatch) -> None:
    """As on a GPU: prepared with the launch, looked at in each call."""
    recorder = Recorder()
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    monkeypatch.setattr(ops, "_launch_module", lambda: recorder)
    prompt = tensors.prefill([(3, 7), (4, 4)], sizes=(128, 128))
    batch = tensors.decode([20, 3, 0], dim_nope=NOPE, dim_rope=ROPE, page=PAGE, heads=HEADS)
    for call, given, out in ((ops.prefill_now, prompt, 5), (ops.decode_now, batch, 6)):
        arguments = [*given.op_arguments()]
        q = arguments[0]
        apart = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
        arguments[out] = apart[..., : arguments[out].shape[-1]]
        call(*arguments)
        arguments[out] = q[..., : arguments[out].shape[-1]]
        with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got"):
            call(*arguments)
        given.check_inputs()
    # By the wrapper, before the reference that stands in for the kernels could.
    assert (len(recorder.prepared), recorder.ran) == (2, 2)


def test_launches_are_made_ready_once_with_tensors_numbers_and_the_plan_as_a_value(tensors, monkeypatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    monkeypatch.setattr(ops, "_launch_module", lambda: recorder)
    sizes = {"dim_nope": NOPE, "dim_rope": ROPE, "page": PAGE, "heads": HEADS, "seqlen_q": 2}
    for _ in range(3):
        batch = tensors.decode([20, 3, 0], **sizes)
        for plan in (None, batch.plan(), batch.plan(num_splits=2)):
            ops.decode_now(*batch.op_arguments(plan))
            batch.check()
    assert [given[-1] for given in recorder.prepared] == [None, batch.plan().tiles, batch.plan(num_splits=2).tiles]
    assert recorder.ran == 9
    for _ in range(2):
        prompt = tensors.prefill([(3, 7), (4, 4)])
        for plan in (None, PrefillPlan(64, 64, 2)):
            ops.prefill_now(*prompt.op_arguments(plan))
            prompt.check()
    assert [given[-1] for given in recorder.prepared[3:]] == [None, PrefillPlan(64, 64, 2)]
    assert recorder.ran == 13


def test_what_is_called_at_once_is_told_what_the_op_is_told(tensors, monkeypatch) -> None:
    """On a GPU, unless the caller's own output is written: the same implementation, without torch's dispatcher."""
    recorder, asked = Recorder(), []
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    monkeypatch.setattr(ops, "_launch_module", lambda: recorder)
    monkeypatch.setattr(straight, "launches", PreparedLaunches())
    monkeypatch.setattr(calls, "runs_now", lambda given: asked.append(len(given)) or True)
    batch = tensors.decode([20, 3, 0], dim_nope=NOPE, dim_rope=ROPE, page=PAGE, heads=HEADS)
    for plan in (None, batch.plan()):
        got = batch.run(out=None, plan=plan)
        batch.check_out(got.out, got.lse)
    assert (recorder.ran, asked) == (2, [6, 6])
    batch.run()
    # The op comes to the same on a GPU, and to the reference on a CPU.
    assert (recorder.ran, asked) == (2 + batch.q.is_cuda, [6, 6])
    with pytest.raises(ValueError, match=r"^kv must be "):
        flash_mla_with_kvcache(batch.q, batch.kv[..., :-32], *batch.given[2:])


@pytest.mark.parametrize("lse", [False, True])
def test_a_call_like_the_last_one_is_begun_at_once_and_refuses_the_same(tensors, monkeypatch, lse) -> None:
    recorder, asked = Recorder(), []
    monkeypatch.setattr(ops, "_launch_module", lambda: recorder)
    monkeypatch.setattr(straight, "launches", PreparedLaunches())
    monkeypatch.setattr(calls, "runs_now", lambda given: asked.append(1) or True)
    sizes = {"dim_nope": NOPE, "dim_rope": ROPE, "page": PAGE, "heads": HEADS}
    batches = [tensors.decode(lengths, **sizes) for lengths in ([20, 3, 0], [0, 20, 3])]
    plan = batches[0].plan()
    for batch in (*batches, *batches):
        for of_call in (None, plan):
            got = batch.run(out=None, plan=of_call, return_lse=lse)
            batch.check_out(*(got if lse else (got, None)))
    assert (recorder.ran, len(recorder.prepared), len(asked)) == (8, 2, 2)
    q, *others = batches[0].given
    with pytest.raises(ValueError, match=r"^q must be without gradient"):
        flash_mla_with_kvcache(q.clone().requires_grad_(), *others, return_lse=lse)
    with pytest.raises(ValueError, match=r"^seqlens_k\[0\] must be"), validate_values():
        flash_mla_with_kvcache(q, others[0], others[1] + 1000, *others[2:], return_lse=lse)
    for name, place, value in (("dim_nope", 4, float(NOPE)), ("causal", 6, 1), ("softmax_scale", 5, "1")):
        given = [q, *others]
        given[place] = value
        with pytest.raises(TypeError, match=f"^{name} must be"):
            flash_mla_with_kvcache(*given, return_lse=lse)
    assert recorder.ran == 8


# Offsets past 2^31 elements


@gpu
@pytest.mark.parametrize("dims", [{0: 0}, {1: 0}, {1: 1}, {3: 0}, {6: 0}], ids=str)
def test_trap_kernels_follow_dimensions_more_than_2_to_the_31_elements_apart(tensors, dims) -> None:
    """Sequences of q, pages, places of a page, rows of the block table, results."""
    batch = tensors.decode([70, 3, 33], page=16, heads=4)
    given = batch.op_arguments(batch.plan())

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        torch.ops.tilelang_mla.decode(*arguments)
        return arguments[6], arguments[7]

    check_far_apart(run, given, dims)


# What only a GPU shows


@gpu
@pytest.mark.torch_compile
def test_a_plan_may_be_given_to_prefill_in_plain_calls_in_a_graph_and_where_torch_compiles(make) -> None:
    contract.check_cuda_graph(prefill_by_a_plan, lambda seed: make.ragged(5, seed=seed))
    contract.check_compiles(prefill_by_a_plan, make.ragged(3), make.ragged(5, seed=1))


@gpu
@every_public_function
def test_trap_a_captured_graph_replays_the_bits_of_plain_calls(make, function, inputs) -> None:
    """For other lengths, pages and values in as many rows."""
    contract.check_cuda_graph(function, lambda seed: inputs(make, 5, seed=seed), replays=4)


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize("name", ["prefill", "decode", "plan and decode", "decode as engines do"])
def test_trap_graphs_that_torch_compile_captures_replay_the_bits_of_plain_calls(make, name) -> None:
    function, inputs = PUBLIC[name]
    contract.check_compiled_graphs(function, *(inputs(make, sequences, seed=sequences) for sequences in (5, 3, 4)))


@gpu
def test_trap_a_graph_with_a_plan_of_other_lengths_replays_right_results(tensors) -> None:
    """The plan is made once, outside the graph; lengths are refilled, up to the same maximum."""
    batch = tensors.decode([8192, 1, 700, 64], heads=16, page=64)
    lengths, plan = batch.seqlens_k, batch.plan()
    full = lengths.clone()
    lengths.copy_(tensors.integers(64, 64, 64, 64))
    run = partial(tilelang_mla.flash_mla_with_kvcache, *batch.given, out=batch.out.tensor, return_lse=True, plan=plan)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    lengths.copy_(full)
    poison_(batch.out.tensor)
    graph.replay()
    torch.cuda.synchronize()
    batch.check_out(*captured)


@gpu
def test_trap_a_graph_of_more_tiles_than_cores_counts_them_anew(tensors) -> None:
    batch = tensors.prefill([(700, 700), (1, 900), (300, 20)], heads=(64, 64))
    run = partial(tilelang_mla.flash_mla_varlen_func, *batch.given, out=batch.out.tensor, return_lse=True)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        poison_(batch.out.tensor)
        graph.replay()
        torch.cuda.synchronize()
        batch.check_out(*captured)


@gpu
@every_public_function
def test_trap_no_call_waits_for_the_gpu(make, function, inputs) -> None:
    tensors = inputs(make, 5)
    contract.check_no_host_sync(lambda: function(*tensors))


@gpu
def test_a_call_inside_another_stream_runs_there(make) -> None:
    given = make.decoding(6)
    wanted = decode_in_parts(*given)
    q = given[0]
    value = q.clone()
    q.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(value)
        result = decode_in_parts(*given)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(result, wanted)


@gpu
def test_tensors_on_a_device_that_is_not_the_current_one_are_taken_there(make) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for function, inputs in ((decode_in_parts, make.decoding), (prefill, make.ragged)):
        expected = function(*inputs(5))
        results = function(*[tensor.to("cuda:1") for tensor in inputs(5)])
        for one, other in zip(tensors_in(results), tensors_in(expected), strict=True):
            assert one.device == torch.device("cuda:1")
            assert_bitwise_equal(one.cpu(), other.cpu())


@gpu
def test_a_chain_on_one_stream_reads_what_the_call_before_it_wrote(make) -> None:
    """A launch that starts before the one ahead has ended must wait on the device, or it reads old values."""
    q, kv, lengths, table = make.decoding(9)
    one = torch.ones_like(kv)
    plan = plan_of(lengths)
    for step in range(100):
        kv.copy_(one * (step % 7))
        out = tilelang_mla.flash_mla_with_kvcache(q, kv, lengths, table, NOPE, 0.2, False, plan=plan)
        poison_(kv)
        assert float((out[lengths > 0].float() - step % 7).abs().max()) < 0.1


@gpu
def test_many_sizes_do_not_grow_the_table_of_launches_past_its_bound(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "launches", PreparedLaunches(8))
    for sequences in range(1, 12):
        decode(*make.decoding(sequences))
        assert len(ops.launches) <= 8
