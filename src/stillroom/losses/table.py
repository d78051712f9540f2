"""The table of losses. One row each; the tests, the docs and the help iterate over it.

To add a loss, write its two functions in ``divergences.py`` and one row here (``docs/add_a_loss.md``).
Outside this package nothing needs registering: hand a ``LossSpec`` to ``make_loss`` in place of a name.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Float, Int
from torch import Tensor

from stillroom.errors import ConfigError, unknown_name
from stillroom.losses import divergences as d
from stillroom.losses.signals import TeacherSignal
from stillroom.losses.spec import Loss, LossSpec, Option

_ROWS = (
    LossSpec.on_pairs(
        "forward_kl",
        d.forward_kl,
        d.forward_kl_flow,
        summary="KL(teacher ‖ student): cover whatever the teacher does",
        reference="arXiv:1503.02531",
    ),
    LossSpec.on_pairs(
        "reverse_kl",
        d.reverse_kl,
        d.reverse_kl_flow,
        summary="KL(student ‖ teacher): avoid whatever the teacher avoids",
        reference="arXiv:2306.08543",
    ),
    LossSpec.on_pairs(
        "jsd",
        d.jsd,
        d.jsd_flow,
        summary="like both KLs to their weighted mixture, so bounded; vanishes at both ends of its weight",
        reference="arXiv:2306.13649",
        options={
            "weight": Option(
                0.5,
                0.0,
                1.0,
                at_low="Value and gradient vanish there; jsd/weight tends to forward KL. Use forward_kl.",
                at_high="Value and gradient vanish there; jsd/(1−weight) tends to reverse KL. Use reverse_kl.",
            )
        },
    ),
    LossSpec.on_pairs(
        "skewed_forward_kl",
        d.skewed_forward_kl,
        d.skewed_forward_kl_flow,
        summary="like forward KL, but the student is mixed with a little teacher, so bounded by −ln alpha",
        reference="arXiv:2402.03898",
        options={
            "alpha": Option(
                0.1,
                0.0,
                1.0,
                at_low="At 0 nothing is mixed in. Use forward_kl.",
                at_high="At 1 the teacher is compared with itself, which is 0. Choose one near 0.1.",
            )
        },
    ),
    LossSpec.on_pairs(
        "skewed_reverse_kl",
        d.skewed_reverse_kl,
        d.skewed_reverse_kl_flow,
        summary="like reverse KL, but the teacher is mixed with a little student, so bounded by −ln alpha",
        reference="arXiv:2402.03898",
        options={
            "alpha": Option(
                0.1,
                0.0,
                1.0,
                at_low="At 0 nothing is mixed in. Use reverse_kl.",
                at_high="At 1 the student is compared with itself, which is 0. Choose one near 0.1.",
            )
        },
    ),
    LossSpec.on_pairs(
        "total_variation",
        d.total_variation,
        d.total_variation_flow,
        summary="half the summed difference of probabilities: bounded by 1, indifferent to rare tokens",
        reference="arXiv:2307.15190",
        unit="probability",
    ),
    LossSpec.on_pairs(
        "adaptive_kl",
        d.adaptive_kl,
        d.adaptive_kl_flow,
        summary="forward and reverse KL, weighted by where the models disagree more, head or tail",
        reference="arXiv:2404.02657",
        lower_on_top_k=False,
        options={
            "head_mass": Option(
                0.5,
                0.0,
                1.0,
                at_low="At 0 there is no head and only reverse KL is left. Use reverse_kl.",
                at_high="At 1 there is no tail and only forward KL is left. Use forward_kl.",
            )
        },
    ),
    LossSpec.on_pairs(
        "cross_entropy",
        d.cross_entropy,
        d.cross_entropy_flow,
        summary="like forward KL, but with the teacher's entropy left in: not 0 at equality; for hard labels",
        reference="arXiv:1606.07947",
        needs_shared_vocabulary=False,  # its usual signal is TeacherSignal.hard, in the student's own ids
        zero_at_equality=False,
    ),
)

LOSSES: Mapping[str, LossSpec] = MappingProxyType({row.name: row for row in _ROWS})
"""Every loss by name."""


def make_loss(loss: str | LossSpec, *, scale_by_temperature_squared: bool = False, **options: object) -> Loss:
    """A loss ready to call: the row of that name, or the row given, with its options checked.

    Args:
        loss: A name in ``LOSSES``, or a ``LossSpec`` of your own.
        scale_by_temperature_squared: Multiply value and gradient by the signal's temperature².
        **options: The row's own; those left out take their defaults.

    Raises:
        ConfigError: The name or an option is unknown, or a value is out of range.

    >>> str(make_loss("jsd", weight=0.3))
    'jsd(weight=0.3)'
    """
    if isinstance(loss, LossSpec):
        spec = loss
    elif loss in LOSSES:
        spec = LOSSES[loss]
    else:
        raise ConfigError(unknown_name("loss", loss, LOSSES))
    for name in options:
        if name not in spec.options:
            raise ConfigError(unknown_name(f"option of loss {spec.name}", name, spec.options))
    bound = {
        name: option.check(spec.name, name, options.get(name, option.default))
        for name, option in spec.options.items()
    }
    return Loss(spec, MappingProxyType(bound), scale_by_temperature_squared)


def hard_label_loss(student_logits: Float[Tensor, "n V"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """−log q of each target id, in nats: the row ``cross_entropy`` on a certain teacher.

    Raises:
        DataError: A target is outside [0, V), such as the −100 of an unmasked label.
    """
    signal = TeacherSignal.hard(targets, vocab_size=student_logits.shape[-1])
    return make_loss("cross_entropy").value(student_logits, signal)
