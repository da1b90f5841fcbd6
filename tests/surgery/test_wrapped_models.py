"""Models wrapped, compiled, quantised or damaged: they work, or one sentence says why not."""

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.surgery import connections, gains, load, patch, save_pretrained, unpatch


def test_what_is_no_plain_model_is_refused(tiny):
    for function in (patch, unpatch):
        with pytest.raises(UserError, match=r"model is a str and no loaded model; load one first"):
            function("llama")
    model = tiny.build("bert")
    model.bert.encoder.layer[1].output = model.bert.encoder.layer[0].output
    with pytest.raises(UserError, match=r"layer\.0 and .*layer\.1 share their output"):
        patch(model)
    assert not connections(model)

    class Adapters(torch.nn.Module):
        """As peft's PeftModel looks from outside."""

        peft_config, get_base_model, save_pretrained = {}, None, None

        def __init__(self):
            super().__init__()
            self.model = tiny.build("llama")

    with pytest.raises(UserError, match="Adapters saves adapters and would leave the connections"):
        patch(Adapters())
    parallel = torch.nn.DataParallel(patch(tiny.build("llama")))
    with pytest.raises(UserError, match=r"save the model inside \(model.module\)"):
        save_pretrained(parallel, "nowhere")


def test_adapters_are_put_on_a_patched_model(tiny, tmp_path):
    peft = pytest.importorskip("peft")
    batch, settings = tiny.inputs("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)
    with pytest.raises(UserError, match="patch the model before get_peft_model"):
        patch(peft.get_peft_model(tiny.build("llama"), settings))
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False,
                               modules_to_save=["mlp_connection"])  # fmt: skip
    patch(tiny.build("llama"), "rezero").save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(load(tmp_path / "base"), settings)
    with torch.no_grad():
        for module in connections(model).values():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.5)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        expected = tiny.logits(model, batch)
        assert torch.equal(tiny.logits(again, batch), expected)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(tiny.logits(load(tmp_path / "merged"), batch), expected)


def test_a_compiled_model_is_patched_through_its_wrapper(tiny, tmp_path):
    batch, half = tiny.inputs("llama"), ConnectionConfig(kind="rezero", init=0.5)
    model = torch.compile(tiny.build("llama"), backend="eager")
    with torch.no_grad():
        before = tiny.logits(model, batch)
        expected = tiny.logits(patch(tiny.build("llama"), half), batch)
        assert torch.equal(tiny.logits(patch(model, half), batch), expected)
        assert len(model.config.skipless_patch) == 1
        save_pretrained(model, tmp_path)
        assert torch.equal(tiny.logits(load(tmp_path), batch), expected)
        assert torch.equal(tiny.logits(unpatch(model), batch), before)


def test_damaged_numbers_and_one_token_compute_as_before(tiny):
    model, one = tiny.build("llama"), {"input_ids": torch.tensor([[5]])}
    with torch.no_grad():
        before = tiny.logits(model, one)
        assert torch.equal(tiny.logits(patch(model, "gated"), one), before)
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
        assert tiny.logits(model, one).isnan().all()


def test_weights_of_whole_numbers_need_none_of_floating_point(tiny):
    class Codes(torch.nn.Module):
        """A linear layer without `weight`, as packed quantised ones are."""

        def __init__(self, linear):
            super().__init__()
            self.register_buffer("codes", (linear.weight.detach() * 64).round().to(torch.int8))

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) / 64).t()

    model, batch = tiny.build("llama").bfloat16(), tiny.inputs("llama")
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in parent.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Codes(child))
    with torch.no_grad():
        before = tiny.logits(model, batch)
        assert torch.equal(tiny.logits(patch(model, "layerscale"), batch), before)
    assert {value.dtype for value in gains(model).values()} == {torch.bfloat16}
