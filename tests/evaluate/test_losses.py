"""loss: the number, its uncertainty, the forms of a batch, and bad input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tasks_material import llama
from torch import nn

from skipless.errors import UserError
from skipless.evaluate import LossReport, SequenceLosses, loss, sequence_losses


def by_hand(model, batches) -> np.ndarray:
    """Nats of every token in float64, [sequences, time]."""
    rows = []
    model.eval()
    for inputs, labels in batches:
        with torch.no_grad():
            z = model(inputs).logits.double().numpy()
        z = z - z.max(-1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
        rows.append(-np.take_along_axis(log_p, labels.numpy()[..., None], -1)[..., 0])
    return np.concatenate(rows)


def test_against_float64(model, batches):
    each = by_hand(model, batches)
    report = loss(model, batches, bytes_per_token=3.5)
    assert report.nats == pytest.approx(each.mean(), rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(each.mean()), rel=1e-6)
    assert report.bits_per_byte == pytest.approx(each.mean() / math.log(2) / 3.5, rel=1e-6)
    assert (report.num_tokens, report.num_sequences) == (84, 7)
    # Sequences of one length: the standard error is that of the mean of their means.
    expected = each.mean(1).std(ddof=1) / math.sqrt(7)
    assert report.standard_error == pytest.approx(expected, rel=1e-5)
    assert loss(model, batches).bits_per_byte is None
    assert LossReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_tokens_weigh_the_same_whatever_their_sequence(model, batches):
    masked = [(inputs, labels.clone()) for inputs, labels in batches]
    masked[0][1][0, 3:] = -100
    masked[2][1][:] = -100  # a sequence without labels does not count
    each = by_hand(model, batches)
    kept = np.ones_like(each, dtype=bool)
    kept[0, 3:] = False
    kept[6] = False
    report = loss(model, masked)
    assert report.nats == pytest.approx(each[kept].mean(), rel=1e-6)
    assert (report.num_tokens, report.num_sequences) == (kept.sum(), 6)


def test_standard_error_covers_the_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        counts = torch.randint(5, 50, (40,), generator=generator).double()
        effects = torch.randn(40, generator=generator, dtype=torch.float64)
        found = SequenceLosses(sums=counts * (3 + effects), counts=counts)
        inside += abs(found.nats - 3) < 1.96 * found.standard_error()
    assert 0.90 < inside / 400 < 0.98


def test_pairing_removes_what_both_share(model, batches):
    base = sequence_losses(model, batches)
    shifted = SequenceLosses(sums=base.sums + 0.25 * base.counts, counts=base.counts)
    assert shifted.standard_error(base) == pytest.approx(0, abs=1e-12)
    assert shifted.standard_error() == pytest.approx(base.standard_error())


def test_one_sequence_has_no_standard_error(model, batches):
    assert loss(model, batches[2:]).standard_error is None


def test_forms_of_a_batch_agree(model, batches):
    expected = loss(model, batches).nats
    whole = [torch.cat([inputs, labels[:, -1:]], 1) for inputs, labels in batches]
    assert loss(model, whole).nats == pytest.approx(expected, rel=1e-6)
    assert loss(model, [{"input_ids": w} for w in whole]).nats == pytest.approx(expected, rel=1e-6)
    as_hf = [{"input_ids": w, "labels": w} for w in whole]
    assert loss(model, as_hf).nats == pytest.approx(expected, rel=1e-6)
    assert loss(model, whole[0]).nats == pytest.approx(loss(model, whole[:1]).nats)
    assert loss(model, iter(batches)).nats == pytest.approx(expected)


def test_padding_is_left_out(model, batches):
    short = torch.cat([batches[0][0], batches[0][1][:, -1:]], 1)[:1, :9]
    padded = torch.cat([short, torch.zeros(1, 4, dtype=torch.long)], 1)
    mask = (torch.arange(13) < 9)[None].long()
    report = loss(model, [{"input_ids": padded, "attention_mask": mask}])
    assert report.num_tokens == 8
    assert report.nats == pytest.approx(loss(model, [short]).nats, rel=1e-5)


def test_padding_on_the_left_is_left_out():
    pytest.importorskip("transformers")
    model = llama()
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    report = loss(model, [{"input_ids": padded, "attention_mask": (padded > 0).long()}])
    assert report.num_tokens == 16
    assert report.nats == pytest.approx(loss(model, [ids]).nats, rel=1e-5)


def test_ids_of_32_bits(model, batches):
    narrow = [(inputs.int(), labels.int()) for inputs, labels in batches]
    assert loss(model, narrow) == loss(model, batches)
    whole = torch.cat([batches[0][0], batches[0][1][:, -1:]], 1)
    assert loss(model, [whole.int()]) == loss(model, [whole])


def test_mode_and_gradients_are_left_as_they_were(model, batches):
    model.train()
    model.layers[1].mlp.eval()
    loss(model, batches)
    assert model.training and not model.layers[1].mlp.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


def test_hugging_face_model_agrees_with_its_own_loss():
    pytest.importorskip("transformers")
    model = llama()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    assert loss(model, [ids]).nats == pytest.approx(float(expected), rel=1e-5)
    assert loss(model, [{"input_ids": ids}]).nats == pytest.approx(float(expected), rel=1e-5)


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, ids):
        return self.value


ids = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("module", "batches", "says"),
    [
        (Constant(torch.zeros(2, 3, 5)), [], "no token"),
        (Constant(torch.zeros(2, 3, 5)), [torch.zeros(0, 3, dtype=torch.long)], "no token"),
        (Constant(torch.zeros(2, 1, 5)), [torch.zeros(2, 1, dtype=torch.long)], "no token"),
        (Constant(torch.zeros(2, 3, 5)), [(ids, ids + 5)], "batch 0 has the label 5.*0 to 4"),
        (Constant(torch.zeros(2, 3, 5)), [(ids, ids - 1)], "label -1"),
        (Constant(torch.zeros(2, 3, 5)), [(ids, ids.float())], "labels of torch.float32"),
        (Constant(torch.zeros(2, 5)), [(ids, ids)], r"logits \(2, 5\)"),
        (Constant("text"), [(ids, ids)], "returns str without logits"),
        (Constant(torch.zeros(2, 3, 5)), ["text"], "batch is str"),
        (Constant(torch.zeros(2, 3, 5)), [ids[0]], r"shape \(3,\)"),
        (Constant(torch.full((2, 3, 5), math.nan)), [(ids, ids)], "loss of batch 0 is not finite"),
    ],
)
def test_bad_input(module, batches, says):
    with pytest.raises(UserError, match=says):
        loss(module, batches)


def test_bytes_per_token_must_be_positive(model, batches):
    with pytest.raises(UserError, match="bytes_per_token is 0"):
        loss(model, batches, bytes_per_token=0)
