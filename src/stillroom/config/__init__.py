"""The desk: what each command can be asked, written once.

One frozen dataclass a command, made of parts; `cli` makes flags, YAML keys and help text from it. Names are
those of Hugging Face and TRL where the thing is theirs. Values are checked here, before any weight is read.
"""

from stillroom.config.calibration import CalibrateConfig, GuardSpec, PromptSpec, RewardSpec, TuneSpec
from stillroom.config.commands import DemoConfig, DistillConfig, EvaluateConfig, FetchConfig, TasksConfig
from stillroom.config.parts import (
    DataSpec,
    LoraSpec,
    LossChoice,
    ModelSpec,
    Options,
    SamplingSpec,
    ScoreSpec,
    StudentSpec,
    TrainSpec,
)

__all__ = [
    "CalibrateConfig",
    "DataSpec",
    "DemoConfig",
    "DistillConfig",
    "EvaluateConfig",
    "FetchConfig",
    "GuardSpec",
    "LoraSpec",
    "LossChoice",
    "ModelSpec",
    "Options",
    "PromptSpec",
    "RewardSpec",
    "SamplingSpec",
    "ScoreSpec",
    "StudentSpec",
    "TasksConfig",
    "TrainSpec",
    "TuneSpec",
]
