"""What the portable kernel is compiled for, and the values that its functions hand on, in groups with names."""

from typing import NamedTuple

import triton
import triton.language as tl

# Whether a config's fields are constant in the argument itself, as from Triton 3.8 on; else in a copy of it.
CONSTANT_FIELDS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8))


class Config(NamedTuple):
    """What the kernel is compiled for; ``launch`` makes it from a problem and its plan."""

    GROUP: int  # query heads that share a kv head
    HEADS_KV: int
    D: int  # head size of queries and keys
    BLOCK_D: int  # the next power of two
    DV: int  # head size of values and outputs
    BLOCK_DV: int
    PAGE: int
    BOX: int  # tokens of a page that are loaded together where they, not elements, are contiguous; else 0
    X: int  # elements of a key that lie together in a page
    CHUNK: int  # of these, how many are loaded together with those of the next token; 0: a key as a whole
    STEP: int  # stride of a page's tokens where X is less than D, else 0
    BLOCK_M: int
    BLOCK_N: int
    HEADS: int  # query heads in a tile
    TOKENS: int  # tokens in a tile
    STAGES: int
    NEW_KV: bool  # the new keys and values are tensors of their own
    FP8: int  # 4: an e4m3 cache, 5: e5m2, 0: of q's dtype
    QUANTIZED_Q: bool  # queries are rounded to e4m3
    K_SCALED: int  # 0: by no tensor, 1: one scale for a kv head, 2: one for each key
    V_SCALED: int
    LIMIT: int  # the largest number of an 8-bit out, else 0
    SOFTCAP: bool
    DRAFT: bool  # new tokens see each other as a mask says
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SKIP_DECODE: bool
    SHARED: bool  # a level of a cascade, but the last: its rows see all keys, and its results stay in parts
    CARRIED: int  # levels of a cascade before this one, whose parts are added
    WIDE: bool  # a head's elements lie 2^31 and more apart


class Strides(NamedTuple):
    """(token, head, element) of q, k, v and out, (page, token, head, element / X, element % X) of the caches,
    (page, token, head) of scales.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    k_cache: tuple[int, ...]
    v_cache: tuple[int, ...]
    k_scale: tuple[int, ...]
    v_scale: tuple[int, ...]
    out: tuple[int, ...]


class Scores(NamedTuple):
    """What makes scores of q.k."""

    softmax_scale: float
    softcap: float


class Numbers(NamedTuple):
    """Scales that are numbers, and a kernel's strides, which Triton specialises on."""

    k_scale: float
    v_scale: float
    out_scale: float
    strides: object


class Results(NamedTuple):
    """out and lse; and a workspace of float32: partial results [num_splits, rows, H, D], and behind them their lse
    [num_splits, H, rows]. In one, as a pointer less is to be kept.
    """

    out: object
    lse: object
    workspace: object


class Rows(NamedTuple):
    """A tile's queries [BLOCK_M, BLOCK_D], their positions, ALiBi slopes and halves of masks of drafts."""

    q: object
    position: object
    slope: object
    draft_low: object
    draft_high: object


class Keys(NamedTuple):
    """A tile of keys and values: pointers, offsets of keys and of elements, positions, which exist, scales; strides of
    a cached key's elements, by those that lie together and among these.
    """

    p_k: object
    p_v: object
    off_k: object
    off_v: object
    o_dk: object
    o_dv: object
    o_key: object
    exists: object
    k_scale: object
    v_scale: object
    s_dk: object


class Scoring(NamedTuple):
    """What makes scores of q.k, the keys from ``low`` to before ``high`` that any row sees, and the first new one."""

    scale: object
    softcap: object
    left: object
    right: object
    low: object
    high: object
    context: object


class Pages(NamedTuple):
    """Where the values of a tile that begins at key ``at`` are looked up, for ``load_transposed``."""

    p_row: object
    at: object
    num_blocks: object
    s_page: object


class Source(NamedTuple):
    """What differs between loops: cached keys or new ones, in the interior of the visible range or at its edges."""

    BOX: int
    FP8: int
    K_SCALED: bool
    V_SCALED: bool
    MASKED: bool


class Excess(NamedTuple):
    """By how much rounding has made float32's accumulator and row sum too large; of other dtypes nothing is kept."""

    acc: object
    row_sum: object
