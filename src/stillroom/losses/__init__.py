"""The scales: how far the student is from the teacher, in nats per position.

``signals`` is what a teacher says about n positions; ``pairs`` lays student and teacher side by side,
over the whole vocabulary or over the kept tokens and one bucket; ``divergences`` holds the formulas;
``spec`` says what a loss is and ``table`` lists them; ``reduce`` is the one place that weighs, sums and
divides. A loss here knows nothing about batches, masks or models.

Names are loaded on first use, so that ``python -m stillroom.losses.divergences`` runs a module that was
not imported already.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillroom.losses.pairs import Pair
    from stillroom.losses.reduce import count_units, plain_loss, require_finite, token_weights
    from stillroom.losses.signals import TeacherSignal
    from stillroom.losses.spec import Loss, LossSpec, Option
    from stillroom.losses.table import LOSSES, hard_label_loss, make_loss

__all__ = [
    "LOSSES",
    "Loss",
    "LossSpec",
    "Option",
    "Pair",
    "TeacherSignal",
    "count_units",
    "hard_label_loss",
    "make_loss",
    "plain_loss",
    "require_finite",
    "token_weights",
]

_HOMES = {
    "pairs": ("Pair",),
    "reduce": ("count_units", "plain_loss", "require_finite", "token_weights"),
    "signals": ("TeacherSignal",),
    "spec": ("Loss", "LossSpec", "Option"),
    "table": ("LOSSES", "hard_label_loss", "make_loss"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
