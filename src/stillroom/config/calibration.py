"""What `stillroom calibrate` can be asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from stillroom.config.checks import at_least_two, at_least_zero, positive, require
from stillroom.config.parts import LoraSpec, ModelSpec


@dataclass(frozen=True)
class PromptSpec:
    """What the teacher is asked while it is calibrated."""

    tasks: tuple[str, ...] = ("pocket/chains",)
    """Tasks with a verifier: its score is the utility."""
    data_dir: str | None = None
    """Folder that holds the tasks' data files."""
    split: str = "train"
    """Split that prompts are drawn from."""
    max_rows: int | None = None
    """Different prompts (per task), chosen by seed; default as many as the steps ask for, or all there are."""

    def __post_init__(self) -> None:
        require(
            bool(self.tasks),
            "data.tasks is empty",
            "there is nothing to ask the teacher, and no utility to hold",
            "Give tasks with a verifier; see `stillroom tasks`.",
        )
        if self.max_rows is not None:
            positive("data.max_rows", self.max_rows)


@dataclass(frozen=True)
class RewardSpec:
    """The calibration reward, and how it is shaped before it becomes an advantage."""

    name: str = "log_ratio"
    """A row of the reward table; all of them are higher for text that suits a student better."""
    normalisation: Literal["token", "sequence", "byte"] = "token"
    """Of the log-ratio: per token of the policy, as it stands, or per byte of the text."""
    gate: Literal["correct", "none"] = "correct"
    """Reward only completions whose utility is full (then right ones compete with right ones), or all that ended."""
    clip: float | None = 2.0
    """Largest size of the group-normalised reward; null leaves it alone."""
    aggregation: Literal["separate", "gdpo"] = "separate"
    """Utility and calibration normalised each by itself, then added (eq. 11); or GDPO, which whitens the sum again."""
    sign: Literal["mode", "random"] = "mode"
    """random: ±1 for each group, from seed and prompt; the control that moves as much and has no direction."""
    warmup_steps: int = 0
    """Steps over which the strength rises from 0."""
    step_size: float = 3e-5
    """Of `influence`: how far the proxy's weights are moved along its gradient, as a share of their norm."""

    def __post_init__(self) -> None:
        at_least_zero("reward.warmup_steps", self.warmup_steps)
        positive("reward.step_size", self.step_size)
        if self.clip is not None:
            positive("reward.clip", self.clip)


@dataclass(frozen=True)
class GuardSpec:
    """What the calibrated teacher may not lose."""

    every_steps: int = 10
    """Optimizer steps between measurements on held-out prompts."""
    max_examples: int = 128
    """Held-out prompts (per task) that utility and KL are measured on."""
    num_samples: int = 2
    """Completions per prompt at temperature 1."""
    floor_points: float = 2.0
    """Percentage points of utility that may be lost, against the original on the same prompts."""
    floor: float | None = None
    """Least utility in [0, 1], in place of floor_points."""
    on_breach: Literal["roll_back", "warn"] = "roll_back"
    """Below the floor: go back to the last good weights and stop, or go on and say so."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """When a monitor sounds (length, repetition, alphabet, entropy …): say so, or roll back and stop."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Other thresholds for monitors, by name."""

    def __post_init__(self) -> None:
        positive("guard.every_steps", self.every_steps)
        at_least_two("guard.max_examples", self.max_examples)
        positive("guard.num_samples", self.num_samples)
        at_least_zero("guard.floor_points", self.floor_points)
        if self.floor is not None:
            require(
                0 <= self.floor <= 1,
                f"guard.floor={self.floor}",
                "utility lies in [0, 1]",
                "Give a number from 0 to 1, or leave it out and set guard.floor_points.",
            )


@dataclass(frozen=True)
class TuneSpec:
    """The policy-gradient loop. Names are TRL's where the thing is TRL's."""

    max_steps: int = 80
    """Optimizer steps at most."""
    prompts_per_step: int = 24
    """Different prompts of one optimizer step."""
    num_generations: int = 8
    """Completions of each prompt: the group that rewards are normalised in."""
    gradient_accumulation_steps: int = 1
    """Pieces that a step's completions are scored in."""
    max_completion_length: int = 256
    """Tokens; completions that reach it get no calibration reward."""
    learning_rate: float = 1e-4
    """Of AdamW, constant."""
    beta: float = 0.04
    """Weight of the KL to the original teacher."""
    use_bias_correction_kl: bool = True
    """True: the anchor's gradient is that of KL(policy‖original); False: of KL(original‖policy), TRL's older form."""
    kl_budget: float | None = None
    """Nats per token that the policy may move away from the original; training stops there. Default no limit."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    save_steps: int = 20
    """Optimizer steps between checkpoints."""
    save_total_limit: int = 2
    """Complete checkpoints kept."""
    seed: int = 0
    """Chooses prompts and keys every random choice."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "prompts_per_step", "gradient_accumulation_steps", "max_completion_length"):
            positive(f"train.{name}", getattr(self, name))
        for name in ("learning_rate", "save_steps", "save_total_limit"):
            positive(f"train.{name}", getattr(self, name))
        for name in ("beta", "max_grad_norm"):
            at_least_zero(f"train.{name}", getattr(self, name))
        require(
            self.num_generations >= 2,
            f"train.num_generations={self.num_generations}",
            "a group of one has nothing to be compared with, so every advantage would be 0",
            "Give 2 or more (8 is usual).",
        )
        require(
            (self.prompts_per_step * self.num_generations) % self.gradient_accumulation_steps == 0,
            f"train.gradient_accumulation_steps={self.gradient_accumulation_steps}",
            f"the {self.prompts_per_step} x {self.num_generations} completions of a step cannot be cut into that many "
            "equal pieces",
            "Give a divisor of their number.",
        )
        if self.kl_budget is not None:
            require(
                math.isfinite(self.kl_budget) and self.kl_budget > 0,
                f"train.kl_budget={self.kl_budget}",
                "with nothing to spend the policy could not move at all",
                "Give nats per token above 0, such as 0.02, 0.1 or 0.4; or leave it out.",
            )
            require(
                self.beta > 0,
                f"train.kl_budget={self.kl_budget} with train.beta=0",
                "without an anchor the KL is not measured in every step",
                "Set train.beta above 0 (0.001 hardly acts), or leave kl_budget out.",
            )


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "guarded": {},
    "paper": {
        "reward": {"normalisation": "sequence", "gate": "none", "clip": None},
        "train": {"use_bias_correction_kl": False},
        "guard": {"on_breach": "warn"},
    },
}
"""``guarded`` is ours and the default. ``paper`` is the plain form of arXiv:2604.18963 as far as it is known: the
log-ratio of whole sequences, of all completions, unclipped, and guards that watch and do not act."""


@dataclass(frozen=True)
class CalibrateConfig:
    """Make a teacher more or less distillable, and keep its skill."""

    output_dir: str = "runs/calibrate"
    """Run folder to write."""
    mode: Literal["distillable", "undistillable"] = "distillable"
    """Which way to turn the knob."""
    strength: float = 1.0
    """How hard, 0 or more: the weight of the calibration reward beside utility; 0 is the control."""
    preset: Literal["guarded", "paper"] = "guarded"
    """guarded: per token, gated on correct completions, clipped. paper: the plain form; watched, not held back."""
    teacher: ModelSpec = field(default_factory=ModelSpec)
    """The model that is calibrated; its original weights are the anchor."""
    proxy: ModelSpec = field(default_factory=ModelSpec)
    """A small model that stands in for students one does not know; of any tokenizer family."""
    more_proxies: tuple[str, ...] = ()
    """Further proxies; the reward is the mean over all of them."""
    data: PromptSpec = field(default_factory=PromptSpec)
    """What the teacher is asked."""
    reward: RewardSpec = field(default_factory=RewardSpec)
    """The calibration reward."""
    guard: GuardSpec = field(default_factory=GuardSpec)
    """Floor and monitors."""
    train: TuneSpec = field(default_factory=TuneSpec)
    """The policy-gradient loop."""
    lora: LoraSpec = field(default_factory=lambda: LoraSpec(r=16))
    """Adapters, the default; r=0 trains all weights."""
    final_examples: int = 500
    """Held-out prompts (per task), apart from the guard's, that the figures before and after are stated on."""
    save_merged: bool = False
    """Also write the teacher with the adapter merged into its weights."""

    def __post_init__(self) -> None:
        at_least_two("final_examples", self.final_examples)
        for role in ("teacher", "proxy"):
            require(
                bool(getattr(self, role).path),
                f"{role}.path is empty",
                "calibration needs a teacher to train and a proxy to stand in for students",
                f"Give --{role}.path: a model folder, a Hugging Face name, or pocket:chars-{role}.",
            )
        require(
            math.isfinite(self.strength) and self.strength >= 0,
            f"strength={self.strength}",
            "strength is a size, and the direction is said by mode",
            "Give 0 (the control) or more, and --mode distillable or undistillable.",
        )
        for section, values in PRESETS[self.preset].items():
            self._preset(section, values)

    def _preset(self, section: str, values: dict[str, Any]) -> None:
        """Set what the preset says; another value given for it is refused."""
        spec = getattr(self, section)
        defaults = {f.name: f.default for f in fields(spec)}
        for key, value in values.items():
            given = getattr(spec, key)
            require(
                given in (defaults[key], value),
                f"{section}.{key}={given!r} with preset={self.preset}",
                f"the preset says {value!r}",
                f"Leave {section}.{key} out, or leave the preset out and set every value yourself.",
            )
        object.__setattr__(self, section, replace(spec, **values))


def preset_values(config: CalibrateConfig) -> str:
    """What the preset has set, to be said aloud."""
    return ", ".join(
        f"{section}.{key}={value!r}"
        for section, values in PRESETS[config.preset].items()
        for key, value in values.items()
    )
