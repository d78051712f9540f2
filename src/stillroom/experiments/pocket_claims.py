"""`stillroom pocket measure` and `stillroom pocket asymmetry`: the figures of the pocket world, as run folders.

The work is done by `pocket_floors` and `pocket_asymmetry`; what is here makes runs of it, so that the
figures can be stated and checked again like any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stillroom.config import Options
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.types import Estimate


@dataclass(frozen=True)
class PocketMeasureConfig:
    """Measure a pocket model: chains in each forced style and sampled freely, facts, strings."""

    model: str = "pocket:chars-teacher"
    """Folder or pocket:NAME."""
    output_dir: str = "runs/pocket/measure"
    """Run folder to write."""
    n: int = 1000
    """Held-out items of each kind."""

    def __post_init__(self) -> None:
        if self.n < 30:
            raise ConfigError(f"n={self.n} items give no useful interval. Give 30 or more.")


@dataclass(frozen=True)
class PocketAsymmetryConfig:
    """Train the student's architecture on gold of one style at a time, and measure what it learned."""

    output_dir: str = "runs/pocket/asymmetry"
    """Run folder to write."""
    family: str = "chars"
    """Tokenizer family: chars or bpe."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One training for each style and seed."""
    n: int = 1000
    """Held-out walks measured."""

    def __post_init__(self) -> None:
        if len(self.seeds) < 2:
            raise ConfigError(f"seeds={list(self.seeds)}: an interval over seeds needs at least two.")


def measure(config: PocketMeasureConfig, options: Options) -> dict[str, Estimate]:
    """Measure a model folder as it lies on disk."""
    from stillroom.commands.checks import refuse_output_inside_models
    from stillroom.commands.display import figures_table, make_console
    from stillroom.experiments.pocket_floors import measure as measure_folder
    from stillroom.models.loading import resolve
    from stillroom.runs import Run

    console = make_console(quiet=options.quiet)
    refuse_output_inside_models(config.output_dir, {"model": config.model})
    folder = resolve(config.model)
    if options.dry_run:
        console.print(f"would measure {folder} on {config.n} items of each kind", markup=False)
        return {}
    run = Run.create(config.output_dir, command="pocket measure", config=config, resume=options.resume)
    figures = measure_folder(folder, config.n)
    run.write_results(figures, model=config.model)
    figures_table(console, figures)
    return figures


def asymmetry(config: PocketAsymmetryConfig, options: Options) -> dict[str, Estimate]:
    """Accuracy by style: means over seeds with t intervals, and each seed's own."""
    from stillroom import stats
    from stillroom.commands.display import figures_table, make_console
    from stillroom.experiments.pocket_asymmetry import CHANCE, STEPS, train_on_one_style
    from stillroom.runs import Run

    console = make_console(quiet=options.quiet)
    if options.dry_run:
        console.print(f"would train {len(STEPS) * len(config.seeds)} students, one to two minutes each")
        return {}
    run = Run.create(config.output_dir, command="pocket asymmetry", config=config, resume=options.resume)
    figures: dict[str, Estimate] = {}
    for style in STEPS:
        for seed in config.seeds:
            for mode, estimate in train_on_one_style(style, seed, config.family, config.n).items():
                figures[f"{style}/{mode}/seed{seed}"] = estimate
            console.print(f"{style}, seed {seed}: greedy {figures[f'{style}/greedy/seed{seed}']}")
        for mode in ("greedy", "sampled"):
            of_seeds = [figures[f"{style}/{mode}/seed{seed}"].value for seed in config.seeds]
            figures[f"{style}/{mode}"] = stats.mean_interval(of_seeds, unit="accuracy")
    figures["chance"] = stats.exact(CHANCE, n=config.n, unit="accuracy")
    run.write_results(figures, seeds=list(config.seeds))
    figures_table(console, figures)
    return figures
