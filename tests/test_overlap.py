"""Train/evaluation overlap: the counts of field report 79, a naive oracle, and that it is linear."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stillroom.data.overlap import LEVELS, overlap, prompt_text
from stillroom.data.tasks import load_task
from stillroom.errors import DataError

ITEM = "Tom has 3 apples and buys 4 more; how many?"
TRAIN = [
    ITEM,
    "  tom has 3 APPLES and\nbuys 4 more; how many? ",
    "Tom has 12 apples and buys 1,050.5 more; how many?",
    "Ann has 3 pears and eats 1; how many are left?",
]


def test_report_79_copies_variants_and_changed_numbers_are_counted_and_the_unrelated_row_is_not():
    report = overlap(TRAIN, [ITEM])
    assert report.train_rows == {"exact": 1, "normalised": 2, "numbers_masked": 3}
    assert report.eval_items == {"exact": 1, "normalised": 1, "numbers_masked": 1}
    assert report.evidence == ((0, 0), (0, 1), (0, 2))
    assert (report.num_train, report.num_eval) == (4, 1)


def test_report_79_the_figures_are_shares_of_the_evaluation_set():
    report = overlap(
        TRAIN[2:], [ITEM, "an unrelated question", "Ann HAS 3 pears and eats 1; how many are left?"]
    )
    estimates = report.estimates()
    assert {name: e.value for name, e in estimates.items()} == pytest.approx(
        {"overlap_exact": 0, "overlap_normalised": 1 / 3, "overlap_numbers_masked": 2 / 3}
    )
    assert {(e.n, e.method) for e in estimates.values()} == {(3, "exact count")}


def test_counts_equal_those_of_a_comparison_of_every_pair():
    rng = random.Random(0)
    words = ["Tom", "tom", "3", "4", "has", " has", "1,000"]
    train, evaluation = ([" ".join(rng.choices(words, k=3)) for _ in range(n)] for n in (300, 80))
    report = overlap(iter(train), evaluation)
    for level, reduce in LEVELS.items():
        pairs = {
            (i, j) for i, t in enumerate(train) for j, e in enumerate(evaluation) if reduce(t) == reduce(e)
        }
        assert report.train_rows[level] == len({i for i, _ in pairs})
        assert report.eval_items[level] == len({j for _, j in pairs})
    assert 0 < report.train_rows["exact"] < report.train_rows["numbers_masked"] < len(train)


def test_a_looser_level_never_finds_less(shared):
    task = load_task("gsm8k", shared / "data")
    prompts = {split: [prompt_text(e.prompt) for e in task.examples(split)] for split in ("train", "test")}
    report = overlap(prompts["train"], prompts["test"])
    assert (
        report.eval_items["exact"] <= report.eval_items["normalised"] <= report.eval_items["numbers_masked"]
    )
    assert report.eval_items["exact"] == 0
    # A planted copy with other numbers is found among 7,473 rows.
    planted = prompts["test"][7].replace("2", "917")
    assert planted != prompts["test"][7]
    more = overlap([*prompts["train"], planted], prompts["test"])
    assert more.train_rows["numbers_masked"] == report.train_rows["numbers_masked"] + 1
    assert (7, 7473) in more.evidence


def test_every_text_is_read_once_at_each_level_so_that_time_is_linear(monkeypatch):
    calls: Counter[str] = Counter()

    def counted(level: str, reduce):
        def count(text: str) -> str:
            calls[level] += 1
            return reduce(text)

        return count

    monkeypatch.setattr("stillroom.data.overlap.LEVELS", {k: counted(k, f) for k, f in LEVELS.items()})
    overlap((f"question {i}" for i in range(500)), [f"other {i}" for i in range(200)])
    assert calls == dict.fromkeys(LEVELS, 700)


def test_messages_are_compared_by_their_contents():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ITEM}]
    assert prompt_text(messages) == f"Be brief.\n{ITEM}"
    assert prompt_text(ITEM) == ITEM


def test_an_empty_evaluation_set_is_refused_and_an_empty_training_set_overlaps_nothing():
    with pytest.raises(DataError, match="no evaluation texts"):
        overlap(TRAIN, [])
    assert set(overlap([], [ITEM]).eval_items.values()) == {0}
