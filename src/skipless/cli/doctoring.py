"""The subcommand that judges a run or a model: `doctor`."""

from __future__ import annotations

from typing import Annotated, Literal

from skipless.cli.arguments import AsJson, Positional, Switch, option, whole_number
from skipless.cli.terminal import aligned, print_json

What = Annotated[
    Positional[str],
    option("WHAT", default="", help="a run directory, a log that ProbeLog wrote, a Hugging Face "
           "folder or hub name, or a name of `models list`"),
]  # fmt: skip


def doctor(
    what: What = "",
    text: Annotated[str | None, option("FILE", default="a run's held-out text")] = None,
    against: Annotated[str | None, option("MODEL", default="")] = None,
    num_tokens: Annotated[str, option("TOKENS")] = "1024",
    heatmap: Annotated[str | None, option("FILE.png", default="")] = None,
    key: Annotated[str, option("KEY")] = "kurtosis",
    device: Literal["cpu", "cuda", "mps"] = "cpu",
    hardware: Switch = False,
    json: AsJson = False,
) -> None:
    """Name symptom, evidence, likely cause and remedy of a sick run or model.

    Prints findings, worst first, then the rules that found nothing and those that could not be
    checked. The exit code is 0 whatever is found; only bad input ends in 2. See docs/doctor.md.

    For example: skipless doctor runs/mine --against runs/pruned --hardware

    Args:
        text: a .txt, .jsonl or .parquet file to measure on; models without one of their own are
            measured on the documentation of CPython.
        against: a model before the change, to judge time and memory by.
        num_tokens: how many tokens to measure on.
        heatmap: also draw a number of every site over training, from probes.jsonl.
        key: the number to draw, such as kurtosis, max_over_std, token_similarity, gradient_norms.
        device: where to run; cpu unless named.
        hardware: also try which integer engines are exact here, and which are fast.
    """
    from skipless.errors import UserError

    tokens = whole_number("--num-tokens", num_tokens)
    if not what and not hardware:
        raise UserError("doctor needs a run or a model to look at, or --hardware")
    if not what and (text or against or heatmap):
        raise UserError("--text, --against and --heatmap need a run or a model; name one first")
    if device != "cpu":
        _check_device(device)
    if what:
        from skipless.pretrained.naming import check_named

        check_named(what)
    answer: dict = {}
    lines: list[str] = []
    if what:
        from skipless.doctor import collect, examine
        from skipless.log import say

        assert tokens is not None, "it has a default"
        quiet = (lambda text: None) if json else say
        evidence = collect(
            what, text=text, against=against, num_tokens=tokens, device=device, say=quiet
        )
        found = examine(evidence)
        answer |= found.as_json()
        lines += found.lines()
    if heatmap is not None:
        from skipless.probes.heatmap import heatmap as draw

        path = draw(what, heatmap, key)
        answer["heatmap"] = str(path)
        lines += ["", str(path)]
    if hardware:
        from skipless.quant.integers.hardware import probe, table

        rows = table(probe(device))
        answer["hardware"] = rows
        lines += ([""] if lines else []) + [f"integer engines on this {device}"]
        head = ("engine", "state", "1 token", "16 tokens", "")
        cells = [
            (r["engine"], r["state"], *(_times(r.get(f"speed_{n}")) for n in (1, 16)), r["detail"])
            for r in rows
        ]
        lines += aligned([head, *cells], left=5)
    print_json(answer) if json else print(*lines, sep="\n")


def _check_device(device: str) -> None:
    import torch

    from skipless.errors import UserError

    backend = {"cuda": torch.cuda, "mps": torch.backends.mps}[device]
    if not backend.is_available():
        raise UserError(f"--device is {device} and torch sees none here; leave it out for the CPU")


def _times(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.2f}x"
