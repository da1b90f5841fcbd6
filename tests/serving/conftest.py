"""A tiny Llama with a byte-level tokenizer beside it, as a folder."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, text_file):
    """A folder that AutoModelForCausalLM reads: two layers, 300 tokens, a context of 48."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from skipless.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=48, bos_token_id=None,
        eos_token_id=0, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    file = folder.parent / "made.json"
    train_tokenizer([text_file.read_text()], 300, file)
    PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    return folder
