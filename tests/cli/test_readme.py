"""Every command that README.md and the pages of docs/ show can be typed as it stands.

`skipless ...` runs in a temporary directory, in this process: training is shrunk to a second by
overrides, run directories that a command reads are put there first, and rows that would train in
processes of their own are replaced by a trained run. `make ...` is planned with `make -n`.
docs/log.md is a dated record and left out.
"""

import functools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tasks_material import stand_in as stand_in_tasks

from skipless.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
READERS = (
    "eval", "probe", "quantize", "report", "show", "doctor", "diagnose", "export", "generate",
    "card",
)  # fmt: skip
ONLY_PARSED = ("convert", "prune", "fold")
"""They take minutes on the models that the pages name; tests/surgery runs them on tiny ones."""
FOLDED = ("llama", "gguf")
"""Formats of export that the tiny run, without skips, has not; tests/export writes them."""


def commands(page: Path) -> list[str]:
    """The command lines of a page's ```bash and ```console blocks, comments and prompts off."""
    found = []
    for language, body in re.findall(r"^ *```(\w+)\n(.*?)^ *```", page.read_text(), re.S | re.M):
        if language not in ("bash", "console", "sh"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if language == "console":
                if not line.lstrip().startswith("$ "):
                    continue  # output
                line = line.lstrip()[2:]
            words = shlex.split(line, comments=True)
            if words:
                found.append(shlex.join(words).replace("'*'", "*"))
    return found


SHOWN = [
    (f"{page.relative_to(ROOT)}: {command}", command)
    for page in PAGES
    if page.name != "log.md"
    for command in commands(page)
]


def of(*programs: str) -> list:
    return [
        pytest.param(shlex.split(command)[1:], id=label)
        for label, command in SHOWN
        if shlex.split(command)[0] in programs
    ]


def test_every_command_is_of_a_kind_that_is_checked():
    known = {"skipless", "make", "torchrun", "git", "cd", "pip"}
    unknown = [label for label, command in SHOWN if shlex.split(command)[0] not in known]
    assert not unknown, "teach this file to check them"
    readme = [command for label, command in SHOWN if label.startswith("README")]
    assert "make demo" in readme and "make test" in readme


@pytest.mark.parametrize("words", of("make"))
def test_make_targets_exist(words):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", of("torchrun"))
def test_torchrun_lines_parse(words):
    from torch.distributed.run import get_args_parser

    from skipless import recipes
    from skipless.cli.arguments import split_settings
    from skipless.jsonable import override

    parsed = get_args_parser().parse_args(words)
    assert parsed.module and parsed.training_script == "skipless"
    rest, settings = split_settings(parsed.training_script_args)
    assert rest[0] == "train"
    override(recipes.get(rest[1]), settings)


@pytest.fixture
def stand_in(monkeypatch, copy_run):
    """Rows in processes of their own become copies of the tiny run; nothing is downloaded."""

    def train_rows(rows, jobs=None):
        for row in rows:
            copy_run(row.directory)
            config = row.directory / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"name": row.recipe}))

    for module in ("demo", "sweep", "connections"):
        monkeypatch.setattr(f"skipless.{module}.train_rows", train_rows)
        monkeypatch.setattr(f"skipless.{module}.prepare_data", lambda config: None)


@pytest.mark.parametrize("words", of("skipless"))
def test_skipless_commands_run(
    words, tmp_path, monkeypatch, capsys, copy_run, stand_in, tiny_settings, text_file
):
    monkeypatch.chdir(tmp_path)
    if ">" in words:  # `... > file`
        words, (target,) = words[: words.index(">")], words[words.index(">") + 1 :]
    else:
        target = None
    name, *rest = words
    if name == "patch":  # of a real model, which takes a minute and a registry
        monkeypatch.setattr("skipless.surgery.folders.find_folder", lambda _: tiny_llama(tmp_path))
    if name == "eval" and "--tasks" in rest:  # of 86 MB of questions
        stand_in_tasks(monkeypatch, tmp_path)
    if name == "doctor":
        monkeypatch.setattr(
            "skipless.diagnose.loading.find_model",
            lambda _: str(tiny_llama(tmp_path / "small")),
        )
    if name == "generate":
        monkeypatch.setattr(
            "skipless.diagnose.loading.find_model",
            lambda _: str(writing_llama(tmp_path / "small", text_file)),
        )
    assert name in COMMANDS or name.startswith("-")
    if name in ONLY_PARSED or name == "export" and set(rest) & set(FOLDED):
        called = []

        @functools.wraps(COMMANDS[name])
        def instead(**arguments):
            called.append(arguments)

        monkeypatch.setitem(COMMANDS, name, instead)
        assert run([name, *rest]) == 0 and len(called) == 1
        return
    put_in_place(name, rest, copy_run)
    if name != "data":  # named texts stay in the user's cache, others beside `text_file`
        monkeypatch.setenv("SKIPLESS_CACHE", str(text_file.parent / "cache"))
    continues = name == "train" and rest[0].startswith("runs/")
    if name == "train" and not continues:
        rest += [f"--{key}={value}" for key, value in tiny_settings.items()]
    assert run([name, *rest]) == 0
    output = capsys.readouterr().out
    assert output.strip()
    if target:
        Path(target).write_text(output)


def writing_llama(path: Path, text_file: Path) -> Path:
    """A folder of a random Llama with a tokenizer."""
    from skipless.data.tokenizer import train_tokenizer

    folder = tiny_llama(path, vocab_size=300)
    train_tokenizer([text_file.read_text()], 300, folder / "tokenizer.json")
    return folder


def tiny_llama(path: Path, vocab_size: int = 40) -> Path:
    """A folder of a random Llama of three layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=vocab_size, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path / "llama")
    return path / "llama"


def put_in_place(name: str, words: list[str], copy_run) -> None:
    """Make the runs and settings files that a command reads."""
    for place, word in enumerate(words):
        word = word.partition("/checkpoint/")[0]
        reads = name in READERS or (name == "train" and place == 0)
        if reads and word.startswith("runs/") and not Path(word).suffix:
            if "*" in word:
                copy_run(Path(word.replace("*", "one")))
                copy_run(Path(word.replace("*", "two")))
            elif not Path(word).exists():
                copy_run(Path(word) if name != "report" else Path(word) / "one")
        if name == "train" and word.endswith(".json"):
            from skipless import recipes
            from skipless.jsonable import to_json

            Path(word).write_text(to_json(recipes.get("demo-fast-rf-kl")))
        if Path(word).suffix == ".html":
            Path(word).parent.mkdir(parents=True, exist_ok=True)


def run(words: list[str]) -> int:
    """`main`, with a skip when a registry that the command needs is out of reach."""
    from skipless.data import UnreachableError
    from skipless.errors import UserError

    expanded = []
    for word in words:
        expanded += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    try:
        return main([*expanded, "--traceback"])
    except UnreachableError as error:
        pytest.skip(f"offline: {error}")
    except UserError as error:
        if "not installed; install" in str(error):
            pytest.skip(str(error))
        raise
    except SystemExit as end:
        return int(end.code or 0)


def test_extraction_reads_both_kinds_of_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nmake demo    # comment\nskipless train a \\\n  --out b\n\n```\n"
        "```console\n$ skipless list demo\ndemo-rf-kl  ...\n```\n```python\nx = 1\n```\n"
    )
    assert commands(page) == ["make demo", "skipless train a --out b", "skipless list demo"]
