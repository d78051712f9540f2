"""The table of calibration rewards, and what is done to a reward before it becomes an advantage.

Every row says of a text how well it suits a student that one does not know, judged by a proxy: **higher means
more distillable**, whatever the sign in the row's paper. Which way the knob is turned is the weight's business
(the mode) and not the reward's. Rewards are plain numbers, so no gradient can flow through them (field report
48); they are constants in a policy gradient.

None means "no opinion". A completion that was cut off gets it: half a text has no probability of its own, and
a policy that learns to be cut off gains nothing from it.

To add a reward, write a function ``(rows, scores, spec) → one number or None a row`` and its line in `REWARDS`.

References: arXiv:2604.18963 (log-ratio, group-wise normalisation), arXiv:2601.14249 (rank-surprisal ratio).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from stillroom import seeds
from stillroom.calibration.rollouts import Written
from stillroom.calibration.scoring import TokenScores
from stillroom.config.calibration import RewardSpec
from stillroom.errors import ConfigError, StillroomError, unknown_name

Values = list[float | None]
"""One number a completion, or None where there is no opinion."""

Need = Literal["policy", "proxy", "influence"]

RANK_CLIP = 100
"""Ranks beyond it count as it (arXiv:2601.14249): how far down a hopeless token stands says nothing."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward may look at: the same completions under the policy and under one proxy."""

    policy: Sequence[TokenScores] | None = None
    proxy: Sequence[TokenScores] | None = None
    influence: Sequence[float | None] | None = None
    """From `stillroom.calibration.influence.Influence.values` with this proxy."""


RewardFunction = Callable[[Sequence[Written], Scores, RewardSpec], Values]


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One calibration reward."""

    function: RewardFunction
    summary: str
    needs: tuple[Need, ...]
    """Fields of `Scores` that it reads; the others may be None."""
    reference: str


def log_ratio(rows: Sequence[Written], scores: Scores, spec: RewardSpec) -> Values:
    """How much likelier the proxy finds a text than the policy that wrote it, in nats.

    ``log π_proxy(y) − log π_policy(y)``, each over its own tokens and its own end token; with
    ``spec.normalisation`` ``sequence`` as it stands, ``token`` divided by the number of the *policy's* tokens (each
    side by its own would compare units, and not models, where tokenizers differ), ``byte`` by the UTF-8 bytes of
    the text and one more for the end token.

    Exactly 0 if both give the text one probability. The sequence's mean over texts of the policy is
    −KL(policy‖proxy), and its policy gradient that of −KL.

    Reference:
        arXiv:2604.18963, eqs. 7-10.
    """
    assert scores.policy is not None
    assert scores.proxy is not None
    values: Values = []
    for row, policy, proxy in zip(rows, scores.policy, scores.proxy, strict=True):
        if not row.ended:
            values.append(None)
            continue
        log_policy, log_proxy = _nats(row, policy, "the policy"), _nats(row, proxy, "the proxy")
        units = {"sequence": 1, "token": len(policy.logprobs), "byte": policy.num_bytes + 1}
        values.append((log_proxy - log_policy) / units[spec.normalisation])
    return values


def rank_surprisal(rows: Sequence[Written], scores: Scores, spec: RewardSpec) -> Values:
    """Minus the rank-surprisal ratio: high where the proxy is surprised, yet had the token high on its list.

    ``−Σ_t min(rank_t, 100) / Σ_t −log p_t`` under the proxy, end token included. None also for a text that the
    proxy is certain of to the last bit, for which the ratio does not exist.

    Reference:
        arXiv:2601.14249; there the ratio itself, and lower is better.
    """
    assert scores.proxy is not None
    values: Values = []
    for row, proxy in zip(rows, scores.proxy, strict=True):
        surprisal = -_nats(row, proxy, "the proxy") if row.ended else 0.0
        ranks = float(proxy.ranks.clamp(max=RANK_CLIP).sum())
        values.append(-ranks / surprisal if surprisal else None)
    return values


def influence(rows: Sequence[Written], scores: Scores, spec: RewardSpec) -> Values:
    """How far training on a text would move the proxy towards a better score, per token of the text.

    The slopes are measured beforehand, by `stillroom.calibration.influence.Influence`, since that needs the
    proxy itself.

    Reference:
        arXiv:2002.08484 for the inner product of gradients; by finite differences as in arXiv:2504.13146.
    """
    assert scores.influence is not None
    return [value if row.ended else None for row, value in zip(rows, scores.influence, strict=True)]


REWARDS: Mapping[str, RewardRow] = MappingProxyType(
    {
        "log_ratio": RewardRow(
            log_ratio,
            "likelier under the proxy than under the policy itself",
            needs=("policy", "proxy"),
            reference="arXiv:2604.18963",
        ),
        "rank_surprisal": RewardRow(
            rank_surprisal,
            "surprising to the proxy, yet near the top of its list",
            needs=("proxy",),
            reference="arXiv:2601.14249",
        ),
        "influence": RewardRow(
            influence,
            "training on it moves the proxy towards a better score",
            needs=("influence",),
            reference="arXiv:2002.08484",
        ),
    }
)


def reward_row(name: str) -> RewardRow:
    """A row of the table.

    Raises:
        ConfigError: no such reward.
    """
    if name not in REWARDS:
        raise ConfigError(unknown_name("calibration reward", name, REWARDS))
    return REWARDS[name]


def calibration_reward(rows: Sequence[Written], proxies: Sequence[Scores], spec: RewardSpec) -> Values:
    """The reward ``spec.name`` of each completion: the mean over proxies of what each of them says.

    Args:
        rows: completions.
        proxies: the scores of one or more proxies, each beside the same policy's.
        spec: names the reward and its normalisation.

    Returns:
        None where any of the proxies has no opinion.

    Raises:
        ConfigError: no such reward, or no proxy.
        StillroomError: a model gives a text no probability at all, so that it has no finite reward.
    """
    function = reward_row(spec.name).function
    if not proxies:
        raise ConfigError(f"reward {spec.name!r} asks a proxy, and there is none. Give --proxy.path.")
    values: Values = []
    for opinions in zip(*(function(rows, scores, spec) for scores in proxies), strict=True):
        numbers = [opinion for opinion in opinions if opinion is not None]
        values.append(math.fsum(numbers) / len(numbers) if len(numbers) == len(opinions) else None)
    return values


def normalise_in_groups(
    values: Sequence[float | None], group_size: int, *, clip: float | None = 2.0, eps: float = 1e-4
) -> Values:
    """Each value against the others of its group: ``(r − mean) / (std + eps)``, then clipped to ±clip.

    Mean and sample standard deviation are taken over the members that are not None, which stay None. A group
    with fewer than two members, or whose members are all equal, gets exactly 0 (field report 52).

    Args:
        values: group after group.
        group_size: completions of one prompt.
        clip: largest size; None leaves it alone.
        eps: keeps differences far below it from being blown up to full size.

    Raises:
        ConfigError: group_size below 2, or not a divisor of the number of values.
        StillroomError: NaN or infinite; names the place.

    Reference:
        arXiv:2402.03300, section 4.1.2; separately for each reward, arXiv:2604.18963, eq. 11.
    """
    for at, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise StillroomError(
                f"the reward of completion {at} (group {at // max(group_size, 1)}) is {value}, and normalising it "
                "would spoil its whole group in silence. Return None for completions that have no reward, and check "
                "the model or function that made this one."
            )
    normalised: Values = []
    for group in _groups(len(values), group_size):
        members = [value for at in group if (value := values[at]) is not None]
        if len(members) < 2 or min(members) == max(members):
            normalised += [None if values[at] is None else 0.0 for at in group]
            continue
        mean, scale = statistics.fmean(members), statistics.stdev(members) + eps
        for at in group:
            value = values[at]
            if value is not None:
                value = (value - mean) / scale
                value = value if clip is None else max(-clip, min(clip, value))
            normalised.append(value)
    return normalised


def gate(
    values: Sequence[float | None], rows: Sequence[Written], on_correct: bool, threshold: float = 1.0
) -> Values:
    """The values of correct completions only, so that right ones compete with right ones.

    Args:
        values: one for each row.
        rows: with the task's score.
        on_correct: False changes nothing.
        threshold: least score that counts as correct; an unparsed completion (None) never does.
    """
    return [
        value if not on_correct or (row.score is not None and row.score >= threshold) else None
        for value, row in zip(values, rows, strict=True)
    ]


def random_sign(
    values: Sequence[float | None], rows: Sequence[Written], group_size: int, seed: int
) -> Values:
    """The values with the sign of each group flipped or not, for good: a push as strong and without direction.

    The sign is a function of the seed and the group's prompt, so the policy is pushed one way on one prompt
    and the other way on another, every time it meets them.

    Raises:
        ConfigError: group_size below 2, or groups that mix prompts.
    """
    signed: Values = []
    for group in _groups(len(values), group_size):
        prompts = {rows[at].example_id for at in group}
        if len(prompts) > 1:
            raise ConfigError(
                f"completions {group.start} to {group.stop - 1} are one group and answer different prompts "
                f"({', '.join(sorted(prompts))}), so they have no common sign. Pass them group after group."
            )
        sign = 1.0 if seeds.key(seed, "random_sign", prompts.pop()) & 1 else -1.0
        for at in group:
            value = values[at]
            signed.append(None if value is None else sign * value)
    return signed


def advantages(
    task: Sequence[float | None], calibration: Sequence[float | None], weight: float
) -> list[float]:
    """What a completion's log-probability is weighted with: ``task + weight · calibration``, None counting as 0.

    Args:
        task: the group-normalised utility.
        calibration: the group-normalised calibration reward.
        weight: the strength, negative for an undistillable teacher.

    Reference:
        arXiv:2604.18963, eq. 11.
    """
    return [(t or 0.0) + weight * (c or 0.0) for t, c in zip(task, calibration, strict=True)]


def _groups(n: int, group_size: int) -> Iterator[range]:
    if group_size < 2 or n % group_size:
        raise ConfigError(
            f"{n} completions in groups of {group_size}: a reward is compared within its group, which needs two or "
            "more completions, and all groups alike. Set train.num_generations to 2 or more, and pass whole groups."
        )
    return (range(start, start + group_size) for start in range(0, n, group_size))


def _nats(row: Written, scores: TokenScores, who: str) -> float:
    """Log-probability of a whole completion, summed in float64."""
    total = float(scores.logprobs.double().sum())
    if not math.isfinite(total):
        raise StillroomError(
            f"{who} gives the text of example {row.example_id!r} the log-probability {total}, so it has no finite "
            f"reward ({row.text[:60]!r}). Check that model's weights; none of its logits may be infinite."
        )
    return total
