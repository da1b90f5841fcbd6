"""Gradients of one backward pass: autograd and scipy agree, and the model is left as it was."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

from skipless.diagnose import diagnose
from skipless.diagnose.gradients import gradient_rows
from skipless.diagnose.page import page
from skipless.diagnose.plots import draw
from skipless.errors import UserError


class Small(nn.Module):
    """Two blocks on floating inputs, in float64; `captured` keeps every tensor for autograd."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x):
        self.captured = [x]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            self.captured.append(x)
        return self.head(x)


def check(row, gradient):
    x = np.asarray(gradient, dtype=np.float64).ravel()
    assert row["norm"] == pytest.approx(np.linalg.norm(x), rel=1e-10)
    assert row["rms"] == pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-10)
    assert row["kurtosis"] == pytest.approx(scipy.stats.kurtosis(x), rel=1e-8)
    assert row["max_abs"] == pytest.approx(np.abs(x).max(), rel=1e-12)


def test_they_equal_autograd_and_scipy():
    net = Small()
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    labels = torch.randint(4, (5, 7))
    found = gradient_rows(net, (x, labels))
    leaf = x.clone().requires_grad_(True)
    loss = F.cross_entropy(net(leaf).flatten(0, 1).float(), labels.flatten())
    named = dict(net.named_parameters())
    expected = torch.autograd.grad(loss, [*net.captured, *named.values()])
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert found["of"] == "cross-entropy with the batch's labels"
    rows = {row["site"]: row for row in found["sites"]}
    places = ["blocks.0:input", "blocks.1:input", "blocks.2:input", "head:input"]
    for name, gradient in zip(places, expected[:4], strict=True):
        check(rows[name], gradient)
    weights = {row["site"]: row for row in found["weights"]}
    assert list(weights) == list(named)
    for (name, parameter), gradient in zip(named.items(), expected[4:], strict=True):
        check(weights[name], gradient)
        size = float(parameter.detach().norm())
        assert weights[name]["relative"] == pytest.approx(float(gradient.norm()) / size, rel=1e-6)
    (ratio,) = [r for r in found["ratios"] if r["of"] == "parameters"]
    norms = [
        math.sqrt(sum(float(g.norm()) ** 2 for g in expected[4 + 2 * i : 6 + 2 * i]))
        for i in (0, 2)
    ]
    assert (ratio["first_layer"], ratio["last_layer"]) == (0, 2)
    assert ratio["ratio"] == pytest.approx(norms[0] / norms[1], rel=1e-5)


def test_the_model_is_left_as_it_was():
    net = Small().train()
    net.blocks[1].weight.requires_grad_(False)
    net.head.bias.grad = torch.ones(4, dtype=torch.float64)
    kept, before = net.head.bias.grad, [p.detach().clone() for p in net.parameters()]
    found = gradient_rows(net, (torch.randn(5, 6).double(), torch.randint(4, (5,))))
    assert "blocks.1.weight" in {row["site"] for row in found["weights"]}, "frozen ones too"
    assert net.training and not net.blocks[1].weight.requires_grad
    assert net.head.bias.grad is kept and net.blocks[0].weight.grad is None
    assert all(map(torch.equal, before, net.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_loss_of_ones_own_and_what_is_none():
    net, x = Small(), torch.randn(5, 6).double()
    found = gradient_rows(net, x, lambda model, batch: model(batch).square().mean())
    leaf = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(net(leaf).square().mean(), leaf)
    check(found["sites"][0], expected)
    for loss, said in (
        (lambda model, batch: model(batch), r"a tensor of shape \(5, 4\)"),
        (lambda model, batch: torch.ones(()), "depends on no parameter"),
        (lambda model, batch: model(batch).sum() * math.inf, "so that its gradients say nothing"),
        (lambda model, batch: 3.0, "the loss is float"),
    ):
        with pytest.raises(UserError, match=said):
            gradient_rows(net, x, loss)
    with pytest.raises(UserError, match="has no loss on these batches"):
        gradient_rows(net, x)
    with pytest.raises(UserError, match="has no loss on these batches"):
        gradient_rows(net, (x, torch.randn(5, 4)))


def test_a_backward_that_torch_refuses_is_a_sentence():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = torch.exp(self.linear(x))
            z = y.sum()
            y.add_(1)  # exp needs its own result
            return z

    with pytest.raises(UserError, match="a backward pass of Broken fails"):
        gradient_rows(Broken(), torch.randn(2, 4), lambda model, batch: model(batch))


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_a_language_model_takes_its_own_loss(llama):
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = gradient_rows(llama, ids)
    assert plain["of"] == "next-token loss"
    own = gradient_rows(llama, {"input_ids": ids, "labels": ids})
    assert own["of"] == "the model's own loss"
    assert plain["loss"] == pytest.approx(own["loss"], rel=1e-6)
    for a, b in zip(plain["sites"], own["sites"], strict=True):
        assert a["site"] == b["site"] and a["norm"] == pytest.approx(b["norm"], rel=1e-4)
    kinds = {row["kind"] for row in plain["sites"]}
    assert kinds == {"embedding", "stream", "sublayer_output", "norm_input", "norm_output",
                     "linear_input", "linear_output"}  # fmt: skip
    assert {r["of"]: r["stack"] for r in plain["ratios"]} == {
        "stream": "model.layers", "parameters": ""
    }  # fmt: skip
    # q, k and v see one tensor, so that it has one gradient
    of = {row["site"]: row["tensor"] for row in plain["sites"]}
    assert len({of[f"model.layers.0.self_attn.{c}_proj:input"] for c in "qkv"}) == 1


def test_padding_is_left_out(llama):
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    found = gradient_rows(llama, {"input_ids": ids, "attention_mask": mask})
    assert {row["count"] for row in found["sites"] if row["kind"] == "stream"} == {20}


def test_two_stacks_have_a_ratio_each():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=60,
        num_mel_bins=8, max_source_positions=20, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    batch = {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 60, (2, 6))}
    found = gradient_rows(model, batch)
    assert found["of"] == "the model's own loss"
    stacks = ["model.encoder.layers", "model.decoder.layers"]
    for of in ("stream", "parameters"):
        rows = [row for row in found["ratios"] if row["of"] == of]
        assert [row["stack"] for row in rows] == stacks
        assert [row["last_layer"] for row in rows] == [1, 2]
    output = model.train(False)(**batch)
    leaf = model.model.decoder.layers[2].fc2.weight
    (expected,) = torch.autograd.grad(output.loss, leaf)
    (row,) = [r for r in found["weights"] if r["site"] == "model.decoder.layers.2.fc2.weight"]
    assert row["norm"] == pytest.approx(float(expected.norm()), rel=1e-5)


def test_the_report_shows_them(llama, tmp_path):
    ids = torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(0))
    result = diagnose(llama, ids, "W8A8", layers=False, gradients=True, out=tmp_path / "out")
    assert result.gradients is not None and len(result.lines()) <= 10
    direct = gradient_rows(llama, ids[:4])
    for shown, measured in zip(result.gradients["ratios"], direct["ratios"], strict=True):
        assert shown["ratio"] == pytest.approx(measured["ratio"], rel=1e-6)
    (line,) = [line for line in result.lines() if line.startswith("gradients of")]
    assert "times as long at layer 0 as at layer 2 (stream of model.layers)" in line
    figures, without = draw(result)
    assert "gradients" in {figure.name for figure in figures}
    text = page(result, figures, without)
    for row in result.gradients["weights"]:
        assert row["site"] in text
    lines = (tmp_path / "out" / "gradients.csv").read_text().splitlines()
    assert len(lines) == 1 + len(result.gradients["sites"])
    assert (tmp_path / "out" / "weight_gradients.csv").exists()


def test_a_model_without_a_loss_says_so(planted, ids):
    result = diagnose(planted(), ids, "W8A8", layers=False, gradients=True)
    assert result.gradients is None
    (said,) = [text for text in result.missing if text.startswith("gradients")]
    assert "Planted has no loss on these batches" in said
    labelled = diagnose(planted(), [(ids, ids)], "W8A8", layers=False, gradients=True)
    assert labelled.gradients is not None
