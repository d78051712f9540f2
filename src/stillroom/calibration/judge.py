"""What a completion earns: two callables in the form that TRL gives reward functions.

Both read one batch once: ids are cut at the first end token, decoded with nothing removed, and graded by
their task. `utility` gives the task's score, `calibration` the reward that turns the knob, each already
normalised in its group (unless GDPO is asked for, which does that itself). Raw values go out as metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stillroom.calibration.influence import Influence
from stillroom.calibration.rewards import (
    Scores,
    calibration_reward,
    gate,
    normalise_in_groups,
    random_sign,
    reward_row,
)
from stillroom.calibration.rollouts import Written, text_of, through_first_end
from stillroom.calibration.scoring import Scorer
from stillroom.config import RewardSpec
from stillroom.errors import DataError, StillroomError
from stillroom.types import Example, Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with the task that grades what is written for it."""

    id: str
    """``task/example``; a prompt that is asked twice has one id."""
    task: Task
    example: Example
    prompt: str | Sequence[Message]
    """As it is sent."""
    prompt_ids: tuple[int, ...]


def written(
    asked: Asked,
    completion_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
) -> Written:
    """Grade one completion by its ids."""
    ids, end_id = through_first_end(completion_ids, end_ids)
    text = text_of(tokenizer, ids)
    score = asked.task.score(asked.example, text)
    if score is not None and not 0 <= score <= 1:
        raise DataError(
            f"task {asked.task.name!r} scores {score} for {asked.example.id!r}; a utility lies in [0, 1], or is None "
            "where the completion cannot be parsed. Correct the task's score function."
        )
    return Written(asked.id, asked.prompt, asked.prompt_ids, ids, text, end_id, score)


class Judge:
    """Gives rewards for batches of whole groups.

    Args:
        asked: everything that may be asked, by id.
        tokenizer: of the policy.
        end_ids: that end a completion of the policy.
        proxies: stand-ins for students.
        spec: which reward, how shaped.
        group_size: completions of each prompt, one behind the other.
        seed: of the random-sign control.
        influences: one for each proxy, where the reward is `influence`.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Collection[int],
        proxies: Sequence[Scorer],
        spec: RewardSpec,
        *,
        group_size: int,
        seed: int,
        influences: Sequence[Influence] = (),
    ) -> None:
        self.asked = {one.id: one for one in asked}
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.proxies, self.influences, self.spec = proxies, influences, spec
        self.group_size, self.seed = group_size, seed
        self.policy: Scorer | None = None
        self._batch: tuple[Sequence[Sequence[int]], list[Written]] | None = None

    def bind(self, policy: PreTrainedModel) -> None:
        """Name the policy; the trainer that holds it exists only after its rewards."""
        batch_size = self.proxies[0].batch_size if self.proxies else 64
        self.policy = Scorer(policy, self.tokenizer, batch_size=batch_size, reads_ids=True)

    def utility(
        self,
        *,
        completion_ids: Sequence[Sequence[int]],
        example_id: Sequence[str],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """The tasks' scores; a completion that cannot be parsed counts as 0."""
        rows = self._read(completion_ids, example_id)
        scores: list[float | None] = [row.score or 0.0 for row in rows]
        log_metric("utility/mean", _mean(scores))
        log_metric("utility/unparsed", _mean([float(row.score is None) for row in rows]))
        return scores if self._is_gdpo else normalise_in_groups(scores, self.group_size, clip=None)

    def calibration(
        self,
        *,
        completion_ids: Sequence[Sequence[int]],
        example_id: Sequence[str],
        trainer_state: Any,
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """The calibration reward; None for what is gated out, cut off, or cannot be scored."""
        rows = self._read(completion_ids, example_id)
        raw = self.raw(rows)
        gated = gate(raw, rows, on_correct=self.spec.gate == "correct")
        for value, row in zip(raw, rows, strict=True):
            if value is not None and not math.isfinite(value):
                raise StillroomError(
                    f"the calibration reward of a completion of {row.example_id!r} is {value}; the trainer would take "
                    "it for no reward and go on. Check the proxy's weights."
                )
        log_metric(f"calibration/{self.spec.name}", _mean(raw))
        log_metric("calibration/rewarded", _mean([float(value is not None) for value in gated]))
        values = gated
        if not self._is_gdpo:
            values = normalise_in_groups(gated, self.group_size, clip=self.spec.clip)
        if self.spec.sign == "random":
            values = random_sign(values, rows, self.group_size, self.seed)
        risen = min(1.0, (trainer_state.global_step + 1) / (self.spec.warmup_steps + 1))
        return [None if value is None else value * risen for value in values]

    def raw(self, rows: Sequence[Written]) -> list[float | None]:
        """The reward before gate, normalisation and sign: higher suits a student better.

        None for a text that a proxy's tokenizer cannot hold byte for byte; a policy may write anything, and one odd
        character is no reason to lose a run.
        """
        assert self.policy is not None, "bind() comes first"
        held = [row for row in rows if all(proxy.readable(row) for proxy in self.proxies)]
        needs = reward_row(self.spec.name).needs
        policy = self.policy.score(held) if "policy" in needs else None
        opinions = [
            Scores(
                policy,
                proxy.score(held) if "proxy" in needs else None,
                self.influences[i].values(held) if "influence" in needs else None,
            )
            for i, proxy in enumerate(self.proxies)
        ]
        values = dict(zip(map(id, held), calibration_reward(held, opinions, self.spec), strict=True))
        return [values.get(id(row)) for row in rows]

    @property
    def _is_gdpo(self) -> bool:
        return self.spec.aggregation == "gdpo"

    def _read(self, completion_ids: Sequence[Sequence[int]], example_id: Sequence[str]) -> list[Written]:
        if self._batch is None or self._batch[0] is not completion_ids:
            for start in range(0, len(example_id), self.group_size):
                if len(set(example_id[start : start + self.group_size])) != 1:
                    raise StillroomError(
                        f"completions {start} to {start + self.group_size - 1} of a batch do not answer one prompt, so "
                        "they cannot be compared as a group. This is a fault of the trainer's batching; report it."
                    )
            rows = [
                written(self.asked[name], ids, self.tokenizer, self.end_ids)
                for name, ids in zip(example_id, completion_ids, strict=True)
            ]
            self._batch = (completion_ids, rows)
        return self._batch[1]


def _mean(values: Sequence[float | None]) -> float:
    """Of the values there are; NaN where there is none (the trainer leaves NaN out of its means)."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else float("nan")
