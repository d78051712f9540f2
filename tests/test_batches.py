"""Padding moves nothing: the logits that score a row are those of the row alone."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from stillroom.data.batches import TrainingRow, collate, left_pad, supervised_logits


def row(name: str, prompt: list[int], completion: list[int], mask: list[bool] | None = None) -> TrainingRow:
    return TrainingRow(name, tuple(prompt), tuple(completion), tuple(mask or [True] * len(completion)))


ROWS = [
    row("long", [1, 5, 6, 7, 8, 9, 10, 11], [12, 13, 2]),
    row("short", [1, 5, 6], [7, 8, 9, 10, 11, 12, 2]),
    row("holes", [1, 9], [3, 4, 5, 6, 2], [True, False, False, True, True]),
]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=84, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("model", [tiny_llama(), gpt2()], ids=["rotary", "learned positions"])
def test_reports_27_and_28_scores_in_a_padded_batch_equal_those_of_each_row_alone(model) -> None:
    with torch.no_grad():
        together = collate(ROWS)
        batched = supervised_logits(model, together.student, together.completion_mask)
        alone = []
        for r in ROWS:
            ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
            logits = model(input_ids=ids).logits[
                0, len(r.prompt_ids) - 1 : -1
            ]  # output at t - 1 scores token t
            alone.append(logits[torch.tensor(r.completion_mask)])
    torch.testing.assert_close(batched, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert together.targets.tolist() == [12, 13, 2, 7, 8, 9, 10, 11, 12, 2, 3, 6, 2]


def test_report_11_the_first_completion_token_is_scored_by_the_last_prompt_token() -> None:
    # A bigram model: the logits of a token's successor are a row of a table, whatever stands before.
    class Bigram(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.log(torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.1, 0.6], [0.4, 0.4, 0.2]]))

        def forward(self, input_ids, logits_to_keep, **_):
            return type("Out", (), {"logits": self.table[input_ids][:, -logits_to_keep:]})

    batch = collate([row("bos a b", [0], [1, 2])])
    logits = supervised_logits(Bigram(), batch.student, batch.completion_mask)
    scored = logits.log_softmax(1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(scored, torch.tensor([0.7, 0.6]).log())


def test_report_18_masks_come_from_lengths_so_an_end_id_equal_to_the_pad_id_is_still_trained() -> None:
    batch = collate([row("a", [1], [5, 6, 0]), row("b", [1], [5, 6, 7, 8, 0])])  # 0 is pad and end
    assert batch.completion_mask.sum(1).tolist() == [3, 5]
    assert batch.student.attention_mask.sum(1).tolist() == [4, 6]
    assert batch.targets.tolist() == [5, 6, 0, 5, 6, 7, 8, 0]


def test_the_teacher_reads_its_own_prompt_and_the_same_completion() -> None:
    own = TrainingRow("a", (1, 5, 6), (7, 2), (True, True), teacher_prompt_ids=(1, 9, 9, 9, 9))
    batch = collate([own, ROWS[1]])
    assert batch.teacher is not batch.student
    assert batch.teacher.input_ids[0].tolist()[:7] == [1, 9, 9, 9, 9, 7, 2]
    model = tiny_llama()
    with torch.no_grad():
        scored = supervised_logits(model, batch.teacher, batch.completion_mask)[:2]
        alone = model(input_ids=torch.tensor([[1, 9, 9, 9, 9, 7, 2]])).logits[0, 4:-1]
    torch.testing.assert_close(scored, alone, rtol=1e-5, atol=1e-5)


def test_without_prompts_of_their_own_teacher_and_student_share_one_view() -> None:
    batch = collate(ROWS)
    assert batch.teacher is batch.student
    moved = batch.to("cpu")
    assert moved.teacher is moved.student


def test_a_completion_by_the_student_replaces_ids_and_mask_and_says_so() -> None:
    written = ROWS[2].with_completion([4, 4, 2])
    assert written.completion_mask == (True, True, True)
    assert written.is_on_policy
    assert collate([written, ROWS[0]]).is_on_policy.tolist() == [True, False]


def test_left_padding_keeps_every_row_at_the_right_edge() -> None:
    ids, mask = left_pad([[5], [6, 7, 8]])
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
