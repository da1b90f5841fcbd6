"""Reading files and cleaning text: what stays, what goes, and which sentence names the fault."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.data.documents import clean, fingerprint, read_path
from skipless.errors import UserError


@given(st.text(alphabet="ab \t\r\n*\ufeff", max_size=80))
@settings(max_examples=150, deadline=None)
def test_cleaning_twice_is_cleaning_once(text):
    assert clean(clean(text)) == clean(text)


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_cleaning_never_touches_words(text):
    strip = {ord(c): None for c in "\r\n \t\ufeff"}
    assert clean(text).translate(strip) == text.translate(strip)


def test_gutenberg_licence_goes():
    text = (
        "\ufeffThe Project Gutenberg EBook\r\nLicence\r\n\r\n"
        "*** START OF THIS PROJECT GUTENBERG EBOOK EMMA ***\r\n\r\n"
        "VOLUME I  \r\n\r\n\r\n\r\n\r\nEmma Woodhouse\r\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK EMMA ***\r\nMore licence\r\n"
    )
    assert clean(text) == "VOLUME I\n\n\nEmma Woodhouse"


def test_an_end_marker_alone_is_text():
    assert clean("x\n*** END OF ACT ***\ny") == "x\n*** END OF ACT ***\ny"


def test_lone_surrogates_do_not_break_the_encoder():
    clean("a\ud800b").encode("utf-8")


def test_folder_is_read_in_order_and_hidden_files_are_not(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text('{"text": "ay"}\n\n{"text": ""}\n{"text": "oh"}\n')
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "notes.md").write_text("no")
    found = [(d.name, d.text) for d in read_path(tmp_path)]
    assert found == [("b.txt", "bee"), ("sub/a.jsonl:1", "ay"), ("sub/a.jsonl:4", "oh")]


def test_parquet_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"content": ["one", None, "two"], "n": [1, 2, 3]}), path)
    assert [d.text for d in read_path(path, "content")] == ["one", "two"]
    with pytest.raises(UserError, match=r"no column 'contents'; did you mean 'content'\?"):
        list(read_path(path, "contents"))
    with pytest.raises(UserError, match="holds int, not text"):
        list(read_path(path, "n"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="not a readable parquet file"):
        list(read_path(path, "content"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "line 3 is not valid JSON"),
        ('{"txt": "a"}', r"line 3 has no text under the key 'text'; did you mean 'txt'\?"),
        ('{"text": 5}', "line 3 has no text under the key"),
        ('["text"]', "line 3 has no text under the key"),
        ("[" * 100_000, "line 3 is nested too deeply"),
        ('{"text": ' + "9" * 5000 + "}", "line 3 is not valid JSON"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "fine"})
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(UserError, match=words):
        list(read_path(path))


def test_undecodable_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 2 is 0xf6\)"):
        list(read_path(tmp_path))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xf6"}')
    with pytest.raises(UserError, match="line 1 is not valid JSON"):
        list(read_path(tmp_path))


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="holds no .txt"):
        list(read_path(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        list(read_path(tmp_path / "none"))
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(UserError, match="ends in '.pdf'"):
        list(read_path(tmp_path / "a.pdf"))


def test_fingerprint_follows_names_and_contents(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    (tmp_path / "a.txt").write_text("two")
    second = fingerprint(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert len({first, second, fingerprint(tmp_path)}) == 3


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch, name):
    import builtins
    import io

    def deny(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(builtins, "open", deny)
    monkeypatch.setattr(io, "open", deny)
    with pytest.raises(UserError, match=name):
        list(read_path(tmp_path / name))
