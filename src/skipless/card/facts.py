"""What a run holds that its card tells, each measurement only if it is of the final weights.

Read by head.py and sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.card.held import Held, what_holds
from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.rundir import CONFIG, ENVIRONMENT, RunDir


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run as its card sees it. What was not measured is None."""

    run: str
    config: RunConfig
    environment: dict[str, Any]
    result: dict[str, Any] | None
    """train.json: None while the run is not finished."""
    text: dict[str, Any]
    """data.json: hashes, and the loss of token frequencies alone."""
    evaluation: dict[str, Any] | None
    quant: dict[str, Any] | None
    probe: dict[str, Any] | None
    tasks: dict[str, Any] | None
    holds: Held
    """What lies in the folder that the card is for."""
    docs: str

    @property
    def is_classifier(self) -> bool:
        """Whether the model gives a label for a text."""
        return self.config.model.num_labels is not None

    @property
    def name(self) -> str:
        """The title."""
        return self.config.label or self.config.name


def read_facts(run: str | Path, folder: Path | None, *, docs: str = "") -> Facts:
    """Everything of `run` that a card tells. Raises UserError for what is no run."""
    directory = RunDir.open(run)
    config = directory.config()
    if "train" not in (_object(directory, CONFIG) or {}):  # every run says it; defaults are others'
        raise UserError(
            f"{run}/{CONFIG} holds no settings of a training; name a run directory, or restore the "
            "file from a copy"
        )
    result = _object(directory, "train.json")
    step = None if result is None else result.get("step")

    def measured(name: str) -> dict[str, Any] | None:
        found = _object(directory, name)
        if found is None or step is None:
            return None
        of = found.get("measured")
        return found if isinstance(of, dict) and of.get("step") == step else None

    return Facts(
        run=str(run), config=config, environment=_object(directory, ENVIRONMENT) or {},
        result=result, text=_object(directory, "data.json") or {},
        evaluation=measured("eval.json"), quant=measured("quant.json"),
        probe=measured("probe.json"), tasks=_tasks(directory, step), holds=what_holds(folder),
        docs=docs.rstrip("/"),
    )  # fmt: skip


def _object(directory: RunDir, name: str) -> dict[str, Any] | None:
    try:
        found = directory.read_json(name)
    except UserError:
        return None  # a damaged file tells nothing
    return found if isinstance(found, dict) else None


def _tasks(directory: RunDir, step: Any) -> dict[str, Any] | None:
    """tasks.json; one that names no step only where it is newer than the weights."""
    found = _object(directory, "tasks.json")
    weights = directory / "model.safetensors"
    if found is None or step is None or not found.get("rows") or not weights.exists():
        return None
    if isinstance(found.get("measured"), dict):
        return found if found["measured"].get("step") == step else None
    newer = (directory / "tasks.json").stat().st_mtime >= weights.stat().st_mtime
    return found if newer else None
