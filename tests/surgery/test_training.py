"""A patched model trains, is saved, loaded, and goes on where it was."""

import pytest
import torch

from skipless.surgery import connections, gains, load, patch


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "clip", "whisper"])
def test_twenty_steps_move_the_gains_and_a_folder_keeps_them(tiny, family, tmp_path):
    model, batch = tiny.build(family), tiny.inputs(family)
    patch(model, "rezero").requires_grad_(False)
    for module in connections(model).values():
        module.requires_grad_(True)
    with torch.no_grad():
        target = tiny.logits(model, batch) * 0.5
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (tiny.logits(model, batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(bool((value != 1).any()) for value in gains(model).values())
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    with torch.no_grad():
        assert torch.equal(tiny.logits(loaded, batch), tiny.logits(model, batch))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_left_padding_and_beams_give_the_same_with_and_without_cache(tiny, family):
    model = patch(tiny.build(family), "interpolate")
    with torch.no_grad():
        for parameter in connections(model).values():
            parameter.theta.fill_(0.8)
    ids = tiny.inputs(family)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 3, "do_sample": False,
                 "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
    cached = model.generate(ids, **arguments)
    assert torch.equal(cached, model.generate(ids, **arguments, use_cache=False))
    alone = model.generate(ids[:1, 2:], max_new_tokens=5, num_beams=3, do_sample=False,
                           eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert torch.equal(cached[0, 6:], alone[0, 4:])
