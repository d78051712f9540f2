"""The nouns: small frozen records that every room shares, and the protocols between rooms.

Shapes: B rows, T token positions, n supervised positions (flattened), V vocabulary, K kept tokens.
Units: log-probabilities and divergences are in nats. Torch is imported for typing only, so that the
command line can read configs and run folders without paying for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stillroom.data.batches import Batch
    from stillroom.losses.signals import TeacherSignal

Message = Mapping[str, str]
"""One chat turn, ``{"role": ..., "content": ...}``."""

StopReason = Literal["end", "length"]
Verdict = Literal["ok", "warn", "trap", "unknown"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval. Made in ``stats``; a bare float never reaches a report."""

    value: float
    low: float
    high: float
    level: float
    """Coverage of [low, high], e.g. 0.95."""
    n: int
    """Independent units behind the interval (items, rows or seeds; the method says which)."""
    unit: str
    method: str
    """How the interval was made, e.g. ``wilson`` or ``bootstrap over 40 rows``."""

    def __post_init__(self) -> None:
        if not (self.low <= self.value <= self.high) and not math.isnan(self.value):
            raise ValueError(f"interval [{self.low}, {self.high}] does not hold {self.value}")

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Example:
    """One item of a task."""

    id: str
    """Unique within the task and split; never a position in a shuffled order."""
    prompt: str | Sequence[Message]
    answer: str
    """The gold final answer that ``Task.score`` compares with (a letter for multiple choice)."""
    completion: str | None = None
    """Gold text to train on; None where the data holds an answer but no worked text."""
    options: tuple[str, ...] = ()
    """Option texts of a multiple-choice item, in the order of the letters A, B, C …"""
    meta: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A versioned set of examples with a verifier. ``score`` is both the metric and the reward."""

    name: str
    version: str
    splits: tuple[str, ...]
    """Names that `examples` accepts."""

    def examples(self, split: str) -> Iterator[Example]: ...

    def score(self, example: Example, completion: str) -> float | None:
        """In [0, 1]; None when the completion could not be parsed (counted apart, scored 0)."""
        ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with everything needed to train on it. Ids travel; text is for display only."""

    example_id: str
    prompt_ids: tuple[int, ...]
    """Ids that the sampling model read, its own template and start token included."""
    completion_ids: tuple[int, ...]
    """Generated ids, up to and including the first end token."""
    logprobs: tuple[float, ...]
    """Natural log of the distribution actually sampled (after temperature), one per completion id."""
    stop_reason: StopReason
    policy: str
    """Who wrote it: model name, revision and training step."""
    text: str = ""


class TeacherSource(Protocol):
    """Says what the teacher thinks of each supervised position: live, cached, served or constant."""

    def signal(self, batch: Batch) -> TeacherSignal: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sampler is asked to continue."""

    example_id: str
    ids: tuple[int, ...]


class Sampler(Protocol):
    """Writes completions. On-policy means that the sampler holds the student; nothing else differs."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int = 1,
        max_completion_length: int,
        temperature: float,
        seed: int,
    ) -> list[Rollout]: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured statement about a model, a pair or a data set."""

    name: str
    value: Estimate
    verdict: Verdict
    threshold: float | None = None
    evidence: tuple[str, ...] = ()
    """Ids of rows to look at."""
    guard: str = ""
    """What to do about it."""
    reference: str = ""
