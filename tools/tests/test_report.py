"""Does the page show every record, and nothing that no record says, in a browser as people have it?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import pytest
import report
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from kernel_reference.bench import mapped
from kernel_reference.bench.case import Requirement
from kernel_reference.bench.record import MACHINE, Record, load, save

ROOT = Path(__file__).parents[2]
WIDE, NARROW = 1280, 390
RESULTS = "packages/{0}/benchmarks/results/{0}.jsonl"

TIMED = Record(
    package="some-package", package_version="1.2.3", case="a case", shape={"tokens": 1}, implementation="some-package",
    ours=True, status="timed", note="", median_us=20.0, p20_us=19.5, p80_us=21.0, host_us=30.0, method="graph",
    input_sets=2, bytes=40_000_000, flops=0, gb_per_s=2000.0, tflop_per_s=0.0, copy_roof_gb_per_s=4000.0,
    gemm_roof_tflop_per_s=800.0, fraction_of_copy_roof=0.5, fraction_of_gemm_roof=0.0, baseline="copy",
    ratio_to_baseline=2.0, error=0.0, requirement=None, requirement_met=None, device="A GPU", driver="1.0",
    capability="9.0", cuda="13.0", torch="2.13.0", triton="3.7.1", python="3.11.2", commit=None,
    date="2026-01-02T03:04:05+00:00",
)  # fmt: skip
ABSENT = dataclasses.replace(
    TIMED, implementation="a peer", ours=False, status="absent", note="ImportError: no module named 'peer'",
    median_us=None, p20_us=None, p80_us=None, host_us=None, method=None, input_sets=None, gb_per_s=None,
    tflop_per_s=None, fraction_of_copy_roof=None, fraction_of_gemm_roof=None, ratio_to_baseline=None, error=None,
)  # fmt: skip
# What a record may hold and a page might trip over: markup, long words, no time of ours, no machine-made commit.
AWKWARD = [
    TIMED,
    ABSENT,
    dataclasses.replace(TIMED, implementation="copy", ours=False, median_us=10.0, error=0.0),
    dataclasses.replace(TIMED, case="<script>throw 1</script> & 'quotes\"", error=1e-9, flops=10**12, tflop_per_s=50.0),
    dataclasses.replace(ABSENT, case="a case that failed", implementation="some-package", ours=True, status="red"),
    dataclasses.replace(
        TIMED, case="a_case_of_one_long_word_" * 6, median_us=123456.7, requirement="time <= 4 us (9.1)"
    ),
    dataclasses.replace(TIMED, case="met or not, nobody knows", requirement="speed >= 0.9 of a peer"),
    dataclasses.replace(
        TIMED, case="missed by little", requirement="speed >= 1 of a rival (1.000)", requirement_met=False
    ),
    dataclasses.replace(TIMED, case="missed by little", implementation="a rival", ours=False, median_us=19.998),
    dataclasses.replace(
        TIMED,
        case="missed on the host",
        requirement="speed >= 0.9 of a rival (1.050); host time <= 25 us (30.000)",
        requirement_met=False,
    ),
    dataclasses.replace(TIMED, case="missed on the host", implementation="a rival", ours=False),
    dataclasses.replace(TIMED, case="older", date="2025-01-01T00:00:00+00:00"),
]


def house(root: Path, records: list[Record], package: str = "some-package") -> Path:
    save(records, root / RESULTS.format(package))
    return root


def made(root: Path, target: Path) -> Path:
    assert report.main(["--root", str(root), "--page", str(target), "--picture", str(target.with_suffix(".svg"))]) == 0
    return target


def committed() -> list[Record]:
    files = (file for file in sorted(ROOT.glob(report.RECORDS)) if file.name not in report.OTHERS)
    return [record for file in files for record in load(file)]


# The records


@pytest.mark.parametrize("field", MACHINE)
def test_a_record_that_does_not_name_its_machine_is_refused_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    file = house(tmp_path, [TIMED]) / RESULTS.format("some-package")
    nameless = dataclasses.asdict(TIMED) | {field: " "}
    file.write_text(file.read_text() + json.dumps(nameless) + "\n")
    assert report.main(["--root", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"report: {RESULTS.format('some-package')}:2: ")
    assert line.endswith(f"got none for {field}")
    assert not (tmp_path / "dist").exists()


def test_without_records_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "report: no record in packages/*/benchmarks/results/*.jsonl\n"


def test_what_was_not_measured_together_is_not_shown_together(tmp_path: Path) -> None:
    runs = report.read(house(tmp_path, AWKWARD))
    assert [len(run.records) for run in runs] == [len(AWKWARD) - 1, 1]
    assert [run.first.date[:4] for run in runs] == ["2026", "2025"]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (made(ROOT, tmp_path / name) for name in ("first.html", "second.html"))
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".svg").read_bytes() == second.with_suffix(".svg").read_bytes()


def test_the_committed_picture_shows_the_committed_records(tmp_path: Path) -> None:
    drawn = made(ROOT, tmp_path / "page.html").with_suffix(".svg").read_text()
    assert (ROOT / "tools" / "report.svg").read_text() == drawn, "make it again: nox -s report"
    assert "](tools/report.svg)" in (ROOT / "README.md").read_text()


def test_no_package_is_named_by_what_shows_all_of_them() -> None:
    sources = [ROOT / "tools" / "report.py", ROOT / "tools" / "figures.py", *report.TEMPLATES.iterdir()]
    text = "".join(file.read_text() for file in sources)
    assert [home.name for home in ROOT.glob("packages/*") if home.name in text] == []


# The maps


def with_map(root: Path) -> Path:
    """A house whose package has a map of three points, the slowest in the middle, and one picture."""
    results = (house(root, [TIMED]) / RESULTS.format("some-package")).parent
    machine = {name: getattr(TIMED, name) for name in MACHINE}
    axes = {"decode": {"page": [16, 24, 64], "heads": [8]}}
    header = mapped.Header(
        "some-package", "1.2.3", **machine, copy_roof_gb_per_s=4000.0, gemm_roof_tflop_per_s=800.0, commit=None,
        date=TIMED.date, axes=axes,
    )  # fmt: skip
    mapped.begin(results / mapped.NAME, header)
    for page, theirs in ((16, 40.0), (24, 10.0), (64, 80.0)):
        outcomes = [
            mapped.Outcome(label, label == "ours", "timed", "", us, us, us, 9.0, "graph", 0.0)
            for label, us in (("ours", 40.0), ("FA3", theirs))
        ]
        mapped.append(
            results / mapped.NAME, mapped.Measured("decode", {"page": page, "heads": 8}, 1.0, outcomes=outcomes)
        )
    mapped.append(
        results / mapped.NAME, mapped.Measured("decode", {"page": 1, "heads": 8}, 1.0, note="<b>no result</b>")
    )
    mapped.save_sweep(results / mapped.SWEEP_NAME, mapped.Sweep(256, 256, 54.0, (mapped.First(17, 2.5, ("paged",)),)))
    (results / "map-decode.svg").write_text("<svg/>")
    return root


def test_a_map_is_shown_with_its_picture_and_its_slowest_points_first(tmp_path: Path) -> None:
    page = made(with_map(tmp_path), tmp_path / "page.html").read_text()
    assert "some-package: where speed falls off" in page
    assert "data:image/svg+xml;base64,PHN2Zy8+" in page
    assert page.index("page=24 heads=8") < page.index("page=16 heads=8") < page.index("page=64 heads=8")
    assert "&lt;b&gt;no result&lt;/b&gt;" in page
    assert "1 kernel compiled in 2.5 s of first calls, at sizes 17 (2.5 s)" in page


def test_a_broken_map_is_refused_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = (with_map(tmp_path) / RESULTS.format("some-package")).with_name(mapped.NAME)
    file.write_text(file.read_text() + "{}\n")
    assert report.main(["--root", str(tmp_path)]) == 2
    assert "benchmarks/results/map.jsonl:6: must be a line of a map" in capsys.readouterr().err


# The figures


@pytest.mark.parametrize("against", ["copy", "a peer (off by one)", "a peer; and more"])
def test_a_bar_is_read_from_the_words_that_the_benchmark_writes(against: str) -> None:
    targets = [
        Requirement("ours", against, speed_at_least=0.97),
        Requirement("ours", "other", time_at_most=0.5),
        Requirement("ours", against, time_at_most=1.5, quantity="host"),
        Requirement("ours", us_at_most=4.0),
    ]
    for words in (
        "; ".join(requirement.describe() for requirement in targets),
        "; ".join(f"{requirement.describe()} (0.951)" for requirement in targets),
    ):
        assert figures.bars_of(dataclasses.replace(TIMED, requirement=words)) == [(against, 0.97), ("other", 2.0)]


@pytest.mark.parametrize("values", [[1.0], [0.9, 1.1], [1e-9, 0.3], [0.0, 3e-7], [3.5, 4300], [49e3, 3.2e9], [0.0]])
def test_an_axis_holds_its_values_and_a_few_ticks(values: list[float]) -> None:
    axis = figures.Axis.over(values)
    assert all(0 <= axis.at(value) <= 100 for value in values)
    assert axis.high / axis.low > 9.999
    assert 1 <= len(axis.ticks) <= figures.MOST_TICKS + 1
    places = [axis.at(tick) for tick in axis.ticks]
    assert places == sorted(set(places))
    assert (0.0 in axis.ticks) == (0.0 in values)


def test_implementations_of_a_package_look_different() -> None:
    peers = [dataclasses.replace(ABSENT, implementation=f"peer {i}") for i in range(35)]
    ours = [dataclasses.replace(TIMED, implementation=f"ours {i}") for i in range(12)]
    looks = figures.looks_of([*peers, *ours]).values()
    assert len({(look.colour, look.shape) for look in looks}) == 47


def test_an_absent_peer_is_in_no_picture(tmp_path: Path) -> None:
    (run,) = report.read(house(tmp_path, [TIMED, ABSENT]))
    for figure in (*run.plots, run.speeds, run.errors):
        assert "a peer" not in [look.label for look in figure.looks]


def test_one_case_is_not_called_cases(tmp_path: Path) -> None:
    records = [TIMED, dataclasses.replace(TIMED, case="another", error=1e-3)]
    page = made(house(tmp_path, records), tmp_path / "page.html").read_text()
    assert "1 other case is exact" in page
    assert "2 records of" in page
    page = made(house(tmp_path, [TIMED]), tmp_path / "page.html").read_text()
    assert "1 record of\n1 case." in page


def test_speeds_are_in_the_units_of_the_readmes(tmp_path: Path) -> None:
    slow = dataclasses.replace(TIMED, case="slow", median_us=2618.0)
    page = made(house(tmp_path, [TIMED, slow]), tmp_path / "page.html").read_text()
    assert "4.00 TB/s" in page
    assert "2.62 ms" in page
    assert "20.0 us" in page
    assert "GB/s" not in page
    assert "µs" not in page


def test_no_mark_and_no_roof_stands_outside_its_plot(tmp_path: Path) -> None:
    for run in [*report.read(ROOT), *report.read(house(tmp_path, AWKWARD))]:
        for plot in run.plots:
            ends = [place for roof in plot.roofs for place in (roof.start, roof.end)]
            for x, y in [*((mark.x, mark.y) for mark in plot.marks), *ends]:
                assert 0 <= x <= 100
                assert 0 <= y <= 100


# The page in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    options = ChromeOptions()
    options.binary_location = binary
    for name in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module", params=["committed", "awkward"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A page and the records that it must show."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "committed":
        return made(ROOT, folder / "report.html"), committed()
    return made(house(folder, AWKWARD), folder / "report.html"), AWKWARD


def opened(browser: Chrome, page: tuple[Path, list[Record]], width: int = WIDE, scheme: str = "light") -> Chrome:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == NARROW}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(page[0].as_uri())
    return browser


Page = tuple[Path, list[Record]]


def test_the_page_loads_without_a_complaint_and_asks_for_nothing_but_itself(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page[0].as_uri()}


def test_every_record_is_shown_and_what_it_was_measured_on(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('table.records tbody tr')].filter(r => !r.closest('.map'))"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    records = page[1]
    assert sorted(row[:2] for row in rows) == sorted([record.case, record.implementation] for record in records)
    text = browser.execute_script("return document.body.textContent")
    for record in records:
        for name in ("package", "package_version", *MACHINE, "note"):
            assert getattr(record, name) in text, name
        for words in filter(None, (record.date[:10], record.requirement, record.commit and record.commit[:12])):
            assert words in text


def test_every_timed_record_has_its_mark_under_the_roofs(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    marks = browser.execute_script("return [...document.querySelectorAll('.plot .mark')].map(m => m.dataset.tip)")
    timed = [record for record in page[1] if record.median_us]
    assert sorted(tip.split("\n")[0] for tip in marks) == sorted(f"{r.implementation}: {r.case}" for r in timed)


def keys(browser: Chrome, column: int) -> list[Any]:
    return browser.execute_script(
        "return [...document.querySelector('table.records').tBodies[0].rows].map(r => r.cells[arguments[0]])"
        ".map(c => c.dataset.exact !== undefined ? Number(c.dataset.exact) : c.textContent || null)",
        column,
    )


def headings(browser: Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, "table.records:first-of-type thead th")[
        : len(browser.find_element(By.CSS_SELECTOR, "table.records thead tr").find_elements(By.TAG_NAME, "th"))
    ]


def test_a_heading_sorts_by_its_column_and_then_the_other_way_round(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    names = [heading.text.strip() for heading in headings(browser)]
    assert {"case", "implementation", "time", "error"} <= set(names)
    for name in ("time", "error", "TB/s"):
        column = names.index(name)
        before = keys(browser, column)
        values = sorted(value for value in before if value is not None)
        empty = [None] * before.count(None)
        for order, wanted in (("ascending", values + empty), ("descending", values[::-1] + empty)):
            headings(browser)[column].find_element(By.TAG_NAME, "button").click()
            assert keys(browser, column) == wanted
            sorted_by = [heading.get_attribute("aria-sort") for heading in headings(browser)]
            assert sorted_by == [order if i == column else None for i in range(len(names))]


def test_names_sort_by_the_numbers_in_them(browser: Chrome, tmp_path: Path) -> None:
    cases = [f"tokens={tokens}" for tokens in (1024, 64, 8192)]
    root = house(tmp_path, [dataclasses.replace(TIMED, case=case) for case in cases])
    opened(browser, (made(root, tmp_path / "page.html"), []))
    headings(browser)[0].find_element(By.TAG_NAME, "button").click()
    assert keys(browser, 0) == ["tokens=64", "tokens=1024", "tokens=8192"]


SETTLED = """
const [target, done] = arguments;
target.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
let last = null;
requestAnimationFrame(function look() {
  const { x, y } = target.getBoundingClientRect();
  if (last && last.x === x && last.y === y) return done();
  last = { x, y };
  requestAnimationFrame(look);
});
"""


def point_at(browser: Chrome, target: WebElement) -> None:
    """Move the pointer onto an element that lies still, from elsewhere: one that is there already makes no event."""
    browser.execute_async_script(SETTLED, target)
    actions = ActionBuilder(browser, duration=0)
    actions.pointer_action.move_to_location(1, 1).move_to(target)
    actions.perform()


@pytest.mark.parametrize("selector", [".plot .mark", ".chart .mark", "td[data-tip]"])
def test_pointing_at_a_mark_says_its_values(browser: Chrome, page: Page, selector: str) -> None:
    opened(browser, page)
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    # The last of those at a place lies on top.
    target = browser.find_elements(By.CSS_SELECTOR, selector)[-1]
    point_at(browser, target)
    # The event reaches the page in its own time.
    WebDriverWait(browser, 10).until(lambda _: tip.is_displayed() and tip.text)
    assert tip.text == target.get_attribute("data-tip").strip()
    box = tip.rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= WIDE


def test_a_scroll_whose_event_comes_late_leaves_the_tip_of_what_is_under_the_pointer(
    browser: Chrome, page: Page
) -> None:
    # A busy browser reports a scroll after the pointer's next move; here the pointer moves before the frame ends.
    opened(browser, page)
    scroll_and_point = """
    const [done] = arguments, target = [...document.querySelectorAll(".plot .mark")].at(-1);
    let scrolled = false;
    document.addEventListener("scroll", () => { scrolled = true; });
    target.scrollIntoView({ block: "center" });
    const box = target.getBoundingClientRect(), clientX = box.x + box.width / 2, clientY = box.y + box.height / 2;
    target.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX, clientY }));
    const frames = (n) => n ? requestAnimationFrame(() => frames(n - 1)) : finish();
    const finish = () => {
      const shown = tip.hidden ? null : tip.textContent, expected = target.dataset.tip;
      scrollTo(0, 0);
      requestAnimationFrame(() => requestAnimationFrame(() => done([scrolled, shown === expected, tip.hidden])));
    };
    frames(3);
    """
    assert browser.execute_async_script(scroll_and_point) == [True, True, True]


STICKING_OUT = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest(".scroll *, defs, [hidden]"))
  .map((element) => [element.tagName, element.textContent.trim().slice(0, 40), element.getBoundingClientRect()])
  .filter(([, , box]) => box.width && (box.left < -0.5 || box.right > wide + 0.5))
  .map(([tag, text]) => `${tag}: ${text}`);
"""

OVERLAPPING = """
const found = [];
for (const part of document.querySelectorAll(".plot svg, .chart .row, .facts, .legend")) {
  const words = [...part.querySelectorAll("text, .what, .value, div, li")]
    .map((element) => [element.textContent.trim(), element.getBoundingClientRect()])
    .filter(([text]) => text);
  words.forEach(([a, x], i) => words.slice(i + 1).forEach(([b, y]) => {
    const beside = x.right <= y.left + 0.5 || y.right <= x.left + 0.5;
    const below = x.bottom <= y.top + 2 || y.bottom <= x.top + 2;
    if (!beside && !below) found.push(`${a} | ${b}`);
  }));
}
return found;
"""


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_sticks_out_of_the_page_and_no_words_lie_on_others(browser: Chrome, page: Page, width: int) -> None:
    opened(browser, page, width)
    visible, whole = browser.execute_script(
        "const { clientWidth, scrollWidth } = document.documentElement; return [clientWidth, scrollWidth]"
    )
    assert whole == visible <= width
    assert browser.execute_script(STICKING_OUT) == []
    assert browser.execute_script(OVERLAPPING) == []


def test_no_table_or_picture_is_cut_on_a_desk(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    cut = """
    return [...document.querySelectorAll(".scroll")].map((part) => {
      part.closest("details")?.setAttribute("open", "");
      return [part.getAttribute("aria-label"), part.scrollWidth - part.clientWidth];
    }).filter(([, wider]) => wider > 0);
    """
    assert browser.execute_script(cut) == []


def test_labels_break_between_words_on_a_telephone(browser: Chrome, page: Page) -> None:
    opened(browser, page, NARROW)
    broken = """
    return [...document.querySelectorAll(".chart .what")].filter((label) => {
      const range = document.createRange();
      range.selectNodeContents(label);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
      // A word of more than 30 characters may be broken.
      return lines > label.textContent.trim().split(/\\s+/).reduce((sum, word) => sum + Math.ceil(word.length / 30), 0);
    }).map((label) => label.textContent);
    """
    assert browser.execute_script(broken) == []


def test_a_case_is_met_where_each_mark_reaches_its_bar_and_the_host_is_in_time(browser: Chrome, page: Page) -> None:
    opened(browser, page)
    rows = browser.execute_script("""
    const peer = (element) => element.dataset.tip.split("\\n")[0].split(" as fast as ")[1];
    const place = (element, name) => parseFloat(element.getAttribute(name));
    const read = (row, what, name) => [...row.querySelectorAll(what)].map((e) => [peer(e), place(e, name)]);
    return [...document.querySelectorAll(".chart .value[data-tip]")].map((value) => [value, value.closest(".row")])
      .map(([value, row]) => [row.querySelector(".what").textContent, value.className, value.dataset.tip,
        read(row, ".bar", "x1"), Object.fromEntries(read(row, ".mark", "x"))]);
    """)
    judged = [row for row in rows if "not-measured" not in row[1]]
    assert judged
    for case, verdict, asked, bars, marks in judged:
        # What has no bar, on host time or in microseconds, is judged by the measured value behind it.
        others = re.findall(r"(?:^|; )(?:host )?time <= ([\d.]+) us \(([\d.]+)\)", asked)
        others += re.findall(r"(?:^|; )host time <= ([\d.]+) x [^;]+ \(([\d.]+)\)", asked)
        met = all(marks[peer] >= bar for peer, bar in bars) and all(float(got) <= float(most) for most, got in others)
        assert met == ("met" in verdict.split()), case


COLOURS = """
const names = [...document.styleSheets[0].cssRules].map((rule) => rule.selectorText)
  .filter((selector) => /^\\.(ours|peer)-\\d$|^\\.copy$/.test(selector));
return names.map((selector) => {
  const element = document.body.appendChild(document.createElement("i"));
  element.className = selector.slice(1);
  const colour = getComputedStyle(element).color;
  element.remove();
  return [selector, colour.match(/\\d+/g).map(Number)];
});
"""


def lab(colour: list[int]) -> tuple[float, float, float]:
    """A colour of sRGB in CIELAB, in which distances are what an eye sees of them."""
    r, g, b = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    white = ((0.4124, 0.3576, 0.1805, 0.9505), (0.2126, 0.7152, 0.0722, 1.0), (0.0193, 0.1192, 0.9505, 1.0888))
    x, y, z = (((red * r + green * g + blue * b) / most) ** (1 / 3) for red, green, blue, most in white)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_colours_are_alike(browser: Chrome, tmp_path: Path, scheme: str) -> None:
    opened(browser, (made(house(tmp_path, [TIMED]), tmp_path / "page.html"), []), scheme=scheme)
    colours = {name: lab(colour) for name, colour in browser.execute_script(COLOURS)}
    assert len(colours) == figures.OUR_COLOURS + figures.COLOURS + 1
    for (one, first), (other, second) in itertools.combinations(colours.items(), 2):
        assert math.dist(first, second) > 20, (one, other)


def test_the_page_is_dark_where_the_reader_wants_it_dark(browser: Chrome, page: Page) -> None:
    ask = "return getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(browser, page, scheme=scheme).execute_script(ask) for scheme in ("light", "dark"))
    assert light == "rgb(255, 255, 255)"
    assert max(map(int, dark.removeprefix("rgb(").removesuffix(")").split(","))) < 40


PICTURES = [ROOT / "tools" / "report.svg", *sorted(ROOT.glob("packages/*/benchmarks/results/*.svg"))]

OUTSIDE = """
const whole = document.documentElement.getBoundingClientRect();
return [...document.querySelectorAll("text, circle")].map((e) => [e.textContent, e.getBoundingClientRect()])
  .filter(([, b]) => b.left < whole.left || b.right > whole.right || b.bottom > whole.bottom).map(([text]) => text);
"""

# The first shape that is painted is the paper; the colour of most words is the ink.
PAPER_AND_INK = """
const numbers = (colour) => colour.match(/\\d+/g).map(Number);
const paper = [...document.querySelectorAll("rect, path")].find((shape) => !shape.closest("defs"));
const words = [...document.querySelectorAll("text")].map((text) => getComputedStyle(text).fill);
return [numbers(getComputedStyle(paper).fill), numbers(words[0])];
"""


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_whole_by_itself_on_light_and_dark_pages(browser: Chrome, picture: Path) -> None:
    for scheme in ("light", "dark"):
        opened(browser, (picture, []), scheme=scheme)
        assert browser.get_log("browser") == []
        assert browser.execute_script(OUTSIDE) == []
        paper, ink = browser.execute_script(PAPER_AND_INK)
        assert (min(paper) > 240 and max(ink) < 120) if scheme == "light" else (max(paper) < 40 and min(ink) > 120)


def test_no_picture_has_an_absent_peer_or_a_bar_that_is_cut_in_silence() -> None:
    for file in (file for file in sorted(ROOT.glob(report.RECORDS)) if file.name not in report.OTHERS):
        text = file.with_suffix(".svg").read_text()
        assert "absent: " not in text
        # A bar longer than the axis says so in words, and is broken by two strokes.
        said = len(re.findall(r"% of (?:copy|GEMM) roof, [\d.]+ x", text))
        assert text.count('id="break-') == 2 * said, file.name
