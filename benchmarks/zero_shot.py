"""Our scorer of multiple-choice questions against lm-eval's, request by request.

    python benchmarks/zero_shot.py [--quick] [--limit 200] [--num-fewshot 0] [--tasks piqa ...]
    python benchmarks/zero_shot.py --tasks lambada mmlu --num-fewshot 5 --limit 3

Each task is asked in chunks of questions, which both scorers get in turn: ours with what requests
share computed once, lm-eval's HFLM in batches (`--batch-size`, 8). The texts of
all requests have to be equal. Figures, for every task: `TASK`, our time over lm-eval's (CPU time
of the process at one thread, so that a busy machine slows neither): at most half where answers
share a long text, which with examples in front is everywhere, else at most the same; and over all
tasks `worst`, the largest difference of a log-likelihood in nats, and `greedy_differs`, the
requests of which the two disagree on `is_greedy`. Accuracies are ours.

lm-eval itself computes a context once for several answers of one token (BoolQ). The column `floor`
says what is left to win: the time of the blocks' matrix products alone, on as many tokens a pass as
our scorer's passes have, over lm-eval's time. No scorer that computes those tokens with torch's
float32 kernels is below it.

Finished tasks are kept in `--out`, so that an interrupted run goes on. Needs the extra `eval`.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _finished import Finished

from skipless.evaluate.tasks import CORE8, Coder, find_tasks, score_requests
from skipless.evaluate.tasks.asking import Questions, ask
from skipless.evaluate.tasks.harness import wrap
from skipless.evaluate.tasks.local import PREFIX, local_tasks
from skipless.evaluate.tasks.scoring import choose_mode
from skipless.pretrained import fetch_model


def measure(name: str, tasks: Any, model: Any, coder: Coder, lm: Any, args: Any) -> dict[str, Any]:
    """Both scorers on one task, chunk by chunk. `tasks`: lm-eval's, of MMLU one a subject."""
    asked = ask(find_tasks([name])[0], coder, limit=args.limit, num_fewshot=args.num_fewshot)
    instances = instances_of(name, asked, tasks, args.limit)
    began = time.process_time()
    mode, _ = choose_mode(model, asked.encoded)  # once a task, as score_tasks does
    ours_s, theirs_s, floor_s, worst = time.process_time() - began, 0.0, 0.0, 0.0
    requests = greedy_differs = right = 0
    for start in range(0, len(asked.items), args.chunk):
        places = range(start, min(start + args.chunk, len(asked.items)))
        theirs = [instance for i in places for instance in instances[i]]
        with passes(model) as sizes:
            began = time.process_time()
            mine = score_requests(model, [asked.encoded[i] for i in places], mode=mode).scores
            between = time.process_time()
        ours_s += between - began
        began = time.process_time()
        found = lm.loglikelihood(theirs, disable_tqdm=True)
        theirs_s += time.process_time() - began
        floor_s += products(sizes, model)
        for one, (likelihood, greedy) in zip([s for q in mine for s in q], found, strict=True):
            worst = max(worst, abs(one.log_likelihood - likelihood))
            greedy_differs += one.is_greedy != greedy
            requests += 1
        for i, scores in zip(places, mine, strict=True):
            best = max(range(len(scores)), key=lambda k: scores[k].log_likelihood)
            right += scores[0].is_greedy if len(scores) == 1 else best == asked.items[i].gold
    return {"questions": len(asked.items), "requests": requests, "acc": right / len(asked.items),
            "ours_s": ours_s, "lm_eval_s": theirs_s, "ratio": ours_s / theirs_s,
            "floor": floor_s / theirs_s, "worst": worst,
            "greedy_differs": greedy_differs}  # fmt: skip


def instances_of(name: str, asked: Questions, tasks: Any, limit: int) -> list[list[Any]]:
    """lm-eval's requests of every question, with our examples in front; the texts have to agree."""
    found: dict[tuple[str, int], list[Any]] = {}
    for key, task in tasks.items():
        subject = key.removeprefix(PREFIX + name).lstrip("_")
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        for instance in task.instances:
            found.setdefault((subject, instance.doc_id), []).append(instance)
    counts: Counter[str] = Counter()
    everything = []
    for number, item, before in zip(asked.numbers, asked.items, asked.before, strict=True):
        place = counts[item.subject] if item.subject else number
        counts[item.subject] += 1
        instances = sorted(found[item.subject, place], key=lambda x: x.idx)
        contexts = [item.heading + context for context in item.contexts]
        if [x.args for x in instances] != list(zip(contexts, item.continuations, strict=True)):
            raise SystemExit(f"{name}: the texts of question {number} differ: {contexts}")
        for instance, context in zip(instances, item.contexts, strict=True):
            instance.arguments = (before + context, instance.args[1])
        everything.append(instances)
    return everything


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    """The number of tokens of every pass inside."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    yield sizes
    hook.remove()


def products(sizes: list[int], model: Any) -> float:
    """CPU seconds of the matrix products of the model's blocks, on so many tokens a pass."""
    body = [x for x in model.get_decoder().modules() if isinstance(x, torch.nn.Linear)]
    seconds = 0.0
    for size in sizes:
        rows = {width: torch.randn(size, width) for width in {x.in_features for x in body}}
        began = time.process_time()
        with torch.inference_mode():
            for layer in body:
                layer(rows[layer.in_features])
        seconds += time.process_time() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="4 questions of two tasks, of whose time half is our scorer's trial",
    )
    parser.add_argument("--model", default="smollm2-135m", help="of `skipless models list`")
    parser.add_argument("--limit", type=int, default=200, help="questions a task or subject")
    parser.add_argument("--tasks", nargs="+", default=list(CORE8))
    parser.add_argument("--num-fewshot", type=int, default=0, help="examples, ours for both")
    parser.add_argument("--batch-size", type=int, default=8, help="lm-eval's")
    parser.add_argument("--chunk", type=int, default=50, help="questions a turn")
    parser.add_argument("--out", type=Path, help="file of finished tasks")
    args = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        print("left out: lm-eval is not installed (`pip install -e '.[eval]'`)")
        return
    if args.quick:
        args.limit, args.tasks = 4, ["boolq", "piqa"]
    import transformers

    torch.set_num_threads(1)
    folder = fetch_model(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    coder = Coder(tokenizer, model.config.max_position_embeddings)
    lm = wrap(model, tokenizer)
    lm.batch_size_per_gpu = args.batch_size
    settings = {"model": args.model, "limit": args.limit, "batch_size": args.batch_size,
                "num_fewshot": args.num_fewshot}  # fmt: skip
    done, rows = Finished(args.out, f"zero_shot{'-quick' * args.quick}.jsonl"), {}
    with local_tasks(args.tasks, "wheel") as (manager, names):
        loaded = manager.load(names)["tasks"]
        for name in [task.name for task in find_tasks(args.tasks)]:
            tasks = {k: t for k, t in loaded.items() if f"{k}_".startswith(f"{PREFIX}{name}_")}
            one = partial(measure, name, tasks, model, coder, lm, args)
            rows[name] = done.get({**settings, "task": name}, one)
            print(name, rows[name], file=sys.stderr, flush=True)
    print("| task | questions | acc | ours s | lm-eval s | ratio | floor | largest difference |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['questions']} | {row['acc']:.3f} | {row['ours_s']:.0f} | "
              f"{row['lm_eval_s']:.0f} | {row['ratio']:.2f} | {row['floor']:.2f} | "
              f"{row['worst']:.1e} |")  # fmt: skip
    found = {name: row["ratio"] for name, row in rows.items()}
    found["worst"] = max(row["worst"] for row in rows.values())
    found["greedy_differs"] = sum(row["greedy_differs"] for row in rows.values())
    target = 0.5 if args.num_fewshot else 1.0
    targets = {"boolq": 0.5, "hellaswag": 0.5, "worst": 1e-4, "greedy_differs": 0}
    figures = {name: {"value": float(f"{value:.3g}"), "target": targets.get(name, target),
                      "better": "lower"} for name, value in found.items()}  # fmt: skip
    print(json.dumps({"benchmark": "zero_shot", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
