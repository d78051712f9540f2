"""What a teacher signal holds, and what it refuses to hold."""

import math

import pytest
import torch

import oracles
from stillroom.errors import ConfigError, DataError, VocabularyError
from stillroom.losses import LOSSES, TeacherSignal, hard_label_loss, make_loss

NEG_INF = -math.inf


def logits(n=3, v=5, seed=0, dtype=torch.float64):
    return 2 * torch.randn(n, v, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_keep_top_k_holds_the_tempered_whole_vocabulary_probabilities():
    teacher = logits()
    kept = TeacherSignal.dense(teacher, temperature=2.0, tokenizer_fingerprint="abc").keep_top_k(2)
    assert (kept.kind, kept.n, kept.vocab_size, kept.temperature) == ("top_k", 3, 5, 2.0)
    assert kept.tokenizer_fingerprint == "abc"
    for row, ids, logprobs, tail in zip(
        teacher.tolist(),
        kept.token_ids.tolist(),
        kept.logprobs.tolist(),
        kept.tail_logprob.tolist(),
        strict=True,
    ):
        p = oracles.softmax(row, 2.0)
        assert ids == sorted(range(5), key=lambda i: -p[i])[:2]
        expected = [math.log(x) for x in oracles.coarsen(p, ids)]
        assert [*logprobs, tail] == pytest.approx(expected, rel=1e-12)


def test_a_tail_of_one_in_a_hundred_million_survives_float32():
    teacher = torch.tensor([[20.0, 1.0, 0.0]])
    tail = TeacherSignal.dense(teacher).keep_top_k(1).tail_logprob.item()
    p = oracles.softmax([20.0, 1.0, 0.0])
    assert tail == pytest.approx(math.log(p[1] + p[2]), rel=1e-6)
    kept = teacher.softmax(-1)[0, 0]
    assert (1 - kept).item() == 0.0, "what one minus the kept mass would have said"


def test_keeping_everything_leaves_no_tail():
    assert TeacherSignal.dense(logits()).keep_top_k(5).tail_logprob.tolist() == [NEG_INF] * 3


@pytest.mark.parametrize("k", [0, 6, -1])
def test_keeping_more_tokens_than_there_are_is_refused(k):
    with pytest.raises(ConfigError, match=f"K={k} on a vocabulary of 5.*Set top_k between 1 and 5"):
        TeacherSignal.dense(logits()).keep_top_k(k)


def test_keeping_top_k_twice_is_refused():
    with pytest.raises(ConfigError, match="the other tokens are gone"):
        TeacherSignal.dense(logits()).keep_top_k(3).keep_top_k(2)


def test_a_signal_is_never_half_of_each_form():
    ids, logprobs, tail = torch.tensor([[0]]), torch.tensor([[-0.5]]), torch.tensor([-0.9])
    for parts in (
        {},
        {"token_ids": ids, "logprobs": logprobs},
        {"token_ids": ids, "tail_logprob": tail},
        {"logits": torch.zeros(1, 4), "token_ids": ids},
        {"logits": torch.zeros(1, 4), "token_ids": ids, "logprobs": logprobs, "tail_logprob": tail},
    ):
        with pytest.raises(ConfigError, match="neither logits alone nor"):
            TeacherSignal(vocab_size=4, **parts)
    assert TeacherSignal(vocab_size=4, token_ids=ids, logprobs=logprobs, tail_logprob=tail).kind == "top_k"


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(ConfigError, match="cannot divide logits"):
        TeacherSignal.dense(logits(), temperature=temperature)


def test_logits_of_another_width_than_the_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="logits of 5 columns with vocab_size=7"):
        TeacherSignal(vocab_size=7, logits=logits())


def test_stored_top_k_is_checked_at_the_door():
    def build(ids, logprobs, tail, vocab_size=4):
        return TeacherSignal.top_k(
            torch.tensor([ids]), torch.tensor([logprobs]), torch.tensor([tail]), vocab_size=vocab_size
        )

    log = math.log
    assert build([2, 0], [log(0.7), log(0.2)], log(0.1)).n == 1
    with pytest.raises(ConfigError, match="K=2 on a vocabulary of 1"):
        build([0, 0], [log(0.7), log(0.3)], NEG_INF, vocab_size=1)
    with pytest.raises(DataError, match=r"token id 4 in row 0 is outside \[0, 4\)"):
        build([2, 4], [log(0.7), log(0.2)], log(0.1))
    with pytest.raises(DataError, match="token id -1 in row 0"):
        build([2, -1], [log(0.7), log(0.2)], log(0.1))
    with pytest.raises(DataError, match="token id 2 is kept twice in row 0"):
        build([2, 2], [log(0.7), log(0.2)], log(0.1))
    with pytest.raises(DataError, match=r"add up to 2\.0052"):  # a mass of 0.1 where its log belongs
        build([2, 0], [log(0.7), log(0.2)], 0.1)
    with pytest.raises(DataError, match="keeps the whole vocabulary has a tail"):
        build([0, 1], [log(0.7), log(0.295)], log(0.005), vocab_size=2)
    half = torch.tensor([[0.7, 0.2]]).log().half()
    assert (
        TeacherSignal.top_k(torch.tensor([[2, 0]]), half, half.new_tensor([0.1]).log(), vocab_size=4).n == 1
    )


def test_narrow_stored_ids_are_widened():
    dense = TeacherSignal.dense(logits()).keep_top_k(2)
    stored = TeacherSignal.top_k(dense.token_ids.int(), dense.logprobs, dense.tail_logprob, vocab_size=5)
    student = logits(seed=1)
    assert torch.equal(make_loss("jsd").value(student, stored), make_loss("jsd").value(student, dense))


def test_a_signal_never_carries_the_teachers_graph():
    teacher = logits().requires_grad_()
    tempered = teacher.log_softmax(-1)
    for signal in (
        TeacherSignal.dense(teacher),
        TeacherSignal.dense(teacher).keep_top_k(2),
        TeacherSignal(vocab_size=5, logits=teacher),
        TeacherSignal.top_k(
            torch.arange(5).expand(3, 5),
            tempered,
            torch.full((3,), NEG_INF, dtype=torch.float64),
            vocab_size=5,
        ),
    ):
        for tensor in (signal.logits, signal.logprobs, signal.tail_logprob):
            assert tensor is None or not tensor.requires_grad


@pytest.mark.parametrize("k", [None, 2])
def test_select_takes_the_named_positions_and_keeps_everything_else(k):
    dense = TeacherSignal.dense(logits(), temperature=2.0, tokenizer_fingerprint="abc")
    signal = dense if k is None else dense.keep_top_k(k)
    student = logits(seed=1)
    value = make_loss("jsd").value(student, signal)
    for index in (torch.tensor([2, 0]), torch.tensor([True, False, True]), slice(1, 3)):
        some = signal.select(index)
        assert (some.temperature, some.tokenizer_fingerprint, some.kind) == (2.0, "abc", signal.kind)
        torch.testing.assert_close(make_loss("jsd").value(student[index], some), value[index])
    assert signal.select(slice(0, 0)).n == 0
    assert signal.to("cpu").n == 3


def test_unlike_widths_are_refused_before_the_loss_can_compare_them():
    for signal in (TeacherSignal.dense(logits(v=6)), TeacherSignal.dense(logits(v=6)).keep_top_k(2)):
        with pytest.raises(VocabularyError, match=r"5 columns and the teacher's signal 6.*shared ids"):
            make_loss("forward_kl").value(logits(v=5), signal)


def test_unlike_numbers_of_positions_are_refused():
    with pytest.raises(
        DataError, match=r"cover 3 positions and the teacher's signal 2.*same completion mask"
    ):
        make_loss("forward_kl").value(logits(), TeacherSignal.dense(logits(n=2)))


def test_a_hard_label_is_a_certain_teacher_and_its_cross_entropy_is_the_usual_one():
    student, targets = logits(n=4).requires_grad_(), torch.tensor([3, 0, 4, 4])
    value = hard_label_loss(student, targets)
    expected = torch.nn.functional.cross_entropy(student, targets, reduction="none")
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    signal = TeacherSignal.hard(targets, vocab_size=5)
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(make_loss("cross_entropy").grad(student.detach(), signal), gradient)
    # Nothing is left to learn from a certain teacher but its choice, so forward KL says the same.
    torch.testing.assert_close(make_loss("forward_kl").value(student.detach(), signal), expected.detach())


def test_a_masked_label_that_slipped_through_is_refused():
    with pytest.raises(DataError, match=r"token id -100 in row 1 is outside \[0, 5\).*Drop masked positions"):
        hard_label_loss(logits(n=2), torch.tensor([3, -100]))


def test_signals_without_positions_are_allowed_everywhere():
    empty = logits(n=0).requires_grad_()
    for signal in (
        TeacherSignal.dense(logits(n=0)),
        TeacherSignal.dense(logits(n=0)).keep_top_k(2),
        TeacherSignal.dense(logits(n=0)).keep_top_k(5),
        TeacherSignal.hard(torch.zeros(0, dtype=torch.long), vocab_size=5),
    ):
        for name in LOSSES:
            assert make_loss(name).value(empty, signal).shape == (0,)
            assert make_loss(name).grad(empty, signal).shape == (0, 5)
