"""`stillroom knob`: the paper's whole experiment as a table of ordinary runs.

Teachers are calibrated both ways (`calibrate`), students are made from each (`distill`) and scored on longer walks
than they were trained on (`evaluate`). A cell is one such run, named by the hash of its config; its ``cell.json``
is written last and counts as done, so a grid can be stopped, spread over days or machines, and gone on with. The
primary comparison runs first. `knob_report` reads the cells.

A seed is a chain: it seeds a teacher's calibration and the making of that teacher's students.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stillroom.commands.calibrate import calibrate
from stillroom.commands.display import make_console
from stillroom.commands.distill import distill
from stillroom.commands.evaluate import evaluate
from stillroom.config import (
    CalibrateConfig,
    DistillConfig,
    EvaluateConfig,
    LossChoice,
    ModelSpec,
    Options,
)
from stillroom.experiments.knob_config import METHODS, KnobConfig
from stillroom.experiments.knob_gold import gold_rows
from stillroom.experiments.knob_matched import matched_rows
from stillroom.experiments.knob_measures import measures
from stillroom.experiments.knob_report import ACCURACY, STOPPED_AT, Done, figures_of, show, tests_of
from stillroom.pocket.chains import style_of
from stillroom.records import plain, read_jsonl, write_atomically
from stillroom.runs import Run
from stillroom.types import Estimate


@dataclass(frozen=True)
class Method:
    """One way to learn from a teacher."""

    loss: LossChoice
    on_policy_fraction: float
    temperature: float = 1.0
    """Of the teacher's completions."""


TABLE: dict[str, Method] = dict(
    zip(
        METHODS,
        (
            Method(LossChoice("cross_entropy"), 0.0),  # fine-tuning on what the teacher samples
            Method(LossChoice("cross_entropy"), 0.0, temperature=0.0),  # on its likeliest text (1606.07947)
            Method(LossChoice("forward_kl"), 0.0),
            Method(LossChoice("forward_kl", top_k=8), 0.0),
            Method(LossChoice("reverse_kl"), 1.0),
            Method(LossChoice("jsd", options={"weight": 0.5}), 0.5),  # GKD, 2306.13649
        ),
        strict=True,
    )
)


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    kind: Literal["teacher", "student", "start"]
    teacher: str
    """Label: original, distillable@1 …; gold, gold smoothed for students without a teacher."""
    method: str
    seed: int
    config: CalibrateConfig | DistillConfig | EvaluateConfig

    def key(self, root: Path) -> str:
        """Hash of the config, without the folders of this machine."""
        settings = {k: v for k, v in plain(self.config).items() if k != "output_dir"}
        text = json.dumps(settings, sort_keys=True).replace(json.dumps(str(root))[1:-1], "GRID")
        return hashlib.sha256(f"{self.kind} {text}".encode()).hexdigest()[:16]


STUDIED = 3
"""Seeds of the secondary comparisons, and of what is measured of students besides their accuracy."""


class Grid:
    """The cells of a config, in the order in which they are run."""

    def __init__(self, config: KnobConfig) -> None:
        self.config = config
        self.root = Path(config.output_dir)

    def cells(self) -> Iterator[Cell]:
        """The start, the primary comparison, then the other methods, strengths and controls."""
        config, first = self.config, self.config.strengths[0]
        yield self.start()
        both = [f"{mode}@{first:g}" for mode in ("distillable", "undistillable")]
        for methods in ((config.primary,), tuple(m for m in config.methods if m != config.primary)):
            for seed in config.seeds:
                yield from self._row(["original", *both], methods, seed)
        others = [f"{mode}@{s:g}" for s in config.strengths[1:] for mode in ("distillable", "undistillable")]
        if config.controls:
            others = ["strength 0", "random sign", *others]
        for seed in config.seeds[:STUDIED]:
            yield from self._row(others, (config.primary,), seed)
            if config.controls:
                yield self.gold(seed, smoothing=0.0)
                yield self.gold(seed, smoothing=0.1)
        within = [f"{label} {STOPPED_AT} {budget:g}" for budget in config.kl_budgets for label in both]
        for seed in config.seeds[:STUDIED]:
            yield from self._row(within, (config.primary,), seed)
        if config.controls and "sft" in config.methods:
            for seed in config.seeds[:STUDIED]:
                yield from (self.matched(label, seed) for label in both)

    def _row(self, teachers: list[str], methods: tuple[str, ...], seed: int) -> Iterator[Cell]:
        for label in teachers:
            if label != "original":
                yield self.teacher(label, seed)
            for method in methods:
                yield self.student(label, method, seed)

    def start(self) -> Cell:
        """The undistilled student, scored as all others are."""
        made = self.config.distill
        scored = EvaluateConfig(
            model=ModelSpec(made.student.path or "", made.student.revision, made.student.dtype),
            tasks=made.score.tasks,
            data_dir=made.data.data_dir,
            max_examples=made.score.max_examples,
            num_samples=made.score.num_samples,
            max_completion_length=made.sampling.max_completion_length,
            batch_size=made.sampling.batch_size,
        )
        return self._placed(Cell("start", "none", "undistilled", 0, scored))

    def teacher(self, label: str, seed: int) -> Cell:
        """A calibration."""
        base = self.config.calibrate
        made = replace(base, save_merged=True, train=replace(base.train, seed=seed))
        if label == "strength 0":
            made = replace(made, strength=0.0)
        elif label == "random sign":
            made = replace(
                made, strength=self.config.strengths[0], reward=replace(made.reward, sign="random")
            )
        else:
            dose, _, budget = label.partition(f" {STOPPED_AT} ")
            mode, _, strength = dose.partition("@")
            made = replace(made, mode=mode, strength=float(strength))  # pyright: ignore[reportArgumentType]
            if budget:
                made = replace(made, train=replace(made.train, kl_budget=float(budget)))
        return self._placed(Cell("teacher", label, "", seed, made))

    def student(self, label: str, method: str, seed: int) -> Cell:
        """A distillation from the original or from a calibrated teacher."""
        base, how = self.config.distill, TABLE[method]
        teacher = base.teacher
        if label != "original":
            made = self.teacher(label, seed)
            teacher = ModelSpec(str(self.root / made.key(self.root) / "merged"), None, base.teacher.dtype)
        config = replace(
            base,
            teacher=teacher,
            loss=how.loss,
            sampling=replace(
                base.sampling, on_policy_fraction=how.on_policy_fraction, temperature=how.temperature
            ),
            train=replace(base.train, seed=seed),
            data=replace(base.data, seed=seed),
        )
        return self._placed(Cell("student", label, method, seed, config))

    def gold(self, seed: int, *, smoothing: float) -> Cell:
        """Fine-tuning without a teacher, on gold text in the original's own mixture of styles."""
        label = "gold smoothed" if smoothing else "gold"
        return self._of_text(label, f"gold-seed{seed}.jsonl", seed, smoothing)

    def matched(self, label: str, seed: int) -> Cell:
        """Fine-tuning on the original's text, resampled to a calibrated teacher's styles and lengths."""
        return self._of_text(f"matched {label}", f"matched-{label}-seed{seed}.jsonl", seed, 0.0)

    def _of_text(self, label: str, file: str, seed: int, smoothing: float) -> Cell:
        base = self.config.distill
        config = replace(
            base,
            loss=LossChoice("cross_entropy", label_smoothing=smoothing),
            data=replace(
                base.data,
                tasks=(),
                path=str(self.root / file),
                completions="gold",
                max_rows=None,
                seed=seed,
            ),
            train=replace(base.train, seed=seed),
        )
        return self._placed(Cell("student", label, "sft", seed, config))

    def _placed(self, cell: Cell) -> Cell:
        return replace(cell, config=replace(cell.config, output_dir=str(self.root / cell.key(self.root))))


def knob(config: KnobConfig, options: Options) -> dict[str, Estimate]:
    """Run the cells that are not done, print the table, and return its figures.

    Raises:
        StillroomError: one of its leaves, of the first run that it concerns.
    """
    console = make_console(quiet=options.quiet)
    whole = replace(config, only_seeds=())
    run = Run.prepare(config.output_dir, command="knob", config=whole, resume=options.resume)
    grid = Grid(config)
    cells = list(grid.cells())
    if options.dry_run:
        for cell in cells:
            console.print(f"{cell.key(grid.root)} {cell.kind} {cell.teacher} {cell.method} seed {cell.seed}")
        console.print(f"{len(cells)} cells; nothing was written")
        return {}
    run.begin()
    done: list[Done] = []
    began, new = time.monotonic(), 0
    for number, cell in enumerate(cells, 1):
        if config.only_seeds and cell.seed not in config.only_seeds:
            continue
        known = read_cell(grid, cell)
        if known is None:
            run_cell(grid, cell)
            known, new = read_cell(grid, cell), new + 1
            left = (time.monotonic() - began) / new * (len(cells) - number)
            console.print(f"{number}/{len(cells)} {_said(cell, known)}; at most {left / 60:.0f} min left")
        assert known is not None
        is_studied = cell.method == config.primary and cell.seed in config.seeds[:STUDIED]
        is_studied &= STOPPED_AT not in cell.teacher
        if isinstance(cell.config, DistillConfig) and is_studied:
            known["figures"] |= measures(cell.config, cell.seed)
        if cell.kind == "start":
            known["estimate"] = Run.open(cell.config.output_dir).results()[ACCURACY].as_dict()
        done.append(Done(cell.kind, cell.teacher, cell.method, cell.seed, known))
    if config.only_seeds:
        console.print(f"the cells of seeds {', '.join(map(str, config.only_seeds))} are done: {len(done)}")
        return {}
    figures = figures_of(done, config.primary)
    tests = tests_of(done, config.methods)
    run.write_results(figures, seeds=list(config.seeds), cells=len(cells), tests=tests)
    show(console, done, figures)
    console.print(f"figures and cells: {run.path}")
    return figures


def read_cell(grid: Grid, cell: Cell) -> dict[str, Any] | None:
    """What a finished cell left, or None."""
    file = grid.root / cell.key(grid.root) / "cell.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def run_cell(grid: Grid, cell: Cell) -> None:
    """Run a cell to its end, or go on with it, and write its ``cell.json``."""
    quiet = Options(resume=True, quiet=True)
    config = cell.config
    folder = Path(config.output_dir)
    found: dict[str, float]
    if isinstance(config, CalibrateConfig):
        figures = calibrate(config, quiet)
        found = {name: e.value for name, e in figures.items()}
        ended = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        found |= {"last_good_step": ended["last_good_step"]} | _styles(folder)
        notes = {"stop_reason": ended["stop_reason"], "alarms": ended["alarms"][:3]}
    elif isinstance(config, EvaluateConfig):
        found, notes = {k: e.value for k, e in evaluate(config, quiet).items()}, {}
    else:
        if config.data.path:
            file, label = Path(config.data.path), cell.teacher.removeprefix("matched ")
            if label == cell.teacher:
                gold_rows(file, grid, cell.seed)
            else:
                matched_rows(file, grid, label, cell.seed)
        figures = distill(config, quiet)
        found = {k.removesuffix("/after"): e.value for k, e in figures.items() if k.endswith("/after")}
        found |= {f"ood/{k}": e.value for k, e in _longer(config).items() if "accuracy" in k}
        notes = {}
    record = {"teacher": cell.teacher, "method": cell.method, "seed": cell.seed, **notes}
    record["figures"] = {name: round(float(value), 6) for name, value in found.items()}
    write_atomically(folder / "cell.json", json.dumps(record, indent=1))


def _longer(config: DistillConfig) -> dict[str, Estimate]:
    """The student on the split that is harder than its training."""
    asked = EvaluateConfig(
        output_dir=str(Path(config.output_dir) / "ood"),
        model=ModelSpec(str(Path(config.output_dir) / "student")),
        tasks=config.score.tasks,
        data_dir=config.data.data_dir,
        split="ood",
        max_examples=300,
        max_completion_length=config.sampling.max_completion_length,
        batch_size=config.sampling.batch_size,
    )
    return evaluate(asked, Options(resume=True, quiet=True))


def _styles(folder: Path) -> dict[str, float]:
    """Share of a teacher's completions that write steps, before and after."""
    shares: dict[str, float] = {}
    for when in ("before", "after"):
        texts = [r["text"] for r in read_jsonl(folder / "rollouts.jsonl") if r.get("purpose") == when]
        if texts:
            shares[f"worked_share/{when}"] = sum((style_of(t) or 0) > 0 for t in texts) / len(texts)
    return shares


def _said(cell: Cell, record: dict[str, Any] | None) -> str:
    figures = (record or {}).get("figures", {})
    name = "utility/after" if cell.kind == "teacher" else "pocket/chains/accuracy_sampled"
    value = figures.get(name)
    what = "calibrating" if cell.kind == "teacher" else cell.method
    return f"{cell.teacher}, {what}, seed {cell.seed}" + (f": {value:.3f}" if value is not None else "")
