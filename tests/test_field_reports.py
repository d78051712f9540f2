"""Field reports that concern the whole path from rows to weights, and stand in no other file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.test_trainer import VOCAB, rows, student, teacher, trainer
from tests.tiny import char_tokenizer, tiny_llama

from stillroom.data.batches import TrainingRow, collate, supervised_logits
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer


def recorded(t: DistillationTrainer) -> list[tuple[int, tuple[str, ...], list[list[int]], list[bool]]]:
    """Step, row ids, completion ids and on-policy flags of every batch from now on, as they are trained on."""
    seen = []
    objective = t._objective

    def recording(model, batch, denominator):
        completions = [
            ids[mask].tolist() for ids, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)
        ]
        seen.append((t.state.global_step, batch.row_ids, completions, batch.is_on_policy.tolist()))
        return objective(model, batch, denominator)

    t._objective = recording
    return seen


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["off-policy", "on-policy"])
def test_report_22_the_teacher_reads_its_own_template_and_the_students_answer(
    fraction: float, tmp_path: Path
) -> None:
    of_student, of_teacher = char_tokenizer(), char_tokenizer()
    of_student.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}{% else %}"
        " Assistant:{{ m.content }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} Assistant:{% endif %}"
    )
    of_teacher.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}|{{ m.content }}{% else %}"
        "|ask teacher {{ m.content }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}|ask teacher {% endif %}"
    )
    data = [
        {"messages": [{"role": "user", "content": f"q{i}" * (i + 1)}, {"role": "assistant", "content": "ok"}]}
        for i in range(4)
    ]
    master = teacher()
    read: list[torch.Tensor] = []
    master.register_forward_pre_hook(
        lambda _, __, kw: read.append(torch.where(kw["attention_mask"] > 0, kw["input_ids"], -1)),
        with_kwargs=True,
    )
    t = DistillationTrainer(
        student(),
        master,
        DistillationConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            disable_tqdm=True,
            on_policy_fraction=fraction,
            max_completion_length=6,
        ),
        data,
        processing_class=of_student,
        teacher_processing_class=of_teacher,
    )
    trained = recorded(t)
    t.train()
    [(_, names, answers, flags)] = trained
    assert flags == [fraction == 1.0] * 4
    texts = {of_teacher.decode([i for i in ids.tolist() if i >= 0]) for ids in read[-1]}
    asked = {row.id: row.teacher_prompt_ids for row in t.train_dataset}
    assert texts == {of_teacher.decode([*asked[n], *a]) for n, a in zip(names, answers, strict=True)}
    assert all("|ask teacher " in text and "Assistant" not in text for text in texts)
    assert all("Assistant" in of_student.decode(row.prompt_ids) for row in t.train_dataset)
    # Scores are cut by the teacher's prompt: as many as the answers have tokens, each that of the row alone.
    batch = collate([row.with_completion((7, 8, 2)) for row in t.train_dataset])
    signal = t.terms[0].source.signal(batch)
    assert batch.num_supervised == 12
    assert signal.logits.shape == (12, VOCAB)
    for number, row in enumerate(t.train_dataset):
        with torch.no_grad():
            alone = master(
                input_ids=torch.tensor([[*row.teacher_prompt_ids, 7, 8, 2]]),
                attention_mask=torch.ones(1, len(row.teacher_prompt_ids) + 3, dtype=torch.int64),
            ).logits[0, -4:-1]
        torch.testing.assert_close(
            signal.logits[3 * number : 3 * number + 3].log_softmax(1), alone.log_softmax(1), rtol=0, atol=1e-4
        )


def test_report_29_rows_are_never_packed_so_no_neighbour_changes_a_score() -> None:
    def scores(model, neighbour: tuple[int, ...]) -> torch.Tensor:
        batch = collate(
            [
                TrainingRow("a", (1, 5), neighbour, (True,) * len(neighbour)),
                TrainingRow("b", (1, 7, 8), (9, 10, 2), (True,) * 3),
            ]
        )
        # A row of its own for each, with positions from 0.
        assert batch.student.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5]]
        with torch.no_grad():
            return supervised_logits(model, batch.student, batch.completion_mask)[len(neighbour) :]

    for model in (student(), teacher()):
        model.set_attn_implementation("eager")
        first = scores(model, (11, 12, 13, 2))
        assert torch.equal(first, scores(model, (40, 41, 42, 2)))
        with torch.no_grad():
            alone = model(torch.tensor([[1, 7, 8, 9, 10, 2]])).logits[0, 2:5]
        torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)


def test_report_68_every_prompt_is_trained_once_an_epoch_however_often_the_run_stops(tmp_path: Path) -> None:
    data = [TrainingRow(f"r{i}", (1, 4 + i), (30 + i, 2), (True, True)) for i in range(20)]
    settings = {
        "data": data,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,  # six rows are fetched ahead of each step; the last step of an epoch has two
        "max_steps": 8,
        "on_policy_fraction": 0.5,
        "max_completion_length": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 20,
    }
    whole = trainer(tmp_path, student(), teacher(), **settings)
    straight = recorded(whole)
    whole.train()
    folder = Path(whole.args.output_dir)
    stopped: list = []
    for begin, end in ((0, 1), (1, 3), (3, 4), (4, 6), (6, 8)):  # also at the border of the epochs, step 4
        part = trainer(tmp_path, student(), teacher(), **settings)
        seen = recorded(part)
        part.train(resume_from_checkpoint=str(folder / f"checkpoint-{begin}") if begin else None)
        stopped += [entry for entry in seen if begin <= entry[0] < end]
    assert stopped == straight
    for epoch in (0, 1):
        names = Counter(n for step, ids, *_ in stopped if step // 4 == epoch for n in ids)
        assert names == Counter(row.id for row in data)


def test_report_69_a_step_that_was_written_ahead_is_written_again_on_resume(tmp_path: Path) -> None:
    # A step's completions serve all its micro-steps; none are kept for a later step, so nothing can be missing.
    settings = {
        "on_policy_fraction": 1.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 10,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
    }
    whole = trainer(tmp_path, student(), teacher(), **settings)
    straight = recorded(whole)
    whole.train()
    for step in (1, 3):
        resumed = trainer(tmp_path, student(), teacher(), **settings)
        seen = recorded(resumed)
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{step}"))
        assert seen == [entry for entry in straight if entry[0] >= step]
        assert all(flag for *_, flags in seen for flag in flags)
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[key]), key


UNUSED_PARAMETERS = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from tests.test_trainer import TOKENIZER, rows, student, teacher
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer

pupil, master = student(), teacher()
pupil.projector = torch.nn.Linear(16, 24)  # of some feature loss: no loss of this run uses it
args = DistillationConfig(
    output_dir=sys.argv[1], per_device_train_batch_size=2, max_steps=2, learning_rate=0.1, save_strategy="no",
    disable_tqdm=True, use_cpu=True, ddp_timeout=60,
)
assert args.world_size == 2
trainer = DistillationTrainer(pupil, master, args, rows(), processing_class=TOKENIZER)
before = pupil.lm_head.weight.clone()
assert trainer.train().global_step == 2
assert isinstance(trainer.model_wrapped, DistributedDataParallel)
assert not torch.equal(before, pupil.lm_head.weight)
assert trainer.terms[0].source.model is master
assert not any(isinstance(module, DistributedDataParallel) for module in master.modules())
"""


@pytest.mark.slow
def test_report_73_two_workers_train_a_student_with_unused_parameters_and_leave_the_teacher_unwrapped(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNUSED_PARAMETERS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path / "out")],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((".", "src"))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_report_86_student_and_teacher_of_different_widths_give_the_divergence_of_their_whole_outputs(
    tmp_path: Path,
) -> None:
    narrow, wide = tiny_llama(VOCAB, seed=1, hidden=8), tiny_llama(VOCAB, seed=7, hidden=16, layers=3)
    t = trainer(tmp_path, narrow, wide, loss="forward_kl")
    data = rows()
    loss = t.compute_loss(t.model, {"batch": collate(data), "micro_step": 0})
    total, count = 0.0, 0
    for row in data:  # from the definition, one row at a time, every logit formed
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        with torch.no_grad():
            p, q = (
                m(ids).logits[0, len(row.prompt_ids) - 1 : -1].double().softmax(1) for m in (wide, narrow)
            )
        total += float((p * (p / q).log()).sum())
        count += len(row.completion_ids)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert total / count > 0.1
