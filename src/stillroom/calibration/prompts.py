"""What is asked in a calibration: prompts to train on in the order of use, and prompts held out.

Held-out prompts come in two disjoint sets: one for the guard, which decides when to stop, and one that it never
sees, for the figures that are stated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stillroom import seeds
from stillroom.calibration.judge import Asked
from stillroom.config import CalibrateConfig
from stillroom.data.asking import as_sent, select_examples
from stillroom.data.rendering import render_prompt
from stillroom.data.tasks import TASKS, load_task
from stillroom.errors import ConfigError, DataError, unknown_name
from stillroom.types import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chosen = list[tuple[Task, Example]]


@dataclass(frozen=True)
class Selection:
    """Examples, before any tokenizer is read."""

    train: Chosen
    """One entry a group, in the order of use: steps x prompts_per_step of them."""
    guard: Chosen
    stated: Chosen


def select(config: CalibrateConfig) -> Selection:
    """Choose examples by seed.

    Raises:
        ConfigError: an unknown task or split; a task without verifier; fewer examples than are asked for.
        DataError: its data.
    """
    data, train = config.data, config.train
    places = train.max_steps * train.prompts_per_step
    share = -(-places // len(data.tasks))
    passes: list[Chosen] = []
    guards: list[Chosen] = []
    stated: Chosen = []
    for name in data.tasks:
        task = load_task(name, data.data_dir)
        spec = TASKS[name]
        if spec.family in ("open-ended", "text"):
            raise ConfigError(
                f"task {name!r} has no verifier, so there is no utility to hold while the teacher moves. Choose a task "
                "whose answers can be checked; see `stillroom tasks`."
            )
        if data.split not in task.splits:
            raise ConfigError(unknown_name(f"split of task {name!r}", data.split, task.splits))
        if data.split == spec.test_split:
            raise ConfigError(
                f"data.split={data.split!r} is the split that task {name!r} is stated on: the floor would be watched "
                f"on prompts that were trained on. Choose another of {', '.join(task.splits)}."
            )
        task_examples = _some(task, data.split, min(share, data.max_rows or share), train.seed)
        task.score(task_examples[0], "")  # a missing package shows here
        passes.append([(task, example) for example in _repeated(task_examples, share, train.seed)])
        wanted = config.guard.max_examples + config.final_examples
        held = select_examples(task, spec.test_split, wanted, seed=seeds.key(train.seed, "calibrate/heldout"))
        guards.append([(task, example) for example in held[: config.guard.max_examples]])
        stated += [(task, example) for example in held[config.guard.max_examples :]]
    in_turn = [one for ones in zip(*passes, strict=True) for one in ones]
    watched = [one for ones in zip(*guards, strict=True) for one in ones]  # tasks in turn, as in training
    return Selection(in_turn[:places], watched, stated)


def _some(task: Task, split: str, limit: int, seed: int) -> list[Example]:
    """That many examples, or all of a split that holds fewer."""
    if hasattr(task, "sample"):
        return select_examples(task, split, limit, seed=seed)
    there = list(itertools.islice(task.examples(split), limit + 1))
    if len(there) < limit:
        return there
    return select_examples(task, split, limit, seed=seed)


def _repeated(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Whole passes over the examples, each in an order of its own, cut at `count`."""
    if not examples:
        raise DataError("a training split holds no example, so there is nothing to ask. Choose another.")
    order: list[int] = []
    while len(order) < count:
        order += seeds.permutation(len(examples), seed, "calibrate/order", len(order) // len(examples))
    return [examples[i] for i in order[:count]]


def ask(
    chosen: Chosen, tokenizer: PreTrainedTokenizerBase, *, room: int, positions: int | None
) -> list[Asked]:
    """The prompts as they are sent.

    Args:
        chosen: tasks and examples.
        tokenizer: of the policy.
        room: tokens that a completion may take.
        positions: of the model; None if it has no limit.

    Raises:
        DataError: a prompt cannot be rendered, leaves too little room, or would be read as other ids by the trainer.
    """
    made: dict[str, Asked] = {}
    asked: list[Asked] = []
    for task, example in chosen:
        name = f"{task.name}/{example.id}"
        if name not in made:
            prompt = as_sent(tokenizer, example.prompt, None)
            ids = render_prompt(tokenizer, prompt)
            if positions is not None and len(ids) + room > positions:
                raise DataError(
                    f"prompt {name!r} has {len(ids)} tokens, and with a completion of up to {room} it would reach "
                    f"beyond the {positions} positions of the model. Lower train.max_completion_length."
                )
            if ids != (theirs := _as_the_trainer_reads(tokenizer, prompt)):
                raise DataError(
                    f"prompt {name!r} is read as {list(ids)[:8]}… here and as {list(theirs)[:8]}… by the trainer, so "
                    "the rewards would score another text than was answered. Correct the tokenizer's start token "
                    "or its chat template."
                )
            made[name] = Asked(name, task, example, prompt, ids)
        asked.append(made[name])
    return asked


def _as_the_trainer_reads(tokenizer: PreTrainedTokenizerBase, prompt: object) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer(text=[prompt])["input_ids"][0])  # pyright: ignore
    ids = tokenizer.apply_chat_template(
        [prompt],  # pyright: ignore[reportArgumentType]
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    return tuple(ids["input_ids"][0])  # pyright: ignore
