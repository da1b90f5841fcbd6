"""A tiny text, its shards, and a tiny run that every test of the room varies."""

import random

import pytest

from skipless.config import (
    DataConfig,
    ModelConfig,
    OptimizerRecipe,
    ProbeConfig,
    RunConfig,
    TrainConfig,
)
from skipless.data import prepare

TEXT = "the king said lord my come go of and to with from not be thou art speak no more"
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Shards of a text in which words follow each other with fixed odds, vocabulary 280."""
    folder = tmp_path_factory.mktemp("text")
    random.seed(1)
    lines = []
    for _ in range(40):
        place, words = 0, []
        for _ in range(150):
            place = (place * 3 + random.choice((1, 1, 1, 2))) % len(WORDS)
            words.append(WORDS[place])
        lines.append(" ".join(words))
    (folder / "text.txt").write_text("\n\n".join(lines))
    source = DataConfig(sources=(str(folder / "text.txt"),), held_out_fraction=0.1)
    return prepare(source, 280, cache_dir=folder / "cache")


@pytest.fixture(scope="session")
def tiny():
    """8 steps of 4 x 16 tokens; checkpoint every 3, held-out loss every 2, probes every 4."""
    return RunConfig(
        name="tiny",
        model=ModelConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=280,
            max_position_embeddings=16,
        ),
        optim=OptimizerRecipe(lr=1e-2, block_size=16, refresh_every=2),
        train=TrainConfig(
            num_tokens=8 * 64, batch_size=4, sequence_length=16, warmup_steps=2, eval_every=2,
            eval_tokens=128, checkpoint_every=3,
        ),
        probe=ProbeConfig(every=4, num_tokens=64, final_tokens=64),
    )  # fmt: skip
