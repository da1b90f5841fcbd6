"""The whole diagnosis of modules in memory: nothing changed, every family, every reason told."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from skipless.diagnose import diagnose
from skipless.diagnose.batches import first_sequences
from skipless.diagnose.collect import Collector
from skipless.diagnose.damage import Damage, main_output, predicts_tokens
from skipless.errors import UserError
from skipless.quant import quantize, restore
from skipless.sites import first_tensor

TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
WHISPER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
    "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
FAMILIES = {
    "llama": ("Llama", "ForCausalLM", TEXT, "loss"),
    "gpt2": ("GPT2", "LMHeadModel", GPT2, "loss"),
    "bert": ("Bert", "Model", TEXT, "distance"),
    "bert-masked": ("Bert", "ForMaskedLM", TEXT, "distance"),
    "vit": ("ViT", "ForImageClassification", IMAGE, "distance"),
    "clip": ("CLIP", "Model", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8},
             "distance"),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER, "distance"),
}  # fmt: skip


def build(name):
    transformers = pytest.importorskip("transformers")
    prefix, suffix, config, _ = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, prefix + "Config")(**config)
    return getattr(transformers, prefix + suffix)(made).eval()


def batch(name):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (3, 8), generator=generator)
    image = torch.randn(3, 3, 8, 8, generator=generator)
    if name == "vit":
        return {"pixel_values": image}
    if name == "clip":
        tokens[:, -1] = 2
        return {"input_ids": tokens, "pixel_values": image}
    if name == "whisper":
        sound = torch.randn(3, 4, 16, generator=generator)
        return {"input_features": sound, "decoder_input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def hooks(model):
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_measured_and_left_as_it_was(name):
    model, inputs = build(name), batch(name)
    with torch.no_grad():
        before = main_output(model(**inputs)).clone()
    result = diagnose(model, [inputs], ["W8A8", "W4A4"])
    with torch.no_grad():
        assert torch.equal(main_output(model(**inputs)), before)
    assert hooks(model) == 0
    assert result.damage["kind"] == FAMILIES[name][3]
    kinds = {row["kind"] for row in result.sites}
    assert {"linear_input", "linear_output", "norm_input", "norm_output", "stream"} <= kinds
    assert all(row["count"] for row in result.sites), [r for r in result.sites if not r["count"]]
    assert {row["layer"] for row in result.layers} == {0, 1}
    assert len(result.layers) == 4 and all(row["increase"] is not None for row in result.layers)
    assert len(result.depth) >= 2 and result.alternatives and result.attention
    assert 6 <= len(result.lines()) <= 10
    assert not any("never ran" in line for line in result.missing)


def test_padding_is_left_out():
    model, inputs = build("bert"), batch("bert")
    row = diagnose(model, [inputs], layers=False).sites[0]
    assert row["count"] == 22


def test_numbers_are_those_of_scipy_in_every_pooling(planted, ids):
    from scipy.stats import kurtosis

    model, kept = planted(giant=50.0), {}
    collector = Collector(model, (8,))
    modules = dict(model.named_modules())
    handles = []
    for place in collector.places:

        def keep(_, args, result=None, name=place.site.name, out=place.site.direction == "output"):
            x = first_tensor(result if out else args)
            kept.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).double().numpy())

        module = modules[place.site.module]
        register = (module.register_forward_hook if place.site.direction == "output"
                    else module.register_forward_pre_hook)  # fmt: skip
        handles.append(register(keep))
    with torch.no_grad(), collector.active():
        for part in ids.split(3):
            collector.run(part)
    for handle in handles:
        handle.remove()
    names = set()
    for record in collector.finished():
        for place in record.places:
            names.add(place.site.name)
            x = np.concatenate(kept[place.site.name])
            assert record.moments.kurtosis() == pytest.approx(kurtosis(x, None), rel=1e-9)
            by_token = record.moments.kurtosis_per_token()
            assert by_token == pytest.approx(kurtosis(x, 1).mean(), rel=1e-9)
            by_channel = record.moments.kurtosis_per_channel().numpy()
            np.testing.assert_allclose(by_channel, kurtosis(x, 0), rtol=1e-9, atol=1e-9)
    assert names == {place.site.name for place in collector.places}


def test_hooks_are_gone_after_an_exception(planted, ids):
    model = planted()

    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of order")

    good, model.blocks[2] = model.blocks[2], Broken()
    with pytest.raises(RuntimeError, match="out of order"):
        diagnose(model, ids)
    assert hooks(model) == 0
    model.blocks[2] = good
    assert diagnose(model, ids, layers=False).num_tokens == 128


def test_training_mode_and_weights_come_back(planted, ids):
    model = planted().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    diagnose(model, ids)
    assert model.training and all(m.training for m in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_iterator_is_read_once_and_a_token_far_on_is_found(planted, words):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 50, (4, 16), generator=generator) for _ in range(5)]
    batches[3][2, 9] = 0
    result = diagnose(planted(giant=400.0), iter(batches), tokenizer=words, layers=False)
    assert result.num_batches == 5 and result.num_tokens == 320
    (token,) = result.sites[0]["anatomy"]["tokens"]
    assert (token["sequence"], token["position"], token["text"]) == (14, 9, "<0>")


def test_a_module_without_blocks_falls_back_to_names():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    result = diagnose(net, [torch.randn(64, 16)])
    assert result.scope == "linear" and result.damage["kind"] == "distance"
    assert [row["site"] for row in result.sites] == ["0:input", "0:output", "2:input", "2:output"]
    assert result.alternatives and result.depth == []
    assert any("error by depth" in line for line in result.missing)
    assert any("attention" in line for line in result.missing)


def test_what_cannot_be_quantised_is_still_measured_and_the_reason_told():
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    result = diagnose(net, [torch.randn(4, 8, 16)])
    assert result.scope is None and result.layers == [] and result.sites
    assert any("nn.MultiheadAttention" in line for line in result.missing)


def test_the_worst_layer_is_found_and_predicted(ids):
    """One layer with a few huge weights: its loss is the largest, and its sites say so."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, :3] = 30.0
        model.lm_head.weight.mul_(20)
    result = diagnose(model, [ids % 40], "W4A4")
    rows = {row["layer"]: row for row in result.layers}
    assert rows[1]["increase"] > rows[0]["increase"]
    assert rows[1]["predicted"] > rows[0]["predicted"]
    assert result.damage["correlation"]["W4A4"] is None  # two layers are too few
    assert rows[1]["increase"] == pytest.approx(_by_hand(model, ids % 40), abs=1e-9)
    weight = next(r for r in result.weights if r["site"] == "model.layers.1.mlp.down_proj")
    assert weight["channel_sqnr"]["W4A4"] < 3 < 10 < weight["sqnr"]["W4A4"]
    assert weight["remedies"]["W4A4"]["channel"] > 10


def _by_hand(model, tokens):
    from skipless.evaluate import loss

    full = loss(model, tokens).nats
    quantize(model, "W4A4", "block", layers=[1])
    low = loss(model, tokens).nats
    restore(model)
    return low - full


def test_who_predicts_tokens():
    assert predicts_tokens(build("llama"), batch("llama"))
    for name in ("bert-masked", "bert", "whisper", "vit"):
        assert not predicts_tokens(build(name), batch(name))


def test_distance_is_that_of_the_outputs_at_real_tokens():
    model, inputs = build("bert"), batch("bert")
    damage = Damage(model, [inputs])
    assert damage.kind == "distance" and damage.increase() == (0.0, None)
    with torch.no_grad():
        old = model(**inputs).last_hidden_state.double()
        quantize(model, "W4A4")
        new = model(**inputs).last_hidden_state.double()
    real = inputs["attention_mask"] == 1
    wanted = float((new - old)[real].norm() / old[real].norm())
    assert damage.increase()[0] == pytest.approx(wanted, rel=1e-6)
    assert wanted != pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3)


def test_first_sequences_cut_every_tensor():
    inputs = batch("whisper")
    small = first_sequences((inputs, torch.ones(3)), 2)
    assert [v.shape[0] for v in small[0].values()] == [2, 2] and len(small[1]) == 2


def test_a_static_scheme_is_calibrated_on_the_layers_batches(planted, ids):
    result = diagnose(planted(), ids, "W8A8-static")
    assert len(result.layers) == 3 and result.alternatives[0]["scheme"] == "W8A8-static"


def test_weights_only(planted, ids):
    result = diagnose(planted(), ids, "W4Afp")
    assert result.worst_tensors() == [] and len(result.layers) == 3
    assert any("worst weight" in line for line in result.lines())


def test_bad_input_is_one_sentence(planted, ids):
    model = planted()
    with pytest.raises(UserError, match="no batch"):
        diagnose(model, [])
    with pytest.raises(UserError, match="at least one scheme"):
        diagnose(model, ids, [])
    with pytest.raises(UserError, match="not a quantisation scheme"):
        diagnose(model, ids, "W8B8")
    with pytest.raises(UserError, match="measure is 'los'"):
        diagnose(model, ids, measure="los")
    with pytest.raises(UserError, match="no query"):
        diagnose(model, ids, scope="all")
    with pytest.raises(UserError, match="BertForMaskedLM does not predict the next token"):
        diagnose(build("bert-masked"), [batch("bert-masked")], measure="loss")
    with pytest.raises(UserError, match="layer_batches is empty"):
        diagnose(model, ids, layer_batches=[])
    quantize(model, "W8A8")
    with pytest.raises(UserError, match=r"restore\(model\)"):
        diagnose(model, ids)
    restore(model)
    with torch.no_grad():
        model.blocks[1].down.weight[0, 0] = math.nan
    with pytest.raises(UserError, match=r"blocks\.1\.down\.weight holds NaN or infinity \(1 of"):
        diagnose(model, ids)


def test_memory_does_not_depend_on_the_number_of_batches(planted):
    """What is kept after one batch is as large as after twenty, but for the token ids."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 50, (32, 16), generator=generator) for _ in range(20)]
    sizes = []
    for number in (1, 20):
        collector = Collector(planted(), (8,))
        with torch.no_grad(), collector.active():
            for tokens in itertools.islice(batches, number):
                collector.run(tokens)
        sizes.append(sum(
            kept.rows.numel() for record in collector.finished()
            for kept in (record.outliers.extreme, record.outliers.sample)
        ))  # fmt: skip
    assert sizes[0] == sizes[1]


def test_the_checksum_tells_weights_and_inputs_apart_and_not_threads(planted, ids):
    from skipless.diagnose.parts import checksum

    model = planted()
    first = checksum(model, [ids])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = checksum(model, [ids])
    torch.set_num_threads(threads)
    assert first == again and checksum(model, [ids.flip(0)]) != first
    with torch.no_grad():
        model.blocks[1].down.weight[0, 0] += 1
    assert checksum(model, [ids]) != first
    assert checksum(model, [{"input_ids": ids}, (ids, ids.float())])
