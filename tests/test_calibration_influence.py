"""The influence of a text is the inner product of two gradients, and measuring it leaves the proxy as it was."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.tiny import tiny_llama

from stillroom.calibration.influence import Influence, gold_direction, moved, score_direction, unit
from stillroom.calibration.rollouts import Written, text_of, through_first_end
from stillroom.calibration.scoring import Scorer
from stillroom.data.rendering import render_prompt
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.loading import load_teacher, load_tokenizer
from stillroom.models.lora import add_lora
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import Chains
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Example, Prompt

CHARS, BPE = tokenizers.build("chars"), tokenizers.build("bpe")
END = CHARS.eos_token_id
EXAMPLES = Chains(lengths=(1, 2)).sample("train", 6, seed=0)


def tiny_proxy(tokenizer=CHARS, *, double: bool = True):
    model = tiny_llama(len(tokenizer), scale=0.3)
    return model.double() if double else model


def own_samples(model, tokenizer=CHARS, *, examples=EXAMPLES, num_generations: int = 3) -> list[Written]:
    """The proxy's samples, graded by a stand-in for a task: which share of the text is digits."""
    prompts = {e.id: Prompt(e.id, render_prompt(tokenizer, e.prompt)) for e in examples}
    rollouts = HFSampler(model, tokenizer).sample(
        list(prompts.values()),
        num_generations=num_generations,
        max_completion_length=8,
        temperature=1.0,
        seed=0,
    )
    asked = {e.id: e.prompt for e in examples}
    rows = []
    for rollout in rollouts:
        ids, end = through_first_end(rollout.completion_ids, {tokenizer.eos_token_id})
        text = text_of(tokenizer, ids)
        score = sum(map(str.isdigit, text)) / len(text) if text else None
        rows.append(
            Written(rollout.example_id, asked[rollout.example_id], rollout.prompt_ids, ids, text, end, score)
        )
    return rows


def texts(tokenizer=CHARS) -> list[Written]:
    """Texts by another policy, one of them cut off."""
    written = [("7a4;4c9#9", True), ("#3", True), ("", True), ("73", False), ("zz:Z", True)]
    return [
        Written(
            f"t{i}",
            "7ac=?",
            (1, 9),
            tuple(CHARS(text, add_special_tokens=False)["input_ids"]),
            text,
            2 if ended else None,
            None,
        )
        for i, (text, ended) in enumerate(written)
    ]


def gradient_of(model, prompt_ids, scored) -> dict[str, torch.Tensor]:
    """∇ Σ log p by autograd, one text at a time."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter in parameters:
        parameter.requires_grad_(True)
    ids = torch.tensor([[*prompt_ids, *scored]])
    logs = model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    total = sum(logs[at, token] for at, token in enumerate(scored))
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def inner(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return float(sum((one[name].double() * other[name].double()).sum() for name in one))


def slopes_by_autograd(model, tokenizer, direction, rows) -> list[float | None]:
    reference = copy.deepcopy(model).double()
    slopes: list[float | None] = []
    for row in rows:
        if row.end_id is None:
            slopes.append(None)
            continue
        scored = (*tokenizer(row.text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        gradient = gradient_of(reference, render_prompt(tokenizer, row.prompt), scored)
        slopes.append(inner(direction, gradient) / len(scored))
    return slopes


def relative_error(values: list[float | None], right: list[float | None]) -> float:
    """‖values − right‖ / ‖right‖ over the texts that have a value, which must be the same ones."""
    assert [value is None for value in values] == [value is None for value in right]
    ours, exact = (np.array([value for value in column if value is not None]) for column in (values, right))
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("tokenizer", [CHARS, BPE], ids=["chars", "bpe"])
@pytest.mark.parametrize("kind", ["score", "gold"])
def test_the_influence_is_the_directional_derivative_that_autograd_gives(tokenizer, kind) -> None:
    model = tiny_proxy(tokenizer)
    scorer = Scorer(model, tokenizer, reads_ids=False)
    direction = (
        score_direction(scorer, own_samples(model, tokenizer))
        if kind == "score"
        else gold_direction(scorer, EXAMPLES)
    )
    rows = texts()
    values = Influence(scorer, direction).values(rows)
    right = slopes_by_autograd(model, tokenizer, direction, rows)
    assert [value is None for value in values] == [False, False, False, True, False]
    assert relative_error(values, right) < 1e-3
    assert np.std([value for value in values if value is not None]) > 0.01


@pytest.mark.parametrize("batch_size", [1, 64])
def test_the_direction_of_the_score_is_reinforce_with_the_mean_of_the_other_samples_taken_off(
    batch_size,
) -> None:
    model = tiny_proxy()
    rows = own_samples(model)
    assert {row.ended for row in rows} == {True, False}
    right: dict[str, torch.Tensor] = {}
    for row in rows:
        others = [r for r in rows if r.example_id == row.example_id and r is not row]
        advantage = (row.score or 0.0) - sum(r.score or 0.0 for r in others) / len(others)
        scored = (*row.ids, *([row.end_id] if row.ended else []))
        for name, part in gradient_of(model, row.prompt_ids, scored).items():
            right[name] = right.get(name, 0.0) + advantage * part
    direction = score_direction(Scorer(model, CHARS, batch_size=batch_size, reads_ids=False), rows)
    assert inner(direction, direction) == pytest.approx(1.0, abs=1e-12)
    assert inner(direction, right) == pytest.approx(math.sqrt(inner(right, right)), rel=1e-9)
    assert inner(right, right) > 0


def test_the_direction_of_gold_is_downhill_of_the_supervised_loss() -> None:
    model = tiny_proxy()
    right: dict[str, torch.Tensor] = {}
    for example in EXAMPLES:
        scored = (*CHARS(example.completion, add_special_tokens=False)["input_ids"], END)
        for name, part in gradient_of(model, render_prompt(CHARS, example.prompt), scored).items():
            right[name] = right.get(name, 0.0) + part
    direction = gold_direction(Scorer(model, CHARS, reads_ids=False), EXAMPLES)
    assert inner(direction, direction) == pytest.approx(1.0, abs=1e-12)
    assert inner(direction, right) == pytest.approx(math.sqrt(inner(right, right)), rel=1e-9)


def test_training_on_the_text_with_the_larger_influence_raises_the_expected_score_more() -> None:
    """Enumerated: a first token of one digit scores 1; the exact expected score before and after one small step."""
    model = tiny_proxy()
    prompt = render_prompt(CHARS, EXAMPLES[0].prompt)
    digits = torch.tensor(CHARS.convert_tokens_to_ids(list("0123456789")))

    def expected_score(proxy) -> torch.Tensor:
        return proxy(torch.tensor([prompt])).logits[0, -1].softmax(0)[digits].sum()

    names, parameters = zip(*model.named_parameters(), strict=True)
    gradient = torch.autograd.grad(expected_score(model), parameters)
    direction = dict(zip(names, gradient, strict=True))
    rows = [
        Written("e", EXAMPLES[0].prompt, prompt, tuple(CHARS(text)["input_ids"][1:]), text, END, None)
        for text in ("7", "z", "7a", "", "#", "4;")
    ]
    values = Influence(Scorer(model, CHARS, reads_ids=True), direction).values(rows)
    gains = []
    for row in rows:
        trained = copy.deepcopy(model)
        step = gradient_of(model, prompt, (*row.ids, END))
        with torch.no_grad():
            for name, weights in trained.named_parameters():
                weights += 1e-6 / (len(row.ids) + 1) * step[name]
            gains.append(float(expected_score(trained) - expected_score(model)))
    assert np.corrcoef(values, gains)[0, 1] > 0.999
    assert np.argmax(values) == np.argmax(gains)
    assert min(gains) < 0 < max(gains)


def test_the_default_step_serves_a_trained_proxy_in_float32_and_a_coarse_one_does_not() -> None:
    model, tokenizer = load_teacher("pocket:chars-proxy"), load_tokenizer("pocket:chars-proxy")
    scorer = Scorer(model, tokenizer, reads_ids=False)
    examples = Chains().sample("train", 12, seed=1)
    direction = gold_direction(scorer, examples)
    rows = [
        Written(e.id, e.prompt, (1,), (), text, END, None)
        for e in examples
        for text in (str(e.completion), f"#{e.answer}", "#0")
    ]
    exact = np.array(slopes_by_autograd(model, tokenizer, direction, rows))

    def error(**settings: float) -> float:
        return float(
            np.sqrt(np.mean((np.array(Influence(scorer, direction, **settings).values(rows)) - exact) ** 2))
        )

    assert error() < 0.005 * exact.std()
    assert error(step_size=0.01) > 0.1 * exact.std()


def bits(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_proxys_weights_modes_and_flags_are_bit_for_bit_what_they_were() -> None:
    model = tiny_proxy(double=False).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    scorer = Scorer(model, CHARS, reads_ids=False)
    calm = gold_direction(scorer, EXAMPLES)
    model.train()
    before, random_state = bits(model), torch.get_rng_state()
    with torch.no_grad():  # as inside a trainer's evaluation
        direction = gold_direction(scorer, EXAMPLES)
    assert all(torch.equal(calm[name], part) for name, part in direction.items())
    score_direction(scorer, own_samples(model))
    influence = Influence(scorer, direction, step_size=0.1)
    first, second = influence.values(texts()), influence.values(texts())
    assert first == second
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert torch.equal(random_state, torch.get_rng_state())
    # Adding and taking away again would not have done.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(direction[name], alpha=0.37).sub_(direction[name], alpha=0.37)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_are_put_back_when_scoring_fails_half_way() -> None:
    model = tiny_proxy(double=False)
    before = bits(model)
    scorer = Scorer(model, CHARS, reads_ids=False)
    influence = Influence(scorer, gold_direction(scorer, EXAMPLES))
    with pytest.raises(DataError):
        influence.values([*texts(), Written("e", "7a=?", (1,), (), "€", END, None)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan  # found only while the weights are moved
    broken = model.lm_head.weight.detach().clone()
    with pytest.raises(StillroomError, match="NaN"):
        influence.values(texts())
    assert torch.equal(model.lm_head.weight.nan_to_num(7.0), broken.nan_to_num(7.0))
    with torch.no_grad():
        model.lm_head.weight.copy_(before["lm_head.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_weights_are_moved_by_the_step_times_the_direction_on_each_side() -> None:
    model = tiny_proxy()
    direction = unit({"lm_head.weight": torch.ones_like(model.lm_head.weight)})
    before = model.lm_head.weight.detach().clone()
    with moved(model, direction, 0.5):
        step = model.lm_head.weight.detach() - before
    assert float(step.norm()) == pytest.approx(0.5)
    influence = Influence(Scorer(model, CHARS, reads_ids=True), direction, step_size=0.25)
    assert influence.step == pytest.approx(0.25 * float(before.norm()))


def test_an_adapter_is_differentiated_alone_and_a_frozen_proxy_everywhere() -> None:
    base = tiny_proxy()
    everywhere = gold_direction(
        Scorer(copy.deepcopy(base).requires_grad_(False), CHARS, reads_ids=False), EXAMPLES
    )
    assert everywhere.keys() == dict(base.named_parameters()).keys()
    adapted = add_lora(copy.deepcopy(base), r=2, alpha=4)
    scorer = Scorer(adapted, CHARS, reads_ids=False)
    direction = gold_direction(scorer, EXAMPLES)
    assert direction.keys() == {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in direction)
    assert all(
        value is None or math.isfinite(value) for value in Influence(scorer, direction).values(texts())
    )


def test_a_proxy_with_tied_embeddings_moves_them_once() -> None:
    model = tiny_proxy()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    scorer = Scorer(model, CHARS, reads_ids=False)
    direction = gold_direction(scorer, EXAMPLES)
    values = Influence(scorer, direction).values(texts())
    right = slopes_by_autograd(model, CHARS, direction, texts())
    assert relative_error(values, right) < 1e-3


def test_scores_that_never_differ_give_no_direction() -> None:
    model = tiny_proxy()
    rows = own_samples(model)
    same = [Written(r.example_id, r.prompt, r.prompt_ids, r.ids, r.text, r.end_id, 1.0) for r in rows]
    scorer = Scorer(model, CHARS, reads_ids=False)
    with pytest.raises(ConfigError, match="same score"):
        score_direction(scorer, same)
    with pytest.raises(ConfigError, match=r"length 0\.0"):
        gold_direction(scorer, [])


def test_a_single_sample_of_a_prompt_and_an_example_without_gold_are_refused() -> None:
    model = tiny_proxy()
    scorer = Scorer(model, CHARS, reads_ids=False)
    rows = own_samples(model)
    with pytest.raises(DataError, match="single sample"):
        score_direction(scorer, rows[:4])
    with pytest.raises(DataError, match="'bare' has no gold text"):
        gold_direction(scorer, [Example("bare", "7a=?", "3")])


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_direction_without_length_is_refused(value: float) -> None:
    model = tiny_proxy()
    scorer = Scorer(model, CHARS, reads_ids=False)
    with pytest.raises(ConfigError, match="length"):
        Influence(scorer, {"lm_head.weight": torch.full_like(model.lm_head.weight, value)})


def test_the_direction_of_another_model_coarse_weights_and_steps_of_nothing_are_refused() -> None:
    model = tiny_proxy()
    scorer = Scorer(model, CHARS, reads_ids=False)
    head = torch.ones_like(model.lm_head.weight)
    with pytest.raises(ConfigError, match="no such parameter"):
        Influence(scorer, {"head": head})
    with pytest.raises(ConfigError, match=r"one of shape"):
        Influence(scorer, {"lm_head.weight": head[:3]})
    for step_size in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="step_size"):
            Influence(scorer, {"lm_head.weight": head}, step_size)
    half = Scorer(tiny_proxy().bfloat16(), CHARS, reads_ids=False)
    with pytest.raises(ConfigError, match=r"bfloat16.*proxy\.dtype"):
        Influence(half, {"lm_head.weight": head})
