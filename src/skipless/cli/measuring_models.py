"""`skipless quantize` on a model that is no run: on text, images or sound that is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Material(NamedTuple):
    """What to measure on, as the arguments say it."""

    text: str | None
    data: str | None
    images: tuple[str, ...]
    audio: tuple[str, ...]
    tokens: int | None

    @property
    def is_named(self) -> bool:
        """Whether there is anything."""
        return bool(self.text or self.data or self.images or self.audio)

    def refuse_beside_run(self, run: str) -> None:
        """UserError if anything is named: `run` has its own."""
        if self.is_named:
            flags = ("--text", "--data", "--images", "--audio")
            flag = next(f for f, given in zip(flags, self[:4], strict=True) if given)
            raise UserError(f"{run} is a run and has its held-out text; leave out {flag}")

    def read(self, name: str) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """(the model called `name`, batches to calibrate on, other ones to measure on)."""
        if not self.is_named:
            raise UserError(
                f"{name} is no run, which has its held-out text; give --text FILE, --data NAME "
                "(`skipless data list` shows names), or --images or --audio to a model of those"
            )
        if self.text is not None and not Path(self.text).exists():
            raise UserError(
                f"--text is {self.text!r}, which does not exist; name a file or folder of text"
            )
        if self.images and self.audio:
            raise UserError("--images and --audio are both given; keep one of them")
        if (self.images or self.audio) and (self.data or self.tokens):
            raise UserError("--data and --num-tokens belong to models of text; leave them out")
        from skipless.pretrained.naming import check_named

        check_named(name, holds_model=True)
        from skipless.diagnose.loading import load_subject
        from skipless.diagnose.texts import read_batches

        subject = load_subject(name)
        if self.images or self.audio:
            from skipless.diagnose.media import read_audio, read_images

            if self.images:
                read = read_images(subject, self.images, self.text)
            else:
                read = read_audio(subject, self.audio, self.text)
            rows, what = _rows(read.batches), "image" if self.images else "recording"
        else:
            import torch

            read = read_batches(subject, self.text, self.data, 2 * (self.tokens or 2048), None)
            rows, what = list(torch.cat(read.batches).split(1)), "sequence"
        if len(rows) < 2:
            raise UserError(
                f"there is one {what}, and methods are calibrated on others than they are measured "
                "on; give more" + (", or fewer --num-tokens" if what == "sequence" else "")
            )
        half = (len(rows) + 1) // 2
        return subject.model, _together(rows[:half]), _together(rows[half:])


def quantize_model(
    name: str,
    schemes: tuple[str, ...],
    scopes: tuple[str, ...],
    methods: tuple[str, ...],
    overrides: tuple[str, ...],
    material: Material,
    include_convolutions: bool,
    json: bool,
) -> list[dict[str, Any]]:
    """Rows of `compare_methods`, calibrated on the first half and measured on the second."""
    parsed = [Scheme.parse(s).with_overrides(overrides) for s in schemes or ("W8A8", "W4A8")]
    model, calibration, held_out = material.read(name)
    from skipless.diagnose.methods import compare_methods
    from skipless.log import say

    return compare_methods(
        model, held_out, parsed, scopes or ("linear",),
        ["rtn", *(method for method in methods if method != "rtn")], calibration=calibration,
        include_convolutions=include_convolutions,
        on_row=lambda row: None if json else say(f"{row['scheme']} {row['scope']} {row['method']}"),
    )  # fmt: skip


def material_of_suggestion(
    name: str, material: Material
) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """`Material.read` for a model that predicts tokens. Raises UserError for another."""
    model, calibration, held_out = material.read(name)
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
