"""The YAML head of a card: what the Hugging Face hub reads.

The licence of the weights is the user's to choose, so it stands as a comment. Read by
`skipless.card`.
"""

from __future__ import annotations

import json

from skipless.card.facts import Facts
from skipless.data.catalog import SOURCES

HUB = "hf:"


def head(facts: Facts) -> str:
    """The lines between two ---."""
    config = facts.config
    languages = _languages(facts)
    named = ["language:", *(f"- {code}" for code in languages)]
    lines = [
        "---",
        "# license: yours to choose; those of the training texts stand under Attribution",
        *(named if languages else ["# language: yours to name, of texts not known here"]),
        f"library_name: {facts.holds.hub_name}",
        f"pipeline_tag: text-{'classification' if facts.is_classifier else 'generation'}",
        "tags:",
        *(f"- {tag}" for tag in tags(facts)),
    ]
    # the hub links what stands here to its own data sets; other texts stand in the body
    datasets = [s.removeprefix(HUB) for s in config.data.sources if s.startswith(HUB)]
    if datasets:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    else:
        lines.append("# datasets: none of the hub; the texts stand under Data and tokens")
    return "\n".join((*lines, "---", ""))


def _languages(facts: Facts) -> list[str]:
    """Codes of the languages of the training texts; [] where one of them is not known here."""
    sources = facts.config.data.sources
    if not all(name in SOURCES.names() for name in sources):
        return []
    return sorted({SOURCES.get(name).language for name in sources})


def tags(facts: Facts) -> list[str]:
    """Words to be found by: the package, the connections, the optimiser, integers."""
    model = facts.config.model
    kinds = dict.fromkeys(
        model.connection_at(layer, sublayer).kind
        for layer in range(model.num_hidden_layers)
        for sublayer in ("attention", "mlp")
    )
    found = ["skipless", *(f"connection-{kind}" for kind in kinds)]
    if set(kinds) <= {"none", "anneal"}:
        found.append("residual-free")
    found.append(facts.config.optim.name.replace("_", "-"))
    if facts.holds.is_packed:
        found.append("quantized")
    return list(dict.fromkeys(found))
