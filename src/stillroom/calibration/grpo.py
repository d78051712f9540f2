"""The only file that knows TRL: a calibration's config as a `GRPOTrainer`, through its public interface.

What is set here and why (read in TRL 1.16's source):

- Each reward callable returns values that are already normalised in their group, gated and clipped, and
  ``sum_then_normalize`` with ``scale_rewards="none"`` adds them with the weights [1, ±S]: eq. 11 of
  arXiv:2604.18963. ``normalize_then_sum`` would whiten the sum again over the batch; it is GDPO
  (arXiv:2601.05242), kept as an option by that name.
- ``loss_type="dapo"`` weighs all tokens of a step alike (arXiv:2503.14476). One pass over each batch, so the
  policy that is trained is the one that wrote, and the ratio is 1.
- Sampling is the policy's own distribution: temperature 1, no top-p, no top-k, or the ratio would lie.
- Prompts stand in the data set in the order of use, and one run is one epoch: on resume the trainer restores
  neither its buffer nor its sampler's epoch, and so neither matters.

Reference: GRPO, arXiv:2402.03300.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stillroom.calibration.judge import Asked, Judge
from stillroom.config import CalibrateConfig
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def arguments(config: CalibrateConfig, folder: Path, *, world_size: int, show_bar: bool) -> GRPOConfig:
    """The trainer's arguments.

    Raises:
        ConfigError: the completions of a step cannot be shared out among the processes in whole groups.
    """
    train, reward = config.train, config.reward
    if train.prompts_per_step % world_size:
        raise ConfigError(
            f"train.prompts_per_step={train.prompts_per_step} cannot be shared out among {world_size} processes: a "
            "prompt's completions must stand in one process to be compared. Give a multiple of the number of "
            "processes."
        )
    per_process = train.prompts_per_step // world_size * train.num_generations
    if per_process % train.gradient_accumulation_steps:
        raise ConfigError(
            f"train.gradient_accumulation_steps={train.gradient_accumulation_steps} does not divide the {per_process} "
            f"completions that each of {world_size} processes writes in a step. Give a divisor."
        )
    weight = config.strength if config.mode == "distillable" else -config.strength
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=train.max_steps,
        per_device_train_batch_size=per_process // train.gradient_accumulation_steps,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        steps_per_generation=train.gradient_accumulation_steps,
        num_generations=train.num_generations,
        num_iterations=1,
        max_completion_length=train.max_completion_length,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=torch.accelerator.is_available(),
        remove_unused_columns=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=train.max_grad_norm,
        beta=train.beta,
        use_bias_correction_kl=train.use_bias_correction_kl,
        loss_type="dapo",
        scale_rewards="none",
        multi_objective_aggregation=(
            "sum_then_normalize" if reward.aggregation == "separate" else "normalize_then_sum"
        ),
        reward_weights=[1.0, weight],
        mask_truncated_completions=False,
        disable_dropout=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=train.seed,
        logging_steps=1,
        save_strategy="steps",
        save_steps=train.save_steps,
        save_total_limit=None,  # ours removes an old checkpoint only when a newer one is whole
        restore_callback_states_from_checkpoint=False,  # the guard takes over its state by itself
        report_to=[],
        model_init_kwargs={
            "revision": config.teacher.revision or "main"
        },  # of the anchor, where it is a model of its own
        disable_tqdm=not show_bar,
    )


def build(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Asked],
    judge: Judge,
    args: GRPOConfig,
    *,
    peft_config: PeftConfig | None,
    callbacks: Sequence[TrainerCallback],
) -> GRPOTrainer:
    """The trainer, with the judge's two callables as its rewards and bound to the policy.

    Args:
        policy: loaded from a folder or a name, since the trainer loads the anchor from there when there is no
            adapter.
        tokenizer: of the policy; padded on the left by the trainer.
        asked: one entry a group, in the order of use; exactly as many as the steps take.
        judge: scores completions.
        args: from `arguments`.
        peft_config: of the adapter; None trains all weights.
        callbacks: in order.
    """
    rows = Dataset.from_dict(
        {"prompt": [_as_column(a.prompt) for a in asked], "example_id": [a.id for a in asked]}
    )
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=[judge.utility, judge.calibration],
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    if args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
    judge.bind(trainer.accelerator.unwrap_model(trainer.model))
    return trainer


def _as_column(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
