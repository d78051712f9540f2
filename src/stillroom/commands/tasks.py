"""`stillroom tasks`: what can be trained and scored on."""

from __future__ import annotations

from rich.table import Column, Table

from stillroom.commands.display import make_console
from stillroom.config import Options, TasksConfig
from stillroom.data.tasks import TASKS
from stillroom.errors import ConfigError, unknown_name


def tasks(config: TasksConfig, options: Options) -> None:
    """Print the table of tasks: name, family, splits, licence and what it holds."""
    families = {spec.family for spec in TASKS.values()}
    if config.family is not None and config.family not in families:
        raise ConfigError(unknown_name("task family", config.family, families))
    table = Table(Column("task", no_wrap=True), "family", "test split", "licence", "holds")
    for name, spec in TASKS.items():
        if config.family in (None, spec.family):
            table.add_row(name, spec.family, spec.test_split, spec.licence, spec.summary)
    make_console(quiet=options.quiet).print(table)
