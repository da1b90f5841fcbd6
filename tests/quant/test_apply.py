"""quantize and restore: what is touched, bit for bit back, and no silence when nothing happens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.quant import (
    Scheme,
    fake_quantize,
    paused,
    quantization,
    quantize,
    quantize_weight,
    quantized,
    restore,
)
from skipless.sites import Site, find_sites

SCHEMES = ["W8A8", "W4A4", "W3Afp", "W2A16", "W16A16", "W4A6-a:token-w:channel", "W4A8-w:g8",
           "W8A4-asym", "W4A4-clip:mse", "W4A4-clip:gauss", "W4A4-clip:p99.9"]  # fmt: skip


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def logits(model, ids):
    with torch.no_grad():
        out = model(ids)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("scope", ["linear", "block", "all"])
def test_restore_is_bit_exact_and_leaves_nothing(ours, ids, text, scope):
    before, reference = snapshot(ours), logits(ours, ids)
    pointers = [p.data_ptr() for p in ours.parameters()]
    assert quantize(ours, text, scope) is ours
    changed = logits(ours, ids)
    assert not torch.equal(changed, reference) and bool(torch.isfinite(changed).all())
    restore(ours)
    assert same(snapshot(ours), before)
    assert pointers == [p.data_ptr() for p in ours.parameters()]
    assert torch.equal(logits(ours, ids), reference)
    assert quantization(ours) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ours.modules())
    assert all(layer.self_attn.implementation == "sdpa" for layer in ours.layers)


def test_weights_are_on_the_grid_and_head_and_embedding_are_not_touched(plain, ids):
    before = snapshot(plain)
    expected = {name: fake_quantize(value, 4) for name, value in before.items() if "mlp" in name}
    with quantized(plain, "W4A8"):
        for name, value in plain.state_dict().items():
            wanted = expected[name] if "mlp" in name and "weight" in name else before[name]
            assert torch.equal(value, wanted), name
    assert same(snapshot(plain), before)


def test_include_head_quantises_the_tied_weight_once_and_keeps_it_tied(plain, ids):
    before = plain.embed.weight.clone()
    quantize(plain, "W4A8", include_head=True)
    assert plain.out.weight is plain.embed.weight
    assert torch.equal(plain.embed.weight, fake_quantize(before, 4))
    assert [w.name for w in quantization(plain).weights].count("embed.weight") == 1
    assert "out:input" in {q.site.name for q in quantization(plain).activations}
    assert "quantised" in quantization(plain).describe()
    restore(plain)
    assert torch.equal(plain.embed.weight, before)


def kinds(model) -> set[str]:
    return {q.site.kind for q in quantization(model).activations}


def test_scopes(ours):
    inside = {"linear_input"}
    for scope, more in (
        ("linear", set()),
        ("block", {"sublayer_output", "stream"}),
        ("all", {"query", "key", "value", "probabilities"}),
    ):
        inside |= more
        with quantized(ours, "W8A8", scope):
            assert kinds(ours) == inside
            names = [q.site.module for q in quantization(ours).activations]
            assert "lm_head" not in names
        with quantized(ours, "W8A8", scope, include_head=True):
            assert "lm_head" in [q.site.module for q in quantization(ours).activations]


def test_named_widths_apply_in_every_scope(ours, ids):
    quantize(ours, "W8A8-KV4-P6", "linear")
    widths = {q.site.kind: q.bits for q in quantization(ours).activations}
    assert widths == {"linear_input": 8, "key": 4, "value": 4, "probabilities": 6}
    assert all(layer.self_attn.implementation == "eager" for layer in ours.layers)
    logits(ours, ids)
    restore(ours)
    quantize(ours, "W8Afp-KV4", "all")
    assert {q.site.kind for q in quantization(ours).activations} == {"key", "value"}
    logits(ours, ids)
    restore(ours)


@pytest.mark.parametrize("scope", ["linear", "block", "all"])
def test_every_site_sees_quantised_values(ours, ids, scope):
    """A hook registered before quantize and one after see the same values, all on the grid."""
    seen: dict[str, list[torch.Tensor]] = {}
    modules = dict(ours.named_modules())

    def watch(site: Site):
        def output(module, args, out):
            seen.setdefault(site.name, []).append(out)

        def inputs(module, args):
            seen.setdefault(site.name, []).append(args[0])

        module = modules[site.module]
        if site.direction == "input":
            return module.register_forward_pre_hook(inputs)
        return module.register_forward_hook(output)

    sites = find_sites(ours)
    early = [watch(site) for site in sites]
    quantize(ours, "W8A3", scope)
    late = [watch(site) for site in sites]
    logits(ours, ids)
    for q in quantization(ours).activations:
        first, second = seen[q.site.name]
        assert torch.equal(first, second)
        assert len(first.unique()) <= 7, q.site.name
    for handle in early + late:
        handle.remove()
    restore(ours)


def test_quantised_forward_is_the_same_by_hand(plain, ids):
    """Scope block, computed without hooks."""
    scheme = Scheme.parse("W4A5")
    with torch.no_grad():
        x = plain.embed(ids)
        for block in plain.blocks:
            up, _, down = block.mlp
            h = fake_quantize(block.norm(x), 5)
            h = nn.functional.linear(h, quantize_weight(up.weight, scheme), up.bias)
            h = fake_quantize(nn.functional.gelu(h), 5)
            h = nn.functional.linear(h, quantize_weight(down.weight, scheme), down.bias)
            x = fake_quantize(x + fake_quantize(h, 5), 5)
        expected = plain.out(x)
    with quantized(plain, scheme, "block"):
        assert torch.equal(logits(plain, ids), expected)


def test_same_input_of_several_linears_is_quantised_once(ours, ids, monkeypatch):
    from skipless.quant import activations

    calls = []
    real = activations.simulate
    monkeypatch.setattr(activations, "simulate", lambda *a, **k: calls.append(1) or real(*a, **k))
    with quantized(ours, "W8A8", "linear"):
        logits(ours, ids)
    assert len(calls) == 2 * 4  # qkv, o, up, down in each of two layers, not 6


def test_in_place_change_between_sites_is_not_mistaken_for_the_same_tensor():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            first = self.a(x)
            x.mul_(3.0)
            return first, self.b(x)

    torch.manual_seed(0)
    model = Doubling().eval()
    x = torch.randn(4, 8)
    with quantized(model, "W16A3"), torch.no_grad():
        first, second = model(x.clone())
        b = fake_quantize(model.b.weight, 16)
    expected = fake_quantize(x * 3, 3) @ b.t()
    assert torch.allclose(second, expected, atol=1e-5)


def test_paused_gives_full_precision_and_comes_back(ours, ids):
    reference = logits(ours, ids)
    quantize(ours, "W3A3", "block")
    low = logits(ours, ids)
    with paused(ours):
        assert torch.equal(logits(ours, ids), reference)
        with pytest.raises(UserError, match="already"), paused(ours):
            pass
    assert torch.equal(logits(ours, ids), low)
    with paused(ours):
        restore(ours)
    assert torch.equal(logits(ours, ids), reference)
    with pytest.raises(UserError, match="not quantised"), paused(ours):
        pass


def test_copies_are_independent(ours, ids):
    before = snapshot(ours)
    quantize(ours, "W4A4", "block")
    low = logits(ours, ids)
    twin = copy.deepcopy(ours)
    restore(ours)
    assert torch.equal(logits(twin, ids), low)
    assert same(snapshot(ours), before)
    restore(twin)
    assert same(snapshot(twin), before)


def test_two_calls_in_a_row_are_an_error_with_the_next_step(plain):
    quantize(plain, "W8A8")
    with pytest.raises(UserError, match=r"already quantised with W8A8.*restore\(model\)"):
        quantize(plain, "W4A4")
    restore(plain)
    with pytest.raises(UserError, match="not quantised"):
        restore(plain)


def test_restore_does_not_throw_training_away_unasked(plain, ids):
    before = snapshot(plain)
    quantize(plain, "W8A8")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(ids).square().mean().backward()
    assert plain.blocks[0].mlp[0].weight.grad.abs().sum() > 0  # straight through
    optimizer.step()
    with pytest.raises(UserError, match=r"blocks.0.mlp.0.weight changed.*discard_changes"):
        restore(plain)
    restore(plain, discard_changes=True)
    assert torch.equal(plain.blocks[0].mlp[0].weight, before["blocks.0.mlp.0.weight"])


def test_layers_limit_weights_and_sites(ours, ids):
    before = snapshot(ours)
    quantize(ours, "W4A4", "block", layers=[1])
    assert {q.site.layer for q in quantization(ours).activations} == {1}
    changed = {k for k, v in ours.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and all(name.startswith("layers.1.") for name in changed)
    logits(ours, ids)
    restore(ours)
    with pytest.raises(UserError, match=r"layers \[7\].*0 to 1"):
        quantize(ours, "W4A4", layers=[7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(ours, ids, dtype):
    ours.to(dtype)
    before = snapshot(ours)
    with quantized(ours, "W8A8", "block"):
        out = logits(ours, ids)
        assert out.dtype == dtype and bool(torch.isfinite(out).all())
        assert all(p.dtype == dtype for p in ours.parameters())
    assert same(snapshot(ours), before)


def test_casting_while_quantised_still_restores(plain):
    before = snapshot(plain)
    quantize(plain, "W8A8")
    plain.double()
    restore(plain, discard_changes=True)
    assert all(torch.equal(v, before[k].double()) for k, v in plain.state_dict().items())


def test_one_token_and_empty_batch(ours):
    with quantized(ours, "W4A4", "all"):
        assert bool(torch.isfinite(logits(ours, torch.zeros(1, 1, dtype=torch.long))).all())
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with quantized(plain, "W4A4"):
        assert plain(torch.zeros(0, 8)).shape == (0, 8)


def test_sixteen_bits_change_next_to_nothing(ours, ids):
    reference = logits(ours, ids)
    with quantized(ours, "W16A16", "all"):
        difference = (logits(ours, ids) - reference).norm() / reference.norm()
    assert 0 < difference < 1e-3


def test_nan_names_the_first_site(ours, ids):
    with torch.no_grad():
        ours.layers[1].input_layernorm.weight[3] = math.nan
    with quantized(ours, "W8A8", "block"), pytest.raises(UserError) as caught:
        logits(ours, ids)
    assert "layers.1.self_attn.q_proj:input" in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weight_is_named_and_the_model_left_alone(plain, bad):
    with torch.no_grad():
        plain.blocks[1].mlp[2].weight[0, 0] = bad
    with pytest.raises(UserError, match=r"blocks.1.mlp.2.weight holds NaN or infinity"):
        quantize(plain, "W8A8", "block")
    assert quantization(plain) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


def test_site_that_never_runs_is_an_error(ids):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    model = Lazy()
    with quantized(model, "W8A8"), pytest.raises(UserError, match="unused:input never ran"):
        model(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("build", "scheme", "scope", "says"),
    [
        (lambda: nn.Sequential(nn.GELU(), nn.LayerNorm(4)), "W8A8", "linear", "no linear layer"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "W8A8", "block", "use scope 'linear'"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "W8A8-KV4", "linear", "key, value"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "W8A8-P4", "linear", "probabilities"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "W8A8", "blocks", "'block'"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "W8A1", "linear", "width is 1"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), "W8A8-w:g4", "linear",
         "0.weight: group size 4 does not divide the 6"),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), "W8A8", "linear",
         "MultiheadAttention"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("meta"), "W8A8", "linear", "meta"),
    ],
)  # fmt: skip
def test_clear_errors(build, scheme, scope, says):
    with pytest.raises(UserError, match=says):
        quantize(build(), scheme, scope)


def test_a_model_that_is_all_head_asks_for_include_head():
    class OnlyHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, x):
            return self.lm_head(self.embed(x))

    model = OnlyHead()
    with pytest.raises(UserError, match="include_head=True"):
        quantize(model, "W8A8")
    with quantized(model, "W8A8", include_head=True):
        assert bool(torch.isfinite(model(torch.tensor([[1, 2]]))).all())


def test_generation_runs_quantised(make_transformer):
    model = make_transformer("none")
    ids = torch.tensor([[1, 2, 3]])
    with quantized(model, "W8A8-KV8", "block"):
        assert model.generate(ids, 5).shape == (1, 8)


def test_hugging_face_models():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                 intermediate_size=48, vocab_size=61)
    ).eval()  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=16)
    ).eval()
    ids = torch.arange(12).view(2, 6)
    for model in (llama, gpt2):
        before, reference = snapshot(model), logits(model, ids)
        for scope in ("linear", "block"):
            with quantized(model, "W4A4-w:channel", scope):
                assert not torch.equal(logits(model, ids), reference)
                assert "lm_head.weight" not in {w.name for w in quantization(model).weights}
        assert same(snapshot(model), before)
        with pytest.raises(UserError, match="query"):
            quantize(model, "W4A4", "all")
    # Conv1D stores in x out: its channels are columns.
    weight = gpt2.transformer.h[0].mlp.c_fc.weight.clone()
    with quantized(gpt2, "W4Afp-w:channel"):
        found = gpt2.transformer.h[0].mlp.c_fc.weight
        assert torch.equal(found, fake_quantize(weight.t(), 4, granularity="channel").t())
