"""Universal interpolation (C8, U0-U3) and the gated join (C10): exactness at the neutral start,
causality, the cache, padding, and float64 oracles of every part."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, UniversalConfig
from skipless.errors import UserError
from skipless.model import KeyValueCache, Transformer, build_connection, describe_interpolation
from skipless.model.aligners import align
from skipless.model.attention_entropy import attention_entropy
from skipless.model.context import ForwardContext
from skipless.model.matrix_roots import bures_map, cholesky_map, symmetric_root
from skipless.model.token_statistics import Tokens, prefix_moments, winsor_factors

CAUSAL = ("mean", "diagonal", "cholesky", "bures")
VOCABULARY, T = 40, 22


def build(aligner="diagonal", *, kind="universal", lively=True, model=None, **ui) -> Transformer:
    """Two layers of width 16 with chunks of 4; `lively` gives every zero start a value."""
    ui = {"chunk_size": 4, "winsor_window": 5, "rank": 4, "winsor": 1.5} | ui
    config = ModelConfig(**dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=64, init=InitConfig(std=0.3),
        connection=ConnectionConfig(kind=kind, universal=UniversalConfig(aligner=aligner, **ui)),
    ) | (model or {}))  # fmt: skip
    built = Transformer(config)
    if lively:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in built.named_parameters():
                if name.endswith(("encoder.up", "gate_weight", "gate_bias", "rho")):
                    p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return built.eval()


def ids(batch=2, length=T, seed=0):
    return torch.randint(0, VOCABULARY, (batch, length),
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip


def tokens_of(config, x, *, causal=True, real=None) -> Tokens:
    context = ForwardContext(is_causal=causal, tokens=real)
    return Tokens.of(config, context, x.shape[1], x.device, 0)


def clouds(length=30, width=5, seed=0):
    """A stream and a branch [1, T, D], float64, with full covariances and different means."""
    generator = torch.Generator().manual_seed(seed)
    x, f, mix = (torch.randn(*s, generator=generator).double()
                 for s in ((length, width), (length, width), (width, width)))  # fmt: skip
    return (x @ mix + 2)[None], (0.3 * f @ mix.T - 1)[None]


class TestNeutralStart:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_rho_0_and_kappa_2_is_the_residual_model_bit_for_bit(self, aligner, feature):
        ours = build(aligner, lively=False, rho=0.0, kappa=2.0, gate_feature=feature)
        plain = build(kind="residual", lively=False)
        for dtype in (torch.float32, torch.bfloat16):
            found = ours.to(dtype)(ids()).logits
            assert torch.equal(found, plain.to(dtype)(ids()).logits)

    def test_so_with_a_massive_token(self):
        x, f = torch.randn(1, 9, 8), torch.randn(1, 9, 8)
        x[0, 0, 3] = 23_679.0
        settings_ = UniversalConfig(rho=0.0, kappa=2.0)
        join = build_connection(ConnectionConfig(kind="universal", universal=settings_), 8)
        assert torch.equal(join(x, f, None), x + f)

    @pytest.mark.parametrize("aligner", [*CAUSAL, "sinkhorn", "none"])
    def test_so_in_an_encoder(self, aligner):
        ours = build(aligner, lively=False, rho=0.0, kappa=2.0, model=dict(causal=False))
        plain = build(kind="residual", lively=False, model=dict(causal=False))
        assert torch.equal(ours(ids()).logits, plain(ids()).logits)

    def test_from_scratch_the_gate_is_one_half_and_e_is_the_branch(self):
        x, f = clouds()
        join = build_connection(ConnectionConfig(kind="universal"), 5).double()
        assert torch.equal(join.gate(x, ForwardContext()), torch.full((1, 30, 1), 0.5).double())
        settings_ = join.config.universal
        aligned = align(settings_, tokens_of(settings_, x), x, f)
        torch.testing.assert_close(join(x, f, None), x + 0.5 * aligned)


class TestCausality:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_later_tokens_change_nothing_before_them(self, aligner, feature):
        model = build(aligner, gate_feature=feature)
        first, mask = ids(), torch.ones(2, T)
        mask[1, :3] = 0
        for t in (0, 3, 7, 12):
            second = first.clone()
            second[:, t + 1 :] = (second[:, t + 1 :] + 7) % VOCABULARY
            for attention_mask in (None, mask):
                one, two = (model(i, attention_mask=attention_mask).logits for i in (first, second))
                assert torch.equal(one[:, : t + 1], two[:, : t + 1])
                assert not torch.equal(one[:, t + 1], two[:, t + 1])

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_nor_does_a_cropped_cache_remember_them(self, aligner):
        model, t = build(aligner, gate_feature="entropy"), 9
        first, second = ids(), ids()
        second[:, t:] = (second[:, t:] + 7) % VOCABULARY
        logits = []
        for text in (first, second):
            cache = KeyValueCache()
            model(text[:, :15], cache=cache)
            cache.crop(t)
            logits.append([model(first[:, i : i + 1], cache=cache).logits for i in range(t, T)])
        for one, two in zip(*logits, strict=True):
            assert torch.equal(one, two)


class TestCache:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_decoding_in_pieces_equals_the_whole(self, aligner, feature):
        model = build(aligner, gate_feature=feature).double()
        whole = model(ids()).logits
        for pieces in ((1,) * T, (5, 1, 3, 1, 1, 8, 3)):
            cache, found = KeyValueCache(), []
            for piece in ids().split(pieces, dim=1):
                found.append(model(piece, cache=cache).logits)
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_crop_reorder_and_repeat_carry_the_state(self, aligner):
        model = build(aligner, gate_feature="entropy").double()
        text, rows = ids(), torch.tensor([1, 1, 0])
        cache = KeyValueCache()
        model(text[:, :15], cache=cache)
        cache.crop(6)
        cache.reorder(rows)
        found = [model(text[rows, i : i + 1], cache=cache).logits for i in range(6, T)]
        whole = model(text[rows]).logits[:, 6:]
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_greedy_text_is_the_same_with_and_without(self, aligner):
        model = build(aligner).double()
        prompt = ids(length=4)
        assert torch.equal(model.generate(prompt, 12), model.generate(prompt, 12, use_cache=False))


class TestPadding:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_a_left_padded_batch_equals_single_texts(self, aligner, feature):
        model = build(aligner, gate_feature=feature).double()
        short, text = ids(1, T - 5, seed=4), ids()
        text[0, :5] = 11
        text[0, 5:] = short
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :5] = 0
        found = model(text, attention_mask=mask).logits
        single = model(short).logits
        torch.testing.assert_close(found[:1, 5:], single, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1:], model(text[1:]).logits, rtol=1e-9, atol=1e-9)

        cache = KeyValueCache()
        model(text[:, :8], attention_mask=mask[:, :8], cache=cache)
        for i in range(8, T):
            step = model(text[:, i : i + 1], attention_mask=mask[:, : i + 1], cache=cache).logits
            torch.testing.assert_close(step[:, 0], found[:, i], rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", [*CAUSAL, "sinkhorn"])
    def test_an_encoder_ignores_padding_too(self, aligner):
        model = build(aligner, model=dict(causal=False)).double()
        text, mask = ids(), torch.ones(2, T, dtype=torch.long)
        mask[0, -6:] = 0
        found = model(text, attention_mask=mask).logits[:1, :-6]
        torch.testing.assert_close(found, model(text[:1, :-6]).logits, rtol=1e-8, atol=1e-8)


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
        distance = (target + source - 2 * symmetric_root(root @ target @ root))
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


class TestEntropyGate:
    def test_eager_and_sdpa_are_one_model(self):
        model = build(gate_feature="entropy", model=dict(init=InitConfig(identity_bias=2.0)))
        other = build(gate_feature="entropy", model=dict(
            init=InitConfig(identity_bias=2.0), attention_implementation="eager"))  # fmt: skip
        torch.testing.assert_close(model(ids()).logits, other(ids()).logits, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("padded", [False, True])
    def test_against_the_probabilities_of_eager_attention(self, padded):
        model = build(gate_feature="entropy", model=dict(
            init=InitConfig(identity_bias=2.0, std=0.5), num_key_value_heads=1,
            attention_implementation="eager")).double()  # fmt: skip
        seen = {}
        attention = model.layers[0].self_attn
        attention.probabilities.register_forward_hook(lambda m, a, out: seen.update(p=out))
        model.layers[0].attention_connection.register_forward_pre_hook(
            lambda m, a: seen.update(entropy=a[2].entropy)
        )
        mask = torch.ones(2, T)
        mask[0, :4] = 0 if padded else 1
        model(ids(), attention_mask=mask)
        p = seen["p"].detach().numpy()
        entropy = -(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)).sum(-1).mean(1)
        for row, start in ((0, 4 if padded else 0), (1, 0)):
            for t in range(start, T):
                n = t - start + 1
                expected = entropy[row, t] / math.log(n) if n > 1 else 0.0
                assert float(seen["entropy"][row, t]) == pytest.approx(expected, abs=1e-12)

    def test_long_texts_go_in_blocks(self):
        q, k = (torch.randn(1, 2, 150, 4).double() for _ in range(2))
        found = attention_entropy(q, k, scale=0.5, visible=None, causal=True)
        visible = torch.ones(150, 150).tril().bool()
        p = (q @ k.mT * 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = torch.special.entr(p).sum(-1).mean(1)[0]
        expected = entropy[1:] / torch.arange(2, 151).log().double()
        torch.testing.assert_close(found[0, 1:], expected)
        assert float(found[0, 0]) == 0

    @settings(max_examples=20, deadline=None)
    @given(st.integers(1, 8), st.integers(0, 4), st.floats(0, 50))
    def test_it_lies_between_0_and_1(self, num_new, past, size):
        q = torch.randn(2, 2, num_new, 4) * size
        k = torch.randn(2, 2, num_new + past, 4)
        found = attention_entropy(q, k, scale=1.0, visible=None, causal=past == 0)
        assert found.shape == (2, num_new)
        assert float(found.min()) >= -1e-6 and float(found.max()) <= 1 + 1e-5

    def test_the_mlp_site_uses_spread(self):
        block = build(gate_feature="entropy").layers[0]
        assert block.attention_connection.needs_entropy and not block.mlp_connection.needs_entropy
        assert block.self_attn.measures_entropy
        assert not build().layers[0].self_attn.measures_entropy

    def test_elsewhere_its_absence_is_told(self):
        config = ConnectionConfig(
            kind="universal", universal=UniversalConfig(gate_feature="entropy")
        )
        with pytest.raises(UserError, match="entropy in the context"):
            build_connection(config, 5)(torch.randn(1, 3, 5), torch.randn(1, 3, 5), None)


class TestModel:
    def test_the_same_numbers_from_meta(self):
        from skipless.model import initialize

        plain = build(lively=False)
        with torch.device("meta"):
            meta = Transformer(plain.config)
        meta.to_empty(device="cpu")
        initialize(meta)
        for (name, one), two in zip(plain.named_parameters(), meta.parameters(), strict=True):
            assert torch.equal(one, two), name
        downs = [m.encoder.down for m in plain.modules() if hasattr(m, "encoder")]
        assert len(downs) == 4 and not torch.equal(downs[0], downs[1])

    def test_sites_are_separate_and_described(self):
        text = describe_interpolation(build())
        assert "layers.1.mlp_connection: universal: encoder of rank 4, aligner diagonal" in text
        assert text.splitlines()[-1].startswith("all 4: ")
        with pytest.raises(UserError, match="no universal connection"):
            describe_interpolation(build(kind="residual"))

    def test_folding_is_refused(self):
        for kind in ("universal", "gated"):
            with pytest.raises(UserError, match="cannot be folded"):
                build_connection(ConnectionConfig(kind=kind), 4).fold_into(torch.nn.Linear(4, 4))

    def test_settings_go_to_json_and_back(self):
        config = build("bures", rank=3, winsor=None).config
        assert ModelConfig.from_dict(config.to_dict()) == config
        old = config.to_dict()
        del old["connection"]["universal"]  # a run from before this kind existed
        assert ModelConfig.from_dict(old).connection.universal == UniversalConfig()

    @pytest.mark.parametrize("change", [
        dict(rank=0), dict(winsor=0.5), dict(shrinkage=-1.0), dict(winsor_window=1),
        dict(chunk_size=0), dict(sinkhorn_epsilon=0.0), dict(encoder_dropout=1.0),
    ])  # fmt: skip
    def test_wrong_settings_are_told(self, change):
        (name, value), = change.items()
        with pytest.raises(UserError, match=f"universal.{name} is {value}"):
            dataclasses.replace(UniversalConfig(), **change)


class TestGated:
    @pytest.mark.parametrize("granularity", ["scalar", "channel"])
    def test_against_the_formula(self, granularity):
        x, f = clouds()
        join = build_connection(
            ConnectionConfig(kind="gated", granularity=granularity, scale=2.0), 5
        ).double()
        assert torch.equal(join(x, f, None), x + f)  # s = 2 and g = 1/2
        torch.nn.init.normal_(join.gate_weight, std=0.3)
        weight = join.gate_weight.view(-1, 5)
        g = torch.sigmoid(x @ weight.T + join.gate_bias)
        torch.testing.assert_close(join(x, f, None), 2 * ((1 - g) * x + g * f))
