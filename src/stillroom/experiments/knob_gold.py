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
    cell = grid.student("original", grid.config.primary, seed)
    source = Path(cell.config.output_dir) / "rollouts.jsonl"
    if not source.is_file():
        raise ConfigError(
            f"gold for seed {seed} is written in the styles of the original's completions, and the cell of those "
            f"({source.parent.name}) has not run. Run the grid from its beginning."
        )
    lines = []
    for record in read_jsonl(source):
        if record.get("purpose") == "train":
            lines.append(json.dumps(_gold_row(record["example_id"], record["text"])))
    write_atomically(file, "\n".join(lines) + "\n")


def _gold_row(example_id: str, written: str) -> dict[str, str]:
    prompt = example_id.rpartition("/")[2]
    start, path = prompt[:1], prompt[1:].removesuffix("=?")
    if not (start.isdigit() and path and set(path) <= set(DOORS) and prompt.endswith("=?")):
        raise ConfigError(
            f"{example_id!r} is no walk through doors, and gold in a teacher's style can be written for walks only. "
            "Set controls: false for other tasks."
        )
    steps = style_of(written)
    # What has no style of its own counts as worked; there are one or two in a thousand.
    return {
        "prompt": prompt,
        "completion": gold(int(start), path, len(path) if steps is None else min(steps, len(path))),
    }
