"""How far a policy has moved from the original: the exact KL on the policy's own completions.

The training loop's estimate (k3, one number a sampled token) is free and noisy; this one sums over the whole
vocabulary at every position, and is what a budget or a dose is stated in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from stillroom import stats
from stillroom.calibration.rollouts import Written
from stillroom.errors import StillroomError
from stillroom.models.modes import evaluation_mode
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Anchor:
    """The original teacher: another model, or the policy with its adapter switched off.

    Args:
        policy: the model that is trained.
        original: frozen; None means the policy without its adapter.
    """

    def __init__(self, policy: PreTrainedModel, original: PreTrainedModel | None = None) -> None:
        self.policy = policy
        self.original = original if original is not None else policy
        if original is None and not hasattr(policy, "disable_adapter"):
            raise StillroomError("a policy without adapter needs its original beside it as the anchor.")
        self._is_adapter = original is None

    def switched_to_original(self) -> AbstractContextManager[object]:
        """A block in which `original` answers as the original."""
        return self.policy.disable_adapter() if self._is_adapter else nullcontext()  # pyright: ignore

    @torch.no_grad()
    def measure(
        self, rows: Sequence[Written], *, batch_size: int = 64, seed: int = 0
    ) -> tuple[Estimate, Estimate]:
        """KL(policy‖original) on the policy's completions, and the policy's entropy, in nats per token.

        Σ over rows and positions of Σ_v π(v)·(log π(v) − log π₀(v)), divided by the number of positions (end
        tokens are positions; so are all of a cut-off completion). The bootstrap is over rows.

        Raises:
            StillroomError: no row has a token, or one of the models gives NaN.
        """
        kl, entropy, counts = [], [], []
        rows = [row for row in rows if row.ids or row.ended]
        if not rows:
            raise StillroomError("no completion holds a token, so there is nothing to measure a KL on.")
        with evaluation_mode(self.policy), evaluation_mode(self.original):
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                ids, mask = _padded(batch, self.policy.device)
                now = self.policy(input_ids=ids).logits.float().log_softmax(-1)
                with self.switched_to_original():
                    then = self.original(input_ids=ids).logits.float().log_softmax(-1)
                p = now.exp()
                # A token that neither model can give has p = 0 and −∞ − −∞ behind it.
                kl.append((torch.where(p > 0, p * (now - then), 0).sum(-1) * mask).sum(1))
                entropy.append((torch.where(p > 0, -p * now, 0).sum(-1) * mask).sum(1))
                counts.append(mask.sum(1))
        totals, entropies, n = (torch.cat(x).double().cpu() for x in (kl, entropy, counts))
        if not (torch.isfinite(totals).all() and torch.isfinite(entropies).all()):
            raise StillroomError(
                "the KL between policy and original is not finite: one of the models gives NaN or infinite logits. "
                "Lower train.learning_rate, or check the model."
            )
        kl_estimate, entropy_estimate = (
            stats.bootstrap_ratio(sums.numpy(), n.numpy(), unit="nats/token", seed=seed)
            for sums in (totals, entropies)
        )
        return kl_estimate, entropy_estimate


def _padded(rows: Sequence[Written], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[B, T]` padded on the right, which causal attention never looks at, and 1 where a logit predicts a
    token of the completion.
    """
    full = [(row.prompt_ids, (*row.ids, *((row.end_id,) if row.end_id is not None else ()))) for row in rows]
    width = max(len(p) + len(c) for p, c in full)
    ids = torch.zeros(len(full), width, dtype=torch.long)
    mask = torch.zeros(len(full), width)
    for i, (prompt, completion) in enumerate(full):
        ids[i, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        mask[i, len(prompt) - 1 : len(prompt) - 1 + len(completion)] = 1
    return ids.to(device), mask.to(device)
