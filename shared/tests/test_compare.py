"""Is a change of compiled code seen, and what is none left alone?"""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_reference.testing import compare
from kernel_reference.testing.compare import Compiled, differences, main, patch_of, table
from kernel_reference.testing.texts import plain_amdgcn, plain_ptx, plain_sass

pytestmark = pytest.mark.codegen

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def scale(p_x, p_y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(p_y + o, tl.load(p_x + o, mask=m) * FACTOR, mask=m)
"""
CASES = """
from kernel_reference.testing.codegen import GeneratedSource, KernelSpec


def specs(target):
    yield KernelSpec(
        "toy.kernels:scale", {"p_x": "*fp32", "p_y": "*fp32", "n": "i32"}, {"FACTOR": 2.0, "BLOCK": 1024},
        aligned=("p_x", "p_y"), name="twice",
    )
    for text in ("a\\nb", "a\\nc"):
        yield GeneratedSource("another compiler's", lambda text=text: text)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A monorepo of one package whose cases have been committed."""
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    root = tmp_path_factory.mktemp("monorepo")
    package = root / "packages" / "toy"
    for place, text in {"src/toy/__init__.py": "", "src/toy/kernels.py": KERNELS, compare.CASES: CASES}.items():
        file = package / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


@pytest.fixture
def checkout(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder, as it was committed; what a test changes is put back."""
    monkeypatch.chdir(repository)
    yield repository / "packages" / "toy"
    subprocess.run(["git", "-C", str(repository), "checkout", "-q", "."], check=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def compared(cache: Path, *words: str) -> int:
    return main(["--compare", "HEAD", "--target", "sm_90", "--processes", "1", "--cache", str(cache), *words])


def test_renamed_and_moved_arguments_are_no_change(checkout: Path, cache: Path, capsys) -> None:
    kernels, cases = checkout / "src/toy/kernels.py", checkout / compare.CASES
    # Another name, another place in the file, another function's name; one constant more.
    text = KERNELS.replace("p_x", "p_in").replace("def scale", "def scaled").replace("@triton", "\n\n@triton")
    kernels.write_text(text.replace("FACTOR:", "MORE: tl.constexpr, FACTOR:"))
    text = CASES.replace("p_x", "p_in").replace(":scale", ":scaled")
    cases.write_text(text.replace('{"FACTOR', '{"MORE": 1, "FACTOR'))
    assert compared(cache, "toy") == 0
    said = capsys.readouterr().out
    assert "toy/sm_90/twice" in said
    assert said.count("unchanged") == 3
    assert "3 cases: 3 not changed or new, 0 changed or gone" in said
    assert "another compiler's (2)" in said


def test_changed_code_new_cases_and_gone_ones_are_told_apart_and_an_error_code_says_so(
    checkout: Path, cache: Path, capsys
) -> None:
    kernels, cases = checkout / "src/toy/kernels.py", checkout / compare.CASES
    kernels.write_text(KERNELS.replace("* FACTOR", "* FACTOR + 1.5"))
    text = CASES.replace('("a\\nb", "a\\nc")', '("a\\nd",)')
    cases.write_text(text.replace("target):", "target):\n    yield GeneratedSource('one more', str)"))
    kept = [*cache.glob("*.json")]
    assert compared(cache, "--diff", "60", "toy") == 1
    said = capsys.readouterr().out
    rows = {line.partition("  ")[0]: line for line in said.splitlines() if line.startswith("toy/")}
    assert "lines)" in rows["toy/sm_90/twice"]
    assert "changed (2 lines)" in rows["toy/sm_90/another compiler's"]
    assert "gone" in rows["toy/sm_90/another compiler's (2)"]
    assert " new " in rows["toy/sm_90/one more"]
    assert "toy/sm_90/twice, sass\n@@" in said, "the diff is of what is nearest to the machine"
    assert "4 cases: 1 not changed or new, 3 changed or gone" in said
    assert not kept or [*cache.glob("*.json")] == kept, "the revision's cases have been kept"


def test_cases_that_are_not_asked_for_are_not_compiled(checkout: Path) -> None:
    compiled = compare.dump(checkout, ["sm_90"], only="another")
    assert [*compiled] == ["sm_90/another compiler's", "sm_90/another compiler's (2)"]


def test_a_package_without_cases_is_named(checkout: Path, cache: Path) -> None:
    (checkout / compare.CASES).write_text("\n")
    with pytest.raises(SystemExit, match=r"toy: tests/test_codegen\.py has no function specs\(target\)"):
        compared(cache, "toy")


def test_a_revision_that_is_not_there_is_named(checkout: Path, cache: Path) -> None:
    with pytest.raises(SystemExit, match="no-such-revision"):
        main(["--compare", "no-such-revision", "--cache", str(cache), "toy"])


# Verdicts


def made(registers: int = 8, error: str = "", **code: str) -> Compiled:
    return Compiled(code, registers, 0, error)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (made(ptx="a\nb", sass="x"), made(ptx="a\nb", sass="x"), "unchanged"),
        (made(ptx="a\nb", sass="x"), made(ptx="a\nc", sass="x"), "unchanged SASS"),
        (made(ptx="a\nb", sass="x"), made(ptx="a\nb", sass="y"), "unchanged"),
        (made(ptx="a\nb", sass="x\ny"), made(ptx="a\nc", sass="x\nz\nz"), "changed (3 lines)"),
        (made(ptx="a", sass="x\ny"), made(ptx="b", sass="y\nx"), "changed (1 lines)"),
        (made(amdgcn="a"), made(amdgcn="b"), "changed (2 lines)"),
        (made(error="no"), made(error="no"), "unchanged"),
        (made(error="no"), made(ptx="a"), "changed (does not compile)"),
        (None, made(ptx="a"), "new"),
        (made(ptx="a"), None, "gone"),
    ],
)
def test_a_verdict_follows_what_is_nearest_to_the_machine(before, after, verdict) -> None:
    [row] = differences(*[{} if one is None else {"case": one} for one in (before, after)])
    assert row.verdict == verdict
    assert row.matters == verdict.startswith(("changed", "gone"))


def test_the_table_shows_registers_before_and_after() -> None:
    rows = differences({"one": made(8, sass="x"), "two": made(9, sass="y")}, {"one": made(12, sass="z")})
    assert table(rows).splitlines() == [
        "case  code               registers  spilled bytes",
        "one   changed (2 lines)  8 -> 12    0",
        "two   gone               9 -> -     0 -> -",
    ]
    assert patch_of(rows[0], 3).splitlines() == ["one, sass", "@@ -1 +1 @@", "-x", "+z"]


# Texts


def test_ptx_is_compared_without_names_comments_and_lines_of_source() -> None:
    def ptx(name: str, line: int, comment: str) -> str:
        return textwrap.dedent(f"""
            //{comment}
            .visible .entry {name}(
            \t.param .u32 {name}_param_0
            )
            {{
            \t.loc\t1 {line} 7
            $L__tmp{line}:
            \tld.param.b32 \t%r1, [{name}_param_0];  // {comment}
            }}
            \t.file\t1 "/{comment}.py"
            \t.section\t.debug_str
            \t{{
            .b8 {line}
            \t}}
            \t.section\t.debug_macinfo\t{{\t}}
        """)

    assert plain_ptx(ptx("scale", 3, "one")) == plain_ptx(ptx("scaled", 8, "other"))
    assert "ld.param.b32 \t%r1, [kernel_param_0];" in plain_ptx(ptx("scale", 3, "one"))
    assert ".b8" not in plain_ptx(ptx("scale", 3, "one"))
    assert ".section" not in plain_ptx(ptx("scale", 3, "one"))
    assert plain_ptx(ptx("scale", 3, "one").replace("%r1", "%r2")) != plain_ptx(ptx("scale", 3, "one"))


def test_sass_is_compared_by_instructions_and_labels() -> None:
    text = ".text.scale:\n.L_x_1:\n        /*0010*/                   @P0 EXIT ;\n        /*0020*/  BRA `(.L_x_1) ;\n"
    assert plain_sass(text) == ".L_x_1:\n@P0 EXIT ;\nBRA `(.L_x_1) ;"


def test_amds_assembly_is_compared_without_names_and_debug_sections() -> None:
    def assembly(name: str) -> str:
        return f"\t.globl\t{name}\n{name}:\n\ts_endpgm ; {name}\n\t.loc 1 2\n\t.section\t.debug_abbrev\n\t.byte 1\n"

    assert plain_amdgcn(assembly("one")) == plain_amdgcn(assembly("other"))
    assert "s_endpgm" in plain_amdgcn(assembly("one"))
