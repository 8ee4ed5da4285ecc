"""What plans are made for: a call, and a device, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_reference.integers import cdiv

# Keys of a page of a cache that is widened before attention, as many as a tile of keys has; and rows of a sequence for
# each kv head from which on that pays.
WIDENED_PAGE = 128
_MANY_ROWS = 4096
# The most tokens that a sequence may have: no bound is this one.
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """One call, as its arguments were checked: all that a plan and a launch need to know beside the tensors.

    ``capacity``: keys that a row of the block table has room for. ``bits``: of an element of q; ``cache_bits``: of one
    of the cache. ``new_kv``: the new keys and values are tensors of their own, not in the cache yet. ``alibi``: scores
    have a bias that depends on the key. ``draft``: new tokens see each other as a mask says. ``tma``: layout, strides
    and scales are such that the kernel for sm_90 can address keys and values by TMA and take them as they are;
    alignment, which only memory tells, is not among these. ``max_seqlen_k``: bounds the keys that the plan reckons
    with, and nothing else. ``left``, ``right``: the window, -1 without limit. ``k_scale``, ``v_scale``, ``out_scale``:
    those that were given as numbers. ``head_dim_v``: of values and outputs, that of keys where it is left out.
    ``token_scales``: tokens in an 8-bit cache have scales of their own. ``quantize_q``: queries are rounded to e4m3.
    ``widen_bytes``: what a cache of 8 bits, widened before, may take.
    ``shared``: a level of a cascade before the last one; ``carried``: how many levels are before, of the last one;
    ``joined``: how many are before in the same rows of the block table (kernels/join.py).
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    page_size: int
    tokens: int
    sequences: int
    max_seqlen_q: int
    capacity: int
    bits: int = 16
    cache_bits: int = 16
    new_kv: bool = False
    alibi: bool = False
    draft: bool = False
    tma: bool = False
    num_blocks: int = 1
    page_layout: str = "NHD"
    max_seqlen_k: int = MOST_TOKENS
    num_splits: int = 0
    softmax_scale: float = 1.0
    softcap: float = 0.0
    left: int = -1
    right: int = 0
    skip_decode: bool = False
    shared: bool = False
    carried: int = 0
    joined: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    out_scale: float = 1.0
    head_dim_v: int = 0
    token_scales: bool = False
    quantize_q: bool = False
    widen_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    def of_batch(self, tokens: int, sequences: int, max_seqlen_q: int, capacity: int) -> Problem:
        """The same problem over a batch of other sizes; in a tenth of the time that ``dataclasses.replace`` takes."""
        other = object.__new__(Problem)
        sizes = {"tokens": tokens, "sequences": sequences, "max_seqlen_q": max_seqlen_q, "capacity": capacity}
        other.__dict__.update(self.__dict__, **sizes)
        return other

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_heads_kv

    @property
    def largest_head(self) -> int:
        """The larger head size: of keys or of values."""
        return max(self.head_dim, self.head_dim_v)


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores`` are SMs (compute units); ``shared_memory`` is the most that a program may use, in bytes. ``hopper``:
    sm_90, with TMA and WGMMA, and a Triton that brings Gluon. ``turing``: sm_75, where shared memory holds tiles twice,
    the second time as they are multiplied. ``gaps``: a Triton that views shared memory by layouts with gaps, by which
    packed keys are read.
    """

    cores: int
    shared_memory: int = 64 * 1024
    hopper: bool = False
    turing: bool = False
    gaps: bool = True


def is_gathered(problem: Problem) -> bool:
    """Whether the kernel for sm_90 gathers cached rows one by one: no TMA box has less than the eight of a swizzle."""
    return problem.page_size % 8 != 0


def is_packed(problem: Problem) -> bool:
    """Whether elements of several tokens lie side by side in the cache."""
    return problem.page_layout == "x-packed"


def is_converted_by_heads_of_128(problem: Problem) -> bool:
    """Whether more registers speed up what loads and converts 8-bit keys where one consumer attends.

    Decoding of 1, 16, 64 and 128 behind 1000, 1000, 4000 and 8000, and drafts, 32 x 4 behind 8000: 32.2, 33.0, 204.7,
    735.8 and 198.8 us, with fewer 35.6, 36.1, 207.6, 742.4 and 202.6 (H200). Heads of 64: 0.91 to 1.03 of the time.
    """
    sizes = (problem.head_dim, problem.head_dim_v)
    return problem.cache_bits == 8 and sizes == (128, 128) and not problem.token_scales


def rows_of_a_sequence(problem: Problem) -> int:
    """The most that one has, each a query head of a token."""
    return max(1, min(problem.max_seqlen_q, problem.tokens)) * problem.group


def may_be_widened(problem: Problem) -> bool:
    """Whether a kernel of its own may widen the cache before, for the one for sm_90."""
    other = problem.new_kv or problem.token_scales or problem.quantize_q or problem.alibi or problem.left >= 0
    # Of no page TMA has no descriptor.
    there = problem.sequences * problem.capacity > 0
    return problem.cache_bits == 8 and there and not (other or problem.shared or problem.carried)


def is_worth_widening(problem: Problem) -> bool:
    """Whether it is asked for, has the memory, and pays."""
    if not (problem.widen_bytes and may_be_widened(problem)):
        return False
    rows = problem.tokens // max(1, problem.sequences) * problem.group
    return rows >= _MANY_ROWS and _widened_bytes(problem) <= problem.widen_bytes


def widened_pages(problem: Problem) -> tuple[int, int]:
    """Of a widened cache: sequences, and the pages that each has room for."""
    return problem.sequences, cdiv(problem.capacity, WIDENED_PAGE)


def widened(problem: Problem) -> Problem:
    """The problem as attention meets it when the cache is widened."""
    sequences, pages = widened_pages(problem)
    return replace(problem, cache_bits=16, page_layout="HND", page_size=WIDENED_PAGE, num_blocks=sequences * pages)


def _widened_bytes(problem: Problem) -> int:
    sequences, pages = widened_pages(problem)
    numbers = WIDENED_PAGE * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    return sequences * pages * (2 * numbers + 4)
