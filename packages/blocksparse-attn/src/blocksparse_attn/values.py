"""What only device memory tells of a call: lengths, page numbers and the lists of a layout."""

from __future__ import annotations

from blocksparse_attn.arguments import Tensors
from blocksparse_attn.lists import NAMES, Names, fail_lists, list_faults, reach
from blocksparse_attn.plan import Problem
from kernel_reference.checks import fail
from kernel_reference.integers import cdiv
from kernel_reference.ragged import check_cu_seqlens, read_integers

_READ = (
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "q_starts", "q_ends", "k_starts", "k_ends",
)  # fmt: skip


def check_values(problem: Problem, tensors: Tensors, names: Names = NAMES) -> None:
    """All of it, by one copy to the host; ValueError names the first that cannot be."""
    columns = reach(problem.rows, problem.q_block, problem.k_block)
    faults = list_faults(tensors.crow, tensors.col, columns)
    held = read_integers({**{name: getattr(tensors, name) for name in _READ}, "faults": faults})
    if any(held["faults"]):
        fail_lists(tensors.crow, tensors.col, columns, names)
    lengths = _padded_lengths(held, tensors) if problem.padded else _ragged_lengths(held, problem, tensors)
    for sequence, (new, total, total_name) in enumerate(lengths):
        if new > problem.max_seqlen_q:
            fail(names.max_seqlen_q, f"at least {new}, the queries of sequence {sequence}", problem.max_seqlen_q)
        if total < new:
            fail(total_name, f"such that the sequence has at least {new} keys, as many as queries", f"{total} keys")
        most = problem.rows * problem.q_block
        if new and total > most:
            fail(total_name, f"such that the sequence has at most {most} keys, as its layout has rows for", total)
        if problem.page_size and new:
            _check_pages(held["block_table"], sequence, new, total, problem, blocks=tensors.k.shape[0])


def _ragged_lengths(held: dict[str, list[int]], problem: Problem, tensors: Tensors) -> list[tuple[int, int, str]]:
    """Queries and keys of each sequence, and what tells the latter."""
    new = check_cu_seqlens("cu_seqlens_q", held["cu_seqlens_q"], tensors.q.shape[0])
    if not problem.page_size:
        totals = check_cu_seqlens("cu_seqlens_k", held["cu_seqlens_k"], tensors.k.shape[0], of="k")
        return [(n, total, f"cu_seqlens_k[{i + 1}]") for i, (n, total) in enumerate(zip(new, totals, strict=True))]
    found = []
    for i, (n, total) in enumerate(zip(new, held["seqlens_k"], strict=True)):
        if not n <= total <= problem.capacity:
            wanted = f"from {n} (the sequence's queries) to {problem.capacity} (what block_table has slots for)"
            fail(f"seqlens_k[{i}]", wanted, total)
        found.append((n, total, f"seqlens_k[{i}]"))
    return found


def _padded_lengths(held: dict[str, list[int]], tensors: Tensors) -> list[tuple[int, int, str]]:
    found = []
    for i in range(tensors.q.shape[0]):
        lengths = []
        for side, most in (("q", tensors.q.shape[1]), ("k", tensors.k.shape[1])):
            begin = held[f"{side}_starts"][i] if f"{side}_starts" in held else 0
            end = held[f"{side}_ends"][i] if f"{side}_ends" in held else most
            if not 0 <= begin <= most:
                fail(f"{side}_starts[{i}]", f"from 0 to {most}, the rows of a sequence", begin)
            if not begin <= end <= most:
                fail(f"{side}_ends[{i}]", f"from {begin}, where the sequence starts, to {most}", end)
            lengths.append(end - begin)
        found.append((lengths[0], lengths[1], f"k_ends[{i}]"))
    return found


def first_page(problem: Problem, new: int, total: int) -> int:
    """The first page that a sequence's queries may see; engines free those wholly before the window."""
    return max(0, total - new - problem.left) // problem.page_size if problem.left >= 0 else 0


def _check_pages(table: list[int], sequence: int, new: int, total: int, problem: Problem, blocks: int) -> None:
    columns = problem.capacity // problem.page_size
    for column in range(first_page(problem, new, total), cdiv(total, problem.page_size)):
        page = table[sequence * columns + column]
        if not 0 <= page < blocks:
            fail(f"block_table[{sequence}, {column}]", f"a page from 0 to {blocks - 1}", page)
