"""What is measured on a finished run: loss, precision, depth, samples. Run directory in, JSON out.

Each function loads nothing itself; it takes a `LoadedRun` (`skipless.train.load_run`) and writes
one file into the run directory, which the report then reads:

    evaluate_run  -> eval.json      held-out loss, perplexity, bits per byte
    quantize_run  -> quant.json     loss at every scheme and scope; R_l by depth (S9); SQNR by site
    probe_run     -> probe.json     statistics of every site (S1-S3, S7, S8, S10)
    sample_run    -> samples.json   greedy and sampled text
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipless.errors import UserError
from skipless.rundir import RunDir
from skipless.train import LoadedRun, measure_sites

Say = Callable[[str], None]


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


def evaluate_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Held-out loss in nats with its standard error, perplexity, bits per byte -> eval.json."""
    from skipless.evaluate import loss

    batches = held_out_batches(run, _or(num_tokens, run.config.evaluate.num_tokens))
    report = loss(run.model, batches, bytes_per_token=run.data.bytes_per_token)
    result = {
        "held_out_loss": report.nats,
        "perplexity": report.perplexity,
        "bits_per_byte": report.bits_per_byte,
        "num_tokens": report.num_tokens,
        "standard_error": report.standard_error,
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
    """Loss under simulated quantisation, error by depth and SQNR by site -> quant.json."""
    from skipless.evaluate import error_propagation, precision_table, site_sqnr
    from skipless.quant import Scheme

    settings = run.config.evaluate
    parsed = [Scheme.parse(text) for text in schemes or settings.schemes]
    chosen_scopes = scopes or settings.scopes
    batches = held_out_batches(run, _or(num_tokens, settings.num_tokens))
    say(f"{len(parsed)} schemes in scopes {', '.join(chosen_scopes)}")
    table = precision_table(run.model, batches, parsed, chosen_scopes)
    few = batches[: max(1, len(batches) // 4)]
    error_scheme = Scheme.parse(settings.error_scheme)
    scope = "block" if "block" in chosen_scopes else chosen_scopes[0]
    say(f"error of {error_scheme} by depth")
    result = {
        "full_precision": table[0]["loss"] - table[0]["increase"],
        "num_tokens": sum(labels.numel() for _, labels in batches),
        "rows": table,
        "error": {
            "scheme": str(error_scheme),
            "scope": scope,
            "rows": error_propagation(run.model, error_scheme, few, scope),
        },
        "sqnr": {
            "scheme": str(error_scheme),
            "rows": site_sqnr(run.model, error_scheme, few),
        },
    }
    RunDir(run.path).write_json("quant.json", result)
    return result


def probe_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Statistics of every site on held-out text -> probe.json."""
    config = run.config
    if num_tokens is not None:
        config = config.replace(probe={"final_tokens": num_tokens})
    result = measure_sites(run.model, config, run.data, final=True)
    RunDir(run.path).write_json("probe.json", result)
    return result


def sample_run(run: LoadedRun, *, prompt: str | None = None) -> dict[str, str]:
    """Greedy and sampled (temperature 0.8, top 40, seed 0) continuations -> samples.json."""
    import torch

    settings = run.config.evaluate
    prompt = prompt if prompt is not None else settings.prompt
    ids = run.tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty; give at least one character, such as --prompt 'The'")
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
    }
    RunDir(run.path).write_json("samples.json", result)
    return result


def measure_all(run: LoadedRun, *, say: Say = _quiet) -> None:
    """Everything a report shows, skipping what the run directory already holds."""
    directory = RunDir(run.path)
    steps: dict[str, Callable[[], Any]] = {
        "eval.json": lambda: evaluate_run(run),
        "samples.json": lambda: sample_run(run),
        "quant.json": lambda: quantize_run(run),
        "probe.json": lambda: probe_run(run),
    }
    for name, step in steps.items():
        if not (directory / name).exists():
            say(f"writing {name}")
            step()
