"""From a data spec to rows that both models can read.

`select_rows` finds the rows and keeps some apart; `training_rows` renders them, once for the student and
once, behind the teacher's own template, for the teacher; `completed` puts a sampler's completions behind
the prompts. Which rows are chosen is keyed by the spec's seed, never by the order of a file.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from stillroom import seeds
from stillroom.config import DataSpec
from stillroom.data.asking import as_sent, select_examples
from stillroom.data.batches import TrainingRow
from stillroom.data.rendering import Rendered, end_ids, render_example, render_messages, render_prompt
from stillroom.data.rows import Row, content_id, fit, load_rows, row_of_example, rows_of_records, rows_of_task
from stillroom.data.tasks import load_task
from stillroom.data.tokens import closed, encode_continuation
from stillroom.errors import DataError
from stillroom.models.vocab import fingerprint, template_hash
from stillroom.types import Rollout, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)


def select_rows(spec: DataSpec) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and rows kept apart for held-out figures; no row is in both.

    Returns:
        Training rows (at most `max_rows` a task) and held-out rows (`heldout_rows` a task). Prompts given
        inline are both: held out are then other completions of the same prompts.

    Raises:
        DataError: a file, task or split cannot be read, or holds too few rows.
    """
    if spec.prompts:
        rows = [Row(id=f"prompt-{i}", prompt=text) for i, text in enumerate(spec.prompts)]
        return rows, rows
    if spec.path is not None:
        return _split(load_rows(spec.path, spec.split), spec, spec.path)
    train: list[Row] = []
    heldout: list[Row] = []
    for name in spec.tasks:
        task = load_task(name, spec.data_dir)
        if spec.heldout_split in task.splits and spec.heldout_split != spec.split:
            train += _examples(task, spec.split, spec.max_rows, spec.seed)
            heldout += _examples(task, spec.heldout_split, spec.heldout_rows, spec.seed)
        else:
            ours, kept = _split(rows_of_task(task, spec.split), spec, name)
            train += ours
            heldout += kept
    return train, heldout


def training_rows(
    rows: Iterable[Mapping[str, Any] | Row | TrainingRow],
    tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer,
    student: PreTrainedModel,
    *,
    max_length: int,
    on_overlong: Literal["error", "drop"] = "error",
    needs_completion: bool = True,
    room: int = 0,
    use_chat_template: bool | None = False,
) -> list[TrainingRow]:
    """Render rows for both models.

    Args:
        rows: mappings or `Row`s with ``messages``, ``prompt`` + ``completion`` or ``prompt``; rendered rows
            pass through.
        tokenizer: the student's.
        teacher_tokenizer: the teacher's; if template or pipeline differ, the teacher reads its own prompt.
        student: says which ids end a completion.
        max_length: tokens of prompt and completion together.
        on_overlong: ``error``, or ``drop`` to leave such rows out and say how many.
        needs_completion: False if the student (or the teacher) writes all completions.
        room: tokens that must be left for completions that student or teacher will write; 0 if nobody will.
            Where somebody will, every assistant turn of a conversation is a row of its own.
        use_chat_template: whether text prompts are sent as a user's message; None means: to a model that has a
            chat template. Messages always are.

    Raises:
        DataError: a row cannot be rendered, has no completion although one is needed, or is too long.
    """
    ends = end_ids(student, tokenizer)
    same_prompt = fingerprint(tokenizer) == fingerprint(teacher_tokenizer) and template_hash(
        tokenizer
    ) == template_hash(teacher_tokenizer)
    rendered: list[TrainingRow] = []
    for row in _as_rows(list(rows)):
        if isinstance(row, TrainingRow):
            rendered.append(row)
            continue
        try:
            rendered += _render(
                row,
                tokenizer,
                None if same_prompt else teacher_tokenizer,
                ends,
                needs_completion,
                use_chat_template,
                is_rewritten=room > 0 or not needs_completion,
            )
        except DataError as error:
            raise DataError(f"row {row.id!r}: {error}") from error
    return fit(rendered, max_length, on_overlong=on_overlong, room=max(room, 1))[0]


def completed(
    rows: Sequence[TrainingRow],
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer,
    writer_tokenizer: Tokenizer,
    student: PreTrainedModel,
) -> list[TrainingRow]:
    """Put completions behind the prompts that they were written for: sequence-level distillation.

    Ids travel unchanged if writer and student share a tokenizer; otherwise the text is rendered again with
    the student's. Completions without any token are left out, and counted in the log.

    Args:
        rows: one for each prompt.
        rollouts: prompt-major, the same number for each row.
        tokenizer: the student's.
        writer_tokenizer: of the model that wrote the rollouts.
        student: says which ids end a completion.
    """
    per_row = len(rollouts) // len(rows)
    same_ids = fingerprint(tokenizer) == fingerprint(writer_tokenizer)
    ends = end_ids(student, tokenizer)
    made: list[TrainingRow] = []
    for number, (rollout, row) in enumerate(
        zip(rollouts, itertools.chain.from_iterable(itertools.repeat(r, per_row) for r in rows), strict=True)
    ):
        name = f"{row.id}#{number % per_row}" if per_row > 1 else row.id
        if (rollout.example_id, rollout.prompt_ids) != (row.id, row.teacher_prompt_ids or row.prompt_ids):
            raise DataError(
                f"completion {number} was written for {rollout.example_id!r} and would stand behind row {row.id!r} "
                "with another prompt. The rows changed since the completions were written; start a new run."
            )
        if same_ids:
            ids = rollout.completion_ids
        else:
            ids = encode_continuation(tokenizer, rollout.text)
            if ids and rollout.stop_reason == "end":  # a completion that was cut off does not end here
                ids = closed(tokenizer, ids, ends)
        if ids:
            made.append(replace(row, id=name, completion_ids=ids, completion_mask=(True,) * len(ids)))
    if len(made) < len(rollouts):
        logger.warning(
            "%d of %d written completions were empty and are left out",
            len(rollouts) - len(made),
            len(rollouts),
        )
    return made


def _as_rows(rows: list[Any]) -> Sequence[Row | TrainingRow]:
    records = [(f"row {i}", dict(row)) for i, row in enumerate(rows) if isinstance(row, Mapping)]
    return rows_of_records(records, "train_dataset") if records else rows


def _render(
    row: Row,
    tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer | None,
    ends: frozenset[int],
    needs_completion: bool,
    use_chat_template: bool | None,
    *,
    is_rewritten: bool,
) -> list[TrainingRow]:
    if row.messages is not None:
        if teacher_tokenizer is None and not is_rewritten:
            return _numbered(row.id, render_messages(tokenizer, row.messages, ends))
        # A turn that somebody will write, or that two templates put differently, is a sample of its own.
        turns = [at for at, message in enumerate(row.messages) if message["role"] == "assistant"]
        return [
            replace(
                made,
                teacher_prompt_ids=render_prompt(teacher_tokenizer, row.messages[:at])
                if teacher_tokenizer
                else (),
            )
            for at, made in zip(
                turns,
                _numbered(
                    row.id,
                    [
                        render_example(tokenizer, row.messages[:at], row.messages[at]["content"], ends)
                        for at in turns
                    ],
                ),
                strict=True,
            )
        ]
    assert row.prompt is not None
    prompt = as_sent(tokenizer, row.prompt, use_chat_template)
    teacher_prompt: tuple[int, ...] = ()
    if teacher_tokenizer is not None:
        teacher_prompt = render_prompt(
            teacher_tokenizer, as_sent(teacher_tokenizer, row.prompt, use_chat_template)
        )
    if row.completion is None:
        if needs_completion:
            raise DataError(
                "it has a prompt and no completion, so there is nothing to train on off-policy. Add a completion "
                "column, let the teacher write (data.completions: teacher), or train on-policy "
                "(sampling.on_policy_fraction: 1)."
            )
        prompt_ids = render_prompt(tokenizer, prompt)
        return [TrainingRow(row.id, prompt_ids, (), (), teacher_prompt)]
    made = _numbered(row.id, [render_example(tokenizer, prompt, row.completion, ends)])
    return [replace(one, teacher_prompt_ids=teacher_prompt) for one in made]


def _numbered(name: str, samples: Sequence[Rendered]) -> list[TrainingRow]:
    return [
        TrainingRow(
            name if len(samples) == 1 else f"{name}#{i}", s.prompt_ids, s.completion_ids, s.completion_mask
        )
        for i, s in enumerate(samples)
    ]


def _examples(task: Task, split: str, limit: int | None, seed: int) -> list[Row]:
    return [row_of_example(example) for example in select_examples(task, split, limit, seed=seed)]


def _split(rows: list[Row], spec: DataSpec, where: str) -> tuple[list[Row], list[Row]]:
    """Cut held-out rows off a set that has none of its own, by a keyed shuffle of what they ask.

    Rows that ask the same stand on one side, so a few more than `heldout_rows` may be held out.
    """
    keyed = sorted((seeds.key(spec.seed, "hold out", where, _asked(row)), row.id, row) for row in rows)
    cut = spec.heldout_rows
    while 0 < cut < len(keyed) and keyed[cut][0] == keyed[cut - 1][0]:
        cut += 1
    heldout, train = ([row for *_, row in part] for part in (keyed[:cut], keyed[cut:]))
    if not train or len(train) < (spec.max_rows or 0):
        raise DataError(
            f"{where!r} has {len(rows)} rows; with data.heldout_rows={spec.heldout_rows}, {len(train)} are left to "
            f"train on{f', and data.max_rows={spec.max_rows} asks for more' if spec.max_rows else ''}. Lower the two, "
            "or add rows."
        )
    return train[: spec.max_rows], heldout


def _asked(row: Row) -> str:
    return content_id(row.prompt, None, row.messages)
