"""What a person sees while a command runs. Text from models and data is shown as text: never as markup, and with
its control codes spelt out, since a terminal would obey them.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
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
    """Copies the Trainer's log lines into ``metrics.jsonl``, and off a terminal prints one now and then."""

    def __init__(
        self,
        run: Run,
        console: Console,
        seconds_between_lines: float = 15.0,
        shown: tuple[str, ...] = ("loss/",),
    ) -> None:
        self.run, self.console, self.pause, self.shown = run, console, seconds_between_lines, shown
        self.first: tuple[float, int] | None = None
        self.last_line = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.first = self.first or (time.monotonic(), state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.run.log(logs, step=state.global_step)
        now = time.monotonic()
        if (
            self.console.is_terminal
            or self.first is None
            or "loss" not in logs
            or now - self.last_line < self.pause
        ):
            return
        self.last_line = now
        began, at = self.first
        left = (now - began) / max(state.global_step - at, 1) * (state.max_steps - state.global_step)
        values = ", ".join(
            f"{k} {v:.4g}" for k, v in logs.items() if k.startswith(self.shown) and v is not None
        )
        self.console.print(f"step {state.global_step}/{state.max_steps}: {values}; {left:.0f} s left")


def make_console(*, quiet: bool = False) -> Console:
    """The terminal, or 120 columns where there is none, so that logs hold whole tables. Prints strings as they are."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it advises on what we set on purpose
    # TRL still speaks of gradient checkpointing by its old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    disable_progress_bar()
    width = None if Console().is_terminal else 120
    return Console(highlight=False, markup=False, emoji=False, width=width, quiet=quiet)


def visible(text: str) -> str:
    r"""The text on one line, with characters that move the cursor or turn the direction of writing spelt out.

    >>> visible("a\x1b[2Jb\nc")
    'a\\x1b[2Jb⏎c'
    """
    return "".join(c if c.isprintable() else _spelt(c) for c in text)


def _spelt(character: str) -> str:
    return "⏎" if character == "\n" else character.encode("unicode_escape").decode("ascii")


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
    return visible(str(tokenizer.decode(list(ids))))


def before_and_after(
    console: Console,
    before: Mapping[str, Estimate],
    after: Mapping[str, Estimate],
    teacher: Mapping[str, Estimate],
) -> None:
    """Figures of the student at the start and at the end, and of the teacher where it was scored too."""
    table = Table(
        Column("figure", no_wrap=True), "before", "after", *(["teacher"] if teacher else []), "unit", "n"
    )
    for name, estimate in after.items():
        of_teacher = [_interval(teacher[name]) if name in teacher else ""] if teacher else []
        table.add_row(
            name,
            _interval(before[name]) if name in before else "",
            _interval(estimate),
            *of_teacher,
            estimate.unit,
            str(estimate.n),
        )
    console.print(table)


def figures_table(console: Console, figures: Mapping[str, Estimate]) -> None:
    """One line a figure."""
    table = Table(Column("figure", no_wrap=True), "value", "unit", "n", "interval by")
    for name, estimate in figures.items():
        table.add_row(name, _interval(estimate), estimate.unit, str(estimate.n), estimate.method)
    console.print(table)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]"
