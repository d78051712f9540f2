"""What a loss is: two pure functions on n positions, four facts, and the options that may be set.

A ``LossSpec`` is one row of the table, or a row of your own that you hand over in place of a name. A
``Loss`` is a row with its options filled in and checked; it is what a driver calls.

Neither masks, weighs or averages: they return one number a position, and ``reduce`` does the rest.

Shapes: n positions, V vocabulary, M outcomes of a pair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.losses.pairs import lay_out, pull_back
from stillroom.losses.signals import TeacherSignal


@dataclass(frozen=True)
class Option:
    """A number with a default that must lie strictly between two ends."""

    default: float
    low: float
    high: float
    at_low: str = ""
    """What to do instead of asking for a value at or below ``low``."""
    at_high: str = ""

    def check(self, loss: str, name: str, value: object) -> float:
        """The value as a float.

        Raises:
            ConfigError: It is no number, or not strictly between the ends.
        """
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ConfigError(
                f"{name}={value!r} of loss {loss} is not a number, so nothing can be weighed with it. "
                f"Give a number strictly between {self.low:g} and {self.high:g}."
            )
        number = float(value)
        if self.low < number < self.high:
            return number
        instead = self.at_low if number <= self.low else self.at_high if number >= self.high else ""
        raise ConfigError(
            f"{name}={number:g} of loss {loss} is not strictly between {self.low:g} and {self.high:g}. "
            f"{instead or 'The loss is not defined there. Choose a value inside.'}"
        )


@dataclass(frozen=True)
class LossSpec:
    """One row of the table: how far the student is from the teacher, and which way to go."""

    name: str
    value: Callable[..., Tensor]
    """``value(student_logits [n, V], signal, **options) → [n]``, differentiable in the student."""
    grad: Callable[..., Tensor]
    """``grad(student_logits [n, V], signal, **options) → [n, V]``, the exact derivative of ``value``."""
    summary: str
    """One line, as in "like forward KL, but …"."""
    reference: str
    """``arXiv:id`` or another source that can be looked up."""
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}))
    unit: str = "nats"

    needs_shared_vocabulary: bool = True
    """Teacher and student must give the same ids to the same strings."""
    accepts_top_k: bool = True
    """Also defined on top-K ids with tail mass."""
    zero_at_equality: bool = True
    """0 where student and teacher agree; a name that promises a divergence must keep this."""
    lower_on_top_k: bool = True
    """Merging outcomes never raises it, so its top-K value is at most the dense one."""

    @classmethod
    def on_pairs(
        cls, name: str, value: Callable[..., Tensor], flow: Callable[..., Tensor], **facts: object
    ) -> "LossSpec":
        """A row from its formula on a ``Pair``: dense and top-K signals both follow from it.

        Args:
            name: As in the table.
            value: ``value(pair, **options) → [n]``.
            flow: ``flow(pair, **options) → [n, M]``, the derivative of ``value`` with respect to the
                student's log-probabilities, each taken as free.
            **facts: The other fields of the row.
        """

        def value_of_logits(student_logits: Tensor, signal: TeacherSignal, **options: float) -> Tensor:
            return value(lay_out(student_logits, signal), **options)

        def grad_of_logits(student_logits: Tensor, signal: TeacherSignal, **options: float) -> Tensor:
            pair = lay_out(student_logits, signal)
            return pull_back(flow(pair, **options), pair, student_logits, signal)

        return cls(name, value_of_logits, grad_of_logits, **facts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Loss:
    """A row with its options. Built by ``make_loss``, which checks them."""

    spec: LossSpec
    options: Mapping[str, float]
    scale_by_temperature_squared: bool = False
    """Multiply by the signal's temperature², so that the gradient keeps its size as the temperature rises."""

    @property
    def name(self) -> str:
        return self.spec.name

    def value(self, student_logits: Float[Tensor, "n V"], signal: TeacherSignal) -> Float[Tensor, " n"]:
        """One number a position, in the row's unit, in float32 or better; differentiable in the student.

        Raises:
            ConfigError: The row does not accept a top-K signal and was given one.
            VocabularyError: Student and signal have different widths.
            DataError: Student and signal have different numbers of positions.
        """
        self._check(signal)
        return self._factor(signal) * self.spec.value(student_logits, signal, **self.options)

    @torch.no_grad()
    def grad(self, student_logits: Float[Tensor, "n V"], signal: TeacherSignal) -> Float[Tensor, "n V"]:
        """The derivative of each position's value by its own logits, ``[n, V]``, in float32 or better."""
        self._check(signal)
        return self._factor(signal) * self.spec.grad(student_logits, signal, **self.options)

    def _factor(self, signal: TeacherSignal) -> float:
        return signal.temperature**2 if self.scale_by_temperature_squared else 1.0

    def _check(self, signal: TeacherSignal) -> None:
        if signal.kind == "top_k" and not self.spec.accepts_top_k:
            raise ConfigError(
                f"loss {self.name} is not defined on a top-K signal: it needs the teacher's whole "
                "distribution. Leave top_k out, or choose a loss that accepts it."
            )

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value:g}" for name, value in self.options.items())
        squared = " × temperature²" if self.scale_by_temperature_squared else ""
        return f"{self.name}{f'({options})' if options else ''}{squared}"
