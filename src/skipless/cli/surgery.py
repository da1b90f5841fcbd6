"""The subcommands that change models which others trained: `patch`."""

from __future__ import annotations

from typing import Annotated, Literal

from skipless.cli.arguments import AsJson, Positional, as_options, new_folder, option
from skipless.cli.terminal import print_json

Model = Annotated[
    Positional[str], option("MODEL", help="a Hugging Face folder, or a name of `models list`")
]
NewFolder = Annotated[
    str | None, option("DIR", default="", help="folder to write, missing or empty (required)")
]


def patch(
    model: Model,
    out: NewFolder = None,
    connection: Annotated[str, option("KIND")] = "rezero",
    sites: Annotated[
        tuple[Literal["attention", "cross_attention", "mlp"], ...],
        option("{attention,cross_attention,mlp} [...]", default="all"),
    ] = (),
    layers: Annotated[tuple[int, ...], option("N [N ...]", default="all")] = (),
    stacks: Annotated[tuple[str, ...], option("STACK [STACK ...]", default="all")] = (),
    json: AsJson = False,
) -> None:
    """Put other skip connections into a Hugging Face model and save it.

    The folder is read by `skipless.surgery.load` (docs/surgery.md).

    For example: skipless patch smollm2-135m --connection rezero --sites mlp --out runs/patched

    Args:
        connection: rezero, layerscale, interpolate, learned, gated, universal, anneal, residual
            (all start as the plain skip and change nothing yet), none or sphere (which do).
        sites: sublayers whose skip is replaced.
        layers: their numbers, negative ones from the end.
        stacks: part of the name of a stack, such as encoder or vision, where there are more.
    """
    path = new_folder(out)
    from skipless.surgery.folders import patch_folder

    with as_options({"stacks=": "--stacks", "connection kind": "--connection"}):
        done = patch_folder(model, path, connection, sites=sites, layers=layers, stacks=stacks)
    if json:
        print_json({
            "path": str(done.path), "model": done.model, "num_parameters": done.num_parameters,
            "difference": done.difference, "largest": done.largest,
            "places": [dict(zip(("layer", "site", "connection"), row, strict=True))
                       for row in done.places],
        })  # fmt: skip
        return
    count = len(done.places)
    what = "skip removed" if connection == "none" else "connection"
    if count != 1:
        what = "skips removed" if connection == "none" else "connections"
    print(f"{done.model}: {count} {what}, {done.num_parameters:,} new parameters")
    by_layer: dict[str, list[str]] = {}
    for layer, site, _ in done.places:
        by_layer.setdefault(layer, []).append(site)
    for layer, found in by_layer.items():
        print(f"  {layer}  {', '.join(found)} -> {connection}")
    if done.difference == 0:
        print("outputs on a random sample: unchanged, bit for bit")
    else:
        share = done.difference / done.largest if done.largest else float("inf")
        print(f"outputs on a random sample: changed by up to {done.difference:.4g}, "
              f"{share:.2%} of the largest")  # fmt: skip
    if connection == "none":
        print("no weight was trained to make up for it; `skipless convert` removes skips and does")
    print(f"{done.path}  (skipless.surgery.load reads it)")
