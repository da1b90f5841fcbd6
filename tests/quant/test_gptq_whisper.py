"""GPTQ against rounding to the nearest on weights that were trained: Whisper tiny.en on speech."""

import pytest
import torch
from real_material import folder, speech_archive, utterances

from skipless.quant import quantization, quantized

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.mark.parametrize("include_convolutions", [False, True])
def test_w4_moves_the_outputs_less_by_gptq(include_convolutions):
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    path, archive = folder("whisper-tiny-en"), speech_archive()
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)

    def batch(sound, text):
        features = processor(sound, sampling_rate=16000, return_tensors="pt").input_features
        words = processor.tokenizer(f" {text}", return_tensors="pt").input_ids[:, 1:]
        return {"input_features": features, "decoder_input_ids": words}

    calibration = [batch(*one) for one in utterances(archive, "cards")]
    held_out = [batch(*one) for one in utterances(archive, "librivox")]  # another speaker

    @torch.no_grad()
    def outputs():
        found = [model(**one) for one in held_out]
        return [(one.encoder_last_hidden_state, one.logits) for one in found]

    def distance(which):
        pairs = [(x[which], y[which]) for x, y in zip(outputs(), exact, strict=True)]
        return sum(float((x - y).norm() / y.norm()) for x, y in pairs) / len(pairs)

    exact, moved = outputs(), {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for method in ("rtn", "gptq"):
        with quantized(
            model, "W4Afp-w:channel", method=method, calibration=calibration,
            include_convolutions=include_convolutions,
        ):  # fmt: skip
            names = [weight.name for weight in quantization(model).weights]
            assert ("model.encoder.conv1.weight" in names) == include_convolutions
            moved[method] = distance(0), distance(1)
    assert moved["gptq"][0] < moved["rtn"][0], moved
    assert moved["gptq"][1] < 0.85 * moved["rtn"][1], moved
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
