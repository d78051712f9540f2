"""Teacher sources: what the teacher says about each supervised position.

A source turns a batch into a `TeacherSignal`. The losses do not know which source it came from, so a
live model, the data's own tokens and (later) a cache or a server are interchangeable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stillroom.data.batches import Batch, supervised_logits
from stillroom.errors import ConfigError
from stillroom.losses.signals import TeacherSignal

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LiveTeacher:
    """The teacher model itself, reading its own prompt and the shared completion.

    Args:
        model: frozen and in evaluation mode (`models.loading.load_teacher` makes it so). It is held here,
            outside the student, the optimizer and the checkpoint (field reports 56 and 70).
        vocab_size: ids below this are shared with the student; columns beyond it are removed before the
            softmax (field reports 1 and 3).
        temperature: divides the logits in the loss.
        top_k: keep this many ids and one bucket for the rest; None keeps the vocabulary.
        fingerprint: of the tokenizer, carried by the signal.

    Raises:
        ConfigError: `top_k` is larger than the vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        fingerprint: str = "",
    ) -> None:
        if top_k is not None and not 1 <= top_k <= vocab_size:
            raise ConfigError(
                f"top_k={top_k}, but teacher and student share {vocab_size} token ids: there are no more to keep. "
                f"Give a number from 1 to {vocab_size}, or leave top_k out to use the whole vocabulary."
            )
        if any(parameter.requires_grad for parameter in model.parameters()) or model.training:
            raise ConfigError(
                "the teacher is trainable or in training mode, so its targets would change from call to call. "
                "Load it with `stillroom.models.loading.load_teacher`, or call `.eval().requires_grad_(False)`."
            )
        self.model = model
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.top_k = top_k
        self.fingerprint = fingerprint

    @torch.no_grad()
    def signal(self, batch: Batch) -> TeacherSignal:
        """Score the batch: dense or top-K, n supervised positions."""
        logits = supervised_logits(self.model, batch.teacher, batch.completion_mask)[:, : self.vocab_size]
        signal = TeacherSignal.dense(
            logits, temperature=self.temperature, tokenizer_fingerprint=self.fingerprint
        )
        return signal if self.top_k is None else signal.keep_top_k(self.top_k)


class HardLabels:
    """The completion's own tokens as a teacher that is certain: one kept id with probability 1.

    Gold fine-tuning and sequence-level distillation are ordinary runs with this source, not special cases.

    Args:
        vocab_size: ids that the student shares with the data.
        fingerprint: of the tokenizer, carried by the signal.
        smoothing: ε of label smoothing (arXiv:1512.00567, section 7): the target gets 1 − ε + ε/V and every other
            token ε/V. A student trained so, without any teacher, is what an undistillable teacher's students are
            compared with (arXiv:2507.00012).
    """

    def __init__(self, *, vocab_size: int, fingerprint: str = "", smoothing: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.smoothing = smoothing

    def signal(self, batch: Batch) -> TeacherSignal:
        """Certainty about the batch's targets, or near it."""
        if not self.smoothing:
            return TeacherSignal.hard(
                batch.targets, vocab_size=self.vocab_size, tokenizer_fingerprint=self.fingerprint
            )
        targets = batch.targets
        p = torch.full(
            (len(targets), self.vocab_size), self.smoothing / self.vocab_size, device=targets.device
        )
        p.scatter_(1, targets[:, None], 1 - self.smoothing + self.smoothing / self.vocab_size)
        return TeacherSignal.dense(p.log(), temperature=1.0, tokenizer_fingerprint=self.fingerprint)
