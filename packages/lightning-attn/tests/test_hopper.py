"""Does the kernel for sm_90 do what it should? On a CPU, with its barriers, copies and products as they behave.

``kernel_reference.testing.gluon`` runs the kernel's own text. What only hardware tells, swizzles, fences and registers
among it, is for the tests on a GPU and for test_codegen.py.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_reference.testing import gluon
from lightning_attn import launch
from lightning_attn.plan import PrefillPlan


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    return gluon.shadow(*(f"lightning_attn.kernels.{name}" for name in ("decay", "schedule", "hopper_rows", "hopper")))[
        -1
    ]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, hopper: ModuleType, device: torch.device) -> None:
    """The launch of the kernel for sm_90, without a GPU."""
    if device.type != "cpu":
        pytest.skip("the kernel itself runs here")

    class Launch:
        def __init__(self, kernel: Any, grid: Any, rest: Any, _: Any, boxes: Any, **options: Any) -> None:
            self.grid, self.rest = grid, rest
            layout = hopper.gl.NVMMASharedLayout.get_default_for
            self.boxes = [(box.sizes, box.strides, box.box, layout(box.box, hopper.gl.bfloat16)) for box in boxes]

        def __call__(self, *tensors: torch.Tensor | None) -> None:
            described = [gluon.Descriptor(x, *box) for x, box in zip(tensors[:4], self.boxes, strict=True)]
            gluon.launch(hopper.prefill, self.grid[0], *described, *tensors[4:], *self.rest)

    monkeypatch.setattr(launch, "TmaLaunch", Launch)


@pytest.mark.parametrize(("sizes", "dtype"), [
    ((64, 64), torch.bfloat16), ((72, 80), torch.float16), ((128, 64), torch.bfloat16), ((40, 104), torch.bfloat16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("segment", "stages"), [(0, 4), (0, 2), (64, 3), (128, 4)])
def test_the_kernel_for_sm_90_is_the_recurrence(tensors, kernels, segment, stages, sizes, dtype) -> None:
    plan = PrefillPlan(64, 64, segment, 4, stages, block_d=128 if sizes[0] > 64 else 64, hopper=True)
    batch = tensors.ragged(
        [1, 200, 0, 64, 70], heads=(1, 2), sizes=sizes, dtype=dtype, slots=[3, 7, 1, -1, 0], num_slots=12,
        initial=[True, False, True, True, True], rows_after=5,
    )  # fmt: skip
    # With snapshots a sequence of one token is a chunk too.
    positions = [[-1, 1], [128, 130], [-1, -1], [-1, -1], [64, 70]] if stages > 2 else None
    batch.check(snapshots=kernels.prefill(batch, plan, positions))


def test_powers_of_two_come_through_float16_on_sm_90(tensors, kernels, powers) -> None:
    plan = PrefillPlan(64, 64, 0, 4, 2, block_d=64, hopper=True)
    tensors.check_powers(partial(kernels.attention, plan), partial(kernels.gradients, plan), 64, 80, powers)
