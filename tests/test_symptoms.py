"""Symptoms equal their definitions, show where they were planted, and are absent from the control."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from tests.tiny import char_tokenizer, tiny_llama

from stillroom.diagnosis.symptom_figures import (
    confidence_figures,
    decoding_figures,
    loops,
    transition_figures,
)
from stillroom.diagnosis.symptoms import corrupt_chain, intact_chain, measure_symptoms
from stillroom.errors import ConfigError, DataError
from stillroom.models.loading import load_model, load_tokenizer
from stillroom.pocket.chains import Chains, is_faithful, walk
from stillroom.types import Example

TASK = Chains()
EXAMPLES = TASK.sample("heldout", 40, 0)


# ------------------------------------------------------------------ confidence


def drawn(seed: int, *, prompts: int = 30, each: int = 4, effect: float = 1.0):
    """Columns in which confidence, on a grid so that there are ties, tells right from wrong by ``effect``."""
    rng = np.random.default_rng(seed)
    n = prompts * each
    right = rng.random(n) < np.repeat(rng.uniform(0.2, 0.8, prompts), each)
    confidence = np.round(1 / (1 + np.exp(-(effect * (right - 0.5) + rng.normal(size=n)))), 2)
    return [f"p{i // each}" for i in range(n)], right.tolist(), confidence.tolist()


def ece_by_definition(right, confidence, bins=15):
    total = 0.0
    for b in range(bins):
        inside = [
            i
            for i, c in enumerate(confidence)
            if b / bins <= c < (b + 1) / bins or (b == bins - 1 and c == 1)
        ]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            mean = math.fsum(confidence[i] for i in inside) / len(inside)
            total += len(inside) / len(right) * abs(accuracy - mean)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_confidence_figures_equal_their_definitions(seed: int) -> None:
    ids, right, confidence = drawn(seed)
    found = {name: e.value for name, e in confidence_figures(ids, right, confidence).items()}
    c_right = [c for r, c in zip(right, confidence, strict=True) if r]
    c_wrong = [c for r, c in zip(right, confidence, strict=True) if not r]
    assert found["ece"] == pytest.approx(ece_by_definition(right, confidence), abs=1e-12)
    squares = [(r - c) ** 2 for r, c in zip(right, confidence, strict=True)]
    assert found["brier"] == pytest.approx(math.fsum(squares) / len(squares), abs=1e-12)
    u = mannwhitneyu(c_right, c_wrong).statistic
    assert found["auroc"] == pytest.approx(u / (len(c_right) * len(c_wrong)), abs=1e-12)
    pairs = [1.0 if r > w else 0.5 * (r == w) for r in c_right for w in c_wrong]
    assert found["auroc"] == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-12)
    assert found["sure_when_wrong"] == pytest.approx(sum(c > 0.9 for c in c_wrong) / len(c_wrong), abs=1e-12)
    assert found["mean_when_wrong"] == pytest.approx(math.fsum(c_wrong) / len(c_wrong), abs=1e-12)
    assert (found["right"], found["wrong"]) == (len(c_right), len(c_wrong))


def test_a_model_that_is_as_often_right_as_it_says_has_no_calibration_error() -> None:
    ids, right, confidence = [], [], []
    for tenths in (1, 3, 5, 8):  # ten completions that claim k/10, k of them right
        for i in range(10):
            ids.append(f"{tenths}-{i % 5}")
            right.append(i < tenths)
            confidence.append(tenths / 10)
    calm = confidence_figures(ids, right, confidence)
    assert calm["ece"].value == pytest.approx(0, abs=1e-12)
    assert calm["sure_when_wrong"].value == 0
    assert calm["sure_when_wrong"].high > 0.05  # none of a few is not never
    boastful = confidence_figures(ids, right, [0.95] * 40)
    assert boastful["ece"].value == pytest.approx(0.95 - 17 / 40)
    assert boastful["ece"].low > 0.2
    assert boastful["sure_when_wrong"].value == 1
    assert boastful["auroc"].value == 0.5


def test_overconfidence_at_three_strengths_gives_rising_figures() -> None:
    ids, right, confidence = drawn(0)
    sharper = [confidence_figures(ids, right, np.array(confidence) ** power) for power in (0.5, 0.2, 0.05)]
    for name in ("mean_when_wrong", "sure_when_wrong", "brier"):
        values = [figures[name].value for figures in sharper]
        assert values == sorted(values)
        assert values[0] < values[-1]
    # A rising transformation cannot change which of two completions is the surer one.
    assert {round(figures["auroc"].value, 12) for figures in sharper} == {
        round(confidence_figures(ids, right, confidence)["auroc"].value, 12)
    }


@pytest.mark.parametrize("grade", [True, False])
def test_without_both_grades_there_is_no_auroc_and_the_counts_say_why(grade: bool) -> None:
    figures = confidence_figures(["a", "a", "b", "b"], [grade] * 4, [0.2, 0.9, 0.95, 0.5])
    assert "auroc" not in figures
    assert figures["right" if grade else "wrong"].value == 4
    assert figures["wrong" if grade else "right"].value == 0
    assert ("sure_when_wrong" in figures) is not grade


def test_perfect_separation_of_a_few_completions_is_not_taken_for_certain() -> None:
    figures = confidence_figures(list("aabbcc"), [True, False] * 3, [0.9, 0.1] * 3)
    assert figures["auroc"].value == 1
    assert figures["auroc"].low < 0.5
    assert figures["auroc"].n == 3
    assert "auroc" not in confidence_figures(list("aabbcc"), [True, False, *[True] * 4], [0.9, 0.1] * 3)


def test_the_order_of_completions_changes_no_figure_and_no_interval() -> None:
    ids, right, confidence = drawn(2)
    order = np.random.default_rng(1).permutation(len(ids))
    first = confidence_figures(ids, right, confidence)
    again = confidence_figures(*([column[i] for i in order] for column in (ids, right, confidence)))
    for name, e in first.items():
        assert (again[name].value, again[name].low, again[name].high) == pytest.approx(
            (e.value, e.low, e.high)
        )


def test_the_interval_of_an_uninformative_confidence_holds_one_half_in_about_nineteen_of_twenty_cases():
    found = [confidence_figures(*drawn(seed, prompts=25, effect=0.0))["auroc"] for seed in range(80)]
    assert 68 <= sum(e.low <= 0.5 <= e.high for e in found) <= 80
    assert all(0 < e.high - e.low < 0.5 for e in found)


def test_the_interval_counts_prompts_and_not_completions() -> None:
    ids, right, confidence = drawn(5)
    copies = confidence_figures(ids * 9, right * 9, confidence * 9)
    once = confidence_figures(ids, right, confidence)
    for name in ("ece", "brier", "auroc", "sure_when_wrong"):
        assert copies[name].value == pytest.approx(once[name].value)
        assert copies[name].high - copies[name].low == pytest.approx(once[name].high - once[name].low)
        assert copies[name].n == once[name].n <= 30


def test_a_confidence_that_is_no_probability_is_refused() -> None:
    for bad in (1.2, -0.1, math.nan):
        with pytest.raises(DataError, match="completion 1 is"):
            confidence_figures(["a", "b"], [True, False], [0.5, bad])
    with pytest.raises(DataError, match="measure at least two"):
        confidence_figures(["a", "a"], [True, False], [0.5, 0.5])


# ------------------------------------------------------------------ recovery


def test_transitions_are_the_hand_counts() -> None:
    first = [True, True, False, False, False]
    second = [[True, False], [True, True], [False, True], [False, False], [True, True]]
    found = transition_figures(first, second)
    assert found["right_to_wrong"].value == 1 / 4
    assert found["wrong_to_right"].value == 3 / 6
    assert (found["right_to_wrong"].n, found["wrong_to_right"].n, found["first_right"].value) == (2, 3, 2)
    assert transition_figures([True] * 3, [[True]] * 3).keys() == {"right_to_wrong", "first_right"}


def test_a_corrupted_chain_differs_from_the_intact_one_in_its_last_digit_alone() -> None:
    numbers, digits = set(), set()
    for example in EXAMPLES:
        intact, corrupted = intact_chain(example), corrupt_chain(example)
        states = walk(example.meta["start"], example.meta["path"])
        j = intact.count(";") + 1
        assert intact == ";".join(f"{states[i]}{example.meta['path'][i]}{states[i + 1]}" for i in range(j))
        assert corrupted[:-1] == intact[:-1]
        assert corrupted[-1] != intact[-1]
        assert 1 <= j < example.meta["length"]
        assert example.completion.startswith(intact)
        # Who walks on from there is faithful to the fault and ends wrong.
        rest = walk(int(corrupted[-1]), example.meta["path"][j:])
        assert TASK.score(example, f"{corrupted}#{rest[-1]}") == 0
        assert not is_faithful(example, f"{corrupted}#{example.answer}")
        assert TASK.score(example, f"{corrupted}#{example.answer}") == 1  # and who goes back can end right
        numbers.add(j)
        digits.add((int(corrupted[-1]) - int(intact[-1])) % 10)
    assert len(numbers) > 2
    assert len(digits) > 5
    assert 0 not in digits
    assert [corrupt_chain(e, seed=1) for e in EXAMPLES] != [corrupt_chain(e) for e in EXAMPLES]


def test_only_chains_can_be_corrupted_this_way() -> None:
    with pytest.raises(DataError, match="no chain of pocket/chains"):
        corrupt_chain(Example(id="e", prompt="Capital of France?", answer="Paris"))


# ------------------------------------------------------------------ decoding


def test_a_loop_is_a_cut_off_completion_whose_last_quarter_repeats_itself() -> None:
    story = list(range(60))
    assert loops(story + [1, 2, 3] * 7, True)
    assert not loops(story + [1, 2, 3] * 7, False)  # it came to an end by itself
    assert not loops(story + list(range(100, 121)), True)
    assert not loops([1, 2, 3] * 20 + list(range(100, 130)), True)  # it had found its way out
    assert not loops([], True)
    assert not loops([7] * 20, True)  # five tokens hold two 4-grams
    assert loops([7] * 21, True)  # six hold three


def test_decoding_figures_equal_their_definitions() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 4, rng.integers(0, 30)).tolist() for _ in range(24)]
    prompt_ids = [f"p{i // 4}" for i in range(24)]
    truncated = (rng.random(24) < 0.5).tolist()
    entropies = [rng.random(len(row) + 1).tolist() for row in ids]
    found = {name: e.value for name, e in decoding_figures(prompt_ids, ids, truncated, entropies).items()}
    repeated = fours = distinct = twos = 0
    for row in ids:
        seen = []
        for i in range(len(row) - 3):
            repeated += row[i : i + 4] in seen
            fours += 1
            seen.append(row[i : i + 4])
    for prompt in range(6):
        seen = []
        for row in ids[4 * prompt : 4 * prompt + 4]:
            for i in range(len(row) - 1):
                twos += 1
                if row[i : i + 2] not in seen:
                    distinct += 1
                    seen.append(row[i : i + 2])
    assert found["repeated_4grams"] == pytest.approx(repeated / fours)
    assert found["distinct_2"] == pytest.approx(distinct / twos)
    assert found["truncated"] == pytest.approx(sum(truncated) / 24)
    for quarter in range(4):
        own = [
            h for row in entropies for t, h in enumerate(row) if quarter <= 4 * (t / len(row)) < quarter + 1
        ]
        assert found[f"entropy_quarter_{quarter + 1}"] == pytest.approx(math.fsum(own) / len(own))


def test_planted_loops_rise_with_their_share_and_the_control_has_none() -> None:
    def figures(looping: int):
        rows = [[i, *range(50)] if i >= looping else [i, *range(30), *[5, 6] * 10] for i in range(20)]
        ids = [f"p{i // 2}" for i in range(20)]
        return decoding_figures(ids, rows, [True] * 20, [[0.1 * t for t in range(8)]] * 20)

    control, mild, strong = figures(0), figures(6), figures(14)
    assert control["loops"].value == 0
    assert [f["loops"].value for f in (control, mild, strong)] == [0, 0.3, 0.7]
    repeated = [f["repeated_4grams"].value for f in (control, mild, strong)]
    assert repeated == sorted(repeated)
    assert repeated[0] == 0 < repeated[1]
    assert [round(control[f"entropy_quarter_{q}"].value, 12) for q in (1, 2, 3, 4)] == [
        0.05,
        0.25,
        0.45,
        0.65,
    ]


def test_a_student_that_writes_nothing_has_no_ngrams_and_no_error() -> None:
    figures = decoding_figures(["a", "b"], [[], []], [False, False], [[0.5], [0.25]])
    assert figures.keys() == {"loops", "truncated", "entropy_quarter_1"}
    assert figures["loops"].value == 0
    with pytest.raises(DataError, match="2 rows of ids and 1 of entropies"):
        decoding_figures(["a", "b"], [[], []], [False, False], [[0.5]])


# ------------------------------------------------------------------ the walk


@pytest.fixture(scope="module")
def pocket():
    return {role: load_model(f"pocket:chars-{role}") for role in ("teacher", "student")}


def symptoms(model, examples=EXAMPLES, tokenizer=None, **settings):
    settings = {"max_completion_length": 40, "seed": 0} | settings
    return measure_symptoms(
        model, tokenizer or load_tokenizer("pocket:chars-student"), TASK, examples, **settings
    )


def test_the_teacher_recovers_from_a_wrong_step_and_the_student_does_not(pocket) -> None:
    settings = {"corrupt": corrupt_chain, "intact": intact_chain}
    teacher, student = (symptoms(pocket[role], **settings) for role in ("teacher", "student"))
    assert teacher["recovery/after_wrong_step"].low > 0.5 > student["recovery/after_wrong_step"].high
    assert min(f["recovery/after_right_step"].value for f in (teacher, student)) > 0.9
    assert teacher["confidence/brier"].high < student["confidence/brier"].low
    assert teacher["recovery/right_to_wrong"].high < student["recovery/right_to_wrong"].low
    assert teacher["decoding/entropy_quarter_4"].high < student["decoding/entropy_quarter_4"].low
    assert student["confidence/right"].value + student["confidence/wrong"].value == 160
    assert student["confidence/auroc"].low > 0.6
    assert all(f["decoding/loops"].value == 0 for f in (teacher, student))
    assert all(e.method for e in student.values())


def test_a_student_made_bold_is_sure_when_wrong_and_one_left_alone_is_not(pocket) -> None:
    longer = TASK.sample("ood", 40, 0)  # beyond what it can do, so that it is mostly wrong
    bold = copy.deepcopy(pocket["student"])
    with torch.no_grad():
        bold.model.norm.weight.mul_(8)
    plain, planted = (symptoms(m, longer, num_samples=2) for m in (pocket["student"], bold))
    assert planted["confidence/sure_when_wrong"].low > 0.7
    assert plain["confidence/sure_when_wrong"].high < 0.3
    assert planted["confidence/ece"].low > plain["confidence/ece"].high
    assert planted["decoding/entropy_quarter_2"].value < 0.1 * plain["decoding/entropy_quarter_2"].value


def test_a_model_that_repeats_itself_is_seen_to_loop() -> None:
    tokenizer, model = char_tokenizer(), tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(50)  # nearly greedy
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # one token decides the next, so its text goes in circles
    settings = {"tokenizer": tokenizer, "max_completion_length": 100, "num_samples": 2}
    planted = symptoms(model, **settings)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.002)
    control = symptoms(model, **settings)
    assert planted["decoding/loops"].low > 0.1
    assert control["decoding/loops"].value == 0
    assert planted["decoding/repeated_4grams"].low > control["decoding/repeated_4grams"].high
    assert planted["decoding/distinct_2"].high < control["decoding/distinct_2"].low


def test_neither_batches_nor_the_order_of_examples_move_a_symptom(pocket) -> None:
    settings = {"corrupt": corrupt_chain, "num_samples": 2}
    model = pocket["student"].train()
    one = symptoms(model, EXAMPLES[:10], batch_size=64, **settings)
    other = symptoms(model, EXAMPLES[9::-1], batch_size=3, **settings)
    assert model.training
    model.eval()
    assert one.keys() == other.keys()
    for name, e in one.items():
        assert other[name].value == pytest.approx(e.value, abs=1e-5), name
        if not name.startswith("recovery"):
            assert (other[name].low, other[name].high) == pytest.approx((e.low, e.high), abs=1e-4), name


def test_symptoms_need_samples() -> None:
    with pytest.raises(ConfigError, match="num_samples = 0"):
        symptoms(tiny_llama(), num_samples=0)
