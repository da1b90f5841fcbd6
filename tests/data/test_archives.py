"""Members of tar and deb archives, R databases and SWORD modules, from handmade examples."""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import tarfile
import zlib

import pytest

from skipless.data.archives import members, read_r_database, read_sword
from skipless.errors import UserError


def tar_bytes(files, mode):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def write_deb(path, files):
    """A Debian package: `ar` with an odd-sized first member, so that padding matters."""
    path.write_bytes(b"!<arch>\n")
    inner = {"debian-binary": b"2.0", "data.tar.xz": tar_bytes(files, "w:xz")}
    with path.open("ab") as file:
        for name, content in inner.items():
            head = f"{name + '/':<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(content):<10}`\n"
            file.write(head.encode() + content + b"\n" * (len(content) % 2))
    return path


def r_vector(lines, version=3):
    raw = b"X\n" + struct.pack(">iii", version, 0x040201, 0x030500)
    if version == 3:
        raw += struct.pack(">i", 5) + b"UTF-8"
    raw += struct.pack(">Ii", 16, len(lines))
    for line in lines:
        content = line.encode()
        raw += struct.pack(">Ii", 0x40009, len(content)) + content
    return raw


def entry(raw, kind):
    packed = {"zlib": zlib.compress, "2": lambda b: b"2" + bz2.compress(b),
              "Z": lambda b: b"Z" + lzma.compress(b)}[kind](raw)  # fmt: skip
    return struct.pack(">I", len(raw)) + packed


def test_members_are_sorted_and_matched_whole(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_bytes({"x/b.txt": b"2", "x/a.txt": b"1", "x/a.txt.bak": b"3"}, "w:gz"))
    assert list(members(path, r"x/.\.txt")) == [("x/a.txt", b"1"), ("x/b.txt", b"2")]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.deb"])
def test_broken_archives(tmp_path, name):
    for content in (b"", b"!<arch>\n", b"not an archive" * 99):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="cannot be unpacked"):
            list(members(tmp_path / name, ".*"))


def test_a_truncated_tar(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_bytes({"a": bytes(range(256)) * 400}, "w:gz")[:-40])
    with pytest.raises(UserError, match="cannot be unpacked"):
        list(members(path, ".*"))


def test_r_database_in_all_its_packings(tmp_path):
    other = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">Ii", 13, 0)  # an integer vector
    database = b"".join([
        entry(r_vector(["EMMA", "", "Größe"]), "zlib"),
        entry(other, "zlib"),
        entry(r_vector(["", "PERSUASION", "text"], version=2), "2"),
        entry(r_vector(["LADY SUSAN"]), "Z"),
    ])  # fmt: skip
    path = write_deb(tmp_path / "r.deb", {"./R/data/Rdata.rdb": database, "./other": b""})
    found = [(d.name, d.text) for d in read_r_database(path, r".*/Rdata\.rdb")]
    assert found == [("EMMA", "EMMA\n\nGröße"), ("PERSUASION", "\nPERSUASION\ntext"),
                     ("LADY SUSAN", "LADY SUSAN")]  # fmt: skip


def test_sword_blocks_lose_their_markup(tmp_path):
    blocks = [
        b'<milestone type="x-importer"/>',
        b'<chapter n="1" osisID="Ps.1" sID="x"/><title>ONE</title><div sID="g1" type="x-p"/> '
        b'A <hi type="i">good</hi>\n man &amp; <reference osisRef="x">Ps 2</reference>. '
        b'<div eID="g1" type="x-p"/> Next.',
    ]
    index, data = b"", b""
    for block in blocks:
        packed = zlib.compress(block)
        index += struct.pack("<III", len(data), len(packed), len(block))
        data += packed
    path = write_deb(tmp_path / "s.deb", {"./m/ot.czs": index, "./m/ot.czz": data})
    found = [(d.name, d.text) for d in read_sword(path, r".*/ot\.czs")]
    assert found == [("Ps.1", "ONE\n\nA good man & Ps 2.\n\nNext.")]
