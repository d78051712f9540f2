"""Intervals and tests. Every figure that Stillroom states gets its interval here.

Pick by what you hold: k successes in n tries (`wilson`), one number per item (`mean_interval`), several
samples per item (`clustered_mean`, or `clustered_share` for scores in [0, 1]), sums over tokens
(`bootstrap_ratio`), two models on the same items (`paired_difference`, `mcnemar_exact`), two methods over
several seeds (`log_ratio_mean`), a standard error made elsewhere (`normal_interval`), a plain count
(`exact`); and `holm` when many tests are read together.

The unit of independence is the item, the row or the seed, never the token and never the sample: tokens of
one row and samples of one prompt resemble each other, and counting them as independent gives intervals
that are too short. Only numpy and scipy are used; this room is in the cellar and everyone may enter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import bdtr, ndtr, ndtri, stdtrit

from stillroom import seeds
from stillroom.errors import ConfigError, DataError
from stillroom.types import Estimate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_RESAMPLE_CHUNK = 1 << 20
"""Indices drawn at once by the bootstrap: 8 MB, whatever the number of rows."""


def _critical(level: float) -> float:
    """The two-sided normal quantile z of a confidence level."""
    if not 0.0 < level < 1.0:
        raise ConfigError(
            f"confidence level {level} lies outside (0, 1), so no interval has it; give a share such as 0.95."
        )
    return float(ndtri(0.5 + level / 2))


def _values(values: ArrayLike, name: str, *, at_least: int) -> NDArray[Any]:
    """The values as a float64 vector, refused when empty, too few, or not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}; an interval needs one number per unit. Flatten it.")
    if array.size < at_least:
        raise DataError(
            f"{name} holds {array.size} value(s); an interval needs at least {at_least}, because the spread "
            "between units is what it is made of. Give more items, rows or seeds."
        )
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise DataError(
            f"{name}[{bad[0]}] is {array[bad[0]]} ({bad.size} of {array.size} are not finite); a mean over "
            "it would be meaningless. Find the row that made it, or count such rows apart."
        )
    return array


def _estimate(
    value: float, low: float, high: float, level: float, n: int, unit: str, method: str
) -> Estimate:
    """An Estimate whose ends are widened by rounding error, so that equal values do not shut it out."""
    return Estimate(float(value), float(min(low, value)), float(max(high, value)), level, n, unit, method)


def exact(value: float, *, n: int, unit: str) -> Estimate:
    """A counted fact about a finite set (rows, overlaps): no sampling, so no width."""
    return Estimate(float(value), float(value), float(value), 1.0, n, unit, "exact count")


def _wilson_ends(share: float, n: float, z: float) -> tuple[float, float]:
    """The two shares q whose distance to ``share`` is z standard errors ``sqrt(q (1 - q) / n)``."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    # At 0 and 1 the ends are exact; rounding would put them at 1e-18 or 1 + 1e-16.
    return 0.0 if share == 0 else max(centre - half, 0.0), 1.0 if share == 1 else min(centre + half, 1.0)


def wilson(successes: int, n: int, level: float = 0.95, *, unit: str = "share") -> Estimate:
    """Wilson's score interval for k successes in n independent tries.

    ``{q : |k/n - q| <= z sqrt(q (1 - q) / n)}``. It has width at 0 and at n successes, where the usual
    ``p ± z sqrt(p (1 - p) / n)`` claims certainty.

    Args:
        successes: k, a whole number between 0 and n.
        n: independent tries, at least 1.
        level: coverage, inside (0, 1).
        unit: what the share is of, for the report.

    Raises:
        DataError: n is below 1, or successes lie outside 0 … n.

    Reference:
        Wilson 1927, doi:10.1080/01621459.1927.10502953; recommended by Brown, Cai and DasGupta 2001.

    >>> print(wilson(0, 10))
    0 [0, 0.2775] share
    """
    z = _critical(level)
    if n < 1:
        raise DataError(f"a share over n = {n} tries has no value; evaluate at least one item.")
    if not 0 <= successes <= n or successes != int(successes):
        raise DataError(
            f"successes = {successes} is not a whole number between 0 and n = {n}; check the count."
        )
    low, high = _wilson_ends(successes / n, n, z)
    return _estimate(successes / n, low, high, level, n, unit, "wilson")


def _t_interval(array: NDArray[Any], level: float) -> tuple[float, float, float]:
    """Mean and ends of Student's t interval of a vector of at least two values."""
    _critical(level)
    mean = float(array.mean())
    half = float(stdtrit(array.size - 1, 0.5 + level / 2) * array.std(ddof=1) / math.sqrt(array.size))
    return mean, mean - half, mean + half


def mean_interval(values: ArrayLike, level: float = 0.95, *, unit: str) -> Estimate:
    """Student's t interval of a mean: ``m ± t(n - 1) s / sqrt(n)``.

    Equal values give an interval of no width; for shares, which are often all 0 or all 1, use `wilson` or
    `clustered_share`.

    Raises:
        DataError: fewer than two values, or one that is not finite.

    >>> print(mean_interval([1.0, 2.0, 3.0], unit="nats"))
    2 [-0.4841, 4.484] nats
    """
    array = _values(values, "values", at_least=2)
    return _estimate(*_t_interval(array, level), level, array.size, unit, f"t over {array.size} values")


def normal_interval(
    value: float, standard_error: float, level: float = 0.95, *, n: int, unit: str, source: str
) -> Estimate:
    """``value ± z · standard error``, for figures that come from elsewhere with a standard error.

    Args:
        value: the figure.
        standard_error: its standard error, at least 0.
        level: coverage, inside (0, 1).
        n: independent units behind it.
        unit: of the value.
        source: who computed the standard error, for ``method``.

    Raises:
        DataError: a number is not finite, or the standard error is negative.

    >>> print(normal_interval(0.5, 0.1, n=25, unit="accuracy", source="lm-eval"))
    0.5 [0.304, 0.696] accuracy
    """
    half = _critical(level) * float(
        _values([value, standard_error], "value and standard error", at_least=2)[1]
    )
    if half < 0:
        raise DataError(f"standard error {standard_error:g} is negative; check where it comes from.")
    return _estimate(value, value - half, value + half, level, n, unit, f"normal, standard error by {source}")


def _expanded_quantiles(replicates: NDArray[Any], n: int, level: float) -> tuple[float, float]:
    """Percentile interval with its tail share corrected for small n.

    A plain percentile interval of a mean is the normal interval with the divide-by-n standard deviation:
    too short by ``sqrt((n - 1) / n)`` and by z against t. The tail share
    ``ndtr(-sqrt(n / (n - 1)) t(n - 1))`` undoes both (Hesterberg 2015, arXiv:1411.5279, section 3.3).
    """
    tail = float(ndtr(-math.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.5 + level / 2)))
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return float(low), float(high)


def _resample_sums(columns: NDArray[Any], seed: int, resamples: int) -> NDArray[Any]:
    """Sums of each column over rows drawn with replacement: ``[C, n]`` to ``[C, resamples]``."""
    if resamples < 100:
        raise ConfigError(f"resamples = {resamples} is too few to read quantiles from; use at least 100.")
    n = columns.shape[1]
    rng = np.random.default_rng(seeds.key(seed, "bootstrap"))
    sums, per_chunk = [], max(1, _RESAMPLE_CHUNK // n)
    for start in range(0, resamples, per_chunk):
        rows = rng.integers(0, n, (min(per_chunk, resamples - start), n))
        sums.append(columns[:, rows].sum(axis=2))
    return np.concatenate(sums, axis=1)


def bootstrap_mean(
    values: ArrayLike, seed: int = 0, level: float = 0.95, resamples: int = 2000, *, unit: str
) -> Estimate:
    """Expanded percentile bootstrap of a mean, for values that are far from normal.

    The same seed and values give the same interval. The ends are stretched to hold the mean itself.

    Raises:
        DataError: fewer than two values, or one that is not finite.
        ConfigError: level outside (0, 1), or fewer than 100 resamples.

    Reference:
        Hesterberg 2015, arXiv:1411.5279, section 3.3.
    """
    _critical(level)
    array = _values(values, "values", at_least=2)
    n = array.size
    means = _resample_sums(array[None, :], seed, resamples)[0] / n
    low, high = _expanded_quantiles(means, n, level)
    return _estimate(
        array.mean(), low, high, level, n, unit, f"bootstrap over {n} values, {resamples} resamples"
    )


def bootstrap_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = 2000,
    *,
    unit: str,
) -> Estimate:
    """Bootstrap of ``Σ a / Σ b``: a mean over tokens whose unit of independence is the row.

    Args:
        numerators: a, one sum per row, such as the row's nats.
        denominators: b > 0, one per row, such as its tokens.
        seed: keys the resampling of rows.
        level: coverage, inside (0, 1).
        resamples: at least 100.
        unit: of a / b.

    Raises:
        DataError: lengths differ, fewer than two rows, a value that is not finite, or a row with b <= 0
            (it says nothing about the ratio: leave it out, and say so).

    Reference:
        Hesterberg 2015, arXiv:1411.5279, section 3.3.

    >>> bootstrap_ratio([1.0, 3.0], [10, 10], unit="nats per token").value
    0.2
    """
    _critical(level)
    a = _values(numerators, "numerators", at_least=2)
    b = _values(denominators, "denominators", at_least=2)
    if a.size != b.size:
        raise DataError(f"{a.size} numerators and {b.size} denominators; give one of each per row.")
    if b.min() <= 0:
        row = int(b.argmin())
        raise DataError(
            f"denominators[{row}] is {b[row]:g}; a row without weight says nothing about a ratio. "
            "Leave such rows out and report how many there were."
        )
    sums = _resample_sums(np.stack([a, b]), seed, resamples)
    low, high = _expanded_quantiles(sums[0] / sums[1], a.size, level)
    method = f"bootstrap over {a.size} rows, {resamples} resamples"
    return _estimate(a.sum() / b.sum(), low, high, level, a.size, unit, method)


def _item_means(values_by_item: Sequence[ArrayLike]) -> NDArray[Any]:
    means = [_values(v, f"values of item {i}", at_least=1).mean() for i, v in enumerate(values_by_item)]
    return _values(means, "items", at_least=2)


def clustered_mean(values_by_item: Sequence[ArrayLike], level: float = 0.95, *, unit: str) -> Estimate:
    """Student's t interval over item means, for several samples of each item.

    ``m = mean_i(mean_j x_ij)``; the items are the unit, so a thousand samples of ten prompts are ten values.
    Every item weighs the same, however many samples it has.

    Raises:
        DataError: fewer than two items, an item without samples, or a value that is not finite.
    """
    means = _item_means(values_by_item)
    method = f"t over {means.size} items"
    return _estimate(*_t_interval(means, level), level, means.size, unit, method)


def clustered_share(
    values_by_item: Sequence[ArrayLike], level: float = 0.95, *, unit: str = "share"
) -> Estimate:
    """Wilson interval at the effective sample size, for several scores in [0, 1] of each item.

    With m items of mean p and variance s²/m of that mean, the sample is worth
    ``n_eff = p (1 - p) / (s²/m) · (z / t(m - 1))²`` independent tries, at most the number of scores. Where
    the items do not differ at all (all solved, none solved) the samples of an item cannot be told from
    copies, and n_eff = m. Unlike `clustered_mean` it keeps width there and stays inside [0, 1].

    Raises:
        DataError: as `clustered_mean`, or a score outside [0, 1].

    Reference:
        Korn and Graubard 1998 (effective sample size with the t correction), applied to Wilson's interval
        as in Dean and Pagano 2015, doi:10.1093/jssam/smv024.

    >>> print(clustered_share([[1, 1], [1, 1], [1, 1], [1, 1]]))
    1 [0.5101, 1] share
    """
    z = _critical(level)
    means = _item_means(values_by_item)
    flat = np.concatenate([np.asarray(v, dtype=np.float64) for v in values_by_item])
    if flat.min() < 0 or flat.max() > 1:
        outside = flat.min() if flat.min() < 0 else flat.max()
        raise DataError(f"score {outside:g} lies outside [0, 1]; use clustered_mean for other values.")
    share, m = float(means.mean()), means.size
    variance = float(means.var(ddof=1)) / m
    n_eff = float(m)
    if variance > 0:
        t = float(stdtrit(m - 1, 0.5 + level / 2))
        n_eff = min(share * (1 - share) / variance * (z / t) ** 2, float(flat.size))
    low, high = _wilson_ends(share, n_eff, z)
    method = f"wilson at effective n {n_eff:.1f}, {flat.size} samples of {m} items"
    return _estimate(share, low, high, level, m, unit, method)


def _pairs(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    left, right = _values(a, "a", at_least=2), _values(b, "b", at_least=2)
    if left.size != right.size:
        raise DataError(
            f"{left.size} scores against {right.size}: a paired comparison needs both models' scores on the "
            "same items, in the same order. Join them by example id first."
        )
    return left, right


def _tango_ends(only_a: int, only_b: int, n: int, z: float) -> tuple[float, float]:
    """The differences d that lie z standard errors from the observed one, errors taken under d."""

    def score(d: float) -> float:
        # The share of items that only b solves, most likely under a true difference d: the root of
        # 2n q² + linear q + constant = 0.
        linear = (2 * n - only_a + only_b) * d - only_a - only_b
        constant = -only_b * d * (1 - d)
        q = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
        variance = n * (2 * q + d * (1 - d))
        return (only_a - only_b - n * d) / math.sqrt(variance) if variance > 0 else 0.0

    def crossing(inside: float, outside: float, target: float) -> float:
        # score falls as d rises, so halving finds where it passes the target; at the edge of [-1, 1] it
        # may never do so, and the halving then ends at the edge.
        for _ in range(60):
            middle = (inside + outside) / 2
            is_inside = score(middle) < target if outside < inside else score(middle) > target
            inside, outside = (middle, outside) if is_inside else (inside, middle)
        return outside

    observed = (only_a - only_b) / n
    return crossing(observed, -1.0, z), crossing(observed, 1.0, -z)


def paired_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95, *, unit: str = "share") -> Estimate:
    """Mean of ``a - b`` over the items that both models answered, with its interval.

    Scores that are all 0 or 1 take Tango's score interval, which has width even when the models agree on
    every item, and which excludes 0 exactly when McNemar's score test rejects. Other scores take the t
    interval of the differences; ``method`` says which.

    Args:
        a: scores of the first model, one per item.
        b: scores of the second, on the same items in the same order.
        level: coverage, inside (0, 1).
        unit: of a score.

    Raises:
        DataError: lengths differ, fewer than two items, or a score that is not finite.

    Reference:
        Tango 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B.
    """
    z = _critical(level)
    left, right = _pairs(a, b)
    n = left.size
    if not np.isin(np.concatenate([left, right]), (0.0, 1.0)).all():
        return _estimate(*_t_interval(left - right, level), level, n, unit, f"t over {n} paired differences")
    only_a, only_b = int((left > right).sum()), int((right > left).sum())
    low, high = _tango_ends(only_a, only_b, n, z)
    method = f"tango over {n} pairs, {only_a} only a, {only_b} only b"
    return _estimate((only_a - only_b) / n, low, high, level, n, unit, method)


def mcnemar_exact(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p-value that two models solve the same share of items, from their 0/1 scores.

    Only the items that exactly one model solves count: under the null each goes either way with
    probability 1/2, so ``p = min(1, 2 P[Binomial(f + g, 1/2) <= min(f, g)])``; 1 when there is none.

    Raises:
        DataError: lengths differ, fewer than two items, or a score other than 0 and 1.

    Reference:
        McNemar 1947, doi:10.1007/BF02295996.

    >>> mcnemar_exact([1, 1, 1, 0], [0, 0, 0, 0])
    0.25
    """
    left, right = _pairs(a, b)
    if not np.isin(np.concatenate([left, right]), (0.0, 1.0)).all():
        raise DataError("McNemar's test needs scores of 0 or 1; use paired_difference for graded scores.")
    only_a, only_b = int((left > right).sum()), int((right > left).sum())
    if only_a + only_b == 0:
        return 1.0
    return float(min(1.0, 2 * bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def log_ratio_mean(a: ArrayLike, b: ArrayLike, level: float = 0.95, *, unit: str = "ratio") -> Estimate:
    """Geometric mean of ``a / b`` over seeds: t interval of ``log a - log b``, exponentiated.

    Args:
        a: positive figures of the first method, one per seed.
        b: positive figures of the second, from the same seeds in the same order.
        level: coverage, inside (0, 1).
        unit: what the ratio is of.

    Raises:
        DataError: lengths differ, fewer than two seeds, or a figure that is not positive (a ratio to or of
            zero has no logarithm: use `paired_difference`).

    >>> round(log_ratio_mean([2.0, 4.0], [1.0, 2.0]).value, 12)
    2.0
    """
    left, right = _pairs(a, b)
    worst = float(min(left.min(), right.min()))
    if worst <= 0:
        raise DataError(f"a figure is {worst:g}; a ratio needs positive ones. Use paired_difference instead.")
    mean, low, high = _t_interval(np.log(left) - np.log(right), level)
    method = f"t over {left.size} log ratios, exponentiated"
    return _estimate(math.exp(mean), math.exp(low), math.exp(high), level, left.size, unit, method)


def _ranks(values: NDArray[Any]) -> NDArray[Any]:
    """Ranks from 1, ties sharing their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def spearman(x: ArrayLike, y: ArrayLike, level: float = 0.95) -> Estimate:
    """Spearman's rank correlation of two figures over the same units, by Fisher's z.

    ``tanh(atanh(rho) ± z sqrt((1 + rho²/2) / (n − 3)))``; a correlation of exactly ±1 has the interval [rho, rho].

    Raises:
        DataError: lengths differ, fewer than four units, or a figure that is the same everywhere.

    Reference:
        Bonett, Wright 2000, doi:10.1007/BF02294183.

    >>> spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]).value
    0.8
    """
    a, b = _pairs(x, y)
    if a.size < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        raise DataError(
            f"a rank correlation over {a.size} units with {np.unique(a).size} and {np.unique(b).size} different values "
            "says nothing. Give four units or more, on which both figures differ."
        )
    rho = round(float(np.corrcoef(_ranks(a), _ranks(b))[0, 1]), 12)
    if abs(rho) == 1:
        return _estimate(rho, rho, rho, level, a.size, "rank correlation", "all ranks agree")
    width = _critical(level) * math.sqrt((1 + rho**2 / 2) / (a.size - 3))
    low, high = math.tanh(math.atanh(rho) - width), math.tanh(math.atanh(rho) + width)
    return _estimate(rho, low, high, level, a.size, "rank correlation", "Fisher's z of Spearman's rho")


def holm(p_values: ArrayLike) -> list[float]:
    """Holm's step-down correction: adjusted p-values in the order given.

    The i-th smallest of m is ``max over j <= i of (m - j + 1) p_(j)``, at most 1. Rejecting where the
    adjusted value is below 0.05 keeps the chance of any false rejection below 0.05, under any dependence.

    Raises:
        DataError: no p-values, or one outside [0, 1].

    Reference:
        Holm 1979, Scandinavian Journal of Statistics 6, 65–70.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = _values(p_values, "p_values", at_least=1)
    if p.min() < 0 or p.max() > 1:
        raise DataError(f"p-values lie in [0, 1], but these span {p.min():g} to {p.max():g}.")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    return adjusted.tolist()
