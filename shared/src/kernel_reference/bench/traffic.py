"""What a server is asked for: requests with arrival times, lengths, shared prefixes and drafts.

Lengths are log-normal round the medians that published traces report, arrivals are a Poisson process. Sources of the
medians: Azure's inference traces of 2023 (Patel et al., Splitwise, ISCA 2024, section III) for ``CHAT`` and ``CODE``;
for ``AGENT`` the lengths and the share of reused prefixes of Qin et al., Mooncake (FAST 2025), section 2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kernel_reference.errors import fail


class Lengths(NamedTuple):
    """A log-normal distribution of tokens: median, standard deviation of the logarithm, and the most there are."""

    median: float
    sigma: float
    most: int

    def draw(self, of: random.Random) -> int:
        """One length, at least 1."""
        return max(1, min(self.most, round(self.median * math.exp(of.gauss(0.0, self.sigma)))))


@dataclass(frozen=True)
class Traffic:
    """Requests as one kind of user makes them.

    rate: requests a second. prefixes: how many system prompts of ``prefix`` tokens there are; ``shared``: the share of
    requests that begin with one of them. drafts: tokens that a draft model guesses ahead in each step of decoding;
    accepted: the probability that a guess is right where those before it are.
    """

    name: str
    rate: float
    prompt: Lengths
    answer: Lengths
    prefixes: int = 0
    prefix: int = 0
    shared: float = 0.0
    drafts: int = 0
    accepted: float = 0.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            fail("rate", "a positive number of requests a second", self.rate)
        for name, share in (("shared", self.shared), ("accepted", self.accepted)):
            if not 0 <= share <= 1:
                fail(name, "from 0 to 1", share)
        if self.shared and not (self.prefixes > 0 and self.prefix > 0):
            fail("prefixes and prefix", "positive where prefixes are shared", (self.prefixes, self.prefix))


class Request(NamedTuple):
    """One request: when it comes, in seconds; prompt and answer in tokens; the number of its shared prefix or None."""

    number: int
    arrival: float
    prompt: int
    answer: int
    prefix: int | None


CHAT = Traffic("chat", 12.0, Lengths(1020, 0.9, 32768), Lengths(129, 0.8, 2048), prefixes=8, prefix=512, shared=0.5)
CODE = Traffic("code", 20.0, Lengths(1500, 0.9, 32768), Lengths(13, 1.0, 1024), drafts=3, accepted=0.7)
AGENT = Traffic("agent", 3.0, Lengths(6000, 0.8, 114688), Lengths(182, 0.7, 2048), prefixes=4, prefix=4096, shared=0.6)
KINDS = {traffic.name: traffic for traffic in (CHAT, CODE, AGENT)}


def requests(traffic: Traffic, seed: int = 0) -> Iterator[Request]:
    """Requests without end, in order of arrival; the same ones for the same seed on every machine.

    A prompt that begins with a shared prefix has tokens of its own after it.
    """
    of = random.Random(seed)
    arrival, number = 0.0, 0
    while True:
        arrival += of.expovariate(traffic.rate)
        prompt, answer = traffic.prompt.draw(of), traffic.answer.draw(of)
        prefix = of.randrange(traffic.prefixes) if of.random() < traffic.shared else None
        if prefix is not None:
            prompt = min(traffic.prompt.most, traffic.prefix + prompt)
            prompt = max(prompt, traffic.prefix + 1)
        yield Request(number, arrival, prompt, answer, prefix)
        number += 1
