"""A model to write with: found by name, quantised, on the fastest engine that fits.

    fused       our models on integers, some C++ calls a token (skipless.decoding)
    integers    linear layers on integers, the rest by torch (skipless.quant.integers.layers)
    simulated   rounded values in floating point
    full        as it is

Each that does not fit falls to the next, and `engine` says why. Read by the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skipless.diagnose.loading import Decoder, load_packed, load_subject
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.pretrained.quantised import is_compressed, is_packed
from skipless.quant import Scheme, integer_layers, quantization, quantize, to_integer
from skipless.quant.kvcache import PackedTensor
from skipless.serving.checking import check_foreign, check_ours, rounded_by_others
from skipless.serving.stepping import ForeignSteps, OwnSteps
from skipless.surgery.checking import check_finite


@dataclass(kw_only=True)
class Writer:
    """A causal language model with its tokenizer, ready for `write`."""

    name: str
    model: Any
    tokenizer: Any
    """Ours, or one of Hugging Face's."""
    limit: int | None
    """Tokens that the model sees; None where nothing says so."""
    ends: frozenset[int]
    """Tokens that end a text."""
    engine: str
    """What computes, in words."""
    kind: str
    """fused, integers, simulated or full."""
    kv_bits: int | None = None
    """Of a cache that is rounded beside the model; a scheme with -KV does so itself."""
    kv_granularity: str = "token"

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Raises UserError for one that the model cannot take."""
        if not prompt:
            raise UserError("the prompt is empty; give at least one character")
        own = _is_own(self.tokenizer)
        ids = self.tokenizer.encode(prompt) if own else _foreign_ids(self.tokenizer, prompt)
        if not ids:
            raise UserError(f"the prompt {prompt[:40]!r} has no token; give some text")
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(
                f"the prompt has {len(ids)} tokens and {self.name} sees {self.limit}; shorten it"
            )
        size = _vocabulary(self.model)
        if size is not None and max(ids) >= size:
            raise UserError(
                f"the prompt has token {max(ids)} and {self.name} has a vocabulary of {size}; the "
                "tokenizer beside it is another model's"
            )
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        if _is_own(self.tokenizer):
            return self.tokenizer.decode(ids)
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def steps(self) -> OwnSteps | ForeignSteps:
        """A fresh start, with an empty cache."""
        bits, granularity = self.kv_bits, self.kv_granularity
        if isinstance(self.model, Transformer):
            return OwnSteps(self.model, bits, granularity)
        if bits is None:
            return ForeignSteps(self.model, self.limit)
        from skipless.hf import QuantizedCache

        new_cache = partial(QuantizedCache, self.model.config, bits=bits, granularity=granularity)
        return ForeignSteps(self.model, self.limit, new_cache)


def open_writer(
    name: str,
    *,
    scheme: str | Scheme | None = None,
    scope: str = "linear",
    kv_bits: int | None = None,
    device: str = "auto",
    engine: str = "auto",
) -> Writer:
    """The model that `name` names, quantised by `scheme`: a run, one of its checkpoints, a folder
    of `skipless export`, a folder or name of Hugging Face's, a model of `skipless models list`.

    `kv_bits` rounds the cache alone, or beside a scheme without -KV. `device` "auto" is the CPU
    for a quantised model, whose integers run there, else an accelerator where there is one.
    `engine`: auto, or simulated. Raises UserError for what is no causal language model, has no
    tokenizer, is quantised already, or cannot be read.
    """
    parsed = None if scheme is None else Scheme.parse(scheme)
    if kv_bits is not None and not 2 <= kv_bits <= 16:
        raise UserError(f"--kv-bits is {kv_bits}; a whole number from 2 to 16 was expected")
    _device(device, quantised=parsed is not None)  # a name that is none, before a model is read
    if kv_bits is not None and parsed is not None:
        if parsed.kv_bits is not None:
            raise UserError(
                f"{parsed} says the cache's width already; leave out --kv-bits {kv_bits}"
            )
        parsed, kv_bits = replace(parsed, kv_bits=kv_bits), None
    if is_packed(Path(name)):
        writer = _open_packed(name, parsed)
        batches = None
    else:
        writer, batches = _open_plain(name, parsed)
    model = writer.model
    check_finite(model, name)
    is_ours = isinstance(model, Transformer)
    if is_ours:
        check_ours(name, model)
    else:
        check_foreign(name, model)
    if parsed is not None and not is_ours and parsed.kv_bits is not None:
        # keys and values of transformers' models are no sites: the cache rounds them
        kv_bits, granularity = parsed.kv_bits, parsed.activation_granularity
        parsed = replace(parsed, kv_bits=None)
        writer.kv_granularity = granularity
    writer.kv_bits = kv_bits
    place = _device(device, quantised=parsed is not None or quantization(model) is not None)
    if quantization(model) is None:
        if place.type == "cpu" and not is_compressed(Path(name)):
            model.float()  # half precision is far slower there
        model.to(place)
    if parsed is not None:
        quantize(model, parsed, scope, calibration=batches() if batches else None)
    writer.kind, writer.engine = _start(model, engine, place, name)
    if writer.kv_bits is not None:
        _check_cache(writer)
        writer.engine += f", cache of {writer.kv_bits}-bit integers"
    writer.engine += _stored(writer)
    return writer


def _open_plain(name: str, scheme: Scheme | None) -> tuple[Writer, Callable[[], list[Any]] | None]:
    """The model, and text for static ranges where some is wanted."""
    subject = load_subject(name)
    run = subject.run
    batches: Callable[[], list[Any]] | None = None
    if scheme is not None and scheme.needs_calibration:
        if run is None:
            raise UserError(
                f"{scheme} fixes activation ranges beforehand, on text; `skipless export {name} "
                f"--scheme {scheme} --text FILE --out FOLDER` does, then generate from FOLDER"
            )
        from skipless.measure import calibration_batches

        batches = partial(calibration_batches, run)
    tokenizer = subject.tokenizer if run is None else run.tokenizer
    writer = _writer(name, subject.model, tokenizer, subject.limit)
    if type(writer.model).__name__ == "SkiplessForCausalLM":  # transformers may not be installed
        from skipless.hf.converting import to_transformer

        writer.model = to_transformer(writer.model)  # which fused steps know
    return writer, batches


def _open_packed(name: str, scheme: Scheme | None) -> Writer:
    if scheme is not None:
        raise UserError(
            f"{name} holds integers already; leave out --scheme, or name the model it was made from"
        )
    subject = load_packed(name)
    tokenizer = subject.tokenizer
    if isinstance(tokenizer, Decoder):
        tokenizer = tokenizer.inner
    return _writer(name, subject.model, tokenizer, subject.limit)


def _writer(name: str, model: Any, tokenizer: Any, limit: int | None) -> Writer:
    if tokenizer is None:
        raise UserError(
            f"{name} has no tokenizer beside its weights that can be read, and a prompt needs one; "
            "put the tokenizer.json of its model there"
        )
    return Writer(
        name=name, model=model, tokenizer=tokenizer, limit=limit,
        ends=_ends(name, getattr(model, "generation_config", None), tokenizer), engine="",
        kind="full",
    )  # fmt: skip


def _ends(name: str, *sources: Any) -> frozenset[int]:
    """The tokens that end a text, of the first source that names some."""
    keys = ("eos_token_id", "eos_id")
    named = (getattr(source, key, None) for source in sources for key in keys)
    found = next((ends for ends in named if ends not in (None, [])), [])
    ends = found if isinstance(found, (list, tuple)) else [found]
    if not all(type(end) is int for end in ends):
        raise UserError(
            f"{name} names {found!r} for the token that ends a text (eos_token_id); a whole number "
            "or a list of them was expected"
        )
    return frozenset(ends)


def _start(model: Any, engine: str, place: torch.device, source: str) -> tuple[str, str]:
    """Put a quantised model on integers if it can; (kind, what computes in words)."""
    record = quantization(model)
    if record is None:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        if is_compressed(Path(source)):
            what = "weights and activations" if rounded_by_others(model) else "weights"
            return "simulated", f"{what} rounded by compressed-tensors ({dtype}) on {place.type}"
        return "full", f"full precision ({dtype}) on {place.type}"
    name = f"{record.scheme}" + ("" if record.scope == "linear" else f" in scope {record.scope}")
    if engine == "simulated":
        return "simulated", f"{name} simulated in floating point on {place.type}, as asked for"
    try:
        to_integer(model)
    except UserError as error:
        return "simulated", f"{name} simulated in floating point on {place.type}: {error}"
    engines = ", ".join(sorted(set(integer_layers(model).values())))
    if not isinstance(model, Transformer):
        return "integers", f"{name}, linear layers on integers ({engines})"
    from skipless.decoding import fuse

    try:
        fuse(model)
    except UserError as error:
        return "integers", f"{name}, linear layers on integers ({engines}); not fused: {error}"
    return "fused", f"{name} on integers ({engines}), fused: few C++ calls a token"


def _stored(writer: Writer) -> str:
    """What is said of a cache whose codes take more bits than they have."""
    record, bits, symmetric = quantization(writer.model), writer.kv_bits, True
    if bits is None and record is not None and writer.kind in ("fused", "integers"):
        bits, symmetric = record.scheme.kv_bits, record.scheme.symmetric
    if bits is None:
        return ""
    stored = PackedTensor(bits, symmetric=symmetric).stored_bits
    if stored == bits:
        return ""
    what = f", keys and values of {bits} bits" if writer.kv_bits is None else ""
    return f"{what}, each stored in {stored} bits"


def _check_cache(writer: Writer) -> None:
    """Raise UserError where nothing can be rounded beside the model, found out on one token."""
    record = quantization(writer.model)
    if record is not None and any(s.site.kind in ("key", "value") for s in record.activations):
        raise UserError(f"{writer.name} rounds its cache already; leave out --kv-bits")
    steps, why = writer.steps(), "a cache has nothing to keep"
    try:
        with torch.no_grad():
            steps.logits([0])
    except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:160]
    if not steps.num_bytes:
        raise UserError(
            f"{writer.name} keeps no keys and values that could be rounded ({why}); leave out "
            "--kv-bits, or -KV of the scheme"
        )


def _device(name: str, *, quantised: bool) -> torch.device:
    from skipless.train.distributed import choose_device

    try:
        return choose_device("cpu" if name == "auto" and quantised else name)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None


def _is_own(tokenizer: Any) -> bool:
    """Whether a tokenizer is ours: one of Hugging Face's may serve a model of ours."""
    return hasattr(tokenizer, "encode_chunks")


def _foreign_ids(tokenizer: Any, prompt: str) -> list[int]:
    from skipless.data.tokenizer import check_text

    check_text(prompt)
    return list(tokenizer(prompt, verbose=False)["input_ids"])


def _vocabulary(model: Any) -> int | None:
    """How many token ids the model's table holds."""
    if isinstance(model, Transformer):
        return model.config.vocab_size
    table = model.get_input_embeddings()
    return getattr(table, "num_embeddings", None)
