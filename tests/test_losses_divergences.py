"""Every row of the loss table against its definition, and its gradient against autograd and differences."""

import math
import subprocess
import sys

import pytest
import torch

import oracles
from stillroom.errors import ConfigError
from stillroom.losses import LOSSES, LossSpec, TeacherSignal, make_loss
from stillroom.losses.divergences import _demonstrate, forward_kl, forward_kl_flow

N, V = 7, 11
OPTIONS = {
    "forward_kl": [{}],
    "reverse_kl": [{}],
    "jsd": [{}, {"weight": 0.1}, {"weight": 0.9}],
    "skewed_forward_kl": [{}, {"alpha": 0.7}],
    "skewed_reverse_kl": [{}, {"alpha": 0.7}],
    "total_variation": [{}],
    "adaptive_kl": [{}, {"head_mass": 0.9}],
    "cross_entropy": [{}],
}
ROWS = [(name, options) for name, settings in OPTIONS.items() for options in settings]
SIGNALS = {"dense": None, "top_1": 1, "top_4": 4, "top_all": V}


def draw(seed=0, n=N, v=V, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    student = scale * torch.randn(n, v, generator=generator, dtype=torch.float64)
    return student, scale * torch.randn(n, v, generator=generator, dtype=torch.float64)


def signal_of(teacher, k, temperature=1.0):
    dense = TeacherSignal.dense(teacher, temperature=temperature)
    return dense if k is None else dense.keep_top_k(k)


def by_oracle(name, student, teacher, k, temperature, options):
    values = []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = oracles.softmax(t, temperature), oracles.softmax(s, temperature)
        if k is not None:
            kept = sorted(range(len(p)), key=lambda i: -p[i])[:k]
            p, q = oracles.coarsen(p, kept), oracles.coarsen(q, kept)
        values.append(oracles.ORACLES[name](p, q, has_tail=k not in (None, len(t)), **options))
    return torch.tensor(values, dtype=torch.float64)


def autograd_of_value(loss, student, signal):
    student = student.clone().requires_grad_()
    loss.value(student, signal).sum().backward()
    return student.grad


def test_every_row_has_an_oracle_and_settings_to_try():
    assert set(LOSSES) == set(oracles.ORACLES) == set(OPTIONS)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("signal_name", SIGNALS)
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_value_equals_the_definition(name, options, signal_name, temperature):
    student, teacher = draw()
    k = SIGNALS[signal_name]
    value = make_loss(name, **options).value(student, signal_of(teacher, k, temperature))
    expected = by_oracle(name, student, teacher, k, temperature, options)
    assert value.dtype == torch.float64
    assert expected.min() > 1e-4, "the comparison would be about rounding"
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("signal_name", SIGNALS)
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_gradient_is_the_derivative_of_the_value(name, options, signal_name, temperature):
    student, teacher = draw(1)
    signal = signal_of(teacher, SIGNALS[signal_name], temperature)
    loss = make_loss(name, **options)
    gradient = loss.grad(student, signal)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, autograd_of_value(loss, student, signal), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("signal_name", ["dense", "top_4"])
@pytest.mark.parametrize(("name", "options"), [row for row in ROWS if row[0] != "adaptive_kl"])
def test_value_passes_gradcheck(name, options, signal_name):
    # Adaptive KL's weights are constants for the gradient by definition: the next test holds it instead.
    student, teacher = draw(2, n=2, v=6)
    k = SIGNALS[signal_name]
    signal = signal_of(teacher, k and 2, 1.5)
    loss = make_loss(name, **options)
    assert torch.autograd.gradcheck(lambda x: loss.value(x, signal), student.requires_grad_())


@pytest.mark.parametrize("k", [None, 3])
def test_gradient_of_adaptive_kl_is_its_two_kls_at_fixed_weights(k):
    student, teacher = draw(3)
    signal = signal_of(teacher, k)
    values = [make_loss(n).value(student, signal) for n in ("adaptive_kl", "forward_kl", "reverse_kl")]
    share = ((values[0] - values[2]) / (values[1] - values[2]))[:, None]
    assert 0 < share.min() < share.max() < 1
    forward, reverse = (make_loss(n).grad(student, signal) for n in ("forward_kl", "reverse_kl"))
    expected = share * forward + (1 - share) * reverse
    torch.testing.assert_close(
        make_loss("adaptive_kl").grad(student, signal), expected, rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits_give_finite_values_and_exact_gradients(name, k):
    student = torch.tensor([[0.0, 5000, -5000, 3], [-800, 0, 1, 2], [90, 0, 0, -90]], dtype=torch.float64)
    teacher = torch.tensor([[0.0, -5000, 5000, 1], [3, 1, 0, -900], [-90, 0, 0, 90]], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        signal, logits = signal_of(teacher.to(dtype), k, 0.7), student.to(dtype)
        loss = make_loss(name)
        gradient = loss.grad(logits, signal)
        assert torch.isfinite(loss.value(logits, signal)).all()
        assert torch.isfinite(gradient).all()
        tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-2}
        torch.testing.assert_close(gradient, autograd_of_value(loss, logits, signal), **tolerance)


@pytest.mark.parametrize("k", [None, 2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_tokens_impossible_for_both_models_have_no_mass_and_no_gradient(name, k):
    dead = [1, 4]
    student, teacher = draw(4, v=7)
    student[:, dead], teacher[:, dead] = -math.inf, -math.inf
    alive = [i for i in range(7) if i not in dead]
    loss, signal = make_loss(name), signal_of(teacher, k)
    gradient = loss.grad(student, signal)
    torch.testing.assert_close(gradient, autograd_of_value(loss, student, signal), rtol=1e-9, atol=1e-12)
    assert (gradient[:, dead] == 0).all()
    without = signal_of(teacher[:, alive], k)
    torch.testing.assert_close(loss.value(student, signal), loss.value(student[:, alive], without))
    torch.testing.assert_close(gradient[:, alive], loss.grad(student[:, alive], without))


@pytest.mark.parametrize("name", LOSSES)
def test_a_tail_that_is_impossible_for_the_student_gives_no_nan(name):
    student = torch.tensor([[1.0, 0.5, -math.inf, -math.inf]], dtype=torch.float64)
    teacher = torch.tensor([[1.5, 0.2, -math.inf, -math.inf]], dtype=torch.float64)
    loss, signal = make_loss(name), signal_of(teacher, 2)
    assert signal.tail_logprob.item() == -math.inf
    two_ids = signal_of(teacher[:, :2], None)
    torch.testing.assert_close(loss.value(student, signal), loss.value(student[:, :2], two_ids))
    for gradient in (loss.grad(student, signal), autograd_of_value(loss, student, signal)):
        torch.testing.assert_close(gradient[:, :2], loss.grad(student[:, :2], two_ids))
        assert (gradient[:, 2:] == 0).all()


TEACHER_FORBIDS = ([0.0, 1.0, 0.3], [0.5, 1.0, -math.inf])
STUDENT_FORBIDS = ([0.0, 1.0, -math.inf], [0.5, 1.0, 0.3])


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize(
    ("name", "logits", "infinite"),
    [
        ("forward_kl", TEACHER_FORBIDS, False),
        ("forward_kl", STUDENT_FORBIDS, True),
        ("reverse_kl", TEACHER_FORBIDS, True),
        ("reverse_kl", STUDENT_FORBIDS, False),
        ("cross_entropy", TEACHER_FORBIDS, False),
        ("cross_entropy", STUDENT_FORBIDS, True),
        ("adaptive_kl", TEACHER_FORBIDS, True),
        ("adaptive_kl", STUDENT_FORBIDS, True),
        *[
            (name, logits, False)
            for name in ("jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation")
            for logits in (TEACHER_FORBIDS, STUDENT_FORBIDS)
        ],
    ],
)
def test_an_infinite_divergence_is_returned_as_infinity_and_its_gradient_is_finite(name, logits, infinite, k):
    student, teacher = (torch.tensor([row], dtype=torch.float64) for row in logits)
    loss, signal = make_loss(name), signal_of(teacher, k)
    assert loss.value(student, signal).isposinf().item() is infinite
    expected = by_oracle(name, student, teacher, k, 1.0, {})
    torch.testing.assert_close(loss.value(student, signal), expected, rtol=1e-10, atol=0)
    gradient = loss.grad(student, signal)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(gradient, autograd_of_value(loss, student, signal), rtol=1e-9, atol=1e-12)


def test_the_head_of_adaptive_kl_counts_ties_and_never_the_tail_bucket():
    flat = torch.tensor([[0.3, 0.3, 0.1, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    student = torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    loss = make_loss("adaptive_kl", head_mass=0.25)
    # Both 0.3 are the head, whichever comes first, and hold all of the gap: pure forward KL.
    assert loss.value(student, signal_of(flat, None)).item() == pytest.approx(
        make_loss("forward_kl").value(student, signal_of(flat, None)).item(), rel=1e-12
    )
    # At K = 2 the bucket, 0.4, is fuller than either kept token and still counts as tail.
    other = torch.tensor([[0.3, 0.3, 0.25, 0.05, 0.05, 0.05]], dtype=torch.float64).log()
    skewed = torch.tensor([[0.2, 0.3, 0.35, 0.05, 0.05, 0.05]], dtype=torch.float64).log()
    value = make_loss("adaptive_kl").value(skewed, signal_of(other, 2)).item()
    half = [make_loss(n).value(skewed, signal_of(other, 2)).item() / 2 for n in ("forward_kl", "reverse_kl")]
    assert value == pytest.approx(sum(half), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_of_exactly_the_asked_mass_does_not_depend_on_the_last_bit(dtype):
    rest = draw(9, n=40, v=5)[0].softmax(-1) / 2
    teacher = torch.cat([torch.full((40, 1), 0.5, dtype=torch.float64), rest], -1).log().to(dtype)
    assert (teacher.softmax(-1)[:, 0] < 0.5).any(), "rounding does decide here"
    student = draw(10, n=40, v=6)[0].to(dtype)
    gap = (teacher.softmax(-1) - student.softmax(-1)).abs()
    share = gap[:, 0] / gap.sum(-1)  # the first token alone is the head
    signal = signal_of(teacher, None)
    forward, reverse = (make_loss(n).value(student, signal) for n in ("forward_kl", "reverse_kl"))
    torch.testing.assert_close(
        make_loss("adaptive_kl").value(student, signal), share * forward + (1 - share) * reverse
    )


def test_a_kl_of_weight_zero_may_be_infinite_in_adaptive_kl():
    student, teacher = ([0.5, 0.5, 0.0], [0.5, 0.25, 0.25])
    logits = torch.tensor([student], dtype=torch.float64).log()
    signal = signal_of(torch.tensor([teacher], dtype=torch.float64).log(), None)
    loss = make_loss("adaptive_kl", head_mass=0.4)
    expected = oracles.adaptive_kl(teacher, student, head_mass=0.4)
    assert make_loss("forward_kl").value(logits, signal).isposinf()
    assert loss.value(logits, signal).item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(loss.grad(logits, signal), autograd_of_value(loss, logits, signal))


def test_results_are_float32_at_least_and_float64_if_either_side_is():
    student, teacher = draw(5)
    for loss in map(make_loss, LOSSES):
        for s, t, expected in [
            (torch.bfloat16, torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.float32, torch.float32),
            (torch.float32, torch.float64, torch.float64),
        ]:
            for k in (None, 3):
                signal = signal_of(teacher.to(t), k)
                assert loss.value(student.to(s), signal).dtype == expected
                assert loss.grad(student.to(s), signal).dtype == expected


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_logits_give_the_float64_loss_of_the_same_stored_numbers(name):
    student, teacher = (x.to(torch.bfloat16) for x in draw(6, v=64))
    for k in (None, 8):
        half = make_loss(name).value(student, signal_of(teacher, k))
        double = make_loss(name).value(student.double(), signal_of(teacher.double(), k))
        torch.testing.assert_close(half.double(), double, rtol=1e-5, atol=1e-6)


def test_two_coins_give_the_known_values():
    student = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    known = {"forward_kl": 0.22629, "reverse_kl": 0.31124, "jsd": 0.06329, "total_variation": 0.3}
    for name in LOSSES:
        value = make_loss(name).value(student, TeacherSignal.dense(teacher)).item()
        assert value == pytest.approx(oracles.ORACLES[name]([0.9, 0.1], [0.6, 0.4]), rel=1e-12)
        assert value == pytest.approx(known.get(name, value), abs=5e-6)


def test_running_the_module_prints_every_loss_on_two_coins_and_nothing_on_stderr():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stillroom.losses.divergences"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == _demonstrate() + "\n"
    assert done.stderr == ""
    rows = {line.split("(")[0].split()[0]: line for line in done.stdout.splitlines()[2:]}
    assert set(rows) == set(LOSSES)
    assert "0.22629" in rows["forward_kl"]
    assert "0.31124" in rows["reverse_kl"]
    assert "0.06329" in rows["jsd"]


def test_jsd_weight_of_zero_is_refused_and_names_forward_kl():
    with pytest.raises(ConfigError, match=r"weight=0 .*Use forward_kl"):
        make_loss("jsd", weight=0)


def test_jsd_weight_of_one_is_refused_and_names_reverse_kl():
    with pytest.raises(ConfigError, match=r"weight=1 .*Use reverse_kl"):
        make_loss("jsd", weight=1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("forwrd_kl", {}, "unknown loss 'forwrd_kl'. Did you mean 'forward_kl'"),
        ("jsd", {"wieght": 0.3}, "unknown option of loss jsd 'wieght'. Did you mean 'weight'"),
        ("forward_kl", {"weight": 0.3}, r"unknown option of loss forward_kl 'weight'. Known: \(none\)"),
        ("jsd", {"weight": math.nan}, "weight=nan .* not strictly between 0 and 1"),
        ("jsd", {"weight": "half"}, "weight='half' .* is not a number"),
        ("jsd", {"weight": True}, "weight=True .* is not a number"),
        ("skewed_forward_kl", {"alpha": 0}, "Use forward_kl"),
        ("skewed_reverse_kl", {"alpha": -2}, "Use reverse_kl"),
        ("skewed_reverse_kl", {"alpha": 1}, "compared with itself"),
        ("adaptive_kl", {"head_mass": 1.5}, "Use forward_kl"),
    ],
)
def test_bad_names_and_options_are_refused_with_the_way_out(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_loss(name, **options)


def test_a_loss_says_what_it_is():
    assert str(make_loss("forward_kl")) == "forward_kl"
    assert str(make_loss("jsd", weight=0.3)) == "jsd(weight=0.3)"
    assert str(make_loss("forward_kl", scale_by_temperature_squared=True)) == "forward_kl × temperature²"


def test_a_row_of_ones_own_is_used_like_a_row_of_the_table():
    mine = LossSpec.on_pairs(
        "twice_forward_kl",
        lambda pair: 2 * forward_kl(pair),
        lambda pair: 2 * forward_kl_flow(pair),
        summary="forward KL, twice",
        reference="this test",
    )
    student, teacher = draw(7)
    for k in (None, 3):
        signal = signal_of(teacher, k)
        ours, theirs = make_loss(mine), make_loss("forward_kl")
        torch.testing.assert_close(ours.value(student, signal), 2 * theirs.value(student, signal))
        torch.testing.assert_close(ours.grad(student, signal), 2 * theirs.grad(student, signal))


def test_a_row_that_needs_the_whole_distribution_refuses_top_k():
    row = LossSpec(
        "dense_only",
        lambda logits, signal: (logits - signal.logits).square().sum(-1),
        lambda logits, signal: 2 * (logits - signal.logits),
        summary="squared distance of logits",
        reference="this test",
        accepts_top_k=False,
    )
    student, teacher = draw(8)
    assert make_loss(row).value(student, TeacherSignal.dense(teacher)).shape == (N,)
    with pytest.raises(ConfigError, match="dense_only is not defined on a top-K signal"):
        make_loss(row).value(student, signal_of(teacher, 2))
    with pytest.raises(ConfigError, match="dense_only is not defined on a top-K signal"):
        make_loss(row).grad(student, signal_of(teacher, 2))
