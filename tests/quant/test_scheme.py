"""The text form of a scheme (Q1): round trips, and one clear sentence for everything else."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.quant.methods.gptq import Gptq
from skipless.quant.methods.learned_rotation import LearnedRotation
from skipless.scheme import Scheme, TrainingPlan, check_groups

bits = st.integers(2, 16)


@st.composite
def schemes(draw) -> Scheme:
    activation, kv, probability = draw(
        st.tuples(st.none() | bits, st.none() | bits, st.none() | bits)
    )
    touches_activations = any(b is not None for b in (activation, kv, probability))
    token = touches_activations and draw(st.booleans())
    return Scheme(
        weight_bits=draw(bits),
        activation_bits=activation,
        kv_bits=kv,
        probability_bits=probability,
        weight_granularity=draw(
            st.sampled_from(["tensor", "channel"]) | st.integers(1, 512).map("g{}".format)
        ),
        activation_granularity="token" if token else "tensor",
        symmetric=draw(st.booleans()),
        dynamic=token or not touches_activations or draw(st.booleans()),
        clip=draw(st.sampled_from(["absmax", "p99.9", "p100", "mse", "gauss"])),
    )


@given(schemes())
def test_text_and_json_round_trip(scheme):
    assert Scheme.parse(str(scheme)) == scheme
    assert str(Scheme.parse(str(scheme))) == str(scheme)
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@pytest.mark.parametrize(
    "text",
    ["W8A8", "W8A12", "W3Afp", "W4A16", "W4A4-KV8-w:g128-a:token", "W8A8-KV4-P8-asym",
     "W4Afp-KV8-static", "W8A6-static-clip:p99.9", "W2A8-w:channel-clip:gauss"],
)  # fmt: skip
def test_canonical_text_is_kept(text):
    assert str(Scheme.parse(text)) == text


def test_options_come_in_any_order_and_defaults_are_not_printed():
    assert str(Scheme.parse("W4A8-clip:absmax-a:token-w:tensor-P4-KV8")) == "W4A8-KV8-P4-a:token"


def test_defaults():
    scheme = Scheme.parse("W8A8")
    assert (scheme.weight_bits, scheme.activation_bits) == (8, 8)
    assert scheme.symmetric and scheme.dynamic and scheme.clip == "absmax"
    assert scheme.weight_granularity == scheme.activation_granularity == "tensor"
    assert Scheme.parse(scheme) is scheme
    assert Scheme.parse("W3Afp").activation_bits is None
    assert Scheme.parse("W3A16").activation_bits == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("W8A1", "activation width is 1.*2 to 16"),
        ("W1A8", "weights width is 1"),
        ("W8A17", "17.*Afp"),
        ("W8", "W8Afp.*W8A16"),
        ("W3", "'W3' does not say.*W3Afp.*W3A16"),
        ("8-8", "'8-8' is not a quantisation scheme.*W8A8"),
        ("", "'' is not"),
        (None, "None is not"),
        ("W8A8 ", "not a quantisation scheme|unknown"),
        ("W8A8-", "unknown option"),
        ("W8A8-asymm", "'asym'"),
        ("W8A8-KV1", "kv width is 1"),
        ("W8A8-P99", "probability width is 99.*leave -P out"),
        ("W8A8-KV99", "kv width is 99.*leave -KV out"),
        ("W8A99", "activation width is 99.*use Afp"),
        ("W" + "9" * 5000 + "A8", "not a quantisation scheme"),
        ("W8A8-KV" + "9" * 5000, "unknown option"),
        ("W8A8-w:g" + "9" * 5000, "weight granularity"),
        ("W8A8-clip:p" + "9" * 5000, "clip is"),
        ("W٨A٨", "not a quantisation scheme"),
        ("W8A8-KV٨", "unknown option"),
        ("W8A8-w:g1٨", "weight granularity"),
        ("W8A8-clip:p9٩", "clip is"),
        ("W8A8-KV8-KV4", "twice"),
        ("W8A8-w:token", "weight granularity is 'token'"),
        ("W8A8-w:g0", "g128"),
        ("W8A8-a:channel", "activation granularity is 'channel'"),
        ("W8A8-clip:p0", "percentile"),
        ("W8A8-clip:p101", "percentile"),
        ("W8A8-clip:max", "'absmax'"),
        ("W4Afp-static", "no effect"),
        ("W4Afp-a:token", "no effect"),
        ("W8A8-a:token-static", "exclude"),
    ],
)
def test_errors_are_one_sentence_that_helps(text, says):
    with pytest.raises(UserError) as caught:
        Scheme.parse(text)
    message = str(caught.value)
    assert re.search(says, message), message
    assert "\n" not in message and message.count(". ") == 0


def test_advice_for_activations_is_not_given_for_other_widths():
    for text in ("W99A8", "W8A8-KV99", "W8A8-P99"):
        with pytest.raises(UserError) as caught:
            Scheme.parse(text)
        assert "Afp" not in str(caught.value)


def test_a_message_stays_short():
    with pytest.raises(UserError) as caught:
        Scheme.parse("W" + "9" * 5000 + "A8")
    assert len(str(caught.value)) < 300


def test_json_is_checked_as_text_is():
    with pytest.raises(UserError, match="activation width is 1"):
        Scheme.from_dict({"weight_bits": 8, "activation_bits": 1})
    with pytest.raises(UserError, match="weight_bit"):
        Scheme.from_dict({"weight_bit": 8, "activation_bits": 8})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("w4a8", "W4A8"), ("W4a8", "W4A8"), ("w3AFP", "W3Afp"), ("W4 A8", "W4A8"), ("W4-A8", "W4A8"),
     ("4w8a", None), ("w4a8-kv4-W:g64", "W4A8-KV4-w:g64"), ("w4a8-static", "W4A8-static"),
     ("w4", None), ("w4a99", None), ("w8a8 " * 40, None)],
)  # fmt: skip
def test_a_scheme_in_other_spelling_is_guessed(written, meant):
    with pytest.raises(UserError) as caught:
        Scheme.parse(written)
    text = str(caught.value)
    assert (f"did you mean '{meant}'?" in text) if meant else "did you mean 'W" not in text


def test_groups_propose_a_size_that_fits_every_width():
    with pytest.raises(UserError, match="b: group size 48 does not divide the 32 .*; use g16$"):
        check_groups(48, {"a": 48, "b": 32})
    check_groups(16, {"a": 48, "b": 32})
    assert Scheme.parse("W4A8-w:g48").group_size == 48 and Scheme.parse("W4A8").group_size is None


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda: Scheme(weight_bits=8, activation_bits=8, symmetric="no"), "scheme.symmetric"),
     (lambda: Scheme(weight_bits=8, activation_bits=8, dynamic=0), "scheme.dynamic"),
     (lambda: TrainingPlan(scheme=Scheme.parse("W8A8"), scope="blocks"), "scope"),
     (lambda: Gptq(act_order="yes"), "gptq.act_order"),
     (lambda: LearnedRotation(offline="yes"), "rotation:learned.offline")],
)  # fmt: skip
def test_words_no_setting_has_are_refused_in_python_too(make, says):
    with pytest.raises(UserError, match=says):
        make()
