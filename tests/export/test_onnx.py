"""ONNX: graphs of our decoder in ONNX Runtime against the model, whole, padded and piece by piece.

The exporter compares too; here the session, the inputs and the measure are the test's own.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from skipless.config import ConnectionConfig as Connection
from skipless.config import (
    ConnectionOverride,
    InitConfig,
    ModelConfig,
    TemperatureConfig,
)
from skipless.errors import UserError
from skipless.export import export_onnx, open_session, session_options
from skipless.probes import sqnr
from skipless.quant import quantize

from .onnx_models import IDS, build, distance, feed

REASON = "pip install -e '.[onnx]'"
onnx = pytest.importorskip("onnx", reason=REASON)
onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)

ABSENT = ConnectionOverride(
    connection=Connection(kind="fixed", a=1.0, b=0.0), layers=(0,), sublayer="attention"
)


SETTINGS = {
    "fixed": {"connection": Connection(kind="fixed", a=0.5, b=2.0, c=0.25)},
    "interpolate by channel": {"connection": Connection(kind="interpolate", granularity="channel")},
    "gate by channel": {"connection": Connection(kind="gated", granularity="channel", scale=2.0)},
    "groups, gate, untied": {
        "kind": "residual", "num_key_value_heads": 2, "hidden_act": "swiglu",
        "tie_word_embeddings": False,
    },
    "learned positions, layer norm, post": {
        "position": "learned", "norm": "layernorm", "norm_placement": "post", "hidden_act": "relu2",
    },
    "no positions, no norms": {"position": "none", "norm_placement": "none", "hidden_act": "relu"},
    "identity bias, groups, temperature by head and length": {
        "num_key_value_heads": 2, "init": InitConfig(identity_bias=2.0),
        "temperature": TemperatureConfig(kind="learned_head", beta=1.1, length_scaled=True),
    },
    "a sublayer less": {"kind": "residual", "connection_overrides": (ABSENT,)},
}  # fmt: skip
KINDS = ("residual", "rezero", "layerscale", "learned", "sphere", "gated", "anneal")


@pytest.mark.parametrize("name", [*KINDS, *SETTINGS])
def test_one_graph_serves_any_batch_and_length(name, tmp_path):
    model = build(**({"kind": name} if name in KINDS else SETTINGS[name]))
    if name == "anneal":
        model.set_training_progress(0.2)
    done = export_onnx(model, tmp_path / "a.onnx", ids=IDS)
    assert done.path.is_file() and done.files["a.onnx"].difference < 1e-5
    session = open_session(done.path)
    for shape in ((1, 1), (1, 40), (3, 7)):
        ids = torch.randint(61, shape, generator=torch.Generator().manual_seed(shape[1]))
        assert distance(feed(session, ids), model, ids) < 1e-5
    mask = torch.ones_like(IDS)
    mask[1, :9] = mask[2, :1] = 0  # on the left, and position 0 anew after it
    assert distance(feed(session, IDS, mask), model, IDS, mask) < 1e-5


@pytest.mark.parametrize("name", ["none", *list(SETTINGS)[-2:]])
def test_past_keys_and_values_continue_a_text(name, tmp_path):
    model = build(**SETTINGS.get(name, {}))
    export_onnx(model, tmp_path / "a.onnx", cached=True, ids=IDS)
    session = open_session(tmp_path / "a.onnx")
    names = [i.name for i in session.get_inputs()][2:]
    assert len(names) == 2 * sum(block.self_attn is not None for block in model.blocks)
    ids, heads = IDS[:2, :5], model.config.key_value_heads
    wanted = model.generate(ids, 12)
    past = {n: np.zeros((2, heads, 0, model.config.head_dim), np.float32) for n in names}
    text = ids
    while text.shape[1] < 17:
        mask = torch.ones(2, text.shape[1], dtype=torch.int64)
        out = feed(session, ids, mask, past)
        past = {n: out[n.replace("past_key_values", "present")] for n in names}
        ids = torch.from_numpy(out["logits"][:, -1:].argmax(-1))
        text = torch.cat((text, ids), dim=1)
    assert torch.equal(text, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_classifiers(causal, tmp_path):
    scaled = TemperatureConfig(length_scaled=True, beta=1.2)
    model = build(causal=causal, num_labels=3, temperature=scaled)
    done = export_onnx(model, tmp_path / "folder", ids=IDS)
    assert list(done.files) == ["model.onnx"]
    mask = torch.ones_like(IDS)
    mask[::2, :4] = 0
    got = feed(open_session(tmp_path / "folder/model.onnx"), IDS, mask)
    assert distance(got, model, IDS, mask) < 1e-5
    with pytest.raises(UserError, match="past keys are of no use"):
        export_onnx(model, tmp_path / "b.onnx", cached=True)


def test_a_folder_keeps_the_weights_of_both_graphs_once(tmp_path):
    model = build(hidden_size=64)
    done = export_onnx(model, tmp_path / "folder", ids=IDS)
    assert sorted(done.files) == ["model.onnx", "model_cached.onnx"]
    parameters = sum(p.numel() * 4 for p in model.parameters())
    size = (tmp_path / "folder/weights.bin").stat().st_size
    assert 0.9 * parameters < size < 1.3 * parameters  # rotary tables too
    moved = (tmp_path / "folder").rename(tmp_path / "elsewhere")
    assert distance(feed(open_session(moved / "model.onnx"), IDS), model, IDS) < 1e-5


SCHEMES = [
    ("W8A8-static", "linear"), ("W8A8-static", "block"), ("W8A12-static", "linear"),
    ("W8A16-static", "block"), ("W8A9-w:channel-static", "linear"), ("W8A8-w:channel", "linear"),
    ("W4A8-w:g16-static", "block"), ("W12A6-static", "linear"), ("W8A8-asym-static", "linear"),
    ("W5A12-asym-w:channel-static", "block"), ("W8A8-asym", "linear"), ("W8A14", "linear"),
    ("W4A4-clip:mse-static", "linear"), ("W8Afp-w:g32", "linear"), ("W8A8-KV4-P8-static", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "scope"), SCHEMES)
@pytest.mark.parametrize("kind", ["none", "residual"])
def test_pairs_round_as_the_simulation_does(scheme, scope, kind, tmp_path):
    model = build(kind, num_key_value_heads=2 if kind == "residual" else None)
    with torch.no_grad():
        exact = model(IDS).logits
    quantize(model, scheme, scope, calibration=IDS[:4] if "static" in scheme else None)
    export_onnx(model, tmp_path / "a.onnx", ids=IDS)
    with torch.no_grad():
        simulated = model(IDS).logits
    # with and without what the file asks for: this processor need not saturate
    plain = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    for session in (open_session(tmp_path / "a.onnx"), plain):
        got = torch.from_numpy(feed(session, IDS)["logits"])
        assert abs(float(sqnr(exact, got)) - float(sqnr(exact, simulated))) < 0.1
        assert float(sqnr(simulated, got)) > float(sqnr(exact, simulated)) + 15


def test_heads_and_embeddings_at_codes(tmp_path):
    for number, tied in enumerate((True, False)):
        model = build(tie_word_embeddings=tied)
        quantize(model, "W8A8-w:channel-static", "all", calibration=IDS, include_head=True)
        done = export_onnx(model, tmp_path / f"{number}.onnx", ids=IDS)
        assert done.files[done.path.name].agreement > 40
        stored = {i.name: i for i in onnx.load(done.path).graph.initializer}
        assert not any(i.data_type == 1 and np.prod(i.dims) > 2000 for i in stored.values())


def constants(path) -> dict[str, np.ndarray]:
    graph = onnx.load(path).graph
    return {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}


@pytest.mark.parametrize(
    ("scheme", "activation", "largest"),
    [("W8A8-static", "uint8", 127), ("W8A9-static", "int16", 255), ("W8A12-static", "int16", 2047),
     ("W8A16-static", "int16", 32767), ("W8A6-static", "uint8", 31)],
)  # fmt: skip
def test_containers_and_codes(scheme, activation, largest, tmp_path):
    model = build()
    quantize(model, scheme, calibration=IDS)
    export_onnx(model, tmp_path / "a.onnx", ids=IDS)
    made = onnx.load(tmp_path / "a.onnx")
    assert made.opset_import[0].version == 21
    known = constants(tmp_path / "a.onnx")
    name = "layers.1.mlp.up_proj"
    codes, scale = known[f"{name}.weight"], known[f"{name}.weight_scale"]
    assert codes.dtype == np.int8
    simulated = model.get_submodule(name).weight.detach().numpy()
    codes = codes if codes.shape == simulated.shape else codes.T
    assert np.array_equal(codes * scale, simulated)
    made_pairs = [n for n in made.graph.node if n.op_type == "QuantizeLinear"]
    assert len(made_pairs) == 4 * 2  # q, k and v share one
    for node in made_pairs:
        zero, step = known[node.input[2]], known[node.input[1]]
        assert str(zero.dtype) == activation and zero == (128 if activation == "uint8" else 0)
        clip = next(n for n in made.graph.node if n.output[0] == node.input[0])
        assert clip.op_type == "Clip"
        assert np.round(known[clip.input[2]] / step) == largest


def test_the_file_says_how_to_open_it(tmp_path):
    model = build()
    quantize(model, "W8A8-static", calibration=IDS)
    export_onnx(model, tmp_path / "a.onnx", ids=IDS)
    options = session_options(tmp_path / "a.onnx", threads=1)
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert options.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "1"
    said = {e.key: e.value for e in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert said["max_length"] == str(model.config.max_position_embeddings)
    assert said["vocab_size"] == str(model.config.vocab_size)
    assert said["skipless.scheme"] == "W8A8-static" and said["skipless.scope"] == "linear"
    assert ModelConfig.from_dict(json.loads(said["skipless.config"])) == model.config
    export_onnx(build(), tmp_path / "b.onnx", ids=IDS)
    plain = session_options(tmp_path / "b.onnx")
    with pytest.raises(RuntimeError):
        plain.get_session_config_entry("session.x64quantprecision")
    (tmp_path / "c.onnx").write_bytes(b"\xff" * 9)
    with pytest.raises(UserError, match="is no ONNX file"):
        session_options(tmp_path / "c.onnx")


def test_what_onnx_runtime_does_not_open(tmp_path):
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(UserError, match=r"empty\.onnx cannot be opened by ONNX Runtime"):
        open_session(tmp_path / "empty.onnx")
    export_onnx(build(), tmp_path / "folder", ids=IDS)
    (tmp_path / "folder" / "weights.bin").unlink()
    with pytest.raises(UserError, match=r"and keep weights\.bin beside"):
        open_session(tmp_path / "folder" / "model.onnx")
    export_onnx(build(), tmp_path / "a.onnx", ids=IDS)
    made = onnx.load(tmp_path / "a.onnx")
    made.metadata_props.add(key="skipless.session_options", value="[1]")
    onnx.save(made, tmp_path / "a.onnx")
    with pytest.raises(UserError, match=r"says '\[1\]' for skipless.session_options"):
        open_session(tmp_path / "a.onnx")


def test_logits_of_zero_and_logits_that_are_no_numbers(tmp_path):
    model = build()
    with torch.no_grad():
        model.norm.weight.zero_()
    assert export_onnx(model, tmp_path / "zero.onnx").files["zero.onnx"].difference == 0
    with torch.no_grad():
        model.norm.weight.fill_(3e38)
    with pytest.raises(UserError, match="logits are not finite; check its weights"):
        export_onnx(model, tmp_path / "inf.onnx")
    with torch.no_grad():
        model.norm.weight.fill_(1)
        model.embed_tokens.weight[3, 0] = torch.nan
    with pytest.raises(UserError, match=r"embed_tokens.weight is nan at \[3, 0\]"):
        export_onnx(model, tmp_path / "nan.onnx")
    assert not (tmp_path / "nan.onnx").exists()
