"""The lines under Use run as they stand, in every folder that `skipless export` makes of a run."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from skipless import recipes
from skipless.card import card_text, write_card
from skipless.cli import main
from skipless.jsonable import override

WANTED = {
    "skipless": ["load_quantized"],
    "hf": ["import skipless.hf", "AutoModelForCausalLM"],
    "hf --remote-code": ["trust_remote_code=True"],
    "compressed-tensors": ["# pip install compressed-tensors", "import skipless.hf"],
    "llama": ["AutoModelForCausalLM"],
    "onnx": ["onnxruntime.InferenceSession('model.onnx'", "up to 32 tokens"],
    "FILE.onnx": ["onnxruntime.InferenceSession('a.onnx'"],
    "FILE.onnx --cached": ["feed[past.name]"],
    "gguf": ["llama-cli -m a.gguf", "gguf_file='a.gguf'"],
}
NEEDS = {"onnx": "onnxruntime", "FILE.onnx": "onnxruntime", "gguf": "gguf",
         "compressed-tensors": "compressed_tensors"}  # fmt: skip
LIBRARY = {"onnx": "onnx", "gguf": "gguf"}


@pytest.fixture(scope="module")
def plain(tiny_settings, text_file, tmp_path_factory):
    """A trained run of SwiGLU with ordinary skips, which stock transformers has a class for."""
    from skipless.data import prepare
    from skipless.train import train

    settings = {**tiny_settings, "model.hidden_act": "swiglu"}
    config = override(recipes.get("connections-4-rezero"), settings)
    path = tmp_path_factory.mktemp("runs") / "plain"
    train(config, path, data=prepare(config.data, 300, cache_dir=text_file.parent / "cache"))
    return path


@pytest.mark.parametrize("form", WANTED)
def test_use(form, plain, tmp_path, monkeypatch, capsys, cache):
    name, *more = form.split()
    pytest.importorskip(NEEDS.get(name, "json"))
    out = tmp_path / "out"
    format = name.removeprefix("FILE.")
    if "FILE" in name or name == "gguf":
        out.mkdir()
        place = out / f"a.{format}"
    else:
        place = out
    words = ["export", str(plain), "--format", format, "--out", str(place), *more]
    if format == "llama":
        words += ["--num-tokens", "64"]
    assert main(words) == 0, capsys.readouterr().err
    text = write_card(plain, out).read_text()
    for wanted in WANTED[form]:
        assert wanted in text, text
    assert "load_run" not in text
    if name == "llama" or more == ["--remote-code"]:
        assert "skipless.hf" not in text
    library = LIBRARY.get(format, "transformers")
    assert f"library_name: {library}\n" in text
    monkeypatch.chdir(out)
    capsys.readouterr()
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "card", "exec"), {})
        assert capsys.readouterr().out.strip()
    for line in re.findall(r"```bash\nskipless (.*?)\n```", text, re.S):
        assert main([*shlex.split(line), "--max-new-tokens", "2"]) == 0
    assert "python" in text


def test_the_head_names_the_language_where_it_is_known(copy_run, tmp_path):
    yaml = pytest.importorskip("yaml")
    run = copy_run(tmp_path / "run")

    def head(sources: list[str]) -> dict:
        config = json.loads((run / "config.json").read_text())
        config["data"]["sources"] = sources
        (run / "config.json").write_text(json.dumps(config))
        text = card_text(run).split("---\n")[1]
        assert ("# language:" in text) != ("\nlanguage:" in text)
        assert ("# datasets: none" in text) != ("\ndatasets:" in text)
        return yaml.safe_load(text)

    assert head(["shakespeare", "kjv"])["language"] == ["en"]
    assert "language" not in head(["shakespeare", "my.txt"])
    assert head(["hf:owner/name"])["datasets"] == ["owner/name"]


def test_tasks_have_intervals_and_kl(copy_run, tmp_path):
    run = copy_run(tmp_path / "run")
    entry = {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.625, "acc_norm_stderr": 0.12}
    change = {"difference": -0.0625, "interval": [-0.1875, 0.03125], "flips": 3}
    against = {"num_questions": 37, "acc_norm": change, "kl_mean": 0.01234, "kl_p95": 0.04321}
    rows = [
        {"scheme": "full precision", "tasks": {"piqa": entry}},
        {"scheme": "W4A4", "tasks": {"piqa": {**entry, "against_full_precision": against}}},
    ]
    tasks = {"tasks": [{"name": "piqa", "chance": 0.5, "num_questions": 37}], "rows": rows}
    (run / "tasks.json").write_text(json.dumps(tasks))
    text = card_text(run).split("## Tasks")[1].split("## Limits")[0]
    assert (
        "| W4A4 | piqa | acc_norm | -0.062 | [-0.188, +0.031] | 3 of 37 | 0.0123 | 0.0432 |" in text
    )
    assert "KL mean" in text and "Against full precision, question by question" in text
