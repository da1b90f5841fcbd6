"""Images and sound as batches, by the processor that lies beside the model's weights.

    vision model           images
    CLIP and its like      images, and a caption for every one
    speech to text         sound, and what is said in it: a transcript, or what the model hears
    other sound models     sound

Images are read by Pillow, sound from uncompressed WAV files by the standard library.
Read by the command line.
"""

from __future__ import annotations

import inspect
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipless.diagnose.loading import Subject
from skipless.diagnose.texts import BATCH_SIZE, Text
from skipless.errors import UserError

IMAGES = (".png", ".jpg", ".jpeg")
MOST_HEARD = 64
"""Tokens that a speech model writes of one file when there is no transcript."""
_PYTHON = "call skipless.diagnose.diagnose(model, batches) in Python with dicts of its inputs"


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
            f"{kind} reads images inside a text of its own form; {_PYTHON} (docs/diagnose.md)"
        )
    if both and captions is None:
        raise UserError(
            f"{kind} reads images with captions; give --text FILE with a line for every image"
        )
    if captions is not None and not both:
        raise UserError(f"{kind} takes images and no text; leave out --text")
    files = _find_images(paths)
    processor = _processor(subject, "AutoImageProcessor", "images")
    lines = [] if captions is None else _lines(captions, len(files), "image", "images")
    batches = []
    for start in range(0, len(files), BATCH_SIZE):
        pictures = [_open_image(file) for file in files[start : start + BATCH_SIZE]]
        batch = dict(processor(images=pictures, return_tensors="pt"))
        if lines:
            batch |= _tokens(subject, lines[start : start + BATCH_SIZE], start)
        batches.append({key: value for key, value in batch.items() if key in wanted})
    what = "images with captions" if both else "images"
    return Text(batches=batches, about=f"{len(files):,} {what} ({files[0].parent})")


def read_audio(subject: Subject, paths: Sequence[str], transcripts: str | None = None) -> Text:
    """One batch a WAV file: {"input_features", "decoder_input_ids"} for speech to text, else what
    the model's feature extractor makes.

    `transcripts` has a line for every file. Raises UserError for a model that hears nothing, a file
    that is no WAV or of another rate than the model's, no processor, and transcripts as captions.
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
    sounds = [_open_wave(Path(path), rate, subject.name) for path in paths]
    lines = [] if transcripts is None else _lines(transcripts, len(sounds), "WAV file", "WAV files")
    batches: list[Any] = []
    for number, sound in enumerate(sounds):
        batch = dict(processor(sound, sampling_rate=rate, return_tensors="pt"))
        batch = {key: value for key, value in batch.items() if key in wanted}
        if writes:
            batch["decoder_input_ids"] = (
                _tokens(subject, [lines[number]], number)["input_ids"]
                if lines else _heard(subject, batch)
            )  # fmt: skip
        batches.append(batch)
    most = getattr(processor, "n_samples", None)  # Whisper's hears 30 s at a time
    seconds = sum(min(len(sound), most or len(sound)) for sound in sounds) / rate
    about = f"{seconds:.1f} s of sound in {len(sounds)} file{'s' * (len(sounds) > 1)}"
    if most is not None and any(len(sound) > most for sound in sounds):
        about += f", cut to {most / rate:g} s each"
    if writes:
        about += ", with transcripts" if lines else ", with what the model hears in it"
    return Text(batches=batches, about=about)


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
            f"preprocessor_config.json there, or {_PYTHON}"
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


def _find_images(paths: Sequence[str]) -> list[Path]:
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGES)
            if not inside:
                raise UserError(f"{path} holds no image (.png, .jpg or .jpeg); name another folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"--images is {str(path)!r}, which does not exist")
    return found


def _open_image(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "Pillow is not installed, which reads images; install it with `pip install pillow`, or "
            + _PYTHON
        ) from None
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from None


def _open_wave(path: Path, rate: int, name: str) -> np.ndarray:
    """float32 samples in [-1, 1], channels averaged."""
    if not path.is_file():
        raise UserError(f"--audio is {str(path)!r}, which is no file; name WAV files")
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise UserError(
            f"{path} cannot be read as uncompressed WAV ({error}); convert it: `ffmpeg -i {path} "
            f"-ar {rate} -ac 1 out.wav`"
        ) from None
    if found != rate:
        raise UserError(
            f"{path} has {found:,} samples a second and {name} takes {rate:,}; convert it: "
            f"`ffmpeg -i {path} -ar {rate} -ac 1 out.wav`"
        )
    if width == 1:  # 8 bits are unsigned in WAV
        samples = np.frombuffer(content, "u1").astype(np.float32) / 128 - 1
    elif width in (2, 4):
        samples = np.frombuffer(content, f"<i{width}") / np.float64(2 ** (8 * width - 1))
    else:
        raise UserError(f"{path} has {8 * width} bits a sample; convert it to 16")
    if samples.size == 0:
        raise UserError(f"{path} holds no sound; name another file")
    return samples.reshape(-1, channels).mean(1).astype(np.float32)


def _lines(path: str, number: int, one: str, several: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path} cannot be read: {error}; name a file of lines") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != number:
        raise UserError(
            f"--text {path} has {len(lines)} line{'s' * (len(lines) != 1)} for {number} "
            f"{one if number == 1 else several}; give a line for every {one}"
        )
    return lines


def _tokens(subject: Subject, lines: list[str], first: int) -> dict[str, torch.Tensor]:
    """Token ids of some lines, padded to the longest."""
    tokenizer, limit = subject.tokenizer, subject.limit
    if tokenizer is None:
        raise UserError(
            f"{subject.name} has no tokenizer beside its weights, so that --text cannot be read; "
            f"put tokenizer.json there, or {_PYTHON}"
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
            ids = model.generate(**batch, max_new_tokens=max(1, most), do_sample=False)
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
