"""Two models, or two checkpoints of one, site by site: what changed, where, by how much.

    skipless.diagnose.compare(a, b, batches, ["W8A8"]) -> Difference
    skipless.diagnose.compare_diagnoses(a, b)          of two finished ones

pairs.py        one text for two tokenizers
comparing.py    both models on the same batches: start here
outputs.py      distance of outputs, loss, KL divergence, distance of the stream and of parameters
difference.py   Difference: sites aligned by name, B minus A; ten lines
page.py         heat maps, one HTML page, all files
"""

from skipless.diagnose.comparison.comparing import compare, compare_diagnoses, read_diagnosis
from skipless.diagnose.comparison.difference import Difference

__all__ = ["Difference", "compare", "compare_diagnoses", "read_diagnosis"]
