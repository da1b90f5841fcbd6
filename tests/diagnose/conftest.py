"""Tiny models for the diagnosis: one with planted outliers, one saved with a tokenizer."""

import shutil

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Planted(nn.Module):
    """Token id 0 is a giant in `channel`; channel 11 is heavy on every token."""

    def __init__(self, width=32, vocabulary=50, giant=0.0, heavy=0.0, channel=5):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)
        with torch.no_grad():
            if heavy:
                self.embedding.weight[:, 11] = heavy
            if giant:
                self.embedding.weight[0, channel] = giant

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Words:
    def decode(self, ids):
        return f"<{ids[0]}>"


@pytest.fixture
def planted():
    return Planted


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def ids():
    """Every sequence begins with token 0, which comes nowhere else."""
    found = torch.randint(1, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    found[:, 0] = 0
    return found


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a tiny Llama with a byte-level tokenizer, and a text beside it."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=280, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the king said my lord come and go"] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The king said: <b>my lord</b>, come and go. " * 60)
    return folder


@pytest.fixture(scope="session")
def changed(saved, tmp_path_factory):
    """The saved Llama with a channel of one MLP blown up."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(saved / "model", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3] *= 100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
