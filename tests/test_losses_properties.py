"""Algebra that every row of the loss table must obey, on drawn logits."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stillroom.losses import LOSSES, TeacherSignal, make_loss
from stillroom.losses.divergences import forward_kl, reverse_kl
from stillroom.losses.pairs import Pair

NAMES = sorted(LOSSES)
ROUNDING = 1e-12
"""Of float64 sums over a handful of outcomes."""


@st.composite
def pairs_of_logits(draw, rows=24):
    """Student and teacher logits [rows, V], V from 2 to 7; every other row is rounded, so that ties occur."""
    v, seed = draw(st.integers(2, 7)), draw(st.integers(0, 2**32))
    logits = draw(st.sampled_from([0.3, 2.0, 9.0])) * torch.randn(
        2, rows, v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    logits[:, ::2] = logits[:, ::2].round()
    return logits.unbind()


def over_the_table(function):
    """Run a property for every row, on drawn logits, a drawn temperature and dense or top-K signals."""
    drawn = given(
        logits=pairs_of_logits(),
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        k=st.one_of(st.none(), st.integers(1, 7)),
    )
    frugal = settings(max_examples=20, deadline=None, derandomize=True)
    return pytest.mark.parametrize("name", NAMES)(frugal(drawn(function)))


def signal_of(teacher, temperature, k):
    dense = TeacherSignal.dense(teacher, temperature=temperature)
    return dense if k is None else dense.keep_top_k(min(k, teacher.shape[-1]))


def smooth(name, logits, k=None):
    """The rows where value and gradient are determined, not left to rounding or to an arbitrary choice.

    Total variation has no single gradient where two probabilities are equal, and with equal probabilities
    at its border the set of the K most probable tokens is not unique.
    """
    student, teacher = logits
    keep = torch.ones(len(student), dtype=torch.bool)
    if name == "total_variation":
        for temperature in (0.5, 1.0, 2.0):
            gap = (student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)
            keep &= (gap.abs() > 1e-9).all(-1)
    if k is not None:
        keep &= torch.tensor([len(set(row)) == len(row) for row in teacher.tolist()])
    assume(keep.any())
    return student[keep], teacher[keep]


def both(loss, student, signal):
    return loss.value(student, signal), loss.grad(student, signal)


@over_the_table
def test_is_never_negative(name, logits, temperature, k):
    value = make_loss(name).value(logits[0], signal_of(logits[1], temperature, k))
    assert (value >= -ROUNDING).all()


@over_the_table
def test_value_and_gradient_are_zero_where_the_models_agree(name, logits, temperature, k):
    value, gradient = both(make_loss(name), logits[1], signal_of(logits[1], temperature, k))
    assert gradient.abs().max() < ROUNDING
    if LOSSES[name].zero_at_equality:
        assert value.abs().max() < ROUNDING


@over_the_table
def test_a_gradient_step_cannot_change_the_total_of_the_logits(name, logits, temperature, k):
    gradient = make_loss(name).grad(logits[0], signal_of(logits[1], temperature, k))
    assert gradient.sum(-1).abs().max() < 1e-11


@over_the_table
def test_adding_a_constant_to_the_logits_changes_nothing(name, logits, temperature, k):
    student, teacher = smooth(name, logits)
    here = both(make_loss(name), student, signal_of(teacher, temperature, k))
    there = both(make_loss(name), student + 40, signal_of(teacher, temperature, k))
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-11)


@over_the_table
def test_the_order_of_the_vocabulary_changes_nothing(name, logits, temperature, k):
    student, teacher = smooth(name, logits, k)
    order = torch.randperm(student.shape[-1], generator=torch.Generator().manual_seed(0))
    value, gradient = both(make_loss(name), student, signal_of(teacher, temperature, k))
    value_2, gradient_2 = both(
        make_loss(name), student[:, order], signal_of(teacher[:, order], temperature, k)
    )
    torch.testing.assert_close(value, value_2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient[:, order], gradient_2, rtol=1e-9, atol=1e-12)


@over_the_table
def test_duplicating_rows_duplicates_values_and_gradients(name, logits, temperature, k):
    student, teacher = smooth(name, logits)
    value, gradient = both(make_loss(name), student, signal_of(teacher, temperature, k))
    twice = both(make_loss(name), student.repeat(2, 1), signal_of(teacher.repeat(2, 1), temperature, k))
    torch.testing.assert_close(twice, (value.repeat(2), gradient.repeat(2, 1)), rtol=1e-10, atol=1e-12)


@over_the_table
def test_appending_tokens_of_probability_zero_changes_nothing(name, logits, temperature, k):
    student, teacher = smooth(name, logits, k)
    nothing = torch.full((len(student), 3), -math.inf, dtype=torch.float64)
    k = k and min(k, student.shape[-1])
    value, gradient = both(make_loss(name), student, signal_of(teacher, temperature, k))
    wide = torch.cat([student, nothing], -1), signal_of(torch.cat([teacher, nothing], -1), temperature, k)
    value_2, gradient_2 = both(make_loss(name), *wide)
    torch.testing.assert_close(value, value_2, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient_2[:, : student.shape[-1]], gradient, rtol=1e-10, atol=1e-12)
    assert (gradient_2[:, student.shape[-1] :] == 0).all()


@over_the_table
def test_keeping_the_whole_vocabulary_equals_the_dense_loss(name, logits, temperature, k):
    student, teacher = smooth(name, logits)
    dense = both(make_loss(name), student, signal_of(teacher, temperature, None))
    whole = both(make_loss(name), student, signal_of(teacher, temperature, teacher.shape[-1]))
    torch.testing.assert_close(whole, dense, rtol=1e-9, atol=1e-12)


@over_the_table
def test_top_k_is_at_most_the_dense_loss_where_the_table_says_so(name, logits, temperature, k):
    student, teacher = logits
    dense = make_loss(name).value(student, signal_of(teacher, temperature, None))
    bucketed = make_loss(name).value(student, signal_of(teacher, temperature, k or 1))
    if LOSSES[name].lower_on_top_k:
        assert (bucketed <= dense + ROUNDING).all()


@over_the_table
def test_the_teacher_receives_no_gradient(name, logits, temperature, k):
    student, teacher = logits[0].clone().requires_grad_(), logits[1].clone().requires_grad_()
    value = make_loss(name).value(student, signal_of(teacher, temperature, k))
    value.sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_the_one_row_that_top_k_may_raise_is_marked_and_really_does():
    assert [name for name in NAMES if not LOSSES[name].lower_on_top_k] == ["adaptive_kl"]
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 500, 6, generator=generator, dtype=torch.float64) * 2
    loss = make_loss("adaptive_kl")
    dense = loss.value(student, signal_of(teacher, 1.0, None))
    assert (loss.value(student, signal_of(teacher, 1.0, 3)) > dense + 1e-3).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits=pairs_of_logits())
def test_forward_kl_of_a_pair_is_reverse_kl_of_the_swapped_pair(logits):
    a, b = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    torch.testing.assert_close(forward_kl(Pair(a, b)), reverse_kl(Pair(b, a)), rtol=0, atol=0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits=pairs_of_logits(), weight=st.floats(0.01, 0.99))
def test_jsd_mirrors_its_weight_and_stays_below_the_entropy_of_it(logits, weight):
    student, teacher = logits
    here = make_loss("jsd", weight=weight).value(student, TeacherSignal.dense(teacher))
    there = make_loss("jsd", weight=1 - weight).value(teacher, TeacherSignal.dense(student))
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
    assert (here <= entropy + ROUNDING).all()
    half = make_loss("jsd").value(student, TeacherSignal.dense(teacher))
    assert (half <= math.log(2) + ROUNDING).all()
    torch.testing.assert_close(half, make_loss("jsd").value(teacher, TeacherSignal.dense(student)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits=pairs_of_logits(), alpha=st.floats(0.01, 0.99))
def test_skewed_kls_are_bounded_and_below_the_kl_that_they_skew(logits, alpha):
    student, signal = logits[0], TeacherSignal.dense(logits[1])
    for skewed, plain in (("skewed_forward_kl", "forward_kl"), ("skewed_reverse_kl", "reverse_kl")):
        value = make_loss(skewed, alpha=alpha).value(student, signal)
        assert (value <= -math.log(alpha) + ROUNDING).all()
        assert (value <= make_loss(plain).value(student, signal) + ROUNDING).all()


def test_skewed_kls_tend_to_the_plain_ones():
    student, teacher = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for skewed, plain in (("skewed_forward_kl", "forward_kl"), ("skewed_reverse_kl", "reverse_kl")):
        value = make_loss(skewed, alpha=1e-9).value(student, TeacherSignal.dense(teacher))
        torch.testing.assert_close(
            value, make_loss(plain).value(student, TeacherSignal.dense(teacher)), rtol=1e-6, atol=0
        )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits=pairs_of_logits())
def test_total_variation_is_at_most_one_and_obeys_pinsker(logits):
    student, signal = logits[0], TeacherSignal.dense(logits[1])
    value = make_loss("total_variation").value(student, signal)
    assert (value <= 1 + ROUNDING).all()
    assert (value**2 <= make_loss("forward_kl").value(student, signal) / 2 + ROUNDING).all()
