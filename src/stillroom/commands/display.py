"""What a person sees while a command runs. Text from models and data is shown as text, never as markup."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from stillroom.runs import Run
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillroom.data.batches import TrainingRow


class RunCallback(TrainerCallback):
    """Copies the Trainer's log lines into ``metrics.jsonl``."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        if state.is_world_process_zero and logs:
            self.run.log(logs, step=state.global_step)


def make_console() -> Console:
    """The terminal, or 120 columns where there is none, so that logs hold whole tables."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it advises on what we set on purpose
    disable_progress_bar()
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def show_example(
    console: Console, tokenizer: PreTrainedTokenizerBase, row: TrainingRow, limit: int = 120
) -> None:
    """One row as it is trained on: prompt dim, supervised tokens green. Finds mask bugs at a glance."""
    text = Text("first row: ", style="bold")
    text.append(_decoded(tokenizer, row.prompt_ids)[-2 * limit :], style="dim")
    marked = list(zip(row.completion_ids, row.completion_mask, strict=True))
    for trained, run in itertools.groupby(marked[:limit], key=lambda pair: pair[1]):
        text.append(_decoded(tokenizer, [token for token, _ in run]), style="green" if trained else "dim")
    text.append(f" … {len(marked) - limit} more tokens" if len(marked) > limit else "", style="dim")
    console.print(text)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids))).replace("\n", "⏎")


def before_and_after(console: Console, before: Mapping[str, Estimate], after: Mapping[str, Estimate]) -> None:
    """Figures of the start and of the end, side by side."""
    table = Table(Column("figure", no_wrap=True), "before", "after", "unit", "n")
    for name, estimate in after.items():
        table.add_row(name, _interval(before[name]), _interval(estimate), estimate.unit, str(estimate.n))
    console.print(table)


def figures_table(console: Console, figures: Mapping[str, Estimate]) -> None:
    """One line a figure."""
    table = Table(Column("figure", no_wrap=True), "value", "unit", "n", "interval by")
    for name, estimate in figures.items():
        table.add_row(name, _interval(estimate), estimate.unit, str(estimate.n), estimate.method)
    console.print(table)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]"
