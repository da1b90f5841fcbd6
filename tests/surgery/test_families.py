"""Every family with connections that matter: trained, saved, decoded in all ways, and taken out.

`test_patching.py` starts neutral; here every learned number of a connection is random, so that a
lost connection, cache or mask changes the result. Sums that are taken in the same order must agree
bit for bit; others (one sequence against a batch, one token against many) to 1e-4 of the largest.
"""

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.surgery import connections, find_stacks, gains, load, patch, unpatch
from skipless.surgery.patching import kinds

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names before and after 5.24

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "gpt2")
ENCODERS = ("bert", "vit", "clip")
FAMILIES = (*DECODERS, *ENCODERS, "whisper")
GENERATE = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CONNECTIONS = {
    "learned": ConnectionConfig(kind="learned", granularity="channel"),
    "gated": ConnectionConfig(kind="gated", scale=2.0),
    "universal": "universal",
}
KINDS = tuple(kind for kind in CONNECTIONS if kind in kinds())


def real(tiny, family, kind, **settings):
    """A patched model whose connections are far from neutral, in eval mode."""
    model = patch(tiny.build(family, **settings), CONNECTIONS[kind])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in connections(model).values():
            for parameter in module.parameters():
                parameter.add_(0.6 * torch.randn(parameter.shape, generator=generator))
    return model


def output(model, batch):
    """Logits without a graph."""
    with torch.no_grad():
        out = model(**batch)
    return out.logits_per_image if "logits_per_image" in out else out.logits


def near(found, expected):
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def changed(ids, first):
    """`ids` [B, T] with other tokens from position `first` on; still no special ones."""
    other = ids.clone()
    other[:, first:] = 3 + (ids[:, first:] - 3 + 11) % 37
    return other


def generate(model, family, inputs, **options):
    """Greedy by default; new tokens only."""
    arguments = {**GENERATE, **options}
    if family != "whisper":
        return model.generate(**inputs, **arguments)[:, inputs["input_ids"].shape[1] :]
    start = inputs["decoder_input_ids"][:, :3]
    found = model.generate(inputs["input_features"], decoder_input_ids=start, **arguments)
    return found[:, -GENERATE["max_new_tokens"] :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_train_save_load_unpatch(tiny, family, kind, tmp_path):
    model, batch = real(tiny, family, kind).train(), tiny.inputs(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        target = tiny.logits(model, batch) * 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    for _ in range(4):
        loss = (tiny.logits(model, batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, module in connections(model).items():
        for key, value in module.named_parameters():
            assert not torch.equal(value, before[f"{name}.{key}"]), f"{name}.{key} was not trained"

    model.eval().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    trained = output(model, batch)
    if (
        kind == "universal"
    ):  # weights of a file are not aligned in memory, so sums round differently
        near(output(loaded, batch), trained)
        loaded.load_state_dict(model.state_dict())
    else:
        assert torch.equal(output(loaded, batch), trained)
    if family not in ENCODERS:
        words = generate(model, family, batch)
        assert torch.equal(generate(loaded, family, batch), words)

    plain = tiny.build(family)
    wanted = plain.state_dict().keys()
    plain.load_state_dict({k: v for k, v in loaded.state_dict().items() if k in wanted})
    expected = output(plain, batch)
    for one in (model, loaded):
        assert torch.equal(output(unpatch(one), batch), expected)
        assert one.state_dict().keys() == wanted
    assert not torch.equal(expected, trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_dtype_device_hooks_and_parameters_are_kept(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    model = model.to(torch.bfloat16)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    frozen = list(model.parameters())[-1].requires_grad_(False)
    calls = []
    layers = [layer for stack in find_stacks(model) for layer in stack.layers]
    for layer in layers:
        layer.module.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.module.register_forward_hook(lambda *_: calls.append("after"))
        layer.module.register_full_backward_hook(lambda *_: calls.append("backward"))
    own = {name: id(parameter) for name, parameter in model.named_parameters()}

    def run():
        calls.clear()
        tiny.logits(model, batch).float().sum().backward()
        return {call: calls.count(call) for call in set(calls)}

    expected = {"before": len(layers), "after": len(layers), "backward": len(layers)}
    assert run() == expected
    for kind in KINDS:
        patch(model, CONNECTIONS[kind])
        assert run() == expected and output(model, batch).dtype == torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        kept = {n: id(p) for n, p in model.named_parameters() if "_connection." not in n}
        assert kept == own and not frozen.requires_grad
        assert run() == expected
        unpatch(model)
    assert run() == expected and not frozen.requires_grad
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == own
    model = patch(tiny.build(family).to("meta"), "learned")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_and_attention_back_ends_change_nothing(tiny, family, kind):
    batch, outputs, found = tiny.inputs(family), [], []
    for attention in ("eager", "sdpa"):
        model = real(tiny, family, kind, attn_implementation=attention)
        outputs.append(output(model, batch))
        assert len(gains(model)) > 0
    near(*outputs)
    # As checkpointing in transformers does; a universal join sums in another order for a cache.
    model.config.use_cache = False
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        tiny.logits(model, batch).square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", (*DECODERS, "whisper"))
def test_no_position_sees_a_later_one(tiny, family, kind):
    model, batch = real(tiny, family, kind), tiny.inputs(family)
    key = "decoder_input_ids" if family == "whisper" else "input_ids"
    ids = batch[key]
    full = output(model, batch)
    for first in range(1, ids.shape[1]):
        other = output(model, {**batch, key: changed(ids, first)})
        assert torch.equal(other[:, :first], full[:, :first])
        assert not torch.equal(other[:, first], full[:, first])

    def in_parts(ids, *sizes):
        cache, parts = None, []
        for part in ids.split(sizes, dim=1):
            with torch.no_grad():
                out = model(**{**batch, key: part}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        return torch.cat(parts, 1)

    cached = in_parts(ids, 3, 3)
    near(cached, full)
    near(in_parts(ids, 2, 1, 1, 1, 1), full)
    assert torch.equal(in_parts(changed(ids, 5), 3, 3)[:, :5], cached[:, :5])


def test_clips_text_tower_sees_no_later_token(tiny):
    for kind in KINDS:
        model, ids = real(tiny, "clip", kind), tiny.inputs("clip")["input_ids"]
        with torch.no_grad():
            full = model.text_model(ids).last_hidden_state
            other = model.text_model(changed(ids, 3)).last_hidden_state
        assert torch.equal(other[:, :3], full[:, :3]) and not torch.equal(other, full)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", DECODERS)
def test_what_stands_in_the_padding_does_not_matter(tiny, family, kind):
    model, ids = real(tiny, family, kind), tiny.inputs(family)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    padded = output(model, batch)
    other = torch.where(mask == 0, changed(ids, 0), ids)
    assert torch.equal(output(model, {**batch, "input_ids": other})[mask == 1], padded[mask == 1])
    alone = output(model, {"input_ids": ids[:1, 2:]})
    near(padded[0, 2:], alone[0])
    inputs = {"input_ids": ids, "attention_mask": mask}
    for beams in (1, 3):
        together = generate(model, family, inputs, num_beams=beams)
        single = generate(model, family, {"input_ids": ids[:1, 2:]}, num_beams=beams)
        assert torch.equal(together[0], single[0])


@pytest.mark.parametrize("family", (*DECODERS, "whisper"))
def test_every_way_of_decoding_gives_the_same_words(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    plain = [generate(model, family, batch, num_beams=beams) for beams in (1, 3)]
    for kind in KINDS:
        patch(model, kind)
        for beams, words in zip((1, 3), plain, strict=True):
            assert torch.equal(generate(model, family, batch, num_beams=beams), words)
        unpatch(model)
        model = real(tiny, family, kind)
        found = [generate(model, family, batch, num_beams=beams) for beams in (1, 3)]
        for beams, words in zip((1, 3), found, strict=True):
            slow = generate(model, family, batch, num_beams=beams, use_cache=False)
            assert torch.equal(slow, words)
        assert not all(torch.equal(*pair) for pair in zip(plain, found, strict=True))
        static = generate(model, family, batch, cache_implementation="static")
        assert torch.equal(static, found[0])
        unpatch(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_cropped_cache_goes_on_like_a_fresh_one(tiny, family, kind):
    from transformers import DynamicCache

    model, ids = real(tiny, family, kind), tiny.inputs(family)["input_ids"]

    def more(cache, part):
        with torch.no_grad():
            return model(input_ids=part, past_key_values=cache, use_cache=True).logits

    cache, fresh = DynamicCache(config=model.config), DynamicCache(config=model.config)
    more(cache, ids)
    cache.crop(-3)
    more(fresh, ids[:, :3])
    tail = changed(ids, 3)[:, 3:]
    near(more(cache, tail), more(fresh, tail))
    # speculative decoding crops the cache after every rejected guess
    one = {"input_ids": torch.cat([ids[:1], ids[:1]], 1)}
    guessed = generate(model, family, one, prompt_lookup_num_tokens=3)
    assert torch.equal(guessed, generate(model, family, one))
