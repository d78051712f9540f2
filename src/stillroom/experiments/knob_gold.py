"""Gold text in the original teacher's own mixture of styles: the students that never met a teacher.

Each prompt that the original's students were trained on gets the right answer, written in the style in which the
original answered that prompt. What separates a student of this text from one of the original's is the teacher's
errors and nothing else: same start, same prompts, same tokens but for those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stillroom.errors import ConfigError
from stillroom.pocket.chains import DOORS, gold, style_of
from stillroom.records import read_jsonl, write_atomically

if TYPE_CHECKING:
    from stillroom.experiments.knob import Grid


def gold_rows(file: Path, grid: Grid, seed: int) -> None:
    """Write the rows, from what the original wrote for the primary method's student of this seed.

    Raises:
        ConfigError: that cell has not run, or its prompts are no walks.
    """
    lines = []
    for prompt, text in written_by(grid, "original", grid.config.primary, seed):
        start, path = walk_of(prompt)
        steps = style_of(text)
        # What has no style of its own counts as worked; there are one or two in a thousand.
        completion = gold(start, path, len(path) if steps is None else min(steps, len(path)))
        lines.append(json.dumps({"prompt": prompt, "completion": completion}))
    write_atomically(file, "\n".join(lines) + "\n")


def written_by(grid: Grid, label: str, method: str, seed: int) -> list[tuple[str, str]]:
    """Prompts, and what a teacher wrote for its student to learn from.

    Raises:
        ConfigError: the student's cell has not run.
    """
    cell = grid.student(label, method, seed)
    source = Path(cell.config.output_dir) / "rollouts.jsonl"
    if not source.is_file():
        raise ConfigError(
            f"a control of seed {seed} is made from what {label!r} wrote for its {method} student, and its cell "
            f"({source.parent.name}) has not run. Run the grid from its beginning."
        )
    return [
        (record["example_id"].rpartition("/")[2], record["text"])
        for record in read_jsonl(source)
        if record.get("purpose") == "train"
    ]


def walk_of(prompt: str) -> tuple[int, str]:
    """The start and the doors of a prompt.

    Raises:
        ConfigError: it is no walk.
    """
    start, path = prompt[:1], prompt[1:].removesuffix("=?")
    if not (start.isdigit() and path and set(path) <= set(DOORS) and prompt.endswith("=?")):
        raise ConfigError(
            f"{prompt!r} is no walk through doors, and only walks have gold in a teacher's style. Set controls: "
            "false for other tasks."
        )
    return int(start), path
