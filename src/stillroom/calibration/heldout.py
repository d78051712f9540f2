"""What a policy does on held-out prompts: utility, KL from the original, and how its text looks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stillroom.calibration.anchor import Anchor
from stillroom.calibration.guards import GuardReading
from stillroom.calibration.judge import Asked, written
from stillroom.calibration.monitors import read
from stillroom.calibration.rollouts import Written
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Heldout:
    """Held-out prompts and how they are answered. Samples are keyed, so that two policies meet the same noise,
    and so do all processes.
    """

    asked: Sequence[Asked]
    tokenizer: PreTrainedTokenizerBase
    end_ids: Collection[int]
    num_samples: int
    max_completion_length: int
    seed: int
    batch_size: int = 256

    def answers(self, policy: PreTrainedModel, *, temperature: float = 1.0) -> list[Written]:
        """The policy's completions, prompt by prompt, graded."""
        sampler = HFSampler(policy, self.tokenizer, end_ids=self.end_ids, batch_size=self.batch_size)
        rollouts = sampler.sample(
            [Prompt(one.id, one.prompt_ids) for one in self.asked],
            num_generations=self.num_samples if temperature > 0 else 1,
            max_completion_length=self.max_completion_length,
            temperature=temperature,
            seed=self.seed,
        )
        by_id = {one.id: one for one in self.asked}
        return [
            written(by_id[r.example_id], r.completion_ids, self.tokenizer, self.end_ids) for r in rollouts
        ]

    def utilities(self, rows: Sequence[Written]) -> np.ndarray:
        """Mean score of each prompt's completions ``[n]``; unparsed ones count 0."""
        scores = np.array([row.score or 0.0 for row in rows])
        return scores.reshape(len(self.asked), -1).mean(1)

    def lengths(self, rows: Sequence[Written]) -> np.ndarray:
        """Mean number of tokens of each prompt's completions ``[n]``."""
        return np.array([len(row.ids) for row in rows]).reshape(len(self.asked), -1).mean(1)

    def measure(self, policy: PreTrainedModel, anchor: Anchor) -> GuardReading:
        """Everything the guard looks at."""
        rows = self.answers(policy)
        kl, entropy = anchor.measure(rows, seed=self.seed)
        return GuardReading(self.utilities(rows), kl, read(rows, entropy.value))
