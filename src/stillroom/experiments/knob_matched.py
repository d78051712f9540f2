"""The rival explanation: is the knob a style knob?

The original teacher's own completions are resampled until their shares of style and length are those of a
calibrated teacher: for each completion of the calibrated teacher one of the original's is drawn with as many
written steps on a walk of the same length. A student of that text differs from a student of the calibrated
teacher in everything but style and length. If it does as well, the calibration moved style, and little else.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from stillroom import seeds
from stillroom.data.rendering import render_prompt
from stillroom.errors import DataError
from stillroom.experiments.knob_gold import walk_of, written_by
from stillroom.models import loading
from stillroom.pocket.chains import style_of
from stillroom.records import write_atomically
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

if TYPE_CHECKING:
    from stillroom.experiments.knob import Grid

POOL = 4
"""Completions of the original that are drawn from, for each prompt."""


def matched_rows(file: Path, grid: Grid, label: str, seed: int) -> None:
    """Write the rows: one for each completion that the calibrated teacher of this label wrote for its student.

    Raises:
        DataError: the original has no completion of a kind that makes up one in a hundred of the calibrated teacher's.
    """
    wanted = written_by(grid, label, "sft", seed)
    pool = _pool(grid, [prompt for prompt, _ in wanted], seed)
    lines, missing = [], 0
    for number, (prompt, text) in enumerate(wanted):
        kind = _kind(prompt, text)
        there = pool.get(kind, [])
        if not there:
            missing += 1
            continue
        chosen = there[seeds.key(seed, "knob/matched", label, number) % len(there)]
        lines.append(json.dumps({"prompt": chosen[0], "completion": chosen[1]}))
    if missing > 0.01 * len(wanted):
        raise DataError(
            f"{missing} of {len(wanted)} completions of {label!r} are of a style and length that the original never "
            f"wrote in {POOL} tries a prompt, so its text cannot be matched to them. Raise POOL, or leave "
            f"the control out."
        )
    write_atomically(file, "\n".join(lines) + "\n")


def _pool(grid: Grid, prompts: list[str], seed: int) -> dict[tuple[int, int | None], list[tuple[str, str]]]:
    """The original's completions that ended, by kind."""
    spec = grid.config.distill
    model = loading.load_teacher(spec.teacher.path, spec.teacher.dtype, spec.teacher.revision)
    tokenizer = loading.load_tokenizer(spec.teacher.path, spec.teacher.revision)
    sampler = HFSampler(model, tokenizer, batch_size=spec.sampling.batch_size)
    rollouts = sampler.sample(
        [Prompt(prompt, render_prompt(tokenizer, prompt)) for prompt in prompts],
        num_generations=POOL,
        max_completion_length=spec.sampling.max_completion_length,
        temperature=1.0,
        seed=seeds.key(seed, "knob/pool"),
    )
    pool: dict[tuple[int, int | None], list[tuple[str, str]]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.stop_reason == "end" and rollout.text:
            pool[_kind(rollout.example_id, rollout.text)].append((rollout.example_id, rollout.text))
    return pool


def _kind(prompt: str, text: str) -> tuple[int, int | None]:
    """Doors of the walk, which are its difficulty, and written steps, which are style and length."""
    _, path = walk_of(prompt)
    return len(path), style_of(text)
