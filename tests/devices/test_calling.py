"""Writing and scoring text on an accelerator that is not there; caches of packed integers."""

import pytest
import torch
from device_models import llama, transformer
from pretend_device import pretend

from skipless.evaluate.tasks.encoding import Encoded
from skipless.evaluate.tasks.scoring import score_requests
from skipless.quant import quantize
from skipless.quant.saved import is_packed, resume, saved_form
from skipless.serving.stepping import ForeignSteps, OwnSteps

IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
ROW = IDS[0].tolist()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("kv_bits", [None, 4, 8])
def test_steps_of_our_models(kind, kv_bits):
    model = transformer(max_position_embeddings=16)
    expected, found = OwnSteps(model, kv_bits, "token"), None
    with torch.no_grad():
        texts = [ROW + list(range(3, 3 + n)) for n in range(0, 10, 3)]  # the window slides
        rows = [expected.logits(text) for text in texts]
        with pretend(kind):
            found = OwnSteps(model.to(kind), kv_bits, "token")
            for text, row in zip(texts, rows, strict=True):
                torch.testing.assert_close(found.logits(text).cpu(), row, rtol=1e-3, atol=1e-3)
            assert found.num_bytes == expected.num_bytes


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_steps_and_packed_caches_of_foreign_models(bits):
    model = llama()
    from skipless.hf import QuantizedCache

    arguments = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    with torch.no_grad(), pretend("cuda") as device:
        model.to("cuda")
        steps = ForeignSteps(model, 64, lambda: QuantizedCache(bits=bits))
        assert steps.logits(ROW).device == device.device
        assert steps.logits([*ROW, 5]).device == device.device
        cache = QuantizedCache(bits=bits)
        ids = IDS.to("cuda")
        model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1], device="cuda"))
        cache.layers[0].offload()
        cache.layers[0].prefetch()
        model(ids[:, :1], past_key_values=cache)
        model.generate(ids, past_key_values=QuantizedCache(bits=bits), num_beams=2, **arguments)


def request(context, targets):
    return Encoded(inputs=(*context, *targets[:-1]), targets=tuple(targets), is_truncated=False)


@pytest.mark.parametrize("name", ["ours", "llama", "rounded"])
def test_scores(name):
    model = llama() if name == "llama" else transformer()
    if name == "rounded":
        quantize(model, "W8A8-a:token")
    context = tuple(ROW)
    questions = [[request(context, [5, 6, 7]), request(context, [8, 9])],
                 [request(context[:4], [5]), request(context[:4], [6])]]  # fmt: skip
    modes = ["plain", "shared", "single"] + ["tree"] * (name == "llama")
    with torch.no_grad(), pretend("cuda"):
        expected = score_requests(model, questions, mode="plain").scores
        model.to("cuda")
        for mode in [*modes, "auto"]:
            found = score_requests(model, questions, mode=mode).scores
            for a, b in zip(sum(found, []), sum(expected, []), strict=True):
                assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-2), mode


@pytest.mark.parametrize("form", ["skipless", "int-quantized"])
def test_packed_weights_that_were_read_onto_the_device(form):
    own = quantize(transformer(max_position_embeddings=16), "W8A8-w:channel")
    tensors, settings = saved_form(own, form)
    with torch.no_grad(), pretend("cuda"):
        model = transformer(max_position_embeddings=16).to("cuda")
        plain = {k: v for k, v in tensors.items() if not is_packed(k, settings)}
        model.load_state_dict(plain, strict=False)
        resume(model, {k: v.to("cuda") for k, v in tensors.items()}, settings)
        found = model(IDS.to("cuda")).logits
        torch.testing.assert_close(found.cpu(), own(IDS).logits, rtol=1e-3, atol=1e-2)
