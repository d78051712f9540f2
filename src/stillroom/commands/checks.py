"""What a command refuses before it does anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.commands.assemble import Pair
from stillroom.config import DistillConfig, LossChoice
from stillroom.errors import ConfigError, VocabularyError
from stillroom.losses import make_loss
from stillroom.models import loading
from stillroom.models.vocab import SharedVocabulary, shared_vocabulary


def refuse_output_inside_models(output_dir: str | Path, models: Mapping[str, str]) -> None:
    """Refuse a run folder that is, or lies inside, a model's folder, however the two are spelt.

    Args:
        output_dir: of the run.
        models: role and path, folder, name, ``pocket:NAME`` or ``fetched:NAME``; empty paths are passed over.

    Raises:
        ConfigError: it lies there, or a model does not exist.
    """
    output = Path(output_dir).expanduser().resolve()
    for role, name in models.items():
        if not name:
            continue
        folder = Path(loading.resolve(name)).resolve()
        if folder.is_dir() and (output == folder or folder in output.parents):
            raise ConfigError(
                f"output_dir {str(output_dir)!r} lies inside the {role}'s folder {name!r}, so the run would write "
                "into a model. Give an output_dir of its own."
            )


def check_models(config: DistillConfig) -> None:
    """Refuse an output inside a model, and a student that is its teacher."""
    teacher, student = config.teacher, config.student
    refuse_output_inside_models(config.output_dir, {"teacher": teacher.path, "student": student.path})
    if student.path:
        loading.check_distinct(
            student.path,
            teacher.path,
            student_revision=student.revision,
            teacher_revision=teacher.revision,
        )


def check_loss(choice: LossChoice) -> None:
    """Refuse an unknown loss, and an unknown or senseless option of a known one."""
    if choice.name != "cross_entropy":
        options: dict[str, Any] = dict(choice.options)
        make_loss(choice.name, **options)


def require_shared_vocabulary(pair: Pair) -> SharedVocabulary:
    """What both models share; says what a recipe must hold if that is nothing."""
    try:
        return shared_vocabulary(
            pair.student_tokenizer,
            pair.teacher_tokenizer,
            pair.student.config.vocab_size,
            pair.teacher.config.vocab_size,
        )
    except VocabularyError as error:
        raise VocabularyError(
            f"{error} In a recipe: data.completions: teacher, loss.name: cross_entropy, and score.heldout_kl: false, "
            "since a divergence between unlike vocabularies cannot be measured either."
        ) from error
