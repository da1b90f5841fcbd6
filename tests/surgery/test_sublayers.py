"""Names of modules as real models have them, and the sublayer they speak of."""

import pytest

from skipless.sublayers import sublayer_of

NAMES = {
    "attention": [
        "self_attn", "attn.c_proj", "attention.output.dense", "attention.self.query", "mixer",
        "temporal_block", "self_attention", "attn.out_proj",
    ],
    "cross_attention": ["encoder_attn", "crossattention.output", "cross_attn.q_proj", "EncDecAttn"],
    "mlp": [
        "mlp.down_proj", "fc2", "output.dense", "output", "intermediate.dense", "ffn.lin2", "ff",
        "block.ff.net", "linear1", "feed_forward.w2", "block_sparse_moe", "experts.3",
        "feedforward", "lin_1",
    ],
    None: ["input_layernorm", "dropout", "staff", "offset", "lm_head", "embed_tokens", "norm1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sublayer"), [(name, sublayer) for sublayer, names in NAMES.items() for name in names]
)
def test_a_name_speaks_of_a_sublayer(name, sublayer):
    assert sublayer_of(name) == sublayer


def test_sites_and_surgery_agree_on_every_family(tiny):
    """Every branch that surgery finds, and the linear layers in it, as sites name them."""
    from skipless.sites import find_sites
    from skipless.surgery import find_stacks

    for family in ("llama", "gpt2", "bert", "vit", "clip", "whisper", "mixtral"):
        model = tiny.build(family)
        sites = {site.module: site.sublayer for site in find_sites(model)}
        for stack in find_stacks(model):
            for layer in stack.layers:
                for join in layer.joins:
                    own = {
                        sublayer for module, sublayer in sites.items()
                        if f"{module}.".startswith(f"{layer.name}.{join.branch}.")
                    }  # fmt: skip
                    expected = join.sublayer.removeprefix("cross_")
                    assert own == {expected}, (family, layer.name, join, own)
