"""What the name of a model stands for: a folder, a model of the catalog, a model of a hub.

Without torch, so that a mistake in a name is told at once. Read by `skipless.diagnose.loading` and
the command line.
"""

from __future__ import annotations

import difflib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from skipless.errors import UserError, suggestion
from skipless.pretrained.beside import refuse_adapter
from skipless.pretrained.catalog import MODELS
from skipless.pretrained.fetching import fetch_model
from skipless.rundir import CHECKPOINTS


def find_model(name: str) -> str:
    """A folder as it is, the folder of a model of the catalog, fetched, or a hub name.

    Raises UserError for what is none of these.
    """
    return str(fetch_model(name)) if _is_listed(name) else _find(name)


def check_named(name: str, *, holds_model: bool = False) -> None:
    """The errors of `find_model` without fetching: for the command line, before torch is loaded.

    RUN/checkpoint/step-N passes, which is found by its number. `holds_model` refuses a folder
    without config.json too; other folders are logs, or diagnoses to compare with.
    """
    if _is_listed(name) or Path(name).parent.name == CHECKPOINTS:
        return
    folder = Path(_find(name))
    if not holds_model or not folder.is_dir() or (folder / "config.json").exists():
        return
    if any(folder.glob("*.onnx")):
        raise UserError(
            f"{name} cannot be loaded: it holds ONNX files, which "
            "`skipless.export.open_session` reads; name the model they were made from"
        )
    refuse_adapter(folder)
    raise UserError(
        f"{name} cannot be loaded: it holds no config.json; name a run directory, or the "
        "folder of a Hugging Face model"
    )


def _is_listed(name: str) -> bool:
    return name in MODELS.names() and not Path(name).is_dir()


def _find(name: str) -> str:
    if Path(name).is_dir():
        return name
    if Path(name).is_file():
        raise UserError(
            f"{name} is a file; name a run directory, or the folder of a Hugging Face model"
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub_folder(name)
    if "/" in name:
        raise UserError(
            f"{name} does not exist; name a folder, a model of `skipless models list`, or "
            "OWNER/NAME of a hub"
        )
    raise UserError(
        f"{name} is neither a folder nor a named model (of a hub write OWNER/NAME); "
        f"{suggestion(name, MODELS.names())}"
    )


def _hub_folder(name: str) -> str:
    """OWNER/NAME as it is where the hub can be asked; without a network the folder of the cache.

    Asked first, since transformers tries for most of a minute before it says so. Raises UserError
    where neither is there.
    """
    parent = Path(name).parent
    if parent.is_dir():
        there = sorted(folder.name for folder in parent.iterdir() if folder.is_dir())
        near = difflib.get_close_matches(Path(name).name, there, n=3) or there[:8]
        more = f"; {parent} holds {', '.join(near)}" if near else f"; {parent} is empty"
        raise UserError(f"{name} does not exist{more}")
    if _reaches_hub():
        return name
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, local_files_only=True)
    except (ImportError, OSError, ValueError):
        raise UserError(
            f"{name} is no folder and not in the cache of the hub, which cannot be reached from "
            f"here; download it elsewhere (`hf download {name} --local-dir DIR`), and name that "
            "folder"
        ) from None


def _reaches_hub() -> bool:
    """Whether the hub's address is known here; behind a proxy only the proxy knows."""
    switches = (os.environ.get(key, "") for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(value.upper() in ("1", "ON", "YES", "TRUE") for value in switches):
        return False
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if getproxies().get(url.scheme):
        return True
    try:
        socket.getaddrinfo(url.hostname, url.port or 443)
    except OSError:
        return False
    return True
