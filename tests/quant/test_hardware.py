"""The probe finds engines that lie; building works once, or says why not, and never half."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.quant.integers import building, hardware
from skipless.quant.integers.engines import ENGINES, Engine, FloatEngine, Problem
from skipless.quant.integers.hardware import TOKENS, EngineReport, examine, pick, probe, table


class Saturating(FloatEngine):
    """An 8-bit product without VNNI: u8 x s8 pairs summed in 16 bits, then corrected for the
    offset of 128 that made the activations unsigned."""

    name = "saturating"

    def refuses(self, problem: Problem) -> str:
        return "8 bits only" if max(problem.weight_bits, problem.activation_bits) > 8 else ""

    def sums(self, prepared, codes: Tensor) -> Tensor:
        weights = prepared.data[0].to(torch.int64)
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
            weights = torch.nn.functional.pad(weights, (0, 1))
        products = (codes.to(torch.int64) + 128)[:, None, :] * weights[None]
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-32768, 32767)
        return pairs.sum(-1) - 128 * weights.sum(-1)


class Wrong(FloatEngine):
    name = "wrong"

    def sums(self, prepared, codes: Tensor) -> Tensor:
        return super().sums(prepared, codes) + 1


class Crashing(FloatEngine):
    name = "crashing"

    def sums(self, prepared, codes: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nfor this device")


class Half(Engine):
    name = "half"

    def unavailable(self, device: str) -> str:
        return f"not on {device}"


def test_the_saturating_kernel_of_older_processors_is_found():
    report = examine(Saturating())
    assert report.state == "saturating" and not report.usable and not report.speed
    assert "instead of" in report.detail and "W8A8" in report.detail


def test_the_numbers_of_a_saturating_kernel_are_those_observed():
    """255 x 127 at K = 768 is 24.87 M; with pairs clamped to 32,767 it is 12.58 M."""
    problem = Problem(weight_bits=8, activation_bits=8, in_features=768, out_features=1)
    engine = Saturating()
    prepared = engine.prepare(torch.full((1, 768), 127), torch.ones(1), problem)
    top = torch.full((1, 768), 127, dtype=torch.int16)
    assert int(engine.sums(prepared, top)) + 128 * 768 * 127 == 32767 * 384 == 12_582_528


@pytest.mark.parametrize(
    ("engine", "state", "detail"),
    [(Wrong(), "wrong", "small codes"), (Crashing(), "unavailable", "no kernel image"),
     (Half(), "unavailable", "not on cpu")],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_other_faults_are_told_apart(engine, state, detail):
    report = examine(engine)
    assert report.state == state and not report.usable and report.detail.endswith(detail)


def test_every_engine_of_this_machine_is_exact_or_says_why_not():
    reports = {report.engine: report for report in probe()}
    assert set(reports) == set(ENGINES)
    assert reports["float"].usable
    for report in reports.values():
        assert report.state in ("exact", "slow", "unavailable", "saturating", "wrong")
        assert report.detail
        assert len(report.speed) == (len(TOKENS) if report.usable else 0)
    if building.find_compiler():
        assert reports["plain"].usable, reports["plain"].detail
    for row in table(list(reports.values())):
        assert row["engine"] in ENGINES and row["state"] == reports[row["engine"]].state
        assert ("speed_1" in row) == reports[row["engine"]].usable


def fake_probe(monkeypatch, **states) -> None:
    reports = []
    for name in ENGINES:
        state, speed = states.get(name, ("unavailable", 0.0))
        usable = state in ("exact", "slow")
        reports.append(
            EngineReport(engine=name, state=state, detail=f"{name} is {state}",
                         speed=(speed, speed) if usable else ())
        )  # fmt: skip
    monkeypatch.setitem(hardware._probed, "cpu", reports)


def test_pick_takes_the_fastest_exact_engine_and_never_a_wrong_one(monkeypatch):
    problem = Problem(weight_bits=8, activation_bits=8, in_features=64, out_features=8)
    fake_probe(monkeypatch, int_mm=("exact", 2.0), float=("slow", 0.5))
    assert pick(problem).name == "int_mm"
    fake_probe(monkeypatch, int_mm=("exact", 0.9), float=("exact", 1.5))
    assert pick(problem).name == "float"
    fake_probe(monkeypatch, int_mm=("slow", 9.0), float=("exact", 1.5))
    assert pick(problem).name == "float"
    fake_probe(monkeypatch, int_mm=("saturating", 0.0), float=("slow", 0.5))
    assert pick(problem).name == "float"
    with pytest.raises(UserError, match="int_mm is saturating; leave the engine out"):
        pick(problem, "int_mm")
    with pytest.raises(UserError, match="did you mean 'float'"):
        pick(problem, "flaot")
    fake_probe(monkeypatch)
    with pytest.raises(UserError, match="no engine computes W8A8"):
        pick(problem)


def test_pick_passes_over_what_refuses(monkeypatch):
    fake_probe(monkeypatch, int_mm=("exact", 2.0), float=("slow", 0.5))
    wide = Problem(weight_bits=8, activation_bits=16, in_features=64, out_features=8)
    assert pick(wide).name == "float"


@pytest.fixture
def unloaded():
    """Forget loaded libraries before and after, so that `load` decides anew."""
    building.load.cache_clear()
    yield
    building.load.cache_clear()


@pytest.fixture
def messages(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(building.log, "say", said.append)
    return said


def script(path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_one_message_and_everything_runs(
    monkeypatch, unloaded, messages
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(hardware, "_probed", {})
    monkeypatch.setattr(building, "_told", set())
    reports = {r.engine: r for r in [*probe(), *probe(fresh=True)]}
    for level in building.LEVELS:
        assert reports[level].state == "unavailable"
    assert any("no C++ compiler (no-such-compiler)" in r.detail for r in reports.values())
    assert len(messages) == 1 and "no C++ compiler" in messages[0]
    problem = Problem(weight_bits=8, activation_bits=16, in_features=64, out_features=8)
    assert pick(problem).name == "float"
    assert hardware.fastest_kernel() is None


@pytest.mark.parametrize("trouble", ["compiler", "cache"])
def test_why_there_is_no_kernel_is_told_once(monkeypatch, tmp_path, unloaded, messages, trouble):
    """A compiler that fails and a cache that cannot be written were passed over in silence."""
    if trouble == "compiler":
        monkeypatch.setenv("CXX", script(tmp_path / "cxx", "exit 1"))
        monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "cache"))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(hardware, "_probed", {})
    monkeypatch.setattr(building, "_told", set())
    probe()
    probe(fresh=True)
    told = [text for text in messages if "without the fast kernel" in text]
    assert len(told) == 1
    assert ("set CXX" if trouble == "compiler" else "set SKIPLESS_CACHE") in told[0]


def test_a_compiler_that_cannot_be_read_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "'g++")
    assert building.find_compiler() is None


def test_a_failing_compiler_is_told_and_leaves_nothing(monkeypatch, tmp_path, messages):
    monkeypatch.setenv(
        "CXX",
        script(tmp_path / "cxx", '[ "$1" = --version ] && echo 1 && exit; '
               'echo "gemm.cpp:1: error: bad luck" >&2; exit 1'),
    )  # fmt: skip
    with pytest.raises(UserError, match="failed on the integer kernel: gemm.cpp:1: error: bad"):
        building.build("plain", tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_of_two_builders_one_compiles(monkeypatch, tmp_path, messages):
    """A stand-in compiler that takes a moment and counts; flock holds between open files, so two
    threads stand for two processes."""
    monkeypatch.setenv(
        "CXX",
        script(tmp_path / "cxx", '[ "$1" = --version ] && echo 1 && exit; '
               f'echo run >> {tmp_path}/count; sleep 0.3; for last; do :; done; echo x > "$last"'),
    )  # fmt: skip
    paths: list = []

    def work() -> None:
        paths.append(building.build("plain", tmp_path / "cache"))

    builders = [threading.Thread(target=work) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=120)
    assert len(set(paths)) == 1 and paths[0].read_text() == "x\n" and len(paths) == 2
    assert (tmp_path / "count").read_text() == "run\n"
    assert not [p for p in (tmp_path / "cache").iterdir() if "tmp" in p.name]
    building.build("plain", tmp_path / "cache")
    assert (tmp_path / "count").read_text() == "run\n"  # found in the cache


def test_the_cache_key_knows_sources_flags_and_compiler(monkeypatch, tmp_path, messages):
    body = '[ "$1" = --version ] && echo {} && exit; for last; do :; done; echo x > "$last"'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", body.format(1)))
    names = {building.build(level, tmp_path).name for level in building.LEVELS}
    script(tmp_path / "cxx", body.format(2))
    names.add(building.build("plain", tmp_path).name)
    copies = tmp_path / "kernels"
    copies.mkdir()
    for source in building.KERNELS.iterdir():
        (copies / source.name).write_text(source.read_text() + "\n")
    monkeypatch.setattr(building, "KERNELS", copies)
    names.add(building.build("plain", tmp_path).name)
    assert len(names) == len(building.LEVELS) + 2


@pytest.mark.skipif(building.find_compiler() is None, reason="needs a C++ compiler")
def test_a_damaged_library_is_made_anew(monkeypatch, tmp_path, unloaded, messages):
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path))
    path = building.build("plain")
    assert path.parent == tmp_path / "kernels"
    damaged = tmp_path / "damaged"
    damaged.write_bytes(path.read_bytes()[:100])
    os.replace(damaged, path)
    library, reason = building.load("plain")
    assert library is not None, reason
    assert library.skipless_level() == b"plain"


def test_levels_follow_the_processor(monkeypatch):
    def levels(*flags: str) -> list[str]:
        monkeypatch.setattr(building, "_processor_flags", lambda: frozenset(flags))
        return building.supported_levels()

    assert levels() == ["plain"]
    assert levels("avx2", "fma") == ["avx2", "plain"]
    full = ("avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni")
    assert levels(*full) == ["vnni", "avx2", "plain"]
    assert levels(*full[:-1]) == ["avx2", "plain"]
