"""Scores of what a model writes: on a small model that was taught one sentence, and on random ones."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import char_tokenizer, tiny_llama

from stillroom import stats
from stillroom.data.asking import select_examples
from stillroom.data.tasks import load_task
from stillroom.errors import ConfigError, DataError, MissingExtraError
from stillroom.evaluation.evaluate import cut_at_stop, evaluate_task
from stillroom.pocket.chains import Chains
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Example, Prompt, Rollout

TOKENIZER = char_tokenizer()
SENTENCE = "Q: x = 4 #### 4 Question: 9 #### 9"
"""What the parrot says to everything: an answer, and then a question of its own."""


@pytest.fixture(scope="module")
def parrot() -> HFSampler:
    """A model trained until it says SENTENCE whatever it is asked."""
    model = tiny_llama(len(TOKENIZER), hidden=32, scale=0.1).train()
    said = TOKENIZER(SENTENCE, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id]
    rows = [TOKENIZER(f"{n}?\n", add_special_tokens=False)["input_ids"] + said for n in (1, 2, 3)]
    ids = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return HFSampler(model.eval(), TOKENIZER)


@pytest.fixture
def problems(tmp_path: Path):
    """GSM8K with three problems, two of which have the answer that the parrot gives."""
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"{n}?", "answer": f"so\n#### {a}"} for n, a in ((1, 4), (2, 4), (3, 5))]
    (tmp_path / "gsm8k/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task("gsm8k", tmp_path)


class Vowels:
    """A task of a user's own: begin with a vowel. Completions that begin with no letter are unparsed."""

    name = "vowels"
    version = "1"

    def examples(self, split: str):
        return (Example(f"{split}/{i}", f"say {i}: ", "vowel") for i in range(30))

    def score(self, example: Example, completion: str) -> float | None:
        if not completion[:1].isalpha():
            return None
        return float(completion[0].lower() in "aeiou")


def run(sampler: HFSampler, task=None, **settings):
    task = task or Vowels()
    examples = settings.pop("examples", None) or list(task.examples("test"))
    settings = {"max_completion_length": 40, "num_samples": 3, "seed": 5, **settings}
    return evaluate_task(sampler, sampler.tokenizer, task, examples, **settings)


def random_sampler(**settings) -> HFSampler:
    return HFSampler(tiny_llama(len(TOKENIZER), scale=0.2), TOKENIZER, **settings)


# --- report 83 ----------------------------------------------------------------------------------------


def test_report_83_a_stop_text_means_the_same_as_a_list_of_one_and_letters_do_not_cut(
    parrot, problems
) -> None:
    as_text, records = run(parrot, problems, stop="Question", num_samples=0)
    as_list, _ = run(parrot, problems, stop=["Question"], num_samples=0)
    assert as_text == as_list
    assert {r["completion"] for r in records} == {"Q: x = 4 #### 4 "}
    assert {r["stopped_by"] for r in records} == {"Question"}
    assert as_text["accuracy_greedy"].value == pytest.approx(2 / 3)
    assert as_text["unparsed_greedy"].value == 0
    # '=' as a stop text does what was asked, and the record shows why the score is gone.
    cut, records = run(parrot, problems, stop="=", num_samples=0)
    assert cut["unparsed_greedy"].value == 1
    assert records[0]["completion"] == "Q: x "


def test_report_83_the_prompt_as_sent_is_stored_with_the_template_applied(parrot, problems) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    chatty = HFSampler(parrot.model, tokenizer)
    _, with_template = run(chatty, problems, num_samples=1)
    _, without = run(chatty, problems, num_samples=1, use_chat_template=False)
    assert {r["prompt"] for r in with_template} == {f"<user>{n}?" for n in (1, 2, 3)}
    assert {r["prompt"] for r in without} == {f"{n}?\n" for n in (1, 2, 3)}


@pytest.mark.parametrize(
    ("stop", "text", "which"),
    [
        ((), "a = b; c", None),
        ("=", "a ", "="),
        (["c", ";"], "a = b", ";"),
        (("zzz",), "a = b; c", None),
        ("zzz", "a = b; c", None),
    ],
)
def test_a_text_is_cut_at_the_first_stop_text_in_it(stop, text, which) -> None:
    assert cut_at_stop("a = b; c", stop) == (text, which)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_text_is_refused(stop) -> None:
    with pytest.raises(ConfigError, match="stop text is empty"):
        cut_at_stop("abc", stop)


# --- figures ------------------------------------------------------------------------------------------


def test_every_figure_is_that_of_the_records() -> None:
    estimates, records = run(random_sampler(), num_samples=4, max_completion_length=6)
    greedy = [r for r in records if r["mode"] == "greedy"]
    sampled = [r for r in records if r["mode"] == "sampled"]
    assert (len(greedy), len(sampled)) == (30, 120)
    by_item = [[r for r in sampled if r["example_id"] == f"test/{i}"] for i in range(30)]
    assert {len(group) for group in by_item} == {4}
    assert [r["generation"] for r in by_item[0]] == [0, 1, 2, 3]

    for name, column in (("accuracy", "score"), ("truncated", "truncated")):
        assert estimates[f"{name}_greedy"].as_dict() | {"unit": ""} == (
            stats.wilson(int(sum(r[column] for r in greedy)), 30, unit="").as_dict()
        )
        expected = stats.clustered_share([[float(r[column]) for r in group] for group in by_item])
        assert estimates[f"{name}_sampled"].as_dict() | {"unit": "share"} == expected.as_dict()
    assert estimates["unparsed_sampled"].value == pytest.approx(np.mean([not r["parsed"] for r in sampled]))
    assert estimates["length_tokens_sampled"].value == pytest.approx(
        np.mean([r["length_tokens"] for r in sampled])
    )
    assert estimates["length_tokens_greedy"].value == pytest.approx(
        np.mean([r["length_tokens"] for r in greedy])
    )
    # The figures could have failed: no share is 0 or 1, and the completions were judged by their own text.
    assert 0 < estimates["unparsed_sampled"].value < 1
    assert 0 < estimates["accuracy_sampled"].value < 1
    for record in records:
        assert record["parsed"] == record["completion"][:1].isalpha()
        assert record["score"] == float(record["completion"][:1].lower() in tuple("aeiou"))
    # The sampler, asked again, says which of them ran into the limit.
    prompts = [
        Prompt(f"test/{i}", tuple(TOKENIZER(f"say {i}: ", add_special_tokens=False)["input_ids"]))
        for i in range(30)
    ]
    again = random_sampler().sample(
        prompts, num_generations=4, max_completion_length=6, temperature=1.0, seed=5
    )
    assert [r["truncated"] for r in sampled] == [rollout.stop_reason == "length" for rollout in again]


def test_the_example_is_the_unit_of_the_sampled_interval() -> None:
    few, _ = run(random_sampler(), num_samples=2, max_completion_length=2)
    many, _ = run(random_sampler(), num_samples=40, max_completion_length=2)
    assert (few["accuracy_sampled"].n, many["accuracy_sampled"].n) == (30, 30)
    naive = stats.wilson(round(many["accuracy_sampled"].value * 1200), 1200)
    assert few["accuracy_sampled"].high - few["accuracy_sampled"].low > naive.high - naive.low


def test_unparsed_completions_count_as_zero_and_are_stated_apart(parrot) -> None:
    class Deaf(Vowels):
        def score(self, example: Example, completion: str) -> float | None:
            return None if example.id.endswith(("0", "1")) else 1.0

    estimates, records = run(parrot, Deaf(), num_samples=0)
    assert estimates["unparsed_greedy"].value == pytest.approx(6 / 30)
    assert estimates["accuracy_greedy"].value == pytest.approx(24 / 30)
    assert sum(not r["parsed"] for r in records) == 6
    assert {r["score"] for r in records if not r["parsed"]} == {0.0}


def test_completions_that_run_into_the_limit_are_counted_unless_they_had_stopped(parrot, problems) -> None:
    whole, _ = run(parrot, problems, num_samples=0)
    cut, _ = run(parrot, problems, num_samples=0, max_completion_length=20)
    assert (whole["truncated_greedy"].value, cut["truncated_greedy"].value) == (0, 1)
    assert cut["length_tokens_greedy"].value == 20
    assert whole["length_tokens_greedy"].value == len(SENTENCE) + 1  # and the end token
    stopped, _ = run(parrot, problems, num_samples=0, max_completion_length=20, stop="Qu")
    assert stopped["truncated_greedy"].value == 0


def test_graded_scores_are_taken_as_they_are(parrot) -> None:
    class Half(Vowels):
        def score(self, example: Example, completion: str) -> float | None:
            return 0.5 if example.id.endswith("0") else 0.25

    estimate = run(parrot, Half(), num_samples=0)[0]["accuracy_greedy"]
    assert estimate.value == pytest.approx((3 * 0.5 + 27 * 0.25) / 30)
    assert estimate.method.startswith("wilson at effective n")


def test_report_84_evaluating_twice_gives_the_same_and_leaves_the_training_state_alone() -> None:
    sampler = random_sampler()
    sampler.model.train()
    states = torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate()
    first, second = run(sampler), run(sampler)
    assert first == second
    assert sampler.model.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert run(sampler, seed=6)[0] != first[0]


def test_figures_do_not_depend_on_the_batch() -> None:
    examples = list(Vowels().examples("test"))[:8]
    alone, together = (
        run(random_sampler(batch_size=size), examples=examples, max_completion_length=5) for size in (1, 64)
    )
    assert alone == together


def test_report_79_the_output_carries_the_overlap_with_the_training_prompts(parrot, problems) -> None:
    seen = ["1?\n", [{"role": "user", "content": " 2?"}], "an unrelated prompt"]
    estimates, _ = run(parrot, problems, num_samples=0, train_prompts=seen)
    shares = {name: e.value for name, e in estimates.items() if name.startswith("overlap")}
    assert shares == pytest.approx(
        # '#?' with masked numbers is all three problems
        {"overlap_exact": 1 / 3, "overlap_normalised": 2 / 3, "overlap_numbers_masked": 1}
    )
    assert not any(name.startswith("overlap") for name in run(parrot, problems, num_samples=0)[0])


def test_a_pocket_task_is_evaluated_like_any_other() -> None:
    task = Chains()
    examples = select_examples(task, "heldout", 8, seed=1)
    estimates, records = run(random_sampler(), task, examples=examples, max_completion_length=6)
    assert len(records) == 8 * (1 + 3)
    assert 0 <= estimates["accuracy_sampled"].low <= estimates["accuracy_sampled"].high <= 1
    json.dumps(records, allow_nan=False)


# --- which examples -----------------------------------------------------------------------------------


def test_a_limited_choice_is_keyed_by_the_seed_and_spread_over_the_file(shared) -> None:
    task = load_task("mmlu_subset", shared / "data")  # sorted by subject
    chosen = select_examples(task, "test", 200, seed=3)
    assert chosen == select_examples(task, "test", 200, seed=3)
    assert {e.id for e in chosen} != {e.id for e in select_examples(task, "test", 200, seed=4)}
    assert len({e.id for e in chosen}) == 200
    assert len({e.meta["subject"] for e in chosen}) > 40
    assert len(select_examples(task, "test")) == 9143


def test_more_examples_than_there_are_is_an_error_and_not_fewer() -> None:
    with pytest.raises(ConfigError, match="31 examples are asked for, and split 'test' of 'vowels' holds 30"):
        select_examples(Vowels(), "test", 31)


# --- bad input, before anything is sampled ------------------------------------------------------------


class Untouched:
    """A sampler that must not be reached."""

    tokenizer = TOKENIZER

    def sample(self, prompts: list[Prompt], **settings) -> list[Rollout]:
        raise AssertionError("something was sampled before the error")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"examples": [Example("a", "p", "x")]}, "at least two"),
        ({"examples": [Example("a", "p", "x"), Example("a", "q", "y")]}, "same id"),
        ({"num_samples": -1}, "num_samples = -1"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"stop": ["x", ""]}, "stop text is empty"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_sampling(settings, says) -> None:
    with pytest.raises((DataError, ConfigError), match=says):
        run(Untouched(), **settings)  # type: ignore[arg-type]


def test_a_task_without_verifier_fails_before_sampling(tmp_path) -> None:
    task = load_task("vicuna", tmp_path)
    with pytest.raises(ConfigError, match="no verifier"):
        run(Untouched(), task, examples=[Example("a", "p", ""), Example("b", "q", "")])  # type: ignore[arg-type]


def test_a_missing_extra_is_noticed_before_sampling(problems, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match="maths"):
        run(Untouched(), problems)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_a_score_outside_zero_and_one_is_refused(parrot, bad) -> None:
    class Wrong(Vowels):
        def score(self, example: Example, completion: str) -> float | None:
            return bad if completion else 0.0

    with pytest.raises(DataError, match=r"score lies in \[0, 1\]"):
        run(parrot, Wrong(), num_samples=0)
