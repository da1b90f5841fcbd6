"""A folder with its own code loads where the package is missing, and computes the same bits."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from skipless.config import ConnectionConfig, ConnectionOverride, InitConfig, ModelConfig
from skipless.errors import UserError
from skipless.hf import SkiplessConfig, SkiplessForCausalLM, SkiplessForSequenceClassification
from skipless.hf.remote import write_remote_code

IDS = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "skipless":
            raise ModuleNotFoundError("No module named 'skipless'")

sys.meta_path.insert(0, Missing())
import json, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification

torch.set_num_threads(1)
torch.set_grad_enabled(False)
causal, classifier, again = sys.argv[1:]
try:
    import skipless
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("skipless is there, so the test tests nothing")
trust = {"trust_remote_code": True}
autos = {causal: AutoModelForCausalLM, classifier: AutoModelForSequenceClassification}
for folder, auto in autos.items():
    ids = torch.load(folder + "/ids.pt")
    model = auto.from_pretrained(folder, **trust).eval()
    found = {"logits": model(ids).logits}
    assert AutoConfig.from_pretrained(folder, **trust).model_type == "skipless"
    if folder == causal:
        found["tokens"] = model.generate(ids, max_new_tokens=8, do_sample=False)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        found["padded"] = model(ids, attention_mask=mask).logits[0, 3:]
        found["body"] = AutoModel.from_pretrained(folder, **trust).eval()(ids).last_hidden_state
        model.save_pretrained(again)
    torch.save(found, folder + "/found.pt")
assert not any(name.split(".")[0] == "skipless" for name in sys.modules)
"""


def config(**changes) -> SkiplessConfig:
    """A small model; `changes` are settings of `ModelConfig`."""
    small = ModelConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=60,
        max_position_embeddings=24, **changes,
    )  # fmt: skip
    return SkiplessConfig.from_model_config(small)


def save(model, folder):
    """Save with parameters away from their start, where gains hide what is wrong."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.rand(parameter.shape, generator=generator))
    model.eval().save_pretrained(folder)
    torch.save(IDS, folder / "ids.pt")
    return model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """{kind: (the package's model, what a process without the package found)}, and where that
    process saved the language model again. Connections of every form stand in one model, with an
    identity bias and grouped queries."""
    root = tmp_path_factory.mktemp("remote")
    overrides = (
        ConnectionOverride(layers=(0,), connection=ConnectionConfig(kind="learned")),
        ConnectionOverride(layers=(1,), sublayer="mlp", connection=ConnectionConfig(kind="sphere")),
        ConnectionOverride(
            layers=(2,), sublayer="mlp", connection=ConnectionConfig(kind="universal")
        ),
    )
    settings = config(
        connection=ConnectionConfig(kind="interpolate"), connection_overrides=overrides,
        init=InitConfig(identity_bias=2.0), num_key_value_heads=2, hidden_act="swiglu",
    )  # fmt: skip
    torch.manual_seed(0)
    models = {
        "causal": SkiplessForCausalLM(settings),
        "classifier": SkiplessForSequenceClassification(config(num_labels=3, causal=False)),
    }
    for kind, model in models.items():
        save(model, root / kind)
        files = write_remote_code(root / kind)
        assert files[-1].name == "config.json" and all(file.is_file() for file in files)
    environment = os.environ | {
        "HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    folders = [str(root / name) for name in ("causal", "classifier", "again")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *folders], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {kind: (models[kind], torch.load(root / kind / "found.pt")) for kind in models}
    return found | {"again": root / "again"}


@torch.no_grad()
def test_logits_are_the_packages_bit_for_bit(loaded):
    model, found = loaded["causal"]
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    assert torch.equal(found["logits"], model(IDS).logits)
    assert torch.equal(found["padded"], model(IDS, attention_mask=mask).logits[0, 3:])
    assert torch.equal(found["body"], model.model(IDS).last_hidden_state)
    assert torch.equal(found["tokens"], model.generate(IDS, max_new_tokens=8, do_sample=False))


def test_the_lines_of_a_card_ask_nothing(tiny_run, tmp_path):
    """Where the package is missing and nobody answers, each line runs as it stands, unasked."""
    from skipless.hf.exporting import export_model

    export_model(tiny_run, tmp_path / "out", remote_code=True)
    card = (tmp_path / "out" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    environment = os.environ | {
        "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    program = WITHOUT.split("import json")[0] + code
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "out", env=environment, text=True,
        capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("The king said")
    assert "trust_remote_code" not in done.stderr and "of type" not in done.stderr, done.stderr


@torch.no_grad()
def test_a_classifier(loaded):
    model, found = loaded["classifier"]
    assert torch.equal(found["logits"], model(IDS).logits)


@torch.no_grad()
def test_saved_without_the_package_and_read_with_it(loaded):
    back = SkiplessForCausalLM.from_pretrained(loaded["again"]).eval()
    assert torch.equal(back(IDS).logits, loaded["causal"][0](IDS).logits)
    assert (loaded["again"] / "modeling_skipless.py").is_file(), "with the code"


def test_the_files_need_nothing_else(tmp_path):
    """They import the standard library, torch, safetensors, transformers and one another; every
    file that is there is needed."""
    save(SkiplessForCausalLM(config()), tmp_path)
    files = [file for file in write_remote_code(tmp_path) if file.suffix == ".py"]
    allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "transformers"}
    needed = {"modeling_skipless", "configuration_skipless"}
    for file in files:
        text = file.read_text()
        assert "\nfrom skipless" not in text and "\nimport skipless" not in text.replace(
            "    import skipless", ""
        )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom) and node.level:
                needed.add(node.module)
                assert (tmp_path / f"{node.module}.py").is_file(), f"{file}: {node.module}"
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed, f"{file}: {node.module}"
    assert {file.stem for file in files} == needed


def test_writing_again_changes_nothing(tmp_path):
    save(SkiplessForCausalLM(config()), tmp_path)
    first = {file: file.read_bytes() for file in write_remote_code(tmp_path)}
    assert first == {file: file.read_bytes() for file in write_remote_code(tmp_path)}
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["auto_map"]["AutoModelForCausalLM"] == "modeling_skipless.SkiplessForCausalLM"


def test_what_the_package_saves_names_no_code_that_is_not_there(tmp_path):
    model = SkiplessForCausalLM(SkiplessConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9,
                                               num_attention_heads=1))  # fmt: skip
    model.save_pretrained(tmp_path / "code")
    write_remote_code(tmp_path / "code")
    again = SkiplessForCausalLM.from_pretrained(tmp_path / "code")
    again.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "auto_map" not in config and not list((tmp_path / "plain").glob("*.py"))
    again.save_pretrained(tmp_path / "code")  # where the code is, its name stays
    assert "auto_map" in json.loads((tmp_path / "code" / "config.json").read_text())


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no model of the classes in skipless.hf"):
        write_remote_code(tmp_path)
    for settings, words in [
        ({"architectures": ["LlamaForCausalLM"]}, "holds no model of the classes"),
        ({"architectures": ["SkiplessForCausalLM"], "quantization_config": {}}, "packed integers"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=words):
            write_remote_code(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_run_exported_with_its_code_and_card(tiny_run, tmp_path, monkeypatch, capsys, cache):
    """The lines under Use of its card run where the card lies."""
    from skipless.cli import main

    folder = tmp_path / "out"
    words = ["export", str(tiny_run), "--format", "hf", "--out", str(folder)]
    assert main([*words, "--remote-code"]) == 0
    assert "with trust_remote_code=True" in capsys.readouterr().out
    assert (folder / "modeling_skipless.py").is_file()
    card = (folder / "README.md").read_text()
    assert "trust_remote_code=True" in card and "library_name: transformers" in card
    plain = tmp_path / "plain"
    assert main([*words[:-1], str(plain)]) == 0
    assert not list(plain.glob("*.py"))
    monkeypatch.chdir(plain)
    (code,) = re.findall(r"```python\n(.*?)```", (plain / "README.md").read_text(), re.S)
    capsys.readouterr()
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.startswith("The king said")
    assert main(["export", str(tiny_run), "--out", str(tmp_path / "x"), "--remote-code"]) == 2
    assert "--remote-code is not for --format skipless" in capsys.readouterr().err
