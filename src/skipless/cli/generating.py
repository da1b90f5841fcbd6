"""The subcommand that has a model write: `generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import (
    AsJson,
    Positional,
    Switch,
    as_options,
    option,
    whole_number,
)
from skipless.cli.terminal import print_json
from skipless.errors import UserError
from skipless.jsonable import read_text
from skipless.scheme import Scheme

STDIN = "-"
OPTIONS = {
    "temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "seed": "--seed",
    "a stop text": "a text of --stop",
}  # fmt: skip
"""What settings are called on the command line."""


def generate(
    model: Annotated[
        Positional[str],
        option(
            "RUN|MODEL",
            help="a run, a folder of `skipless export`, or what `skipless diagnose` takes",
        ),
    ],
    prompt: Annotated[tuple[str, ...], option("TEXT [TEXT ...]", default="stdin")] = (),
    file: Annotated[tuple[str, ...], option("FILE [FILE ...]", default="")] = (),
    max_new_tokens: Annotated[str, option("N")] = "100",
    temperature: Annotated[float, option("T", default="0: the likeliest token")] = 0.0,
    top_k: Annotated[int | None, option("K", default="all")] = None,
    top_p: Annotated[float | None, option("SHARE", default="all")] = None,
    seed: Annotated[int, option("N")] = 0,
    stop: Annotated[tuple[str, ...], option("TEXT [TEXT ...]", default="")] = (),
    ignore_end: Switch = False,
    scheme: Annotated[str | None, option("SCHEME", default="full precision")] = None,
    scope: Annotated[Literal["linear", "block", "all"], option("{linear,block,all}")] = "linear",
    kv_bits: Annotated[int | None, option("BITS", default="as the model computes")] = None,
    engine: Annotated[Literal["auto", "simulated"], option("{auto,simulated}")] = "auto",
    device: Annotated[str, option("DEVICE", default="auto")] = "auto",
    json: AsJson = False,
) -> None:
    """Continue a text, token by token as they come.

    Text goes to stdout; which engine runs, tokens a second and the size of the cache to stderr.

    For example: skipless generate runs/mine --prompt "The king" --scheme W8A8-KV8

    Args:
        prompt: one or several texts, each continued for itself; - reads stdin.
        file: files that are prompts, each as a whole.
        max_new_tokens: at most so many; a model ends a text earlier by itself.
        temperature: 0.8 draws less freely than 1, the model's own probabilities.
        top_k: draw among the K likeliest tokens.
        top_p: draw among the likeliest tokens that have this share of the probability.
        seed: the same seed draws the same text.
        stop: texts that end the writing and are not printed.
        ignore_end: go on after the token that ends texts.
        scheme: quantise first, such as W8A8-KV8 (docs/quantise.md).
        scope: what the scheme touches; integers are fused in linear.
        kv_bits: keys and values as integers, 2 to 16 bits, beside any scheme or alone; stored in 4,
            8 or 16 bits, so that 2 and 3 take as much room as 4.
        engine: simulated computes a scheme in floating point.
        device: cpu, cuda, cuda:N or mps; schemes run on integers on the CPU.
    """
    tokens = whole_number("--max-new-tokens", max_new_tokens)
    assert tokens is not None, "it has a default"
    if scheme is not None:
        Scheme.parse(scheme)
    elif scope != "linear":
        raise UserError(f"--scope {scope} is what a scheme touches; give --scheme too")
    prompts = _prompts(prompt, file)
    from skipless.pretrained.naming import check_named

    check_named(model, holds_model=True)
    from skipless.serving import Settings, open_writer

    with as_options(OPTIONS):
        settings = Settings(
            max_new_tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            stop=stop, ignore_end=ignore_end,
        )  # fmt: skip
    writer = open_writer(
        model, scheme=scheme, scope=scope, kv_bits=kv_bits, device=device, engine=engine
    )
    for text in prompts:  # a mistake in the last is told before the first is continued
        writer.encode(text)
    _write_all(writer, prompts, settings, json)


def _prompts(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts to continue. Raises UserError for none, and for what cannot be read."""
    if not given and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("there is no prompt; give --prompt TEXT, --file FILE or text on stdin")
        given = (STDIN,)
    if given.count(STDIN) > 1:
        raise UserError(f"{STDIN} stands for stdin, which is read once; give it once")
    prompts = []
    for text in given:
        if text == STDIN:
            text = _from_stdin()
        if not text.strip():
            raise UserError("the prompt is empty; give at least one word")
        prompts.append(text)
    for name in files:
        text = _bare(read_text(Path(name)))
        if not text.strip():
            raise UserError(f"{name} is empty; name a file with some text")
        prompts.append(text)
    return prompts


def _from_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"what stands on stdin is not UTF-8 text ({error})") from None
    return _bare(text.replace("\r\n", "\n"))  # as a file is read


def _bare(text: str) -> str:
    """Without the mark that some editors begin a file with, and the end of the last line."""
    return text.removeprefix("\ufeff").removesuffix("\n")


def _write_all(writer: Any, prompts: list[str], settings: Any, json: bool) -> None:
    from skipless.log import say
    from skipless.serving import write

    if not json:
        say(f"{writer.name}: {writer.engine}")
    results = []
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1 and not json:
            if number:
                _emit("\n")
            say(f"[{number + 1}] {_shortened(prompt)}")
        written = write(writer, prompt, settings, (lambda _: None) if json else _emit)
        results.append(written)
        if not json:
            _emit("\n")
            say(_summary(written))
            if written.num_dropped_tokens:
                say(
                    f"the text outgrew the {writer.limit} tokens that the model sees: its first "
                    f"{written.num_dropped_tokens} were out of sight at the end"
                )
        if written.finish == "interrupted":
            break
    if json:
        print_json({
            "model": writer.name, "engine": writer.engine, "kind": writer.kind,
            "results": [written.to_dict() for written in results],
        })  # fmt: skip
    if results[-1].finish == "interrupted":
        raise KeyboardInterrupt(f"{len(results[-1].token_ids)} tokens were written")


def _emit(text: str) -> None:
    """To stdout at once, in UTF-8 whatever the terminal says."""
    out = getattr(sys.stdout, "buffer", None)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write(text.encode("utf-8", errors="replace"))
    sys.stdout.flush()


def _shortened(text: str, most: int = 60) -> str:
    first = " ".join(text.split())
    return first if len(first) <= most else f"{first[: most - 3]}..."


ENDS = {
    "length": "as many as asked for",
    "end": "the model ended the text",
    "stop": "a stop text came",
    "context": "the context is full",
    "interrupted": "interrupted",
}


def _summary(written: Any) -> str:
    """One line of what it took."""
    parts = [
        _rate(written.num_prompt_tokens, "prompt token", written.prompt_speed),
        _rate(len(written.token_ids), "new token", written.speed) + f" ({ENDS[written.finish]})",
    ]
    size = written.cache_bytes
    if size is not None:
        parts.append(
            f"cache {size / 1e6:,.2f} MB" if size >= 1e5 else f"cache {size / 1e3:,.1f} kB"
        )
    return "; ".join(parts)


def _rate(count: int, what: str, speed: float | None) -> str:
    tokens = f"{count} {what}{'' if count == 1 else 's'}"
    return tokens if speed is None else f"{tokens} at {speed:,.1f} a second"
