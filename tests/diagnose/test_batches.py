"""What cannot be measured is told before or instead of the model's own exception."""

import shutil

import pytest
import torch
from torch import nn

from skipless.diagnose import compare, diagnose, measure_checkpoints
from skipless.diagnose.loading import load_subject
from skipless.diagnose.parts import Parts
from skipless.errors import UserError
from skipless.quant import quantization


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(64).view(2, 32) % 50


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([IDS[:0]], r"batch 0 has a tensor of shape \(0, 32\)"),
        ([IDS, {"input_ids": IDS[:, :0]}], r"batch 1 has a tensor of shape \(2, 0\)"),
        ([(IDS, IDS[:0])], r"batch 0 has a tensor of shape \(0, 32\)"),
        ([IDS + 10], "batch 0 has the token id 59 and the model knows 0 to 49"),
        ([IDS - 1], "batch 0 has the token id -1"),
        ([IDS.float()], "batch 0 has token ids of torch.float32"),
    ],
)
def test_batches_that_no_model_takes(llama, batches, said):
    with pytest.raises(UserError, match=said):
        diagnose(llama, batches)
    with pytest.raises(UserError, match=said):
        measure_checkpoints([(1, llama), (2, llama)], batches)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())


def test_what_is_no_module():
    with pytest.raises(UserError, match="the model is int; an nn.Module was expected"):
        diagnose(42, [IDS])


def test_a_model_without_a_place_that_runs():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(UserError, match="of a convolution nothing is"):
        diagnose(net, [torch.randn(2, 3, 8, 8)])


class Drifting(nn.Module):
    """Its forward pass moves its weights, as a running average kept in a parameter would."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.a.weight += 0.01
        return self.b(self.a(x))


def test_a_model_that_changes_is_refused_and_left_without_hooks(tmp_path):
    model = Drifting()
    with pytest.raises(UserError, match=r"a\.weight changed while the model was measured"):
        diagnose(model, [torch.randn(4, 8)], out=tmp_path / "out")
    assert quantization(model) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not (tmp_path / "out" / "diagnosis.json").exists()


def test_a_folder_that_another_process_writes_to(tmp_path):
    """Refused while the other one measures, free again when it ends, however it ends."""
    net, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    parts = Parts(tmp_path / "out", {})
    with pytest.raises(ValueError, match="stop"), parts.held():
        with pytest.raises(UserError, match="another process is writing to .*out"):
            diagnose(net, [batch], out=tmp_path / "out")
        raise ValueError("stop")
    diagnose(net, [batch], out=tmp_path / "out")
    assert (tmp_path / "out" / "diagnosis.json").exists()
    assert not (tmp_path / "out" / "parts").exists()


def test_comparisons_and_checkpoints_hold_their_folder_too(tmp_path):
    net, batch, out = (
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
        torch.randn(4, 8),
        tmp_path / "o",
    )
    ways = {
        "comparison.json": lambda: compare(net, net, [batch], out=out),
        "over-time.json": lambda: measure_checkpoints([(1, net), (2, net)], [batch], out=out),
    }
    for name, measured in ways.items():
        with pytest.raises(ValueError, match="stop"), Parts(out, {}).held():
            with pytest.raises(UserError, match="another process is writing to"):
                measured()
            raise ValueError("stop")
        measured()
        assert (out / name).exists() and not (out / "parts").exists()
        shutil.rmtree(out)


def test_who_comes_when_the_other_has_just_finished(tmp_path):
    """The folder was free when it was looked at, and holds a report when the lock is got."""
    out = tmp_path / "out"
    late = Parts(out, {})
    with Parts(out, {}).held():
        (out / "comparison.json").write_text("{}")
    with pytest.raises(UserError, match="holds a finished report"), late.held():
        raise AssertionError("it was let in")
    assert [file.name for file in out.iterdir()] == ["comparison.json"]


def test_a_damaged_file_of_weights(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(UserError, match="cannot be loaded: .*deserializing"):
        load_subject(str(tmp_path))
