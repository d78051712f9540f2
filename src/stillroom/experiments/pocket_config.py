"""What `stillroom pocket train` can be asked; apart from the training, so that help costs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillroom.errors import ConfigError, unknown_name

FAMILIES = ("chars", "bpe")
ROLES = ("teacher", "student", "proxy")


@dataclass(frozen=True)
class PocketTrainConfig:
    """Rebuilds one pocket model from its seed."""

    family: Literal["chars", "bpe"] = "chars"
    """Tokenizer family."""
    role: Literal["teacher", "student", "proxy"] = "teacher"
    """Which model: the teacher, the undistilled student, or the smaller proxy."""
    output_dir: str = ""
    """Run folder; default runs/pocket/FAMILY-ROLE. The finished model lies in its folder `model`."""
    seed: int = 0
    """Added to the role's written seed; 0 rebuilds the shipped model."""
    longest: int = 6
    """Doors in the longest walks trained on."""
    minutes: float = 0.0
    """Time limit in minutes, after which the teacher's last phase begins; 0 takes the role's own."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl."""
    measure_every: int = 0
    """Steps between two measurements on held-out examples, which steer the training; 0 takes the role's own."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(unknown_name("tokenizer family", self.family, FAMILIES))
        if self.role not in ROLES:
            raise ConfigError(unknown_name("role", self.role, ROLES))
        if not 2 <= self.longest <= 8:
            raise ConfigError(
                f"longest={self.longest} doors: the curriculum begins at 2, and the positions of a completion are "
                "laid out for at most 8. Give a number from 2 to 8."
            )
        if not (math.isfinite(self.minutes) and self.minutes >= 0 and self.checkpoint_minutes > 0):
            raise ConfigError(
                f"minutes={self.minutes}, checkpoint_minutes={self.checkpoint_minutes}: a time limit is 0 (the "
                "role's own) or more, and checkpoints need some time between them. Give positive numbers."
            )
        if self.log_every < 1 or self.measure_every < 0:
            raise ConfigError(
                f"log_every={self.log_every}, measure_every={self.measure_every}: nothing is logged every 0 steps. "
                "Give 1 or more (measure_every may be 0 for the role's own)."
            )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or f"runs/pocket/{self.family}-{self.role}")
