"""Sections 1 and 2 of docs/equations.md, recomputed in float64 numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, TemperatureConfig
from skipless.model import Transformer, build_connection, haar
from skipless.model.context import ForwardContext
from skipless.model.initializers import generator_for, layer_weights, second_moment

D, RNG = 16, np.random.default_rng(0)


def tiny(**changes) -> ModelConfig:
    base = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
                max_position_embeddings=16)  # fmt: skip
    return ModelConfig(**(base | changes))


def matrices(config: ModelConfig, layer: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a layer as in the equations: in x out, float64."""
    weights = layer_weights(config, layer, seed)
    return {name.split(".")[1]: w.double().numpy().T for name, w in weights.items()}


def heads(matrix: np.ndarray, size: int) -> list[np.ndarray]:
    return [matrix[:, i : i + size] for i in range(0, matrix.shape[1], size)]


# section 1 ---------------------------------------------------------------------------------------

X, F, X0 = (RNG.standard_normal((2, 3, D)) for _ in range(3))
GAMMA = RNG.standard_normal(D)
SIGMOID = 1 / (1 + np.exp(-0.3))


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6)


JOINS = {
    "C1": (dict(kind="residual"), {}, X + F),
    "C2": (dict(kind="none"), {}, F),
    "C3": (dict(kind="fixed", a=0.5, b=2.0, c=-1.5), {}, 0.5 * X + 2 * F - 1.5 * X0),
    "C3 without stream": (dict(kind="fixed", a=0.0, b=0.7), {}, 0.7 * F),
    "C4 at start": (dict(kind="rezero"), {}, X),
    "C4": (dict(kind="rezero"), {"alpha": [0.4]}, X + 0.4 * F),
    "C4 from init": (dict(kind="rezero", init=0.25), {}, X + 0.25 * F),
    "C5 at start": (dict(kind="layerscale"), {}, X + 1e-4 * F),
    "C5": (dict(kind="layerscale"), {"gamma": GAMMA}, X + GAMMA * F),
    "C5 scalar": (dict(kind="layerscale", granularity="scalar"), {"gamma": [3.0]}, X + 3 * F),
    "C6 at start": (dict(kind="interpolate"), {}, 0.5 * X + 0.5 * F),
    "C6": (dict(kind="interpolate"), {"theta": [0.3]}, (1 - SIGMOID) * X + SIGMOID * F),
    "C6 s=2": (dict(kind="interpolate", scale=2.0), {}, X + F),
    "C9 at start": (dict(kind="learned"), {}, X + F),
    "C9": (dict(kind="learned", granularity="channel"), {"a": GAMMA, "b": GAMMA - 1},
           GAMMA * X + (GAMMA - 1) * F),
    "C11 at start": (dict(kind="sphere"), {}, unit(0.95 * unit(X) + 0.05 * unit(F))),
    "C11": (dict(kind="sphere"), {"alpha": GAMMA}, unit((1 - GAMMA) * unit(X) + GAMMA * unit(F))),
}  # fmt: skip


def join(config: dict, gains: dict, progress: float | None = None) -> np.ndarray:
    connection = build_connection(ConnectionConfig(**config), D).double()
    with torch.no_grad():
        for name, value in gains.items():
            getattr(connection, name).copy_(torch.as_tensor(value))
    if progress is not None:
        connection.set_training_progress(progress)
    x, f, x0 = (torch.from_numpy(t) for t in (X, F, X0))
    return connection(x, f, ForwardContext(embedding=x0)).detach().numpy()


@pytest.mark.parametrize("case", JOINS)
def test_connections(case):
    config, gains, expected = JOINS[case]
    # 1e-4 is stored as a float32 gain first
    np.testing.assert_allclose(join(config, gains), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("progress", [0.0, 0.05, 0.1, 0.2, 0.39, 0.4, 0.7, 1.0])
def test_c7_anneals_the_stream_away(shape, progress):
    done = min(progress / 0.4, 1)
    a = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    config = dict(kind="anneal", anneal_fraction=0.4, anneal_shape=shape)
    np.testing.assert_allclose(join(config, {}, progress), a * X + F, rtol=1e-12, atol=1e-12)


def test_c6_with_scale_2_is_the_residual_bit_for_bit():
    torch.manual_seed(0)
    x, f = torch.randn(2, 64, D), torch.randn(2, 64, D)
    joined = build_connection(ConnectionConfig(kind="interpolate", scale=2.0), D)(x, f, None)
    assert torch.equal(joined, x + f)


# section 2: initialisation -----------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 1000))
def test_i1_haar_is_orthonormal_on_its_shorter_side(rows, columns, seed):
    q = haar(rows, columns, generator_for(seed, "q")).numpy()
    assert q.shape == (rows, columns)
    product = q @ q.T if rows <= columns else q.T @ q
    np.testing.assert_allclose(product, np.eye(min(rows, columns)), atol=1e-12)


def test_i1_haar_is_uniform():
    """Haar entries have mean zero; LAPACK's QR alone gives a negative diagonal."""
    draws = np.stack([haar(3, 3, generator_for(s, "q")).numpy() for s in range(2000)])
    # sd of an entry is 1/sqrt(3), so of the mean 0.013
    assert np.abs(draws.mean(axis=0)).max() < 0.06
    np.testing.assert_allclose((draws**4).mean(), 3 / (3 * 5), rtol=0.06)  # E a^4 = 3/(d(d+2))


def test_i2_value_output_product_is_the_identity():
    w = matrices(tiny(init=InitConfig(value_output="haar", a_vo=3.0)))
    np.testing.assert_allclose(w["v_proj"] @ w["o_proj"], 3 * np.eye(D), atol=1e-12)
    for left, right in zip(heads(w["v_proj"], 4), heads(w["o_proj"].T, 4), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-12)  # W_O's slice is W_V's transposed


@pytest.mark.parametrize("groups", [1, 2])
def test_i2_with_grouped_queries_is_a_projector(groups):
    config = tiny(num_key_value_heads=groups, init=InitConfig(value_output="haar", a_vo=3.0))
    w = matrices(config)
    values = heads(w["v_proj"], 4)
    outputs = np.split(w["o_proj"], 4)  # rows of W_O by query head
    product = sum(values[h * groups // 4] @ outputs[h] for h in range(4)) / 3
    np.testing.assert_allclose(product @ product, product, atol=1e-12)
    np.testing.assert_allclose(product, product.T, atol=1e-12)
    np.testing.assert_allclose(np.trace(product), groups * 4, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_i3_query_key_product_is_a_projector(groups):
    w = matrices(tiny(num_key_value_heads=groups, init=InitConfig(query_key="haar", a_qk=0.9)))
    keys = heads(w["k_proj"], 4)
    for h, query in enumerate(heads(w["q_proj"], 4)):
        product = query @ keys[h * groups // 4].T / 0.9
        np.testing.assert_allclose(product @ product, product, atol=1e-12)
        np.testing.assert_allclose(np.trace(product), 4, atol=1e-12)
    if groups == 4:
        assert np.abs(keys[0] - keys[1]).max() > 0.1  # every head has its own draw


@pytest.mark.parametrize("correction, up_gain", [(True, 4.0), (False, 1.0)])
def test_i4_suo_mlp(correction, up_gain):
    w = matrices(tiny(init=InitConfig(mlp="suo", suo_correction=correction)))
    up, down = w["up_proj"], w["down_proj"]
    assert up.shape == (D, 4 * D)
    np.testing.assert_allclose(up @ up.T, 1.5 * up_gain * np.eye(D), atol=1e-12)
    np.testing.assert_allclose(down.T @ down, 1.5 * np.eye(D), atol=1e-12)  # sqrt(D/F) < 1
    tokens = np.random.default_rng(1).standard_normal((4000, D))
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose((tokens @ up).std(), 1.22 if correction else 0.61, atol=0.01)


def test_i4_down_correction_of_a_narrow_mlp():
    w = matrices(tiny(intermediate_size=4, init=InitConfig(mlp="suo")))
    down = w["down_proj"]  # 4 x 16: rows orthonormal, times sqrt(1.5) * sqrt(16/4)
    np.testing.assert_allclose(down @ down.T, 1.5 * 4 * np.eye(4), atol=1e-12)
    np.testing.assert_allclose(w["up_proj"].T @ w["up_proj"], 1.5 * np.eye(4), atol=1e-12)


@pytest.mark.parametrize("inner", [8, 64])
def test_i4_swiglu_branch_starts_as_large_as_with_gelu(inner):
    config = tiny(hidden_act="swiglu", intermediate_size=inner, init=InitConfig(mlp="suo"))
    plain = tiny(intermediate_size=inner, init=InitConfig(mlp="suo"))
    tokens = np.random.default_rng(1).standard_normal((500, D))
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    gated_size, plain_size = [], []
    for seed in range(30):  # one draw of so small matrices varies by a tenth
        w, p = matrices(config, seed=seed), matrices(plain, seed=seed)
        gate = tokens @ w["gate_proj"]
        hidden = gate / (1 + np.exp(-gate)) * (tokens @ w["up_proj"])
        gated_size.append(((hidden @ w["down_proj"]) ** 2).mean())
        hidden = torch.nn.functional.gelu(torch.from_numpy(tokens @ p["up_proj"])).numpy()
        plain_size.append(((hidden @ p["down_proj"]) ** 2).mean())
    np.testing.assert_allclose(np.mean(gated_size), np.mean(plain_size), rtol=0.15)


def test_second_moments_match_published_values():
    # erf GELU of N(0,1): mean .28209, variance .34564
    assert second_moment("gelu", 1.0) == pytest.approx(0.34564 + 0.28209**2, abs=1e-4)
    z = np.random.default_rng(0).standard_normal(400_000)
    silu = z / (1 + np.exp(-z))
    assert second_moment("silu", 1.0) == pytest.approx((silu**2).mean(), rel=0.01)


def test_i5_value_output_product_is_orthogonal_but_not_the_identity():
    w = matrices(tiny(init=InitConfig(value_output="cs", cs_c=3.0)))
    product = w["v_proj"] @ w["o_proj"] / 9
    np.testing.assert_allclose(product @ product.T, np.eye(D), atol=1e-12)
    assert np.abs(product - np.eye(D)).max() > 0.5


@pytest.mark.parametrize("groups", [2, 4])
def test_i5_query_key_product_is_the_best_rank_k_part(groups):
    config = tiny(num_key_value_heads=groups, init=InitConfig(query_key="cs"))
    w = matrices(config)
    generator = generator_for(0, "layers.0.query_key")
    queries, keys = heads(w["q_proj"], 4), heads(w["k_proj"], 4)
    for g in range(groups):
        z = torch.randn(D, D, generator=generator).double().numpy() / math.sqrt(D)
        u, s, vt = np.linalg.svd(2 * z + 0.6 * np.eye(D))
        best = u[:, :4] * s[:4] @ vt[:4]
        for h in range(g * 4 // groups, (g + 1) * 4 // groups):
            np.testing.assert_allclose(queries[h] @ keys[g].T, best, atol=1e-10)
        np.testing.assert_allclose(
            np.linalg.norm(keys[g], axis=0) ** 2, s[:4], atol=1e-10
        )  # sqrt(S) on each side


def test_i6_baseline_standard_deviations():
    w = matrices(tiny(hidden_size=64, num_hidden_layers=8))
    for name in ("q_proj", "k_proj", "v_proj", "up_proj"):
        assert w[name].std() == pytest.approx(0.02, rel=0.05)
    for name in ("o_proj", "down_proj"):
        assert w[name].std() == pytest.approx(0.02 / 4, rel=0.05)


def test_i7_unit_queries_and_keys():
    config = tiny(hidden_size=64, init=InitConfig(query_key="unit", identity_bias=5.0))
    w = matrices(config)
    tokens = np.random.default_rng(1).standard_normal((2000, 64))
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    for name in ("q_proj", "k_proj"):
        assert (tokens @ w[name]).var() == pytest.approx(1, rel=0.1)
    bias = Transformer(config).layers[1].self_attn.identity_bias
    assert bias.shape == (4,) and bool((bias == 5).all())


# section 2: attention ----------------------------------------------------------------------------


def attention_by_hand(layer, x, tau, bias=None):
    """Causal multi-head attention without positions, in numpy; x [T, D], tau [T] or scalar."""
    w = {n: getattr(layer, n).weight.detach().double().numpy().T
         for n in ("q_proj", "k_proj", "v_proj", "o_proj")}  # fmt: skip
    size, length = layer.head_dim, len(x)
    shared = layer.num_heads // layer.num_key_value_heads
    tau = np.broadcast_to(tau, (length,))
    columns = []
    for h, q in enumerate(heads(x @ w["q_proj"], size)):
        k = heads(x @ w["k_proj"], size)[h // shared]
        v = heads(x @ w["v_proj"], size)[h // shared]
        logits = tau[:, None] * (q @ k.T) / math.sqrt(size)
        if bias is not None:
            logits = logits + bias[h] * np.eye(length)
        logits[np.triu_indices(length, 1)] = -np.inf
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        columns.append(p / p.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(columns, axis=1) @ w["o_proj"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["plain", "T1", "learned_layer", "learned_head", "length", "I7",
                                  "grouped"])  # fmt: skip
def test_attention(case, implementation):
    temperature, init, more, beta = {}, InitConfig(query_key="unit"), {}, 1.0
    if case in ("T1", "learned_layer", "learned_head", "length"):
        beta = 1.1
        temperature = dict(beta=beta)
        if case.startswith("learned"):
            temperature["kind"] = case
        temperature["length_scaled"] = case == "length"
    if case == "I7":
        init = InitConfig(query_key="unit", identity_bias=5.0)
    if case == "grouped":
        more = dict(num_key_value_heads=2)
    config = tiny(num_hidden_layers=4, position="none", init=init, norm_placement="none",
                  attention_implementation=implementation,
                  temperature=TemperatureConfig(**temperature), **more)  # fmt: skip
    model = Transformer(config).double()
    layer = model.layers[3].self_attn
    layer.temperature.reset_parameters()  # a learned tau was rounded to float32 at first
    seen, x = [], np.random.default_rng(2).standard_normal((8, D))
    handle = layer.register_forward_pre_hook(lambda m, args: (torch.from_numpy(x)[None], args[1]))
    layer.register_forward_hook(lambda m, args, out: seen.append(out.detach().numpy()[0]))
    model(torch.zeros(1, 8, dtype=torch.long))
    handle.remove()
    tau = beta**-3
    if case == "length":
        tau = tau * np.log(np.arange(1, 9)) / np.log(16)
    expected = attention_by_hand(layer, x, tau, np.full(4, 5.0) if case == "I7" else None)
    np.testing.assert_allclose(seen[0], expected, rtol=1e-9, atol=1e-12)


def test_t1_self_attention_mass_falls_with_depth():
    """Independent normed tokens, 512 keys, I3 with a_qk 0.9: 0.64 in layer 0, 0.004 in layer 23."""
    size, width = 64, 768
    generator = np.random.default_rng(3)
    tokens = generator.standard_normal((512, width))
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    p = np.linalg.qr(generator.standard_normal((width, size)))[0]
    # the token of its row is the last of its keys
    logits = 0.9 * (tokens[-1] @ p) @ (tokens @ p).T / math.sqrt(size)
    mass = []
    for layer in (0, 23):
        row = np.exp(1.1**-layer * logits)
        mass.append(row[-1] / row.sum())
    assert 0.2 < mass[0] < 0.95 and mass[1] < 0.02


@pytest.mark.parametrize("kind", ["none", "residual", "rezero"])
def test_t1_is_offered_for_every_connection(kind):
    config = tiny(connection=ConnectionConfig(kind=kind), temperature=TemperatureConfig(beta=1.1))
    scalings = [b.self_attn.temperature.scaling for b in Transformer(config).layers]
    assert scalings == pytest.approx([1 / 2, 1 / 2 / 1.1])


def test_the_forward_pass_ignores_a_vo_and_a_down_without_skips():
    """Section 2: norms in front of every sublayer absorb both gains. Shift at the default eps:
    below 1e-4 of the logits."""
    ids = torch.arange(12)[None] % 32

    def logits(a_vo: float, a_down: float, eps: float) -> torch.Tensor:
        init = InitConfig(value_output="haar", query_key="haar", mlp="suo", a_vo=a_vo,
                          a_down=a_down)  # fmt: skip
        config = tiny(connection=ConnectionConfig(kind="none"), init=init, norm_eps=eps)
        return Transformer(config).double()(ids).logits

    for eps, tolerance in ((0.0, 1e-6), (1e-6, 1e-4)):
        one, other = logits(3.0, 1.5, eps), logits(0.7, 4.0, eps)
        shift = float(((one - other).norm() / one.norm()).detach())
        # weights were rounded to float32 once: 1e-7 a layer is all that may differ
        assert shift < tolerance, (eps, shift)


def test_the_forward_pass_depends_on_a_qk_and_a_up():
    ids = torch.arange(12)[None] % 32

    def logits(**gains) -> torch.Tensor:
        init = InitConfig(value_output="haar", query_key="haar", mlp="suo", **gains)
        return Transformer(tiny(connection=ConnectionConfig(kind="none"), init=init))(ids).logits

    base = logits()
    for changed in (logits(a_qk=2.0), logits(a_up=4.0)):
        assert float(((base - changed).norm() / base.norm()).detach()) > 0.01


def test_the_reference_decoder_has_194_445_312_weights():
    with torch.device("meta"):
        model = Transformer(ModelConfig(connection=ConnectionConfig(kind="none")))
    assert model.num_parameters(gains=False) == 24 * 12 * 768**2 + 32_000 * 768 == 194_445_312
    assert model.num_parameters() == 194_445_312 + 49 * 768
    assert all(p.is_meta for p in model.parameters())
