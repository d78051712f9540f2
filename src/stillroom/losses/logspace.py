"""Arithmetic on probabilities that are held as logs, with zero as minus infinity.

Two rules, kept in value *and* in gradient:

- A probability of zero silences whatever it multiplies, even an infinity. Zeros are selected away before
  they meet one: masking the product afterwards leaves 0 · ∞ = NaN in the backward pass.
- Mixtures are formed by logaddexp. Below e^−104 a float32 probability vanishes; its log does not.

Distributions a and b are over the last axis.
"""

import math

import torch
from torch import Tensor

from stillroom.losses.signals import NEG_INF


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a ‖ b) = Σ a log(a / b)."""
    return expect(log_a, log_a - log_b)


def kl_flow_of(log_a: Tensor, log_b: Tensor) -> Tensor:
    """∂ KL(a ‖ b) / ∂ log a = a (log(a / b) + 1); 0 where the term is infinite."""
    flow = log_a.exp() * (log_ratio(log_a, log_b) + 1)
    return flow.masked_fill((log_b == NEG_INF) & (log_a != NEG_INF), 0.0)


def kl_flow_to(log_a: Tensor, log_b: Tensor) -> Tensor:
    """∂ KL(a ‖ b) / ∂ log b = −a; 0 where the term is infinite."""
    return -log_a.exp().masked_fill(log_b == NEG_INF, 0.0)


def expect(log_a: Tensor, x: Tensor) -> Tensor:
    """Σ a x, where a = 0 silences any x.

    An infinite x under a > 0 makes the sum +inf and adds nothing to its gradient.
    """
    silent = log_a == NEG_INF
    infinite = (x == math.inf) & ~silent
    finite_part = (log_a.exp() * x.masked_fill(silent | infinite, 0.0)).sum(-1)
    return finite_part + torch.where(infinite.any(-1), math.inf, 0.0).to(finite_part.dtype)


def log_mix(log_a: Tensor, log_b: Tensor, share_of_a: float) -> Tensor:
    """Log of share · a + (1 − share) · b. Where both are zero so is the mixture, without a NaN gradient."""
    neither = (log_a == NEG_INF) & (log_b == NEG_INF)
    log_a, log_b = log_a.masked_fill(neither, 0.0), log_b.masked_fill(neither, 0.0)
    mixture = torch.logaddexp(log_a + math.log(share_of_a), log_b + math.log1p(-share_of_a))
    return mixture.masked_fill(neither, NEG_INF)


def log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a / b); 0 where a = 0, since a multiplies it."""
    return (log_a - log_b).masked_fill(log_a == NEG_INF, 0.0)


def ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """The quotient a / b; 0 where a = 0, whatever b is."""
    return (log_a - log_b).exp().masked_fill(log_a == NEG_INF, 0.0)
