"""Likelihoods against a token-by-token float64 oracle, and independence of batch, window and mode."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from tests.tiny import char_tokenizer, tiny_llama
from tests.tokenizers_in_code import byte_tokenizer

from stillroom.data.tasks import TASKS, load_task
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.evaluation.continuations import continuation_nats
from stillroom.evaluation.likelihood import (
    evaluate_likelihood,
    multiple_choice_accuracy,
    option_loglikelihoods,
    text_nats,
)
from stillroom.types import Example

TOKENIZER = char_tokenizer()
V = len(TOKENIZER)
QUESTIONS = [
    Example("short", "Q?", "A", options=("a", "bb")),
    Example("long", "Why " * 12 + "?", "C", options=("the first of all", "b", "no, this one")),
    Example("cloze", "Q\nA. x\nB. y\nAnswer:", "B", options=("x", "y"), meta={"cloze": "Q\nAnswer:"}),
]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def oracle_nats(model, context: tuple[int, ...], continuation: tuple[int, ...], start=lambda p: 0) -> float:
    """Σ -log p(id | ids before it), one forward pass a token, in float64, without padding or batches."""
    double = model if model.dtype == torch.float64 else copy.deepcopy(model).double()
    ids, total = context + continuation, 0.0
    for p in range(len(context), len(ids)):
        with torch.no_grad():
            logits = double(torch.tensor([ids[start(p) : p]])).logits[0, -1, :V].tolist()
        top = max(logits)
        total += top + math.log(sum(math.exp(x - top) for x in logits)) - logits[ids[p]]
    return total


# --- the engine ---------------------------------------------------------------------------------------


def test_option_loglikelihoods_equal_the_oracle() -> None:
    model = tiny_llama(V)
    for example, sums in zip(QUESTIONS, option_loglikelihoods(model, TOKENIZER, QUESTIONS), strict=True):
        context = ids_of(example.meta.get("cloze", example.prompt))
        expected = [-oracle_nats(model, context, ids_of(" " + option)) for option in example.options]
        assert sums == pytest.approx(expected, rel=1e-5)
        assert max(expected) - min(expected) > 1  # the options differ by more than any tolerance


def test_report_80_sums_and_answers_do_not_depend_on_the_batch() -> None:
    model = tiny_llama(V)
    rng = random.Random(0)
    docs = [
        Example(f"{n}", "".join(rng.choices("abc XYZ,", k=n)), "A", options=("yes it is", "no"))
        for n in (5, 50, 7, 90, 23)
    ]
    reference = option_loglikelihoods(model, TOKENIZER, docs, batch_size=1)
    for batch_size in (2, 3, 32):
        sums = option_loglikelihoods(model, TOKENIZER, docs, batch_size=batch_size)
        for one, other in zip(reference, sums, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        estimates = [
            multiple_choice_accuracy(model, TOKENIZER, docs, batch_size=b)[0] for b in (1, batch_size)
        ]
        assert estimates[0] == estimates[1]
    shuffled = option_loglikelihoods(model, TOKENIZER, docs[::-1], batch_size=2)[::-1]
    assert [x for s in shuffled for x in s] == pytest.approx([x for s in reference for x in s], abs=1e-4)


def test_columns_beyond_the_vocabulary_have_no_probability() -> None:
    padded = tiny_llama(V + 40)
    [sums] = option_loglikelihoods(padded, TOKENIZER, QUESTIONS[:1])
    expected = [-oracle_nats(padded, ids_of("Q?"), ids_of(" " + o)) for o in QUESTIONS[0].options]
    assert sums == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [2, 7, 8, 9, 20, 31])
def test_windows_score_every_token_once_behind_at_least_half_a_window(length: int) -> None:
    model, ids = tiny_llama(V), tuple(random.Random(length).choices(range(4, V), k=length))
    [nats] = continuation_nats(model, TOKENIZER, [(ids[:1], ids[1:])], batch_size=3, window=8)

    def start(p: int) -> int:
        """The first 8 tokens share a window; each later block of 4 is read in the 8 that end with it."""
        return 0 if p < 8 else min(p // 4 * 4 + 4, length) - 8

    expected = oracle_nats(model, ids[:1], ids[1:], start)
    assert all(p - start(p) >= 4 for p in range(4, length))
    assert nats == pytest.approx(expected, rel=1e-5)


def test_a_window_of_the_whole_text_is_one_pass() -> None:
    model, ids = tiny_llama(V), tuple(random.Random(0).choices(range(4, V), k=60))
    whole, cut = (
        continuation_nats(model, TOKENIZER, [(ids[:1], ids[1:])], batch_size=1, window=w)[0] for w in (60, 8)
    )
    assert whole == pytest.approx(oracle_nats(model, ids[:1], ids[1:]), rel=1e-5)
    assert abs(whole - cut) > 0.1


@pytest.mark.parametrize(("window", "says"), [(1, "at least 2"), (129, "the model reads 128")])
def test_a_window_that_cannot_be_is_refused(window: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        text_nats(tiny_llama(V), TOKENIZER, ["abc", "abd"], window=window)


def test_report_84_scoring_twice_gives_the_same_and_leaves_modes_and_random_states_alone() -> None:
    model = tiny_llama(V)
    model.config.attention_dropout = 0.5
    model.train()
    model.model.layers[0].eval()  # a module that was put into evaluation mode by hand stays there
    modes = [m.training for m in model.modules()]
    states = torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate()
    first, second = (text_nats(model, TOKENIZER, ["abc def", "xyz"])[0] for _ in range(2))
    assert first == second
    assert [m.training for m in model.modules()] == modes
    assert True in modes
    assert False in modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_the_mode_is_put_back_when_scoring_fails() -> None:
    model = tiny_llama(V).train()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(StillroomError, match="NaN logits"):
        text_nats(model, TOKENIZER, ["abc", "def"])
    assert model.training


# --- multiple choice ----------------------------------------------------------------------------------


def test_accuracy_is_that_of_the_likeliest_option_by_sum_and_by_byte() -> None:
    model = tiny_llama(V)
    rng = random.Random(1)
    words = ["cat", "a dog", "the very old horse", "eel", "no animal at all"]
    examples = [
        Example(f"{i}", f"{rng.random()}?", rng.choice("ABC"), options=tuple(rng.sample(words, 3)))
        for i in range(30)
    ]
    estimates, records = multiple_choice_accuracy(model, TOKENIZER, examples)
    hits, double = {"acc": 0, "acc_norm": 0}, copy.deepcopy(model).double()
    for example in examples:
        nats = [oracle_nats(double, ids_of(example.prompt), ids_of(" " + o)) for o in example.options]
        by_byte = [n / len(o) for n, o in zip(nats, example.options, strict=True)]
        hits["acc"] += "ABC"[nats.index(min(nats))] == example.answer
        hits["acc_norm"] += "ABC"[by_byte.index(min(by_byte))] == example.answer
    assert {name: round(estimates[name].value * 30) for name in hits} == hits
    assert hits["acc"] != hits["acc_norm"]
    assert estimates["acc_chance"].value == pytest.approx(1 / 3)
    assert {e.method for e in estimates.values()} == {"wilson", "exact count"}
    assert [r["example_id"] for r in records] == [e.id for e in examples]


def test_bytes_and_not_characters_normalise() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_llama(len(tokenizer))
    example = Example("x", "Q", "A", options=("ééé", "abcd"))
    _, [record] = multiple_choice_accuracy(model, tokenizer, [example])
    six, four = record["options_nats"]
    assert record["acc_norm"] == int(six / 6 >= four / 4)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (Example("x", "Q", "A"), "0 options"),
        (Example("x", "Q", "A", options=("one",)), "1 options"),
        (Example("x", "Q", "C", options=("a", "b")), "answer 'C' and 2 options"),
        (Example("x", "Q", "a", options=("a", "b")), "must be the letter"),
        (Example("x", "Q" * 126, "A", options=("a", "b")), "has 128 tokens and the model reads 127"),
    ],
)
def test_examples_that_cannot_be_scored_are_refused(example: Example, says: str) -> None:
    model = tiny_llama(V)
    model.config.max_position_embeddings = 127
    with pytest.raises(DataError, match=says):
        multiple_choice_accuracy(model, TOKENIZER, [example])
    with pytest.raises(DataError, match="no examples"):
        multiple_choice_accuracy(model, TOKENIZER, [])


# --- texts --------------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing_needs_log_v_nats_a_token() -> None:
    model = tiny_llama(V)
    torch.nn.init.zeros_(model.lm_head.weight)
    estimates, records = text_nats(model, TOKENIZER, ["abc", "a longer text, of 31 characters."])
    assert estimates["nats_per_token"].value == pytest.approx(math.log(V), rel=1e-6)
    assert estimates["bits_per_byte"].value == pytest.approx(math.log2(V), rel=1e-6)  # one byte a token here
    assert [(r["tokens"], r["bytes"]) for r in records] == [(3, 3), (32, 32)]


def test_texts_equal_the_oracle_alone_and_behind_prompts() -> None:
    model = tiny_llama(V)
    texts, prompts = ["abc", "de fgh"], ["tell me: ", "again"]
    estimates, records = text_nats(model, TOKENIZER, texts)
    # This tokenizer writes no start token of its own, so its <bos> (id 1) stands before the first token.
    expected = [oracle_nats(model, (1,), ids_of(text)) for text in texts]
    assert [r["nats"] for r in records] == pytest.approx(expected, rel=1e-5)
    assert estimates["nats_per_token"].value == pytest.approx(sum(expected) / 9, rel=1e-5)
    _, behind = text_nats(model, TOKENIZER, texts, prompts=prompts)
    expected = [oracle_nats(model, ids_of(p), ids_of(t)) for p, t in zip(prompts, texts, strict=True)]
    assert [r["nats"] for r in behind] == pytest.approx(expected, rel=1e-5)


def test_a_start_token_is_read_and_not_counted() -> None:
    tokenizer = byte_tokenizer(prepends_start=True)
    model = tiny_llama(len(tokenizer))
    _, records = text_nats(model, tokenizer, ["abc", "é"])
    assert [(r["tokens"], r["bytes"]) for r in records] == [(3, 3), (2, 2)]


@pytest.mark.parametrize(
    ("texts", "prompts", "says"),
    [
        (["abc"], None, "at least 2"),
        (["abc", ""], None, "text 1 is empty"),
        (["a", "b"], ["c"], "1 prompts for 2 texts"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(texts, prompts, says) -> None:
    with pytest.raises(DataError, match=says):
        text_nats(tiny_llama(V), TOKENIZER, texts, prompts=prompts)


def test_a_tokenizer_without_start_and_end_token_cannot_score_a_first_token() -> None:
    tokenizer = char_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="no start and no end token"):
        text_nats(tiny_llama(V), tokenizer, ["abc", "def"])


def test_the_measure_follows_what_the_examples_hold() -> None:
    model = tiny_llama(V)
    answered = [Example(str(i), f"say {i}\n", "", completion=f"it is {i}") for i in range(3)]
    asked = [Example(str(i), f"say {i}\n", "") for i in range(3)]
    assert set(evaluate_likelihood(model, TOKENIZER, QUESTIONS)[0]) == {"acc", "acc_norm", "acc_chance"}
    figures, records = evaluate_likelihood(model, TOKENIZER, answered)
    assert [r["example_id"] for r in records] == ["0", "1", "2"]
    assert (
        figures
        == text_nats(
            model, TOKENIZER, [e.completion or "" for e in answered], prompts=[e.prompt for e in answered]
        )[0]
    )
    assert (
        evaluate_likelihood(model, TOKENIZER, asked)[0]
        == (text_nats(model, TOKENIZER, [str(e.prompt) for e in asked])[0])
    )
    for mixed in ([*QUESTIONS, *asked], []):
        with pytest.raises(DataError, match="one figure measures one kind"):
            evaluate_likelihood(model, TOKENIZER, mixed)


# --- real models and data -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(shared):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "stories260k"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(
        folder
    )


def test_a_real_model_finds_its_own_stories_likelier_than_their_shuffled_words(stories) -> None:
    told = [
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
        "One day, a big dog saw a red ball. The dog was very happy and ran to the ball.",
    ]
    shuffled = [" ".join(random.Random(0).sample(t.split(), len(t.split()))) for t in told]
    good, bad = (text_nats(*stories, texts)[0]["nats_per_token"].value for texts in (told, shuffled))
    assert good < 1.6 < 2.5 < bad


@pytest.mark.parametrize("name", [n for n, spec in TASKS.items() if spec.files and spec.family != "maths"])
def test_every_file_task_has_a_likelihood(stories, shared, name) -> None:
    spec = TASKS[name]
    examples = [
        e for _, e in zip(range(3), load_task(name, shared / "data").examples(spec.test_split), strict=False)
    ]
    if name == "wikitext2":  # articles of thousands of tokens are for the slow test
        examples = [Example(e.id, "", "", completion=(e.completion or "")[:1500]) for e in examples]
    estimates, records = evaluate_likelihood(*stories, examples)
    assert len(records) == 3
    if spec.family == "multiple choice":
        assert set(estimates) == {"acc", "acc_norm", "acc_chance"}
    else:
        assert 1.0 < estimates["nats_per_token"].value < 12.0
        assert 0.5 < estimates["bits_per_byte"].value < 12.0
