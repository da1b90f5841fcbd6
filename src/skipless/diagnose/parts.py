"""Finished parts of a diagnosis on disk, so that an interrupted one goes on where it was.

    DIR/parts/NAME.json    {"of": settings, "value": the part}, each written under a temporary name

The settings hold a checksum of weights and batches, so that parts of another model or text are
refused. The folder of parts goes when the report is written. Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.diagnose.streaming import loaded_parameters
from skipless.errors import UserError
from skipless.files import to_strict_json, write_atomic
from skipless.jsonable import parse_json, read_text
from skipless.locking import try_lock

FOLDER = "parts"
LOCK = "lock"
RESULT = "diagnosis.json"
RESULTS = (RESULT, "comparison.json", "over-time.json")
"""The numbers of each kind of report, written last: a folder that has one of them is finished."""


class Parts:
    """What of a diagnosis is finished; keeps nothing without a folder."""

    def __init__(self, out: str | Path | None, settings: dict[str, Any]) -> None:
        """Raises UserError when `out` holds a finished report, another one's parts, or anything
        else."""
        self.out = None if out is None else Path(out)
        self.settings = json.loads(to_strict_json(settings))
        if self.out is not None:
            check_free(self.out)
            for file in sorted((self.out / FOLDER).glob("*.json")):
                found = parse_json(read_text(file), where=str(file))
                if not isinstance(found, dict) or found.get("of") != self.settings:
                    raise UserError(
                        f"{self.out} holds parts of a diagnosis of another model, text or "
                        "settings; name another folder, or delete it"
                    )

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part `name`: as it is on disk, or computed now and written. What is not finite is
        None either way."""
        known = self.known(name)
        if known is not None:
            return known
        value = json.loads(to_strict_json(compute()))
        self.keep(name, value)
        return value

    def known(self, name: str) -> Any:
        """The part on disk, or None."""
        if self.out is None or not (self.out / FOLDER / f"{name}.json").exists():
            return None
        file = self.out / FOLDER / f"{name}.json"
        return parse_json(read_text(file), where=str(file))["value"]

    def keep(self, name: str, value: Any) -> None:
        """Write a part, finished or as far as it goes."""
        if self.out is not None:
            text = to_strict_json({"of": self.settings, "value": value})
            write_atomic(self.out / FOLDER / f"{name}.json", text)

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the length of a with statement, in which the report is written too, no other process
        keeps parts in this folder; afterwards the parts are deleted, unless an exception left it.

        Raises UserError where another process holds it or has finished meanwhile, or where nothing
        can be written.
        """
        if self.out is None:
            yield
            return
        path = self.out / FOLDER / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        with file:
            if not try_lock(file):
                raise UserError(
                    f"another process is writing to {self.out}; wait for it, or name another folder"
                )
            if _is_finished(self.out):  # by whoever held the lock since __init__ looked
                shutil.rmtree(self.out / FOLDER, ignore_errors=True)
                check_free(self.out)
            yield
        shutil.rmtree(self.out / FOLDER, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise UserError for a folder that holds a finished report or other files."""
    if out.is_file():
        raise UserError(f"{out} is a file; name a folder for the report")
    if _is_finished(out):
        raise UserError(f"{out} holds a finished report; name another folder, or delete it")
    if out.exists() and not (out / FOLDER).is_dir() and any(out.iterdir()):
        raise UserError(f"{out} exists already and holds other files; name a folder that does not")


def _is_finished(out: Path) -> bool:
    return any((out / name).exists() for name in RESULTS)


def checksum(model: nn.Module, batches: Iterable[Any]) -> str:
    """SHA-256 over a thousand numbers of every parameter and all inputs, 16 characters.

    Read and not summed, so that the number of threads does not matter.
    """
    digest = hashlib.sha256()
    for name, parameter in loaded_parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_some_bytes(parameter))
    for batch in batches:
        for tensor in _tensors(batch):
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()[:16]


def fingerprints(model: nn.Module) -> dict[str, bytes]:
    """{parameter: a digest of a thousand of its numbers}."""
    found = loaded_parameters(model)
    return {name: hashlib.sha256(_some_bytes(parameter)).digest() for name, parameter in found}


def _some_bytes(parameter: Tensor) -> bytes:
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // 1000)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, Mapping) else batch
    return [t for item in items for t in _tensors(item)] if isinstance(
        items, (list, tuple, type({}.values()))
    ) else []  # fmt: skip
