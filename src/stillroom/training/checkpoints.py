"""Checkpoints that are whole or do not count.

The Trainer writes a checkpoint file by file, and a kill in between leaves a folder that looks like one.
Here a checkpoint counts only once it holds a file named COMPLETE, written last, after every other file
has reached the disk; older checkpoints are removed only after that.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from stillroom.errors import RunFolderError

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders that count, oldest first."""
    return [path for _, path in _checkpoints(output_dir) if (path / MARKER).is_file()]


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The checkpoint to resume from, or None. Half-written ones are named in the log and left alone."""
    found = _checkpoints(output_dir)
    for step, path in reversed(found):
        if (path / MARKER).is_file():
            return path
        logger.warning(
            "checkpoint of step %d is half-written (no %s file) and does not count: %s", step, MARKER, path
        )
    return None


def require_complete_checkpoint(output_dir: str | Path) -> Path:
    """The newest complete checkpoint.

    Raises:
        RunFolderError: there is none.
    """
    found = last_complete_checkpoint(output_dir)
    if found is None:
        raise RunFolderError(
            f"{str(output_dir)!r} holds no complete checkpoint to resume from. Check output_dir, or start without "
            "resume_from_checkpoint."
        )
    return found


def finished_state(checkpoint: str | Path, total_steps: int) -> TrainerState | None:
    """The state of a checkpoint that was written at the last step; None if there are steps left."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    return state if state.global_step >= total_steps else None


def _checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    folder = Path(output_dir)
    matches = (
        [(re.fullmatch(r"checkpoint-(\d+)", p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    )
    return sorted((int(match.group(1)), path) for match, path in matches if match and path.is_dir())


class CompleteCheckpoints(TrainerCallback):
    """Marks a checkpoint once it is whole, then removes the oldest beyond `keep`, but never the best one.

    The Trainer's own `save_total_limit` must be off: it removes the old checkpoint before the new one
    is known to be whole.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        PartialState().wait_for_everyone()  # every worker has written its part
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        for file in folder.rglob("*"):
            if file.is_file():
                _flush(file)
        (folder / MARKER).write_text(f"step {state.global_step}\n", encoding="utf-8")
        _flush(folder / MARKER)
        best = Path(state.best_model_checkpoint or "").name
        old = complete_checkpoints(str(args.output_dir))[: -self.keep]
        for path in (path for path in old if path.name != best):
            (path / MARKER).unlink()  # first, so that a half-removed checkpoint does not count either
            shutil.rmtree(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
