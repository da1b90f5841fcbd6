"""Text of tokens as they come: whole characters that join to the decoded text, no stop text."""

from __future__ import annotations

import random

import pytest

from skipless.data.tokenizer import train_tokenizer
from skipless.serving import Pieces, StopText

TEXT = "Größe: 5 €, 你好世界 🙂👩‍👩‍👧 — naïve café, عربى\n\n  indented\ttext"


def byte_level(tmp_path):
    """Ours: almost every character beyond ASCII is several tokens."""
    words = "plain words only, so that no other character is known " * 20
    tokenizer = train_tokenizer([words], 280, tmp_path / "tokenizer.json")
    return tokenizer.encode, tokenizer.decode


def byte_fallback(tmp_path):
    """As Llama's: unknown characters are byte tokens, decoded a run at a time; the first space of a
    text is dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefinprtvx:,5"]
    vocabulary = {name: number for number, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return lambda text: inner.encode(text).ids, inner.decode


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_pieces_are_whole_characters_and_join_to_the_text(kind, cut, tmp_path):
    encode, decode = kind(tmp_path)
    ids = encode(TEXT)
    assert decode(ids) == TEXT, "the tokenizer itself loses nothing"
    while "�" in decode(ids[:cut]):  # a prompt is whole
        cut += 1
    pieces = Pieces(decode, ids[:cut])
    found = [pieces.push(token) for token in ids[cut:]]
    assert not any("�" in piece for piece in found)
    assert "" in found, "something was held back, or the test tests nothing"
    assert pieces.finish() == ""
    assert decode(ids[:cut]) + "".join(found) == TEXT


def test_what_is_no_character_is_shown_in_the_end(tmp_path):
    encode, decode = byte_level(tmp_path)
    euro = encode("€")
    assert len(euro) == 3
    pieces = Pieces(decode)
    assert [pieces.push(token) for token in euro[:2]] == ["", ""]
    assert pieces.finish() == decode(euro[:2]) == "�"
    assert pieces.finish() == ""


def test_bytes_without_end_are_not_held_without_end(tmp_path):
    encode, decode = byte_level(tmp_path)
    middle = encode("€")[1]
    pieces = Pieces(decode)
    found = [pieces.push(middle) for _ in range(100)]
    shown = "".join(found) + pieces.finish()
    assert shown == decode([middle] * 100) and max(map(len, found)) <= 16


def test_special_tokens_show_nothing(tmp_path):
    encode, decode = byte_level(tmp_path)
    ids = [0, *encode("a"), 0, 0, *encode("b"), 0]
    pieces = Pieces(decode)
    assert "".join(pieces.push(token) for token in ids) + pieces.finish() == "ab"


@pytest.mark.parametrize("stops", [("END",), ("aab", "ba"), ("\n\n", "\nQ:"), ()])
def test_stop_texts_wherever_the_pieces_are_cut(stops):
    draw = random.Random(0)
    letters = sorted(set("".join(stops)) | set("xa"))
    for _ in range(300):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(12)))
        places = [p for stop in stops if (p := text.find(stop)) >= 0]
        filter_, shown, rest = StopText(stops), "", text
        while rest and not filter_.found:
            size = draw.randint(1, 4)
            piece, rest = rest[:size], rest[size:]
            shown += filter_.push(piece)
            assert not any(stop in shown for stop in stops)
        assert filter_.found == bool(places)
        # of two stop texts the first to be whole ends it, which may begin later
        expected = text[: min(places)] if places else text
        if filter_.found:
            assert shown.startswith(expected) and text.startswith(shown)
        else:
            assert shown + filter_.finish() == expected
