"""From a distillation's config to its parts: models, rendered rows, arguments, trainer."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PrinterCallback, ProgressCallback

from stillroom import seeds
from stillroom.config import DistillConfig
from stillroom.data.batches import TrainingRow
from stillroom.data.prepare import training_rows
from stillroom.data.rows import Row
from stillroom.errors import ConfigError, DataError
from stillroom.models import loading, shrink
from stillroom.models.lora import add_lora
from stillroom.records import plain
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer
from stillroom.training.preflight import check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


@dataclass(frozen=True)
class Tokenizers:
    """Of both models; read before any weights."""

    teacher: PreTrainedTokenizerBase
    student: PreTrainedTokenizerBase

    @classmethod
    def load(cls, config: DistillConfig) -> Tokenizers:
        teacher = loading.load_tokenizer(config.teacher.path, config.teacher.revision)
        spec = config.student
        return cls(teacher, loading.load_tokenizer(spec.path, spec.revision) if spec.path else teacher)


@dataclass(frozen=True)
class Pair:
    """Both models with their tokenizers."""

    teacher: PreTrainedModel
    teacher_tokenizer: PreTrainedTokenizerBase
    student: PreTrainedModel
    student_tokenizer: PreTrainedTokenizerBase


def load_pair(config: DistillConfig, tokenizers: Tokenizers, device: torch.device) -> Pair:
    """Load the teacher; load the student or make it from the teacher; add adapters if asked for.

    Both stand on one device from here on, so that figures are made where training is.
    """
    teacher = loading.load_teacher(
        config.teacher.path, config.teacher.dtype, config.teacher.revision, device=device
    )
    spec = config.student
    if spec.path:
        student = loading.load_student(spec.path, spec.dtype, spec.revision, device=device)
    else:
        assert spec.num_hidden_layers is not None
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
        student.to(device, loading.DTYPES[spec.dtype])  # pyright: ignore[reportCallIssue, reportArgumentType]
    if config.lora.r:
        torch.manual_seed(seeds.key(config.train.seed, "adapters"))
        student = add_lora(student, config.lora.r, config.lora.lora_alpha, config.lora.target_modules)
    return Pair(teacher, tokenizers.teacher, student, tokenizers.student)


def render(
    config: DistillConfig, pair: Pair, rows: Sequence[Row], *, is_heldout: bool = False
) -> list[TrainingRow]:
    """Rows as ids; without completions where the teacher or the student will write them.

    Raises:
        DataError: a row cannot be rendered, or does not fit beside what will be written; no two rows are held out.
    """
    if is_heldout and not config.score.heldout_kl:
        return []
    by_teacher = config.data.completions == "teacher"
    fraction = 0.0 if is_heldout else config.sampling.on_policy_fraction
    gold = not by_teacher and fraction < 1
    room = config.sampling.max_completion_length if by_teacher or fraction > 0 else 0
    if is_heldout and gold and any(row.completion is None and row.messages is None for row in rows):
        raise DataError(
            "held-out rows have prompts and no completions, so there is nothing to measure the divergence on. Let the "
            "teacher write (data.completions: teacher), add completions, or set score.heldout_kl to false."
        )
    rendered = training_rows(
        rows,
        pair.student_tokenizer,
        pair.teacher_tokenizer,
        pair.student,
        max_length=config.data.max_length,
        on_overlong=config.data.on_overlong,
        needs_completion=gold,
        room=room,
        use_chat_template=None if config.data.tasks else False,  # a user's own texts are sent as they stand
    )
    if by_teacher:
        check_positions("teacher", pair.teacher, rendered, room)
    if is_heldout and len(rendered) < 2 and not config.data.prompts:
        raise DataError(
            f"{len(rendered)} held-out row is left, and a divergence over fewer than two has no interval. Raise "
            "data.max_length or data.heldout_rows, or set score.heldout_kl to false."
        )
    return rendered


def digest(*sets: Sequence[TrainingRow]) -> str:
    """A hash of rendered rows, by which a resumed run notices that they have changed."""
    made = hashlib.sha256()
    for rows in sets:
        made.update(f"{len(rows)} rows\n".encode())
        for row in rows:
            made.update(f"{row!r}\n".encode("utf-8", "backslashreplace"))
    return made.hexdigest()[:16]


def prompts_of(rows: Sequence[Row]) -> list[str]:
    """What is asked in rows, as texts: a text prompt, or each of a user's turns."""
    texts: list[str] = []
    for row in rows:
        asked = row.prompt if row.messages is None else row.messages
        if isinstance(asked, str):
            texts.append(asked)
        else:
            texts += [turn["content"] for turn in asked or () if turn["role"] == "user"]
    return texts


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
    own = {k: v for k, v in plain(train).items() if k != "extra"}  # config keeps the two apart
    try:
        return DistillationConfig(
            output_dir=str(output_dir),
            loss=loss.name,
            loss_options=dict(loss.options),
            temperature=loss.temperature,
            scale_by_temperature_squared=loss.scale_by_temperature_squared,
            top_k=loss.top_k,
            hard_label_weight=loss.hard_label_weight,
            label_smoothing_factor=loss.label_smoothing,
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
