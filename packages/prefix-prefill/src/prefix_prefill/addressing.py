"""How the tensors of a call lie in memory, as its kernels are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_reference.integers import is_power_of_two, power_of_two_in
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.plan import Problem

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pages:
    """How keys or values lie in pages: ``x`` elements together, strides by (page, token, head, element / x, rest)."""

    x: int
    strides: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, cache: Tensor, page_layout: str) -> Pages:
        s = cache.stride()
        if page_layout == "NHD":
            return cls(cache.shape[3], (s[0], s[1], s[2], 0, s[3]))
        if page_layout == "HND":
            return cls(cache.shape[3], (s[0], s[2], s[1], 0, s[3]))
        if cache.ndim == 5:
            return cls(cache.shape[4], (s[0], s[3], s[1], s[2], s[4]))
        return cls(cache.shape[2], (s[0], s[3], s[1], 0, s[2]))

    def reach(self, head_dim: int) -> int:
        """Elements from a head's first element to its last."""
        return (head_dim - 1) // self.x * self.strides[3] + (self.x - 1) * self.strides[4]


def contiguous_tokens(problem: Problem, values: Pages, block_n: int) -> int:
    """Tokens of a page that are loaded together where they, not elements, are contiguous; 0 where elements are."""
    box = min(block_n, power_of_two_in(problem.page_size))
    transposed = values.strides[1] == 1 and values.strides[4] != 1
    # Fewer than 16 bytes are no gain.
    return box if transposed and box * problem.cache_bits >= 128 else 0


def chunk_of_keys(problem: Problem, keys: Pages, block_m: int) -> int:
    """Elements of a key that are loaded together with those of the page's next token; 0 where a key's are.

    As memory has them, 64 that decode behind 8000 take 743 us on an H100, key by key 812. Tiles of more rows multiply
    keys from shared memory, where only the latter come without a detour: chunks of 512 take 2806 us, so 3387.
    """
    apart = keys.x < problem.head_dim and is_power_of_two(keys.x)
    return keys.x if apart and block_m == 16 else 0


def scaling(scale: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """How scales vary, 1 with the kv head at most and 2 with the token too, and strides by (page, token, head)."""
    if scale is None:
        return 0, (0, 0, 0)
    if scale.ndim == 3:
        return 2, scale.stride()
    return 1, (0, 0, scale.stride()[0] if scale.ndim and scale.shape[0] > 1 else 0)


def largest_of(out: Tensor) -> int:
    """The largest number of an 8-bit result; others are not clamped."""
    return int(torch.finfo(out.dtype).max) if out.dtype.itemsize == 1 else 0


@dataclass(frozen=True)
class Batch:
    """A problem, and what else a launch must know of the tensors that come with each batch.

    s_table: elements from a row of the block table to the next. s_lse: strides of lse, by head and token.
    """

    problem: Problem
    s_table: int
    s_lse: tuple[int, ...] = (0, 0)

    @classmethod
    def of(cls, problem: Problem, tensors: PrefillTensors) -> Batch:
        """That of a call with these tensors."""
        return cls(problem, tensors.block_table.stride()[0], (0, 0) if tensors.lse is None else tensors.lse.stride())

    @property
    def counts(self) -> tuple[int, ...]:
        """The integers of both kernels that differ between batches: arguments of their own, as Triton would specialise
        on those in tuples.
        """
        problem = self.problem
        return problem.tokens, problem.sequences, problem.num_blocks, problem.capacity, self.s_table, *self.s_lse
