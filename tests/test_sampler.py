"""What is asked for is what is sampled, whatever the batch; and sampling leaves no trace."""

from __future__ import annotations

import pytest
import torch
from scipy import stats as reference
from tests.tiny import char_tokenizer, tiny_llama
from transformers import GenerationConfig

from stillroom import seeds
from stillroom.errors import ConfigError, StillroomError
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

TOKENIZER = char_tokenizer()
PROMPTS = [Prompt(f"p{i}", (1, *range(4, 4 + length))) for i, length in enumerate([3, 9, 1, 6, 2, 12])]


def draw(model, prompts=PROMPTS, *, batch_size=64, **settings):
    settings = {"max_completion_length": 12, "temperature": 1.0, "seed": 3, **settings}
    return HFSampler(model, TOKENIZER, batch_size=batch_size).sample(prompts, **settings)


def test_greedy_decoding_equals_generate_token_for_token() -> None:
    model = tiny_llama()
    ours = draw(model, temperature=0.0)
    for prompt, rollout in zip(PROMPTS, ours, strict=True):
        theirs = model.generate(
            torch.tensor([prompt.ids]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=2
        )
        assert list(rollout.completion_ids) == theirs[0, len(prompt.ids) :].tolist()


def test_a_rows_sample_depends_neither_on_its_batch_nor_on_its_place() -> None:
    model = tiny_llama()
    together = {r.example_id: r for r in draw(model, batch_size=64)}
    one_by_one = {r.example_id: r for r in draw(model, list(reversed(PROMPTS)), batch_size=1)}
    for name, rollout in together.items():
        assert rollout.completion_ids == one_by_one[name].completion_ids
        assert rollout.logprobs == pytest.approx(one_by_one[name].logprobs, abs=1e-4)


def test_seeds_and_generations_give_different_samples_in_prompt_major_order() -> None:
    model = tiny_llama()
    rollouts = draw(model, PROMPTS[:2], num_generations=3)
    assert [r.example_id for r in rollouts] == ["p0"] * 3 + ["p1"] * 3
    assert len({r.completion_ids for r in rollouts}) == 6
    assert [r.completion_ids for r in draw(model, PROMPTS[:2], num_generations=3, seed=4)] != [
        r.completion_ids for r in rollouts
    ]
    assert draw(model, PROMPTS[:2], num_generations=3) == rollouts


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_first_tokens_follow_the_tempered_softmax(temperature: float) -> None:
    model = tiny_llama(vocab_size=len(TOKENIZER), scale=0.3)
    prompt = (1, 20, 30)
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(0)
    rollouts = draw(
        model,
        [Prompt("p", prompt)],
        num_generations=3000,
        max_completion_length=1,
        temperature=temperature,
        batch_size=512,
    )
    first = torch.tensor([r.completion_ids[0] for r in rollouts])
    counts = torch.bincount(first, minlength=len(expected)).double()
    common = expected * 3000 > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]).double()
    assert reference.chisquare(observed, wanted / wanted.sum() * 3000).pvalue > 0.001


def test_report_54_logprobs_are_those_of_the_tempered_distribution_that_was_sampled() -> None:
    model = tiny_llama(vocab_size=len(TOKENIZER))
    rollout = draw(model, PROMPTS[:1], temperature=0.6)[0]
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / 0.6
    again = logits.log_softmax(1).gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
    assert rollout.logprobs == pytest.approx(again.tolist(), abs=1e-4)


def test_report_62_generation_defaults_of_the_model_are_neither_used_nor_changed() -> None:
    model = tiny_llama(scale=0.2)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.01, top_k=1, eos_token_id=2)
    before = model.generation_config.to_dict()
    rollouts = draw(model, PROMPTS[:1], num_generations=32)
    assert len({r.completion_ids for r in rollouts}) > 8
    assert model.generation_config.to_dict() == before


def test_report_63_sampling_during_training_equals_a_clean_copy_and_leaves_the_model_as_it_was() -> None:
    clean, model = tiny_llama(), tiny_llama()
    model.train()
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    state = torch.get_rng_state()
    assert draw(model, temperature=0.0) == draw(clean, temperature=0.0)
    assert model.training
    assert model.is_activation_checkpointing
    assert model.config.use_cache is False
    assert torch.equal(torch.get_rng_state(), state)


def test_report_2_padded_columns_are_never_sampled_whatever_their_logits() -> None:
    model = tiny_llama(vocab_size=104)
    with torch.no_grad():
        model.lm_head.weight[len(TOKENIZER) :] *= 50
    rollouts = draw(model, num_generations=8)
    assert max(i for r in rollouts for i in r.completion_ids) < len(TOKENIZER)


def test_reports_13_and_19_every_declared_end_id_ends_a_completion_and_is_kept() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 30, 31, 32, 33, 34, 35, 36]
    rollouts = draw(model, num_generations=8, max_completion_length=40)
    ended = [r for r in rollouts if r.stop_reason == "end"]
    assert len(ended) > 10
    ends = set(model.generation_config.eos_token_id)
    for r in rollouts:
        inside = [i for i in r.completion_ids if i in ends]
        assert inside == ([r.completion_ids[-1]] if r.stop_reason == "end" else [])
        assert len(r.logprobs) == len(r.completion_ids)
        assert (len(r.completion_ids) == 40) or r.stop_reason == "end"


def test_report_87_the_sampler_speaks_with_the_weights_as_they_are_now() -> None:
    model = tiny_llama()
    sampler = HFSampler(model, TOKENIZER)
    settings = {"max_completion_length": 6, "temperature": 0.0, "seed": 0}
    before = sampler.sample(PROMPTS[:1], **settings)
    with torch.no_grad():
        model.lm_head.weight[40] += 10 * torch.sign(model.lm_head.weight.mean())
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    after = sampler.sample(PROMPTS[:1], **settings)
    assert after != before
    greedy = model.generate(torch.tensor([PROMPTS[0].ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert list(after[0].completion_ids) == greedy[0, len(PROMPTS[0].ids) :].tolist()


def test_near_ties_are_counted() -> None:
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)  # all logits equal: greedy is all ties, sampling has none
    sampler = HFSampler(model, TOKENIZER)
    sampler.sample(PROMPTS, max_completion_length=4, temperature=0.0, seed=0)
    assert sampler.stats.near_ties == sampler.stats.tokens == 4 * len(PROMPTS)
    sampler.sample(PROMPTS, max_completion_length=4, temperature=1.0, seed=0)
    assert sampler.stats.near_ties < 4 * len(PROMPTS) + 3


def test_noise_is_keyed_by_seed_example_and_generation_alone() -> None:
    assert seeds.key(0, "sample", "p0", 0) != seeds.key(0, "sample", "p0", 1)
    model = tiny_llama()
    renamed = [Prompt("other", PROMPTS[0].ids)]
    assert draw(model, renamed)[0].completion_ids != draw(model, PROMPTS[:1])[0].completion_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1.0}, "temperature=-1"), ({"max_completion_length": 0}, "max_completion_length=0")],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(tiny_llama(), **settings)


def test_an_empty_prompt_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="'nothing' has no ids"):
        draw(tiny_llama(), [Prompt("nothing", ())])


def test_nan_logits_stop_the_sampler_and_name_the_model() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(StillroomError, match="NaN logits while sampling"):
        draw(model)


def test_a_model_without_any_end_token_is_refused() -> None:
    model = tiny_llama()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="declares an end token"):
        HFSampler(model, tokenizer)
