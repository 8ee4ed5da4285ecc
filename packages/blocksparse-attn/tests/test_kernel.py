"""Does every branch of every plan match the oracle? Through launch: on a GPU, or in Triton's interpreter.

Plans are forced, and lengths made for them: no new token, one, a tile and more, with and without context. Interpreted,
a case has few programs; the kernel for sm_90 runs on a GPU alone, see test_hopper.py.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse_attn import AttentionPlan
from blocksparse_attn.kernels import softmax
from kernel_reference.testing import gluon
from kernel_reference.testing.codegen import KernelSpec, compile_specs, recorded_launches
from kernel_reference.testing.contract import check_batch_invariant, check_deterministic
from kernel_reference.testing.gluon.pipeline import product_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_SIZES = (16, 64, 80, 96, 128, 192, 256)
KINDS = ("ragged", "paged", "padded")
gpu = pytest.mark.gpu


def name_of(value: Any) -> str:
    if isinstance(value, AttentionPlan):
        where = "sm_90, " if value.hopper else f"{value.packed} tokens packed, " if value.packed else ""
        return f"{where}{value.block_m} x {value.block_n}, {value.num_splits} splits, {value.num_stages} stages"
    return str(value).removeprefix("torch.")


def lists(block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1) -> AttentionPlan:
    return AttentionPlan(block_m, block_n, num_splits, 4, num_stages)


def packed(
    block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1, tokens: int = 1
) -> AttentionPlan:
    return AttentionPlan(block_m, block_n, num_splits, 4, num_stages, tokens)


def several(block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1) -> AttentionPlan:
    return packed(block_m, block_n, num_splits, num_stages, tokens=4)


makers = pytest.mark.parametrize("make", [lists, packed, several], ids=lambda make: make.__name__)


def check(tensors, kernels, plan: AttentionPlan, lengths: list[tuple[int, int]], **options: Any) -> Any:
    """A batch by this plan; on a GPU, where there is time for it, with longer lengths too. The first is returned."""
    if plan.packed and not options.get("fused"):
        # Such plans are for few new tokens, of which each is a program or more.
        lengths = [(ctx + max(0, new - 4), min(new, 4)) for ctx, new in lengths]
    batch = tensors.batch(lengths, **options)
    kernels.attend(batch, plan)
    batch.check()
    if not INTERPRETED:
        more = [(4096, 17), (0, 1000), (15, 128)]
        if options.get("fused"):
            more = [(0, 1000), (0, 128)]
        elif options.get("side") == "none":
            lengths, more = [], [(1000, 128)] * 3
        longer = tensors.batch([*more, *lengths], **{**options, "mask": None})
        kernels.attend(longer, plan)
        longer.check(most=4)
    return batch


# Each branch


def branches() -> list[Any]:
    """Rows and keys of a tile, and blocks of queries and keys, of all sizes; splits, dtypes and kinds take turns."""
    made = []
    for blocks, sizes in {
        (16, 16): [(16, 16)], (64, 64): [(16, 32), (32, 64), (64, 16), (64, 64)], (32, 64): [(32, 32), (16, 64)],
        (64, 32): [(64, 32), (32, 16)], (48, 48): [(16, 16)], (128, 32): [(128, 32)],
    }.items():  # fmt: skip
        for block_m, block_n in sizes:
            for make in (lists, packed, several):
                n = len(made)
                plan = make(block_m, block_n, (1, 2, 3)[n % 3], 1 + n % 2)
                made.append((plan, blocks, (BF16, FP16, FP32)[(n + n // 3) % 3], KINDS[n // 3 % 3]))
    return made


# No size is a power of two: a tile's rows are not all taken, nor its columns.
LENGTHS = [(30, 17), (0, 0), (18, 3), (16, 1), (0, 2)]


@pytest.mark.parametrize(("plan", "blocks", "dtype", "kind"), branches(), ids=name_of)
def test_every_branch_of_the_portable_kernels_matches_the_oracle(tensors, kernels, plan, blocks, dtype, kind) -> None:
    options = {"heads": (3, 1), "head_dim": 24, "head_dim_v": 40, "dtype": dtype, "kind": kind, "blocks": blocks}
    after = {"rows_after": 3} if kind != "padded" else {"side": "both"}
    check(tensors, kernels, plan, LENGTHS, **options, **after)


# Rows and keys of a tile, tokens, heads, their size, and where or how keys lie.
FEW = (
    (1, 16, 1, (2, 2), 40, "paged"), (2, 8, 1, (3, 1), 24, "ragged"), (4, 8, 1, (3, 1), 136, "x-packed"),
    (8, 16, 2, (3, 1), 96, "padded"), (16, 16, 2, (4, 1), 96, "paged"),
)  # fmt: skip


@pytest.mark.parametrize(("block_m", "block_n", "tokens", "heads", "head_dim", "kind"), FEW)
def test_few_rows_of_float32_are_multiplied_one_by_one_or_in_thirds(
    tensors, kernels, block_m, block_n, tokens, heads, head_dim, kind
) -> None:
    options = {"heads": heads, "head_dim": head_dim, "head_dim_v": 48, "kind": kind, "blocks": (32, 16), "dtype": FP32}
    after = {"rows_after": 3, "softcap": 2.0} if kind != "padded" else {"side": "both", "sinks": True}
    if kind == "x-packed":
        options |= {"kind": "paged", "page_layout": kind, "page": 24}
    plan = AttentionPlan(block_m, block_n, 1 + block_m % 2, 1, 1, tokens, thirds=block_m == 16)
    check(tensors, kernels, plan, LENGTHS, **options, **after)


@makers
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_any_number_of_splits_even_more_than_there_are_blocks(tensors, kernels, num_splits, make) -> None:
    options = {"heads": (2, 1), "head_dim": 16, "sinks": True, "dtype": FP32}
    check(tensors, kernels, make(num_splits=num_splits), [(37, 5), (0, 1), (3, 2)], **options)


def test_splits_are_merged_by_a_compiled_kernel_where_tokens_of_lse_lie_apart(tensors) -> None:
    """What the lowest Triton makes of strides in tuples, which the interpreter does not show."""
    batch = tensors.batch([(20, 3)], heads=(2, 1), head_dim=16)
    *others, lse = batch.tensors
    given = (*others, lse.new_empty(lse.shape[::-1]).T)
    launches = recorded_launches(batch.prepare(packed(num_splits=2), given), *given)
    specs = [KernelSpec.of_launch(start, arguments) for start, arguments in launches]
    [report] = compile_specs([spec for spec in specs if spec.kernel.endswith("merge:merge")], ["sm_90"])
    assert not report.error


# Layouts


LAYOUTS = {
    "nothing listed": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "everything listed": lambda shape: torch.ones(shape, dtype=torch.bool),
    "the first block alone": lambda shape: torch.zeros(shape, dtype=torch.bool).index_fill_(2, torch.tensor([0]), True),
    "blocks behind the diagonal alone": lambda shape: torch.ones(shape, dtype=torch.bool).triu(1),
    "the diagonal alone": lambda shape: torch.ones(shape, dtype=torch.bool).triu(0).tril(0),
    "a head of many and one of none": lambda shape: torch.tensor([True, False])[:, None, None].expand(shape),
}


@makers
@pytest.mark.parametrize("mask", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_are_all_or_nothing(tensors, kernels, make, mask) -> None:
    for num_splits in (1, 2):
        mask_of_blocks = mask((2, 4, 4)).clone()
        options = {"heads": (2, 1), "head_dim": 16, "mask": mask_of_blocks, "sinks": num_splits == 2}
        check(tensors, kernels, make(num_splits=num_splits), [(30, 17), (0, 3)], **options)


@makers
def test_rows_of_one_tile_may_list_different_blocks(tensors, kernels, make) -> None:
    """Blocks of 16 queries: 20 new tokens are in three rows of the layout."""
    mask = torch.zeros(4, 4, 4, dtype=torch.bool)
    for head in range(4):
        for row in range(4):
            mask[head, row, (head + row) % 4] = True
    check(tensors, kernels, make(), [(14, 20), (40, 2)], heads=(4, 1), head_dim=16, mask=mask)


@makers
def test_a_row_may_list_more_columns_than_one_bit_mask_holds(tensors, kernels, make) -> None:
    """150 blocks of 16 keys; a bit mask holds 64, and the last head lists none of the first 64."""
    mask = torch.rand(3, 150, 150) < 0.5
    mask[2, :, :64] = False
    # The last block of a bit mask is its sign bit.
    mask[:, -1, 63] = torch.tensor([True, False, True])
    for splits in (1, 3):
        plan = make(16, 16, splits)
        check(tensors, kernels, plan, [(2397, 3)], heads=(3, 1), head_dim=16, mask=mask, blocks=(16, 16))


@makers
def test_columns_may_be_in_any_order(tensors, kernels, make) -> None:
    batch = tensors.batch([(40, 20)], heads=(2, 1), head_dim=16)
    crow, col = batch.layout.crow, batch.layout.col
    for head in range(2):
        for row in range(crow.shape[1] - 1):
            own = slice(int(crow[head, row]), int(crow[head, row + 1]))
            col[head, own] = col[head, own].flip(0)
    kernels.attend(batch, make())
    batch.check()


@makers
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 48)], ids=str)
def test_a_tile_gathers_keys_of_several_small_blocks(tensors, kernels, make, blocks) -> None:
    for kind, splits in (("paged", 2), ("ragged", 1)):
        options = {"heads": (2, 1), "head_dim": 16, "kind": kind, "blocks": blocks, "window": (90, -1)}
        check(tensors, kernels, make(16, 64, splits), [(130, 3), (20, 17), (0, 2)], **options)
    options = {"kind": "paged", "page_layout": "x-packed", "page": 32, "blocks": blocks, "heads": (2, 1)}
    check(tensors, kernels, make(16, 64), [(130, 3)], head_dim=16, **options)


# Sizes


@makers
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_head_sizes_of_models(tensors, kernels, head_dim, make) -> None:
    i = HEAD_SIZES.index(head_dim)
    options = {"dtype": (BF16, FP16, FP32)[i % 3], "head_dim_v": HEAD_SIZES[(i + 3) % 7] if i % 2 else head_dim}
    check(tensors, kernels, make(), [(18, 5), (0, 2)], heads=(2, 1), head_dim=head_dim, **options)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 256, 3, 24])
def test_pages_of_any_size(tensors, kernels, page) -> None:
    """The last keys lie in the second page, or past it."""
    context = page + 5 if page >= 16 else 37
    i = (1, 16, 32, 64, 256, 3, 24).index(page)
    options = {"kind": "paged", "page": page, "page_layout": ("NHD", "HND", "x-packed")[i % 3]}
    for make in (lists, packed):
        check(tensors, kernels, make(), [(context, 3), (page, 1)], heads=(1, 1), head_dim=16, **options)


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16, 20])
def test_any_number_of_query_heads_shares_a_kv_head_in_one_tile_or_in_several(tensors, kernels, ratio) -> None:
    tokens = max(1, 16 // ratio)
    check(tensors, kernels, packed(tokens=tokens), [(17, 5), (0, 3)], heads=(2 * ratio, 2), head_dim=16)
    check(tensors, kernels, lists(16), [(17, 5)], heads=(2 * ratio, 2), head_dim=16)


# Features


FEATURES: dict[str, dict[str, Any]] = {
    "a window": {"window": (7, -1)},
    "a window of the token alone": {"window": (0, 0)},
    "a window of all there is": {"window": (2**31 - 1, -1)},
    "sinks": {"sinks": True},
    "a soft cap": {"softcap": 2.0, "dtype": FP32},
    "a scale below zero": {"softmax_scale": -0.3},
    "a scale of zero": {"softmax_scale": 0.0},
    "no lse": {"lse": False},
    "one layout for all heads": {"one_layout": True},
    "x-packed": {"kind": "paged", "page_layout": "x-packed"},
    "heads before places": {"kind": "paged", "page_layout": "HND"},
    "slices of one tensor": {"fused": True},
    "padding on the left": {"kind": "padded", "side": "left"},
    "padding on the right": {"kind": "padded", "side": "right"},
    "padding on both sides": {"kind": "padded", "side": "both", "index_dtype": torch.int64},
    "lengths of 64 bits": {"index_dtype": torch.int64},
    "everything": {
        "window": (19, -1), "sinks": True, "softcap": 4.0, "kind": "paged", "page_layout": "x-packed", "page": 24,
    },
}  # fmt: skip
feature = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)


@feature
def test_each_feature_with_and_without_splits(tensors, kernels, options) -> None:
    number = [*FEATURES.values()].index(options)
    lengths = [(0, 7), (0, 12), (0, 3)] if options.get("fused") else [(21, 12), (16, 1), (0, 3)]
    # Two kv heads, so that neither sinks nor lists of one serve for the other.
    options = {"heads": (4, 2), "head_dim": 16, **options}
    for i, make in enumerate((lists, (packed, several)[number % 2])):
        check(tensors, kernels, make(16, 16, 1 + 2 * ((number + i) % 2)), lengths, **options)


def test_scores_far_below_the_soft_cap_lose_no_digits(tensors, kernels) -> None:
    options = {"heads": (24, 2), "head_dim": 40, "dtype": FP16, "kind": "paged", "softmax_scale": -0.1}
    for make in (lists, packed):
        check(tensors, kernels, make(), [(1, 2), (0, 3)], softcap=30.0, **options)


def test_a_padded_batch_of_full_rows_has_no_bounds_to_read(tensors, kernels) -> None:
    for make in (lists, packed):
        check(tensors, kernels, make(), [(5, 20), (5, 20)], heads=(2, 1), head_dim=16, kind="padded", side="none")


# The largest of such scores is none.
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@makers
def test_a_row_whose_every_key_is_nan_says_so_and_other_sequences_do_not(tensors, kernels, make) -> None:
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    batch = tensors.batch([(33, 2), (17, 2)], heads=(1, 1), head_dim=16, mask=mask)
    batch.spoil(0, range(35))
    kernels.attend(batch, make())
    assert bool(batch.out.tensor[:2].isnan().all())
    assert bool(batch.out.tensor[2:].isfinite().all())


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("splits", [1, 2])
@makers
def test_keys_that_no_query_sees_are_not_read_wherever_they_lie(tensors, kernels, make, splits, kind) -> None:
    """In blocks that are not listed, before the window, and in the part of a listed block that is before it."""
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    mask[:, :, 3] = False
    batch = tensors.batch([(75, 3), (40, 17)], heads=(2, 1), head_dim=16, kind=kind, window=(40, -1), mask=mask)
    for sequence, context in enumerate((75, 40)):
        batch.spoil(sequence, [*range(context - 40), *range(48, min(64, batch.totals[sequence]))])
    kernels.attend(batch, make(num_splits=splits))
    batch.check()


# Splits, fixed and repeated


FIXED = [lists(), lists(num_splits=3), packed(), several(16, 16, 2)]


@pytest.mark.parametrize("plan", FIXED, ids=name_of)
def test_plans_with_fixed_splits_are_batch_invariant(tensors, kernels, plan) -> None:
    lengths = [(70, 5), (0, 17), (33, 1)]
    batch = tensors.batch(lengths, heads=(2, 1), head_dim=16, sinks=True, kind="paged")
    q, out, lse = batch.q, batch.out.tensor, batch.lse.tensor
    cu, table, seqlens = (batch.positional[name] for name in ("cu_seqlens_q", "block_table", "seqlens_k"))

    def compute(some: slice) -> list[torch.Tensor]:
        """These sequences alone: their outputs, as one row each of the longest."""
        begins = batch.begins[some.start : some.stop + 1]
        rows = slice(begins[0], begins[-1])
        given = list(batch.tensors)
        given[0], given[14], given[15] = q[rows], torch.empty_like(out[rows]), torch.empty_like(lse[:, rows])
        given[5] = cu[some.start : some.stop + 1] - begins[0]
        given[7], given[8] = table[some], seqlens[some]
        batch.prepare(plan, given)(*given)
        longest = max(new for _, new in lengths)
        results = torch.zeros(len(begins) - 1, longest, 2, 17, device=q.device)
        for i, begin in enumerate(begins[:-1]):
            own = slice(begin - begins[0], begins[i + 1] - begins[0])
            results[i, : own.stop - own.start, :, :16] = given[14][own].float()
            results[i, : own.stop - own.start, :, 16] = given[15][:, own].mT
        return [results]

    check_batch_invariant(compute, len(lengths))
    kernels.attend(batch, plan)
    batch.check()


@pytest.mark.parametrize("plan", FIXED[1:], ids=name_of)
def test_the_same_call_twice_gives_the_same_bits(tensors, kernels, plan) -> None:
    batch = tensors.batch([(40, 5), (0, 3)], heads=(2, 1), head_dim=16, window=(25, -1))

    def compute() -> list[torch.Tensor]:
        kernels.attend(batch, plan)
        return [batch.out.tensor, batch.lse.tensor]

    check_deterministic(compute, runs=2 if INTERPRETED else 5)


# Any make of batch


@st.composite
def makes(draw) -> tuple[AttentionPlan, dict[str, Any]]:
    blocks = draw(st.sampled_from([(16, 16), (32, 32), (32, 16), (16, 32), (48, 48)]))
    block = st.sampled_from([16, 32])
    make = draw(st.sampled_from([lists, packed, several]))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (6, 2)]))
    block_m, block_n = draw(block), draw(block)
    if make is lists and blocks[0] % block_m:
        block_m = 16
    if blocks[1] % block_n:
        block_n = 16
    plan = make(block_m, block_n, draw(st.sampled_from([1, 1, 2, 5])))
    kind = draw(st.sampled_from(KINDS))
    layout = draw(st.sampled_from(["NHD", "HND", "x-packed"]))
    sizes = [16, 32] if kind == "paged" and layout == "x-packed" else [16, 24, 32, 40]
    options: dict[str, Any] = {
        "heads": heads, "blocks": blocks, "kind": kind,
        "head_dim": draw(st.sampled_from(sizes)), "head_dim_v": draw(st.sampled_from([16, 24, 32, 40])),
        "page": draw(st.sampled_from([1, 3, 16, 24, 32])), "page_layout": layout,
        "dtype": draw(st.sampled_from([BF16, FP16, FP32])), "one_layout": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, (0, 0), (9, -1), (30, -1)])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])), "softmax_scale": draw(st.sampled_from([None, 0.5, -0.2])),
        "sinks": draw(st.booleans()), "lse": draw(st.booleans()),
        "side": draw(st.sampled_from(["left", "right", "both"])),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }  # fmt: skip
    if kind != "padded":
        options["rows_after"] = draw(st.sampled_from([0, 1, 20]))
    return plan, options


def sequences(most: int, longest: int, deepest: int, least: int = 0) -> st.SearchStrategy[list[tuple[int, int]]]:
    context = st.one_of(st.just(0), st.integers(0, deepest))
    new = st.one_of(st.just(0), st.just(1), st.integers(2, longest))
    return st.lists(st.tuples(context, new), min_size=least, max_size=most)


@settings(max_examples=20 if INTERPRETED else 10, derandomize=True)
@given(make=makes(), lengths=sequences(3, 20, 50, least=1), seed=st.integers(0, 2**31))
def test_random_batches_match_the_oracle(tensors, kernels, make, lengths, seed) -> None:
    torch.manual_seed(seed)
    plan, options = make
    batch = tensors.batch(lengths, **options)
    if batch.q.numel():
        kernels.attend(batch, plan)
        batch.check()


BULK: list[dict[str, Any]] = [
    {"heads": (8, 2), "head_dim": 128, "blocks": (64, 64), "kind": "paged", "page": 64},
    {"heads": (4, 2), "head_dim": 80, "window": (100, -1), "blocks": (32, 32)},
    {"heads": (4, 1), "head_dim": 64, "head_dim_v": 96, "sinks": True, "blocks": (64, 128), "kind": "padded"},
]  # fmt: skip


@gpu
@pytest.mark.parametrize(
    "plan", [lists(32, 32, 1, 2), lists(32, 32, 3, 2), packed(16, 32, 2, 3), several(32, 32, 2, 3)], ids=name_of
)
@pytest.mark.parametrize("options", BULK, ids=str)
@settings(max_examples=40)
@given(lengths=sequences(12, 700, 2000), seed=st.integers(0, 2**31))
def test_large_ragged_batches_match_the_oracle(tensors, kernels, plan, options, lengths, seed) -> None:
    """One compilation, so that many lengths can be tried."""
    torch.manual_seed(seed)
    batch = tensors.batch(lengths, **options)
    if batch.q.numel():
        kernels.attend(batch, plan)
        batch.check(most=4)


# What kernels are made of


@triton.jit
def _exponentials(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, softmax.exponential(tl.load(p_x + o)))


def test_the_exponential_of_float32_is_right_within_a_unit_in_the_last_place(device) -> None:
    x = torch.cat([-torch.rand(4000) * 87, -torch.rand(90), torch.tensor([0.0, -200.0, -torch.inf, torch.nan])])
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)), value=-1.0).to(device)
    y = torch.empty_like(x)
    _exponentials[(1,)](x, y, 4096)
    exact = x.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    off = ((y.double() - exact).abs() / unit)[exact > 2.0**-126]
    assert off.max() <= 1
    assert y[4090] == 1
    assert y[4092] == 0
    assert bool(y[4093].isnan())


def test_lse_of_sums_that_tensor_cores_cut_off_is_within_its_bound(tensors) -> None:
    """Of 24 lse of float16 each sum of 40 products was cut off three times: 1.26 of what one unit allows."""
    batch = tensors.batch([(0, 2)], heads=(12, 4), head_dim=40, dtype=FP16, mask=torch.ones(12, 1, 1, dtype=torch.bool))
    torch.manual_seed(82)
    # The worst of 400000 draws.
    q, k = (torch.randn(1000, 2, heads, 40)[595].half() for heads in (12, 4))
    batch.q[:] = q.to(batch.q)
    batch.keys = k.to(batch.keys)
    with gluon.truncated_sums():
        products = torch.stack([product_of(q[:, h], k[:, h // 3].T, None) for h in range(12)])
    # In base 2, as the kernels take it.
    scores = products * (batch.scale * 1.4426950408889634)
    scores = scores.masked_fill(torch.ones(2, 2, dtype=torch.bool).triu(1), -torch.inf)
    top = scores.amax(-1)
    lse = (top * 0.6931471805599453 + torch.exp2(scores - top[..., None]).sum(-1).log()).to(batch.device)
    rows = batch.sample()
    out = batch.wanted(rows)[0].plain.to(FP16)
    batch.check_out(out, lse)
    with pytest.raises(AssertionError, match="lse"):
        batch.check_out(out, lse * (1 + 2**-18))
