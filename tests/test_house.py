"""Rules of the house, kept by machine: file lengths, imports that go one way, docstrings."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "skipless"
FILES = sorted(SOURCE.rglob("*.py"))
ORDER = [
    ("errors",),
    ("unread", "files", "packages"),
    ("jsonable",),
    ("scheme",),
    ("ranges",),
    ("checks",),
    ("interpolation_config",),
    ("connection_config",),
    ("config",),
    ("registry", "log", "sublayers", "environment", "compiled"),
    ("locking",),
    ("rundir", "sites", "sharded", "fallback", "outputs"),
    ("heads",),
    ("recipes", "model", "optim", "data", "probes"),
    ("quant", "pretrained"),
    ("evaluate", "packed"),
    ("train",),
    ("measure", "surgery", "card"),
    ("decoding", "hf", "export"),
    ("report",),
    ("diagnose",),
    ("doctor", "serving"),
    ("rows",),
    ("demo",),
    ("sweep", "connections"),
    ("cli",),
    ("__main__",),
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
NEUTRAL = {"probes", "quant", "optim"}  # work on any nn.Module, so they may not know our model
HEAVY = {"transformers", "matplotlib", "pyarrow", "tokenizers", "datasets", "tensorboard"}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, *, module_level: bool) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if module_level else ast.walk(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found += names if node.module == "skipless" else [node.module]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_fits_in_one_sitting(path):
    lines = path.read_text().count("\n")
    assert lines <= 400, f"{path} has {lines} lines; split it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    mine = room(path)
    if mine == "__init__":
        return
    assert mine in RANK, f"{path} is in no room of the order"
    for name in imports(path, module_level=True):
        parts = name.split(".")
        if parts[0] != "skipless" or len(parts) < 2:
            assert parts[0] not in HEAVY or mine == "hf", f"{path} imports {name} at module level"
            continue
        other = parts[1]
        if other.startswith("__version__") or other == mine:
            continue
        assert RANK[other] < RANK[mine], f"{path} ({mine}) imports {name}: the wrong way"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_neutral_rooms_do_not_know_our_model(path):
    if room(path) in NEUTRAL:
        wrong = [n for n in imports(path, module_level=False) if n.startswith("skipless.model")]
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_public_thing_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no module docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


@pytest.mark.parametrize(
    "here", sorted({p.parent for p in FILES if p.parent != SOURCE}),
    ids=lambda p: str(p.relative_to(SOURCE)),
)  # fmt: skip
def test_files_of_a_room_do_not_import_in_a_circle(here):
    """Imports inside functions count: they only hide that two files cannot be read apart. A package
    inside a room is one of its files."""
    above = ["skipless", *here.relative_to(SOURCE).parts]
    files = {path.stem: [path] for path in here.glob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: list(path.parent.rglob("*.py")) for path in here.glob("*/*.py")}
    needs = {
        name: {
            part[len(above)] for path in paths for found in imports(path, module_level=False)
            if (part := found.split("."))[: len(above)] == above and len(part) > len(above)
        } - {name} for name, paths in files.items()
    }  # fmt: skip
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"these import one another: {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}
