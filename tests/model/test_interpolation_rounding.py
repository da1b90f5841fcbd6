"""Gradients of the diagonal aligner in float32, beside channels whose mean outweighs all else."""

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.interpolation_config import UniversalConfig
from skipless.model.context import ForwardContext
from skipless.model.interpolation import Universal


def gradients(dtype, mean, deviation):
    """d sum(y r) / d (x, F) at rho 1; channel 3 of both has that mean and deviation."""
    generator = torch.Generator().manual_seed(0)
    settings = UniversalConfig(rho=1.0, kappa=2.0)
    join = Universal(ConnectionConfig(kind="universal", universal=settings), 32).to(dtype)
    join.place(0, "mlp", True)
    x, f, r = torch.randn(3, 1, 64, 32, generator=generator)
    for z in (x, f):
        z[..., 3] = mean + deviation * z[..., 3]
    x, f = (z.to(dtype).requires_grad_() for z in (x, f))
    (join(x, f, ForwardContext(is_causal=True)) * r.to(dtype)).sum().backward()
    return [z.grad.double() for z in (x, f)]


@pytest.mark.parametrize(("mean", "deviation"), [(10.0, 1.0), (100.0, 0.1), (1000.0, 0.1)])
def test_a_variance_of_nothing_leaves_no_rounding_in_the_gradient(mean, deviation):
    """Of one token there is no variance, and d ratio / d variance is some 1 / EPS."""
    for exact, found in zip(
        gradients(torch.float64, mean, deviation), gradients(torch.float32, mean, deviation),
        strict=True,
    ):  # fmt: skip
        error = (found - exact)[..., 3].norm() / exact[..., 3].norm()
        assert error < 1e-2, error
