"""The subcommand that writes models for other programs: `export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import AsJson, Switch, new_folder, option, whole_number
from skipless.cli.slimming import Model
from skipless.cli.terminal import print_json
from skipless.errors import UserError

NUM_TOKENS = 4096
PACKED = ("skipless", "compressed-tensors")
OPTIONS = {
    "scheme": (*PACKED, "onnx", "gguf"), "scope": (*PACKED, "onnx"), "method": (*PACKED, "onnx"),
    "override": (*PACKED, "onnx"), "include_head": (*PACKED, "onnx"), "cached": ("onnx",),
    "include_convolutions": PACKED,
    "dtype": ("gguf",), "norm_gains": ("llama", "gguf"), "text": (*PACKED, "onnx", "llama"),
    "num_tokens": (*PACKED, "onnx", "llama"), "remote_code": ("hf",),
}  # fmt: skip
"""Formats that read an option; any other refuses it."""
ROUNDING = ("scope", "method", "override", "include_head", "text")
"""Options that say more of a scheme."""


def export(
    model: Model,
    out: Annotated[
        str | None,
        option(
            "PATH", default="", help="what to write: a folder, or FILE.onnx, FILE.gguf (required)"
        ),
    ] = None,
    format: Annotated[
        Literal["skipless", "compressed-tensors", "hf", "onnx", "llama", "gguf"],
        option("{skipless,compressed-tensors,hf,onnx,llama,gguf}"),
    ] = "skipless",
    scheme: Annotated[
        str | None, option("SCHEME", default="W8A8; onnx and gguf: full precision")
    ] = None,
    scope: Annotated[Literal["linear", "block", "all"], option("{linear,block,all}")] = "linear",
    method: Annotated[str, option("METHOD")] = "rtn",
    override: Annotated[tuple[str, ...], option("PATTERN=SCHEME [...]", default="")] = (),
    include_head: Switch = False,
    include_convolutions: Switch = False,
    cached: Switch = False,
    dtype: Annotated[Literal["f32", "f16"], option("{f32,f16}")] = "f32",
    norm_gains: Switch = False,
    remote_code: Switch = False,
    text: Annotated[tuple[str, ...], option("TEXT [TEXT ...]", default="the run's own")] = (),
    num_tokens: Annotated[str | None, option("TOKENS", default="4096")] = None,
    json: AsJson = False,
) -> None:
    """Write a model for other programs, read it back and print the difference.

    skipless and compressed-tensors are folders of packed integers (docs/integer.md). hf is a run
    as it is for transformers, after `import skipless.hf` (docs/huggingface.md). onnx is our
    decoder for ONNX Runtime: FILE.onnx is one graph, a folder holds one with and one without past
    keys. llama and gguf fold gains and temperatures into a model with ordinary skips, for stock
    transformers and for llama.cpp (docs/export.md).

    For example: skipless export runs/mine --scheme W4A8-w:channel --out packed

    Args:
        scheme: such as W8A8, W4A8-w:channel-a:token (docs/quantise.md). onnx: W8A8-static,
            W8A12-static and others, as quantise/dequantise pairs. gguf: W8Afp-w:g32, its Q8_0.
        scope: linear (inputs of linear layers), block (also sublayer outputs and the stream), all.
        method: how codes are chosen: rtn, gptq and others (docs/quantise.md).
        override: modules set apart, by name: layers.0.mlp.*=W8A8, or =fp for full precision.
        include_head: quantise embedding and head too.
        include_convolutions: nn.Conv1d to 3d too, the front ends of models of images and sound.
        cached: of FILE.onnx: past keys and values are inputs and outputs.
        dtype: of gguf's matrices.
        norm_gains: llama and gguf: also multiply the gains of norms into the layers behind them.
        remote_code: hf: with our modules beside the weights, to load without skipless installed
            (trust_remote_code=True).
        text: what static ranges and methods look at: named texts, files or folders.
        num_tokens: of it.
    """
    given = {
        "scheme": scheme is not None, "scope": scope != "linear", "method": method != "rtn",
        "override": bool(override), "include_head": include_head, "cached": cached,
        "dtype": dtype != "f32", "norm_gains": norm_gains, "text": bool(text),
        "remote_code": remote_code, "include_convolutions": include_convolutions,
        "num_tokens": num_tokens is not None,
    }  # fmt: skip
    _check_options(format, {name for name, is_given in given.items() if is_given})
    tokens = whole_number("--num-tokens", num_tokens) or NUM_TOKENS
    path = _free(out, format)
    if cached and path.suffix != ".onnx":
        raise UserError("--cached is for FILE.onnx; a folder holds both graphs anyway")
    rounding = {
        "scope": scope, "method": method, "overrides": override, "include_head": include_head,
        "include_convolutions": include_convolutions, "text": text, "num_tokens": tokens,
    }  # fmt: skip
    writers: dict[str, Callable[[], tuple[list[str], dict[str, Any], str]]] = {
        "skipless": lambda: _packed(model, path, scheme or "W8A8", format, rounding),
        "compressed-tensors": lambda: _packed(model, path, scheme or "W8A8", format, rounding),
        "hf": lambda: _transformers(model, path, remote_code),
        "onnx": lambda: _onnx(model, path, scheme, cached, rounding),
        "llama": lambda: _llama(model, path, text, norm_gains, tokens),
        "gguf": lambda: _gguf(model, path, dtype, scheme, norm_gains),
    }
    lines, answer, note = writers[format]()
    if json:
        print_json({"path": str(path), "format": format, **answer})
        return
    for line in lines:
        print(line)
    print(f"{path}  ({note})")


def _check_options(format: str, given: set[str]) -> None:
    for name in sorted(given):
        flag = "--" + name.replace("_", "-")
        if format == "onnx" and name in ROUNDING and "scheme" not in given:
            raise UserError(
                f"{flag} rounds nothing in full precision; name a --scheme, such as W8A8-static"
            )
        if format not in OPTIONS[name]:
            raise UserError(
                f"{flag} is not for --format {format}, but for {', '.join(OPTIONS[name])}; leave "
                "it out"
            )


def _free(out: str | None, format: str) -> Path:
    """The path that --out names, before anything slow."""
    if out is not None and (format == "gguf" or (format == "onnx" and out.endswith(".onnx"))):
        from skipless.export.places import free_file

        return free_file(out, f".{format}")
    return new_folder(out)


def _packed(
    model: str, path: Path, scheme: str, layout: str, rounding: dict[str, Any]
) -> tuple[list[str], dict[str, Any], str]:
    from skipless.export import export_folder

    done = export_folder(model, path, scheme, layout=layout, **rounding)
    share = done.num_bytes / done.full_bytes
    what = "logit" if layout == "skipless" else "weight"
    lines = [
        done.description,
        f"{done.num_bytes / 1e6:,.1f} MB, {share:.0%} of the {done.full_bytes / 1e6:,.1f} before",
        f"read back: largest difference of a {what} to the quantised model {done.difference:.2g}",
    ]
    answer = {
        "description": done.description, "num_bytes": done.num_bytes,
        "full_bytes": done.full_bytes, "difference": done.difference,
    }  # fmt: skip
    from skipless.surgery.slimming.opening import holds_run
    from skipless.surgery.sources import find_folder

    is_run = holds_run(find_folder(model))
    reader = "transformers after `import skipless.hf`"
    if layout == "skipless":
        return lines, answer, f"skipless.export.load_quantized, or {reader}, reads it"
    reader = reader if is_run else "transformers"
    return lines, answer, f"{reader}, with the package compressed-tensors, reads it"


def _transformers(
    model: str, path: Path, remote_code: bool
) -> tuple[list[str], dict[str, Any], str]:
    from skipless.hf.exporting import export_model

    done = export_model(model, path, remote_code=remote_code)
    lines = [done.describe(), f"{done.num_bytes / 1e6:,.1f} MB"]
    answer = {
        "model": done.model, "difference": done.difference, "num_tokens": done.num_tokens,
        "num_bytes": done.num_bytes,
    }  # fmt: skip
    how = "with trust_remote_code=True" if remote_code else "after `import skipless.hf`"
    return lines, answer, f"transformers reads it {how}"


def _onnx(
    model: str, path: Path, scheme: str | None, cached: bool, rounding: dict[str, Any]
) -> tuple[list[str], dict[str, Any], str]:
    from skipless.export import export_onnx_of

    done = export_onnx_of(model, path, scheme, cached=cached, **rounding)
    lines = [done.describe(), f"{done.num_bytes / 1e6:,.1f} MB"]
    answer: dict[str, Any] = {
        "num_bytes": done.num_bytes, "max_length": done.max_length,
        "files": {name: vars(found) for name, found in done.files.items()},
    }  # fmt: skip
    if path.suffix == ".onnx" and (tokenizer := Path(model) / "tokenizer.json").is_file():
        lines.append(f"its tokenizer stays in {tokenizer}")
        answer["tokenizer"] = str(tokenizer)
    note = "ONNX Runtime runs it; skipless.export.open_session opens it there with safe settings"
    rounds = any(found.sqnr_file is not None for found in done.files.values())
    return lines, answer, note if rounds else note.removesuffix(" with safe settings")


def _llama(
    model: str, path: Path, text: tuple[str, ...], norm_gains: bool, tokens: int
) -> tuple[list[str], dict[str, Any], str]:
    from skipless.export import export_llama

    done = export_llama(model, path, text=text, norm_gains=norm_gains, num_tokens=tokens)
    lines = [f"{done.model}, {done.folded.describe()}"]
    if done.losses:
        lines.append(f"held-out loss on {done.num_held_out:,} tokens:")
    lines += [f"  {name:<14}  {before:.5f} -> {after:.5f}"
              for name, (before, after) in done.losses.items()]  # fmt: skip
    answer = {"model": done.model, "difference": done.folded.difference}
    return lines, answer, "stock transformers reads it"


def _gguf(
    model: str, path: Path, dtype: str, scheme: str | None, norm_gains: bool
) -> tuple[list[str], dict[str, Any], str]:
    from skipless.export import export_gguf

    done = export_gguf(model, path, dtype=dtype, scheme=scheme, norm_gains=norm_gains)
    lines = [done.describe(), f"{done.num_bytes / 1e6:,.1f} MB"]
    answer = {
        "architecture": done.architecture, "kinds": done.kinds, "difference": done.difference,
        "to_rounded": done.to_rounded, "num_bytes": done.num_bytes,
    }  # fmt: skip
    readers = "llama.cpp and transformers read" if done.architecture == "llama" else (
        "llama.cpp reads"
    )  # fmt: skip
    return lines, answer, f"{readers} it"
