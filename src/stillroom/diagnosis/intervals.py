"""Intervals whose independent unit is the prompt, for figures over several completions of each.

Completions of one prompt resemble each other, so prompts are what is resampled: a prompt is drawn with all its
completions or not at all. Prompts are sorted by id before anything is drawn, so an interval depends on the
completions alone and not on the order in which they were measured.

Legend: P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stillroom import seeds, stats
from stillroom.errors import DataError
from stillroom.types import Estimate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000


def numbered(prompt_ids: Sequence[Hashable], **columns: ArrayLike) -> tuple[NDArray[Any], int]:
    """The number 0 … P - 1 of each completion's prompt, in the order of the sorted ids, and P.

    Raises:
        DataError: no completions, or a column that has not one entry for each.
    """
    lengths = {name: np.shape(column) for name, column in columns.items()}
    if len(prompt_ids) == 0 or any(shape != (len(prompt_ids),) for shape in lengths.values()):
        raise DataError(
            f"there are {len(prompt_ids)} prompt ids, with columns of shapes {lengths}; a figure over completions "
            "needs at least one, and each with all its entries. Give columns of equal length."
        )
    distinct, number = np.unique(np.asarray(prompt_ids), return_inverse=True)
    return number, len(distinct)


def share(
    successes: ArrayLike, tries: ArrayLike, *, seed: int = 0, level: float = 0.95, unit: str = "share"
) -> Estimate | None:
    """``Σ successes / Σ tries`` over prompts; a prompt without tries says nothing and is left out.

    The interval is the bootstrap over prompts. Where all prompts agree (none looped, each preference was a
    tie) resampling them changes nothing and would claim certainty; the interval is then Wilson's with the prompts
    as tries. ``Estimate.method`` says which, ``Estimate.n`` how many prompts counted.

    Args:
        successes: [P], from 0 to the prompt's tries.
        tries: [P], at least 0.
        seed: of the resampling.
        level: coverage, inside (0, 1).
        unit: of the share.

    Returns:
        None if fewer than two prompts have tries: there is no spread to make an interval of.
    """
    numerators, denominators = np.asarray(successes, float), np.asarray(tries, float)
    numerators, denominators = numerators[denominators > 0], denominators[denominators > 0]
    if len(denominators) < 2:
        return None
    shares = numerators / denominators
    if shares.min() == shares.max():
        return stats.clustered_share([[value] for value in shares], level, unit=unit)
    return stats.bootstrap_ratio(numerators, denominators, seed, level, RESAMPLES, unit=unit)


def bootstrap(
    statistic: Callable[[NDArray[Any]], NDArray[Any]],
    num_prompts: int,
    *,
    seed: int = 0,
    level: float = 0.95,
    unit: str,
) -> Estimate:
    """A figure in [0, 1] that is no mean, with the normal interval of its bootstrap standard error.

    Percentiles would mislead for figures such as the calibration error, which resampling pushes up. The
    interval is cut to [0, 1], where the true value lies, so that its coverage stays.

    Args:
        statistic: from how often each prompt counts, float ``[R, P]``, to the figure under each, ``[R]``; NaN
            where a resample has none.
        num_prompts: P, at least 2.
        seed: of the resampling.
        level: coverage, inside (0, 1).
        unit: of the figure.

    Raises:
        DataError: fewer than two prompts.
    """
    if num_prompts < 2:
        raise DataError(f"{num_prompts} prompt(s) give no interval; measure at least two.")
    value = float(statistic(np.ones((1, num_prompts)))[0])
    generator = np.random.default_rng(seeds.key(seed, "diagnosis/bootstrap"))
    drawn = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES)
    spread = np.nanstd(statistic(drawn.astype(float)), ddof=1) * np.sqrt(num_prompts / (num_prompts - 1))
    source = f"bootstrap over {num_prompts} prompts, {RESAMPLES} resamples"
    estimate = stats.normal_interval(value, float(spread), level, n=num_prompts, unit=unit, source=source)
    return replace(estimate, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))
