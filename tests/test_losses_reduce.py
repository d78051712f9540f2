"""The one place where positions become a scalar: weights, denominators, empty masks and NaN."""

import logging
import math

import pytest
import torch

from stillroom.errors import ConfigError, StillroomError
from stillroom.losses import (
    LOSSES,
    TeacherSignal,
    count_units,
    make_loss,
    plain_loss,
    require_finite,
    token_weights,
)

V = 6


def draw(*shape, seed=0):
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value_and_gradient(loss, logits, signal, weights):
    logits = logits.clone().requires_grad_()
    scalar = plain_loss(loss, logits, signal, weights)
    scalar.backward()
    return scalar.detach(), logits.grad


def test_token_mean_weighs_every_supervised_token_alike():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).bool()
    assert count_units(mask) == 5
    torch.testing.assert_close(token_weights(mask, 5), torch.full((5,), 0.2))
    torch.testing.assert_close(token_weights(mask, torch.tensor(10)), torch.full((5,), 0.1))


def test_sequence_mean_weighs_every_row_with_a_supervised_token_alike():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    assert count_units(mask, "sequence_mean") == 2
    weights = token_weights(mask, 2, reduction="sequence_mean")
    torch.testing.assert_close(weights, torch.tensor([1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6]))
    assert weights.sum().item() == pytest.approx(1)


def test_weights_come_in_the_order_in_which_a_mask_selects():
    mask = torch.tensor([[0, 1, 0], [1, 1, 1]]).bool()
    weights = torch.zeros(2, 3)
    weights[mask] = token_weights(mask, 2, reduction="sequence_mean")
    torch.testing.assert_close(weights, torch.tensor([[0, 1 / 2, 0], [1 / 6, 1 / 6, 1 / 6]]))


def test_an_unknown_reduction_is_refused_with_near_matches():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"unknown reduction 'token_meen'\. Did you mean 'token_mean'"):
        token_weights(mask, 2, reduction="token_meen")
    with pytest.raises(ConfigError, match="unknown reduction 'batchmean'"):
        count_units(mask, "batchmean")


@pytest.mark.parametrize("denominator", [0, -3, math.nan])
def test_a_denominator_of_nothing_is_refused_unless_nothing_is_supervised(denominator):
    with pytest.raises(ConfigError, match="for 2 supervised positions"):
        token_weights(torch.ones(1, 2, dtype=torch.bool), denominator)
    assert token_weights(torch.zeros(1, 2, dtype=torch.bool), denominator).shape == (0,)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_plain_loss_is_the_weighted_sum_and_its_gradient_the_weighted_rows(name, k):
    logits, dense = draw(5), TeacherSignal.dense(draw(5, seed=1), temperature=2.0)
    signal = dense if k is None else dense.keep_top_k(k)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    loss = make_loss(name)
    scalar, gradient = value_and_gradient(loss, logits, signal, weights)
    torch.testing.assert_close(scalar, (loss.value(logits, signal) * weights).sum())
    torch.testing.assert_close(gradient, loss.grad(logits, signal) * weights[:, None])


@pytest.mark.parametrize("name", LOSSES)
def test_positions_of_weight_zero_change_nothing_whatever_stands_there(name):
    logits, teacher = draw(5), draw(5, seed=1)
    weights = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    clean = value_and_gradient(make_loss(name), logits, TeacherSignal.dense(teacher), weights)
    logits[1], teacher[3], logits[4], teacher[4] = math.nan, math.nan, math.inf, -math.inf
    dirty = value_and_gradient(make_loss(name), logits, TeacherSignal.dense(teacher), weights)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert clean[1][0].abs().max() > 1e-3
    assert (dirty[1][[1, 3, 4]] == 0).all()


def test_temperature_squared_multiplies_value_and_gradient_and_is_off_by_default():
    logits, signal = draw(3), TeacherSignal.dense(draw(3, seed=1), temperature=3.0)
    plain, scaled = make_loss("jsd"), make_loss("jsd", scale_by_temperature_squared=True)
    torch.testing.assert_close(scaled.value(logits, signal), 9 * plain.value(logits, signal))
    torch.testing.assert_close(scaled.grad(logits, signal), 9 * plain.grad(logits, signal))


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("who", ["teacher", "student"])
def test_a_nan_stops_the_step_and_says_whose_it_is_and_where(who, name, k):
    logits, teacher = draw(4), draw(4, seed=1)
    (teacher if who == "teacher" else logits)[2, 3] = math.nan
    signal = TeacherSignal.dense(teacher)
    signal = signal if k is None else signal.keep_top_k(k)
    message = (
        rf"the {who}'s scores are NaN or infinite at supervised position 2 of 4, so {name} is not a number"
    )
    with pytest.raises(StillroomError, match=message):
        plain_loss(make_loss(name), logits, signal, torch.ones(4))


def test_infinite_scores_are_told_from_an_infinite_divergence():
    logits, teacher = draw(8), draw(8, seed=1)
    with pytest.raises(
        StillroomError, match=r"student's scores .* at supervised positions 0, 1, 2, 3, 4 and 3 more of 8"
    ):
        plain_loss(
            make_loss("jsd"), torch.full_like(logits, math.inf), TeacherSignal.dense(teacher), torch.ones(8)
        )
    empty = TeacherSignal.dense(torch.full_like(teacher, -math.inf))
    with pytest.raises(StillroomError, match="teacher's scores"):
        plain_loss(make_loss("reverse_kl"), logits, empty, torch.ones(8))
    teacher[[1, 6], 2] = -math.inf
    with pytest.raises(
        StillroomError, match=r"reverse_kl is infinite at supervised positions 1, 6 of 8.*bounded loss"
    ):
        plain_loss(make_loss("reverse_kl"), logits, TeacherSignal.dense(teacher), torch.ones(8))
    for name in ("forward_kl", "jsd", "skewed_reverse_kl", "total_variation"):
        assert plain_loss(make_loss(name), logits, TeacherSignal.dense(teacher), torch.ones(8)).isfinite()


def test_require_finite_is_silent_about_finite_losses():
    logits, signal = draw(4), TeacherSignal.dense(draw(4, seed=1))
    require_finite(make_loss("jsd").value(logits, signal), logits, signal)


def test_an_empty_batch_warns_and_stays_connected_to_the_student(caplog):
    logits = draw(3).requires_grad_()
    mask = torch.zeros(3, dtype=torch.bool)
    with caplog.at_level(logging.WARNING):
        scalar = plain_loss(make_loss("jsd"), logits[mask], TeacherSignal.dense(draw(0)), torch.zeros(0))
    assert "no supervised position" in caplog.text
    scalar.backward()
    assert scalar.item() == 0
    assert (logits.grad == 0).all()
