"""The page: self-contained, escaped, its one script allowed by hash, opened in a browser."""

import base64
import hashlib
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from skipless.diagnose import diagnose
from skipless.diagnose.page import GLOSSARY
from skipless.diagnose.plots import draw
from skipless.report.frame import SCRIPT

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome")
     if (path := shutil.which(name))), None,
)  # fmt: skip


class Markup:
    """A tokenizer whose tokens are markup."""

    def decode(self, ids):
        return "<script>alert(1)</script>" if ids == [0] else f"<|{ids[0]}|>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 5] = 300.0
    ids = torch.randint(1, 50, (4, 16), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 0
    out = tmp_path_factory.mktemp("report") / "out"
    result = diagnose(model, ids, ["W8A8", "W4A4"], tokenizer=Markup(), out=out, name="tiny <b>")
    return result, out


def test_the_page_is_whole_and_loads_nothing(report):
    result, out = report
    text = (out / "index.html").read_text()
    assert "src=" not in text and "http" not in re.sub(r"http-equiv|www\.w3\.org", "", text)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and text.count("<script") == 1
    assert f"<script>{SCRIPT}</script>" in text
    assert "alert(1)" in text and "<script>alert" not in text and "tiny <b>" not in text
    for term in GLOSSARY:
        assert term in text
    for row in result.sites:
        assert row["site"] in text
    assert "quantize(model, &quot;W8A8" in text or "quantize(model, &#x27;" in text
    assert text.count('class="sortable"') >= 6


def test_every_figure_has_a_title_axes_and_units(report):
    result, _ = report
    figures, without = draw(result)
    assert {f.name for f in figures} == {"rounding", "tails", "layers", "prediction", "attention"}
    assert without == []
    for figure in figures:
        assert figure.title and figure.caption and figure.png[:4] == b"\x89PNG"
        tree = ElementTree.fromstring(figure.svg)
        assert tree.get("aria-label") == figure.title


def test_text_stands_to_the_left_and_sentences_have_room(report):
    text = (report[1] / "index.html").read_text()
    rows = re.findall(r"<tr><th scope=row.*?</tr>", text)
    kinds = {cell for row in rows for cell in re.findall(r"<td[^>]*>norm (?:in|out)put</td>", row)}
    assert kinds and all("class=text " in cell for cell in kinds)
    assert re.search(r'<td class="text long" data-value="[^"]*outlier token', text)
    assert re.search(r'<td data-value="-?[\d.]+">', text), "numbers stay to the right"
    assert "increase (nats a token)" in text


def test_axes_are_labelled(report, monkeypatch):
    """Looked at on the axes themselves, since the SVG holds letters as paths."""
    import skipless.diagnose.plots as plots

    seen = []
    real = plots.render

    def spy(comparison, on, panels, **options):
        def both(pen, axes):
            on(pen, axes)
            seen.extend((options["name"], a.get_xlabel(), a.get_ylabel()) for a in axes)

        return real(comparison, both, panels, **options)

    monkeypatch.setattr(plots, "render", spy)
    plots.draw(report[0])
    assert len(seen) == 2 * 9
    for name, x, y in seen:
        assert x and y, name
        units = ("dB", "no unit", "standard deviations", "nats", "|x_q", "share")
        assert any(unit in y for unit in units), y


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(report, width, tmp_path):
    """No script error, tables sort, nothing is wider than the screen; a screenshot is kept."""
    _, out = report
    check = """
    <script>
    const errors = [];
    window.addEventListener('error', e => errors.push(e.message));
    window.addEventListener('load', () => {
      const table = document.querySelector('table.sortable');
      const column = 1, values = () => [...table.tBodies[0].rows].map(
        r => Number(r.cells[column].dataset.value));
      const button = table.tHead.rows[0].cells[column].querySelector('button');
      button.click(); const up = values();
      button.click(); const down = values();
      const sorted = [...up].sort((a, b) => a - b);
      document.title = JSON.stringify({
        errors, ready: document.documentElement.dataset.ready,
        sorts: String(up) === String(sorted) && String(down) === String(sorted.reverse()),
        fits: document.documentElement.scrollWidth <= window.innerWidth,
        figures: document.querySelectorAll('figure svg').length,
      });
    });
    </script>"""
    text = (out / "index.html").read_text()
    probed = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", text)
    page = tmp_path / "page.html"
    page.write_text(probed.replace("<head>", "<head>" + check, 1))
    options = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
               f"--window-size={width},900", "--virtual-time-budget=3000"]  # fmt: skip
    shot = out / f"screenshot-{width}.png"
    subprocess.run([*options, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120,
                   capture_output=True)  # fmt: skip
    assert shot.stat().st_size > 5000
    dumped = subprocess.run([*options, "--dump-dom", page.as_uri()], check=True, timeout=120,
                            capture_output=True, text=True).stdout  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", dumped)[1].replace("&quot;", '"')
    import json

    found = json.loads(title)
    assert found == {"errors": [], "ready": "yes", "sorts": True, "fits": True, "figures": 5}
