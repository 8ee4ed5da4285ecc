"""Does the package do what engines rely on: torch.compile, CUDA graphs, streams, large batches, equal bits?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import blocksparse_attn
from blocksparse_attn import AttentionPlan, BlockLayout, LocalStridedBlockSparseAttn, SelectedPlan, ops
from blocksparse_attn.plan import DeviceLimits
from kernel_reference import blocks
from kernel_reference.attention import attention
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.models import PHI3_SMALL
from kernel_reference.testing import contract
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal, assert_same_bits, poison_, tensors_in
from kernel_reference.testing.memory import check_far_apart, much_memory, peak_beyond

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
gpu = pytest.mark.gpu
needs_kernels = pytest.mark.skipif(find_spec("blocksparse_attn.launch") is None, reason="the kernels are not there yet")
HEADS, HEADS_KV, D, DV, PAGE, BLOCK = 4, 2, 32, 48, 16, 16
COLUMNS, POOL = 4, 40
LONGEST = COLUMNS * PAGE


class Maker:
    """Makes the inputs of the public functions from a number of sequences and a seed: lengths follow from both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layout = BlockLayout.local_strided(HEADS, LONGEST, 1, 3, BLOCK, device=device)
        self.merged = BlockLayout.local_strided(HEADS, LONGEST, 1, 3, BLOCK, device=device, q_block_size=32)
        self.module = LocalStridedBlockSparseAttn(HEADS, LONGEST, 1, 3, BLOCK, device=device)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def start(self, seed: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    def bounds(self, sequences: int, rows: int) -> list[int]:
        """cu_seqlens of sequences with these many tokens in all, or a few less, none above the longest."""
        lengths = torch.randint(min(LONGEST, rows // sequences) + 1, (sequences,), generator=self.host)
        return [0, *lengths.cumsum(0).tolist()]

    def ragged(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, cu_seqlens_q, cu_seqlens_k."""
        self.start(seed)
        rows = 11 * sequences
        q, k, v = self.normal(rows, HEADS, D), self.normal(3 * rows, HEADS_KV, D), self.normal(3 * rows, HEADS_KV, DV)
        new = self.bounds(sequences, rows)
        context = torch.randint(20, (sequences,), generator=self.host).tolist()
        totals = [end - begin + ctx for (begin, end), ctx in zip(pairwise(new), context, strict=True)]
        return [q, k, v, self.integers(new), self.integers([0, *accumulate(totals)])]

    def with_lists(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """The same with cu_seqlens the other way round, and crow and col."""
        q, k, v, cu_seqlens_q, cu_seqlens_k = self.ragged(sequences, seed)
        return [q, k, v, cu_seqlens_k, cu_seqlens_q, self.layout.crow, self.layout.col]

    def paged(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, block_table, cu_seqlens_q, seqlens_k, sinks, out."""
        self.start(seed)
        q = self.normal(11 * sequences, HEADS, D)
        caches = [self.normal(POOL, PAGE, HEADS_KV, D) for _ in range(2)]
        table = torch.randint(POOL, (sequences, COLUMNS), generator=self.host).tolist()
        new = self.bounds(sequences, q.shape[0])
        totals = [
            end - begin + int(torch.randint(LONGEST - end + begin + 1, (), generator=self.host))
            for begin, end in pairwise(new)
        ]
        sinks = torch.rand(HEADS, generator=self.generator, device=self.device)
        integers = [self.integers(x) for x in (table, new, totals)]
        return [q, *caches, *integers, sinks, torch.zeros_like(q)]

    def padded(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, q_starts, k_starts, k_ends."""
        self.start(seed)
        q, k, v = (self.normal(sequences, n, heads, D) for n, heads in ((9, HEADS), (33, HEADS_KV), (33, HEADS_KV)))
        bounds = torch.randint(9, (3, sequences), generator=self.host)
        bounds[2] += 25
        return [q, k, v, *[self.integers(own) for own in bounds.tolist()]]

    def decoding(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, cu_seqlens_k."""
        self.start(seed)
        lengths = (1 + torch.randint(LONGEST, (sequences,), generator=self.host)).tolist()
        q = self.normal(sequences, HEADS, D)
        k, v = (self.normal(LONGEST * sequences, HEADS_KV, D) for _ in range(2))
        return [q, k, v, self.integers([0, *accumulate(lengths)])]


@pytest.fixture
def make(device: torch.device) -> Maker:
    return Maker(device)


# All calls of a maker share layouts on the device. max_seqlen_q follows from a shape, so that it is a symbol to
# torch.compile where that is one.


def attend(make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.layout, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=min(q.shape[0], LONGEST), return_lse=True,
    )  # fmt: skip


def attend_in_parts(make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.merged, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=min(q.shape[0], LONGEST), return_lse=True, num_splits=3, softmax_scale=0.4, window=(20, 0),
        softcap=4.0,
    )  # fmt: skip


def attend_to_pages(
    make: Maker, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    sinks: Tensor, out: Tensor,
) -> Any:  # fmt: skip
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.layout, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, sinks=sinks,
        out=out, max_seqlen_q=min(q.shape[0], LONGEST),
    )  # fmt: skip


def attend_padded(
    make: Maker, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, k_ends: Tensor
) -> Any:
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.layout, q_starts=q_starts, k_starts=k_starts, k_ends=k_ends, return_lse=True
    )


def attend_as_engines_do(
    make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, crow: Tensor, col: Tensor
) -> Any:
    return blocksparse_attn.blocksparse_flash_attn_varlen_fwd(
        q, k, v, cu_seqlens_k, cu_seqlens_q, 0.2, (crow, col), block_size=BLOCK, max_seqlen=LONGEST
    )


def decode_as_engines_do(make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor) -> Any:
    return blocksparse_attn.blocksparse_flash_attn_varlen_fwd(q, k, v, cu_seqlens_k, None, None, make.layout)


def decode_by_the_module(make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor) -> Any:
    return make.module(q, k, v, cu_seqlens_k)


def attend_by_a_plan(make: Maker, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.layout, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=min(q.shape[0], LONGEST), return_lse=True, plan=AttentionPlan(16, 16, 2, 4, 1),
    )  # fmt: skip


def select_by_a_plan(
    make: Maker, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor,
    *_: Tensor,
) -> Any:  # fmt: skip
    # The first two blocks of each sequence.
    indices = torch.arange(2, dtype=torch.int32, device=q.device).expand(q.shape[0], HEADS_KV, 2)
    return blocksparse_attn.selected_attention(
        q, k, v, indices, block_size=BLOCK, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k,
        return_lse=True, plan=SelectedPlan(16, 16, 2, 4, 1),
    )  # fmt: skip


PUBLIC: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "ragged": (attend, Maker.ragged),
    "ragged in parts": (attend_in_parts, Maker.ragged),
    "paged, out=": (attend_to_pages, Maker.paged),
    "padded": (attend_padded, Maker.padded),
    "as engines do": (attend_as_engines_do, Maker.with_lists),
    "as engines decode": (decode_as_engines_do, Maker.decoding),
    "the module": (decode_by_the_module, Maker.decoding),
}
BY_A_PLAN = {"ragged": (attend_by_a_plan, Maker.ragged), "selected": (select_by_a_plan, Maker.paged)}
every_public_function = pytest.mark.parametrize(("function", "inputs"), PUBLIC.values(), ids=PUBLIC)


# The op


def cases_of(make: Maker) -> list[tuple[Any, ...]]:
    q, k, v, cu_seqlens_q, cu_seqlens_k = make.ragged(3)
    lists = (make.layout.crow, make.layout.col)
    out, lse = q.new_zeros(33, HEADS, DV), q.new_zeros(HEADS, 33, dtype=FP32)
    plan = AttentionPlan(16, 16, 2, 4, 1).as_ints()
    ragged = (q, k, v, *lists, cu_seqlens_q, cu_seqlens_k, *(None,) * 7)
    none = (q[:0], k[:0], v[:0], *lists, cu_seqlens_q[:1], cu_seqlens_k[:1], *(None,) * 7)
    q, k, v, table, cu_seqlens_q, seqlens_k, sinks, own = make.paged(3)
    paged = (q, k, v, *lists, cu_seqlens_q, None, table, seqlens_k, *(None,) * 4, sinks)
    q, k, v, q_starts, k_starts, k_ends = make.padded(3)
    padded = (q, k, v, *lists, *(None,) * 4, q_starts, None, k_starts, k_ends, None)
    sizes = (BLOCK, BLOCK, "NHD", 0.2)
    return [
        (*ragged, out, lse, 33, *sizes, -1, 0, 0.0, 0),
        (*ragged, out, None, 33, *sizes, 25, 0, 4.0, 0, False, plan),
        (*none, out[:0], lse[:, :0], 0, *sizes, -1, 0, 0.0, 2),
        (*paged, own, lse, 33, *sizes, 25, 0, 0.0, 0),
        (*padded, torch.zeros_like(q), q.new_zeros(3, HEADS, 9, dtype=FP32), 9, *sizes, -1, 0, 0.0, 0),
    ]


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("blocksparse_attn::") for name in names if name.startswith("blocksparse_attn::"))


def test_there_are_ops_of_layouts_of_lists_of_their_gradients_of_choices_and_of_ranks() -> None:
    # Which has the ops of ranks, and is imported by who wants them.
    import_module("blocksparse_attn.parallel")
    of_layouts = ["attend", "attention", "attention_backward"]
    of_lists = ["selected", "selected_attention", "selected_attention_backward"]
    of_choices, of_ranks = ["choose", "pack"], ["merge_parts", "own_lists", "pack_parts"]
    assert sorted(op_names()) == sorted(of_layouts + of_lists + of_choices + of_ranks)


def test_the_op_passes_opcheck(make) -> None:
    contract.check_opcheck(torch.ops.blocksparse_attn.attend.default, cases_of(make))


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_without_graph_breaks_and_once_for_two_sizes(make, function, inputs) -> None:
    contract.check_compiles(partial(function, make), inputs(make, 3), inputs(make, 5, seed=1))


def compiled(make: Maker, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    backend = "inductor" if make.device.type == "cuda" else "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_where_every_size_is_a_symbol(make, function, inputs) -> None:
    run = compiled(make, partial(function, make), dynamic=True)
    for sequences in (6, 9, 13):
        given = inputs(make, sequences, seed=sequences)
        expected = function(make, *[x.clone() for x in given])
        # Sizes that are the same by chance are no one size.
        symbols = torch.fx.experimental._config.patch(use_duck_shape=False)
        with symbols, torch._dynamo.config.patch(error_on_recompile=sequences != 6):
            assert_same_bits(run(*given), expected)


def scaled(make: Maker, scale: float, softcap: float, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Any:
    options = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1], "max_seqlen_q": LONGEST}
    return blocksparse_attn.blocksparse_attention(
        q, k, v, make.layout, **options, softmax_scale=scale, softcap=softcap, return_lse=True
    )


def scaled_drop_in(make: Maker, scale: float, _: float, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Any:
    return blocksparse_attn.blocksparse_flash_attn_varlen_fwd(q, k, v, *cu_seqlens[::-1], scale, make.layout)


def scaled_module(make: Maker, scale: float, _: float, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Any:
    return make.module(q, k, v, *cu_seqlens[::-1], scale)


@pytest.mark.torch_compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_any_float_argument_compiles_without_graph_breaks(make, dynamic) -> None:
    """From the second value on torch takes a float for a symbol, and compiles anew for what an op does with it."""

    def all_of_them(*given: Any) -> Any:
        # In one graph, which costs little more than one of them.
        return [function(make, *given) for function in (scaled, scaled_drop_in, scaled_module)]

    run = compiled(make, all_of_them, dynamic=dynamic)
    given = make.ragged(3)
    for scale, softcap in ((0.2, 1.0), (0.25, 2.0), (0.0, 2.5), (0.125, 0.0)):
        assert_same_bits(run(scale, softcap, *given), all_of_them(scale, softcap, *given))


def some_tokens(make: Maker, wanted: Tensor, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Any:
    """Of as many keys as queries, and as many as only the device knows."""
    (chosen,) = wanted.nonzero(as_tuple=True)
    return attend(make, q[chosen], k[chosen], v[chosen], *cu_seqlens)


def some_tokens_as_engines_do(
    make: Maker, wanted: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Any:
    (chosen,) = wanted.nonzero(as_tuple=True)
    layout = make.layout
    given = (q[chosen], k[chosen], v[chosen], cu_seqlens_k)
    return blocksparse_attn.blocksparse_flash_attn_varlen_fwd(
        *given, cu_seqlens_q, 0.2, layout
    ), blocksparse_attn.blocksparse_flash_attn_varlen_fwd(*given, None, 0.2, layout)


def some_sequences_decode(
    make: Maker, wanted: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, _: Tensor, seqlens: Tensor, *__: Tensor
) -> Any:
    (chosen,) = wanted.nonzero(as_tuple=True)
    cu_seqlens_q = torch.arange(chosen.shape[0] + 1, device=q.device)
    return blocksparse_attn.blocksparse_attention(
        q[chosen], k, v, make.layout, block_table=table[chosen], cu_seqlens_q=cu_seqlens_q,
        seqlens_k=seqlens[chosen].clamp(min=1), max_seqlen_q=1, return_lse=True,
    )  # fmt: skip


def some_sequences_decode_as_engines_do(make: Maker, wanted: Tensor, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Any:
    (chosen,) = wanted.nonzero(as_tuple=True)
    cu_seqlens_k = torch.arange(chosen.shape[0] + 1, device=q.device)
    return blocksparse_attn.blocksparse_flash_attn_varlen_fwd(q[chosen], k, v, cu_seqlens_k, None, None, make.layout)


def some_padded_sequences(make: Maker, wanted: Tensor, *given: Tensor) -> Any:
    (chosen,) = wanted.nonzero(as_tuple=True)
    return attend_padded(make, *[x[chosen] for x in given])


def most_queries_by_the_device(make: Maker, wanted: Tensor, *given: Tensor) -> Any:
    q, k, v, cu_seqlens_q, cu_seqlens_k = given
    options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": int(wanted.sum())}
    return blocksparse_attn.blocksparse_attention(q, k, v, make.layout, **options)


UNKNOWN: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "ragged": (some_tokens, Maker.ragged),
    "as engines do": (some_tokens_as_engines_do, Maker.ragged),
    "paged decoding": (some_sequences_decode, Maker.paged),
    "as engines decode": (some_sequences_decode_as_engines_do, Maker.decoding),
    "padded": (some_padded_sequences, Maker.padded),
    "most queries": (most_queries_by_the_device, Maker.ragged),
}


@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), UNKNOWN.values(), ids=UNKNOWN)
def test_data_dependent_sizes_compile_without_graph_breaks_and_once(make, function, inputs) -> None:
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    run = compiled(make, partial(function, make))
    given = inputs(make, 4)
    paged = len(given) == 8
    rows = 4 if paged else given[0].shape[0]
    for count in (rows, 1, 3):
        tensors = list(given)
        if inputs is Maker.ragged and function is not most_queries_by_the_device:
            tensors[3:] = [make.integers([0, count])] * 2
        elif function is most_queries_by_the_device:
            tensors[3:] = [make.integers([0, count]), make.integers([0, count + 7])]
        wanted = torch.arange(rows, device=make.device) < count
        with torch._dynamo.config.patch(config | {"error_on_recompile": count != rows}):
            assert_same_bits(run(wanted, *tensors), function(make, wanted, *tensors))


@pytest.mark.torch_compile
def test_other_lengths_in_as_many_rows_compile_once(make) -> None:
    backend = "inductor" if make.device.type == "cuda" else "aot_eager"
    compiled = torch.compile(partial(attend, make), fullgraph=True, backend=backend, dynamic=False)
    for seed in range(3):
        tensors = make.ragged(4, seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_same_bits(compiled(*tensors), attend(make, *tensors))


@pytest.mark.torch_compile
def test_a_layout_may_be_an_argument_of_what_is_compiled(make) -> None:
    """One of the same sizes with other lists compiles nothing anew."""
    backend = "inductor" if make.device.type == "cuda" else "aot_eager"

    def run(layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
        options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": min(q.shape[0], LONGEST)}
        return blocksparse_attn.blocksparse_attention(q, k, v, layout, **options)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    tensors = make.ragged(4)
    masks = [make.layout.to_mask(), make.layout.to_mask()]
    masks[1][:, 2], masks[1][:, 3] = masks[0][:, 3], masks[0][:, 2]
    for i, mask in enumerate(masks):
        made = BlockLayout.from_mask(mask, BLOCK, BLOCK)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert_same_bits(compiled(made, *tensors), run(made, *tensors))


@pytest.mark.torch_compile
def test_the_first_call_of_a_process_may_be_inside_torch_compile(device: torch.device) -> None:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    run_alone(
        f"""
        import torch
        from blocksparse_attn import BlockLayout, blocksparse_flash_attn_varlen_fwd
        device = {device.type!r}
        layout = BlockLayout.sliding(64, 1, 16, device)
        q = torch.zeros(1, 2, 16, device=device)
        k = torch.ones(20, 1, 16, device=device)
        v = torch.arange(20.0, device=device)[:, None, None].expand(20, 1, 16)
        cu = torch.tensor([0, 20], device=device)
        def attend(q, k, v, cu):
            return blocksparse_flash_attn_varlen_fwd(q, k, v, cu, None, 0.0, layout)
        out = torch.compile(attend, fullgraph=True, backend={backend!r})(q, k, v, cu)
        torch.testing.assert_close(out, torch.full_like(out, 17.5))
        """
    )


def test_importing_the_package_imports_no_triton_nor_matplotlib_and_initialises_no_gpu() -> None:
    run_alone(
        """
        import sys, blocksparse_attn, torch
        for name in ("triton", "matplotlib"):
            assert name not in sys.modules, name + " was imported"
        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        """
    )


def test_cpu_tensors_need_no_triton() -> None:
    run_alone(
        """
        import sys
        sys.modules["triton"] = None
        import torch
        from blocksparse_attn import LocalStridedBlockSparseAttn
        x = torch.ones(3, 2, 16)
        out = LocalStridedBlockSparseAttn(2, 32, 1, 2, 16, device="cpu")(x, x, x, torch.tensor([0, 3]))
        assert (out == 1).all()
        """
    )


def test_the_version_is_that_of_the_metadata_or_says_that_there_is_none() -> None:
    contract.check_version(blocksparse_attn, "blocksparse-attn")


def test_every_exported_name_exists() -> None:
    assert sorted(blocksparse_attn.__all__) == blocksparse_attn.__all__
    wanted = {"BlockLayout", "LocalStridedBlockSparseAttn", "blocksparse_attention"}
    assert wanted | {"blocksparse_flash_attn_varlen_fwd"} <= set(blocksparse_attn.__all__)
    for name in blocksparse_attn.__all__:
        assert getattr(blocksparse_attn, name).__doc__


@every_public_function
def test_trap_no_call_reads_device_memory(make, function, inputs) -> None:
    """A call needs no contents of tensors: a copy to the host would have nothing to copy."""
    tensors = inputs(make, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            results = tensors_in(function(make, *[mode.from_tensor(tensor) for tensor in tensors]))
        except DataDependentOutputException as error:
            pytest.fail(f"the call copies to the host: {error}")
    for got, wanted in zip(results, tensors_in(function(make, *inputs(make, 4))), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@every_public_function
def test_public_functions_run_under_inference_mode(make, function, inputs) -> None:
    expected = function(make, *inputs(make, 4))
    with torch.inference_mode():
        for tensors in (inputs(make, 4), [tensor.clone() for tensor in inputs(make, 4)]):
            assert_same_bits(function(make, *tensors), expected)


@every_public_function
def test_the_same_call_gives_the_same_bits(make, function, inputs) -> None:
    contract.check_deterministic(lambda: function(make, *inputs(make, 4)))


# A sequence's bits do not depend on its neighbours, where the number of splits is given


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"window": (50, 0), "dtype": FP32}, {"one_layout": True}], ids=str)
def test_given_splits_are_batch_invariant(tensors, options, splits) -> None:
    batch = tensors.batch([(70, 5), (0, 1), (300, 1), (20, 90), (5, 0), (129, 33)], sinks=True, kind="paged", **options)
    whole = batch.run(out=None, num_splits=splits)
    for group in [[i] for i in range(6)] + [[2, 0], [3, 5, 1], [5, 4, 3, 2, 1, 0]]:
        rows = [torch.arange(batch.begins[i], batch.begins[i + 1], device=batch.device) for i in group]
        which = torch.tensor(group, device=batch.device)
        # One row behind them belongs to no sequence.
        chosen = torch.cat([*rows, torch.zeros(1, dtype=torch.int64, device=batch.device)])
        lengths = [len(own) for own in rows]
        options_of_call = {
            **batch.options, "cu_seqlens_q": tensors.integers(0, *accumulate(lengths)), "max_seqlen_q": max(lengths),
            "seqlens_k": batch.positional["seqlens_k"][which], "block_table": batch.positional["block_table"][which],
        }  # fmt: skip
        got = blocksparse_attn.blocksparse_attention(
            batch.q[chosen], batch.k, batch.v, batch.layout, **options_of_call, return_lse=True, num_splits=splits
        )
        expected = torch.cat(rows)
        assert_bitwise_equal(got.out[:-1], whole.out[expected], what=f"sequences {group}")
        assert_bitwise_equal(got.lse[:, :-1], whole.lse[:, expected], what=f"lse of sequences {group}")


# From a public function to the kernels: without a GPU, CPU tensors take that way too


@pytest.fixture
def by_kernels(interpreted: Callable[..., Any]) -> Iterator[None]:
    """The op runs the kernels on CPU tensors, interpreted, with the plan of a device with one SM."""
    from blocksparse_attn import launch

    with interpreted("attend", ops.attend_now, ops, launch, cores=1):
        yield


@needs_kernels
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("kind", ["ragged", "paged", "padded"])
def test_public_functions_reach_the_kernels_with_every_argument_in_its_place(tensors, kind) -> None:
    for splits in (None, 2):
        batch = tensors.batch(
            [(20, 4), (5, 1), (0, 3)], heads=(2, 1), head_dim=16, head_dim_v=32, rows_after=1, kind=kind, sinks=True,
            window=(13, 4), softcap=3.0, softmax_scale=0.3, blocks=(32, 16), side="both",
        )  # fmt: skip
        batch.run(num_splits=splits)
        batch.check()


@needs_kernels
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(("new", "most"), [(1, 98), (64, 98)], ids=["decode, split", "prefill"])
def test_a_call_that_was_prepared_costs_the_host_a_few_calls_of_functions(tensors, monkeypatch, new, most) -> None:
    """Python's and C's; on this path they take 0.15 us each, and a launch 4 us."""
    from blocksparse_attn import launch

    init = launch.Launch.__init__
    started = {"__getitem__": lambda self, grid: lambda *given, **options: started_once}
    kernel = type("Kernel", (), started)()
    started_once = type("Compiled", (), {"__getitem__": lambda self, grid: lambda *given: None})()
    monkeypatch.setattr(
        launch.Launch, "__init__", lambda self, _, *rest, **options: init(self, kernel, *rest, **options)
    )
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(132, 232448, hopper=new > 1))
    monkeypatch.setattr(blocksparse_attn.api, "runs_now", lambda tensor: True)
    mask = torch.ones(1, 64, 64, dtype=torch.bool)
    batch = tensors.batch(
        [(4000, new)], heads=(8, 8), head_dim=16, mask=mask, blocks=(64, 64), kind="paged", page=64, lse=False
    )
    calls = 0

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with torch.inference_mode(), validate_values(False):
        batch.run(out=None)
        sys.setprofile(count)
        try:
            batch.run(out=None)
        finally:
            sys.setprofile(None)
    assert calls <= most


@needs_kernels
@pytest.mark.usefixtures("by_kernels")
def test_a_call_that_looks_like_the_last_is_begun_at_once_and_no_other(tensors, monkeypatch) -> None:
    from blocksparse_attn import api, straight

    looked_at = []
    attended = straight.attended
    monkeypatch.setattr(api, "runs_now", lambda inputs: True)
    monkeypatch.setattr(straight, "attended", lambda *given: looked_at.append(1) or attended(*given))
    batch = tensors.batch([(4, 1), (17, 1)], heads=(2, 1), head_dim=16, blocks=(16, 16), kind="ragged")
    others = [{"softcap": 3.0}, {"window": (7, 0)}, {"softmax_scale": 0.5}, {"max_seqlen_q": 2}]
    with validate_values(False):
        for options in ({}, *others):
            with torch.no_grad():
                first, again = (batch.run(out=None, **options) for _ in range(2))
            assert_bitwise_equal(again[0], first[0])
            assert again[0].data_ptr() != first[0].data_ptr()
        batch.check_out(again.out, again.lse)
        assert len(looked_at) == 1 + len(others)
        counts: tuple[Any, ...] = (True, 1.0, [1])
        for wrong in (*({"max_seqlen_q": it} for it in counts), {"return_lse": 1}, {"page_layout": ["NHD"]}):
            with torch.no_grad(), pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} "):
                batch.run(out=None, **wrong)
        batch.q.requires_grad_()
        for mode in (True, False, True, False):
            with torch.set_grad_enabled(mode):
                assert batch.run(out=None)[0].requires_grad == mode


@needs_kernels
@pytest.mark.usefixtures("by_kernels")
def test_an_output_that_overlaps_an_input_is_refused_in_each_call_of_a_prepared_launch(tensors) -> None:
    """A kernel would read what another program has written already. Slices that share no element are taken."""
    batch = tensors.batch([(0, 20), (0, 9)], heads=(2, 1), head_dim=16, lse=False)
    fused = torch.cat([batch.q, poison_(torch.empty_like(batch.q))], dim=1)
    batch.q, own = fused[:, :2], fused[:, 2:]
    for _ in range(2):
        batch.run(out=own)
        batch.check_out(own)
        kept = fused.clone()
        with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got "):
            batch.run(out=fused[:, 1:3])
        assert_bitwise_equal(fused, kept)


@needs_kernels
@pytest.mark.usefixtures("by_kernels")
def test_the_drop_in_and_the_module_reach_the_kernels_too(tensors) -> None:
    mask = blocks.local_strided(2, 32, 1, 2, 16)
    batch = tensors.batch([(20, 4), (5, 1), (0, 3)], heads=(2, 1), head_dim=16, mask=mask, lse=False)
    cu_seqlens_q, cu_seqlens_k = batch.positional["cu_seqlens_q"], batch.positional["cu_seqlens_k"]
    given = (batch.q, batch.k, batch.v, cu_seqlens_k, cu_seqlens_q, None)
    pair = (batch.layout.crow, batch.layout.col)
    batch.check_out(blocksparse_attn.blocksparse_flash_attn_varlen_fwd(*given, pair, block_size=16))
    batch.check_out(LocalStridedBlockSparseAttn(2, 32, 1, 2, 16, device=tensors.device)(*given))


# Offsets past 2^31 elements


# What is stretched: the kind of batch, the argument, in the order of the op, and its dimension.
FAR = {
    "rows": ("ragged", {0: 0, 1: 0, 2: 0}), "heads": ("ragged", {0: 1, 1: 1, 2: 1}),
    "elements": ("ragged", {0: 2, 1: 2, 2: 2}), "lists": ("ragged", {3: 0, 4: 0}),
    "results' rows": ("ragged", {14: 0, 15: 1}), "results' heads": ("ragged", {14: 1, 15: 0}),
    "results' elements": ("ragged", {14: 2}),
    "pages": ("paged", {1: 0, 2: 0}), "places": ("paged", {1: 1, 2: 1}), "kv heads": ("paged", {1: 2, 2: 2}),
    "block table": ("paged", {7: 0}), "sequences": ("padded", {0: 0, 1: 0, 2: 0, 14: 0, 15: 0}),
    "padded rows": ("padded", {0: 1, 1: 1, 2: 1, 14: 1, 15: 2}),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("far", FAR)
def test_trap_kernels_follow_dimensions_more_than_2_to_the_31_elements_apart(tensors, far) -> None:
    """Three or more of each, so that strides fit in 32 bits and products of them do not."""
    kind, dims = FAR[far]
    heads = (3, 3) if "heads" in far or far == "lists" else (1, 1)
    lengths = [(17, 3)] if kind == "ragged" else [(17, 3), (2, 1), (3, 1)]
    batch = tensors.batch(lengths, heads=heads, head_dim=16, page=8, kind=kind)
    # Splits have a launch of their own for the results; test_guards.py has it of ragged batches.
    for splits in (1, 2) if kind == "padded" and 14 in dims else (1,):
        plan = AttentionPlan(16, 16, splits, 4, 1)

        def run(*given: Any, plan: AttentionPlan = plan) -> tuple[()]:
            batch.prepare(plan, given)(*given)
            return ()

        check_far_apart(run, batch.tensors, dims)


@gpu
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@much_memory()
def test_trap_packed_tokens_of_more_than_2_to_the_31_elements_are_all_computed(make, tensors, fused: bool) -> None:
    """524,288 tokens of 32 heads of 128 elements, or 350,000 with q, k and v in one tensor."""
    model = PHI3_SMALL
    heads, heads_kv, size = model.num_heads_q, model.num_heads_kv, model.head_dim
    rows = 360_000 if fused else 530_000
    whole = torch.empty(rows, heads + 2 * heads_kv, size, dtype=BF16, device=make.device).normal_()
    q, k, v = whole.split([heads, heads_kv, heads_kv], dim=1)
    if not fused:
        q = q.contiguous()
    assert (rows - 1) * q.stride(0) > 2**31
    layout = BlockLayout.local_strided(heads, rows, 2, 512, model.block_size, device=make.device)
    bounds = [0, 100, rows - 4000, rows]
    cu = make.integers(bounds)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": rows}
    out = blocksparse_attn.blocksparse_attention(q, k, v, layout, **options)
    for row in (99, 100, 300, rows - 4001, rows - 2000, rows - 1):
        begin = max(bound for bound in bounds if bound <= row)
        last = (row - begin) // model.block_size
        own = slice(begin, row + 1)

        def visible(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor, last: int = last) -> Tensor:
            block = key // model.block_size
            return (last - block < 2) | ((block + head * 16 + 1) % 512 == 0)

        wanted, plain = (
            attention(q[row : row + 1], k[own], v[own], causal=True, mask=visible, compute_dtype=dtype).out
            for dtype in (torch.float64, FP32)
        )
        tensors.assert_rounded(out[row : row + 1], tensors.Wanted(wanted, plain.to(BF16)), what=f"row {row}")


# What only a GPU shows


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), BY_A_PLAN.values(), ids=BY_A_PLAN)
def test_a_plan_may_be_given_in_plain_calls_in_a_graph_and_where_torch_compiles(make, function, inputs) -> None:
    contract.check_cuda_graph(partial(function, make), lambda seed: inputs(make, 5, seed=seed))
    contract.check_compiles(partial(function, make), inputs(make, 3), inputs(make, 5, seed=1))


@gpu
@every_public_function
def test_trap_a_captured_graph_replays_the_bits_of_plain_calls(make, function, inputs) -> None:
    """For other lengths, pages and values in as many rows."""
    contract.check_cuda_graph(partial(function, make), lambda seed: inputs(make, 5, seed=seed), replays=4)


def attend_in_tiles(make: Maker, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Any:
    """Which programs of sm_90 take as they come free, from a counter."""
    return blocksparse_attn.blocksparse_attention(
        q, k, v, layout, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=512, return_lse=True
    )


def in_tiles(make: Maker, sequences: int) -> list[Tensor]:
    make.start(sequences)
    q, k, v = (make.normal(300 * sequences, heads, 128) for heads in (4, 2, 2))
    return [q, k, v, make.integers([300 * i for i in range(sequences + 1)])]


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize("way", ["tiles", "parts", "selected"])
def test_graphs_of_torch_compile_give_the_bits_of_plain_calls(make, way) -> None:
    """What a call keeps must not lie in their memory."""
    if way == "tiles":
        layout = BlockLayout.local_strided(4, 512, 2, 2, 64, device=make.device)
        contract.check_compiled_graphs(partial(attend_in_tiles, make, layout), in_tiles(make, 2), in_tiles(make, 3))
    else:
        function, inputs = (attend_in_parts, Maker.ragged) if way == "parts" else BY_A_PLAN["selected"]
        contract.check_compiled_graphs(partial(function, make), inputs(make, 3), inputs(make, 5))


@gpu
def test_a_captured_graph_of_a_model_decodes_other_lengths(make) -> None:
    model, sequences, longest = PHI3_SMALL, 32, 8192
    heads, heads_kv, size = model.num_heads_q, model.num_heads_kv, model.head_dim
    layout = BlockLayout.local_strided(
        heads, longest, model.local_blocks, model.vert_stride, model.block_size, device=make.device
    )

    def inputs(seed: int) -> list[Tensor]:
        make.start(seed)
        table = torch.randint(2000, (sequences, longest // 16), generator=make.host)
        totals = 1 + torch.randint(longest, (sequences,), generator=make.host)
        caches = [make.normal(2000, 16, heads_kv, size) for _ in range(2)]
        return [
            make.normal(sequences, heads, size), *caches, table.int().to(make.device), totals.int().to(make.device)
        ]  # fmt: skip

    cu = torch.arange(sequences + 1, dtype=torch.int32, device=make.device)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seqlens: Tensor) -> Any:
        return blocksparse_attn.blocksparse_attention(
            q, k, v, layout, block_table=table, cu_seqlens_q=cu, seqlens_k=seqlens, max_seqlen_q=1, return_lse=True
        )

    contract.check_cuda_graph(run, inputs, replays=4)


@gpu
@every_public_function
def test_trap_no_call_synchronises(make, function, inputs) -> None:
    tensors = inputs(make, 5)
    contract.check_no_host_sync(lambda: function(make, *tensors))


@gpu
def test_an_unaligned_tensor_after_an_aligned_one_of_the_same_shape_is_computed(tensors) -> None:
    for offset in (0, 0, 1, 0, 3, 8):
        for kind in ("ragged", "paged"):
            batch = tensors.batch([(70, 33), (20, 1)], heads=(4, 2), kind=kind)
            for name in ("q", "k", "v"):
                tensor = getattr(batch, name)
                room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
                setattr(batch, name, room[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor))
            batch.check_out(*batch.run(out=None))


@gpu
def test_a_chain_on_one_stream_reads_what_the_call_before_it_wrote(make) -> None:
    """A launch that starts before its predecessor has ended must wait on the device, or it reads old values."""
    q, k, v, *bounds = make.ragged(9)
    one = torch.ones_like(v)
    dense = BlockLayout.sliding(LONGEST, COLUMNS, BLOCK, make.device)
    options = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], "max_seqlen_q": LONGEST}
    for step in range(100):
        v.copy_(one * (step % 7))
        out = blocksparse_attn.blocksparse_attention(q, k, v, dense, **options, num_splits=1 + step % 3)
        poison_(v)
        live = out[: int(bounds[0][-1])].float()
        assert float((live - step % 7).abs().max()) < 0.1


@gpu
def test_many_sizes_do_not_grow_the_table_of_launches_past_its_limit(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "launches", PreparedLaunches(8))
    for sequences in range(1, 12):
        attend(make, *make.ragged(sequences))
        assert len(ops.launches) <= 8


@gpu
def test_a_call_inside_another_stream_runs_there(make) -> None:
    given = make.ragged(6)
    wanted = attend_in_parts(make, *given)
    q = given[0]
    value = q.clone()
    q.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(value)
        result = attend_in_parts(make, *given)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(result, wanted)


@gpu
def test_tensors_on_a_device_that_is_not_the_current_one_are_taken_there(make) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    expected = attend(make, *make.ragged(5))
    there = Maker(make.device)
    there.layout = make.layout.to("cuda:1")
    for _ in range(2):
        results = attend(there, *[tensor.to("cuda:1") for tensor in make.ragged(5)])
        for one, other in zip(tensors_in(results), tensors_in(expected), strict=True):
            assert one.device == torch.device("cuda:1")
            assert_bitwise_equal(one.cpu(), other.cpu())
    assert torch.cuda.current_device() == 0


@gpu
def test_a_long_prompt_takes_no_memory_beyond_its_inputs_and_outputs(make) -> None:
    """No list, mask or copy of the keys is materialised, and a long prompt needs no splits."""
    model, rows = PHI3_SMALL, 32768
    make.start(0)
    q, k, v = (make.normal(rows, heads, model.head_dim) for heads in (32, 8, 8))
    layout = BlockLayout.local_strided(
        32, rows, model.local_blocks, model.vert_stride, model.block_size, device=make.device
    )
    cu = make.integers([0, rows])
    run = partial(
        blocksparse_attn.blocksparse_attention, q, k, v, layout, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=rows,
        return_lse=True,
    )  # fmt: skip
    # The allocator gives out blocks of 2 MiB.
    assert peak_beyond(run) <= 2**21
