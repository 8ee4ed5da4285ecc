"""The points of a map: axes round a package's cases, and a sample of their grid in which every two values meet.

A speed falls off where two sizes meet that no plan was made on, such as a narrow window and a wide table; so the sample
has every pair of values of any two axes, as far as the grid allows them, in as few points as a greedy choice finds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from kernel_reference.bench.case import Case

Value = int | float | str
Point = Mapping[str, Any]
"""A value for every axis, by the axes' names."""

# A grid is gone through point by point.
LARGEST_GRID = 200_000
# Points looked at for each one that is taken.
_CANDIDATES = 48


@dataclass(frozen=True)
class Axis:
    """One size or choice that a case can be made with, and the values worth a look, in the order of a picture."""

    name: str
    values: Sequence[Value]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must be a non-empty string")
        if len(self.values) < 1 or len(set(self.values)) < len(self.values):
            raise ValueError(f"values of {self.name} must be distinct and at least one, got {list(self.values)}")


@dataclass(frozen=True)
class Map:
    """A grid of cases of one kind.

    name: unique in its package, in a word or two.
    case: the case of a point, or None where there is none. Making it must be cheap; inputs are made in their turn.
    allows: whether a point is meaningful, in so few operations that it can be asked of the whole grid.
    known: points measured first, whatever the sample holds: those where a cliff is or was.
    points: how many to measure in all; None: as many as it takes for all pairs.
    """

    name: str
    axes: Sequence[Axis]
    case: Callable[[Point], Case | None]
    allows: Callable[[Point], bool] = lambda point: True
    known: Sequence[Point] = field(default=())
    points: int | None = None

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"axes must be at least two of different names, got {names}")
        size = math.prod(len(axis.values) for axis in self.axes)
        if size > LARGEST_GRID:
            raise ValueError(f"axes must span at most {LARGEST_GRID} points, got {size}")
        values = {axis.name: axis.values for axis in self.axes}
        for point in self.known:
            if set(point) != set(names) or any(point[name] not in values[name] for name in names):
                raise ValueError(f"known must hold points of the axes, got {dict(point)}")
            if not self.allows(point):
                raise ValueError(f"known must hold allowed points, got {dict(point)}")

    def sample(self, *, seed: int = 0, points: int | None = None) -> list[dict[str, Value]]:
        """The points to measure: the known ones, then a covering sample; the same for the same seed."""
        return cover(self.axes, self.allows, seed=seed, known=self.known, points=points or self.points)


def key_of(name: str, point: Point) -> str:
    """What identifies a point of a map in a file."""
    return json.dumps([name, dict(point)], sort_keys=True)


def words_of(point: Point) -> str:
    """A point as a person would write it: ``dtype=float16 heads=8``."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def cover(
    axes: Sequence[Axis],
    allows: Callable[[Point], bool],
    *,
    seed: int = 0,
    known: Sequence[Point] = (),
    points: int | None = None,
) -> list[dict[str, Value]]:
    """``known``, then points until every two values that some allowed point holds together are in one of them.

    With ``points``, that many: the first of them, or more, any that are allowed, where fewer cover all pairs.
    """
    chance = random.Random(seed)
    names = [axis.name for axis in axes]
    rows = [row for row in product(*(axis.values for axis in axes)) if allows(dict(zip(names, row, strict=True)))]
    taken = [tuple(point[name] for name in names) for point in known]
    where: dict[tuple[int, Value, int, Value], list[int]] = {}
    for number, row in enumerate(rows):
        for pair in _pairs(row):
            where.setdefault(pair, []).append(number)
    for row in taken:
        for pair in _pairs(row):
            where.pop(pair, None)
    # Rare pairs first: they leave the least choice of what else comes with them.
    order = sorted(where, key=lambda pair: (len(where[pair]), chance.random()))
    for pair in order:
        if pair in where:
            some = where[pair]
            candidates = some if len(some) <= _CANDIDATES else chance.sample(some, _CANDIDATES)
            best = max(candidates, key=lambda number: (sum(p in where for p in _pairs(rows[number])), chance.random()))
            taken.append(rows[best])
            for found in _pairs(rows[best]):
                where.pop(found, None)
    if points is not None and points > len(taken):
        rest = sorted(set(range(len(rows))) - {number for number, row in enumerate(rows) if row in set(taken)})
        taken += [rows[number] for number in chance.sample(rest, min(points - len(taken), len(rest)))]
    return [dict(zip(names, row, strict=True)) for row in taken[:points]]


def _pairs(row: Sequence[Value]) -> list[tuple[int, Value, int, Value]]:
    return [(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)]
