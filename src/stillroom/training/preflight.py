"""What must hold before the first step, found out before it costs anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stillroom.data.batches import TrainingRow
from stillroom.errors import ConfigError, DataError
from stillroom.models.loading import longest_input, warn_if_larger

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from stillroom.models.vocab import SharedVocabulary
    from stillroom.training.config import DistillationConfig


def check_pair(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that is the student, or that shares a tensor with it; warn if it is the smaller one.

    Raises:
        ConfigError: some parameter belongs to both: frozen with the teacher, it would never learn.
    """
    of_teacher = {id(parameter) for parameter in teacher.parameters()}
    common = [name for name, parameter in student.named_parameters() if id(parameter) in of_teacher]
    if common:
        raise ConfigError(
            f"student and teacher share {len(common)} tensors (first: {common[0]}), which would be frozen with the "
            "teacher or move it. Load the two apart, or copy the model (copy.deepcopy)."
        )
    warn_if_larger(student, teacher)


def check_ids(rows: Sequence[TrainingRow], shared: SharedVocabulary) -> None:
    """Refuse rows with tokens that only the student has: the teacher would score them as something else.

    Raises:
        VocabularyError: an id of a completion, or of a prompt that the teacher reads too, is not shared.
    """
    if not shared.student_extra:
        return
    for row in rows:
        shared.require(row.completion_ids)
        if not row.teacher_prompt_ids:
            shared.require(row.prompt_ids)


def check_positions(role: str, model: PreTrainedModel, rows: Sequence[TrainingRow], room: int) -> None:
    """Refuse rows that reach beyond the positions a model has; it would read them, and make nothing of them.

    Args:
        role: ``student`` or ``teacher``, for the message and the choice of prompt.
        model: that reads the rows.
        rows: rendered.
        room: tokens that the student may write behind a prompt; 0 if it never does.

    Raises:
        DataError: the longest row, or the longest prompt with what the student may write behind it, is too long.
    """
    limit = longest_input(model)
    if limit is None:
        return
    for row in rows:
        prompt = len(
            row.teacher_prompt_ids if role == "teacher" and row.teacher_prompt_ids else row.prompt_ids
        )
        if prompt + max(len(row.completion_ids), room) > limit:
            raise DataError(
                f"row {row.id!r} has {prompt} prompt and {len(row.completion_ids)} completion tokens"
                f"{f', and the student may write {room}' if room else ''}, but the {role} has {limit} positions. "
                "Lower max_completion_length or max_length, or shorten the rows."
            )


def updates_per_epoch(num_rows: int, args: DistillationConfig) -> int:
    """Optimizer steps in one pass over the rows, as the Trainer counts them.

    Raises:
        ConfigError: there is not even one: nothing would be trained, without a word.
    """
    rows_per_micro_step = args.per_device_train_batch_size * max(args.world_size, 1)
    if args.dataloader_drop_last:
        micro_steps = num_rows // rows_per_micro_step
    else:
        micro_steps = math.ceil(num_rows / rows_per_micro_step)
    if not micro_steps:
        raise ConfigError(
            f"{num_rows} rows do not fill one step of {args.per_device_train_batch_size} rows on each of "
            f"{max(args.world_size, 1)} workers, so nothing would be trained. Add rows, or lower "
            "per_device_train_batch_size."
        )
    return math.ceil(micro_steps / args.gradient_accumulation_steps)


def path_of(model: PreTrainedModel | str) -> str:
    """The path whose tokenizer belongs to a model that was given by path.

    Raises:
        ConfigError: it was given as an object, which does not say what its tokenizer is.
    """
    if not isinstance(model, str):
        raise ConfigError(
            "the student was passed as an object and processing_class was not given, so its tokenizer is unknown. Pass "
            "processing_class=AutoTokenizer.from_pretrained(…)."
        )
    return model
