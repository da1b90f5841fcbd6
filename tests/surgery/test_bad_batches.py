"""Batches, weights and teachers that do not fit the model: one sentence, and nothing is changed."""

import pytest
import torch

from skipless.errors import UserError
from skipless.model import ModelConfig, Transformer
from skipless.surgery import (
    ConversionConfig,
    convert,
    fold,
    patch,
    prune,
    save_pretrained,
    shares,
    untrained_curves,
)

GOOD = [torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))]
QUICK = ConversionConfig(steps_per_stage=1, fit_batches=2, skips_per_stage=0)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (GOOD[0][:, :0], r"int64 of shape \[2, 0\]"),
        (GOOD[0][0], r"int64 of shape \[6\]"),
        (GOOD[0].float(), "holds float32"),
        (GOOD[0] + 900, "knows 0 to 39; cut the text with the tokenizer"),
        (-GOOD[0], "the token -"),
        ({"input_ids": GOOD[0] + 900}, "knows 0 to 39"),
        ((GOOD[0] + 900, GOOD[0]), "knows 0 to 39"),
    ],
)
def test_ids_that_are_none_of_the_models(tiny, tmp_path, batch, said):
    model, patched = tiny.build("llama"), patch(tiny.build("llama"), "rezero")
    before = tiny.logits(model, tiny.inputs("llama"))
    folder = tmp_path / "new"
    for call in (
        lambda: prune(patched, [batch], loss_budget=0.1),
        lambda: shares(patched, [batch]),
        lambda: convert(model, [batch], GOOD, QUICK, folder=folder),
        lambda: convert(model, GOOD, [batch], QUICK, folder=folder),
        lambda: untrained_curves(model, [batch]),
    ):
        with pytest.raises(UserError, match=said) as error:
            call()
        assert "\n" not in str(error.value) and "batch 0" in str(error.value)
    assert not folder.exists()
    assert torch.equal(tiny.logits(model, tiny.inputs("llama")), before)


def test_our_decoder_has_a_vocabulary_too():
    ours = Transformer(ModelConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
    ))  # fmt: skip
    with pytest.raises(UserError, match="Transformer knows 0 to 19"):
        shares(ours, GOOD)


def test_images_are_no_token_ids(tiny):
    model = patch(tiny.build("vit"), "rezero")
    assert len(shares(model, [tiny.inputs("vit")])) == 4


@pytest.mark.parametrize("words", [{"loss_budget": "0.1"}, {"tolerance": "1e-3"}])
def test_words_are_no_limits(tiny, words):
    with pytest.raises(UserError, match="'.*'; a positive"):
        prune(patch(tiny.build("llama"), "rezero"), GOOD, **words)


def test_weights_that_are_nan_have_no_shares_and_no_curve(tiny):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="layers.0.mlp.up_proj.weight is nan"):
        untrained_curves(model, GOOD)
    with pytest.raises(UserError, match="layers.0.mlp.up_proj.weight is nan"):
        shares(patch(model, "rezero"), GOOD)


def test_a_teacher_of_another_vocabulary(tiny):
    with pytest.raises(UserError, match="logits of 50 tokens and the model of 40"):
        convert(tiny.build("llama"), GOOD, GOOD, QUICK, teacher=tiny.build("llama", vocab_size=50))


def test_sublayers_that_are_not_patched_are_named(tiny):
    model = patch(tiny.build("llama"), "none", sites="mlp")
    with pytest.raises(UserError, match="the other 2 sublayers are not patched: mark them"):
        prune(model, GOOD, loss_budget=0.1)


def test_what_compile_returns_is_folded_measured_and_converted(tiny):
    compiled = torch.compile(patch(tiny.build("llama"), "rezero"), backend="eager")
    assert shares(compiled, GOOD) == shares(compiled._orig_mod, GOOD)
    assert type(fold(compiled).model).__name__ == "LlamaForCausalLM"
    plain = torch.compile(tiny.build("llama"), backend="eager")
    assert len(convert(plain, GOOD, GOOD, QUICK).converted) == 4


def test_layers_that_share_a_weight_are_named(tiny, tmp_path):
    model = patch(tiny.build("llama"), "rezero")
    first, second = model.model.layers
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    with torch.no_grad():
        first.mlp_connection.alpha.fill_(0.5)
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.weight are one tensor, which can"):
        fold(model)
    with pytest.raises(UserError, match="down_proj.weight are one tensor, which its class does"):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("empty", ["", " "])
def test_a_folder_without_a_name_is_not_the_working_directory(tiny, monkeypatch, tmp_path, empty):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the folder to save to is empty"):
        save_pretrained(patch(tiny.build("llama"), "rezero"), empty)
    assert not list(tmp_path.iterdir())
