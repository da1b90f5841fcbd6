"""`--images` and `--audio`: what reaches the model, and one sentence for what is wrong."""

import json
import shlex
import shutil
import wave

import numpy as np
import pytest
import torch

from skipless.cli import main
from skipless.diagnose.loading import load_subject
from skipless.diagnose.media import read_audio, read_images
from skipless.errors import UserError

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
WORDS = {**SIZES, "vocab_size": 280, "max_position_embeddings": 32, "eos_token_id": 2}
WHISPER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 280,
    "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
FAST = ["--schemes", "W8A8", "--no-layers"]


@pytest.fixture(scope="module")
def folders(saved, tmp_path_factory):
    """vit, clip, whisper and bare (a ViT without processor), tiny and random."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    path = tmp_path_factory.mktemp("media")
    torch.manual_seed(0)
    size = {"height": 8, "width": 8}
    processor = transformers.ViTImageProcessor(size=size, crop_size=size)
    for name in ("vit", "bare"):
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE))
        vit.save_pretrained(path / name)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=WORDS, vision_config=IMAGE, projection_dim=8)
    )
    clip.save_pretrained(path / "clip")
    for name in ("vit", "clip"):
        processor.save_pretrained(path / name)
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    whisper.save_pretrained(path / "whisper")
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(
        path / "whisper"
    )
    for name in ("clip", "whisper"):
        for file in (saved / "model").glob("tokenizer*"):
            shutil.copy(file, path / name)
    return path


@pytest.fixture
def pictures(tmp_path):
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number, suffix in enumerate(("png", "PNG", "jpg", "jpeg", "png")):
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{suffix}", suffix.replace("jpg", "jpeg"))
    Image.fromarray(pixels).convert("L").save(folder / "4.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def record(path, samples, rate=16000, width=2, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


@pytest.fixture
def sounds(tmp_path):
    generator = np.random.default_rng(0)
    return [
        record(tmp_path / f"{n}.wav", generator.integers(-9999, 9999, 9000 + n, dtype="<i2"))
        for n in range(2)
    ]


def test_pixels_are_those_of_the_processor_in_the_order_of_names(folders, pictures):
    from PIL import Image

    read = read_images(load_subject(str(folders / "vit")), [str(pictures)])
    assert [batch["pixel_values"].shape[0] for batch in read.batches] == [4, 1]
    found = torch.cat([batch["pixel_values"] for batch in read.batches])
    for number, suffix in ((0, "png"), (1, "PNG")):  # the processor's mean and deviation are 0.5
        pixels = np.asarray(Image.open(pictures / f"{number}.{suffix}"), np.float64) / 255
        expected = torch.from_numpy((pixels - 0.5) / 0.5).permute(2, 0, 1)
        torch.testing.assert_close(found[number].double(), expected, atol=1e-6, rtol=0)
    grey = found[4]
    assert torch.equal(grey[0], grey[1]) and read.about.startswith("5 images")


def test_a_vision_model_is_diagnosed_on_files(folders, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["diagnose", str(folders / "vit"), "--images", str(pictures), "--out", str(out)]
    assert main([*words, "--schemes", "W8A8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 5 * (4 + 1) and found["num_batches"] == 2
    assert found["about"].startswith("5 images") and len(found["layers"]) == 2
    assert found["damage"]["kind"] == "distance" and (out / "index.html").exists()
    line = shlex.split(found["command"])  # what it found can be pasted, for images too
    assert line == ["skipless", "quantize", str(folders / "vit"), "--images", str(pictures)]
    assert main([*line[1:], "--schemes", "W8A8", "--scopes", "block"]) == 0


def test_clip_reads_captions(folders, pictures, tmp_path):
    subject = load_subject(str(folders / "clip"))
    captions = tmp_path / "captions.txt"
    captions.write_text("the king\ncome and go\n\nmy lord said the king\nlord\ngo\n")
    read = read_images(subject, [str(pictures)], str(captions))
    first, second = read.batches
    assert set(first) == {"pixel_values", "input_ids", "attention_mask"}
    assert first["input_ids"].shape[0] == 4 and second["input_ids"].shape[0] == 1
    ids, mask = first["input_ids"][1], first["attention_mask"][1] == 1
    assert subject.tokenizer.decode(ids[mask]) == "come and go"
    words = ["diagnose", str(folders / "clip"), "--images", str(pictures), "--text", str(captions)]
    assert main([*words, *FAST, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert found["about"].startswith("5 images with captions")
    stacks = {row["site"].split(".")[0] for row in found["sites"] if row["kind"] == "stream"}
    assert stacks == {"vision_model", "text_model"}


def test_speech_with_a_transcript_and_with_what_the_model_hears(folders, sounds, tmp_path):
    subject = load_subject(str(folders / "whisper"))
    transcript = tmp_path / "said.txt"
    transcript.write_text("my lord\ncome\n")
    read = read_audio(subject, [str(path) for path in sounds], str(transcript))
    assert [batch["input_features"].shape for batch in read.batches] == [(1, 8, 100)] * 2
    assert subject.tokenizer.decode(read.batches[0]["decoder_input_ids"][0]) == "my lord"
    assert read.about == "1.1 s of sound in 2 files, with transcripts"
    heard = read_audio(subject, [str(sounds[0])])
    ids = heard.batches[0]["decoder_input_ids"]
    assert ids[0, 0] == 3 and 2 <= ids.shape[1] <= 66 and heard.about.endswith("hears in it")
    longer = record(tmp_path / "long.wav", np.ones(20000, "<i2"))
    transcript.write_text("go\n")
    cut = read_audio(subject, [str(longer)], str(transcript))
    assert cut.about == "1.0 s of sound in 1 file, cut to 1 s each, with transcripts"
    transcript.write_text("my lord\ncome\n")
    words = ["diagnose", str(folders / "whisper"), "--audio", *map(str, sounds), "--text",
             str(transcript), *FAST, "--out", str(tmp_path / "out")]  # fmt: skip
    assert main(words) == 0


@pytest.mark.parametrize(("width", "code"), [(1, "u1"), (2, "<i2"), (4, "<i4")])
def test_samples_of_every_width_and_two_channels(folders, tmp_path, width, code, monkeypatch):
    subject = load_subject(str(folders / "whisper"))
    top = 2.0 ** (8 * width - 1)
    left, right = np.full(800, 0.5), np.full(800, -0.25)
    samples = np.stack([left, right], 1) * top + (top if width == 1 else 0)
    path = record(tmp_path / "two.wav", samples.astype(code), width=width, channels=2)
    seen = []

    class Processor:
        sampling_rate = 16000

        def __call__(self, sound, **_):
            seen.append(sound)
            return {"input_features": torch.zeros(1, 8, 100)}

    monkeypatch.setattr("skipless.diagnose.media._processor", lambda *_: Processor())
    transcript = tmp_path / "said.txt"
    transcript.write_text("come")
    read_audio(subject, [str(path)], str(transcript))
    np.testing.assert_allclose(seen[0], np.full(800, 0.125), atol=1e-6)
    assert seen[0].dtype == np.float32


def test_what_is_wrong_is_one_sentence(folders, saved, pictures, sounds, tmp_path, capsys):
    text = tmp_path / "t.txt"
    text.write_text("a\nb\n")
    long = tmp_path / "long.txt"
    long.write_text("the king said my lord " * 9 + "\n" + "a\n" * 4)
    slow = record(tmp_path / "slow.wav", np.ones(80, "<i2"), rate=8000)
    silent = record(tmp_path / "silent.wav", np.ones(0, "<i2"))
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    (tmp_path / "empty").mkdir()
    dumb = tmp_path / "dumb"
    shutil.copytree(folders / "clip", dumb)
    for file in dumb.glob("tokenizer*"):
        file.unlink()
    vit, clip, whisper = (str(folders / name) for name in ("vit", "clip", "whisper"))
    llama, seen = str(saved / "model"), ["--images", str(pictures)]
    heard = ["--audio", str(sounds[0])]
    cases = [
        ([llama, *seen], "takes input_ids and no images"),
        ([llama, *heard], "takes input_ids and no sound"),
        ([vit, *seen, *heard], "keep one of them"),
        ([vit, *seen, "--data", "kjv"], "--data belongs to models of text"),
        ([vit, *seen, "--sequence-length", "8"], "--sequence-length belongs to models of text"),
        ([vit, *seen, "--text", str(text)], "takes images and no text"),
        ([vit, "--images", str(tmp_path / "nowhere")], "does not exist"),
        ([vit, "--images", str(tmp_path / "empty")], "holds no image"),
        ([vit, "--images", str(tmp_path / "broken.png")], "cannot be read as an image"),
        ([str(folders / "bare"), *seen], "has no processor for images"),
        ([clip, *seen], "give --text FILE with a line for every image"),
        ([clip, "--text", str(text)], "reads images with captions"),
        ([clip, *seen, "--text", str(text)], "has 2 lines for 5 images"),
        ([clip, *seen, "--text", str(long)], "line 1 of --text has"),
        ([str(dumb), *seen, "--text", str(long)], "has no tokenizer"),
        ([whisper, "--text", str(text)], "takes input_features and no text; give --audio"),
        ([whisper, "--audio", str(slow)], "has 8,000 samples a second"),
        ([whisper, "--audio", str(silent)], "holds no sound"),
        ([whisper, "--audio", str(tmp_path / "broken.wav")], "cannot be read as uncompressed WAV"),
        ([whisper, "--audio", str(tmp_path)], "which is no file"),
        ([whisper, *heard, "--text", str(text)], "has 2 lines for 1 WAV file;"),
    ]
    for words, said in cases:
        assert main(["diagnose", *words, "--out", str(tmp_path / "o")]) == 2, words
        error = capsys.readouterr().err.strip()
        assert said in error.splitlines()[-1] and "Traceback" not in error, (words, error)
    assert not (tmp_path / "o").exists()
    words = ["diagnose", vit, *seen, "--measure", "loss", "--out", str(tmp_path / "p")]
    assert main(words) == 2 and "does not predict the next token" in capsys.readouterr().err


def half(folders, name, path):
    """The same model in bfloat16, with what lies beside its weights."""
    subject = load_subject(str(folders / name))
    shutil.copytree(folders / name, path)
    subject.model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_two_precisions_on_the_same_images(folders, pictures, tmp_path):
    vit, low, out = folders / "vit", half(folders, "vit", tmp_path / "low"), tmp_path / "out"
    words = ["diagnose", str(vit), "--against", str(low), "--images", str(pictures)]
    assert main([*words, "--schemes", "W8A8", "--out", str(out)]) == 0
    found = json.loads((out / "comparison.json").read_text())
    a, b = (load_subject(str(path)) for path in (vit, low))
    assert b.model.dtype == torch.bfloat16
    batches = read_images(a, [str(pictures)]).batches
    with torch.no_grad():
        ya, yb = (
            torch.cat([s.model(**batch).logits.double() for batch in batches]) for s in (a, b)
        )
    expected = float((yb - ya).norm() / ya.norm())
    assert (
        found["outputs"]["distance"] == pytest.approx(expected, rel=1e-6) and 1e-4 < expected < 0.1
    )
    assert found["about"].startswith("5 images") and found["outputs"]["loss_a"] is None
    assert all((row["distance"] or 0) < 0.01 for row in found["weights"]) and not found["only_a"]


def test_two_precisions_hear_the_same(folders, sounds, tmp_path):
    """Half precision runs on float32 features, and B is given what A hears."""
    whisper, low = folders / "whisper", half(folders, "whisper", tmp_path / "low")
    words = ["--audio", *map(str, sounds), "--schemes", "W8A8"]
    pair = ["diagnose", str(whisper), "--against", str(low), *words]
    assert main([*pair, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["about"].endswith(f"with what {whisper} hears in it")
    assert 0 < found["outputs"]["distance"] < 0.1
    alone = ["diagnose", str(low), *words, "--no-layers", "--gradients"]
    assert main([*alone, "--out", str(tmp_path / "alone")]) == 0


def test_a_clip_without_processor_takes_the_others(folders, pictures, tmp_path):
    bare, captions = tmp_path / "bare", tmp_path / "captions.txt"
    load_subject(str(folders / "clip")).model.save_pretrained(bare)
    captions.write_text("the king\ncome\nmy lord\nlord\ngo\n")
    words = ["diagnose", str(bare), "--against", str(folders / "clip"), "--images", str(pictures)]
    out = tmp_path / "out"
    assert main([*words, "--text", str(captions), "--schemes", "W8A8", "--out", str(out)]) == 0
    found = json.loads((out / "comparison.json").read_text())
    assert found["outputs"]["distance"] == 0 and len(found["only_a"]) == 0


def test_checkpoints_of_a_vision_model(folders, pictures, tmp_path):
    training, out = tmp_path / "training", tmp_path / "out"
    shutil.copytree(folders / "vit", training / "checkpoint-1")
    half(folders, "vit", training / "checkpoint-2")
    words = ["diagnose", str(training), "--checkpoints", "all", "--images", str(pictures)]
    assert main([*words, "--schemes", "W8A8", "--out", str(out)]) == 0
    found = json.loads((out / "over-time.json").read_text())
    assert found["maps"]["kurtosis"]["steps"] == [1, 2] and "5 images" in found["about"]


def test_what_two_models_of_media_refuse(folders, pictures, sounds, tmp_path, capsys):
    vit, clip, whisper = (str(folders / name) for name in ("vit", "clip", "whisper"))
    shutil.copytree(folders / "vit", tmp_path / "dark")
    settings = json.loads((tmp_path / "dark" / "preprocessor_config.json").read_text())
    settings["image_mean"] = [0.0, 0.0, 0.0]
    (tmp_path / "dark" / "preprocessor_config.json").write_text(json.dumps(settings))
    shutil.copytree(folders / "vit", tmp_path / "large")
    settings["size"] = {"height": 16, "width": 16}
    (tmp_path / "large" / "preprocessor_config.json").write_text(json.dumps(settings))
    small, seen, heard = (
        tmp_path / "small",
        ["--images", str(pictures)],
        ["--audio", str(sounds[0])],
    )
    model = load_subject(whisper).model
    model.resize_token_embeddings(3)
    model.save_pretrained(small)
    cases = [
        ([vit, str(tmp_path / "dark"), *seen], "differently (pixel_values differs by up to 1)"),
        ([vit, str(tmp_path / "large"), *seen], "(4, 3, 8, 8) for one and (4, 3, 16, 16) for the"),
        ([vit, whisper, *seen], "and no images; leave out --images"),
        ([vit, clip, *seen], "give --text FILE with a line for every image"),
        ([whisper, str(small), *heard], "knows token ids below 3 and is given id"),
        ([whisper, vit, *heard], "and no sound; leave out --audio"),
    ]
    for (a, b, *words), said in cases:
        line = ["diagnose", a, "--against", b, *words, "--out", str(tmp_path / "o")]
        assert main(line) == 2, line
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error, (line, error)
    assert main(["diagnose", vit, "--over-time", *seen, "--out", str(tmp_path / "o")]) == 2
    assert "runs no model; leave out --images" in capsys.readouterr().err


def test_without_pillow_a_sentence(folders, pictures, monkeypatch):
    import sys

    subject = load_subject(str(folders / "vit"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr("skipless.diagnose.media._processor", lambda *_: None)
    with pytest.raises(UserError, match="Pillow is not installed"):
        read_images(subject, [str(pictures)])


def test_two_texts_are_for_python(saved, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=280
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    words = ["diagnose", str(tmp_path / "t5"), "--text", str(saved / "text.txt")]
    assert main([*words, "--out", str(tmp_path / "o")]) == 2
    assert "reads one text and writes another" in capsys.readouterr().err
