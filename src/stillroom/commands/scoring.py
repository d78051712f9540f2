"""Scores on tasks by name, for every command that states them.

`select` finds tasks and examples, and refuses what cannot be scored, before any model is read;
`check_prompts` adds what depends on a model; `score` asks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stillroom import stats
from stillroom.data.asking import as_sent, select_examples
from stillroom.data.rendering import render_prompt
from stillroom.data.tasks import TASKS, load_task
from stillroom.errors import ConfigError, DataError, unknown_name
from stillroom.evaluation.evaluate import evaluate_task
from stillroom.evaluation.likelihood import evaluate_likelihood
from stillroom.models.loading import longest_input
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Estimate, Example, Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Chosen:
    """A task with the examples that a model is scored on."""

    name: str
    task: Task
    split: str
    examples: Sequence[Example]
    by_likelihood: bool
    """Whether likelihoods are compared, or what the model writes is verified."""


def select(
    names: Sequence[str],
    *,
    data_dir: str | None,
    split: str | None = None,
    max_examples: int | None,
    seed: int,
    multiple_choice: Literal["loglikelihood", "generate"] = "loglikelihood",
) -> list[Chosen]:
    """The tasks with their examples.

    Tasks with a verifier are scored by what the model writes; multiple choice by option likelihood unless
    generation is asked for; open-ended sets and texts by likelihood.

    Raises:
        ConfigError: a task's name, split or number of examples.
        DataError: its data, or fewer than two examples.
        MissingExtraError: its verifier needs a package that is not installed.
    """
    chosen: list[Chosen] = []
    for name in names:
        task = load_task(name, data_dir)
        spec = TASKS[name]
        wanted = split or spec.test_split
        if wanted not in task.splits:
            raise ConfigError(unknown_name(f"split of task {name!r}", wanted, task.splits))
        examples = select_examples(task, wanted, max_examples, seed=seed)
        if len(examples) < 2:
            raise DataError(
                f"split {wanted!r} of task {name!r} has {len(examples)} example(s), and a figure over fewer than two "
                "has no interval. Choose another split."
            )
        by_likelihood = spec.family in ("open-ended", "text") or (
            spec.family == "multiple choice" and multiple_choice == "loglikelihood"
        )
        if not by_likelihood:
            task.score(examples[0], "")  # fails here, and not after training, if its package is missing
        chosen.append(Chosen(name, task, wanted, examples, by_likelihood))
    return chosen


DEFAULT_LENGTH = 256
"""Tokens of a completion where nobody says otherwise and the model has the positions."""


def default_length(
    chosen: Sequence[Chosen], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """`DEFAULT_LENGTH`, or what the model's positions leave behind the longest prompt if that is less."""
    limit = longest_input(model)
    lengths = [
        len(render_prompt(tokenizer, as_sent(tokenizer, example.prompt, None)))
        for one in chosen
        if not one.by_likelihood
        for example in one.examples
    ]
    if limit is None or not lengths:
        return DEFAULT_LENGTH
    return max(min(DEFAULT_LENGTH, limit - max(lengths)), 1)


def check_prompts(
    chosen: Sequence[Chosen],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_completion_length: int,
) -> None:
    """Refuse prompts that a model cannot be sent, or that leave it no room to answer.

    Raises:
        DataError: names the first.
    """
    limit = longest_input(model)
    for one in chosen:
        for example in () if one.by_likelihood else one.examples:
            length = len(render_prompt(tokenizer, as_sent(tokenizer, example.prompt, None)))
            if limit is not None and length + max_completion_length > limit:
                raise DataError(
                    f"example {example.id!r} of task {one.name!r} has {length} tokens, and with a completion of up to "
                    f"{max_completion_length} it would reach beyond the {limit} positions of the model. Lower "
                    "max_completion_length, or leave the task out."
                )


def score(
    chosen: Sequence[Chosen],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int,
    max_completion_length: int,
    batch_size: int,
    seed: int,
    train_prompts: Iterable[str | Sequence[Message]] | None = None,
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Figures named ``task/figure``, and every completion or likelihood behind them.

    Args:
        chosen: from `select`.
        model: on any device, left in the mode it is in.
        tokenizer: of the model.
        num_samples: completions per example at temperature 1, beside the greedy one.
        max_completion_length: tokens.
        batch_size: changes the speed only.
        seed: keys the samples.
        train_prompts: of the data trained on; how many examples stand among them is then a figure too, for
            tasks whose completions are verified.
    """
    figures: dict[str, Estimate] = {}
    records: list[dict[str, Any]] = []
    for one in chosen:
        if one.by_likelihood:
            found, samples = evaluate_likelihood(
                model, tokenizer, one.examples, batch_size=batch_size, progress=one.name, seed=seed
            )
        else:
            found, samples = evaluate_task(
                HFSampler(model, tokenizer, batch_size=batch_size, progress=one.name),
                tokenizer,
                one.task,
                one.examples,
                max_completion_length=max_completion_length,
                num_samples=num_samples,
                train_prompts=train_prompts,
                seed=seed,
            )
        excluded = getattr(one.task, "excluded", None)  # sets that we score in part say how much is left out
        if excluded is not None:
            found["excluded_examples"] = stats.exact(
                excluded(one.split)["prompts"], n=len(one.examples), unit="examples"
            )
        figures |= {f"{one.name}/{figure}": estimate for figure, estimate in found.items()}
        where = {"task": one.name, "task_version": one.task.version, "split": one.split}
        records += [where | record for record in samples]
    return figures, records
