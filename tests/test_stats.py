"""Intervals against formulas written by hand, against scipy.stats, and against their stated coverage."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from stillroom import stats
from stillroom.errors import ConfigError, DataError
from stillroom.types import Estimate

NAN = float("nan")


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


# --- one sample ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (431, 1319)])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_wilson_equals_scipy(successes, n, level):
    ours = stats.wilson(successes, n, level)
    theirs = scipy.stats.binomtest(successes, n).proportion_ci(level, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert (ours.value, ours.n, ours.level, ours.method) == (successes / n, n, level, "wilson")


def test_wilson_ends_solve_the_equation_that_defines_them():
    estimate, z = stats.wilson(7, 20), statistics.NormalDist().inv_cdf(0.975)
    for q in (estimate.low, estimate.high):
        assert abs(7 / 20 - q) == pytest.approx(z * math.sqrt(q * (1 - q) / 20), rel=1e-12)


def test_wilson_covers_the_stated_share_by_enumeration():
    n, shares = 40, np.linspace(0.05, 0.95, 91)
    intervals = [stats.wilson(k, n) for k in range(n + 1)]
    coverage = [
        sum(scipy.stats.binom.pmf(k, n, p) for k in range(n + 1) if covers(intervals[k], p)) for p in shares
    ]
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.01)
    assert min(coverage) > 0.90


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_mean_interval_equals_the_hand_formula_and_scipy(level):
    values = [0.3, 1.7, -2.0, 4.4, 0.0]
    ours = stats.mean_interval(values, level, unit="nats")
    half = scipy.stats.t.ppf(0.5 + level / 2, 4) * statistics.stdev(values) / math.sqrt(5)
    assert ours.value == pytest.approx(statistics.fmean(values))
    assert ours.high - ours.value == pytest.approx(half, rel=1e-12)
    theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(level)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)


def test_mean_interval_of_null_runs_covers_zero_in_the_stated_share():
    rng = np.random.default_rng(0)
    hits = [covers(stats.mean_interval(row, unit="x"), 0.0) for row in rng.normal(size=(3000, 5))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.012)
    hits = [covers(stats.mean_interval(row, 0.8, unit="x"), 0.0) for row in rng.normal(size=(3000, 5))]
    assert np.mean(hits) == pytest.approx(0.80, abs=0.022)


def test_bootstrap_mean_covers_skewed_values_better_than_the_plain_percentile_interval():
    rng = np.random.default_rng(1)
    ours, plain = [], []
    for row in rng.exponential(size=(500, 12)):
        ours.append(covers(stats.bootstrap_mean(row, resamples=300, unit="x"), 1.0))
        means = rng.choice(row, (300, 12)).mean(axis=1)
        plain.append(np.quantile(means, 0.025) <= 1.0 <= np.quantile(means, 0.975))
    assert np.mean(ours) > np.mean(plain) + 0.01
    assert 0.87 < np.mean(ours) < 0.97  # skew at n = 12 costs every method a little


def test_bootstrap_mean_of_normal_values_covers_the_stated_share():
    rows = np.random.default_rng(2).normal(size=(800, 20))
    hits = [covers(stats.bootstrap_mean(row, resamples=400, unit="x"), 0.0) for row in rows]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.025)


def test_bootstrap_agrees_with_the_t_interval_where_both_hold():
    values = np.random.default_rng(3).normal(3.0, 2.0, 400)
    ours, t = stats.bootstrap_mean(values, unit="x"), stats.mean_interval(values, unit="x")
    assert ours.value == pytest.approx(t.value)
    assert (ours.low, ours.high) == pytest.approx((t.low, t.high), abs=0.03)


def test_bootstrap_is_a_function_of_its_seed_and_leaves_numpy_alone():
    values = np.random.default_rng(4).normal(size=50)
    state = np.random.get_state()[1].copy()
    first, again = (stats.bootstrap_mean(values, seed=7, unit="x") for _ in range(2))
    assert first == again
    assert first != stats.bootstrap_mean(values, seed=8, unit="x")
    assert (np.random.get_state()[1] == state).all()


def test_bootstrap_does_not_depend_on_how_its_draws_are_chunked(monkeypatch):
    values = np.random.default_rng(5).normal(size=30)
    whole = stats.bootstrap_mean(values, resamples=200, unit="x")
    monkeypatch.setattr(stats, "_RESAMPLE_CHUNK", 30 * 7)
    assert stats.bootstrap_mean(values, resamples=200, unit="x") == whole


def test_equal_values_give_an_interval_that_holds_them_despite_rounding():
    for estimate in (
        stats.bootstrap_mean([0.1] * 7, unit="x"),
        stats.mean_interval([0.1] * 7, unit="x"),
        stats.bootstrap_ratio([0.3] * 7, [3] * 7, unit="x"),
    ):
        assert estimate.value == pytest.approx(0.1)
        assert estimate.high - estimate.low < 1e-12


def test_bootstrap_ratio_weighs_rows_by_their_tokens():
    estimate = stats.bootstrap_ratio([10.0, 1.0], [100, 1], unit="nats per token")
    assert estimate.value == pytest.approx(11 / 101)
    assert estimate.value != pytest.approx((0.1 + 1.0) / 2)
    # With two rows the only resamples are a twice, b twice, or one of each.
    assert (estimate.low, estimate.high) == pytest.approx((0.1, 1.0))


def test_bootstrap_ratio_of_null_runs_covers_the_true_ratio():
    rng = np.random.default_rng(6)
    hits = []
    for _ in range(500):
        tokens = rng.integers(5, 60, 40)
        row_rate = rng.normal(2.0, 0.5, 40)  # tokens of one row resemble each other
        estimate = stats.bootstrap_ratio(row_rate * tokens, tokens, resamples=300, unit="x")
        hits.append(covers(estimate, 2.0))
    assert np.mean(hits) == pytest.approx(0.95, abs=0.03)


# --- several samples per item -------------------------------------------------------------------------


def test_clustered_mean_is_the_t_interval_of_item_means():
    values = [[1.0, 0.0, 0.0], [1.0], [0.5, 0.5]]
    assert stats.clustered_mean(values, unit="x").as_dict() | {"method": ""} == (
        stats.mean_interval([1 / 3, 1.0, 0.5], unit="x").as_dict() | {"method": ""}
    )


def clustered_scores(rng: np.random.Generator, items: int, samples: int) -> np.ndarray:
    """0/1 scores whose items differ: solved with probability drawn from Beta(0.6, 0.4), mean 0.6."""
    return (rng.random((items, samples)) < rng.beta(0.6, 0.4, items)[:, None]).astype(float)


def test_clustered_intervals_cover_where_counting_samples_as_independent_does_not():
    rng = np.random.default_rng(7)
    share, mean, naive = [], [], []
    for _ in range(800):
        scores = clustered_scores(rng, 40, 8)
        share.append(covers(stats.clustered_share(scores), 0.6))
        mean.append(covers(stats.clustered_mean(scores, unit="x"), 0.6))
        naive.append(covers(stats.wilson(int(scores.sum()), scores.size), 0.6))
    assert np.mean(share) == pytest.approx(0.95, abs=0.025)
    assert np.mean(mean) == pytest.approx(0.95, abs=0.03)
    assert np.mean(naive) < 0.75


def test_clustered_share_keeps_width_when_every_item_is_solved():
    assert stats.clustered_mean([[1, 1]] * 30, unit="x").low == 1.0
    solved, wilson = stats.clustered_share([[1, 1]] * 30), stats.wilson(30, 30)
    assert (solved.low, solved.high) == pytest.approx((wilson.low, wilson.high))


def test_clustered_share_never_counts_more_tries_than_scores():
    # Items that agree far better than chance would: without the cap n_eff would be enormous.
    scores = [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0], [1, 1]]
    estimate = stats.clustered_share(scores)
    floor = stats.wilson(7, 12)
    assert estimate.high - estimate.low == pytest.approx(floor.high - floor.low)


# --- pairs --------------------------------------------------------------------------------------------


def tango_oracle(only_a: int, only_b: int, n: int, level: float) -> tuple[float, float]:
    """Score interval from the definition: maximise the likelihood under the difference, numerically."""
    z = statistics.NormalDist().inv_cdf(0.5 + level / 2)

    def score(d: float) -> float:
        def minus_log_likelihood(q: float) -> float:  # P(only b) = q, P(only a) = q + d
            terms = ((only_a, q + d), (only_b, q), (n - only_a - only_b, 1 - 2 * q - d))
            return -sum(k * math.log(p) for k, p in terms if k)

        low, high = max(0.0, -d), (1 - d) / 2
        q = scipy.optimize.minimize_scalar(
            minus_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-13}
        ).x
        return (only_a - only_b - n * d) / math.sqrt(n * (2 * q + d - d * d))

    observed = (only_a - only_b) / n
    low = scipy.optimize.brentq(lambda d: score(d) - z, -1 + 1e-9, observed)
    high = scipy.optimize.brentq(lambda d: score(d) + z, observed, 1 - 1e-9)
    return low, high


def scores_with(only_a: int, only_b: int, n: int) -> tuple[list[int], list[int]]:
    both = n - only_a - only_b
    return [1] * only_a + [0] * only_b + [1] * both, [0] * only_a + [1] * only_b + [1] * both


@pytest.mark.parametrize(
    ("only_a", "only_b", "n"), [(12, 2, 50), (1, 9, 40), (5, 5, 300), (3, 1, 8), (40, 41, 100)]
)
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_paired_difference_of_binary_scores_is_the_score_interval(only_a, only_b, n, level):
    estimate = stats.paired_difference(*scores_with(only_a, only_b, n), level)
    assert estimate.value == pytest.approx((only_a - only_b) / n)
    assert (estimate.low, estimate.high) == pytest.approx(tango_oracle(only_a, only_b, n, level), abs=2e-6)


def test_paired_difference_changes_sign_with_its_arguments():
    a, b = scores_with(9, 3, 40)
    forth, back = stats.paired_difference(a, b), stats.paired_difference(b, a)
    assert (back.value, back.low, back.high) == pytest.approx((-forth.value, -forth.high, -forth.low))


def test_paired_difference_has_width_at_the_edges_where_a_t_interval_has_none():
    same = stats.paired_difference(*scores_with(0, 0, 30))
    assert (same.value, same.low) == pytest.approx((0.0, -same.high))
    # Agreement on all n items: the same limit that Wilson gives 0 of n.
    assert same.high == pytest.approx(stats.wilson(0, 30).high)
    always = stats.paired_difference(*scores_with(30, 0, 30))
    assert (always.value, always.high) == (1.0, 1.0)
    assert 0.5 < always.low < 1.0


def test_paired_difference_excludes_zero_exactly_when_mcnemars_score_test_rejects():
    decisions = set()
    for only_a, only_b in itertools.product(range(0, 16, 3), repeat=2):
        if only_a + only_b:
            rejects = (only_a - only_b) ** 2 / (only_a + only_b) > scipy.stats.chi2.ppf(0.95, 1)
            estimate = stats.paired_difference(*scores_with(only_a, only_b, 60))
            assert rejects == (not covers(estimate, 0.0))
            decisions.add(rejects)
    assert decisions == {True, False}


def test_paired_difference_of_null_runs_covers_zero_in_the_stated_share():
    rng = np.random.default_rng(8)
    hits = []
    for _ in range(1500):
        difficulty = rng.beta(1, 1, 60)
        a, b = (rng.random((2, 60)) < difficulty).astype(float)
        hits.append(covers(stats.paired_difference(a, b), 0.0))
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def test_paired_difference_is_tighter_than_two_separate_intervals():
    rng = np.random.default_rng(9)
    a = (rng.random(300) < 0.5).astype(float)
    b = np.where(rng.random(300) < 0.05, 1 - a, a)
    paired = stats.paired_difference(a, b)
    separate = stats.wilson(int(a.sum()), 300)
    assert paired.high - paired.low < 0.6 * (separate.high - separate.low)


def test_paired_difference_of_graded_scores_is_a_t_interval_and_says_so():
    a, b = [0.5, 0.25, 1.0, 0.0], [0.25, 0.0, 0.5, 0.25]
    estimate = stats.paired_difference(a, b)
    expected = stats.mean_interval([0.25, 0.25, 0.5, -0.25], unit="share")
    assert (estimate.value, estimate.low, estimate.high) == (expected.value, expected.low, expected.high)
    assert estimate.method == "t over 4 paired differences"


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (0, 5), (3, 4), (10, 1), (6, 6)])
def test_mcnemar_equals_the_two_sided_binomial_test(only_a, only_b):
    p = stats.mcnemar_exact(*scores_with(only_a, only_b, 40))
    if only_a + only_b == 0:
        assert p == 1.0
    else:
        assert p == pytest.approx(scipy.stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


def test_log_ratio_mean_is_the_geometric_mean_and_inverts_with_its_arguments():
    a, b = [0.6, 0.5, 0.66], [0.4, 0.45, 0.5]
    ratio, inverse = stats.log_ratio_mean(a, b), stats.log_ratio_mean(b, a)
    assert ratio.value == pytest.approx(math.prod(x / y for x, y in zip(a, b, strict=True)) ** (1 / 3))
    assert (inverse.low, inverse.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    t = scipy.stats.ttest_1samp(logs, 0).confidence_interval()
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((t.low, t.high))


def test_log_ratio_of_null_runs_covers_one():
    runs = np.exp(np.random.default_rng(10).normal(0, 0.2, (2000, 2, 4)))
    hits = [covers(stats.log_ratio_mean(a, b), 1.0) for a, b in runs]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)


def test_holm_equals_the_step_down_definition():
    rng = np.random.default_rng(11)
    for _ in range(50):
        p = rng.random(rng.integers(1, 7)).tolist()
        ranked = sorted(range(len(p)), key=lambda i: p[i])
        expected = [0.0] * len(p)
        for rank, i in enumerate(ranked):
            expected[i] = min(1.0, max((len(p) - j) * p[ranked[j]] for j in range(rank + 1)))
        assert stats.holm(p) == pytest.approx(expected)


def test_holm_keeps_the_family_error_where_raw_p_values_do_not():
    p = np.random.default_rng(12).random((3000, 6))
    assert np.mean([min(stats.holm(row)) < 0.05 for row in p]) == pytest.approx(0.05, abs=0.015)
    assert np.mean(p.min(axis=1) < 0.05) > 0.2


def test_spearman_is_scipys_with_fishers_interval():
    rng = np.random.default_rng(13)
    for _ in range(20):
        x, y = rng.integers(0, 6, 12), rng.integers(0, 6, 12)
        estimate, rho = stats.spearman(x, y), scipy.stats.spearmanr(x, y).statistic
        assert estimate.value == pytest.approx(rho)
        half = scipy.stats.norm.ppf(0.975) * math.sqrt((1 + rho**2 / 2) / 9)
        assert (estimate.low, estimate.high) == pytest.approx(
            (math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half))
        )
    assert stats.spearman([1, 2, 3, 4], [2, 3, 5, 9]).low == 1.0
    for x, y in (([1, 2, 3], [1, 2, 3]), ([1, 1, 1, 1], [1, 2, 3, 4])):
        with pytest.raises(DataError, match="says nothing"):
            stats.spearman(x, y)


def test_a_standard_error_from_elsewhere_becomes_a_normal_interval():
    estimate = stats.normal_interval(0.5, 0.1, 0.9, n=25, unit="x", source="lm-eval")
    assert (estimate.low, estimate.high) == pytest.approx(scipy.stats.norm.interval(0.9, 0.5, 0.1))
    assert estimate.method == "normal, standard error by lm-eval"
    for value, error, says in ((NAN, 0.1, "not finite"), (0.5, NAN, "not finite"), (0.5, -0.1, "negative")):
        with pytest.raises(DataError, match=says):
            stats.normal_interval(value, error, n=25, unit="x", source="lm-eval")


def test_an_exact_count_has_no_width():
    estimate = stats.exact(3, n=10, unit="rows")
    assert (estimate.low, estimate.value, estimate.high, estimate.method) == (3, 3, 3, "exact count")


# --- bad input ----------------------------------------------------------------------------------------

ONE_SAMPLE = [
    lambda v: stats.mean_interval(v, unit="x"),
    lambda v: stats.bootstrap_mean(v, unit="x"),
    lambda v: stats.bootstrap_ratio(v, [1.0] * len(v), unit="x"),
    lambda v: stats.clustered_mean([[x] for x in v], unit="x"),
    lambda v: stats.clustered_share([[x] for x in v]),
    lambda v: stats.paired_difference(v, v),
    lambda v: stats.mcnemar_exact(v, v),
    lambda v: stats.log_ratio_mean(v, v),
]


@pytest.mark.parametrize("function", ONE_SAMPLE)
@pytest.mark.parametrize(
    ("values", "says"),
    [([], "at least"), ([0.5], "at least 2"), ([1.0, NAN], "not finite"), ([1.0, math.inf], "not finite")],
)
def test_empty_single_and_nan_values_are_refused(function, values, says):
    with pytest.raises(DataError, match=says):
        function(values)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5, NAN])
@pytest.mark.parametrize(
    "function",
    [
        lambda level: stats.wilson(1, 2, level),
        lambda level: stats.mean_interval([1, 2], level, unit="x"),
        lambda level: stats.bootstrap_mean([1, 2], level=level, unit="x"),
        lambda level: stats.bootstrap_ratio([1, 2], [1, 2], level=level, unit="x"),
        lambda level: stats.clustered_mean([[1], [2]], level, unit="x"),
        lambda level: stats.clustered_share([[1], [0]], level),
        lambda level: stats.paired_difference([1, 0], [0, 1], level),
        lambda level: stats.log_ratio_mean([1, 2], [2, 1], level),
    ],
)
def test_a_level_outside_zero_and_one_is_refused(function, level):
    with pytest.raises(ConfigError, match="outside"):
        function(level)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: stats.wilson(0, 0), "n = 0"),
        (lambda: stats.wilson(3, 2), "successes = 3"),
        (lambda: stats.wilson(-1, 2), "successes = -1"),
        (lambda: stats.wilson(0.5, 2), "whole number"),
        (lambda: stats.mean_interval([[1.0, 2.0]], unit="x"), "shape"),
        (lambda: stats.bootstrap_ratio([1, 2], [1, 2, 3], unit="x"), "2 numerators and 3"),
        (lambda: stats.bootstrap_ratio([1, 0], [5, 0], unit="x"), r"denominators\[1\] is 0"),
        (lambda: stats.bootstrap_ratio([1, 0], [5, -1], unit="x"), r"denominators\[1\] is -1"),
        (lambda: stats.clustered_mean([[1.0], []], unit="x"), "item 1"),
        (lambda: stats.clustered_share([[1.0], [1.5]]), "score 1.5"),
        (lambda: stats.clustered_share([[1.0], [-0.5]]), "score -0.5"),
        (lambda: stats.paired_difference([1, 0], [1, 0, 1]), "2 scores against 3"),
        (lambda: stats.mcnemar_exact([0.5, 1], [0, 1]), "graded"),
        (lambda: stats.log_ratio_mean([1, 0], [1, 1]), "positive"),
        (lambda: stats.holm([]), "at least 1"),
        (lambda: stats.holm([0.5, 1.5]), "1.5"),
    ],
)
def test_bad_values_are_named_in_the_error(call, says):
    with pytest.raises(DataError, match=says):
        call()


def test_too_few_resamples_are_refused():
    with pytest.raises(ConfigError, match="resamples = 10"):
        stats.bootstrap_mean([1, 2], resamples=10, unit="x")
