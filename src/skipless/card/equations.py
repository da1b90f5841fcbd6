"""Which equations the settings of a run name: tag, what it is, formula, source.

The tags are those of docs/equations.md, where every one has its place in the code. Read by
sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from skipless.config import RunConfig

RF, REZERO, LAYERSCALE, NGPT = "2605.25880", "2003.04887", "2103.17239", "2410.01131"


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One line of the card."""

    tag: str
    what: str
    formula: str = ""
    paper: str = ""
    """arXiv number; empty where it is ours or common."""

    @property
    def anchor(self) -> str:
        """Of its heading in docs/equations.md."""
        return f"{self.tag} {self.what}".lower().replace(" ", "-").translate(_NO_MARKS)


_NO_MARKS = str.maketrans("", "", "(),")

CONNECTIONS = {
    "residual": Equation(tag="C1", what="residual", formula="y = x + f(norm(x))"),
    "none": Equation(tag="C2", what="none", formula="y = f(norm(x))", paper=RF),
    "fixed": Equation(tag="C3", what="fixed", formula="y = a x + b f(norm(x)) + c x0"),
    "rezero": Equation(tag="C4", what="rezero", formula="y = x + alpha f(norm(x))", paper=REZERO),
    "layerscale": Equation(
        tag="C5", what="layerscale", formula="y = x + gamma * f(norm(x))", paper=LAYERSCALE
    ),
    "interpolate": Equation(
        tag="C6", what="interpolate", formula="y = s (1 - lam) x + s lam f(norm(x))"
    ),
    "anneal": Equation(tag="C7", what="anneal", formula="y = a(p) x + f(norm(x))"),
    "learned": Equation(tag="C9", what="learned", formula="y = a x + b f(norm(x))"),
    "universal": Equation(
        tag="C8", what="universal", formula="y = x + kappa g (F + rho (A(e) - F))"
    ),
    "gated": Equation(tag="C10", what="gated", formula="y = s (1 - g) x + s g f(norm(x))"),
    "sphere": Equation(
        tag="C11", what="sphere", formula="y = n(n(x) + alpha (n(F) - n(x)))", paper=NGPT
    ),
}
STARTS = {
    ("value_output", "haar"): Equation(tag="I2", what="value and output"),
    ("query_key", "haar"): Equation(tag="I3", what="query and key", paper=RF),
    ("mlp", "suo"): Equation(tag="I4", what="MLP (SUO)", paper="2302.10322"),
    ("value_output", "cs"): Equation(tag="I5", what="constructive start", paper="2510.00345"),
    ("query_key", "cs"): Equation(tag="I5", what="constructive start", paper="2510.00345"),
    ("query_key", "unit"): Equation(tag="I7", what="identity-biased attention (ours)"),
    ("value_output", "normal"): Equation(tag="I6", what="baseline"),
    ("query_key", "normal"): Equation(tag="I6", what="baseline"),
    ("mlp", "normal"): Equation(tag="I6", what="baseline"),
}
OPTIMIZERS = {
    "kl_shampoo": Equation(tag="O1", what="KL-Shampoo", paper="2509.03378"),
    "kl_soap": Equation(tag="O2", what="SOAP and its relatives", paper="2509.03378"),
    "soap": Equation(tag="O2", what="SOAP and its relatives", paper="2409.11321"),
    "shampoo": Equation(tag="O2", what="SOAP and its relatives", paper="1802.09568"),
    "muon": Equation(tag="O3", what="Muon"),
}


def equations_of(config: RunConfig) -> list[Equation]:
    """What a run's connections, starts, temperature and optimiser are, each once."""
    model = config.model
    kinds = dict.fromkeys(
        model.connection_at(layer, sublayer).kind
        for layer in range(model.num_hidden_layers)
        for sublayer in ("attention", "mlp")
    )
    found = [CONNECTIONS[kind] for kind in kinds if kind in CONNECTIONS]
    for field in ("value_output", "query_key", "mlp"):
        equation = STARTS.get((field, getattr(model.init, field)))
        found += [] if equation is None else [equation]
    if model.init.identity_bias is not None:
        found.append(STARTS["query_key", "unit"])
    if model.temperature.kind != "constant" or model.temperature.length_scaled:
        found.append(Equation(tag="T1", what="attention temperature"))
    if config.optim.name in OPTIMIZERS:
        found.append(OPTIMIZERS[config.optim.name])
    return list(dict.fromkeys(found))
