"""What several of these tests need: random bits inside wider tensors, and the layouts as literal loops.

Tests are imported one by one (``--import-mode=importlib``), so that what they share reaches them as a fixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from gdn_split.plan import GroupShape

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What surrounds a source differs from what surrounds a result, or a row read and written too many would go unseen.
_POISON_OF_SOURCES = 0x5A
_POISON_OF_RESULTS = 0xA5


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaNs compare."""
    return tensor.view(_BITS[tensor.element_size()])


class Columns(NamedTuple):
    """Columns of mixed_qkvz that make mixed_qkv and z, and columns of mixed_ba that make b and a."""

    mixed_qkv: list[int]
    z: list[int]
    b: list[int]
    a: list[int]


def literal_columns(shape: GroupShape, layout: str) -> Columns:
    """Where each part of a row stands, counted off one run after the other as the layout's definition reads."""
    g, r, hq, hv = shape.num_heads_qk, shape.ratio, shape.head_qk, shape.head_v
    q, k, v, z, b, a = ([] for _ in range(6))
    if layout == "interleaved":
        runs = [run for _ in range(g) for run in ((q, hq), (k, hq), (v, r * hv), (z, r * hv))]
        runs_ba = [run for _ in range(g) for run in ((b, r), (a, r))]
    else:
        runs = [(q, g * hq), (k, g * hq), (v, g * r * hv), (z, g * r * hv)]
        runs_ba = [(b, g * r), (a, g * r)]
    for row in (runs, runs_ba):
        at = 0
        for part, length in row:
            part += range(at, at + length)
            at += length
    return Columns(q + k + v, z, b, a)


@dataclass(frozen=True)
class Band:
    """A tensor [rows, *tail] that is a slice of a wider one, with a row more before and after it."""

    wide: torch.Tensor
    view: torch.Tensor
    before: torch.Tensor

    def holds(self, expected: torch.Tensor) -> bool:
        """Whether the slice is ``expected`` bit for bit and everything around it is as it was."""
        wanted = self.before.clone()
        left = self.view.storage_offset() - self.wide.stride(0)
        rows, width = self.view.shape[0], self.view.shape[1:].numel()
        wanted[1 : 1 + rows, left : left + width] = bits(expected).reshape(rows, width)
        return torch.equal(bits(self.wide), wanted)

    def is_unchanged(self) -> bool:
        return torch.equal(bits(self.wide), self.before)


class Kernels:
    """The launches themselves, with plans of the caller's: on a GPU, or in Triton's interpreter."""

    @staticmethod
    def move(
        qkvz: torch.Tensor, ba: torch.Tensor, parts: Any, shape: GroupShape, layout: str, merge: bool, plan: Any = None
    ) -> None:
        """Split into these parts, or merge them."""
        from gdn_split import arguments, launch
        from gdn_split.tensors import Merge, Split

        sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, layout)
        t = Merge(*parts, qkvz, ba) if merge else Split(qkvz, ba, *parts)
        problem = (arguments.check_merge if merge else arguments.check_split)(t, *sizes)
        launch.prepare_move(problem, plan, t)(qkvz, ba, *parts)

    @staticmethod
    def convolve(given: Any, shape: GroupShape, tokens: int, silu: bool, layout: str, plan: Any = None) -> None:
        """The op's tensors, in its order: a bias of None is not read."""
        from gdn_split import arguments, launch
        from gdn_split.tensors import Convolve

        sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, layout)
        t = Convolve(*given)
        problem = arguments.check_convolve(t, tokens, silu, *sizes)
        launch.prepare_split_conv1d_update(problem, plan, t)(
            *[t.conv_weight if tensor is None else tensor for tensor in t]
        )


class Tensors:
    """Makes and compares tensors on the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    kernels = Kernels()
    bits = staticmethod(bits)
    literal_columns = staticmethod(literal_columns)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random bits: every value of the dtype there is, NaNs with payloads among them."""
        if dtype == torch.bool:
            return torch.randint(0, 2, size, dtype=torch.uint8, device=self.device).view(dtype)
        stored = _BITS[dtype.itemsize]
        limits = torch.iinfo(stored)
        # torch.randint takes no end past int64: its largest value is the one that never comes.
        end = min(limits.max + 1, 2**63 - 1)
        return torch.randint(limits.min, end, size, dtype=stored, device=self.device).view(dtype)

    def band(
        self, rows: int, *tail: int, dtype: torch.dtype = torch.bfloat16, left: int = 0, right: int = 0,
        values: torch.Tensor | None = None,
    ) -> Band:  # fmt: skip
        """A slice [rows, *tail] of a wider tensor, holding ``values``, or poison like all around it."""
        width = torch.Size(tail).numel()
        wide = torch.empty(rows + 2, left + width + right, dtype=dtype, device=self.device)
        wide.view(torch.uint8).fill_(_POISON_OF_RESULTS if values is None else _POISON_OF_SOURCES)
        view = wide[1 : 1 + rows, left : left + width]
        if values is not None:
            bits(view).copy_(bits(values).reshape(rows, width))
        if len(tail) > 1:
            view = view.unflatten(1, tail)
        return Band(wide, view, bits(wide).clone())

    def same(self, got: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Equal in shape, dtype, device and every bit."""
        return (
            got.shape == wanted.shape
            and got.dtype == wanted.dtype
            and got.device == wanted.device
            and torch.equal(bits(got), bits(wanted))
        )

    def all_same(self, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
        return len(got) == len(wanted) and all(self.same(*pair) for pair in zip(got, wanted, strict=True))

    def take_apart(
        self, mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, shape: GroupShape, layout: str
    ) -> tuple[torch.Tensor, ...]:
        """The split by :func:`literal_columns`, for any dtype."""
        columns = literal_columns(shape, layout)
        parts = []
        for source, chosen in zip((mixed_qkvz, mixed_qkvz, mixed_ba, mixed_ba), columns, strict=True):
            chosen = torch.tensor(chosen, device=source.device)
            parts.append(bits(source)[:, chosen].view(source.dtype))
        mixed_qkv, z, b, a = parts
        return mixed_qkv, z.unflatten(1, (shape.num_heads_v, shape.head_v)), b, a


@pytest.fixture(scope="session")
def tensors(device: torch.device) -> Tensors:
    return Tensors(device)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels()
