"""One pair of nodes in ONNX Runtime equals `fake_quantize` on any values, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.export import export_onnx
from skipless.export.graphs import checking, decoder, writing
from skipless.export.graphs.files import save_graph
from skipless.export.graphs.nodes import Graph
from skipless.export.graphs.rounding import Rounding
from skipless.quant import fake_quantize, paused, quantization, quantize

from .onnx_models import IDS, build

REASON = "pip install -e '.[onnx]'"
pytest.importorskip("onnx", reason=REASON)
onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)

EDGES = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 3.0, -3.0, 0.99999994, 1e9, -1e9, 2.5, 1.5]
)


def run_pair(tmp_path, bits: int, asymmetric: bool, static: bool, x: torch.Tensor):
    """(what ONNX Runtime makes of x, what the model's own site makes of it)."""
    model = nn.Sequential(nn.Linear(x.shape[-1], 2))
    text = f"W8A{bits}{'-asym' if asymmetric else ''}{'-static' if static else ''}"
    calibration = torch.linspace(-0.7, 1.0, 2 * x.shape[-1]).reshape(2, -1)
    quantize(model, text, calibration=[calibration] if static else None)
    record = quantization(model)
    graph = Graph()
    rounding = Rounding(graph, record)
    value = graph.add_input("x", "FLOAT", list(x.shape))
    graph.add_output(rounding.at("0:input", value), "y", "FLOAT", list(x.shape))
    rounding.check_used()
    save_graph(graph, tmp_path / "pair.onnx", {}, None)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        tmp_path / "pair.onnx", options, providers=["CPUExecutionProvider"]
    )
    (site,) = record.activations
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), site(x)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 7, 8, 9, 12, 15, 16])
def test_a_pair_is_the_site(bits, asymmetric, static, tmp_path):
    generator = torch.Generator().manual_seed(bits)
    ties = torch.arange(-20, 20) * 0.5 / (2 ** (bits - 1) - 1)
    samples = [torch.randn(4, 40, generator=generator), ties.reshape(2, 20), torch.zeros(1, 3)]
    if static:  # beyond the range too
        samples.append(EDGES.reshape(2, 7))
    for x in samples:
        got, wanted = run_pair(tmp_path, bits, asymmetric, static, x)
        if static or not asymmetric:
            assert torch.equal(got, wanted), x
            continue
        # the range of a dynamic asymmetric tensor is rounded once here and twice there
        step = float(x.max().clamp(min=0) - x.min().clamp(max=0)) / (2**bits - 1)
        assert float((got - wanted).abs().max()) <= 1.01 * step
        assert float(((got - wanted).abs() > 0.5 * step).float().mean()) <= 0.1


def test_the_oracle_of_a_static_pair_is_fake_quantize(tmp_path):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    got, _ = run_pair(tmp_path, 8, False, True, x)
    assert torch.equal(got, fake_quantize(x, 8, clip=1.0))


def refusals():
    """(what is wrong, a model and arguments made by a call, words of the sentence)."""

    def with_scheme(text, scope="linear", **options):
        def make():
            model = build()
            quantize(model, text, scope, calibration=IDS, **options)
            return model, {}

        return make

    held = []

    def off():
        model = build()
        quantize(model, "W8A8")
        held.append(paused(model))  # a generator that is let go of ends the block
        held[0].__enter__()
        return model, {}

    yield "tokens", with_scheme("W8A8-a:token"), "leave out -a:token"
    yield "clip", with_scheme("W8A8-clip:gauss"), "take -static"
    yield "rotated", with_scheme("W8A8-static", method="hadamard"), "quantise by 'rtn' or 'gptq'"
    yield (
        "outliers",
        with_scheme("W8A8-static", method="outliers:0.5"),
        "without the method outliers",
    )
    yield "codebook", with_scheme("W3Afp", method="codebook"), "has a codebook"
    yield "universal", lambda: (build("universal"), {}), "attention_connection is of kind 'univ"
    yield "half floats", lambda: (build().bfloat16(), {}), "call model.float"
    yield "paused", off, "leave the paused block"
    yield "cache", lambda: (build(causal=False), {"cached": True}), "is bidirectional"
    yield "foreign", lambda: (nn.Linear(2, 2), {}), "of our Transformer, not of Linear"


CASES = list(refusals())


@pytest.mark.parametrize(
    ("make", "words"), [(make, words) for _, make, words in CASES], ids=[name for name, *_ in CASES]
)
def test_what_no_graph_says_is_refused(make, words, tmp_path):
    model, options = make()
    for out in ("a.onnx", "folder"):
        if options and out == "folder":
            continue
        with pytest.raises(UserError, match=words):
            export_onnx(model, tmp_path / out, ids=IDS, **options)
        assert not list(tmp_path.iterdir())


def test_what_exists_is_left_alone(tmp_path):
    (tmp_path / "a.onnx").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_onnx(build(), tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "mine"
    with pytest.raises(UserError, match="exists already"):
        export_onnx(build(), tmp_path)
    with pytest.raises(UserError, match=r"does not end in \.onnx|is a file|exists"):
        export_onnx(build(), tmp_path / "a.onnx" / "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.onnx"]


@pytest.mark.parametrize("out", ["a.onnx", "folder"])
def test_a_wrong_or_interrupted_file_never_gets_its_name(out, tmp_path, monkeypatch):
    model = build()
    right = decoder.attention

    def unscaled(graph, rounding, module, *rest):
        old = module.temperature.base
        module.temperature.base = 1.1 * old
        try:
            return right(graph, rounding, module, *rest)
        finally:
            module.temperature.base = old

    monkeypatch.setattr(decoder, "attention", unscaled)
    with pytest.raises(UserError, match=rf"other logits from .*{out}.*nothing was written"):
        export_onnx(model, tmp_path / out, ids=IDS)
    assert not list(tmp_path.iterdir())
    quantize(model, "W8A8-static", calibration=IDS)
    with pytest.raises(UserError, match=r"dB where the simulation has"):
        export_onnx(model, tmp_path / out, ids=IDS)
    monkeypatch.setattr(decoder, "attention", right)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(model, tmp_path / out, ids=IDS)
    assert not list(tmp_path.iterdir())


def test_noise_is_compared_on_more_texts_where_few_do_not_agree(tmp_path, monkeypatch):
    model = build()
    quantize(model, "W8A8-static", calibration=IDS)
    monkeypatch.setattr(checking, "sample_size", lambda _: (1, 24))
    parts = []
    add = checking._Sums.add
    monkeypatch.setattr(checking._Sums, "add", lambda *args: parts.append(add(*args)))
    for limit, used in ((100, 1), (-1, 16)):
        monkeypatch.setattr(checking, "_agree", lambda found, limit=limit: limit > 0)
        parts.clear()
        if limit > 0:
            export_onnx(model, tmp_path / "a.onnx", ids=IDS.repeat(3, 1))
        else:
            with pytest.raises(UserError, match="where the simulation has"):
                export_onnx(model, tmp_path / "b.onnx", ids=IDS.repeat(3, 1))
        assert len(parts) == used


def test_a_missing_package_is_told_in_one_line(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name)
    )
    with pytest.raises(UserError) as told:
        export_onnx(build(), tmp_path / "a.onnx")
    assert str(told.value) == (
        "onnxruntime is not installed; install it with `pip install 'onnxruntime>=1.20'`"
    )


def test_weights_beyond_one_file_ask_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("skipless.export.graphs.files.LARGEST", 1000)
    with pytest.raises(UserError, match="name a folder"):
        export_onnx(build(), tmp_path / "a.onnx", ids=IDS)
    export_onnx(build(), tmp_path / "folder", ids=IDS)


def test_every_site_of_every_scope_has_its_pair(tmp_path):
    for kind, placement in itertools.product(("none", "residual"), ("pre", "post", "none")):
        model = build(kind, norm_placement=placement)
        quantize(model, "W8A8-static", "all", calibration=IDS)
        graph = decoder.build_graph(model, cached=False)  # asserts that none is left over
        assert sum(node.op_type == "QuantizeLinear" for node in graph.nodes) >= 2 * 8
    assert checking.sample_size(model)[0] * checking.sample_size(model)[1] <= 1024
    assert np.isfinite(graph.constants["norm.weight"]).all()
