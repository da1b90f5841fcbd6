"""The subcommand that saves a quantised model: `export`."""

from __future__ import annotations

from typing import Annotated, Literal

from skipless.cli.arguments import AsJson, Switch, new_folder, option, whole_number
from skipless.cli.slimming import Model
from skipless.cli.surgery import NewFolder
from skipless.cli.terminal import print_json


def export(
    model: Model,
    out: NewFolder = None,
    scheme: Annotated[str, option("SCHEME")] = "W8A8",
    scope: Annotated[Literal["linear", "block", "all"], option("{linear,block,all}")] = "linear",
    method: Annotated[str, option("METHOD")] = "rtn",
    override: Annotated[tuple[str, ...], option("PATTERN=SCHEME [...]", default="")] = (),
    include_head: Switch = False,
    layout: Annotated[
        Literal["skipless", "compressed-tensors"], option("{skipless,compressed-tensors}")
    ] = "skipless",
    text: Annotated[tuple[str, ...], option("TEXT [TEXT ...]", default="the run's own")] = (),
    num_tokens: Annotated[str, option("TOKENS")] = "4096",
    json: AsJson = False,
) -> None:
    """Quantise a model and save its packed integers, scales and scheme.

    The folder is read by `skipless.export.load_quantized`, and by transformers' from_pretrained
    after `import skipless.hf` (docs/integer.md).

    For example: skipless export runs/mine --scheme W4A8-w:channel --out packed

    Args:
        scheme: such as W8A8 or W4A8-w:channel-a:token (docs/quantise.md).
        scope: linear (inputs of linear layers), block (also sublayer outputs and the stream), all.
        method: how codes are chosen: rtn, gptq and others (docs/quantise.md).
        override: modules set apart, by name: layers.0.mlp.*=W8A8, or =fp for full precision.
        include_head: quantise embedding and head too.
        layout: compressed-tensors is for other programs that read that package's folders.
        text: what static ranges and methods look at: named texts, files or folders.
        num_tokens: of it.
    """
    path = new_folder(out)
    tokens = whole_number("--num-tokens", num_tokens)
    assert tokens is not None, "it has a default"
    from skipless.export import export_folder

    done = export_folder(
        model, path, scheme, scope=scope, method=method, overrides=override,
        include_head=include_head, layout=layout, text=text, num_tokens=tokens,
    )  # fmt: skip
    if json:
        print_json({
            "path": str(done.path), "description": done.description, "num_bytes": done.num_bytes,
            "full_bytes": done.full_bytes,
        })  # fmt: skip
        return
    print(done.description)
    share = done.num_bytes / done.full_bytes
    print(f"{done.num_bytes / 1e6:,.1f} MB, {share:.0%} of the {done.full_bytes / 1e6:,.1f} before")
    reader = "skipless.export.load_quantized" if layout == "skipless" else "compressed-tensors"
    print(f"{done.path}  ({reader} reads it)")
