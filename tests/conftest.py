"""Shared by tests across rooms: one tiny trained and measured run, and one thread for torch."""

import shutil
from pathlib import Path

import pytest

TINY = {
    "data.held_out_fraction": "0.1",
    "data.tokenizer": "bpe",
    "model.vocab_size": "300",
    "model.hidden_size": "32",
    "model.num_hidden_layers": "2",
    "model.num_attention_heads": "2",
    "model.num_key_value_heads": "none",
    "model.intermediate_size": "none",
    "model.max_position_embeddings": "32",
    "train.num_tokens": "512",
    "train.batch_size": "4",
    "train.micro_batch_size": "none",
    "train.sequence_length": "16",
    "train.warmup_steps": "2",
    "train.eval_every": "4",
    "train.eval_tokens": "128",
    "train.checkpoint_every": "4",
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.compile": "false",
    "train.num_threads": "1",
    "probe.every": "4",
    "probe.num_tokens": "64",
    "probe.final_tokens": "64",
    "evaluate.schemes": "W8A8,W4A4",
    "evaluate.num_tokens": "256",
    "evaluate.quantize_tokens": "none",
    "evaluate.sample_tokens": "4",
}
"""Overrides that make any recipe a matter of two seconds: 8 steps of 4 x 16 tokens."""


def _text() -> str:
    """40 short documents in which words follow each other in a fixed pattern."""
    text = "the king said lord my come go of and to with from not be thou art speak no more"
    words = text.split()
    documents = []
    for start in range(40):
        row, place = [], start
        for step in range(120):
            place = (place * 3 + step % 5) % len(words)
            row.append(words[place])
        documents.append(" ".join(row))
    return "\n\n".join(documents) + "\n"


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # Imported when the first test runs, so that `pytest --collect-only` stays quick.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A small text of our own; its prepared form is cached beside it."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(_text())
    return path


@pytest.fixture
def cache(text_file, monkeypatch) -> Path:
    """Prepared data goes beside `text_file` instead of the user's cache."""
    monkeypatch.setenv("SKIPLESS_CACHE", str(text_file.parent / "cache"))
    return text_file.parent / "cache"


@pytest.fixture(scope="session")
def tiny_settings(text_file) -> dict[str, str]:
    """Overrides that shrink any recipe to two seconds on `text_file`."""
    return {"data.sources": str(text_file), **TINY}


@pytest.fixture(scope="session")
def tiny_config(tiny_settings):
    """demo-fast-rf-kl, shrunk."""
    from skipless import recipes
    from skipless.jsonable import override

    return override(recipes.get("demo-fast-rf-kl"), tiny_settings)


@pytest.fixture(scope="session")
def tiny_run(tiny_config, text_file, tmp_path_factory) -> Path:
    """A run directory of `tiny_config`, trained and measured once; copy it before changing it."""
    from skipless.data import prepare
    from skipless.measure import measure_all
    from skipless.train import load_run, train

    data = prepare(tiny_config.data, 300, cache_dir=text_file.parent / "cache")
    path = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny_config, path, data=data)
    measure_all(load_run(path))
    return path


@pytest.fixture
def copy_run(tiny_run):
    """`copy_run(path)`: a copy of the tiny run there, parents made."""

    def copy(path: Path) -> Path:
        return shutil.copytree(tiny_run, path)

    return copy
