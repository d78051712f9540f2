"""Progress bars with the time left, on a terminal and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def tracked(items: Sequence[T], label: str | None) -> Iterable[T]:
    """The items, with a bar on standard error while they are gone through; without a label there is none."""
    console = Console(stderr=True)
    if label is None or not console.is_terminal:
        return items
    return track(items, label, console=console, transient=True)
