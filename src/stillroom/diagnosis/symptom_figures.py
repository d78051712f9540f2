"""The figures of a student's symptoms, from what it wrote: arrays in, estimates out, no model in sight.

Completions of one prompt resemble each other, so every interval has the prompt as its unit. What cannot be said
of the completions at hand (how confidence tells right from wrong, where nothing is wrong) is left out of the
result, and a count in it says why.

Legend: P prompts, R resamples, B bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stillroom import stats
from stillroom.diagnosis.intervals import bootstrap, numbered, share
from stillroom.errors import DataError
from stillroom.types import Estimate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BINS = 15
"""Equal-width bins of the calibration error; each holds its lower edge, the last one 1 as well."""
SURE = 0.9
"""Confidence above which a wrong completion counts as confidently wrong."""
NGRAM = 4
LOOP_REPEATS = 3


def confidence_figures(
    prompt_ids: Sequence[Hashable],
    right: ArrayLike,
    confidence: ArrayLike,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """How well confidence tells right completions from wrong ones.

    With c the confidence and r the grade (0 or 1) of each of n completions:

    - ``ece``: ``Σ over 15 equal-width bins |Σ in the bin (r - c)| / n``, expected calibration error;
    - ``brier``: mean of ``(c - r)²``;
    - ``auroc``: Pr[c_right > c_wrong] over all pairs, ties 1/2; left out if fewer than two prompts have a right one
      or fewer than two a wrong one (all are right, say);
    - ``sure_when_wrong``: share of the wrong ones with c above 0.9, and ``mean_when_wrong``, their mean c; both left
      out if fewer than two prompts have a wrong one;
    - ``right`` and ``wrong``: how many there are, which explains what is left out.

    Args:
        prompt_ids: one for each completion, of at least two prompts.
        right: bool, one for each.
        confidence: in [0, 1], one for each.
        seed: of the bootstraps over prompts.
        level: coverage of the intervals.

    Raises:
        DataError: unequal columns, a confidence outside [0, 1], or fewer than two prompts.

    Reference:
        Guo et al. 2017, arXiv:1706.04599, eq. 3 (calibration error); Brier 1950.
    """
    number, num_prompts = numbered(prompt_ids, right=right, confidence=confidence)
    r, c = np.asarray(right, bool), np.asarray(confidence, float)
    if not ((c >= 0) & (c <= 1)).all():
        at = int((~((c >= 0) & (c <= 1))).argmax())
        raise DataError(
            f"the confidence of completion {at} is {c[at]}, which is no probability, so it cannot be compared with how "
            "often the model is right. Give the exponential of a mean log-probability."
        )
    sum_by_prompt = partial(np.bincount, number, minlength=num_prompts)
    total, wrong = sum_by_prompt(), sum_by_prompt((~r).astype(float))
    gaps_PB = np.zeros((num_prompts, BINS))
    np.add.at(gaps_PB, (number, np.minimum((c * BINS).astype(int), BINS - 1)), r - c)
    over_prompts = {"seed": seed, "level": level}
    figures = {
        "ece": bootstrap(
            lambda k_RP: np.abs(k_RP @ gaps_PB).sum(1) / (k_RP @ total),
            num_prompts,
            unit="probability",
            **over_prompts,
        ),
        "brier": stats.bootstrap_ratio(sum_by_prompt((c - r) ** 2), total, unit="squared", **over_prompts),
        "auroc": _auroc(number, num_prompts, r, c, **over_prompts),
        "sure_when_wrong": share(
            sum_by_prompt(~r * (c > SURE)), wrong, unit="share of wrong completions", **over_prompts
        ),
        "mean_when_wrong": share(sum_by_prompt(~r * c), wrong, unit="probability", **over_prompts),
    }
    for name, count in (("right", r.sum()), ("wrong", (~r).sum())):
        figures[name] = stats.exact(int(count), n=len(r), unit="completions")
    return {name: figure for name, figure in figures.items() if figure is not None}


def _auroc(
    number: np.ndarray, num_prompts: int, r: np.ndarray, c: np.ndarray, *, seed: int, level: float
) -> Estimate | None:
    rights, wrongs = (np.bincount(number[side], minlength=num_prompts) for side in (r, ~r))
    rarer = min((rights > 0).sum(), (wrongs > 0).sum())
    if rarer < 2:
        return None
    wins_PP = np.zeros((num_prompts, num_prompts))
    for prompt in range(num_prompts):  # one at a time: all pairs at once would not fit
        own = c[r & (number == prompt)]
        won = np.greater.outer(own, c[~r]) + 0.5 * np.equal.outer(own, c[~r])
        wins_PP[prompt] = np.bincount(number[~r], won.sum(0), minlength=num_prompts)
    if (value := wins_PP.sum() / (rights.sum() * wrongs.sum())) in (0, 1):
        # Every resample agrees, which is no certainty: Wilson's interval, with the prompts of the rarer grade as tries.
        return stats.wilson(int(value) * int(rarer), int(rarer), level, unit="share of pairs")

    def of(k_RP: np.ndarray) -> np.ndarray:
        # A resample may draw no right or no wrong completion; it then has no value.
        pairs = (k_RP @ rights) * (k_RP @ wrongs)
        return np.divide(
            ((k_RP @ wins_PP) * k_RP).sum(1), pairs, out=np.full(len(pairs), np.nan), where=pairs > 0
        )

    return bootstrap(of, num_prompts, seed=seed, level=level, unit="share of pairs")


def transition_figures(
    first_right: Sequence[bool],
    second_right: Sequence[Sequence[bool]],
    *,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """What a second pass makes of the first: ``right_to_wrong`` and ``wrong_to_right``.

    Args:
        first_right: one grade for each prompt.
        second_right: one or more grades for each prompt.
        seed: of the bootstrap over prompts.
        level: coverage of the intervals.

    Returns:
        The share of second passes that are wrong where the first was right, and right where it was wrong;
        each left out if fewer than two prompts have such a first pass. Beside them ``first_right``, the number
        of those.
    """
    tries = np.array([len(second) for second in second_right])
    solved = np.array([sum(second) for second in second_right])
    first = np.asarray(first_right, bool)
    figures = {
        name: share(changed[chosen], tries[chosen], seed=seed, level=level, unit="share of second passes")
        for name, chosen, changed in (
            ("right_to_wrong", first, tries - solved),
            ("wrong_to_right", ~first, solved),
        )
    }
    figures["first_right"] = stats.exact(int(first.sum()), n=len(first), unit="prompts")
    return {name: figure for name, figure in figures.items() if figure is not None}


def ngrams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All n-grams in a row of ids, overlapping ones included."""
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def loops(ids: Sequence[int], is_truncated: bool) -> bool:
    """Whether a completion was cut off while it repeated itself: its last quarter (rounded up) holds some 4-gram
    three times or more, overlaps counted. One that ended by itself does not loop.
    """
    last = ids[len(ids) * 3 // 4 :]
    return is_truncated and max(Counter(ngrams(last, NGRAM)).values(), default=0) >= LOOP_REPEATS


def decoding_figures(
    prompt_ids: Sequence[Hashable],
    ids: Sequence[Sequence[int]],
    truncated: Sequence[bool],
    entropies: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """How the text holds together.

    - ``loops``: share of completions for which `loops` is true; ``truncated``: share cut off;
    - ``repeated_4grams``: share of 4-grams that stood in the same completion before;
    - ``distinct_2``: distinct / all bigrams of a prompt's completions together. It falls with their number, so
      compare only figures with equally many;
    - ``entropy_quarter_1`` … ``_4``: nats per token over the positions of each quarter of the completions: of T
      tokens, number t from 0 is in quarter ``floor(4 t / T)``.

    Shares are over prompts' sums, with a bootstrap over prompts. What fewer than two prompts have (completions too
    short for a 4-gram) is left out.

    Args:
        prompt_ids: one for each completion, of at least two prompts.
        ids: the writer's, without end token.
        truncated: whether cut off at the length limit.
        entropies: in nats, one for each scored token; the end token may be among them.
        seed: of the bootstrap.
        level: coverage of the intervals.

    Raises:
        DataError: unequal columns, or no completions.
    """
    number, num_prompts = numbered(prompt_ids, truncated=truncated)
    if not len(ids) == len(entropies) == len(number):
        raise DataError(
            f"{len(ids)} rows of ids and {len(entropies)} of entropies for {len(number)} completions; give one of each."
        )

    def by_prompt(values: Iterable[float]) -> np.ndarray:
        return np.bincount(number, list(values), minlength=num_prompts)

    fours = [ngrams(row, NGRAM) for row in ids]
    bigrams: list[list[tuple[int, ...]]] = [[] for _ in range(num_prompts)]
    for prompt, row in zip(number, ids, strict=True):
        bigrams[prompt] += ngrams(row, 2)
    completions = by_prompt([1.0] * len(ids))
    looped = (loops(row, cut) for row, cut in zip(ids, truncated, strict=True))
    parts = {
        "loops": (by_prompt(looped), completions, "share of completions"),
        "truncated": (by_prompt(truncated), completions, "share of completions"),
        "repeated_4grams": (
            by_prompt(len(grams) - len(set(grams)) for grams in fours),
            by_prompt(len(grams) for grams in fours),
            "share of 4-grams",
        ),
        "distinct_2": ([len(set(b)) for b in bigrams], [len(b) for b in bigrams], "share of bigrams"),
    }
    figures = {
        name: share(numerators, tries, seed=seed, level=level, unit=unit)
        for name, (numerators, tries, unit) in parts.items()
    }
    for quarter in range(4):
        own = [[h for t, h in enumerate(row) if 4 * t // len(row) == quarter] for row in entropies]
        tokens, nats = by_prompt(map(len, own)), by_prompt(map(sum, own))
        if (tokens > 0).sum() >= 2:
            figures[f"entropy_quarter_{quarter + 1}"] = stats.bootstrap_ratio(
                nats[tokens > 0], tokens[tokens > 0], seed, level, unit="nats/token"
            )
    return {name: figure for name, figure in figures.items() if figure is not None}
