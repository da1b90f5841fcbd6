"""Evaluation: held-out loss, loss by precision, error by depth, sensitivity by layer.

classification.py  accuracy of a classifier
losses.py       loss, perplexity, bits per byte, standard errors
precision.py    loss at every scheme and scope
propagation.py  R_l through depth (S9), SQNR of every site against the yardstick (S3, S11)
sensitivity.py  one layer quantised at a time
suggesting.py   a mixed-precision scheme, raised layer by layer
prefixes.py     what blocks returned, given back to passes that differ behind them
tasks/          zero-shot tasks: accuracy, and what quantisation does to the answers
"""

from skipless.evaluate.classification import AccuracyReport, accuracy
from skipless.evaluate.losses import LossReport, SequenceLosses, loss, sequence_losses
from skipless.evaluate.precision import precision_table
from skipless.evaluate.propagation import error_propagation, site_sqnr
from skipless.evaluate.sensitivity import sensitivity
from skipless.evaluate.suggesting import Suggestion, suggest_scheme
from skipless.evaluate.tasks import score_tasks

__all__ = [
    "AccuracyReport",
    "LossReport",
    "SequenceLosses",
    "Suggestion",
    "accuracy",
    "error_propagation",
    "loss",
    "precision_table",
    "score_tasks",
    "sensitivity",
    "sequence_losses",
    "site_sqnr",
    "suggest_scheme",
]
