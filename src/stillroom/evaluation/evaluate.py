"""Scores of a model on a task, from what it writes.

Two accuracies, because they differ much where distillation is most of interest (an undertrained student was
measured at 0.70 greedy and 0.27 sampled): *greedy*, the likeliest token each time, and *sampled*, the mean
over several completions at temperature 1, which is what a student learns from and what a user sees.

Besides accuracy it says how many completions could not be parsed, how many ran into the length limit, and
how long they are; a low accuracy with a high unparsed share is a problem of form. Every completion is kept
as a record with the prompt as the model read it, so that a surprising figure can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stillroom import stats
from stillroom.data.asking import as_sent
from stillroom.data.overlap import overlap, prompt_text
from stillroom.data.rendering import render_prompt
from stillroom.errors import ConfigError, DataError
from stillroom.types import Estimate, Example, Message, Prompt, Rollout, Sampler, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def cut_at_stop(text: str, stop: str | Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop text in it, and which one that was.

    One string is one stop text, not a list of its letters (field report 83).

    Raises:
        ConfigError: a stop text is empty: it would end every completion before it begins.

    >>> cut_at_stop("x = 4 #### 4 Question: next", "Question")
    ('x = 4 #### 4 ', 'Question')
    """
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        raise ConfigError("a stop text is empty, so every completion would be cut to nothing. Leave it out.")
    found = [(text.index(s), s) for s in stops if s in text]
    if not found:
        return text, None
    at, which = min(found)
    return text[:at], which


def evaluate_task(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    *,
    max_completion_length: int,
    num_samples: int = 4,
    temperature: float = 1.0,
    stop: str | Sequence[str] = (),
    use_chat_template: bool | None = None,
    train_prompts: Iterable[str | Sequence[Message]] | None = None,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Greedy and sampled accuracy of a model on examples of a task.

    Args:
        sampler: holds the model.
        tokenizer: the model's; renders the prompts.
        task: scores the completions.
        examples: at least two, with unique ids.
        max_completion_length: tokens.
        num_samples: completions per example at ``temperature``, beside the greedy one; 0 for greedy alone.
        temperature: of those samples, above 0.
        stop: text or texts at which a completion is cut before it is scored.
        use_chat_template: whether text prompts are sent as a user's message; default: if the tokenizer has a
            template. Messages always are.
        train_prompts: prompts that the model was trained on; the share of the examples found among them is
            then stated beside the accuracy.
        seed: keys the samples.
        level: coverage of the intervals.

    Returns:
        Estimates ``accuracy_greedy``, ``unparsed_greedy``, ``truncated_greedy`` (Wilson over examples) and
        ``length_tokens_greedy``; the same with ``_sampled``, where the example is the unit and not the
        sample; ``overlap_exact``, ``overlap_normalised`` and ``overlap_numbers_masked``. An unparsed
        completion counts as 0 in the accuracy. And one record for each completion.

    Raises:
        DataError: fewer than two examples, duplicate ids, or a score outside [0, 1].
        ConfigError: the task has no verifier, or a setting is out of range.
        MissingExtraError: scoring needs a package that is not installed; raised before anything is sampled.
    """
    if len(examples) < 2:
        raise DataError(f"{len(examples)} example(s) give no interval; evaluate at least two.")
    if len({example.id for example in examples}) < len(examples):
        raise DataError("two examples have the same id, so their completions could not be told apart.")
    if num_samples < 0 or (num_samples and temperature <= 0):
        raise ConfigError(
            f"num_samples = {num_samples} at temperature {temperature}: samples need a temperature above 0, and "
            "their number cannot be negative. The greedy completion comes in any case."
        )
    task.score(examples[0], "")  # a task without verifier, or without its package, fails here and not later
    cut_at_stop("", stop)
    prompts = [
        Prompt(example.id, render_prompt(tokenizer, as_sent(tokenizer, example.prompt, use_chat_template)))
        for example in examples
    ]
    estimates: dict[str, Estimate] = {}
    records: list[dict[str, Any]] = []
    for mode, generations, heat in (("greedy", 1, 0.0), ("sampled", num_samples, temperature)):
        if generations == 0:
            continue
        rollouts = sampler.sample(
            prompts,
            num_generations=generations,
            max_completion_length=max_completion_length,
            temperature=heat,
            seed=seed,
        )
        by_example: dict[str, list[Rollout]] = {example.id: [] for example in examples}
        for rollout in rollouts:
            by_example[rollout.example_id].append(rollout)
        scored = [
            [
                _record(tokenizer, task, example, rollout, stop) | {"mode": mode, "generation": number}
                for number, rollout in enumerate(by_example[example.id])
            ]
            for example in examples
        ]
        records += [record for group in scored for record in group]
        estimates |= {f"{name}_{mode}": value for name, value in _summary(scored, level).items()}
    if train_prompts is not None:
        texts = (prompt_text(prompt) for prompt in train_prompts)
        estimates |= overlap(texts, [prompt_text(example.prompt) for example in examples]).estimates()
    return estimates, records


def _record(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    example: Example,
    rollout: Rollout,
    stop: str | Sequence[str],
) -> dict[str, Any]:
    completion, stopped_by = cut_at_stop(rollout.text, stop)
    score = task.score(example, completion)
    if score is not None and not (math.isfinite(score) and 0 <= score <= 1):
        raise DataError(
            f"task {task.name!r} scores {score} for {example.id!r}; a score lies in [0, 1], or is None where the "
            "completion cannot be parsed. Correct the task's score function."
        )
    return {
        "example_id": example.id,
        "prompt": tokenizer.decode(list(rollout.prompt_ids), skip_special_tokens=False),
        "completion": completion,
        "answer": example.answer,
        "score": score or 0.0,
        "parsed": score is not None,
        "stopped_by": stopped_by,
        # A completion that reached a stop text had said what is scored; only the rest was cut off.
        "truncated": rollout.stop_reason == "length" and stopped_by is None,
        "length_tokens": len(rollout.completion_ids),
    }


def _summary(scored: list[list[dict[str, Any]]], level: float) -> dict[str, Estimate]:
    """The figures of one mode, from the records of each example."""

    def values(name: str) -> list[list[float]]:
        return [[float(record[name]) for record in group] for group in scored]

    unparsed = [[1 - parsed for parsed in group] for group in values("parsed")]
    return {
        "accuracy": _share(values("score"), level, "accuracy"),
        "unparsed": _share(unparsed, level, "share of completions"),
        "truncated": _share(values("truncated"), level, "share of completions"),
        "length_tokens": stats.clustered_mean(values("length_tokens"), level, unit="tokens"),
    }


def _share(values: list[list[float]], level: float, unit: str) -> Estimate:
    """Wilson's interval for one yes or no an example, else its clustered form."""
    flat = [value for group in values for value in group]
    if len(flat) == len(values) and all(value in (0.0, 1.0) for value in flat):
        return stats.wilson(int(sum(flat)), len(flat), level, unit=unit)
    return stats.clustered_share(values, level, unit=unit)
