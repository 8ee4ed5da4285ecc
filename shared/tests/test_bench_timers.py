"""The timers decide well: cold inputs, fair turns, graphs where launches would dominate. A fake device keeps time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.bench.timers import (
    MAX_CALLS_PER_GRAPH,
    MOST_SETS,
    REPLAY_US,
    Rotation,
    host_time_us,
    rotation_count,
    spread,
    tensor_bytes,
    time_interleaved,
)

H200_L2 = 60 * 2**20


@dataclass
class FakeClock:
    """Device and host times advance by what the called implementation says it costs."""

    l2_bytes: int = H200_L2
    device_us: float = 0.0
    host_us: float = 0.0
    launched: list[tuple[str, int, bool]] = field(default_factory=list)
    capturing: bool = False
    drift: float = 0.0
    flush_us: float = 45.0

    def free_bytes(self) -> int:
        return 10**11

    def host_seconds(self) -> float:
        return self.host_us * 1e-6

    def synchronize(self) -> None:
        # Waiting costs host time, which must not be counted as launching.
        self.host_us += 1000.0

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for call in calls:
            start, host = self.device_us, self.host_us
            call()
            # Outside a graph the device waits for a slow host.
            times.append(max(self.device_us - start, self.host_us - host))
        return times

    def flush(self) -> None:
        self.launched.append(("flush", 0, self.capturing))
        self.device_us += self.flush_us

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        start, host = self.device_us, self.host_us
        self.capturing = True
        try:
            run()
        finally:
            self.capturing = False
        cost = self.device_us - start
        self.device_us, self.host_us = start, host

        def replay() -> None:
            self.device_us += cost

        return replay

    def implementation(
        self, label: str, device_us: float, host_us: float = 5.0, capturable: bool = True
    ) -> Callable[[int], object]:
        def call(turn: int) -> object:
            if self.capturing and not capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.launched.append((label, turn, self.capturing))
            self.device_us += device_us + self.drift * len(self.launched)
            self.host_us += host_us
            return object()

        return call


def test_rotating_sets_together_pass_three_times_the_cache() -> None:
    qwen3_next_1024_tokens = 1024 * 12288 * 2
    count = rotation_count(qwen3_next_1024_tokens, 3 * qwen3_next_1024_tokens, H200_L2, 20 * 10**9)
    assert count * qwen3_next_1024_tokens > 3 * H200_L2 >= (count - 1) * qwen3_next_1024_tokens


@pytest.mark.parametrize(
    ("touched", "held", "memory", "expected"),
    [
        pytest.param(24_576, 50_000, 20 * 10**9, MOST_SETS, id="one token is bounded by the number of sets"),
        pytest.param(8 * 10**9, 24 * 10**9, 20 * 10**9, 2, id="a huge case still rotates"),
        pytest.param(
            10**7, 10**9, 5 * 10**9, 5, id="sets that hold much more than a call touches are bounded by memory"
        ),
    ],
)
def test_number_of_sets_is_bounded(touched: int, held: int, memory: int, expected: int) -> None:
    assert rotation_count(touched, held, H200_L2, memory) == expected


def test_a_case_that_touches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="touched_bytes must be positive, got 0"):
        rotation_count(0, 1, H200_L2, 1)


def test_bytes_of_nested_inputs_count_each_tensor_once() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        rest: dict[str, Any]

    @dataclass
    class Inputs:
        pair: Pair
        flag: bool

    x = torch.zeros(10, 4, dtype=torch.bfloat16)
    inputs = Inputs(Pair(x, {"again": x, "list": [torch.zeros(3)], "expanded": torch.zeros(1).expand(1000)}), True)
    assert tensor_bytes(inputs) == 80 + 12 + 4


def test_rotation_keeps_the_outputs_of_a_set_until_its_next_turn() -> None:
    alive: set[int] = set()

    class Output:
        def __init__(self, turn: int) -> None:
            self.turn = turn
            alive.add(turn)

        def __del__(self) -> None:
            alive.discard(self.turn)

    made = itertools.count()
    rotation = Rotation(lambda _: Output(next(made)), 3, itertools.count())
    for _ in range(5):
        rotation()
    assert alive == {2, 3, 4}
    rotation.release()
    assert alive == set()


def test_spread_is_the_median_with_twenty_and_eighty_percent_quantiles() -> None:
    assert spread([float(x) for x in range(11)]) == (5.0, 2.0, 8.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)
    assert spread([1.0, 1.0, 1.0, 1000.0])[0] == 1.0
    with pytest.raises(ValueError, match="values must be at least one time"):
        spread([])


def test_host_time_counts_launching_and_not_waiting() -> None:
    clock = FakeClock()
    call = clock.implementation("x", device_us=100.0, host_us=7.0)
    assert host_time_us(lambda: call(0), clock) == pytest.approx(7.0)


def test_long_calls_are_timed_by_events_and_report_their_time() -> None:
    clock = FakeClock()
    calls = {"fast": clock.implementation("fast", 200.0), "slow": clock.implementation("slow", 5000.0)}
    timings = time_interleaved(calls, 3, clock)
    assert timings["fast"].median_us == pytest.approx(200.0)
    assert timings["slow"].median_us == pytest.approx(5000.0)
    assert {t.method for t in timings.values()} == {"events"}
    assert timings["fast"].host_us == pytest.approx(5.0)
    assert timings["slow"].host_us is None


def test_one_call_below_fifty_microseconds_puts_the_whole_case_into_graphs() -> None:
    clock = FakeClock()
    calls = {"copy": clock.implementation("copy", 12.5), "ours": clock.implementation("ours", 60.0)}
    timings = time_interleaved(calls, 15, clock)
    assert {label: t.method for label, t in timings.items()} == {"copy": "graph", "ours": "graph"}
    assert timings["copy"].median_us == pytest.approx(12.5)
    assert timings["ours"].median_us == pytest.approx(60.0)


def test_a_call_that_was_held_up_on_the_host_is_still_timed_as_the_others_are() -> None:
    clock = FakeClock()
    quick, numbers = clock.implementation("ours", 12.5), itertools.count()

    def held_up(turn: int) -> object:
        # Two of the three calls whose times say how long one is.
        clock.host_us += 2000.0 if next(numbers) in (3, 4) else 0.0
        return quick(turn)

    timings = time_interleaved({"copy": clock.implementation("copy", 3.0), "ours": held_up}, 15, clock)
    assert {label: (t.method, t.median_us) for label, t in timings.items()} == {
        "copy": ("graph", pytest.approx(3.0)), "ours": ("graph", pytest.approx(12.5)),
    }  # fmt: skip


def test_a_case_may_ask_for_graphs_however_long_a_call_takes() -> None:
    clock = FakeClock()
    timings = time_interleaved({"ours": clock.implementation("ours", 200.0)}, 15, clock, in_graph=True)
    assert timings["ours"].method == "graph"
    assert timings["ours"].median_us == pytest.approx(200.0)


def test_a_call_bound_by_its_host_is_captured_and_shows_its_device_time() -> None:
    clock = FakeClock()
    timings = time_interleaved({"torch": clock.implementation("torch", 54.0, host_us=110.0)}, 15, clock)
    assert timings["torch"].method == "graph"
    assert timings["torch"].median_us == pytest.approx(54.0)
    assert timings["torch"].host_us == pytest.approx(110.0)


def test_a_peer_that_cannot_be_captured_is_timed_by_events_and_says_so() -> None:
    clock = FakeClock()
    calls = {
        "ours": clock.implementation("ours", 2.0),
        "syncs": clock.implementation("syncs", 20.0, host_us=30.0, capturable=False),
    }
    timings = time_interleaved(calls, 64, clock)
    assert (timings["ours"].method, timings["syncs"].method) == ("graph", "events")
    assert timings["syncs"].median_us == pytest.approx(30.0)


@pytest.mark.parametrize("us", [0.5, 1.3])
def test_a_graph_visits_every_set_equally_often_and_is_long_enough_to_drown_its_launch(us: float) -> None:
    clock = FakeClock()
    sets = 60
    time_interleaved({"ours": clock.implementation("ours", us, host_us=20.0)}, sets, clock)
    captured = [turn for _, turn, capturing in clock.launched if capturing]
    final = captured[sets:]
    assert len(final) % sets == 0
    assert len(final) <= MAX_CALLS_PER_GRAPH
    assert len(final) * us >= REPLAY_US or len(final) + sets > MAX_CALLS_PER_GRAPH
    assert {final.count(turn) for turn in range(sets)} == {len(final) // sets}
    assert all(b == (a + 1) % sets for a, b in itertools.pairwise(final))


def test_implementations_take_turns_and_the_first_of_a_round_changes() -> None:
    clock = FakeClock()
    labels = ("a", "b", "c")
    time_interleaved({label: clock.implementation(label, 8000.0) for label in labels}, 2, clock, rounds=6)
    order = [label for label, _ in itertools.groupby(label for label, _, _ in clock.launched)]
    rounds = order[len(labels) :]
    # Estimating takes the first three; where c ends one round and begins the next, groupby sees it once.
    assert "".join(rounds) == "abcbcacababcbcacab".replace("cc", "c")


def test_drift_meets_all_implementations_alike() -> None:
    clock = FakeClock(drift=0.5)
    calls = {label: clock.implementation(label, 1000.0) for label in ("a", "b")}
    timings = time_interleaved(calls, 2, clock, seconds=0.1)
    assert timings["a"].median_us == pytest.approx(timings["b"].median_us, rel=0.02)
    assert timings["a"].p80_us > 1.02 * timings["a"].p20_us


def test_no_call_reads_the_inputs_of_the_call_before_it() -> None:
    clock = FakeClock()
    calls = {label: clock.implementation(label, 3000.0) for label in ("a", "b", "c")}
    time_interleaved(calls, 2, clock)
    turns = [turn for _, turn, _ in clock.launched]
    assert all(a != b for a, b in itertools.pairwise(turns))


def test_the_time_spent_stays_within_the_budget() -> None:
    clock = FakeClock()
    calls = {"quick": clock.implementation("quick", 80.0), "slow": clock.implementation("slow", 200_000.0)}
    timings = time_interleaved(calls, 2, clock, seconds=0.4)
    assert timings["slow"].samples >= 3
    assert clock.device_us < 3e6


def test_a_small_case_finds_its_set_flushed_in_every_cycle_of_a_graph_and_pays_nothing_for_it() -> None:
    clock = FakeClock()
    calls = {"ours": clock.implementation("ours", 2.0), "copy": clock.implementation("copy", 3.0)}
    timings = time_interleaved(calls, 4, clock, flush=True)
    assert {label: t.method for label, t in timings.items()} == {"ours": "graph", "copy": "graph"}
    assert timings["ours"].median_us == pytest.approx(2.0)
    assert timings["copy"].median_us == pytest.approx(3.0)
    captured = [(label, turn) for label, turn, capturing in clock.launched if capturing]
    last = captured[captured.index(("copy", 0)) - 1 :]
    assert last[:10] == 2 * [("flush", 0), *[("copy", turn) for turn in range(4)]]


def test_a_call_timed_by_events_is_flushed_for_outside_of_its_time() -> None:
    clock = FakeClock()
    timings = time_interleaved({"ours": clock.implementation("ours", 200.0)}, 2, clock, flush=True)
    assert (timings["ours"].method, timings["ours"].median_us) == ("events", pytest.approx(200.0))
    order = [label for label, _, _ in clock.launched]
    assert order[-4:] == ["flush", "ours", "flush", "ours"]


def test_what_rotates_through_the_cache_is_not_flushed() -> None:
    clock = FakeClock()
    time_interleaved({"ours": clock.implementation("ours", 2.0)}, 4, clock)
    assert "flush" not in {label for label, _, _ in clock.launched}
