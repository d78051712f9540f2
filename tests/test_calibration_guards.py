"""Monitors, and the guard inside a real Trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import tiny_llama
from transformers import Trainer, TrainerState, TrainingArguments

from stillroom import stats
from stillroom.calibration.guards import KL_WINDOW, GuardCallback, GuardReading
from stillroom.calibration.monitors import ALARMS, Reading, alarms, read
from stillroom.calibration.rollouts import Written
from stillroom.commands.display import RunCallback, make_console
from stillroom.config import RewardSpec
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import Chains
from stillroom.runs import Run


def row(ids, text=None, *, ended=True, score: float | None = 1.0) -> Written:
    text = "".join(chr(97 + i % 26) for i in ids) if text is None else text
    return Written("e", "p", (1,), tuple(ids), text, 2 if ended else None, score)


# --- monitors


def test_a_reading_is_what_its_fields_say() -> None:
    found = read([row([1, 2, 3, 4, 5]), row([7] * 11, ended=False, score=None)], entropy=0.5)
    assert found.length == 8
    assert found.truncated == found.unparsed == 0.5
    # 8 four-grams, one of them distinct; the other completion repeats nothing
    assert found.repetition == pytest.approx((0 + 7 / 8) / 2)
    assert sum(found.characters.values()) == pytest.approx(1)
    with pytest.raises(DataError):
        read([])


def styles() -> tuple[list[Written], list[Written]]:
    """Worked and direct gold of the same walks."""
    tokenizer = tokenizers.build("chars")

    def written(style: str) -> list[Written]:
        return [
            row(tokenizer.encode(str(e.completion), add_special_tokens=False), str(e.completion))
            for e in Chains(style=style).sample("heldout", 60, seed=0)
        ]

    return written("worked"), written("direct")


def test_a_change_of_style_sounds_no_alarm_in_either_direction_from_the_mixture() -> None:
    worked, direct = styles()
    mixture = read(worked[:30] + direct[30:], entropy=0.1)
    assert read(worked).length / read(direct).length > 5
    assert alarms(read(worked, entropy=0.02), mixture) == []
    assert alarms(read(direct, entropy=0.2), mixture) == []


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("length", [row([i % 26 for i in range(26)])]),
        ("repetition", [row([5, 6] * 8)]),
        ("alphabet", [row([1, 2, 3], "日本語")]),
        ("truncated", [row([1, 2, 3], ended=False)]),
        ("unparsed", [row([1, 2, 3], score=None)]),
    ],
)
def test_every_monitor_sounds_on_its_planted_fault_alone_and_not_on_the_control(name: str, broken) -> None:
    letters = [row([(i + j) % 26 for j in range(12)]) for i in range(0, 26, 2)]
    original, control = read(letters, entropy=0.3), read(letters[::-1][:10], entropy=0.35)
    assert alarms(control, original) == []
    sounding = alarms(read(broken, entropy=0.3), original)
    assert [sentence.split(":")[0] for sentence in sounding] == [name]


def test_entropy_sounds_when_it_multiplies_and_thresholds_can_be_moved() -> None:
    original, now = read([row([1, 2, 3])], entropy=0.1), read([row([1, 2, 3])], entropy=0.5)
    assert [s.split(":")[0] for s in alarms(now, original)] == ["entropy"]
    assert alarms(now, original, {"entropy": 6.0}) == []
    assert alarms(read([row([1, 2, 3])]), original) == []  # not measured: nothing to say
    with pytest.raises(ConfigError, match="repetition"):
        alarms(now, original, {"repetitoin": 1.0})


def test_every_alarm_says_its_value_and_threshold() -> None:
    assert set(ALARMS) == {"length", "repetition", "alphabet", "truncated", "unparsed", "entropy"}
    original, now = read([row([1, 2, 3])]), read([row([1, 2, 3], ended=False)])
    assert alarms(now, original) == [
        "truncated: the rise of the share of completions that are cut off is 1, above 0.1"
    ]


# --- the guard, in a real Trainer


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int):
        ids = torch.tensor([1, 4 + i % 60, 5, 6, 7])
        return {"input_ids": ids, "labels": ids}


class WithKL(Trainer):
    """Logs a KL beside the loss, as GRPOTrainer does."""

    kls: list[float]

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs = {**logs, "kl": self.kls[self.state.global_step - 1]}
        super().log(logs, *args, **kwargs)


CALM = Reading(3.0, 3.0, 0.0, 0.0, 0.0, {"a": 1.0})


def reading(utility: float, kl: float = 0.1, monitors: Reading = CALM) -> GuardReading:
    noise = np.array([0.01, -0.01] * 10)
    return GuardReading(np.full(20, utility) + noise, stats.exact(kl, n=1, unit="nats/token"), monitors)


def guarded(tmp_path: Path, readings: list[GuardReading], *, kls=None, steps=10, resume=None, **options):
    """Trains a tiny model under a guard whose measurements are given; returns (trainer, guard, kept weights)."""
    model = tiny_llama(84)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    left = iter(readings)

    def save_good(step: int) -> None:
        kept[step] = {k: v.clone() for k, v in model.state_dict().items()}

    settings = {
        "every_steps": 2,
        "floor_points": 2.0,
        "kl_budget": None,
        "on_breach": "roll_back",
        "on_alarm": "warn",
        "thresholds": {},
    }
    logged: dict[int, dict[str, float]] = {}
    guard = GuardCallback(
        **(settings | options),
        measure=lambda: next(left),
        save_good=save_good,
        restore_good=lambda step: model.load_state_dict(kept[step]),
        report=lambda figures, step: logged.update({step: figures}),
        original=reading(0.9),
    )
    save_good(0)
    args = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
    )
    trainer = WithKL(model=model, args=args, train_dataset=Rows(), callbacks=[guard])
    trainer.kls = kls or [0.0] * steps
    if resume:
        guard.take_over(TrainerState.load_from_json(str(Path(resume) / "trainer_state.json")))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, guard, kept, logged


def same(model, weights) -> bool:
    return all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_a_planted_breach_rolls_back_to_the_last_good_weights_bit_for_bit_and_stops(tmp_path: Path) -> None:
    trainer, guard, kept, _ = guarded(tmp_path, [reading(0.9), reading(0.885), reading(0.87)])
    assert trainer.state.global_step == 6
    assert guard.summary()["stop_reason"] == "floor"
    assert guard.last_good_step == 4
    assert same(trainer.model, kept[4])
    assert not same(trainer.model, kept[2])
    assert [b["step"] for b in guard.breaches] == [6]


def test_a_breach_at_the_first_measurement_gives_the_original_back(tmp_path: Path) -> None:
    trainer, guard, kept, _ = guarded(tmp_path, [reading(0.5)])
    assert guard.last_good_step == 0
    assert same(trainer.model, kept[0])


def test_a_guard_that_only_watches_goes_on_and_says_when_the_floor_was_broken(tmp_path: Path) -> None:
    trainer, guard, _, logged = guarded(tmp_path, [reading(0.5)] * 5, on_breach="warn")
    assert trainer.state.global_step == 10
    assert guard.summary()["stop_reason"] == "max_steps"
    assert [b["step"] for b in guard.breaches] == [2, 4, 6, 8, 10]
    assert logged[2]["utility_difference"] == pytest.approx(-0.4)


def test_the_budget_stops_the_run_after_a_last_look(tmp_path: Path) -> None:
    kls = [0.01, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6]
    trainer, guard, kept, _ = guarded(tmp_path, [reading(0.9)] * 9, kls=kls, kl_budget=0.1)
    first = next(i for i in range(KL_WINDOW, 11) if np.mean(kls[i - KL_WINDOW : i]) >= 0.1)
    assert trainer.state.global_step == first
    assert guard.summary()["stop_reason"] == "kl_budget"
    assert guard.last_good_step == first
    assert same(trainer.model, kept[first])


def test_a_last_look_below_the_floor_still_rolls_back(tmp_path: Path) -> None:
    kls = [0.0] * 4 + [0.9] * 6
    trainer, guard, kept, _ = guarded(
        tmp_path, [reading(0.9), reading(0.9), reading(0.1)], kls=kls, kl_budget=0.2
    )
    assert guard.summary()["stop_reason"] == "floor"
    assert same(trainer.model, kept[4])


def test_an_alarm_warns_or_stops_as_asked(tmp_path: Path) -> None:
    loud = reading(0.9, monitors=Reading(30.0, 30.0, 0.9, 0.0, 0.0, {"a": 1.0}))
    _, guard, _, _ = guarded(tmp_path / "a", [reading(0.9), *[loud] * 4])
    assert guard.summary()["stop_reason"] == "max_steps"
    assert {a["step"] for a in guard.alarms} == {4, 6, 8, 10}
    trainer, guard, kept, _ = guarded(tmp_path / "b", [reading(0.9), loud], on_alarm="stop")
    assert guard.summary()["stop_reason"].startswith("alarm: length")
    assert same(trainer.model, kept[2])


def test_the_last_step_is_always_looked_at(tmp_path: Path) -> None:
    _, guard, _, _ = guarded(tmp_path, [reading(0.9)] * 3, steps=5)
    assert [h["step"] for h in guard.history] == [2, 4, 5]


def test_a_measurement_that_is_not_finite_stops_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(StillroomError, match="not finite"):
        guarded(tmp_path, [reading(float("nan"))])
    with pytest.raises(StillroomError, match="step 2"):
        guarded(tmp_path / "kl", [reading(0.9)] * 5, kls=[0.0, float("nan"), *[0.0] * 8])


def test_what_the_guard_knows_is_in_the_checkpoint(tmp_path: Path) -> None:
    kls = [0.02 * i for i in range(10)]
    whole, of_whole, _, _ = guarded(tmp_path / "whole", [reading(0.9)] * 9, kls=kls, kl_budget=0.15)
    guarded(tmp_path / "part", [reading(0.9)] * 2, kls=kls, steps=4, kl_budget=0.15)
    rest, of_rest, _, _ = guarded(
        tmp_path / "part",
        [reading(0.9)] * 9,
        kls=kls,
        kl_budget=0.15,
        resume=str(tmp_path / "part" / "out" / "checkpoint-4"),
    )
    assert rest.state.global_step == whole.state.global_step
    assert of_rest.summary() == of_whole.summary()


def test_a_log_line_with_a_figure_that_could_not_be_measured_is_printed_without_it(
    tmp_path: Path, capsys
) -> None:
    run = Run.create(tmp_path / "run", command="x", config=RewardSpec())
    callback = RunCallback(run, make_console(), 0.0, shown=("utility/", "calibration/"))
    state = TrainerState(global_step=1, max_steps=2, is_world_process_zero=True)
    arguments = TrainingArguments(str(tmp_path / "out"), report_to="none", use_cpu=True)
    callback.on_step_begin(arguments, state, None)
    logs = {"loss": 0.1, "utility/mean": 0.5, "calibration/log_ratio": None}
    callback.on_log(arguments, state, None, logs=logs)
    assert "utility/mean 0.5" in capsys.readouterr().out
    assert run.metrics()[-1]["calibration/log_ratio"] is None
