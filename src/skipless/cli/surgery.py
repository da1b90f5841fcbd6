"""The subcommands that change models which others trained: `patch`."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from skipless.cli.arguments import Positional, new_folder
from skipless.cli.terminal import print_json


def patch(
    model: Annotated[
        Positional[str],
        tyro.conf.arg(metavar="MODEL", help="a Hugging Face folder, or a name of `models list`"),
    ],
    out: str | None = None,
    connection: str = "rezero",
    sites: tuple[Literal["attention", "cross_attention", "mlp"], ...] = (),
    layers: tuple[int, ...] = (),
    stacks: tuple[str, ...] = (),
    json: bool = False,
) -> None:
    """Put other skip connections into a Hugging Face model and save it (docs/surgery.md).

    For example: skipless patch smollm2-135m --connection rezero --sites mlp --layers 0 1
    --out runs/patched. `skipless.surgery.load` reads the folder.

    Args:
        out: folder to write.
        connection: rezero, layerscale, interpolate, learned, gated, anneal, residual (all start
            as the plain skip and change nothing yet) or none.
        sites: sublayers whose skip is replaced; all if none is given.
        layers: their numbers, negative ones from the end; all if none is given.
        stacks: part of the name of a stack, such as encoder or vision_model, where there are more.
        json: print JSON.
    """
    path = new_folder(out)
    from skipless.surgery.folders import patch_folder

    done = patch_folder(model, path, connection, sites=sites, layers=layers, stacks=stacks)
    if json:
        print_json({
            "path": str(done.path), "model": done.model, "num_parameters": done.num_parameters,
            "difference": done.difference, "largest": done.largest,
            "places": [dict(zip(("layer", "site", "connection"), row, strict=True))
                       for row in done.places],
        })  # fmt: skip
        return
    print(f"{done.model}: {len(done.places)} connections, {done.num_parameters} new parameters")
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
    print(f"{done.path}  (skipless.surgery.load reads it)")
