"""Arguments of the distillation trainer: `TrainingArguments` plus what is about distillation."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from stillroom.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass
class DistillationConfig(TrainingArguments):
    """`TrainingArguments`, with defaults that are safe on a CPU, and the fields of distillation.

    Differences from the parent's defaults: columns are never dropped, nothing is reported to trackers
    unless asked, non-finite losses raise instead of being averaged away, and sampling settings are
    separate from the loss's temperature.
    """

    loss: str = field(default="forward_kl", metadata={"help": "Row of `LOSSES`, or cross_entropy."})
    loss_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "The loss's own options."})
    temperature: float = field(default=1.0, metadata={"help": "Of the loss; divides both models' logits."})
    scale_by_temperature_squared: bool = field(
        default=False, metadata={"help": "Multiply the loss by temperature²."}
    )
    top_k: int | None = field(default=None, metadata={"help": "Keep the teacher's K largest probabilities."})
    hard_label_weight: float = field(
        default=0.0, metadata={"help": "Cross-entropy on rows the student did not write."}
    )
    reduction: Literal["token_mean", "sequence_mean"] = field(
        default="token_mean", metadata={"help": "token_mean or sequence_mean."}
    )
    on_policy_fraction: float = field(
        default=0.0, metadata={"help": "Share of steps whose text the student writes."}
    )
    sampling_temperature: float = field(default=1.0, metadata={"help": "Of the student's own completions."})
    sampling_batch_size: int = field(default=64, metadata={"help": "Rows decoded together."})
    max_completion_length: int = field(
        default=256, metadata={"help": "Longest completion the student writes, tokens."}
    )
    max_length: int = field(default=1024, metadata={"help": "Longest prompt + completion, tokens."})
    on_overlong: Literal["error", "drop"] = field(
        default="error", metadata={"help": "error or drop, for rows beyond max_length."}
    )

    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Columns are read by name, never dropped."}
    )
    report_to: Any = field(
        default="none", metadata={"help": "Trackers; metrics.jsonl is written whatever this says."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A non-finite loss raises here."})

    def __post_init__(self) -> None:
        has_accelerator = torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or not has_accelerator  # else several processes would look for NCCL
        super().__post_init__()
        self.dataloader_pin_memory &= has_accelerator
        if self.use_cpu and (self.bf16 or self.fp16):
            logger.warning(
                "%s is asked for on a CPU, where it is about 40 times slower than float32 on most machines",
                "bf16" if self.bf16 else "fp16",
            )
        if not 0.0 <= self.on_policy_fraction <= 1.0:
            raise ConfigError(
                f"on_policy_fraction={self.on_policy_fraction} is outside [0, 1]: it is the share of optimizer steps "
                "whose completions the student writes. Give a number from 0 to 1."
            )
        if self.on_overlong not in ("error", "drop"):
            raise ConfigError(f"on_overlong={self.on_overlong!r} is unknown: give error or drop.")
        if not (math.isfinite(self.hard_label_weight) and self.hard_label_weight >= 0):
            raise ConfigError(
                f"hard_label_weight={self.hard_label_weight} is negative or no number, so the loss would be too. "
                "Give 0 or more."
            )
        if not 0.0 <= self.label_smoothing_factor < 1.0:
            raise ConfigError(
                f"label_smoothing_factor={self.label_smoothing_factor} is outside [0, 1): it is the share of a label's "
                "mass that is spread over the vocabulary. Give 0 for none; 0.1 is usual."
            )
        if self.label_smoothing_factor and self.loss != "cross_entropy":
            raise ConfigError(
                f"label_smoothing_factor={self.label_smoothing_factor} with loss={self.loss!r}: the teacher's "
                "distribution is soft already, and hard labels beside it are meant to be hard. Leave it at 0, or set "
                "loss='cross_entropy'."
            )
        if self.loss == "cross_entropy" and (
            self.on_policy_fraction or self.hard_label_weight or self.top_k or self.temperature != 1
        ):
            raise ConfigError(
                f"loss='cross_entropy' with on_policy_fraction={self.on_policy_fraction}, hard_label_weight="
                f"{self.hard_label_weight}, top_k={self.top_k}, temperature={self.temperature}: it reads the "
                "completions' own tokens and no teacher, and would repeat what the student writes. Leave these at "
                "their defaults, or choose a divergence."
            )
        if self.reduction not in ("token_mean", "sequence_mean"):
            raise ConfigError(f"reduction={self.reduction!r} is unknown: give token_mean or sequence_mean.")
        if self.n_gpu > 1:
            raise ConfigError(
                f"{self.n_gpu} GPUs are visible to one process, and DataParallel would split batches that are already "
                "built. Launch one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one."
            )
