"""Names symptom, evidence, likely cause and remedy of a run or a model: `skipless doctor`.

A rule is a pure function from `Evidence` to a `Finding`, to `Unchecked` where the evidence is
missing, or to None, which is healthy. records.py and measuring.py gather the evidence.
"""

from skipless.doctor.checkup import RULES, Checkup, examine
from skipless.doctor.evidence import Evidence
from skipless.doctor.finding import Finding, Unchecked
from skipless.doctor.measuring import measure
from skipless.doctor.patient import check_model, collect

__all__ = [
    "RULES",
    "Checkup",
    "Evidence",
    "Finding",
    "Unchecked",
    "check_model",
    "collect",
    "examine",
    "measure",
]
