"""Completions with their grades, and what a model makes of them token by token.

Any model can be asked about any other's completions. Each reads its own rendering of the prompt. A model with
the writer's tokenizer scores the very ids that were written; another one reads the text its own way, with
its own end token behind it if the writer came to an end. Texts that its tokenizer cannot hold unchanged are not
scored at all, since the ratio of two probabilities says nothing if they are the probabilities of two texts.

Units: nats at temperature 1, over the columns that are tokens. Nothing depends on what shares a batch.

Legend: n scored tokens of a batch, t of one completion, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.data.asking import as_sent
from stillroom.data.batches import TrainingRow, collate, supervised_logits
from stillroom.data.rendering import end_ids, render_example, render_prompt
from stillroom.data.tokens import Ids, encode_continuation
from stillroom.errors import DataError, StillroomError
from stillroom.models.loading import longest_input
from stillroom.models.modes import evaluation_mode
from stillroom.models.vocab import fingerprint
from stillroom.sampling.sampler import HFSampler
from stillroom.types import Example, Prompt, Rollout, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no text, such as half a character at the length limit."""


@dataclass(frozen=True, slots=True)
class Graded:
    """One completion and what its task says of it."""

    example: Example
    rollout: Rollout
    is_right: bool
    """Full score. Partial credit and text that could not be parsed are wrong."""
    prefix: str = ""
    """Start of the answer that was given to the writer; graded with the rest, not scored."""

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut off at the length limit."""
        return self.rollout.stop_reason == "length"

    @property
    def ids(self) -> Ids:
        """The writer's ids without the end token."""
        return self.rollout.completion_ids[: None if self.is_truncated else -1]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One completion under one model: t tokens of that model, the end token last if the writer ended."""

    logprobs: Tensor
    """float32 [t] (float64 of a float64 model), on the CPU: natural log of each token's probability."""
    entropies: Tensor
    """The same shape: entropy of the distribution that each token was taken from."""

    @property
    def total(self) -> float:
        """``log p(completion | prompt)``, summed in float64."""
        return self.logprobs.double().sum().item()

    @property
    def per_token(self) -> float:
        """Mean of the log-probabilities; its exponential is the geometric mean probability of a token."""
        return self.total / len(self.logprobs)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    *,
    num_samples: int,
    max_completion_length: int,
    temperature: float,
    prefix: Callable[[Example], str] | None = None,
    use_chat_template: bool | None = None,
    batch_size: int = 64,
    seed: int,
) -> list[Graded]:
    """Completions of every example, graded by its task; all of the first example, then of the second …

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        task: grades ``prefix + completion``.
        examples: at least two, with unique ids.
        num_samples: completions per example.
        max_completion_length: tokens, the prefix not among them.
        temperature: 0 takes the likeliest token each time.
        prefix: makes the start of the answer that the model has to go on from; default none.
        use_chat_template: as in `stillroom.evaluation.evaluate.evaluate_task`.
        batch_size: changes the speed only.
        seed: keys the samples.

    Raises:
        DataError: fewer than two examples, ids that are not unique, a score outside [0, 1], and all of
            `HFSampler.sample`.
        ConfigError: the task has no verifier, or a setting is out of range.
    """
    by_id = {example.id: example for example in examples}
    if len(by_id) < max(2, len(examples)):
        raise DataError(
            f"{len(examples)} example(s) with {len(by_id)} distinct ids: prompts are what an interval is made of, and "
            "an id is all that tells them apart. Give at least two examples, each with its own id."
        )
    task.score(examples[0], "")  # a task without verifier fails here and not after the sampling
    starts = {example.id: prefix(example) if prefix else "" for example in examples}
    rollouts = HFSampler(model, tokenizer, batch_size=batch_size).sample(
        [Prompt(e.id, _asked(tokenizer, e, starts[e.id], use_chat_template)) for e in examples],
        num_generations=num_samples,
        max_completion_length=max_completion_length,
        temperature=temperature,
        seed=seed,
    )
    graded: list[Graded] = []
    for rollout in rollouts:
        example, start = by_id[rollout.example_id], starts[rollout.example_id]
        value = task.score(example, start + rollout.text)
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
            raise DataError(
                f"task {task.name!r} scores {value} for {example.id!r}; a score lies in [0, 1], or is None where the "
                "completion cannot be parsed. Correct the task's score function."
            )
        graded.append(Graded(example, rollout, value == 1, start))
    return graded


@torch.no_grad()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    completions: Sequence[Graded],
    *,
    writer_tokenizer: PreTrainedTokenizerBase,
    use_chat_template: bool | None = None,
    batch_size: int = 64,
) -> list[TokenScores | None]:
    """Log-probability and entropy at every token of every completion, under any model.

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        completions: by any model.
        writer_tokenizer: of the model that wrote them.
        use_chat_template: None lets each model's own tokenizer decide.
        batch_size: completions read together; changes the speed, not the scores.

    Returns:
        One entry for each completion; None where the tokenizer cannot hold its text unchanged, which never
        happens to a model with the writer's tokenizer.

    Raises:
        DataError: more tokens than the model has positions.
        StillroomError: the model gives NaN.
    """
    shares_ids = fingerprint(tokenizer) == fingerprint(writer_tokenizer)
    ends, limit = end_ids(model, tokenizer), longest_input(model)
    rows: dict[int, TrainingRow] = {}
    for i, completion in enumerate(completions):
        prompt = _asked(tokenizer, completion.example, completion.prefix, use_chat_template)
        if shares_ids:
            ids: Ids | None = completion.rollout.completion_ids
        else:
            ids = _reread(tokenizer, prompt, _text(writer_tokenizer, completion))
            if ids is not None and not completion.is_truncated:
                # The token that closes an answer in this model's own rendering.
                sent = as_sent(tokenizer, completion.example.prompt, use_chat_template)
                ids = (*ids, render_example(tokenizer, sent, "0", ends).completion_ids[-1])
        if not ids:
            continue
        if limit is not None and len(prompt) + len(ids) > limit:
            raise DataError(
                f"example {completion.example.id!r} has {len(prompt)} prompt and {len(ids)} completion tokens, and the "
                f"model reads {limit}, so its end would go unscored. Lower max_completion_length."
            )
        rows[i] = TrainingRow(completion.example.id, prompt, ids, (True,) * len(ids))
    scores: list[TokenScores | None] = [None] * len(completions)
    order = sorted(rows, key=lambda i: len(rows[i].prompt_ids) + len(rows[i].completion_ids))
    with evaluation_mode(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            for i, one in zip(chosen, _score_batch(model, tokenizer, [rows[i] for i in chosen]), strict=True):
                scores[i] = one
    return scores


def _score_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[TrainingRow]
) -> list[TokenScores]:
    batch = collate(rows).to(model.device)
    used = sorted(set(tokenizer.get_vocab().values()))
    logits_nV = supervised_logits(model, batch.student, batch.completion_mask)[:, : used[-1] + 1]
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    if len(used) <= used[-1]:  # columns between the tokens that are none
        unused = torch.ones(logits_nV.shape[1], dtype=torch.bool, device=logits_nV.device)
        unused[used] = False
        logits_nV = logits_nV.masked_fill(unused, -torch.inf)
    logprobs_nV = logits_nV.log_softmax(1)
    targets = batch.completion_ids[batch.completion_mask]
    logprobs = logprobs_nV.gather(1, targets[:, None]).squeeze(1).cpu()
    entropies = torch.special.entr(logprobs_nV.exp()).sum(1).cpu()
    if torch.isnan(logprobs).any():
        raise StillroomError(
            f"{getattr(model.config, '_name_or_path', '') or type(model).__name__!r} gives NaN logits while scoring "
            "completions, so its weights or its arithmetic are broken. Check the checkpoint."
        )
    lengths = [len(row.completion_ids) for row in rows]
    return [
        TokenScores(*part) for part in zip(logprobs.split(lengths), entropies.split(lengths), strict=True)
    ]


def _asked(
    tokenizer: PreTrainedTokenizerBase, example: Example, prefix: str, use_chat_template: bool | None
) -> Ids:
    """What a model reads before it goes on."""
    sent = as_sent(tokenizer, example.prompt, use_chat_template)
    return render_prompt(tokenizer, sent) + encode_continuation(tokenizer, prefix)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _text(tokenizer: PreTrainedTokenizerBase, completion: Graded) -> str:
    """What was written. Decoded behind the prompt: at the start of a text some tokenizers swallow a space."""
    prompt = completion.rollout.prompt_ids
    return _decoded(tokenizer, prompt + completion.ids)[len(_decoded(tokenizer, prompt)) :]


def _reread(tokenizer: PreTrainedTokenizerBase, prompt: Ids, text: str) -> Ids | None:
    """The text in this tokenizer's ids; None if those are another text."""
    if _REPLACEMENT in text:
        return None
    ids = encode_continuation(tokenizer, text)
    return ids if _decoded(tokenizer, prompt + ids) == _decoded(tokenizer, prompt) + text else None
