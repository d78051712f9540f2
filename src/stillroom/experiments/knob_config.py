"""What `stillroom knob` can be asked; apart from the experiment, so that help costs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from stillroom.config import (
    CalibrateConfig,
    DataSpec,
    DistillConfig,
    LoraSpec,
    ModelSpec,
    PromptSpec,
    SamplingSpec,
    ScoreSpec,
    StudentSpec,
    TrainSpec,
    TuneSpec,
)
from stillroom.config.checks import at_least_two, positive, require
from stillroom.errors import ConfigError, unknown_name

METHODS = ("sft", "sequence_kd", "forward_kl", "top_k_forward_kl", "reverse_kl", "gkd")
"""Ways to learn from a teacher, in the order of the table; what each means stands in `experiments.knob`."""


@dataclass(frozen=True)
class KnobConfig:
    """Calibrate a teacher both ways, distil from each, and compare the students."""

    output_dir: str = "runs/knob"
    """Folder of the grid; each cell gets a folder named by the hash of its config."""
    calibrate: CalibrateConfig = field(
        default_factory=lambda: CalibrateConfig(
            teacher=ModelSpec("pocket:chars-teacher"),
            proxy=ModelSpec("pocket:chars-proxy"),
            data=PromptSpec(tasks=("pocket/chains",)),
            lora=LoraSpec(r=8),
            final_examples=1000,
            train=TuneSpec(max_steps=40, max_completion_length=40, learning_rate=1e-3),
        )
    )
    """How teachers are calibrated; mode, strength, sign, seed and folder are set for each cell."""
    distill: DistillConfig = field(
        default_factory=lambda: DistillConfig(
            teacher=ModelSpec("pocket:chars-teacher"),
            student=StudentSpec(path="pocket:chars-student"),
            data=DataSpec(tasks=("pocket/chains",), completions="teacher", max_rows=2048, heldout_rows=64),
            sampling=SamplingSpec(max_completion_length=40, batch_size=256),
            train=TrainSpec(
                max_steps=70,
                learning_rate=6e-3,
                per_device_train_batch_size=64,
                warmup_steps=5,
                save_steps=10_000,
            ),
            score=ScoreSpec(tasks=("pocket/chains",), max_examples=1000, start=False),
        )
    )
    """How students are made; teacher, loss, policy mix, seed and folder are set for each cell."""
    strengths: tuple[float, ...] = (1.0, 0.3, 0.1)
    """Of the calibrated teachers, both ways; the first is the default that the primary comparison uses."""
    kl_budgets: tuple[float, ...] = (0.005, 0.015, 0.05, 0.12)
    """Nats per token at which teachers of the default strength are stopped, both ways: the other axis of the dose."""
    methods: tuple[str, ...] = METHODS
    """Ways to learn from a teacher; the first cells run are those of `primary`."""
    primary: str = "forward_kl"
    """The method of the one comparison that was fixed beforehand."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """One chain each: the calibration's seed is the student's seed."""
    only_seeds: tuple[int, ...] = ()
    """Run the cells of these seeds and stop: to spread a grid over processes or machines that share a folder."""
    controls: bool = True
    """Also teachers with strength 0 and with random signs, and students without a teacher."""

    def __post_init__(self) -> None:
        for method in (*self.methods, self.primary):
            if method not in METHODS:
                raise ConfigError(unknown_name("method", method, METHODS))
        require(
            len(set(self.seeds)) == len(self.seeds) >= 2,
            f"seeds={list(self.seeds)}",
            "the interval is over seeds, so there must be two or more, each once",
            "Give for instance --seeds 0,1,2.",
        )
        require(
            set(self.only_seeds) <= set(self.seeds),
            f"only_seeds={list(self.only_seeds)} with seeds={list(self.seeds)}",
            "a seed that is not in the grid has no cells",
            "Give some of the grid's own seeds.",
        )
        require(
            self.calibrate.lora.r > 0,
            "calibrate.lora.r=0",
            "students are made from merged adapters, and there would be none",
            "Give a rank, such as 8.",
        )
        require(
            self.distill.score.tasks == ("pocket/chains",) == self.calibrate.data.tasks,
            f"calibrate.data.tasks={list(self.calibrate.data.tasks)} and "
            f"distill.score.tasks={list(self.distill.score.tasks)}",
            "styles, gold text and the table are those of pocket/chains",
            "Give pocket/chains for both; run calibrate and distill by themselves for other tasks.",
        )
        require(
            not self.controls or self.primary in ("sft", "forward_kl", "top_k_forward_kl", "sequence_kd"),
            f"primary={self.primary} with controls",
            "gold text is written in the styles of what a teacher wrote for the primary method, and it writes nothing "
            "for a student that learns from its own text alone",
            "Choose an off-policy method, or set controls: false.",
        )
        require(
            bool(self.strengths) and all(s > 0 for s in self.strengths),
            f"strengths={list(self.strengths)}",
            "strength 0 is among the controls already",
            "Give strengths above 0.",
        )


@dataclass(frozen=True)
class KnobDemoConfig:
    """Distil from the pocket teacher, from two calibrated ones as shipped, and from one calibrated live."""

    output_dir: str = "runs/demo-knob"
    """Run folder; each run gets a folder inside it."""
    family: str = "chars"
    """Tokenizer family of the pocket models."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One student for each teacher and seed."""
    live_steps: int = 30
    """Steps of the calibration that is run live."""
    max_steps: int = 70
    """Optimizer steps of a student."""
    max_examples: int = 250
    """Held-out prompts that each student is scored on."""

    def __post_init__(self) -> None:
        require(
            len(set(self.seeds)) == len(self.seeds) >= 2,
            f"seeds={list(self.seeds)}",
            "the interval is over seeds, so there must be two or more, each once",
            "Give for instance --seeds 0,1,2.",
        )
        positive("live_steps", self.live_steps)
        positive("max_steps", self.max_steps)
        at_least_two("max_examples", self.max_examples)
