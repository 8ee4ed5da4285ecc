"""What every launch plan can do: a plan is a frozen dataclass of numbers, and crosses a torch op as ``int[]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kernel_reference.errors import fail
from kernel_reference.integers import cdiv

# More partial results of a row take a merge kernel too long.
_MOST_SPLITS = 128
# What a number of a plan may have been meant to be.
_NUMBERS, _MOST_TOLD = (0, 1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 96, 128, 256), 4


@dataclass(frozen=True)
class Plan:
    """The base of launch plans, whose fields are all int or bool. Needs no torch.

    >>> @dataclass(frozen=True)
    ... class SplitPlan(Plan):
    ...     block: int
    ...     num_warps: int
    ...     hopper: bool = False
    >>> SplitPlan(64, 4, True).as_ints()
    [64, 4, 1]
    >>> SplitPlan.from_ints([64, 4, 1])
    SplitPlan(block=64, num_warps=4, hopper=1)

    In an error's one line it is what of it is no default.

    >>> print(SplitPlan(64, 4))
    SplitPlan(block=64, num_warps=4)
    """

    def __str__(self) -> str:
        return brief(self)

    def as_ints(self) -> list[int]:
        """The plan as a torch op takes it."""
        # Each call of an op with a plan comes by: dataclasses.astuple would copy deeply, for 5 us.
        return [int(getattr(self, name)) for name in self.__dataclass_fields__]

    @classmethod
    def from_ints(cls, ints: Sequence[int] | None) -> Self | None:
        """The plan that an op was given; None where it was given none. ValueError names ``plan`` if the count differs.

        What was a bool is 0 or 1 again, which compares equal.
        """
        if ints is None:
            return None
        try:
            return cls(*ints)
        except TypeError:
            fail("plan", f"the numbers of a {cls.__name__}", list(ints))


def brief(value: Any) -> str:
    """A plan, or a problem, in one line of an error: of a dataclass's fields those that are not as they are by default.

    >>> @dataclass(frozen=True)
    ... class Tile:
    ...     rows: int
    ...     keys: int = 64
    >>> brief(Tile(128, 64)), brief(Tile(128, 32))
    ('Tile(rows=128)', 'Tile(rows=128, keys=32)')
    """
    told = ((field.name, getattr(value, field.name)) for field in fields(value) if field.repr)
    defaults = {field.name: field.default for field in fields(value)}
    return f"{type(value).__name__}({', '.join(f'{name}={own!r}' for name, own in told if own != defaults[name])})"


def check_covers(plan: Any, problem: Any) -> None:
    """Raise ValueError, naming ``plan``, unless ``plan.covers(problem)`` or it is None.

    The error says with which other number of one field it would, where there are such.

    >>> @dataclass(frozen=True)
    ... class Tiles(Plan):
    ...     rows: int
    ...     paired: bool = False
    ...
    ...     def covers(self, tile):
    ...         return self.rows in (32, 64) and not self.paired
    >>> check_covers(Tiles(32), Tiles(1))
    >>> check_covers(Tiles(48), Tiles(1))
    Traceback (most recent call last):
    ValueError: plan must be one made for Tiles(rows=1), as with rows 32 or 64, got Tiles(rows=48)
    """
    if plan is None or plan.covers(problem):
        return
    ways = []
    for field in fields(plan):
        numbers: tuple[int, ...] = (False, True) if field.type in (bool, "bool") else _NUMBERS
        found = [str(number) for number in numbers if replace(plan, **{field.name: number}).covers(problem)]
        if len(found) > _MOST_TOLD:
            found = [*found[:_MOST_TOLD], "others"]
        if found:
            ways.append(f"with {field.name} {' or '.join(filter(None, (', '.join(found[:-1]), found[-1])))}")
    hint = f", as {', or '.join(ways)}" if ways else ""
    fail("plan", f"one made for {brief(problem)}{hint}", plan)


def quickest_splits(tiles: int, steps: int, programs: int, *, least: int) -> int:
    """In how many splits tiles of so many steps each are taken quickest by programs that run at the same time: as many
    as keep all of these evenly busy, and no more. No split has fewer than ``least`` steps.

    Programs run in waves. Each begins and ends at the cost of two steps; merging costs three.

    >>> quickest_splits(8, 1000, 132, least=4)
    16
    >>> quickest_splits(8, 16, 132, least=4), quickest_splits(130, 1000, 132, least=4)
    (4, 1)
    """

    def cost(splits: int) -> int:
        return cdiv(tiles * splits, programs) * (cdiv(steps, splits) + 2) + 3 * (splits > 1)

    return min(range(1, max(1, min(_MOST_SPLITS, steps // least)) + 1), key=cost)


def plan_as_ints(plan: Any, kind: type[Plan]) -> list[int] | None:
    """What a public function hands to its op for ``plan=``: None, or the plan's numbers.

    Raises TypeError unless the plan is None or a ``kind``, which is named with its package.
    """
    if plan is None:
        return None
    if not isinstance(plan, kind):
        # Here, as plans are made without torch too.
        from kernel_reference.words import describe

        package = kind.__module__.partition(".")[0]
        fail("plan", f"a {package}.{kind.__name__} or None", describe(plan), TypeError)
    return plan.as_ints()
