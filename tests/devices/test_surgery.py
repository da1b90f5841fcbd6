"""Patched Hugging Face models, and ours in transformers, on an accelerator that is not there."""

import copy

import pytest
import torch
from pretend_device import pretend

from skipless.config import ConnectionConfig, ModelConfig, UniversalConfig
from skipless.model import Transformer
from skipless.surgery import ConversionConfig, convert, fold, patch, prune, shares, to_stock

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip
TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WHISPER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
    "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "bert": ("BertConfig", "BertForMaskedLM", TEXT | DROP),
    "vit": ("ViTConfig", "ViTForImageClassification", {**SMALL, "image_size": 8, "patch_size": 4}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
}
GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(3, 40, (2, 9), generator=GENERATOR)
IMAGE = torch.randn(2, 3, 8, 8, generator=GENERATOR)
SOUND = torch.randn(2, 4, 16, generator=GENERATOR)
MASK = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
INPUTS = {
    "llama": {"input_ids": IDS, "attention_mask": MASK}, "bert": {"input_ids": IDS},
    "vit": {"pixel_values": IMAGE}, "whisper": {"input_features": SOUND, "decoder_input_ids": IDS},
}  # fmt: skip


def build(name):
    config, model, settings = MODELS[name]
    torch.manual_seed(0)
    found = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for p in found.parameters():
            if p.ndim > 1:
                p.mul_(5)
    return found.eval()


def join(kind):
    if kind in ("mean", "diagonal", "cholesky", "bures"):
        small = UniversalConfig(
            aligner=kind, rank=4, chunk_size=3, winsor=1.5, winsor_window=4, rho=0.5, kappa=2.0
        )
        return ConnectionConfig(kind="universal", universal=small)
    return ConnectionConfig(kind=kind)


def moved(batch, kind):
    return {k: v.to(kind) for k, v in batch.items()}


CASES = [
    ("llama", "learned"), ("llama", "diagonal"), ("llama", "bures"), ("llama", "gated"),
    ("bert", "rezero"), ("bert", "diagonal"), ("vit", "layerscale"), ("vit", "cholesky"),
    ("whisper", "interpolate"), ("whisper", "mean"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize(("family", "connection"), CASES)
def test_patched_models(kind, family, connection):
    model = patch(build(family), join(connection))
    twin = build(family)
    expected = model(**INPUTS[family]).logits
    expected.square().mean().backward()
    with pretend(kind) as device:
        patch(twin.to(kind), join(connection))  # on the device: new gains are made there
        assert all(p.device == device.device for p in twin.parameters())
        twin.load_state_dict(model.state_dict())
        found = twin(**moved(INPUTS[family], kind)).logits
        found.square().mean().backward()
        torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-3, atol=1e-3)
        for name, p in twin.named_parameters():
            own = model.get_parameter(name).grad
            if own is not None:
                torch.testing.assert_close(p.grad.cpu(), own, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("connection", ["learned", "diagonal"])
def test_generation(connection):
    model = patch(build("llama"), join(connection))
    arguments = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3}
    expected = model.generate(IDS, attention_mask=MASK, **arguments)
    beams = model.generate(IDS, attention_mask=MASK, num_beams=2, **arguments)
    with pretend("cuda") as device:
        model.to("cuda")
        inputs = {"attention_mask": MASK.to("cuda"), **arguments}
        assert model.generate(IDS.to("cuda"), **inputs).tolist() == expected.tolist()
        assert not [
            place
            for place, number in device.waits.items()
            if "universal/" in place and number > 2 * 2
        ]  # once a site for the whole text, none a token
        assert model.generate(IDS.to("cuda"), num_beams=2, **inputs).tolist() == beams.tolist()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_folding_and_pruning(kind):
    small = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
                        max_position_embeddings=32, norm_eps=1e-9,
                        connection=ConnectionConfig(kind="learned"))  # fmt: skip
    with pretend(kind) as device:
        for model in (Transformer(small).to(kind), patch(build("llama"), join("learned")).to(kind)):
            folded = fold(model)
            assert folded.difference < 1e-4
            assert next(folded.model.parameters()).device == device.device
        own = Transformer(small).to(kind)
        assert shares(own, [IDS])
        assert to_stock(fold(own).model) is not None
        torch.nn.init.zeros_(own.layers[1].mlp.down_proj.weight)
        assert prune(own, [IDS.to(kind)]).dropped == ("layers.1.mlp_connection",)


@pytest.mark.parametrize("start", ["fit", "anneal"])
def test_conversion(start):
    config = ConversionConfig(steps_per_stage=2, fit_batches=2, warmup_steps=1, start=start)
    batches = [torch.randint(3, 40, (2, 9), generator=GENERATOR) for _ in range(24)]
    with pretend("cuda"):
        model = build("llama").to("cuda")
        found = convert(model, batches, batches[:2], config)
        assert found.stages and all(row.loss > 0 for row in found.stages)


@pytest.mark.parametrize("kind", ["none", "learned", "diagonal"])
def test_ours_in_transformers(kind):
    from skipless.hf import SkiplessConfig, SkiplessForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 32}  # fmt: skip
    connection = {"kind": "universal"} if kind == "diagonal" else kind
    model = SkiplessForCausalLM(SkiplessConfig(**small, connection=connection)).eval()
    twin = copy.deepcopy(model)
    arguments = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3}
    text = model.generate(IDS, attention_mask=MASK, **arguments)
    expected = model(IDS, attention_mask=MASK, labels=IDS)
    with pretend("cuda") as device:
        twin.to("cuda")
        ids, mask = IDS.to("cuda"), MASK.to("cuda")
        found = twin(ids, attention_mask=mask, labels=ids)
        found.loss.backward()
        assert found.logits.device == device.device
        torch.testing.assert_close(found.logits.detach().cpu(), expected.logits)
        assert twin.generate(ids, attention_mask=mask, **arguments).tolist() == text.tolist()
        twin.generate(ids, attention_mask=mask, num_beams=2, **arguments)
