"""What a frozen model makes of the texts that the policy wrote, token by token.

The policy, and a proxy with the policy's tokenizer, score the very ids that were sampled. A proxy of another
family is asked its own way: its template around the prompt, its tokens for the text, its end token behind it.
Whatever it reads is decoded again and must be the policy's text byte for byte, since the ratio of two
probabilities says nothing if they are the probabilities of two texts.

Units: nats. Every column of a model's logits counts, as in the loop that trains the policy. Rows are padded
on the right, with an attention mask and explicit positions, so a score does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.calibration.rollouts import Written, text_of
from stillroom.data.rendering import render_example, render_prompt
from stillroom.data.tokens import Ids, closed, encode_continuation, end_ids
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.loading import longest_input
from stillroom.models.modes import evaluation_mode
from stillroom.models.vocab import fingerprint, template_hash
from stillroom.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Pair = tuple[Ids, Ids]
"""Ids of a prompt, which are read, and ids of a completion, which are scored."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One completion under one model: t tokens of that model, its own end token last if the rollout ended."""

    logprobs: Tensor
    """float32 [t] (float64 of a float64 model), on the CPU: natural log of each token's probability."""
    ranks: Tensor
    """int64 [t]: 1 + the number of tokens with a strictly larger logit."""
    num_bytes: int
    """UTF-8 bytes of the text, without the end token."""


def reads_same_ids(tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model with this tokenizer may score the policy's ids as they are: the same ids for every text,
    and the same template around messages.
    """
    return fingerprint(tokenizer) == fingerprint(policy_tokenizer) and template_hash(
        tokenizer
    ) == template_hash(policy_tokenizer)


class Scorer:
    """Scores completions with one model, which is left in the mode it is in.

    Args:
        model: a causal LM; of one with an adapter, whatever is active is what scores.
        tokenizer: of the model.
        batch_size: completions read together; changes the speed, not the scores.
        reads_ids: True scores the rows' own ids behind their own prompt ids (the policy, and a proxy of which
            `reads_same_ids` is true); False renders prompt and text anew with ``tokenizer``.

    Raises:
        ConfigError: batch_size below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 64,
        reads_ids: bool,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} would score nothing. Give 1 or more.")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.reads_ids = reads_ids
        self.end_ids = end_ids(model, tokenizer)
        self.name = name_of(model)
        self._closing: dict[bool, int] = {}

    @torch.no_grad()
    def score(self, rows: Sequence[Written]) -> list[TokenScores]:
        """Natural log of p(token | prompt, earlier tokens), and rank, of every token of every completion.

        A completion that ended at once has one token, the end; one that is empty and did not end has none.

        Raises:
            DataError: the tokenizer cannot hold a row's text, there is no chat template for messages, a prompt
                without ids, or more tokens than the model has positions; all of it before the first forward.
            StillroomError: the model gives NaN.
        """
        pairs = [self.read(row) for row in rows]
        num_bytes = [len(row.text.encode()) for row in rows]
        scores = [TokenScores(torch.zeros(0), torch.zeros(0, dtype=torch.long), n) for n in num_bytes]
        with evaluation_mode(self.model):
            for chosen in in_batches(pairs, self.batch_size):
                batch = score_batch(self.model, [pairs[i] for i in chosen])
                for i, (logprobs, ranks) in zip(chosen, batch, strict=True):
                    scores[i] = TokenScores(logprobs.cpu(), ranks.cpu(), num_bytes[i])
        return scores

    def readable(self, row: Written) -> bool:
        """Whether the tokenizer holds the row's text byte for byte, so that `score` would accept it."""
        return self.reads_ids or self._misread(row, *self._rendered(row)) is None

    def read(self, row: Written) -> Pair:
        """The ids that the model reads for a row, and those that it scores.

        Raises:
            DataError: as in `score`.
        """
        prompt, ids = (row.prompt_ids, row.ids) if self.reads_ids else self._rendered(row)
        if not self.reads_ids and (other := self._misread(row, prompt, ids)) is not None:
            at = next((i for i, (a, b) in enumerate(zip(row.text, other, strict=False)) if a != b), 0)
            raise DataError(
                f"the tokenizer of {self.name!r} reads {_near(other, at)!r} where the policy wrote "
                f"{_near(row.text, at)!r} (example {row.example_id!r}), so the two models would score different "
                "texts and the ratio of their probabilities would mean nothing. Use a proxy whose tokenizer holds "
                "every character that the policy can write, or leave such completions out."
            )
        if row.end_id is not None:
            ids = (*ids, row.end_id if self.reads_ids else self._end_token(row.prompt))
        if not prompt:
            raise DataError(
                f"the prompt of example {row.example_id!r} has no ids for {self.name!r}, so nothing "
                "stands before the first token and no model can score it. Give it a prompt, or the tokenizer a "
                "start token."
            )
        limit = longest_input(self.model)
        if limit is not None and len(prompt) + len(ids) > limit:
            raise DataError(
                f"example {row.example_id!r} has {len(prompt)} prompt and {len(ids)} completion tokens for "
                f"{self.name!r}, which reads {limit}, so its end would go unscored. Lower "
                "train.max_completion_length, or leave the prompt out."
            )
        return prompt, ids

    def _rendered(self, row: Written) -> Pair:
        return render_prompt(self.tokenizer, row.prompt), encode_continuation(self.tokenizer, row.text)

    def _misread(self, row: Written, prompt: Ids, ids: Ids) -> str | None:
        """What the ids say if it is not the row's text. Decoded behind the prompt: at the start of a text some
        tokenizers swallow a space.
        """
        before, whole = text_of(self.tokenizer, prompt), text_of(self.tokenizer, (*prompt, *ids))
        return None if whole == before + row.text else whole[len(before) :]

    def _end_token(self, prompt: str | Sequence[Message]) -> int:
        """The token that closes an answer in this model's own rendering: for every text the same one, and for
        messages whatever its chat template writes.
        """
        is_text = isinstance(prompt, str)
        if is_text not in self._closing:
            self._closing[is_text] = (
                closed(self.tokenizer, (), self.end_ids)[-1]
                if is_text
                else render_example(self.tokenizer, prompt, "0", self.end_ids).completion_ids[-1]
            )
        return self._closing[is_text]


def in_batches(pairs: Sequence[Pair], batch_size: int) -> Iterator[list[int]]:
    """Places of the pairs that have something to score, cut into batches of like length."""
    order = sorted(
        (i for i, (_, completion) in enumerate(pairs) if completion),
        key=lambda i: len(pairs[i][0]) + len(pairs[i][1]),
    )
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def score_batch(model: PreTrainedModel, pairs: Sequence[Pair]) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities [t], ranks [t]) of every completion's tokens; differentiable where gradients are on.

    Args:
        model: in the mode in which it shall score.
        pairs: with at least one prompt and one completion id each.

    Raises:
        StillroomError: the model gives NaN.
    """
    width = max(len(prompt) + len(completion) for prompt, completion in pairs)
    input_ids = torch.zeros(len(pairs), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(pairs):
        length = len(prompt) + len(completion)
        input_ids[row, :length] = torch.tensor([*prompt, *completion])
        attention_mask[row, :length] = 1
    # The output at t - 1 scores token t; the prompts' own logits are never formed.
    offset = min(len(prompt) for prompt, _ in pairs) - 1
    logits = model(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        position_ids=torch.arange(width, device=model.device).expand(len(pairs), width),
        use_cache=False,
        logits_to_keep=torch.arange(offset, width - 1, device=model.device),
    ).logits
    scores = []
    for row, (prompt, completion) in enumerate(pairs):
        first = len(prompt) - 1 - offset
        own = logits[row, first : first + len(completion)]
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        target = own.gather(1, torch.tensor(completion, device=own.device)[:, None])
        logprobs = target.squeeze(1) - own.logsumexp(1)
        if torch.isnan(logprobs).any():
            raise StillroomError(
                f"{name_of(model)!r} gives NaN logits while scoring completions, so no reward could be computed from "
                "it: its weights or its arithmetic are broken. Check the checkpoint, or lower the learning rate."
            )
        scores.append((logprobs, 1 + (own.detach() > target.detach()).sum(1)))
    return scores


def name_of(model: PreTrainedModel) -> str:
    """What a message calls a model."""
    return str(getattr(model.config, "_name_or_path", "")) or type(model).__name__


def _near(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 40]
