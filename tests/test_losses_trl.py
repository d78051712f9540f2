"""Agreement with TRL, an independent implementation, wherever it has the same loss.

TRL's generalised JSD is forward KL at beta 0, reverse KL at beta 1 and the weighted JSD between, with beta
the teacher's share in the mixture. Tested against trl 1.16: GKD's dense loss, the chunked loss of the
DistillationTrainer, and the tail bucket of its self-distillation trainer.
"""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL warns on import that these parts may change

import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from stillroom.losses import TeacherSignal, hard_label_loss, make_loss, plain_loss, token_weights

BETAS = {
    0.0: ("forward_kl", {}),
    0.1: ("jsd", {"weight": 0.1}),
    0.5: ("jsd", {"weight": 0.5}),
    0.9: ("jsd", {"weight": 0.9}),
    1.0: ("reverse_kl", {}),
}
B, T, V, H = 3, 6, 29, 8


def draw(*shape, seed):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of_uneven_rows():
    return torch.arange(T)[None] < torch.tensor([[2], [6], [4]])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_dense_losses_equal_those_of_trl_gkd(beta, temperature):
    student, teacher = draw(B, T, V, seed=0).requires_grad_(), draw(B, T, V, seed=1)
    mask = mask_of_uneven_rows()
    labels = torch.where(mask, 0, -100)
    theirs = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=labels, beta=beta, temperature=temperature, reduction="batchmean"
    )
    (their_gradient,) = torch.autograd.grad(theirs, student)
    name, options = BETAS[beta]
    signal = TeacherSignal.dense(teacher[mask], temperature=temperature)
    ours = plain_loss(make_loss(name, **options), student[mask], signal, token_weights(mask, 12))
    (our_gradient,) = torch.autograd.grad(ours, student)
    assert ours.item() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_dense_losses_equal_those_of_trl_distillation_trainer(beta, temperature):
    hidden = draw(B, T, H, seed=2).requires_grad_()
    teacher_hidden, head, teacher_head = draw(B, T, H + 3, seed=3), draw(V, H, seed=4), draw(V, H + 3, seed=5)
    mask = mask_of_uneven_rows()
    theirs, _, _ = _chunked_divergence_loss(
        hidden,
        teacher_hidden,
        head,
        teacher_head,
        mask,
        beta=beta,
        num_items_in_batch=12,
        temperature=temperature,
    )
    (their_gradient,) = torch.autograd.grad(theirs, hidden)
    name, options = BETAS[beta]
    signal = TeacherSignal.dense((teacher_hidden @ teacher_head.T)[mask], temperature=temperature)
    ours = plain_loss(make_loss(name, **options), (hidden @ head.T)[mask], signal, token_weights(mask, 12))
    (our_gradient,) = torch.autograd.grad(ours, hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_top_k_losses_equal_trl_with_its_tail_bucket(beta):
    student, teacher = draw(10, V, seed=6).double(), draw(10, V, seed=7).double()
    ids = teacher.topk(4, dim=-1).indices
    theirs = compute_divergence(
        add_tail_bucket(student.log_softmax(-1).gather(-1, ids)),
        add_tail_bucket(teacher.log_softmax(-1).gather(-1, ids)),
        alpha=beta,
    )
    name, options = BETAS[beta]
    ours = make_loss(name, **options).value(student, TeacherSignal.dense(teacher).keep_top_k(4))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_hard_label_loss_equals_the_cross_entropy_of_the_hugging_face_trainer():
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits, targets = draw(12, V, seed=8), torch.arange(12)
    theirs = fixed_cross_entropy(logits, targets, num_items_in_batch=torch.tensor(12))
    torch.testing.assert_close(hard_label_loss(logits, targets).mean(), theirs, rtol=1e-5, atol=0)
