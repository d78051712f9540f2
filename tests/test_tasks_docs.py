"""The page on adding a task works as written."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from tests.tiny import char_tokenizer, tiny_llama

from stillroom.data import tasks
from stillroom.data.tasks import TaskSpec, load_task
from stillroom.errors import DataError
from stillroom.evaluation.evaluate import evaluate_task
from stillroom.sampling.sampler import HFSampler

PAGE = Path(__file__).resolve().parents[1] / "docs" / "add_a_task.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def times(tmp_path, monkeypatch):
    """The task of the page, from its own code, put where its row points."""
    module = type(sys)("stillroom.data.tasks.times")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(CODE[0], str(PAGE), "exec"), module.__dict__)
    names: dict[str, TaskSpec] = {}
    exec(compile(CODE[1], str(PAGE), "exec"), names)
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "times": names["row"]})
    (tmp_path / "times").mkdir()
    rows = [{"left": i, "right": i + 1} for i in range(5)]
    (tmp_path / "times/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task("times", tmp_path)


def test_the_example_of_the_page_loads_scores_and_evaluates(times) -> None:
    examples = list(times.examples("test"))
    assert [e.prompt for e in examples] == ["0 * 1 =", "1 * 2 =", "2 * 3 =", "3 * 4 =", "4 * 5 ="]
    assert {times.score(e, e.completion or "") for e in examples} == {1.0}
    assert [times.score(examples[2], c) for c in ("so 2*3 is 6", "7", "many")] == [1.0, 0.0, None]
    tokenizer = char_tokenizer()
    sampler = HFSampler(tiny_llama(len(tokenizer)), tokenizer)
    estimates, records = evaluate_task(
        sampler, tokenizer, times, examples, max_completion_length=4, num_samples=2
    )
    assert estimates["accuracy_sampled"].n == 5
    assert len(records) == 15


def test_the_example_of_the_page_refuses_a_bad_row(times, tmp_path) -> None:
    (tmp_path / "times/test.jsonl").write_text('{"left": 1, "right": "two"}\n')
    with pytest.raises(DataError, match=r"times/test.jsonl, line 1: found right = 'two' \(str\)"):
        list(times.examples("test"))


def test_the_page_is_one_page_and_ends_in_a_checklist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert text.rstrip().splitlines()[-1].startswith("- [ ] ")


@pytest.mark.parametrize(
    "module",
    [
        "stats",
        "data.overlap",
        "data.tasks.answers",
        "data.tasks.maths",
        "data.tasks.multiple_choice",
        "evaluation.evaluate",
    ],
)
def test_examples_in_docstrings_hold(module) -> None:
    result = doctest.testmod(importlib.import_module(f"stillroom.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
