"""Finds the pocket models that are shipped inside the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from stillroom.errors import ConfigError, unknown_name


def _folder(kind: str) -> Path:
    """The models are read as files by transformers, so the package must lie unzipped on disk."""
    return Path(str(resources.files("stillroom.pocket"))) / kind


def model_names() -> list[str]:
    """Names of the shipped models, ``<family>-<role>``, such as ``chars-teacher``."""
    return sorted(path.parent.name for path in _folder("models").glob("*/card.json"))


def adapter_names() -> list[str]:
    """Names of the shipped adapters, calibrated teachers: ``<family>-<mode>``, such as ``chars-distillable``."""
    return sorted(path.parent.name for path in _folder("adapters").glob("*/card.json"))


def model_path(name: str) -> Path:
    """The folder of a shipped model or adapter, to be given to ``from_pretrained``.

    The weights of models are stored as float16; load them with ``dtype=torch.float32`` on a CPU.

    Raises:
        ConfigError: no model of that name is shipped; the message names near matches and all that are.
    """
    names, adapters = model_names(), adapter_names()
    if name in adapters:
        return _folder("adapters") / name
    if name not in names:
        raise ConfigError(
            unknown_name("pocket model", name, [*names, *adapters])
            + " A name is a tokenizer family and a role. Others can be built with `stillroom pocket train`."
        )
    return _folder("models") / name


def card(name: str) -> dict[str, Any]:
    """What is known about a shipped model: its making, and its measured accuracies with their n."""
    return json.loads((model_path(name) / "card.json").read_text(encoding="utf-8"))
