"""The gate of universal interpolation (C8) and the gated join (C10): exact at the neutral start,
entropy as a feature, settings, refusals."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, UniversalConfig
from skipless.errors import UserError
from skipless.model import Transformer, build_connection, describe_interpolation
from skipless.model.aligners import align
from skipless.model.attention_entropy import attention_entropy
from skipless.model.context import ForwardContext

from .interpolation_models import CAUSAL, T, build, clouds, ids, tokens_of


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
        ((name, value),) = change.items()
        with pytest.raises(UserError, match=f"universal.{name} is {value}"):
            dataclasses.replace(UniversalConfig(), **change)
