"""Two models site by site: nothing from a model and itself, signs turn, planted changes are named,
distances equal plain torch."""

import copy
import csv
import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import skipless
from skipless.diagnose import compare, compare_diagnoses, diagnose, read_diagnosis
from skipless.diagnose.comparison.page import draw, page
from skipless.errors import UserError


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def other(llama):
    """The same with one channel of one MLP blown up, and a little noise everywhere."""
    model = copy.deepcopy(llama)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.01 * torch.randn(p.shape, generator=generator))
        model.model.layers[1].mlp.down_proj.weight[7] *= 60
    return model


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(50, (6, 16), generator=torch.Generator().manual_seed(1))
    return [ids[:4], ids[4:]]


@pytest.fixture(scope="module")
def found(llama, other, batches):
    return compare(llama, other, batches, ["W8A8", "W4A4"])


def changes(row):
    return {k: v["change"] for k, v in row.items() if isinstance(v, dict) and "change" in v}


def test_a_model_does_not_differ_from_itself(llama, batches):
    result = compare(llama, llama, batches, ["W8A8"])
    assert result.sites and not result.only_a and not result.only_b
    for row in result.sites:
        assert set(changes(row).values()) <= {0.0, None}, row["site"]
        assert row["channels"] == row["tokens"] == {"gained": [], "lost": []}
    assert {row["distance"] for row in [*result.weights, *result.depth]} == {0.0}
    outputs = result.outputs
    assert (outputs["distance"], outputs["kl"], outputs["loss_change"]) == (0.0, 0.0, 0.0)
    assert outputs["agreement"] == 1.0 and outputs["standard_error"] == 0.0
    assert result.lines() == [f"none of the {len(result.sites)} sites differs"]


def test_b_minus_a_is_minus_a_minus_b(llama, other, batches, found):
    back = compare(other, llama, batches, ["W8A8", "W4A4"])
    for one, two in zip(found.sites, back.sites, strict=True):
        assert one["site"] == two["site"] and len(changes(one)) == 6 + 2 * 2
        for key, value in changes(one).items():
            assert value is None or value == -changes(two)[key]
        for what in ("channels", "tokens"):
            assert one[what]["gained"] == two[what]["lost"]
            assert one[what]["lost"] == two[what]["gained"]
    assert found.outputs["loss_change"] == -back.outputs["loss_change"]
    assert any(value for row in found.sites for value in changes(row).values())


def test_a_planted_channel_is_found_and_named(found):
    gained = {row["site"]: row["channels"]["gained"] for row in found.sites}
    assert gained["model.layers.1.mlp.down_proj:output"] == [7]
    assert not any(gained[f"model.layers.0.mlp.down_proj:{d}"] for d in ("input", "output"))
    assert "model.layers.1.mlp:output" in "".join(found.lines()[1:3])
    assert "gained channel 7" in "".join(found.lines())
    weight = max(found.weights, key=lambda row: row["distance"])
    assert weight["site"] == "model.layers.1.mlp.down_proj.weight"
    assert len(found.lines()) <= 10


def test_numbers_are_those_of_two_diagnoses(llama, other, batches, found):
    of_a, of_b = (diagnose(m, batches, ["W8A8", "W4A4"], layers=False) for m in (llama, other))
    again = compare_diagnoses(of_a, of_b, names=("x", "y"))
    assert again.sites == found.sites
    assert again.outputs is None and again.depth == [] and (again.a, again.b) == ("x", "y")
    assert "two folders hold no models" in again.missing[0]
    for row, a, b in zip(again.sites, of_a.sites, of_b.sites, strict=True):
        assert row["kurtosis"]["change"] == b["kurtosis"] - a["kurtosis"]
        ratio = "token_sqnr", "W4A4"
        expected = b[ratio[0]][ratio[1]] - a[ratio[0]][ratio[1]]
        assert row["token_sqnr W4A4"]["change"] == expected


def test_distances_equal_plain_torch(llama, other, batches, found):
    ids = torch.cat(batches)
    with torch.no_grad():
        a, b = (m(ids, output_hidden_states=True) for m in (llama, other))
        small = [m(batches[0][:2], output_hidden_states=True).hidden_states for m in (llama, other)]
    ya, yb = a.logits.double(), b.logits.double()
    outputs = found.outputs
    assert outputs["distance"] == pytest.approx(float((yb - ya).norm() / ya.norm()), rel=1e-6)
    log_a, log_b = F.log_softmax(ya[:, :-1], -1), F.log_softmax(yb[:, :-1], -1)
    divergence = F.kl_div(log_b, log_a, log_target=True, reduction="sum") / ids[:, 1:].numel()
    assert outputs["kl"] == pytest.approx(float(divergence), rel=1e-4)
    losses = [F.nll_loss(y.flatten(0, 1), ids[:, 1:].flatten()) for y in (log_a, log_b)]
    assert outputs["loss_change"] == pytest.approx(float(losses[1] - losses[0]), rel=1e-4)
    agree = (log_a.argmax(-1) == log_b.argmax(-1)).double().mean()
    assert outputs["agreement"] == pytest.approx(float(agree), rel=1e-12)
    assert [row["site"] for row in found.depth] == [f"model.layers.{i}:output" for i in range(3)]
    for row, x, y in zip(found.depth[:2], small[0][1:], small[1][1:], strict=False):
        expected = float((y - x).norm() / x.norm())
        assert row["distance"] == pytest.approx(expected, rel=1e-5)
    weights = {row["site"]: row for row in found.weights}
    assert len(weights) == len(list(llama.parameters()))
    theirs = dict(other.named_parameters())
    for name, p in llama.named_parameters():
        expected = float(((theirs[name] - p).norm() / p.norm()).detach())
        assert weights[name]["distance"] == pytest.approx(expected, rel=1e-5)


def test_padding_parts_no_streams(llama, other, batches):
    ids, mask = batches[0].clone(), torch.ones_like(batches[0])
    mask[0, 10:] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    changed = {"input_ids": ids.masked_fill(mask == 0, 3), "attention_mask": mask}
    one, two = (compare(llama, other, [batch]) for batch in (padded, changed))
    for a, b in zip(one.depth, two.depth, strict=True):
        assert a["distance"] == pytest.approx(b["distance"], rel=1e-5)
    assert one.outputs["distance"] == pytest.approx(two.outputs["distance"], rel=1e-5)
    assert one.outputs["kl"] == pytest.approx(two.outputs["kl"], rel=1e-4)


def test_models_of_other_shapes_and_sites(llama, batches):
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers, config.vocab_size, config.intermediate_size = 2, 60, 64
    torch.manual_seed(1)
    small = transformers.LlamaForCausalLM(config).eval()
    result = compare(llama, small, batches, "W8A8")
    assert all(name.startswith("model.layers.2") for name in result.only_a)
    assert result.only_b == [] and result.outputs["kl"] is None
    assert result.outputs["distance"] is None and result.outputs["loss_change"] is not None
    said = "".join(result.missing)
    assert "their shapes are (4, 16, 50) and (4, 16, 60)" in said
    assert "parameters of other shapes: model.embed_tokens.weight" in said
    widths = {r["site"]: r["channels"] for r in result.sites}
    assert widths["model.layers.0.mlp.down_proj:input"] is None, "their channels are others"
    assert widths["model.layers.0.mlp.down_proj:output"] is not None
    assert any("only in A, such as model.layers.2" in line for line in result.lines())


def test_a_model_without_a_loss_is_judged_by_its_distance(planted, ids):
    result = compare(planted(), planted(giant=500.0), ids, "W8A8")
    assert result.outputs["distance"] > 0 and result.outputs["kl"] is None
    assert any("does not predict the next token" in text for text in result.missing)
    gained = {row["site"]: row["tokens"]["gained"] for row in result.sites}
    assert sorted(gained["embedding:output"]) == [[sequence, 0] for sequence in range(8)]


def test_what_cannot_be_compared_is_one_sentence(llama, planted, ids, batches, tmp_path):
    with pytest.raises(UserError, match="no site in common.*embed_tokens.*embedding:output"):
        compare(llama, planted(), ids)
    with pytest.raises(UserError, match="there is no batch"):
        compare(llama, llama, [])
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="up_proj.weight holds NaN"):
        compare(llama, broken, batches)
    with pytest.raises(UserError, match="holds no finished diagnosis"):
        read_diagnosis(tmp_path)
    (tmp_path / "diagnosis.json").write_text("{}")
    with pytest.raises(UserError, match="no diagnosis of this version"):
        read_diagnosis(tmp_path)


def test_diagnoses_of_other_schemes_and_texts_say_so(planted, ids):
    a = diagnose(planted(), ids, "W8A8", layers=False, about="one text")
    b = diagnose(planted(), ids, "W4A4", layers=False, about="another text")
    result = compare_diagnoses(a, b)
    said = "".join(result.missing)
    assert "A was diagnosed at W8A8 and B at W4A4" in said and "also those of the texts" in said
    assert result.key() is None and result.lines()
    old = replace(a, sites=[
        r | {"anatomy": {k: v for k, v in r["anatomy"].items() if not k.startswith("all_")}}
        for r in a.sites
    ])  # fmt: skip
    assert compare_diagnoses(old, a).sites[0]["channels"] is None


def test_files_and_page(llama, other, batches, tmp_path):
    out = tmp_path / "out"
    result = skipless.diagnose.compare(
        llama, other, batches, "W8A8", names=("before <b>", "after"), out=out
    )
    stored = json.loads((out / "comparison.json").read_text())
    assert stored["sites"] == json.loads(json.dumps(result.sites)) and not (out / "parts").exists()
    with open(out / "sites.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.sites)
    for row, site in zip(rows, result.sites, strict=True):
        assert float(row["kurtosis change"]) == site["kurtosis"]["change"]
        assert row["channels gained"] == " ".join(map(str, site["channels"]["gained"]))
    figures, without = draw(result)
    assert [f.name for f in figures] == ["rounding", "tails", "depth"] and without == []
    text = (out / "index.html").read_text()
    assert "before <b>" not in text and "before &lt;b&gt;" in text
    assert "src=" not in text and "http" not in re.sub(r"http-equiv|www\.w3\.org", "", text)
    assert text == page(result, figures, without)
    for row in (*result.sites, *result.weights):
        assert row["site"] in text


def test_an_interrupted_comparison_goes_on(llama, other, batches, tmp_path, monkeypatch):
    from skipless.diagnose.comparison import comparing

    out, real, count = tmp_path / "out", comparing.site_rows, []

    def interrupted(model, *arguments, **options):
        count.append(model)
        if len(count) == 2:
            raise KeyboardInterrupt
        return real(model, *arguments, **options)

    monkeypatch.setattr(comparing, "site_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(llama, other, batches, out=out)
    assert (out / "parts" / "a.json").exists() and not (out / "index.html").exists()
    with pytest.raises(UserError, match="parts of a diagnosis of another model"):
        compare(other, llama, batches, out=out)
    compare(llama, other, batches, out=out)
    assert count == [llama, other, other] and (out / "index.html").exists()
