"""Are the projections taken apart, put together and convolved as their definition says, element by element?"""

import pytest
import torch
import torch.nn.functional as F

from kernel_reference import projection
from kernel_reference.models import QWEN3_NEXT_80B

SHAPES = [(1, 1, 1, 1), (2, 4, 3, 5), (3, 9, 4, 2), (1, 6, 2, 7), (4, 4, 5, 3)]


def positions(heads_qk: int, heads_v: int, head_qk: int, head_v: int, layout: str) -> dict[str, list[int]]:
    """Where the elements of q, k, v, z stand in a row of mixed_qkvz, and those of b, a in one of mixed_ba."""
    ratio = heads_v // heads_qk
    found: dict[str, list[int]] = {name: [] for name in "qkvzba"}
    group = 2 * head_qk + 2 * ratio * head_v
    for g in range(heads_qk):
        for c in range(head_qk):
            found["q"].append(g * group + c if layout == "interleaved" else g * head_qk + c)
            found["k"].append(g * group + head_qk + c if layout == "interleaved" else (heads_qk + g) * head_qk + c)
    for h in range(heads_v):
        g, j = divmod(h, ratio)
        for c in range(head_v):
            if layout == "interleaved":
                found["v"].append(g * group + 2 * head_qk + j * head_v + c)
                found["z"].append(g * group + 2 * head_qk + (ratio + j) * head_v + c)
            else:
                found["v"].append(2 * heads_qk * head_qk + h * head_v + c)
                found["z"].append(2 * heads_qk * head_qk + (heads_v + h) * head_v + c)
        found["b"].append(g * 2 * ratio + j if layout == "interleaved" else h)
        found["a"].append(g * 2 * ratio + ratio + j if layout == "interleaved" else heads_v + h)
    return found


def inputs(rows: int, sizes: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    heads_qk, heads_v, head_qk, head_v = sizes
    width = 2 * heads_qk * head_qk + 2 * heads_v * head_v
    return torch.randn(rows, width, dtype=torch.float64), torch.randn(rows, 2 * heads_v, dtype=torch.float64)


@pytest.mark.parametrize("layout", projection.LAYOUTS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_every_element_of_a_split_comes_from_its_place_in_the_definition(
    sizes: tuple[int, int, int, int], layout: str
) -> None:
    mixed_qkvz, mixed_ba = inputs(3, sizes)
    at = positions(*sizes, layout)
    parts = projection.split(mixed_qkvz, mixed_ba, *sizes, layout)
    assert torch.equal(parts.mixed_qkv, mixed_qkvz[:, at["q"] + at["k"] + at["v"]])
    assert torch.equal(parts.z.flatten(1), mixed_qkvz[:, at["z"]])
    assert torch.equal(parts.b, mixed_ba[:, at["b"]])
    assert torch.equal(parts.a, mixed_ba[:, at["a"]])
    assert all(part.is_contiguous() for part in parts)
    assert parts.z.shape == (3, sizes[1], sizes[3])


@pytest.mark.parametrize("layout", projection.LAYOUTS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_merging_the_parts_gives_the_projections_back(sizes: tuple[int, int, int, int], layout: str) -> None:
    for rows in (0, 1, 4):
        fused = inputs(rows, sizes)
        merged = projection.merge(*projection.split(*fused, *sizes, layout), *sizes, layout)
        assert torch.equal(merged.mixed_qkvz, fused[0])
        assert torch.equal(merged.mixed_ba, fused[1])


@pytest.mark.parametrize("sizes", SHAPES)
def test_rows_in_contiguous_order_turn_an_interleaved_projection_into_a_contiguous_one(
    sizes: tuple[int, int, int, int],
) -> None:
    mixed_qkvz, mixed_ba = inputs(2, sizes)
    order = projection.contiguous_row_order(*sizes)
    wanted = projection.split(mixed_qkvz, mixed_ba, *sizes, "interleaved")
    got = projection.split(mixed_qkvz[:, order.mixed_qkvz], mixed_ba[:, order.mixed_ba], *sizes, "contiguous")
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("layout", projection.LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_is_torchs_over_the_state_and_the_new_tokens(
    layout: str, width: int, tokens: int, activation: str | None
) -> None:
    sizes = (2, 4, 3, 5)
    channels = 2 * 2 * 3 + 4 * 5
    slots = torch.tensor([5, -1, 0, 9])
    mixed_qkvz, mixed_ba = inputs(len(slots) * tokens, sizes)
    state = torch.randn(7, channels, width - 1, dtype=torch.float64)
    weight, bias = torch.randn(channels, width, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    before = state.clone()
    parts = projection.split_conv1d_update(
        mixed_qkvz, mixed_ba, state, weight, bias, slots, *sizes,
        tokens_per_sequence=tokens, activation=activation, layout=layout,
    )  # fmt: skip
    raw = projection.split(mixed_qkvz, mixed_ba, *sizes, layout)
    for sequence, slot in enumerate(slots.tolist()):
        rows = slice(sequence * tokens, (sequence + 1) * tokens)
        if not 0 <= slot < len(state):
            assert all(not part[rows].any() for part in parts), "padding is 0, whichever slot it names"
            continue
        line = torch.cat([before[slot], raw.mixed_qkv[rows].T], dim=1)
        wanted = F.conv1d(line[None], weight[:, None], bias, groups=channels)[0].T
        wanted = wanted * torch.sigmoid(wanted) if activation else wanted
        torch.testing.assert_close(parts.mixed_qkv[rows], wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(state[slot], line[:, -(width - 1) :])
        assert all(torch.equal(part[rows], whole[rows]) for part, whole in zip(parts[1:], raw[1:], strict=True))
    untouched = [slot for slot in range(len(state)) if slot not in slots.tolist()]
    assert torch.equal(state[untouched], before[untouched])


def test_a_real_layer_splits_into_its_published_sizes() -> None:
    model = QWEN3_NEXT_80B
    sizes = (model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v)
    parts = projection.split(torch.randn(2, 12288), torch.randn(2, 64), *sizes)
    assert [list(part.shape) for part in parts] == [[2, 8192], [2, 32, 128], [2, 32], [2, 32]]
