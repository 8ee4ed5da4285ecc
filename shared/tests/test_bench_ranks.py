"""Are calls of several ranks checked against one GPU's, and timed as their slowest rank? What of those that fail?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from kernel_reference.bench import ranks
from kernel_reference.bench.ranked import LINKS, NAME, Failed, Kept, Timed, read, tables
from kernel_reference.bench.ranks import ONE, Call, Limits, RanksCase, measure, options_of, run_cases
from kernel_reference.testing.distributed import run

CPU = torch.device("cpu")


def make(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    x = torch.arange(8.0, device=device)
    own = slice(4 * rank, 4 * rank + 4)
    return {ONE: Call(lambda: x), "shared": Call(lambda: x[own], lambda whole: whole[own])}


def _measured(rank: int) -> list[Timed]:
    case = RanksCase("a copy", {"elements": 8}, make, efficiency={"shared": 1e-9}, us_at_most={ONE: 1e-9})
    one, shared = measure(case, CPU, 3)
    assert isinstance(one, Timed)
    assert isinstance(shared, Timed)
    assert (one.case, one.implementation, one.world, one.error) == ("a copy", ONE, 2, 0)
    assert one.efficiency == 0.5
    assert (one.target, one.met) == ("at most 1e-09 us", False)
    assert shared.efficiency == one.median_us / 2 / shared.median_us
    assert (shared.target, shared.met) == ("efficiency >= 1e-09", True)
    assert (one.rounds, shared.rounds) == (3, 3)

    def waits(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        def run() -> torch.Tensor:
            time.sleep(0.02 * rank)
            return torch.ones(1)

        return {ONE: Call(lambda: torch.ones(1)), "waits": Call(run)}

    _, line = measure(RanksCase("a wait", {}, waits), CPU, 1)
    assert isinstance(line, Timed)
    assert line.median_us >= 20000

    # Where one GPU is done too soon, there is no target.
    case = RanksCase("a copy", {}, make, efficiency={"shared": 9.0}, target_from_us=1e9)
    assert [line.target for line in measure(case, CPU, 1) if isinstance(line, Timed)] == ["", ""]
    # As many rounds as there is time for, and at least three.
    case = RanksCase("a copy", {}, make)
    assert [line.rounds for line in measure(case, CPU, Limits(9, 0.0)) if isinstance(line, Timed)] == [3, 3]
    assert len(measure(case, CPU, Limits(1, skipped=["shared"]))) == 1

    with pytest.raises(ValueError, match=r"make must be a function that gives a call 'one GPU', got "):
        measure(RanksCase("a copy", {}, lambda device, rank, world: {"shared": Call(lambda: torch.ones(3))}), CPU, 1)
    return [one, shared]


def test_a_call_is_checked_against_one_gpu_s_and_takes_as_long_as_its_slowest_rank() -> None:
    first, second = run(2, _measured)
    assert first == second


def _broken(rank: int) -> list[tuple[str, str]]:
    def raises(of: int) -> torch.Tensor:
        if rank == of:
            raise RuntimeError("of this rank\nalone")
        return torch.ones(3)

    def wrong(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        return {
            ONE: Call(lambda: torch.ones(3)),
            "off": Call(lambda: torch.ones(3) + 0.1 * rank),
            "no number": Call(lambda: torch.tensor([1.0, float("nan"), 1.0])),
            "another shape": Call(lambda: torch.ones(2)),
            "raises": Call(partial(raises, 1)),
            "a share": Call(lambda: torch.zeros(2), share=4),
            "right": Call(lambda: torch.ones(3)),
        }

    lines = measure(RanksCase("a copy", {}, wrong), CPU, 1)
    found = [(line.implementation, line.failed if isinstance(line, Failed) else "") for line in lines]
    (no_one,) = measure(
        RanksCase("a copy", {}, lambda *_: {ONE: Call(partial(raises, 0)), "x": Call(lambda: torch.ones(3))}), CPU, 1
    )
    assert isinstance(no_one, Failed)
    assert no_one.failed == "rank 0: RuntimeError: of this rank alone"

    def no_room(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        raise MemoryError("no room")

    (nothing,) = measure(RanksCase("a copy", {}, no_room), CPU, 1)
    assert nothing == Failed("a copy", {}, "", 2, "rank 0: MemoryError: no room")
    return found


def test_a_call_that_fails_on_one_rank_is_a_line_and_the_others_go_on() -> None:
    first, second = run(2, _broken)
    assert first == second
    assert dict(first) == {
        "off": "rank 1: ValueError: off by 0.1 of the largest element of one GPU's",
        "no number": "rank 0: ValueError: off by nan of the largest element of one GPU's",
        "another shape": "rank 0: ValueError: of shape (2,) in place of (3,)",
        "raises": "rank 1: RuntimeError: of this rank alone",
        ONE: "",
        "a share": "",
        "right": "",
    }


def timed(case: str, n: int, label: str, world: int = 2, us: float = 1.0, **options: object) -> Timed:
    shape = {"n": n, "heads": 4}
    efficiency = float(options.pop("efficiency", 0.5))  # type: ignore[arg-type]
    return Timed(case, shape, label, world, us, us, us, efficiency, 0.0, 0.0, False, 3, axis="n", **options)  # type: ignore[arg-type]


def test_tables_say_where_several_gpus_are_faster_and_calculate_larger_worlds() -> None:
    lines = [
        Timed(LINKS, {"bytes": 10**6}, "all_gather", 2, 10.0, 10.0, 10.0, 1.0, 0.0, 0.0, False, sends={2: 10**6}),
        Timed(LINKS, {"bytes": 8}, "all_gather", 2, 5.0, 5.0, 5.0, 1.0, 0.0, 0.0, True, sends={2: 8}),
        Failed("n 9", {"n": 9}, "peer", 2, "rank 0: no peer"),
    ]
    for n, efficiency in ((1024, 0.3), (2048, 0.45), (4096, 0.55), (5000, 0.9)):
        target = {"target": "efficiency >= 0.8", "met": efficiency > 0.8}
        lines += [
            timed(f"n {n}", n, ONE, us=400.0),
            timed(f"n {n}", n, "shared", us=200 / efficiency, efficiency=efficiency, **target),
        ]
    sends = {2: 10**6, 4: 2 * 10**6, 8: 4 * 10**6}
    lines += [timed("long", 9999, ONE, us=1000.0), timed("long", 9999, "sent", us=600.0, efficiency=5 / 6, sends=sends)]
    lines += [timed("long", 9999, "exchange alone", us=4.0, efficiency=99.0, part=True)]
    lines += [timed("long", 9999, f"a share of {w}", us=us, share=w) for w, us in ((2, 510.0), (4, 250.0))]
    text = tables(lines)
    assert "| n 5000 | shared | 400 | 222 | 0.90 | efficiency >= 0.8: met |" in text
    assert "| long | exchange alone | 1000 | 4.0 |  |  |" in text
    assert "| n 2048 | shared | 400 | 444 | 0.45 | efficiency >= 0.8: **missed** |" in text
    assert "| heads 4 | shared | on an idle GPU | n | 2k | 4k |" in text
    # 250 and 2e6 bytes at 1e5 a microsecond, and what two take beyond 510 and 10.
    assert "Calculated, not measured" in text
    assert "the measured 100 GB/s" in text
    assert "| long | sent | 0.83 | 350 | 0.71 |  |  |" in text
    assert "| n 9 | peer | rank 0: no peer |" in text
    assert "a share" not in text


def test_a_record_goes_on_behind_the_case_that_ended_its_process(tmp_path: Path) -> None:
    first = Kept(tmp_path, {"machine": {"device": "a GPU"}}, resume=False)
    line = timed("a", 1, ONE, sends={2: 3.0}, target="at most 3 us")
    first.add([line])
    first.note("b", {"n": 2}, "peer", 2)
    second = Kept(tmp_path, {"machine": {"device": "a GPU"}}, resume=True)
    assert second.begun == first.begun
    assert second.lines[0] == line
    assert [type(line) for line in second.lines] == [Timed, Failed]
    assert (second.lines[1].case, second.lines[1].implementation) == ("b", "peer")
    second.close()
    assert read(tmp_path / NAME) == second.lines
    older = tmp_path / "older.jsonl"
    older.write_text((tmp_path / NAME).read_text().replace('"target":', '"owed":'))
    assert read(older) == second.lines
    older.unlink()
    assert [*tmp_path.iterdir()] == [tmp_path / NAME]
    assert json.loads((tmp_path / NAME).read_text().splitlines()[1])["machine"] == {"device": "a GPU"}
    assert Kept(tmp_path, {}, resume=False).lines == []


def _driven(rank: int, out: Path, *arguments: str) -> None:
    def make(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        ones = Call(lambda: torch.ones(3))
        return {ONE: ones, "ends its process": Call(lambda: os._exit(3)), "right": ones}

    def cases(dry: bool) -> Iterator[RanksCase]:
        yield RanksCase("first", {"n": 1}, make, efficiency={"right": 0.9})
        yield RanksCase("later", {}, make)

    run_cases(cases, options_of(["--dry", "--out", str(out), *arguments]), CPU, None)


def test_the_command_goes_on_with_what_an_ended_one_has_written(tmp_path: Path) -> None:
    for _ in ("first", "later"):
        with pytest.raises(RuntimeError, match="it ended without a word"):
            run(2, _driven, tmp_path, "--resume")
    run(2, _driven, tmp_path, "--resume")
    lines = [line for line in read(tmp_path / NAME) if line.case != LINKS]
    assert [(line.case, line.implementation, type(line)) for line in lines] == [
        (case, label, kind)
        for case in ("first", "later")
        for label, kind in (("ends its process", Failed), (ONE, Timed), ("right", Timed))
    ]
    assert [*tmp_path.iterdir()] == [tmp_path / NAME]
    told = subprocess.run([sys.executable, ranks.__file__, "--table", tmp_path / NAME], capture_output=True, text=True)
    assert "| first | right |" in told.stdout


def test_no_case_begins_after_the_last_minute(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(2, _driven, tmp_path, "--minutes", "0", "--only", "later")
    assert "not begun, 0 minutes are over" in capfd.readouterr().out
    assert not (tmp_path / NAME).exists()
