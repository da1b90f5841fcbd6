"""Refresh the "In the code" lines of docs/equations.md from the package's docstrings.

    python docs/generate_equations.py           rewrite the file
    python docs/generate_equations.py --check   exit 1 if it would change, or a tag does not fit

The headings "### C1 residual" define the tags. A function, class or module implements a tag when
the first paragraph of its docstring names it. Sources are parsed, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("equations.md")
SOURCE = Path(__file__).parents[1] / "src" / "skipless"
ROOMS = ("model", "optim", "probes", "quant", "evaluate", "surgery")
"""Where equations live; other rooms use them, and their mentions are only checked for existence."""
PREFIX = "In the code: "
LIMIT = 5
Found = tuple[dict[str, list[str]], dict[str, set[str]]]

_HEADING = re.compile(r"^### ([A-Z]\d+) ", re.MULTILINE)
_RESERVED = re.compile(r"\*\*([A-Z]\d+)\*\*")
_TAG = re.compile(r"\b([CIOQSTUF]\d{1,2})\b(?:-([CIOQSTUF]?)(\d{1,2})\b)?")


def tags_of(page: str) -> tuple[list[str], set[str]]:
    """(tags with a heading, in order; reserved tags) of the page's text."""
    return _HEADING.findall(page), set(_RESERVED.findall(page.partition("## Reserved tags")[2]))


def mentions(text: str) -> list[tuple[str, bool]]:
    """(tag, whether it stands for itself) in `text`; "I1-I7" yields all seven, not for itself."""
    found = []
    for first, letter, last in _TAG.findall(text):
        if not last:
            found.append((first, True))
        elif letter in ("", first[0]):
            numbers = range(int(first[1:]), int(last) + 1)
            found += [(f"{first[0]}{number}", False) for number in numbers]
    return found


def docstrings(source: Path = SOURCE) -> Iterator[tuple[str, str, str]]:
    """(dotted name without the package, docstring, "module", "inside" or "mention").

    Mentions, in rooms that only use equations and under the settings of `config`, implement none.
    """
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        room = module.split(".")[0] in ROOMS
        whole = "module" if room and path.stem != "__init__" else "mention"
        yield module, ast.get_docstring(tree) or "", whole
        for name, text in _inside(tree):
            yield f"{module}.{name}", text, "inside" if room else "mention"
        if module == "config":
            for node in ast.walk(tree):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    yield module, str(node.value.value), "mention"


def _inside(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + child.name, ast.get_docstring(child) or ""
            yield from _inside(child, f"{prefix}{child.name}.")


def collect(source: Path = SOURCE) -> Found:
    """({tag: names that implement it}, {tag: names whose docstring has it})."""
    candidates: dict[str, list[tuple[int, str]]] = {}
    named: dict[str, set[str]] = {}
    for name, text, what in docstrings(source):
        for tag, _ in mentions(text):
            named.setdefault(tag, set()).add(name)
        if what != "mention":
            first = text.split("\n\n")[0]
            for tag in {tag for tag, alone in mentions(first) if alone}:
                rank = _rank(tag, first, what == "module", "._" in name)
                candidates.setdefault(tag, []).append((rank, name))
    best = {tag: min(found)[0] for tag, found in candidates.items()}
    implemented = {
        tag: [name for rank, name in found if rank == best[tag]]
        for tag, found in candidates.items()
    }
    return implemented, named


def _rank(tag: str, text: str, is_module: bool, is_private: bool) -> int:
    """How squarely a first paragraph says that it implements a tag; 0 is best.

    "S1: ..." and "... (S1)" say so, "the clamp of O1" does not; public names count before private
    ones, and functions before whole modules.
    """
    says_so = re.search(rf"^{tag}\b.*?:|\(([A-Z]\d+, )*{tag}(, [^)]*)?\)", text)
    return 4 * is_module + 2 * is_private + (says_so is None)


def problems(page: str, found: Found) -> list[str]:
    """Sentences about tags that do not fit; empty when all is well."""
    listed, reserved = tags_of(page)
    implemented, named = found
    wrong = [f"{tag} is listed twice" for tag in sorted({t for t in listed if listed.count(t) > 1})]
    wrong += [f"{tag} has no implementing docstring" for tag in listed if tag not in implemented]
    known = set(listed) | reserved
    for tag in sorted(set(named) - known):
        wrong.append(f"{tag}, in the docstring of {min(named[tag])}, is not in {PAGE.name}")
    wrong += [f"{tag} is reserved, yet {implemented[tag][0]} implements it"
              for tag in sorted(reserved & set(implemented))]  # fmt: skip
    return wrong


def render(page: str, found: Found) -> str:
    """The page with fresh "In the code" lines."""
    implemented, _ = found
    parts = _HEADING.split(page)
    out = [parts[0]]
    for tag, text in zip(parts[1::2], parts[2::2], strict=True):
        names = implemented.get(tag, [])
        shown = ", ".join(f"`{name}`" for name in names[:LIMIT])
        if len(names) > LIMIT:
            shown += f" and {len(names) - LIMIT} more"
        line = PREFIX + (shown or "nowhere")
        out.append(f"### {tag} " + re.sub(rf"^{PREFIX}.*$", line, text, count=1, flags=re.M))
    return "".join(out)


def main() -> int:
    """Entry point; returns the exit code."""
    page = PAGE.read_text()
    found = collect()
    fresh, wrong = render(page, found), problems(page, found)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    if "--check" in sys.argv[1:]:
        if fresh != page:
            print(f"{PAGE} is out of date; run python docs/generate_equations.py", file=sys.stderr)
        return int(bool(wrong) or fresh != page)
    PAGE.write_text(fresh)
    print(f"{PAGE}: {len(tags_of(page)[0])} tags")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
