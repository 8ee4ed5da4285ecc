"""What do launches hand to kernels? On any machine: kernels are stood in for, and what they are given is looked at."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from kernel_reference.testing.memory import bytes_alive
from tilelang_mla import DecodeTiles, PrefillPlan
from tilelang_mla.arguments import (
    Decode8bitTensors,
    DecodeOptions,
    DecodeTensors,
    PrefillOptions,
    PrefillTensors,
    check_decode,
    check_prefill,
)
from tilelang_mla.caches import E4M3
from tilelang_mla.plan import DeviceLimits

Tensor = torch.Tensor
BF16 = torch.bfloat16
KINDS: dict[str, Any] = {
    "decode": (DecodeTensors, DecodeOptions, check_decode), "prefill": (PrefillTensors, PrefillOptions, check_prefill)
}  # fmt: skip


@pytest.fixture
def launch(launch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """launch.py with kernels that only note their arguments, in ``given``."""
    given: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []

    def kernel(name: str, **constants: Any) -> Any:
        return lambda *arguments: given.append((name, constants, arguments))

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(132))
    monkeypatch.setattr(launch, "given", given, raising=False)
    return launch


def decoding(batch: int = 3, tokens: int = 2, heads: int = 16, page: int = 64, **changed: Any) -> list[Any]:
    """q, kv, seqlens_k, block_table, first_part, order, out, lse, dim_nope, scale, causal, plan."""
    ints = torch.zeros(8 * batch + 1, dtype=torch.int32)
    named = {
        "q": torch.zeros(batch, tokens, heads, 576, dtype=BF16), "kv": torch.zeros(9, page, 1, 576, dtype=BF16),
        "seqlens_k": ints[:batch], "block_table": ints[: 2 * batch].view(batch, 2), "first_part": None,
        "order": None, "out": torch.zeros(batch, tokens, heads, 512, dtype=BF16),
        "lse": torch.zeros(batch, heads, tokens), "dim_nope": 512, "scale": 0.1, "causal": True, "plan": None,
    }  # fmt: skip
    return [{**named, **changed}[name] for name in named]


def started(launch: Any, arguments: list[Any], op: str = "decode") -> list[Any]:
    """The kernels that a call of these arguments of the op starts."""
    launch.given.clear()
    kinds = {
        "decode": (DecodeTensors, DecodeOptions, check_decode),
        "prefill": (PrefillTensors, PrefillOptions, check_prefill),
    }
    of_tensors, of_options, check = kinds[op]
    count = len(of_tensors._fields)
    tensors, options = of_tensors(*arguments[:count]), of_options(*arguments[count:])
    plan = options.plan
    problem, plan = check(tensors, options._replace(plan=None if plan is None else plan.as_ints()))
    getattr(launch, f"prepare_{op}")(problem, plan, tensors)(*tensors)
    return [name for name, _, _ in launch.given]


@lru_cache
def text_of(launch: Any, name: str, **constants: Any) -> Any:
    """Traced once for all that hand the same kernel its arguments."""
    return launch.text_of(name, **constants)


def assert_fits(launch: Any, name: str, constants: dict[str, Any], arguments: tuple[Any, ...]) -> None:
    """As many arguments as the kernel has, of its ranks, dtypes and constant sizes; one size for one name."""
    text = text_of(launch, name, **constants)
    assert len(arguments) == len(text.params)
    known: dict[str, int] = {}
    for parameter, argument in zip(text.params, arguments, strict=True):
        if parameter not in text.buffer_map:
            assert isinstance(argument, float if str(parameter.dtype) == "float32" else int), parameter
            continue
        buffer = text.buffer_map[parameter]
        assert str(argument.dtype).removeprefix("torch.") == str(buffer.dtype), parameter
        assert len(buffer.shape) == argument.ndim, parameter
        for wanted, size in zip([*buffer.shape, *buffer.strides], [*argument.shape, *argument.stride()], strict=False):
            name_of_size = str(wanted)
            if name_of_size.isdigit():
                assert int(name_of_size) == size, parameter
            elif name_of_size.isidentifier():
                assert known.setdefault(name_of_size, size) == size, (parameter, name_of_size)


@pytest.mark.parametrize(("page", "boxes"), [(64, 0), (48, 1), (24, 0), (1, 0), (128, 0)])
def test_decoding_hands_kernels_what_they_are_made_for(launch, page, boxes) -> None:
    ints = torch.zeros(100, dtype=torch.int32)
    plans: list[dict[str, Any]] = [
        {}, {"lse": None}, {"batch": 1, "tokens": 1, "heads": 1}, {"plan": DecodeTiles(64, 64, 2, 3)},
        {"plan": DecodeTiles(64, 64, 2, 1, 5), "first_part": ints[:4], "order": ints[:8]},
        {"plan": DecodeTiles(64, 64, 2, 1, 5), "first_part": ints[:4]},
    ]  # fmt: skip
    for changed in plans:
        names = started(launch, decoding(page=page, **changed))
        assert names in (["decode"], ["decode", "merge"])
        for name, constants, arguments in launch.given:
            assert_fits(launch, name, constants, arguments)
        constants = launch.given[0][1]
        assert constants["gather"] == (page % 64 != 0)
        # A plan of one's own says nothing of rows, of which boxes are.
        assert constants.get("boxes", False) == bool(boxes and constants["by_rows"])


@pytest.mark.parametrize(("batch", "page", "ordered"), [(300, 64, 2), (300, 32, 0), (3, 64, 0), (300, 128, 0)])
def test_programs_take_long_ones_of_short_sequences_first(launch, batch, page, ordered) -> None:
    """Of up to two blocks each, where there are more of them than programs; else parts are shared or as numbered."""
    started(launch, decoding(batch, 1, 1, page))
    assert launch.given[0][2][-3] == ordered


@pytest.mark.parametrize("records", [False, True], ids=["bfloat16", "records"])
def test_sparse_decoding_hands_kernels_what_they_are_made_for(launch, records) -> None:
    from tilelang_mla.sparse.arguments import SparseOptions, SparseTensors, check_sparse

    ints = torch.zeros(200, dtype=torch.int32)
    plans = [
        (None, None, None), (DecodeTiles(64, 64, 2, 3), None, None),
        (DecodeTiles(64, 64, 2, 2, by_rows=True), None, None), (DecodeTiles(64, 64, 2, 1, 5), ints[:7], ints[:11]),
    ]  # fmt: skip
    for (plan, first, order), more, tokens in itertools.product(plans, (False, True), (1, 2)):
        lists = 6 // tokens
        width = 576 if records or more else 512
        kv = torch.zeros(9, 48, 1, 656, dtype=torch.uint8) if records else torch.zeros(9, 48, 1, width, dtype=BF16)
        # No descriptor addresses heads that are the same memory: they are copied.
        q = torch.zeros(lists, tokens, 1, width, dtype=BF16).expand(lists, tokens, 16, width)
        tensors = SparseTensors(
            q if more else q.contiguous(), kv, ints[: 6 * 20].view(lists, tokens, 20),
            ints[:lists] if more else None, torch.zeros(16) if more else None, first, order,
            torch.zeros(lists, tokens, 16, 512, dtype=BF16), torch.zeros(lists, 16, tokens) if more else None,
        )  # fmt: skip
        launch.given.clear()
        problem, _ = check_sparse(tensors, SparseOptions(512, 0.1, None if plan is None else plan.as_ints()))
        launch.prepare_sparse(problem, plan, tensors)(*tensors)
        names, joined = [name for name, _, _ in launch.given], launch.given[0][1].get("joined", False)
        # The 20 keys are one block, and programs that share them cut no list.
        assert names == ["decode_sparse", *(["merge"] if plan is not None and not joined else [])]
        assert joined == (plan is not None and plan.num_splits == 2)
        for name, constants, arguments in launch.given:
            assert_fits(launch, name, constants, arguments)
        assert min(launch.given[0][2][0].stride()) > 0


def test_launches_of_new_sizes_keep_no_memory(launch) -> None:
    """Each is kept as long as the process lives, and a server's life has thousands of sizes."""
    from tilelang_mla.sparse.arguments import SparseOptions, SparseTensors, check_sparse

    def prepared(batch: int) -> list[Any]:
        arguments = decoding(batch)
        dense, options = DecodeTensors(*arguments[:8]), DecodeOptions(*arguments[8:])
        q, kv, lengths, *_, out, lse = dense
        sparse = SparseTensors(q, kv, torch.zeros(batch, 2, 20, dtype=torch.int32), lengths, None, None, None, out, lse)
        return [
            launch.prepare_decode(*check_decode(dense, options), dense),
            launch.prepare_sparse(*check_sparse(sparse, SparseOptions(512, 0.1, None)), sparse),
        ]

    kept = prepared(1)
    before = bytes_alive()
    for batch in (2, 3, 4):
        kept += prepared(batch)
    assert bytes_alive() == before


@pytest.mark.parametrize("cache", ["e4m3", "656"])
def test_caches_of_8_bits_hand_kernels_what_they_are_made_for(launch, cache) -> None:
    records = cache == "656"
    kv = torch.zeros(9, 48, 1, 656, dtype=torch.uint8) if records else torch.zeros(9, 48, 1, 576).to(E4M3)
    bare = {"q": torch.zeros(3, 2, 16, 512, dtype=BF16), "kv": torch.zeros(9, 48, 1, 512).to(E4M3)}
    of_keys = DecodeTiles(16, 128, 4, 3)
    plans = (DecodeTiles(64, 64, 2, 3), of_keys, *([] if records else [replace(of_keys, narrow=True)]))
    for changed in ({}, {"lse": None} if records else bare, *({"plan": plan} for plan in plans)):
        arguments = decoding(**{"kv": kv, **changed})
        tensors = Decode8bitTensors(*arguments[:6], None if records else torch.ones(1), *arguments[6:8])
        plan = arguments[-1]
        launch.given.clear()
        numbers = None if plan is None else plan.as_ints()
        problem, _ = check_decode(tensors, DecodeOptions(*arguments[8:11], numbers))
        launch.prepare_decode_8bit(problem, plan, tensors)(*tensors)
        # Two tokens of 16 heads; a plan may ask for fewer rows.
        rows = 16 if plan is not None and plan.block_m == 16 else 32
        assert [constants["block_m"] for name, constants, _ in launch.given if name == "decode_8bit"] == [rows]
        for name, constants, handed in launch.given:
            assert_fits(launch, name, constants, handed)
            assert ("narrow" in constants) == (name == "decode_8bit" and plan is not None and plan.narrow)


def test_the_merging_kernel_runs_where_keys_may_be_cut_and_only_there(launch) -> None:
    assert started(launch, decoding(plan=DecodeTiles(64, 64, 2, 1))) == ["decode"]
    assert started(launch, decoding(plan=DecodeTiles(64, 64, 2, 2))) == ["decode", "merge"]


def test_nothing_is_launched_over_nothing(launch) -> None:
    assert started(launch, decoding(batch=0)) == []
    assert started(launch, decoding(tokens=0)) == []
    arguments = decoding(block_table=torch.zeros(3, 0, dtype=torch.int32))
    arguments[6].fill_(7)
    assert started(launch, arguments) == []
    assert not bool(arguments[6].any())
    assert bool((arguments[7] == -torch.inf).all())


def test_a_pool_without_pages_is_one_of_zeros(launch) -> None:
    started(launch, decoding(kv=torch.zeros(0, 64, 1, 576, dtype=BF16)))
    assert launch.given[0][2][1].shape == (1, 64, 576)


def test_scales_of_0_and_below_become_scales_above_0(launch) -> None:
    arguments = decoding(scale=-0.5)
    arguments[0].normal_()
    started(launch, arguments)
    handed = launch.given[0][2]
    torch.testing.assert_close(handed[0], -arguments[0].flatten(1, 2), rtol=0, atol=0)
    assert handed[11] == pytest.approx(0.5 * 1.4426950408889634)
    started(launch, decoding(scale=0.0))
    assert 0 < launch.given[0][2][11] < 1e-20


def test_queries_and_outputs_that_no_descriptor_tells_of_are_copied(launch) -> None:
    wide = torch.zeros(3, 2, 32, 576, dtype=BF16)[:, :, :16]
    odd = torch.full((3, 2, 16, 513), 7.0, dtype=BF16)[..., :512]
    for changed in ({"q": wide}, {"out": odd}, {"q": torch.zeros(1, 1, 16, 576, dtype=BF16).expand(3, 2, 16, 576)}):
        arguments = decoding(**changed)
        started(launch, arguments)
        name, constants, handed = launch.given[0]
        assert_fits(launch, name, constants, handed)
        assert all(stride % 8 == 0 and stride > 0 for place in (0, 1, 6) for stride in handed[place].stride()[:-1])
    # Of another one than its own memory: it has been written over.
    assert launch.given[0][2][0].data_ptr() != arguments[0].data_ptr()


def test_pages_that_are_all_the_same_memory_are_copied_row_by_row(launch) -> None:
    for page in (64, 16):
        started(launch, decoding(kv=torch.zeros(1, page, 1, 576, dtype=BF16).expand(9, page, 1, 576)))
        assert launch.given[-1][1]["gather"]
        assert "boxes" not in launch.given[-1][1]


@pytest.mark.parametrize("plan", [None, PrefillPlan(64, 32, 1), PrefillPlan(64, 32, 1, 3)], ids=str)
def test_prefill_hands_its_kernel_what_it_is_made_for(launch, plan) -> None:
    bounds = torch.zeros(4, dtype=torch.int32)
    for heads, tokens, lse in (((4, 2), 50, True), ((1, 1), 1, False)):
        q, k, v = (
            torch.zeros(tokens, h, d, dtype=BF16) for h, d in ((heads[0], 192), (heads[1], 192), (heads[1], 128))
        )
        given = [q, k, v, bounds, bounds, torch.zeros(tokens, heads[0], 128, dtype=BF16)]
        given += [torch.zeros(heads[0], tokens) if lse else None, 50, 50, -0.1, True, plan]
        of_parts = [] if plan is None or plan.num_splits == 1 else ["merge_ranks"]
        assert started(launch, given, "prefill") == ["prefill", *of_parts]
        for handed in launch.given:
            assert_fits(launch, *handed)


def test_blocks_that_do_not_fit_and_addresses_that_are_odd_are_refused_by_name(launch) -> None:
    with pytest.raises(ValueError, match=r"^plan must be of blocks that fit in"):
        started(launch, decoding(plan=DecodeTiles(64, 128, 4)))
    room = torch.zeros(9 * 64 * 576 + 8, dtype=BF16)[1:]
    with pytest.raises(ValueError, match=r"^kv must be at an address that is a multiple of 16"):
        started(launch, decoding(kv=room[: 9 * 64 * 576].view(9, 64, 1, 576)))
