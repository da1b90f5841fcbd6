"""Real models: SmolLM2's giant is found, MiniLM and Whisper are measured whole.

Needs a registry once; afterwards the cache is enough.
"""

import pytest
import torch
from real_material import SPOKEN, TEXT, folder, speech

from skipless.diagnose import diagnose

pytestmark = [pytest.mark.network, pytest.mark.slow]


def test_the_giant_of_smollm2_is_found(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder("smollm2-135m")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    ids = torch.tensor(tokenizer(TEXT * 4)["input_ids"])[:128].reshape(2, 64)
    result = diagnose(model, ids, "W8A8", tokenizer=tokenizer, layers=False)
    streams = {r["layer"]: r for r in result.sites if r["kind"] == "stream"}
    for layer in range(11, 28):
        row = streams[layer]
        giant = row["anatomy"]["tokens"][0]
        assert (giant["channel"], giant["position"]) == (507, 0), layer
        assert 20_000 < abs(giant["value"]) < 27_000
        # heavy on every token too, and told apart: what it usually is has nothing of the giant
        levels = {c["channel"]: c["level"] for c in row["anatomy"]["channels"]}
        assert levels.get(507, 0.0) < abs(giant["value"]) / 50
        assert row["token_sqnr"]["W8A8"] < 6 < row["sqnr"]["W8A8"] - row["token_sqnr"]["W8A8"]
        tried = {r["remedy"]: r["token_sqnr"] for r in row["remedies"]["W8A8"]}
        assert tried["token"] > tried["as is"] + 20 and tried["rotation"] < tried["token"]
        assert row["remedy"]["W8A8"]["remedy"].endswith("token")
    assert streams[28]["max_abs"] < 15_000 and streams[10]["anatomy"]["tokens"] == []
    assert streams[0]["max_abs"] < 1000


def test_minilm_on_text():
    from transformers import AutoModel, AutoTokenizer

    path = folder("minilm-l6")
    model, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    batch = dict(tokenizer([TEXT, TEXT[:80]], padding=True, return_tensors="pt"))
    result = diagnose(model, [batch], ["W8A8", "W4A4"], tokenizer=tokenizer)
    assert result.damage["kind"] == "distance" and len(result.layers) == 12
    assert len(result.attention) == 6 and len(result.lines()) >= 8
    assert result.sites[0]["count"] == int(batch["attention_mask"].sum())


def test_whisper_on_speech():
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    path = folder("whisper-tiny-en")
    processor = AutoProcessor.from_pretrained(path)
    features = processor(speech(), sampling_rate=16000, return_tensors="pt").input_features
    labels = processor.tokenizer(SPOKEN, return_tensors="pt").input_ids[:, 1:]
    model = WhisperForConditionalGeneration.from_pretrained(path)
    batch = {"input_features": features, "decoder_input_ids": labels}
    result = diagnose(model, [batch], "W8A8", tokenizer=processor.tokenizer)
    assert {r["layer"] for r in result.layers} == {0, 1, 2, 3}
    stacks = {r["site"].split(".")[1] for r in result.sites if r["kind"] == "stream"}
    assert stacks == {"encoder", "decoder"}
