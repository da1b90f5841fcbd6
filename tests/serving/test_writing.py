"""What is streamed is what `generate` gives, ours and transformers', on every engine and cache."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace

import pytest
import torch

from skipless.errors import UserError
from skipless.pretrained import beside
from skipless.quant.integers.hardware import fastest_kernel
from skipless.serving import Settings, open_writer, write

PROMPT = "the king said lord"
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "seed": 3}


def streamed(writer, prompt=PROMPT, **settings):
    """(what was written, the pieces); the pieces are the text."""
    pieces: list[str] = []
    found = write(writer, prompt, Settings(**settings), pieces.append)
    assert "".join(pieces) == found.text
    return found, pieces


@pytest.mark.parametrize("kind", ["full", "integers", "simulated"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_text_is_that_of_generate(tiny_run, cache, kind, sampling):
    """Beyond the context of 32, where both slide, the same."""
    scheme = {"full": {}, "integers": {"scheme": "W8A8-KV8-a:token"},
              "simulated": {"scheme": "W4A8-w:g16"}}[kind]  # fmt: skip
    writer = open_writer(str(tiny_run), **scheme)
    expected_kind = "fused" if kind == "integers" and fastest_kernel() is not None else kind
    assert writer.kind == expected_kind, writer.engine
    found, pieces = streamed(writer, max_new_tokens=40, ignore_end=True, **sampling)
    start = torch.tensor([writer.encode(PROMPT)])
    expected = writer.model.generate(start, 40, **sampling)[0, start.shape[1] :].tolist()
    assert found.token_ids == expected
    assert found.text == writer.tokenizer.decode(expected)
    assert len(pieces) > 5 and found.finish == "length"
    assert found.num_prompt_tokens == start.shape[1] and found.speed and found.prompt_speed


def test_cached_steps_are_the_uncached_model(tiny_run, cache):
    writer = open_writer(str(tiny_run))
    found, _ = streamed(writer, max_new_tokens=12, ignore_end=True)
    start = torch.tensor([writer.encode(PROMPT)])
    plain = writer.model.generate(start, 12, use_cache=False)[0, start.shape[1] :]
    assert found.token_ids == plain.tolist()
    config = writer.model.config
    size = 2 * config.num_hidden_layers * config.hidden_size * 4
    assert found.cache_bytes >= size * (start.shape[1] + 11)


def test_cache_of_few_bits_without_a_scheme(tiny_run, cache):
    """Keys and values as the simulation rounds them: the hooks of a scheme that rounds no more."""
    from skipless.quant import quantize

    writer = open_writer(str(tiny_run), kv_bits=4)
    found, _ = streamed(writer, max_new_tokens=12, ignore_end=True)
    plain, _ = streamed(open_writer(str(tiny_run)), max_new_tokens=12, ignore_end=True)
    assert found.cache_bytes < 0.4 * plain.cache_bytes and "4-bit" in writer.engine
    reference = open_writer(str(tiny_run))
    names = {site.name: "fp" for site in reference.model.sites() if site.kind == "linear_input"}
    weights = {name.rpartition(":")[0]: "fp" for name in names if "layers" in name}
    first = next(iter(weights))
    del weights[first]  # a scheme needs a weight; at 16 bits it is as good as exact
    quantize(reference.model, "W16A16-KV4-a:token", overrides=weights)
    rounded, _ = streamed(reference, max_new_tokens=12, ignore_end=True)
    assert found.token_ids == rounded.token_ids


@pytest.mark.parametrize("bits", [None, 4])
def test_transformers_model_writes_what_its_generate_does(tiny_llama, bits):
    from skipless.hf import QuantizedCache

    writer = open_writer(str(tiny_llama), kv_bits=bits)
    found, _ = streamed(writer, max_new_tokens=20, ignore_end=True)
    names = inspect.signature(writer.model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
    options = {} if bits is None else {argument: QuantizedCache(bits=bits)}
    start = torch.tensor([writer.encode(PROMPT)])
    expected = writer.model.generate(
        start, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones_like(start), **options,
    )[0, start.shape[1] :]  # fmt: skip
    assert found.token_ids == expected.tolist() and found.cache_bytes > 0
    assert found.text == writer.decode(expected.tolist())


def test_transformers_model_under_a_scheme(tiny_llama):
    """Linear layers on integers, keys and values by the cache; the simulation agrees."""
    writer = open_writer(str(tiny_llama), scheme="W8A12-KV8-a:token")
    simulated = open_writer(str(tiny_llama), scheme="W8A12-KV8-a:token", engine="simulated")
    assert (writer.kind, simulated.kind) == ("integers", "simulated")
    assert writer.kv_bits == simulated.kv_bits == 8 and writer.kv_granularity == "token"
    ids = writer.encode(PROMPT)
    with torch.no_grad():
        one, other = writer.steps().logits(ids), simulated.steps().logits(ids)
    assert (one - other).norm() < 1e-3 * other.norm()
    found, _ = streamed(writer, max_new_tokens=100, ignore_end=True)
    assert found.finish == "context" and found.num_prompt_tokens + len(found.token_ids) == 49


def test_our_model_in_a_hugging_face_folder(tiny_run, cache, tmp_path):
    """The text of the run on the same engine, beyond the context too; also where the folder brings
    its own code, which is not run."""
    from skipless.hf.exporting import export_model

    export_model(tiny_run, tmp_path / "out", remote_code=True)
    for options in ({}, {"kv_bits": 8}, {"scheme": "W8A8"}, {"scheme": "W4A8-KV8"}):
        wanted, writer = (
            open_writer(str(name), **options) for name in (tiny_run, tmp_path / "out")
        )
        assert (writer.kind, writer.engine) == (wanted.kind, wanted.engine)
        assert writer.kind == ("fused" if "scheme" in options else "full")
        (found, _), (plain, _) = (
            streamed(one, max_new_tokens=30, ignore_end=True) for one in (writer, wanted)
        )
        assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
        assert found.num_prompt_tokens + 30 > writer.limit


def test_our_folder_without_attention(tiny_llama, tmp_path):
    """Nothing to cache: every token is computed anew, and --kv-bits is refused."""
    from skipless.hf import SkiplessConfig, SkiplessForCausalLM

    folder = tmp_path / "mlps"
    shutil.copytree(tiny_llama, folder)
    absent = {"connection": {"kind": "fixed", "a": 1.0, "b": 0.0}, "sublayer": "attention"}
    config = SkiplessConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
        max_position_embeddings=48, connection="residual", connection_overrides=[absent],
    )  # fmt: skip
    model = SkiplessForCausalLM(config).eval()
    model.save_pretrained(folder)
    writer = open_writer(str(folder))
    found, _ = streamed(writer, max_new_tokens=6, ignore_end=True)
    ids = torch.tensor([writer.encode(PROMPT)])
    expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert found.token_ids == expected[0, ids.shape[1] :].tolist() and found.cache_bytes is None
    with pytest.raises(UserError, match="keeps no keys and values .*a cache has nothing to keep"):
        open_writer(str(folder), kv_bits=8)


def test_a_model_whose_state_is_no_keys_and_values(tiny_llama, tmp_path):
    import transformers

    folder = tmp_path / "mamba"
    shutil.copytree(tiny_llama, folder)
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=300, eos_token_id=0
    )
    model = transformers.MambaForCausalLM(config).eval()
    model.save_pretrained(folder)
    writer = open_writer(str(folder))
    found, _ = streamed(writer, max_new_tokens=4, ignore_end=True)
    ids = torch.tensor([writer.encode(PROMPT)])
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert found.token_ids == expected[0, ids.shape[1] :].tolist()
    with pytest.raises(UserError, match="mamba keeps no keys and values .*--kv-bits, or -KV"):
        open_writer(str(folder), kv_bits=8)


def test_a_folder_whose_code_would_have_to_be_run(tiny_llama, tmp_path):
    """Refused, without a question on the terminal."""
    folder = shutil.copytree(tiny_llama, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "somebodys", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot be loaded: .*custom code"):
        open_writer(str(folder))


def test_folder_of_packed_integers(tiny_run, tiny_llama, cache, tmp_path):
    """Of a run and of a Hugging Face model: the text that quantising anew gives."""
    from skipless.export import export_folder

    for source, scheme in (
        (tiny_run, "W8A8-a:token"), (tiny_llama, "W8A8-a:token"), (tiny_llama, "W4A4"),
    ):  # fmt: skip
        folder = tmp_path / f"{source.name}-{scheme}"
        export_folder(str(source), folder, scheme)
        packed, _ = streamed(open_writer(str(folder)), max_new_tokens=10, ignore_end=True)
        anew, _ = streamed(
            open_writer(str(source), scheme=scheme), max_new_tokens=10, ignore_end=True
        )
        assert packed.token_ids == anew.token_ids
        with pytest.raises(UserError, match="holds integers already"):
            open_writer(str(folder), scheme="W4A4")


def test_ends_and_stop_texts(tiny_run, cache):
    writer = open_writer(str(tiny_run))
    whole, _ = streamed(writer, max_new_tokens=20, ignore_end=True)
    stop = whole.text[5:8]
    found, _ = streamed(writer, max_new_tokens=20, ignore_end=True, stop=(stop,))
    assert found.finish == "stop" and found.text == whole.text[: whole.text.index(stop)]
    assert len(found.token_ids) < 20
    token = whole.token_ids[3]
    writer.ends = frozenset({token})
    ended, _ = streamed(writer, max_new_tokens=20)
    assert ended.finish == "end"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token)]


def test_bad_settings_and_prompts(tiny_run, cache):
    for settings, words in [
        ({"top_p": 0.0}, "top_p is 0.0"), ({"top_k": 0}, "top_k is 0"),
        ({"seed": -1}, "seed is -1"), ({"stop": ("",)}, "stop text is empty"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop": "END"}, "stop is 'END'; a tuple"), ({"stop": (3,)}, "a tuple of texts"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=words):
            Settings(**settings)
    writer = open_writer(str(tiny_run))
    with pytest.raises(UserError, match="the prompt is empty"):
        write(writer, "", Settings())
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens and .* sees 32; shorten it"):
        write(writer, "king " * 60, Settings())
    writer.model.config = replace(writer.model.config, vocab_size=40)
    with pytest.raises(UserError, match="vocabulary of 40; the tokenizer beside it"):
        write(writer, PROMPT, Settings())


def test_logits_that_are_no_numbers(tiny_run, cache):
    writer = open_writer(str(tiny_run))
    with torch.no_grad():
        writer.model.norm.weight[3] = torch.nan
    for sampling in ({}, SAMPLED):
        with pytest.raises(UserError, match="logits are not finite"):
            write(writer, PROMPT, Settings(**sampling))


def test_models_that_write_no_text(tiny_run, tiny_llama, cache, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path / "bert"
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=300,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    with pytest.raises(UserError, match="has no tokenizer beside its weights"):
        open_writer(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, folder)
    with pytest.raises(UserError, match="no causal language model: BertForMaskedLM sees"):
        open_writer(str(folder))


def test_damaged_files(tiny_run, tiny_llama, cache, tmp_path):
    """A file of weights that was cut short: one sentence naming it, whatever the kind of folder."""
    from skipless.export import export_folder

    folders = {"run": tiny_run, "llama": tiny_llama}
    export_folder(str(tiny_run), tmp_path / "made", "W8A8")
    folders["packed"] = tmp_path / "made"
    for name, source in folders.items():
        folder = shutil.copytree(source, tmp_path / name)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(UserError, match=str(folder)) as caught:
            open_writer(str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config.json", "[]", "config.json holds a list and no JSON object"),
        ("config.json", "7", "config.json holds a number and no JSON object"),
        ("config.json", '{"model_type": "lla', "config.json is not valid JSON"),
        ("config.json", {"num_attention_heads": 0}, "cannot be loaded: "),
        ("generation_config.json", "null", "generation_config.json holds null"),
        ("generation_config.json", '{"a', "generation_config.json is not valid JSON"),
        ("generation_config.json", {"eos_token_id": "x"}, "names 'x' for the token that ends"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "for the token that ends a text"),
        ("tokenizer.json", "[]", "tokenizer.json holds a list"),
        ("tokenizer.json", "", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "{}", "no tokenizer beside its weights that can be read"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "no tokenizer beside its weights"),
        ("adapter_config.json", "{}", "holds an adapter"),
        ("adapter_config.json", "[]", "adapter_config.json holds a list"),
    ],
)  # fmt: skip
def test_settings_that_are_damaged(tiny_llama, tmp_path, monkeypatch, file, change, told):
    monkeypatch.setattr(beside, "find_spec", lambda name: None)  # peft is not installed
    folder = shutil.copytree(tiny_llama, tmp_path / "damaged")
    path = folder / file
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(change)
    with pytest.raises(UserError, match=told) as caught:
        open_writer(str(folder))
    assert "\n" not in str(caught.value) and "damaged" in str(caught.value)


def test_an_adapter_alone(tmp_path):
    from skipless.pretrained.naming import check_named

    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter .*merge it"):
        check_named(str(tmp_path), holds_model=True)


def test_cache_bits_that_do_not_fit(tiny_run, cache, tmp_path):
    for options, words in [
        ({"scheme": "W8A8-KV8", "kv_bits": 4}, "says the cache's width already"),
        ({"kv_bits": 1}, "--kv-bits is 1"),
        ({"scheme": "W8A8-KV1"}, "kv"),
        ({"scheme": "W8"}, "does not say what happens to activations"),
    ]:
        with pytest.raises(UserError, match=words):
            open_writer(str(tiny_run), **options)
    from skipless.export import export_folder

    export_folder(str(tiny_run), tmp_path / "packed", "W8A8-KV8")
    with pytest.raises(UserError, match="packed rounds its cache already"):
        open_writer(str(tmp_path / "packed"), kv_bits=8)
    joined = open_writer(str(tiny_run), scheme="W8A8", kv_bits=4)
    assert "W8A8-KV4" in joined.engine


def test_static_schemes_calibrate_on_the_runs_text(tiny_run, tiny_llama, cache):
    found, _ = streamed(open_writer(str(tiny_run), scheme="W8A8-static"), max_new_tokens=5)
    assert json.dumps(found.to_dict())
    with pytest.raises(UserError, match="skipless export"):
        open_writer(str(tiny_llama), scheme="W8A8-static")
