"""Folders of models on disk: read whole, written whole, in any odd but legal place."""

import json
import os

import pytest
from safetensors.torch import load_file, save_file

from skipless.cli import main
from skipless.errors import UserError
from skipless.outputs import free_folder, written_folder
from skipless.surgery import connections, load, patch
from skipless.surgery.folders import patch_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and locks of POSIX")


@pytest.fixture
def plain(tiny, tmp_path):
    folder = tmp_path / "plain model é"
    tiny.build("llama").save_pretrained(folder)
    return folder


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def reweigh(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def lacking(folder):
    reweigh(folder, lambda w: {k: v for k, v in w.items() if "1.mlp.up_proj" not in k})


def narrower(folder):
    reweigh(folder, lambda w: {k: v[:1].clone() if "1.mlp.up" in k else v for k, v in w.items()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lacking, "lacks the weight model.layers.1.mlp.up_proj.weight of a LlamaForCausalLM"),
        (lambda f: configure(f, num_hidden_layers=3), "and 8 more of a LlamaForCausalLM"),
        (narrower, "holds model.layers.1.mlp.up_proj.weight as [1, 16] and its config.json wants"),
        (lambda f: configure(f, num_attention_heads=3), "cannot be loaded as LlamaForCausalLM: "),
        (lambda f: configure(f, hidden_size="16"), "cannot be loaded as LlamaForCausalLM: "),
        (lambda f: configure(f, architectures=[3]), "holds a 3, which this version"),
        (lambda f: configure(f, architectures=["utils"]), "holds a utils, which this version"),
        (lambda f: configure(f, model_type=None), "it names no model_type"),
        (lambda f: (f / "config.json").write_bytes(b"\0\xff"), "it names no model_type"),
    ],
)
def test_a_folder_that_is_not_one_whole_model_is_refused(plain, tmp_path, capsys, damage, message):
    damage(plain)
    assert main(["patch", str(plain), "--out", str(tmp_path / "out")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(errors) == 1 and message in errors[0], errors
    assert sorted(p.name for p in tmp_path.iterdir()) == [plain.name]


@pytest.mark.parametrize("change", [{"num_attention_heads": 3}, {"architectures": [3]}])
def test_a_patched_folder_of_an_impossible_config_is_refused(tiny, tmp_path, change):
    patch(tiny.build("llama")).save_pretrained(tmp_path / "patched")
    configure(tmp_path / "patched", **change)
    with pytest.raises(UserError, match="cannot be loaded as|which this version"):
        load(tmp_path / "patched")


def test_links_the_working_directory_and_empty_folders_are_filled(plain, tmp_path, monkeypatch):
    """A link stays a link, an empty folder stays the one it was (it may be a mount)."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    before = (tmp_path / "real").stat().st_ino
    patch_folder(str(plain), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(connections(load(tmp_path / "real"))) == 4
    assert (tmp_path / "real").stat().st_ino == before
    (tmp_path / "dangling").symlink_to("made")
    patch_folder(str(plain), tmp_path / "dangling")
    assert len(connections(load(tmp_path / "made"))) == 4
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    patch_folder(str(plain), ".")
    assert len(connections(load(tmp_path / "here"))) == 4 and os.listdir(".")
    patch_folder(str(plain), plain / "in side")
    assert len(connections(load(plain / "in side"))) == 4
    assert not list(tmp_path.rglob(".*"))


def test_a_name_that_no_disk_holds_is_one_sentence(plain, tmp_path):
    with pytest.raises(UserError, match="File name too long; name another"):
        patch_folder(str(plain), tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="null byte"):
        free_folder("a\0b")


def test_a_disk_that_refuses_leaves_nothing(tmp_path):
    from safetensors import SafetensorError

    for error in (OSError(28, "No space left on device"), SafetensorError("I/O error: No space")):
        refused = pytest.raises(UserError, match="cannot write .*No space")
        with refused, written_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("a")
            raise error
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), written_folder(tmp_path / "file" / "out"):
        pass


def test_of_two_writers_the_first_to_end_is_kept_and_the_other_told(tmp_path):
    for place in (tmp_path / "new", tmp_path / "empty"):
        if place.name == "empty":
            place.mkdir()
        with pytest.raises(UserError, match="exists already"), written_folder(place) as mine:
            (mine / "config.json").write_text("mine")
            with written_folder(place) as other:
                assert mine.is_dir(), "what another process holds is no leftover"
                (other / "config.json").write_text("other")
        assert [p.name for p in place.iterdir()] == ["config.json"]
        assert (place / "config.json").read_text() == "other"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("empty", [False, True])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, empty):
    place = tmp_path / "out"
    if empty:
        place.mkdir()
    left = (place if empty else tmp_path) / ".skipless-0123abcd.tmp" / "new"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    with written_folder(free_folder(place)) as folder:
        (folder / "config.json").write_text("{}")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "out"]
