"""From a distillation's config to its parts: models, rendered rows, arguments, trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PrinterCallback, ProgressCallback

from stillroom.config import DistillConfig
from stillroom.data.batches import TrainingRow
from stillroom.data.prepare import training_rows
from stillroom.data.rows import Row
from stillroom.errors import ConfigError, DataError
from stillroom.models import loading, shrink
from stillroom.models.lora import add_lora
from stillroom.runs import plain
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


@dataclass(frozen=True)
class Pair:
    """Both models with their tokenizers."""

    teacher: PreTrainedModel
    teacher_tokenizer: PreTrainedTokenizerBase
    student: PreTrainedModel
    student_tokenizer: PreTrainedTokenizerBase


def load_pair(config: DistillConfig) -> Pair:
    """Load the teacher; load the student or make it from the teacher; add adapters if asked for."""
    teacher_tokenizer = loading.load_tokenizer(config.teacher.path, config.teacher.revision)
    teacher = loading.load_teacher(config.teacher.path, config.teacher.dtype, config.teacher.revision)
    spec = config.student
    if spec.path:
        student = loading.load_student(spec.path, spec.dtype, spec.revision)
        student_tokenizer = loading.load_tokenizer(spec.path, spec.revision)
    else:
        assert spec.num_hidden_layers is not None
        student_tokenizer = teacher_tokenizer
        if spec.random_init:
            student = shrink.random_student(
                teacher.config,
                num_hidden_layers=spec.num_hidden_layers,
                hidden_size=spec.hidden_size,
                seed=config.train.seed,
            )
        else:
            keep = shrink.evenly_spaced(teacher.config.num_hidden_layers, spec.num_hidden_layers)
            student = shrink.drop_layers(teacher, keep)
    if config.lora.r:
        student = add_lora(student, config.lora.r, config.lora.lora_alpha, config.lora.target_modules)
    return Pair(teacher, teacher_tokenizer, student, student_tokenizer)


def render(
    config: DistillConfig, pair: Pair, rows: Sequence[Row], *, by_teacher: bool, is_heldout: bool = False
) -> list[TrainingRow]:
    """Rows as ids; without completions where the teacher or the student will write them."""
    writes_later = by_teacher or (config.sampling.on_policy_fraction == 1 and not is_heldout)
    if is_heldout and not config.score.heldout_kl:
        return []
    if (
        is_heldout
        and not writes_later
        and any(row.completion is None and row.messages is None for row in rows)
    ):
        raise DataError(
            "held-out rows have prompts and no completions, so there is nothing to measure the divergence on. Let the "
            "teacher write (data.completions: teacher), add completions, or set score.heldout_kl to false."
        )
    return training_rows(
        rows,
        pair.student_tokenizer,
        pair.teacher_tokenizer,
        pair.student,
        max_length=config.data.max_length,
        on_overlong=config.data.on_overlong,
        needs_completion=not writes_later,
        room=config.sampling.max_completion_length if writes_later else 1,
        use_chat_template=None if config.data.tasks else False,  # a user's own texts are sent as they stand
    )


def bytes_written(config: DistillConfig, student: PreTrainedModel) -> int:
    """Disk that checkpoints may take: weights and Adam's two moments, one more than are kept, and the student."""
    per_checkpoint = 3 * 4 * sum(p.numel() for p in student.parameters() if p.requires_grad)
    return (
        (config.train.save_total_limit + 1) * per_checkpoint
        + 4 * loading.num_parameters(student)
        + 20_000_000
    )


def arguments(config: DistillConfig, output_dir: Path, *, quiet: bool = False) -> DistillationConfig:
    """The Trainer's arguments.

    Raises:
        ConfigError: transformers does not know or does not accept one of them.
    """
    train, loss, sampling = config.train, config.loss, config.sampling
    own = {k: v for k, v in plain(train).items() if k != "extra"}
    try:
        return DistillationConfig(
            output_dir=str(output_dir),
            loss=loss.name,
            loss_options=dict(loss.options),
            temperature=loss.temperature,
            scale_by_temperature_squared=loss.scale_by_temperature_squared,
            top_k=loss.top_k,
            hard_label_weight=loss.hard_label_weight,
            reduction=loss.reduction,
            on_policy_fraction=sampling.on_policy_fraction,
            sampling_temperature=sampling.temperature,
            sampling_batch_size=sampling.batch_size,
            max_completion_length=sampling.max_completion_length,
            max_length=config.data.max_length,
            disable_tqdm=quiet or not sys.stderr.isatty(),
            **{**own, **train.extra},
        )
    except TypeError as error:
        raise ConfigError(
            f"train.extra holds a field that transformers.TrainingArguments does not have ({error}). "
            "Check its spelling; the fields are those of the transformers documentation."
        ) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"transformers refuses these training arguments: {error} Change them under train."
        ) from error


def build_trainer(
    pair: Pair, args: DistillationConfig, rows: Sequence[TrainingRow], callback: TrainerCallback
) -> DistillationTrainer:
    """The trainer, silent but for the callback and, on a terminal, the progress bar."""
    trainer = DistillationTrainer(
        model=pair.student,
        teacher_model=pair.teacher,
        args=args,
        train_dataset=rows,
        processing_class=pair.student_tokenizer,
        teacher_processing_class=pair.teacher_tokenizer,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    if args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
    return trainer
