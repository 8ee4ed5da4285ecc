"""Barriers in shared memory whose place is stored to."""

from __future__ import annotations

import pytest

from kernel_reference.testing.ptx import overwritten_barriers

KERNEL = """
	mov.b32 	%r1, global_smem;
	add.s32 	%r2, %r1, 64;
	add.s32 	%r3, %r1, 80;
	@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
	@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
	STORE
"""


@pytest.mark.parametrize("store", [
    "st.shared.b32 	[global_smem+68], %r9;", "@%p2 st.shared.b8 [ %r2 + 0 ], %r9;",
    "st.shared.v4.b32 	[%r1+72], {%r5, %r6, %r7, %r8};",
])  # fmt: skip
def test_a_store_to_a_barriers_memory_is_found(store: str) -> None:
    assert len(overwritten_barriers(KERNEL.replace("STORE", store))) == 1


@pytest.mark.parametrize("store", [
    "st.shared.b64 	[global_smem+72], %rd9;", "st.shared.v2.b32 	[%r1+56], {%r5, %r6};",
    "st.shared.b32 	[%r77], %r9;", "st.global.b32 	[%rd1+64], %r9;",
])  # fmt: skip
def test_stores_beside_barriers_and_to_places_not_known_are_left_alone(store: str) -> None:
    assert overwritten_barriers(KERNEL.replace("STORE", store)) == []
