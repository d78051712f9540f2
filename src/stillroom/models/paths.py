"""What a user writes for a model becomes a folder or a Hugging Face name, or one clear error.

Four spellings: a local folder, a Hugging Face name (``org/name``), ``pocket:NAME`` for a model that is
shipped inside the package, ``fetched:NAME`` for one that `stillroom fetch` put into the user's cache.
``pocket.assets`` imports nothing but the cellar, so this room may look a name up in it although the rest
of the pocket world stands further right.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from stillroom.errors import ConfigError, unknown_name

_SHOWN = 12


def resolve(name: str) -> str:
    """The local folder or Hugging Face name that ``name`` stands for.

    Returns:
        An existing folder that holds a model or an adapter, or a Hugging Face name (not looked up yet).

    Raises:
        ConfigError: the name is empty, a local path that does not exist (near matches among its siblings
            are named), a file, a folder without a model, or a model that would run its own code.
    """
    if not name.strip():
        raise ConfigError(
            "a model's path is empty, so there is nothing to load. Give a folder, a Hugging Face name, or "
            "pocket:NAME for a shipped model."
        )
    if name.startswith("pocket:"):
        from stillroom.pocket.assets import model_path

        return str(model_path(name.removeprefix("pocket:")))
    if name.startswith("fetched:"):
        from stillroom.models.fetch import fetched_path

        return str(fetched_path(name.removeprefix("fetched:")))
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_model_folder(folder)
        return str(folder)
    if folder.exists():
        raise ConfigError(
            f"model path {name!r} is a file, but a model is a folder with config.json and safetensors "
            f"weights. Give the folder that holds it ({str(folder.parent)!r}?)."
        )
    if _is_written_as_path(name, folder):
        raise ConfigError(f"{missing_folder(folder)} The model cannot be loaded. Correct the path.")
    return name


def check_distinct(
    student: str, teacher: str, *, student_revision: str | None = None, teacher_revision: str | None = None
) -> None:
    """Refuse a student that is the teacher's own folder, also through a symbolic link.

    Raises:
        ConfigError: both names lead to the same weights.
    """
    one, other = resolve(student), resolve(teacher)
    same = Path(one).resolve() == Path(other).resolve() if Path(one).is_dir() else one == other
    if same and student_revision == teacher_revision:
        raise ConfigError(
            f"student {student!r} and teacher {teacher!r} are the same model, so every divergence is zero "
            "and nothing would be learned. Give the student a folder of its own, or make one from the teacher "
            "(student.num_hidden_layers)."
        )


def missing_folder(folder: Path) -> str:
    """A sentence on a folder that is not there: near matches and siblings, or how far its path exists."""
    parent = folder.parent
    if parent.is_dir():
        return unknown_name("model folder", folder.name, _shortened(folder.name, _folders(parent)))
    while not parent.is_dir():
        parent = parent.parent
    held = ", ".join(_folders(parent)[:_SHOWN]) or "(no folders)"
    return (
        f"unknown model folder {str(folder)!r}. Its path exists up to {str(parent)!r}, which holds: {held}."
    )


def near_folders(name: str) -> list[str]:
    """Folders near the current one whose names resemble ``name``."""
    return difflib.get_close_matches(Path(name).name, _folders(Path()), n=3, cutoff=0.5)


def _folders(parent: Path) -> list[str]:
    return sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and entry.name[:1] != ".")


def _shortened(name: str, names: list[str]) -> list[str]:
    """At most a dozen, near matches among them."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return near + [other for other in names if other not in near][: _SHOWN - len(near)]


def _is_written_as_path(name: str, folder: Path) -> bool:
    """Hugging Face names have at most one slash, and what stands before it is rarely a folder here."""
    return name[0] in "./~\\" or name.count("/") > 1 or ("/" in name and folder.parent.is_dir())


def _check_model_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        return
    config = folder / "config.json"
    if not config.is_file():
        inside = [str(path.parent.relative_to(folder)) for path in sorted(folder.glob("*/config.json"))]
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:_SHOWN]) or "(nothing)"
        hint = (
            f"Did you mean one inside it ({', '.join(inside[:_SHOWN])})?" if inside else "Correct the path."
        )
        raise ConfigError(
            f"folder {str(folder)!r} holds no config.json, so it is not a model. It holds: {held}. {hint}"
        )
    try:
        declared = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(
            f"{str(config)!r} is not valid JSON ({problem}), so the model's shape is unknown. It may be cut "
            "short; copy or save the model again."
        ) from problem
    _check_no_own_code(folder, declared)


def _check_no_own_code(folder: Path, config: dict[str, object]) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError(
            f"model {str(folder)!r} (type {config.get('model_type')!r}) wants to run Python code of its own, "
            "which Stillroom never does. Use a model whose type is part of transformers, or a newer "
            "transformers that knows this one."
        )
