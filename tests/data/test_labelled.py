"""Labelled passages: whole documents held out, labels in equal shares, batches by seed and step."""

import numpy as np
import pytest
import torch

from skipless.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from skipless.data import Loader, open_batches, open_loader, prepare
from skipless.data.labelled import PassageLoader, Passages
from skipless.errors import UserError

LENGTH = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources whose documents use their own letters; source b is three times as long. Names
    hold U+2028, a separator of lines for Python and none in JSON."""
    root = tmp_path_factory.mktemp("two")
    for name, letters, count in (("a", "abcd", 6), ("b", "wxyz", 18)):
        folder = root / name
        folder.mkdir()
        for number in range(count):
            text = "".join(letters[(i * (number + 2) + number) % 4] for i in range(300))
            (folder / f"a\u2028{number}.txt").write_text(text)
    config = DataConfig(sources=(str(root / "a"), str(root / "b")), held_out_fraction=0.2)
    return prepare(config, 260, cache_dir=root / "cache"), config


def settings(config, **model):
    model = ModelConfig(hidden_size=8, num_attention_heads=2, vocab_size=260, **model)
    return RunConfig(
        model=model, data=config, train=TrainConfig(sequence_length=LENGTH, batch_size=6)
    )


def source_of(data, row):
    from skipless.data import load_tokenizer

    text = load_tokenizer(data.tokenizer_path).decode(row.tolist())
    return {frozenset("abcd"): 0, frozenset("wxyz"): 1}[
        frozenset("abcd") if set(text) <= set("abcd") else frozenset("wxyz")
    ]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_labels_are_the_sources(data, split):
    prepared, config = data
    batches = open_batches(settings(config, num_labels=2), prepared, split, 5, 320)
    labels = torch.cat([labels for _, labels in batches])
    rows = torch.cat([ids for ids, _ in batches])
    assert rows.dtype == labels.dtype == torch.int64 and rows.shape == (len(labels), LENGTH)
    assert [source_of(prepared, row) for row in rows] == labels.tolist()
    assert labels.bincount().tolist() == [20, 20]  # 320 tokens of 8, as many of each


def test_a_passage_never_leaves_its_document(data):
    prepared, _ = data
    passages = Passages(prepared, "train", LENGTH)
    eos = prepared.train.header.eos_id
    for label, starts in enumerate(passages.starts):
        ids, _ = passages.read(np.full(len(starts), label), np.arange(len(starts)))
        assert not (ids == eos).any()
        assert len(set(starts.tolist())) == len(starts)
    assert len(passages.starts[1]) > len(passages.starts[0])


def test_more_tokens_than_there_are_give_all_of_the_scarcest_label(data):
    prepared, config = data
    passages = Passages(prepared, "held_out", LENGTH)
    batches = open_batches(settings(config, num_labels=2), prepared, "held_out", 7, 10**6)
    labels = torch.cat([labels for _, labels in batches])
    assert labels.bincount().tolist() == [min(map(len, passages.starts))] * 2


def test_batches_depend_on_seed_and_step_and_visit_all(data):
    prepared, config = data
    loader = open_loader(settings(config, num_labels=2), prepared)
    assert isinstance(loader, PassageLoader)
    first = loader.batch(3)
    loader.batch(0)
    assert all(torch.equal(a, b) for a, b in zip(first, loader.batch(3), strict=True))
    other = PassageLoader(loader.passages, 6, seed=1).batch(3)
    assert not torch.equal(first[0], other[0])
    rows = [loader.batch(step) for step in range(-(-2 * len(loader.passages.starts[0]) // 6))]
    ids = torch.cat([i for i, _ in rows])[torch.cat([y for _, y in rows]) == 0]
    starts = loader.passages.starts[0]
    every = loader.passages.read(np.zeros(len(starts), np.int64), np.arange(len(starts)))[0]
    seen = sorted(map(tuple, ids[: len(starts)].tolist()))
    assert seen == sorted(map(tuple, every.tolist()))  # an epoch: each passage once


def test_ranks_take_slices_of_the_global_batch(data):
    prepared, _ = data
    passages = Passages(prepared, "train", LENGTH)
    whole = PassageLoader(passages, 6).batch(2)
    parts = [PassageLoader(passages, 6, rank=r, world_size=3).batch(2) for r in range(3)]
    for place in (0, 1):
        assert torch.equal(torch.cat([p[place] for p in parts]), whole[place])


def test_a_language_model_gets_the_next_tokens(data):
    prepared, config = data
    assert isinstance(open_loader(settings(config), prepared), Loader)
    ids, labels = open_batches(settings(config), prepared, "held_out", 4, 64)[0]
    assert labels.shape == ids.shape and torch.equal(labels[:, :-1], ids[:, 1:])


def test_bad_settings_say_so(data):
    prepared, config = data
    with pytest.raises(UserError, match="num_labels is 3 and there are 2 sources"):
        open_loader(settings(config, num_labels=3), prepared)
    with pytest.raises(UserError, match=r"has no train document of 10000 tokens"):
        Passages(prepared, "train", 10_000)
    with pytest.raises(UserError, match="cannot be shared evenly"):
        PassageLoader(Passages(prepared, "train", LENGTH), 5, world_size=2)
    with pytest.raises(UserError, match="it counts from 0"):
        PassageLoader(Passages(prepared, "train", LENGTH), 4).batch(-1)


def test_separators_and_documents_that_do_not_agree(data, tmp_path):
    import shutil

    from skipless.data import PreparedData

    broken = tmp_path / "prepared" / "copy"
    shutil.copytree(data[0].directory, broken)
    _, _, rest = (broken / "documents.jsonl").read_bytes().partition(b"\n")
    (broken / "documents.jsonl").write_bytes(rest)
    with pytest.raises(UserError, match="separators and documents.jsonl names"):
        for split in ("train", "held_out"):
            Passages(PreparedData.open(broken), split, LENGTH)
