"""What a calibration refuses once the original has been looked at, and before anything is written."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stillroom.calibration.judge import Judge
from stillroom.calibration.rewards import gate
from stillroom.commands.calibration_parts import HeldoutSets
from stillroom.config import CalibrateConfig
from stillroom.errors import ConfigError
from stillroom.models import loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stillroom.calibration.guards import GuardReading

logger = logging.getLogger(__name__)


def refuse_adapter(path: str) -> None:
    if (Path(loading.resolve(path)) / "adapter_config.json").is_file():
        raise ConfigError(
            f"teacher {path!r} is an adapter, and the original that the KL is measured from would be its base model, "
            "not the teacher that you have. Merge it first (save_merged: true when it was calibrated) and give the "
            "merged folder."
        )


def refuse_what_cannot_be_calibrated(
    config: CalibrateConfig, judge: Judge, held: HeldoutSets, policy: PreTrainedModel
) -> None:
    """Look at groups of completions by the original: is there anything to push on?"""
    group = config.train.num_generations
    first = replace(held.guard, asked=held.guard_asked[:32], num_samples=group)
    rows = first.answers(policy)
    utility = np.array([row.score or 0.0 for row in rows])
    if not any(row.ended for row in rows):
        raise ConfigError(
            f"all {len(rows)} completions of the original are cut off at train.max_completion_length="
            f"{config.train.max_completion_length}, so none can be rewarded. Raise it."
        )
    if (utility == 0).all():
        raise ConfigError(
            f"the original scores 0 on all {len(rows)} completions of {len(first.asked)} held-out prompts, so there is "
            "no skill to keep and no right completion to reward. Choose tasks that it can do."
        )
    if (utility == 1).all():
        logger.warning(
            "the original scores 1 on all %d completions: utility gives no signal, and only the floor holds it",
            len(rows),
        )
    if config.strength == 0:
        return
    rewarded = gate(judge.raw(rows), rows, on_correct=config.reward.gate == "correct")
    groups = [[r for r in rewarded[i : i + group] if r is not None] for i in range(0, len(rewarded), group)]
    if not any(len(set(values)) > 1 for values in groups):
        raise ConfigError(
            f"nothing to calibrate: in none of {len(groups)} groups of {group} completions do two that may be rewarded "
            "differ. The teacher answers in a single way (or hardly ever right). Raise train.num_generations, or give "
            "a teacher that has more than one style."
        )


def floor_points(config: CalibrateConfig, before: GuardReading) -> float:
    """Percentage points of utility that may be lost.

    Raises:
        ConfigError: the floor that was given lies above the original.
    """
    measured = float(np.mean(before.utilities))
    if config.guard.floor is None:
        return config.guard.floor_points
    if config.guard.floor > measured:
        raise ConfigError(
            f"guard.floor={config.guard.floor} lies above the original's own utility of {measured:.3f} on "
            f"{len(before.utilities)} held-out prompts, so every step would be rolled back. Lower it, or give "
            "guard.floor_points."
        )
    return 100 * (measured - config.guard.floor)
