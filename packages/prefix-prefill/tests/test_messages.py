"""Does an error help? It is one line, of an array of another library too, and names the layout that was mixed up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefix_prefill
from kernel_reference.models import LLAMA3_70B
from kernel_reference.testing.guards import assert_bitwise_equal

Tensor = torch.Tensor
MODEL = LLAMA3_70B.tensor_parallel(2)
HEADS, HEADS_KV, D, PAGE, BLOCKS = MODEL.num_heads_q, MODEL.num_heads_kv, MODEL.head_dim, 16, 9


def caches_in(layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "NHD": ((BLOCKS, PAGE, HEADS_KV, D),) * 2,
        "HND": ((BLOCKS, HEADS_KV, PAGE, D),) * 2,
        "x-packed": ((BLOCKS, HEADS_KV, D // 8, PAGE, 8), (BLOCKS, HEADS_KV, D, PAGE)),
    }
    return tuple(torch.randn(shape, device=device).bfloat16() for shape in shapes[layout])  # type: ignore[return-value]


def batch(device: torch.device, rows: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v; block_table, cu_seqlens_q, seqlens_k."""
    new = [torch.randn(rows, heads, D, device=device).bfloat16() for heads in (HEADS, HEADS_KV, HEADS_KV)]
    lengths = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 7]], [0, rows], [25])]
    return new, lengths


@pytest.mark.parametrize("given", ["NHD", "HND", "x-packed"])
@pytest.mark.parametrize("said", ["NHD", "HND", "x-packed"])
def test_caches_of_another_layout_than_said_name_their_own(device, given: str, said: str) -> None:
    new, lengths = batch(device)
    call = (*new, *caches_in(given, device), *lengths)
    if said == given:
        prefix_prefill.prefix_prefill(*call, max_seqlen_q=5, page_layout=said)
        return
    with pytest.raises(ValueError, match=rf'^k_cache must be .*, got .*; with page_layout="{given}" it would fit$'):
        prefix_prefill.prefix_prefill(*call, max_seqlen_q=5, page_layout=said)


def test_caches_that_fit_no_layout_name_none(device) -> None:
    new, lengths = batch(device)
    k_cache, v_cache = caches_in("HND", device)
    for changed in ((k_cache[..., :64], v_cache[..., :64]), (k_cache, v_cache[1:])):
        with pytest.raises(ValueError, match=r"^k_cache must be .*\]$"):
            prefix_prefill.prefix_prefill(*new, *changed, *lengths, max_seqlen_q=5)


def test_pages_taken_for_heads_that_do_not_divide_the_queries_name_the_layout(device) -> None:
    """Where the new tokens are in the cache nothing else tells the number of kv heads."""
    [q, _, _], lengths = batch(device)
    shape = (BLOCKS, HEADS_KV, 24, D)
    k_cache, v_cache = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    with pytest.raises(ValueError, match=r'^q must be of a multiple of .*; with page_layout="HND" it would fit$'):
        prefix_prefill.prefix_prefill(q, None, None, k_cache, v_cache, *lengths, max_seqlen_q=5)


def test_queries_that_no_layout_would_fit_name_none(device) -> None:
    [q, k, v], lengths = batch(device)
    with pytest.raises(ValueError, match=rf"^q must be of a multiple of the {HEADS_KV} kv heads, got 3 heads$"):
        prefix_prefill.prefix_prefill(q[:, :3], k, v, *caches_in("NHD", device), *lengths, max_seqlen_q=5)


@pytest.mark.parametrize("given", ["NHD", "HND"])
def test_the_drop_in_says_which_layout_of_prefix_prefill_its_caches_would_fit(device, given: str) -> None:
    new, lengths = batch(device)
    said = rf'^k_cache must be .*, got .*; with page_layout="{given}" it would fit prefix_prefill$'
    with pytest.raises(ValueError, match=said):
        prefix_prefill.context_attention_fwd(
            *new, torch.empty_like(new[0]), "auto", *caches_in(given, device), *lengths, 25, 5, None, None
        )


LARGE = np.arange(30_000.0, dtype=np.float32).reshape(300, 100)


@pytest.mark.parametrize(
    "name", ["q", "k_cache", "block_table", "sinks", "draft_mask", "k_scale", "out", "window", "page_layout", "plan"]
)
def test_an_array_of_numpy_is_described_and_not_printed(device, name: str) -> None:
    new, lengths = batch(device)
    names = ("q", "k", "v", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqlens_k")
    given: dict[str, Any] = dict(zip(names, (*new, *caches_in("NHD", device), *lengths), strict=True))
    with pytest.raises(TypeError) as raised:
        prefix_prefill.prefix_prefill(**{**given, "max_seqlen_q": 5, name: LARGE})
    assert str(raised.value).startswith(f"{name} must be ")
    assert str(raised.value).endswith(", got a numpy ndarray float32 [300, 100]")


def test_a_merge_describes_what_is_no_tensor_too(device) -> None:
    out, lse = torch.zeros(3, 2, 16, device=device), torch.zeros(2, 3, device=device)
    for place, name in enumerate(("out_a", "lse_a", "out_b", "lse_b")):
        given: list[Any] = [out, lse, out, lse]
        given[place] = LARGE
        with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got a numpy ndarray float32 "):
            prefix_prefill.merge_attention_states(*given)


class Count:
    """A number of another library."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint8, Count], ids=lambda kind: kind.__name__)
def test_integers_of_any_type_are_taken(device, integer: Any) -> None:
    new, lengths = batch(device)
    call = (*new, *caches_in("NHD", device), *lengths)
    for counts in ({"window": (7, 0)}, {"num_splits": 2}):
        wanted = prefix_prefill.prefix_prefill(*call, max_seqlen_q=5, **counts)
        others = {
            name: tuple(map(integer, value)) if isinstance(value, tuple) else integer(value)
            for name, value in counts.items()
        }
        got = prefix_prefill.prefix_prefill(*call, max_seqlen_q=integer(5), **others)
        assert_bitwise_equal(got, wanted)
    packed = caches_in("x-packed", device)
    results = [torch.zeros_like(new[0]) for _ in range(2)]
    for o, kind in zip(results, (int, integer), strict=True):
        prefix_prefill.context_attention_fwd(
            *new, o, "auto", *packed, *lengths, kind(25), kind(5), None, None, sliding_window=kind(7)
        )
    assert_bitwise_equal(results[1], results[0])
