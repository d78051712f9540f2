"""The table of a knob experiment, from the cells that are done.

A student's accuracy is compared with that of the original teacher's student of the same seed: the mean of the log
ratios over seeds, with a t interval, given as a ratio. *Shown*: the interval lies on the right side of 1.
*Reached*: the estimate also passes the target. *Firm*: so does the interval's near end. The primary comparison was
fixed beforehand; p-values of all methods are Holm's. The share of an effect that matched text explains is the
log ratio of its student over the mean log ratio of the calibrated teacher's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from scipy import stats as scipy_stats

from stillroom import stats
from stillroom.types import Estimate

ACCURACY = "pocket/chains/accuracy_sampled"
TARGETS = {"distillable": 1.27, "undistillable": 0.40}
"""Ratios of the product's aims: arXiv:2604.18963 reports +17 to +27 % and −59 to −60 % on maths."""


STOPPED_AT = "stopped at"

TRAITS = (
    "pocket/chains/accuracy_greedy",
    "ood/pocket/chains/accuracy_sampled",
    "heldout/reverse_kl_nats",
    "wrong_trace/start/implicit",
    "wrong_trace/start/likelihood_per_token",
    "wrong_trace/finished/implicit",
    "wrong_trace/finished/likelihood_per_token",
    "symptom/confidence/ece",
    "symptom/confidence/sure_when_wrong",
    "symptom/recovery/after_wrong_step",
    "symptom/recovery/after_right_step",
    "symptom/decoding/loops",
)
"""What is stated of the primary method's students besides their accuracy."""


@dataclass(frozen=True)
class Done:
    """A cell that has run."""

    kind: str
    teacher: str
    method: str
    seed: int
    record: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        return self.record["figures"]


def accuracies(done: Sequence[Done], teacher: str, method: str, figure: str = ACCURACY) -> dict[int, float]:
    """Seed → accuracy of the students of one teacher by one method."""
    return {
        d.seed: d.figures[figure]
        for d in done
        if d.kind == "student" and (d.teacher, d.method) == (teacher, method) and figure in d.figures
    }


def figures_of(done: Sequence[Done], primary: str) -> dict[str, Estimate]:
    """Means over seeds, and ratios to the original's students of the same seeds."""
    figures: dict[str, Estimate] = {}
    for d in done:
        if d.kind == "start":
            figures["undistilled"] = Estimate(**d.record["estimate"])
    teachers = sorted({d.teacher for d in done if d.kind == "teacher"})
    for teacher in teachers:
        for figure in ("utility/difference", "kl_nats_per_token", "worked_share/after"):
            values = [
                d.figures[figure]
                for d in done
                if d.kind == "teacher" and d.teacher == teacher and figure in d.figures
            ]
            if len(values) > 1:
                figures[f"teacher/{teacher}/{figure}"] = stats.mean_interval(
                    values, unit=figure.split("/")[0]
                )
    for teacher, method in sorted({(d.teacher, d.method) for d in done if d.kind == "student"}):
        found = accuracies(done, teacher, method)
        if len(found) > 1:
            figures[f"student/{teacher}/{method}"] = stats.mean_interval(
                list(found.values()), unit="accuracy"
            )
        base = accuracies(done, "original", method)
        both = sorted(set(found) & set(base))
        if teacher != "original" and len(both) > 1:
            figures[f"ratio/{teacher}/{method}"] = stats.log_ratio_mean(
                [found[s] for s in both], [base[s] for s in both], unit="ratio"
            )
        for trait in TRAITS if method == primary else ():
            values = list(accuracies(done, teacher, method, trait).values())
            if len(values) > 1:
                figures[f"trait/{teacher}/{trait}"] = stats.mean_interval(values, unit=trait.split("/")[0])
        if teacher.startswith("matched "):
            effect = accuracies(done, teacher.removeprefix("matched "), method)
            used = [
                seed for seed in both if seed in effect and min(effect[seed], base[seed], found[seed]) > 0
            ]
            whole = np.log([effect[seed] / base[seed] for seed in used])
            part = np.log([found[seed] / base[seed] for seed in used])
            if len(used) > 1 and abs(whole.mean()) > 0.05:  # of hardly any effect there is no share
                figures[f"share/{teacher}"] = stats.mean_interval(
                    part / whole.mean(), unit="share of the effect"
                )
    return figures | _doses(done, primary)


def _doses(done: Sequence[Done], primary: str) -> dict[str, Estimate]:
    """Rank correlation of a teacher's realised KL with its student's accuracy, for each mode.

    One correlation a seed, over the original (KL 0), the teachers stopped by a budget, and the one of full length;
    their mean over seeds with a t interval. Teachers that never reached their budget are the full one over again.
    """
    figures: dict[str, Estimate] = {}
    for mode in TARGETS:
        full = next((d.teacher for d in done if d.kind == "teacher" and d.teacher.startswith(mode)), "")
        doses: dict[int, list[tuple[float, float]]] = {}
        for d in done:
            is_dose = d.teacher == full or (
                d.teacher.startswith(f"{full} {STOPPED_AT}") and d.record.get("stop_reason") == "kl_budget"
            )
            accuracy = accuracies(done, d.teacher, primary).get(d.seed)
            if d.kind == "teacher" and is_dose and accuracy is not None:
                doses.setdefault(d.seed, []).append((d.figures["kl_nats_per_token"], accuracy))
        start = accuracies(done, "original", primary)
        by_seed = [
            stats.spearman([0.0, *(kl for kl, _ in points)], [start[seed], *(a for _, a in points)]).value
            for seed, points in doses.items()
            if len(points) >= 3 and seed in start
        ]
        if len(by_seed) > 1:
            figures[f"dose/{mode}"] = stats.mean_interval(by_seed, unit="rank correlation")
    return figures


def minimum_detectable_ratio(ratios: Sequence[float], level: float = 0.95, power: float = 0.8) -> float:
    """The smallest true ratio above 1 that a t test over as many seeds would find with this power.

    ``exp((t_{(1+level)/2} + t_power) · s / √n)`` with the spread s of the log ratios that were seen.
    """
    logs = np.log(ratios)
    t = scipy_stats.t(len(logs) - 1)
    return float(np.exp((t.ppf((1 + level) / 2) + t.ppf(power)) * logs.std(ddof=1) / math.sqrt(len(logs))))


def tests_of(done: Sequence[Done], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each calibrated teacher and method: Holm's p over the methods, and the minimum detectable ratio."""
    found: dict[str, dict[str, float]] = {}
    for teacher in sorted({d.teacher for d in done if d.teacher.partition("@")[0] in TARGETS}):
        adjusted = holm_over_methods(done, teacher, methods)
        for method, p in adjusted.items():
            one, base = accuracies(done, teacher, method), accuracies(done, "original", method)
            ratios = [one[seed] / base[seed] for seed in one if seed in base]
            found[f"{teacher}/{method}"] = {
                "holm_p": p,
                "minimum_detectable_ratio": minimum_detectable_ratio(ratios),
            }
    return found


def verdict(
    teacher: str, ratio: Estimate, student: Estimate | None = None, start: Estimate | None = None
) -> str:
    """shown, reached or firm; not shown if the interval holds 1 or lies on the other side.

    A teacher is undistillable only if its student also ends below the undistilled one, interval for interval.
    """
    target = TARGETS.get(teacher.partition("@")[0])
    if target is None:
        return ""
    if target > 1:
        sides = (ratio.low > 1, ratio.value >= target, ratio.low >= target)
    else:
        is_below = student is None or start is None or student.high < start.low
        sides = (ratio.high < 1 and is_below, ratio.value <= target, ratio.high <= target)
    if not sides[0]:
        return "not shown"
    return "firm" if sides[2] else "reached" if sides[1] else "shown"


def holm_over_methods(done: Sequence[Done], teacher: str, methods: Sequence[str]) -> dict[str, float]:
    """Holm-adjusted two-sided p-values of the mean log ratio, over the methods that have run."""
    p: dict[str, float] = {}
    for method in methods:
        found, base = accuracies(done, teacher, method), accuracies(done, "original", method)
        both = sorted(set(found) & set(base))
        if len(both) > 1:
            logs = np.log([found[s] / base[s] for s in both])
            p[method] = float(np.asarray(scipy_stats.ttest_1samp(logs, 0.0))[1])
    return dict(zip(p, stats.holm(list(p.values())), strict=True)) if p else {}


def show(console: Console, done: Sequence[Done], figures: dict[str, Estimate]) -> None:
    """Teachers, then students."""
    table = Table(Column("teacher", no_wrap=True), "utility − original's", "KL (nats/token)", "worked share")
    for teacher in sorted({d.teacher for d in done if d.kind == "teacher"}):
        row = [
            _cell(figures.get(f"teacher/{teacher}/{f}"))
            for f in ("utility/difference", "kl_nats_per_token", "worked_share/after")
        ]
        table.add_row(teacher, *row)
    console.print(table)
    if start := figures.get("undistilled"):
        console.print(f"undistilled student: {start.value:.3f}")
    table = Table(
        Column("teacher", no_wrap=True), "method", "student's accuracy", "ratio to the original's", ""
    )
    for name, estimate in figures.items():
        if name.startswith("student/"):
            _, teacher, method = name.split("/")
            ratio = figures.get(f"ratio/{teacher}/{method}")
            table.add_row(
                teacher,
                method,
                _cell(estimate),
                _cell(ratio),
                verdict(teacher, ratio, estimate, start) if ratio else "",
            )
    console.print(table)


def _cell(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
