"""What must not go wrong unseen: other shapes, other weights, twice quantised, threads, copies."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant import (
    integer_layers,
    paused,
    quantization,
    quantize,
    restore,
    to_integer,
    train_quantized,
)
from skipless.quant.integers.hardware import probe


def stack(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width)).eval()


@pytest.fixture
def net() -> nn.Sequential:
    return stack()


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
USABLE = [report.engine for report in probe() if report.usable]


@pytest.mark.parametrize("engine", USABLE)
@pytest.mark.parametrize("scheme", ["W8A8", "W4A8-a:token", "W8A12-static"])
def test_inputs_of_another_width_or_kind_are_refused(net, engine, scheme):
    """The kernel takes addresses: a wider row was read and written past its end."""
    quantize(net, scheme, calibration=[X])
    if engine == "onnxruntime" and "A12" in scheme:
        with pytest.raises(UserError, match="at most 8 bits"):
            to_integer(net, engine)
        return
    to_integer(net, engine)
    with torch.no_grad():
        expected = net(X)  # the second pass of a layer may go another way than the first
        for width in (1, 15, 17, 1000):
            with pytest.raises(UserError, match=r"0 takes 16 inputs and was given \[5, "):
                net(torch.randn(5, width))
        with pytest.raises(UserError, match=r"was given \[\]"):
            net(torch.tensor(1.0))
        with pytest.raises(UserError, match=r"torch.int64; give floating-point"):
            net(torch.zeros(5, 16, dtype=torch.long))
        assert torch.equal(net(X), expected)


@pytest.mark.parametrize("engine", [e for e in USABLE if e in ("vnni", "avx2", "plain")])
def test_the_kernel_itself_refuses_rows_of_another_width(net, engine):
    from skipless.quant.integers.engines import ENGINES
    from skipless.quant.integers.layers import integer_state

    quantize(net, "W8A8")
    to_integer(net, engine)
    state, kernel = integer_state(net[0]), ENGINES[engine]
    assert state is not None
    for rows in (torch.randn(2, 17), torch.randn(16)):
        with pytest.raises(UserError, match="rows of 16 inputs"):
            kernel.from_floats(state.prepared, rows, False, -1.0, None)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="rows of 16 inputs"):
        kernel.sums(state.prepared, torch.ones(2, 17, dtype=torch.int16))


@pytest.mark.parametrize("integer", [False, True])
def test_other_weights_are_not_loaded_into_a_quantised_model(net, integer):
    quantize(net, "W4A8")
    if integer:
        to_integer(net)
    with torch.no_grad():
        expected = net(X)
        with pytest.raises(UserError, match=r"0.weight would be replaced.*restore\(model\)"):
            net.load_state_dict(stack(1).state_dict())
        with pytest.raises(UserError, match="would be replaced"):
            net.load_state_dict(net.state_dict(), assign=True)
        with pytest.raises(UserError, match="would be replaced"):
            nn.Sequential(net).load_state_dict(nn.Sequential(stack(1)).state_dict())
        assert torch.equal(net(X), expected)
        net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()})  # the same
        assert torch.equal(net(X), expected)
        restore(net)
        assert torch.equal(net(X), stack()(X))
        net.load_state_dict(stack(1).state_dict())
        assert torch.equal(net(X), stack(1)(X))


def test_a_quantised_state_dict_gives_a_plain_model_the_rounded_weights(net):
    quantize(net, "W4A8")
    plain = stack()
    plain.load_state_dict(net.state_dict())
    assert torch.equal(plain[0].weight, net[0].weight)
    assert not torch.equal(plain[0].weight, stack()[0].weight)


def test_weights_changed_on_integers_are_told(net):
    """The packed codes would go on being those of the old weights."""
    quantize(net, "W8A8")
    to_integer(net)
    with torch.no_grad():
        net(X)
        net[2].weight.add_(1.0)
        with pytest.raises(UserError, match=r"2.weight changed after quantize.*discard_changes"):
            net(X)
    restore(net, discard_changes=True)
    assert torch.equal(net(X), stack()(X))


def through(model: nn.Module, how: str) -> nn.Module:
    return copy.deepcopy(model) if how == "copy" else pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_copies_know_whether_weights_changed(net, how):
    """A model that was trained before has parameters that count their changes from a number."""
    with torch.no_grad():
        net[0].weight.mul_(1.5)
        plain = net(X)
        quantize(net, "W8A8-static", calibration=[X])
        to_integer(net)
        expected = net(X)
        twin = through(net, how)
        assert torch.equal(twin(X), expected)
        with pytest.raises(UserError, match="would be replaced"):
            twin.load_state_dict(stack(1).state_dict())
        assert torch.equal(restore(twin)(X), plain)
        assert not any(m._forward_pre_hooks for m in twin.modules())
        assert not twin._load_state_dict_pre_hooks and not twin._load_state_dict_post_hooks
        assert torch.equal(net(X), expected) and quantization(net) is not None
        net[0].weight.mul_(1.5)
        with pytest.raises(UserError, match="0.weight changed"):
            restore(through(net, how))


def test_a_model_in_a_model_is_quantised_once(net):
    whole = nn.Sequential(net, nn.Linear(16, 4)).eval()
    with torch.no_grad():
        expected = whole(X)
        for scheme in ("W8A8", "W4Afp"):  # weights alone have no hooks that could be seen
            quantize(net, scheme)
            with pytest.raises(UserError, match=rf"0 in the model is already.*{scheme}.*model.0"):
                quantize(whole, "W4A4")
            with pytest.raises(UserError, match="0 in the model is already"):
                train_quantized(whole, "W4A4")
            restore(net)
            quantize(whole, scheme)
            for part in (net, net[2]):
                with pytest.raises(UserError, match="part of a larger model"):
                    quantize(part, "W4A4", include_head=True)
            restore(whole)
            assert torch.equal(whole(X), expected)
            assert not any("_skipless_part" in vars(m) for m in whole.modules())


def test_a_model_that_trains_quantised_is_not_quantised_beside_it(net):
    training = train_quantized(net, "W4A8")
    with pytest.raises(UserError, match=r"trained quantised.*finish\(\) or remove\(\)"):
        quantize(net, "W8A8")
    with pytest.raises(UserError, match="trained quantised"):
        train_quantized(net, "W8A8")
    training.remove()
    quantize(net, "W8A8")


def test_a_weight_that_is_computed_is_refused_or_left_out():
    """weight_norm makes a new tensor at every reading: a rounded one was dropped, unseen."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16))
    nn.utils.parametrizations.weight_norm(model[0])
    for act in (quantize, train_quantized):
        with pytest.raises(UserError, match=r"0 computes its weight.*remove_param.*0=fp"):
            act(model, "W8A8")
    quantize(model, "W8A8", overrides={"0": "fp"})
    record = quantization(model)
    assert record is not None and {w.name for w in record.weights} == {"2.weight", "3.weight"}
    assert {site.site.module for site in record.activations} == {"2", "3"}


def test_weights_made_in_inference_mode_are_refused_untouched():
    with torch.inference_mode():
        model = stack()
        before = model(X)
        with pytest.raises(UserError, match=r"0.weight was made under torch.inference_mode"):
            quantize(model, "W8A8")
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("method", ["rtn", "smooth+gptq"])
def test_what_is_quantised_in_inference_mode_lives_on_outside(net, method):
    before = copy.deepcopy(net.state_dict())
    expected = quantize(copy.deepcopy(net), "W8A8", method=method, calibration=[X])
    with torch.inference_mode():
        quantize(net, "W8A8", method=method, calibration=[X])
    net(X).square().sum().backward()
    expected(X).square().sum().backward()
    for mine, right in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, right) and torch.equal(mine.grad, right.grad)
    restore(net)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    "options, says",
    [
        ({"layers": []}, "layers is .., which names none"),
        ({"layers": 3}, "layers is 3, which names none"),
        ({"scheme": "W8A8-static", "calibration": 5}, "calibration is 5; a list of batches"),
        ({"overrides": 5}, "overrides are 5; "),
    ],
)
def test_arguments_of_another_type(net, options, says):
    with pytest.raises(UserError, match=says):
        quantize(net, **{"scheme": "W8A8"} | options)
    assert quantization(net) is None and torch.equal(net(X), stack()(X))


@pytest.mark.parametrize("integer", [False, True])
def test_passes_in_several_threads_do_not_mix(integer):
    """Each thread has its own input; one of them is NaN, and only its own pass says so."""
    model = stack(width=32)
    quantize(model, "W8A8")
    if integer:
        to_integer(model)
    inputs = [torch.randn(3 + n, 32) * 10.0**n for n in range(4)]
    bad = torch.full((3, 32), torch.nan)
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    wrong: list[str] = []
    start = threading.Barrier(len(inputs) + 1)

    @torch.no_grad()
    def good(x: Tensor, y: Tensor) -> None:
        start.wait()
        for _ in range(150):
            try:
                if not torch.equal(model(x), y):
                    wrong.append("another output")
            except UserError as error:
                wrong.append(str(error))

    @torch.no_grad()
    def not_finite() -> None:
        start.wait()
        for _ in range(150):
            try:
                model(bad)
                wrong.append("NaN went unseen")
            except UserError:
                pass

    threads = [
        threading.Thread(target=good, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    threads.append(threading.Thread(target=not_finite))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_caches_of_several_threads_do_not_mix(make_transformer):
    model = make_transformer()
    quantize(model, "W8A8-KV8")
    to_integer(model)
    assert integer_layers(model)
    ids = [torch.randint(61, (1, 6), generator=torch.Generator().manual_seed(n)) for n in range(3)]

    @torch.no_grad()
    def decode(tokens: Tensor) -> Tensor:
        cache = model.new_cache()
        return torch.cat([model(tokens[:, i : i + 1], cache=cache).logits for i in range(6)], 1)

    expected = [decode(tokens) for tokens in ids]
    wrong: list[str] = []

    def work(tokens: Tensor, right: Tensor) -> None:
        for _ in range(6):
            try:
                if not torch.equal(decode(tokens), right):
                    wrong.append("another output")
            except UserError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(ids, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    with torch.no_grad():
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(ids[0]).logits, model(ids[0]).logits)
    with paused(model), torch.no_grad():
        model(ids[0])


def test_classes_made_at_run_time_are_pickled():
    """GPT-2's Conv1D on integers, and a training with a convolution."""
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=8))
    ids = torch.arange(6)[None]
    quantize(gpt2.eval(), "W8A8")
    to_integer(gpt2)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)).eval()
    training = train_quantized(net, "W4A4 from=0", include_convolutions=True)
    training.at(1.0)
    x = torch.randn(3, 2, 6)
    with torch.no_grad():
        for how in ("copy", "pickle"):
            assert torch.equal(through(gpt2, how)(ids).logits, gpt2(ids).logits)
            assert torch.equal(through(net, how)(x), net(x))
            assert type(through(net, how)[0]).__name__ == "Conv1d"
