"""What plans are made for: a call, and a device, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

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
    ``shared``: a level of a cascade before the last one; ``carried``: how many levels are before, of the last one.
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
    k_scale: float = 1.0
    v_scale: float = 1.0
    out_scale: float = 1.0
    head_dim_v: int = 0
    token_scales: bool = False
    quantize_q: bool = False

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
