"""What is quantised to how many bits, in words: `Scheme` and the plan of a training.

formats.py    Scheme and its text form (Q1)
patterns.py   which modules and sites an exception names
limits.py     what its fields may be
plans.py      TrainingPlan: a scheme that begins late and narrows (Q3)
"""

from skipless.scheme.formats import Scheme
from skipless.scheme.limits import MAX_BITS, MIN_BITS, check_groups
from skipless.scheme.patterns import FULL_PRECISION, matches
from skipless.scheme.plans import TrainingPlan

__all__ = [
    "FULL_PRECISION",
    "MAX_BITS",
    "MIN_BITS",
    "Scheme",
    "TrainingPlan",
    "check_groups",
    "matches",
]
