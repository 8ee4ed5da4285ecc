"""The words of an argument error, and who sees the switch for checks of values."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kernel_reference.checks import fail, validate_values, values_are_checked


def test_an_error_names_the_argument_what_it_must_be_and_what_it_was() -> None:
    with pytest.raises(ValueError, match=r"^mixed_ba must be on cuda:0, got cpu$"):
        fail("mixed_ba", "on cuda:0", "cpu")
    with pytest.raises(TypeError, match=r"^q must be a tensor, got list$"):
        fail("q", "a tensor", "list", TypeError)


def test_values_are_checked_inside_the_block_alone() -> None:
    assert not values_are_checked()
    with validate_values():
        assert values_are_checked()
    assert not values_are_checked()


def test_leaving_an_inner_block_does_not_end_the_outer_one() -> None:
    with validate_values():
        with validate_values():
            assert values_are_checked()
        assert values_are_checked()
    assert not values_are_checked()


def test_an_exception_passes_and_ends_the_block() -> None:
    with pytest.raises(KeyError), validate_values():
        raise KeyError("mine")
    assert not values_are_checked()


def test_one_block_can_be_entered_again_and_again() -> None:
    for _ in range(3):
        with validate_values():
            assert values_are_checked()
        assert not values_are_checked()


def test_other_threads_are_not_affected() -> None:
    inside, seen = threading.Event(), []
    done = threading.Event()

    def checks() -> None:
        with validate_values():
            inside.set()
            done.wait(10)
            seen.append(values_are_checked())

    thread = threading.Thread(target=checks)
    thread.start()
    assert inside.wait(10)
    seen.append(values_are_checked())
    with validate_values():
        seen.append(values_are_checked())
    seen.append(values_are_checked())
    done.set()
    thread.join(10)
    assert seen == [False, True, False, True]


def test_tasks_that_interleave_each_keep_their_own_setting() -> None:
    async def checks(enter: bool, seen: list[bool]) -> None:
        if enter:
            with validate_values():
                await asyncio.sleep(0)
                seen.append(values_are_checked())
        else:
            await asyncio.sleep(0)
            seen.append(values_are_checked())

    async def both() -> tuple[list[bool], list[bool]]:
        on: list[bool] = []
        off: list[bool] = []
        await asyncio.gather(checks(True, on), checks(False, off))
        return on, off

    assert asyncio.run(both()) == ([True], [False])
