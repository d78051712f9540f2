"""Rows to tensors: one padded layout for every path.

Prompts are padded on the left and completions on the right, so that all completions of a batch start
in the same column. The logits that predict completion token c then stand at column P − 1 + c for every
row, one slice selects them, and no label needs shifting anywhere else. Masks come from lengths, never
from comparing ids with the pad id, which may equal the end id (field report 18).

Shapes: B rows, P prompt width, C completion width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillroom.errors import DataError


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One rendered example: the same completion behind the student's and the teacher's prompt."""

    id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    completion_mask: tuple[bool, ...]
    """True where a token is trained on; holes are later user turns."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """The prompt in the teacher's own template; empty if the teacher reads the student's."""
    is_on_policy: bool = False
    """Whether the student wrote the completion in this step."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise DataError(
                f"row {self.id!r} has no prompt ids, so its first completion token would be scored from padding. Give "
                "it a prompt, or the tokenizer a start token."
            )
        if len(self.completion_mask) != len(self.completion_ids):
            raise DataError(
                f"row {self.id!r} has {len(self.completion_ids)} completion ids and a mask of "
                f"{len(self.completion_mask)}: it is unknown what is trained on. Give one mask entry for each id."
            )

    def with_completion(self, completion_ids: Sequence[int]) -> TrainingRow:
        """The same prompt with a completion that the student has just written."""
        ids = tuple(completion_ids)
        return replace(self, completion_ids=ids, completion_mask=(True,) * len(ids), is_on_policy=True)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one model reads: prompt and completion side by side."""

    input_ids: Tensor
    """int64 [B, P + C]"""
    attention_mask: Tensor
    """int64 [B, P + C]"""
    position_ids: Tensor
    """int64 [B, P + C]; the first real token of a row has position 0 whatever the padding."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for both models. The n supervised positions are the True cells of the mask, row-major."""

    student: ModelInput
    teacher: ModelInput
    completion_ids: Tensor
    """int64 [B, C]; padding holds 0 and is masked."""
    completion_mask: Tensor
    """bool [B, C]"""
    is_on_policy: Tensor
    """bool [B]"""
    row_ids: tuple[str, ...]

    @property
    def targets(self) -> Tensor:
        """Ids of the supervised positions, int64 [n]."""
        return self.completion_ids[self.completion_mask]

    @property
    def num_supervised(self) -> int:
        return int(self.completion_mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        def move(view: ModelInput) -> ModelInput:
            return ModelInput(*(getattr(view, f).to(device) for f in ModelInput.__slots__))

        student = move(self.student)
        return Batch(
            student,
            student if self.teacher is self.student else move(self.teacher),
            self.completion_ids.to(device),
            self.completion_mask.to(device),
            self.is_on_policy.to(device),
            self.row_ids,
        )


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both int64 [B, longest], with the padding on the left."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        if sequence:
            ids[row, width - len(sequence) :] = torch.tensor(sequence)
            mask[row, width - len(sequence) :] = 1
    return ids, mask


def collate(rows: Sequence[TrainingRow]) -> Batch:
    """Pad rows into a batch. The value of no loss depends on how much padding this adds."""
    width = max(len(row.completion_ids) for row in rows)
    completion_ids = torch.zeros((len(rows), width), dtype=torch.int64)
    attended = torch.zeros_like(completion_ids)
    completion_mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.completion_ids)
        completion_ids[i, :length] = torch.tensor(row.completion_ids, dtype=torch.int64)
        completion_mask[i, :length] = torch.tensor(row.completion_mask, dtype=torch.bool)
        attended[i, :length] = 1

    def view(prompts: list[tuple[int, ...]]) -> ModelInput:
        ids, mask = left_pad(prompts)
        mask = torch.cat([mask, attended], dim=1)
        return ModelInput(
            input_ids=torch.cat([ids, completion_ids], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        )

    student = view([row.prompt_ids for row in rows])
    shares_prompt = all(row.teacher_prompt_ids in ((), row.prompt_ids) for row in rows)
    teacher = student if shares_prompt else view([row.teacher_prompt_ids or row.prompt_ids for row in rows])
    return Batch(
        student=student,
        teacher=teacher,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        is_on_policy=torch.tensor([row.is_on_policy for row in rows]),
        row_ids=tuple(row.id for row in rows),
    )


def supervised_logits(model: torch.nn.Module, view: ModelInput, completion_mask: Tensor) -> Tensor:
    """Logits that predict the supervised tokens, [n, V]: the output at t − 1 scores token t.

    Args:
        model: a causal LM, possibly wrapped for data-parallel training.
        view: what this model reads.
        completion_mask: bool [B, C].
    """
    width = completion_mask.shape[1]
    out = model(
        input_ids=view.input_ids,
        attention_mask=view.attention_mask,
        position_ids=view.position_ids,
        use_cache=False,
        logits_to_keep=width + 1,  # the prompt's own logits are never formed
    )
    return out.logits[:, -(width + 1) : -1][completion_mask]
