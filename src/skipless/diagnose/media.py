"""Images and sound as batches, by the processor that lies beside the model's weights.

    vision model           images
    CLIP and its like      images, and a caption for every one
    speech to text         sound, and what is said in it: a transcript, or what the model hears
    other sound models     sound

Read by the command line and, for two models, by comparison/pairs.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from skipless.diagnose.loading import Subject
from skipless.diagnose.media_files import IN_PYTHON, find_images, open_image, open_wave, read_lines
from skipless.diagnose.texts import BATCH_SIZE, Text
from skipless.errors import UserError
from skipless.quant import placed

MOST_HEARD = 64
"""Tokens that a speech model writes of one file when there is no transcript."""


def read_media(
    subject: Subject,
    images: Sequence[str],
    audio: Sequence[str],
    text: str | None = None,
    *,
    heard: Sequence[Any] | None = None,
) -> Text:
    """`read_images` or, without images, `read_audio`; `heard` is the latter's."""
    if images:
        return read_images(subject, images, text)
    return read_audio(subject, audio, text, heard=heard)


def read_images(subject: Subject, paths: Sequence[str], captions: str | None = None) -> Text:
    """Batches {"pixel_values"[, "input_ids", "attention_mask"]} of files and folders of images.

    `captions` is a file with a line for every image, in the order of the files' names. Raises
    UserError for a model that sees no images, no image, one that is broken, no processor, and
    captions that are missing, too many, too few, too long or not wanted.
    """
    wanted = _inputs(subject)
    kind = type(subject.model).__name__
    if "pixel_values" not in wanted:
        raise UserError(
            f"{kind} takes {getattr(subject.model, 'main_input_name', 'input_ids')} and no images; "
            "leave out --images"
        )
    both = "input_ids" in wanted
    if both and not hasattr(subject.model, "text_model"):
        raise UserError(
            f"{kind} reads images inside a text of its own form; {IN_PYTHON} (docs/diagnose.md)"
        )
    if both and captions is None:
        raise UserError(
            f"{kind} reads images with captions; give --text FILE with a line for every image"
        )
    if captions is not None and not both:
        raise UserError(f"{kind} takes images and no text; leave out --text")
    files = find_images(paths)
    processor = _processor(subject, "AutoImageProcessor", "images")
    lines = [] if captions is None else read_lines(captions, len(files), "image", "images")
    batches = []
    for start in range(0, len(files), BATCH_SIZE):
        pictures = [open_image(file) for file in files[start : start + BATCH_SIZE]]
        batch = dict(processor(images=pictures, return_tensors="pt"))
        if lines:
            batch |= _tokens(subject, lines[start : start + BATCH_SIZE], start)
        batches.append({key: value for key, value in batch.items() if key in wanted})
    what = "images with captions" if both else "images"
    return Text(batches=batches, about=f"{len(files):,} {what} ({files[0].parent})")


def read_audio(
    subject: Subject,
    paths: Sequence[str],
    transcripts: str | None = None,
    *,
    heard: Sequence[Any] | None = None,
) -> Text:
    """One batch a WAV file: {"input_features", "decoder_input_ids"} for speech to text, else what
    the model's feature extractor makes.

    `transcripts` has a line for every file; without it the model is given what it hears itself, or
    the "decoder_input_ids" of `heard`, the batches of another one. Raises UserError for a model
    that hears nothing, a file that is no WAV or of another rate than the model's, no processor, and
    transcripts as captions.
    """
    wanted = _inputs(subject)
    kind = type(subject.model).__name__
    if not {"input_features", "input_values"} & wanted:
        raise UserError(
            f"{kind} takes {getattr(subject.model, 'main_input_name', 'input_ids')} and no sound; "
            "leave out --audio"
        )
    writes = "decoder_input_ids" in wanted
    if transcripts is not None and not writes:
        raise UserError(f"{kind} takes sound and no text; leave out --text")
    processor = _processor(subject, "AutoFeatureExtractor", "sound")
    rate = int(getattr(processor, "sampling_rate", 16000))
    sounds = [open_wave(Path(path), rate, subject.name) for path in paths]
    lines = []
    if transcripts is not None:
        lines = read_lines(transcripts, len(sounds), "WAV file", "WAV files")
    batches: list[Any] = []
    for number, sound in enumerate(sounds):
        batch = dict(processor(sound, sampling_rate=rate, return_tensors="pt"))
        batch = {key: value for key, value in batch.items() if key in wanted}
        if writes and lines:
            batch["decoder_input_ids"] = _tokens(subject, [lines[number]], number)["input_ids"]
        elif writes:
            batch["decoder_input_ids"] = (
                _heard(subject, batch) if heard is None else heard[number]["decoder_input_ids"]
            )
        batches.append(batch)
    most = getattr(processor, "n_samples", None)  # Whisper's hears 30 s at a time
    seconds = sum(min(len(sound), most or len(sound)) for sound in sounds) / rate
    about = f"{seconds:.1f} s of sound in {len(sounds)} file{'s' * (len(sounds) > 1)}"
    if most is not None and any(len(sound) > most for sound in sounds):
        about += f", cut to {most / rate:g} s each"
    if writes:
        about += ", with transcripts" if lines else f", with what {subject.name} hears in it"
    return Text(batches=batches, about=about)


def has_processor(subject: Subject) -> bool:
    """Whether a processor lies in the model's folder; what is no folder is thought to have one."""
    folder = Path(subject.source)
    names = ("preprocessor_config.json", "processor_config.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def _inputs(subject: Subject) -> set[str]:
    """The names of what the model is called with."""
    if subject.run is not None:
        raise UserError(
            f"{subject.name} is a run of a language model, which takes text; leave out --images "
            "and --audio"
        )
    return set(inspect.signature(subject.model.forward).parameters)


def _processor(subject: Subject, auto: str, what: str) -> Any:
    import transformers

    try:
        with _quiet():  # it tells of torchvision, which is not needed
            return getattr(transformers, auto).from_pretrained(subject.source)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{subject.name} has no processor for {what} beside its weights ({reason}); put its "
            f"preprocessor_config.json there, or {IN_PYTHON}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers says errors only."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def _tokens(subject: Subject, lines: list[str], first: int) -> dict[str, torch.Tensor]:
    """Token ids of some lines, padded to the longest."""
    tokenizer, limit = subject.tokenizer, subject.limit
    if tokenizer is None:
        raise UserError(
            f"{subject.name} has no tokenizer beside its weights, so that --text cannot be read; "
            f"put tokenizer.json there, or {IN_PYTHON}"
        )
    found = [tokenizer(line, verbose=False)["input_ids"] for line in lines]
    for number, ids in enumerate(found, first + 1):
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"line {number} of --text has {len(ids)} tokens and {subject.name} takes {limit} "
                "at most; shorten it"
            )
    longest = max(map(len, found))
    pad = next((p for p in (tokenizer.pad_token_id, tokenizer.eos_token_id) if p is not None), 0)
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids in found]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids))
                                        for ids in found]),
    }  # fmt: skip


def _heard(subject: Subject, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The ids that the model writes of a sound, what it is given at the start included."""
    model: Any = subject.model
    most = min(MOST_HEARD, (subject.limit or MOST_HEARD + 8) - 8)  # some are given at the start
    try:
        with torch.no_grad(), _quiet():
            given = {key: placed(value, model) for key, value in batch.items()}
            ids = model.generate(**given, max_new_tokens=max(1, most), do_sample=False)
    except (AttributeError, ValueError, RuntimeError, KeyError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{subject.name} writes nothing by itself ({reason}); give --text FILE with what is "
            "said, a line for every file"
        ) from None
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is not None and (ids.shape[1] == 0 or int(ids[0, 0]) != start):
        # generate() leaves out what a speech model is always given first
        ids = torch.cat([torch.full((len(ids), 1), start, dtype=ids.dtype), ids], 1)
    return ids
