"""What a teacher says about n positions: a frozen record in one of two forms, never half of each.

*Dense* holds the teacher's logits over the whole vocabulary. *Top-K* holds K token ids, their
log-probabilities and the log-probability of everything else together, the tail: what a cache or a server
can afford to send, and still a whole distribution. Both carry the temperature that the loss applies, which
has nothing to do with the temperature of sampling: dense logits are divided by it when a loss reads them,
top-K log-probabilities were taken after it.

The tail travels as a log-probability. One minus the kept mass cancels: in float32 a tail of 1e-8 would
round to 0 or to 6e-8, and a loss that divides by it would be wrong by everything.

Hard labels are a top-K signal too: the target with probability one and an empty tail. So gold fine-tuning
and sequence-level distillation need no loss of their own.

Shapes: n positions, V vocabulary, K kept tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stillroom.errors import ConfigError, DataError

NEG_INF = float("-inf")
_MASS_TOLERANCE = 0.01
"""Kept and tail mass must add up to 1 within this; half-precision storage costs about a tenth of it."""


@dataclass(frozen=True, eq=False)
class TeacherSignal:
    """The teacher's distribution at each of n positions. Build it with ``dense``, ``top_k`` or ``hard``."""

    vocab_size: int
    """Columns of the student's logits that this signal is about."""
    temperature: int | float = 1.0
    """Of the loss: the student's logits are divided by it, and the teacher's were or will be."""
    tokenizer_fingerprint: str = ""
    """Of the tokenizer whose ids these are; empty if unknown."""
    logits: Float[Tensor, "n V"] | None = None
    """Dense form, before the temperature. Minus infinity means probability zero."""
    token_ids: Int[Tensor, "n K"] | None = None
    """Top-K form: the kept tokens, distinct within a row, in any order."""
    logprobs: Float[Tensor, "n K"] | None = None
    """Top-K form: nats, after the temperature, normalised over the whole vocabulary."""
    tail_logprob: Float[Tensor, " n"] | None = None
    """Top-K form: log of the mass of all other tokens; minus infinity if there is none."""

    def __post_init__(self) -> None:
        sparse = (self.token_ids, self.logprobs, self.tail_logprob)
        if self.logits is None:
            whole = all(part is not None for part in sparse)
        else:
            whole = all(part is None for part in sparse)
        if not whole:
            raise ConfigError(
                "a teacher signal holds neither logits alone nor token_ids, logprobs and tail_logprob "
                "together, so its distribution is not determined. Build it with dense, top_k or hard."
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"temperature={self.temperature} cannot divide logits. Give a finite number above 0; "
                "1 leaves both distributions as they are."
            )
        if self.logits is not None and self.logits.shape[-1] != self.vocab_size:
            raise ConfigError(
                f"logits of {self.logits.shape[-1]} columns with vocab_size={self.vocab_size}: ids and "
                "columns would not correspond. Pass the width left after surplus columns were removed."
            )
        for name in ("logits", "logprobs", "tail_logprob"):  # a teacher is never trained by its own signal
            tensor = getattr(self, name)
            if tensor is not None and tensor.requires_grad:
                object.__setattr__(self, name, tensor.detach())
        if self.token_ids is not None:  # caches store narrower ids than gather accepts
            object.__setattr__(self, "token_ids", self.token_ids.long())

    @classmethod
    def dense(
        cls,
        logits: Float[Tensor, "n V"],
        *,
        temperature: int | float = 1.0,
        tokenizer_fingerprint: str = "",
    ) -> "TeacherSignal":
        """The whole distribution, as logits ``[n, V]`` before the temperature. Gradients are cut here."""
        return cls(logits.shape[-1], temperature, tokenizer_fingerprint, logits=logits.detach())

    @classmethod
    def top_k(
        cls,
        token_ids: Int[Tensor, "n K"],
        logprobs: Float[Tensor, "n K"],
        tail_logprob: Float[Tensor, " n"],
        *,
        vocab_size: int,
        temperature: int | float = 1.0,
        tokenizer_fingerprint: str = "",
    ) -> "TeacherSignal":
        """K tokens a position and the log of the mass outside them, for stored and served teachers.

        Args:
            token_ids: ``[n, K]``, distinct within a row, each in [0, V).
            logprobs: ``[n, K]`` nats after ``temperature``, normalised over all V tokens, not over the K.
            tail_logprob: ``[n]`` nats; minus infinity where nothing is left, as it must be at K = V.
            vocab_size: V.
            temperature: The one that ``logprobs`` were taken after.
            tokenizer_fingerprint: Of the tokenizer whose ids these are.

        Raises:
            ConfigError: K > V.
            DataError: An id is out of range or repeated, or the masses do not add up to 1.
        """
        _check_kept(token_ids.shape[-1], vocab_size)
        _check_ids(token_ids, vocab_size)
        _check_mass(logprobs, tail_logprob, full=token_ids.shape[-1] == vocab_size)
        return cls(
            vocab_size,
            temperature,
            tokenizer_fingerprint,
            token_ids=token_ids,
            logprobs=logprobs.detach(),
            tail_logprob=tail_logprob.detach(),
        )

    @classmethod
    def hard(
        cls, targets: Int[Tensor, " n"], *, vocab_size: int, tokenizer_fingerprint: str = ""
    ) -> "TeacherSignal":
        """Certainty: one target id a position, ``[n]``. With ``cross_entropy`` this is ordinary fine-tuning.

        Raises:
            DataError: A target is outside [0, V), such as the −100 of an unmasked label.
        """
        _check_ids(targets[:, None], vocab_size)
        certain = torch.zeros(len(targets), 1, device=targets.device)
        return cls(
            vocab_size,
            1.0,
            tokenizer_fingerprint,
            token_ids=targets[:, None],
            logprobs=certain,
            tail_logprob=torch.full_like(certain[:, 0], NEG_INF),
        )

    @property
    def kind(self) -> Literal["dense", "top_k"]:
        return "top_k" if self.logits is None else "dense"

    @property
    def n(self) -> int:
        """Positions."""
        return len(self._tensors()[0])

    @property
    def device(self) -> torch.device:
        return self._tensors()[0].device

    def keep_top_k(self, k: int) -> "TeacherSignal":
        """The K most probable tokens of a dense signal, with the log mass of the rest.

        ``logprobs`` and ``tail_logprob`` are taken after the signal's temperature and over the whole
        vocabulary. At k = V nothing is left over and every loss equals its dense value. Which of several
        equally probable tokens at the border is kept is left to torch.

        Raises:
            ConfigError: k is not in [1, V], or the signal is top-K already.
        """
        if self.logits is None:
            raise ConfigError(
                f"keep_top_k({k}) on a signal that holds top-K already: the other tokens are gone. "
                "Keep the dense signal, or choose k where the signal is made."
            )
        _check_kept(k, self.vocab_size)
        scaled = tempered(self.logits, self.temperature)
        token_ids = scaled.topk(k, dim=-1).indices
        logprobs, tail_logprob = kept_and_tail(scaled, token_ids)
        return replace(self, logits=None, token_ids=token_ids, logprobs=logprobs, tail_logprob=tail_logprob)

    def select(self, index: Tensor | slice) -> "TeacherSignal":
        """The positions named by a slice, a boolean mask ``[n]`` or indices, in that order."""
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> "TeacherSignal":
        return self._map(lambda tensor: tensor.to(device))

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.logits, self.token_ids, self.logprobs, self.tail_logprob) if t is not None]

    def _map(self, change) -> "TeacherSignal":
        names = ("logits", "token_ids", "logprobs", "tail_logprob")
        held = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(t) for name, t in held.items() if t is not None})


def tempered(
    logits: Float[Tensor, "n V"], temperature: int | float, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n V"]:
    """Logits over the temperature, widened first: dividing bfloat16 would round a second time."""
    wide = logits.to(torch.promote_types(logits.dtype, dtype))
    return wide if temperature == 1 else wide / temperature


def kept_and_tail(
    scaled_logits: Float[Tensor, "n V"], token_ids: Int[Tensor, "n K"]
) -> tuple[Float[Tensor, "n K"], Float[Tensor, " n"]]:
    """Log-probabilities of the kept tokens, and of all the others as one event.

    log q_tail = logsumexp of the other logits − logsumexp of all: never one minus the kept mass. Teacher and
    student go through this one function, so that equal logits give equal bits. A tail without any probable
    token is minus infinity and has no gradient.
    """
    log_total = scaled_logits.logsumexp(-1, keepdim=True)
    others = scaled_logits.scatter(-1, token_ids, NEG_INF)
    # logsumexp of nothing but −inf has a NaN gradient, so such rows are taken out before it.
    empty = (others == NEG_INF).all(-1)
    log_others = others.masked_fill(empty[:, None], 0.0).logsumexp(-1)
    tail = (log_others - log_total[:, 0]).masked_fill(empty, NEG_INF)
    return scaled_logits.gather(-1, token_ids) - log_total, tail


def _check_kept(k: int, vocab_size: int) -> None:
    if not 1 <= k <= vocab_size:
        raise ConfigError(
            f"top-K signal with K={k} on a vocabulary of {vocab_size}: there are not that many tokens to "
            f"keep. Set top_k between 1 and {vocab_size}, or leave it out for the whole distribution."
        )


def _check_ids(token_ids: Tensor, vocab_size: int) -> None:
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        row = int(outside.any(-1).nonzero()[0])
        raise DataError(
            f"token id {int(token_ids[outside][0])} in row {row} is outside [0, {vocab_size}): it names no "
            "column of the student's logits. Drop masked positions and align the vocabularies first."
        )
    ordered = token_ids.sort(-1).values
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if repeated.any():
        row = int(repeated.any(-1).nonzero()[0])
        raise DataError(
            f"token id {int(ordered[:, 1:][repeated][0])} is kept twice in row {row}: its mass would count "
            "twice. Keep each id once a row."
        )


def _check_mass(logprobs: Tensor, tail_logprob: Tensor, *, full: bool) -> None:
    mass = logprobs.float().exp().sum(-1) + tail_logprob.float().exp()
    wrong = (mass - 1).abs() > _MASS_TOLERANCE  # NaN passes here: require_finite names it with its row
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"kept and tail mass of row {row} add up to {float(mass[row]):.4f}, so this is no distribution. "
            "Pass natural logs after the temperature, normalised over the whole vocabulary, and the log of "
            "the mass that is left."
        )
    if full and (tail_logprob != NEG_INF).any():
        raise DataError(
            "a top-K signal that keeps the whole vocabulary has a tail: no token is left to hold it. "
            "Pass minus infinity as tail_logprob."
        )
