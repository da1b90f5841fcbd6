"""A weight that is NaN: named by every command that would compute with it.

torch's attention on a CPU can turn NaN in a query into zeros, so that logits do not always show it.
"""

from __future__ import annotations

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
        pytest.importorskip("onnx", reason="pip install 'skipless[onnx]'")
    folder, told = broken(tiny_run if kind == "run" else tiny_llama, tmp_path / "broken")
    given = {"MODEL": folder, "TEXT": text_file, "FOLDER": tmp_path, "OUT": tmp_path / "out"}
    assert main([str(given.get(word, word)) for word in COMMANDS[command]]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
