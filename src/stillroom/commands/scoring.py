"""Scores on tasks by name, for every command that states them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stillroom import stats
from stillroom.data.asking import select_examples
from stillroom.data.tasks import TASKS, load_task
from stillroom.evaluation.evaluate import evaluate_task
from stillroom.evaluation.likelihood import evaluate_likelihood
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Estimate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def score_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    data_dir: str | None,
    split: str | None = None,
    max_examples: int | None,
    num_samples: int,
    max_completion_length: int,
    batch_size: int,
    seed: int,
    multiple_choice: Literal["loglikelihood", "generate"] = "loglikelihood",
    train_prompts: Iterable[str | Sequence[Message]] | None = None,
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Figures named ``task/figure``, and every completion or likelihood behind them.

    Tasks with a verifier are scored by what the model writes; multiple choice by option likelihood unless
    generation is asked for; open-ended sets and texts by likelihood.

    Raises:
        ConfigError: a task's name, split or number of examples.
        DataError: its data.
    """
    figures: dict[str, Estimate] = {}
    records: list[dict[str, Any]] = []
    for name in names:
        task = load_task(name, data_dir)
        spec = TASKS[name]
        chosen = split or spec.test_split
        examples = select_examples(task, chosen, max_examples, seed=seed)
        by_likelihood = spec.family in ("open-ended", "text") or (
            spec.family == "multiple choice" and multiple_choice == "loglikelihood"
        )
        if by_likelihood:
            found, samples = evaluate_likelihood(
                model, tokenizer, examples, batch_size=batch_size, progress=name, seed=seed
            )
        else:
            found, samples = evaluate_task(
                HFSampler(model, tokenizer, batch_size=batch_size, progress=name),
                tokenizer,
                task,
                examples,
                max_completion_length=max_completion_length,
                num_samples=num_samples,
                train_prompts=train_prompts,
                seed=seed,
            )
        excluded = getattr(task, "excluded", None)  # sets that we score in part say how much is left out
        if excluded is not None:
            found["excluded_examples"] = stats.exact(
                excluded(chosen)["prompts"], n=len(examples), unit="examples"
            )
        figures |= {f"{name}/{figure}": estimate for figure, estimate in found.items()}
        records += [{"task": name, "task_version": task.version, "split": chosen, **r} for r in samples]
    return figures, records
