"""What is measured on a finished run: loss, precision, depth, samples. Run directory in, JSON out.

Each function loads nothing itself; it takes a `LoadedRun` (`skipless.train.load_run`) and writes
one file into the run directory, which the report then reads:

    evaluate_run  -> eval.json      held-out loss, perplexity, bits per byte
    quantize_run  -> quant.json     loss at every scheme and scope; R_l by depth (S9); SQNR by site
    probe_run     -> probe.json     statistics of every site (S1-S3, S7, S8, S10)
    sample_run    -> samples.json   greedy and sampled text

Each file says in "measured" what it was made from (training step, held-out tokens, ...). With that
`measure_all` tells what is still good from what an earlier step or other settings left, and
`quantize_run` which rows may stand in one table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipless.errors import UserError
from skipless.rundir import RunDir
from skipless.train import LoadedRun, measure_sites

Say = Callable[[str], None]
CALIBRATION_TOKENS = 8_192
"""Training tokens that fix the ranges of static schemes."""


def _quiet(_: str) -> None:
    return None


def _or(num_tokens: int | None, default: int) -> int:
    return default if num_tokens is None else num_tokens


def held_out_batches(run: LoadedRun, num_tokens: int) -> list:
    """(input_ids, labels) pairs from the run's held-out documents, [batch, sequence_length]."""
    from skipless.data import evaluation_batches

    train = run.config.train
    return evaluation_batches(
        run.data.held_out, train.sequence_length, max(train.batch_size, 16), num_tokens
    )


def measured_from(run: LoadedRun) -> dict[str, dict[str, Any]]:
    """By file: what a measurement with the run's own settings is made from."""
    settings, probe = run.config.evaluate, run.config.probe
    return {
        "eval.json": {"step": run.step, "num_tokens": settings.num_tokens},
        "samples.json": {
            "step": run.step, "prompt": settings.prompt, "sample_tokens": settings.sample_tokens
        },
        "quant.json": {"step": run.step, "num_tokens": settings.num_tokens},
        "probe.json": {
            "step": run.step, "num_tokens": probe.final_tokens, "stats": list(probe.stats)
        },
    }  # fmt: skip


def evaluate_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Held-out loss in nats with its standard error, perplexity, bits per byte -> eval.json."""
    from skipless.evaluate import loss

    num_tokens = _or(num_tokens, run.config.evaluate.num_tokens)
    batches = held_out_batches(run, num_tokens)
    report = loss(run.model, batches, bytes_per_token=run.data.bytes_per_token)
    result = {
        "held_out_loss": report.nats,
        "perplexity": report.perplexity,
        "bits_per_byte": report.bits_per_byte,
        "num_tokens": report.num_tokens,
        "standard_error": report.standard_error,
        "measured": measured_from(run)["eval.json"] | {"num_tokens": num_tokens},
    }
    RunDir(run.path).write_json("eval.json", result)
    return result


def quantize_run(
    run: LoadedRun,
    *,
    schemes: tuple[str, ...] | None = None,
    scopes: tuple[str, ...] | None = None,
    num_tokens: int | None = None,
    say: Say = _quiet,
) -> dict[str, Any]:
    """Loss under simulated quantisation, error by depth and SQNR by site -> quant.json.

    Returns what was asked for. The file keeps the rows it has if they were measured on the same
    weights and as many tokens, and a table of the run's own settings is never replaced by one on
    other tokens. Static schemes are calibrated on training batches.
    """
    from skipless.evaluate import error_propagation, precision_table, site_sqnr
    from skipless.quant import Scheme

    settings = run.config.evaluate
    parsed = list(dict.fromkeys(Scheme.parse(text) for text in schemes or settings.schemes))
    chosen_scopes = tuple(dict.fromkeys(scopes or settings.scopes))
    num_tokens = _or(num_tokens, settings.num_tokens)
    batches = held_out_batches(run, num_tokens)
    error_scheme = Scheme.parse(settings.error_scheme)
    is_static = any(not scheme.dynamic for scheme in (*parsed, error_scheme))
    calibration = calibration_batches(run) if is_static else None
    say(f"{len(parsed)} schemes in scopes {', '.join(chosen_scopes)}")
    table = precision_table(run.model, batches, parsed, chosen_scopes, calibration=calibration)
    few = batches[: max(1, len(batches) // 4)]
    scope = "block" if "block" in chosen_scopes else chosen_scopes[0]
    say(f"error of {error_scheme} by depth")
    result = {
        "full_precision": table[0]["loss"] - table[0]["increase"],
        "num_tokens": sum(labels.numel() for _, labels in batches),
        "rows": table,
        "error": {
            "scheme": str(error_scheme),
            "scope": scope,
            "rows": error_propagation(run.model, error_scheme, few, scope, calibration=calibration),
        },
        "sqnr": {
            "scheme": str(error_scheme),
            "rows": site_sqnr(run.model, error_scheme, few, calibration=calibration),
        },
        "measured": measured_from(run)["quant.json"] | {"num_tokens": num_tokens},
    }
    _keep_table(run, result, say)
    return result


def calibration_batches(run: LoadedRun) -> list:
    """A few batches of the training text, for the fixed ranges of static schemes."""
    from skipless.data import evaluation_batches

    train = run.config.train
    return evaluation_batches(
        run.data.train, train.sequence_length, max(train.batch_size, 16), CALIBRATION_TOKENS
    )


def _keep_table(run: LoadedRun, result: dict[str, Any], say: Say) -> None:
    """Write `result` to quant.json, joined with the rows there that compare to it."""
    directory = RunDir(run.path)
    old = _read(directory, "quant.json")
    if old.get("measured") == result["measured"]:
        rows = {_cell(row): row for row in old["rows"]}
        rows |= {_cell(row): row for row in result["rows"]}
        parts = {"error": old["error"]} if old["error"]["scope"] == "block" else {}
        directory.write_json("quant.json", {**result, **parts, "rows": list(rows.values())})
    elif old and old.get("measured") == measured_from(run)["quant.json"]:
        say(
            f"quant.json keeps its table on {old['measured']['num_tokens']} tokens; the one on "
            f"{result['measured']['num_tokens']} is only shown"
        )
    else:
        directory.write_json("quant.json", result)


def _cell(row: dict[str, Any]) -> tuple[str, str]:
    return row["scheme"], row["scope"]


def _read(directory: RunDir, name: str) -> dict[str, Any]:
    """A measurement; empty when there is none that can be read."""
    try:
        found = directory.read_json(name, {})
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def probe_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Statistics of every site on held-out text -> probe.json."""
    config = run.config
    if num_tokens is not None:
        config = config.replace(probe={"final_tokens": num_tokens})
    result = measure_sites(run.model, config, run.data, final=True, step=run.step)
    RunDir(run.path).write_json("probe.json", result)
    return result


def sample_run(run: LoadedRun, *, prompt: str | None = None) -> dict[str, Any]:
    """Greedy and sampled (temperature 0.8, top 40, seed 0) continuations -> samples.json."""
    import torch

    settings = run.config.evaluate
    prompt = prompt if prompt is not None else settings.prompt
    ids = run.tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty; set evaluate.prompt to at least one character")
    room = run.config.model.max_position_embeddings - len(ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens and the model sees "
            f"{run.config.model.max_position_embeddings}; shorten it"
        )
    device = next(run.model.parameters()).device
    start = torch.tensor([ids], device=device)
    length = min(settings.sample_tokens, room)
    greedy = run.model.generate(start, length)
    sampled = run.model.generate(start, length, temperature=0.8, top_k=40, seed=0)
    result = {
        "prompt": prompt,
        "greedy": run.tokenizer.decode(greedy[0, len(ids) :].tolist()),
        "sampled": run.tokenizer.decode(sampled[0, len(ids) :].tolist()),
        "measured": measured_from(run)["samples.json"] | {"prompt": prompt},
    }
    RunDir(run.path).write_json("samples.json", result)
    return result


def measure_all(run: LoadedRun, *, say: Say = _quiet) -> None:
    """Everything a report shows, skipping what the run directory holds of these very weights."""
    directory = RunDir(run.path)
    steps: dict[str, Callable[[], Any]] = {
        "eval.json": lambda: evaluate_run(run),
        "samples.json": lambda: sample_run(run),
        "quant.json": lambda: quantize_run(run),
        "probe.json": lambda: probe_run(run),
    }
    wanted = measured_from(run)
    for name, step in steps.items():
        found = _read(directory, name)
        if found.get("measured") != wanted[name] or (
            name == "quant.json" and not _is_complete(run, found)
        ):
            say(f"writing {name}")
            step()


def _is_complete(run: LoadedRun, table: dict[str, Any]) -> bool:
    """Whether the table of quant.json has a row for every scheme and scope of the settings."""
    from skipless.quant import Scheme

    settings = run.config.evaluate
    there = {_cell(row) for row in table["rows"]}
    error = str(Scheme.parse(settings.error_scheme))
    return table["error"]["scheme"] == error and there >= {
        (str(Scheme.parse(scheme)), scope)
        for scheme in settings.schemes
        for scope in settings.scopes
    }
