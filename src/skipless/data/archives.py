"""Reading members out of archives without unpacking them to disk: tar, zip (pip, npm), deb.

Also the two formats inside the Debian packages: R's lazy-load database and the compressed
commentaries of the SWORD project. Read by `skipless.data.catalog`.
"""

from __future__ import annotations

import bz2
import html
import io
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from skipless.data.documents import Document
from skipless.errors import UserError

_BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError,
           struct.error, zipfile.BadZipFile)  # fmt: skip
_R_STRINGS, _R_STRING = 16, 9  # SEXP types of a character vector and of one element
_R_HEADER = 14  # "X\n", then format version, writer version, minimal reader version


def members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files whose whole name matches, sorted by name.

    Raises UserError if the archive is broken.
    """
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                for name in sorted(n for n in wheel.namelist() if re.fullmatch(pattern, n)):
                    yield name, wheel.read(name)
            return
        inner = _deb_data(archive) if archive.suffix == ".deb" else None
        with tarfile.open(None if inner else archive, "r:*", fileobj=inner) as tar:
            found = {m.name: m for m in tar.getmembers() if re.fullmatch(pattern, m.name)}
            for name in sorted(found):
                file = tar.extractfile(found[name])
                if file is not None:
                    yield name, file.read()
    except _BROKEN as error:
        raise UserError(
            f"{archive} cannot be unpacked ({error}); delete it and get the source again"
        ) from None


def _deb_data(archive: Path) -> io.BytesIO:
    """The inner data.tar.* of a Debian package, which is an `ar` archive of three members."""
    content, at = archive.read_bytes(), 8
    while at + 60 <= len(content):
        name = content[at : at + 16].decode("ascii").strip().rstrip("/")
        size = int(content[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return io.BytesIO(content[at + 60 : at + 60 + size])
        at += 60 + size + size % 2
    raise ValueError("no data.tar member")


def read_r_database(archive: Path, pattern: str) -> Iterator[Document]:
    """Each character vector of an R lazy-load database (.rdb): a document, an element a line.

    A database is a row of entries: 4 bytes raw length (big-endian), then zlib, or a type byte
    (2: bzip2, Z: xz) and that. The first line that is not blank names the document.
    """
    for _, content in members(archive, pattern):
        at = 4
        while at < len(content):
            kind = content[at : at + 1]
            if kind == b"2":
                stream, start = bz2.BZ2Decompressor(), at + 1
            elif kind == b"Z":
                stream, start = lzma.LZMADecompressor(), at + 1
            else:
                stream, start = zlib.decompressobj(), at
            raw = stream.decompress(content[start:])
            at = len(content) - len(stream.unused_data) + 4
            lines = _r_strings(raw)
            if lines is not None:
                title = next((line for line in lines if line.strip()), "untitled")
                yield Document(title, "\n".join(lines))


def _r_strings(raw: bytes) -> list[str] | None:
    """The elements of a serialised character vector, or None for any other R object."""
    at = _R_HEADER
    if raw[:2] != b"X\n":
        return None
    if struct.unpack_from(">i", raw, 2)[0] == 3:  # version 3 also names its encoding
        at += 4 + struct.unpack_from(">i", raw, at)[0]
    flags, count = struct.unpack_from(">Ii", raw, at)
    if flags & 0xFF != _R_STRINGS:
        return None
    at, lines = at + 8, []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", raw, at)
        if flags & 0xFF != _R_STRING:
            raise ValueError(f"R type {flags & 0xFF} where a string was expected")
        length = max(length, 0)  # -1 is NA
        lines.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return lines


def read_sword(archive: Path, pattern: str) -> Iterator[Document]:
    """Each block (a book or a chapter) of a SWORD zCom module, without its markup.

    The index (`pattern` finds *.bzs or *.czs) holds offset, compressed and raw size of each block
    of the data file beside it (*.bzz or *.czz), little-endian; a block is zlib and OSIS markup.
    """
    for name, index in members(archive, pattern):
        for _, data in members(archive, re.escape(name[:-1] + "z")):
            for offset, size, _ in struct.iter_unpack("<III", index):
                osis = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
                label = re.search(r'<(?:chapter|div)[^>]* osisID="([^"]+)"', osis)
                text = _plain(osis)
                if text:
                    yield Document(label.group(1) if label else f"block {offset}", text)


def _plain(osis: str) -> str:
    """OSIS markup to paragraphs of plain text."""
    text = re.sub(r"<title[^>]*>|</title>|<div eID=[^>]*/>|<lb[^>]*/>", "\n\n", osis)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(part for part in paragraphs if part)
