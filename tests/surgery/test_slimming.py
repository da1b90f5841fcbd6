"""`skipless prune` and `skipless fold`: runs and folders in, smaller ones out, clear refusals."""

import json
import math

import pytest
import torch

from skipless.cli import main
from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.evaluate import loss
from skipless.jsonable import override
from skipless.measure import evaluate_run, held_out_batches, quantize_run
from skipless.rundir import RunDir
from skipless.surgery import connections, load, patch, shares
from skipless.train import load_run, train

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def rezero(tiny_settings, text_file, tmp_path_factory):
    """A trained ReZero run of SwiGLU, one of whose MLPs hardly adds anything."""
    from skipless import recipes
    from skipless.data import prepare

    changes = {"model.hidden_act": "swiglu", "optim.lr": "1e-2", "model.num_hidden_layers": "3"}
    config = override(recipes.get("connections-4-rezero"), {**tiny_settings, **changes})
    path = tmp_path_factory.mktemp("slim") / "rezero"
    data = prepare(config.data, 300, cache_dir=text_file.parent / "cache")
    train(config, path, data=data)
    return path


@pytest.fixture
def plain(tiny, rezero, tmp_path):
    """A tiny Llama, one of whose layers hardly adds anything, and the tokenizer of the run."""
    folder = tmp_path / "llama"
    model = tiny.build("llama", vocab_size=300, num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-4)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-4)
    model.save_pretrained(folder)
    tokenizer = load_run(rezero).data.tokenizer_path.read_text()
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_a_run_is_pruned_folded_and_read_by_everything(rezero, tmp_path, capsys):
    import transformers

    small, out = tmp_path / "small", tmp_path / "stock"
    arguments = ["prune", str(rezero), "--loss-budget", "0.05", "--num-tokens", "128"]
    assert main([*arguments, "--out", str(small)]) == 0
    said = capsys.readouterr().out
    assert "share max" in said and "dropped" in said
    assert ") on 128 tokens; the loss above is on 128 that it chose by" in said
    assert f"{small}  (a run:" in said
    before, after = load_run(rezero), load_run(small)
    assert after.is_finished and after.model.num_parameters() < before.model.num_parameters()
    noted = json.loads((small / "prune.json").read_text())
    assert noted["source"] == str(rezero) and len(noted["rows"]) == 6
    assert "without layers." in after.config.note
    held_out = held_out_batches(after, 128)
    assert evaluate_run(after, num_tokens=128)["held_out_loss"] == loss(after.model, held_out).nats
    quantize_run(after, schemes=("W8A8",), scopes=("block",), num_tokens=128)

    assert main(["fold", str(small), "--out", str(out), "--num-tokens", "128"]) == 0
    said, noise = capsys.readouterr()
    assert "held-out loss on 128 tokens:\n" in said
    assert "it/s" not in noise  # bars of transformers
    assert (
        "folded F1 x" in said and "(gains)" in said and "W4A4" in said and "full precision" in said
    )
    stock = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = held_out[0][0][:2]
    with torch.no_grad():
        expected, got = after.model(ids).logits, stock(ids).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("the king").input_ids == after.tokenizer.encode("the king")
    for settings in (stock.config, stock.generation_config):
        ends = {settings.eos_token_id, settings.pad_token_id}
        assert ends == {after.tokenizer.eos_id} == {tokenizer.pad_token_id}
    assert tokenizer.model_max_length == after.config.model.max_position_embeddings
    texts = ["the", "the king said lord"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)  # on the left, as generate wants
    alone = tokenizer(texts[:1], return_tensors="pt")
    lengths = {"max_new_tokens": 6, "do_sample": False}
    written = stock.generate(**batch, **lengths)[0, -6:]
    assert torch.equal(written, stock.generate(**alone, **lengths)[0, -6:])

    again = ["fold", str(rezero), "--norm-gains", "--num-tokens", "64", "--json"]
    assert main([*again, "--out", str(tmp_path / "two")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["folded"]["F1"] == 6 and row["folded"]["F4"] == 6 and row["difference"] < 1e-5
    assert row["model"] == "LlamaForCausalLM" and row["zeroed"] == []
    pair = row["losses"]["full precision"]
    assert pair["before"] == pytest.approx(pair["after"], abs=1e-5)
    assert set(row["losses"]) == {"full precision", "W8A8", "W4A4"}


def test_whole_layers_of_a_folder_leave_a_plain_model(plain, text_file, cache, tmp_path, capsys):
    import transformers

    arguments = ["prune", str(plain), "--text", str(text_file), "--num-tokens", "64",
                 "--tolerance", "0.01", "--json"]  # fmt: skip
    code = main([*arguments, "--unit", "layer", "--out", str(tmp_path / "layers")])
    row = json.loads(capsys.readouterr().out)
    assert code == 0 and row["kind"] == "plain"
    assert row["removed_layers"] == ["model.layers.1"]
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "layers")
    assert stock.config.num_hidden_layers == 2
    assert (tmp_path / "layers" / "tokenizer.json").exists()
    assert not hasattr(stock.config, "skipless_patch")


def test_single_sublayers_of_a_folder_leave_a_patched_model_that_folds(
    tiny, rezero, text_file, cache, tmp_path, capsys
):
    model = tiny.build("llama", vocab_size=300, num_hidden_layers=3)
    patch(model, ConnectionConfig(kind="rezero", init=1.0))
    with torch.no_grad():
        connections(model)["model.layers.1.attention_connection"].alpha.fill_(1e-7)
    model.save_pretrained(tmp_path / "patched")
    tokenizer = load_run(rezero).data.tokenizer_path.read_text()
    (tmp_path / "patched" / "tokenizer.json").write_text(tokenizer)
    common = ["--data", str(text_file), "--num-tokens", "64"]
    arguments = ["prune", str(tmp_path / "patched"), *common, "--tolerance", "1e-3", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "small")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["kind"] == "patched" and row["dropped"] == ["model.layers.1.attention_connection"]
    assert row["before"]["cache_bytes"] * 2 == row["after"]["cache_bytes"] * 3
    assert len(connections(load(tmp_path / "small"))) == 6
    assert main(["fold", str(tmp_path / "small"), *common, "--out", str(tmp_path / "one")]) == 0
    assert "weights of 0 for: model.layers.1.attention_connection" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["bert", "vit", "clip", "whisper"])
def test_a_model_without_a_next_token_folds_unmeasured_and_is_not_pruned(
    family, tiny, rezero, text_file, cache, tmp_path, capsys
):
    import transformers

    model = tiny.build(family)
    model.save_pretrained(tmp_path / "plain")
    patch(model, ConnectionConfig(kind="rezero", init=0.5)).save_pretrained(tmp_path / "patched")
    tokenizer = load_run(rezero).data.tokenizer_path.read_text()
    for name in ("plain", "patched"):
        (tmp_path / name / "tokenizer.json").write_text(tokenizer)
    text = ["--text", str(text_file), "--num-tokens", "64", "--out", str(tmp_path / "no")]
    for command in ("prune", "convert"):
        arguments = text if command == "prune" else [*text[:2], *text[4:]]
        assert main([command, str(tmp_path / "plain"), *arguments]) == 2
        assert "predicts no next token" in capsys.readouterr().err
    reason = "token that it would have to predict" if family == "bert" else "no next token"
    for command in ("prune", "fold"):
        assert main([command, str(tmp_path / "patched"), *text]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["fold", str(tmp_path / "patched"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"no held-out loss: {type(tiny.build(family)).__name__}" in said and reason in said
    stock = getattr(transformers, type(tiny.build(family)).__name__)
    batch = tiny.inputs(family)
    with torch.no_grad():
        got = tiny.logits(stock.from_pretrained(tmp_path / "out").eval(), batch)
        expected = tiny.logits(model.eval(), batch)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_decoder_predicts_and_a_head_that_is_missing_is_told(tiny, tmp_path):
    from skipless.surgery.reading import no_next_token, read_language_model

    for family in ("llama", "gpt2", "mixtral"):
        assert no_next_token(tiny.build(family)) == ""
    assert "predicts no next token" in no_next_token(tiny.build("llama").model)
    tiny.build("llama").model.save_pretrained(tmp_path / "body")
    with pytest.raises(UserError, match="LlamaModel predicts no next token, as LlamaForCausalLM"):
        read_language_model(tmp_path / "body")
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "body" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks the weight lm_head.weight"):
        read_language_model(tmp_path / "body")


def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    plain, rezero, text_file, cache, copy_run, tmp_path, capsys
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "odd").mkdir()
    unfinished = copy_run(tmp_path / "unfinished")
    (unfinished / "train.json").unlink()
    text = ["--text", str(text_file), "--num-tokens", "64"]
    out = ["--out", str(tmp_path / "out")]
    for arguments, said in [
        (["prune", str(rezero)], "--out is missing"),
        (["prune", str(rezero), "--out", str(tmp_path / "full")], "exists already"),
        (["prune", str(rezero), "--loss-budget", "0", *out], "--loss-budget is 0"),
        (["prune", str(rezero), "--tolerance", "-1", *out], "--tolerance is -1"),
        (["prune", str(rezero), "--num-tokens", "0", *out], "--num-tokens is '0'"),
        (["prune", str(rezero), "--tolerance", "1e9", *text, *out], "nothing would be left"),
        (["prune", str(rezero), "--loss-budget", "1e9", *text, *out], "covers every sublayer"),
        (["prune", str(tmp_path / "odd"), *out], "no config.json that can be read"),
        (["prune", "smollm9", *out], "neither a folder nor a named model"),
        (["prune", str(unfinished), *out], "is not finished"),
        (["fold", str(plain), *text, *out], "is not patched, so there is no gain to fold"),
        (["fold", str(rezero), "--text", "nothing.txt", *out], "unknown source 'nothing.txt'"),
    ]:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_pruned_classifier_and_a_classifier_that_does_not_fold(
    tiny_settings, text_file, cache, tmp_path, capsys
):
    from skipless import recipes

    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("king", "moon"))
    changes = {"data.sources": f"{text_file},{other}", "model.num_labels": "2"}
    config = override(recipes.get("connections-author-4-rezero"), {**tiny_settings, **changes})
    train(config, tmp_path / "judge")
    run = load_run(tmp_path / "judge")
    between = sorted(shares(run.model, held_out_batches(run, 256)).values())[2]
    arguments = ["prune", str(run.path), "--tolerance", str(between), "--num-tokens", "256"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "small")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert math.isfinite(row["held_out_after"]) and row["before"]["cache_bytes"] is None
    assert RunDir(tmp_path / "small").config().model.num_labels == 2
    assert main(["fold", str(tmp_path / "judge"), "--out", str(tmp_path / "out")]) == 2
    assert "classification head" in capsys.readouterr().err
    assert main([*arguments, "--text", str(other), "--out", str(tmp_path / "out")]) == 2
    assert "leave --text out" in capsys.readouterr().err
