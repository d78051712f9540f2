"""Each reward is the number its paper says, and pushes a policy where its documentation says."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from tests.tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from stillroom.calibration.influence import Influence
from stillroom.calibration.rewards import (
    REWARDS,
    Scores,
    advantages,
    calibration_reward,
    gate,
    normalise_in_groups,
    random_sign,
    reward_row,
)
from stillroom.calibration.rollouts import Written
from stillroom.calibration.scoring import Scorer, TokenScores
from stillroom.config.calibration import RewardSpec
from stillroom.errors import ConfigError, StillroomError
from stillroom.pocket import tokenizers

NORMALISATIONS = ("sequence", "token", "byte")


def token_scores(*logprobs: float, ranks: tuple[int, ...] = (), num_bytes: int = 0) -> TokenScores:
    return TokenScores(
        torch.tensor(logprobs), torch.tensor(ranks or (1,) * len(logprobs), dtype=torch.long), num_bytes
    )


def written(text: str = "", *, ended: bool = True, name: str = "e", score: float | None = 1.0) -> Written:
    return Written(name, "?", (0,), tuple(range(len(text))), text, 1 if ended else None, score)


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalisation", "right"),
    [("sequence", -6.0 + 2.0), ("token", (-6.0 + 2.0) / 2), ("byte", (-6.0 + 2.0) / (3 + 1))],
)
def test_the_log_ratio_is_taken_per_sequence_per_token_of_the_policy_or_per_byte_and_end(
    normalisation, right
) -> None:
    scores = Scores(
        [token_scores(-0.5, -1.5, num_bytes=3)], [token_scores(-1.0, -2.0, -0.5, -2.5, num_bytes=3)]
    )
    spec = RewardSpec("log_ratio", normalisation)
    assert calibration_reward([written("abc")], [scores], spec) == [pytest.approx(right)]
    # One probability of the text, cut into other tokens: no reward, whatever the unit.
    equal = Scores([token_scores(-1.0, -2.0, num_bytes=3)], [token_scores(-0.5, -1.0, -1.5, num_bytes=3)])
    assert calibration_reward([written("abc")], [equal], spec) == [0.0]


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_a_policy_that_is_its_own_proxy_has_log_ratio_exactly_zero(normalisation) -> None:
    tokenizer = tokenizers.build("chars")
    model = tiny_llama(len(tokenizer))
    rows = [
        Written("e", "7a=?", (1, 5, 6, 7), tuple(tokenizer(text)["input_ids"][1:]), text, 2, None)
        for text in ("7a4#4", "#4", "", "73;33")
    ]
    ours = Scorer(model, tokenizer, reads_ids=True).score(rows)
    theirs = Scorer(model, tokenizer, reads_ids=True).score(rows)
    rewards = calibration_reward(rows, [Scores(ours, theirs)], RewardSpec("log_ratio", normalisation))
    assert rewards == [0.0] * 4


def test_the_rank_surprisal_ratio_is_that_of_the_papers_toy_with_the_sign_turned() -> None:
    proxy = token_scores(math.log(0.5), math.log(0.1), ranks=(1, 3))
    (reward,) = calibration_reward(
        [written("ab")], [Scores(proxy=[proxy])], RewardSpec(name="rank_surprisal")
    )
    assert reward == pytest.approx(-4 / (0.6931 + 2.3026), abs=1e-4)
    assert reward == pytest.approx(-1.335, abs=1e-3)


def test_ranks_are_clipped_at_a_hundred_before_they_are_summed() -> None:
    spec = RewardSpec(name="rank_surprisal")
    far, farther, near = (token_scores(-4.0, -1.0, ranks=(r, 1)) for r in (100, 5000, 99))
    rewards = calibration_reward([written("a")] * 3, [Scores(proxy=[far, farther, near])], spec)
    assert rewards == [pytest.approx(-101 / 5)] * 2 + [pytest.approx(-100 / 5)]


def test_a_text_that_surprises_the_proxy_not_at_all_has_no_rank_surprisal() -> None:
    scores = Scores(proxy=[token_scores(0.0, 0.0), token_scores(-0.5, 0.0)])
    rewards = calibration_reward([written("a")] * 2, [scores], RewardSpec(name="rank_surprisal"))
    assert rewards == [None, -4.0]


@pytest.mark.parametrize("name", REWARDS)
def test_cut_off_completions_have_no_reward(name: str) -> None:
    one = [token_scores(-1.0, -2.0, num_bytes=2), token_scores(), token_scores(-3.0)]
    rows = [written("ab", ended=False), written("", ended=False), written("")]
    rewards = calibration_reward(rows, [Scores(one, one, [1.0, None, 2.0])], RewardSpec(name=name))
    assert rewards[:2] == [None, None]
    assert rewards[2] is not None


@pytest.mark.parametrize("name", REWARDS)
def test_every_row_reads_only_what_it_says_it_needs(name: str) -> None:
    row = REWARDS[name]
    there = {"policy": [token_scores(-1.0)], "proxy": [token_scores(-2.0)], "influence": [0.5]}
    scores = Scores(**{need: there[need] for need in row.needs})
    assert calibration_reward([written()], [scores], RewardSpec(name=name))[0] is not None
    assert row.summary
    assert row.reference.startswith("arXiv:")
    assert row.needs


def test_several_proxies_speak_with_the_mean_of_their_rewards_unless_one_has_no_opinion() -> None:
    policy = [token_scores(-1.0), token_scores(-1.0)]
    proxies = [
        Scores(policy, [token_scores(nats), token_scores(nats)], [nats, None if nats < -3 else 0.0])
        for nats in (-2.0, -3.0, -7.0)
    ]
    rows = [written()] * 2
    assert calibration_reward(rows, proxies, RewardSpec("log_ratio", "sequence")) == [-3.0, -3.0]
    assert calibration_reward(rows, proxies, RewardSpec("influence")) == [-4.0, None]


def test_unknown_rewards_and_missing_proxies_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'log_ratio'"):
        reward_row("logratio")
    with pytest.raises(ConfigError, match=r"proxy\.path"):
        calibration_reward([], [], RewardSpec())


@pytest.mark.parametrize("name", ["log_ratio", "rank_surprisal"])
def test_a_text_that_the_proxy_cannot_give_is_an_error_and_not_the_best_or_the_worst(name: str) -> None:
    scores = Scores([token_scores(-1.0)], [token_scores(-math.inf, ranks=(80,))])
    with pytest.raises(StillroomError, match=r"'task/3'.*-inf"):
        calibration_reward([written(name="task/3")], [scores], RewardSpec(name=name))


# --- the expected gradient on a policy that can be enumerated -----------------------------------------------------


class TwoWays(torch.nn.Module):
    """Writes "é" and the end, or the end at once: two texts, and two logits that choose between them.

    Ids: 0 is "é", 1 the end; after an "é" the end is certain.
    """

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))
        self.config = LlamaConfig(max_position_embeddings=8)
        self.device = torch.device("cpu")
        self.register_buffer("then", torch.tensor([-1000.0, 0.0], dtype=torch.float64))

    def forward(self, input_ids, logits_to_keep, **_):
        first = torch.arange(input_ids.shape[1])[None, :, None] == 0
        logits = torch.where(first, self.logits, self.then).expand(*input_ids.shape, 2)
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def letter_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"é": 0, "</s>": 1}, unk_token="</s>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


LETTER = letter_tokenizer()
BOTH = [Written("e", "é", (0,), (0,), "é", 1, 1.0), Written("e", "é", (0,), (), "", 1, 0.0)]


def rewards_of_both(name: str, normalisation: str, policy: TwoWays, proxy: TwoWays) -> list[float]:
    """Through the real scorers; v is the direction in which the proxy would learn to write the "é"."""
    scorer = Scorer(proxy, LETTER, reads_ids=True)
    ours = Scorer(policy, LETTER, reads_ids=True).score(BOTH)
    influence = Influence(scorer, {"logits": torch.tensor([3.0, -3.0], dtype=torch.float64)})
    scores = Scores(ours, scorer.score(BOTH), influence.values(BOTH))
    values = calibration_reward(BOTH, [scores], RewardSpec(name, normalisation))
    assert not any(isinstance(value, torch.Tensor) or value is None for value in values)
    return [value for value in values if value is not None]


def expected_gradient(policy: TwoWays, rewards: list[float]) -> list[float]:
    """Σ_y π(y) · r(y) · ∇log π(y), the reward a constant."""
    logs = policy.logits.log_softmax(0)
    objective = sum(logs[y].exp().detach() * rewards[y] * logs[y] for y in range(2))
    (gradient,) = torch.autograd.grad(objective, policy.logits)
    return gradient.tolist()


PROXY = (math.log(0.9), math.log(0.1))


def test_report_48_the_log_ratio_as_reward_has_minus_the_gradient_of_the_reverse_kl() -> None:
    policy, proxy = TwoWays(0.0, 0.0), TwoWays(*PROXY)
    rewards = rewards_of_both("log_ratio", "sequence", policy, proxy)
    assert policy.logits.grad is None
    assert proxy.logits.grad is None
    assert expected_gradient(policy, rewards) == pytest.approx([0.5493, -0.5493], abs=1e-4)
    log_pi, log_proxy = policy.logits.log_softmax(0), proxy.logits.detach().log_softmax(0)
    reverse_kl = (log_pi.exp() * (log_pi - log_proxy)).sum()
    (of_kl,) = torch.autograd.grad(reverse_kl, policy.logits)
    assert expected_gradient(policy, rewards) == pytest.approx((-of_kl).tolist(), abs=1e-9)


def slope(toward: float, probability: float) -> float:
    """The derivative of the log-probability of a choice along (1, −1)/√2 in its two logits."""
    return (toward - probability * 1 + (1 - probability) * 1) / math.sqrt(2)


# By hand, for policy (1/2, 1/2) and proxy (0.9, 0.1): the rewards of "é" + end and of the end alone.
BY_HAND = {
    ("log_ratio", "sequence"): (math.log(0.9 / 0.5), math.log(0.1 / 0.5)),
    ("log_ratio", "token"): (math.log(0.9 / 0.5) / 2, math.log(0.1 / 0.5)),  # two tokens, one token
    ("log_ratio", "byte"): (math.log(0.9 / 0.5) / 3, math.log(0.1 / 0.5)),  # two bytes and the end, the end
    ("rank_surprisal", "token"): (2 / math.log(0.9), 2 / math.log(0.1)),  # ranks 1 + 1, and 2
    ("influence", "token"): (slope(1, 0.9) / 2, slope(-1, 0.9)),
}


@pytest.mark.parametrize(("name", "normalisation"), BY_HAND)
def test_the_expected_gradient_of_each_reward_is_that_of_an_enumeration_by_hand(name, normalisation) -> None:
    policy, proxy = TwoWays(0.0, 0.0), TwoWays(*PROXY)
    rewards = rewards_of_both(name, normalisation, policy, proxy)
    right = BY_HAND[name, normalisation]
    assert rewards == pytest.approx(right, rel=1e-6)
    # π = (1/2, 1/2) and ∇log π = ±(1/2, −1/2), so the sum is a quarter of the difference.
    push = (right[0] - right[1]) / 4
    assert expected_gradient(policy, rewards) == pytest.approx([push, -push], rel=1e-6)


def test_every_reward_has_its_enumeration() -> None:
    assert {name for name, _ in BY_HAND} == set(REWARDS)
    assert {n for name, n in BY_HAND if name == "log_ratio"} == set(NORMALISATIONS)


@pytest.mark.parametrize(("name", "normalisation"), BY_HAND)
@pytest.mark.parametrize("policy_logits", [(0.0, 0.0), (1.0, 0.0)])
def test_normalised_in_groups_of_two_a_reward_keeps_only_its_order(
    name, normalisation, policy_logits
) -> None:
    policy, proxy = TwoWays(*policy_logits), TwoWays(*PROXY)
    rewards = rewards_of_both(name, normalisation, policy, proxy)
    logs = policy.logits.log_softmax(0)
    objective = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(2), repeat=2):
        shaped = normalise_in_groups([rewards[y] for y in group], 2)
        chance = math.prod(float(logs[y].detach().exp()) for y in group)
        objective = objective + chance * sum(a * logs[y] for a, y in zip(shaped, group, strict=True)) / 2
    (gradient,) = torch.autograd.grad(objective, policy.logits)
    # By hand: equal members give nothing. Each of the two mixed groups has advantages ±d/2 / (|d|/√2 + ε) and the
    # mean ½·(A·∇log π(é) − A·∇log π(end)) = ½·A·(1, −1), whatever π; together they have probability 2·π(é)·π(end).
    p = 1 / (1 + math.exp(policy_logits[1] - policy_logits[0]))
    d = rewards[0] - rewards[1]
    push = p * (1 - p) * (d / 2) / (abs(d) / math.sqrt(2) + 1e-4)
    assert gradient.tolist() == pytest.approx([push, -push], rel=1e-9)
    assert abs(push) == pytest.approx(p * (1 - p) / math.sqrt(2), rel=1e-3)


# --- shaping -----------------------------------------------------------------------------------------------------


def test_report_52_rewards_are_normalised_within_their_group_and_equal_ones_give_exactly_zero() -> None:
    first, second, third, fourth = normalise_in_groups([1.0, 1.0, 0.0, 4.0], 2)
    assert (first, second) == (0.0, 0.0)
    assert (third, fourth) == (pytest.approx(-0.707, abs=1e-3), pytest.approx(0.707, abs=1e-3))
    assert third == pytest.approx(-2 / (math.sqrt(8) + 1e-4), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, -0.1, 1e300, 0.1 + 0.2])
def test_equal_rewards_are_exactly_zero_without_a_sign(value: float) -> None:
    for shaped in normalise_in_groups([value] * 6, 3):
        assert shaped == 0
        assert math.copysign(1, shaped or 0.0) == 1


def test_members_without_a_reward_are_left_out_of_mean_and_deviation_and_stay_without() -> None:
    shaped = normalise_in_groups([None, 0.0, 4.0, None, 5.0, None, None, None], 4)
    assert shaped == [None, *normalise_in_groups([0.0, 4.0], 2), None, 0.0, None, None, None]


def test_large_values_are_clipped_on_both_sides_and_only_if_asked() -> None:
    values = [0.0] * 9 + [1.0]
    (top,) = {v for v in normalise_in_groups(values, 10, clip=None) if v and v > 0}
    assert top == pytest.approx(0.9 / (math.sqrt(0.1) + 1e-4))
    assert top > 2
    assert max(normalise_in_groups(values, 10), key=lambda v: v or 0.0) == 2.0
    assert min(normalise_in_groups([-v for v in values], 10), key=lambda v: v or 0.0) == -2.0
    assert normalise_in_groups(values, 10)[0] == pytest.approx(-0.1 / (math.sqrt(0.1) + 1e-4))


def test_differences_far_below_eps_are_not_blown_up() -> None:
    assert max(abs(v or 0.0) for v in normalise_in_groups([1.0, 1.0 + 1e-9], 2)) < 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_its_place(bad: float) -> None:
    with pytest.raises(StillroomError, match=r"completion 4 \(group 2\)"):
        normalise_in_groups([0.0, 1.0, None, 1.0, bad, 2.0], 2)


@pytest.mark.parametrize(("n", "group_size"), [(5, 2), (4, 1), (4, 0), (3, 4)])
def test_groups_that_are_not_whole_or_hold_one_are_refused(n: int, group_size: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.num_generations"):
        normalise_in_groups([0.0] * n, group_size)


def test_the_gate_lets_only_correct_completions_through() -> None:
    rows = [written(score=score) for score in (1.0, 0.5, None, 0.0, 1.0)]
    values = [0.1, 0.2, 0.3, 0.4, None]
    assert gate(values, rows, on_correct=True) == [0.1, None, None, None, None]
    assert gate(values, rows, on_correct=True, threshold=0.5) == [0.1, 0.2, None, None, None]
    assert gate(values, rows, on_correct=False) == values


def test_the_random_control_flips_whole_groups_by_seed_and_prompt_and_half_of_them() -> None:
    names = [f"chains/{i}" for i in range(400)]
    rows = [written(name=name) for name in names for _ in range(2)]
    values = [1.0, None] * 400
    signs = random_sign(values, rows, 2, seed=0)
    assert set(signs) == {1.0, -1.0, None}
    assert signs[1::2] == [None] * 400
    assert 150 < signs.count(1.0) < 250
    assert random_sign(values, rows, 2, seed=0) == signs
    backwards = random_sign(values, rows[::-1], 2, seed=0)
    assert backwards[::2] == signs[::2][::-1]  # the prompt decides, not the place
    assert (
        120
        < sum(a == b for a, b in zip(signs, random_sign(values, rows, 2, seed=1), strict=True)) - 400
        < 280
    )
    assert random_sign([2.0, -3.0], rows[:2], 2, seed=0) in ([2.0, -3.0], [-2.0, 3.0])


def test_a_group_of_two_prompts_has_no_sign() -> None:
    with pytest.raises(ConfigError, match="different prompts"):
        random_sign([1.0, 2.0], [written(name="a"), written(name="b")], 2, seed=0)


def test_the_advantage_is_utility_plus_strength_times_the_calibration_that_there_is() -> None:
    assert advantages([1.0, -1.0, None], [0.5, None, 2.0], -0.5) == [0.75, -1.0, -1.0]
    assert advantages([1.0], [7.0], 0.0) == [1.0]


def test_utility_and_calibration_are_normalised_apart_so_the_scale_of_a_reward_does_not_matter() -> None:
    task, calibration = [0.0, 1.0, 1.0, 0.0], [3.0, 1.0, 2.0, 0.0]
    plain = advantages(normalise_in_groups(task, 4), normalise_in_groups(calibration, 4), 1.0)
    scaled = advantages(
        normalise_in_groups(task, 4), normalise_in_groups([1000 * c for c in calibration], 4), 1.0
    )
    assert plain == pytest.approx(scaled, abs=1e-3)
    joint = normalise_in_groups([t + 1000 * c for t, c in zip(task, calibration, strict=True)], 4)
    assert plain != pytest.approx(joint, abs=0.1)
