"""The documentation is true: its Python runs and prints what it says, its links lead somewhere.

A page's ```python blocks run in order in one namespace, as a reader would type them, in a temporary
directory with a `text.txt`. A line `print(...)  # -> X` must print X ("..." stands for anything);
a ```text block is the output of the block before it.
"""

import ast
import contextlib
import doctest
import importlib.util
import io
import re
import textwrap
from pathlib import Path

import pytest

import skipless
from skipless.data import UnreachableError
from skipless.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
GROUPS = "(?:model|data|optim|train|probe|evaluate)"
_EXPECTED = re.compile(r"#\s*->\s*(.*)$")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def same(expected: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(
        expected.strip() + "\n", got.strip() + "\n", doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )


def run_block(source: str, page: Path, line: int, names: dict) -> str:
    """Execute statement by statement, compare what `# -> X` promises, return all output."""
    lines, whole = source.splitlines(), ""
    for node in ast.parse(source).body:
        for inner in ast.walk(node):
            if hasattr(inner, "lineno"):
                inner.lineno += line
                inner.end_lineno += line
        module = ast.Module(body=[node], type_ignores=[])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(compile(module, name(page), "exec"), names)
            except UnreachableError as error:
                pytest.skip(f"offline: {error}")
            except UserError as error:
                if "not installed; install" in str(error):
                    pytest.skip(str(error))
                raise
        whole += out.getvalue()
        last = lines[node.end_lineno - line - 1]
        promised = _EXPECTED.search(last)
        if promised:
            where = f"{name(page)}:{node.end_lineno}"
            assert same(promised[1], out.getvalue()), f"{where} printed {out.getvalue().strip()!r}"
    return whole


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, cache, text_file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(text_file.read_text())
    text, names, output = page.read_text(), {"__name__": "__docs__"}, ""
    for block in _BLOCK.finditer(text):
        _, language, body = block.groups()
        source = textwrap.dedent(body)
        line = text.count("\n", 0, block.start()) + 1
        if language == "python":
            output = run_block(source, page, line, names)
        elif language == "text":
            assert same(source, output), f"{name(page)}:{line}: the code above printed {output!r}"


def test_the_checks_of_this_file_can_fail(tmp_path):
    with pytest.raises(AssertionError, match="printed '3'"):
        run_block("x = 3\nprint(x)  # -> 4\n", ROOT / "README.md", 0, {})
    with pytest.raises(ZeroDivisionError):
        run_block("1 / 0\n", ROOT / "README.md", 0, {})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{name(page)} links to {target}; {file} has {anchors}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_and_recipes_that_pages_name_exist(page):
    from skipless import recipes
    from skipless.config import RunConfig
    from skipless.jsonable import leaves

    known = set(leaves(RunConfig()))
    groups = {leaf.rsplit(".", count)[0] for leaf in known for count in (1, 2)} - known
    text = re.sub(r"^In the code: .*$", "", page.read_text(), flags=re.MULTILINE)
    found = re.findall(rf"--({GROUPS}\.[a-z_.]*[a-z_])", text)
    found += re.findall(rf"`({GROUPS}\.[a-z_.]+)(?:`|=| =)", text)
    for setting in found:
        is_module = (ROOT / "src/skipless" / setting.replace(".", "/")).with_suffix(".py").exists()
        if not is_module and not setting.endswith((".json", ".jsonl", ".safetensors")):
            assert setting in known | groups, f"{name(page)} names the unknown setting {setting}"
    for recipe in re.findall(
        r"\b(?:demo(?:-fast)?|rf-small|rf-194m|residual-194m)-[a-z-]+\b", text
    ):
        assert any(r == recipe or r.startswith(recipe) for r in recipes.names()), (
            f"{name(page)} names the recipe {recipe}, which does not exist"
        )


# --- equations.md ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate_equations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equations_are_up_to_date(generator):
    page = generator.PAGE.read_text()
    found = generator.collect()
    assert generator.render(page, found) == page, "run python docs/generate_equations.py"
    assert generator.problems(page, found) == []


def test_every_tag_of_the_scope_is_listed(generator):
    numbers = {"C": (*range(8), 9), "I": range(1, 8), "T": (1,), "O": range(1, 5),
               "S": range(1, 12), "Q": range(1, 4)}  # fmt: skip
    scope = [f"{letter}{number}" for letter, found in numbers.items() for number in found]
    assert set(scope) <= set(generator.tags_of(generator.PAGE.read_text())[0])


def test_tags_that_do_not_fit_are_found(generator, tmp_path):
    room = tmp_path / "quant"
    room.mkdir()
    (room / "a.py").write_text('"""A."""\ndef f():\n    """S1: g (Z9, O77)."""\n')
    page = "### S1 kurtosis\nIn the code: x\n### S2 energy\n## Reserved tags\n- **Q4** later\n"
    found = generator.problems(page, generator.collect(tmp_path))
    assert found == [
        "S2 has no implementing docstring",
        "O77, in the docstring of quant.a.f, is not in equations.md",
    ]
    (room / "a.py").write_text('"""Exact integers (Q4), S1, S2."""\n')
    assert generator.problems(page, generator.collect(tmp_path)) == [
        "Q4 is reserved, yet quant.a implements it"
    ]


def test_render_names_the_function_that_says_so(generator, tmp_path):
    room = tmp_path / "probes"
    room.mkdir()
    (room / "a.py").write_text(
        '"""Rooms (S1)."""\n'
        'def uses():\n    """Half of S1 only."""\n'
        'def does():\n    """S1: all of it."""\n'
        'def group():\n    """Several (S1-S3)."""\n'
    )
    text = generator.render(
        "### S1 kurtosis\n    g\nIn the code: old\n", generator.collect(tmp_path)
    )
    assert text == "### S1 kurtosis\n    g\nIn the code: `probes.a.does`\n"


# --- the other files ------------------------------------------------------------------------------


def test_citation_is_valid_and_of_this_version():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0" and found["type"] == "software"
    assert {"message", "title", "authors", "license"} <= set(found)
    for work in (found, *found["references"]):
        assert work["title"] and all(author["name"] for author in work["authors"])
    assert str(found["version"]) == skipless.__version__
    assert found["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()


def test_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text and skipless.__version__ in text
