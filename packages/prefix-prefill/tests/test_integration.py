"""Does the package do what engines take for granted: torch.compile, CUDA graphs, streams, large batches, equal bits?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference.attention import attention
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.models import LLAMA3_70B
from kernel_reference.testing import contract
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal, assert_same_bits, poison_, tensors_in
from kernel_reference.testing.memory import check_far_apart, much_memory, peak_beyond
from prefix_prefill import CascadeLevel, PrefillPlan, launch, ops
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.plan import DeviceLimits, Problem, plan_prefill

Tensor = torch.Tensor
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
gpu = pytest.mark.gpu
HEADS, HEADS_KV, D, PAGE = 4, 2, 32, 16
COLUMNS, BLOCKS = 4, 40


class Maker:
    """Makes the inputs of the public functions from a number of sequences and a seed: lengths follow from both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def start(self, seed: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    def lengths(self, sequences: int, rows: int) -> list[Tensor]:
        """block_table, cu_seqlens_q, seqlens_k of sequences with these many new tokens in all, or a few less."""
        bounds = torch.randint(rows + 1, (sequences,), generator=self.host).sort().values.tolist()
        if sequences > 2:
            bounds[1] = bounds[0]
        new = [end - begin for begin, end in pairwise([0, *bounds])]
        room = [COLUMNS * PAGE - n for n in new]
        context = [int(torch.randint(most + 1, (), generator=self.host)) for most in room]
        table = torch.randint(BLOCKS, (sequences, COLUMNS), generator=self.host).tolist()
        totals = [ctx + n for ctx, n in zip(context, new, strict=True)]
        return [self.integers(table), self.integers([0, *bounds]), self.integers(totals)]

    def batch(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k."""
        self.start(seed)
        rows = 11 * sequences
        q, k, v = (self.normal(rows, heads, D) for heads in (HEADS, HEADS_KV, HEADS_KV))
        caches = [self.normal(BLOCKS, PAGE, HEADS_KV, D) for _ in range(2)]
        return [q, k, v, *caches, *self.lengths(sequences, rows)]

    def with_all(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """With a cache of 8 bits, alibi_slopes, sinks, k_scale [Hkv], v_scale [blocks, page, Hkv], masks."""
        tensors = self.batch(sequences, seed)
        tensors[3:5] = [cache.to(E4M3) for cache in tensors[3:5]]
        per_head = [torch.rand(HEADS, generator=self.generator, device=self.device) for _ in range(2)]
        scales = [
            torch.rand(shape, generator=self.generator, device=self.device) + 0.5
            for shape in ((HEADS_KV,), (BLOCKS, PAGE, HEADS_KV))
        ]
        masks = torch.randint(2**62, tensors[0].shape[:1], generator=self.generator, device=self.device)
        return [*tensors, *per_head, *scales, masks]

    def cached(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """The same without k and v, with an out."""
        q, _, _, *rest = self.batch(sequences, seed)
        return [q, *rest, torch.zeros_like(q)]

    def drop_in(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, o, k_cache, v_cache, b_loc, b_start_loc, b_seq_len, k_scale, v_scale."""
        q, k, v, _, _, *lengths = self.batch(sequences, seed)
        k_cache, v_cache = self.normal(BLOCKS, HEADS_KV, D // 8, PAGE, 8), self.normal(BLOCKS, HEADS_KV, D, PAGE)
        scales = [torch.ones(1, device=self.device) for _ in range(2)]
        return [q, k, v, torch.zeros_like(q), k_cache, v_cache, *lengths, *scales]

    def levels(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k_cache, v_cache; and block_table, cu_seqlens_q, seqlens_k of keys that all share, and of each one's."""
        q, _, _, *caches, table, cu, totals = self.batch(sequences, seed)
        shared = [table[:1].clone(), cu[[0, -1]], self.integers([COLUMNS * PAGE - 5])]
        return [q, *caches, *shared, table, cu, totals]

    def parts(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """out_a, lse_a, out_b, lse_b."""
        self.start(seed)
        rows = 11 * sequences
        return [x for _ in range(2) for x in (self.normal(rows, HEADS, D), self.normal(HEADS, rows, dtype=FP32))]


@pytest.fixture
def make(device: torch.device) -> Maker:
    return Maker(device)


# The most new tokens follow from a shape, so that they are a symbol to torch.compile where that is one.


def attend(q: Tensor, *rest: Tensor) -> Any:
    return prefix_prefill.prefix_prefill(q, *rest, max_seqlen_q=q.shape[0], return_lse=True)


def attend_split(q: Tensor, *rest: Tensor) -> Any:
    return prefix_prefill.prefix_prefill(
        q, *rest, max_seqlen_q=q.shape[0], return_lse=True, num_splits=3, softmax_scale=0.4, window=(20, 0)
    )


def attend_with_all(q: Tensor, *rest: Tensor) -> Any:
    *tensors, alibi, sinks, k_scale, v_scale, draft_mask = rest
    return prefix_prefill.prefix_prefill(
        q, *tensors, max_seqlen_q=q.shape[0], alibi_slopes=alibi, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        window=(25, 3), causal=False, softcap=4.0, out_scale=0.01, draft_mask=draft_mask,
    )  # fmt: skip


def attend_to_the_cache(q: Tensor, *rest: Tensor) -> Any:
    *tensors, out = rest
    return prefix_prefill.prefix_prefill(q, None, None, *tensors, max_seqlen_q=q.shape[0], out=out, k_scale=0.7)


def attend_as_engines_do(q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Tensor) -> Tensor:
    *tensors, k_scale, v_scale = rest
    prefix_prefill.context_attention_fwd(
        q, k, v, o, "auto", *tensors, 64, q.shape[0], k_scale, v_scale, sliding_window=30
    )
    return o


def attend_to_levels(q: Tensor, *tensors: Tensor) -> Any:
    k_cache, v_cache, *rest = tensors
    levels = [prefix_prefill.CascadeLevel(k_cache, v_cache, *each) for each in (rest[:3], rest[3:])]
    return prefix_prefill.cascade_attention(q, levels, max_seqlen_q=q.shape[0], return_lse=True)


def attend_by_a_plan(q: Tensor, *rest: Tensor) -> Any:
    plan = PrefillPlan(16, 16, 2, 4, 1)
    return prefix_prefill.prefix_prefill(q, *rest, max_seqlen_q=q.shape[0], return_lse=True, plan=plan)


PUBLIC: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "prefill": (attend, Maker.batch),
    "prefill, split": (attend_split, Maker.batch),
    "prefill with all": (attend_with_all, Maker.with_all),
    "prefill, cached, out=": (attend_to_the_cache, Maker.cached),
    "as engines do": (attend_as_engines_do, Maker.drop_in),
    "cascade": (attend_to_levels, Maker.levels),
    "merge": (prefix_prefill.merge_attention_states, Maker.parts),
}
every_public_function = pytest.mark.parametrize(("function", "inputs"), PUBLIC.values(), ids=PUBLIC)


# The ops


def cases_of(name: str, make: Maker) -> list[tuple[Any, ...]]:
    if name == "merge":
        a, lse_a, b, lse_b = make.parts(3)
        none = [x[:, :0] if x is lse_a or x is lse_b else x[:0] for x in (a, lse_a, b, lse_b)]
        return [
            (a, lse_a, b, lse_b, torch.zeros_like(a), torch.zeros_like(lse_a)),
            (*none, torch.zeros_like(none[0]), torch.zeros_like(none[1])),
        ]
    if name == "cascade":
        q, *caches, table, cu, lengths, own_table, own_cu, own = make.levels(3)
        lists = [[caches[0]] * 2, [caches[1]] * 2, [table, own_table], [cu, own_cu], [lengths, own]]
        masks = torch.randint(2**62, q.shape[:1], generator=make.generator, device=make.device)
        out, lse = torch.zeros_like(q), torch.zeros(HEADS, q.shape[0], device=make.device)
        sinks = torch.rand(HEADS, generator=make.generator, device=make.device)
        return [
            (q, *lists, sinks, None, None, None, out, lse, masks, 33, "NHD", 0.2, 4.0, 1.0, 1.0, 1.0, 0),
            (q, *[each[1:] for each in lists], None, None, None, None, out, None, None, 33, "NHD", 0.2, 0.0, 0.5, 2.0,
             1.0, 3),
        ]  # fmt: skip
    assert name == "prefill", f"an op that this test does not know: {name}"
    *tensors, alibi, sinks, k_scale, v_scale, draft_mask = make.with_all(3)
    tensors[3:5] = [cache.to(BF16) for cache in tensors[3:5]]
    q = tensors[0]
    out, lse = torch.zeros_like(q), torch.zeros(HEADS, q.shape[0], device=make.device)
    plan = PrefillPlan(16, 16, 2, 4, 1).as_ints()
    none = (None,) * 5
    plain, cached = make.batch(3), make.cached(3)
    nothing = [*[x[:0] for x in plain[:3]], *plain[3:6], *[0 * x for x in plain[6:]]]
    return [
        (*tensors, alibi, sinks, k_scale, v_scale, None, out, lse, draft_mask, 33, "NHD", 0.2, 25, 3, 4.0, True, 1.0,
         1.0, 1.0, 0),
        (*plain, *none, out, None, None, 33, "NHD", 0.2, -1, 0, 0.0, False, 0.5, 2.0, 1.0, 0, 64, False, plan),
        (cached[0], None, None, *cached[1:-1], *none, out, lse, None, 33, "NHD", 0.2, -1, -1, 0.0, False, 1.0, 1.0,
         1.0, 2),
        (*nothing, *none, out[:0], lse[:, :0], None, 0, "NHD", 0.2, -1, 0, 0.0, False, 1.0,
         1.0, 1.0, 0),
    ]  # fmt: skip


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("prefix_prefill::") for name in names if name.startswith("prefix_prefill::"))


@pytest.mark.parametrize("name", op_names())
def test_every_op_of_the_library_passes_opcheck(make, name: str) -> None:
    contract.check_opcheck(getattr(torch.ops.prefix_prefill, name).default, cases_of(name, make))


def test_the_op_passes_what_of_opcheck_knows_8_bit_floats(make) -> None:
    """Its test of the schema compares tensors, which torch does not do in these dtypes."""
    tensors = make.with_all(3)
    q, out_scale = tensors[0], torch.full((1,), 0.02, device=make.device)
    given = (
        *tensors[:-1],
        out_scale,
        q.to(E4M3),
        None,
        tensors[-1],
        33,
        "NHD",
        0.2,
        25,
        3,
        4.0,
        False,
        1.0,
        1.0,
        1.0,
        0,
    )
    some = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.prefix_prefill.prefill.default, given, test_utils=some)


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_whole_and_once_for_two_sizes(make, function, inputs) -> None:
    contract.check_compiles(function, inputs(make, 3), inputs(make, 5, seed=1))


@pytest.mark.torch_compile
def test_other_lengths_in_as_many_rows_and_other_numbers_of_rows_or_sequences_compile_once(make) -> None:
    def of_rows(rows: int, sequences: int) -> list[Tensor]:
        make.start(rows)
        q, k, v = (make.normal(rows, heads, D) for heads in (HEADS, HEADS_KV, HEADS_KV))
        caches = [make.normal(BLOCKS, PAGE, HEADS_KV, D) for _ in range(2)]
        return [q, k, v, *caches, *make.lengths(sequences, rows)]

    contract.check_compiles(attend, of_rows(30, 3), of_rows(43, 3))
    contract.check_compiles(attend, of_rows(30, 3), of_rows(30, 4))
    backend = "inductor" if make.device.type == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=False)
    for seed in range(3):
        tensors = make.batch(4, seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_same_bits(compiled(*tensors), attend(*tensors))


@pytest.mark.torch_compile
def test_the_first_call_of_a_process_may_be_inside_torch_compile(device: torch.device) -> None:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    run_alone(
        f"""
        import torch, prefix_prefill
        device = {device.type!r}
        def attend(q, k, v, cache, table, cu, seqlens):
            part = prefix_prefill.prefix_prefill(
                q, k, v, cache, cache, table, cu, seqlens, max_seqlen_q=3, return_lse=True)
            return prefix_prefill.merge_attention_states(*part, *part)
        q, k = torch.zeros(3, 2, 16, device=device), torch.ones(3, 1, 16, device=device)
        v = torch.full((3, 1, 16), 7.0, device=device)
        table, cu, seqlens = (torch.tensor(x, device=device) for x in ([[1]], [0, 3], [4]))
        cache = torch.full((2, 16, 1, 16), 3.0, device=device)
        out, lse = torch.compile(attend, fullgraph=True, backend={backend!r})(q, k, v, cache, table, cu, seqlens)
        wanted = torch.tensor([5.0, 17 / 3, 6.0], device=device)[:, None, None].expand_as(out)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse[0], torch.tensor([4.0, 6.0, 8.0], device=device).log())
        """
    )


def test_importing_the_package_imports_no_triton_and_initialises_no_gpu() -> None:
    run_alone(
        """
        import sys, prefix_prefill, torch
        assert "triton" not in sys.modules, "triton was imported"
        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        """
    )


def test_cpu_tensors_need_no_triton() -> None:
    run_alone(
        """
        import sys
        sys.modules["triton"] = None
        import torch, prefix_prefill
        q, cache = torch.ones(1, 2, 16), torch.ones(1, 1, 2, 16)
        n = torch.tensor([0, 1])
        out = prefix_prefill.prefix_prefill(q, q, q, cache, cache, n[:1, None], n, n[1:], max_seqlen_q=1)
        assert (out == 1).all()
        """
    )


def test_the_version_is_that_of_the_metadata_or_says_that_there_is_none() -> None:
    contract.check_version(prefix_prefill, "prefix-prefill")


def test_all_names_that_are_exported_are_there() -> None:
    assert sorted(prefix_prefill.__all__) == prefix_prefill.__all__
    assert {"prefix_prefill", "context_attention_fwd", "merge_attention_states"} <= set(prefix_prefill.__all__)
    for name in prefix_prefill.__all__:
        assert getattr(prefix_prefill, name).__doc__


@every_public_function
def test_public_functions_run_under_inference_mode(make, function, inputs) -> None:
    expected = function(*inputs(make, 4))
    with torch.inference_mode():
        for tensors in (inputs(make, 4), [tensor.clone() for tensor in inputs(make, 4)]):
            assert_same_bits(function(*tensors), expected)


@every_public_function
def test_the_same_call_gives_the_same_bits(make, function, inputs) -> None:
    contract.check_deterministic(lambda: function(*inputs(make, 4)))


# A sequence's bits do not depend on its neighbours, where the number of splits is given


def test_a_plan_for_given_splits_follows_from_heads_sizes_and_dtypes_and_from_nothing_of_the_batch() -> None:
    """Tiles of another size sum a row's keys in another order, and split them elsewhere."""
    heads = {"num_heads": 8, "num_heads_kv": 1, "head_dim": 128, "page_size": 16}
    for limits in (DeviceLimits(132, 232448, hopper=True), DeviceLimits(108, 166912)):
        for bits, described in ((16, True), (16, False), (32, False)):
            plans = {
                plan_prefill(
                    Problem(
                        **heads, tokens=tokens, sequences=sequences, max_seqlen_q=most, capacity=capacity, bits=bits,
                        cache_bits=bits, new_kv=True, tma=described,
                    ),
                    limits, 3,
                )
                for tokens, sequences, most, capacity in (
                    (1, 1, 1, 16), (1, 1, 1, 2**20), (5, 5, 1, 4096), (300, 2, 299, 4096), (8192, 1, 8192, 2**17),
                    (8192, 64, 2048, 4096), (100, 3, 8192, 64),
                )
            }  # fmt: skip
            assert len(plans) == 1, plans


def attention_of(batch: Any, sequences: Sequence[int], through: Callable[..., Any], **options: Any) -> list[Any]:
    """Out and lse of these sequences of a batch alone."""
    rows = [torch.arange(batch.begins[i], batch.begins[i + 1], device=batch.device) for i in sequences]
    lengths = [len(own) for own in rows]
    # A row before none of which it knows, so that tensors start elsewhere.
    chosen = torch.cat([*rows, torch.zeros(1, dtype=torch.int64, device=batch.device)])
    q, k, v, k_cache, v_cache, table, cu, seqlens = batch.inputs
    q, k, v = (None if x is None else x[chosen] for x in (q, k, v))
    cu = cu.new_tensor([0, *accumulate(lengths)])
    which = torch.tensor(sequences, device=batch.device)
    given = {**batch.options, "max_seqlen_q": max(lengths, default=0), **options}
    out, lse = through(q, k, v, k_cache, v_cache, table[which], cu, seqlens[which], given)
    parts = zip(out.split([*lengths, 1])[:-1], lse.split([*lengths, 1], dim=1)[:-1], strict=True)
    return [*parts]


def by_public_function(*tensors: Any) -> Any:
    *tensors, options = tensors
    return prefix_prefill.prefix_prefill(*tensors, **options, return_lse=True)


def by_launch(plan: PrefillPlan) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        *tensors, options = tensors
        q = tensors[0]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
        given = PrefillTensors(*tensors, None, options["sinks"], None, None, None, out, lse)
        longest, layout = options["max_seqlen_q"], options["page_layout"]
        numbers = PrefillNumbers(longest, layout, 0.2, -1, 0, 0.0, False, 1.0, 1.0, 1.0, 0)
        launch.prepare_prefill(check_prefill(given, numbers), plan, given)(*given)
        return out, lse

    return run


def check_neighbours(batch: Any, groups: Any, through: Callable[..., Any] = by_public_function, **options: Any) -> None:
    whole = attention_of(batch, range(len(batch.lengths)), through, **options)
    for group in groups:
        for i, parts in zip(group, attention_of(batch, group, through, **options), strict=True):
            for one, other in zip(parts, whole[i], strict=True):
                assert_bitwise_equal(one, other, what=f"sequence {i} among {group}")


@pytest.mark.parametrize("splits", [1, 3])
def test_kernels_give_a_sequence_the_same_bits_whatever_is_beside_it(tensors, splits: int) -> None:
    batch = tensors.batch([(40, 3), (0, 1), (70, 12)], heads=(2, 1), head_dim=16, sinks=True)
    through = by_launch(PrefillPlan(16, 16, splits, 4, 1))
    check_neighbours(batch, [[0], [1], [2, 0]], through)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"cached": True}, {"window": (50, 0), "dtype": FP32}], ids=str)
def test_a_sequence_has_the_same_bits_whatever_is_beside_it_where_splits_are_given(tensors, options, splits) -> None:
    batch = tensors.batch([(70, 5), (0, 1), (300, 1), (20, 90), (5, 0), (129, 33)], sinks=True, **options)
    groups = [[i] for i in range(6)] + [[2, 0], [3, 5, 1], [5, 4, 3, 2, 1, 0]]
    check_neighbours(batch, groups, num_splits=splits)


@gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sequences_of_a_model_have_the_same_bits_whatever_is_beside_them(tensors, dtype, cached, splits) -> None:
    model = LLAMA3_70B.tensor_parallel(8)
    lengths = [(8192, 1), (0, 777), (4096, 256), (131, 1), (16384, 2), (0, 1), (64, 2048)]
    batch = tensors.batch(
        lengths, heads=(model.num_heads_q, model.num_heads_kv), head_dim=model.head_dim, dtype=dtype, cached=cached
    )
    groups = [[0], [2], [3], [6], [4, 0], [1, 3, 5], [6, 5, 4, 3, 2, 1, 0]]
    check_neighbours(batch, groups, num_splits=splits)


# The way from a public function to the kernels: where there is no GPU, CPU tensors are sent it too


@pytest.fixture
def by_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops on CPU tensors run the kernels, interpreted, with the plan of a device of few cores."""
    if device.type == "cuda":
        yield
        return
    library = torch.library.Library("prefix_prefill", "IMPL", "CPU")
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    with warnings.catch_warnings():
        # torch says once that an implementation is replaced.
        warnings.simplefilter("ignore")
        for name in op_names():
            library.impl(name, getattr(ops, f"_kernel_{name}"), allow_override=True)
    yield
    library._destroy()


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("options", [
    {"alibi": True, "sinks": True, "window": (13, 4), "causal": False, "softcap": 3.0, "softmax_scale": 0.3,
     "cache_dtype": E4M3, "k_scale": "heads", "v_scale": "tokens", "skip_decode": True},
    {"sinks": True, "cached": True, "cache_dtype": E4M3, "k_scale": "number", "v_scale": 0.5, "page_layout": "HND",
     "out_scale": torch.full((1,), 0.03)},
    {"alibi": True, "window": (9, 0), "k_scale": 0.5, "v_scale": "tensor", "page_layout": "x-packed",
     "out_scale": 0.02},
], ids=["new keys", "cached", "x-packed"])  # fmt: skip
def test_public_functions_reach_the_kernels_with_every_argument_in_its_place(tensors, options) -> None:
    if isinstance(options.get("out_scale"), Tensor):
        options = {**options, "out_scale": options["out_scale"].to(tensors.device)}
    for splits in (None, 2):
        batch = tensors.batch([(20, 4), (5, 1), (0, 3)], heads=(2, 1), head_dim=16, rows_after=1, **options)
        batch.run(num_splits=splits)
        batch.check()


@pytest.mark.usefixtures("by_kernels")
def test_the_other_public_functions_reach_the_kernels_too(tensors) -> None:
    batch = tensors.batch(
        [(20, 4), (5, 1), (0, 3)], heads=(2, 1), head_dim=16, page_layout="x-packed", cache_dtype=E4M3,
        k_scale="tensor",
        v_scale="number", window=(6, -1), sinks=True, alibi=True, lse=False, skip_decode=True, softmax_scale=0.3,
    )  # fmt: skip
    prefix_prefill.context_attention_fwd(
        batch.q, batch.k, batch.v, batch.out.tensor, "fp8", batch.k_cache.view(torch.uint8),
        batch.v_cache.view(torch.uint8), batch.block_table, batch.cu_seqlens_q, batch.seqlens_k, 24, 4, batch.k_scale,
        batch.v_scale, batch.alibi_slopes, 7, 0.3, True, None, batch.sinks,
    )  # fmt: skip
    batch.check()
    out, lse = tensors.normal(5, 2, 16), tensors.normal(2, 5)
    other = torch.full((2, 5), -torch.inf, device=tensors.device)
    got = prefix_prefill.merge_attention_states(out, lse, torch.full_like(out, torch.nan), other)
    assert_bitwise_equal(got.out, out)
    torch.testing.assert_close(got.lse, lse)


@pytest.mark.usefixtures("by_kernels")
def test_calls_of_one_look_but_for_strides_dtypes_and_scale_are_not_confused(tensors) -> None:
    for dtype, scale, fused in ((BF16, 1.0, False), (BF16, 0.5, False), (BF16, 0.5, True), (FP32, 0.5, True)):
        batch = tensors.batch([(5, 2)], heads=(1, 1), head_dim=16, dtype=dtype, softmax_scale=scale, fused=fused)
        batch.run()
        batch.check()


# Offsets past 2^31 elements


# What is stretched: the argument, in the order of the op, and its dimension.
FAR = {
    "rows": {0: 0, 1: 0, 2: 0}, "heads": {0: 1, 1: 1, 2: 1}, "elements": {0: 2, 1: 2},
    "results' rows": {13: 0, 14: 1}, "results' heads": {13: 1, 14: 0}, "elements of results": {13: 2},
    "pages": {3: 0, 4: 0}, "tokens of a page": {3: 1, 4: 1}, "kv heads": {3: 2, 4: 2},
    "elements of a page": {3: 3, 4: 3},
    "scales": {10: 0, 11: 1}, "block table": {5: 0},
}  # fmt: skip


@pytest.mark.parametrize("dims", FAR.values(), ids=FAR)
def test_kernels_follow_dimensions_more_than_2_to_the_31_elements_apart(tensors, dims) -> None:
    """Three or more of each, so that strides fit in 32 bits and products of them do not."""
    options = {"heads": (3, 3), "head_dim": 16, "page": 8, "cache_dtype": E4M3, "k_scale": "tokens"}
    lengths = [(2, 1), (1, 1), (3, 1)] if 5 in dims else [(17, 3)]
    batch = tensors.batch(lengths, **options, v_scale="tokens")
    # Splits have a launch of their own for the results.
    for splits in (1, 2) if 13 in dims else (1,):
        plan = PrefillPlan(16, 16, splits, 4, 1)

        def attend(*given: Any, plan: PrefillPlan = plan) -> tuple[()]:
            batch.attend(given, plan)
            return ()

        check_far_apart(attend, batch.tensors, dims)


@pytest.mark.parametrize("dims", [{0: 0, 2: 0, 4: 0}, {0: 1, 2: 1, 4: 1}, {1: 0, 3: 1, 5: 0}], ids=str)
def test_merging_follows_dimensions_more_than_2_to_the_31_elements_apart(tensors, dims) -> None:
    outs = [tensors.normal(3, 3, 16) for _ in range(3)]
    lses = [tensors.normal(3, 3) for _ in range(3)]

    def merge(*given: Any) -> tuple[()]:
        launch.prepare_merge(MergeTensors(*given))(*given)
        return ()

    check_far_apart(merge, (outs[0], lses[0], outs[1], lses[1], outs[2], lses[2]), dims)


@gpu
@pytest.mark.parametrize("layout", ["NHD", "HND", "x-packed"])
@much_memory()
def test_a_packed_cache_of_more_than_2_to_the_31_elements_is_read_in_its_last_pages(tensors, layout: str) -> None:
    batch = tensors.batch([(3000, 200), (500, 1)], heads=(8, 2), head_dim=128, page=32, page_layout=layout, lse=False)
    own = batch.k_cache.shape[0]
    blocks = 2**31 // (32 * 2 * 128) + own + 3
    q, k, v, k_cache, v_cache, table, *lengths = batch.inputs
    large = []
    for cache in (k_cache, v_cache):
        whole = torch.full((blocks, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device=cache.device)
        whole[blocks - own :] = cache
        large.append(whole)
    assert large[0].numel() > 2**31
    for splits in (1, 4):
        got = prefix_prefill.prefix_prefill(
            q, k, v, *large, table + (blocks - own), *lengths, **batch.options, num_splits=splits
        )
        batch.check_out(got, again=splits > 1)


@gpu
@much_memory()
def test_packed_tokens_of_more_than_2_to_the_31_elements_are_all_computed(make, tensors) -> None:
    heads, size, window = 64, 128, 63
    make.start(0)
    rows = 2**31 // (heads * size) + 5000
    q = torch.empty(rows, heads, size, dtype=BF16, device=make.device).normal_()
    assert q.numel() > 2**31
    k, v = (make.normal(rows, 1, size) for _ in range(2))
    cache, table = make.normal(1, 16, 1, size), make.integers([[0], [0], [0]])
    bounds = [0, 100, rows - 4000, rows]
    cu, seqlens = make.integers(bounds), make.integers([end - begin for begin, end in pairwise(bounds)])
    for splits in (None, 2):
        out = prefix_prefill.prefix_prefill(
            q, k, v, cache, cache, table, cu, seqlens, max_seqlen_q=rows, window=(window, 0), num_splits=splits
        )
        for row in (99, 100, 300, rows - 4001, rows - 2000, rows - 1):
            own = slice(max(row - window, max(bound for bound in bounds if bound <= row)), row + 1)
            wanted, plain = (
                attention(q[row : row + 1], k[own], v[own], causal=True, compute_dtype=dtype).out
                for dtype in (torch.float64, FP32)
            )
            tensors.assert_rounded(out[row : row + 1], tensors.Wanted(wanted, plain.to(BF16)), what=f"row {row}")
        del out


# What only a GPU shows


@gpu
@every_public_function
def test_a_captured_graph_replays_the_bits_of_plain_calls(make, function, inputs) -> None:
    """For other lengths, pages and values in as many rows."""
    contract.check_cuda_graph(function, lambda seed: inputs(make, 5, seed=seed), replays=4)


@gpu
@pytest.mark.torch_compile
def test_a_plan_may_be_given_in_plain_calls_in_a_graph_and_where_torch_compiles(make) -> None:
    contract.check_cuda_graph(attend_by_a_plan, lambda seed: make.batch(5, seed=seed))
    contract.check_compiles(attend_by_a_plan, make.batch(3), make.batch(5, seed=1))


@gpu
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_a_captured_graph_of_a_model_replays_other_lengths_of_the_same_most(make, cached: bool) -> None:
    sequences, rows, blocks, columns = 16, 2048, 2000, 600

    def inputs(seed: int) -> list[Tensor]:
        make.start(seed)
        bounds = [0, *torch.randint(rows + 1, (sequences,), generator=make.host).sort().values.tolist()]
        if seed == 1:
            bounds = [0] + [rows] * sequences
        if seed == 2:
            bounds = [*range(sequences + 1)]
        new = [end - begin for begin, end in pairwise(bounds)]
        totals = [n + int(torch.randint(columns * 16 - n + 1, (), generator=make.host)) for n in new]
        table = torch.randint(blocks, (sequences, columns), generator=make.host)
        q, k, v = (make.normal(rows, heads, 128) for heads in (8, 1, 1))
        caches = [make.normal(blocks, 16, 1, 128) for _ in range(2)]
        return [q, *([] if cached else [k, v]), *caches, table.int().to(make.device), make.integers(bounds),
                make.integers(totals)]  # fmt: skip

    def run(q: Tensor, *rest: Tensor) -> Any:
        new = (None, None) if cached else ()
        return prefix_prefill.prefix_prefill(q, *new, *rest, max_seqlen_q=rows, return_lse=True)

    contract.check_cuda_graph(run, inputs, replays=4)


@gpu
@pytest.mark.torch_compile
def test_a_layer_compiled_to_cuda_graphs_gives_plain_calls_bits_for_batches_of_any_size(make) -> None:
    """Rows that decode between projections: with new keys, in pieces, over keys that all share, and merged."""
    heads, heads_kv, size, columns = 8, 2, 128, 150

    def inputs(sequences: int, seed: int) -> list[Tensor]:
        make.start(seed)
        x, w_q, w_k, w_out = (
            make.normal(*shape) * shape[-1] ** -0.5
            for shape in ((sequences, 256), (256, heads * size), (256, heads_kv * size), (heads * size, 256))
        )
        caches = [make.normal(64 * columns, PAGE, heads_kv, size) for _ in range(2)]
        table = torch.randint(64 * columns, (sequences, columns), generator=make.host)
        lengths = torch.randint(1, columns * PAGE, (sequences,), generator=make.host)
        return [
            x,
            w_q,
            w_k,
            w_out,
            *caches,
            *map(make.integers, (table.tolist(), range(sequences + 1), lengths.tolist())),
        ]

    def layer(x: Tensor, w_q: Tensor, w_k: Tensor, w_out: Tensor, *cached: Tensor) -> Tensor:
        q, k = (x @ w_q).view(-1, heads, size), (x @ w_k).view(-1, heads_kv, size)
        k_cache, v_cache, table, cu, lengths = cached
        new = prefix_prefill.prefix_prefill(q, k, k, *cached, max_seqlen_q=1, return_lse=True)
        old = prefix_prefill.prefix_prefill(q, None, None, *cached, max_seqlen_q=1, return_lse=True)
        shared = CascadeLevel(k_cache, v_cache, table[:1], cu[[0, -1]], lengths[:1])
        levels = [shared, CascadeLevel(k_cache, v_cache, table, cu, lengths)]
        both = prefix_prefill.cascade_attention(q, levels, max_seqlen_q=1)
        merged = prefix_prefill.merge_attention_states(*new, *old).out
        return (merged + both).flatten(1) @ w_out

    contract.check_compiled_graphs(layer, *[inputs(sequences, seed) for seed, sequences in enumerate((4, 16, 7, 4))])


@gpu
@every_public_function
def test_no_call_waits_for_the_gpu(make, function, inputs) -> None:
    tensors = inputs(make, 5)
    contract.check_no_host_sync(lambda: function(*tensors))


@gpu
def test_an_unaligned_tensor_after_an_aligned_one_of_the_same_look_is_computed(tensors) -> None:
    for offset in (0, 0, 1, 0, 3, 8):
        batch = tensors.batch([(70, 33), (20, 1)], heads=(4, 2))
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            tensor = getattr(batch, name)
            room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
            setattr(batch, name, room[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor))
        batch.check_out(*batch.run(out=None))


@gpu
def test_a_chain_on_one_stream_reads_what_the_call_before_it_wrote(make) -> None:
    """A launch that starts before the one ahead has ended must wait on the device, or it reads old values."""
    q, k, v, k_cache, v_cache, table, cu, seqlens = make.batch(9)
    one = torch.ones_like(v)
    for step in range(100):
        v.copy_(one * (step % 7))
        v_cache.fill_(step % 7)
        out = prefix_prefill.prefix_prefill(
            q, k, v, k_cache, v_cache, table, cu, seqlens, max_seqlen_q=99, num_splits=1 + step % 3
        )
        poison_(v)
        live = out[: int(cu[-1])].float()
        assert float((live - step % 7).abs().max()) < 0.1


@gpu
def test_many_sizes_do_not_grow_the_table_of_launches_past_its_bound(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "launches", PreparedLaunches(most=8))
    for sequences in range(1, 12):
        for function, inputs in (PUBLIC["prefill"], PUBLIC["merge"]):
            function(*inputs(make, sequences))
            assert len(ops.launches) <= 8


@gpu
def test_a_call_inside_another_stream_runs_there(make) -> None:
    given = make.batch(6)
    wanted = attend_split(*given)
    q = given[0]
    value = q.clone()
    q.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(value)
        result = attend_split(*given)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(result, wanted)


@gpu
@every_public_function
def test_tensors_on_a_device_that_is_not_the_current_one_are_taken_there(make, function, inputs) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    expected = function(*inputs(make, 5))
    for _ in range(2):
        results = function(*[tensor.to("cuda:1") for tensor in inputs(make, 5)])
        for one, other in zip(tensors_in(results), tensors_in(expected), strict=True):
            assert one.device == torch.device("cuda:1")
            assert_bitwise_equal(one.cpu(), other.cpu())
    assert torch.cuda.current_device() == 0


@gpu
def test_a_long_prompt_takes_no_memory_beyond_its_inputs_outputs_and_two_parts_a_program(make) -> None:
    """The cache is neither copied nor gathered; whether tiles are cut, only the device knows."""
    make.start(0)
    rows, blocks = 8192, 8192
    q, k, v = (make.normal(rows, heads, 128) for heads in (32, 8, 8))
    caches = [make.normal(blocks, 16, 8, 128) for _ in range(2)]
    table = torch.randperm(blocks, generator=make.host)[None].int().to(make.device)
    cu, seqlens = make.integers([0, rows]), make.integers([rows + 16 * blocks // 2])
    run = partial(
        prefix_prefill.prefix_prefill, q, k, v, *caches, table, cu, seqlens, max_seqlen_q=rows, return_lse=True
    )
    parts = 2 * torch.cuda.get_device_properties(make.device).multi_processor_count * 128 * 128 * 4
    # The allocator gives out blocks of 2 MiB.
    assert peak_beyond(run) <= parts + 2**21
