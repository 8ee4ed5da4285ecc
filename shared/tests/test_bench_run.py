"""A run checks before it times, records what is absent or red, and says by its exit code what happened."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.bench import run
from kernel_reference.bench.case import Case, Requirement
from kernel_reference.bench.dry import rehearse_cases
from kernel_reference.bench.machine import Machine
from kernel_reference.bench.measure import Stamp, measure
from kernel_reference.bench.record import Record, load
from kernel_reference.bench.roofs import Roofs
from kernel_reference.bench.roofs import measure as measure_roofs
from kernel_reference.bench.timers import MOST_SETS

CPU = torch.device("cpu")
MACHINE = Machine("NVIDIA H200", "580.1", "9.0", "13.0", "2.13.0", "3.7.1", "3.12.3")
STAMP = Stamp("gdn-split", "0.1.0", MACHINE, Roofs(4000.0, 800.0), None, "2026-11-21T10:00:00+00:00")


class FakeClock:
    """Every call costs 100 us of device time, or what it adds to ``extra_us`` itself."""

    l2_bytes = 60 * 2**20

    def __init__(self) -> None:
        self.host_us = 0.0
        self.extra_us = 0.0

    def free_bytes(self) -> int:
        return 10**8

    def host_seconds(self) -> float:
        self.host_us += 10.0
        return self.host_us * 1e-6

    def synchronize(self) -> None:
        return None

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for call in calls:
            before = self.extra_us
            call()
            times.append(100.0 + self.extra_us - before)
        return times

    def flush(self) -> None:
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        raise RuntimeError("no graphs here")


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def worst(out: torch.Tensor, x: torch.Tensor) -> float:
    return float((out - 2 * x).abs().max())


def doubling(**changes: Any) -> Case:
    values: dict[str, Any] = dict(
        name="double n1024",
        shape={"n": 1024},
        make_inputs=lambda: torch.randn(1024),
        ours={"ours": double},
        peers={},
        check=worst,
        bytes_moved=8192,
        flops=1024,
    )
    return Case(**(values | changes))


def measured(case: Case, clock: FakeClock | None = None) -> dict[str, Record]:
    records = measure(case, CPU, clock or FakeClock(), STAMP, seconds=0.002, rounds=2)
    assert [r.implementation for r in records] == list(case.labels())
    return {r.implementation: r for r in records}


def test_a_passing_case_is_timed_beside_the_copy_with_bandwidth_rates_and_roofs() -> None:
    found = measured(doubling())
    ours, copied = found["ours"], found["copy"]
    assert (ours.status, ours.median_us, ours.error, ours.ours) == ("timed", 100.0, 0.0, True)
    assert ours.gb_per_s == pytest.approx(8192 / 100e-6 / 1e9)
    assert ours.tflop_per_s == pytest.approx(1024 / 100e-6 / 1e12)
    assert ours.fraction_of_copy_roof == pytest.approx(8192 / 100e-6 / 4e12)
    assert ours.fraction_of_gemm_roof == pytest.approx(1024 / 100e-6 / 8e14)
    assert ours.ratio_to_baseline == 1.0
    assert ours.input_sets == MOST_SETS
    assert (copied.status, copied.ours, copied.baseline) == ("timed", False, "copy")
    assert (ours.device, ours.driver, ours.package) == ("NVIDIA H200", "580.1", "gdn-split")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param(lambda x: 2 * x + 1, "error 1 > 0", id="wrong"),
        pytest.param(lambda x: x * math.nan, "error nan > 0", id="nan"),
        pytest.param(lambda x: x.missing, "AttributeError", id="raises"),
    ],
)
def test_what_fails_its_check_is_red_and_has_no_speed(wrong: Callable[[Any], Any], reason: str) -> None:
    found = measured(doubling(ours={"ours": double, "wrong": wrong}))
    assert found["wrong"].status == "red"
    assert reason in found["wrong"].note
    assert (found["wrong"].median_us, found["wrong"].gb_per_s, found["wrong"].ratio_to_baseline) == (None, None, None)
    assert found["ours"].status == "timed"


def test_an_unwritten_element_is_seen_although_the_right_answer_lay_there_before() -> None:
    kept = torch.empty(1024)

    def skips_one(x: torch.Tensor) -> torch.Tensor:
        kept[1:] = 2 * x[1:]
        return kept

    def fills(x: torch.Tensor) -> torch.Tensor:
        return kept.copy_(2 * x)

    found = measured(doubling(ours={"fills": fills, "skips": skips_one}))
    assert (found["fills"].status, found["skips"].status) == ("timed", "red")


def test_a_check_that_raises_is_a_red_check() -> None:
    def check(out: Any, x: Any) -> float:
        raise AssertionError("rows differ")

    record = measured(doubling(check=check, tolerance=math.inf))["ours"]
    assert (record.status, record.note) == ("red", "AssertionError: rows differ")


def test_an_error_within_the_tolerance_is_recorded_and_timed() -> None:
    record = measured(doubling(check=lambda out, x: 0.25, tolerance=0.25))["ours"]
    assert (record.status, record.error) == ("timed", 0.25)
    assert measured(doubling(check=lambda out, x: 0.26, tolerance=0.25))["ours"].error == 0.26


def test_the_check_sees_inputs_as_they_were_before_an_in_place_call() -> None:
    found = measured(doubling(ours={"in place": lambda x: x.mul_(2), "after it": double}))
    assert {r.status for r in found.values()} == {"timed"}


def test_a_peer_that_cannot_be_imported_is_recorded_with_its_reason_and_one_that_breaks_is_red() -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'sglang'")

    def broken() -> Any:
        raise RuntimeError("needs\nsm_100")

    found = measured(doubling(peers={"sglang": missing, "broken": broken, "torch": lambda: double}))
    assert (found["sglang"].status, found["sglang"].note) == ("absent", "ModuleNotFoundError: No module named 'sglang'")
    assert (found["broken"].status, found["broken"].note) == ("red", "RuntimeError: needs sm_100")
    assert (found["torch"].status, found["torch"].ours) == ("timed", False)


def test_inputs_that_cannot_be_made_turn_the_case_red_and_not_the_run() -> None:
    def impossible() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = measured(doubling(make_inputs=impossible))
    assert found["ours"].note == "OutOfMemoryError: CUDA out of memory"
    assert found["ours"].status == "red"


def test_a_record_says_how_the_cache_was_cold() -> None:
    assert measured(doubling())["ours"].l2 == "flushed"
    clock = FakeClock()
    clock.l2_bytes = 64 * 4096 // 3
    assert measured(doubling(), clock)["ours"].l2 == "rotated"


class Forgetful:
    """Changes its inputs, and from its second call on leaves its result as it finds it."""

    def __init__(self, leaves_it: bool) -> None:
        self.calls, self.leaves_it = 0, leaves_it

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = 2 * x
        x.zero_()
        return torch.full_like(out, math.nan) if self.leaves_it and self.calls == 2 else out


def test_where_memory_is_short_one_copy_is_judged_twice_and_one_set_rotates() -> None:
    clock = FakeClock()
    clock.l2_bytes, clock.free_bytes = 64, lambda: 8191  # type: ignore[method-assign]
    found = measured(doubling(ours={"ours": Forgetful(False), "left": Forgetful(True)}), clock)
    assert (found["ours"].status, found["ours"].input_sets, found["ours"].l2) == ("timed", 1, "rotated")
    assert found["left"].note == "error nan > 0"
    # Read from the cache, it would be timed too short: two sets, whatever they take.
    clock.l2_bytes = 4096 // 3 - 1
    assert measured(doubling(), clock)["ours"].input_sets == 2


class KnowsItsInputs:
    """Returns what it gave before to inputs at the same address; in a graph alone with ``when_captured``."""

    def __init__(self, clock: CapturingClock, when_captured: bool = False) -> None:
        self.clock, self.when_captured = clock, when_captured
        self.given: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # What it is called with must live: another tensor may have its address else.
        if x.data_ptr() not in self.given or (self.when_captured and not self.clock.capturing):
            self.given[x.data_ptr()] = 2 * x
            self.kept = [*getattr(self, "kept", []), x]
        return self.given[x.data_ptr()]


class CapturingClock(FakeClock):
    """A device whose graphs run their calls anew, into what the first run returned, as CUDA's do."""

    capturing = False

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        # So short that it is captured.
        return [us / 10 for us in super().sample_us(calls)]

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        self.capturing = True
        try:
            run()
        finally:
            self.capturing = False
        return lambda: None


def test_what_knows_its_inputs_again_by_their_address_is_red_after_its_timing() -> None:
    clock = CapturingClock()
    clock.capture = FakeClock.capture.__get__(clock)  # type: ignore[method-assign]
    found = measured(doubling(ours={"honest": double, "cheats": KnowsItsInputs(clock)}), clock)
    assert found["cheats"].status == "red"
    assert found["cheats"].note.startswith(
        "passed, and failed on new values at old addresses after it was timed: error"
    )
    assert (found["cheats"].median_us, found["cheats"].ratio_to_baseline) == (None, None)
    assert found["honest"].status == "timed"


def test_what_is_timed_in_a_graph_is_judged_in_one() -> None:
    clock = CapturingClock()
    replayed: list[torch.Tensor] = []

    def in_graphs(run: Callable[[], None]) -> Callable[[], object]:
        clock.capturing = True
        run()
        clock.capturing = False
        return lambda: [out.copy_(2 * given) for given, out in replayed]

    def honest(given: torch.Tensor) -> torch.Tensor:
        out = 2 * given
        if clock.capturing:
            replayed.append((given, out))
        return out

    clock.capture = in_graphs  # type: ignore[method-assign]
    cheats = KnowsItsInputs(clock, when_captured=True)
    found = measured(doubling(ours={"honest": honest, "cheats": cheats}, copy=False, baseline="honest"), clock)
    assert (found["honest"].status, found["honest"].method) == ("timed", "graph")
    assert found["cheats"].status == "red"


def test_inputs_that_are_changed_in_place_are_judged_again_as_they_were() -> None:
    @dataclass(eq=False)
    class Step:
        x: torch.Tensor
        held: dict[str, torch.Tensor] = field(default_factory=dict)

    def in_place(i: Step) -> torch.Tensor:
        # What a peer keeps beside its inputs belongs to their values and is made anew with them.
        i.held.setdefault("factor", torch.full((), 2.0 if i.x[0] != 0 else 0.0))
        return i.x.mul_(i.held["factor"])

    found = measured(
        doubling(
            make_inputs=lambda: Step(torch.randn(1024)),
            ours={"ours": in_place},
            check=lambda out, i: float((out - 2 * i.x).abs().max()),
        )
    )
    assert found["ours"].status == "timed"


def test_nothing_is_timed_where_nothing_passed() -> None:
    found = measured(doubling(ours={"ours": lambda x: x}))
    assert (found["ours"].status, found["copy"].status) == ("red", "absent")
    assert found["copy"].median_us is None


def test_every_implementation_is_timed_on_every_set_of_the_same_inputs() -> None:
    seen: dict[str, set[int]] = {"ours": set(), "peer": set()}

    def noting(label: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            seen[label].add(x.data_ptr())
            return 2 * x

        return call

    made: list[torch.Tensor] = []

    def make_inputs() -> torch.Tensor:
        made.append(torch.randn(1024))
        return made[-1]

    found = measured(
        doubling(make_inputs=make_inputs, ours={"ours": noting("ours")}, peers={"peer": lambda: noting("peer")})
    )
    # The last one gives the values that all are judged by again.
    sets = {x.data_ptr() for x in made[:-1]}
    assert len(sets) == found["ours"].input_sets == MOST_SETS
    assert len(made[0].unique()) > 1000
    assert not torch.equal(made[0], made[1])
    # Beside the sets each saw the two copies of its check.
    assert sets <= seen["ours"]
    assert sets <= seen["peer"]


def test_requirements_are_met_missed_or_not_measured() -> None:
    clock = FakeClock()

    def slow(x: torch.Tensor) -> torch.Tensor:
        clock.extra_us += 100.0
        return 2 * x

    def missing() -> Any:
        raise ImportError("no fla")

    case = doubling(
        ours={"ours": double, "slow": slow, "lone": double, "brief": double, "late": double},
        peers={"fla": missing},
        requirements=[
            Requirement("ours", speed_at_least=0.97),
            Requirement("ours", "slow", time_at_most=0.6),
            Requirement("slow", time_at_most=1.12),
            Requirement("lone", "fla", time_at_most=1.0),
            Requirement("brief", us_at_most=100.5),
            # A bound in microseconds needs no other implementation.
            Requirement("late", "fla", us_at_most=99.5),
        ],
    )
    found = measured(case, clock)
    assert found["ours"].requirement == "speed >= 0.97 of copy (1.000); time <= 0.6 x slow (0.500)"
    assert found["ours"].requirement_met is True
    assert (found["slow"].requirement, found["slow"].requirement_met) == ("time <= 1.12 x copy (2.000)", False)
    assert (found["lone"].requirement, found["lone"].requirement_met) == ("time <= 1 x fla", None)
    assert (found["brief"].requirement, found["brief"].requirement_met) == ("time <= 100.5 us (100.000)", True)
    assert (found["late"].requirement, found["late"].requirement_met) == ("time <= 99.5 us (100.000)", False)
    assert (found["copy"].requirement, found["copy"].requirement_met) == (None, None)


def test_roofs_follow_from_bytes_read_and_written_and_two_operations_a_multiply_add() -> None:
    roofs = measure_roofs(CPU, FakeClock(), copy_bytes=1 << 20, gemm_size=64, repeats=2)
    assert roofs.copy_gb_per_s == pytest.approx(2 * 2**20 / 100e-6 / 1e9)
    assert roofs.gemm_tflop_per_s == pytest.approx(2 * 64**3 / 100e-6 / 1e12)


class FakeBench:
    """A run without a GPU."""

    device = CPU

    def __init__(self) -> None:
        self.clock = FakeClock()

    def roofs(self) -> Roofs:
        return Roofs(4000.0, 800.0)

    def machine(self) -> Machine:
        return MACHINE

    def tidy(self) -> None:
        return None


CASES = """
import torch
from kernel_reference.bench import Case


def cases(device):
    for n in (256, 512):
        yield Case(
            name=f"double n{n}",
            shape={"n": n},
            make_inputs=lambda n=n: torch.randn(n, device=device),
            ours={"ours": lambda x: FACTOR * x},
            peers={"torch": lambda: lambda x: x + x},
            check=lambda out, x: float((out - 2 * x).abs().max()),
            bytes_moved=8 * n,
        )
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "doubling" / "benchmarks" / "cases.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_run_writes_records_table_and_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    assert run.main([cases, "--out", str(tmp_path / "out"), "--quick", "--commit", "abc"], bench=FakeBench()) == 0
    records = load(tmp_path / "out" / "doubling.jsonl")
    assert [(r.case, r.implementation) for r in records] == [
        (f"double n{n}", label) for n in (256, 512) for label in ("ours", "torch", "copy")
    ]
    assert {r.commit for r in records} == {"abc"}
    out = capsys.readouterr().out
    assert "[2/2] double n512: ours 100 us, torch 100 us, copy 100 us" in out
    assert "doubling 0+source on NVIDIA H200" in out
    assert (tmp_path / "out" / "doubling.svg").read_text().lstrip().startswith("<?xml")


def test_a_red_check_makes_the_run_fail_after_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "3"))
    assert run.main([cases, "--out", str(tmp_path), "--quick"], bench=FakeBench()) == 1
    assert {r.status for r in load(tmp_path / "doubling.jsonl") if r.ours} == {"red"}
    assert "RED: double n256 / ours: error" in capsys.readouterr().out


def test_a_run_compares_with_an_old_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    assert run.main([cases, "--out", str(tmp_path / "old"), "--quick"], bench=FakeBench()) == 0
    old = str(tmp_path / "old" / "doubling.jsonl")
    again = [cases, "--out", str(tmp_path), "--quick", "--compare", old]
    assert run.main(again, bench=FakeBench()) == 0
    slower = FakeBench()
    slower.clock.sample_us = lambda calls: [300.0 + 0 * len([call()]) for call in calls]  # type: ignore[method-assign]
    capsys.readouterr()
    assert run.main([*again, "--only", "n512$"], bench=slower) == 1
    assert "1 regression(s): double n512 / ours" in capsys.readouterr().out
    assert "double n256" not in capsys.readouterr().out


def test_a_case_that_is_no_longer_there_is_a_regression_unless_left_out(tmp_path: Path, capsys: Any) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    assert run.main([cases, "--out", str(tmp_path / "old"), "--quick"], bench=FakeBench()) == 0
    written(tmp_path, CASES.replace("FACTOR", "2").replace("(256, 512)", "(256,)"))
    again = [cases, "--out", str(tmp_path), "--quick", "--compare", str(tmp_path / "old" / "doubling.jsonl")]
    assert run.main(again, bench=FakeBench()) == 1
    assert "double n512 / ours: MISSING" in capsys.readouterr().out
    assert run.main([*again, "--only", "n256$"], bench=FakeBench()) == 0
    # What its pattern asks for and no case has any more is missing too.
    assert run.main([*again, "--only", "n256$|n512$"], bench=FakeBench()) == 1


def test_a_run_without_matplotlib_still_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plot", "picture"):
        monkeypatch.delitem(sys.modules, f"kernel_reference.bench.{name}", raising=False)
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    assert run.main([cases, "--out", str(tmp_path), "--quick"], bench=FakeBench()) == 0
    assert "no SVG: " in capsys.readouterr().out
    assert len(load(tmp_path / "doubling.jsonl")) == 6


def test_all_cores_compile_first_where_so_many_processes_share_the_cases_and_call_ours_before_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    commands: list[Sequence[str]] = []
    left: list[float] = []

    def note(given: Sequence[Sequence[str]], environments: Any, until: float) -> None:
        commands[:] = given
        left.append(until - time.monotonic())

    monkeypatch.setattr(run, "run_together", note)
    given = [cases, "--out", str(tmp_path), "--quick", "--only", "double", "--processes", "2"]
    for within in ((), ("--within", "3600")):
        assert run.main([*given, *within], bench=FakeBench()) == 0
    # The other half is for measuring.
    assert [round(seconds, -2) for seconds in left] == [600, 1800]
    assert [command[-4:] for command in commands] == [["--only", "double", "--share", f"{i}/2"] for i in (0, 1)]
    assert len(load(tmp_path / "doubling.jsonl")) == 6
    called = "import pathlib\n" + CASES.replace("FACTOR * x", "pathlib.Path(FILE).open('a').write(f'{len(x)} ') / 0")
    called = called.replace("x + x", "pathlib.Path(FILE).open('a').write(f'peer {len(x)} ')")
    cases = written(tmp_path, called.replace("FILE", repr(str(tmp_path / "called"))))
    for command in commands:
        assert run.main([cases, *command[4:]], bench=FakeBench()) == 0
    assert (tmp_path / "called").read_text() == "256 peer 256 512 peer 512 "
    assert run.main([cases, *commands[0][4:-1], "0/1"], bench=FakeBench()) == 0
    assert (tmp_path / "called").read_text().endswith(" 256 512 peer 256 peer 512 ")


def test_compiling_may_be_all_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[float] = []
    monkeypatch.setattr(run, "run_together", lambda *_, until: left.append(until - time.monotonic()))
    given = [written(tmp_path, CASES.replace("FACTOR", "2")), "--out", str(tmp_path / "out"), "--processes", "2"]
    assert run.main([*given, "--compile-only", "--within", "3600"], bench=FakeBench()) == 0
    assert [round(seconds, -2) for seconds in left] == [3600]
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run.main([*given[:-2], "--compile-only"], bench=FakeBench())
    assert "--compile-only must be given with --processes N" in capsys.readouterr().err


def test_no_case_begins_after_the_seconds_given_and_those_before_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = written(tmp_path, CASES.replace("FACTOR", "2"))
    seconds = iter(range(0, 100, 10))
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(run, "time", clock)
    assert run.main([cases, "--out", str(tmp_path), "--quick", "--within", "15"], bench=FakeBench()) == 0
    assert {record.case for record in load(tmp_path / "doubling.jsonl")} == {"double n256"}
    assert "15 s are over: 1 of 2 cases are not measured" in capsys.readouterr().out


def test_a_case_without_a_peer_owes_nothing_beside_it_and_has_another_baseline() -> None:
    targets = [Requirement("ours", "torch", speed_at_least=1.0), Requirement("ours", speed_at_least=0.9)]
    peers = {"torch": lambda: double, "fla": lambda: double}
    case = doubling(peers=peers, requirements=targets, baseline="torch").without("torch", "one that is not there")
    assert (case.labels(), case.baseline, list(case.requirements)) == (("ours", "fla", "copy"), "copy", targets[1:])
    assert doubling(peers=peers, baseline="fla", copy=False).without("fla").baseline == "ours"
    assert doubling(peers=peers, baseline="fla").without("torch").baseline == "fla"


def test_a_case_of_host_time_bounds_one_implementation_beside_one_peer_where_it_has_it() -> None:
    peers = {"torch": lambda: double, "fla": lambda: double}
    case = doubling(peers=peers, baseline="torch").of_host("decode", "ours", 25.0, "fla")
    assert (case.name, case.labels(), case.baseline) == ("host time, decode", ("ours", "fla"), "ours")
    [target] = case.requirements
    assert (target.implementation, target.describe()) == ("ours", "host time <= 25 us")
    assert doubling(peers=peers).of_host("decode", "ours", 25.0, "vllm").labels() == ("ours",)


def test_a_rehearsal_makes_every_case_and_judges_the_smallest(tmp_path: Path) -> None:
    cases = Path(written(tmp_path, CASES.replace("FACTOR", "(2 if len(x) < 300 else 3)")))
    assert rehearse_cases(cases) == ["double n256", "double n512"]
    with pytest.raises(AssertionError, match=r"^double n512, ours: error"):
        rehearse_cases(cases, judged=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_a_run_says_so_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([written(tmp_path, "raise SystemError"), "--out", str(tmp_path / "out")]) == 2
    assert "a benchmark needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "extra", "words"),
    [
        ("x = 1", [], "must define cases(device), got none"),
        (CASES.replace("double n{n}", "double"), [], "must name each case once, got twice: double"),
        (CASES, ["--only", "n7$"], "--only must match a case of"),
        (CASES, ["--compare", "/nowhere.jsonl"], "--compare must name a readable record"),
    ],
)
def test_an_unusable_request_is_refused(tmp_path: Path, capsys: Any, text: str, extra: list[str], words: str) -> None:
    assert run.main([written(tmp_path, text), "--out", str(tmp_path / "out"), *extra], bench=FakeBench()) == 2
    assert words in capsys.readouterr().err
