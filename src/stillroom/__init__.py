"""Stillroom: predictable, controllable knowledge distillation of language models.

Public names are loaded on first use, so that ``import stillroom`` and ``stillroom --help`` stay
fast and do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_PUBLIC = {
    "DistillationTrainer": "stillroom.training.distill",
    "LOSSES": "stillroom.losses",
    "TASKS": "stillroom.data.tasks",
    "TeacherSignal": "stillroom.losses.signals",
    "Estimate": "stillroom.types",
    "Example": "stillroom.types",
    "Finding": "stillroom.types",
    "Rollout": "stillroom.types",
    "StillroomError": "stillroom.errors",
}
__all__ = sorted(_PUBLIC)

try:
    __version__ = version("stillroom")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'stillroom' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
