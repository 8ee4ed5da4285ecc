"""Is whoever hands a testing tool something wrong told which argument, what it must be and what it was?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernel_reference.testing import contract, guards

X = torch.zeros(4, 3)


def same(*tensors: Any) -> Any:
    return tensors[0]


def rows(part: slice) -> torch.Tensor:
    return X[part]


# A call that is well, and for its arguments what they must not be, beside things of another kind.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]] = {
    "poison_": (guards.poison_, {"tensor": X.clone()}, {"tensor": []}),
    "poisoned": (
        guards.poisoned, {"shape": (2, 3), "dtype": torch.int8, "device": "cpu"},
        {"shape": [(2.0,), (-1, 2), 5], "dtype": [np.float32, "float32"], "device": ["nowhere"]},
    ),
    "canaried": (
        guards.canaried,
        {"shape": (2, 3), "dtype": torch.int8, "device": "cpu", "strides": (8, 1), "band": 256, "offset": 1},
        {"shape": [(2, "3"), (2, -3)], "dtype": [int], "device": ["nowhere"], "strides": [(8.0, 1), (8, -1), (8,)],
         "band": [2.5, 100], "offset": [True, -1]},
    ),
    "guarded": (guards.guarded, {"tensor": X, "row_padding": 3}, {"tensor": [], "row_padding": ["3", -1]}),
    "nan_pages": (
        guards.nan_pages, {"cache": X.clone(), "used": [0, 2]},
        {"cache": [torch.zeros(())], "used": [3, [1.5], torch.ones(2)]},
    ),
    "bitwise_equal": (guards.bitwise_equal, {"a": X, "b": X}, {"a": [None], "b": [None]}),
    "assert_bitwise_equal": (
        guards.assert_bitwise_equal, {"actual": X, "expected": X}, {"actual": [None], "expected": [None]}
    ),
    "check_opcheck": (
        contract.check_opcheck, {"op": torch.ops.aten.relu.default, "cases": [(X,)]}, {"cases": [7, [X], [X, (X,)], []]}
    ),
    "check_compiles": (
        contract.check_compiles,
        {"fn": same, "inputs_small": (X,), "inputs_large": (torch.zeros(6, 3),), "dynamic": {0: 0}},
        {"fn": [None], "inputs_small": [X, 3], "inputs_large": [X, (X, X)],
         "dynamic": [[0], {1: 0}, {0: 2}, {0: "0"}, {"0": 0}]},
    ),
    "check_deterministic": (
        contract.check_deterministic, {"fn": lambda: X, "runs": 2}, {"fn": [None, X], "runs": [2.0, 1]}
    ),
    "check_batch_invariant": (
        contract.check_batch_invariant, {"fn": rows, "size": 4, "parts": [slice(0, 2)]},
        {"fn": [None], "size": [4.0, 1], "parts": [[0], 3]},
    ),
    "check_int64_offsets": (
        contract.check_int64_offsets, {"fn": None, "inputs": None},
        {"fn": [None, 3], "inputs": [X, 3], "dims": [[0], {1: 0}, {0: 2}, {0: (0, 5)}], "written": [3, ["0"], [9]]},
    ),
    "check_no_host_sync": (contract.check_no_host_sync, {"fn": None}, {"fn": [None]}),
    "check_cuda_graph": (
        contract.check_cuda_graph, {"fn": None, "make_inputs": None}, {"fn": [None], "make_inputs": [3]}
    ),
    "far_apart": (
        contract.far_apart, {"tensor": X, "dim": 0, "beyond": 64},
        {"tensor": [], "dim": [2, "0"], "beyond": ["far"]},
    ),
}  # fmt: skip
KINDS: list[Any] = ["text", np.zeros((40, 3))]
# What is not called here as it stands: it takes 4 GiB, or a GPU.
GIVEN: dict[str, dict[str, Any]] = {
    "check_int64_offsets": {"fn": same, "inputs": (X,), "dims": {0: 0}},
    "check_no_host_sync": {"fn": lambda: X},
    "check_cuda_graph": {"fn": same, "make_inputs": lambda seed: (X,)},
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, (_, _, wrong) in CALLS.items() for argument in wrong]
)
def test_a_wrong_argument_of_a_tool_is_named(name: str, argument: str) -> None:
    call, given, wrong = CALLS[name]
    if name in GIVEN:
        given = GIVEN[name]
    else:
        call(**given)
    for value in (*wrong[argument], *KINDS):
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}\b.* must be .*, got ") as caught:
            call(**{**given, argument: value})
        assert len(str(caught.value)) < 300, value
