"""The subcommand that describes a run to others: `card`."""

from __future__ import annotations

from typing import Annotated

from skipless.cli.arguments import Positional, check_out, option


def card(
    run: Annotated[Positional[str], option("RUN", help="a run directory, such as runs/mine")],
    out: Annotated[str | None, option("FOLDER", default="print it")] = None,
    docs: Annotated[str, option("URL", default="no links")] = "",
) -> None:
    """Write the model card of a run: recipe, data, loss, quantised loss, limits.

    Every number is the run's own; what was not measured says with which command.

    For example: skipless card runs/mine

    Args:
        out: a folder that holds the model, for README.md; the lines under Use fit what it holds.
        docs: the address of the docs folder of skipless, to which equations then link.
    """
    check_out(out)
    from skipless.card import card_text, write_card

    if out is None:
        print(card_text(run, docs=docs), end="")
    else:
        print(write_card(run, out, docs=docs))
