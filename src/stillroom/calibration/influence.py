"""Does training on a text make the proxy better at the task? The reward that asks this directly.

The direction v is where the proxy's own learning would go: the gradient of its expected score (from samples
of its own that a task has graded), or of the likelihood of gold texts. A small step of training on text y
moves the weights along the gradient of log p(y), so its first-order effect on the score is the inner product
of the two gradients, v·∇log p(y). That product is a directional derivative, and two forward passes with the
weights moved a little along ±v measure it for a whole batch of texts, without a gradient per text:

    reward(y) = [log p_{φ+εv}(y) − log p_{φ−εv}(y)] / (2 ε |y|),   ε = step_size·‖φ‖,  ‖v‖ = 1

in nats per token and unit of length in weight space; |y| counts the proxy's own tokens, the end token too.

References: influence as an inner product of gradients, arXiv:2002.08484; measured on a proxy by finite
differences, arXiv:2504.13146.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.calibration.rollouts import Written
from stillroom.calibration.scoring import Pair, Scorer, in_batches, score_batch
from stillroom.data.rendering import render_example
from stillroom.errors import ConfigError, DataError
from stillroom.models.modes import evaluation_mode
from stillroom.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Direction = dict[str, Tensor]
"""Parameter name → its part of v."""


def score_direction(scorer: Scorer, rows: Sequence[Written]) -> Direction:
    """Where the proxy's expected score rises fastest, by REINFORCE with a leave-one-out baseline.

    v ∝ Σ_i (s_i − mean score of the prompt's other samples) · ∇log p(y_i | x_i), an unbiased estimate of the
    gradient of E[s] up to its length.

    Args:
        scorer: of the proxy.
        rows: the proxy's own samples (their ids are the proxy's), at least two for each example id; a text that
            could not be parsed has score 0. Cut-off samples count, with the tokens they have.

    Returns:
        A direction of length 1 over the trainable parameters, or over all of them if the proxy is frozen.

    Raises:
        DataError: an example id with a single sample.
        ConfigError: the gradient is zero (as when all samples of each prompt have the same score) or not finite.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.example_id].append(row.score or 0.0)
    for example_id, scores in groups.items():
        if len(scores) < 2:
            raise DataError(
                f"example {example_id!r} has a single sample, so its score can be compared with nothing. Draw two or "
                "more completions of each prompt from the proxy."
            )
    own = Scorer(scorer.model, scorer.tokenizer, batch_size=scorer.batch_size, reads_ids=True)
    pairs, weights = [], []
    for row in rows:
        scores = groups[row.example_id]
        score = row.score or 0.0
        pairs.append(own.read(row))
        weights.append(score - (math.fsum(scores) - score) / (len(scores) - 1))
    return _gradient(scorer, pairs, weights)


def gold_direction(scorer: Scorer, examples: Sequence[Example]) -> Direction:
    """Where gold texts become likelier fastest: v ∝ ∇ Σ log p(completion | prompt), as supervised training sees it.

    Args:
        scorer: of the proxy.
        examples: with completions, in whatever mixture of styles the gradient shall speak for.

    Returns:
        A direction of length 1 over the trainable parameters, or over all of them if the proxy is frozen.

    Raises:
        DataError: an example without a completion, and all of `stillroom.data.rendering.render_example`.
        ConfigError: the gradient is zero (as without examples) or not finite.
    """
    pairs = []
    for example in examples:
        if example.completion is None:
            raise DataError(
                f"example {example.id!r} has no gold text, so its likelihood has no gradient. Give it a completion, "
                "or use score_direction with samples of the proxy."
            )
        rendered = render_example(scorer.tokenizer, example.prompt, example.completion, scorer.end_ids)
        pairs.append((rendered.prompt_ids, rendered.completion_ids))
    return _gradient(scorer, pairs, [1.0] * len(pairs))


def unit(direction: Mapping[str, Tensor]) -> Direction:
    """The direction at length 1: v / ‖v‖, the norm taken over all its parts together.

    Raises:
        ConfigError: the length is zero, infinite or NaN.
    """
    norm = _norm(direction.values())
    if not (math.isfinite(norm) and norm > 0):
        raise ConfigError(
            f"the direction in which the proxy would learn has length {norm}, so no text can be more or less useful "
            "to it. If it is 0, all samples of each prompt have the same score: give the proxy prompts that it "
            "solves sometimes, or gold texts. If it is not finite, check the proxy's weights."
        )
    return {name: part / norm for name, part in direction.items()}


class Influence:
    """The reward of texts by how far training on them would move the proxy along a direction.

    Args:
        scorer: of the proxy; its weights are moved in place while `values` runs and put back bit for bit.
        direction: by parameter name, of any length; from `score_direction` or `gold_direction`.
        step_size: ε as a share of the norm of the weights that are moved. Too small a step drowns in the rounding
            of float32, too large a one leaves the straight line: on the pocket proxies the error is about 0.1 % of
            the spread between texts at 3e-5, and 30 to 80 % at 0.01.

    Raises:
        ConfigError: a zero or non-finite direction, one that does not fit the proxy, weights of less than 32 bits,
            or a step size that is not above 0.
    """

    def __init__(self, scorer: Scorer, direction: Mapping[str, Tensor], step_size: float = 3e-5) -> None:
        self.scorer = scorer
        self.direction = unit(direction)
        parameters = dict(scorer.model.named_parameters())
        for name, part in self.direction.items():
            weights = parameters.get(name)
            if weights is None or weights.shape != part.shape:
                held = "no such parameter" if weights is None else f"one of shape {tuple(weights.shape)}"
                raise ConfigError(
                    f"the direction moves {name!r} by a tensor of shape {tuple(part.shape)}, and the proxy has {held}, "
                    "so it is the direction of another model. Make it with this proxy."
                )
            if weights.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"the proxy's {name!r} is {weights.dtype}, in which a small step is lost to rounding, and with it "
                    "the reward. Load the proxy in float32 (proxy.dtype: float32)."
                )
        self.step = step_size * _norm(parameters[name] for name in self.direction)
        if not (math.isfinite(self.step) and self.step > 0):
            raise ConfigError(
                f"step_size={step_size} moves the proxy's weights by {self.step}, which measures nothing. Give a share "
                "of their norm above 0, such as 3e-5."
            )

    def values(self, rows: Sequence[Written]) -> list[float | None]:
        """The directional derivative of log p(text) along v, in nats per token; None for cut-off completions.

        Raises:
            DataError: as in `Scorer.score`.
            StillroomError: the proxy gives NaN.
        """
        ended = [row for row in rows if row.ended]
        with moved(self.scorer.model, self.direction, self.step):
            above = self.scorer.score(ended)
        with moved(self.scorer.model, self.direction, -self.step):
            below = self.scorer.score(ended)
        slopes = iter(
            float((a.logprobs.double() - b.logprobs.double()).mean()) / (2 * self.step)
            for a, b in zip(above, below, strict=True)
        )
        return [next(slopes) if row.ended else None for row in rows]


@contextmanager
def moved(model: PreTrainedModel, direction: Mapping[str, Tensor], step: float) -> Iterator[None]:
    """The model with weights φ + step·v for the block; afterwards they are what they were, bit for bit.

    Subtracting the step again would leave rounding behind, so copies are kept and put back.
    """
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in direction}
    try:
        with torch.no_grad():
            for name, part in direction.items():
                parameters[name].add_(part.to(parameters[name]), alpha=step)
        yield
    finally:
        with torch.no_grad():
            for name, weights in kept.items():
                parameters[name].copy_(weights)


def _gradient(scorer: Scorer, pairs: Sequence[Pair], weights: Sequence[float]) -> Direction:
    """Σ_i weight_i · ∇log p(completion_i), at length 1."""
    model = scorer.model
    used = [i for i, weight in enumerate(weights) if weight]
    pairs, weights = [pairs[i] for i in used], [weights[i] for i in used]
    with evaluation_mode(model), _differentiable(model) as parameters, torch.enable_grad():
        total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for chosen in in_batches(pairs, scorer.batch_size):
            scores = score_batch(model, [pairs[i] for i in chosen])
            value = torch.stack(
                [weights[i] * logprobs.sum() for i, (logprobs, _) in zip(chosen, scores, strict=True)]
            ).sum()
            parts = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, part in zip(total, parts, strict=True):
                if part is not None:
                    total[name] += part
    return unit(total)


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[dict[str, torch.nn.Parameter]]:
    """The parameters to differentiate by: the trainable ones, or of a frozen model all, frozen again afterwards."""
    named = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if trainable:
        yield trainable
        return
    floats = {name: parameter for name, parameter in named.items() if parameter.is_floating_point()}
    try:
        for parameter in floats.values():
            parameter.requires_grad_(True)
        yield floats
    finally:
        for parameter in floats.values():
            parameter.requires_grad_(False)


def _norm(parts: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(part.detach().double().square().sum()) for part in parts))
