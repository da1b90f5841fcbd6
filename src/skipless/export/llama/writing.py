"""`export_gguf`: a plain decoder as a GGUF file, read back three ways before it gets its name.

Our own reader and the `gguf` package's find the tensors that were to be written, bit for bit; the
model that transformers builds of the file computes the same logits. transformers reads the
architecture llama; for arcee, which it does not, its class gets what our reader read.
"""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipless.errors import UserError, check_choice
from skipless.export.llama.plain import Plain, open_plain
from skipless.export.llama.tensors import (
    Stored,
    check_scheme,
    halves,
    own_name,
    stored_tensors,
    turning_heads,
)
from skipless.export.llama.vocabulary import Vocabulary, read_vocabulary
from skipless.export.places import free_file, written_file
from skipless.packages import need
from skipless.pretrained.gguf import read_gguf
from skipless.quant import Scheme, quantization, quantize
from skipless.surgery.slimming.folding import difference, sample_inputs

LIMIT = 1e-5
"""Largest difference of a logit to the model with the weights that the file holds, as a share of
the largest: sums in another order."""
DTYPES = ("f32", "f16")
SHARES = {"F32": 0.0, "F16": 2**-11, "Q8_0": 1 / 254}
"""How far a kind of tensor may be from what it was made of (of Q8_0: from the codes)."""
_FILE_TYPES = {"f32": 0, "f16": 1, "q8": 7}
_ARCHITECTURES = {("LlamaForCausalLM", "silu"): "llama", ("ArceeForCausalLM", "relu2"): "arcee"}


@dataclass(frozen=True, kw_only=True)
class WrittenGguf:
    """What `export_gguf` wrote."""

    path: Path
    architecture: str
    """llama or arcee."""
    kinds: dict[str, int]
    """How many tensors of each kind."""
    difference: float
    """Largest |difference of a logit| / largest |logit| of what was read back, to the model before
    its weights were rounded."""
    to_rounded: float
    """The same to the model whose weights are rounded as was asked for: that of the scheme, or of
    half floats; `difference` where nothing is rounded."""
    reader: str
    """Who computed them."""
    num_bytes: int

    def describe(self) -> str:
        """A line of what it holds, a line of what was compared with what."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        share = f"{self.difference:.2g} of the largest one"
        lines = [f"{self.architecture}, {kinds}", f"read back by {self.reader}; largest difference "
                 f"of a logit to the model in full precision {share}"]  # fmt: skip
        if set(self.kinds) != {"F32"}:
            lines[1] += (
                f", which is the rounding of its weights: to the model with rounded weights "
                f"{self.to_rounded:.2g}"
            )
        return "\n".join(lines)


def export_gguf(
    model: str | Plain,
    out: str | Path,
    *,
    dtype: str = "f32",
    scheme: str | Scheme | None = None,
    norm_gains: bool = False,
) -> WrittenGguf:
    """Write a run, a patched or a Llama folder to the file `out`, its gains folded.

    `dtype` f32 or f16 is the kind of matrices; with `scheme` "W8Afp-w:g32" the linear layers of
    blocks are Q8_0. `norm_gains` folds those of norms too (F4). Raises UserError where a package is
    missing or `out` exists, for what GGUF does not know, and when what is read back differs;
    nothing is then written.
    """
    need("gguf", "transformers")
    check_choice("dtype", dtype, DTYPES)
    path = free_file(out, ".gguf")
    parsed = None if scheme is None else Scheme.parse(scheme)
    if parsed is not None:
        check_scheme(parsed)
    plain = open_plain(model, norm_gains=norm_gains) if isinstance(model, str) else model
    architecture = check_architecture(plain.model)
    if plain.tokenizer is None:
        raise UserError("the folder holds no tokenizer.json, without which no program can use a "
                        "GGUF file; save the tokenizer beside the model")  # fmt: skip
    vocabulary = read_vocabulary(plain.tokenizer, plain.model.config.vocab_size)
    work = plain.model
    if parsed is not None:
        work = copy.deepcopy(work)
        quantize(work, parsed)
    tensors = stored_tensors(work, dtype)
    with written_file(path) as temporary:
        _write(temporary, work, architecture, vocabulary, tensors, dtype)
        again, reader = _read_back(temporary, work, architecture, tensors)
        batch = sample_inputs(plain.model, None)
        found = difference(plain.model, again, batch)
        rounded = work if parsed is not None else _in_half(plain.model) if dtype == "f16" else None
        to_rounded = found if rounded is None else difference(rounded, again, batch)
        size = temporary.stat().st_size
    kinds: dict[str, int] = {}
    for tensor in tensors.values():
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
    return WrittenGguf(
        path=path, architecture=architecture, kinds=kinds, difference=found, to_rounded=to_rounded,
        reader=reader, num_bytes=size,
    )  # fmt: skip


def _in_half(model: Any) -> Any:
    """A copy whose matrices are rounded to half floats."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half())
    return copied


def check_architecture(model: Any) -> str:
    """llama or arcee. Raises UserError for any other decoder, saying what keeps it."""
    config, name = model.config, type(model).__name__
    found = _ARCHITECTURES.get((name, getattr(config, "hidden_act", "")))
    if found is None and name == "ArceeForCausalLM":
        raise UserError(
            f"GGUF has no MLP without a gate and with {config.hidden_act}: llama has a gate "
            "(model.hidden_act swiglu), arcee squared ReLU (relu2); train with one of them, or take"
            " --format llama, which stock transformers reads"
        )
    if found is None:
        norms = any(part in ("q_norm", "k_norm") for n, _ in model.named_modules()
                    for part in n.split("."))  # fmt: skip
        what = "norms queries and keys" if norms else "is another architecture"
        raise UserError(
            f"GGUF is written of LlamaForCausalLM and of what folds to it; {name} {what}: use "
            "llama.cpp's convert_hf_to_gguf.py on its folder"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    biased = [n for n, _ in model.named_parameters() if n.endswith(".bias")]
    if rope != "default" or biased:
        what = f"turns by the rule {rope!r}" if not biased else f"has the bias {biased[0]}"
        raise UserError(
            f"the model {what}, which is not written here; use llama.cpp's convert_hf_to_gguf.py "
            "on its folder"
        )
    return found


def _write(
    path: Path,
    model: Any,
    architecture: str,
    vocabulary: Vocabulary,
    tensors: dict[str, Stored],
    dtype: str,
) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("skipless")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(_FILE_TYPES["q8" if quantization(model) else dtype])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds["bos"])
    writer.add_add_eos_token(vocabulary.adds["eos"])
    for role, index in vocabulary.ids.items():
        getattr(writer, f"add_{role}_token_id")(index)
    kinds = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=kinds[tensor.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_back(
    path: Path, model: Any, architecture: str, tensors: dict[str, Stored]
) -> tuple[Any, str]:
    """The model of the file, after comparing it with what was to be written."""
    import gguf  # pyright: ignore[reportMissingImports]

    ours, theirs = read_gguf(path.read_bytes()), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        _check(path, tensor.name, np.array_equal(values, tensors[tensor.name].values))
    read = {name: ours.tensor(name) for name in ours.tensors}
    _check(
        path, "the list of tensors", set(read) == set(tensors) == {t.name for t in theirs.tensors}
    )
    for name, value in read.items():
        _check(path, name, np.array_equal(value, tensors[name].values))
    expected = _with_weights(model, read)
    kinds = {own_name(name): tensor.kind for name, tensor in tensors.items()}
    for name, parameter in model.named_parameters():
        own, got = parameter.detach().cpu().float(), expected.get_parameter(name).detach()
        allowed = SHARES[kinds[name]] * own.abs() + (2**-25 if kinds[name] == "F16" else 0)
        _check(path, name, bool(((got - own).abs() <= allowed).all()))
    if architecture != "llama":
        return expected, "our reader, in transformers' class"
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar
        again = type(model).from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    again.eval()
    found = difference(expected, again, sample_inputs(expected, None))
    _check(path, f"a logit by {found:.2g} of the largest", found < LIMIT)
    return again, "transformers"


def _with_weights(model: Any, read: dict[str, np.ndarray]) -> Any:
    """A model of the same class with the weights of the file, rows in transformers' order."""
    weights = {}
    for name, value in read.items():
        heads = turning_heads(name, model.config)
        value = halves(value, heads) if heads is not None else value
        weights[own_name(name)] = torch.from_numpy(np.ascontiguousarray(value))
    with torch.random.fork_rng(devices=[]):
        built = type(model)(model.config)
    found = built.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
    built.tie_weights()
    return built.eval()


def _check(path: Path, what: str, holds: bool) -> None:
    if not holds:
        raise UserError(
            f"{path} was read back with a difference: {what}; nothing was written, so try another "
            "version of gguf and transformers"
        )
