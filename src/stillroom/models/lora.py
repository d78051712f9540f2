"""Low-rank adapters: made, and read back in. The rest of the house treats them as ordinary models.

Reference: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from stillroom.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def add_lora(
    model: PreTrainedModel, r: int, alpha: float, target_modules: str | Sequence[str] = "all-linear"
) -> PreTrainedModel:
    """Freeze a model and add trainable low-rank updates to its layers: W + (alpha / r)·B·A.

    Args:
        model: changed in place and wrapped.
        r: rank of A and B.
        alpha: scale of the update.
        target_modules: ``"all-linear"`` (all but the head) or the last names of modules, e.g. ``q_proj``.

    Returns:
        The wrapped model. B starts at zero, so its logits are still the model's own.

    Raises:
        ConfigError: r or alpha not positive; a target that names no linear module (those there are, listed).

    Reference:
        arXiv:2106.09685, eq. 3.
    """
    from peft import get_peft_model

    return cast("PreTrainedModel", get_peft_model(model, lora_config(model, r, alpha, target_modules)))


def lora_config(
    model: PreTrainedModel, r: int, alpha: float, target_modules: str | Sequence[str] = "all-linear"
) -> LoraConfig:
    """The adapter that `add_lora` adds, for trainers that add it themselves; same arguments, same errors."""
    from peft import LoraConfig, TaskType

    if r < 1 or alpha <= 0:
        raise ConfigError(
            f"LoRA with r={r} and alpha={alpha} would change nothing. Give a rank of at least 1 and an alpha "
            "above 0 (common: r 16, alpha 32)."
        )
    targets: str | list[str] = "all-linear"
    if target_modules != "all-linear":
        targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
        known = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        for target in targets:
            if target not in known:
                raise ConfigError(
                    f"{unknown_name('LoRA target module', target, known)} Nothing would be adapted there. "
                    "Name linear modules of this model, or use all-linear."
                )
    return LoraConfig(
        r=r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        task_type=TaskType.CAUSAL_LM,
    )


def base_of(folder: Path) -> tuple[str, str | None]:
    """Name and revision of the model that an adapter folder was trained on.

    Raises:
        ConfigError: the adapter does not say, or it has no safetensors weights.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"adapter folder {str(folder)!r} has no adapter_model.safetensors, so there is nothing to add to "
            "its base model. Save the adapter again (safetensors is the default)."
        )
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"adapter folder {str(folder)!r} does not say which model it was trained on, so it cannot be "
            "loaded. Write base_model_name_or_path into its adapter_config.json."
        )
    return base, settings.get("revision")


def attach(base: PreTrainedModel, folder: Path, *, trainable: bool) -> PreTrainedModel:
    """Put a saved adapter onto its base model.

    If tokens were added before training, the adapter brings the widened embeddings, and the base is first
    widened to the same number of rows.
    """
    from peft import PeftModel
    from safetensors import safe_open

    embeddings = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embeddings)
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dict
            if key.endswith(f"{name}.weight"):
                base.resize_token_embeddings(tensors.get_slice(key).get_shape()[0], mean_resizing=False)
    return cast("PreTrainedModel", PeftModel.from_pretrained(base, str(folder), is_trainable=trainable))
