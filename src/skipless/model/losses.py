"""Cross-entropy of next-token prediction, with a cheaper backward pass on the CPU.

torch's path writes three tensors of the size of the logits (log-probabilities, the gradient of the
negative log-likelihood, the gradient of the logits), which for a large vocabulary is a good part of
a step's memory traffic. Here the log-probabilities become the gradient in place. The loss is the
same number. Read by `transformer.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
ROWS_AT_ONCE = 32  # so many rows of 4,096 logits are half a megabyte, which stays in cache


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label) in nats over labels other than -100, float32 scalar.

    `logits` [n, V], `labels` int64 [n]. NaN if every label is -100, with a gradient of 0, as in
    torch.
    """
    logits = logits.float()
    if logits.requires_grad and torch.is_grad_enabled() and logits.device.type == "cpu":
        return _InPlaceCrossEntropy.apply(logits, labels)
    return F.cross_entropy(logits, labels)


class _InPlaceCrossEntropy(torch.autograd.Function):
    """A second backward pass through the same graph is refused by autograd's version check."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, -1)
        ctx.save_for_backward(log_probabilities, labels)
        return F.nll_loss(log_probabilities, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        out, labels = ctx.saved_tensors
        asked = labels != IGNORED
        # d loss / d logits = (softmax - one_hot) / n in rows that are asked, 0 in the others
        share = torch.where(asked, gradient / asked.sum(), 0.0).unsqueeze(1)
        for rows, part in zip(out.split(ROWS_AT_ONCE), share.split(ROWS_AT_ONCE), strict=True):
            rows.exp_().mul_(part)
        return out.scatter_add_(1, labels.clamp(min=0).unsqueeze(1), -share), None
