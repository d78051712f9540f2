"""The objective: weighted terms, each a loss between the student and a teacher source.

Values are summed over supervised positions with weights that one global denominator made before, so the
sum over micro-batches and workers is the step's loss, however the step was cut. Each term is logged apart,
unweighted.

Legend: n supervised positions of a micro-batch, V shared vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stillroom.data.batches import Batch
from stillroom.errors import ConfigError
from stillroom.losses import Loss, make_loss
from stillroom.losses.reduce import count_units, plain_loss, token_weights
from stillroom.sampling.teacher import HardLabels, LiveTeacher
from stillroom.types import TeacherSource

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from stillroom.training.config import DistillationConfig


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the objective, logged apart: weight · loss(student, source)."""

    metric: str
    loss: Loss
    source: TeacherSource
    weight: float = 1.0
    dataset_rows_only: bool = False


def objective(
    terms: Sequence[Term],
    student_logits: Tensor,
    batch: Batch,
    denominator: float,
    *,
    reduction: str,
    add: Callable[[str, float, float], None],
) -> Tensor:
    """The weighted sum of the terms on one micro-batch, a scalar for autograd.

    Args:
        terms: from `build_terms`.
        student_logits: ``[n, V]`` at the batch's supervised positions.
        batch: says which positions belong to rows that the student wrote.
        denominator: supervised tokens (or rows) of the whole optimizer step.
        reduction: ``token_mean`` or ``sequence_mean``.
        add: called with a term's metric, its unweighted sum and how many tokens (or rows) that sum is over.
    """
    total = student_logits.new_zeros(())
    mask = batch.completion_mask
    for term in terms:
        chosen = mask & ~batch.is_on_policy[:, None] if term.dataset_rows_only else mask
        if term.dataset_rows_only and not chosen.any():
            add(term.metric, 0.0, 0.0)  # all workers log the same names
            continue
        weights = torch.zeros(len(student_logits), device=mask.device)
        weights[chosen[mask]] = token_weights(chosen, denominator, reduction=reduction)
        part = plain_loss(term.loss, student_logits, term.source.signal(batch), weights)
        total = total + term.weight * part
        add(term.metric, part.item() * denominator, count_units(chosen, reduction))
    return total


def build_terms(
    args: DistillationConfig,
    teacher: PreTrainedModel | None,
    source: TeacherSource | None,
    loss: Loss | None,
    vocab_size: int,
    tokenizer_fingerprint: str,
) -> list[Term]:
    """The terms that the arguments ask for: a divergence to the source, hard labels, or hard labels alone.

    Raises:
        ConfigError: a divergence without any teacher, or a loss that does not exist.
    """
    labels = HardLabels(
        vocab_size=vocab_size, fingerprint=tokenizer_fingerprint, smoothing=args.label_smoothing_factor
    )
    cross_entropy = make_loss("cross_entropy")
    if args.loss == "cross_entropy" and loss is None:
        return [Term("loss/cross_entropy_nats", cross_entropy, labels)]
    if source is None:
        if teacher is None:
            raise ConfigError(
                f"loss={args.loss!r} compares the student with a teacher, and none was given. Pass teacher_model or "
                "source, or set loss='cross_entropy' to train on the completions' own tokens."
            )
        source = LiveTeacher(
            teacher,
            vocab_size=vocab_size,
            temperature=args.temperature,
            top_k=args.top_k,
            fingerprint=tokenizer_fingerprint,
        )
    bound = loss or make_loss(
        args.loss, scale_by_temperature_squared=args.scale_by_temperature_squared, **args.loss_options
    )
    terms = [Term(f"loss/{bound.name}{'_nats' if bound.spec.unit == 'nats' else ''}", bound, source)]
    if args.hard_label_weight:
        terms.append(
            Term(
                "loss/hard_label_nats", cross_entropy, labels, args.hard_label_weight, dataset_rows_only=True
            )
        )
    return terms
