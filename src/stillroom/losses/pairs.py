"""Student and teacher side by side: logits and a signal in, two log-distributions over M outcomes out.

A divergence is written once, on such a pair. What the outcomes are is decided here:

- a dense signal gives one outcome a token, M = V;
- a top-K signal gives the K kept tokens and, last, one *tail bucket* that holds all other tokens of both
  models, M = K + 1 (M = K where K = V, since nothing is left over).

Merging outcomes can only make two distributions harder to tell apart (the data-processing inequality), so
an f-divergence of the bucketed pair is at most the full one, never negative, and 0 where the models agree.
What the bucket cannot see is how the student spreads its mass inside the tail: the pull on the tail is
shared out in proportion to the student's own probabilities.

Everything here is float32 or better, whatever the models computed in.

Shapes: n positions, V vocabulary, K kept tokens, M outcomes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stillroom.errors import DataError, VocabularyError
from stillroom.losses.signals import NEG_INF, TeacherSignal, kept_and_tail, tempered


@dataclass(frozen=True, eq=False)
class Pair:
    """Log-probabilities in nats of the same M outcomes. Minus infinity is probability zero."""

    student: Float[Tensor, "n M"]
    teacher: Float[Tensor, "n M"]
    has_tail: bool = False
    """The last outcome is the tail bucket."""


def lay_out(student_logits: Float[Tensor, "n V"], signal: TeacherSignal) -> Pair:
    """Both distributions after the signal's temperature, over the outcomes that the signal knows.

    Differentiable in ``student_logits``. Minus infinity on either side gives probability exactly 0.

    Args:
        student_logits: ``[n, V]``, any floating type, before the temperature.
        signal: What the teacher says about the same n positions and V tokens.

    Raises:
        VocabularyError: The widths differ.
        DataError: The numbers of positions differ.
    """
    _check_shapes(student_logits, signal)
    scaled = _scaled(student_logits, signal)
    if signal.logits is not None:
        teacher = tempered(signal.logits, signal.temperature, scaled.dtype)
        return Pair(scaled.log_softmax(-1), teacher.log_softmax(-1))
    assert signal.token_ids is not None
    assert signal.logprobs is not None
    assert signal.tail_logprob is not None
    student, student_tail = kept_and_tail(scaled, signal.token_ids)
    teacher, teacher_tail = signal.logprobs.to(scaled.dtype), signal.tail_logprob.to(scaled.dtype)
    if signal.token_ids.shape[-1] == signal.vocab_size:
        return Pair(student, teacher)
    return Pair(
        torch.cat([student, student_tail[:, None]], dim=-1),
        torch.cat([teacher, teacher_tail[:, None]], dim=-1),
        has_tail=True,
    )


def pull_back(
    flow: Float[Tensor, "n M"], pair: Pair, student_logits: Float[Tensor, "n V"], signal: TeacherSignal
) -> Float[Tensor, "n V"]:
    """From ∂D/∂log q on the outcomes of a pair to ∂D/∂logits on the vocabulary: the softmax, transposed.

    Dense: (flow_j − q_j Σ flow) / T. Bucketed: a token j of the tail receives flow_tail · q_j / q_tail in
    place of flow_j, its share of the bucket.
    """
    total = flow.sum(-1, keepdim=True)
    if signal.token_ids is None:
        return (flow - pair.student.exp() * total) / signal.temperature
    log_q = _scaled(student_logits, signal).log_softmax(-1)
    pulled = torch.zeros_like(log_q)
    if pair.has_tail:
        share = (log_q - pair.student[:, -1:]).exp().masked_fill(log_q == NEG_INF, 0.0)
        pulled = share * flow[:, -1:]  # meaningless, perhaps infinite, on kept tokens; overwritten next
    pulled = pulled.scatter(-1, signal.token_ids, flow[:, : signal.token_ids.shape[-1]])
    return (pulled - log_q.exp() * total) / signal.temperature


def _scaled(student_logits: Tensor, signal: TeacherSignal) -> Tensor:
    """Student logits over the temperature, in the wider of the two types and at least float32."""
    held = signal.logits if signal.logits is not None else signal.logprobs
    assert held is not None
    return tempered(student_logits, signal.temperature, torch.promote_types(held.dtype, torch.float32))


def _check_shapes(student_logits: Tensor, signal: TeacherSignal) -> None:
    n, width = student_logits.shape
    if width != signal.vocab_size:
        raise VocabularyError(
            f"the student's logits have {width} columns and the teacher's signal {signal.vocab_size}: an id "
            "would not mean the same token on both sides. Keep only shared ids, before any softmax."
        )
    if n != signal.n:
        raise DataError(
            f"the student's logits cover {n} positions and the teacher's signal {signal.n}: they cannot "
            "describe the same tokens. Select both with the same completion mask."
        )
