"""The pocket world's tasks: their data are right, their splits apart, their verifiers exact."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest

from stillroom.errors import ConfigError
from stillroom.pocket import chains
from stillroom.pocket.chains import Chains, gold, group_order, is_faithful, style_of
from stillroom.pocket.facts import TEMPLATES, Facts, in_gold, one_hop, pairs, two_hop
from stillroom.pocket.strings import HELD_OUT_PAIRS, PAIRS, Strings, word_held_out
from stillroom.types import Task

TASKS = [Chains(), Facts(), Strings()]


def _closure(generators: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Every element of a group, by multiplying until nothing new appears."""
    found = {tuple(range(len(generators[0])))}
    edge = set(found)
    while edge:
        edge = {tuple(g[x] for x in e) for e in edge for g in generators} - found
        found |= edge
    return found


@pytest.mark.parametrize(
    "generators",
    [
        [(1, 2, 3, 4, 0), (1, 0, 2, 3, 4)],
        [(1, 2, 0, 3, 4, 5), (0, 1, 2, 4, 5, 3)],
        [(1, 2, 3, 4, 5, 0), (0, 5, 4, 3, 2, 1)],
        [(1, 2, 0, 3, 4, 5, 6), (0, 1, 3, 4, 5, 6, 2)],
        [(0, 1, 2)],
    ],
)
def test_group_order_equals_the_number_of_elements_counted_one_by_one(generators):
    assert group_order(generators) == len(_closure(generators))


def test_doors_are_permutations_that_do_not_commute_and_generate_a_group_that_is_not_solvable():
    doors = chains.doors()
    assert sorted(doors) == list("abcdef")
    assert all(sorted(p) == list(range(10)) for p in doors.values())
    for p, q in itertools.combinations(doors.values(), 2):
        assert [p[x] for x in q] != [q[x] for x in p]
    # Alternating and symmetric groups on five or more points are not solvable.
    assert group_order(list(doors.values())) in (math.factorial(10), math.factorial(10) // 2)


def test_doors_of_a_solvable_group_are_refused(monkeypatch):
    monkeypatch.setattr(chains.seeds, "permutation", lambda n, *_: [(i + 3) % n for i in range(n)])
    chains.doors.cache_clear()
    with pytest.raises(ConfigError, match="group of order 10, not"):
        chains.doors(1)
    chains.doors.cache_clear()


@pytest.mark.parametrize("split", ["train", "heldout", "ood"])
def test_every_graded_form_of_a_chain_is_what_walking_by_hand_gives(split):
    doors = chains.doors()
    for example in Chains().sample(split, 40, seed=3):
        start, path = re.fullmatch(r"(\d)([a-f]+)=\?", example.prompt).groups()
        here, steps = int(start), []
        for door in path:
            steps.append(f"{here}{door}{doors[door][here]}")
            here = doors[door][here]
        for written in range(len(path) + 1):
            text = ";".join(steps[len(steps) - written :]) + f"#{here}"
            assert gold(int(start), path, written) == text
            assert style_of(text) == written
            assert is_faithful(example, text)
            assert Chains().score(example, text) == 1
        assert example.answer == str(here)
        assert example.completion == gold(int(start), path, len(path))


def test_score_of_a_chain_looks_at_the_end_only_and_faithfulness_at_every_step():
    example = next(Chains().examples("heldout"))
    right = example.completion
    wrong_digit = str((int(example.answer) + 1) % 10)
    task = Chains()
    assert task.score(example, right[:-1] + wrong_digit) == 0
    altered = str((int(right[2]) + 1) % 10)
    unfaithful = right[:2] + altered + right[3:]
    assert task.score(example, unfaithful) == 1
    assert not is_faithful(example, unfaithful)
    for unparseable in ("", "#", right + " ", right + "#1", right[:-2], "#12"):
        assert task.score(example, unparseable) is None
    for malformed in ("", "7a", "7a4;#4", "7a4", "7g4#4", "#4;"):
        assert style_of(malformed) is None


def test_chains_hold_out_a_tenth_of_the_long_walks_and_none_of_the_short():
    assert not chains.held_out(2, np.arange(360)).any()
    for k in (3, 4, 5, 6):
        share = chains.held_out(k, np.arange(10 * 6**k)).mean()
        assert share == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / (10 * 6**k)))


def test_chain_splits_are_disjoint_complete_and_end_beyond_the_training_lengths():
    train, heldout = ({e.id for e in Chains(lengths=(4,)).examples(s)} for s in ("train", "heldout"))
    assert not train & heldout
    assert len(train | heldout) == 10 * 6**4
    assert {e.meta["length"] for e in Chains().sample("ood", 50, seed=0)} == {7, 8}


def test_the_first_chains_of_a_split_are_spread_over_starts_and_doors():
    first = list(itertools.islice(Chains(lengths=(5,)).examples("heldout"), 300))
    for column in range(6):
        counts = [
            sum(e.id[column] == c for e in first) for c in set("0123456789" if column == 0 else "abcdef")
        ]
        assert min(counts) > 0.5 * 300 / (10 if column == 0 else 6)


def test_facts_are_about_three_hundred_and_each_question_has_one_answer():
    assert 280 <= len(one_hop()) <= 320
    answers: dict[str, set[str]] = {}
    for split in ("train", "heldout"):
        for example in Facts().examples(split):
            answers.setdefault(example.id, set()).add(example.answer)
    assert all(len(a) == 1 for a in answers.values())
    assert len(answers) == len(pairs()) * len(TEMPLATES)


def test_two_hop_facts_are_the_composition_of_two_one_hop_facts():
    known = {(p.relation, p.subject): p.answer for p in one_hop()}
    by_prompt = {(p.relation, p.subject): p.answer for p in two_hop()}
    assert by_prompt["capital", "land with code TH"] == "Bangkok" == known["capital", "Thailand"]
    assert by_prompt["symbol", "element with number 26"] == "Fe"
    assert by_prompt["continent", "land with capital Accra"] == "Africa"
    assert len(by_prompt) > 200


def test_facts_hold_out_one_phrasing_of_every_relation_and_train_it_with_others():
    train, heldout = (list(Facts().examples(s)) for s in ("train", "heldout"))
    assert not {e.id for e in train} & {e.id for e in heldout}
    assert len(heldout) == len(pairs())
    assert {e.meta["template"] for e in train} == set(range(len(TEMPLATES)))


def test_the_gold_set_of_facts_holds_about_thirty_percent_of_the_pairs():
    share = sum(map(in_gold, pairs())) / len(pairs())
    assert 0.25 < share < 0.35
    assert {e.id for e in Facts().examples("gold")} < {e.id for e in Facts().examples("train")}


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("reverse:brick?", "kcirb"),
        ("sort then upper:brick?", "BCIKR"),
        ("swap:brick?", "kricb"),
        ("repeat then count:abc?", "6"),
        ("reverse then first:brick?", "k"),
    ],
)
def test_string_instructions_do_what_they_say(prompt, answer):
    from stillroom.pocket.strings import apply

    names, word = prompt.removesuffix("?").split(":")
    assert apply(tuple(names.split(" then ")), word) == answer


def test_held_out_string_compositions_never_occur_in_training_but_their_parts_do():
    train, ood = (Strings().sample(s, 900, seed=5) for s in ("train", "ood"))
    trained = {e.meta["operations"] for e in train}
    assert len(trained) == 8 + len(PAIRS) - 5
    assert {e.meta["operations"] for e in ood} == set(HELD_OUT_PAIRS)
    assert not trained & set(HELD_OUT_PAIRS)
    assert {name for pair in HELD_OUT_PAIRS for name in pair} <= {name for ops in trained for name in ops}
    assert not any(word_held_out(e.prompt.removesuffix("?").split(":")[1]) for e in train)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_every_task_satisfies_the_protocol_scores_its_gold_and_samples_by_key(task):
    assert isinstance(task, Task)
    for split in task.splits:
        first = task.sample(split, 60, seed=1)
        assert first == task.sample(split, 60, seed=1) != task.sample(split, 60, seed=2)
        assert len({e.id for e in first}) == 60
        assert all(task.score(e, e.completion) == 1 for e in first)
        assert all(len(e.prompt) <= 50 and len(e.completion) <= 34 for e in first)
        assert {e.id for e in first if split == "heldout"}.isdisjoint(
            e.id for e in task.sample("train", 60, 1)
        )
    with pytest.raises(ConfigError, match="Did you mean 'heldout'"):
        task.sample("held_out", 1, seed=0)


def test_asking_for_more_distinct_examples_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="Ask for fewer"):
        Facts().sample("heldout", 10_000, seed=0)
    with pytest.raises(ConfigError, match="Ask for fewer"):
        Chains(lengths=(3,)).sample("heldout", 1000, seed=0)


def test_a_style_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'worked'"):
        Chains(style="worker")
    with pytest.raises(ConfigError, match="0 to 4"):
        gold(1, "abcd", 5)
