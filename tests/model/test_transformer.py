"""The whole model: parity with Hugging Face, construction, heads, sites, bad input."""

import copy

import pytest
import torch
from torch import nn

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.model import Transformer, initialize, layout
from skipless.model.norms import RMSNorm
from skipless.sites import find_sites

IDS = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))


def build(seed: int = 0, **changes) -> Transformer:
    base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=40,
                max_position_embeddings=24)  # fmt: skip
    return Transformer(ModelConfig(**(base | changes)), seed=seed)


@pytest.mark.parametrize("groups", [4, 2])
def test_logits_and_gradients_equal_a_hugging_face_llama(groups):
    transformers = pytest.importorskip("transformers")
    ours = build(hidden_act="swiglu", intermediate_size=48, num_key_value_heads=groups,
                 tie_word_embeddings=False, init=InitConfig(std=0.2))  # fmt: skip
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=40,
            num_key_value_heads=groups, intermediate_size=48, max_position_embeddings=24,
            tie_word_embeddings=False, rms_norm_eps=1e-6,
        )
    )  # fmt: skip
    state = {k if k == "lm_head.weight" else f"model.{k}": v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    one, two = ours(IDS, labels=IDS), theirs(IDS)
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-5, atol=1e-5)
    one.loss.backward()
    nn.functional.cross_entropy(two.logits.flatten(0, 1), IDS.flatten()).backward()
    for name, p in ours.named_parameters():
        other = theirs.get_parameter(name if name == "lm_head.weight" else f"model.{name}")
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-3, atol=1e-5)


class TestConstruction:
    def test_it_does_not_touch_the_global_generator(self):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        build()
        assert torch.equal(torch.rand(3), expected)

    def test_the_seed_decides_every_matrix(self):
        one, same, other = build(0), build(0), build(1)
        for (name, p), q, r in zip(
            one.named_parameters(), same.parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(p, q)
            assert (p.ndim == 1) == torch.equal(p, r), name

    @pytest.mark.parametrize("changes", [
        dict(),
        dict(init=InitConfig(value_output="haar", query_key="cs", mlp="suo", identity_bias=5.0)),
        dict(tie_word_embeddings=False, norm="layernorm", position="learned"),
        dict(num_labels=3, connection=ConnectionConfig(kind="anneal")),
        dict(connection=ConnectionConfig(kind="rezero", granularity="block"),
             temperature=TemperatureConfig(kind="learned_head", beta=1.1)),
    ])  # fmt: skip
    def test_meta_materialisation_gives_the_same_numbers(self, changes):
        with torch.device("meta"):
            model = build(**changes)
        assert all(t.is_meta for t in model.state_dict().values())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for t in model.state_dict().values():
                t.fill_(torch.nan)  # what memory may hold
        initialize(model, seed=0)
        expected = build(**changes).state_dict()
        assert model.state_dict().keys() == expected.keys()
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name

    def test_layers_and_roles_get_different_draws(self):
        first, second = build().layers
        assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)
        assert not torch.equal(first.self_attn.q_proj.weight, first.self_attn.k_proj.weight)

    @pytest.mark.parametrize("tie", [True, False])
    def test_tying_survives_copies_and_casts(self, tie):
        with torch.device("meta"):
            meta = build(tie_word_embeddings=tie)
        for model in (build(tie_word_embeddings=tie), meta.to_empty(device="cpu"),
                      copy.deepcopy(build(tie_word_embeddings=tie)).double()):  # fmt: skip
            assert (model.lm_head.weight is model.embed_tokens.weight) is tie
        shared = 0 if tie else 40 * 32
        assert build(tie_word_embeddings=tie).num_parameters(gains=False) == (
            2 * 12 * 32**2 + 40 * 32 + shared
        )

    @pytest.mark.parametrize("placement, norms", [("pre", 2), ("post", 2), ("none", 0)])
    def test_norm_placement(self, placement, norms):
        model = build(norm_placement=placement)
        assert sum(p.ndim == 1 for p in model.parameters()) == 2 * norms + 1
        stream = []
        model.norm.register_forward_hook(lambda m, args, out: stream.append(args[0]))
        model(IDS)
        rms = stream[0].square().mean(-1).sqrt()
        assert torch.allclose(rms, torch.ones_like(rms), atol=1e-3) is (placement == "post")

    def test_state_dict_round_trip(self):
        one, two = build(0), build(1)
        two.load_state_dict(one.state_dict())
        assert torch.equal(one(IDS).logits, two(IDS).logits)


@pytest.mark.parametrize("activation, reference", [
    ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
    ("relu", lambda x: x.clamp(min=0)),
    ("relu2", lambda x: x.clamp(min=0) ** 2),
])  # fmt: skip
def test_mlp(activation, reference):
    mlp = build(hidden_act=activation).layers[0].mlp
    x = torch.randn(2, 5, 32)
    expected = reference(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm(dtype):
    norm = RMSNorm(8, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 8))
    x = torch.randn(2, 3, 8, dtype=dtype)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-3) ** -0.5 * norm.weight
    torch.testing.assert_close(norm(x), expected)
    if dtype == torch.float64:
        inputs = (x.transpose(0, 1).requires_grad_(),)
        assert torch.autograd.gradcheck(norm, inputs)
        weight = norm.weight.detach().clone().requires_grad_()
        call = torch.func.functional_call
        assert torch.autograd.gradcheck(lambda w: call(norm, {"weight": w}, x), (weight,))


class TestForward:
    def test_loss_is_the_mean_over_labels_that_ask(self):
        model = build()
        labels = IDS.clone()
        labels[:, ::2] = -100
        out = model(IDS, labels=labels)
        log_probabilities = out.logits.double().log_softmax(-1)
        picked = log_probabilities.gather(-1, IDS[..., None])[..., 0][:, 1::2]
        torch.testing.assert_close(out.loss.double(), -picked.mean())
        assert out.loss.dtype == torch.float32

    def test_logits_to_keep(self):
        model = build()
        torch.testing.assert_close(model(IDS, logits_to_keep=3).logits, model(IDS).logits[:, -3:])

    def test_dropout_acts_in_training_only(self):
        model = build(dropout=0.5)
        assert not torch.equal(model(IDS).logits, model(IDS).logits)
        assert torch.equal(model.eval()(IDS).logits, build().eval()(IDS).logits)

    def test_bfloat16_autocast_trains(self):
        model = build(connection=ConnectionConfig(kind="none"),
                      init=InitConfig(query_key="unit", identity_bias=5.0))  # fmt: skip
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert abs(float(loss.detach()) - float(model(IDS, labels=IDS).loss.detach())) < 0.02
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())

    @pytest.mark.parametrize("kind", ["residual", "none"])
    def test_activation_checkpointing_changes_no_gradient(self, kind):
        from torch.utils.checkpoint import checkpoint

        model = build(connection=ConnectionConfig(kind=kind), init=InitConfig(identity_bias=5.0))
        model(IDS, labels=IDS).loss.backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for block in model.layer_list:
            inner = block.forward
            block.forward = lambda *a, inner=inner: checkpoint(inner, *a, use_reentrant=False)
        model(IDS, labels=IDS).loss.backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)


class TestClassification:
    def test_it_learns_with_bidirectional_attention_and_padding(self):
        model = build(causal=False, num_labels=2, init=InitConfig(std=0.1))
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[0, 6:], mask[1, :3] = 0, 0
        labels = torch.tensor([0, 1, 1])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(12):
            out = model(IDS, labels=labels, attention_mask=mask)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            losses.append(float(out.loss.detach()))
        assert out.logits.shape == (3, 2) and losses[-1] < 0.2 * losses[0]

    @pytest.mark.parametrize("causal", [True, False])
    def test_padding_does_not_reach_the_answer(self, causal):
        model = build(causal=causal, num_labels=3, init=InitConfig(std=0.2)).double()
        mask = torch.ones(1, 12, dtype=torch.long)
        mask[0, 8:] = 0
        padded = model(IDS[:1], attention_mask=mask).logits
        torch.testing.assert_close(padded, model(IDS[:1, :8]).logits)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_long_texts_are_pooled_exactly_in_half_precision(self, causal, dtype):
        lengths = torch.tensor([[513], [515], [3], [4097]])
        mask = torch.arange(4100) < lengths
        stream = torch.randn(4, 4100, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        wide = [row[: int(n)].double() for row, n in zip(stream, lengths, strict=True)]
        expected = torch.stack([row[-1] if causal else row.mean(0) for row in wide])
        found = layout.pool(stream, mask, 0, causal)
        torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)

    def test_one_label_is_refused(self):
        with pytest.raises(UserError, match="num_labels is 1"):
            build(num_labels=1)


class TestSites:
    def test_every_site_exists_and_is_seen(self):
        for changes in (dict(), dict(hidden_act="swiglu", norm_placement="post", num_labels=2)):
            model = build(attention_implementation="eager", **changes)
            modules, seen = dict(model.named_modules()), set()
            sites = model.sites()
            assert len({site.name for site in sites}) == len(sites)
            for site in sites:
                modules[site.module].register_forward_hook(
                    lambda m, args, out, name=site.name, seen=seen: seen.add(name)
                )
            model(IDS)
            assert seen == {site.name for site in sites}

    def test_kinds(self):
        model = build()
        streams = [site.name for site in find_sites(model, "stream")]
        assert streams == [f"layers.{i}.{s}_connection:output"
                           for i in (0, 1) for s in ("attention", "mlp")]  # fmt: skip
        linears = {site.module for site in find_sites(model, "linear_input")}
        assert linears == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("call, message", [
    (lambda m: m(torch.tensor([[3, 40]])), "token id 40 .* vocabulary of 40"),
    (lambda m: m(torch.tensor([[-1, 4]])), "smallest -1"),
    (lambda m: m(torch.zeros(1, 25, dtype=torch.long)), "25 tokens exceed .* 24"),
    (lambda m: m(torch.zeros(4, dtype=torch.long)), r"shape \[4\]"),
    (lambda m: m(torch.zeros(1, 0, dtype=torch.long)), "at least one"),
    (lambda m: m(IDS, attention_mask=torch.ones(3, 5)), r"attention_mask .*\[3, 12\]"),
    (lambda m: m(IDS, labels=IDS[:, 1:]), r"labels have shape \[3, 11\]"),
])  # fmt: skip
def test_bad_input_is_told_in_one_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call(build())
