"""Wrong-trace preference: does a teacher's signal favour a wrong completion over a right one?

The trap called the teacher-student gap. Completions of a prompt are graded by the task; s(y) is what the
teacher's signal says for completion y, and the preference is the chance that a wrong one is favoured,

    WTP = E over prompts of Pr[ s(y_wrong) > s(y_right) ],    ties counting 1/2.

0.5 is no preference, 1 a teacher that teaches errors. A prompt whose completions are all right or all wrong
has no pair to compare: such prompts are left out and counted. The paper does not say what its s is, so there
are four, of the teacher's p and the student's q:

- ``implicit``: log p(y|x) - log q(y|x), what reverse KL rewards (the implicit reward of DPO);
- ``likelihood``: log p(y|x), what a student that copies the teacher's text will see more of;
- ``likelihood_per_token``: its mean over the teacher's tokens;
- ``length_matched``: ``implicit``, over pairs whose lengths differ by at most a fifth of the longer one, since
  wrong completions are often longer or shorter than right ones and length alone moves a sum.

Reference: arXiv:2604.18963, section 4 (the name; forms are ours), and arXiv:2305.18290, eq. 5 (implicit reward).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np

from stillroom.diagnosis.intervals import numbered, share
from stillroom.diagnosis.scores import score, write
from stillroom.errors import ConfigError, DataError, unknown_name
from stillroom.types import Estimate, Example, Task

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMS: Mapping[str, str] = MappingProxyType(
    {
        "implicit": "log p - log q",
        "likelihood": "log p",
        "likelihood_per_token": "mean log p of a token",
        "length_matched": "log p - log q, pairs of like length",
    }
)
LENGTH_TOLERANCE = 0.2
"""Largest difference of a pair's lengths, as a share of the longer one."""


def wrong_trace_preference(
    prompt_ids: Sequence[Hashable],
    right: ArrayLike,
    scores: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[Estimate | None, dict[str, int]]:
    """Mean over prompts of the share of (wrong, right) pairs in which the wrong completion scores higher.

    Every prompt weighs the same, however many pairs it has. Depends neither on the order of the completions nor
    on any rising transformation of the scores.

    Args:
        prompt_ids: one for each completion, all strings or all numbers.
        right: bool, one for each.
        scores: s(y), one for each; infinite ones are compared like others.
        lengths: in tokens, one for each: only pairs of like length count. None: all pairs do.
        seed: of the bootstrap over prompts.
        level: coverage of the interval.

    Returns:
        The estimate (bootstrap over prompts; see `stillroom.diagnosis.intervals.share`), None if fewer than two
        prompts have a pair. And counts: ``prompts`` and of those ``no_right``, ``no_wrong``, ``no_like_length`` and
        ``compared``, which add up; ``pairs``.

    Raises:
        DataError: columns of unequal lengths, no completions, or a score that is NaN.

    >>> estimate, counts = wrong_trace_preference(["a", "a", "b", "b"], [1, 0, 1, 0], [0.0, 1.0, 2.0, 1.0])
    >>> estimate.value, counts["pairs"]
    (0.5, 2)
    """
    number, num_prompts = numbered(prompt_ids, right=right, scores=scores)
    is_right, s = np.asarray(right, bool), np.asarray(scores, float)
    if np.isnan(s).any():
        at = int(np.isnan(s).argmax())
        raise DataError(
            f"the score of completion {at} (prompt {prompt_ids[at]!r}) is NaN, so it can be compared with none. Find "
            "the model that made it."
        )
    if lengths is not None:
        numbered(prompt_ids, lengths=lengths)
    counts: dict[str, int] = dict.fromkeys(
        ("prompts", "no_right", "no_wrong", "no_like_length", "compared", "pairs"), 0
    )
    counts["prompts"] = num_prompts
    means: list[float] = []
    order = np.argsort(number, kind="stable")
    for mine in np.split(order, np.cumsum(np.bincount(number))[:-1]):
        rights, wrongs = mine[is_right[mine]], mine[~is_right[mine]]
        if not len(rights) or not len(wrongs):
            counts["no_wrong" if len(rights) else "no_right"] += 1
            continue
        above = np.greater.outer(s[wrongs], s[rights]) + 0.5 * np.equal.outer(s[wrongs], s[rights])
        counted = np.ones(above.shape, dtype=bool)
        if lengths is not None:
            t = np.asarray(lengths, float)
            longer = np.maximum.outer(t[wrongs], t[rights])
            counted = np.abs(np.subtract.outer(t[wrongs], t[rights])) <= LENGTH_TOLERANCE * longer
        if not counted.any():
            counts["no_like_length"] += 1
            continue
        means.append(float(above[counted].mean()))
        counts["compared"] += 1
        counts["pairs"] += int(counted.sum())
    return share(means, np.ones(len(means)), seed=seed, level=level, unit="share of pairs"), counts


def measure(
    teacher: PreTrainedModel,
    teacher_tokenizer: PreTrainedTokenizerBase,
    student: PreTrainedModel,
    student_tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    *,
    num_samples: int = 8,
    max_completion_length: int,
    writer: Literal["student", "teacher"] = "student",
    use_chat_template: bool | None = None,
    batch_size: int = 64,
    seed: int,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], dict[str, int]]:
    """Wrong-trace preference of a teacher towards a student, in every form of `FORMS`.

    Completions are sampled at temperature 1 and graded; only those with full score are right. Those cut off at
    the length limit count, without an end token. With equal models the form ``implicit`` is exactly 0.5.

    Args:
        teacher: p; left in the mode it is in, like the student.
        teacher_tokenizer: any; of another family it reads the same text its own way.
        student: q.
        student_tokenizer: of the student.
        task: grades the completions.
        examples: at least two, with unique ids.
        num_samples: completions per example.
        max_completion_length: tokens.
        writer: whose completions are compared: the student's are those that on-policy distillation scores, the
            teacher's those that it teaches off-policy.
        use_chat_template: None lets each model's own tokenizer decide.
        batch_size: changes the speed only.
        seed: keys the samples and the bootstrap.
        level: coverage of the intervals.

    Returns:
        An estimate for each form for which two prompts or more have a pair to compare. And counts:
        ``completions`` and of those ``right``, ``truncated`` and ``unreadable`` (the other model's tokenizer
        cannot hold the text; left out, the rest is compared); the counts of `wrong_trace_preference` for all
        pairs (there ``no_like_length`` is how many of the ``compared`` have no pair of like length); and
        ``like_length_compared`` and ``like_length_pairs``, what ``length_matched`` rests on.

    Raises:
        ConfigError: unknown writer, and all of `stillroom.diagnosis.scores.write`.
        DataError: as there; or not one completion can be read by both models.
        StillroomError: a model gives NaN.
    """
    if writer not in ("student", "teacher"):
        raise ConfigError(
            f"{unknown_name('writer', writer, ['student', 'teacher'])} One of the two must write."
        )
    author = (student, student_tokenizer) if writer == "student" else (teacher, teacher_tokenizer)
    written = write(
        *author,
        task,
        examples,
        num_samples=num_samples,
        max_completion_length=max_completion_length,
        temperature=1.0,
        use_chat_template=use_chat_template,
        batch_size=batch_size,
        seed=seed,
    )
    p, q = (
        score(
            *reader,
            written,
            writer_tokenizer=author[1],
            use_chat_template=use_chat_template,
            batch_size=batch_size,
        )
        for reader in ((teacher, teacher_tokenizer), (student, student_tokenizer))
    )
    read = [(c, a, b) for c, a, b in zip(written, p, q, strict=True) if a is not None and b is not None]
    if not read:
        raise DataError(
            f"none of the {len(written)} completions by the {writer} can be read by both models, so there is nothing "
            "to compare: the other tokenizer lacks the characters. Let the other model write, or compare models "
            "whose tokenizers hold the task's text."
        )
    prompt_ids = [c.example.id for c, _, _ in read]
    right = [c.is_right for c, _, _ in read]
    lengths = [len(c.rollout.completion_ids) for c, _, _ in read]
    implicit = [a.total - b.total for _, a, b in read]
    s = {
        "implicit": implicit,
        "likelihood": [a.total for _, a, _ in read],
        "likelihood_per_token": [a.per_token for _, a, _ in read],
        "length_matched": implicit,
    }
    found = {
        form: wrong_trace_preference(
            prompt_ids,
            right,
            values,
            lengths if form == "length_matched" else None,
            seed=seed,
            level=level,
        )
        for form, values in s.items()
    }
    counts = {
        "completions": len(written),
        "right": sum(c.is_right for c in written),
        "truncated": sum(c.is_truncated for c in written),
        "unreadable": len(written) - len(read),
        **found["implicit"][1],
    }
    matched = found["length_matched"][1]
    counts["no_like_length"] = matched["no_like_length"]
    counts |= {f"like_length_{name}": matched[name] for name in ("compared", "pairs")}
    return {form: estimate for form, (estimate, _) in found.items() if estimate is not None}, counts
