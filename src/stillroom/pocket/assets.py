"""Finds the pocket models that are shipped inside the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from stillroom.errors import ConfigError, unknown_name


def _folder() -> Path:
    """The models are read as files by transformers, so the package must lie unzipped on disk."""
    return Path(str(resources.files("stillroom.pocket"))) / "models"


def model_names() -> list[str]:
    """Names of the shipped models, ``<family>-<role>``, such as ``chars-teacher``."""
    return sorted(path.parent.name for path in _folder().glob("*/card.json"))


def model_path(name: str) -> Path:
    """The folder of a shipped model, to be given to ``from_pretrained``.

    The weights are stored as float16; load them with ``dtype=torch.float32`` on a CPU.

    Raises:
        ConfigError: no model of that name is shipped; the message names near matches and all that are.
    """
    names = model_names()
    if name not in names:
        raise ConfigError(
            unknown_name("pocket model", name, names)
            + " A name is a tokenizer family and a role. Others can be built with `stillroom pocket train`."
        )
    return _folder() / name


def card(name: str) -> dict[str, Any]:
    """What is known about a shipped model: its making, and its measured accuracies with their n."""
    return json.loads((model_path(name) / "card.json").read_text(encoding="utf-8"))
