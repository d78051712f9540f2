"""IFEval's instructions: for each, a text that follows it and one that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stillroom.data.tasks import load_task
from stillroom.data.tasks.ifeval import CHECKS
from stillroom.errors import DataError
from stillroom.types import Example

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("punctuation:no_comma", {}, "no; commas here", "one, comma"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "it's me", "two words"),
    (
        "length_constraints:number_words",
        {"relation": "less than", "num_words": 3},
        "two words",
        "now three words",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "*** one *** two ***", "one *** *** two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Summary"},
        "one\n\n'summary, it is",
        "one\n\nthe summary",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "send"},
        "Send it\n\nnow",
        "send it now",
    ),
    ("keywords:existence", {"keywords": ["mom", "mother"]}, "My MOM is a grandmother", "my mom"),
    (
        "keywords:frequency",
        {"relation": "at least", "keyword": "war", "frequency": 2},
        "War and warfare",
        "war",
    ),
    (
        "keywords:frequency",
        {"relation": "less than", "keyword": "war", "frequency": 2},
        "one war",
        "war, war",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "ride"]}, "a candle, a bride", "Can you"),
    ("keywords:letter_frequency", {"let_relation": "at least", "letter": "Q", "let_frequency": 2}, "qQ", "q"),
    (
        "keywords:letter_frequency",
        {"let_relation": "less than", "letter": "!", "let_frequency": 1},
        "no",
        "no!",
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write it."}, " write IT. Done", "Sure: write it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one ****** one"),
    ("combination:two_responses", {}, "****** one ****** two ******", "one ****** ****** two"),
    ("startend:quotation", {}, ' "quoted" ', '"half quoted'),
    ("startend:quotation", {}, '""', '"'),
    ("startend:end_checker", {"end_phrase": "Peace!"}, 'Done. PEACE!"', "Peace! And more"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] and [a b]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\np. s. more", "P.S more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye P.P.S: more", "Bye P.S. more"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n  - two", "* one\n* two\n- three"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* one\n** two", "one"),
    ("detectable_format:title", {}, "<<Song of joy>>\nla", "<< >>"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION2 b",
        "Section 1 a Section 2 b",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "my answer is yes."),
]


def example(*instructions: tuple[str, dict[str, Any]]) -> Example:
    meta = {"instructions": [i for i, _ in instructions], "arguments": [a for _, a in instructions]}
    return Example("x", "prompt", "", meta=meta)


@pytest.fixture(scope="module")
def ifeval(tmp_path_factory):
    return load_task("ifeval", tmp_path_factory.mktemp("data"))


def test_every_instruction_that_is_checked_has_a_case():
    assert {name for name, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize(("name", "arguments", "follows", "breaks"), CASES)
def test_an_instruction_is_followed_or_broken(ifeval, name, arguments, follows, breaks):
    assert ifeval.score(example((name, arguments)), follows) == 1.0
    assert ifeval.score(example((name, arguments)), breaks) == 0.0


def test_all_instructions_of_a_prompt_must_be_followed_and_an_empty_completion_follows_none(ifeval):
    both = example(("punctuation:no_comma", {}), ("startend:quotation", {}))
    assert [ifeval.score(both, text) for text in ('"a b"', '"a, b"', "a b", " ")] == [1.0, 0.0, 0.0, 0.0]
    assert ifeval.score(example(("punctuation:no_comma", {})), "") == 0.0


def test_prompts_with_unsupported_instructions_are_left_out_and_counted(tmp_path, caplog):
    rows = [
        {"key": 1, "prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {
            "key": 2,
            "prompt": "b",
            "instruction_id_list": ["language:response_language"],
            "kwargs": [{"language": "kn"}],
        },
    ]
    (tmp_path / "ifeval").mkdir()
    (tmp_path / "ifeval/input_data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    task = load_task("ifeval", tmp_path)
    assert [e.id for e in task.examples("test")] == ["ifeval/1"]
    assert "1 of 2 prompts are kept" in caplog.text
    assert task.excluded("test") == {"prompts": 1, "language:response_language": 1}


def test_as_many_arguments_as_instructions_are_required(tmp_path):
    (tmp_path / "ifeval").mkdir()
    row = {"key": 1, "prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []}
    (tmp_path / "ifeval/input_data.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="1 instructions with 0 kwargs"):
        list(load_task("ifeval", tmp_path).examples("test"))


def test_386_of_the_540_published_prompts_remain_and_each_can_be_scored(shared):
    task = load_task("ifeval", shared / "data")
    examples = list(task.examples("test"))
    excluded = task.excluded("test")
    assert (len(examples), excluded.pop("prompts")) == (386, 154)
    assert set(excluded) == {
        "change_case:capital_word_frequency",
        "change_case:english_capital",
        "change_case:english_lowercase",
        "language:response_language",
        "length_constraints:number_sentences",
    }
    assert {task.score(e, "A plain sentence.") for e in examples} == {0.0, 1.0}
