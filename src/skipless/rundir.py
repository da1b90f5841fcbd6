"""A run on disk: one directory, written so that nothing is ever half there.

    config.json        the RunConfig, first thing written
    environment.json   versions, CPU, threads
    data.json          where its text is, what it is, how far token frequencies alone get
    tokenizer.json     that of its text, so that a run can be moved
    metrics.jsonl      a line a step; held-out losses on lines of their own
    probes.jsonl       measurements inside the model during training
    checkpoint/        to resume from
    probe.json         a longer measurement inside the trained model
    model.safetensors  the trained weights
    train.json         what training came to, written last

Whole files go to a temporary name and are renamed; logs are appended line by line, and a torn last
line (power cut) is dropped on reading. Only one process may hold a run (`lock`). A directory is
ours when its config.json reads as one, or when nothing but our own files is in it (`is_ours`): the
rest of a start that was cut short. Only our own files are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skipless.config import RunConfig, from_json, to_json
from skipless.environment import environment
from skipless.errors import UserError
from skipless.files import (
    disk_error,
    make_directory,
    to_strict_json,
    write_atomic,
)
from skipless.jsonable import leaves, parse_json, read_text
from skipless.locking import try_lock

CONFIG, ENVIRONMENT = "config.json", "environment.json"
WEIGHTS, CHECKPOINTS, LOCK = "model.safetensors", "checkpoint", ".lock"
TOKENIZER, DATA = "tokenizer.json", "data.json"
METRICS, PROBES = "metrics.jsonl", "probes.jsonl"
RESULT, DIAGNOSIS, FINAL_PROBE = "train.json", "diagnosis.json", "probe.json"
EVALUATION, QUANTISED, SAMPLES = "eval.json", "quant.json", "samples.json"
OWN_FILES = (
    CONFIG, ENVIRONMENT, WEIGHTS, CHECKPOINTS, LOCK, TOKENIZER, DATA, METRICS, PROBES, RESULT,
    DIAGNOSIS, FINAL_PROBE, EVALUATION, QUANTISED, SAMPLES, "prune.json", "tensorboard",
    "tasks.json", "tasks.md", "tasks.png", "tasks-documents.jsonl",
)  # fmt: skip
"""Everything that training and measuring write into a run directory, temporaries apart."""


class RunDir:
    """Access to one run directory. `create` makes it, `open` expects it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, *, fresh: bool = False) -> RunDir:
        """Make the directory, or reuse one that holds the same settings (to resume).

        Raises UserError if it holds trained weights of other settings and `fresh` is False; the
        first differing settings are named. Without weights there is nothing to lose, and it starts
        anew. `fresh` removes the former run, but only a directory that is one.
        """
        with cls.claim(path, config, fresh=fresh) as run:
            return run

    @classmethod
    @contextlib.contextmanager
    def claim(cls, path: str | Path, config: RunConfig, *, fresh: bool = False) -> Iterator[RunDir]:
        """`create` and hold the lock from before the first look at it to the end of the block."""
        run = cls(path)
        run.check(config, fresh=fresh)
        with run.lock():
            run.check(config, fresh=fresh)  # again: another process may have been here meanwhile
            if fresh or not run.continues(config):
                run.clear()
            if not (run / CONFIG).exists():
                write_atomic(run / CONFIG, to_json(config))
            if not (run / ENVIRONMENT).exists():
                write_atomic(run / ENVIRONMENT, to_strict_json(environment(), indent=2) + "\n")
            yield run

    def check(self, config: RunConfig, *, fresh: bool = False) -> None:
        """Raise UserError if `create` would; changes nothing."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another directory for the run")
        if not self.is_ours():
            raise UserError(
                f"{self.path} exists and is not a run of ours (it has no {CONFIG} of ours, or "
                "other files and no settings); choose another directory"
            )
        if fresh or not self.has_weights():
            return
        if not (self / CONFIG).exists():
            raise UserError(
                f"{self.path} holds weights and no {CONFIG}; put it back, choose another directory "
                "or start anew with --fresh"
            )
        _check_same(self.config(), config, self.path)

    def is_ours(self) -> bool:
        """True for a run, for what a start or removal cut short left of one, and for nothing.

        A model folder of another library also has a config.json and a model.safetensors.
        """
        if not self.path.exists() or self._own_config() is not None:
            return True
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except OSError as error:
            raise disk_error(self.path, error) from error
        begun = ENVIRONMENT in names or any(name.startswith(f".{CONFIG}.") for name in names)
        return all(map(_is_own, names)) and (begun or set(names) <= {LOCK})

    def has_weights(self) -> bool:
        """True once training has left something that is worth keeping."""
        return (self / WEIGHTS).exists() or any((self / CHECKPOINTS).glob("step-*"))

    def clear(self, keep: tuple[str, ...] = ()) -> None:
        """Remove our files, all but the lock, which must be held, and those named in `keep`.

        They are moved aside first, beginning with the settings, so that being cut short never
        leaves a directory that looks like a whole run.
        """
        aside = self / f".{CONFIG}.{uuid.uuid4().hex[:8]}.old"
        try:
            aside.mkdir()
            own = sorted(p for p in self.path.iterdir() if _is_own(p.name) and p != aside)
            for entry in sorted(own, key=lambda p: p.name != CONFIG):
                if entry.name not in (LOCK, *keep):
                    os.replace(entry, aside / entry.name)
            shutil.rmtree(aside)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def _own_config(self) -> RunConfig | None:
        try:
            return self.config() if (self / CONFIG).exists() else None
        except UserError:
            return None

    def continues(self, config: RunConfig) -> bool:
        """True if the directory holds these very settings already; the note is none."""
        own = self._own_config()
        return own is not None and own.replace(note="") == config.replace(note="")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Expect an existing run. Raises UserError if there is none."""
        run = cls(path)
        if not (run / CONFIG).exists():
            why = f"no {CONFIG}" if run.path.exists() else "there is no such folder"
            raise UserError(
                f"{run.path} is not a run directory ({why}); make one with "
                "`skipless train RECIPE --out DIR`"
            )
        return run

    def config(self) -> RunConfig:
        """The settings of this run. Raises UserError for what is none, a Hugging Face model say."""
        text, where = read_text(self / CONFIG), str(self / CONFIG)
        settings = parse_json(text, where=where)
        if isinstance(settings, dict) and "quantization_config" in settings:
            about = settings["quantization_config"]
            packed = isinstance(about, dict) and about.get("quant_method") == "skipless"
            raise UserError(
                f"{self.path} is a quantised model and no run; "
                + (f"measure it by `skipless eval {self.path} --text FILE`, or " if packed else "")
                + "name the run that it was made from"
            )
        if isinstance(settings, dict) and "model_type" in settings:
            raise UserError(
                f"{self.path} is a Hugging Face model and no run; `skipless diagnose {self.path}` "
                "measures it, `skipless patch` and `skipless prune` change it"
            )
        return from_json(RunConfig, text, where=where)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run exclusively. Raises UserError if another process holds it.

        The lock belongs to the open file, so it vanishes with its process, even a killed one.
        """
        make_directory(self.path)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(self / LOCK, "a+"))
                if not try_lock(file):
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise UserError(
                        f"{self.path} is in use by another process (pid {holder}); wait for it or "
                        "choose another directory"
                    )
                file.seek(0)
                file.truncate()
                file.write(str(os.getpid()))
                file.flush()
            except OSError as error:
                raise disk_error(self / LOCK, error) from error
            yield

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line. Raises UserError when the disk refuses."""
        path = self / name
        line = (to_strict_json(row) + "\n").encode()
        try:
            with open(path, "ab", buffering=0) as file:  # unbuffered: a refused line is not retried
                start = file.tell()
                try:
                    written = file.write(line)
                    if written != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    with contextlib.suppress(OSError):
                        os.truncate(path, start)
                    raise
        except OSError as error:
            raise disk_error(path, error) from error

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """All rows; an unfinished last line is left out. Missing file: no rows."""
        path = self / name
        if not path.exists():
            return []
        rows = []
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        for number, line in enumerate(lines, start=1):
            row = json_row(line)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise UserError(
                    f"{path} line {number} is not a JSON object; delete the line or the run "
                    "directory"
                )
        return rows

    def truncate_jsonl(self, name: str, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only the rows for which `keep` holds (used when resuming)."""
        rows = self.read_jsonl(name)
        text = "".join(to_strict_json(row) + "\n" for row in rows if keep(row))
        if (self / name).exists():
            write_atomic(self / name, text)

    def write_json(self, name: str, value: Any) -> Path:
        """Write one JSON file atomically; NaN becomes null."""
        return write_atomic(self / name, to_strict_json(value, indent=1) + "\n")

    def read_json(self, name: str, default: Any = None) -> Any:
        """One JSON file, or `default` when it is missing."""
        path = self / name
        if not path.exists():
            return default
        try:
            return parse_json(read_text(path), where=str(path))
        except UserError as error:
            raise UserError(f"{error}; delete the file to make it anew") from None


def json_row(line: bytes) -> dict[str, Any] | None:
    """One line of a .jsonl file; None for anything but a whole JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # torn, or not even text
        return None
    return row if isinstance(row, dict) else None


def continue_command(path: str | Path, *more: str) -> str:
    """The command line that continues the run at `path`."""
    return shlex.join(["skipless", "train", str(path), *more])


def _is_own(name: str) -> bool:
    if name in OWN_FILES or re.fullmatch(r"tasks-\d+(\.json|\.md|\.png|-documents\.jsonl)", name):
        return True
    temporary = name.startswith(".") and name.endswith((".tmp", ".old"))
    return temporary and any(name.startswith(f".{own}.") for own in OWN_FILES)


def _check_same(old: RunConfig, new: RunConfig, path: Path) -> None:
    before, after = leaves(old), leaves(new)
    differing = [k for k in after if before.get(k) != after[k] and k != "note"]
    if differing:
        first = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UserError(
            f"{path} holds a run with other settings ({first} is {before.get(first)!r} there and "
            f"{after[first]!r} here{more}); continue it as it is with `{continue_command(path)}`, "
            "choose another directory, or throw it away with --fresh"
        )
