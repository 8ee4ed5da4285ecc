"""What a benchmark says about itself: inputs, implementations, their check, bytes and FLOP, and the speed required."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kernel_reference.errors import fail

Call = Callable[[Any], object]
"""An implementation: takes one set of inputs and returns its outputs. Launches device work and does not wait for it."""

COPY = "copy"
"""Label of torch's device-to-device copy of the same bytes, which the runner times beside every case."""


@dataclass(frozen=True)
class Requirement:
    """The target of one implementation's speed, against another timed in the same run or in microseconds.

    Give exactly one bound: ``speed_at_least=0.97`` (time of ``against`` / time of ``implementation``),
    ``time_at_most=1.12`` (time of ``implementation`` / time of ``against``) or ``us_at_most=4.0`` (time of
    ``implementation`` alone, ``against`` playing no part). ``quantity="host"`` bounds the host time of a call instead
    of its time on the device.
    """

    implementation: str
    against: str = COPY
    speed_at_least: float | None = None
    time_at_most: float | None = None
    us_at_most: float | None = None
    quantity: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        given = (self.speed_at_least, self.time_at_most, self.us_at_most)
        bounds = [bound for bound in given if bound is not None]
        if len(bounds) != 1:
            fail("speed_at_least, time_at_most, us_at_most", "exactly one given", ", ".join(map(str, given)))
        if not (bounds[0] > 0 and math.isfinite(bounds[0])):
            fail("speed_at_least, time_at_most or us_at_most", "a positive number", bounds[0])
        if self.quantity not in ("device", "host"):
            fail("quantity", "'device' or 'host'", repr(self.quantity))

    def describe(self) -> str:
        """The requirement in words: ``speed >= 0.97 of copy``."""
        what = "host time" if self.quantity == "host" else "time"
        if self.us_at_most is not None:
            return f"{what} <= {self.us_at_most:g} us"
        if self.time_at_most is not None:
            return f"{what} <= {self.time_at_most:g} x {self.against}"
        return f"{'host speed' if self.quantity == 'host' else 'speed'} >= {self.speed_at_least:g} of {self.against}"

    def ratio(self, time: float, against: float) -> float:
        """What the bound speaks of, from the two times in microseconds: their ratio, or ``time`` itself."""
        if self.us_at_most is not None:
            return time
        return time / against if self.time_at_most is not None else against / time

    def is_met(self, time: float, against: float) -> bool:
        """Whether ``time`` satisfies the bound beside ``against``; both in microseconds."""
        ratio = self.ratio(time, against)
        if self.us_at_most is not None:
            return ratio <= self.us_at_most
        if self.time_at_most is not None:
            return ratio <= self.time_at_most
        return self.speed_at_least is not None and ratio >= self.speed_at_least


@dataclass(frozen=True)
class Case:
    """One benchmark: one shape, several implementations, timed interleaved on the same rotating inputs.

    name: unique in its package; ``--only`` matches it.
    shape: the sizes, for the record and the table.
    make_inputs: returns one new set of random inputs on the device: a tensor, or tensors in dicts, sequences, tuples
        and dataclasses. Called several times, so that no call reads what an earlier one left in the L2 cache.
    ours: label -> implementation.
    peers: label -> factory that imports the peer and returns its implementation. ImportError means absent, and is
        recorded with its reason; any other error marks the peer red.
    check: ``check(outputs, inputs) -> error``, or raises. ``inputs`` is the set as it was before the call: an
        implementation that works in place returns what it changed. Every implementation gets an equal set and ``check``
        the same object, so that a reference can be kept between calls.
    bytes_moved: the fewest bytes that must cross device memory, each input read once and each output written once.
    flops: floating-point operations that must be done; 0 where nothing is computed.
    tolerance: the largest error that passes. 0 means exact; ``math.inf`` leaves the verdict to ``check`` raising. NaN
        never passes.
    copy: time torch's copy of the same bytes beside the others, as the implementation ``copy``.
    baseline: the label that the ratio column refers to.
    requirements: targets; the table says met or missed.
    in_graph: time it in CUDA graphs, as what runs in one does, where single calls would be long enough to be timed.
    """

    name: str
    shape: Mapping[str, int | str]
    make_inputs: Callable[[], Any]
    ours: Mapping[str, Call]
    peers: Mapping[str, Callable[[], Call]]
    check: Callable[[Any, Any], float]
    bytes_moved: int
    flops: int = 0
    tolerance: float = 0.0
    copy: bool = True
    baseline: str = COPY
    requirements: Sequence[Requirement] = field(default=())
    in_graph: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            fail("name", "a non-empty string", repr(self.name))
        if not self.ours:
            fail("ours", "at least one implementation", dict(self.ours))
        if not isinstance(self.bytes_moved, int) or self.bytes_moved <= 0:
            fail("bytes_moved", "a positive int", self.bytes_moved)
        if not isinstance(self.flops, int) or self.flops < 0:
            fail("flops", "an int >= 0", self.flops)
        if not self.tolerance >= 0:
            fail("tolerance", ">= 0", self.tolerance)
        doubled = set(self.ours) & set(self.peers)
        if doubled:
            fail("peers", "labelled differently from ours", sorted(doubled))
        if COPY in self.ours or COPY in self.peers:
            fail("ours, peers", f"without the label {COPY!r}, which the runner adds", COPY)
        labels = self.labels()
        if self.baseline not in labels:
            fail("baseline", f"one of {list(labels)}", repr(self.baseline))
        for requirement in self.requirements:
            for label in (requirement.implementation, requirement.against):
                if label not in labels:
                    fail("requirements", f"between labels of {list(labels)}", repr(label))

    def labels(self) -> tuple[str, ...]:
        """Every implementation's label, ours first, in the order of the table."""
        return (*self.ours, *self.peers, *((COPY,) if self.copy else ()))

    def without(self, *peers: str) -> Case:
        """This case without these of its peers, and without targets beside them."""
        left = {label: factory for label, factory in self.peers.items() if label not in peers}
        gone = set(self.peers) - set(left)
        targets = tuple(one for one in self.requirements if not gone & {one.implementation, one.against})
        baseline = self.baseline
        if baseline in gone:
            baseline = COPY if self.copy else next(iter(self.ours))
        return replace(self, peers=left, baseline=baseline, requirements=targets)

    def of_host(self, name: str, implementation: str, us_at_most: float, beside: str) -> Case:
        """The host time of one of ours, at most so many microseconds, beside a peer where this case has it."""
        peers = {label: factory for label, factory in self.peers.items() if label == beside}
        target = Requirement(implementation, implementation, us_at_most=us_at_most, quantity="host")
        return replace(
            self, name=f"host time, {name}", ours={implementation: self.ours[implementation]}, peers=peers, copy=False,
            baseline=implementation, requirements=(target,),
        )  # fmt: skip
