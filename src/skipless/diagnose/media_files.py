"""Files of images, sound and lines, read into what processors take.

Images are read by Pillow, sound from uncompressed WAV files by the standard library.
Read by media.py.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skipless.errors import UserError
from skipless.packages import not_installed

IMAGES = (".png", ".jpg", ".jpeg")
IN_PYTHON = "call skipless.diagnose.diagnose(model, batches) in Python with dicts of its inputs"


def find_images(paths: Sequence[str]) -> list[Path]:
    """Files as given and those of folders by name. Raises UserError where there is none."""
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


def open_image(path: Path) -> Any:
    """An RGB image of Pillow's. Raises UserError for what is none, and without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise not_installed("PIL", why="which reads images", instead=IN_PYTHON) from None
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from None


def open_wave(path: Path, rate: int, name: str) -> np.ndarray:
    """float32 samples in [-1, 1], channels averaged.

    Raises UserError for what is no uncompressed WAV, and for another rate than that of the model
    called `name`.
    """
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


def read_lines(path: str, number: int, one: str, several: str) -> list[str]:
    """The lines of a file that are not blank. Raises UserError unless there are `number`, which is
    that of what `one` and `several` call the files beside them."""
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
