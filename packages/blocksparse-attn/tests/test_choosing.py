"""Are the blocks chosen that score best, exactly, and nothing that causality leaves out?"""

from __future__ import annotations

import pytest
import torch

from blocksparse_attn import BlockLayout, select_blocks, selected_attention
from blocksparse_attn.choosing import ops, reference
from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal

Tensor = torch.Tensor
gpu = pytest.mark.gpu
INF, NAN = float("inf"), float("nan")


def literal(scores: list[float], possible: int, topk: int, local: int, sink: int, within: bool) -> list[int]:
    """The definition, one row at a time."""
    possible = min(possible, len(scores))
    always = {c for c in range(possible) if c >= possible - local or c < sink}
    others = [c for c in range(possible) if c not in always and scores[c] > -INF]
    best = sorted(others, key=lambda c: (-scores[c], c))
    return sorted(always | set(best[: max(0, topk - len(always)) if within else topk]))


ROWS = [
    [0.5, 0.25, -1.0, 3.0, 3.0, 0.0, -0.0, 2.5], [1.0] * 8, [-INF] * 8, [NAN, 1.0, NAN, -2.0, INF, -INF, 0.0, 1e-40],
    [-1.0, -2.0, -3.0, -2.0, -1.0, -2.0, -1.5, -1e30], [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
    [-0.0, 0.0, -3.0, -0.0, 0.0, -0.0, -1.0, 0.0],
]  # fmt: skip


RULES = [
    (3, 0, 0, False), (2, 1, 1, False), (4, 2, 1, True), (1, 1, 0, True), (0, 1, 0, False), (20, 0, 0, False),
]  # fmt: skip


@pytest.mark.parametrize("way", ["op", "kernel"])
@pytest.mark.parametrize(("topk", "local", "sink", "within"), RULES)
def test_the_best_columns_are_chosen_and_of_equal_ones_the_lower(device, way, topk, local, sink, within) -> None:
    scores = torch.tensor([row for row in ROWS for _ in range(4)], device=device)
    possible = torch.tensor([0, 1, 5, 8] * len(ROWS), dtype=torch.int32, device=device)
    if way == "op":
        indices, counts = ops.chosen(scores, possible, topk, local, sink, within)
    else:
        from blocksparse_attn.choosing.launch import prepare_choose

        width = min(8, topk if within else topk + local + sink)
        indices = torch.full((len(scores), width), -9, dtype=torch.int32, device=device)
        counts = torch.full((len(scores),), -9, dtype=torch.int32, device=device)
        given = (scores, possible, indices, counts)
        prepare_choose(given, (topk, local, sink, within, 1, 1, 1))(*given)
    for row, columns, listed, count in zip(
        scores.tolist(), possible.tolist(), indices.tolist(), counts.tolist(), strict=True
    ):
        wanted = literal(row, columns, topk, local, sink, within)
        assert listed == wanted + [-1] * (len(listed) - len(wanted))
        assert count == len(wanted)


def test_the_kernel_agrees_with_the_reference_on_rows_of_any_dtype(device) -> None:
    from blocksparse_attn.choosing.launch import prepare_choose

    # The numbers of more than 255 chosen columns have more bits.
    for dtype, columns, topk in (
        (torch.float32, 700, 9),
        (torch.bfloat16, 37, 9),
        (torch.float16, 5, 9),
        (torch.float32, 600, 300),
    ):
        # Few values, so that many are equal.
        scores = torch.randint(-9, 9, (12, columns), device=device).to(dtype) / 4
        possible = torch.randint(columns + 3, (12,), dtype=torch.int32, device=device)
        got, wanted = (
            [torch.empty(12, min(columns, topk + 5), dtype=torch.int32, device=device), possible.clone()] for _ in "12"
        )
        numbers = (topk, 3, 2, False, 1, 1, 1)
        prepare_choose((scores, possible, *got), numbers)(scores, possible, *got)
        reference.choose(scores, possible, *wanted, *numbers)
        for one, other in zip(got, wanted, strict=True):
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (64, 5), (130, 20)])
def test_lists_are_packed_one_behind_the_other(device, rows, width) -> None:
    """By the kernel too, and rows of nothing among them; what is behind a row's count may be anything."""
    from blocksparse_attn.choosing.launch import prepare_pack

    counts = torch.randint(width + 1, (2 * rows,), dtype=torch.int32, device=device)
    counts[::3] = 0
    indices = torch.randint(99, (2, rows, width), dtype=torch.int32, device=device)
    crow, col = ops.packed(indices, counts)
    listed = indices[torch.arange(width, device=device) < counts.view(2, rows, 1)].split(
        counts.view(2, -1).sum(1).tolist()
    )
    for head in range(2):
        assert crow[head].diff().tolist() == counts.view(2, rows)[head].tolist()
        assert col[head].tolist() == listed[head].tolist() + [-1] * (rows * width - len(listed[head]))
    got = torch.full_like(crow, -9), torch.full_like(col, -9)
    prepare_pack((indices, counts, *got))(indices, counts, *got)
    assert_bitwise_equal(got[0], crow)
    assert_bitwise_equal(got[1], col)


def test_the_kernel_finds_by_itself_what_causality_leaves_a_row(device) -> None:
    from blocksparse_attn.choosing.launch import prepare_choose

    scores = torch.randn(3 * 4, 8, device=device)
    for q_block, k_block in ((64, 32), (32, 64), (16, 16)):
        got, wanted = ([torch.empty(12, 3, dtype=torch.int32, device=device) for _ in "12"] for _ in "12")
        got[1], wanted[1] = (x[:, 0].contiguous() for x in (got[1], wanted[1]))
        numbers = (2, 1, 0, False, 4, q_block, k_block)
        prepare_choose((scores, None, *got), numbers)(scores, None, *got)
        reference.choose(scores, None, *wanted, *numbers)
        for one, other in zip(got, wanted, strict=True):
            assert_bitwise_equal(one, other)


def test_a_layout_of_scores_lists_the_best_the_last_and_the_first_blocks(device) -> None:
    scores = torch.randn(3, 7, 14, device=device)
    layout = BlockLayout.from_scores(scores, 3, q_block=64, k_block=32, local=2, sink=1)
    with validate_values():
        BlockLayout.from_csr(layout.crow, layout.col, 64, 32, columns=14)
    mask = layout.to_mask().tolist()
    for head in range(3):
        for row in range(7):
            wanted = literal(scores[head, row].tolist(), 2 * row + 2, 3, 2, 1, False)
            assert [c for c in range(14) if mask[head][row][c]] == wanted
    assert layout.col.shape == (3, 7 * 6)


@pytest.mark.parametrize("capacity", [None, 9, 40])
def test_a_mask_within_a_capacity_is_the_mask(device, capacity) -> None:
    mask = torch.rand(2, 4, 4, device=device) < 0.5
    mask[:, 3] = torch.tensor([True, False, False, True], device=device)
    layout = BlockLayout.from_mask(mask, 32, 32, capacity=None if capacity is None else max(capacity, int(mask.sum())))
    assert torch.equal(layout.to_mask(), mask)


def test_blocks_past_the_capacity_are_left_out_or_named(device) -> None:
    mask = torch.ones(2, 3, 3, dtype=torch.bool, device=device)
    with validate_values(), pytest.raises(ValueError, match=r"^capacity must be at least 9, the blocks .*, got 7$"):
        BlockLayout.from_mask(mask, 16, 16, capacity=7)
    with validate_values(False):
        layout = BlockLayout.from_mask(mask, 16, 16, capacity=7)
    mask[:, 2, 1:] = False
    assert torch.equal(layout.to_mask(), mask)


@pytest.mark.parametrize(("lengths", "topk"), [([(0, 40), (30, 3)], 3), ([(60, 1), (20, 1), (0, 1)], 2)], ids=str)
def test_selected_blocks_are_those_whose_means_score_best(device, lengths, topk) -> None:
    heads, size, block = 2, 8, 8
    totals = [older + new for older, new in lengths]
    q = torch.randn(sum(new for _, new in lengths) + 1, 4, size, device=device)
    summary = torch.randn(len(lengths), 9, heads, size, device=device)
    cu = torch.tensor([0, *(sum(n for _, n in lengths[: i + 1]) for i in range(len(lengths)))], device=device)
    got = select_blocks(
        q, summary, topk=topk, block_size=block, cu_seqlens_q=cu, seqlens_k=torch.tensor(totals, device=device), sink=1
    )
    assert got.shape == (len(q), heads, topk)
    assert bool((got[-1] == -1).all())
    for i, (older, new) in enumerate(lengths):
        for j, head in ((j, head) for j in range(new) for head in range(heads)):
            token = int(cu[i]) + j
            scores = summary[i, :, head].double() @ q[token, 2 * head : 2 * head + 2].double().sum(0)
            wanted = literal(scores.tolist(), (older + j) // block + 1, topk, 1, 1, True)
            assert got[token, head].tolist() == wanted + [-1] * (topk - len(wanted))


def test_what_is_selected_may_be_attended_to(device) -> None:
    q, keys = torch.randn(5, 4, 16, device=device), torch.randn(3, 16, 2, 16, device=device)
    where = {"cu_seqlens_q": torch.tensor([0, 5], device=device), "seqlens_k": torch.tensor([45], device=device)}
    means = keys.mean(1)[None]
    indices = select_blocks(q, means, topk=2, block_size=16, **where)
    table = torch.arange(3, device=device)[None].int()
    out = selected_attention(q, keys, keys, indices, block_size=16, block_table=table, **where)
    assert bool(out.isfinite().all())


def test_wrong_arguments_are_named(device) -> None:
    q, summary = torch.randn(3, 4, 8, device=device), torch.randn(1, 2, 2, 8, device=device)
    good = {
        "topk": 2, "block_size": 8, "cu_seqlens_q": torch.tensor([0, 3], device=device),
        "seqlens_k": torch.tensor([9], device=device),
    }  # fmt: skip
    for change, words in (
        ({"topk": 0}, "^topk must be at least 1"), ({"sink": 3}, r"^topk must be at least local \+ sink = 4"),
        ({"seqlens_k": torch.tensor([9, 9], device=device)}, r"^seqlens_k must be \[1\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            select_blocks(q, summary, **{**good, **change})
    with pytest.raises(ValueError, match=r"^k_summary must be \[B, blocks, Hkv, 8\]"):
        select_blocks(q, summary[..., :4], **good)
    with pytest.raises(ValueError, match=r"^scores must be \[heads or 1, rows, columns\]"):
        BlockLayout.from_scores(summary[0, 0], 1, q_block=16, k_block=16)
    with pytest.raises(TypeError, match=r"^scores.dtype must be"):
        BlockLayout.from_scores(summary.int()[0], 1, q_block=16, k_block=16)


@gpu
@pytest.mark.parametrize("what", ["scores", "a mask", "means"])
def test_a_graph_chooses_anew_at_each_replay(device, what) -> None:
    """Layouts of scores and of masks within a capacity, and lists of blocks, attended to in the same graph."""
    scores = torch.randn(32, 512, 512, device=device)
    keys, values = torch.randn(2, 512, 64, 4, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(512, dtype=torch.int32, device=device)[None]
    where = {
        "cu_seqlens_q": torch.tensor([0, 512], dtype=torch.int32, device=device),
        "seqlens_k": torch.tensor([32768], dtype=torch.int32, device=device),
    }

    def choose() -> tuple[Tensor, ...]:
        if what == "scores":
            layout = BlockLayout.from_scores(scores, 8, q_block=64, k_block=64, local=4, sink=1)
        elif what == "a mask":
            layout = BlockLayout.from_mask(scores > 1.5, 64, 64, capacity=20000)
        else:
            q = scores[:, :, :128].transpose(0, 1).to(torch.bfloat16)
            indices = select_blocks(q, keys.float().mean(1)[None], topk=16, block_size=64, **where)
            out = selected_attention(q, keys, values, indices, block_size=64, block_table=table, **where)
            return indices, out
        return layout.crow, layout.col

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = choose()
    for _ in range(2):
        scores.copy_(torch.randn_like(scores))
        graph.replay()
        for one, wanted in zip(made, choose(), strict=True):
            assert_bitwise_equal(one, wanted)


def test_the_ops_pass_opcheck(device) -> None:
    scores = torch.randn(6, 5, device=device)
    indices, counts = (torch.zeros(*size, dtype=torch.int32, device=device) for size in ((6, 3), (6,)))
    torch.library.opcheck(
        torch.ops.blocksparse_attn.choose.default, (scores, None, indices, counts, 1, 1, 1, False, 3, 1, 1)
    )
    lists = torch.tensor([[[0, 2, -1], [1, 2, 4]]], dtype=torch.int32, device=device)
    crow, col = (torch.zeros(1, size, dtype=torch.int32, device=device) for size in (3, 6))
    full = torch.tensor([2, 3], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.blocksparse_attn.pack.default, (lists, full, crow, col))
