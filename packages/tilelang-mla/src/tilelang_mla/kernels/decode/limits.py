"""Which keys a row of decoding sees: by the causal rule, or by a length of its query token."""

from typing import Any

from tilelang_mla.kernels.common import macro


def is_per_token(inputs: Any) -> bool:
    """Whether lengths are those that each query token sees."""
    return len(inputs.seqlens_k.shape) == 2


def seen_by(T: Any, launch: Any, inputs: Any, work: Any, row: Any) -> Any:
    """The keys that a row's query token sees, where each has a length of its own."""
    i_token = T.min(T.truncdiv(row, launch.heads), launch.tokens - 1)
    return T.min(inputs.seqlens_k[work.sequence, i_token], work.length)


@macro
def unmasked_keys(T, launch, inputs, work):
    """Keys that the first row of a tile sees, and the others do too."""
    unmasked = T.alloc_var(T.int32, init=work.length)
    if is_per_token(inputs):
        unmasked = seen_by(T, launch, inputs, work, work.first_row)
    else:
        if launch.causal != 0:
            unmasked = work.length - launch.tokens + T.truncdiv(work.first_row, launch.heads) + 1
    return unmasked


def limit_of(T: Any, row: Any, heads: Any, tokens: Any, length: Any, causal: Any) -> Any:
    """The first key that a row does not see, by the causal rule if it holds."""
    i_token = T.min(T.truncdiv(row, heads), tokens - 1)
    return T.if_then_else(causal != 0, length - tokens + i_token + 1, length)


@macro
def find_limits(T, limit, first_row, heads, tokens, length, causal):
    """The first key that each row does not see."""
    for i in T.Parallel(*limit.shape):
        limit[i] = limit_of(T, first_row + i, heads, tokens, length, causal)


@macro
def find_limits_of_tokens(T, limit, launch, inputs, work):
    """The same, where each query token has a length of its own."""
    for i in T.Parallel(*limit.shape):
        limit[i] = seen_by(T, launch, inputs, work, work.first_row + i)
