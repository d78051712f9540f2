"""Vocabularies: ids that mean the same strings, and logit columns that mean no token."""

from __future__ import annotations

import logging

import pytest
import torch
from tokenizers import pre_tokenizers

from stillroom.errors import VocabularyError
from stillroom.models.vocab import fingerprint, restrict, shared_vocabulary, template_hash
from tiny import tiny_llama
from tokenizers_in_code import CHATML, byte_tokenizer, word_tokenizer

WORDS = ["<unk>", *(f"w{i}" for i in range(1, 90))]


def forward_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """From the definition: Σ p (ln p - ln q), mean over positions."""
    p = teacher_logits.double().softmax(-1)
    q = student_logits.double().softmax(-1)
    return (p * (p.log() - q.log())).sum(-1).mean()


def test_report_1_padded_widths_train_as_if_the_teacher_were_as_narrow_as_the_student():
    tokenizer = word_tokenizer(WORDS)
    student, wide = tiny_llama(96, seed=1), tiny_llama(104, seed=2)
    narrow = tiny_llama(96, seed=3)
    state = wide.state_dict()
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        state[key] = state[key][:96]
    narrow.load_state_dict(state)
    ids = torch.arange(12)[None]
    gradients, losses = [], []
    for teacher in (wide, narrow):
        shared = shared_vocabulary(tokenizer, tokenizer, 96, teacher.config.vocab_size)
        assert shared.num_shared == 90
        with torch.no_grad():
            target = restrict(teacher(ids).logits, shared)
        student.zero_grad()
        loss = forward_kl(restrict(student(ids).logits, shared), target)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in student.parameters()])
    assert losses[0] > 0.1
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    # Surplus columns get no gradient; real ones do.
    head = student.lm_head.weight.grad
    assert head[90:].abs().max() == 0 < head[:90].abs().max()


def test_report_3_phantom_columns_have_exactly_no_mass():
    tokenizer = word_tokenizer(["a", "b", "c", "d"])
    shared = shared_vocabulary(tokenizer, tokenizer, 6, 4)
    real = torch.tensor([2.0, 1.0, 0.0, -1.0])
    widened = torch.cat([real, torch.zeros(2)])
    expected = torch.tensor([0.6439, 0.2369, 0.0871, 0.0321])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        kept = restrict(widened.to(dtype), shared)
        assert kept.dtype == dtype
        assert kept.shape == (4,)
        torch.testing.assert_close(kept.float().softmax(-1), expected, atol=tolerance, rtol=0)
    # Zeros are no absence: kept in the softmax, the phantoms would hold 14.84 % of the mass.
    assert widened.softmax(-1)[4:].sum().item() == pytest.approx(0.1484, abs=1e-4)


def test_report_4_swapped_ids_are_refused_and_counted():
    swapped = list(WORDS)
    swapped[7], swapped[8] = swapped[8], swapped[7]
    with pytest.raises(VocabularyError) as raised:
        shared_vocabulary(word_tokenizer(WORDS), word_tokenizer(swapped), 96, 96)
    message = str(raised.value)
    assert "2 of 90 ids" in message
    assert "id 7: student 'w7', teacher 'w8'" in message
    assert "completions: teacher" in message


def test_report_4_extra_teacher_tokens_are_cut_off_and_logged(caplog):
    teacher = word_tokenizer([*WORDS, "x", "y", "z"])
    with caplog.at_level(logging.WARNING):
        shared = shared_vocabulary(word_tokenizer(WORDS), teacher, 96, 96)
    assert (shared.num_shared, shared.teacher_extra, shared.student_extra) == (90, 3, 0)
    assert not shared.same_tokenizer
    assert "90 tokens that both models have" in caplog.text
    probabilities = restrict(torch.randn(5, 96), shared).softmax(-1)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))


def test_extra_student_tokens_may_not_occur_in_the_data():
    shared = shared_vocabulary(word_tokenizer([*WORDS, "mine"]), word_tokenizer(WORDS), 96, 96)
    assert shared.student_extra == 1
    shared.require([0, 89])
    with pytest.raises(VocabularyError, match=r"1 ids \(first: \[90\]\)"):
        shared.require([3, 90, 90])


def test_report_5_permuted_ids_are_refused():
    words = WORDS[:20]
    permuted = [words[0], *words[:0:-1]]
    with pytest.raises(VocabularyError, match=r"18 of 20 ids name different strings"):
        shared_vocabulary(word_tokenizer(words), word_tokenizer(permuted), 20, 20)


def test_a_head_narrower_than_its_tokenizer_is_refused():
    with pytest.raises(VocabularyError, match="teacher's tokenizer has 10 ids"):
        shared_vocabulary(word_tokenizer(WORDS), word_tokenizer(WORDS), 96, 80)


def test_logits_of_an_unknown_width_are_refused():
    shared = shared_vocabulary(word_tokenizer(WORDS), word_tokenizer(WORDS), 96, 104)
    for width in (90, 96, 104):
        assert restrict(torch.zeros(2, 3, width), shared).shape == (2, 3, 90)
    with pytest.raises(VocabularyError, match="100 columns"):
        restrict(torch.zeros(2, 3, 100), shared)


def test_equal_tokenizers_share_everything_in_silence(caplog):
    with caplog.at_level(logging.INFO):
        shared = shared_vocabulary(byte_tokenizer(), byte_tokenizer(), 261, 261)
    assert shared.same_tokenizer
    assert shared.num_shared == 261
    assert not caplog.records


def test_report_76_the_fingerprint_changes_with_all_that_shapes_ids_and_with_nothing_else():
    base = byte_tokenizer()
    print_of_base = fingerprint(base)
    assert print_of_base == fingerprint(byte_tokenizer())
    assert len(print_of_base) == 64

    used = byte_tokenizer()
    used(["a", "bc"], padding=True, truncation=True, max_length=2)
    used.padding_side = "left"
    assert fingerprint(used) == print_of_base
    assert fingerprint(byte_tokenizer(template=CHATML)) == print_of_base

    other_splitter = byte_tokenizer()
    other_splitter.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    others = [
        byte_tokenizer(merges=[("a", "b")]),
        byte_tokenizer(prepends_start=True),
        byte_tokenizer(pad="<unk>"),
        other_splitter,
    ]
    assert len({print_of_base, *map(fingerprint, others)}) == 5


def test_report_76_the_template_hash_changes_with_one_word_of_the_template():
    templates = (None, CHATML, CHATML.replace("assistant", "model"))
    hashes = [template_hash(byte_tokenizer(template=template)) for template in templates]
    assert len(set(hashes)) == 3
    assert hashes == [template_hash(byte_tokenizer(template=template)) for template in templates]
