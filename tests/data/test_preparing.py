"""From settings to shards: whole documents held out, once only, nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import DataConfig
from skipless.data import PreparedData, fetching, load_tokenizer, prepare
from skipless.data.splits import choose_held_out, cut
from skipless.errors import UserError


def config(*sources, **options):
    return DataConfig(**{"sources": tuple(map(str, sources)), "held_out_fraction": 0.2, **options})


def texts(prepared, split):
    """The documents of a shard, decoded."""
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    ids = np.asarray(getattr(prepared, split).tokens)
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    assert ends[-1] == len(ids) - 1  # every document is closed
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]


def test_every_document_is_on_exactly_one_side(corpus):
    prepared = prepare(config(corpus), 300)
    train, held_out = texts(prepared, "train"), texts(prepared, "held_out")
    originals = {p.read_text() for p in corpus.iterdir()}
    assert set(train) | set(held_out) == originals
    assert not set(train) & set(held_out)
    assert prepared.num_documents == {"train": 8, "held_out": 2}
    size = sum(len(text.encode()) for text in held_out)
    assert prepared.bytes_per_token == size / prepared.held_out.num_tokens
    assert prepared.fallback_reason is None and prepared.sources == (str(corpus),)
    rows = [json.loads(line) for line in (prepared.directory / "documents.jsonl").open()]
    assert len(rows) == 10 and {row[2] for row in rows} == {"train", "held_out"}


def test_the_second_call_only_opens(corpus, monkeypatch):
    first = prepare(config(corpus), 300)
    monkeypatch.setattr("skipless.data.preparing.Builder", None)  # building would fail now
    second = prepare(config(corpus), 300)
    assert second.directory == first.directory
    assert second.train.header == first.train.header
    assert PreparedData.open(first.directory).held_out.header == first.held_out.header
    assert "8 documents" in first.describe() and str(first.directory) in first.describe()


def test_whatever_shapes_the_result_has_a_place_of_its_own(corpus):
    base = config(corpus)
    places = {prepare(base, 300).directory, prepare(base, 310).directory}
    places |= {prepare(dataclasses.replace(base, **change), 300).directory
               for change in ({"seed": 1}, {"held_out_fraction": 0.3})}  # fmt: skip
    (corpus / "text0.txt").write_text("changed")
    places.add(prepare(base, 300).directory)
    assert len(places) == 5


def test_the_seed_chooses(corpus):
    chosen = {tuple(sorted(texts(prepare(config(corpus, seed=s), 300), "held_out")))
              for s in range(4)}  # fmt: skip
    assert len(chosen) > 1


def test_a_foreign_tokenizer(corpus):
    own = prepare(config(corpus), 300)
    with_path = config(corpus, tokenizer=str(own.tokenizer_path))
    again = prepare(with_path, 4000)
    assert again.train.header.sha256 == own.train.header.sha256
    assert again.train.vocab_size == 4000
    with pytest.raises(UserError, match="has 300 tokens, more than vocab_size 299"):
        prepare(with_path, 299)
    with pytest.raises(UserError, match=re.escape("'bpe' or the path of a tokenizer.json")):
        prepare(config(corpus, tokenizer="bpee"), 300)


def test_a_single_document_is_cut_and_says_so(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("\n\n".join(f"Paragraph {i} has some words in it." for i in range(200)))
    prepared = prepare(config(path), 300)
    (train,), (held_out,) = texts(prepared, "train"), texts(prepared, "held_out")
    assert train + held_out == path.read_text()
    assert train.endswith("\n\n") and held_out.startswith("Paragraph")
    assert len(held_out) / len(path.read_text()) == pytest.approx(0.2, abs=0.01)
    assert "single document" in prepared.notes[0] and "note:" in prepared.describe()


def test_copies_of_a_text_stay_on_one_side(corpus):
    for number in range(10):
        (corpus / f"copy{number}.txt").write_text((corpus / f"text{number}.txt").read_text())
    prepared = prepare(config(corpus), 300)
    assert not set(texts(prepared, "train")) & set(texts(prepared, "held_out"))


def test_jsonl_and_parquet_sources(tmp_path, corpus):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    bodies = [p.read_text() for p in sorted(corpus.iterdir())]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": b}) + "\n" for b in bodies[:5]))
    pq.write_table(pa.table({"body": bodies[5:]}), tmp_path / "b.parquet")
    prepared = prepare(config(tmp_path / "a.jsonl", tmp_path / "b.parquet", text_key="body"), 300)
    assert {*texts(prepared, "train"), *texts(prepared, "held_out")} == set(bodies)


@given(
    st.lists(st.integers(1, 500), min_size=2, max_size=40, unique=True),
    st.floats(0.01, 0.9),
    st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_choice_leaves_both_sides_something(lengths, fraction, seed):
    documents = [(str(i).encode(), n) for i, n in enumerate(lengths)]
    held = choose_held_out(documents, fraction, seed, "x")
    assert 1 <= len(held) < len(documents)
    assert held == choose_held_out(list(reversed(documents)), fraction, seed, "x")
    share = sum(n for key, n in documents if key in held) / sum(lengths)
    assert abs(share - fraction) <= max(lengths) / sum(lengths)


@given(st.text(alphabet="ab \n", min_size=2, max_size=300), st.floats(0.01, 0.99))
@settings(max_examples=150, deadline=None)
def test_cut_leaves_both_sides_something(text, fraction):
    assert 0 < cut(text, fraction) < len(text)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0])
def test_impossible_fractions(corpus, fraction, cache):
    with pytest.raises(UserError, match=r"data.held_out_fraction .* in \(0, 1\)"):
        prepare(config(corpus, held_out_fraction=fraction), 300)
    assert nothing_half_written(cache)


def test_empty_input(tmp_path, cache):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text("\n \n")
    with pytest.raises(UserError, match="holds no text"):
        prepare(config(empty), 300)
    (empty / "a.txt").write_text("x")
    with pytest.raises(UserError, match="single document of 1 character"):
        prepare(config(empty), 300)
    with pytest.raises(UserError, match="data.sources is empty"):
        prepare(config(), 300)
    with pytest.raises(UserError, match="twice"):
        prepare(config(empty, empty), 300)
    assert nothing_half_written(cache)


def test_unknown_source_suggests():
    with pytest.raises(UserError, match=r"unknown source 'shakespear': .* 'shakespeare'\?"):
        prepare(config("shakespear"), 300)


def test_a_bad_line_stops_before_anything_is_written(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(UserError, match="line 2 is not valid JSON"):
        prepare(config(tmp_path / "a.jsonl"), 300)
    assert nothing_half_written(cache)


@pytest.mark.parametrize("victim", ["train.bin", "held_out.json", "tokenizer.json",
                                    "prepared.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_folder_says_how_to_rebuild(corpus, victim, damage):
    import shutil

    prepared = prepare(config(corpus), 300)
    path = prepared.directory / victim
    path.write_bytes(path.read_bytes()[:-3]) if damage == "truncate" else path.unlink()
    with pytest.raises(UserError, match=f"delete the folder {prepared.directory}"):
        prepare(config(corpus), 300)
    shutil.rmtree(prepared.directory)
    assert prepare(config(corpus), 300).train.header == prepared.train.header


@pytest.mark.parametrize(
    "change",
    [
        {"sources": [1]}, {"sources": 3}, {"notes": [None]}, {"fallback_reason": 5},
        {"num_documents": {"train": 1}}, {"num_documents": {"train": "x", "held_out": 1}},
    ],
)  # fmt: skip
def test_a_record_of_other_types_is_broken(corpus, change):
    prepared = prepare(config(corpus), 300)
    path = prepared.directory / "prepared.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=f"broken .* delete the folder {prepared.directory}"):
        PreparedData.open(prepared.directory)


@pytest.mark.parametrize("place", ["", "/tmp"])
def test_a_folder_that_is_not_of_the_cache_is_never_to_be_deleted(place):
    with pytest.raises(UserError) as error:
        PreparedData.open(place)
    assert "delete" not in str(error.value)


def test_a_flipped_bit_is_found_on_opening(corpus):
    prepared = prepare(config(corpus), 300)
    data = bytearray(prepared.train.path.read_bytes())
    data[11] ^= 4
    prepared.train.path.write_bytes(data)
    with pytest.raises(UserError, match=r"train.bin is corrupt: .* delete the folder"):
        prepare(config(corpus), 300)


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "prepared.json"])
def test_disk_full(corpus, cache, monkeypatch, name):
    """The write of each file in turn fails: one sentence, nothing left, and it works afterwards."""
    import builtins

    real = builtins.open

    def full(file, *arguments, **options):
        opened = real(file, *arguments, **options)
        if not isinstance(file, int) and f".{name}." in os.fspath(file):

            def write(_):
                raise OSError(errno.ENOSPC, "No space left on device")

            return Wrapped(opened, write)
        return opened

    class Wrapped:
        def __init__(self, inner, write):
            self.inner, self.write = inner, write

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.inner.close()

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(UserError, match="No space left on device") as caught:
        prepare(config(corpus), 300)
    monkeypatch.setattr(builtins, "open", real)
    assert "\n" not in str(caught.value)
    assert nothing_half_written(cache)
    assert prepare(config(corpus), 300).num_documents["train"] == 8


def test_leftovers_of_a_killed_process_go(corpus):
    prepared = prepare(config(corpus), 300)
    old = prepared.directory.with_name(f".{prepared.directory.name}.abcd1234.tmp")
    prepared.directory.rename(old)  # as if killed before the rename
    again = prepare(config(corpus), 300)
    assert again.directory == prepared.directory and not old.exists()


def _prepare_in_child(corpus, cache, queue):
    os.environ["SKIPLESS_CACHE"] = cache
    try:
        result = prepare(config(corpus), 300)
        queue.put((str(result.directory), result.train.header.sha256))
    except BaseException as error:
        queue.put(repr(error))


def test_two_processes_prepare_the_same_at_once(corpus, cache):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=_prepare_in_child, args=(str(corpus), str(cache), queue))
                for _ in range(2)]  # fmt: skip
    for child in children:
        child.start()
    results = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert results[0] == results[1]
    assert isinstance(results[0], tuple), results
    assert len(list((cache / "prepared").iterdir())) == 1


def test_offline_defaults_fall_back_and_say_so(cpython, monkeypatch, capsys):
    real = fetching.get

    def offline(name, cache=None):
        if name == "cpython":
            return real(name, cpython)
        raise fetching.UnreachableError(f"{name} is out of reach")

    monkeypatch.setattr(fetching, "get", offline)
    defaults = DataConfig()
    prepared = prepare(defaults, 300)
    assert prepared.sources == ("cpython",)
    assert "shakespeare is out of reach" in prepared.fallback_reason
    assert "FALLBACK" in prepared.describe()
    assert "WARNING" in capsys.readouterr().err
    header = json.loads((prepared.directory / "prepared.json").read_text())
    assert header["fallback_reason"] == prepared.fallback_reason
    assert PreparedData.open(prepared.directory).fallback_reason == prepared.fallback_reason
    with pytest.raises(fetching.UnreachableError):  # asked for by name: no silent replacement
        prepare(config("kjv"), 300)


def nothing_half_written(cache):
    return not any((cache / "prepared").glob("*")) and not any((cache / "prepared").glob(".*"))
