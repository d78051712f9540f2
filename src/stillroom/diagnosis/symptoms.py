"""What ails a student that has been taught: three symptoms, each as numbers with intervals over prompts.

- *Overconfident hallucination* (``confidence/…``): is it as often right as it is sure? The confidence of a completion
  is the geometric mean probability of its tokens, the exponential of their mean log-probability.
- *Collapse of self-correction* (``recovery/…``): given the start of an answer with a wrong step in it, does it still
  come to the right end? And does a second, sampled pass put right what the greedy one had wrong, or spoil it?
- *Local decay of decoding* (``decoding/…``): loops, cut-off completions, repetition, and entropy along the completion.

None of them has a verdict here: a figure means something beside the undistilled student's. The measures are ours;
of the paper (arXiv:2604.18963) only the symptoms' names are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stillroom import seeds, stats
from stillroom.diagnosis.scores import score, write
from stillroom.diagnosis.symptom_figures import confidence_figures, decoding_figures, transition_figures
from stillroom.errors import ConfigError, DataError
from stillroom.pocket.chains import STATES, gold
from stillroom.types import Estimate, Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def measure_symptoms(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    *,
    max_completion_length: int,
    num_samples: int = 4,
    corrupt: Callable[[Example], str] | None = None,
    intact: Callable[[Example], str] | None = None,
    use_chat_template: bool | None = None,
    batch_size: int = 64,
    seed: int,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """All symptoms of one model on one task.

    ``num_samples`` completions at temperature 1 and a greedy one are written for every example. Right means full
    score; partial credit and text that cannot be parsed are wrong.

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        task: grades the completions.
        examples: at least two, with unique ids.
        max_completion_length: tokens, a given start of the answer not among them.
        num_samples: at least 1.
        corrupt: the start of an answer with a wrong step in it, such as `corrupt_chain`; None leaves the rate of
            recovery out.
        intact: the same start without the fault, such as `intact_chain`: the control.
        use_chat_template: as in `stillroom.evaluation.evaluate.evaluate_task`.
        batch_size: changes the speed only.
        seed: keys the samples and the bootstraps.
        level: coverage of the intervals.

    Returns:
        ``confidence/…`` as in `confidence_figures`, of the samples; ``recovery/…`` as in `transition_figures`, from
        the greedy pass to the samples, with ``recovery/after_wrong_step`` and ``recovery/after_right_step``, the share
        of right ends (greedy, Wilson over examples) behind ``corrupt`` and ``intact``; ``decoding/…`` as in
        `decoding_figures`, of the samples. What the completions at hand cannot say is left out.

    Raises:
        ConfigError, DataError: as `stillroom.diagnosis.scores.write` and ``corrupt``; no samples.
        StillroomError: the model gives NaN.
    """
    if num_samples < 1:
        raise ConfigError(
            f"num_samples = {num_samples}: the symptoms are read from samples. Ask for 1 or more."
        )
    ask = partial(
        write,
        model,
        tokenizer,
        task,
        examples,
        max_completion_length=max_completion_length,
        use_chat_template=use_chat_template,
        batch_size=batch_size,
        seed=seed,
    )
    # What cannot be made is found out before anything is sampled.
    starts = {
        name: {example.id: make(example) for example in examples}
        for name, make in (("wrong", corrupt), ("right", intact))
        if make is not None
    }
    samples = ask(num_samples=num_samples, temperature=1.0)
    first = ask(num_samples=1, temperature=0.0)
    figures = {}
    for name, start in starts.items():
        ends = ask(num_samples=1, temperature=0.0, prefix=lambda example, start=start: start[example.id])
        figures[f"recovery/after_{name}_step"] = stats.wilson(
            sum(end.is_right for end in ends), len(ends), level, unit="share of right ends"
        )
    second = [[c.is_right for c in samples[i : i + num_samples]] for i in range(0, len(samples), num_samples)]
    scores = score(
        model,
        tokenizer,
        samples,
        writer_tokenizer=tokenizer,
        use_chat_template=use_chat_template,
        batch_size=batch_size,
    )
    own = [tokens for tokens in scores if tokens is not None]
    assert len(own) == len(samples)  # a model can always read what it wrote
    prompt_ids = [c.example.id for c in samples]
    over_prompts = {"seed": seed, "level": level}
    parts = {
        "confidence": confidence_figures(
            prompt_ids,
            [c.is_right for c in samples],
            [math.exp(tokens.per_token) for tokens in own],
            **over_prompts,
        ),
        "recovery": transition_figures([c.is_right for c in first], second, **over_prompts),
        "decoding": decoding_figures(
            prompt_ids,
            [c.ids for c in samples],
            [c.is_truncated for c in samples],
            [tokens.entropies.tolist() for tokens in own],
            **over_prompts,
        ),
    }
    return figures | {f"{part}/{name}": value for part, of in parts.items() for name, value in of.items()}


def corrupt_chain(example: Example, *, seed: int = 0) -> str:
    """The first steps of a worked chain, of which the last ends at a wrong digit: ``7a4;4c9`` becomes ``7a4;4c2``.

    At least one step is written and, but for chains of a single door, at least one is left. Doors are
    permutations, so whoever walks on from the wrong digit ends wrong; only one who goes back to the prompt
    can end right.

    Args:
        example: of ``pocket/chains``.
        seed: keys how many steps are written and the wrong digit.

    Raises:
        DataError: the example is no chain.
    """
    before = intact_chain(example, seed=seed)
    shift = 1 + seeds.key(seed, "diagnosis/corrupt/digit", example.id) % (len(STATES) - 1)
    return before[:-1] + STATES[(STATES.index(before[-1]) + shift) % len(STATES)]


def intact_chain(example: Example, *, seed: int = 0) -> str:
    """The same first steps as `corrupt_chain` with the same seed, all of them right.

    Raises:
        DataError: the example is no chain.
    """
    if not {"start", "path"} <= example.meta.keys():
        raise DataError(
            f"example {example.id!r} has no start and path, so it is no chain of pocket/chains and nothing is known of "
            "its steps. Give a function that writes the start of an answer for this task."
        )
    path: str = example.meta["path"]
    steps = gold(example.meta["start"], path, len(path)).split("#")[0].split(";")
    written = 1 + seeds.key(seed, "diagnosis/corrupt/step", example.id) % max(len(steps) - 1, 1)
    return ";".join(steps[:written])
