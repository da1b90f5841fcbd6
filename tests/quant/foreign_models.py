"""Tiny random models of transformers: (model, batch, who reads what and where it comes from).

The last maps the last parts of the names of layers that read one tensor to that of its source, for
the tensors that a test looks at; None where a family is not looked at so closely.
"""

import torch


def llama(ids):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32,
    ))  # fmt: skip
    return model, ids, {
        ("q_proj", "k_proj", "v_proj"): "input_layernorm", ("o_proj",): "v_proj",
        ("gate_proj", "up_proj"): "post_attention_layernorm", ("down_proj",): "up_proj",
    }  # fmt: skip


def gpt2(ids):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1,
        eos_token_id=2,
    ))  # fmt: skip
    return model, ids, {("c_attn",): "ln_1", ("c_proj",): None, ("c_fc",): "ln_2"}


def bert(ids):
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64,
    ))  # fmt: skip
    return model, ids, {("query", "key", "value"): None, ("dense",): None}


def vit(ids):
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=8, patch_size=4,
    ))  # fmt: skip
    return model, {"pixel_values": torch.randn(2, 3, 8, 8)}, None


def clip(ids):
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(
        text_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                     "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16,
                     "bos_token_id": 1, "eos_token_id": 2},
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                       "num_attention_heads": 4, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    ))  # fmt: skip
    return model, {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": ids}, {
        ("q_proj", "k_proj", "v_proj"): "layer_norm1", ("out_proj",): "v_proj",
        ("fc1",): "layer_norm2", ("fc2",): None,
    }  # fmt: skip


def whisper(ids):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64,
        max_source_positions=20, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ))  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    return model, batch, {
        ("q_proj", "k_proj", "v_proj"): "self_attn_layer_norm", ("out_proj",): "v_proj",
        ("fc1",): "final_layer_norm", ("fc2",): None,
    }  # fmt: skip


FAMILIES = [llama, gpt2, bert, vit, clip, whisper]
