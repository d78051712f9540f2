"""The guard: a floor under utility, a budget of KL, and monitors, watched while a policy is trained.

Every few steps the policy answers held-out prompts. Above the floor its weights are kept as good; below it they
are put back to the last good ones and training ends, so what is saved is always the furthest that stayed above. The
budget is watched through the trainer's own estimate (k3 on the training completions, the mean of a few steps), which
lags behind a policy that moves fast: training stops soon after the budget, not before it. Then the policy is measured
once more, and may still be rolled back; what it has really spent is the exact KL among the figures.

What the guard knows travels with the trainer's checkpoints. All processes measure the same prompts with the same
keyed noise, so all of them decide alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from stillroom import stats
from stillroom.calibration.monitors import Reading, alarms, check_thresholds
from stillroom.errors import StillroomError
from stillroom.types import Estimate

logger = logging.getLogger(__name__)

KL_WINDOW = 3
"""Steps whose KL estimates are averaged before they are held against the budget."""


_STATE = (
    "stop_reason",
    "last_good_step",
    "last_measured_step",
    "recent_kl",
    "alarms",
    "breaches",
    "history",
)


@dataclass(frozen=True)
class GuardReading:
    """One measurement on held-out prompts."""

    utilities: np.ndarray
    """Mean score of each prompt's completions, ``[n]``; the same prompts in the same order every time."""
    kl: Estimate
    """KL(policy‖original), exact, in nats per token."""
    monitors: Reading


class GuardCallback(TrainerCallback, ExportableState):
    """Watches a Trainer; see the module.

    Args:
        every_steps: optimizer steps between measurements.
        floor_points: percentage points below the original at which weights are no longer good.
        kl_budget: nats per token; None for no limit.
        on_breach: go back and stop, or say so and go on (then every measurement counts as good).
        on_alarm: say so and go on, or go back and stop.
        thresholds: of monitors, by name.
        measure: measures the policy as it is.
        save_good: keeps the weights as good; called with the step.
        restore_good: puts the last good weights back; called with their step.
        report: takes figures for the log, and the step.
        original: measurement of the original teacher.
        expects_kl: whether every log line of a step must state a KL (there is an anchor).
        forget_good: drops kept weights of steps before the given one; called once no checkpoint needs them.
    """

    def __init__(
        self,
        *,
        every_steps: int,
        floor_points: float,
        kl_budget: float | None,
        on_breach: Literal["roll_back", "warn"],
        on_alarm: Literal["warn", "stop"],
        thresholds: Mapping[str, float],
        measure: Callable[[], GuardReading],
        save_good: Callable[[int], None],
        restore_good: Callable[[int], None],
        report: Callable[[dict[str, float], int], None],
        original: GuardReading,
        expects_kl: bool = True,
        forget_good: Callable[[int], None] = lambda step: None,
    ) -> None:
        check_thresholds(thresholds)
        self.every_steps, self.floor_points, self.kl_budget = every_steps, floor_points, kl_budget
        self.on_breach, self.on_alarm, self.thresholds = on_breach, on_alarm, thresholds
        self.measure, self.save_good, self.restore_good = measure, save_good, restore_good
        self.report, self.original = report, original
        self.expects_kl, self.forget_good = expects_kl, forget_good
        self.stop_reason = ""
        self.last_good_step = 0
        self.last_measured_step = 0
        self.recent_kl: list[float] = []
        self.alarms: list[dict[str, Any]] = []
        self.breaches: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the guard."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in _STATE}}

    def take_over(self, state: TrainerState) -> None:
        """Go on from a checkpoint's state.

        The Trainer's own way makes a new callback from "args", which cannot hold the callables of this process; so
        that way is off (``restore_callback_states_from_checkpoint``), and the attributes are read here.
        """
        saved: dict[str, Any] = dict(state.stateful_callbacks or {}).get(type(self).__name__, {})  # pyright: ignore
        for name, value in saved.get("attributes", {}).items():
            setattr(self, name, value)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Take the step's KL; the log line comes after the step's end, so a spent budget is seen here."""
        if "loss" not in (logs or {}) or self.stop_reason or not self.expects_kl:
            return
        kl = (logs or {}).get("kl")
        if kl is None or not math.isfinite(kl):  # the trainer logs None for NaN
            raise StillroomError(
                f"the KL to the original is {kl} at step {state.global_step}: the logits of one of them are "
                "not finite. Lower train.learning_rate."
            )
        self.recent_kl = [*self.recent_kl, kl][-KL_WINDOW:]
        spent = float(np.mean(self.recent_kl))
        if self.kl_budget is not None and len(self.recent_kl) == KL_WINDOW and spent >= self.kl_budget:
            if self.last_measured_step != state.global_step:
                self._look(state, control)
            if not self.stop_reason:
                self.stop_reason = "kl_budget"
            control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """The checkpoint that is being written knows of no good weights older than these."""
        self.forget_good(self.last_good_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Measure when it is time, and always at the last step."""
        is_last = state.global_step >= state.max_steps
        if state.global_step % self.every_steps == 0 or is_last:
            self._look(state, control)
        if is_last and not self.stop_reason:
            self.stop_reason = "max_steps"

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        now, step = self.measure(), state.global_step
        self.last_measured_step = step
        if not (np.isfinite(now.utilities).all() and math.isfinite(now.kl.value)):
            raise StillroomError(
                f"the measurement at step {step} is not finite (utility {np.mean(now.utilities)}, KL {now.kl.value}). "
                "Check the task's score and the policy's weights; lower train.learning_rate."
            )
        difference = stats.paired_difference(now.utilities, self.original.utilities, unit="utility")
        figures = {
            "utility": float(np.mean(now.utilities)),
            "utility_difference": difference.value,
            "utility_difference_low": difference.low,
            "utility_difference_high": difference.high,
            "kl_nats_per_token": now.kl.value,
        } | now.monitors.figures()
        self.report(figures, step)
        self.history.append({"step": step, **figures})
        sounding = alarms(now.monitors, self.original.monitors, self.thresholds)
        known = {alarm["alarm"].split(":")[0] for alarm in self.alarms}
        for sentence in sounding:
            if sentence.split(":")[0] not in known:
                logger.warning("step %d: %s", step, sentence)
        self.alarms += [{"step": step, "alarm": sentence} for sentence in sounding]
        # Processes measure alike but for the last bit, which must not send them on different ways.
        breached = _first_worker_says(difference.value < -self.floor_points / 100)
        is_loud = _first_worker_says(bool(sounding))
        if breached:
            self.breaches.append({"step": step, "utility_difference": difference.value})
            logger.warning(
                "step %d: utility is %.1f points below the original", step, -100 * difference.value
            )
        if breached and self.on_breach == "roll_back":
            self._go_back("floor", control)
        elif is_loud and self.on_alarm == "stop":
            self._go_back(f"alarm: {sounding[0] if sounding else 'seen by the first worker'}", control)
        else:
            self.last_good_step = step
            self.save_good(step)

    def _go_back(self, reason: str, control: TrainerControl) -> None:
        self.restore_good(self.last_good_step)
        self.stop_reason = reason
        control.should_training_stop = True

    def summary(self) -> dict[str, Any]:
        """Why it stopped and what was seen, for the results."""
        return {
            "stop_reason": self.stop_reason or "max_steps",
            "last_good_step": self.last_good_step,
            "alarms": self.alarms,
            "breaches": self.breaches,
            "history": self.history,
        }


def _first_worker_says(answer: bool) -> bool:
    """The first process's answer, in all of them."""
    state = PartialState()
    if state.num_processes == 1:
        return answer
    told = torch.tensor([int(answer)], device=state.device)
    torch.distributed.broadcast(told, src=0)
    return bool(told.item())
