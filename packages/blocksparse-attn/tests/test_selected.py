"""Selected attention: does each token see the blocks that are listed for it, up to itself, and nothing else?

The caches are pages in random order; pages of no sequence, unused tails of pages and the outputs before the call are
NaN. Expected is kernel_reference's oracle in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from blocksparse_attn import SelectedPlan, selected_attention
from blocksparse_attn.plan import DeviceLimits
from blocksparse_attn.selected import ops
from blocksparse_attn.selected.arguments import Options, Tensors, check_selected
from blocksparse_attn.selected.plan import MOST_ENTRIES, Problem, plan_selected
from kernel_reference.checks import validate_values
from kernel_reference.paging import gather
from kernel_reference.selection import selection_mask
from kernel_reference.testing import contract
from kernel_reference.testing.guards import assert_bitwise_equal, poison_

Tensor = torch.Tensor
gpu = pytest.mark.gpu
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
H200 = DeviceLimits(132, 232448, hopper=True)
LENGTHS = [(70, 1), (5, 12), (0, 0), (130, 6)]


def plan(
    rows: int = 16, keys: int = 16, splits: int = 1, packed: int = 1, most_united: int = 0, alone: int = 0
) -> SelectedPlan:
    return SelectedPlan(rows, keys, splits, 4, 1, packed, most_united, alone)


def blockwise(rows: int = 16, keys: int = 16, stages: int = 1, tokens: int = 4096) -> SelectedPlan:
    return SelectedPlan(rows, keys, 1, 4, stages, by_blocks=tokens)


@pytest.fixture
def prepared(device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
    """The launch of a plan of the caller's, and the tensors that it is called with."""

    def prepared(batch: Any, plan: SelectedPlan) -> tuple[Any, Tensors]:
        from blocksparse_attn.selected import launch

        o = batch.options
        scales = [o[name] if isinstance(o[name], Tensor) else None for name in ("k_scale", "v_scale")]
        factors = [o[name] if isinstance(o[name], float) else 1.0 for name in ("k_scale", "v_scale")]
        lse = torch.full((batch.heads[0], len(batch.q)), torch.nan, device=device)
        tensors = Tensors(
            batch.q, batch.k, batch.v, batch.indices, o["block_table"], o["cu_seqlens_q"], o["seqlens_k"], o["sinks"],
            *scales, batch.out.tensor, lse,
        )  # fmt: skip
        options = Options(o["block_size"], o["page_layout"], o["causal"], batch.q.shape[2] ** -0.5, *factors)
        problem = check_selected(tensors, options)
        assert plan.covers(problem)
        return launch.prepare_selected(problem, plan, tensors), tensors

    return prepared


@pytest.fixture
def run(prepared: Callable[..., tuple[Any, Tensors]]) -> Callable[..., None]:
    """The kernel itself, into guarded memory."""

    def run(batch: Any, plan: SelectedPlan) -> None:
        launched, tensors = prepared(batch, plan)
        launched(*tensors)
        batch.out.check()
        batch.check(batch.out.tensor, tensors.lse)

    return run


CASES: dict[str, tuple[SelectedPlan, dict[str, Any]]] = {
    "a token at a time": (plan(), {}),
    "a token at a time, split": (plan(splits=3), {"sinks": True}),
    "two blocks of 8 bits' keys": (plan(16, 32), {"cache": E4M3, "scales": "heads"}),
    "e4m3, one scale each": (plan(), {"cache": E4M3, "scales": "one", "dtype": FP16}),
    "e4m3, widened by an instruction": (replace(plan(16, 32), e4m3=True), {"cache": E4M3, "scales": "heads"}),
    "scales that are numbers": (plan(), {"cache": E4M3, "scales": "numbers"}),
    "blocks of one token": (plan(16, 32), {"block": 1, "topk": 20}),
    "blocks of 4": (plan(16, 32, 2), {"block": 4, "topk": 11, "page": 24, "page_layout": "HND"}),
    "blocks of 64 in pieces": (plan(16, 16), {"block": 64, "topk": 2, "page": 3}),
    "four tokens at a time": (plan(16, 16, 1, 4), {}),
    "four tokens at a time, split": (plan(16, 16, 2, 4), {"sinks": True, "block": 32, "share": 0.9}),
    "four tokens at a time, or one": (plan(16, 16, 1, 4, 5, 16), {"topk": 4, "share": 0.6}),
    "four tokens at a time, or one, split": (plan(16, 16, 2, 4, 5, 32), {"topk": 4, "share": 0.6, "sinks": True}),
    "five tokens of long lists": (plan(16, 32, 1, 5), {"block": 4, "topk": 20, "share": 0.7, "page": 24}),
    "five tokens of long lists, or one, split": (
        plan(16, 16, 3, 5, 40, 16), {"block": 4, "topk": 20, "share": 0.6, "sinks": True, "page_layout": "HND"},
    ),
    "long lists, not causal": (plan(16, 16, 1, 4), {"block": 16, "topk": 33, "causal": False}),
    "eight tokens of one head": (plan(16, 16, 1, 8), {"heads": (2, 2), "share": 0.0, "topk": 5}),
    "heads of a group of 12": (plan(16, 16), {"heads": (12, 1), "head_dim_v": 48}),
    "more heads than rows": (plan(16, 16), {"heads": (40, 2)}),
    "not causal": (plan(16, 16, 1, 2), {"causal": False}),
    "not causal, a token at a time": (plan(16, 32), {"causal": False, "block": 4}),
    "float32": (plan(16, 16, 2, 2), {"dtype": FP32}),
    "one block": (plan(), {"topk": 1}),
    "block by block": (blockwise(), {"sinks": True}),
    "block by block, four tokens a tile": (blockwise(64, 32, 4), {"block": 32, "page": 24, "heads": (24, 2)}),
    "block by block, some tokens at a time": (blockwise(16, 16, 2, tokens=7), {"page_layout": "HND", "head_dim_v": 48}),
    "block by block, not causal": (blockwise(32), {"causal": False, "scales": "heads", "dtype": FP16}),
}  # fmt: skip


@pytest.mark.parametrize(("chosen", "options"), CASES.values(), ids=CASES)
def test_the_kernel_matches_the_oracle(selected, run, chosen, options) -> None:
    run(selected(LENGTHS, **options), chosen)


@pytest.mark.parametrize(
    ("chosen", "kernels"),
    [
        (plan(), ["attend_selected"]),
        (plan(splits=3), ["attend_selected", "merge"]),
        (plan(16, 16, 2, 4, 5, 32), ["unite_lists", "attend_selected", "attend_selected", "merge"]),
    ],
    ids=["at once", "in parts", "four tokens at a time, or one"],
)
def test_addresses_start_what_their_tensors_would(selected, prepared, started, chosen, kernels) -> None:
    by_tensors, by_addresses = started(*prepared(selected(LENGTHS, topk=4), chosen))
    assert [kernel for kernel, *_ in by_tensors] == kernels
    assert by_addresses == by_tensors


@pytest.mark.parametrize(("heads", "seed"), [((1, 1), 189), ((2, 1), 190)], ids=["one row", "two rows"])
def test_few_rows_of_float32_are_not_refused_by_the_luck_of_a_plain_version(selected, run, heads, seed) -> None:
    """Of one row plain PyTorch's four errors were so small that right ones were up to 1.37 of what they may be."""
    torch.manual_seed(seed)
    batch = selected([(40, 1)], heads=heads, head_dim=16, block=4, dtype=FP32, rows_after=0)
    run(batch, plan())
    with pytest.raises(AssertionError, match="ABOVE"):
        batch.check(batch.out.tensor * (1 + 2**-20))


def test_queries_outside_of_float16_meet_keys_of_e4m3(selected, run) -> None:
    batch = selected([(60, 4)], cache=E4M3)
    batch.q[0], batch.q[1:] = 0.0, batch.q[1:] * 2.0**18
    run(batch, plan())


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> SelectedPlan:
    """A plan that reads e4m3 in pairs; on a CPU, which has no such instruction, by another function."""
    if device.type == "cpu":
        from triton import language as tl

        from blocksparse_attn.kernels import selected

        def halves(b_x: Any) -> tuple[Any, ...]:
            both = b_x & 0xFF, (b_x >> 8) & 0xFF
            return tuple(x.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) for x in both)

        monkeypatch.setattr(selected, "halves_of_e4m3", halves)
    return replace(plan(16, 32, 2), e4m3=True, pairs=True)


@pytest.mark.parametrize("options", [{"head_dim": 40, "head_dim_v": 24, "page_layout": "HND"}, {"page": 32}], ids=str)
def test_e4m3_is_read_two_elements_at_a_time(selected, run, pairs, options) -> None:
    run(selected(LENGTHS, cache=E4M3, scales="heads", **options), pairs)


@pytest.mark.parametrize("before", [0, 1])
def test_caches_whose_pairs_lie_apart_are_read_one_by_one(selected, run, pairs, before) -> None:
    """Both caches in one tensor, whose rows have an odd number of elements, or begin at odd addresses."""
    batch = selected(LENGTHS, cache=E4M3)
    both = torch.cat([batch.k[..., :before], batch.k, batch.v, batch.v[..., :1]], 3)
    batch.k, batch.v = both[..., before : before + 32], both[..., before + 32 : before + 64]
    run(batch, pairs)


@pytest.mark.parametrize("options", [{}, {"cache": E4M3, "scales": "heads"}, {"block": 1}, {"causal": False}], ids=str)
def test_a_call_matches_the_oracle_whatever_runs_it(selected, options) -> None:
    batch = selected(LENGTHS, sinks=True, **options)
    got = batch.call(return_lse=True)
    batch.check(got.out, got.lse)
    assert batch.call(out=batch.out.tensor) is batch.out.tensor
    assert_bitwise_equal(batch.out.tensor, got.out)


def test_the_order_of_a_list_and_nothing_in_it_change_no_result(selected) -> None:
    batch = selected(LENGTHS)
    before = batch.call()
    batch.indices = batch.indices.flip(2)
    torch.testing.assert_close(batch.call(), before, atol=1e-2, rtol=1e-2)
    batch.indices = torch.nn.functional.pad(batch.indices, (2, 1), value=-1)
    torch.testing.assert_close(batch.call(), before, atol=1e-2, rtol=1e-2)


def test_tokens_see_their_own_block_up_to_themselves(selected, device) -> None:
    """With the token's own block alone, one by one: the first of it sees itself alone."""
    batch = selected([(14, 6)], block=16, topk=1, rows_after=0)
    batch.indices = (torch.arange(14, 20, device=device)[:, None, None] // 16).int().expand(6, 2, 1).contiguous()
    out = batch.call()
    values = gather(batch.v, batch.options["block_table"], batch.options["seqlens_k"]).tokens
    torch.testing.assert_close(out[2], values[16].repeat_interleave(2, dim=0))
    batch.check(out)


@pytest.mark.parametrize("chosen", [plan(), plan(16, 16, 1, 4), blockwise()], ids=["one", "four", "blocks"])
def test_keys_that_no_token_of_a_tile_sees_are_not_multiplied(selected, device, run, chosen) -> None:
    batch = selected([(60, 4)], block=16, topk=2, page=16, rows_after=0)
    batch.indices = torch.tensor([0, 2], dtype=torch.int32, device=device).expand(4, 2, 2).contiguous()
    table = batch.options["block_table"]
    for page in (1, 3):
        for cache in (batch.k, batch.v):
            poison_(cache[int(table[0, page])])
    # The first token alone lists their own block, and sees none of what the others list.
    batch.indices[0, :, 1] = 3
    for cache in (batch.k, batch.v):
        cache[int(table[0, 3]), :13] = torch.randn(cache[0, :13].shape).to(cache)
    run(batch, chosen)


@pytest.mark.parametrize("chosen", [plan(), plan(16, 16, 2, 4), blockwise()], ids=["one", "four", "blocks"])
def test_lists_of_any_content_touch_nothing_else(selected, device, run, chosen) -> None:
    """Blocks past the last one, far out of bounds, negative; sequences of impossible lengths."""
    batch = selected(LENGTHS, topk=5)
    wild = torch.tensor([2**31 - 1, -(2**31), 9, -7, 2**26], dtype=torch.int32, device=device)
    batch.indices[::2, :, 1:3] = wild[:2]
    batch.indices[1::2, :, 3:] = wild[3:]
    run(batch, chosen)


def test_a_sequence_of_impossible_length_gives_zeros_and_leaves_others_alone(selected) -> None:
    batch = selected(LENGTHS)
    with validate_values(False):
        before = batch.call()
        for wrong in (-1, 5, 2**31 - 1):
            batch.options["seqlens_k"][1] = wrong
            got = batch.call(return_lse=True)
            assert not got.out[1:13].any()
            assert bool((got.lse[:, 1:13] == -torch.inf).all())
            assert_bitwise_equal(got.out[:1], before[:1])
            assert_bitwise_equal(got.out[13:], before[13:])


# Errors

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "block of 3": ({"block_size": 3}, ValueError, r"^block_size must be a power of two up to 256, got 3$"),
    "block of 512": ({"block_size": 512}, ValueError, "^block_size must be a power of two"),
    "a layout": ({"page_layout": "x-packed"}, ValueError, "^page_layout must be one of"),
    "causal as a number": ({"causal": 1}, TypeError, "^causal must be a bool"),
    "scales of three": ({"k_scale": torch.ones(3)}, ValueError, r"^k_scale must be \[2\]"),
    "sinks of one": ({"sinks": torch.ones(1)}, ValueError, r"^sinks must be \[4\]"),
    "a table of others": ({"block_table": torch.zeros(1, 1).int()}, ValueError, r"^block_table must be \[4, "),
    "a plan for more tokens": ({"plan": plan(16, 16, 1, 16)}, ValueError, "^plan must be one made for"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(selected, device, change, kind, words) -> None:
    change = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in change.items()}
    with pytest.raises(kind, match=words):
        selected(LENGTHS).call(**change)


def test_sizes_of_nothing_are_named(selected) -> None:
    batch = selected(LENGTHS)
    batch.v = batch.v.new_zeros(())
    with pytest.raises(ValueError, match=r"^v_cache must be \[Tk, Hkv, Dv\], or of 4 dimensions"):
        batch.call()
    batch.q = batch.q[..., :0]
    with pytest.raises(ValueError, match=r"^q must be of a head size from 16 to 256, got 0"):
        batch.call(softmax_scale=None)


def test_lists_of_other_shapes_and_dtypes_are_refused(selected) -> None:
    batch = selected(LENGTHS)
    for wrong, kind, words in (
        (batch.indices.long(), TypeError, r"^indices.dtype must be int32"),
        (batch.indices[1:], ValueError, r"^indices must be \[21, 2, topk\]"),
        (batch.indices[:, :1], ValueError, r"^indices must be \[21, 2, topk\]"),
        (batch.indices.tolist(), TypeError, r"^indices must be a torch.Tensor"),
        (None, TypeError, r"^indices must be a torch.Tensor, got None"),
    ):  # fmt: skip
        batch.indices = wrong
        with pytest.raises(kind, match=words):
            batch.call()


BAD_VALUES = {
    "a block past the last": (4, 0, 2, r"^indices\[4, 0, 2\] must be a block from 0 to 1, or -1, got 2$"),
    "below -1": (4, 1, -2, r"^indices\[4, 1, 2\] must be a block from 0"),
    "twice": (4, 0, 0, r"^indices\[4, 0, 2\] must be a block that is not listed before, got 0$"),
}


@pytest.mark.parametrize(("token", "head", "block", "words"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_entries_are_named_where_values_are_checked(selected, device, token, head, block, words) -> None:
    batch = selected(LENGTHS)
    batch.indices[4] = torch.tensor([0, -1, -1], dtype=torch.int32, device=device)
    batch.indices[token, head, 2] = block
    with validate_values(), pytest.raises(ValueError, match=words):
        batch.call()


# Plans

M3 = Problem(64, 4, 128, 128, 128, 16, 1024, 1, 32768, 64)


def test_every_call_gets_a_plan_that_covers_it() -> None:
    groups, blocks, lists = (
        ((64, 4), (24, 2), (7, 7), (64, 1), (128, 1)),
        (1, 4, 16, 32, 64, 128, 256),
        (1, 16, 100, 512),
    )
    for (heads, kv), block, topk, tokens, bits in product(groups, blocks, lists, (1, 64, 8192), (16, 32)):
        problem = Problem(heads, kv, 128, 128, block, topk, tokens, 1, 32768, 16, bits=bits, cache_bits=bits)
        for limits in (H200, DeviceLimits(108, 166912), DeviceLimits(304, 65536), DeviceLimits(1)):
            chosen = plan_selected(problem, limits)
            assert chosen.covers(problem), (problem, chosen)
            assert chosen.packed * topk <= MOST_ENTRIES or chosen.packed == 1 or block < 64


def test_neighbouring_tokens_share_a_tile_in_prefill_and_lists_are_split_in_decode() -> None:
    assert plan_selected(M3, H200).packed == 4
    decode = plan_selected(Problem(64, 4, 128, 128, 128, 16, 1, 1, 131072, 64), H200)
    assert decode.packed == 1
    assert decode.num_splits >= 8
    for sequences, splits in ((20, 6), (32, 1), (128, 1), (256, 1)):
        batch = Problem(64, 4, 128, 128, 128, 16, sequences, sequences, 131072, 64)
        chosen = plan_selected(batch, H200)
        assert chosen.num_splits == splits
        assert chosen.dependent_launch
        assert not plan_selected(batch, DeviceLimits(148, 232448)).dependent_launch


def test_steps_of_a_server_compile_nothing_that_its_graphs_and_first_prompts_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel compiled between two steps keeps everybody waiting for 0.4 s."""
    from blocksparse_attn.selected import launch
    from kernel_reference.testing.specs import recorded_launches

    monkeypatch.setattr(launch, "device_limits", lambda _: H200)
    monkeypatch.setattr(launch, "_has_dependent_launches", lambda _: True)

    def compiled(tokens: int, sequences: int) -> set[Any]:
        q = torch.empty(tokens, 64, 128, dtype=BF16)
        pages = torch.empty(64, 4, 128, 128, dtype=BF16)
        shapes = ((tokens, 4, 16), (sequences, 1024), (sequences + 1,), (sequences,))
        ints = [torch.empty(shape, dtype=torch.int32) for shape in shapes]
        given = Tensors(q, pages, pages, *ints, None, None, None, q, None)
        problem = check_selected(given, Options(128, "HND", True, 0.1, 1.0, 1.0))
        run = launch.prepare_selected(problem, None, given)
        return {
            (start.kernel.fn.__name__, start.rest[-1], *sorted(start.options.items()))
            for start, _ in recorded_launches(run, *given)
        }

    # Graphs of decoding, a short prompt, and long ones of few sequences and of many.
    sizes = [(2**i, 2**i) for i in range(9)] + [(256, 8), (4096, 1), (4096, 8)]
    before = set().union(*(compiled(*size) for size in sizes))
    for tokens, sequences in ((3, 2), (17, 1), (118, 11), (297, 33), (312, 36), (700, 200), (2100, 1), (8192, 30)):
        assert compiled(tokens, sequences) <= before, (tokens, sequences)


@pytest.mark.parametrize(("block", "topk"), [(64, 16), (64, 32), (128, 8), (128, 16)])
def test_programs_of_decoding_fill_the_sms_they_were_measured_on(block, topk) -> None:
    problem = replace(M3, block_size=block, topk=topk)
    deep = []
    for sequences in range(1, 200):
        batch = replace(problem, tokens=sequences, sequences=sequences)
        chosen = plan_selected(batch, H200)
        assert chosen.covers(batch)
        if chosen.num_stages != 3:
            deep.append(sequences)
            programs = sequences * 4 * chosen.num_splits
            assert programs <= 2 * H200.cores
            assert programs >= 0.75 * H200.cores or chosen.num_splits == min(16, block * topk // chosen.block_n)
    assert {1, 2, 4, 8, 16, 32, 64} <= set(deep)
    assert not {24, 48, 128} & set(deep)
    few = replace(problem, tokens=8, sequences=8)
    for other in (replace(few, topk=4), replace(few, topk=128), replace(few, head_dim=64, head_dim_v=64)):
        assert plan_selected(other, H200).num_stages == 3


def test_lists_of_two_tiles_or_fewer_are_loaded_in_two_stages_whatever_the_batch() -> None:
    for size, few, many in ((64, (1, 128), (3, 64)), (128, (4, 16), (16, 16)), (256, (1, 32), (4, 32))):
        for tokens in (1, 8, 32, 500):
            problem = Problem(64, 4, size, size, few[1], few[0], tokens, tokens, 32768, 64)
            assert plan_selected(problem, H200).num_stages == 2
            longer = replace(problem, topk=many[0], block_size=many[1])
            assert plan_selected(longer, H200).num_stages > 2, longer


def test_pairs_of_e4m3_are_read_where_one_token_is_walked() -> None:
    decode = replace(M3, tokens=32, sequences=32, cache_bits=8)
    assert plan_selected(decode, H200).pairs
    assert plan_selected(replace(decode, block_size=4), H200).pairs
    for other in (replace(decode, cache_bits=16), replace(M3, cache_bits=8), replace(decode, head_dim_v=17)):
        assert not plan_selected(other, H200).pairs
    assert not plan_selected(decode, DeviceLimits(148, 232448)).pairs
    for sequences, keys, splits in ((1, 128, 16), (8, 128, 8), (32, 128, 1), (64, 128, 1), (128, 64, 1)):
        chosen = plan_selected(replace(decode, tokens=sequences, sequences=sequences), H200)
        assert (chosen.block_n, chosen.num_splits) == (keys, splits), sequences


@pytest.mark.parametrize(("heads", "topk"), [((64, 4), 16), ((64, 4), 64), ((64, 2), 16), ((8, 2), 16)], ids=str)
def test_tokens_whose_lists_have_little_in_common_are_walked_by_themselves(heads, topk) -> None:
    problem = Problem(*heads, 128, 128, 128, topk, 1024, 1, 32768, 64)
    chosen = plan_selected(problem, H200)
    assert chosen.alone_n > 0
    assert chosen.block_m > chosen.alone(problem).block_m
    # Half of the entries are what a tile wins from; all of them, what it loses from.
    assert 0.5 < chosen.most_united / (chosen.packed * topk) < 0.8
    # A tile of one token's rows loses nothing.
    assert plan_selected(Problem(7, 7, 128, 128, 128, 16, 1024, 1, 32768, 64), H200).alone_n == 0


def test_long_lists_of_small_blocks_are_united_where_their_maps_have_room() -> None:
    prompt = Problem(24, 2, 64, 64, 32, 512, 8192, 8, 32768, 16)
    chosen = plan_selected(prompt, H200)
    assert (chosen.packed, chosen.alone_n, chosen.most_united) == (5, 128, 1280)
    # Bytes of maps, caches of 8 bits, short lists, few rows for a tile.
    others = (
        {"capacity": 2**20, "tokens": 2**16},
        {"cache_bits": 8},
        {"topk": 64},
        {"num_heads": 128},
        {"head_dim": 80},
    )
    for other in others:
        assert plan_selected(replace(prompt, **other), H200).packed == 1
    assert plan_selected(replace(prompt, tokens=32, sequences=32), H200).packed == 1


def test_long_prompts_are_walked_block_by_block() -> None:
    prompt = replace(M3, tokens=8192)
    assert plan_selected(prompt, H200).by_blocks == 4096
    batch = replace(prompt, sequences=4096)
    for other in (M3, batch, replace(prompt, block_size=4), replace(prompt, cache_bits=8), replace(prompt, topk=512)):
        assert plan_selected(other, H200).by_blocks == 0
    assert plan_selected(prompt, DeviceLimits(148, 232448)).by_blocks == 0


# The op


@pytest.fixture
def by_kernels(interpreted: Callable[..., Any]) -> Iterator[None]:
    """The op runs the kernel on CPU tensors, interpreted, with the plan of a device with one SM."""
    from blocksparse_attn.selected import launch

    with interpreted("selected", ops.attend_now, ops, launch, cores=2):
        yield


@pytest.mark.usefixtures("by_kernels")
def test_a_call_reaches_the_kernel_with_every_argument_in_its_place(selected) -> None:
    for options in ({"cache": E4M3, "scales": "heads"}, {"page_layout": "HND", "causal": False}):
        batch = selected(LENGTHS, sinks=True, head_dim_v=48, **options)
        for _ in range(2):
            got = batch.call(return_lse=True)
            batch.check(got.out, got.lse)


@pytest.mark.usefixtures("by_kernels")
def test_a_call_that_looks_like_the_last_is_begun_at_once_and_no_other(selected, monkeypatch) -> None:
    from blocksparse_attn.selected import api, straight

    looked_at = []
    attended = straight.attended
    monkeypatch.setattr(api, "runs_now", lambda inputs: True)
    monkeypatch.setattr(straight, "attended", lambda *given: looked_at.append(1) or attended(*given))
    batch = selected(LENGTHS[:2], sinks=True)
    others = [{"causal": False}, {"softmax_scale": 0.5}, {"return_lse": True}]
    with validate_values(False):
        for options in ({}, *others):
            with torch.no_grad():
                first, again = (batch.call(**options) for _ in range(2))
            assert_bitwise_equal(again[0], first[0])
        batch.check(again.out, again.lse)
        assert len(looked_at) == 1 + len(others)
        for wrong in ({"causal": 1}, {"block_size": 16.0}, {"page_layout": ["NHD"]}):
            with torch.no_grad(), pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} "):
                batch.call(**wrong)
        batch.q.requires_grad_()
        for mode in (False, True, False, True):
            with torch.set_grad_enabled(mode):
                assert batch.call().requires_grad == mode


def test_the_op_passes_opcheck_and_compiles(selected) -> None:
    batch = selected(LENGTHS)
    given = (batch.q, batch.k, batch.v, batch.indices)
    o = batch.options
    out = torch.empty_like(batch.q)
    names = ("block_table", "cu_seqlens_q", "seqlens_k")
    tensors = (*given, *(o[name] for name in names), None, None, None, out, None)
    torch.library.opcheck(
        torch.ops.blocksparse_attn.selected.default, (*tensors, 16, "NHD", True, 0.2, 1.0, 1.0),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    compiled = torch.compile(lambda *x: selected_attention(*x, **o), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_bitwise_equal(compiled(*given), batch.call())


def test_a_selection_as_a_mask_lists_what_is_there() -> None:
    mask = selection_mask(torch.tensor([[[3, -1, 0], [5, 9, -4]]]), 5)
    assert mask.tolist() == [[[True, False, False, True, False], [False] * 5]]


@gpu
@pytest.mark.parametrize("lengths", [[(131071, 1)], [(1000 * i, 1) for i in range(1, 33)], [(8192, 512)]], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache": E4M3, "scales": "one"}, {"heads": (24, 2), "head_dim": 256, "block": 4, "topk": 512}],
    ids=str,
)
def test_models_at_their_sizes(selected, lengths, options) -> None:
    """MiniMax-M3's layer, with an 8-bit cache too, and Qwen3.8's."""
    sizes = {"heads": (64, 4), "head_dim": 128, "block": 128, "topk": 16, "page": 64, "share": 0.7, **options}
    batch = selected(lengths, rows_after=0, **sizes)
    got = batch.call(return_lse=True)
    batch.check(got.out, got.lse)
    contract.check_deterministic(lambda: [batch.call()])


@gpu
@pytest.mark.parametrize(
    "chosen",
    [blockwise(64, 128, 2), blockwise(64, 128, 3, tokens=384), replace(blockwise(64, 128), shared=True)],
    ids=["one", "two", "shared"],
)
def test_prefill_block_by_block_at_its_sizes(selected, chosen) -> None:
    batch = selected(
        [(8192, 512), (0, 100), (3000, 1)], heads=(64, 4), head_dim=128, block=128, topk=16, page=64, share=0.5
    )
    got = batch.call(return_lse=True, plan=chosen)
    batch.check(got.out, got.lse)
    contract.check_deterministic(lambda: [batch.call(plan=chosen)])


@gpu
def test_a_captured_graph_follows_new_lists(selected) -> None:
    batch = selected([(1000, 1), (2000, 3)], heads=(64, 4), head_dim=128, block=64, topk=8, page=64)
    batch.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.call()
    for _ in range(2):
        # Others than before, each once still.
        batch.indices.copy_(torch.where(batch.indices > 0, batch.indices - 1, -1))
        graph.replay()
        batch.check(out)
