"""How close a student is to its teacher on held-out rows, with intervals.

Rows are the independent units: positions of one completion are not. A figure is Σ over rows of a row's
sum, divided by Σ of its supervised tokens (nats per token), with a bootstrap over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from stillroom import stats
from stillroom.data.batches import TrainingRow, collate, supervised_logits
from stillroom.errors import DataError
from stillroom.losses import make_loss
from stillroom.losses.reduce import require_finite
from stillroom.losses.signals import TeacherSignal
from stillroom.models.modes import evaluation_mode
from stillroom.types import Estimate, TeacherSource

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DIVERGENCES = ("forward_kl", "reverse_kl")


@torch.no_grad()
def heldout_divergences(
    student: PreTrainedModel,
    source: TeacherSource,
    rows: Sequence[TrainingRow],
    *,
    vocab_size: int,
    batch_size: int = 8,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """Forward and reverse KL in nats per token, and the share of positions where both prefer one token.

    Args:
        student: scored in evaluation mode; its mode is as before afterwards.
        source: the teacher, dense or top-K (then the KLs are those of the coarsened distributions).
        rows: held-out rows with completions.
        vocab_size: shared ids; columns beyond are removed before the softmax.
        batch_size: changes the speed only.
        seed: of the bootstrap.
        level: coverage of the intervals.

    Returns:
        ``forward_kl_nats``, ``reverse_kl_nats``, ``top1_agreement``.

    Raises:
        DataError: no rows.
        StillroomError: student or teacher gives NaN.
    """
    if not rows:
        raise DataError("there are no held-out rows to compare the models on. Set data.heldout_rows above 0.")
    losses = {f"{name}_nats": make_loss(name) for name in DIVERGENCES}
    sums: dict[str, list[float]] = {name: [] for name in (*losses, "top1_agreement")}
    counts: list[int] = []
    with evaluation_mode(student):
        # Rows of like length share a batch; the sums are per row, so their order does not matter.
        ordered = sorted(rows, key=lambda row: len(row.completion_ids))
        for start in range(0, len(ordered), batch_size):
            batch = collate(ordered[start : start + batch_size]).to(student.device)
            logits = supervised_logits(student, batch.student, batch.completion_mask)[:, :vocab_size]
            signal = source.signal(batch)
            values = {name: loss.value(logits, signal) for name, loss in losses.items()}
            for name, value in values.items():
                require_finite(value, logits, signal, name=f"held-out {name}")
            values["top1_agreement"] = (logits.argmax(1) == _top1(signal)).float()
            lengths = batch.completion_mask.sum(1).tolist()
            counts.extend(lengths)
            for name, value in values.items():
                sums[name].extend(part.sum().item() for part in value.double().split(lengths))
    units = dict.fromkeys(losses, "nats/token") | {"top1_agreement": "share"}
    return {
        name: stats.bootstrap_ratio(row_sums, counts, seed=seed, level=level, unit=units[name])
        for name, row_sums in sums.items()
    }


def _top1(signal: TeacherSignal) -> Tensor:
    """The teacher's most probable id at each position, [n]."""
    if signal.logits is not None:
        return signal.logits.argmax(1)
    assert signal.token_ids is not None
    assert signal.logprobs is not None
    return signal.token_ids.gather(1, signal.logprobs.argmax(1, keepdim=True)).squeeze(1)
