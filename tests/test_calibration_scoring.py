"""A completion's scores are those of the text that the policy wrote, under each model's own tokens."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from tests.tiny import tiny_llama
from tests.tokenizers_in_code import BOS, CHATML, EOS, IM_END, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stillroom.calibration.rollouts import Written, text_of, through_first_end
from stillroom.calibration.scoring import Scorer, reads_same_ids
from stillroom.data.rendering import render_prompt
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.lora import add_lora
from stillroom.pocket import tokenizers
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

CHARS, BPE = tokenizers.build("chars"), tokenizers.build("bpe")
TEXTS = ["7a4;4c9;9f3#3", "#3", "", "The capital of France is Paris#Paris", "a"]


def row(text: str, tokenizer=CHARS, *, prompt="7acf=?", ended: bool = True, name: str = "e") -> Written:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id if ended else None
    return Written(name, prompt, render_prompt(tokenizer, prompt), ids, text, end, 1.0)


def rows_of(tokenizer) -> list[Written]:
    return [
        row(text, tokenizer, prompt=prompt, ended=ended, name=f"{text}|{prompt}")
        for text in TEXTS
        for prompt, ended in (("7acf=?", True), ("What comes next? 31 ab", False))
    ]


def by_definition(model, prompt_ids, scored) -> tuple[list[float], list[int]]:
    """Natural logs and ranks of the scored ids, one unpadded forward in float64 and sums written out."""
    reference = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt_ids, *scored]])).logits[0].tolist()
    logs, ranks = [], []
    for at, token in enumerate(scored):
        column = logits[len(prompt_ids) + at - 1]
        total = sum(math.exp(z) for z in column)
        logs.append(math.log(math.exp(column[token]) / total))
        ranks.append(1 + sum(z > column[token] for z in column))
    return logs, ranks


@contextmanager
def listening(model):
    """Collects what each forward was given: (ids, attention mask)."""
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hear(module, args, kwargs) -> None:
        heard.append((kwargs["input_ids"].clone(), kwargs["attention_mask"].clone()))

    handle = model.register_forward_pre_hook(hear, with_kwargs=True)
    try:
        yield heard
    finally:
        handle.remove()


@pytest.mark.parametrize("tokenizer", [CHARS, BPE], ids=["chars", "bpe"])
@pytest.mark.parametrize("padded_columns", [0, 9])
def test_scores_of_own_ids_are_those_of_the_definition_over_all_columns(tokenizer, padded_columns) -> None:
    model = tiny_llama(len(tokenizer) + padded_columns)
    rows = rows_of(tokenizer)
    for one, scores in zip(rows, Scorer(model, tokenizer, reads_ids=True).score(rows), strict=True):
        scored = (*one.ids, *([one.end_id] if one.ended else []))
        logs, ranks = by_definition(model, one.prompt_ids, scored)
        assert scores.logprobs.dtype == torch.float32
        assert scores.ranks.dtype == torch.int64
        assert scores.logprobs.tolist() == pytest.approx(logs, abs=2e-5)
        assert scores.ranks.tolist() == ranks
        assert scores.num_bytes == len(one.text.encode())


def test_scores_do_not_depend_on_the_batch_or_on_the_order() -> None:
    model, rows = tiny_llama(len(CHARS)), rows_of(CHARS)
    together = Scorer(model, CHARS, reads_ids=True).score(rows)
    backwards = Scorer(model, CHARS, batch_size=3, reads_ids=True).score(rows[::-1])[::-1]
    for one, other in zip(together, backwards, strict=True):
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)
        assert one.ranks.tolist() == other.ranks.tolist()


@pytest.mark.parametrize(("policy", "proxy"), [(CHARS, BPE), (BPE, CHARS)], ids=["chars-bpe", "bpe-chars"])
def test_policy_and_proxy_of_two_families_read_the_same_bytes(policy, proxy) -> None:
    text = "7a4;4c9;9f3#3"
    one = row(text, policy, prompt="What is the capital of France?")
    read = {}
    for name, tokenizer, reads_ids in (("policy", policy, True), ("proxy", proxy, False)):
        model = tiny_llama(len(tokenizer))
        with listening(model) as heard:
            (scores,) = Scorer(model, tokenizer, reads_ids=reads_ids).score([one])
        ((ids, mask),) = heard
        assert mask.all()
        first = len(render_prompt(tokenizer, one.prompt))
        assert ids[0, -1] == tokenizer.eos_token_id
        assert len(scores.logprobs) == ids.shape[1] - first
        read[name] = (
            text_of(tokenizer, ids[0, :first].tolist()),
            text_of(tokenizer, ids[0, first:-1].tolist()),
        )
        logs, ranks = by_definition(model, ids[0, :first].tolist(), ids[0, first:].tolist())
        assert scores.logprobs.tolist() == pytest.approx(logs, abs=2e-5)
        assert scores.ranks.tolist() == ranks
    assert read["policy"] == read["proxy"] == (f"<bos>{one.prompt}", text)
    assert len(one.prompt_ids) != len(render_prompt(proxy, one.prompt))  # the two do cut it differently


def test_a_proxy_of_the_same_family_gives_rendered_texts_the_scores_of_the_ids() -> None:
    model, rows = tiny_llama(len(CHARS)), rows_of(CHARS)
    by_ids = Scorer(model, CHARS, reads_ids=True).score(rows)
    by_text = Scorer(model, CHARS, reads_ids=False).score(rows)
    for one, other in zip(by_ids, by_text, strict=True):
        assert torch.equal(one.logprobs, other.logprobs)


def test_an_empty_completion_has_its_end_token_or_nothing() -> None:
    model = tiny_llama(len(CHARS))
    for reads_ids in (True, False):
        ended, cut = Scorer(model, CHARS, reads_ids=reads_ids).score([row(""), row("", ended=False)])
        logs, _ = by_definition(model, row("").prompt_ids, [CHARS.eos_token_id])
        assert ended.logprobs.tolist() == pytest.approx(logs, abs=2e-5)
        assert (len(cut.logprobs), len(cut.ranks), cut.num_bytes) == (0, 0, 0)
    assert Scorer(model, CHARS, reads_ids=True).score([]) == []


def test_the_policys_own_end_token_is_scored_where_it_has_several() -> None:
    model, ends = tiny_llama(len(CHARS)), (CHARS.eos_token_id, CHARS.pad_token_id)
    for end in ends:
        one = Written("e", "1", (1, 5), (6,), "2", end, None)
        (scores,) = Scorer(model, CHARS, reads_ids=True).score([one])
        assert scores.logprobs.tolist() == pytest.approx(by_definition(model, (1, 5), (6, end))[0], abs=2e-5)


def test_messages_are_closed_as_the_proxys_template_closes_an_answer_and_texts_with_its_end_token() -> None:
    tokenizer = byte_tokenizer(template=CHATML)
    model = tiny_llama(len(tokenizer))
    model.generation_config.eos_token_id = [EOS, IM_END]
    scorer = Scorer(model, tokenizer, reads_ids=False)
    chat = [{"role": "user", "content": "7acf=?"}]
    for prompt, end in ((chat, IM_END), ("7acf=?", EOS), (chat, IM_END)):
        one = Written("e", prompt, (1, 5), (6,), "#3", CHARS.eos_token_id, None)
        prompt_ids, ids = scorer.read(one)
        assert ids == (*tokenizer("#3")["input_ids"], end)
        assert prompt_ids == render_prompt(tokenizer, prompt)
    cut = Written("e", chat, (1, 5), (6,), "#3", None, None)
    assert scorer.read(cut)[1] == tuple(tokenizer("#3")["input_ids"])


def test_messages_need_a_chat_template() -> None:
    one = Written("e", [{"role": "user", "content": "7"}], (1, 5), (6,), "#3", 2, None)
    with pytest.raises(DataError, match="chat template"):
        Scorer(tiny_llama(len(CHARS)), CHARS, reads_ids=False).score([one])


def spaced_tokenizer(normalizer=None) -> PreTrainedTokenizerFast:
    """As SentencePiece's: a space before every text, which decoding takes away again."""
    letters = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz#3", "▁a"]
    core = Tokenizer(models.BPE({t: i for i, t in enumerate(letters)}, [("▁", "a")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    if normalizer is not None:
        core.normalizer = normalizer
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("text", ["ab", " ab", "a b", "  a", "", " "])
def test_spaces_that_a_tokenizer_adds_or_swallows_are_the_policys_own(text: str) -> None:
    tokenizer = spaced_tokenizer()
    scorer = Scorer(tiny_llama(len(tokenizer)), tokenizer, reads_ids=False)
    one = Written("e", "ab", (1, 5), (6,), text, None, None)
    prompt, ids = scorer.read(one)
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    assert "".join(tokens).replace("▁", " ") == text
    assert scorer.readable(one)
    assert prompt == render_prompt(tokenizer, "ab")


@pytest.mark.parametrize(
    ("tokenizer", "written", "read"),
    [(CHARS, "ab€c", "ab<unk>c"), (spaced_tokenizer(normalizers.Lowercase()), "aB", "ab")],
    ids=["unknown letter", "lower case"],
)
def test_a_text_that_the_proxy_cannot_hold_is_refused_and_both_texts_are_shown(
    tokenizer, written, read
) -> None:
    scorer = Scorer(tiny_llama(len(tokenizer)), tokenizer, reads_ids=False)
    one = Written("task/17", "ab", (1, 5), (6,), written, 2, None)
    assert not scorer.readable(one)
    with listening(scorer.model) as heard, pytest.raises(DataError) as caught:
        scorer.score([row("#3"), one] if tokenizer is CHARS else [one])
    assert all(part in str(caught.value) for part in (repr(read), repr(written), "task/17"))
    assert not heard


def test_what_the_policy_wrote_is_read_by_the_proxy_whatever_it_wrote() -> None:
    """Special tokens in the middle, and letters of the alphabet at random."""
    policy = tiny_llama(len(CHARS), scale=0.1)
    prompts = [Prompt("e", render_prompt(CHARS, "7acf=?"))]
    rollouts = HFSampler(policy, CHARS).sample(
        prompts, num_generations=40, max_completion_length=30, temperature=1.0, seed=0
    )
    rows = []
    for rollout in rollouts:
        ids, end = through_first_end(rollout.completion_ids, {CHARS.eos_token_id})
        rows.append(Written("e", "7acf=?", rollout.prompt_ids, ids, text_of(CHARS, ids), end, None))
    assert any("<" in one.text for one in rows)
    scorer = Scorer(tiny_llama(len(BPE)), BPE, reads_ids=False)
    for one in rows:
        assert text_of(BPE, scorer.read(one)[1][: -1 if one.ended else None]) == one.text
    ours = Scorer(policy, CHARS, reads_ids=True).score(rows)
    for scores, rollout in zip(ours, rollouts, strict=True):
        assert scores.logprobs.tolist() == pytest.approx(rollout.logprobs, abs=1e-4)


def test_a_row_longer_than_the_model_is_refused_before_the_first_forward() -> None:
    model = tiny_llama(len(CHARS))
    rows = [row("#3"), row("a" * 128, name="long")]
    with listening(model) as heard, pytest.raises(DataError, match=r"'long'.*reads 128"):
        Scorer(model, CHARS, reads_ids=True).score(rows)
    assert not heard
    fits = row("a" * (128 - 1 - len(rows[1].prompt_ids)))
    assert len(Scorer(model, CHARS, reads_ids=True).score([fits])[0].logprobs) == 128 - len(fits.prompt_ids)


def test_a_prompt_without_ids_is_refused() -> None:
    tokenizer = byte_tokenizer()
    scorer = Scorer(tiny_llama(len(tokenizer)), tokenizer, reads_ids=False)
    with pytest.raises(DataError, match="no ids"):
        scorer.score([Written("e", "", (1,), (6,), "#3", 2, None)])


def test_nan_logits_are_an_error_that_names_the_model() -> None:
    model = tiny_llama(len(CHARS))
    model.config._name_or_path = "broken-proxy"
    with torch.no_grad():
        model.lm_head.weight[7, 0] = math.nan
    with pytest.raises(StillroomError, match="broken-proxy"):
        Scorer(model, CHARS, reads_ids=True).score([row("#3")])


def test_a_token_without_probability_has_minus_infinity_and_no_nan() -> None:
    model = tiny_llama(len(CHARS))
    model.lm_head = torch.nn.Linear(16, len(CHARS))
    with torch.no_grad():
        model.lm_head.bias[row("#").ids[0]] = -math.inf
    (scores,) = Scorer(model, CHARS, reads_ids=True).score([row("#3")])
    assert scores.logprobs[0] == -math.inf
    assert scores.ranks[0] == len(CHARS)
    assert torch.isfinite(scores.logprobs[1:]).all()


def test_a_policy_scores_with_its_adapter_while_it_is_active_and_without_it_while_it_is_off() -> None:
    base = tiny_llama(len(CHARS))
    before = Scorer(base, CHARS, reads_ids=True).score([row("7a4#4")])[0].logprobs
    policy = add_lora(copy.deepcopy(base), r=4, alpha=8)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    scorer = Scorer(policy, CHARS, reads_ids=True)
    adapted = scorer.score([row("7a4#4")])[0].logprobs
    with policy.disable_adapter():
        assert torch.equal(scorer.score([row("7a4#4")])[0].logprobs, before)
    assert not torch.allclose(adapted, before, atol=0.1)
    merged = copy.deepcopy(policy).merge_and_unload()
    again = Scorer(merged, CHARS, reads_ids=True).score([row("7a4#4")])[0].logprobs
    assert again.tolist() == pytest.approx(adapted.tolist(), abs=1e-4)


def test_scoring_leaves_no_trace_in_the_model_and_carries_no_gradient() -> None:
    model = tiny_llama(len(CHARS))
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    scorer = Scorer(model, CHARS, reads_ids=True)
    calm = scorer.score([row("7a4#4")])[0]
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    again = scorer.score([row("7a4#4")])[0]
    assert torch.equal(calm.logprobs, again.logprobs)
    assert not again.logprobs.requires_grad
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random_state, torch.get_rng_state())


def test_ids_are_shared_by_equal_tokenizers_with_equal_templates_only() -> None:
    assert reads_same_ids(CHARS, tokenizers.build("chars"))
    assert not reads_same_ids(CHARS, BPE)
    assert not reads_same_ids(byte_tokenizer(template=CHATML), byte_tokenizer())


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        Scorer(tiny_llama(len(CHARS)), CHARS, batch_size=0, reads_ids=True)


def test_the_start_token_is_the_proxys_own() -> None:
    tokenizer = byte_tokenizer(prepends_start=True)
    scorer = Scorer(tiny_llama(len(tokenizer)), tokenizer, reads_ids=False)
    assert scorer.read(row("#3"))[0][0] == BOS
