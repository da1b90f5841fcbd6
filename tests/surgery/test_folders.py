"""`skipless patch`: a folder in, a patched folder out, one sentence for what cannot be."""

import errno
import json
import os

import pytest
import torch

from skipless.cli import main
from skipless.errors import UserError
from skipless.surgery import connections, load, patch
from skipless.surgery.folders import patch_folder, sample_batch
from skipless.surgery.sources import find_folder

FAMILIES = ("llama", "gpt2", "bert", "vit", "clip", "whisper")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neutral_patch_changes_no_output(tiny, family, tmp_path):
    tiny.build(family).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    done = patch_folder(str(tmp_path / "plain"), tmp_path / "new", "layerscale", layers=[-1])
    assert done.difference == 0 and done.largest > 0 and done.num_parameters > 0
    loaded = load(tmp_path / "new")
    names = {f"{layer}.{site}_connection" for layer, site, _ in done.places}
    assert names == set(connections(loaded)) and done.model == type(loaded).__name__
    assert (tmp_path / "new" / "tokenizer.json").exists()
    batch = tiny.inputs(family)
    with torch.no_grad():
        assert torch.equal(tiny.logits(loaded, batch), tiny.logits(tiny.build(family), batch))


def test_the_command_prints_places_and_change(tiny, tmp_path, capsys):
    tiny.build("llama").save_pretrained(tmp_path / "plain")
    plain, new = str(tmp_path / "plain"), str(tmp_path / "new")
    arguments = ["patch", plain, "--connection", "none", "--sites", "mlp", "--layers", "1"]
    assert main([*arguments, "--out", new]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM: 1 skip removed, 0 new parameters" in said
    assert "`skipless convert` removes skips" in said
    assert "model.layers.1  mlp -> none" in said and "changed by up to" in said and new in said
    assert main([*arguments, "--json", "--out", new + "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    model = tiny.build("llama")
    batch = sample_batch(model)
    with torch.no_grad():
        before = model(**batch).logits
        after = patch(model, "none", sites="mlp", layers=1)(**batch).logits
    assert row["difference"] == pytest.approx(float((after - before).abs().max()), rel=1e-4)
    assert row["places"] == [{"layer": "model.layers.1", "site": "mlp", "connection": "none"}]


def test_what_cannot_be_is_one_sentence_and_leaves_nothing(tiny, tmp_path, capsys):
    tiny.build("llama").save_pretrained(tmp_path / "plain")
    patch(tiny.build("llama")).save_pretrained(tmp_path / "patched")
    (tmp_path / "empty").mkdir()
    odd = {"architectures": ["LlamaForCausalMM"], "model_type": "llama"}
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps(odd))
    sick = tiny.build("llama")
    with torch.no_grad():
        sick.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    sick.save_pretrained(tmp_path / "sick")
    tiny.build("llama").save_pretrained(tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 500)
    out = tmp_path / "out"
    for arguments, said in [
        (["plain", "--layers", "2"], "layer 2 is out of range"),
        (["plain", "--sites", "cross_attention"], "has no cross_attention"),
        (["plain", "--connection", "rezro"], "did you mean 'rezero'"),
        (["plain", "--stacks", "encoder"], "no stack of layers matches 'encoder'"),
        (["patched"], "is patched already"),
        (["empty"], "holds no config.json"),
        (["sick"], "no numbers: model.layers.1.mlp.up_proj.weight is nan at [0, 0]"),
        (["cut"], "cannot be loaded as LlamaForCausalLM"),
        (["odd"], "holds a LlamaForCausalMM"),
        (["smolm2-135m"], "did you mean 'smollm2-135m'"),
    ]:
        place = tmp_path / arguments[0]
        model = str(place) if place.exists() else arguments[0]
        assert main(["patch", model, *arguments[1:], "--out", str(out)]) == 2, arguments
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("skipless: ") and said in error
        assert not out.exists() and not list(tmp_path.glob(".out*"))
    assert main(["patch", str(tmp_path / "plain"), "--out", str(tmp_path / "patched")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["patch", str(tmp_path / "plain")]) == 2
    assert "--out is missing" in capsys.readouterr().err
    with pytest.raises(UserError, match="neither a folder nor a named model"):
        find_folder("nowhere")
    assert main(["models", "get"]) == 2 and "needs at least one name" in capsys.readouterr().err
    assert main(["models", "list"]) == 0 and "smollm2-135m" in capsys.readouterr().out


def test_odd_vocabularies_work_and_t5_is_refused_in_words(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    for size in (40, 4):  # below GPT-2's own end token, and below the first five
        small = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=size)
        transformers.GPT2LMHeadModel(small).save_pretrained(tmp_path / f"gpt2-{size}")
        out = str(tmp_path / f"out-{size}")
        assert main(["patch", str(tmp_path / f"gpt2-{size}"), "--out", out]) == 0
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50,
        decoder_start_token_id=0,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    capsys.readouterr()
    assert main(["patch", str(tmp_path / "t5"), "--out", str(tmp_path / "no")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("skipless: ") and "T5" in said and not (tmp_path / "no").exists()


def test_a_full_disk_names_the_folder_that_was_asked_for(tiny, tmp_path, monkeypatch):
    import transformers

    tiny.build("llama").save_pretrained(tmp_path / "plain")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(UserError) as error:
        patch_folder(str(tmp_path / "plain"), tmp_path / "new")
    said = str(error.value)
    assert f"saved to {tmp_path / 'new'}: No space left" in said and ".skipless-" not in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["plain"]
