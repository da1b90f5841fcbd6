"""Optional packages: what is missing and the line that installs it, told before anything slow.

The project is on no package index, so the line names the packages themselves, in the versions that
pyproject.toml asks for: it works in any directory. Imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import tomllib
from functools import lru_cache
from pathlib import Path

from skipless.errors import UserError

_DISTRIBUTIONS = {
    "PIL": "pillow", "compressed_tensors": "compressed-tensors", "lm_eval": "lm-eval",
    "pytorch_lightning": "pytorch-lightning", "yaml": "pyyaml",
}  # fmt: skip
"""Where a package is installed by another name than it is imported by."""
_NAMES = {"PIL": "Pillow"}
_TOGETHER = {"transformers": ("accelerate",)}
"""What else the extra of a package installs."""


class NotInstalledError(UserError, ImportError):
    """A package is missing, told in one sentence. An ImportError too, as importing
    `skipless.hf` without transformers raises it."""


def need(*names: str, why: str = "", instead: str = "") -> None:
    """Raise NotInstalledError, with the line to type, unless every package can be imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise not_installed(*missing, why=why, instead=instead)


def not_installed(*names: str, why: str = "", instead: str = "") -> NotInstalledError:
    """The error for packages that are missing; `why` says what they are wanted for, `instead`
    what does without them."""
    told = " and ".join(_NAMES.get(name) or _DISTRIBUTIONS.get(name, name) for name in names)
    text = f"{told} {'is' if len(names) == 1 else 'are'} not installed"
    text += f", {why}" if why else ""
    text += f"; install {'it' if len(names) == 1 else 'them'} with `{install_line(*names)}`"
    return NotInstalledError(text + (f", or {instead}" if instead else ""))


def install_line(*names: str) -> str:
    """What to type to have the packages that are imported as `names`."""
    wanted = [one for name in names for one in (name, *_TOGETHER.get(name, ()))]
    asked = _requirements()
    named = (_DISTRIBUTIONS.get(name, name) for name in wanted)
    return shlex.join(["pip", "install", *(asked.get(name, name) for name in named)])


def is_known(name: str) -> bool:
    """Whether skipless can use the package, so that its absence is told in a sentence."""
    return _DISTRIBUTIONS.get(name, name) in _requirements()


@lru_cache(maxsize=1)
def _requirements() -> dict[str, str]:
    """{name: name with the versions that fit}, of all extras; empty where nothing says so."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    try:  # in a clone its own list, as an editable install keeps that of the day it was made
        about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        assert about["name"] == "skipless", "or it is that of another package"
        extras = about["optional-dependencies"].values()
        lines = [*about["dependencies"], *(line for extra in extras for line in extra)]
    except (OSError, ValueError, KeyError, AssertionError):
        try:
            lines = importlib.metadata.requires("skipless") or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
    found: dict[str, str] = {}
    for line in lines:
        text = line.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", text)
        if name is not None and "[" not in text:
            found[name[0]] = text
    return found
