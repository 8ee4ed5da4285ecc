"""Is a server's day the same for everyone, are its pages each sequence's own, and is what goes wrong in it said?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

from kernel_reference.bench import serve
from kernel_reference.bench.serve import DRY, DRY_TRAFFIC, Buffers, Setting, graph_sizes, main
from kernel_reference.bench.served import Served, quantile
from kernel_reference.bench.server import Limits, Pool, Row, Server, Step, first_prompts
from kernel_reference.bench.traffic import AGENT, CHAT, Lengths, Traffic, requests

# So few pages that sequences are preempted, with prefixes and drafts.
TIGHT = Limits(pages=26, page_size=4, sequences=5, tokens=24, longest=96)
BUSY = replace(
    DRY_TRAFFIC, rate=200.0, drafts=2, accepted=0.5, prompt=Lengths(14, 0.6, 60), answer=Lengths(12, 0.5, 20)
)


def day(traffic: Traffic = BUSY, limits: Limits = TIGHT, steps: int = 400, seed: int = 0) -> list[Step]:
    return list(islice(Server(traffic, limits, seed).steps(), steps))


def test_the_same_seed_gives_the_same_requests_and_steps_and_another_seed_others():
    days = [hash(tuple(day(seed=seed))) for seed in (3, 3, 4)]
    assert days[0] == days[1] != days[2]
    assert list(islice(requests(CHAT, 1), 20)) == list(islice(requests(CHAT, 1), 20))


def test_lengths_lie_round_the_medians_of_the_traces():
    drawn = sorted(request.prompt for request in islice(requests(replace(CHAT, shared=0.0), 5), 2000))
    assert drawn[1000] == pytest.approx(CHAT.prompt.median, rel=0.1)
    assert drawn[-1] <= CHAT.prompt.most
    assert all(
        request.prompt > AGENT.prefix for request in islice(requests(AGENT, 5), 300) if request.prefix is not None
    )


def test_a_page_is_one_sequences_own_but_for_whole_pages_of_a_shared_prefix():
    whole = BUSY.prefix // TIGHT.page_size
    for step in day():
        users = Counter(page for row in step.rows for page in row.pages)
        shared = {page for page, count in users.items() if count > 1}
        assert shared <= {page for row in step.rows for page in row.pages[:whole]}
        assert len({row.slot for row in step.rows}) == len(step.rows)
        for row in step.rows:
            assert len(row.pages) == -(-(row.cached + row.new) // TIGHT.page_size)
            assert 1 <= row.kept <= row.new
        assert step.tokens <= TIGHT.tokens


def test_a_sequence_goes_on_where_it_stood_unless_it_was_preempted():
    steps = day()
    assert sum(step.preempted for step in steps) > 0
    stood: dict[int, Row] = {}
    for step in steps:
        for row in step.rows:
            before = stood.get(row.request)
            if row.begins:
                assert row.cached == (BUSY.prefix // TIGHT.page_size * TIGHT.page_size if row.prefix is not None else 0)
            else:
                assert before is not None
                assert (row.cached, row.slot) == (before.cached + before.kept, before.slot)
            stood[row.request] = row
    again = [row.request for step in steps for row in step.rows if row.begins]
    assert len(again) > len(set(again))


def test_no_page_is_lost_and_none_given_back_twice():
    server = Server(BUSY, TIGHT)
    for _ in islice(server.steps(), 400):
        used = sum(count > 0 for count in server.pool.users)
        assert used + len(server.pool.free) == TIGHT.pages
    pool = Pool(2)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(ValueError, match=r"pages must be in use where they are released, got 0"):
        pool.release([0])


def test_drafts_are_kept_as_often_as_they_are_said_to_be_right():
    rows = [row for step in day(steps=1500) for row in step.rows if row.decodes]
    assert {row.new for row in rows} == {3}
    share = sum(row.kept >= 2 for row in rows) / len(rows)
    assert share == pytest.approx(BUSY.accepted, abs=0.05)


def test_first_prompts_are_steps_that_a_server_could_have():
    steps = list(first_prompts(BUSY, TIGHT))
    assert [len(step.rows) for step in steps] == [1, 1, 1, 1, 5, 5, 5, 5]
    for step in steps:
        assert not step.decodes
        assert step.tokens <= TIGHT.tokens
        pages = [page for row in step.rows for page in row.pages]
        assert len(pages) == len(set(pages)) <= TIGHT.pages
        assert all(len(row.pages) == -(-(row.cached + row.new) // TIGHT.page_size) for row in step.rows)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"longest": 50}, r"limits\.longest must be at least 82, .*got 50"),
        ({"pages": 9}, r"limits\.pages must be at least 21, one longest request, got 9"),
        ({"tokens": 14}, r"limits\.tokens must be at least a new token and the drafts of every sequence, got 14"),
    ],
)
def test_limits_that_a_request_cannot_fit_in_are_refused(changed: dict[str, int], words: str):
    with pytest.raises(ValueError, match=words):
        Server(BUSY, TIGHT._replace(**changed))


def test_a_batch_of_decoding_rows_is_padded_to_the_next_graph_with_rows_that_have_nothing():
    buffers = Buffers(Setting(torch.device("cpu"), DRY, DRY_TRAFFIC, True))
    rows = [Row(0, 2, 5, 1, 1, True, (7, 3), False, None), Row(1, 0, 4, 1, 1, True, (1, 9), False, None)]
    batch = buffers.load(rows, 0, 1, 4)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]
    assert batch.seqlens_k.tolist() == [6, 5, 0, 0]
    assert batch.slots.tolist() == [2, 0, -1, -1]
    # The second token of page 3, the first of page 9.
    assert batch.places.tolist() == [3 * 4 + 1, 9 * 4, -1, -1]
    assert graph_sizes(100)[:5] == [1, 2, 4, 8, 16]
    assert graph_sizes(100)[-1] == 100


FILE = """
import torch
class Layer:
    name, absent = "a layer", {{"a peer": "no module"}}
    def __init__(self):
        self.calls, self.steps = {{"ours": self.call}}, 0
    def fill(self, batch):
        self.steps += 1
    def call(self, batch):
        return batch.seqlens_k.double()
    def judge(self, label, batch, rows):
        wanted = batch.seqlens_k[rows].double()
        return lambda out: {error}
def layers(setting):
    return [Layer()]
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    def run(error: str, *options: str) -> int:
        file = tmp_path / "serve.py"
        file.write_text(FILE.format(error=error))
        return main([str(file), "--dry", *(options or ("--out", str(tmp_path / "out")))])

    return run


def test_a_day_without_errors_leaves_a_record_and_a_picture(
    run: Callable[[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("float((out[rows] - wanted).abs().max())") == 0
    assert '"judged": 12' in (tmp_path / "out/serve.json").read_text()
    assert "all rows decode" in (tmp_path / "out/serve.svg").read_text()
    assert "a layer: a peer is absent: no module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("float('nan') if self.steps > 40 else 0.0", "a layer, ours: error nan of what is allowed"),
        ("1.5", "a layer, ours: error 1.5 of what is allowed"),
        ("0.002 * self.steps", "a layer, ours: errors grow"),
    ],
)
def test_results_that_are_wrong_or_get_worse_are_said_and_end_with_1(
    run: Callable[[str], int], error: str, words: str, capsys: pytest.CaptureFixture[str]
):
    assert run(error) == 1
    assert words in capsys.readouterr().err


def test_bytes_that_calls_keep_are_said_and_those_of_judging_are_not(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    held = iter(range(0, 10**6, 512))
    monkeypatch.setattr(serve, "allocated", lambda _: next(held))
    assert run("0.0", "--steps", "20", "--log", str(tmp_path / "log")) == 1
    # Of 20 steps two are judged.
    assert "a layer, ours: 9216 bytes are kept by calls that are over" in capsys.readouterr().err
    [memory] = json.loads((tmp_path / "log").read_text())["memory"].values()
    assert len(memory) == 2
    assert all(one["resident"] > 0 for one in memory)


def test_a_log_has_a_line_for_each_sitting_with_traffic_of_its_own(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "soak/log.jsonl"
    options = ("--steps", "60", "--seconds", "300", "--log", str(log))
    assert [run(error, *options) for error in ("0.0", "1.25", "0.000")] == [0, 1, 0]
    assert "900 s of each file in 3 sittings, 1 ill" in capsys.readouterr().out
    sittings = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["sitting"] for one in sittings] == [0, 1, 2]
    assert [bool(one["failures"]) for one in sittings] == [False, True, False]
    # Another day has other steps.
    assert len({one["served"][0]["decode_steps"] for one in sittings}) > 1


def test_without_a_gpu_only_a_dry_day_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["serve.py"]) == 2
    assert "--dry runs without one" in capsys.readouterr().err


def test_a_quantile_is_a_value_that_occurred():
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)
    assert quantile([3.0], 0.99) == 3.0
    assert all(quantile(values, a) <= quantile(values, b) for a, b in pairwise((0.1, 0.5, 0.9)))


@pytest.mark.parametrize(
    ("errors", "drifts"),
    [
        ([0.02, 0.05, 0.08, *[0.06] * 6, 0.05, 0.08, 0.11], False),
        ([0.02, 0.03, 0.04, *[0.06] * 6, 0.09, 0.10, 0.11], True),
        ([0.02, 0.02, 0.02, *[0.02] * 6, 0.02, 0.02, 0.02], False),
    ],
    ids=["by chance", "steadily", "never"],
)
def test_errors_that_grow_by_no_more_than_chance_are_no_drift(errors: list[float], drifts: bool):
    assert Served("a layer", "ours", True, errors=errors).drifts is drifts


def test_steps_in_which_a_layer_has_no_part_are_not_judged(run: Callable[..., int], tmp_path: Path):
    # Zeros before errors would look like a drift.
    assert run("0.2 if self.steps > 66 else None") == 0
    assert '"judged": 8' in (tmp_path / "out/serve.json").read_text()


def test_kernels_compiled_in_the_middle_of_the_day_are_a_failure():
    one = Served("a layer", "ours", True, compiled=["attend", "merge"])
    assert one.failures() == ["a layer, ours: 2 kernels compiled after the warm-up: attend, merge"]
    assert serve.JUDGED_EACH == 100
