"""Warm-up of universal interpolation: it lowers its objective, and touches nothing else."""

import pytest
import torch

from skipless.errors import UserError
from skipless.model import Connection, Universal
from skipless.model.warmup import distance, record_pairs, warm_up

from .interpolation_models import T, build, ids


def neutral(aligner="diagonal", **settings):
    """A model that computes what the residual one does."""
    return build(aligner, lively=False, rho=0.0, kappa=2.0, **settings)


def site(model, name) -> Universal:
    module = model.get_submodule(name)
    assert isinstance(module, Universal)
    return module


def recorded(aligner="diagonal"):
    model = neutral(aligner)
    return model, record_pairs(model, [ids(seed=s) for s in range(2)])


class TestRecording:
    def test_pairs_are_those_of_the_residual_model(self):
        model, pairs = recorded()
        plain, seen = build(kind="residual", lively=False), []
        for block in plain.blocks:
            for join in (block.attention_connection, block.mlp_connection):
                assert isinstance(join, Connection)
                join.register_forward_hook(lambda m, args, out: seen.append(args[:2]))
        plain(ids(seed=1))
        assert len(pairs) == 4 and all(len(own) == 2 for own in pairs.values())
        for own, (x, f) in zip(pairs.values(), seen, strict=True):
            assert torch.equal(own[1].stream, x) and torch.equal(own[1].branch, f)

    def test_the_model_is_left_as_it_was(self):
        model = neutral().train()
        before = {n: p.clone() for n, p in model.named_parameters()}
        record_pairs(model, [{"input_ids": ids()}])
        assert all(m.training for m in model.modules())
        assert not any("join" in vars(m) for m in model.modules())
        assert all(torch.equal(p, before[n]) and p.grad is None
                   for n, p in model.named_parameters())  # fmt: skip

    def test_padding_and_entropy_go_along(self):
        model = neutral(gate_feature="entropy")
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :5] = 0
        pairs = record_pairs(model, [{"input_ids": ids(), "attention_mask": mask}])
        attention = pairs["layers.0.attention_connection"][0]
        assert attention.context.tokens is not None
        assert torch.equal(attention.context.tokens, mask.bool())
        later = pairs["layers.1.attention_connection"][0].context.entropy
        entropy = attention.context.entropy
        assert entropy is not None and later is not None and entropy.shape == (2, T)
        assert not torch.equal(entropy, later)

    def test_what_cannot_be_recorded_is_told(self):
        with pytest.raises(UserError, match="no universal connection; build or patch"):
            record_pairs(build(kind="residual"), [ids()])
        with pytest.raises(UserError, match="0 batches reached no pair at .* and 3 more"):
            record_pairs(build(), [])


class TestFitting:
    @pytest.mark.parametrize("aligner", ["mean", "diagonal", "bures"])
    def test_it_lowers_the_objective_at_the_goal(self, aligner):
        model, pairs = recorded(aligner)
        for name, own in pairs.items():  # rho = 0: nothing to lose
            assert float(distance(site(model, name), own[0]).detach()) == 0
        fits = warm_up(model, pairs, steps=60, lr=3e-2)
        for name, fit in fits.items():
            assert fit.after < 0.8 * fit.before, name
            join = site(model, name)
            assert float(join.rho.detach()) == 1
            found = sum(float(distance(join, pair).detach()) for pair in pairs[name]) / 2
            assert fit.after == pytest.approx(found, rel=1e-6)

    def test_it_touches_gate_and_encoder_alone(self):
        model, pairs = recorded()
        before = {n: p.clone() for n, p in model.named_parameters()}
        name = "layers.1.mlp_connection"
        model.get_parameter(f"{name}.gate_bias").requires_grad_(False)
        warm_up(model, {name: pairs[name]}, steps=3, rho=0.5)
        for n, p in model.named_parameters():
            assert torch.equal(p, before[n]) != n.startswith(name), n
            assert p.grad is None and p.requires_grad == (n != f"{name}.gate_bias")
        assert float(model.get_parameter(f"{name}.rho").detach()) == 0.5

    def test_twice_gives_the_same(self):
        one, two = (recorded() for _ in range(2))
        assert warm_up(*one, steps=4) == warm_up(*two, steps=4)

    def test_padding_is_no_part_of_the_objective(self):
        model = neutral()
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :5] = 0
        pair = record_pairs(model, [{"input_ids": ids(), "attention_mask": mask}])[
            "layers.0.mlp_connection"
        ][0]
        join = site(model, "layers.0.mlp_connection")
        join.rho.data.fill_(1.0)
        before = float(distance(join, pair).detach())
        pair.branch[0, :5] += 100
        assert float(distance(join, pair).detach()) == pytest.approx(before, rel=1e-5)

    def test_wrong_use_is_told(self):
        model, pairs = recorded()
        with pytest.raises(UserError, match="fits nothing"):
            warm_up(model, pairs, steps=0)
        with pytest.raises(UserError, match="recorded at elsewhere"):
            warm_up(model, {"elsewhere": []})
        with pytest.raises(UserError, match="no pair of layers.0.mlp_connection"):
            warm_up(model, {**pairs, "layers.0.mlp_connection": []})
