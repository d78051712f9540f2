"""The parts of a config: a model, the data, the loss, the sampling, the training, the scores."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from stillroom.config.checks import at_least_two, at_least_zero, fraction, positive, require


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what to run: not part of any config, and not compared on resume."""

    dry_run: bool = False
    resume: bool = False
    quiet: bool = False
    """Print nothing; for commands that call commands."""


@dataclass(frozen=True)
class ModelSpec:
    """A model to load."""

    path: str = ""
    """Folder in Hugging Face format, a cached Hugging Face name, or pocket:NAME for a shipped model."""
    revision: str | None = None
    """Branch, tag or commit, for a Hugging Face name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights in memory. bfloat16 is about 40 times slower than float32 on most CPUs."""


@dataclass(frozen=True)
class StudentSpec(ModelSpec):
    """The student: a model of its own (path), or one made from the teacher (num_hidden_layers)."""

    num_hidden_layers: int | None = None
    """Make the student from the teacher with this many of its layers, evenly spaced (when path is empty)."""
    hidden_size: int | None = None
    """Width of a random student made from the teacher's config; default the teacher's (needs random_init)."""
    random_init: bool = False
    """Start the student made from the teacher with random weights instead of copied layers."""


@dataclass(frozen=True)
class DataSpec:
    """What is trained on."""

    tasks: tuple[str, ...] = ()
    """Names of tasks, mixed in proportion to their rows; see `stillroom tasks`."""
    path: str | None = None
    """A JSONL, JSON or Parquet file, or a dataset folder, with columns messages, prompt + completion, or prompt."""
    prompts: tuple[str, ...] = ()
    """Prompts given here; an empty string asks for free text from the start token."""
    data_dir: str | None = None
    """Folder that holds the tasks' data files."""
    split: str = "train"
    """Split of the tasks to train on."""
    heldout_split: str = "heldout"
    """Split of the tasks that held-out figures use; where a task has none, rows are cut off its training split."""
    max_rows: int | None = None
    """Rows to train on (per task), chosen by seed; default all."""
    heldout_rows: int = 64
    """Rows kept out of training for the held-out divergence (per task)."""
    completions: Literal["gold", "teacher"] = "gold"
    """Who wrote the completions trained on off-policy: the data, or the teacher (sequence-level distillation)."""
    num_generations: int = 1
    """Completions that the teacher writes for each prompt (with completions: teacher)."""
    max_length: int = 1024
    """Longest prompt + completion in tokens."""
    on_overlong: Literal["error", "drop"] = "error"
    """What to do with a row longer than max_length: stop, or drop it and say so. Nothing is ever cut off."""
    seed: int = 0
    """Chooses rows and held-out rows."""

    def __post_init__(self) -> None:
        require(
            not self.prompts or self.completions == "teacher",
            "data.prompts without completions",
            "prompts alone hold nothing to learn from off-policy",
            "Set data.completions to teacher.",
        )
        positive("data.num_generations", self.num_generations)
        require(
            self.num_generations == 1 or self.completions == "teacher",
            f"data.num_generations={self.num_generations} with data.completions={self.completions}",
            "the completions are the data's own, and nobody writes several",
            "Set data.completions to teacher, or leave num_generations out.",
        )
        positive("data.max_length", self.max_length)
        at_least_zero("data.heldout_rows", self.heldout_rows)
        if self.max_rows is not None:
            positive("data.max_rows", self.max_rows)
            require(
                not self.prompts,
                f"data.max_rows={self.max_rows} with {len(self.prompts)} data.prompts",
                "prompts given here are all trained on",
                "Leave max_rows out, and prompts that are not wanted.",
            )


@dataclass(frozen=True)
class LossChoice:
    """How far the student is from the teacher, and how that becomes one number."""

    name: str = "forward_kl"
    """A row of the loss table, or cross_entropy to train on the completion's own tokens (no teacher scores)."""
    options: dict[str, float] = field(default_factory=dict)
    """The loss's own options, such as {weight: 0.5} for jsd or {alpha: 0.1} for the skewed losses."""
    temperature: float = 1.0
    """Divides both models' logits in the loss. Separate from the temperature of sampling."""
    scale_by_temperature_squared: bool = False
    """Multiply the loss by temperature² (Hinton et al. 2015), which keeps the size of its gradient."""
    top_k: int | None = None
    """Keep the teacher's K largest probabilities and one bucket for the rest; default all of the vocabulary."""
    hard_label_weight: float = 0.0
    """Weight of cross-entropy on the data's own tokens, added on rows that the student did not write."""
    label_smoothing: float = 0.0
    """With cross_entropy: share of a label's mass that is spread evenly over the vocabulary."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all supervised tokens of the step, or over rows of their means."""

    def __post_init__(self) -> None:
        positive("loss.temperature", self.temperature)
        at_least_zero("loss.hard_label_weight", self.hard_label_weight)
        require(
            0 <= self.label_smoothing < 1 and (self.name == "cross_entropy" or not self.label_smoothing),
            f"loss.label_smoothing={self.label_smoothing} with loss.name={self.name}",
            "it is a share below 1, of labels and not of a teacher's distribution",
            "Leave it out, or give for instance 0.1 with loss.name=cross_entropy.",
        )
        if self.top_k is not None:
            positive("loss.top_k", self.top_k)
        if self.name == "cross_entropy":
            extras = {
                "top_k": self.top_k,
                "options": self.options or None,
                "hard_label_weight": self.hard_label_weight or None,
                "scale_by_temperature_squared": self.scale_by_temperature_squared or None,
            }
            for name, value in extras.items():
                require(
                    value is None,
                    f"loss.{name}={value} with loss.name=cross_entropy",
                    "cross-entropy reads the completion's own tokens and no teacher",
                    f"Leave loss.{name} out.",
                )
            require(
                self.temperature == 1.0,
                f"loss.temperature={self.temperature} with loss.name=cross_entropy",
                "there is no teacher distribution to soften",
                "Leave it at 1.",
            )


@dataclass(frozen=True)
class SamplingSpec:
    """How completions are written, by the student on-policy or by the teacher beforehand."""

    on_policy_fraction: float = 0.0
    """Share of optimizer steps whose completions the current student writes."""
    max_completion_length: int = 256
    """Tokens."""
    temperature: float = 1.0
    """Of sampling; 0 is greedy."""
    batch_size: int = 64
    """Rows decoded together; changes the speed, not the samples."""

    def __post_init__(self) -> None:
        fraction("sampling.on_policy_fraction", self.on_policy_fraction)
        at_least_zero("sampling.temperature", self.temperature)
        positive("sampling.max_completion_length", self.max_completion_length)
        positive("sampling.batch_size", self.batch_size)


_HAVE_A_KEY = {
    **dict.fromkeys(("temperature", "top_k", "hard_label_weight", "reduction"), "loss.{}"),
    "scale_by_temperature_squared": "loss.{}",
    "label_smoothing_factor": "loss.label_smoothing",
    "loss": "loss.name",
    "loss_options": "loss.options",
    "on_policy_fraction": "sampling.{}",
    "max_completion_length": "sampling.{}",
    "sampling_temperature": "sampling.temperature",
    "sampling_batch_size": "sampling.batch_size",
    "max_length": "data.{}",
    "on_overlong": "data.{}",
    "output_dir": "output_dir",
    "resume_from_checkpoint": "the flag --resume",
    "disable_tqdm": "the program, which shows progress on a terminal only",
}
"""What train.extra may not hold because it is asked elsewhere."""

_WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict", "data_seed", "load_best_model_at_end")
_WITHOUT_EFFECT += ("per_device_eval_batch_size", "metric_for_best_model", "greater_is_better")
"""What train.extra may not hold, beside eval_*, because the command never evaluates amid training, or shuffles anew."""


@dataclass(frozen=True)
class TrainSpec:
    """Hugging Face TrainingArguments, under their own names."""

    max_steps: int = -1
    """Optimizer steps; -1 means num_train_epochs decides."""
    num_train_epochs: float = 1.0
    """Passes over the data."""
    learning_rate: float = 1e-4
    """Peak rate."""
    per_device_train_batch_size: int = 8
    """Rows per device and micro-step."""
    gradient_accumulation_steps: int = 1
    """Micro-steps per optimizer step."""
    lr_scheduler_type: str = "cosine"
    """Shape of the rate after the warm-up."""
    warmup_steps: float = 0.0
    """Steps of linear warm-up; below 1, a share of all steps."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down; 0 switches it off."""
    seed: int = 0
    """Keys every random choice of training."""
    logging_steps: int = 10
    """Optimizer steps between lines of metrics.jsonl."""
    save_steps: int = 500
    """Optimizer steps between checkpoints."""
    save_total_limit: int = 2
    """Complete checkpoints kept."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Any other field of TrainingArguments."""

    def __post_init__(self) -> None:
        require(
            self.max_steps == -1 or self.max_steps > 0,
            f"train.max_steps={self.max_steps}",
            "no step would be taken",
            "Give a positive number, or -1 to let num_train_epochs decide.",
        )
        positive("train.num_train_epochs", self.num_train_epochs)
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"):
            at_least_zero(f"train.{name}", getattr(self, name))
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "save_steps",
        ):
            positive(f"train.{name}", getattr(self, name))
        positive("train.save_total_limit", self.save_total_limit)
        own = {f.name: "train.{}" for f in fields(self)}
        for name in self.extra:
            key = (_HAVE_A_KEY | own).get(name)
            require(
                key is None,
                f"train.extra holds {name!r}",
                f"that is asked under {str(key).format(name)}, and one of the two would be ignored",
                "Set it there.",
            )
            require(
                not name.startswith("eval_") and name not in _WITHOUT_EFFECT,
                f"train.extra holds {name!r}",
                "it has no effect here: figures are measured before and after training, on data.heldout_rows and "
                "score.tasks, and rows are shuffled by train.seed",
                "Leave it out.",
            )


@dataclass(frozen=True)
class LoraSpec:
    """Train low-rank adapters instead of all weights."""

    r: int = 0
    """Rank; 0 trains all weights."""
    lora_alpha: int = 16
    """Scale: the update is multiplied by lora_alpha / r."""
    target_modules: str = "all-linear"
    """Names of the modules that get an adapter."""

    def __post_init__(self) -> None:
        at_least_zero("lora.r", self.r)
        positive("lora.lora_alpha", self.lora_alpha)
        for f in fields(self):
            require(
                self.r > 0 or getattr(self, f.name) == f.default,
                f"lora.{f.name}={getattr(self, f.name)!r} with lora.r=0",
                "without a rank there is no adapter, and all weights are trained",
                "Set lora.r, or leave it out.",
            )


@dataclass(frozen=True)
class ScoreSpec:
    """What to measure before and after training."""

    heldout_kl: bool = True
    """Forward and reverse KL to the teacher on held-out rows."""
    tasks: tuple[str, ...] = ()
    """Tasks to score; default none."""
    teacher: bool = False
    """Score the teacher on the tasks too."""
    start: bool = True
    """Measure the student before training too; false saves time where many runs share a start."""
    max_examples: int = 200
    """Items per task, chosen by seed."""
    num_samples: int = 4
    """Completions per item at temperature 1, beside the greedy one."""
    sample_prompt: str | None = None
    """A prompt whose completion by the trained student is printed."""

    def __post_init__(self) -> None:
        require(
            bool(self.tasks) or not self.teacher,
            "score.teacher without score.tasks",
            "there is nothing to score the teacher on",
            "Give score.tasks, or leave it out.",
        )
        at_least_two("score.max_examples", self.max_examples)
        positive("score.num_samples", self.num_samples)
