"""A folder that loads without this package: `write_remote_code(folder)`.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)   # torch, transformers

There is no second model. The files are our own modules, those that `modeling.py` needs, put flat
beside the weights, as transformers copies them: `from skipless.model.norms import RMSNorm` becomes
`from .model_norms import RMSNorm`, and nothing else is changed. An import inside a function of what
is not among them (an optimiser) becomes an error that says so.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import skipless
from skipless.errors import UserError
from skipless.files import write_atomic
from skipless.jsonable import parse_json, read_text

__all__ = ["write_remote_code"]

ENTRY, SETTINGS = "skipless.hf.modeling", "skipless.hf.configuration"
NAMES = {ENTRY: "modeling_skipless", SETTINGS: "configuration_skipless"}
"""As transformers names such files; the others are called by room and file."""
CLASSES = {
    "AutoConfig": (SETTINGS, "SkiplessConfig"),
    "AutoModel": (ENTRY, "SkiplessModel"),
    "AutoModelForCausalLM": (ENTRY, "SkiplessForCausalLM"),
    "AutoModelForSequenceClassification": (ENTRY, "SkiplessForSequenceClassification"),
}
PACKAGE = "skipless"


def write_remote_code(folder: str | Path) -> list[Path]:
    """Put the code of our models into `folder`, and name it in config.json; returns the files.

    `folder` is one that `SkiplessForCausalLM.save_pretrained` or `skipless export --format hf`
    wrote. config.json is written last, so that an interrupted call leaves a folder that loads as
    before. Raises UserError for other folders, and for packed integers, whose reading is more than
    a model.
    """
    path = Path(folder)
    config = _read_config(path)
    modules = _needed(ENTRY)
    written = [
        write_atomic(path / f"{_flat(module.name)}.py", _rewritten(module, modules))
        for module in modules.values()
    ]
    config["auto_map"] = {auto: f"{NAMES[file]}.{cls}" for auto, (file, cls) in CLASSES.items()}
    written.append(write_atomic(path / "config.json", json.dumps(config, indent=2) + "\n"))
    return written


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config = parse_json(read_text(file), where=str(file)) if file.is_file() else None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not (names or [""])[0].startswith("Skipless"):
        raise UserError(
            f"{path} holds no model of the classes in skipless.hf; write one with `skipless export "
            "RUN --format hf --out FOLDER`"
        )
    if "quantization_config" in config:
        raise UserError(
            f"{path} holds packed integers, which only the package reads; export the model in full "
            "precision"
        )
    return config


@dataclass(frozen=True)
class _Module:
    """One module of the package as text."""

    name: str
    source: str
    tree: ast.Module


def _file(name: str) -> Path | None:
    """Where the module lies; a package's is its __init__.py."""
    plain = Path(skipless.__file__).parent.parent.joinpath(*name.split("."))
    for file in (plain / "__init__.py", plain.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@lru_cache(maxsize=256)
def _open(name: str) -> _Module:
    file = _file(name)
    if file is None:
        raise UserError(f"the source of {name} is not there; install skipless from its source")
    source = file.read_text(encoding="utf-8")
    return _Module(name, source, ast.parse(source))


def _home(module: str, name: str) -> tuple[str, str | None]:
    """(module, name) where what `from module import name` gives is defined; name None for a module.

    A package's __init__ hands on what its files define.
    """
    if _file(f"{module}.{name}") is not None:
        return f"{module}.{name}", None
    file = _file(module)
    if file is not None and file.name == "__init__.py":
        for node in _open(module).tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _home(node.module, alias.name)
    return module, name


def _needed(entry: str) -> dict[str, _Module]:
    """Every module that `entry` needs when it is imported, by name."""
    found: dict[str, _Module] = {}
    wanted = [entry]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = _open(name)
        for node in found[name].tree.body:
            if _is_own(node):
                assert isinstance(node, ast.ImportFrom) and node.module, "as _is_own says"
                wanted += [_home(node.module, alias.name)[0] for alias in node.names]
    return dict(sorted(found.items()))


def _is_own(node: ast.AST) -> bool:
    """Whether this imports from the package."""
    if isinstance(node, ast.Import) and any(a.name.split(".")[0] == PACKAGE for a in node.names):
        raise AssertionError(f"line {node.lineno} imports {PACKAGE} whole; import names from it")
    is_from = isinstance(node, ast.ImportFrom) and node.level == 0 and bool(node.module)
    return is_from and str(node.module).split(".")[0] == PACKAGE  # type: ignore[attr-defined]


def _flat(name: str) -> str:
    return NAMES.get(name) or "_".join(name.split(".")[1:])


def _rewritten(module: _Module, modules: dict[str, _Module]) -> str:
    """The text of `module`, with imports from the package turned into those of files beside it."""
    lines = module.source.splitlines()
    inside = {id(node) for node in module.tree.body}
    checking = {
        id(node)
        for top in module.tree.body
        if isinstance(top, ast.If) and "TYPE_CHECKING" in ast.dump(top.test)
        for node in ast.walk(top)
    }
    found = [node for node in ast.walk(module.tree) if _is_own(node)]
    for node in sorted(found, key=lambda n: -n.lineno):  # type: ignore[attr-defined]
        assert isinstance(node, ast.ImportFrom) and node.module and node.end_lineno
        indent = " " * node.col_offset
        new: dict[str, list[str]] = {}  # by the file that they come from
        whole: list[str] = []
        for alias in node.names:
            home, name = _home(node.module, alias.name)
            as_ = "" if alias.asname is None else f" as {alias.asname}"
            if home not in modules and id(node) not in checking:
                assert id(node) not in inside, "what a module needs at once is among the modules"
                text = f"{home} is no part of this folder; install {PACKAGE} from its source"
                whole.append(f'raise ImportError("{text}")')
            elif home not in modules:
                whole.append("pass")
            elif name is None:
                whole += _import_module(_flat(home), alias.asname or alias.name)
            else:
                new.setdefault(_flat(home), []).append(name + as_)
        text = [f"from .{file} import {', '.join(names)}" for file, names in new.items()]
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in (*text, *whole)]
    where = module.name.replace(".", "/")
    head = [f"# {where}.py of {PACKAGE} {skipless.__version__}, Apache-2.0; imports made relative."]
    tail = []
    if module.name in NAMES:
        tail = ["", "# Some versions of transformers copy only what this file itself imports."]
        others = [name for name in _needed(module.name) if name != module.name]
        tail += [f"from .{_flat(name)} import __name__ as _  # noqa: E402" for name in others]
    return "\n".join((*head, *lines, *tail, ""))


def _import_module(file: str, called: str) -> list[str]:
    """The lines that give the module of a file beside this one.

    transformers finds the files to copy by `from .FILE import NAME`, which cannot give a module.
    """
    return [
        f"from .{file} import __name__ as _{file}",
        f'{called} = __import__("sys").modules[_{file}]',
    ]
