"""A recipe at several learning rates (or several values of any setting), and which did best.

The rates of the demo's rows were found with this; docs/log.md has the tables.
"""

from __future__ import annotations

from pathlib import Path

from skipless import recipes
from skipless.demo import prepare_data
from skipless.errors import UserError
from skipless.jsonable import override
from skipless.rows import Row, check_jobs, train_rows
from skipless.rundir import METRICS, RESULT, RunDir


def run_sweep(
    names: tuple[str, ...],
    *,
    setting: str,
    values: tuple[str, ...],
    out: str | Path = "runs/sweep",
    settings: dict[str, str] | None = None,
    jobs: int | None = None,
) -> list[dict]:
    """Train every recipe at every value; finished runs are not repeated.

    Returns a row a run: {"recipe", SETTING: value, "held_out_loss" in nats (None if it failed),
    "held_out_tokens" that it is the mean over (passages of a classifier), "error"}, also written to
    OUT/sweep.json. `settings` are further overrides, the same for all.
    """
    if not names or not values:
        raise UserError("a sweep needs at least one recipe and one value: --values 1e-3 2e-3")
    check_jobs(jobs)
    settings = settings or {}
    rows, keys, texts = [], [], {}
    for name in names:
        for value in values:
            config = override(recipes.get(name), {**settings, setting: value})
            arguments = [f"--{key}={v}" for key, v in {**settings, setting: value}.items()]
            directory = Path(out) / f"{name}-{setting.rsplit('.', 1)[-1]}-{value}"
            rows.append(Row(name, directory, config.train.num_steps, tuple(arguments)))
            keys.append((name, value))
            texts[config.data, config.model.vocab_size] = config
    for config in texts.values():
        prepare_data(config)
    train_rows(rows, jobs)
    results = []
    for (name, value), row in zip(keys, rows, strict=True):
        losses: list[float] = []
        counted = None
        try:
            found = RunDir(row.directory).read_jsonl(METRICS)
            losses = [r["held_out_loss"] for r in found if "held_out_loss" in r]
            counted = RunDir(row.directory).read_json(RESULT, {}).get("held_out_tokens")
        except UserError as error:  # one damaged log must not cost the whole table
            row.error = row.error or str(error)
        loss = losses[-1] if losses and not row.error else None
        results.append({
            "recipe": name, setting: value, "held_out_loss": loss, "held_out_tokens": counted,
            "error": row.error,
        })  # fmt: skip
    RunDir(out).write_json("sweep.json", results)
    return results


def best(results: list[dict]) -> dict[str, dict]:
    """The result with the lowest held-out loss of each recipe."""
    chosen: dict[str, dict] = {}
    for result in results:
        old = chosen.get(result["recipe"])
        if result["held_out_loss"] is not None and (
            old is None or result["held_out_loss"] < old["held_out_loss"]
        ):
            chosen[result["recipe"]] = result
    return chosen
