"""Our scorer of multiple-choice questions against lm-eval's, request by request.

    python benchmarks/zero_shot.py [--quick] [--limit 200] [--num-fewshot 0] [--tasks piqa ...]

Each task is asked in chunks of questions, which both scorers get in turn: ours with what requests
share computed once, lm-eval's HFLM in batches (`--batch-size`, 8). The texts of
all requests have to be equal. Figures, for every task: `TASK`, our time over lm-eval's (CPU time
of the process at one thread, so that a busy machine slows neither): at most half where answers
share a long text, which with examples in front is everywhere, else at most the same; and over all
tasks `worst`, the largest difference of a log-likelihood in nats, and `greedy_differs`, the
requests of which the two disagree on `is_greedy`. Accuracies are ours.

lm-eval itself computes a context once for several answers of one token (BoolQ). The column `floor`
says what is left to win: the time of the blocks' matrix products alone, over every token that the
requests do not share once, in the shapes of our trees, over lm-eval's time. No scorer that
computes those tokens with torch's float32 kernels is below it.

Finished tasks are kept in `--out`, so that an interrupted run goes on. Needs the extra `eval`.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _finished import Finished

from skipless.evaluate.tasks import CORE8, Coder, find_tasks, score_requests
from skipless.evaluate.tasks.asking import ask
from skipless.evaluate.tasks.encoding import Encoded
from skipless.evaluate.tasks.harness import PREFIX, local_tasks, wrap
from skipless.evaluate.tasks.scoring import BATCH_TOKENS, choose_mode
from skipless.evaluate.tasks.trees import grow, plan_trees
from skipless.pretrained import fetch_model


def measure(name: str, task: Any, model: Any, coder: Coder, lm: Any, args: Any) -> dict[str, Any]:
    """Both scorers on one task, chunk by chunk."""
    asked = ask(find_tasks([name])[0], coder, limit=args.limit, num_fewshot=args.num_fewshot)
    task.build_all_requests(limit=args.limit, rank=0, world_size=1)
    by_question: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_question.setdefault(instance.doc_id, []).append(instance)
    began = time.process_time()
    mode, _ = choose_mode(model, asked.encoded)  # once a task, as score_tasks does
    ours_s, theirs_s, floor_s, worst = time.process_time() - began, 0.0, 0.0, 0.0
    requests = greedy_differs = right = 0
    for start in range(0, len(asked.items), args.chunk):
        places = range(start, min(start + args.chunk, len(asked.items)))
        theirs = [sorted(by_question[asked.numbers[i]], key=lambda x: x.idx) for i in places]
        for i, instances in zip(places, theirs, strict=True):
            item = asked.items[i]
            pairs = list(zip(item.contexts, item.continuations, strict=True))
            if pairs != [instance.args for instance in instances]:
                raise SystemExit(f"{name}: the texts of question {i} differ: {pairs}")
            for instance, (context, continuation) in zip(instances, pairs, strict=True):
                instance.arguments = (asked.before[i] + context, continuation)
        began = time.process_time()
        mine = score_requests(model, [asked.encoded[i] for i in places], mode=mode).scores
        between = time.process_time()
        found = lm.loglikelihood([x for instances in theirs for x in instances], disable_tqdm=True)
        theirs_s += time.process_time() - between
        ours_s += between - began
        floor_s += products([r for i in places for r in asked.encoded[i]], model)
        for one, (likelihood, greedy) in zip([s for q in mine for s in q], found, strict=True):
            worst = max(worst, abs(one.log_likelihood - likelihood))
            greedy_differs += one.is_greedy != greedy
            requests += 1
        for i, scores in zip(places, mine, strict=True):
            best = max(range(len(scores)), key=lambda k: scores[k].log_likelihood)
            right += best == asked.items[i].gold
    return {"questions": len(asked.items), "requests": requests, "acc": right / len(asked.items),
            "ours_s": ours_s, "lm_eval_s": theirs_s, "ratio": ours_s / theirs_s,
            "floor": floor_s / theirs_s, "worst": worst,
            "greedy_differs": greedy_differs}  # fmt: skip


def products(requests: list[Encoded], model: Any) -> float:
    """CPU seconds of the matrix products of the model's blocks in passes as `score_requests`'s."""
    body = [x for x in model.get_decoder().modules() if isinstance(x, torch.nn.Linear)]
    seconds = 0.0
    for numbers in plan_trees(requests, BATCH_TOKENS):
        size = len(grow([requests[n] for n in numbers]).ids)
        rows = {width: torch.randn(size, width) for width in {x.in_features for x in body}}
        began = time.process_time()
        with torch.inference_mode():
            for layer in body:
                layer(rows[layer.in_features])
        seconds += time.process_time() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 questions of two tasks")
    parser.add_argument("--model", default="smollm2-135m", help="of `skipless models list`")
    parser.add_argument("--limit", type=int, default=200, help="questions a task")
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
        for key, task in manager.load(names)["tasks"].items():
            name = key.removeprefix(PREFIX)
            one = partial(measure, name, task, model, coder, lm, args)
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
