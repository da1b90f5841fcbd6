"""Connections in the model: per layer and sublayer, sharing, annealing, gradients, folding."""

import copy

import pytest
import torch

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig
from skipless.errors import UserError
from skipless.model import CONNECTIONS, Transformer, build_connection
from skipless.model.context import ForwardContext

KINDS = ("residual", "none", "fixed", "rezero", "layerscale", "interpolate", "anneal", "learned",
         "sphere", "universal", "gated")  # fmt: skip


def build(kind="residual", overrides=(), **settings) -> Transformer:
    config = ModelConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=16, connection=ConnectionConfig(kind=kind, **settings),
        connection_overrides=overrides,
    )  # fmt: skip
    return Transformer(config)


IDS = torch.arange(20).view(2, 10)


def test_all_kinds_of_the_config_are_registered():
    assert tuple(CONNECTIONS.names()) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_docstrings_carry_a_tag_and_a_drawing(kind):
    text = CONNECTIONS.get(kind).__doc__
    assert text.startswith("C") and "norm ─ f" in text


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_to_bfloat16_trains_what_float32_does(kind):
    model = build(kind, **({"init": 0.5} if kind in ("rezero", "layerscale") else {}))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(5)
    model.set_training_progress(0.25)  # between the ends of annealing
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found.append((loss.detach(), torch.stack(norms).norm()))
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.02)


def test_kinds_per_layer_and_sublayer():
    none, rezero = ConnectionConfig(kind="none"), ConnectionConfig(kind="rezero")
    rules = (
        ConnectionOverride(connection=none, sublayer="mlp"),
        ConnectionOverride(connection=rezero, layers=(0, -1)),
    )
    kinds = [
        (b.attention_connection.config.kind, b.mlp_connection.config.kind)
        for b in build(overrides=rules).layers
    ]
    assert kinds == [
        ("rezero", "rezero"), ("residual", "none"), ("residual", "none"), ("rezero", "rezero"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_every_parameter(kind):
    model = build(kind)
    model.set_training_progress(0.25)
    for _ in range(2):  # at rezero's start the branch has no gradient, only its gain has
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert all(float(p.grad.abs().sum()) > 0 for p in model.parameters())


@pytest.mark.parametrize(
    "kind, names",
    [
        ("rezero", ["b"]),
        ("layerscale", ["b"]),
        ("anneal", "a"),
        ("interpolate", "ab"),
        ("learned", "ab"),
        ("none", ""),
    ],
)
def test_gains_are_listed(kind, names):
    expected = {f"layers.{i}.{s}_connection.{n}"
                for i in range(4) for s in ("attention", "mlp") for n in names}  # fmt: skip
    assert set(build(kind).gains()) == expected


def test_no_gradient_and_no_nan_come_from_a_stream_of_weight_zero():
    stream = torch.full((1, 1, 4), torch.inf, requires_grad=True)
    branch = torch.ones(1, 1, 4)
    for settings in (dict(kind="none"), dict(kind="fixed", a=0.0), dict(kind="anneal")):
        connection = build_connection(ConnectionConfig(**settings), 4)
        connection.set_training_progress(1.0)
        joined = connection(stream, branch, None)
        assert torch.equal(joined, branch) and not joined.requires_grad


def test_weight_one_is_a_plain_addition():
    x, f = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for settings in (dict(kind="fixed"), dict(kind="anneal")):
        assert torch.equal(build_connection(ConnectionConfig(**settings), 4)(x, f, None), x + f)


def test_a_fixed_weight_of_the_embedding_reaches_every_layer():
    seen = []
    model = build("fixed", a=1.0, b=0.0, c=1.0)
    model.embed_tokens.register_forward_hook(lambda m, a, out: seen.append(out))
    model.layers[-1].mlp_connection.register_forward_hook(lambda m, a, out: seen.append(out))
    model(IDS)
    torch.testing.assert_close(seen[1], seen[0] * 9)  # x0, and once more at each of 8 sites


class TestReZeroPerBlock:
    def test_sublayers_share_one_parameter_on_every_path(self, tmp_path):
        with torch.device("meta"):
            meta = build("rezero", granularity="block")
        for model in (build("rezero", granularity="block"), meta.to_empty(device="cpu")):
            for block in model.layers:
                assert block.attention_connection.alpha is block.mlp_connection.alpha
            assert sum("alpha" in n for n, _ in model.named_parameters()) == 4
        assert all(
            b.attention_connection.alpha is b.mlp_connection.alpha
            for b in copy.deepcopy(build("rezero", granularity="block")).layers
        )

    def test_gradients_of_both_sublayers_add_up(self):
        shared = build("rezero", granularity="block", init=0.3)
        apart = build("rezero", init=0.3)
        for model in (shared, apart):
            model(IDS, labels=IDS).loss.backward()
        for one, two in zip(shared.layers, apart.layers, strict=True):
            expected = two.attention_connection.alpha.grad + two.mlp_connection.alpha.grad
            torch.testing.assert_close(one.mlp_connection.alpha.grad, expected)


class TestAnneal:
    def test_progress_survives_a_checkpoint(self):
        model, other = build("anneal"), build("anneal")
        model.set_training_progress(0.2)
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(IDS).logits, other(IDS).logits)
        assert other.layers[0].mlp_connection._weight == pytest.approx(0.6)
        model.set_training_progress(1.0)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(IDS).logits, build("none")(IDS).logits)

    def test_it_starts_residual_and_ends_without(self):
        model = build("anneal", anneal_fraction=0.5)
        assert torch.equal(model(IDS).logits, build("residual")(IDS).logits)
        model.set_training_progress(0.5)
        assert torch.equal(model(IDS).logits, build("none")(IDS).logits)

    def test_compiled_and_eager_agree_in_every_phase(self):
        x, f = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        connection = build_connection(ConnectionConfig(kind="anneal"), 4)
        compiled = torch.compile(connection, backend="eager", fullgraph=True)
        for progress in (0.0, 0.1, 0.2, 0.3, 0.6):
            connection.set_training_progress(progress)
            torch.testing.assert_close(compiled(x, f, None), connection(x, f, None))

    def test_progress_out_of_range_is_refused(self):
        with pytest.raises(UserError, match="1.5"):
            build("anneal").set_training_progress(1.5)


def test_the_context_is_only_read_for_x0():
    x = torch.randn(1, 2, 4)
    with_embedding = ForwardContext(embedding=x)
    for kind in KINDS:
        connection = build_connection(ConnectionConfig(kind=kind), 4)
        assert torch.equal(connection(x, x, None), connection(x, x, with_embedding))
