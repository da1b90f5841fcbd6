"""A weight that is NaN: named by every command that would compute with it.

torch's attention on a CPU can turn NaN in a query into zeros, so that logits do not always show it.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from skipless.cli import main

COMMANDS = {
    "generate": ["generate", "MODEL", "--prompt", "the king"],
    "text": ["eval", "MODEL", "--text", "TEXT"],
    "tasks": ["eval", "MODEL", "--tasks", "piqa", "--source", "FOLDER"],
    "loss": ["eval", "MODEL"],
    "hf": ["export", "MODEL", "--format", "hf", "--out", "OUT"],
    "onnx": ["export", "MODEL", "--format", "onnx", "--out", "OUT"],
}


def broken(source, target):
    """A copy of the folder `source` in which one number of a query projection is NaN."""
    folder = shutil.copytree(source, target)
    state = load_file(folder / "model.safetensors")
    name = next(n for n in state if n.endswith("layers.0.self_attn.q_proj.weight"))
    state[name] = state[name].clone()
    state[name][1, 2] = torch.nan
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, f"{name} is nan at [1, 2]"


@pytest.mark.parametrize(
    ("kind", "command"),
    [("run", c) for c in COMMANDS] + [("llama", c) for c in ("generate", "text", "tasks")],
)
def test_the_weight_is_named(kind, command, tiny_run, tiny_llama, text_file, tmp_path, capsys):
    if command == "onnx":
        pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
    folder, told = broken(tiny_run if kind == "run" else tiny_llama, tmp_path / "broken")
    given = {"MODEL": folder, "TEXT": text_file, "FOLDER": tmp_path, "OUT": tmp_path / "out"}
    assert main([str(given.get(word, word)) for word in COMMANDS[command]]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_hidden_layers": 4}, "lacks the weight model.layers.2."),
        ({"num_hidden_layers": 1}, "its config.json counts 1, so the rest would be left out"),
        ({"vocab_size": 200}, "as [300, 32] and its config.json wants [200, 32]"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "text", "tasks"])
def test_a_config_of_another_model(changed, told, command, tiny_llama, text_file, tmp_path, capsys):
    folder = shutil.copytree(tiny_llama, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    given = {"MODEL": folder, "TEXT": text_file, "FOLDER": tmp_path}
    assert main([str(given.get(word, word)) for word in COMMANDS[command]]) == 2
    assert told in capsys.readouterr().err


def test_text_cut_by_a_tokenizer_of_another_model(tiny_llama, text_file, tmp_path, capsys):
    from skipless.data.tokenizer import train_tokenizer

    folder = shutil.copytree(tiny_llama, tmp_path / "broken")
    text = " ".join(f"{first}{second}" for first in "abcdefghij" for second in "klmnopqrst") * 3
    train_tokenizer([text], 400, folder / "tokenizer.json")
    (tmp_path / "text.txt").write_text(text * 9)
    assert main(["eval", str(folder), "--text", str(tmp_path / "text.txt")]) == 2
    assert "knows 0 to 299; cut the text with the tokenizer of this" in capsys.readouterr().err
