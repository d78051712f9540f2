"""Faults that users of other tools reported, each with its small input and the right value.

The numbers in the names are those of the project's collection of field reports.
"""

import logging
import math

import pytest
import torch

import oracles
from stillroom.errors import DataError
from stillroom.losses import (
    LOSSES,
    TeacherSignal,
    count_units,
    hard_label_loss,
    make_loss,
    plain_loss,
    token_weights,
)

NEG_INF = -math.inf


def log_of(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def value(name, student, teacher, **options):
    return make_loss(name, **options).value(student, TeacherSignal.dense(teacher)).item()


def scalar_and_gradient(loss, logits, signal, weights):
    logits = logits.clone().requires_grad_()
    scalar = plain_loss(loss, logits, signal, weights)
    scalar.backward()
    return scalar.detach(), logits.grad


COIN_TEACHER, COIN_STUDENT = log_of([0.9, 0.1]), log_of([0.6, 0.4])


@pytest.mark.parametrize("name", LOSSES)
def test_report_3_surplus_columns_hold_no_mass_and_get_no_gradient_in_mixed_precision(name):
    narrow = torch.tensor([[2.0, 1, 0, -1]])
    widened = torch.cat([narrow, torch.full((1, 2), NEG_INF)], -1)
    signal = TeacherSignal.dense(widened).keep_top_k(6)
    probabilities = dict(zip(signal.token_ids[0].tolist(), signal.logprobs[0].exp().tolist(), strict=True))
    assert [probabilities[i] for i in range(4)] == pytest.approx([0.6439, 0.2369, 0.0871, 0.0321], abs=1e-4)
    assert probabilities[4] == probabilities[5] == 0
    zero_filled = oracles.softmax([2, 1, 0, -1, 0, 0])
    assert zero_filled[4] + zero_filled[5] == pytest.approx(0.1484, abs=1e-4), "what a filler of 0 would do"

    student = torch.tensor([[0.5, 0.25, -1, 2]], dtype=torch.bfloat16)
    student_widened = torch.cat([student, torch.full((1, 2), NEG_INF, dtype=torch.bfloat16)], -1)
    loss = make_loss(name)
    gradient = loss.grad(student_widened, TeacherSignal.dense(widened))
    assert (gradient[:, 4:] == 0).all()
    torch.testing.assert_close(gradient[:, :4], loss.grad(student, TeacherSignal.dense(narrow)))
    torch.testing.assert_close(
        loss.value(student_widened, TeacherSignal.dense(widened)),
        loss.value(student, TeacherSignal.dense(narrow)),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_report_16_ignored_positions_are_left_out_of_sum_and_denominator(name):
    student, teacher = normal(2, 4, 5), normal(2, 4, 5, seed=1)
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]]).bool()
    loss, by_hand = make_loss(name), []
    for b in range(2):
        for t in range(4):
            if mask[b, t]:
                p, q = oracles.softmax(teacher[b, t].tolist()), oracles.softmax(student[b, t].tolist())
                by_hand.append(oracles.ORACLES[name](p, q))
    weights = token_weights(mask, count_units(mask))
    scalar = plain_loss(loss, student[mask], TeacherSignal.dense(teacher[mask]), weights)
    assert scalar.item() == pytest.approx(sum(by_hand) / 4, rel=1e-6)
    none = torch.zeros_like(mask)
    logits = student.clone().requires_grad_()
    nothing = plain_loss(loss, logits[none], TeacherSignal.dense(teacher[none]), token_weights(none, 0))
    nothing.backward()
    assert nothing.item() == 0
    assert (logits.grad == 0).all()


def test_report_30_jsd_mixes_probabilities_and_stays_below_ln_2():
    student, teacher = log_of([1e-6, 1 - 1e-6]), log_of([1 - 1e-6, 1e-6])
    right = value("jsd", student, teacher, weight=0.5)
    assert right == pytest.approx(0.69313, abs=5e-6)
    assert right < math.log(2)
    half_way = (student + teacher) / 2
    wrong = ((teacher.exp() * (teacher - half_way)).sum() + (student.exp() * (student - half_way)).sum()) / 2
    assert wrong.item() == pytest.approx(6.91, abs=0.01), "what averaging logs would have said"


def test_report_31_forward_and_reverse_kl_are_the_right_way_round():
    assert value("forward_kl", COIN_STUDENT, COIN_TEACHER) == pytest.approx(0.22629, abs=5e-6)
    assert value("reverse_kl", COIN_STUDENT, COIN_TEACHER) == pytest.approx(0.31124, abs=5e-6)
    assert value("jsd", COIN_STUDENT, COIN_TEACHER) == pytest.approx(0.06329, abs=5e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("k", [None, 1, 3, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_report_12_and_32_a_copy_of_the_teacher_has_no_loss_and_no_gradient(name, k, temperature):
    logits = normal(3, 8, dtype=torch.float32) * 3
    dense = TeacherSignal.dense(logits, temperature=temperature)
    signal = dense if k is None else dense.keep_top_k(k)
    loss = make_loss(name)
    assert loss.grad(logits, signal).abs().max() <= 1e-6
    at_equality = loss.value(logits, signal).abs().max().item()
    assert (at_equality <= 1e-6) is LOSSES[name].zero_at_equality


def test_report_32_a_loss_that_leaves_the_teacher_entropy_in_is_called_cross_entropy():
    assert [name for name, row in LOSSES.items() if not row.zero_at_equality] == ["cross_entropy"]
    entropy = oracles.cross_entropy([0.9, 0.1], [0.9, 0.1])
    assert value("cross_entropy", COIN_TEACHER, COIN_TEACHER) == pytest.approx(entropy, rel=1e-12)


def test_report_33_jsd_vanishes_at_both_ends_and_only_its_scaled_form_reaches_the_kls():
    forward, reverse = (value(name, COIN_STUDENT, COIN_TEACHER) for name in ("forward_kl", "reverse_kl"))
    for weight, expected in ((0.001, 0.000226), (0.5, 0.06329), (0.999, 0.000311)):
        assert value("jsd", COIN_STUDENT, COIN_TEACHER, weight=weight) == pytest.approx(expected, abs=5e-6)
    for weight, end in ((1e-6, forward), (1 - 1e-6, reverse)):
        scaled = value("jsd", COIN_STUDENT, COIN_TEACHER, weight=weight) / (weight * (1 - weight))
        assert scaled == pytest.approx(end, rel=1e-5)


def test_report_34_temperature_squared_keeps_the_size_of_the_gradient_and_is_a_stated_choice():
    student, teacher = torch.tensor([[1.0, 0, -1]]), torch.tensor([[0.0, 2, 0]])
    norms = {False: [], True: []}
    for scaled, found in norms.items():
        loss = make_loss("forward_kl", scale_by_temperature_squared=scaled)
        for temperature in (1.0, 2.0, 4.0, 8.0):
            found.append(
                loss.grad(student, TeacherSignal.dense(teacher, temperature=temperature)).norm().item()
            )
    assert norms[True] == pytest.approx([0.779, 0.799, 0.771, 0.748], abs=6e-4)
    assert norms[False] == pytest.approx([0.779, 0.200, 0.0482, 0.0117], rel=3e-3)
    assert str(make_loss("forward_kl", scale_by_temperature_squared=True)) == "forward_kl × temperature²"


@pytest.mark.parametrize("name", LOSSES)
def test_report_36_a_stored_top_k_signal_does_not_pull_a_perfect_student_away(name):
    p = log_of([0.7, 0.2, 0.06, 0.04])
    signal = TeacherSignal.top_k(torch.tensor([[0, 1]]), p[:, :2], torch.tensor([0.1]).log(), vocab_size=4)
    loss = make_loss(name)
    if name == "total_variation":  # 0.1 in float32 is not 0.06 + 0.04, and here rounding decides the sign
        signal = TeacherSignal.dense(p).keep_top_k(2)
    assert loss.grad(p, signal).abs().max() < 1e-7
    if LOSSES[name].zero_at_equality:
        assert loss.value(p, signal).abs().max() < 1e-7


def test_report_36_normalising_the_teacher_over_the_kept_tokens_alone_would_pull_it():
    p = log_of([0.7, 0.2, 0.06, 0.04])
    renormalised = TeacherSignal.top_k(
        torch.tensor([[0, 1]]), log_of([0.7 / 0.9, 0.2 / 0.9]), torch.tensor([NEG_INF]), vocab_size=4
    )
    assert make_loss("forward_kl").value(p, renormalised).item() == pytest.approx(0.10536, abs=5e-6)
    with pytest.raises(DataError, match=r"add up to 0\.9000"):
        TeacherSignal.top_k(torch.tensor([[0, 1]]), p[:, :2], torch.tensor([NEG_INF]), vocab_size=4)


def test_report_37_top_k_kl_with_a_tail_bucket_is_a_divergence_below_the_full_one():
    p, q = [0.7, 0.2, 0.06, 0.04], [0.75, 0.22, 0.02, 0.01]
    teacher, student = log_of(p), log_of(q)
    full = value("forward_kl", student, teacher)
    bucketed = make_loss("forward_kl").value(student, TeacherSignal.dense(teacher).keep_top_k(2)).item()
    assert full == pytest.approx(0.05401, abs=5e-6)
    assert bucketed == pytest.approx(0.05304, abs=5e-6)
    raw_subset = sum(a * math.log(a / b) for a, b in zip(p[:2], q[:2], strict=True))
    assert raw_subset == pytest.approx(-0.06736, abs=5e-6), "no divergence, and not offered"


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_report_38_a_batch_and_the_same_batch_twice_have_one_loss_and_one_gradient(name, reduction):
    student, teacher = normal(2, 3, 5), normal(2, 3, 5, seed=1)
    mask = torch.tensor([[1, 1, 1], [0, 1, 0]]).bool()
    found = []
    for times in (1, 2):
        logits = student.clone().requires_grad_()
        both = mask.repeat(times, 1)
        weights = token_weights(both, count_units(both, reduction), reduction=reduction)
        signal = TeacherSignal.dense(teacher.repeat(times, 1, 1)[both])
        scalar = plain_loss(make_loss(name), logits.repeat(times, 1, 1)[both], signal, weights)
        scalar.backward()
        found.append((scalar.detach(), logits.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_report_39_a_thousand_columns_without_mass_do_not_dilute_the_loss(name):
    student, teacher = normal(4, 6), normal(4, 6, seed=1)
    nothing = torch.full((4, 1000), NEG_INF, dtype=torch.float64)
    loss = make_loss(name)
    narrow = loss.value(student, TeacherSignal.dense(teacher))
    wide = loss.value(
        torch.cat([student, nothing], -1), TeacherSignal.dense(torch.cat([teacher, nothing], -1))
    )
    assert narrow.min() > 1e-2
    torch.testing.assert_close(wide, narrow, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_report_40_probabilities_that_underflow_on_both_sides_give_no_nan(name):
    student, teacher = torch.tensor([[0.0, 0, -200]]), torch.tensor([[0.0, 0.5, -200]])
    assert student.softmax(-1)[0, 2] == 0, "the probability does underflow in float32"
    for temperature in (1.0, 0.5):
        signal = TeacherSignal.dense(teacher, temperature=temperature)
        loss = make_loss(name)
        two_ids = loss.value(student[:, :2], TeacherSignal.dense(teacher[:, :2], temperature=temperature))
        torch.testing.assert_close(loss.value(student, signal), two_ids)
        _, gradient = scalar_and_gradient(loss, student, signal, torch.ones(1))
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(loss.grad(student, signal)).all()
    if name == "jsd":
        assert loss.value(student, TeacherSignal.dense(teacher)).item() == pytest.approx(0.0076329, abs=5e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_report_41_a_float32_student_and_a_bfloat16_teacher_agree_with_float64(name, temperature):
    student = normal(8, 64, dtype=torch.float32) * 3
    teacher = (student + 0.01 * normal(8, 64, seed=1, dtype=torch.float32)).to(torch.bfloat16)
    loss = make_loss(name)
    mixed = loss.value(student, TeacherSignal.dense(teacher, temperature=temperature))
    exact = loss.value(student.double(), TeacherSignal.dense(teacher.double(), temperature=temperature))
    torch.testing.assert_close(mixed.double(), exact, rtol=0, atol=1e-5)
    assert mixed.min() >= -1e-7


@pytest.mark.parametrize("route", ["selected", "weighted"])
@pytest.mark.parametrize("name", LOSSES)
def test_report_42_fillers_at_masked_places_leave_no_nan_in_the_backward_pass(name, route):
    student, teacher = normal(2, 4, 5).requires_grad_(), normal(2, 4, 5, seed=1)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    teacher[~mask] = NEG_INF
    if route == "selected":
        logits, signal = student[mask], TeacherSignal.dense(teacher[mask])
        weights = token_weights(mask, count_units(mask))
    else:
        logits, signal = student.flatten(0, 1), TeacherSignal.dense(teacher.flatten(0, 1))
        weights = mask.flatten().double() / 6
    scalar = plain_loss(make_loss(name), logits, signal, weights)
    scalar.backward()
    assert torch.isfinite(scalar)
    assert torch.isfinite(student.grad).all()
    assert (student.grad[~mask] == 0).all()
    assert (student.grad[mask].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_report_43_a_batch_without_supervised_tokens_adds_exactly_nothing(name, caplog):
    student, teacher = normal(4, 3, 5), normal(4, 3, 5, seed=1)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 0]]).bool()
    denominator, loss = count_units(mask), make_loss(name)

    def window(pieces):
        logits, total = student.clone().requires_grad_(), 0.0
        for rows in pieces:
            part = mask[rows]
            signal = TeacherSignal.dense(teacher[rows][part])
            scalar = plain_loss(loss, logits[rows][part], signal, token_weights(part, denominator))
            scalar.backward()
            total += scalar.item()
        return total, logits.grad

    total, gradient = window([slice(0, 2)])
    with caplog.at_level(logging.WARNING):
        with_empty, gradient_with_empty = window([slice(2, 4), slice(0, 2)])
        alone, gradient_alone = window([slice(2, 4)])
    assert caplog.text.count("no supervised position") == 2
    assert with_empty == total > 0
    assert torch.equal(gradient_with_empty, gradient)
    assert alone == 0
    assert (gradient_alone == 0).all()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_report_44_the_gradient_does_not_depend_on_the_number_of_accumulation_steps(reduction):
    lengths = [2, 2, 2, 2, 16, 16, 16, 16]
    mask = torch.arange(16)[None] < torch.tensor(lengths)[:, None]
    inputs, teacher = normal(8, 16, 4), normal(8, 16, 7, seed=1)
    denominator = count_units(mask, reduction)
    found = []
    for size in (8, 4, 1):
        head = normal(4, 7, seed=2).requires_grad_()
        total = 0.0
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            part = mask[rows]
            weights = token_weights(part, denominator, reduction=reduction)
            signal = TeacherSignal.dense(teacher[rows][part])
            scalar = plain_loss(make_loss("jsd"), (inputs[rows] @ head)[part], signal, weights)
            scalar.backward()
            total += scalar.item()
        found.append((torch.tensor(total), head.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-9)


def test_report_45_token_mean_and_sequence_mean_are_two_named_things_and_no_split_changes_them():
    mask = torch.arange(30)[None] < torch.tensor([[2], [30]])
    one_nat, tenth = (
        log_of([math.exp(-1), 1 - math.exp(-1)])[0],
        log_of([math.exp(-0.1), 1 - math.exp(-0.1)])[0],
    )
    logits = torch.stack([one_nat.expand(30, 2), tenth.expand(30, 2)])
    assert hard_label_loss(logits[:, 0], torch.tensor([0, 0])).tolist() == pytest.approx([1.0, 0.1])
    for reduction, expected in (("token_mean", 0.15625), ("sequence_mean", 0.55)):
        denominator = count_units(mask, reduction)
        for pieces in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
            total = 0.0
            for rows in pieces:
                part = mask[rows]
                signal = TeacherSignal.hard(torch.zeros(int(part.sum()), dtype=torch.long), vocab_size=2)
                weights = token_weights(part, denominator, reduction=reduction)
                total += plain_loss(make_loss("cross_entropy"), logits[rows][part], signal, weights).item()
            assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_report_46_value_and_gradient_do_not_depend_on_the_number_of_chunks(name, k):
    student, dense = normal(10, 6), TeacherSignal.dense(normal(10, 6, seed=1), temperature=1.5)
    signal = dense if k is None else dense.keep_top_k(k)
    weights = torch.full((10,), 1 / 7, dtype=torch.float64)
    weights[5:8] = 0  # three masked positions, all in one of the two halves
    found = []
    for chunks in (1, 2, 4, 10):
        logits, total = student.clone().requires_grad_(), 0.0
        for index in torch.arange(10).tensor_split(chunks):
            scalar = plain_loss(make_loss(name), logits[index], signal.select(index), weights[index])
            scalar.backward()
            total += scalar.item()
        found.append((torch.tensor(total), logits.grad))
    assert found[0][0] > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-12)


def test_report_47_the_denominator_counts_the_mask_that_is_trained_on():
    completions = torch.arange(8)[None] < torch.tensor([[4], [8]])
    ended = torch.tensor([[True], [False]])
    trained_on = completions & ended  # the completion that was cut off is masked
    assert count_units(completions) == 12
    assert count_units(trained_on) == 4
    assert count_units(trained_on, "sequence_mean") == 1
    assert token_weights(trained_on, count_units(trained_on)).tolist() == [0.25] * 4
