"""The task table, the strict readers, and the prompts, completions and scores of each data set."""

from __future__ import annotations

import itertools
import json
from importlib import import_module
from pathlib import Path

import pytest

from stillroom.data.tasks import TASKS, load_task
from stillroom.data.tasks.multiple_choice import chosen_letter
from stillroom.errors import ConfigError, DataError
from stillroom.types import Example, Task

FROM_FILES = [name for name, spec in TASKS.items() if spec.files]

ROW = {"question": "Tom has 3 apples and buys 4.", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
"""A GSM8K row."""


def write(folder: Path, name: str, content: bytes | str | list) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def gsm8k(folder: Path, content: bytes | str | list) -> list[Example]:
    return list(load_task("gsm8k", write(folder, "gsm8k/test.jsonl", content)).examples("test"))


# --- the table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_row_of_the_table_points_at_something_that_exists(name):
    spec = TASKS[name]
    module, _, attribute = spec.factory.partition(":")
    assert callable(getattr(import_module(module), attribute))
    assert spec.licence
    assert spec.summary
    assert not spec.files or spec.test_split in spec.files


def test_an_unknown_task_gets_near_matches_and_the_list():
    with pytest.raises(ConfigError, match=r"unknown task 'gms8k'. Did you mean 'gsm8k'.*Known: .*wikitext2"):
        load_task("gms8k")


def test_a_missing_data_folder_is_answered_with_the_file_and_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"gsm8k/train.jsonl and gsm8k/test.jsonl.*--data-dir"):
        load_task("gsm8k")
    with pytest.raises(DataError, match=r"nowhere is not a folder.*svamp/SVAMP.json"):
        load_task("svamp", tmp_path / "nowhere")


def test_a_missing_file_is_reported_before_the_first_example_is_asked_for(tmp_path):
    task = load_task("gsm8k", tmp_path)
    with pytest.raises(DataError, match=r"gsm8k/test.jsonl.*does not exist.*--data-dir"):
        task.examples("test")


def test_an_unknown_split_names_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown split of gsm8k 'tset'. Did you mean 'test'.*train"):
        load_task("gsm8k", tmp_path).examples("tset")


# --- strict reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            json.dumps(ROW).encode() + b'\n{"question": "caf\xe9"}\n',
            r"line 2: found the byte 0xe9.*expected UTF-8",
        ),
        ('{"question": "a", \n', r"line 1: found .*expected JSON"),
        ('{"question": NaN}\n', r"line 1: found NaN"),
        ("[1, 2]\n", r"line 1: found list \[1, 2\], expected a JSON object"),
        (
            [ROW, {"question": "a", "solution": "b"}],
            r"line 2: found the columns question, solution.*'answer' \(str\)",
        ),
        ([ROW | {"answer": 7}], r"line 1: found answer = 7 \(int\), expected 'answer' to be str"),
        ([ROW | {"answer": "seven"}], r"line 1: found answer = 'seven'.*'#### NUMBER'"),
        ([ROW | {"answer": "3 + 4 = 7\n#### "}], r"'#### NUMBER'"),
        (json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n", r"line 2: found an empty line"),
        ("", r"holds no rows"),
        ("\n", r"holds no rows"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_found_and_expected(tmp_path, content, says):
    with pytest.raises(DataError, match=rf"(?s)gsm8k/test.jsonl.*{says}"):
        gsm8k(tmp_path, content)


def test_empty_lines_at_the_end_and_separators_inside_a_text_are_no_rows(tmp_path):
    row = json.dumps(
        ROW | {"question": "one\u2028two"}, ensure_ascii=False
    )  # U+2028 ends a line for str.splitlines
    examples = gsm8k(tmp_path, f"{row}\r\n{row}\n\n\n")
    assert [e.prompt for e in examples] == ["one\u2028two\n"] * 2


def test_duplicate_ids_are_refused_and_both_rows_named(tmp_path):
    item = {"ID": "chal-1", "Body": "a", "Question": "b", "Equation": "c", "Answer": 1.0, "Type": "d"}
    task = load_task(
        "svamp", write(tmp_path, "svamp/SVAMP.json", json.dumps([item, item | {"ID": "x"}, item]))
    )
    with pytest.raises(DataError, match=r"item 3: found the id 'chal-1' again \(first at .*item 1\)"):
        list(task.examples("test"))


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"a": 1}', "found dict, expected a JSON list"), ("[", "expected JSON"), ("[]", "no rows")],
)
def test_a_json_list_is_read_as_strictly(tmp_path, content, says):
    with pytest.raises(DataError, match=says):
        list(load_task("svamp", write(tmp_path, "svamp/SVAMP.json", content)).examples("test"))


def test_a_bool_is_no_number(tmp_path):
    row = {"subject": "s", "question": "q", "choices": ["a", "b"], "answer": True}
    with pytest.raises(DataError, match=r"answer = True \(bool\)"):
        list(load_task("mmlu_subset", write(tmp_path, "mmlu/test.jsonl", [row])).examples("test"))


def test_rows_can_come_from_a_hugging_face_dataset(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = write(tmp_path / "published", "test.jsonl", [ROW, ROW | {"question": "second"}])
    examples = list(load_task("gsm8k", f"hf:{folder}").examples("test"))
    assert [e.prompt for e in examples] == [ROW["question"] + "\n", "second\n"]
    with pytest.raises(DataError, match=r"split 'train' of the Hugging Face dataset"):
        load_task("gsm8k", f"hf:{folder}").examples("train")


# --- word problems ------------------------------------------------------------------------------------


def test_gsm8k_keeps_the_solution_and_drops_the_calculator_marks(tmp_path):
    [example] = gsm8k(tmp_path, [ROW | {"answer": "a <<1*2=2>>2 b <<2,000+1=2001>>\n#### 2,001"}])
    assert (example.id, example.answer) == ("gsm8k/test/0", "2001")
    assert example.completion == "a 2 b \n#### 2,001"


def test_svamp_joins_body_and_question_with_one_full_stop(tmp_path):
    item = {"ID": "1", "Question": "How many?", "Equation": "e", "Answer": 2.5, "Type": "t"}
    items = [item | {"Body": "Ann has some"}, item | {"Body": "Ann has some. ", "ID": "2", "Answer": 51.0}]
    first, second = load_task("svamp", write(tmp_path, "svamp/SVAMP.json", json.dumps(items))).examples(
        "test"
    )
    assert first.prompt == second.prompt == "Ann has some. How many?\n"
    assert (first.answer, second.answer) == ("2.5", "51")
    assert first.completion is None


# --- multiple choice ----------------------------------------------------------------------------------

ARC = {"question": "Why?", "choices": {"label": ["1", "2", "3"], "text": ["x", "y y", "z"]}, "answerKey": "2"}


def arc(folder: Path, row: dict) -> Example:
    [example] = load_task("arc_easy", write(folder, "arc_easy/test.jsonl", [row])).examples("test")
    return example


def test_a_multiple_choice_prompt_ends_before_the_space_and_the_completion_begins_with_it(tmp_path):
    example = arc(tmp_path, ARC)
    assert example.prompt == "Question: Why?\nA. x\nB. y y\nC. z\nAnswer:"
    assert (example.answer, example.completion, example.options) == ("B", " B", ("x", "y y", "z"))
    assert example.meta["cloze"] == "Question: Why?\nAnswer:"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answerKey": "D"}, r"answerKey = 'D', expected one of the labels"),
        ({"choices": {"label": ["A"], "text": ["x"]}, "answerKey": "A"}, "1 options"),
        ({"choices": {"label": ["A", "B"], "text": ["x", " "]}, "answerKey": "A"}, "none of them empty"),
        ({"choices": {"label": ["A", "B"], "text": ["x"]}, "answerKey": "A"}, "one text for each label"),
        ({"choices": ["x", "y"]}, r"choices = \['x', 'y'\] \(list\), expected 'choices' to be dict"),
    ],
)
def test_a_multiple_choice_row_that_contradicts_itself_is_refused(tmp_path, change, says):
    with pytest.raises(DataError, match=says):
        arc(tmp_path, ARC | change)


def test_the_nested_and_the_flat_form_of_commonsenseqa_give_the_same_example(tmp_path):
    choices = [{"label": "A", "text": "bank"}, {"label": "B", "text": "mall"}]
    nested = {
        "id": "1",
        "answerKey": "B",
        "question": {"stem": "Where?", "choices": choices, "question_concept": "c"},
    }
    flat = {
        "id": "1",
        "answerKey": "B",
        "question": "Where?",
        "choices": {"label": ["A", "B"], "text": ["bank", "mall"]},
    }
    read = [
        list(
            load_task("commonsenseqa", write(tmp_path / str(i), "commonsenseqa/train.jsonl", [row])).examples(
                "train"
            )
        )
        for i, row in enumerate((nested, flat))
    ]
    assert read[0] == read[1]


def test_aqua_options_lose_their_letters_and_must_have_had_them(tmp_path):
    row = {"question": "q", "options": ["A)5", "B) 6"], "rationale": "r", "correct": "B"}
    folder = write(tmp_path, "aqua_rat/test.jsonl", [row])
    [example] = load_task("aqua_rat", folder).examples("test")
    assert (example.options, example.answer, example.meta["rationale"]) == (("5", "6"), "B", "r")
    write(tmp_path, "aqua_rat/test.jsonl", [row | {"options": ["A)5", "6"]}])
    with pytest.raises(DataError, match="option '6'"):
        list(load_task("aqua_rat", folder).examples("test"))


def test_a_letter_is_a_letter_even_where_the_options_are_letters():
    assert chosen_letter(" A", ["B", "A"]) == "A"


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        (" B", "B"),
        ("B.", "B"),
        ("B. yell at", "B"),
        ("(b)", "B"),
        ("b", "B"),
        ("**C**", "C"),
        ("[C]", "C"),
        ("C) the desert\nbecause it is dry", "C"),
        ("B because people shout", "B"),
        ("A because of that", "A"),
        ("A", "A"),
        ("A\n", "A"),
        ("A ignore", "A"),
        ("yell at", "B"),
        ("Yell at.", "B"),
        ("The answer is C", "C"),
        ("The answer is (C).", "C"),
        ("the correct answer is: **C**", "C"),
        ("Answer: A", "A"),
        ("First I thought the answer is A. No, the answer is B.", "B"),
        ("I would choose option C here", "C"),
        ("It must be the desert (C), clearly", "C"),
        # none of these says which:
        ("A dog would bark", None),
        ("The answer is a dog", None),
        ("Bananas are yellow", None),
        ("D", None),
        ("Both (A) and (B) fit", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_chosen_letter_is_found_or_said_to_be_missing(completion, letter):
    assert chosen_letter(completion, ["ignore", "yell at", "the desert"]) == letter


def test_a_multiple_choice_score_is_right_wrong_or_unparsed(tmp_path):
    example = arc(tmp_path, ARC)
    task = load_task("arc_easy", tmp_path)
    assert [task.score(example, c) for c in (" B", "y y", "C", "E", "no idea")] == [1.0, 1.0, 0.0, None, None]


# --- without a verifier -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FROM_FILES if TASKS[n].family in ("open-ended", "text")])
def test_asking_a_task_without_verifier_for_a_score_is_a_clear_error(name, tmp_path):
    with pytest.raises(ConfigError, match=rf"{name}.*likelihood"):
        load_task(name, tmp_path).score(Example("x", "prompt", ""), "completion")


def test_pieces_of_a_text_join_to_the_text(tmp_path):
    speeches = "".join(f"KING {i}:\n{'word ' * (i % 90)}\n\n" for i in range(400))
    folder = write(tmp_path, "tinyshakespeare/input.txt", speeches)
    task = load_task("tinyshakespeare", folder)
    pieces = {split: [e.completion or "" for e in task.examples(split)] for split in ("train", "validation")}
    assert "".join(pieces["train"] + pieces["validation"]) == speeches
    assert min(map(len, pieces["validation"])) > 0
    assert len("".join(pieces["validation"])) / len(speeches) == pytest.approx(0.1, abs=0.02)


def test_line_ends_of_a_text_are_not_translated(tmp_path):
    text = " \r\n = One = \r\n body\r\n"
    [example] = load_task("wikitext2", write(tmp_path, "wikitext2/test.txt", text)).examples("test")
    assert example.completion == text


def test_a_text_without_a_single_letter_is_refused(tmp_path):
    with pytest.raises(DataError, match="no text"):
        load_task("wikitext2", write(tmp_path, "wikitext2/test.txt", " \n")).examples("test")


# --- the real files -----------------------------------------------------------------------------------

ROWS = {
    ("gsm8k", "train"): 7473,
    ("gsm8k", "test"): 1319,
    ("svamp", "test"): 1000,
    ("aqua_rat", "validation"): 254,
    ("aqua_rat", "test"): 254,
    ("commonsenseqa", "train"): 9741,
    ("commonsenseqa", "validation"): 1221,
    ("arc_easy", "train"): 2251,
    ("arc_easy", "test"): 2376,
    ("arc_challenge", "train"): 1119,
    ("arc_challenge", "validation"): 294,
    ("arc_challenge", "test"): 1172,
    ("openbookqa", "train"): 4957,
    ("openbookqa", "test"): 500,
    ("mmlu_subset", "test"): 9143,
    ("ifeval", "test"): 386,
    ("dolly", "train"): 1000,
    ("self_instruct", "train"): 175,
    ("self_instruct", "test"): 252,
    ("vicuna", "test"): 80,
    ("wikitext2", "validation"): 60,
    ("wikitext2", "test"): 62,
    ("tinyshakespeare", "train"): 446,
    ("tinyshakespeare", "validation"): 52,
}


def test_the_row_counts_below_cover_every_split_of_every_file_task():
    assert set(ROWS) == {(name, split) for name in FROM_FILES for split in TASKS[name].files}


@pytest.mark.parametrize(("name", "split"), ROWS)
def test_a_published_file_has_its_rows_and_its_gold_completions_score_one(shared, name, split):
    task = load_task(name, shared / "data")
    assert isinstance(task, Task)
    examples = list(task.examples(split))
    assert len(examples) == ROWS[name, split]
    assert len({e.id for e in examples}) == len(examples)
    assert task.name == name
    if TASKS[name].family == "multiple choice":
        assert {task.score(e, e.completion or "") for e in examples} == {1.0}
        wrong = [task.score(e, " A" if e.answer != "A" else " B") for e in examples]
        assert set(wrong) == {0.0}
    if TASKS[name].family == "maths":
        assert not any("<<" in (e.completion or "") for e in examples)
        for e in examples[:300]:
            assert task.score(e, e.completion or f"It is {e.answer}.") == 1.0


def test_texts_of_the_published_files_join_to_the_files(shared):
    for name, file in (("wikitext2", "wikitext2/test.txt"), ("wikitext2", "wikitext2/valid.txt")):
        split = "test" if "test" in file else "validation"
        text = "".join(e.completion or "" for e in load_task(name, shared / "data").examples(split))
        assert text.encode() == (shared / "data" / file).read_bytes()
    task = load_task("tinyshakespeare", shared / "data")
    text = "".join(e.completion or "" for split in ("train", "validation") for e in task.examples(split))
    assert text.encode() == (shared / "data" / "tinyshakespeare/input.txt").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_solution_scores_one_on_its_own_problem_and_not_on_the_next(shared, split):
    task = load_task("gsm8k", shared / "data")
    examples = list(task.examples(split))
    assert {task.score(e, e.completion or "") for e in examples} == {1.0}
    # The answer without its marker, at the end of a text, is found too.
    assert {task.score(e, (e.completion or "").replace("####", "So the answer is")) for e in examples} == {
        1.0
    }
    moved = [task.score(e, other.completion or "") for e, other in itertools.pairwise(examples)]
    same = sum(e.answer == other.answer for e, other in itertools.pairwise(examples))
    assert sum(moved) == same < 0.05 * len(examples)
