"""`hf:NAME` with a stand-in for the hub: limits, caching, broken streams, wrong columns."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from skipless import data
from skipless.config import DataConfig
from skipless.data import hub
from skipless.errors import UserError


@pytest.fixture
def rows(monkeypatch):
    """What the pretended hub streams; an exception in the list is raised at its place."""
    state = SimpleNamespace(rows=[], calls=[])

    def load_dataset(name, config, *, split, streaming):
        state.calls.append((name, config, split))
        assert streaming

        def stream():
            for row in state.rows:
                if isinstance(row, Exception):
                    raise row
                yield row

        return stream()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return state


def test_streams_up_to_the_limit_once(rows):
    rows.rows = [{"text": f"document {i} " * 10} for i in range(100)]
    spec = "hf:owner/name?config=sample&split=validation&characters=1_000"
    found = data.fetch(spec)
    assert rows.calls == [("owner/name", "sample", "validation")]
    assert 1000 <= found["num_characters"] < 1200
    assert data.fetch(spec) == found and len(rows.calls) == 1
    config = DataConfig(sources=(spec,), held_out_fraction=0.3)
    prepared = data.prepare(config, 300)
    assert sum(prepared.num_documents.values()) == found["num_documents"]
    assert prepared.directory == data.prepare(config, 300).directory


@pytest.mark.parametrize("text", ["[]", "{", '{"licence": "x"}'])
def test_a_broken_note_is_streamed_again(rows, cache, text):
    rows.rows = [{"text": f"document {i} " * 10} for i in range(10)]
    first = data.fetch("hf:owner/name")
    next(cache.rglob("source.json")).write_text(text)
    assert data.fetch("hf:owner/name") == first and len(rows.calls) == 2


def test_a_broken_stream_leaves_nothing(rows, cache):
    rows.rows = [{"text": "a" * 50}, ConnectionError("reset")]
    with pytest.raises(data.UnreachableError, match="broke off after 50 characters"):
        data.fetch("hf:owner/name")
    assert not [p for p in cache.rglob("*") if "hf-" in p.name and p.suffix != ".lock"]
    rows.rows = [ConnectionError("no route\nmore")]
    with pytest.raises(data.UnreachableError, match=r"cannot be streamed \(no route\)"):
        data.fetch("hf:owner/name")


def test_a_missing_column_suggests(rows):
    rows.rows = [{"texts": "a", "id": "b"}]
    with pytest.raises(UserError, match=r"no text column 'text'; did you mean 'texts'\?"):
        data.fetch("hf:owner/name")


def test_no_text_and_no_package(rows, monkeypatch):
    with pytest.raises(UserError, match="holds no text"):
        data.fetch("hf:owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install 'datasets"):
        data.fetch("hf:owner/name")


@pytest.mark.parametrize("count", ["0", "x", "²", "9" * 5000, "-1"])
def test_malformed_counts(count):
    with pytest.raises(UserError, match="is not a hub source"):
        hub.parse(f"hf:a/b?characters={count}")


@pytest.mark.parametrize("spec", ["hf:", "hf:?characters=5"])
def test_malformed(spec):
    with pytest.raises(UserError, match="is not a hub source"):
        hub.parse(spec)


def test_unknown_option_suggests():
    with pytest.raises(UserError, match=r"unknown option 'splt' .* did you mean 'split'"):
        hub.parse("hf:a/b?splt=train")
