"""Accuracy against a count by hand."""

import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate import accuracy


class Fixed(nn.Module):
    """Answers each passage with the logits its first token names."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.table[input_ids[:, 0]]})


def test_accuracy_loss_and_recall_by_hand():
    model = Fixed([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    ids = torch.tensor([[0, 5], [0, 5], [1, 5], [1, 5]])
    labels = torch.tensor([0, 1, 1, 2])
    found = accuracy(model, [(ids[:3], labels[:3]), (ids[3:], labels[3:])])
    assert found.accuracy == 0.5 and found.num_passages == 4
    assert found.standard_error == pytest.approx(0.25)
    assert found.recall == (1.0, 0.5, 0.0)
    two, one = math.log(math.exp(2) + 2), math.log(math.e + 2)
    assert found.nats == pytest.approx((two - 2 + two + one - 1 + one) / 4)
    assert model.training


def test_what_is_no_classifier():
    lm = Fixed([[[0.0, 1.0]] * 2] * 2)
    with pytest.raises(UserError, match=r"logits \[batch, num_labels\] were expected"):
        accuracy(lm, [(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))])
    with pytest.raises(UserError, match="no passage"):
        accuracy(lm, [])
    with pytest.raises(UserError, match="not finite"):
        accuracy(Fixed([[math.nan, 1.0]]), [(torch.zeros(1, 1).long(), torch.zeros(1).long())])
