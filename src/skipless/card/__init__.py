"""The model card of a run: README.md with a YAML head, every number from the run's own files.

facts.py     what the run holds, and of which weights; held.py the folder
equations.py which equations a run's settings name
sections.py  the headings, in Markdown
head.py      the YAML

    write_card("runs/mine", "folder")     # folder/README.md; use lines for what `folder` holds
    card_text("runs/mine")                # the text alone

Reads JSON alone and no weights; no torch. Read by the command line and by exporters.
"""

from __future__ import annotations

from pathlib import Path

from skipless.card.facts import read_facts
from skipless.card.head import head
from skipless.card.sections import MARK, body
from skipless.errors import UserError
from skipless.files import write_atomic

__all__ = ["card_text", "write_card"]
NAME = "README.md"


def card_text(run: str | Path, folder: str | Path | None = None, *, docs: str = "") -> str:
    """The card of `run` as Markdown.

    `folder` is where the model stands that the card is for (the lines under Use fit what it
    holds); None: the run itself. `docs` is the address of the package's docs folder, to which
    equations then link. Raises UserError for what is no run.
    """
    facts = read_facts(run, None if folder is None else Path(folder), docs=docs)
    return head(facts) + "\n" + body(facts)


def write_card(run: str | Path, folder: str | Path, *, docs: str = "") -> Path:
    """Write `card_text` to README.md in `folder`; returns its path.

    A README.md that this did not write is never replaced: UserError.
    """
    path = Path(folder) / NAME
    if not path.parent.is_dir():
        raise UserError(f"{folder} is no folder; name one that holds a model")
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{path} was not written by `skipless card`; move it away, or name another folder"
        )
    return write_atomic(path, card_text(run, folder, docs=docs))
