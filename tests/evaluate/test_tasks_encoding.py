"""Where a request is cut into context and continuation, and what a long one loses."""

import pytest

from skipless.errors import UserError
from skipless.evaluate.tasks import Coder


class Words:
    """A tokenizer that keeps a space with the word after it, as byte-pair ones do."""

    def __init__(self, eos_id=0):
        self.eos_id = eos_id
        self.words = ["<eos>"]

    def encode(self, text):
        pieces, piece = [], ""
        for character in text:
            if character == " " and piece.strip():
                pieces.append(piece)
                piece = ""
            piece += character
        pieces += [piece] if piece else []
        for piece in pieces:
            if piece not in self.words:
                self.words.append(piece)
        return [self.words.index(piece) for piece in pieces]

    def text(self, ids):
        return [self.words[i] for i in ids]


def pieces(context, continuation, **options):
    words = Words(**options)
    context_ids, continuation_ids = Coder(words, 100).split(context, continuation)
    return words.text(context_ids), words.text(continuation_ids)


def test_spaces_at_the_end_of_the_context_go_to_the_continuation():
    assert pieces("a cork ", "floats well") == (["a", " cork"], [" floats", " well"])
    assert pieces("a cork", " floats") == (["a", " cork"], [" floats"])


def test_the_two_are_encoded_together():
    # without a space the continuation runs into the context's last word: nothing is left of it
    assert pieces("a cor", "k floats") == (["a", " cor"], [" floats"])


def test_an_empty_context_is_the_token_that_ends_texts():
    assert pieces("", "cork") == (["<eos>"], ["cork"])
    assert pieces("  ", "cork") == (["<eos>"], ["  cork"])
    with pytest.raises(UserError, match="no token for the beginning or end"):
        Coder(Words(eos_id=None), 10).encode("", "cork")


def test_a_continuation_that_begins_with_that_token_gives_it_as_the_context():
    class Marked(Words):
        def encode(self, text):
            return [0, *super().encode(text)] if text.startswith("cork") else super().encode(text)

    words = Marked()
    context, continuation = Coder(words, 10).split("", "cork floats")
    assert (context, words.text(continuation)) == ([0], ["cork", " floats"])


def test_what_is_too_long_loses_its_left_side():
    words = Words()
    whole = words.encode("a b c d e f")
    # 6 tokens, the last of which is only asked for: 5 inputs
    assert Coder(words, 5).encode("a b c d", " e f").inputs == tuple(whole[:5])
    assert not Coder(words, 5).encode("a b c d", " e f").is_truncated
    cut = Coder(words, 3).encode("a b c d", " e f")
    assert cut.inputs == tuple(whole[2:5]) and cut.targets == tuple(whole[4:])
    assert cut.is_truncated
    assert Coder(words, 2).encode("a b c d", " e f").inputs == tuple(whole[3:5])
    assert Coder(words, 1).encode("a b c d", " e f") is None


def test_a_continuation_without_tokens_and_a_thing_that_is_no_tokenizer():
    with pytest.raises(UserError, match="has no tokens of its own"):
        Coder(Words(), 10).encode("a cork", "")
    with pytest.raises(UserError, match="the tokenizer is int"):
        Coder(3, 10)


@pytest.mark.parametrize("first", [True, False])
def test_special_tokens_of_a_transformers_tokenizer(tmp_path, first):
    """A tokenizer that puts a token before texts does so here, once; and bos comes before eos."""
    pytest.importorskip("transformers")
    from tasks_material import hf_tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = hf_tokenizer(tmp_path, bos_token="!")
    begin = tokenizer.bos_token_id
    if first:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="! $A <|endoftext|>", special_tokens=[("!", begin), ("<|endoftext|>", 0)]
        )
    coder = Coder(tokenizer, 100)
    context, continuation = coder.split("Ann had a pear", " and a cork")
    plain = tokenizer.encode("Ann had a pear and a cork", add_special_tokens=False)
    assert context + continuation == ([begin] if first else []) + plain
    assert tokenizer.decode(continuation) == " and a cork"
    assert coder.split("", "cork")[0] == [begin]
