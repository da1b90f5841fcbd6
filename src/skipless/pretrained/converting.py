"""Archives of named models to Hugging Face folders: config, fp32 weights, tokenizer.

Only numpy, safetensors and tokenizers are needed, not transformers. Settings that the packaged
formats leave out (the models' own configs on the hub hold them) are written here. Read by
`catalog.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from skipless.data.archives import members
from skipless.errors import UserError
from skipless.pretrained.ctranslate2 import read_ctranslate2
from skipless.pretrained.gguf import read_gguf

__all__ = ["bert_folder", "smollm_folder", "whisper_folder"]


def smollm_folder(archive: Path, folder: Path) -> None:
    """SmolLM2 out of a GGUF file. llama.cpp turns neighbouring pairs where transformers turns the
    halves of a head, so the rows of q and k go back to their places."""
    file = read_gguf(_only(archive, r".*\.gguf"))
    about = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads, groups = about["attention.head_count"], about["attention.head_count_kv"]
    ids = {
        f"{token}_token_id": about[f"tokenizer.ggml.{name}_token_id"]
        for token, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": about["embedding_length"], "num_hidden_layers": about["block_count"],
        "intermediate_size": about["feed_forward_length"], "vocab_size": about["vocab_size"],
        "num_attention_heads": heads, "num_key_value_heads": groups,
        "max_position_embeddings": about["context_length"], "hidden_act": "silu",
        "rms_norm_eps": float(f"{about['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": about["rope.freq_base"], "tie_word_embeddings": True,
        "initializer_range": 1 / 24,
        **ids,
    }  # fmt: skip
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for name in file.tensors:
        *block, kind, _ = name.split(".")  # "blk.0.attn_q.weight", "token_embd.weight"
        value = file.tensor(name)
        if kind in ("attn_q", "attn_k"):
            value = _halves(value, heads if kind == "attn_q" else groups)
        place = f"layers.{block[1]}." if block else ""
        weights[f"model.{place}{names[kind]}.weight"] = value
    _write_weights(folder, weights)
    _write_json(folder, "config.json", config)
    _write_json(folder, "generation_config.json", ids)
    _byte_level_tokenizer(folder, file.metadata)


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _byte_level_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """SmolLM's: GPT-2's byte-level BPE after every digit was split off."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    about = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    if (about["model"], about["pre"]) != ("gpt2", "smollm"):
        raise UserError(f"the tokenizer is {about['model']}/{about['pre']}; gpt2/smollm is read")
    tokens = about["tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in about["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = 3
    special = [t for t, kind in zip(tokens, about["token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    _write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        **{f"{token}_token": tokens[about[f"{name}_token_id"]] for token, name in names},
    })  # fmt: skip


def bert_folder(archive: Path, folder: Path) -> None:
    """MiniLM comes as a Hugging Face folder, which is copied."""
    wanted = r".*/(config|tokenizer|tokenizer_config|special_tokens_map)\.json|.*/vocab\.txt"
    for name, content in members(archive, wanted):
        if "/1_Pooling/" not in name:
            (folder / Path(name).name).write_bytes(content)
    from safetensors.numpy import load

    # its position ids are a buffer that transformers makes anew
    weights = load(_only(archive, r".*/model\.safetensors"))
    _write_weights(folder, {k: v for k, v in weights.items() if v.dtype.kind == "f"})


WHISPER_TINY_EN = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
    "dtype": "float32", "vocab_size": 51864, "num_mel_bins": 80, "d_model": 384,
    "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
    "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
    "max_source_positions": 1500, "max_target_positions": 448, "activation_function": "gelu",
    "scale_embedding": False, "tie_word_embeddings": True, "decoder_start_token_id": 50257,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256,
}  # fmt: skip


def whisper_folder(archive: Path, folder: Path) -> None:
    """Whisper tiny.en out of CTranslate2's format, with what its generation leaves out."""
    spec, variables = read_ctranslate2(_only(archive, r".*/model\.bin"))
    if spec != "WhisperSpec":
        raise UserError(f"model.bin holds a {spec}; expected a WhisperSpec")
    weights: dict[str, np.ndarray] = {}
    for name, value in variables.items():
        if value.ndim:  # scalars are settings
            weights |= _whisper_weights(name, value.astype("f4"))
    _write_weights(folder, weights)
    _write_json(folder, "config.json", WHISPER_TINY_EN)
    settings = json.loads(_only(archive, r".*/model/config\.json"))
    _write_json(folder, "generation_config.json", {
        **{f"{t}_token_id": 50256 for t in ("bos", "eos", "pad")}, "decoder_start_token_id": 50257,
        "is_multilingual": False, "max_length": 448, "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": 50362, "prev_sot_token_id": 50360, "return_timestamps": False,
        "alignment_heads": settings["alignment_heads"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
    })  # fmt: skip
    _write_json(folder, "preprocessor_config.json", {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30,
        "n_fft": 400, "padding_value": 0.0, "return_attention_mask": False,
    })  # fmt: skip
    (folder / "tokenizer.json").write_bytes(_only(archive, r".*/model/tokenizer\.json"))
    end = "<|endoftext|>"
    _write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "WhisperTokenizer", "model_max_length": 1024,
        **{f"{token}_token": end for token in ("bos", "eos", "unk", "pad")},
    })  # fmt: skip


def _whisper_weights(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """One CTranslate2 variable under transformers' names. Projections of one input are stacked
    there: q, k, v of self-attention, k and v of cross-attention. The bias of k, zero, has no place
    here."""
    parts = name.split("/")
    side, kind = parts[0], {"gamma": "weight", "beta": "bias"}.get(parts[-1], parts[-1])
    whole = {
        "embeddings": "embed_tokens", "position_encodings": "embed_positions",
        "layer_norm": "layer_norm", "conv1": "conv1", "conv2": "conv2",
    }  # fmt: skip
    if parts[1] in whole:
        kind = "weight" if kind == "encodings" else kind
        return {f"model.{side}.{whole[parts[1]]}.{kind}": value}
    layer = f"model.{side}.layers.{parts[1].removeprefix('layer_')}"
    block, part = parts[2], parts[3]
    own = {"self_attention": "self_attn", "attention": "encoder_attn"}.get(block)
    if own is None:  # ffn
        return {
            f"{layer}.{{}}.{kind}".format(
                {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[part]
            ): value
        }
    if part == "layer_norm":
        return {f"{layer}.{own}_layer_norm.{kind}": value}
    projections = {
        ("self_attn", "linear_0"): "qkv", ("self_attn", "linear_1"): "o",
        ("encoder_attn", "linear_0"): "q", ("encoder_attn", "linear_1"): "kv",
        ("encoder_attn", "linear_2"): "o",
    }[own, part]  # fmt: skip
    if projections == "o":
        return {f"{layer}.{own}.out_proj.{kind}": value}
    pieces = zip(projections, np.split(value, len(projections)), strict=True)
    return {
        f"{layer}.{own}.{letter}_proj.{kind}": np.ascontiguousarray(piece)
        for letter, piece in pieces
        if (letter, kind) != ("k", "bias")
    }


def _only(archive: Path, pattern: str) -> bytes:
    found = list(members(archive, pattern))
    if len(found) != 1:
        raise UserError(f"{archive} holds {len(found)} files like {pattern}; one was expected")
    return found[0][1]


def _write_weights(folder: Path, weights: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    plain = {name: np.ascontiguousarray(value, "f4") for name, value in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(value, indent=2) + "\n")
