"""`stillroom demo knob`: the knob in a few minutes on a laptop.

Students are made from the pocket teacher, from two calibrated teachers that are shipped as adapters, and from one
that is calibrated here and now for a few steps, so that the bar moves. Ordinary `calibrate` and `distill` runs, and
a page.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stillroom.commands.calibrate import calibrate
from stillroom.commands.display import make_console
from stillroom.commands.distill import distill
from stillroom.config import LossChoice, ModelSpec, Options
from stillroom.experiments.knob_config import KnobConfig, KnobDemoConfig
from stillroom.experiments.knob_page import write_page
from stillroom.experiments.knob_report import ACCURACY, Done, figures_of, show
from stillroom.pocket import assets
from stillroom.runs import Run
from stillroom.types import Estimate

SHIPPED = ("distillable", "undistillable")
METHOD = "forward_kl"


def knob_demo(config: KnobDemoConfig, options: Options) -> dict[str, Estimate]:
    """Run it, print the table, write the page, and return the figures."""
    console = make_console(quiet=options.quiet)
    run = Run.prepare(config.output_dir, command="demo knob", config=config, resume=options.resume)
    names = {mode: assets.card(f"{config.family}-{mode}") for mode in SHIPPED}
    if options.dry_run:
        console.print(
            f"would calibrate for {config.live_steps} steps and make {4 * len(config.seeds)} students from the "
            f"original, {', '.join(f'the shipped {mode} one' for mode in names)} and the live one"
        )
        return {}
    run.begin()
    root, base = Path(config.output_dir), KnobConfig()
    teachers = {"original": f"pocket:{config.family}-teacher"}
    teachers |= {f"{mode} (shipped)": f"pocket:{config.family}-{mode}" for mode in SHIPPED}
    of_teachers = {
        f"{mode} (shipped)": {name: Estimate(**figure) for name, figure in card["figures"].items()}
        for mode, card in names.items()
    }

    console.print(f"calibrating live: {config.live_steps} steps towards distillable")
    live = replace(
        base.calibrate,
        output_dir=str(root / "live"),
        teacher=ModelSpec(teachers["original"]),
        proxy=ModelSpec(f"pocket:{config.family}-proxy"),
        train=replace(base.calibrate.train, max_steps=config.live_steps),
        guard=replace(base.calibrate.guard, max_examples=64),
        final_examples=200,
    )
    label = f"distillable (live, {config.live_steps} steps)"
    of_teachers[label] = calibrate(live, Options(resume=True, quiet=options.quiet))
    teachers[label] = str(root / "live" / "teacher")

    done = [
        Done("teacher", name, "", 0, {"figures": {k: e.value for k, e in found.items()}})
        for name, found in of_teachers.items()
    ]
    said = _Progress(console, len(teachers) * len(config.seeds))
    for name, teacher in teachers.items():
        for seed in config.seeds:
            student = replace(
                base.distill,
                output_dir=str(root / f"{_slug(name)}-seed{seed}"),
                teacher=ModelSpec(teacher),
                student=replace(base.distill.student, path=f"pocket:{config.family}-student"),
                loss=LossChoice("forward_kl"),
                data=replace(base.distill.data, seed=seed),
                train=replace(base.distill.train, seed=seed, max_steps=config.max_steps),
                score=replace(base.distill.score, max_examples=config.max_examples, start=name == "original"),
            )
            found = distill(student, Options(resume=True, quiet=True))
            after = {k.removesuffix("/after"): e.value for k, e in found.items() if k.endswith("/after")}
            done.append(Done("student", name, METHOD, seed, {"figures": after}))
            if name == "original" and seed == config.seeds[0]:
                start = found[f"{ACCURACY}/before"].as_dict()
                done.append(Done("start", "none", "undistilled", 0, {"figures": {}, "estimate": start}))
            said(f"{name}, seed {seed}: accuracy {after[ACCURACY]:.3f}")
    figures = figures_of(done, METHOD)
    for name, known in of_teachers.items():
        for figure in ("utility/difference", "kl_nats_per_token"):
            figures[f"teacher/{name}/{figure}"] = known[figure]
    run.write_results(figures, seeds=list(config.seeds))
    show(console, done, figures)
    page = write_page(root, done, figures, Run.open(root / "live").metrics(), METHOD)
    console.print(f"page: {page}")
    return figures


def _slug(name: str) -> str:
    return re.sub("[^a-z]+", "-", name).strip("-")


class _Progress:
    """Prints a line a student, with the time left."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done, self.began = console, total, 0, time.monotonic()

    def __call__(self, line: str) -> None:
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
        self.console.print(f"  {self.done}/{self.total} {line}; {left:.0f} s left")
