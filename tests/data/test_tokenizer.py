"""Byte-level BPE: no text is lost, nothing injects a separator, training is deterministic."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skipless.data import load_tokenizer, train_tokenizer
from skipless.data.tokenizer import EOS, chunks
from skipless.errors import UserError

TEXTS = ["the king and the queen and the knight\n\n" * 40, "Größe, naïve — 北京 🙂\n" * 20]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@given(st.text(max_size=300))
@example(EOS)
@example(f"a{EOS}b")
@example(" leading,  double \t tab\r\n\x00\n\n\n")
@example("\ufeff🙂\u0301é")
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(st.text(alphabet="ab \n", max_size=400), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_chunks_are_the_text(text, size):
    pieces = list(chunks(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_chunks_end_between_paragraphs():
    text = ("word " * 12 + "\n\n") * 10
    assert all(piece.endswith("\n\n") for piece in chunks(text, 150))


def test_long_texts_come_back_through_chunks(tokenizer):
    text = "".join(TEXTS) * 400
    ids = [i for piece in tokenizer.encode_chunks(text) for i in piece]
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic(tokenizer, tmp_path):
    again = train_tokenizer(iter(TEXTS), 300, tmp_path / "again.json")
    assert again.path.read_bytes() == tokenizer.path.read_bytes()


def test_vocabulary_and_separator(tokenizer):
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_id == 0
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("a")]) == "a"
    assert tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False) == EOS
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2  # it compresses


def test_loading_gives_the_same(tokenizer):
    for path in (tokenizer.path, tokenizer.path.parent):
        loaded = load_tokenizer(path)
        text = TEXTS[1] + EOS
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_a_small_text_gives_a_smaller_vocabulary(tmp_path):
    small = train_tokenizer(["ab ab"], 5000, tmp_path / "tokenizer.json")
    assert 257 <= small.vocab_size < 270


def test_bad_input(tokenizer, tmp_path):
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer(TEXTS, 256, tmp_path / "t.json")
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(UserError, match="token id 300 is outside the vocabulary"):
        tokenizer.decode([5, 300])
    for ids in ([[1, 2]], ["x"], 5, [float("nan")]):
        with pytest.raises(UserError, match="not one sequence of whole numbers"):
            tokenizer.decode(ids)
    for encode in (tokenizer.encode, lambda text: list(tokenizer.encode_chunks(text))):
        with pytest.raises(UserError, match="half of a surrogate pair"):
            encode("The \ud800 king")
        with pytest.raises(UserError, match="the byte 0xe9 at character 3, which is not UTF-8"):
            encode(os.fsdecode(b"caf\xe9"))
        with pytest.raises(UserError, match="int, not text"):
            encode(5)
    broken = tmp_path / "tokenizer.json"
    for text in ("", "{}", "not json"):
        broken.write_text(text)
        with pytest.raises(UserError, match="not a tokenizer.json"):
            load_tokenizer(broken)
