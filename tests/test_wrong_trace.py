"""Wrong-trace preference equals the hand count, fires on planted traps, and stays quiet without one."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.tiny import char_tokenizer, tiny_llama
from tests.tokenizers_in_code import CHATML, IM_END, byte_tokenizer

from stillroom.diagnosis.scores import Graded, score, write
from stillroom.diagnosis.wrong_trace import FORMS, measure, wrong_trace_preference
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.loading import load_model, load_tokenizer
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import Chains
from stillroom.types import Example, Rollout

TASK = Chains()
EXAMPLES = TASK.sample("heldout", 40, 0)
CHARS, BPE = tokenizers.build("chars"), tokenizers.build("bpe")


# ------------------------------------------------------------------ oracle and data


def by_definition(prompt_ids, right, scores, lengths=None):
    """Pairs written out one by one; the mean of the prompts' means, and how many pairs there were."""
    means, pairs = [], 0
    for prompt in sorted(set(prompt_ids)):
        mine = [i for i, p in enumerate(prompt_ids) if p == prompt]
        values = []
        for w in mine:
            for r in mine:
                if right[w] or not right[r]:
                    continue
                if lengths and 5 * abs(lengths[w] - lengths[r]) > max(lengths[w], lengths[r]):
                    continue
                values.append(1.0 if scores[w] > scores[r] else 0.5 if scores[w] == scores[r] else 0.0)
        if values:
            means.append(math.fsum(values) / len(values))
            pairs += len(values)
    return math.fsum(means) / len(means), pairs


def drawn(seed: int, *, prompts: int = 12, each: int = 6, trap: float = 0.0, step: float = 0.5):
    """Columns with ties (scores are multiples of ``step``); ``trap`` is added to the scores of wrong ones."""
    rng = np.random.default_rng(seed)
    n = prompts * each
    right = rng.random(n) < 0.5
    scores = np.round((rng.normal(size=n) + trap * ~right) / step) * step
    ids = [f"p{i // each}" for i in range(n)]
    return ids, right.tolist(), scores.tolist(), rng.integers(1, 30, n).tolist()


# ------------------------------------------------------------------ the core


def test_the_preference_of_a_hand_made_case_is_the_hand_count() -> None:
    estimate, counts = wrong_trace_preference(
        ["a", "a", "a", "b", "b", "c", "d", "d"],
        [True, False, False, True, False, True, False, False],
        [1.0, 2.0, 1.0, 5.0, 0.0, 0.0, 0.0, 0.0],
    )
    assert estimate is not None
    assert estimate.value == ((1 + 0.5) / 2 + 0) / 2  # two pairs of a, one of b; c is all right, d all wrong
    assert estimate.n == 2
    assert counts == {
        "prompts": 4,
        "no_right": 1,
        "no_wrong": 1,
        "no_like_length": 0,
        "compared": 2,
        "pairs": 3,
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_preference_equals_its_definition_with_and_without_like_lengths(seed: int) -> None:
    ids, right, scores, lengths = drawn(seed)
    for chosen in (None, lengths):
        estimate, counts = wrong_trace_preference(ids, right, scores, chosen)
        value, pairs = by_definition(ids, right, scores, chosen)
        assert estimate is not None
        assert estimate.value == pytest.approx(value, abs=1e-12)
        assert counts["pairs"] == pairs
        left_out = counts["no_right"] + counts["no_wrong"] + counts["no_like_length"]
        assert counts["compared"] + left_out == counts["prompts"] == 12


def test_lengths_that_differ_by_exactly_a_fifth_are_alike_and_by_more_are_not() -> None:
    ids, right, scores = ["a", "a", "b", "b"], [True, False] * 2, [0.0, 1.0, 0.0, 1.0]
    estimate, counts = wrong_trace_preference(ids, right, scores, [4, 5, 100, 80])
    assert estimate is not None
    assert counts["pairs"] == 2
    estimate, counts = wrong_trace_preference(ids, right, scores, [4, 5, 100, 79])
    assert estimate is None
    assert (counts["no_like_length"], counts["compared"], counts["pairs"]) == (1, 1, 1)


def test_order_names_and_rising_transformations_change_nothing_not_even_the_interval() -> None:
    ids, right, scores, lengths = drawn(3, trap=0.4)
    first = wrong_trace_preference(ids, right, scores, lengths)
    order = np.random.default_rng(0).permutation(len(ids))
    shuffled = ([list(column)[i] for i in order] for column in (ids, right, scores, lengths))
    assert wrong_trace_preference(*shuffled) == first
    assert wrong_trace_preference(ids, right, np.exp(scores), lengths) == first
    numbers = [100 + sorted(set(ids)).index(p) for p in ids]
    assert wrong_trace_preference(numbers, right, scores, lengths) == first


def test_parts_of_the_prompts_join_to_the_whole_and_every_prompt_weighs_the_same() -> None:
    ids, right, scores, _ = drawn(4)
    whole, counts = wrong_trace_preference(ids, right, scores)
    parts = [wrong_trace_preference(ids[s], right[s], scores[s]) for s in (slice(0, 30), slice(30, None))]
    assert whole is not None
    assert sum(e.value * e.n for e, _ in parts if e) / whole.n == pytest.approx(whole.value, abs=1e-12)
    assert {k: sum(c[k] for _, c in parts) for k in counts} == counts
    # One prompt asked a hundred times as often still counts once.
    more = wrong_trace_preference(ids + ids[:6] * 99, right + right[:6] * 99, scores + scores[:6] * 99)[0]
    assert more is not None
    assert more.value == pytest.approx(whole.value, abs=1e-12)


def test_a_trap_at_three_strengths_gives_rising_values_and_is_seen() -> None:
    found = [wrong_trace_preference(*drawn(1, prompts=60, trap=t)[:3])[0] for t in (0.5, 1.0, 2.0)]
    values = [e.value for e in found if e]
    assert values == sorted(values)
    assert all(e is not None and e.low > 0.5 for e in found)


def test_the_control_stays_quiet_in_about_nineteen_of_twenty_cases() -> None:
    controls = (wrong_trace_preference(*drawn(seed, prompts=40, each=4)[:3])[0] for seed in range(200))
    alarms = sum(e is not None and not e.low <= 0.5 <= e.high for e in controls)
    assert (
        1 <= alarms <= 22
    )  # Binomial(200, 0.05) stays below 19 in 99.9 % of cases; the bootstrap is a bit short


def test_a_preference_shared_by_all_prompts_still_has_width() -> None:
    estimate, _ = wrong_trace_preference(["a", "a", "b", "b", "c", "c"], [1, 0] * 3, [0, 1] * 3)
    assert estimate is not None
    assert (estimate.value, estimate.high) == (1, 1)
    assert estimate.low < 0.5
    assert "wilson" in estimate.method


def test_one_prompt_with_pairs_has_no_interval_and_says_so_in_the_counts() -> None:
    estimate, counts = wrong_trace_preference(["a", "a", "b"], [True, False, True], [0.0, 1.0, 0.0])
    assert estimate is None
    assert (counts["compared"], counts["no_wrong"]) == (1, 1)


def test_nan_scores_and_unequal_columns_are_refused_and_infinite_scores_compared() -> None:
    with pytest.raises(DataError, match=r"completion 1 \(prompt 'a'\) is NaN"):
        wrong_trace_preference(["a", "a"], [True, False], [0.0, math.nan])
    with pytest.raises(DataError, match="columns of shapes"):
        wrong_trace_preference(["a", "a"], [True, False, True], [0.0, 1.0])
    with pytest.raises(DataError, match="0 prompt ids"):
        wrong_trace_preference([], [], [])
    columns = ["a", "a", "b", "b"], [True, False] * 2, [-math.inf, 0.0, -math.inf, -math.inf]
    estimate = wrong_trace_preference(*columns)[0]
    assert estimate is not None
    assert estimate.value == 0.75


# ------------------------------------------------------------------ scores of completions


def forward(model, prompt, ids, width):
    """Log-probabilities and entropies of the ids: one unpadded forward in float64, sums written out."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double().eval()(torch.tensor([[*prompt, *ids]])).logits[0]
    logs, entropies = [], []
    for at, token in enumerate(ids):
        weights = [math.exp(z) for z in logits[len(prompt) + at - 1, :width].tolist()]
        p = [w / math.fsum(weights) for w in weights]
        logs.append(math.log(p[token]))
        entropies.append(-math.fsum(x * math.log(x) for x in p))
    return logs, entropies


def written_by(model, tokenizer, **settings) -> list[Graded]:
    settings = {"num_samples": 2, "max_completion_length": 9, "temperature": 1.0, "seed": 0} | settings
    return write(model, tokenizer, TASK, EXAMPLES[:5], **settings)


def test_scores_equal_one_unpadded_forward_and_cover_the_end_token_and_no_padded_column() -> None:
    tokenizer = char_tokenizer()
    model = tiny_llama(vocab_size=104).train()  # 20 columns that are no token
    completions = written_by(model, tokenizer, num_samples=8, max_completion_length=12)
    assert {c.is_truncated for c in completions} == {True, False}
    assert all(c.is_truncated or c.rollout.completion_ids == (*c.ids, 2) for c in completions)
    for batch_size in (3, 64):
        scores = score(model, tokenizer, completions, writer_tokenizer=tokenizer, batch_size=batch_size)
        for completion, found in zip(completions, scores, strict=True):
            rollout = completion.rollout
            logs, entropies = forward(model, rollout.prompt_ids, rollout.completion_ids, len(tokenizer))
            assert found is not None
            assert found.logprobs.tolist() == pytest.approx(logs, abs=1e-4)
            assert found.entropies.tolist() == pytest.approx(entropies, abs=1e-4)
            assert found.total == pytest.approx(math.fsum(logs), abs=1e-3)
            assert found.per_token == pytest.approx(math.fsum(logs) / len(logs), abs=1e-4)
            # At temperature 1 they are the log-probabilities that the sampler kept.
            assert found.logprobs.tolist() == pytest.approx(rollout.logprobs, abs=1e-4)
    assert model.training


def test_another_tokenizer_reads_the_same_text_with_its_own_end_token() -> None:
    reader = load_model("pocket:bpe-student")
    ids = CHARS("7a4;4c9#9", add_special_tokens=False)["input_ids"]
    ended = Rollout("e", (1, 5), (*ids, CHARS.eos_token_id), (), "end", "by hand")
    cut = Rollout("e", (1, 5), tuple(ids), (), "length", "by hand")
    example = Example(id="e", prompt="7ac=?", answer="9")
    scores = score(reader, BPE, [Graded(example, r, False) for r in (ended, cut)], writer_tokenizer=CHARS)
    theirs = BPE("7a4;4c9#9", add_special_tokens=False)["input_ids"]
    logs, _ = forward(reader, BPE("7ac=?")["input_ids"], [*theirs, BPE.eos_token_id], len(BPE))
    assert all(s is not None for s in scores)
    assert [s.logprobs.tolist() for s in scores if s] == [
        pytest.approx(logs, abs=1e-4),
        pytest.approx(logs[:-1], abs=1e-4),
    ]


def test_a_model_that_is_talked_to_reads_its_own_template_and_closes_the_turn_its_own_way() -> None:
    reader_tokenizer = byte_tokenizer(template=CHATML)
    reader = tiny_llama(vocab_size=len(reader_tokenizer))
    reader.generation_config.eos_token_id = [2, IM_END]
    ids = CHARS("#3", add_special_tokens=False)["input_ids"]
    graded = Graded(
        Example(id="e", prompt="7acf=?", answer="3"),
        Rollout("e", (1, 5), (*ids, CHARS.eos_token_id), (), "end", "by hand"),
        True,
    )
    found = score(reader, reader_tokenizer, [graded], writer_tokenizer=CHARS)[0]
    asked = reader_tokenizer.apply_chat_template(
        [{"role": "user", "content": "7acf=?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = reader_tokenizer(asked, add_special_tokens=False)["input_ids"]
    answer = [*reader_tokenizer("#3", add_special_tokens=False)["input_ids"], IM_END]
    assert found is not None
    assert found.logprobs.tolist() == pytest.approx(
        forward(reader, prompt, answer, len(reader_tokenizer))[0], abs=1e-4
    )


@pytest.mark.parametrize(("text", "readable"), [("#3", True), ("3!", False), ("", False)])
def test_a_text_that_the_other_tokenizer_cannot_hold_is_not_scored(text: str, readable: bool) -> None:
    tokenizer = char_tokenizer()
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    graded = Graded(
        Example(id="e", prompt="1a=?", answer="3"), Rollout("e", (1, 5), ids, (), "length", "by hand"), True
    )
    model = tiny_llama(vocab_size=len(CHARS))
    assert (score(model, CHARS, [graded], writer_tokenizer=tokenizer)[0] is not None) is readable


def test_nan_logits_and_completions_beyond_the_models_positions_stop_the_scoring() -> None:
    tokenizer = char_tokenizer()
    completions = written_by(tiny_llama(), tokenizer)
    broken, short = tiny_llama(), tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight[5] = math.nan
    with pytest.raises(StillroomError, match="NaN logits while scoring"):
        score(broken, tokenizer, completions, writer_tokenizer=tokenizer)
    short.config.max_position_embeddings = 8
    with pytest.raises(DataError, match="the model reads 8"):
        score(short, tokenizer, completions, writer_tokenizer=tokenizer)


def test_examples_that_give_no_interval_are_refused_before_anything_is_sampled() -> None:
    for examples in (EXAMPLES[:1], [EXAMPLES[0]] * 3):
        with pytest.raises(DataError, match="1 distinct ids"):
            write(
                tiny_llama(),
                char_tokenizer(),
                TASK,
                examples,
                num_samples=1,
                max_completion_length=4,
                temperature=1.0,
                seed=0,
            )


# ------------------------------------------------------------------ the walk


@pytest.fixture(scope="module")
def pocket():
    names = ("chars-teacher", "chars-student", "bpe-teacher")
    return {name: (load_model(f"pocket:{name}"), load_tokenizer(f"pocket:{name}")) for name in names}


def walk(teacher, student, examples=EXAMPLES, **settings):
    settings = {"max_completion_length": 40, "num_samples": 4, "seed": 1} | settings
    return measure(*teacher, *student, TASK, examples, **settings)


def test_an_honest_teacher_prefers_right_traces_and_one_turned_against_itself_the_wrong_ones(pocket) -> None:
    honest, counts = walk(pocket["chars-teacher"], pocket["chars-student"])
    assert set(honest) == set(FORMS)
    assert all(estimate.high < 0.5 for estimate in honest.values())
    assert counts["completions"] == 160
    assert 20 < counts["right"] < 140
    assert counts["compared"] + counts["no_right"] + counts["no_wrong"] == counts["prompts"] == 40
    assert counts["like_length_pairs"] < counts["pairs"]
    assert honest["implicit"].n == counts["compared"]
    assert honest["length_matched"].n == counts["like_length_compared"]
    turned = copy.deepcopy(pocket["chars-teacher"][0])
    with torch.no_grad():
        turned.model.norm.weight.neg_()  # every logit changes its sign: what was likely is not
    trapped, again = walk((turned, pocket["chars-teacher"][1]), pocket["chars-student"])
    assert again == counts  # the student wrote the same
    assert trapped["implicit"].low > 0.5
    assert trapped["likelihood_per_token"].low > 0.5


def test_a_student_equal_to_its_teacher_is_preferred_neither_way(pocket) -> None:
    student, tokenizer = pocket["chars-student"]
    estimates, counts = walk((copy.deepcopy(student), tokenizer), (student, tokenizer))
    assert counts["pairs"] > 50
    assert estimates["implicit"].value == estimates["length_matched"].value == 0.5
    assert estimates["likelihood"].value != 0.5


def test_neither_batches_nor_the_order_of_examples_move_the_walk(pocket) -> None:
    one, other = (
        walk(pocket["chars-teacher"], pocket["chars-student"], examples, batch_size=batch_size)
        for examples, batch_size in ((EXAMPLES[:12], 64), (EXAMPLES[11::-1], 5))
    )
    assert one == other


def test_a_teacher_of_another_family_reads_the_students_text_its_own_way(pocket) -> None:
    estimates, counts = walk(pocket["bpe-teacher"], pocket["chars-student"])
    assert counts["unreadable"] == 0
    assert estimates["implicit"].high < 0.5


def test_the_teacher_may_write_and_then_prompts_without_a_wrong_completion_are_counted(pocket) -> None:
    estimates, counts = walk(pocket["chars-teacher"], pocket["chars-student"], writer="teacher")
    assert counts["no_wrong"] > 25
    assert counts["compared"] == counts["prompts"] - counts["no_wrong"] - counts["no_right"]
    assert all(estimate.n <= counts["compared"] for estimate in estimates.values())


def test_an_unknown_writer_is_refused_by_name(pocket) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'teacher'"):
        walk(pocket["chars-teacher"], pocket["chars-student"], writer="teachr")
