"""Does the documentation show every public function at work, and do its links and examples hold?"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import docs
import pytest
import snippets

PAGES = docs.HERE / "pages"
PACKAGES = [name for name, home in docs.homes().items() if home.parent.name == "packages"]
REFERENCES = [home / "docs" / "reference.md" for home in docs.homes().values()]
BLOCKS = [
    pytest.param(page, number, id=f"{page.parent.parent.name}-{page.stem}-{number}")
    for page in (*sorted(PAGES.rglob("*.md")), *REFERENCES)
    for number in range(page.read_text().count("```python\n"))
]


def blocks_of(page: Path) -> list[str]:
    return snippets.BLOCK.findall(page.read_text())


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="nox -s docs runs the examples")
@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_an_example_runs(page: Path, number: int) -> None:
    exec(compile(blocks_of(page)[number], f"{page.name}, example {number + 1}", "exec"), {})


def test_a_block_is_typed_at_its_lines_and_an_excerpt_as_the_whole_example(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "ranks.py").write_text("from some import a, b\n\n\ndef main(x: int) -> None:\n    a(x)\n")
    (tmp_path / "README.md").write_text("# One\n```python\nx = 1\n```\n\n```python\nfrom some import a\n\na(x)\n```\n")
    alone, excerpt = snippets.snippets(tmp_path / "README.md")
    assert alone == ("README_0", "\n\nx = 1\n")
    assert excerpt == ("examples_ranks", (tmp_path / "examples" / "ranks.py").read_text())


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_documented_and_every_function_has_an_example(name: str) -> None:
    folder = docs.homes()[name] / "src" / name.replace("-", "_")
    exported = re.search(r"__all__ = (\[.*?\])", (folder / "__init__.py").read_text(), flags=re.DOTALL)
    assert exported
    public = [entry for entry in ast.literal_eval(exported[1]) if not entry.startswith("__")]
    page = docs.homes()[name] / "docs" / "reference.md"
    documented = re.findall(rf"^::: {folder.name}\.([\w.]+)$", page.read_text(), flags=re.MULTILINE)
    examples = "\n".join(blocks_of(page))
    functions = {name for file in folder.glob("*.py") for name in functions_of(file)}
    for entry in public:
        assert any(entry in path.split(".") for path in documented), f"{page}: nothing documents {entry}"
        if entry in functions:
            assert f"{entry}(" in examples, f"{page}: no example calls {entry}"


def test_every_module_of_kernel_reference_is_documented_and_every_function_has_an_example() -> None:
    home = docs.homes()["kernel-reference"]
    page = home / "docs" / "reference.md"
    documented = dict(re.findall(r"^::: kernel_reference\.([\w.]+)\n(.*)$", page.read_text(), flags=re.MULTILINE))
    examples = "\n".join(blocks_of(page))
    # The tables of the README: of oracles, of the host side and of the testing tools.
    cells = [line.split("|")[1:-1] for line in (home / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert cells
    for modules, *told in cells:
        for module in re.findall(r"`(\w+)`", modules):
            assert {module, f"testing.{module}"} & set(documented), f"{page}: nothing documents {module}"
        for word in re.findall(r"`(?:\w+\.)?([A-Z]\w*[a-z]\w*)`", " ".join(told)):
            assert re.search(rf"\b{word}\b", examples), f"{page}: no example has {word}"
    for module, options in documented.items():
        path = home / "src" / "kernel_reference" / module.replace(".", "/")
        functions = functions_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        if members := re.search(r"members: \[(.*?)\]", options):
            functions &= set(members[1].split(", "))
        for function in functions:
            # Called or, a fixture, taken.
            shown = function.startswith("_") or re.search(rf"\b{function}[(,):]", examples)
            assert shown, f"{page}: no example has {module}.{function}"


def test_install_lines_name_the_torch_that_is_tested() -> None:
    pin = docs.pinned_torch()
    roots = [docs.ROOT / "README.md", docs.ROOT / "CONTRIBUTING.md"]
    for file in (*roots, *(home / "README.md" for home in docs.homes().values())):
        words = " ".join(file.read_text().split())
        assert set(re.findall(r"torch==([\d.]+)", words)) <= {pin}, file
        if file in roots:
            assert f"pip install torch=={pin} --index-url https://download.pytorch.org/whl/cpu" in words


MEASUREMENTS = sorted(docs.ROOT.glob("packages/*/benchmarks/README.md"))


@pytest.mark.parametrize("page", MEASUREMENTS, ids=lambda page: page.parts[-3])
def test_what_a_page_about_measurements_names_is_there(page: Path) -> None:
    readme = (page.parents[1] / "README.md").read_text()
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(benchmarks/README\.md#([^)]*)\)", readme)) <= anchors
    assert set(re.findall(r"\]\(#([^)]*)\)", page.read_text())) <= anchors
    listed = re.findall(r"^ *- \[(.*)\]\(#", page.read_text(), re.MULTILINE)
    assert not listed or listed == titles[1:]
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (docs.HERE / "mkdocs.yml").read_text()
    for page in PAGES.rglob("*.md"):
        assert str(page.relative_to(PAGES)) in navigation


def test_roles_of_sphinx_lines_of_an_interpreter_and_tables_become_markdown() -> None:
    pytest.importorskip("griffe", reason="nox -s docs has it")
    spec = importlib.util.spec_from_file_location("roles", docs.HERE / "roles.py")
    assert spec is not None
    assert spec.loader is not None
    roles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(roles)
    assert roles.as_markdown("as :func:`split` and :meth:`.Layout.to` of torch.func: done") == (
        "as `split` and `Layout.to` of torch.func: done"
    )
    assert roles.as_markdown("Twice.\n\n>>> f(1)\n2\n>>> f(2)\n4\n\nArgs:\n    x: a number.\n") == (
        "Twice.\n\n```pycon\n>>> f(1)\n2\n>>> f(2)\n4\n```\n\nArgs:\n    x: a number.\n"
    )
    ruler = "====  =====\n"
    rows = "a     b |c|\n      more\nd     e\n"
    assert roles.as_markdown(f"Of two:\n\n{ruler}{rows}{ruler}\nAnd:\n\n{ruler}f     g\n{ruler}{rows}{ruler}") == (
        "Of two:\n\n|  |  |\n| --- | --- |\n| a | b \\|c\\| more |\n| d | e |\n\n"
        "And:\n\n| f | g |\n| --- | --- |\n| a | b \\|c\\| more |\n| d | e |\n"
    )


def test_what_docstrings_have_that_is_ill_shown_is_named(tmp_path: Path) -> None:
    signature = '<div class="doc-signature highlight"><code><span>f</span>({})</code></div>'
    (tmp_path / "good.html").write_text(signature.format("q: Tensor,\n    k: Tensor") + "<blockquote>said</blockquote>")
    (tmp_path / "bad.html").write_text(
        signature.format("q: <a>Tensor</a>, " * 15)
        + "<p>===== =====\na b</p><blockquote>\n<blockquote>f(1)</blockquote></blockquote>"
    )
    assert list(docs.ill_shown(tmp_path)) == [
        "bad.html: a line of a signature has 168 characters: is ruff installed?",
        "bad.html: a quote in a quote, as of lines of an interpreter",
        "bad.html: the rulers of a table, in a paragraph",
    ]


def test_a_broken_link_is_named_and_so_is_a_missing_anchor(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<p id="here"><a href="other.html#there"></a><a href="gone.html"></a><a href="#here"></a>'
        '<a href="other.html#nowhere"></a><img src="gone.svg"><a href="https://example.org/never-asked"></a>'
    )
    (tmp_path / "other.html").write_text('<p id="there">')
    assert sorted(docs.broken_links(tmp_path)) == [
        "index.html: gone.html is not there",
        "index.html: gone.svg is not there",
        "index.html: other.html#nowhere has no such anchor",
    ]


def test_links_of_a_readme_hold_on_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "packages" / "one", tmp_path / "packages" / "two"
    other.mkdir(parents=True)
    (home / "benchmarks").mkdir(parents=True)
    (home / "benchmarks" / "one.svg").write_text("<svg/>")
    (home / "README.md").write_text(
        "![drawn](benchmarks/one.svg) [all](benchmarks#end) [two](../two#speed) [web](https://example.org) [up](#top)\n"
        "```\n[code](no/link)\n```\n"
    )
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "homes", lambda: {"one": home, "two": other})
    (tmp_path / "site" / "packages").mkdir(parents=True)
    assert docs.readme(home, tmp_path / "site", "one") == (
        f"![drawn](one/one.svg) [all]({docs.REPOSITORY}/tree/main/packages/one/benchmarks#end) [two](two.md#speed) "
        "[web](https://example.org) [up](#top)\n```\n[code](no/link)\n```\n"
    )
    assert (tmp_path / "site" / "packages" / "one" / "one.svg").is_file()


def test_a_readme_that_links_to_nothing_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("[gone](no/such/file)")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "homes", lambda: {"one": tmp_path})
    with pytest.raises(SystemExit, match="links to no/such/file, which is not there"):
        docs.readme(tmp_path, tmp_path, "one")
