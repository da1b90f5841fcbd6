"""`compare`: two models on the same batches; `compare_diagnoses`: two finished diagnoses.

1. sites of A, then of B     one pass each over all batches (site_rows.py, without remedies)
2. outputs                   another pass over all batches, both models side by side
3. depth, parameters         the first sequences
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from skipless.compiled import run_eagerly, unwrapped
from skipless.diagnose.batches import check_module, first_sequences
from skipless.diagnose.comparison.difference import Difference, change, site_differences
from skipless.diagnose.comparison.outputs import Outputs, distance_by_depth, parameter_rows
from skipless.diagnose.parts import RESULT, Parts, checksum
from skipless.diagnose.result import Diagnosis
from skipless.diagnose.running import SAMPLED_SEQUENCES, parse_schemes
from skipless.diagnose.site_rows import Say, site_rows
from skipless.diagnose.weights import check_finite
from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.jsonable import parse_json, read_text
from skipless.quant import Scheme, evaluation_mode, quantization
from skipless.rundir import CONFIG


def compare(
    a: nn.Module,
    b: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[str | Scheme] | str = ("W8A8",),
    *,
    names: tuple[str, str] = ("A", "B"),
    tokenizer: Any = None,
    about: str = "",
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> Difference:
    """Measure where `b` differs from `a` on the same batches, site by site; B minus A.

    Sites are aligned by name. `batches` are as in `diagnose`, kept in memory and read three times.
    `out` writes the report and keeps finished parts. Both models are left as they were;
    what `torch.compile` made of them is not run.

    Raises UserError for no batch, no common site, an unknown scheme, a quantised model, and as
    `diagnose` does.
    """
    parsed, a, b = parse_schemes(schemes), unwrapped(a), unwrapped(b)
    kept = list(as_list(batches))
    if not kept:
        raise UserError("there is no batch to measure on; give at least one")
    for name, model in zip("AB", (a, b), strict=True):
        check_module(model)
        if quantization(model) is not None:
            raise UserError(f"model {name} is quantised; call restore(model) before comparing it")
        check_finite(model)
    settings = {
        "names": names, "about": about, "schemes": [str(s) for s in parsed],
        "checksum": [checksum(model, kept) for model in (a, b)],
    }  # fmt: skip
    parts = Parts(out, settings)
    tables = {}
    with parts.held():
        with evaluation_mode(a), evaluation_mode(b), run_eagerly():
            for part, model in (("a", a), ("b", b)):
                if parts.known(part) is None:
                    say(f"sites of {names[part == 'b']}")
                tables[part] = parts.get(
                    part,
                    lambda model=model: site_rows(
                        model, kept, parsed, tokenizer, 30.0, say, remedies=False
                    ),
                )
            check_common(tables["a"]["rows"], tables["b"]["rows"])
            say("outputs of both")
            apart = parts.get("apart", lambda: _apart(a, b, kept))
        result = _joined(tables, apart, settings, about)
        _write(result, out)
    return result


def _joined(
    tables: dict[str, Any], apart: dict[str, Any], settings: dict[str, Any], about: str
) -> Difference:
    """The result out of the finished parts."""
    missing = [f"{part.upper()}: {text}" for part in "ab" for text in tables[part]["missing"]]
    return _difference(
        tables["a"]["rows"], tables["b"]["rows"], settings["schemes"],
        a=settings["names"][0], b=settings["names"][1],
        about=about or f"{tables['a']['num_tokens']:,} tokens", outputs=apart["outputs"],
        depth=apart["depth"], missing=[*missing, *apart["missing"]],
        weights=[
            {**row, **{key: change(*row[key]) for key in ("kurtosis", "max_over_std")}}
            for row in apart["weights"]
        ],
    )  # fmt: skip


def compare_diagnoses(
    a: Diagnosis, b: Diagnosis, *, names: tuple[str, str] | None = None,
    out: str | Path | None = None,
) -> Difference:  # fmt: skip
    """The difference of two finished diagnoses: of their tables, without models.

    Distances of outputs, stream and weights need the models and are listed as missing. Raises
    UserError for no common site.
    """
    check_common(a.sites, b.sites)
    names = names or (a.model, b.model)
    schemes = [scheme for scheme in a.schemes if scheme in b.schemes]
    missing = ["distance of outputs, stream and weights: two folders hold no models; give models"]
    if not schemes:
        missing.append(
            f"signal to rounding noise: A was diagnosed at {', '.join(a.schemes)} and B at "
            f"{', '.join(b.schemes)}"
        )
    if a.about != b.about:
        missing.append(
            f"the same text: A was measured on {a.about or 'unnamed batches'}, B on "
            f"{b.about or 'unnamed batches'}, so that differences are also those of the texts"
        )
    theirs, weights = {row["site"]: row for row in b.weights}, []
    for row in a.weights:
        if row["site"] in theirs:
            other = theirs[row["site"]]
            weights.append({
                "site": row["site"], "shape": row["shape"], "distance": None,
                **{key: change(row[key], other[key]) for key in ("kurtosis", "max_over_std")},
            })  # fmt: skip
    result = _difference(
        a.sites, b.sites, schemes, a=names[0], b=names[1],
        about=a.about if a.about == b.about else f"A: {a.about}; B: {b.about}",
        outputs=None, depth=[], missing=missing, weights=weights,
    )  # fmt: skip
    with Parts(out, {"names": names, "of": "two diagnoses"}).held():
        _write(result, out)
    return result


def read_diagnosis(folder: str | Path) -> Diagnosis:
    """The finished diagnosis in `folder`. Raises UserError when there is none."""
    file = Path(folder) / RESULT
    if not is_diagnosis(folder):
        raise UserError(f"{folder} holds no finished diagnosis; `skipless diagnose` writes them")
    found = parse_json(read_text(file), where=str(file))
    fields = {field.name: field for field in dataclasses.fields(Diagnosis)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(found, dict) or not needed <= found.keys():
        raise UserError(f"{file} is no diagnosis of this version; diagnose the model again")
    return Diagnosis(**{key: value for key, value in found.items() if key in fields})


def is_diagnosis(folder: str | Path) -> bool:
    """Whether `folder` holds a finished diagnosis (and not a run, which may note a failure under
    the same name)."""
    return (Path(folder) / RESULT).is_file() and not (Path(folder) / CONFIG).exists()


def check_common(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> None:
    """Raise UserError when no site stands in both tables."""
    mine, theirs = {row["site"] for row in a}, {row["site"] for row in b}
    if not mine & theirs:
        raise UserError(
            f"the models have no site in common: A has {next(iter(a))['site']} and {len(a) - 1} "
            f"more, B has {next(iter(b))['site']} and {len(b) - 1} more; compare models of one "
            "architecture"
        )


def _apart(a: nn.Module, b: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    outputs = Outputs(a, b, batches[0])
    for batch in batches:
        outputs.run(batch)
    weights, missing = parameter_rows(a, b)
    depth = distance_by_depth(a, b, first_sequences(batches[0], SAMPLED_SEQUENCES))
    return {
        "outputs": outputs.found(), "depth": depth, "weights": weights,
        "missing": [*outputs.missing, *missing],
    }  # fmt: skip


def _difference(
    of_a: Sequence[dict[str, Any]], of_b: Sequence[dict[str, Any]], schemes: Sequence[str],
    **more: Any,
) -> Difference:  # fmt: skip
    mine, theirs = ([row["site"] for row in rows] for rows in (of_a, of_b))
    return Difference(
        schemes=list(schemes), sites=site_differences(of_a, of_b, schemes),
        only_a=[site for site in mine if site not in set(theirs)],
        only_b=[site for site in theirs if site not in set(mine)], **more,
    )  # fmt: skip


def _write(result: Difference, out: str | Path | None) -> None:
    if out is not None:
        from skipless.diagnose.comparison.page import write

        write(result, Path(out))
