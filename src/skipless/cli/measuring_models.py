"""`skipless quantize` on a model that is no run: on text, images or sound that is named; and the
loss of such a model on a text, packed ones included, for `skipless eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipless.cli.arguments import tell_fewer
from skipless.cli.material import Material
from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text
from skipless.rundir import CONFIG
from skipless.scheme import Scheme


def is_run(name: str) -> bool:
    """Whether the folder's config.json is a run's; Hugging Face calls its own the same."""
    try:
        return "train" in parse_json(read_text(Path(name) / CONFIG), where=name)
    except UserError:
        return False


def is_plain_model(name: str) -> bool:
    """Whether a folder of a model lies there that is no run, or it is a name of the catalog."""
    from skipless.pretrained.catalog import MODELS

    return ((Path(name) / CONFIG).exists() and not is_run(name)) or name in MODELS.names()


def refuse_beside_run(run: str, material: Material) -> None:
    """UserError if anything is named to read: `run` has its own."""
    if material.flag is not None:
        raise UserError(f"{run} is a run and has its held-out text; leave out {material.flag}")


def read_halves(
    name: str, material: Material, *, calibrated: bool = True
) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """(the model called `name`, batches to calibrate on, other ones to measure on).

    A single example is measured on if nothing is `calibrated`.
    """
    if Path(name).is_dir():
        from skipless.pretrained.quantised import refuse_packed

        refuse_packed(Path(name))
    if material.flag is None:
        raise UserError(
            f"{name} is no run, which has its held-out text; give --text FILE, --data NAME "
            "(`skipless data list` shows names), or --images or --audio to a model of those"
        )
    material.check()
    if material.is_media and material.num_tokens:
        raise UserError("--num-tokens belongs to models of text; leave it out of --images, --audio")
    from skipless.pretrained.naming import check_named

    check_named(name, holds_model=True)
    from skipless.diagnose.loading import load_subject

    subject = load_subject(name)
    if material.is_media:
        rows = _rows(material.read(subject).batches)
        what = "image" if material.images else "recording"
    else:
        import torch

        tokens = 2 * (material.num_tokens or 2048)
        rows = list(torch.cat(material._replace(num_tokens=tokens).read(subject).batches).split(1))
        what = "sequence"
    if len(rows) < 2 and calibrated:
        raise UserError(
            f"there is one {what}, and methods and static schemes are calibrated on others than "
            "they are measured on; give more" + (" text" if what == "sequence" else "")
        )
    half = (len(rows) + 1) // 2 if len(rows) > 1 else 0
    if not material.is_media:
        length = rows[0].shape[1]
        tell_fewer(material.num_tokens, (len(rows) - half) * length, length)
    return subject.model, _together(rows[:half]) if half else [], _together(rows[half:])


def quantize_model(
    name: str,
    schemes: tuple[str, ...],
    scopes: tuple[str, ...],
    methods: tuple[str, ...],
    overrides: tuple[str, ...],
    material: Material,
    include_convolutions: bool,
    by_layer: bool,
    all_but_one: bool,
    json: bool,
) -> dict[str, Any]:
    """Calibrated on the first half and measured on the second: "rows" of `compare_methods`, and
    with `by_layer` the "sensitivity" as in quant.json."""
    parsed = [Scheme.parse(s) for s in schemes or ("W8A8", "W4A8")]
    closer = min(reversed(parsed), key=Scheme.bits_together).with_overrides(overrides)
    parsed = [scheme.with_overrides(overrides) for scheme in parsed]
    others = [method for method in methods if method != "rtn"]
    needed = bool(others) or any(scheme.needs_calibration for scheme in parsed)
    model, calibration, held_out = read_halves(name, material, calibrated=needed)
    from skipless.diagnose.damage import predicts_tokens
    from skipless.diagnose.methods import compare_methods
    from skipless.log import say

    if by_layer and (isinstance(held_out[0], Mapping) or not predicts_tokens(model, held_out[0])):
        raise UserError(
            f"{name} does not predict the next token, whose loss --by-layer measures; `skipless "
            "diagnose` ranks the layers of any model"
        )
    result: dict[str, Any] = {
        "rows": compare_methods(
            model, held_out, parsed, scopes or ("linear",), ["rtn", *others],
            calibration=calibration, include_convolutions=include_convolutions,
            on_row=lambda row: None if json else say(
                f"{row['scheme']} {row['scope']} {row['method']}"
            ),
        )
    }  # fmt: skip
    if by_layer:
        from skipless.evaluate import sensitivity

        scope = "block" if "block" in scopes else (scopes or ("linear",))[0]
        found: dict[str, Any] = {"scheme": str(closer), "scope": scope}
        for key, keep in (("rows", "others"), ("all_but_one", "one"))[: 1 + all_but_one]:
            if not json:
                what = "one layer" if keep == "others" else "all layers but one"
                say(f"loss with {what} at {closer}")
            found[key] = sensitivity(
                model, closer, held_out, scope, keep=keep, calibration=calibration
            )
        result["sensitivity"] = found
    return result


def text_loss(name: str, text: str, num_tokens: int | None) -> dict[str, Any]:
    """Loss of the run or model called `name` on a file or folder of text, as eval.json has it.

    A folder that `skipless export` packed is measured as it is, on the same tokens as the run that
    it was made from. Raises UserError for a model that predicts no tokens.
    """
    from skipless.pretrained.quantised import is_packed

    if not Path(text).exists():
        raise UserError(f"--text is {text!r}, which does not exist; name a file or folder of text")
    from skipless.diagnose.loading import load_packed, load_subject
    from skipless.diagnose.texts import read_batches
    from skipless.evaluate import loss
    from skipless.surgery.checking import check_batches, check_finite

    subject = load_packed(name) if is_packed(Path(name)) else load_subject(name)
    check_finite(subject.model, name)
    if subject.run is not None and subject.run.config.model.num_labels is not None:
        raise UserError(
            f"{name} is a classifier, measured on labelled passages of its own; leave out --text"
        )
    batches = read_batches(subject, text, None, num_tokens or 8192, None).batches
    ids = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
    tell_fewer(num_tokens, sum(part.numel() for part in ids), ids[0].shape[1])
    check_batches(subject.model, batches)
    report = loss(subject.model, batches)
    return {
        "held_out_loss": report.nats, "perplexity": report.perplexity,
        "bits_per_byte": report.bits_per_byte, "num_tokens": report.num_tokens,
        "standard_error": report.standard_error,
    }  # fmt: skip


def material_of_suggestion(
    name: str, material: Material
) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """`read_halves` for a model that predicts tokens. Raises UserError for another."""
    model, calibration, held_out = read_halves(name, material)
    from skipless.diagnose.damage import predicts_tokens

    if isinstance(held_out[0], Mapping) or not predicts_tokens(model, held_out[0]):
        raise UserError(
            f"{name} does not predict the next token, and --suggest weighs bits against its loss; "
            "`skipless diagnose` says which layers to set apart, for --override"
        )
    return model, calibration, held_out


def _rows(batches: Sequence[Any]) -> list[Any]:
    """Dicts of one example each."""
    found = []
    for batch in batches:
        number = len(next(iter(batch.values())))
        found += [{key: value[i : i + 1] for key, value in batch.items()} for i in range(number)]
    return found


def _together(rows: list[Any]) -> list[Any]:
    """Up to four sequences in a batch; dicts, whose lengths may differ, stay apart."""
    import torch

    if isinstance(rows[0], Mapping):
        return rows
    return list(torch.cat(rows).split(4))
