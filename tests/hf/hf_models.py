"""Tiny models in transformers beside the same weights in our own Transformer."""

import torch

KINDS = (
    "none", "residual", "fixed", "rezero", "layerscale", "interpolate", "anneal", "learned",
    "universal", "gated", "sphere",
)  # fmt: skip
SMALL = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip


def settings(kind="none", **more):
    from skipless.hf import SkiplessConfig

    connection = {"kind": "fixed", "a": 0.6, "b": 0.9, "c": 0.1} if kind == "fixed" else kind
    return SkiplessConfig(**{**SMALL, "connection": connection, **more})


def build(kind="none", seed=0, **more):
    """A language model whose every weight, gains too, has been moved away from its start."""
    from skipless.hf import SkiplessForCausalLM

    torch.manual_seed(seed)
    model = SkiplessForCausalLM(settings(kind, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.set_training_progress(0.2)
    return model


def own(model):
    """The same weights as a `skipless.model.Transformer`."""
    from skipless.model import Transformer

    found = Transformer(model.config.to_model_config())
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    found.load_state_dict(state)
    return found.eval()


def ids(rows=2, length=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SMALL["vocab_size"], (rows, length), generator=generator)
