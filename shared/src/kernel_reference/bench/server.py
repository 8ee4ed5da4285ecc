"""The steps of a server: continuous batching over a paged cache, worked out on the host alone.

A step takes the new token (and drafts) of every sequence that decodes, then as much of waiting prompts as its budget of
tokens holds, a long prompt in chunks. A shared prefix is computed once and its whole pages are used by all. Where pages
run out, cached prefixes that nobody uses go first; then the sequence that came last is preempted: it loses its pages
and begins anew. What happens does not depend on how fast a machine is: a step's duration is counted, not measured, so
that every implementation is asked for the same steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kernel_reference.bench.traffic import Request, Traffic, requests
from kernel_reference.errors import fail


class Limits(NamedTuple):
    """The limits of a server.

    pages: of the pool, page_size tokens each. sequences: that run at once. tokens: new ones in a step. longest: tokens
    of a sequence, which is the block table's width. A step is counted as step_seconds + token_seconds a new token.
    """

    pages: int
    page_size: int
    sequences: int
    tokens: int
    longest: int
    step_seconds: float = 0.012
    token_seconds: float = 1.5e-5


class Row(NamedTuple):
    """A sequence's part of a step.

    slot: its number among those that run. cached: tokens before the new ones. pages: its own, as many as cached + new
    tokens need. kept: how many of the new tokens stand, the last of a sequence's drafts may not. decodes: whether they
    are an answer's and not a prompt's. prefix: the shared
    prefix whose pages it was given, if it begins in this step, else None; begins: whether it does.
    """

    request: int
    slot: int
    cached: int
    new: int
    kept: int
    decodes: bool
    pages: tuple[int, ...]
    begins: bool
    prefix: int | None


class Step(NamedTuple):
    """What is computed at once: rows, and what happened on the way: requests that ended, waited, were preempted."""

    number: int
    seconds: float
    rows: tuple[Row, ...]
    ended: int
    waiting: int
    preempted: int

    @property
    def tokens(self) -> int:
        """New ones of all rows."""
        return sum(row.new for row in self.rows)

    @property
    def decodes(self) -> bool:
        """Whether every row does."""
        return all(row.decodes for row in self.rows)


@dataclass(eq=False)
class _Sequence:
    request: Request
    slot: int = -1
    computed: int = 0
    answered: int = 0
    pages: list[int] = field(default_factory=list)
    begins: bool = True
    given: int | None = None

    @property
    def known(self) -> int:
        return self.request.prompt + self.answered


class Pool:
    """Pages and how many use each; a page that nobody uses is free.

    Raises:
        ValueError: a page is given back once too often.
    """

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages - 1, -1, -1))
        self.users = [0] * pages

    def take(self, count: int) -> list[int]:
        """So many free pages, each with one user."""
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.users[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """One more user of each."""
        for page in pages:
            self.users[page] += 1

    def release(self, pages: list[int]) -> None:
        """One user less of each."""
        for page in pages:
            if self.users[page] < 1:
                fail("pages", "in use where they are released", page)
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)


class Server:
    """The steps that a traffic makes under limits; the same ones for the same seed.

    Raises:
        ValueError: a request can be longer than ``limits.longest`` or than the pool.
    """

    def __init__(self, traffic: Traffic, limits: Limits, seed: int = 0) -> None:
        most = traffic.prompt.most + traffic.answer.most + traffic.drafts
        if most > limits.longest:
            fail("limits.longest", f"at least {most}, prompt, answer and drafts of the longest request", limits.longest)
        if -(-most // limits.page_size) > limits.pages:
            fail("limits.pages", f"at least {-(-most // limits.page_size)}, one longest request", limits.pages)
        if limits.tokens < limits.sequences * (1 + traffic.drafts):
            fail("limits.tokens", "at least a new token and the drafts of every sequence", limits.tokens)
        self.traffic, self.limits = traffic, limits
        self.pool = Pool(limits.pages)
        self._random = random.Random(seed + 1)
        self._requests = requests(traffic, seed)
        self._next = next(self._requests)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._slots = list(range(limits.sequences - 1, -1, -1))
        # Whole pages of a shared prefix; in the order of last use.
        self._prefixes: dict[int, list[int]] = {}
        self._preempted = 0

    def steps(self) -> Iterator[Step]:
        """One after another, without end. Where nothing waits, time passes until the next request."""
        number, seconds = 0, 0.0
        while True:
            while self._next.arrival <= seconds:
                self._waiting.append(_Sequence(self._next))
                self._next = next(self._requests)
            if not (self._running or self._waiting):
                seconds = self._next.arrival
                continue
            self._preempted = 0
            rows = self._rows()
            ended = self._advance(rows)
            step = Step(number, seconds, tuple(rows.values()), ended, len(self._waiting), self._preempted)
            if rows:
                yield step
                number += 1
            seconds += self.limits.step_seconds + step.tokens * self.limits.token_seconds

    def _rows(self) -> dict[int, Row]:
        rows: dict[int, Row] = {}
        budget = self.limits.tokens
        # Those that decode come first: no prompt holds them up.
        for sequence in sorted(self._running, key=lambda s: s.computed < s.known - 1):
            if sequence.slot >= 0 and budget:
                budget -= self._put(sequence, budget, rows)
        while budget and self._waiting and self._slots and not self._preempted:
            sequence = self._waiting[0]
            self._begin(sequence)
            put = self._put(sequence, budget, rows, may_preempt=False)
            if not put:
                self._stop(sequence)
                break
            self._waiting.popleft()
            self._running.append(sequence)
            budget -= put
        return rows

    def _put(self, sequence: _Sequence, budget: int, rows: dict[int, Row], *, may_preempt: bool = True) -> int:
        """Give a sequence its row of this step, if pages suffice; its new tokens."""
        decodes = sequence.computed == sequence.known - 1 and sequence.answered > 0
        new = 1 + self.traffic.drafts if decodes else sequence.known - sequence.computed
        new = min(new, budget)
        if not self._grow(sequence, sequence.computed + new, rows, may_preempt):
            return 0
        kept = new
        if decodes:
            kept = 1
            while kept < new and self._random.random() < self.traffic.accepted:
                kept += 1
        rows[sequence.slot] = Row(
            sequence.request.number, sequence.slot, sequence.computed, new, kept, decodes, tuple(sequence.pages),
            sequence.begins, sequence.given if sequence.begins else None,
        )  # fmt: skip
        return new

    def _grow(self, sequence: _Sequence, tokens: int, rows: dict[int, Row], may_preempt: bool) -> bool:
        lacking = -(-tokens // self.limits.page_size) - len(sequence.pages)
        while len(self.pool.free) < lacking:
            if self._forget_prefix():
                continue
            last = self._running[-1] if self._running else sequence
            if not may_preempt or last.slot in rows:
                return False
            self._running.remove(last)
            self._stop(last)
            self._waiting.appendleft(last)
            self._preempted += 1
            if last is sequence:
                return False
        sequence.pages += self.pool.take(max(0, lacking))
        return True

    def _begin(self, sequence: _Sequence) -> None:
        sequence.slot, sequence.begins = self._slots.pop(), True
        prefix = sequence.request.prefix
        pages = None if prefix is None else self._prefixes.pop(prefix, None)
        if prefix is not None and pages is not None:
            self._prefixes[prefix] = pages
            self.pool.share(pages)
            sequence.pages = list(pages)
            sequence.computed, sequence.given = len(pages) * self.limits.page_size, prefix

    def _stop(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.computed, sequence.pages, sequence.given = -1, 0, [], None

    def _forget_prefix(self) -> bool:
        """Give back the prefix that was used longest ago, if one is used by nobody."""
        for prefix, pages in self._prefixes.items():
            if all(self.pool.users[page] == 1 for page in pages):
                self.pool.release(self._prefixes.pop(prefix))
                return True
        return False

    def _advance(self, rows: dict[int, Row]) -> int:
        ended = []
        for sequence in self._running:
            row = rows.get(sequence.slot)
            if row is None:
                continue
            decodes = sequence.computed == sequence.known - 1 and sequence.answered > 0
            sequence.computed += row.kept
            sequence.begins = False
            if decodes:
                sequence.answered += row.kept
            elif sequence.computed == sequence.known:
                sequence.answered += 1
            self._keep_prefix(sequence)
            if sequence.answered >= sequence.request.answer:
                ended.append(sequence)
        for sequence in ended:
            self._running.remove(sequence)
            self._stop(sequence)
        return len(ended)

    def _keep_prefix(self, sequence: _Sequence) -> None:
        prefix = sequence.request.prefix
        whole = self.traffic.prefix // self.limits.page_size
        if prefix is None or prefix in self._prefixes or not whole:
            return
        if sequence.computed >= whole * self.limits.page_size:
            self._prefixes[prefix] = sequence.pages[:whole]
            self.pool.share(sequence.pages[:whole])


def first_prompts(traffic: Traffic, limits: Limits) -> Iterator[Step]:
    """Prompts of four lengths beside no row that decodes, few and many: a step of each kind, and no server's day.

    What a server's owner runs before the first request, so that nothing is compiled after it. Alone, 2048 tokens are
    as many as fill a GPU once or a few times, for which kernels have plans of their own.
    """
    each = 1 + traffic.drafts
    pages_each = -(-(limits.page_size + each) // limits.page_size)
    for others in sorted({min(others, limits.sequences - 1) for others in (0, 7, limits.sequences - 1)}):
        for length in (16, 256, 2048, limits.tokens):
            prompt = min(length, limits.tokens - others * each)
            pages = iter(range(limits.pages))
            rows = [
                Row(i, i, limits.page_size, each, each, True, tuple(islice(pages, pages_each)), False, None)
                for i in range(others)
            ]
            own = tuple(islice(pages, -(-prompt // limits.page_size)))
            rows.append(Row(others, others, 0, prompt, prompt, False, own, True, None))
            yield Step(0, 0.0, tuple(rows), 0, 0, 0)
