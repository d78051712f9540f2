"""From a calibration's config to its parts: proxies, their influence, prompts held out, weights to keep."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stillroom import seeds, stats
from stillroom.calibration.anchor import Anchor
from stillroom.calibration.heldout import Heldout
from stillroom.calibration.influence import Influence, score_direction
from stillroom.calibration.judge import Asked
from stillroom.calibration.prompts import Chosen, ask
from stillroom.calibration.scoring import Scorer, reads_same_ids
from stillroom.config import CalibrateConfig
from stillroom.models import loading
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_proxy(
    config: CalibrateConfig,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    device: torch.device,
) -> Scorer:
    """A proxy, frozen; reads the policy's ids where both mean the same by them."""
    revision = config.proxy.revision if path == config.proxy.path else None
    model = loading.load_teacher(path, config.proxy.dtype, revision, device=device)
    own = loading.load_tokenizer(path, revision)
    if loading.num_parameters(model) > loading.num_parameters(policy):
        logger.warning("proxy %s is larger than the teacher; it is to stand in for small students", path)
    if loading.resolve(path) == loading.resolve(config.teacher.path):
        logger.warning("proxy %s is the teacher itself: the log-ratio of the original is 0 everywhere", path)
    return Scorer(model, own, reads_ids=reads_same_ids(own, tokenizer))


_INFLUENCE_PROMPTS = 256
"""Training prompts whose graded samples say where a proxy would learn."""


def influences(config: CalibrateConfig, scorers: Sequence[Scorer], train: Chosen) -> list[Influence]:
    """For each proxy the direction in which its own expected score rises, where the reward asks for it."""
    if config.reward.name != "influence":
        return []
    made: list[Influence] = []
    for scorer in scorers:
        room, positions = config.train.max_completion_length, loading.longest_input(scorer.model)
        asked = ask(train[:_INFLUENCE_PROMPTS], scorer.tokenizer, room=room, positions=positions)
        distinct = list({one.id: one for one in asked}.values())
        seed = seeds.key(config.train.seed, "calibrate/influence")
        own = Heldout(
            distinct, scorer.tokenizer, scorer.end_ids, config.train.num_generations, room, seed
        ).answers(scorer.model)
        made.append(Influence(scorer, score_direction(scorer, own), config.reward.step_size))
    return made


@dataclass(frozen=True)
class HeldoutSets:
    """Held-out prompts: the guard's, and those that figures are stated on."""

    config: CalibrateConfig
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    guard_asked: Sequence[Asked]
    stated_asked: Sequence[Asked]

    @property
    def guard(self) -> Heldout:
        return self._of(self.guard_asked, self.config.guard.num_samples, "guard")

    @property
    def stated(self) -> Heldout:
        return self._of(self.stated_asked, self.config.guard.num_samples, "stated")

    def _of(self, asked: Sequence[Asked], num_samples: int, purpose: str) -> Heldout:
        seed = seeds.key(self.config.train.seed, "calibrate/answers", purpose)
        length = self.config.train.max_completion_length
        return Heldout(asked, self.tokenizer, self.ends, num_samples, length, seed)

    def figures(
        self, calibrated: PreTrainedModel, anchor: Anchor
    ) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
        """Utility before and after on the stated prompts, their paired difference, KL, lengths; and the completions."""
        held = self.stated
        after = held.answers(calibrated)
        with anchor.switched_to_original():
            before = held.answers(anchor.original)
        records = [
            {"purpose": when, "example_id": r.example_id, "text": r.text, "ended": r.ended, "score": r.score}
            for when, rows in (("before", before), ("after", after))
            for r in rows
        ]
        kl, entropy = anchor.measure(after, seed=held.seed)
        was, now = held.utilities(before), held.utilities(after)
        figures = {
            "utility/before": stats.mean_interval(was, unit="utility"),
            "utility/after": stats.mean_interval(now, unit="utility"),
            "utility/difference": stats.paired_difference(now, was, unit="utility"),
            "kl_nats_per_token": kl,
            "entropy_nats_per_token": entropy,
            "length_tokens/before": stats.mean_interval(held.lengths(before), unit="tokens"),
            "length_tokens/after": stats.mean_interval(held.lengths(after), unit="tokens"),
        }
        return figures, records


def trained_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trained_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        parameters[name].copy_(value)


def prompts_digest(*sets: Sequence[Asked]) -> str:
    text = "\n".join(f"{one.id} {one.prompt_ids}" for asked in sets for one in asked)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digest(models: Sequence[torch.nn.Module]) -> str:
    """A hash of weights: another model under the same name would be another run."""
    made = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            made.update(name.encode())
            made.update(tensor.detach().float().cpu().numpy().tobytes())
    return made.hexdigest()[:16]
