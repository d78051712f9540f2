"""What models write for a distillation: the teacher's completions beforehand, and a sample at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from stillroom import seeds
from stillroom.commands.assemble import Pair
from stillroom.commands.display import visible
from stillroom.config import DistillConfig
from stillroom.data.batches import TrainingRow
from stillroom.data.prepare import completed
from stillroom.data.rendering import end_ids, render_prompt
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.records import read_jsonl, rollout
from stillroom.runs import Run
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def by_teacher(
    config: DistillConfig,
    pair: Pair,
    run: Run,
    console: Console,
    rendered: Sequence[TrainingRow],
    purpose: str,
    num_generations: int,
) -> list[TrainingRow]:
    """The same prompts with completions by the teacher, written once and read back on resume.

    Raises:
        DataError: all completions are empty, or those that were read back belong to other rows.
    """
    if not rendered:
        return []
    stored = [r for r in read_jsonl(run.path / "rollouts.jsonl") if r.get("purpose") == purpose]
    wanted = len(rendered) * num_generations
    if len(stored) >= wanted:  # more, if an earlier writing of them was cut short
        rollouts = [rollout(record) for record in stored[-wanted:]]
    else:
        sampler = HFSampler(
            pair.teacher,
            pair.teacher_tokenizer,
            batch_size=config.sampling.batch_size,
            name=config.teacher.path,
            progress=None if console.quiet else f"teacher writes {wanted:,} completions ({purpose})",
        )
        rollouts = sampler.sample(
            [Prompt(row.id, row.teacher_prompt_ids or row.prompt_ids) for row in rendered],
            num_generations=num_generations,
            max_completion_length=config.sampling.max_completion_length,
            temperature=config.sampling.temperature,
            seed=seeds.key(config.train.seed, "teacher completions", purpose),
        )
        run.add_rollouts(rollouts, purpose=purpose)
    if truncated := sum(r.stop_reason == "length" for r in rollouts):
        console.print(
            f"{purpose}: {truncated:,} of {len(rollouts):,} completions by the teacher were cut off at "
            f"sampling.max_completion_length={config.sampling.max_completion_length} and do not end"
        )
    made = completed(rendered, rollouts, pair.student_tokenizer, pair.teacher_tokenizer, pair.student)
    if not made:
        raise DataError(
            f"all {wanted:,} completions by the teacher ({purpose}) are empty, so there is nothing to learn from them. "
            "Check what the teacher is asked (rollouts.jsonl holds its prompts), and start a new run."
        )
    return made


def sample_prompt(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt | None:
    """The prompt of the sample as ids, if there is to be one.

    Raises:
        ConfigError: nothing can be continued.
        DataError: it cannot be rendered.
    """
    text = config.score.sample_prompt
    if text is None:
        return None
    prompt = Prompt("sample", render_prompt(tokenizer, text))
    if not prompt.ids:
        raise ConfigError(
            f"score.sample_prompt={text!r} has no tokens, and this tokenizer writes no start token, so there is "
            "nothing to continue. Give it a text, or leave it out."
        )
    return prompt


def sample(console: Console, config: DistillConfig, pair: Pair, prompt: Prompt) -> str | None:
    """A greedy completion by the trained student, for the reader's eye; not worth a run if it fails."""
    try:
        ends = end_ids(pair.student, pair.student_tokenizer)
        sampler = HFSampler(pair.student, pair.student_tokenizer, end_ids=ends)
        written = sampler.sample([prompt], max_completion_length=60, temperature=0.0, seed=0)[0]
    except StillroomError as error:
        console.print(f"no sample: {visible(str(error))}")
        return None
    return f"{config.score.sample_prompt}{written.text}"
