"""Aligners of universal interpolation (U2): float64 numpy oracles, matrix maps, running statistics,
gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, UniversalConfig
from skipless.errors import UserError
from skipless.model import KeyValueCache, build_connection
from skipless.model.aligners import align
from skipless.model.context import ForwardContext
from skipless.model.matrix_roots import bures_map, cholesky_map, symmetric_root
from skipless.model.token_statistics import Tokens, prefix_moments, winsor_factors

from .interpolation_models import CAUSAL, build, clouds, tokens_of


def oracle_factors(z, config):
    """Winsorising of one text [T, D], token by token in numpy."""
    size, found = np.sqrt((z**2).mean(1)), np.zeros(len(z))
    for t in range(1, len(z)):
        seen = np.sort(size[max(1, t - config.winsor_window + 1) : t + 1])
        typical = seen[(len(seen) - 1) // 2]
        if len(seen) < 4:
            around = np.sort(np.abs(z[t]))
            typical = min(typical, 1.4826 * around[(len(around) - 1) // 2])
        found[t] = min(1.0, config.winsor * typical / size[t])
    return found


def oracle_affine(x, e, config):
    """(mean_x, mean_e, M) of U2 from the counted, winsorised tokens [n, D] so far."""
    n, width = x.shape
    w = n / (n + config.shrinkage)
    mean_x, mean_e = x.mean(0), e.mean(0)
    cov_x, cov_e = (np.cov(z.T, bias=True).reshape(width, width) for z in (x, e))
    if config.aligner == "mean":
        return w * mean_x, w * mean_e, np.eye(width)
    if config.aligner == "diagonal":
        v_x, v_e = np.diag(cov_x), np.diag(cov_e)
        common = (1 - w) * (v_x + v_e) / 2
        top, bottom = w * v_x + common, w * v_e + common
        known = bottom > 0  # one token has no spread: nothing to scale by yet
        ratio = np.sqrt(np.divide(top, bottom, out=np.ones(width), where=known))
        return w * mean_x, w * mean_e, np.diag(ratio)
    common = (1 - w) * (np.trace(cov_x) + np.trace(cov_e)) / (2 * width) * np.eye(width)
    s_x, s_e = w * cov_x + common, w * cov_e + common
    if config.aligner == "cholesky":
        matrix = np.linalg.inv(np.linalg.cholesky(s_e)).T @ np.linalg.cholesky(s_x).T
    else:
        root = _root(s_e)
        matrix = np.linalg.inv(root) @ _root(root @ s_x @ root) @ np.linalg.inv(root)
    return w * mean_x, w * mean_e, matrix


def _root(s):
    from scipy.linalg import sqrtm

    return sqrtm(s).real


class TestAligners:
    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_causal_form_against_numpy(self, aligner):
        x, f = clouds()
        x[0, 12] *= 40  # something to winsorise
        f[0, 1, 2] = 300
        config = UniversalConfig(aligner=aligner, winsor=2.0, winsor_window=6, chunk_size=7)
        found = align(config, tokens_of(config, x), x, f)[0].numpy()
        zx, zf = (z[0].numpy() for z in (x, f))
        wx, wf = (z * oracle_factors(z, config)[:, None] for z in (zx, zf))
        assert oracle_factors(zx, config)[12] < 0.1 > oracle_factors(zf, config)[1]
        for t in range(30):
            end = t + 1 if aligner in ("mean", "diagonal") else t // 7 * 7
            expected = zf[t]
            if end > 1:
                mean_x, mean_f, matrix = oracle_affine(wx[1:end], wf[1:end], config)
                expected = mean_x + (zf[t] - mean_f) @ matrix
            np.testing.assert_allclose(found[t], expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_whole_sequence_form_against_numpy(self, aligner):
        x, f = clouds(seed=2)
        config = UniversalConfig(aligner=aligner, winsor=None, skip_first_token=False)
        found = align(config, tokens_of(config, x, causal=False), x, f)[0].numpy()
        mean_x, mean_f, matrix = oracle_affine(x[0].numpy(), f[0].numpy(), config)
        expected = mean_x + (f[0].numpy() - mean_f) @ matrix
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def test_sinkhorn_against_plain_domain_numpy(self):
        x, f = (z[0].numpy() for z in clouds(12))
        config = UniversalConfig(aligner="sinkhorn", winsor=None, skip_first_token=False,
                                 shrinkage=0.0, sinkhorn_epsilon=0.3,
                                 sinkhorn_steps=300)  # fmt: skip
        cost = ((f[:, None] - x[None]) ** 2).sum(-1)
        kernel, u = np.exp(-cost / (0.3 * cost.mean())), np.ones(12)
        for _ in range(300):
            v = 1 / 12 / (kernel.T @ u)
            u = 1 / 12 / (kernel @ v)
        plan = u[:, None] * kernel * v
        np.testing.assert_allclose(plan.sum(0), 1 / 12, rtol=1e-4)
        expected = plan @ x / plan.sum(1, keepdims=True)
        stream, branch = (torch.from_numpy(z)[None] for z in (x, f))
        found = align(config, tokens_of(config, stream, causal=False), stream, branch)
        np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6, atol=1e-8)

    def test_a_causal_sinkhorn_is_refused(self):
        with pytest.raises(UserError, match="future"):
            build("sinkhorn")
        join = build_connection(
            ConnectionConfig(kind="universal", universal=UniversalConfig(aligner="sinkhorn")), 5
        )
        with pytest.raises(UserError, match="cannot be causal"):
            join(*clouds(), None)

    def test_without_tokens_the_map_is_the_identity(self):
        x, f = clouds(1)
        for aligner in CAUSAL:
            config = UniversalConfig(aligner=aligner)
            assert torch.equal(align(config, tokens_of(config, x), x, f), f)


class TestMatrixMaps:
    def spd(self, seed, width=6):
        a = torch.randn(1, width, width, generator=torch.Generator().manual_seed(seed)).double()
        return a @ a.mT + 0.1 * torch.eye(width).double()

    def test_both_carry_one_covariance_into_the_other(self):
        target, source = self.spd(0), self.spd(1)
        for function in (bures_map, cholesky_map):
            m = function(target, source)
            torch.testing.assert_close(m.mT @ source @ m, target)

    def test_bures_is_the_optimal_one(self):
        """Its mean squared displacement is the Bures distance; Cholesky's is larger."""
        target, source = self.spd(0), self.spd(1)
        root = symmetric_root(source)
        distance = target + source - 2 * symmetric_root(root @ target @ root)
        distance = float(distance.diagonal(dim1=1, dim2=2).sum())

        def cost(m):
            move = m - torch.eye(6).double()
            return float((move.mT @ source @ move).diagonal(dim1=1, dim2=2).sum())

        assert cost(bures_map(target, source)) == pytest.approx(distance, rel=1e-9)
        assert cost(cholesky_map(target, source)) > distance * 1.001

    @pytest.mark.parametrize("inverse", [False, True])
    def test_gradient_of_the_root_also_with_equal_eigenvalues(self, inverse):
        for matrix in (self.spd(3, 4), torch.eye(4).double()[None] * 2):
            matrix.requires_grad_()
            assert torch.autograd.gradcheck(
                lambda m: symmetric_root((m + m.mT) / 2, inverse=inverse), matrix
            )


class TestStatistics:
    def test_gradient_of_prefix_moments(self):
        config = UniversalConfig()
        x = torch.randn(2, 6, 3).double().requires_grad_()
        tokens = tokens_of(config, x)
        assert torch.autograd.gradcheck(
            lambda x: prefix_moments(tokens, x * tokens.new[..., None], "x"), x
        )

    def test_float32_sums_are_shifted(self):
        config = UniversalConfig(skip_first_token=False)
        x = 1e4 + torch.randn(1, 200, 4)
        exact = prefix_moments(tokens_of(config, x), x, "x", torch.float64)[1]
        found = prefix_moments(tokens_of(config, x), x, "x", torch.float32)[1]
        torch.testing.assert_close(found[:, 20:], exact[:, 20:], rtol=0.01, atol=0)
        raw = x.square().cumsum(1) / 200 - (x.cumsum(1) / 200).square()
        assert abs(float(raw[0, -1, 0] / exact[0, -1, 0]) - 1) > 0.05

    @pytest.mark.parametrize("place", [0, 1, 2, 9])
    def test_one_massive_token_moves_no_variance_much(self, place):
        """SmolLM2's 23,679 in one channel, at the front or later."""
        config = UniversalConfig()
        x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).double()
        calm = x.clone()
        x[0, place, 3] = 23_679.0
        tokens = tokens_of(config, x)
        variance = []
        for z in (calm, x):
            weighted = z * winsor_factors(config, tokens, z, "size")
            variance.append(prefix_moments(tokens, weighted, "x")[1][0, -1])
        raw = prefix_moments(tokens, x * tokens.new[..., None], "x")[1][0, -1]
        # at most 5 root mean squares: 5 sqrt(32) in one of 63 tokens
        assert float(variance[1].max()) < (5 * 32**0.5) ** 2 / 63 * 2 + 3
        assert place == 0 or float(raw.max()) > 1e6
        rest = torch.arange(32) != 3
        torch.testing.assert_close(variance[1][rest], variance[0][rest], rtol=0.25, atol=0)

    @settings(max_examples=20, deadline=None)
    @given(st.integers(2, 20), st.integers(1, 19), st.integers(0, 5), st.booleans())
    def test_pieces_give_the_moments_of_the_whole(self, length, cut, padding, skip):
        cut, padding = min(cut, length - 1), min(padding, length - 1)
        config = UniversalConfig(skip_first_token=skip)
        x = torch.randn(1, length, 3, generator=torch.Generator().manual_seed(length)).double()
        real = torch.arange(length)[None] >= padding
        whole = tokens_of(config, x, real=real)
        expected = prefix_moments(whole, x * whole.new[..., None], "x")
        cache, found = KeyValueCache(), []
        for begin, end in ((0, cut), (cut, length)):
            context = ForwardContext(cache=cache, tokens=real[:, :end])
            part = Tokens.of(config, context, end - begin, x.device, 0)
            found.append(prefix_moments(part, x[:, begin:end] * part.new[..., None], "x"))
            cache.advance(end - begin)
        for i in range(2):
            torch.testing.assert_close(torch.cat([f[i] for f in found], 1), expected[i])
        seen = x[0, padding + skip :]
        if len(seen):
            torch.testing.assert_close(expected[1][0, -1], seen.var(0, correction=0))


class TestGradients:
    @pytest.mark.parametrize("aligner", [*CAUSAL, "sinkhorn"])
    @pytest.mark.parametrize("zero_branch", [False, True])
    def test_finite_from_the_start_with_a_massive_token(self, aligner, zero_branch):
        causal = aligner != "sinkhorn"
        config = ConnectionConfig(
            kind="universal", universal=UniversalConfig(aligner=aligner, chunk_size=4)
        )
        join = build_connection(config, 8)
        generator = torch.Generator().manual_seed(0)
        x, f = (torch.randn(1, 17, 8, generator=generator) for _ in range(2))
        x[0, 0, 2] = x[0, 6, 2] = 23_679.0
        f = f * 0 if zero_branch else f
        x.requires_grad_()
        f.requires_grad_()
        join(x, f, ForwardContext(is_causal=causal)).square().mean().backward()
        for tensor in (x, f, *join.parameters()):
            assert tensor.grad is not None and bool(tensor.grad.isfinite().all())
        assert float(join.rho.grad.abs()) > 0 and float(join.gate_bias.grad.abs()) > 0

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_right_through_the_statistics(self, aligner):
        config = UniversalConfig(aligner=aligner, winsor=None, chunk_size=3)
        x, f = (z.requires_grad_() for z in clouds(7, 3))
        tokens = tokens_of(config, x)
        assert torch.autograd.gradcheck(lambda x, f: align(config, tokens, x, f), (x, f), atol=1e-4)
