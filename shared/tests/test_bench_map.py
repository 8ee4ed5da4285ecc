"""A map measures a sample of its grids within its time, goes on from where it was ended, and shows the worst points."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_reference.bench import map as command
from kernel_reference.bench import mapped, processes
from kernel_reference.bench.compiled import compilations
from kernel_reference.bench.dry import DryBench
from kernel_reference.bench.mapped import First, Header, Measured, Outcome, Sweep
from kernel_reference.bench.processes import started

MAPS = """
import torch
from kernel_reference.bench import Axis, Case, Map

calls = []


def doubling(device, point):
    n, dtype = point["n"], getattr(torch, point["dtype"])
    if point["kind"] == "raises":
        raise RuntimeError(f"no case of {n}")
    if point["kind"] == "none":
        return None

    def ours(x):
        if point["kind"] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (3 if point["kind"] == "wrong" else 2) * x

    def peer():
        if point["kind"] == "alone":
            raise ImportError("no peer here")
        return lambda x: x + x

    return Case(
        name="double", shape={"n": n}, make_inputs=lambda: torch.randn(n, device=device).to(dtype), ours={"ours": ours},
        peers={"peer": peer}, check=lambda out, x: float((out - 2 * x).abs().max()),
        bytes_moved=10**10 if point["kind"] == "huge" else 8 * n,
    )


def maps(device):
    kinds = ["plain", "alone", "wrong", "raises", "none", "memory", "huge"]
    axes = [Axis("n", [256, 512]), Axis("dtype", ["float32", "bfloat16"]), Axis("kind", kinds)]
    yield Map("double", axes, lambda point: doubling(device, point))
    yield Map("again", axes[:2], lambda point: doubling(device, {**point, "kind": "plain"}))


def sweep(device, batch):
    x = torch.randn(batch, device=device)
    return lambda: 2 * x
"""


def written(tmp_path: Path, text: str = MAPS) -> str:
    path = tmp_path / "doubling" / "benchmarks" / "map.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def outcome(label: str, us: float | None, *, ours: bool = False, status: str = "timed", note: str = "") -> Outcome:
    return Outcome(label, ours, status, note, us, us, us, 9.0, "graph", 0.0)


def point(ours_us: float | None, /, map: str = "decode", **others: float | None) -> Measured:
    outcomes = [outcome("ours", ours_us, ours=True), *(outcome(label, us) for label, us in others.items())]
    return Measured(map, {"heads": 8, "page": 16}, 1.0, bytes=4_000_000, flops=8_000_000_000, outcomes=tuple(outcomes))


HEADER = Header(
    package="prefix-prefill", package_version="0.1.0", device="NVIDIA H200", driver="580.1", capability="9.0",
    cuda="13.0", torch="2.13.0", triton="3.7.1", python="3.12.3", copy_roof_gb_per_s=4000.0,
    gemm_roof_tflop_per_s=800.0, commit=None, date="2026-11-22T10:00:00+00:00",
    axes={"decode": {"heads": [8, 16], "page": [16, 24, 64]}},
)  # fmt: skip


def test_every_point_is_recorded_with_its_times_or_its_reason(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert command.main([written(tmp_path), "--out", str(out)], bench=DryBench()) == 1
    header, points = mapped.load(out / "map.jsonl")
    assert (header.package, header.device, list(header.axes)) == ("doubling", "no GPU", ["double", "again"])
    assert header.axes["double"]["n"] == [256, 512]
    by_kind = {p.point["kind"]: p for p in points if p.map == "double"}
    assert len(points) == len(by_kind) * 2 + 4
    assert (by_kind["plain"].of_peer, by_kind["plain"].red) == (1.0, [])
    assert (by_kind["alone"].of_peer, header.ratio(by_kind["alone"])) == (None, 1.0)
    assert "ImportError: no peer here" in [o.note for o in by_kind["alone"].outcomes]
    assert "error" in by_kind["wrong"].red[0]
    assert by_kind["raises"].red[0].startswith("RuntimeError: no case of ")
    assert by_kind["memory"].red == ["ours: OutOfMemoryError: CUDA out of memory"]
    assert by_kind["huge"].red == ["moves 10.0 GB, and a point may move 4"]
    assert (by_kind["none"].outcomes, by_kind["none"].red) == ((), [])
    shown = capsys.readouterr().out
    assert "kind=plain: 20000 us, 1.00 of peer (" in shown
    assert "the slowest of 18 points" in shown
    assert "batch sizes 1 to 256: 0 kernels compiled" in shown
    for name in ("double", "again"):
        assert (out / f"map-{name}.svg").read_text().lstrip().startswith("<?xml")


def test_resuming_keeps_what_is_there_and_measures_the_rest(tmp_path: Path, capsys: Any) -> None:
    arguments = [written(tmp_path), "--out", str(tmp_path), "--only", "again", "--no-sweep"]
    assert command.main([*arguments, "--points", "3"], bench=DryBench()) == 0
    file = tmp_path / "map.jsonl"
    three = file.read_text()
    # What a process that was killed while it wrote leaves behind.
    file.write_text(three + '{"point": {"map": "aga')
    capsys.readouterr()
    assert command.main([*arguments, "--resume", "--commit", "later"], bench=DryBench()) == 0
    assert file.read_text().startswith(three)
    assert [found.commit == "later" for found in mapped.load(file)[1]] == [False, False, False, True]
    assert "[4/4] again" in capsys.readouterr().out
    file.write_text(three.replace("no GPU", "another GPU"))
    assert command.main([*arguments, "--resume"], bench=DryBench()) == 2
    assert "got no GPU" in capsys.readouterr().err
    assert command.main([*arguments, "--points", "2"], bench=DryBench()) == 0
    assert len(mapped.load(file)[1]) == 2


def test_points_whose_kernels_are_made_come_first(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    arguments = [written(tmp_path), "--out", str(out), "--only", "double .*=plain|again"]
    assert command.main([*arguments, "--role", "ahead", "--share", "5/6"], bench=DryBench()) == 0
    made = json.loads((out / "map.ready").read_text())
    assert command.main([*arguments, "--role", "measure"], bench=DryBench()) == 0
    measured = [[found.map, found.point] for found in mapped.load(out / "map.jsonl")[1]]
    assert (len(measured), measured[0]) == (6, made)
    assert command.finish(out) == 0
    assert not (out / "map.ready").exists()
    assert command.main([*arguments[:-1], "nothing", "--role", "measure"], bench=DryBench()) == 2


def test_compiling_may_be_all_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    given = [written(tmp_path), "--out", str(out), "--compile-only", "--only", "again"]
    assert command.main(given, bench=DryBench()) == 0
    assert len((out / "map.ready").read_text().splitlines()) == 4
    roles: list[list[str]] = []

    def note(commands: list[list[str]], environments: Any, until: float) -> list[int]:
        roles.extend(one[one.index("--role") :] for one in commands)
        assert until - time.monotonic() > 900
        return [0] * len(commands)

    monkeypatch.setattr(command, "CudaBench", DryBench)
    monkeypatch.setattr(command, "run_together", note)
    assert command.main([*given, "--seconds", "1000", "--ahead", "2"]) == 0
    assert [role[1] for role in roles] == ["ahead", "ahead"]
    assert not (out / "map.jsonl").exists()


def test_maps_take_turns_so_that_each_has_its_share_when_time_is_up(tmp_path: Path) -> None:
    maps, _ = command.load_maps(Path(written(tmp_path)), DryBench.device)
    items = command.items_of(maps)
    assert (len(items), len({item.key for item in items})) == (18, 18)
    assert [item.map.name for item in items[:9]].count("again") == 2


def test_nothing_is_begun_that_the_time_left_does_not_hold(tmp_path: Path) -> None:
    maps, _ = command.load_maps(Path(written(tmp_path)), DryBench.device)
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    bench = DryBench()
    stamp: Any = None
    assert list(command.measure_items(command.items_of(maps), bench, stamp, file, until=time.monotonic() - 1)) == []


SURVIVOR = """
import os, signal, sys, time
from pathlib import Path
from kernel_reference.bench import mapped
from kernel_reference.bench.grid import key_of

file, fate = Path(sys.argv[1]), sys.argv[2]
done = {one.key for one in mapped.load(file)[1]}
for page in (16, 24, 64):
    point = {"heads": 8, "page": page}
    if key_of("decode", point) in done:
        continue
    file.with_suffix(".running").write_text('["decode", {"heads": 8, "page": %d}]' % page)
    if page == 24:
        if fate == "hangs":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGSEGV)
    mapped.append(file, mapped.Measured("decode", point, 0.1))
    file.with_suffix(".running").unlink()
    if fate == "lost" and page == 16:
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("fate", "note"),
    [
        ("dies", "the process ended with SIGSEGV"),
        ("hangs", "no result within 1 s"),
        ("lost", "the process ended with SIGSEGV"),
    ],
)
def test_a_point_that_ends_or_hangs_its_process_costs_only_itself(tmp_path: Path, fate: str, note: str) -> None:
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    child = [sys.executable, "-c", SURVIVOR, str(file), fate]
    command.supervise(child, file, until=time.monotonic() + 100, point_seconds=1.0)
    points = {p.point["page"]: p.note for p in mapped.load(file)[1]}
    assert points == {16: "", 24: note, 64: ""}
    assert not file.with_suffix(".running").exists()


def test_a_point_that_has_all_the_time_is_named_with_what_it_was_doing(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    text = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.register(signal.SIGUSR1)
running = pathlib.Path(sys.argv[1])
running.write_text('["prefill", {"heads": 8}]')
os.utime(running, (time.time() - 20, time.time() - 20))

def compile_forty_eight_configurations():
    time.sleep(600)

compile_forty_eight_configurations()
"""
    child = [sys.executable, "-c", text, str(file.with_suffix(".running"))]
    command.supervise(child, file, until=time.monotonic() + 3)
    shown = capfd.readouterr()
    assert "time was up after 2" in shown.out
    assert "of prefill heads=8, not recorded" in shown.out
    assert "in compile_forty_eight_configurations" in shown.err
    assert mapped.load(file)[1] == []


def test_the_measuring_process_makes_itself_ready_and_begins_when_it_is_told(tmp_path: Path) -> None:
    file, ready = tmp_path / "map.jsonl", tmp_path / "ready"
    mapped.begin(file, HEADER)
    text = """
import sys
from pathlib import Path
from kernel_reference.bench import mapped

Path(sys.argv[2]).touch()
if sys.stdin.readline():
    mapped.append(Path(sys.argv[1]), mapped.Measured("decode", {"heads": 8, "page": 16}, 0.1))
"""
    with started([sys.executable, "-c", text, str(file), str(ready)]) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert mapped.load(file)[1] == []
        command.supervise(["no such command"], file, until=time.monotonic() + 100, first=process)
    assert len(mapped.load(file)[1]) == 1


def test_compiling_ahead_tells_what_was_compiled_and_what_failed(tmp_path: Path, capsys: Any) -> None:
    triton = pytest.importorskip("triton")
    told = {"src": None, "metadata_group": {}, "times": None, "cache_hit": False}
    maps, _ = command.load_maps(Path(written(tmp_path)), DryBench.device)
    double = maps[0]

    def case(point: Any) -> Any:
        triton.knobs.compilation.listener(metadata={"name": "attend"}, **told)
        return double.case(point)

    items = [
        command.Item(replace(double, case=case), {"n": 256, "dtype": "float32", "kind": kind})
        for kind in ("plain", "memory", "alone")
    ]
    command.call_ahead(items, DryBench(), tmp_path / "map.ready")
    assert (tmp_path / "map.ready").read_text().splitlines() == [item.key for item in items]
    shown = capsys.readouterr().out
    assert "ahead: double n=256 dtype=float32 kind=memory: ours: OutOfMemoryError: CUDA out of memory" in shown
    assert shown.count("1 compiled: attend)") == 3
    # That a peer is not there is told where it is judged.
    assert "no peer here" not in shown


def test_one_long_point_does_not_keep_the_next_from_being_begun(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    maps, _ = command.load_maps(Path(written(tmp_path)), DryBench.device)
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    now = [0.0]
    seconds = iter([1.0, 60.0, 1.0, 1.0, 1.0])

    def measure_one(item: Any, bench: Any, stamp: Any, spent: dict[str, float]) -> Measured:
        took = next(seconds)
        now[0] += took
        spent.update({"judging vLLM": took * 0.8, "inputs": took * 0.1})
        return Measured(item.map.name, dict(item.point), took)

    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command, "measure_one", measure_one)
    stamp: Any = None
    found = list(command.measure_items(command.items_of(maps), DryBench(), stamp, file, until=63.5))
    assert [one.seconds for one in found] == [1.0, 60.0, 1.0, 1.0]
    assert "(60.0 s, judging vLLM 48.0, inputs 6.0)" in capsys.readouterr().out


def test_when_time_is_up_the_processes_are_ended_and_no_point_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(processes.subprocess, "Popen", Noted)
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    asleep = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('[\"a\", {}]'); time.sleep(600)"
    child = [sys.executable, "-c", asleep, str(file.with_suffix(".running"))]
    start = time.monotonic()
    command.supervise(child, file, until=start + 1)
    assert command.run_together([child, [sys.executable, "-c", ""]], [{}, {}], until=start + 8) == [None, 0]
    assert len(made) == 3
    # Collected, so that they are gone: none is left to sleep on.
    assert all(process.returncode is not None for process in made)
    assert mapped.load(file)[1] == []


def test_a_process_that_never_comes_to_a_point_is_not_started_for_ever(tmp_path: Path) -> None:
    file, starts = tmp_path / "map.jsonl", tmp_path / "starts"
    child = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(2)", str(starts)]
    command.supervise(child, file, until=time.monotonic() + 100)
    assert starts.read_text() == "xx"


def test_ratios_are_to_the_fastest_peer_and_to_the_nearer_roof() -> None:
    found = point(40.0, FA3=30.0, vLLM=90.0, copy=8.0)
    assert found.peer is not None
    assert (found.peer.implementation, found.of_peer) == ("FA3", 0.75)
    # 8 GFLOP at 800 TFLOP/s take 10 us, the copy of the same bytes 8.
    assert HEADER.of_roof(found) == 0.25
    assert HEADER.of_roof(point(40.0, copy=20.0)) == 0.5
    assert HEADER.ratio(point(40.0, copy=20.0)) == 0.5
    assert (point(None, FA3=30.0).of_peer, HEADER.ratio(point(None, FA3=30.0))) == (None, None)


def test_the_worst_points_come_first_and_red_ones_last() -> None:
    slow, slower, alone = point(50.0, FA3=40.0), point(50.0, FA3=10.0), point(50.0)
    wrong = Measured("decode", {"heads": 16, "page": 64}, 1.0, note="no result within 40 s")
    table = mapped.of_points(HEADER, [slow, slower, alone, wrong])
    rows = [row for section in table.sections for row in section]
    assert [row[5] for row in rows] == ["0.20", "0.80", "", ""]
    assert rows[-1][-1] == "red: no result within 40 s"


def test_a_map_survives_its_file_and_a_broken_one_is_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "map.jsonl"
    mapped.begin(file, HEADER)
    mapped.append(file, point(40.0, FA3=30.0))
    assert mapped.load(file) == (HEADER, [point(40.0, FA3=30.0)])
    sweep = Sweep(137, 256, 54.0, (First(1, 2.5, ("paged",)), First(17, 1.8, ("paged", "merge"))))
    mapped.save_sweep(tmp_path / "sweep.json", sweep)
    assert mapped.load_sweep(tmp_path / "sweep.json") == sweep
    assert "1 to 137 (of 256: time was up): 3 kernels compiled in 4.3 s" in sweep.words()
    file.write_text(file.read_text() + '{"point": {"speed": 3}}\n')
    with pytest.raises(ValueError, match=r"map\.jsonl:3: must be a line of a map"):
        mapped.load(file)
    file.write_text(json.dumps({"header": {**vars(HEADER), "driver": ""}}) + "\n")
    with pytest.raises(ValueError, match=r"map\.jsonl:1: .*no driver"):
        mapped.load(file)


def test_a_sweep_counts_what_each_first_call_compiles(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    made: list[int] = []

    def sweep(device: Any, batch: int) -> Any:
        def call() -> None:
            # As Triton tells of a kernel, for batches of 1, 16 and multiples of 16, each once.
            kind = 1 if batch == 1 else 16 if batch % 16 == 0 else 0
            listener = triton.knobs.compilation.listener
            listener(src=None, metadata={"name": "paged"}, metadata_group={}, times=None, cache_hit=kind in made)
            made.append(kind)

        return call

    found = command.run_sweep(sweep, DryBench(), tmp_path / "s.json", until=time.monotonic() + 100, batches=40)
    assert [one.batch for one in found.first] == [1, 2, 16]
    assert (found.kernels, found.batches) == (3, 40)
    assert mapped.load_sweep(tmp_path / "s.json") == found
    cut = command.run_sweep(sweep, DryBench(), tmp_path / "s.json", until=time.monotonic() - 1)
    assert (cut.batches, cut.of) == (0, 256)


def test_a_sweep_that_is_ended_after_its_first_call_has_written_what_that_compiled(
    tmp_path: Path, monkeypatch: Any
) -> None:
    triton = pytest.importorskip("triton")

    def sweep(device: Any, batch: int) -> Any:
        told = {"src": None, "metadata_group": {}, "times": None, "cache_hit": False}
        return lambda: triton.knobs.compilation.listener(metadata={"name": "attend"}, **told)

    def killed(*_: Any, **__: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "host_time_us", killed)
    with pytest.raises(KeyboardInterrupt):
        command.run_sweep(sweep, DryBench(), tmp_path / "s.json", until=time.monotonic() + 100)
    found = mapped.load_sweep(tmp_path / "s.json")
    assert found is not None
    assert [(one.batch, list(one.kernels)) for one in found.first] == [(1, ["attend"])]


def test_watching_compilations_leaves_a_listener_of_the_users_in_place() -> None:
    triton = pytest.importorskip("triton")
    heard: list[str] = []

    def listener(**values: Any) -> None:
        heard.append(values["metadata"]["name"])

    triton.knobs.compilation.listener = listener
    try:
        with compilations() as found:
            told = {"src": None, "metadata_group": {}, "times": None}
            triton.knobs.compilation.listener(metadata={"name": "a"}, cache_hit=False, **told)
            triton.knobs.compilation.listener(metadata={"name": "b"}, cache_hit=True, **told)
        assert (found, heard) == (["a"], ["a", "b"])
        assert triton.knobs.compilation.listener is listener
    finally:
        triton.knobs.compilation.listener = None


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_map_says_so(tmp_path: Path, capsys: Any) -> None:
    assert command.main([written(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "a benchmark needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "extra", "words"),
    [
        ("x = 1", [], "must define maps(device), got none"),
        (MAPS.replace('"again"', '"double"'), [], "must name each map once and have one, got ['double', 'double']"),
        (MAPS, ["--only", "decode"], "--only must match a point of"),
    ],
)
def test_an_unusable_request_is_refused(tmp_path: Path, capsys: Any, text: str, extra: list[str], words: str) -> None:
    assert command.main([written(tmp_path, text), "--out", str(tmp_path / "out"), *extra], bench=DryBench()) == 2
    assert words in capsys.readouterr().err
