"""Which documents are held out: whole ones, chosen by seed, about the wanted share of each source.

Texts that occur twice stay on one side, so nothing trained on is ever evaluated on. Read by
`skipless.data.preparing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from skipless.data.documents import Document
from skipless.errors import UserError


def digest(document: Document) -> bytes:
    """Identity of a document's text."""
    return hashlib.blake2b(document.text.encode(), digest_size=16).digest()


def choose_held_out(
    documents: Iterable[tuple[bytes, int]], fraction: float, seed: int, source: str
) -> set[bytes]:
    """Digests of the documents of one source to hold out; empty if it has a single text.

    `documents` are (digest, characters). They are taken in an order drawn from (seed, source) as
    long as each brings the total nearer to `fraction` of the characters; at least one is taken and
    at least one is left. Adding or removing another source changes nothing here.
    """
    if not 0 < fraction < 1:
        raise UserError(
            f"data.held_out_fraction is {fraction}; it is a share between 0 and 1, such as 0.05"
        )
    sizes: dict[bytes, int] = {}
    for key, length in documents:
        sizes[key] = sizes.get(key, 0) + length
    if len(sizes) < 2:
        return set()
    salt = f"{seed}\0{source}\0".encode()
    order = sorted(sizes, key=lambda key: hashlib.sha256(salt + key).digest())
    target, held, total = fraction * sum(sizes.values()), set(), 0.0
    for key in order:
        if total + sizes[key] / 2 <= target and len(held) < len(sizes) - 1:
            held.add(key)
            total += sizes[key]
    # every document is more than twice the share: the smallest comes nearest
    return held or {min(order, key=sizes.__getitem__)}


def cut(text: str, fraction: float) -> int:
    """Where to split a single document, so that about `fraction` of it follows: after a blank
    line if there is one near, else a newline, else a space, else between two characters."""
    wanted = round(len(text) * (1 - fraction))
    reach = max(int(len(text) * min(fraction, 1 - fraction) / 2), 1)
    low, high = max(wanted - reach, 1), min(wanted + reach, len(text) - 1)
    for mark in ("\n\n", "\n", " "):
        before = text.rfind(mark, low, wanted)
        after = text.find(mark, wanted, high)
        places = [p + len(mark) for p in (before, after) if 0 <= p < len(text) - len(mark)]
        if places:
            return min(places, key=lambda p: abs(p - wanted))
    return min(max(wanted, 1), max(len(text) - 1, 1))
