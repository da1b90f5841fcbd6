"""The fused join of universal interpolation against autograd's own operations, in float64: values,
gradients, what is kept, and its parts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, UniversalConfig
from skipless.model import aligned_join, build_connection, interpolation
from skipless.model.context import ForwardContext
from skipless.model.pair_attention import pair_attention
from skipless.model.row_products import row_products
from skipless.model.running_sums import running_sums_, suffix_sums_

D, T = 6, 45


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def lively(**settings_):
    config = UniversalConfig(**{"rank": 4, "winsor": 1.5, "winsor_window": 5} | settings_)
    join = build_connection(ConnectionConfig(kind="universal", universal=config), D).double()
    with torch.no_grad():
        for i, p in enumerate(join.parameters()):
            p.add_(0.5 * normal(*p.shape, seed=i))
    return join


def pair(length=T, batch=2):
    x, f = normal(batch, length, D, seed=1) * 2 + 1, normal(batch, length, D, seed=2)
    x[0, 9:10] *= 30  # something to winsorise
    return x.requires_grad_(), f.requires_grad_()


def outcome(join, x, f, context):
    """The output, and the gradients of a fixed sum of it, by inputs and parameters."""
    y = join(x, f, context)
    inputs = [x, f, *join.parameters()]
    grads = torch.autograd.grad((y * normal(*y.shape, seed=3)).sum(), inputs, allow_unused=True)
    return y, [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads, strict=True)]


class TestAgainstPlainAutograd:
    @pytest.mark.parametrize("aligner", aligned_join.FUSED)
    @pytest.mark.parametrize("encoder", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("gate", ["dynamic", "constant"])
    def test_values_and_gradients(self, monkeypatch, aligner, encoder, padded, gate):
        monkeypatch.setattr(aligned_join, "CHUNK", 16 * 2 * D)  # chunks of 16, 16 and 13 tokens
        join, (x, f) = lively(aligner=aligner, encoder=encoder, gate=gate), pair()
        real = None
        if padded:
            real = torch.ones(2, T, dtype=torch.bool)
            real[0, :19] = False  # more than a chunk
        visible = None if real is None else torch.ones(T, T).tril().bool() & real[:, None, None]
        if visible is not None:
            visible = visible | torch.eye(T, dtype=torch.bool)
        context = ForwardContext(tokens=real, visible=visible)
        found, found_grads = outcome(join, x, f, context)
        monkeypatch.setattr(interpolation, "FUSED", ())
        expected, grads = outcome(join, x, f, context)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        for one, two in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("aligner", aligned_join.FUSED)
    def test_gradients_by_finite_differences(self, aligner):
        join, (x, f) = lively(aligner=aligner, winsor=None), pair(7, 1)
        assert torch.autograd.gradcheck(lambda x, f: join(x, f, None), (x, f), atol=1e-4)

    @pytest.mark.parametrize("aligner", aligned_join.FUSED)
    def test_a_graph_can_be_walked_twice(self, aligner):
        join, (x, f) = lively(aligner=aligner), pair()
        total = join(x, f, None).square().sum()
        first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)

    def test_a_mean_of_ten_thousand_deviations_costs_no_digits(self):
        x, f = pair(400, 1)
        x, f = (x.detach() + 1e4).float(), (f.detach() - 1e4).float()
        join = lively(winsor=None, encoder=False)
        exact = join(x.double(), f.double(), None).detach()
        found = join.float()(x, f, None).detach()
        moved = (exact - x).square().mean().sqrt()
        # two float32 numbers of 10^4 differ by 10^-3
        assert float((found - exact).abs().max()) < 0.01 < 1e-4 * float(moved)

    @pytest.mark.parametrize("aligner", aligned_join.FUSED)
    def test_only_stream_and_branch_are_kept(self, aligner):
        kept = {}
        x, f = (torch.randn(1, 64, 256, requires_grad=True) for _ in range(2))
        join = build_connection(
            ConnectionConfig(kind="universal", universal=UniversalConfig(aligner=aligner)), 256
        )

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            join(x, f, None)
        others = {x.untyped_storage().data_ptr(), f.untyped_storage().data_ptr()}
        others |= {p.untyped_storage().data_ptr() for p in join.parameters()}
        rest = sum(size for place, size in kept.items() if place not in others)
        assert len(kept) > len(others) and rest < x.nbytes

    def test_bfloat16_is_summed_in_float32(self):
        join, (x, f) = lively(), pair()
        exact = join(x.bfloat16().double(), f.bfloat16().double(), None)
        found = join.bfloat16()(x.bfloat16(), f.bfloat16(), None)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.1)


class TestRunningSums:
    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 40), st.booleans())
    def test_against_cumsum(self, length, started):
        x = normal(2, length, 3)
        start = normal(2, 3, seed=1) if started else None
        extra = start[:, None] if start is not None else 0
        torch.testing.assert_close(running_sums_(x.clone(), start), x.cumsum(1) + extra)
        back = x.flip(1).cumsum(1).flip(1) + extra
        torch.testing.assert_close(suffix_sums_(x.clone(), start), back)

    def test_what_is_not_finite_stays_behind(self):
        x = normal(1, 30, 3)
        before = running_sums_(x.clone())
        x[:, 13] = torch.inf
        x[:, 20] = torch.nan
        assert torch.equal(running_sums_(x.clone())[:, :13], before[:, :13])


class TestRowProducts:
    @pytest.mark.parametrize("spread", [False, True])
    def test_against_the_plain_form(self, spread):
        x, rows = pair(5)[0], normal(3, D, seed=4).requires_grad_()
        found = row_products(x, rows, spread=spread)
        expected = F.linear(F.rms_norm(x, (D,)), rows)
        torch.testing.assert_close(found.normalised, expected)
        assert (found.spread is None) == (not spread)
        if spread:
            torch.testing.assert_close(found.spread, x.std(-1, correction=0, keepdim=True))

        def values(x, rows):
            of_x = row_products(x, rows, spread=spread)
            return [t for t in (of_x.normalised, of_x.square, of_x.spread) if t is not None]

        assert torch.autograd.gradcheck(values, (x, rows))

    def test_a_constant_token_has_a_gradient_of_zero(self):
        x = torch.ones(1, 2, D, requires_grad=True)
        spread = row_products(x, x[0, :0], spread=True).spread
        assert spread is not None
        (grad,) = torch.autograd.grad(spread.sum(), x)
        assert torch.equal(grad, torch.zeros_like(grad))


class TestPairAttention:
    @pytest.mark.parametrize("length", [1, 5, 70])
    def test_against_one_masked_attention(self, length):
        q, *texts = (normal(2, 1, length, 4, seed=i).requires_grad_() for i in range(5))
        k_1, v_1, k_2, v_2 = texts
        seen = torch.ones(length, length).tril().bool()
        expected = F.scaled_dot_product_attention(
            q, torch.cat((k_1, k_2), 2), torch.cat((v_1, v_2), 2), torch.cat((seen, seen), 1)
        )
        found = pair_attention(q, k_1, v_1, k_2, v_2, scale=0.5)
        torch.testing.assert_close(found, expected)
        grad = normal(*found.shape, seed=9)
        for one, two in zip(
            torch.autograd.grad(found, [q, *texts], grad),
            torch.autograd.grad(expected, [q, *texts], grad),
            strict=True,
        ):
            torch.testing.assert_close(one, two)
