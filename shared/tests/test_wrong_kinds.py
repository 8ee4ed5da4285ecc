"""Is whoever hands a reference something of another kind told which argument, what it must be and what it was?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernel_reference import attention, blocks, paging, projection, recurrence
from kernel_reference.testing import numerics

T = torch.zeros
LENGTHS = torch.tensor([0, 3], dtype=torch.int32)
TABLE = torch.zeros(1, 2, dtype=torch.int32)
# A call that is well, by the names of its arguments, and those that are made wrong.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "attention": (
        attention.attention,
        {"q": T(3, 2, 4), "k": T(3, 2, 4), "v": T(3, 2, 4), "softmax_scale": 1.0, "softcap": 1.0, "window": (1, 1),
         "sinks": T(2), "alibi_slopes": T(2), "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS},
        "q k v softmax_scale softcap window sinks alibi_slopes cu_seqlens_q cu_seqlens_k",
    ),
    "merge_attention_states": (
        attention.merge_attention_states,
        {"out_a": T(3, 2, 4), "lse_a": T(2, 3), "out_b": T(3, 2, 4), "lse_b": T(2, 3)}, "out_a lse_a out_b lse_b",
    ),
    "gather": (
        paging.gather, {"cache": T(2, 2, 1, 4), "block_table": TABLE, "seqlens": LENGTHS[1:], "scale": 1.0},
        "cache block_table seqlens scale",
    ),
    "scatter": (
        paging.scatter,
        {"tokens": T(3, 1, 4), "cache": T(2, 2, 1, 4), "block_table": TABLE, "cu_seqlens": LENGTHS},
        "tokens cache block_table cu_seqlens",
    ),
    "paged_cache": (
        paging.paged_cache,
        {"k": T(3, 1, 8), "v": T(3, 1, 8), "cu_seqlens": LENGTHS, "page_size": 2, "unused_pages": 2},
        "k v cu_seqlens page_size unused_pages",
    ),
    "cumulative": (paging.cumulative, {"seqlens": LENGTHS}, "seqlens"),
    "pack": (paging.pack, {"padded": T(1, 4, 2), "starts": LENGTHS[:1], "ends": LENGTHS[1:]}, "padded starts ends"),
    "unpack": (
        paging.unpack, {"tokens": T(3, 2), "length": 4, "ends": LENGTHS[1:], "batch": 1}, "tokens length ends batch"
    ),
    "linear_attention_chunked": (
        recurrence.linear_attention_chunked,
        {"q": T(3, 2, 4), "k": T(3, 2, 4), "v": T(3, 2, 4), "slopes": T(2), "cu_seqlens": LENGTHS,
         "initial_state": T(1, 2, 4, 4), "chunk_size": 2},
        "q k v slopes cu_seqlens initial_state chunk_size",
    ),
    "commit": (
        recurrence.commit,
        {"k": T(1, 3, 2, 4), "v": T(1, 3, 2, 4), "state": T(1, 2, 4, 4), "slopes": T(2), "accepted": LENGTHS[1:]},
        "k v slopes accepted",
    ),
    "csr_to_mask": (
        blocks.csr_to_mask, {"crow": LENGTHS[None], "col": torch.arange(3)[None], "columns": 3}, "crow col columns"
    ),
    "mask_to_csr": (blocks.mask_to_csr, {"mask": torch.ones(1, 2, 2, dtype=torch.bool)}, "mask"),
    "token_mask": (
        blocks.token_mask,
        {"mask": torch.ones(1, 2, 2, dtype=torch.bool), "q_block": 2, "k_block": 2, "q_len": 3, "k_len": 3},
        "mask q_block k_block q_len k_len",
    ),
    "local_strided": (
        blocks.local_strided,
        {"num_heads": 2, "max_seqlen": 8, "local_blocks": 1, "vert_stride": 2, "block_size": 2},
        "num_heads max_seqlen local_blocks vert_stride block_size",
    ),
    "split": (
        projection.split,
        {"mixed_qkvz": T(2, 16), "mixed_ba": T(2, 4), "num_heads_qk": 2, "num_heads_v": 2, "head_qk": 2, "head_v": 2},
        "mixed_qkvz mixed_ba num_heads_qk num_heads_v head_qk head_v",
    ),
    "merge": (
        projection.merge,
        {"mixed_qkv": T(2, 12), "z": T(2, 2, 2), "b": T(2, 2), "a": T(2, 2), "num_heads_qk": 2, "num_heads_v": 2,
         "head_qk": 2, "head_v": 2},
        "mixed_qkv z b a num_heads_qk",
    ),
    "split_conv1d_update": (
        projection.split_conv1d_update,
        {"mixed_qkvz": T(2, 16), "mixed_ba": T(2, 4), "conv_state": T(2, 12, 3), "conv_weight": T(12, 4),
         "conv_bias": T(12), "slots": torch.arange(2), "num_heads_qk": 2, "num_heads_v": 2, "head_qk": 2, "head_v": 2,
         "tokens_per_sequence": 1},
        "mixed_qkvz mixed_ba conv_state conv_weight conv_bias slots tokens_per_sequence",
    ),
    "measure": (numerics.measure, {"actual": T(3, 4), "oracle": T(3, 4).double()}, "actual oracle"),
    "assert_close_to_oracle": (
        numerics.assert_close_to_oracle,
        {"actual": T(3, 4), "oracle64": T(3, 4).double(), "same_dtype_baseline": T(3, 4)},
        "actual oracle64 same_dtype_baseline",
    ),
}  # fmt: skip
WRONG = {"a list": [1, 2, 3], "an array": np.zeros((400, 3)), "text": "3"}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, (_, _, wrong) in CALLS.items() for argument in wrong.split()]
)
def test_what_is_of_another_kind_is_named(name: str, argument: str) -> None:
    call, given, _ = CALLS[name]
    call(**given)
    for what, value in WRONG.items():
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}\b.* must be .*, got ") as caught:
            call(**{**given, argument: value})
        assert len(str(caught.value)) < 300, what


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, (_, given, _) in CALLS.items() for argument, x in given.items() if type(x) is int],
)
def test_a_float_for_an_int_is_named(name: str, argument: str) -> None:
    call, given, _ = CALLS[name]
    with pytest.raises(TypeError, match=rf"^{argument} must be an int, got 2\.0"):
        call(**{**given, argument: 2.0})


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, (_, given, wrong) in CALLS.items()
        for argument in wrong.split()
        if isinstance(given[argument], torch.Tensor)
    ],
)
def test_a_tensor_without_dimensions_is_named(name: str, argument: str) -> None:
    call, given, _ = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=r"^\w+ must be "):
        call(**{**given, argument: given[argument].new_zeros(())})
