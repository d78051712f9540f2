"""The formulas, each written once as two pure functions of a ``Pair``.

``loss(pair) → [n]`` is the value in nats, differentiable by autograd; ``loss_flow(pair) → [n, M]`` is
∂D/∂log q, how hard the loss pulls at each log-probability of the student, from which ``pairs.pull_back``
makes the exact gradient. p is the teacher and q the student; a sum runs over outcomes.

Conventions, the same for every row:

- 0 · log 0 = 0, in value and gradient (``logspace`` has the arithmetic).
- An infinite divergence (KL where the reference gives probability zero) is returned as +inf. Its gradient is
  that of the finite terms, never NaN; ``reduce.require_finite`` stops the step before it is used.

``python -m stillroom.losses.divergences`` prints every loss on two coins.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stillroom.losses.logspace import expect, kl, kl_flow_of, kl_flow_to, log_mix, log_ratio, ratio
from stillroom.losses.pairs import Pair


def forward_kl(pair: Pair) -> Float[Tensor, " n"]:
    """Forward KL, KL(teacher ‖ student) = Σ p log(p / q): the student must cover whatever the teacher does.

    ≥ 0, and 0 only at equality; +inf where q = 0 < p.

    Reference: arXiv:1503.02531.

    >>> pair = Pair(student=torch.tensor([[0.6, 0.4]]).log(), teacher=torch.tensor([[0.9, 0.1]]).log())
    >>> round(forward_kl(pair).item(), 5)
    0.22629
    """
    return kl(pair.teacher, pair.student)


def forward_kl_flow(pair: Pair) -> Float[Tensor, "n M"]:
    """−p."""
    return kl_flow_to(pair.teacher, pair.student)


def reverse_kl(pair: Pair) -> Float[Tensor, " n"]:
    """Reverse KL, KL(student ‖ teacher) = Σ q log(q / p): the student must avoid whatever the teacher does.

    ≥ 0, and 0 only at equality; +inf where p = 0 < q.

    Reference: arXiv:2306.08543.

    >>> pair = Pair(student=torch.tensor([[0.6, 0.4]]).log(), teacher=torch.tensor([[0.9, 0.1]]).log())
    >>> round(reverse_kl(pair).item(), 5)
    0.31124
    """
    return kl(pair.student, pair.teacher)


def reverse_kl_flow(pair: Pair) -> Float[Tensor, "n M"]:
    """The product q (log(q / p) + 1)."""
    return kl_flow_of(pair.student, pair.teacher)


def jsd(pair: Pair, *, weight: float) -> Float[Tensor, " n"]:
    """Weighted Jensen–Shannon: w KL(p ‖ m) + (1 − w) KL(q ‖ m), with m = w p + (1 − w) q.

    Always finite: at most −w log w − (1 − w) log(1 − w), which is ln 2 at w = ½. Not a dial between the two
    KLs: it tends to 0 at both ends. Only jsd / (w (1 − w)) has limits, forward KL at w → 0 and reverse KL at
    w → 1.

    Args:
        pair: Student and teacher.
        weight: w, the teacher's share in the mixture, 0 < w < 1.

    Reference: arXiv:2306.13649, eq. 1 (there β for w).
    """
    mixture = log_mix(pair.teacher, pair.student, weight)
    return weight * kl(pair.teacher, mixture) + (1 - weight) * kl(pair.student, mixture)


def jsd_flow(pair: Pair, *, weight: float) -> Float[Tensor, "n M"]:
    """(1 − w) q log(q / m). The dependence of m on q cancels between the two terms."""
    mixture = log_mix(pair.teacher, pair.student, weight)
    return (1 - weight) * pair.student.exp() * log_ratio(pair.student, mixture)


def skewed_forward_kl(pair: Pair, *, alpha: float) -> Float[Tensor, " n"]:
    """Skewed forward KL: KL(p ‖ m), with m = α p + (1 − α) q.

    Like forward KL, but always finite, at most −log α, because the reference never vanishes under p.

    Args:
        pair: Student and teacher.
        alpha: The teacher's share in the mixture, 0 < α < 1.

    Reference: arXiv:2402.03898 (skew KL).
    """
    return kl(pair.teacher, log_mix(pair.teacher, pair.student, alpha))


def skewed_forward_kl_flow(pair: Pair, *, alpha: float) -> Float[Tensor, "n M"]:
    """−(1 − α) p q / m."""
    mixture = log_mix(pair.teacher, pair.student, alpha)
    return -(1 - alpha) * pair.teacher.exp() * ratio(pair.student, mixture)


def skewed_reverse_kl(pair: Pair, *, alpha: float) -> Float[Tensor, " n"]:
    """Skewed reverse KL: KL(q ‖ m), with m = (1 − α) p + α q.

    Like reverse KL, but always finite, at most −log α.

    Args:
        pair: Student and teacher.
        alpha: The student's share in the mixture, 0 < α < 1.

    Reference: arXiv:2402.03898 (skew reverse KL).
    """
    return kl(pair.student, log_mix(pair.student, pair.teacher, alpha))


def skewed_reverse_kl_flow(pair: Pair, *, alpha: float) -> Float[Tensor, "n M"]:
    """The product q (log(q / m) + 1 − α q / m)."""
    mixture = log_mix(pair.student, pair.teacher, alpha)
    return pair.student.exp() * (log_ratio(pair.student, mixture) + 1 - alpha * ratio(pair.student, mixture))


def total_variation(pair: Pair) -> Float[Tensor, " n"]:
    """Total variation: ½ Σ |p − q|, the largest difference in the probability of any event. In [0, 1].

    Not in nats. It has a kink at equality: the gradient there is 0, but one rounding error away it has full
    size, so a copied student stays put only if both models were computed alike.

    Reference: arXiv:2307.15190.
    """
    return 0.5 * (pair.teacher.exp() - pair.student.exp()).abs().sum(-1)


def total_variation_flow(pair: Pair) -> Float[Tensor, "n M"]:
    """½ q sign(q − p)."""
    q = pair.student.exp()
    return 0.5 * q * (q - pair.teacher.exp()).sign()


def adaptive_kl(pair: Pair, *, head_mass: float) -> Float[Tensor, " n"]:
    """Adaptive KL: λ KL(p ‖ q) + (1 − λ) KL(q ‖ p), with λ the head's share of the disagreement.

    λ = Σ_head |p − q| / Σ |p − q|. The head is the smallest set of the teacher's most probable tokens whose
    mass reaches ``head_mass``. Early in training forward KL corrects the head and reverse KL the tail; the
    larger gap decides which of them speaks louder at this position.

    What we changed or had to decide:

    1. λ is a constant for the gradient, as in the authors' program; a moving λ could be lowered by
       spreading the error instead of removing it.
    2. Tokens as probable as the last of the head belong to it too, so that λ does not depend on the
       order of the vocabulary.
    3. Where the models agree exactly λ is 0/0; it is taken as ½ and multiplies zeros.
    4. A tail bucket never belongs to the head, however full: it stands for tokens that are each rarer.

    +inf where either KL is and its weight is not 0. λ jumps where a token enters the head.

    Args:
        pair: Student and teacher.
        head_mass: Teacher mass that makes a head, 0 < head_mass < 1; ½ in the paper.

    Reference: arXiv:2404.02657 (there μ for head_mass).
    """
    share = _head_share(pair, head_mass)
    return _weigh(share, forward_kl(pair)) + _weigh(1 - share, reverse_kl(pair))


def adaptive_kl_flow(pair: Pair, *, head_mass: float) -> Float[Tensor, "n M"]:
    """λ · (forward KL's flow) + (1 − λ) · (reverse KL's flow)."""
    share = _head_share(pair, head_mass)[:, None]
    return share * forward_kl_flow(pair) + (1 - share) * reverse_kl_flow(pair)


def cross_entropy(pair: Pair) -> Float[Tensor, " n"]:
    """Cross-entropy: −Σ p log q. On hard labels, −log q of the target.

    Forward KL plus the teacher's entropy: the same gradient, but not 0 where the models agree, so it is no
    divergence and is not called one. +inf where q = 0 < p.
    """
    return expect(pair.teacher, -pair.student)


def cross_entropy_flow(pair: Pair) -> Float[Tensor, "n M"]:
    """−p."""
    return kl_flow_to(pair.teacher, pair.student)


def _weigh(weight: Tensor, value: Tensor) -> Tensor:
    """Product of weight and value, where a weight of 0 silences even an infinite value."""
    return weight * value.masked_fill(weight == 0, 0.0)


def _head_share(pair: Pair, head_mass: float) -> Float[Tensor, " n"]:
    """λ of adaptive KL: the part of Σ |p − q| that lies in the teacher's head. A constant for autograd."""
    p, q = pair.teacher.exp(), pair.student.detach().exp()
    gap = (p - q).abs()
    head_gap = gap.masked_fill(~_head(p, head_mass, has_tail=pair.has_tail), 0.0).sum(-1)
    total = gap.sum(-1)
    return torch.where(total == 0, 0.5, head_gap / total)


def _head(p: Tensor, head_mass: float, *, has_tail: bool) -> Bool[Tensor, "n M"]:
    """The fewest most probable tokens with mass ≥ head_mass, ties included, never the tail bucket.

    Both comparisons forgive a few roundings: the last bit of a probability must not decide what is a head.
    """
    tokens = p[:, :-1] if has_tail else p
    slack = 1 - 16 * torch.finfo(p.dtype).eps
    ordered = tokens.sort(-1, descending=True).values
    mass_before = ordered.cumsum(-1) - ordered
    least = ordered.masked_fill(mass_before >= head_mass * slack, math.inf).amin(-1, keepdim=True)
    head = tokens >= least * slack
    return torch.cat([head, torch.zeros_like(head[:, :1])], dim=-1) if has_tail else head


def _demonstrate() -> str:
    """Every loss on two coins, teacher (0.9, 0.1) and student (0.6, 0.4)."""
    from stillroom.losses.signals import TeacherSignal
    from stillroom.losses.table import LOSSES, make_loss

    student = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    signal = TeacherSignal.dense(torch.tensor([[0.9, 0.1]], dtype=torch.float64).log())
    lines = ["teacher (0.9, 0.1), student (0.6, 0.4)", f"{'loss':<32}{'value':>9}{'gradient':>21}"]
    for name in LOSSES:
        loss = make_loss(name)
        pull = ", ".join(f"{g:+.5f}" for g in loss.grad(student, signal)[0].tolist())
        lines.append(f"{loss!s:<32}{loss.value(student, signal).item():>9.5f}{f'({pull})':>21}")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(_demonstrate() + "\n")
