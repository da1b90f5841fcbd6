"""Shards on disk: sizes, headers, hashes, and every way they can be damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from skipless.data import Shard, write_shard
from skipless.errors import UserError


def make(tmp_path, vocab_size=300, **options):
    ids = list(range(256)) * 4
    return write_shard(tmp_path / "train", [ids[:500], [], ids[500:]], vocab_size=vocab_size,
                       **options)  # fmt: skip


def test_tokens_come_back(tmp_path):
    shard = make(tmp_path, num_bytes=2048)
    assert np.array_equal(shard.tokens, list(range(256)) * 4)
    assert shard.tokens.dtype == np.uint16
    assert shard.num_tokens == 1024 and shard.bytes_per_token == 2.0
    shard.verify()
    for path in ("train", "train.bin", "train.json"):
        assert Shard.open(tmp_path / path).header == shard.header


def test_large_vocabularies_take_four_bytes(tmp_path):
    shard = write_shard(tmp_path / "big", [[65_536, 3, 131_071]], vocab_size=131_072)
    assert shard.header.dtype == "uint32"
    assert shard.path.stat().st_size == 12
    assert shard.tokens.tolist() == [65_536, 3, 131_071]
    edge = write_shard(tmp_path / "edge", [[65_535]], vocab_size=65_536)
    assert edge.header.dtype == "uint16" and edge.tokens.tolist() == [65_535]


def test_truncated(tmp_path):
    shard = make(tmp_path)
    shard.path.write_bytes(shard.path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"truncated: 2,046 bytes .* 2,048; prepare the data again"):
        Shard.open(shard.path)


def test_too_long(tmp_path):
    shard = make(tmp_path)
    shard.path.write_bytes(shard.path.read_bytes() + b"xx")
    with pytest.raises(UserError, match="too long"):
        Shard.open(shard.path)


def test_one_flipped_bit_is_found_by_verify(tmp_path):
    shard = make(tmp_path)
    data = bytearray(shard.path.read_bytes())
    data[100] ^= 1
    shard.path.write_bytes(data)
    with pytest.raises(UserError, match=r"corrupt: .* prepare the data again"):
        Shard.open(shard.path).verify()


def test_a_hash_that_fits_wrong_ids_does_not_hide_them(tmp_path):
    shard = make(tmp_path)
    header = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps({**header, "vocab_size": 200}))
    with pytest.raises(UserError, match="token id 255, beyond its vocabulary of 200"):
        Shard.open(shard.path).verify()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_tokens": "many"}, "num_tokens"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"surprise": 1}, "surprise"),
        ({"dtype": []}, "dtype"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_bytes": "x"}, "num_bytes"),
        ({"num_bytes": 0}, "num_bytes"),
        ({"num_documents": None}, "num_documents"),
        ({"sha256": None}, "sha256"),
        ({"tokenizer_sha256": 3}, "tokenizer_sha256"),
        ({"eos_id": "0"}, "eos_id"),
    ],
)
def test_bad_headers(tmp_path, change, words):
    make(tmp_path)
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        Shard.open(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000,
                                  '{"format": "skipless-shard-1"}'])  # fmt: skip
def test_headers_that_are_none(tmp_path, text):
    make(tmp_path)
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(UserError, match=r"not a shard header .* prepare the data again"):
        Shard.open(tmp_path / "train")


@pytest.mark.parametrize("name", ["train.bin", "train.json"])
def test_missing_files(tmp_path, name):
    make(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        Shard.open(tmp_path / "train")


@pytest.mark.parametrize(("ids", "words"), [([5, 300], "id 300"), ([-1], "id -1"), ([], "no text")])
def test_impossible_tokens_leave_nothing_behind(tmp_path, ids, words):
    with pytest.raises(UserError, match=words):
        write_shard(tmp_path / "train", [ids], vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_a_smaller_vocabulary_is_refused(tmp_path):
    shard = make(tmp_path)
    shard.check_vocabulary(300)
    with pytest.raises(UserError, match="model.vocab_size"):
        shard.check_vocabulary(299)


def test_only_a_folder_of_the_cache_may_be_deleted_without_a_look(tmp_path):
    with pytest.raises(UserError) as error:
        Shard.open(tmp_path / "train")
    assert "delete" not in str(error.value) and "skipless data prepare" in str(error.value)
    ours = tmp_path / "prepared" / "kjv-123"
    with pytest.raises(UserError, match=f"delete the folder {ours}"):
        Shard.open(ours / "train")
