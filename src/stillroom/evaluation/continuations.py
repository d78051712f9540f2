"""What probability a model gives to a continuation behind its context: the engine of `likelihood`.

Rows are padded on the right, with an attention mask and explicit positions, and nothing is read from a
padded place, so a sum does not depend on what shares its batch (field report 80). A sequence longer than the
window is scored in overlapping windows, each token exactly once. Nothing is drawn and every module's mode is
put back, so an evaluation leaves no trace in a training run (field report 84).

Units: nats, summed in float64 over float32 log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.loading import longest_input
from stillroom.models.modes import evaluation_mode
from stillroom.progress import tracked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ids = tuple[int, ...]

WINDOW = 1024
"""Tokens read at once where neither the caller nor the model says less."""


def continuation_nats(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    batch_size: int,
    window: int | None = None,
    progress: str | None = None,
) -> list[float]:
    """``-log p(continuation | context)`` in nats of each (context ids, continuation ids).

    Args:
        model: left in the mode it is in.
        tokenizer: says how many of the logits' columns are tokens; padded columns have no probability.
        pairs: contexts hold at least one id; an empty continuation has 0 nats.
        batch_size: windows scored together.
        window: most tokens read at once, default the model's limit, at most 1024.
        progress: label of a progress bar, shown on a terminal only.

    Raises:
        ConfigError: the window is below 2 or above what the model can read.
        StillroomError: the model gives NaN.
    """
    limit = longest_input(model)
    if window is not None and (window < 2 or (limit and window > limit)):
        raise ConfigError(
            f"window = {window} tokens, but it needs at least 2 and the model reads {limit or 'any number'}. "
            "Choose one between, or leave it out."
        )
    window = window or min(limit or WINDOW, WINDOW)
    jobs = [
        (pair, ids, first)
        for pair, (context, continuation) in enumerate(pairs)
        for ids, first in _windows(context + continuation, len(context), window)
    ]
    jobs.sort(key=lambda job: len(job[1]))  # like lengths share a batch; the sums do not depend on it
    totals = [0.0] * len(pairs)
    with evaluation_mode(model), torch.no_grad():
        for start in tracked(range(0, len(jobs), batch_size), progress):
            batch = jobs[start : start + batch_size]
            sums = _score(model, [(ids, first) for _, ids, first in batch], vocab_size=len(tokenizer))
            for (pair, _, _), nats in zip(batch, sums, strict=True):
                totals[pair] += nats
    return totals


def _windows(ids: Ids, first: int, window: int) -> Iterator[tuple[Ids, int]]:
    """Cuts that score the ids from ``first`` on, each once: (ids to read, position of the first scored)."""
    done = first
    while done < len(ids):
        end = min(len(ids), max(done + window - window // 2, window))
        start = max(0, end - window)
        yield ids[start:end], done - start
        done = end


def _score(model: PreTrainedModel, rows: list[tuple[Ids, int]], vocab_size: int) -> list[float]:
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (ids, _) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    # Logits at position p speak of token p + 1: only positions from the first scored token's predecessor
    # to the last token's are turned into logits, which are the largest thing in memory here.
    offset = min(first for _, first in rows) - 1
    logits = model(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        position_ids=torch.arange(width, device=model.device).expand(len(rows), width),
        use_cache=False,
        logits_to_keep=torch.arange(offset, width - 1, device=model.device),
    ).logits
    sums = []
    for row, (ids, first) in enumerate(rows):
        targets = input_ids[row, first : len(ids)].to(model.device)
        scores = logits[row, first - 1 - offset : len(ids) - 1 - offset, :vocab_size].float()
        nats = scores.logsumexp(-1) - scores.gather(-1, targets[:, None]).squeeze(-1)
        if torch.isnan(nats).any():
            raise StillroomError(
                "the model gives NaN logits, so its likelihoods mean nothing: its weights or its arithmetic are "
                "broken. Check the checkpoint, and try dtype float32."
            )
        sums.append(float(nats.double().sum()))
    return sums


def with_start(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> Ids:
    """The ids, or for none a start token, because the first token needs something that predicts it."""
    if ids:
        return ids
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(start, int):
        raise DataError(
            "the tokenizer names no start and no end token, so nothing can stand before the first token of a text "
            "and that token has no probability. Set tokenizer.bos_token, or give the texts prompts."
        )
    return (start,)
