"""The student's turn to write: its completions replace the data's, in one decode batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from stillroom.data.batches import TrainingRow
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

logger = logging.getLogger(__name__)


def write_completions(
    sampler: HFSampler,
    micro_batches: Sequence[Sequence[TrainingRow]],
    *,
    max_completion_length: int,
    temperature: float,
    seed: int,
    add: Callable[[str, float, float], None],
) -> list[list[TrainingRow]]:
    """Replace every completion by the student's own, all micro-batches in one decode batch.

    Args:
        sampler: holds the student as it is now.
        micro_batches: rows of one optimizer step.
        max_completion_length: tokens.
        temperature: of sampling.
        seed: of this step.
        add: called with a metric's name, numerator and denominator.
    """
    prompts = [Prompt(row.id, row.prompt_ids) for rows in micro_batches for row in rows]
    ties, drawn = sampler.stats.near_ties, sampler.stats.tokens
    rollouts = sampler.sample(
        prompts, max_completion_length=max_completion_length, temperature=temperature, seed=seed
    )
    truncated = sum(r.stop_reason == "length" for r in rollouts)
    add("rollout/length_tokens_mean", sum(len(r.completion_ids) for r in rollouts), len(rollouts))
    add("rollout/truncated_share", truncated, len(rollouts))
    add("rollout/near_tie_share", sampler.stats.near_ties - ties, sampler.stats.tokens - drawn)
    if rollouts and truncated == len(rollouts):  # field report 64
        logger.warning(
            "all %d completions of a step were cut off at max_completion_length=%d, so the student never learns to "
            "end. Raise the limit, or start from a student that can end.",
            truncated,
            max_completion_length,
        )
    written = iter(rollouts)
    return [[row.with_completion(next(written).completion_ids) for row in rows] for rows in micro_batches]
