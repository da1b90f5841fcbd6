"""The cross-entropy that overwrites its log-probabilities equals torch's."""

import pytest
import torch
import torch.nn.functional as F

from skipless.model.losses import cross_entropy


@pytest.mark.parametrize("num_rows", [1, 32, 77])
def test_loss_and_gradient_equal_torch(num_rows):
    torch.manual_seed(num_rows)
    logits, labels = 5 * torch.randn(num_rows, 50), torch.randint(50, (num_rows,))
    labels[::5] = -100
    labels[-1] = 3
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = cross_entropy(ours, labels), F.cross_entropy(theirs, labels)
    assert torch.equal(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-7, rtol=1e-5)
    assert torch.equal(ours.grad[0], torch.zeros(50)) or labels[0] != -100


def test_rows_of_which_none_is_asked_get_no_gradient():
    for loss in (cross_entropy, F.cross_entropy):
        logits = torch.randn(3, 9, requires_grad=True)
        found = loss(logits, torch.full((3,), -100))
        (0 * found).backward()
        assert found.isnan() and torch.equal(logits.grad, torch.zeros(3, 9))


def test_logits_keep_their_values_and_low_precision_goes_through():
    logits = torch.randn(8, 20, dtype=torch.bfloat16, requires_grad=True)
    before, labels = logits.detach().clone(), torch.randint(20, (8,))
    loss = cross_entropy(logits, labels)
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    assert torch.equal(logits.detach(), before)
    assert torch.equal(loss, F.cross_entropy(before.float(), labels))


def test_a_second_backward_pass_is_refused_and_not_wrong():
    logits = torch.randn(4, 9, requires_grad=True)
    loss = cross_entropy(logits, torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
