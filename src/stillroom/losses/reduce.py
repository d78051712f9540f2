"""From one number a position to the scalar that is minimised: the only place that weighs, sums or divides.

Weights are computed from the completion mask *before* the loss, with a denominator counted over the whole
optimizer step: every micro-batch, every process. A step's loss is then a plain sum over positions, so it
does not depend on how the step was cut into pieces.

    denominator = sum of count_units(mask) over the step
    weights = token_weights(mask, denominator)               # [n]
    scalar = plain_loss(loss, logits[mask], signal, weights)  # add these up over the step

The answers for bad positions live here too, once for every loss:

- *No supervised position*: the scalar is 0, connected to the student, with zero gradient, and a warning.
- *NaN, or an infinite loss*: ``require_finite`` stops the step and says whose logits and which positions.

Shapes: B rows, T token positions, n supervised positions in row-major order, V vocabulary.
"""

import logging

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stillroom.errors import ConfigError, StillroomError, unknown_name
from stillroom.losses.signals import TeacherSignal
from stillroom.losses.spec import Loss

logger = logging.getLogger(__name__)

REDUCTIONS = ("token_mean", "sequence_mean")
"""``token_mean``: every supervised token counts the same. ``sequence_mean``: every row does, as the mean
of its tokens, so a token of a short completion counts more."""


def count_units(mask: Bool[Tensor, "B T"], reduction: str = "token_mean") -> int:
    """What the denominator counts in this piece: supervised tokens, or rows that have any.

    Add this up over all pieces of an optimizer step, then pass the sum to ``token_weights``.
    """
    _check_reduction(reduction)
    return int(mask.sum()) if reduction == "token_mean" else int(mask.any(-1).sum())


def token_weights(
    mask: Bool[Tensor, "B T"], denominator: int | float | Tensor, *, reduction: str = "token_mean"
) -> Float[Tensor, " n"]:
    """The weight of each supervised position, in the order of ``logits[mask]``.

    token_mean: 1 / denominator. sequence_mean: 1 / (denominator · tokens of the row).

    Args:
        mask: ``[B, T]``, True where a token is trained on.
        denominator: Sum of ``count_units`` over the whole step, not over this piece.
        reduction: The one that the denominator was counted with.

    Raises:
        ConfigError: The denominator is not above 0 though something is supervised, or the name is unknown.
    """
    _check_reduction(reduction)
    if mask.any() and not float(denominator) > 0:
        raise ConfigError(
            f"denominator={float(denominator):g} for {int(mask.sum())} supervised positions: their weights "
            "would be infinite or negative. Add up count_units over all pieces of the step and pass the sum."
        )
    if reduction == "token_mean":
        tokens_of_row = torch.ones_like(mask, dtype=torch.float32)
    else:
        tokens_of_row = mask.sum(-1, keepdim=True).expand_as(mask).float()
    return 1 / (tokens_of_row[mask] * denominator)


def plain_loss(
    loss: Loss,
    student_logits: Float[Tensor, "n V"],
    signal: TeacherSignal,
    weights: Float[Tensor, " n"],
) -> Float[Tensor, ""]:
    """Σ weight · loss as a scalar for autograd: the plain driver, which holds all n × V logits.

    Positions of weight 0 are left out before anything is computed, so that whatever stands there, NaN
    included, changes neither value nor gradient. With no position left the scalar is 0 with zero gradient.

    Args:
        loss: From ``make_loss``.
        student_logits: ``[n, V]`` at the supervised positions.
        signal: The teacher at the same positions.
        weights: ``[n]``, from ``token_weights``.

    Raises:
        StillroomError: A position of nonzero weight has a NaN or infinite loss; its number counts those.
    """
    used = weights != 0
    if not bool(used.all()):
        student_logits, signal, weights = student_logits[used], signal.select(used), weights[used]
    if len(weights) == 0:
        logger.warning("no supervised position in this batch: its loss is 0 and it moves no weight")
    values = loss.value(student_logits, signal)
    require_finite(values, student_logits, signal, name=loss.name)
    return (values * weights.to(values.device)).sum()


def require_finite(
    values: Float[Tensor, " n"],
    student_logits: Float[Tensor, "n V"],
    signal: TeacherSignal,
    *,
    name: str = "loss",
) -> None:
    """Stop before a NaN or an infinity reaches the weights, and say where it came from.

    Args:
        values: ``[n]``, the loss at each position. Only if one of them is not finite are the logits read.
        student_logits: ``[n, V]`` that the values were computed from.
        signal: Likewise.
        name: Of the loss, for the message.

    Raises:
        StillroomError: The teacher or the student holds no distribution at some position, or the loss is
            infinite between two that do.
    """
    bad = ~torch.isfinite(values.detach())
    if not bool(bad.any()):
        return
    if signal.logits is not None:
        teacher_broken = _broken(signal.logits)
    else:
        assert signal.logprobs is not None
        assert signal.tail_logprob is not None
        teacher_broken = torch.cat([signal.logprobs, signal.tail_logprob[:, None]], dim=-1).isnan().any(-1)
    student_broken = _broken(student_logits.detach())
    for who, broken, advice in (
        ("teacher", teacher_broken, "Score these prompts with the teacher alone, in float32."),
        ("student", student_broken, "Start again from the last checkpoint with a lower learning rate."),
    ):
        if bool(broken.any()):
            raise StillroomError(
                f"the {who}'s scores are NaN or infinite at {_places(broken)}, so {name} is not a number "
                f"and one optimizer step would spoil every weight. {advice}"
            )
    raise StillroomError(
        f"{name} is infinite at {_places(bad)}: one model gives probability zero to what the other allows. "
        "Restrict both to their shared ids, or use a bounded loss: jsd, skewed_forward_kl, skewed_reverse_kl."
    )


def _broken(logits: Tensor) -> Tensor:
    """[n], True where logits hold no distribution: NaN, plus infinity, or nothing above minus infinity."""
    highest = logits.amax(-1)  # NaN spreads through the maximum
    return ~torch.isfinite(highest)


def _places(rows: Tensor) -> str:
    """At most five row numbers, in words."""
    found = rows.nonzero()[:, 0].tolist()
    shown = ", ".join(str(row) for row in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"supervised position{'s' if len(found) > 1 else ''} {shown}{more} of {len(rows)}"


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ConfigError(unknown_name("reduction", reduction, REDUCTIONS))
