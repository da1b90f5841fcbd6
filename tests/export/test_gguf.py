"""GGUF and plain Llamas: gains folded, read back by three readers, logits of transformers."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from skipless.cli import main
from skipless.config import ConnectionConfig, ModelConfig, TemperatureConfig
from skipless.data.tokenizer import load_tokenizer, train_tokenizer
from skipless.errors import UserError
from skipless.export import export_gguf
from skipless.export.llama import Plain, open_plain, tensors, writing
from skipless.export.llama.vocabulary import read_vocabulary
from skipless.jsonable import override
from skipless.model import Transformer
from skipless.pretrained.gguf import read_gguf
from skipless.quant import quantize
from skipless.surgery import patch, save_pretrained
from skipless.surgery.slimming.stock import to_stock
from skipless.train import load_run, train

gguf = pytest.importorskip("gguf", reason="pip install -e '.[export]'")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(5))
TEXT = "The king's 1234 ships don't  sail\n\nünï  x"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the king said that 12 ships had sailed, don't you know. " * 9], 300, path)
    return path


def ours(kind: str = "rezero", **changes) -> Transformer:
    """A decoder that folds to a Llama, with gains of about 1, seed 1."""
    settings = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 310, "max_position_embeddings": 40,
        "connection": ConnectionConfig(kind=kind), "hidden_act": "swiglu", "intermediate_size": 96,
        "norm_eps": 1e-8,
    } | changes  # fmt: skip
    model = Transformer(ModelConfig(**settings), seed=1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                start = 0.0 if name.endswith("theta") else 1.0
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(start + 0.3 * draw.clamp(-2, 2))
            elif "embed" in name:
                parameter.mul_(50)  # so that no stream is small against the norms' eps
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("rezero", {}), ("layerscale", {"tie_word_embeddings": False}),
     ("interpolate", {"temperature": TemperatureConfig(beta=1.1)}),
     ("residual", {"num_key_value_heads": 4, "rope_theta": 500.0})],
)  # fmt: skip
def test_transformers_computes_from_the_file_what_our_model_does(
    kind, changes, tokenizer, tmp_path
):
    model = ours(kind, **changes)
    file = tmp_path / "a.gguf"
    done = export_gguf(Plain(model=to_stock(model), tokenizer=tokenizer), file)
    assert done.architecture == "llama" and done.reader == "transformers"
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    ).eval()
    assert distance(logits(again), logits(model)) < 1e-5
    assert done.difference < 1e-5
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert theirs(TEXT).input_ids == load_tokenizer(tokenizer).encode(TEXT)
    assert theirs.eos_token_id == 0


def test_without_the_change_of_rows_the_file_is_refused(tokenizer, tmp_path, monkeypatch):
    plain = Plain(model=to_stock(ours()), tokenizer=tokenizer)
    monkeypatch.setattr(tensors, "pairs", lambda weight, heads: weight)
    with pytest.raises(UserError, match="a difference: model.layers.0.self_attn.q_proj"):
        export_gguf(plain, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_half_floats(tokenizer, tmp_path):
    model = to_stock(ours())
    done = export_gguf(Plain(model=model, tokenizer=tokenizer), tmp_path / "a.gguf", dtype="f16")
    assert done.kinds == {"F16": 15, "F32": 5} and 1e-6 < done.difference < 5e-3
    assert done.to_rounded < 1e-5
    read = read_gguf((tmp_path / "a.gguf").read_bytes())
    value = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert np.array_equal(read.tensor("blk.0.ffn_up.weight"), value.astype("f2").astype("f4"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"up_proj.weight reaches 1e\+06.*--dtype f32"):
        export_gguf(Plain(model=model, tokenizer=tokenizer), tmp_path / "b.gguf", dtype="f16")


def test_blocks_hold_the_codes_of_the_scheme(tokenizer, tmp_path):
    model = to_stock(ours())
    plain = Plain(model=model, tokenizer=tokenizer)
    done = export_gguf(plain, tmp_path / "a.gguf", scheme="W8Afp-w:g32")
    assert done.kinds == {"Q8_0": 14, "F32": 6}
    assert 0 < done.to_rounded < 0.2 * done.difference
    told = done.describe()
    assert f"in full precision {done.difference:.2g} of the largest one, which is the round" in told
    assert f"to the model with rounded weights {done.to_rounded:.2g}" in told
    exact = logits(model)
    quantize(model, "W8Afp-w:g32")  # export_gguf quantised a copy
    simulated = logits(model)
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    ).eval()
    assert distance(logits(again), simulated) < 0.3 * distance(exact, simulated)
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    read = read_gguf((tmp_path / "a.gguf").read_bytes()).tensor("blk.1.ffn_down.weight")
    assert (np.abs(read - weight) <= np.abs(weight) / 254).all()
    (stored,) = [
        t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors
        if t.name == "blk.1.ffn_down.weight"
    ]  # fmt: skip
    blocks = stored.data.reshape(-1, 34)
    from skipless.quant import quantization

    (own,) = [w for w in quantization(model).weights if w.name.endswith("1.mlp.down_proj.weight")]
    assert np.array_equal(blocks[:, 2:].view("i1"), own.codes().codes.numpy().reshape(-1, 32))


@pytest.mark.parametrize("scheme", ["W8A8", "W4Afp-w:g32", "W8Afp", "W8Afp-w:g32-asym"])
def test_other_schemes_are_refused(scheme, tokenizer, tmp_path):
    with pytest.raises(UserError, match="has no counterpart in GGUF.*W8Afp-w:g32"):
        export_gguf(Plain(model=None, tokenizer=tokenizer), tmp_path / "a.gguf", scheme=scheme)


def test_scales_that_a_half_float_loses_are_refused(tokenizer, tmp_path):
    model = to_stock(ours())
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e-4)
    plain = Plain(model=model, tokenizer=tokenizer)
    with pytest.raises(UserError, match="down_proj.weight has the scale .*--dtype f16"):
        export_gguf(plain, tmp_path / "a.gguf", scheme="W8Afp-w:g32")


def test_squared_relu_is_arcee_and_gelu_nothing(tokenizer, tmp_path):
    model = ours(hidden_act="relu2")
    done = export_gguf(Plain(model=to_stock(model), tokenizer=tokenizer), tmp_path / "a.gguf")
    assert done.architecture == "arcee" and done.difference < 1e-5
    with pytest.raises(UserError, match="model.hidden_act swiglu.*--format llama"):
        plain = Plain(model=to_stock(ours(hidden_act="gelu")), tokenizer=tokenizer)
        export_gguf(plain, tmp_path / "b.gguf")


def test_other_decoders_are_refused(tokenizer, tmp_path):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 300,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    qwen = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small))
    with pytest.raises(UserError, match="Qwen3ForCausalLM norms queries and keys.*convert_hf_to"):
        export_gguf(Plain(model=qwen, tokenizer=tokenizer), tmp_path / "a.gguf")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, rope_parameters=rope))
    with pytest.raises(UserError, match="turns by the rule 'linear'"):
        export_gguf(Plain(model=llama, tokenizer=tokenizer), tmp_path / "a.gguf")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, attention_bias=True))
    with pytest.raises(UserError, match="has the bias model.layers.0.self_attn.q_proj.bias"):
        export_gguf(Plain(model=llama, tokenizer=tokenizer), tmp_path / "a.gguf")


def test_tokenizers_that_gguf_has_no_words_for(tokenizer, tmp_path):
    about = json.loads(tokenizer.read_text())
    with pytest.raises(UserError, match="do not belong together"):
        read_vocabulary(tokenizer, 100)
    known = read_vocabulary(tokenizer, 310)
    assert len(known.tokens) == 310 and known.pre == "gpt-2" and known.ids == {"eos": 0}
    assert known.types[0] == 3 and known.types[-1] == 5 and known.types[5] == 1
    for change in (
        {"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None}, {"model": {**about["model"], "type": "Unigram"}},
        {"model": {**about["model"], "ignore_merges": True}},
    ):  # fmt: skip
        other = tmp_path / "tokenizer.json"
        other.write_text(json.dumps(about | change))
        with pytest.raises(UserError, match="is not a byte-level BPE"):
            read_vocabulary(other, 310)
    other.write_text("{")
    with pytest.raises(UserError, match="no tokenizer.json that can be read"):
        read_vocabulary(other, 310)


def test_tokens_that_the_tokenizer_puts_around_a_text(tokenizer, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import ByteLevel, TemplateProcessing

    end = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": end, "eos_token": end})
    )

    def read(processor):
        made = Tokenizer.from_file(str(tokenizer))
        made.post_processor = processor
        made.save(str(tmp_path / "tokenizer.json"))
        ids, bare = (
            made.encode("the king").ids,
            made.encode("the king", add_special_tokens=False).ids,
        )
        found = read_vocabulary(tmp_path / "tokenizer.json", 310)
        before, after = [0] * found.adds["bos"], [0] * found.adds["eos"]
        assert ids == [*before, *bare, *after]
        return found.adds

    assert read(ByteLevel()) == {"bos": False, "eos": False}
    around = {"single": f"{end} $A", "special_tokens": [(end, 0)]}
    assert read(TemplateProcessing(**around)) == {"bos": True, "eos": False}
    around["single"] = f"$A {end}"
    assert read(TemplateProcessing(**around)) == {"bos": False, "eos": True}
    around["single"] = f"{end} {end} $A"
    with pytest.raises(UserError, match="puts other tokens around a text"):
        read(TemplateProcessing(**around))


@pytest.fixture(scope="module")
def rezero(tiny_settings, text_file, tmp_path_factory):
    """A trained ReZero run of SwiGLU."""
    from skipless import recipes
    from skipless.data import prepare

    changes = {"model.hidden_act": "swiglu", "optim.lr": "1e-2"}
    config = override(recipes.get("connections-4-rezero"), {**tiny_settings, **changes})
    path = tmp_path_factory.mktemp("export") / "rezero"
    train(config, path, data=prepare(config.data, 300, cache_dir=text_file.parent / "cache"))
    return path


def test_a_trained_run_goes_to_gguf_to_llama_and_back(rezero, tmp_path, capsys):
    file, folder = tmp_path / "a.gguf", tmp_path / "llama"
    words = ["export", str(rezero), "--format", "gguf", "--out", str(file)]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["difference"] < 1e-5 and said["architecture"] == "llama"
    run = load_run(rezero)
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    ).eval()
    ids = torch.tensor([run.tokenizer.encode("The king said that the king said")])[:, :16]
    with torch.no_grad():
        wanted = run.model(ids).logits
        assert distance(again(ids).logits, wanted) < 1e-5
    assert main(words) == 2 and "exists already" in capsys.readouterr().err
    words = ["export", str(rezero), "--format", "llama", "--out", str(folder)]
    assert main([*words, "--num-tokens", "64"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, folded F1 x" in said and "stock transformers reads it" in said
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert distance(stock(ids).logits, wanted) < 1e-5
    # and the folder, a Llama like any other, is a source itself
    assert main(["export", str(folder), "--format", "gguf", "--dtype", "f16", "--norm-gains",
                 "--out", str(tmp_path / "b.gguf")]) == 0  # fmt: skip
    assert "largest difference of a logit to the model in full precision" in capsys.readouterr().out


def test_a_patched_llama(rezero, tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    patch(model, "rezero")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.fill_(0.7)
    wanted = logits(model)
    save_pretrained(model, tmp_path / "patched")
    tokenizer = load_run(rezero).data.tokenizer_path.read_text()
    with pytest.raises(UserError, match="holds no tokenizer.json"):
        export_gguf(str(tmp_path / "patched"), tmp_path / "a.gguf")
    (tmp_path / "patched/tokenizer.json").write_text(tokenizer)
    export_gguf(str(tmp_path / "patched"), tmp_path / "a.gguf")
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    ).eval()
    assert distance(logits(again), wanted) < 1e-5


@pytest.mark.parametrize("format", ["llama", "gguf"])
def test_a_model_without_skips_is_refused_with_what_keeps_it(format, tiny_run, tmp_path, capsys):
    out = tmp_path / ("a.gguf" if format == "gguf" else "folder")
    assert main(["export", str(tiny_run), "--format", format, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "stock transformers has no class for this model" in error
    assert "--format onnx or hf keeps it as it is" in error and not list(tmp_path.iterdir())


def test_an_interrupted_or_unwritable_file(rezero, tmp_path, monkeypatch):
    plain = open_plain(str(rezero))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_read_back", stop)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(plain, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"does not end in \.gguf"):
        export_gguf(plain, tmp_path / "folder")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(UserError) as told:
        export_gguf(plain, tmp_path / "a.gguf")
    assert str(told.value) == "gguf is not installed; install it with `pip install 'gguf>=0.17'`"
