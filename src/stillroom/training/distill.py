"""The distillation trainer: a thin subclass of the Hugging Face Trainer.

Three things differ from its parent. `get_batch_samples` decides who writes the completions of an
optimizer step, lets the student write them, and counts the one global denominator after that.
`compute_loss` asks the teacher source for a signal and hands both to a row of the loss table. The order
of rows, the on/off-policy choice, the samples and dropout are keyed by (seed, purpose, step, …), so a
resumed run repeats none of them and needs no random state. Everything else is the parent's.

Legend: n supervised positions of a micro-batch, V shared vocabulary.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import get_peft_model
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import TrainOutput

from stillroom import seeds
from stillroom.data.batches import Batch, TrainingRow, collate, supervised_logits
from stillroom.data.prepare import training_rows
from stillroom.errors import ConfigError
from stillroom.losses import Loss
from stillroom.losses.reduce import count_units
from stillroom.models.loading import check_distinct, load_student, load_teacher, load_tokenizer
from stillroom.models.modes import evaluation_mode
from stillroom.models.vocab import fingerprint, shared_vocabulary
from stillroom.sampling.sampler import HFSampler
from stillroom.training.checkpoints import CompleteCheckpoints, finished_state, require_complete_checkpoint
from stillroom.training.config import DistillationConfig
from stillroom.training.objective import build_terms, objective
from stillroom.training.on_policy import write_completions
from stillroom.training.order import KeyedSampler
from stillroom.training.preflight import check_ids, check_pair, check_positions, path_of, updates_per_epoch
from stillroom.types import TeacherSource

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, TrainerCallback

logger = logging.getLogger(__name__)


class DistillationTrainer(Trainer):
    """Distil `teacher_model` into `model`.

    Off-policy, on-policy and mixed differ only in who writes the completions of a step
    (`args.on_policy_fraction`). The objective is the divergence between the two models at the supervised
    positions, weighted by one global denominator, plus cross-entropy on dataset rows if
    `args.hard_label_weight` is set.

    Args:
        model: the student, or a path to it.
        teacher_model: the teacher, or a path to it; None trains on the completions' own tokens
            (then `args.loss` must be ``cross_entropy``).
        args: settings; the fields of `TrainingArguments` keep their meaning.
        train_dataset: rows with ``messages``, ``prompt`` and ``completion``, or ``prompt`` (on-policy only);
            or `TrainingRow`s that are rendered already.
        eval_dataset: the same, for `evaluate`, which never samples (field report 84).
        processing_class: the student's tokenizer; default that of the student's path.
        teacher_processing_class: the teacher's tokenizer; default that of its path, else the student's.
        peft_config: train an adapter of the student instead of all weights.
        source: another teacher source instead of a live teacher, such as a cache.
        loss: a bound `Loss` instead of the name in `args.loss`.
        callbacks: as in `Trainer`.

    Raises:
        VocabularyError: an id means different strings to teacher and student.
        DataError: a row cannot be rendered or does not fit.
        ConfigError: settings contradict each other.
    """

    # What the parent leaves wider.
    args: DistillationConfig
    model: Any
    train_dataset: Any
    eval_dataset: Any

    loss_is_scaled_for_ga = (
        True  # divided by the global count of supervised tokens, so not by micro-steps again
    )

    def __init__(
        self,
        model: PreTrainedModel | str,
        teacher_model: PreTrainedModel | str | None = None,
        args: DistillationConfig | None = None,
        train_dataset: Sequence[Any] | None = None,
        eval_dataset: Sequence[Any] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        source: TeacherSource | None = None,
        loss: Loss | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        # Our own copy: some fields are taken over from the parent below.
        args = copy.copy(args) if args is not None else DistillationConfig(output_dir="runs/distill")
        if isinstance(model, str) and isinstance(teacher_model, str):
            check_distinct(model, teacher_model)
        tokenizer = processing_class or load_tokenizer(path_of(model))
        teacher_tokenizer = teacher_processing_class or (
            load_tokenizer(teacher_model) if isinstance(teacher_model, str) else tokenizer
        )
        student = load_student(model) if isinstance(model, str) else model
        teacher = load_teacher(teacher_model) if isinstance(teacher_model, str) else teacher_model
        if args.loss == "cross_entropy" and loss is None:
            teacher, teacher_tokenizer = None, tokenizer  # it reads the completions' own tokens alone
        if teacher is not None:
            check_pair(student, teacher)
            teacher.requires_grad_(False).eval()
        width = student.config.vocab_size
        shared = shared_vocabulary(
            tokenizer, teacher_tokenizer, width, teacher.config.vocab_size if teacher is not None else width
        )
        self.vocab_size = shared.num_shared
        if peft_config is not None:
            torch.manual_seed(seeds.key(args.seed, "adapters"))
            student = cast(PreTrainedModel, get_peft_model(student, peft_config))
        self.terms = build_terms(args, teacher, source, loss, self.vocab_size, fingerprint(tokenizer))

        keep = args.save_total_limit or 1_000_000
        args.save_total_limit = None  # CompleteCheckpoints removes old ones, after the new one is whole
        if args.world_size > 1:
            args.dataloader_drop_last = True  # else the last batch would repeat rows to even out the workers

        def prepare(rows: Sequence[Any] | None, *, room: int = 0) -> Any:
            """Rendered and checked; with `room`, completions may still be missing where the student writes all."""
            made = training_rows(
                rows or (),
                tokenizer,
                teacher_tokenizer,
                student,
                max_length=args.max_length,
                on_overlong=args.on_overlong,
                needs_completion=not (room and args.on_policy_fraction == 1),
                room=room,
            )
            check_ids(made, shared)
            for role, reader in (("student", student), ("teacher", teacher)):
                if reader is not None:
                    check_positions(role, reader, made, room)
            return made

        self._prepare = prepare
        room = args.max_completion_length if args.on_policy_fraction > 0 else 0
        super().__init__(
            model=student,
            args=args,
            data_collator=list,  # pyright: ignore[reportArgumentType]
            train_dataset=prepare(train_dataset, room=room),
            eval_dataset=prepare(eval_dataset) if eval_dataset else None,
            processing_class=tokenizer,
            callbacks=[*(callbacks or ()), CompleteCheckpoints(keep)],
        )
        if self.is_fsdp_enabled and args.on_policy_fraction > 0:
            raise ConfigError(
                "on_policy_fraction is above 0 under FSDP: sharded workers must decode in step, and ours stop when "
                "their own rows end, so they would wait for each other for ever. Use DDP, or train off-policy."
            )
        if teacher is not None:
            teacher.to(args.device)  # pyright: ignore[reportArgumentType]
        self.sampler = HFSampler(
            self.accelerator.unwrap_model(self.model),
            tokenizer,
            batch_size=args.sampling_batch_size,
            vocab_size=self.vocab_size,
            name="student",
        )
        self.tokens_read = 0
        """Prompt and completion tokens that the student has read in training, over all workers."""
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or go on from a checkpoint.

        Args:
            resume_from_checkpoint: a folder, or True for the newest complete checkpoint of `args.output_dir`. One
                that was written at the last step is loaded, and no step is added to it.
            trial: as in `Trainer.train`.
            ignore_keys_for_eval: as in `Trainer.train`.

        Raises:
            ConfigError: the rows do not fill one step.
            RunFolderError: True, and there is no complete checkpoint.
        """
        per_epoch = updates_per_epoch(len(self.train_dataset), self.args)
        if self.args.dataloader_drop_last:
            rest = len(self.train_dataset) % (self.args.per_device_train_batch_size * self.args.world_size)
            if rest:
                logger.warning(
                    "the last %d rows of every epoch's order do not fill a step and are left out", rest
                )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(require_complete_checkpoint(str(self.args.output_dir)))
        total = (
            self.args.max_steps
            if self.args.max_steps > 0
            else math.ceil(self.args.num_train_epochs * per_epoch)
        )
        if resume_from_checkpoint and (state := finished_state(resume_from_checkpoint, total)):
            self._load_from_checkpoint(str(resume_from_checkpoint))
            self.state = state
            return TrainOutput(state.global_step, 0.0, {"train_runtime": 0.0})
        return super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)

    # What a step trains on

    def _get_train_sampler(self, train_dataset: Any = None) -> KeyedSampler:
        per_epoch = updates_per_epoch(len(self.train_dataset), self.args)
        return KeyedSampler(
            len(self.train_dataset), self.args.seed, lambda: self.state.global_step // per_epoch
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[TrainingRow]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """Collect an optimizer step's micro-batches, let the student write if it is its turn, count the tokens.

        The count is taken from the masks that are trained on, after sampling (field report 47), over all
        micro-steps and all workers, so it does not matter how the step was cut.
        """
        micro_batches = [rows for _, rows in zip(range(num_batches), epoch_iterator, strict=False)]
        step = self.state.global_step
        if seeds.uniform(self.args.seed, "mix", step) < self.args.on_policy_fraction:
            micro_batches = write_completions(
                self.sampler,
                micro_batches,
                max_completion_length=self.args.max_completion_length,
                temperature=self.args.sampling_temperature,
                seed=seeds.key(self.args.seed, "rollout", step),
                add=self._add,
            )
        inputs = [self._input(rows, micro_step) for micro_step, rows in enumerate(micro_batches)]
        masks = [x["batch"].completion_mask for x in inputs]
        read = sum(int(x["batch"].student.attention_mask.sum()) for x in inputs)
        tokens, units, read = self._total(
            [
                *(float(sum(count_units(m, r) for m in masks)) for r in ("token_mean", self.args.reduction)),
                float(read),
            ]
        )
        self._add("train/supervised_tokens_per_step", tokens, 1.0)
        self._add("train/read_tokens_per_step", read, 1.0)
        self.tokens_read += int(read)
        if not tokens:
            logger.warning("step %d has no supervised token; its gradient is zero", step)
        return inputs, units

    def _input(self, rows: Sequence[TrainingRow], micro_step: int) -> dict[str, Any]:
        batch = collate(rows)
        # input_ids is there for the parent's own counts of tokens and FLOPs.
        return {"input_ids": batch.student.input_ids, "batch": batch, "micro_step": micro_step}

    # The objective

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One micro-step; dropout is keyed like every other random choice."""
        where = (self.state.global_step, inputs["micro_step"], self.args.process_index)
        torch.manual_seed(seeds.key(self.args.seed, "dropout", *where))
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Sum over terms of weight · Σ_positions w · divergence, w = 1 / global count (in nats)."""
        batch: Batch = inputs["batch"].to(self.args.device)
        denominator = num_items_in_batch
        if denominator is None:  # called outside a training step
            denominator = count_units(batch.completion_mask, self.args.reduction)
        total = self._objective(model, batch, denominator)
        # Data-parallel training averages gradients over workers; the denominator is already the global one.
        total = total * self.accelerator.num_processes
        return (total, {}) if return_outputs else total

    def _objective(self, model: torch.nn.Module, batch: Batch, denominator: float) -> Tensor:
        """The weighted sum of the terms on one micro-batch, logged term by term."""
        student_logits = supervised_logits(model, batch.student, batch.completion_mask)[:, : self.vocab_size]
        total = objective(
            self.terms, student_logits, batch, denominator, reduction=self.args.reduction, add=self._add
        )
        self._add("train/on_policy_row_share", float(batch.is_on_policy.sum()), len(batch.row_ids))
        return total

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The objective on held-out rows with their own completions; a function of weights and rows alone."""
        rows: Sequence[TrainingRow] = (
            self.eval_dataset if eval_dataset is None else self._prepare(eval_dataset)
        )
        if not rows:
            raise ConfigError(
                "evaluate() has no rows with completions: pass eval_dataset here or to the trainer, with completions "
                "to measure on."
            )
        size = self.args.per_device_eval_batch_size
        kept_sums, self._sums = self._sums, defaultdict(lambda: [0.0, 0.0])
        with evaluation_mode(self.model), torch.no_grad():
            for start in range(0, len(rows), size):
                batch = collate(rows[start : start + size]).to(self.args.device)
                self._objective(self.model, batch, 1.0)
        sums, self._sums = self._sums, defaultdict(lambda: [0.0, 0.0])
        metrics = {
            f"{metric_key_prefix}_{t.metric.split('/')[-1]}": _ratio(sums[t.metric]) for t in self.terms
        }
        metrics[f"{metric_key_prefix}_loss"] = sum(
            t.weight * _ratio(sums[t.metric])
            for t in self.terms
            if not t.dataset_rows_only or sums[t.metric][1]
        )
        self.log(dict(metrics))
        self._sums = kept_sums  # what training has added up is for training's own next line
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # What is logged

    def _add(self, metric: str, numerator: float, denominator: float) -> None:
        self._sums[metric][0] += numerator
        self._sums[metric][1] += denominator

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add our means since the last line, over all workers."""
        names = sorted(self._sums)
        totals = self._total([x for name in names for x in self._sums[name]])
        self._sums.clear()
        means = {name: _ratio(totals[2 * i : 2 * i + 2]) for i, name in enumerate(names) if totals[2 * i + 1]}
        super().log({**logs, **means}, start_time)

    def _total(self, values: list[float]) -> list[float]:
        """Sums over workers."""
        if self.accelerator.num_processes == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.args.device)
        return self.accelerator.reduce(tensor, reduction="sum").tolist()  # pyright: ignore[reportAttributeAccessIssue]


def _ratio(sums: Sequence[float]) -> float:
    return sums[0] / sums[1] if sums[1] else 0.0
