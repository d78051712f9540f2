"""The table of a knob experiment, from the cells that are done.

A student's accuracy is compared with that of the original teacher's student of the same seed: the mean of the log
ratios over seeds, with a t interval, given as a ratio. *Shown*: the interval lies on the right side of 1.
*Reached*: the estimate also passes the target. *Firm*: so does the interval's near end. The primary comparison was
fixed beforehand; p-values of the others are Holm's. The share of an effect that matched text explains is the ratio of
the two log ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from scipy import stats as scipy_stats

from stillroom import stats
from stillroom.types import Estimate

ACCURACY = "pocket/chains/accuracy_sampled"
TARGETS = {"distillable": 1.27, "undistillable": 0.40}
"""Ratios of the product's aims: arXiv:2604.18963 reports +17 to +27 % and −59 to −60 % on maths."""


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
            n = 1000
            figures["undistilled"] = stats.exact(d.figures[ACCURACY], n=n, unit="accuracy")
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
            shares = [
                math.log(found[s] / base[s]) / math.log(effect[s] / base[s]) for s in both if s in effect
            ]
            if len(shares) > 1:
                figures[f"share/{teacher}"] = stats.mean_interval(shares, unit="share of the effect")
    return figures


def verdict(teacher: str, ratio: Estimate) -> str:
    """shown, reached or firm; not shown if the interval holds 1 or lies on the other side."""
    target = TARGETS.get(teacher.partition("@")[0])
    if target is None:
        return ""
    if target > 1:
        sides = (ratio.low > 1, ratio.value >= target, ratio.low >= target)
    else:
        sides = (ratio.high < 1, ratio.value <= target, ratio.high <= target)
    if not sides[0]:
        return "not shown"
    return "firm" if sides[2] else "reached" if sides[1] else "shown"


def holm_over_methods(done: Sequence[Done], teacher: str, methods: Sequence[str]) -> dict[str, float]:
    """Holm-adjusted two-sided p-values of the mean log ratio, over the methods that have run."""
    import numpy as np

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
                teacher, method, _cell(estimate), _cell(ratio), verdict(teacher, ratio) if ratio else ""
            )
    console.print(table)


def _cell(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
