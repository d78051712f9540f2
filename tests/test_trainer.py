"""The real trainer on tiny models: what it must not depend on, and what it must."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tests.tiny import char_tokenizer, tiny_llama

from stillroom import seeds
from stillroom.data.batches import TrainingRow, collate, supervised_logits
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.losses import LOSSES
from stillroom.training.checkpoints import MARKER, complete_checkpoints, last_complete_checkpoint
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer

TOKENIZER = char_tokenizer()
VOCAB = len(TOKENIZER)
DIVERGENCES = [name for name, spec in LOSSES.items() if spec.zero_at_equality]


def rows(lengths=(2, 2, 2, 2, 16, 16, 16, 16), prompt_length: int = 5) -> list[TrainingRow]:
    made = []
    for i, length in enumerate(lengths):
        ids = [4 + seeds.key(0, "ids", i, j) % (VOCAB - 4) for j in range(prompt_length + i % 3 + length)]
        prompt, completion = ids[: prompt_length + i % 3], [*ids[prompt_length + i % 3 :][:-1], 2]
        made.append(TrainingRow(f"r{i}", (1, *prompt), tuple(completion), (True,) * length))
    return made


def trainer(
    tmp_path: Path, student, teacher=None, data=None, eval_dataset=None, **settings
) -> DistillationTrainer:
    defaults = {
        "output_dir": str(tmp_path / f"out{len(list(tmp_path.iterdir()))}"),
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "max_completion_length": 8,
    }
    args = DistillationConfig(**(defaults | settings))
    return DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=rows() if data is None else data,
        eval_dataset=eval_dataset,
        processing_class=TOKENIZER,
    )


def student(seed: int = 1):
    return tiny_llama(VOCAB, seed=seed)


def teacher():
    return tiny_llama(VOCAB, seed=7, hidden=24, layers=3)


def gradient(
    t: DistillationTrainer, data: list[TrainingRow], denominator: float | None = None
) -> torch.Tensor:
    """Flat gradient of the objective on one batch."""
    t.model.zero_grad()
    loss = t.compute_loss(t.model, {"batch": collate(data), "micro_step": 0}, num_items_in_batch=denominator)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in t.model.parameters()])


# The copy test: a student that equals its teacher has nothing to learn, on every path.


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("path", ["off-policy", "on-policy", "top-k", "hot"])
def test_report_12_a_copy_of_the_teacher_gets_no_loss_and_no_gradient(
    name: str, path: str, tmp_path: Path
) -> None:
    original = teacher()
    settings = {
        "off-policy": {},
        "on-policy": {"on_policy_fraction": 1.0},
        "top-k": {"top_k": 5},
        "hot": {"temperature": 3.0, "scale_by_temperature_squared": True},
    }[path]
    t = trainer(tmp_path, copy.deepcopy(original), original, loss=name, **settings)
    before = copy.deepcopy(t.model.state_dict())
    result = t.train()
    assert abs(result.training_loss) < 1e-6
    # Total variation has a kink at equality; the others must not move any weight.
    if name != "total_variation":
        for key, value in t.model.state_dict().items():
            torch.testing.assert_close(value, before[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_that_differs_is_moved_closer_by_every_loss(name: str, tmp_path: Path) -> None:
    pupil = student()
    t = trainer(tmp_path, pupil, teacher(), loss=name, max_steps=12, optim="adamw_torch", learning_rate=0.01)
    before = t.evaluate(rows())["eval_loss"]
    t.train()
    after = t.evaluate(rows())["eval_loss"]
    assert after < 0.9 * before


# The partition test: it does not matter how a step is cut.


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_reports_44_and_45_weights_after_a_step_do_not_depend_on_the_cut(
    reduction: str, tmp_path: Path
) -> None:
    ends, losses = [], []
    for size, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        t = trainer(
            tmp_path,
            student(),
            teacher(),
            reduction=reduction,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
        )
        losses.append(t.train().training_loss)
        ends.append(torch.cat([p.flatten() for p in t.model.parameters()]))
    start = torch.cat([p.flatten() for p in student().parameters()])
    assert (ends[0] - start).norm() > 1e-3
    for end, loss in zip(ends[1:], losses[1:], strict=True):
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(losses[0], rel=1e-6)


def test_token_mean_and_sequence_mean_differ_on_uneven_rows(tmp_path: Path) -> None:
    token, sequence = (
        gradient(trainer(tmp_path, student(), teacher(), reduction=r), rows())
        for r in ("token_mean", "sequence_mean")
    )
    assert (token - sequence).norm() > 0.05 * token.norm()


def test_report_38_duplicated_rows_change_neither_loss_nor_gradient(tmp_path: Path) -> None:
    t = trainer(tmp_path, student(), teacher())
    once = gradient(t, rows())
    twice = gradient(t, rows() + rows())
    assert (once - twice).norm() < 1e-6 * once.norm()


# The perturb test: what should not matter does not.


def perturbations() -> dict[str, list[TrainingRow]]:
    base = rows()[:4]
    longer = TrainingRow("mate", (1, *range(10, 40)), tuple(range(4, 44)), (False,) * 40)
    return {
        "row order": base[::-1],
        "a longer batch mate that is not trained on (padding)": [*base, longer],
    }


@pytest.mark.parametrize("change", list(perturbations()))
@pytest.mark.parametrize("name", list(LOSSES))
def test_report_15_what_stands_in_other_rows_or_padding_changes_nothing(
    name: str, change: str, tmp_path: Path
) -> None:
    t = trainer(tmp_path, student(), teacher(), loss=name)
    plain = gradient(t, rows()[:4])
    changed = gradient(t, perturbations()[change])
    assert plain.norm() > 1e-4
    assert (changed - plain).norm() < 1e-5 * plain.norm()


def test_report_14_what_the_teacher_says_of_the_prompt_does_not_matter(tmp_path: Path) -> None:
    class Meddler(torch.nn.Module):
        """A teacher whose outputs at all but the completion's predictors are garbage."""

        def __init__(self, model, noise: float) -> None:
            super().__init__()
            self.model, self.noise, self.config = model, noise, model.config

        def forward(self, **inputs):
            kept = inputs.pop("logits_to_keep")
            out = self.model(**inputs)
            out.logits[:, :-kept] += self.noise * torch.randn_like(out.logits[:, :-kept])
            out.logits[:, -1] += self.noise
            return out

    quiet, loud = (
        gradient(trainer(tmp_path, student(), Meddler(teacher(), noise)), rows()) for noise in (0.0, 100.0)
    )
    assert torch.equal(quiet, loud)


# The contrast test: what should matter does.


def test_report_85_another_teacher_gives_another_student_after_one_step(tmp_path: Path) -> None:
    def end(seed: int) -> torch.Tensor:
        t = trainer(tmp_path, student(), tiny_llama(VOCAB, seed=seed))
        t.train()
        assert [line for line in t.state.log_history if "loss/forward_kl_nats" in line]
        return torch.cat([p.flatten() for p in t.model.parameters()])

    assert not torch.allclose(end(7), end(8), atol=1e-6)


def test_report_17_hard_labels_apply_to_dataset_rows_only_and_are_logged_apart(tmp_path: Path) -> None:
    off = trainer(tmp_path, student(), teacher(), hard_label_weight=0.5)
    off.train()
    logged = off.state.log_history[0]
    assert logged["loss"] == pytest.approx(
        logged["loss/forward_kl_nats"] + 0.5 * logged["loss/hard_label_nats"], rel=1e-5
    )
    on = trainer(tmp_path, student(), teacher(), hard_label_weight=0.5, on_policy_fraction=1.0)
    on.train()
    logged = on.state.log_history[0]
    assert "loss/hard_label_nats" not in logged
    assert logged["train/on_policy_row_share"] == 1.0
    assert logged["loss"] == pytest.approx(logged["loss/forward_kl_nats"], rel=1e-5)


def test_cross_entropy_needs_no_teacher_and_equals_the_models_own_loss(tmp_path: Path) -> None:
    pupil = student()
    t = trainer(tmp_path, pupil, None, loss="cross_entropy")
    one = rows()[5]
    ours = t.compute_loss(pupil, {"batch": collate([one])})
    ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
    labels = ids.clone()
    labels[0, : len(one.prompt_ids)] = -100
    torch.testing.assert_close(ours, pupil(input_ids=ids, labels=labels).loss, rtol=1e-5, atol=1e-6)


def test_report_48_on_policy_reverse_kl_moves_a_student_towards_its_teacher(tmp_path: Path) -> None:
    t = trainer(
        tmp_path,
        student(),
        teacher(),
        loss="reverse_kl",
        on_policy_fraction=1.0,
        max_steps=15,
        optim="adamw_torch",
        learning_rate=0.02,
    )
    t.train()
    values = [line["loss/reverse_kl_nats"] for line in t.state.log_history if "loss/reverse_kl_nats" in line]
    assert sum(values[-3:]) < 0.8 * sum(values[:3])


# Who writes, and when.


def test_the_mix_is_a_function_of_seed_and_step_with_the_share_asked_for(tmp_path: Path) -> None:
    def shares(seed: int) -> list[float]:
        t = trainer(tmp_path, student(), teacher(), on_policy_fraction=0.5, max_steps=12, seed=seed)
        t.train()
        return [
            line["train/on_policy_row_share"]
            for line in t.state.log_history
            if "train/on_policy_row_share" in line
        ]

    first = shares(0)
    assert set(first) == {0.0, 1.0}
    assert first == shares(0)
    assert first != shares(1)


def test_report_47_the_denominator_counts_what_the_student_wrote(tmp_path: Path) -> None:
    t = trainer(tmp_path, student(), teacher(), on_policy_fraction=1.0)
    t.train()
    line = t.state.log_history[0]
    assert line["train/supervised_tokens_per_step"] == pytest.approx(8 * line["rollout/length_tokens_mean"])


def test_report_64_a_step_in_which_every_completion_is_cut_off_is_warned_about(
    tmp_path: Path, caplog
) -> None:
    # Greedy, and no first token is an end token, so one token ends nothing.
    settings = {"max_completion_length": 1, "sampling_temperature": 0.0}
    t = trainer(tmp_path, student(), teacher(), on_policy_fraction=1.0, **settings)
    t.train()
    assert "cut off at max_completion_length=1" in caplog.text


def test_every_row_is_trained_once_per_epoch_and_the_order_changes(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []
    t = trainer(
        tmp_path, student(), teacher(), per_device_train_batch_size=3, max_steps=-1, num_train_epochs=2
    )
    objective = t._objective
    t._objective = lambda model, batch, denominator: (
        seen.append(batch.row_ids),
        objective(model, batch, denominator),
    )[1]
    t.train()
    flat = [name for batch in seen for name in batch]
    assert sorted(flat[:8]) == sorted(flat[8:]) == sorted(r.id for r in rows())
    assert flat[:8] != flat[8:]


# The teacher stays as it is.


def test_report_56_the_teacher_is_frozen_deterministic_and_unchanged(tmp_path: Path) -> None:
    original = teacher()
    original.config.attention_dropout = 0.5
    original.train()
    before = copy.deepcopy(original.state_dict())
    t = trainer(tmp_path, student(), original, max_steps=5)
    batch = collate(rows())
    first = t.terms[0].source.signal(batch).logits
    t.model.train()
    assert torch.equal(first, t.terms[0].source.signal(batch).logits)
    t.train()
    assert all(torch.equal(before[k], v) for k, v in original.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in original.parameters())
    held = {id(p) for group in t.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in original.parameters()}


def test_report_70_only_the_student_is_saved_and_it_loads_alone(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    t = trainer(tmp_path, student(), teacher())
    t.train()
    t.save_model(str(tmp_path / "saved"))
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as f:
        assert sum(f.get_tensor(k).numel() for k in f.keys()) == sum(p.numel() for p in t.model.parameters())  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 6]])
    torch.testing.assert_close(again(ids).logits, t.model.eval()(ids).logits)


def test_report_84_evaluating_twice_gives_one_number_and_does_not_disturb_training(tmp_path: Path) -> None:
    t = trainer(tmp_path, student(), teacher(), on_policy_fraction=0.5)
    state = torch.get_rng_state()
    assert t.evaluate(rows()) == t.evaluate(rows())
    assert torch.equal(torch.get_rng_state(), state)

    def end(**settings) -> torch.Tensor:
        t = trainer(tmp_path, student(), teacher(), max_steps=4, on_policy_fraction=0.5, **settings)
        t.train()
        return torch.cat([p.flatten() for p in t.model.parameters()])

    assert torch.equal(end(), end(eval_strategy="steps", eval_steps=1, eval_dataset=rows()))


def test_evaluating_between_log_lines_takes_nothing_from_training_figures(tmp_path: Path) -> None:
    t = trainer(
        tmp_path,
        student(),
        teacher(),
        max_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=rows(),
    )
    t.train()
    train_lines = [line for line in t.state.log_history if "loss" in line]
    eval_lines = [line for line in t.state.log_history if "eval_loss" in line]
    assert train_lines[0]["loss/forward_kl_nats"] == pytest.approx(train_lines[0]["loss"], rel=1e-5)
    assert len(eval_lines) == 2
    assert "loss/forward_kl_nats" not in eval_lines[0]


def test_rows_may_be_plain_dictionaries_in_any_of_the_three_layouts(tmp_path: Path) -> None:
    data = [{"prompt": f"{i}+1=", "completion": str(i + 1), "source": "sums"} for i in range(8)]
    t = trainer(tmp_path, student(), teacher(), data=data)
    t.train()
    assert t.evaluate(data[:2])["eval_loss"] > 0
    prompts = [{"prompt": f"{i}+1="} for i in range(8)]
    trainer(tmp_path, student(), teacher(), data=prompts, on_policy_fraction=1.0).train()
    with pytest.raises(DataError, match="a prompt and no completion"):
        trainer(tmp_path, student(), teacher(), data=prompts)


def test_report_35_the_loss_on_fixed_rows_does_not_depend_on_the_temperature_of_sampling(
    tmp_path: Path,
) -> None:
    cold, hot = (
        gradient(trainer(tmp_path, student(), teacher(), sampling_temperature=t), rows()) for t in (0.5, 2.0)
    )
    assert torch.equal(cold, hot)
    assert not torch.equal(cold, gradient(trainer(tmp_path, student(), teacher(), temperature=2.0), rows()))


# Widths.


def test_reports_1_and_3_padded_columns_of_either_model_change_nothing(tmp_path: Path) -> None:
    def widened(model, width: int):
        model.resize_token_embeddings(width, mean_resizing=False)
        with torch.no_grad():
            model.lm_head.weight[VOCAB:] = 3.0  # large, to be noticed
        return model

    plain = trainer(tmp_path, student(), teacher())
    padded = trainer(tmp_path, widened(student(), VOCAB + 6), widened(teacher(), VOCAB + 14))
    loss, same = (t.compute_loss(t.model, {"batch": collate(rows())}) for t in (plain, padded))
    torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-7)
    same.backward()
    assert not padded.model.lm_head.weight.grad[VOCAB:].any()


# Bad input.


def test_a_nan_teacher_stops_the_first_step_and_is_named(tmp_path: Path) -> None:
    broken = teacher()
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    with pytest.raises(StillroomError, match="teacher's scores are NaN"):
        trainer(tmp_path, student(), broken).train()


def test_a_nan_student_stops_the_first_step_and_is_named(tmp_path: Path) -> None:
    broken = student()
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    with pytest.raises(StillroomError, match="student's scores are NaN"):
        trainer(tmp_path, broken, teacher()).train()


def test_top_k_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"top_k={VOCAB + 1}.*{VOCAB} token ids"):
        trainer(tmp_path, student(), teacher(), top_k=VOCAB + 1)


def test_a_divergence_without_a_teacher_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher_model or source.*cross_entropy"):
        trainer(tmp_path, student(), None)


def test_an_unknown_loss_gets_near_matches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'forward_kl'"):
        trainer(tmp_path, student(), teacher(), loss="forwad_kl")


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_fraction_outside_its_range_is_refused(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_policy_fraction"):
        trainer(tmp_path, student(), teacher(), on_policy_fraction=value)


def test_report_43_a_batch_without_supervised_tokens_gives_zero_and_harms_nobody(
    tmp_path: Path, caplog
) -> None:
    silent = [TrainingRow(f"s{i}", (1, 5), (6, 7), (False, False)) for i in range(2)]
    for name in LOSSES:
        t = trainer(tmp_path, student(), teacher(), loss=name)
        alone = gradient(t, silent)
        assert not alone.any()
        torch.testing.assert_close(gradient(t, [*rows(), *silent]), gradient(t, rows()), rtol=1e-5, atol=1e-7)
    assert "no supervised position" in caplog.text


def test_rows_beyond_the_positions_of_either_model_are_refused(tmp_path: Path) -> None:
    long = [
        TrainingRow("long", (1, *range(4, 80)), tuple(range(4, 64)), (True,) * 60)
    ]  # 137 of 128 positions
    with pytest.raises(DataError, match=r"'long'.*the student has 128 positions"):
        trainer(tmp_path, student(), teacher(), data=long)
    with pytest.raises(DataError, match="the student may write 125"):
        trainer(tmp_path, student(), teacher(), on_policy_fraction=0.5, max_completion_length=125)


# Checkpoints.


def test_only_complete_checkpoints_count_and_old_ones_go_after_the_new_is_whole(tmp_path: Path) -> None:
    t = trainer(
        tmp_path, student(), teacher(), max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2
    )
    t.train()
    folder = Path(t.args.output_dir)
    assert [p.name for p in complete_checkpoints(folder)] == ["checkpoint-4", "checkpoint-6"]
    assert not (folder / "checkpoint-2").exists()
    (folder / "checkpoint-6" / MARKER).unlink()
    assert last_complete_checkpoint(folder).name == "checkpoint-4"


def test_report_67_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {
        "max_steps": 7,  # epochs of 4 steps: the border lies behind the checkpoint of step 3
        "per_device_train_batch_size": 2,
        "on_policy_fraction": 0.5,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
    }

    def with_dropout():
        pupil = student()
        pupil.config.attention_dropout = 0.2
        for layer in pupil.model.layers:
            layer.self_attn.attention_dropout = 0.2
        return pupil

    whole = trainer(tmp_path, with_dropout(), teacher(), **settings)
    whole.train()
    for step in ("3", "6"):
        resumed = trainer(tmp_path, with_dropout(), teacher(), **settings)
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{step}"))
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[key]), (step, key)


def test_lora_trains_adapters_only_and_saves_them(tmp_path: Path) -> None:
    from peft import LoraConfig

    base = student()
    before = copy.deepcopy(base.state_dict())
    args = DistillationConfig(
        output_dir=str(tmp_path / "lora"),
        max_steps=3,
        learning_rate=0.05,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    t = DistillationTrainer(
        base,
        teacher(),
        args,
        rows(),
        processing_class=TOKENIZER,
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    t.train()
    t.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    frozen = {
        k.removeprefix("base_model.model."): v for k, v in t.model.state_dict().items() if "lora" not in k
    }
    for key, value in before.items():
        torch.testing.assert_close(
            frozen.get(key, frozen.get(key.replace(".weight", ".base_layer.weight"))), value
        )
    assert any(p.abs().sum() > 0 for n, p in t.model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_is_pytorchs_own_on_the_same_logits(tmp_path: Path, smoothing: float) -> None:
    pupil = student()
    t = trainer(tmp_path, pupil, loss="cross_entropy", label_smoothing_factor=smoothing)
    batch = collate(rows())
    logits = supervised_logits(pupil, batch.student, batch.completion_mask)
    expected = torch.nn.functional.cross_entropy(logits.double(), batch.targets, label_smoothing=smoothing)
    assert t.compute_loss(t.model, {"batch": batch, "micro_step": 0}).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_label_smoothing_beside_a_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="soft already"):
        trainer(tmp_path, student(), teacher(), label_smoothing_factor=0.1)
