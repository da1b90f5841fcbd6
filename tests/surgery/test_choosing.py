"""What patch is asked for: kinds that would do nothing, stacks by a word of their name."""

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.surgery import connections, find_stacks, patch
from skipless.surgery.patching import kinds


@pytest.mark.parametrize("kind", kinds())
def test_a_kind_by_name_learns_changes_or_is_refused(tiny, kind):
    """None does nothing in silence, but those that are asked for by what they are."""
    model, batch = tiny.build("llama"), tiny.inputs("llama")
    with torch.no_grad():
        before = tiny.logits(model, batch)
    if kind == "fixed":
        for plain in (kind, ConnectionConfig(kind="fixed")):
            with pytest.raises(UserError, match="a=1, b=1, c=0 is the plain skip.*set a or b"):
                patch(model, plain)
        assert not connections(model)
        patch(model, ConnectionConfig(kind="fixed", a=0.9))
    else:
        patch(model, kind)
    with torch.no_grad():
        changed = not torch.equal(tiny.logits(model, batch), before)
    learns = any(p.requires_grad for join in connections(model).values() for p in join.parameters())
    assert changed or learns or kind in ("residual", "anneal")


@pytest.mark.parametrize(
    ("family", "entry", "found"),
    [
        ("clip", "vision", ["vision_model.encoder.layers"]),
        ("clip", "text", ["text_model.encoder.layers"]),
        ("clip", "encoder", ["text_model.encoder.layers", "vision_model.encoder.layers"]),
        ("clip", "image", []),
        ("whisper", "encoder", ["model.encoder.layers"]),
        ("whisper", "decoder", ["model.decoder.layers"]),
        ("whisper", "*.decoder.*", ["model.decoder.layers"]),
        ("llama", "decoder", []),
    ],
)
def test_a_stack_is_meant_by_a_word_of_its_name(tiny, family, entry, found):
    model = tiny.build(family)
    names = [stack.name for stack in find_stacks(model)]
    if not found:
        with pytest.raises(UserError, match=f"no stack .*; the model has: {', '.join(names)}"):
            patch(model, "rezero", stacks=entry)
        return
    patch(model, "rezero", stacks=entry)
    patched = connections(model)
    assert [n for n in names if any(name.startswith(n) for name in patched)] == found
