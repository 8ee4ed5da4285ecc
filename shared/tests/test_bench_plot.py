"""The picture of a record is the same for the same record, names everything, and overlaps nothing."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kernel_reference.bench import plot
from kernel_reference.bench.record import Record


def record(case: str, implementation: str, us: float | None, **changes: Any) -> Record:
    timed = us is not None
    values: dict[str, Any] = dict(
        package="gdn-split",
        package_version="0.1.0",
        case=case,
        shape={"tokens": 8192},
        implementation=implementation,
        ours=implementation.startswith("gdn-split"),
        status="timed" if timed else "absent",
        note=""
        if timed
        else "ModuleNotFoundError: No module named 'sglang' on this machine, nor in its site-packages anywhere",
        median_us=us,
        p20_us=us * 0.99 if us else None,
        p80_us=us * 1.02 if us else None,
        host_us=None,
        method="graph" if timed else None,
        input_sets=2 if timed else None,
        bytes=400_000_000,
        flops=0,
        gb_per_s=4000.0 if timed else None,
        tflop_per_s=0.0 if timed else None,
        copy_roof_gb_per_s=4270.0,
        gemm_roof_tflop_per_s=750.0,
        fraction_of_copy_roof=0.9 * min(1.0, 100.0 / us) if us and us > 50 else 0.021 if us else None,
        fraction_of_gemm_roof=0.0 if timed else None,
        baseline="copy",
        ratio_to_baseline=None,
        error=0.0 if timed else None,
        requirement=None,
        requirement_met=None,
        device="NVIDIA H200",
        driver="580.159.04",
        capability="9.0",
        cuda="13.0",
        torch="2.11.0",
        triton="3.6.0",
        python="3.12.3",
        commit=None,
        date="2026-11-21T10:00:00+00:00",
    )
    return Record(**(values | changes))


RECORDS = [
    record("Qwen3-Next, 1 token", "gdn-split", 1.2),
    record("Qwen3-Next, 1 token", "torch split+cat", 11.2),
    record("Qwen3-Next, 1 token", "sglang", 1.8),
    record("Qwen3-Next, 1 token", "copy", 1.1),
    record("Qwen3-Next, 8192 tokens", "gdn-split", 101.5),
    record("Qwen3-Next, 8192 tokens", "torch split+cat", 328.0),
    record("Qwen3-Next, 8192 tokens", "torch.compile", 144.0),
    record("Qwen3-Next, 8192 tokens", "products left out", 98.0, fraction_of_gemm_roof=1.59),
    record("Qwen3-Next, 8192 tokens", "sglang", None),
    record("Qwen3-Next, 8192 tokens", "copy", 100.0),
    record("split and convolution, 64 sequences", "gdn-split fused", 20.0, baseline="gdn-split, two kernels"),
    record("split and convolution, 64 sequences", "gdn-split, two kernels", 95.0, baseline="gdn-split, two kernels"),
    record("prefill", "gdn-split", 95.0, baseline="fla", fraction_of_gemm_roof=0.97),
    record("prefill", "fla", None, baseline="fla", status="red", note="error nan > 0"),
]


def test_equal_records_give_equal_bytes_without_a_date(tmp_path: Path) -> None:
    plot.draw(RECORDS, tmp_path / "a.svg")
    plot.draw(list(RECORDS), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert not re.search(r"dc:date|20\d\d-\d\d-\d\d", text)


def test_every_case_implementation_and_time_is_named(tmp_path: Path) -> None:
    plot.draw(RECORDS, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for r in RECORDS:
        assert r.case in text or r.status == "absent"
        assert r.implementation in text
    assert "328 us" in text
    assert "97% of GEMM roof" in text
    assert "159% of GEMM roof" not in text
    assert "red: error nan &gt; 0" in text
    assert "prefill (1 = gdn-split: fla was not timed)" in text
    assert "64 sequences (1 = gdn-split, two kernels)" in text
    assert "4.8 x" in text


def test_an_absent_peer_has_no_row_and_what_of_ours_failed_has_one(tmp_path: Path) -> None:
    ours = record("prefill", "gdn-split, other", None, note="ImportError: no such kernel")
    plot.draw([*RECORDS, ours], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "absent: ModuleNotFoundError" not in text
    assert "absent: ImportError: no such kernel" in text


def test_a_bar_that_is_cut_is_broken_by_two_strokes(tmp_path: Path) -> None:
    plot.draw(RECORDS, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    # 4.8 x, the one bar beyond 3.
    assert text.count('id="break-') == 2


def test_a_long_title_is_wrapped(tmp_path: Path) -> None:
    name = "prefill of a model with a long name, in many words, and with a window and sinks beside it, of 65536 tokens"
    figure = plot._figure([record(name, "gdn-split", 1.2), record(name, "copy", 1.1)])
    titles = [text.get_text() for text in figure.findobj(Text) if "prefill of" in text.get_text()]
    assert len(titles) == 1
    assert name.startswith(titles[0])
    assert titles[0] != name
    assert name.endswith(next(text.get_text() for text in figure.findobj(Text) if "65536" in text.get_text()))


def test_every_colour_has_one_for_dark_pages(tmp_path: Path) -> None:
    plot.draw(RECORDS, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    drawn = set(re.findall(r'style="[^"]*(?:fill|stroke): (#[0-9a-f]{6})', text))
    assert len(drawn) > 6
    for colour in drawn:
        assert f'[style*="fill: {colour}"]' in text or f'[style*="stroke: {colour}"]' in text


def test_no_label_overlaps_another_or_leaves_the_picture() -> None:
    figure = plot._figure(RECORDS)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts]
    assert len(boxes) > 2 * len(RECORDS)
    overlaps = [(a, b) for (a, box), (b, other) in itertools.combinations(boxes, 2) if box.overlaps(other)]
    assert overlaps == []
    outside = [text for text, box in boxes if not figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1]
    assert outside == []


def test_implementations_keep_their_colour_across_cases_and_share_none() -> None:
    colours = plot._colours(RECORDS)
    assert len(set(colours.values())) == len(colours)


def test_an_empty_record_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one record"):
        plot.draw([], tmp_path / "a.svg")
