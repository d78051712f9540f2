"""Batched decoding in process, with noise that is keyed instead of drawn.

The loop is our own, on the model's own forward and key-value cache, because `generate` merges the
model's stored generation defaults into the request in silence (field report 62) and draws from one
global random state, so that a row's sample would depend on its batch and on what was sampled before.
Here temperature is the only knob, every completion is a function of (seed, example, generation), and
the log-probabilities kept are those of the distribution that was sampled.

Legend: B rows, P prompt width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stillroom import seeds
from stillroom.data.batches import left_pad
from stillroom.data.rendering import end_ids as declared_end_ids
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.models.loading import longest_input
from stillroom.models.modes import evaluation_mode
from stillroom.progress import tracked
from stillroom.types import Prompt, Rollout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEAR_TIE = 1e-4
"""Gap in nats below which the best two perturbed scores count as a tie that rounding could flip."""


@dataclass
class SamplerStats:
    """Counts over everything a sampler has written; `near_ties` bounds how far the claim "a row's
    sample does not depend on its batch" can fail, since batch shape moves logits by about 1e-6.
    """

    tokens: int = 0
    near_ties: int = 0


class HFSampler:
    """Writes completions with a Hugging Face causal language model.

    Args:
        model: any causal LM with a key-value cache. Its training mode, gradient checkpointing and cache
            flag are as before when `sample` returns (field report 63).
        tokenizer: used for the pad id, the end ids and the text shown.
        end_ids: ids that end a completion; default: every end id that model and tokenizer declare.
        batch_size: rows decoded together. Does not change what is sampled, only the speed.
        vocab_size: ids below this may be sampled; default all that the tokenizer has. Columns that are no token,
            padded ones beyond it or unused ones between, are never sampled (field report 2).
        name: written into `Rollout.policy`.
        progress: label of a progress bar with the time left, shown on a terminal only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int] | None = None,
        batch_size: int = 64,
        vocab_size: int | None = None,
        name: str = "",
        progress: str | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids) if end_ids is not None else declared_end_ids(model, tokenizer)
        self.batch_size = batch_size
        ids = set(tokenizer.get_vocab().values())
        self.vocab_size = vocab_size or max(ids) + 1
        # Some tokenizers leave ids unused; a model has columns for them all the same.
        self.unused_ids = sorted(set(range(self.vocab_size)) - ids)
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        self.progress = progress
        self.stats = SamplerStats()
        if not self.end_ids:
            raise ConfigError(
                f"neither the model nor the tokenizer of {self.name!r} declares an end token, so no completion "
                "could ever end. Set `eos_token` on the tokenizer or `eos_token_id` in the generation config."
            )

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int = 1,
        max_completion_length: int,
        temperature: float,
        seed: int,
    ) -> list[Rollout]:
        """Draw completions, prompt-major: all generations of the first prompt, then of the second …

        Each token is argmax(logits / temperature + Gumbel noise), an exact sample; the noise is keyed by
        (seed, example id, generation, position).

        Args:
            prompts: ids as this model reads them, start token included.
            num_generations: completions per prompt.
            max_completion_length: tokens; a completion that has not ended by then has `stop_reason="length"`.
            temperature: divides the logits; 0 takes the largest logit (greedy), and then the log-probabilities
                are those of temperature 1.
            seed: of this call; use a different one for every optimizer step.

        Raises:
            ConfigError: a setting is out of range, or a prompt is empty.
            DataError: a prompt leaves too few of the model's positions for a completion.
            StillroomError: the model's logits are NaN.
        """
        if temperature < 0 or max_completion_length < 1 or num_generations < 1:
            raise ConfigError(
                f"cannot sample with temperature={temperature}, max_completion_length={max_completion_length}, "
                f"num_generations={num_generations}: temperature must be >= 0 and both counts >= 1."
            )
        empty = [prompt.example_id for prompt in prompts if not prompt.ids]
        if empty:
            raise ConfigError(
                f"prompt {empty[0]!r} has no ids, so there is nothing to predict the first token from. "
                "Give the tokenizer a start token or the row a prompt."
            )
        limit = longest_input(self.model)
        longest = max(prompts, key=lambda prompt: len(prompt.ids), default=None)
        if limit and longest and len(longest.ids) + max_completion_length > limit:
            raise DataError(
                f"prompt {longest.example_id!r} has {len(longest.ids)} tokens, and with "
                f"max_completion_length={max_completion_length} a completion may reach beyond the {limit} positions "
                f"of {self.name!r}, where it reads nothing it was trained on. Lower the limit or shorten the prompt."
            )
        jobs = [(prompt, g) for prompt in prompts for g in range(num_generations)]
        # Rows of like length decode together; the order does not change any row's sample.
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i][0].ids))
        rollouts: list[Rollout | None] = [None] * len(jobs)
        with evaluation_mode(self.model), torch.no_grad():
            starts = range(0, len(order), self.batch_size)
            for start in tracked(starts, self.progress):
                chosen = order[start : start + self.batch_size]
                batch = [jobs[i] for i in chosen]
                for i, rollout in zip(
                    chosen, self._decode(batch, max_completion_length, temperature, seed), strict=True
                ):
                    rollouts[i] = rollout
        return [rollout for rollout in rollouts if rollout is not None]

    def _decode(
        self, jobs: list[tuple[Prompt, int]], limit: int, temperature: float, seed: int
    ) -> Iterator[Rollout]:
        device = self.model.device
        prompts = [prompt for prompt, _ in jobs]
        input_ids, attention_mask = (t.to(device) for t in left_pad([p.ids for p in prompts], pad_id=0))
        row_keys = torch.tensor(
            [seeds.key(seed, "sample", prompt.example_id, g) for prompt, g in jobs], device=device
        )
        end_ids = torch.tensor(sorted(self.end_ids), device=device)
        tokens: list[list[int]] = [[] for _ in jobs]
        logprobs: list[list[float]] = [[] for _ in jobs]
        alive = torch.arange(len(jobs), device=device)
        ended = [False] * len(jobs)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        step_ids, cache = input_ids, None
        for position in range(limit):
            out = self.model(
                input_ids=step_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.cache
            chosen, chosen_logprobs = self._choose(out.logits[:, -1], row_keys[alive], position, temperature)
            for row, token, logprob in zip(
                alive.tolist(), chosen.tolist(), chosen_logprobs.tolist(), strict=True
            ):
                tokens[row].append(token)
                logprobs[row].append(logprob)
            done = torch.isin(chosen, end_ids)
            for row in alive[done].tolist():
                ended[row] = True
            keep = (~done).nonzero().squeeze(1)
            if len(keep) == 0:
                break
            if len(keep) < len(alive):  # finished rows leave the batch, so the rest gets cheaper
                alive, chosen, attention_mask = alive[keep], chosen[keep], attention_mask[keep]
                position_ids = position_ids[keep]
                cache.batch_select_indices(keep)
            step_ids = chosen[:, None]
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(alive), 1)], dim=1)
            position_ids = position_ids[:, -1:] + 1
        for row, (prompt, _) in enumerate(jobs):
            yield Rollout(
                example_id=prompt.example_id,
                prompt_ids=prompt.ids,
                completion_ids=tuple(tokens[row]),
                logprobs=tuple(logprobs[row]),
                stop_reason="end" if ended[row] else "length",
                policy=self.name,
                text=str(self.tokenizer.decode(tokens[row], skip_special_tokens=True)),
            )

    def _choose(
        self, logits_BV: Tensor, row_keys: Tensor, position: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Ids `[B]` and their log-probabilities `[B]` under the distribution sampled."""
        logits_BV = logits_BV[:, : self.vocab_size].float()
        logits_BV[:, self.unused_ids] = -torch.inf
        if torch.isnan(logits_BV).any():
            raise StillroomError(
                f"{self.name!r} gives NaN logits while sampling (token {position} of the completion), so its "
                "weights or its arithmetic are broken. Check the checkpoint, or lower the learning rate."
            )
        scores_BV = logits_BV / (temperature or 1.0)
        noisy_BV = scores_BV
        if temperature > 0:
            noisy_BV = scores_BV + seeds.gumbel(row_keys, position, scores_BV.shape[1])
        best = noisy_BV.topk(2, dim=1)
        self.stats.tokens += len(best.values)
        self.stats.near_ties += int((best.values[:, 0] - best.values[:, 1] < NEAR_TIE).sum())
        chosen = best.indices[:, 0]
        return chosen, scores_BV.log_softmax(1).gather(1, chosen[:, None]).squeeze(1)
