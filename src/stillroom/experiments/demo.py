"""`stillroom demo`: four ways to distil one teacher, side by side, in a few minutes on a laptop.

A table of ordinary `distill` runs on the shipped pocket models and a renderer, nothing more. Every method
starts from the same undistilled student and sees the same prompts; the seed is the unit of the interval.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from stillroom import stats
from stillroom.commands.checks import refuse_output_inside_models
from stillroom.commands.display import make_console
from stillroom.commands.distill import distill
from stillroom.config import (
    DataSpec,
    DemoConfig,
    DistillConfig,
    LossChoice,
    ModelSpec,
    Options,
    SamplingSpec,
    ScoreSpec,
    StudentSpec,
    TrainSpec,
)
from stillroom.runs import Run
from stillroom.types import Estimate

TASK = "pocket/chains"


@dataclass(frozen=True)
class Method:
    """One row of the demo's table."""

    loss: LossChoice
    on_policy_fraction: float
    summary: str


METHODS = {
    "sequence KD": Method(LossChoice("cross_entropy"), 0.0, "fine-tuning on the teacher's completions"),
    "forward KL": Method(LossChoice("forward_kl"), 0.0, "the teacher's distribution on its own completions"),
    "reverse KL, top 8": Method(
        LossChoice("reverse_kl", top_k=8),
        1.0,
        "on the student's completions; the teacher's 8 likeliest tokens",
    ),
    "reverse KL": Method(LossChoice("reverse_kl"), 1.0, "on the student's completions alone"),
}
"""The teacher answers in two styles, of which this student can learn one: what copies both share out its
effort, what seeks a mode does not. So the first two are expected to lose here, and the last two to win.
"""


def demo(config: DemoConfig, options: Options) -> dict[str, Estimate]:
    """Run the table, print it, and return its figures.

    Raises:
        StillroomError: one of its leaves, before the first run.
    """
    console = make_console(quiet=options.quiet)
    refuse_output_inside_models(config.output_dir, {"teacher": config.teacher, "student": config.student})
    run = Run.prepare(config.output_dir, command="demo", config=config, resume=options.resume)
    cells = {
        (name, seed): _cell(config, method, name, seed)
        for name, method in METHODS.items()
        for seed in config.seeds
    }
    # What the first run would refuse is refused here, before there is a folder.
    distill(next(iter(cells.values())), Options(dry_run=True, resume=True, quiet=True))
    if options.dry_run:
        console.print(
            f"would run {len(cells)} distillations of {config.max_steps} steps: {', '.join(METHODS)}"
        )
        return {}
    run.begin()
    console.print(f"teacher {config.teacher}, student {config.student}, task {TASK}; {len(cells)} runs")
    results: dict[tuple[str, int], dict[str, Estimate]] = {}
    began = time.monotonic()
    for number, ((name, seed), cell) in enumerate(cells.items(), 1):
        results[name, seed] = distill(cell, Options(resume=True, quiet=True))
        after = results[name, seed][f"{TASK}/accuracy_sampled/after"]
        left = (time.monotonic() - began) / number * (len(cells) - number)
        console.print(
            f"  {number}/{len(cells)} {name}, seed {seed}: accuracy {after.value:.3f}; {left:.0f} s left"
        )
    figures = _figures(config, results)
    run.write_results(figures, seeds=list(config.seeds))
    _show(console, figures)
    console.print(f"figures and students: {run.path}")
    return figures


def _cell(config: DemoConfig, method: Method, name: str, seed: int) -> DistillConfig:
    folder = name.lower().replace(",", "").replace(" ", "-")
    return DistillConfig(
        output_dir=str(Path(config.output_dir) / f"{folder}-seed{seed}"),
        teacher=ModelSpec(path=config.teacher),
        student=StudentSpec(path=config.student),
        data=DataSpec(
            tasks=(TASK,), max_rows=config.max_rows, heldout_rows=128, completions="teacher", seed=seed
        ),
        loss=method.loss,
        sampling=SamplingSpec(method.on_policy_fraction, max_completion_length=32, batch_size=256),
        train=TrainSpec(
            max_steps=config.max_steps,
            learning_rate=6e-3,
            per_device_train_batch_size=64,
            warmup_steps=5,
            save_steps=10_000,
            seed=seed,
        ),
        score=ScoreSpec(tasks=(TASK,), max_examples=config.max_examples),
    )


def _figures(config: DemoConfig, results: dict[tuple[str, int], dict[str, Estimate]]) -> dict[str, Estimate]:
    """Means over seeds with t intervals; the undistilled student once, over prompts."""
    figures: dict[str, Estimate] = {}
    for name in METHODS:
        for figure in (f"{TASK}/accuracy_sampled", f"{TASK}/accuracy_greedy", "heldout/forward_kl_nats"):
            values = [results[name, seed][f"{figure}/after"] for seed in config.seeds]
            mean = stats.mean_interval([v.value for v in values], unit=values[0].unit)
            figures[f"{name}/{figure.split('/')[-1]}"] = replace(mean, method=f"t over {len(values)} seeds")
    start = results[next(iter(METHODS)), config.seeds[0]]
    for figure in (f"{TASK}/accuracy_sampled", f"{TASK}/accuracy_greedy", "heldout/forward_kl_nats"):
        figures[f"undistilled/{figure.split('/')[-1]}"] = start[f"{figure}/before"]
    return figures


def _show(console: Console, figures: dict[str, Estimate]) -> None:
    table = Table(
        Column("student", no_wrap=True),
        "accuracy, sampled",
        "accuracy, greedy",
        "held-out forward KL (nats/token)",
        "what it is",
    )
    for name in ("undistilled", *METHODS):
        cells = [
            f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"
            for e in (
                figures[f"{name}/{f}"] for f in ("accuracy_sampled", "accuracy_greedy", "forward_kl_nats")
            )
        ]
        table.add_row(name, *cells, METHODS[name].summary if name in METHODS else "the start of every run")
    console.print(table)
    start = figures["undistilled/accuracy_sampled"]
    better = [name for name in METHODS if figures[f"{name}/accuracy_sampled"].low > start.high]
    console.print(f"better than the undistilled student beyond both intervals: {', '.join(better) or 'none'}")
