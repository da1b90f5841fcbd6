"""Tiny random Hugging Face models of every family, made from configs only."""

from types import SimpleNamespace

import pytest

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GQA = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}  # fmt: skip
WHISPER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
    "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

FAMILIES = {
    "llama": ("Llama", "ForCausalLM", GQA),
    "mistral": ("Mistral", "ForCausalLM", GQA),
    "qwen2": ("Qwen2", "ForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", "ForCausalLM", GQA),
    "smollm3": ("SmolLM3", "ForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "phi3": ("Phi3", "ForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "mixtral": ("Mixtral", "ForCausalLM", {**GQA, "num_local_experts": 2}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "bert": (
        "Bert",
        "ForMaskedLM",
        {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "vit": ("ViT", "ForImageClassification", IMAGE),
    "clip": ("CLIP", "Model", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8}),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER),
}
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "gpt2")


def build(name: str, **settings):
    """A model of the family in eval mode, its weights large enough for every branch to matter."""
    import torch
    import transformers

    prefix, suffix, config = FAMILIES[name]
    config_class = getattr(transformers, prefix + "Config")
    torch.manual_seed(0)
    model = getattr(transformers, prefix + suffix)(config_class(**{**config, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.eval()


def inputs(name: str) -> dict:
    """One batch that the family's forward takes."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (2, 6), generator=generator)
    image = torch.randn(2, 3, 8, 8, generator=generator)
    if name == "vit":
        return {"pixel_values": image}
    if name == "clip":
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": image}
    if name == "whisper":
        sound = torch.randn(2, 4, 16, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids}
    return {"input_ids": ids}


def logits(model, batch):
    """What the model is for: logits, or CLIP's similarities; inside a graph if there is one."""
    out = model(**batch)
    return out.logits_per_image if "logits_per_image" in out else out.logits


@pytest.fixture(scope="session")
def tiny():
    """`tiny.build(name)`, `tiny.inputs(name)`, `tiny.logits(model, batch)`."""
    pytest.importorskip("transformers")
    return SimpleNamespace(build=build, inputs=inputs, logits=logits)


@pytest.fixture(scope="session")
def trained(tiny):
    """`trained(family)`: a tiny decoder that has learned the sequences a little."""
    import torch

    from .sequences import batches

    states = {}

    def build(family):
        model = tiny.build(family)
        if family not in states:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(60):
                ids = batches(first=4 * step, count=1)[0]
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            states[family] = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(states[family])
        return model

    return build
