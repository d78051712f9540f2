"""Losses from their definitions: plain Python floats and loops, no torch, nothing shared with the source.

p is the teacher and q the student, both lists of probabilities. Mixtures are formed in probability space,
sums run over outcomes one at a time, and 0 · log 0 is 0. Slow and obvious on purpose.
"""

import math


def softmax(logits, temperature=1.0):
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    exponentials = [math.exp(x - top) for x in scaled]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def coarsen(probabilities, kept):
    """The kept tokens in their order, then everything else added up; nothing is added if all are kept."""
    head = [probabilities[i] for i in kept]
    if len(kept) == len(probabilities):
        return head
    return [*head, math.fsum(p for i, p in enumerate(probabilities) if i not in kept)]


def kl(a, b):
    total = []
    for x, y in zip(a, b, strict=True):
        if x == 0:
            continue
        if y == 0:
            return math.inf
        total.append(x * math.log(x / y))
    return math.fsum(total)


def forward_kl(p, q, has_tail=False):
    return kl(p, q)


def reverse_kl(p, q, has_tail=False):
    return kl(q, p)


def jsd(p, q, has_tail=False, weight=0.5):
    m = [weight * x + (1 - weight) * y for x, y in zip(p, q, strict=True)]
    return weight * kl(p, m) + (1 - weight) * kl(q, m)


def skewed_forward_kl(p, q, has_tail=False, alpha=0.1):
    return kl(p, [alpha * x + (1 - alpha) * y for x, y in zip(p, q, strict=True)])


def skewed_reverse_kl(p, q, has_tail=False, alpha=0.1):
    return kl(q, [(1 - alpha) * x + alpha * y for x, y in zip(p, q, strict=True)])


def total_variation(p, q, has_tail=False):
    return max(  # the definition: the event on which the two disagree most
        math.fsum(x - y for x, y in zip(p, q, strict=True) if x > y),
        math.fsum(y - x for x, y in zip(p, q, strict=True) if y > x),
    )


def head_of(p, head_mass, has_tail):
    """Indices of the smallest set {tokens at least this probable} that holds the asked mass."""
    tokens = range(len(p) - 1) if has_tail else range(len(p))
    for least in sorted({p[i] for i in tokens}, reverse=True):
        head = [i for i in tokens if p[i] >= least]
        if math.fsum(p[i] for i in head) >= head_mass:
            return head
    return list(tokens)


def adaptive_kl(p, q, has_tail=False, head_mass=0.5):
    head = head_of(p, head_mass, has_tail)
    in_head = math.fsum(abs(p[i] - q[i]) for i in range(len(p)) if i in head)
    in_tail = math.fsum(abs(p[i] - q[i]) for i in range(len(p)) if i not in head)
    if in_head + in_tail == 0:
        return 0.0
    parts = ((in_head, kl(p, q)), (in_tail, kl(q, p)))
    return math.fsum(gap / (in_head + in_tail) * value for gap, value in parts if gap > 0)


def cross_entropy(p, q, has_tail=False):
    return kl(p, q) + math.fsum(-x * math.log(x) for x in p if x > 0)


ORACLES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skewed_forward_kl": skewed_forward_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
    "total_variation": total_variation,
    "adaptive_kl": adaptive_kl,
    "cross_entropy": cross_entropy,
}
