"""A model on disk and a named text in, a folder with fewer skips out. Read by the CLI.

The model is a causal language model; the text is cut with its own tokenizer and held out by whole
documents (`skipless.data`). `convert` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.data import Loader, evaluation_batches
from skipless.errors import UserError
from skipless.log import say
from skipless.surgery.conversion.converting import convert
from skipless.surgery.conversion.keeping import check_folder
from skipless.surgery.conversion.results import Conversion, Untrained
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.conversion.skips import untrained_curves
from skipless.surgery.reading import read_language_model
from skipless.surgery.saving import MODEL_TYPE
from skipless.surgery.sources import (
    copy_tokenizer,
    find_folder,
    model_type,
    prepare_text,
    seen_tokens,
)
from skipless.train.distributed import choose_device
from skipless.train.memory import keep_freed_memory

__all__ = ["TextSource", "convert_folder", "measure_untrained"]

LONGEST = 256
"""Tokens a sequence where none are asked for."""


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Which model, which text, and how it is cut."""

    model: str
    """A Hugging Face folder or a name of the catalog."""
    text: Sequence[str]
    """Named sources, files or folders, as `DataConfig.sources`."""
    sequence_length: int | None = None
    """Tokens; by default LONGEST, or as many as the model sees."""
    batch_size: int = 4
    """Sequences a step."""
    held_out_tokens: int = 8192
    device: str = "auto"

    @property
    def length(self) -> int:
        """Tokens a sequence."""
        if self.sequence_length is not None:
            return self.sequence_length
        return min(LONGEST, seen_tokens(find_folder(self.model)) or LONGEST)

    def to_dict(self) -> dict[str, Any]:
        """What a conversion's record says of it; the device is no part of the settings."""
        return {
            "model_name": self.model, "text": list(self.text),
            "sequence_length": self.length, "batch_size": self.batch_size,
            "held_out_tokens": self.held_out_tokens,
        }  # fmt: skip

    def open(self) -> tuple[Any, Loader, list[Any]]:
        """(model in fp32 on its device, training batches, held-out batches).

        Raises UserError for a folder that is no causal language model with a tokenizer, for one
        that is patched already, and for too little text.
        """
        numbers = {
            "sequence_length": self.length, "batch_size": self.batch_size,
            "held_out_tokens": self.held_out_tokens,
        }  # fmt: skip
        for name, number in numbers.items():
            if number < 1:
                raise UserError(f"{name} is {number}; at least 1 was expected")
        device = choose_device(self.device)
        if device.type == "cpu":
            keep_freed_memory()
        folder = find_folder(self.model)
        model = _load(folder)
        limit = seen_tokens(folder) or self.length
        if self.length > limit:
            raise UserError(
                f"sequence_length is {self.length} and {self.model} sees {limit} tokens "
                f"at most; choose {limit} or less"
            )
        data = prepare_text(folder / "tokenizer.json", self.text, model.config.vocab_size)
        loader = Loader(data.train, self.length, self.batch_size)
        held_out = evaluation_batches(
            data.held_out, self.length, self.batch_size, self.held_out_tokens
        )
        return model.to(device), loader, held_out


def convert_folder(
    source: TextSource,
    out: str | Path,
    config: ConversionConfig,
    draw: Callable[[Conversion], Any] | None = None,
) -> Conversion:
    """Convert a model of the disk into the folder `out`, or go on with what is there.

    `draw` puts a figure beside the model. Raises UserError as `convert` does, and when the first
    stage is beyond the budget already, so that there is no model to write; the record is in `out`
    then.
    """
    target = Path(out)
    check_folder(target, config, source.to_dict())  # before anything large is read
    model, loader, held_out = source.open()
    needed = len(loader.batch(0)[0]) * max(config.steps_per_stage, 1)
    if loader.num_windows < needed:
        say(
            f"NOTE: {', '.join(source.text)} has {loader.num_windows} sequences, fewer than the "
            f"{needed} of a stage: the model sees them again and again"
        )

    def beside(found: Conversion) -> None:
        if not found.converted:
            return
        try:
            copy_tokenizer(find_folder(source.model), target)
            if draw is not None:
                draw(found)
        except OSError as error:
            raise UserError(
                f"cannot write tokenizer and figure to {target}: {error.strerror or error}; free "
                "space and run the same command again, which goes on from there"
            ) from error

    found = convert(
        model, loader, held_out, config, folder=target, source=source.to_dict(), on_finish=beside
    )
    if not found.converted:
        row = found.stages[0]
        raise UserError(
            f"the first stage costs {row.increase:+.4f} nats, more than the budget of "
            f"{config.loss_budget}; give a higher loss_budget or more steps (the numbers are in "
            f"{target / 'convert.json'}, no model was written)"
        )
    return found


def measure_untrained(
    source: TextSource, config: ConversionConfig, points: int = 10
) -> dict[str, tuple[Untrained, ...]]:
    """`untrained_curves` of a model of the disk on held-out text."""
    model, _, held_out = source.open()
    return untrained_curves(model, held_out, config, points=points)


def _load(folder: Path) -> Any:
    if model_type(folder) == MODEL_TYPE:
        raise UserError(
            f"{folder} is patched or converted already; in Python, skipless.surgery.load and "
            "convert(..., teacher=the original) go on with other sites"
        )
    return read_language_model(folder)
