"""The page and its companions: self-contained, escaped, atomic, complete whatever is missing."""

import io
import json
import math
import re
from html.parser import HTMLParser

import pytest

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.report import build_report, compare, load_runs, plots, print_table, verdict
from skipless.report.cells import show
from skipless.report.html import page
from skipless.report.plots import FIGURES, draw_all
from skipless.report.style import PALETTE, looks

HOSTILE = '<script>alert("x")</script> & <img src="http://evil.example/x.png"> $x_{$ [bold]'
VOID = {"meta", "br", "img", "path", "line", "use"}


class Reader(HTMLParser):
    """Collects tags, attributes and ids, and checks that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()


def quick_page(runs):
    """The page without figures, which take seconds to draw."""
    comparison = compare(load_runs(runs))
    return page(comparison, verdict(comparison), [], [], title="t", command="c")


@pytest.fixture(scope="module")
def built(make, tmp_path_factory):
    """One report of two rows, the second with hostile text and without quant.json."""
    base = tmp_path_factory.mktemp("report")
    runs = [
        make(base / "one", label="residual + Muon"),
        make(base / "two", label=HOSTILE, note=HOSTILE, without=("quant.json",),
             connection=ConnectionConfig(kind="anneal"),
             samples={"prompt": HOSTILE, "greedy": HOSTILE, "sampled": "fine"}),
    ]  # fmt: skip
    return build_report(runs, base / "out" / "report.html")


@pytest.fixture(scope="module")
def html(built):
    return built.read_text()


def test_the_page_loads_nothing(html):
    reader = Reader(html)
    loading = {"src", "href", "srcset", "data", "action", "poster"}
    wanted = [(k, v) for k, v in reader.attributes if k.split(":")[-1] in loading]
    assert wanted and all(v.startswith("#") for _, v in wanted)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(reader.tags)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in html


def test_the_page_is_well_formed_and_references_resolve(html):
    reader = Reader(html)
    assert reader.open == []
    ids = [v for k, v in reader.attributes if k == "id"]
    used = {v[1:] for k, v in reader.attributes if k == "href"}
    used |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert used and used <= set(ids)


def test_hostile_text_is_escaped(html):
    assert "<script" not in html and "<img" not in html
    assert (
        html.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 4
    )  # label, note, sample


def test_line_breaks_of_a_sample_do_not_stretch_the_page(make, tmp_path):
    sample = {"prompt": "p", "greedy": "\n" * 40 + "end", "sampled": ""}
    text = quick_page([make(tmp_path / "run", samples=sample)])
    assert text.count("↵") == 40


def test_missing_pieces_are_named(html):
    assert "What is missing" in html
    assert "quant.json is missing: no loss at low precision" in html


def test_figures_follow_light_and_dark(html):
    for variable in ("--ink", "--grid", "--row-0", "--row-1"):
        assert f"var({variable})" in html
        assert html.count(f"{variable}:") == 2  # light and dark
    assert not re.search(r"#0[0-9a-f]{3}f3", html)  # no stand-in colour is left


def test_companion_files(built):
    names = {path.name for path in built.parent.iterdir()}
    numbers = json.loads(built.with_suffix(".json").read_text())
    figures = {f"report-{name}.png" for name in numbers["figures"]}
    assert names == {"report.html", "report.json"} | figures  # and no temporary file
    assert len(figures) == len(FIGURES)
    assert all((built.parent / f).read_bytes().startswith(b"\x89PNG") for f in figures)


def test_json_has_the_numbers_of_the_tables(built):
    numbers = json.loads(built.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    first, second = numbers["rows"]
    assert first["label"] == "residual + Muon" and first["loss"] == 4.5
    assert first["precision"]["block"]["W4A4"]["increase"] == pytest.approx(1.0)
    assert second["error"] is None and second["precision"] == {}
    assert numbers["pairs"][0]["gap"] == pytest.approx(0.0)
    assert numbers["verdict"][0]["topic"] == "In short"
    assert numbers["command"].startswith("skipless report ")


def test_every_label_and_reading_order(four):
    text = quick_page(four)
    for label in ("residual + KL-Shampoo", "residual-free + KL-Shampoo", "residual + Muon",
                  "residual-free + Muon"):  # fmt: skip
        assert text.count(label) >= 3  # tables, settings, machine
    order = ["<h1>", "The verdict", "The rows", "Loss by precision", "Figures", "What they write",
             "What the numbers mean", "Settings", "Machine", "Make it again"]  # fmt: skip
    places = [text.index(f">{part}<" if part[0] != "<" else part) for part in order]
    assert places == sorted(places)
    assert "What is missing" not in text


def test_settings_show_what_differs(four):
    text = quick_page(four)
    block = text[text.index("Settings</h2>") :]
    assert "optim.name = &#x27;muon&#x27;" in block
    assert "train.batch_size = " not in block  # the same in all rows


def test_nothing_written_when_the_disk_refuses(make, tmp_path, monkeypatch):
    import skipless.report.build as build
    from skipless import files

    runs = [make(tmp_path / "run")]
    out = tmp_path / "out" / "report.html"
    out.parent.mkdir()
    out.write_text("old")
    monkeypatch.setattr(build, "draw_all", lambda comparison: ([], []))

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        build_report(runs, out)
    assert out.read_text() == "old"
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


def test_the_barest_run_still_makes_a_page(make, tmp_path):
    everything = ("metrics.jsonl", "probes.jsonl", "probe.json", "quant.json", "eval.json",
                  "samples.json", "environment.json", "train.json")  # fmt: skip
    out = build_report([make(tmp_path / "run", label="bare", without=everything)],
                       tmp_path / "bare.html")  # fmt: skip
    text = out.read_text()
    Reader(text)
    assert "bare has no held-out loss yet" in text
    assert all(title in text for _, title, *_ in FIGURES)  # each named as left out
    assert json.loads(out.with_suffix(".json").read_text())["figures"] == []


def test_values_that_are_not_finite(make, edit, tmp_path, monkeypatch):
    path = make(
        tmp_path / "run", label="broken", loss=math.nan, connection=ConnectionConfig(kind="none")
    )
    edit(
        path, "probe.json", lambda p: [s.update(kurtosis=None, std=None) for s in p["sites"]] and p
    )
    runs = [path, make(tmp_path / "fine", label="fine", kurtosis=math.inf)]
    text = quick_page(runs)
    assert "not finite" in text
    assert not re.search(r">\s*[+-]?(nan|inf)", text)
    monkeypatch.setattr(plots, "FIGURES", FIGURES[:3])  # the others take the same way, slowly
    figures, _ = draw_all(compare(load_runs(runs)))
    assert "loss_curves" in {figure.name for figure in figures}


def test_twelve_rows_look_different(make, tmp_path):
    runs = [make(tmp_path / f"{kind}-{name}", label=f"{kind} {name}", optimizer=name,
                 connection=ConnectionConfig(kind=kind), steps=8, layers=2)
            for kind in ("residual", "none")
            for name in ("adamw", "muon", "soap", "shampoo", "kl_shampoo", "kl_soap")]  # fmt: skip
    rows = compare(load_runs(runs)).rows
    found = looks(rows)
    assert len({(look.light, str(look.line)) for look in found.values()}) == 12
    for row in rows:
        assert found[row.label].light in {light for light, _ in PALETTE[row.family]}
    assert all(row.label in quick_page(runs) for row in rows)


@pytest.mark.parametrize(("ground", "index"), [("#ffffff", 0), ("#14171c", 1)])
def test_colours_stand_out_from_the_ground(ground, index):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for shades in PALETTE.values():
        for shade in shades:
            low, high = sorted((luminance(shade[index]), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 3.0, f"{shade[index]} on {ground}"


def test_terminal_table(four):
    file = io.StringIO()
    print_table(four, file=file)
    text = file.getvalue()
    assert "residual-free + Muon" in text and "+3.1%" in text and "+0.450" in text
    assert "Rounded to W4A4" in text


def test_an_unfinished_run_is_marked_in_the_page_and_in_the_terminal(make, tmp_path):
    run = make(tmp_path / "run", label="mine", steps=40, without=("train.json",))
    done = make(tmp_path / "done", label="done", steps=40, layers=4)
    text = quick_page([run, done])
    assert (
        text.count("<small>not finished: step 40 of 40</small>") == 3
    )  # rows, block scope, linear scope
    assert f"continue with: skipless train {run}" in text
    file = io.StringIO()
    print_table([run, done], file=file)
    marked = [line for line in file.getvalue().splitlines() if "not finished: step 40" in line]
    assert len(marked) == 1 and marked[0].split()[0] == "mine"


def test_rows_of_one_label_are_told_apart(make, tmp_path):
    runs = [
        make(tmp_path / where, label=label, layers=layers)
        for where, label, layers in (("a/x", "mine", 8), ("b/x", "mine", 6), ("y", "mine", 4),
                                     ("z", "other", 3))
    ]  # fmt: skip
    labels = [row.label for row in compare(load_runs(runs)).rows]
    assert labels == [f"mine ({runs[0]})", f"mine ({runs[1]})", "mine (y)", "other"]


def test_why_a_gap_is_not_to_be_built_upon(make, tmp_path):
    free = ConnectionConfig(kind="none")
    cases = (
        ({"standard_error": 0.01}, 4.6, ""), ({"standard_error": 0.2}, 4.6, "not established"),
        ({"without": ("eval.json",)}, 4.6, "error not known"), ({}, 6.9, "learned too little"),
    )  # fmt: skip
    for number, (more, loss, said) in enumerate(cases):
        base = tmp_path / str(number)
        runs = [make(base / "a", label="with", loss=4.5, **more),
                make(base / "b", label="without", loss=loss, connection=free, **more)]  # fmt: skip
        text = quick_page(runs)
        row = text[text.index(">without<") :]
        cell = row[: row.index("</tr>")].split("<td")[2]
        assert said in cell and ("<small>" in cell) == bool(said), (said, cell)


def test_how_to_make_it_again_can_be_typed(make, edit, tmp_path):
    run = make(tmp_path / "run")
    old = "__main__.py train demo-rf-kl --out runs/x --measure"  # as older runs noted it
    edit(run, "environment.json", lambda e: e.update(command=old))
    text = quick_page([run])
    assert "skipless train demo-rf-kl --out runs/x --measure" in text and "__main__" not in text


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(-0.0004, "+.3f", "+0.000"), (-0.0004, ".3f", "0.000"), (-0.0006, "+.3f", "-0.001"),
     (-0.0, "+.1%", "+0.0%"), (-12.0, "+.1f", "-12.0")],
)  # fmt: skip
def test_what_rounds_to_zero_has_no_minus(value, form, shown):
    assert show(value, form) == shown


def test_terminal_table_takes_labels_literally(make, tmp_path):
    file = io.StringIO()
    print_table([make(tmp_path / "run", label="[red]x[/red] [/oops]")], file=file)
    assert "[red]x[/red] [/oops]" in file.getvalue()


def test_the_report_needs_no_torch(make, tmp_path):
    import subprocess
    import sys

    make(tmp_path / "run")
    code = (
        "import sys; from skipless.report import print_table, compare, load_runs, verdict;"
        f"print_table([{str(tmp_path / 'run')!r}]);"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["config.html", "quant.html", "new.html", "deeper/new.html"])
def test_a_report_never_lands_among_the_files_of_a_run(make, tmp_path, name):
    run = make(tmp_path / "run")
    before = {p: p.read_bytes() for p in run.iterdir()}
    with pytest.raises(UserError, match="inside the run directory"):
        build_report([run], run / name)
    assert {p: p.read_bytes() for p in run.iterdir()} == before


@pytest.mark.parametrize("name", ["", ".", "rep.json", "rep", "folder.html"])
def test_a_report_is_an_html_file(make, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "run")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match=r"ends in \.html"):
        build_report([run], name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.html", "run"]


def test_a_report_replaces_its_own_numbers_and_no_others(make, tmp_path):
    run = make(tmp_path / "run")
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    with pytest.raises(UserError, match="not one of ours"):
        build_report([run], tmp_path / "package.html")
    assert (tmp_path / "package.json").read_text() == '{"name": "mine"}'
    for _ in range(2):
        build_report([run], tmp_path / "report.html")
