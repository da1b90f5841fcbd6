"""Saving that is cut short and folders that are damaged: one clear sentence, never half a model."""

import errno
import json
import multiprocessing
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.surgery import connections, load, patch, save_pretrained, saving

WEIGHTS = "skipless-model.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"
GAIN = "model.layers.1.mlp_connection.alpha"


def half(tiny, value=0.5):
    return patch(tiny.build("llama"), ConnectionConfig(kind="rezero", init=value))


def edit(change):
    """Change config.json of a folder."""

    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(config)))

    return apply


def without(*keys):
    return edit(lambda config: {k: v for k, v in config.items() if k not in keys})


def rows(change):
    return edit(lambda config: {**config, "skipless_patch": change(config["skipless_patch"])})


def reweigh(change):
    """Change the weights of a folder."""

    def apply(folder):
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def lacking(key):
    return reweigh(lambda weights: {k: v for k, v in weights.items() if k != key})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lacking(UP), f"lacks the weight {UP}; the folder is incomplete"),
        (lacking(GAIN), f"lacks the gain {GAIN}; the folder is incomplete"),
        (reweigh(lambda w: {**w, GAIN: torch.ones(4)}), f"holds {GAIN} as [4] and its config.json"),
        (reweigh(lambda w: {**w, UP: w[UP][:3].clone()}), f"holds {UP} as [3, 16] and its config"),
        (rows(lambda r: [{**r[0], "at": r[0]["at"][:-1]}]), f"holds the gain {GAIN}, which its"),
        (rows(lambda r: [{"connection": r[0]["connection"]}]), "does not say under skipless_patch"),
        (rows(lambda r: "all"), "does not say under skipless_patch"),
        (rows(lambda r: [{**r[0], "connection": {"kind": "rezro"}}]), "did you mean 'rezero'"),
        (without("skipless_patch"), "does not say under skipless_patch what is patched"),
        (without("skipless_model_type"), "lacks skipless_model_type"),
        (without("architectures"), "holds a model of no class"),
        (edit(lambda config: [config]), "holds no settings but a list"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\0"), "is not UTF-8 text"),
        (lambda f: os.truncate(f / WEIGHTS, 500), "cannot be loaded as LlamaForCausalLM: "),
        (lambda f: os.truncate(f / WEIGHTS, os.path.getsize(f / WEIGHTS) - 8), "cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_refused_and_says_where(tiny, tmp_path, damage, message):
    folder = save_pretrained(half(tiny), tmp_path / "model")
    load(folder)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load(folder)
    said = str(caught.value)
    assert message in said and str(folder) in said
    assert "skipless-load-" not in said and "\n" not in said


def test_a_lost_shard_and_what_is_no_folder(tiny, tmp_path):
    folder = save_pretrained(half(tiny), tmp_path / "model", max_shard_size="4KB")
    shard = sorted(folder.glob("skipless-model-0*"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"lacks {shard.name}; the folder is incomplete"):
        load(folder)
    with pytest.raises(UserError, match=r"is no folder; .*snapshot_download"):
        load("somebody/no-such-model")
    with pytest.raises(UserError, match="takes the path of a folder, and got 3"):
        load(3)


@pytest.mark.parametrize("place", ["new", "old"])
@pytest.mark.parametrize("step", ["weights", "rename"])
def test_a_full_disk_leaves_what_was_there(tiny, tmp_path, monkeypatch, place, step):
    import transformers

    model, batch = half(tiny), tiny.inputs("llama")
    folder = tmp_path / "model"
    if place == "old":
        save_pretrained(half(tiny, 0.25), folder)
    before = sorted(tmp_path.rglob("*"))
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args, **kwargs):
        raise full

    with monkeypatch.context() as patching:
        if step == "weights":
            patching.setattr(transformers.modeling_utils, "safe_save_file", fail)
        else:
            patching.setattr(saving, "_mark", fail)
        with pytest.raises(UserError, match=r"cannot be saved to .*model: No space left on device"):
            model.save_pretrained(folder)
    assert sorted(tmp_path.rglob("*")) == before
    if place == "old":
        with torch.no_grad():
            expected = tiny.logits(half(tiny, 0.25), batch)
            assert torch.equal(tiny.logits(load(folder), batch), expected)


def test_a_place_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be saved to .*file: File exists"):
        save_pretrained(half(tiny), tmp_path / "file")
    with pytest.raises(UserError, match="cannot be saved to .*file/model: Not a directory"):
        save_pretrained(half(tiny), tmp_path / "file" / "model")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "read-only").mkdir()

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saving, "staging_folder", refuse)
    with pytest.raises(UserError, match="read-only: Permission denied; free space, fix the perm"):
        save_pretrained(half(tiny), tmp_path / "read-only")


def test_a_rename_cut_short_is_not_mistaken_for_a_model(tiny, tmp_path, monkeypatch):
    folder = save_pretrained(half(tiny, 0.25), tmp_path / "model")

    class Killed(BaseException):
        pass

    def killed(source, target):
        raise Killed

    monkeypatch.setattr(saving.os, "replace", killed)
    with pytest.raises(Killed):
        save_pretrained(half(tiny), folder)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load(folder)


def write(folder, value, times):
    import conftest  # the module under whose name pytest loaded it does not exist here

    torch.set_num_threads(1)
    for _ in range(times):
        model = patch(conftest.build("llama"), ConnectionConfig(kind="rezero", init=value))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        save_pretrained(model, folder, max_shard_size="4KB")


def test_two_processes_that_write_one_folder_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    context = multiprocessing.get_context("fork" if os.name != "nt" else "spawn")
    both = [context.Process(target=write, args=(tmp_path, value, 4)) for value in (0.25, 0.5)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    found = {float(p.unique()) for p in load(tmp_path).parameters()}
    assert found in ({0.25}, {0.5})
    assert not list(tmp_path.glob(".skipless*")) and connections(load(tmp_path))


def _save_and_die(folder, kind):
    from . import conftest

    saving._mark = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save_pretrained(patch(conftest.build("llama"), kind), folder)


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_what_a_killed_save_leaves_goes_with_the_next(tiny, tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=_save_and_die, args=(tmp_path, "rezero")
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].is_dir()  # the weights of a model that never got its name
    with pytest.raises(UserError, match="holds no config.json"):
        load(tmp_path)
    save_pretrained(patch(tiny.build("llama"), "rezero"), tmp_path)
    assert not left[0].exists() and len(connections(load(tmp_path))) == 4
