"""Optional packages that are not there: every command and room says so in one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from skipless import packages
from skipless.cli import COMMANDS, main
from skipless.errors import UserError
from skipless.packages import NotInstalledError, install_line, need, not_installed
from skipless.surgery.records import RECORD
from skipless.surgery.saving import MODEL_TYPE

ROOT = Path(__file__).parents[2]
HIDDEN = ["transformers", "accelerate", "datasets", "pyarrow", "lm_eval", "onnx", "onnxruntime",
          "gguf", "tensorboard", "trackio", "compressed_tensors", "huggingface_hub",
          "pytorch_lightning"]  # fmt: skip
CHILD = """
import contextlib, io, json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from skipless.cli import main
for words in json.loads(sys.argv[2]):
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        try:
            code = main(words)
        except BaseException as error:
            code = repr(error)
    print(json.dumps([words, code, told.getvalue()]))
for statement in ("import skipless.hf", "from skipless.hf.cache import QuantizedCache",
                  "from skipless.export import export_gguf; export_gguf('a', 'b.gguf')"):
    try:
        exec(statement)
    except ImportError as error:
        print(json.dumps([[statement], type(error).__name__, str(error)]))
"""


def missing(name: str) -> str:
    return re.escape(f"{name} is not installed") + ".*; install it with `pip install "


def test_every_command_without_optional_packages(copy_run, text_file, cache, tmp_path):
    run = str(copy_run(tmp_path / "run"))
    llama, out = tmp_path / "llama", str(tmp_path / "out")
    llama.mkdir()
    (llama / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "config.json").write_text(
        json.dumps({"model_type": MODEL_TYPE, RECORD: [], "skipless_model_type": "llama"})
    )
    changed = str(patched)
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "piqa.parquet").write_bytes(b"")
    (tmp_path / "images").mkdir()
    hf, text = str(llama), ["--text", str(text_file)]
    export = ["export", run, "--out", out, "--format"]
    packed = str(tmp_path / "packed")
    wanted = {
        "transformers": [
            [*export, "hf"], [*export, "hf", "--remote-code"],
            [*export, "compressed-tensors"], ["export", hf, "--out", out],
            ["export", changed, "--out", out, "--format", "llama"],
            ["fold", changed, "--out", out], ["generate", hf, "--prompt", "a"], ["eval", hf, *text],
            ["eval", hf, "--tasks", "piqa", "--source", str(tmp_path)], ["quantize", hf, *text],
            ["diagnose", hf, *text, "--out", out], ["doctor", hf, *text],
            ["prune", hf, *text, "--out", out],
            ["patch", hf, "--connection", "layerscale", "--out", out],
            ["convert", hf, *text, "--out", out],
        ],
        "onnx and onnxruntime are": [[*export[:-2], f"{out}.onnx", "--format", "onnx"]],
        "gguf and transformers are": [[*export[:-2], f"{out}.gguf", "--format", "gguf"]],
        "lm-eval": [["eval", run, "--tasks", "core8", "--backend", "lm-eval"]],
        "pyarrow": [
            ["train", "demo-fast-rf-kl", "--out", out, "--data.sources",
             str(tmp_path / "a.parquet")],
            ["eval", run, "--tasks", "piqa", "--source", str(tmp_path)],
        ],
        "datasets": [["train", "demo-fast-rf-kl", "--out", out, "--data.sources", "hf:a/b"],
                     ["eval", run, "--tasks", "piqa", "--source", "hub"]],
    }  # fmt: skip
    fine = [
        ["generate", run, "--prompt", "the king", "--max-new-tokens", "2"], ["card", run],
        ["eval", run], ["list"], ["show", "demo-fast-rf-kl"], ["models", "list"], ["data", "list"],
        ["export", run, "--out", packed], ["probe", run],
        ["generate", packed, "--prompt", "the", "--engine", "simulated"],
        ["report", run, "--out", f"{out}.html"],
    ]  # fmt: skip
    lines = [words for group in wanted.values() for words in group] + fine
    apart = {"demo", "sweep", "compare-connections"}  # they train, as `train` does
    assert {words[0] for words in lines} | apart == set(COMMANDS)
    answer = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(HIDDEN), json.dumps(lines)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    told = {tuple(words): (code, text) for words, code, text in found}
    wrong = []
    for name, group in wanted.items():
        for words in group:
            code, text = told[tuple(words)]
            plain = name.removesuffix(" are")
            line = missing(name) if plain == name else f"{plain} are not installed; install them"
            if code != 2 or not re.search(line, text) or "Traceback" in text:
                wrong.append((words, code, text))
    assert not wrong, json.dumps(wrong)
    for words in fine:
        assert told[tuple(words)][0] == 0, (words, told[tuple(words)])
    for words, kind, text in found[len(lines) :]:
        assert kind == "NotInstalledError" and "install" in text, (words, kind, text)
    assert len(found) == len(lines) + 3


def test_the_sentence(monkeypatch):
    with pytest.raises(NotInstalledError, match="nowhere_x is not installed; install it with"):
        need("json", "nowhere_x")
    assert issubclass(NotInstalledError, UserError) and issubclass(NotInstalledError, ImportError)
    assert install_line("lm_eval", "nowhere_x") == "pip install lm-eval==0.4.13 nowhere_x"
    assert str(not_installed("onnx", "gguf", why="why", instead="leave it")) == (
        "onnx and gguf are not installed, why; install them with `pip install 'onnx>=1.16.1' "
        "'gguf>=0.17'`, or leave it"
    )
    monkeypatch.setattr(packages, "__file__", "/nowhere/a/b/packages.py")
    packages._requirements.cache_clear()
    try:  # out of a wheel: what it says of itself
        assert install_line("datasets").startswith("pip install 'datasets>=")
    finally:
        packages._requirements.cache_clear()


@pytest.mark.parametrize(
    ("name", "told"),
    [("matplotlib.figure", "matplotlib>="), ("tokenizers", "tokenizers>="), ("a_bug", "")],
)
def test_a_package_that_no_room_asks_for_first(name, told, monkeypatch, capsys):
    """What is known is told; another module that is missing is a bug, and shows where."""

    def missing(*_):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("skipless.cli._run", missing)
    if not told:
        with pytest.raises(ModuleNotFoundError):
            main(["list"])
        return
    assert main(["list"]) == 2
    assert f"is not installed; install it with `pip install '{told}" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        main(["list", "--traceback"])


def test_nothing_tells_to_install_the_project_from_an_index():
    """It is on none; and messages have one source of such lines."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(extras["optional-dependencies"])
    for file in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("*.md"),
                 *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.py")]:  # fmt: skip
        text = file.read_text()
        if file != Path(__file__):
            assert not re.search(r"pip install '?skipless\b|\bskipless\[[a-z]", text), file
        for inside in re.findall(r"install -e '\.\[([\w,]+)\]'", text):
            assert set(inside.split(",")) <= names, file
        if file.is_relative_to(ROOT / "src") and file.name not in ("packages.py", "pip_fetch.py"):
            assert "pip install" not in text, file
