"""A student from a teacher: some of its layers copied, or its shape with random weights.

Dropping evenly spaced layers is the start used by DistilBERT (arXiv:1910.01108, section 3) and
"shrink and fine-tune" (arXiv:2010.13002). Students made here share the teacher's vocabulary by
construction, and share no memory with it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stillroom.errors import ConfigError, unknown_name

logger = logging.getLogger(__name__)


def evenly_spaced(n_from: int, n_to: int) -> tuple[int, ...]:
    """``n_to`` of the layers 0 … n_from - 1 at equal steps: round(i·(n_from - 1)/(n_to - 1)).

    Returns:
        Strictly rising indices that hold the first and the last layer; for ``n_to`` = 1 the first alone.

    Raises:
        ConfigError: ``n_to`` is not in 1 … n_from.

    >>> evenly_spaced(30, 10)
    (0, 3, 6, 10, 13, 16, 19, 23, 26, 29)
    """
    if not 1 <= n_to <= n_from:
        raise ConfigError(
            f"a student with num_hidden_layers={n_to} cannot be cut from a teacher with {n_from} layers. Give "
            f"a number from 1 to {n_from}, or a student model of its own (student.path)."
        )
    if n_to == 1:
        return (0,)
    step = (n_from - 1) / (n_to - 1)
    return tuple(int(i * step + 0.5) for i in range(n_to))


def drop_layers(teacher: PreTrainedModel, keep: Sequence[int]) -> PreTrainedModel:
    """A copy of the teacher with only some of its layers, in their order.

    Embeddings, final norm and head are copied too; tied embeddings stay tied. Per-layer settings of the
    config (``layer_types`` of models that alternate attention kinds) follow their layers.

    Args:
        teacher: stays as it is.
        keep: strictly rising layer indices, e.g. from `evenly_spaced`.

    Returns:
        A trainable model of the teacher's class and dtype, on its device.

    Raises:
        ConfigError: ``keep`` is empty, out of range or not rising; the layers cannot be found.
    """
    prefix, n_layers = _layer_stack(teacher)
    keep = tuple(keep)
    if not keep or list(keep) != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= n_layers:
        raise ConfigError(
            f"layers to keep {keep} are not rising indices from 0 to {n_layers - 1}, so the student would not "
            "be part of its teacher. Give each wanted layer once, in order."
        )
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten; nobody else should notice it
        student = type(teacher)(_with_layers(teacher.config, keep))
    new_place = {f"{prefix}.{old}.": f"{prefix}.{new}." for new, old in enumerate(keep)}
    state = {}
    for key, tensor in teacher.state_dict().items():
        if not key.startswith(f"{prefix}."):
            state[key] = tensor
            continue
        old = key[: key.index(".", len(prefix) + 1) + 1]
        if old in new_place:
            state[new_place[old] + key[len(old) :]] = tensor
    student.load_state_dict(state, strict=True)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.to(teacher.device, teacher.dtype).train()  # pyright: ignore[reportCallIssue, reportArgumentType]


def random_student(
    config_of_teacher: PretrainedConfig,
    *,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    seed: int,
    **overrides: Any,
) -> PreTrainedModel:
    """A model of the teacher's architecture and vocabulary with random float32 weights.

    Args:
        config_of_teacher: stays as it is.
        num_hidden_layers: default the teacher's; per-layer settings are those of the teacher's layers at
            equal steps.
        hidden_size: default the teacher's. The size of a head stays, so the number of heads, that of
            key-value heads and the feed-forward width shrink in proportion (logged).
        seed: of the weights; the global random state is left as it was.
        **overrides: any other setting of the config, e.g. ``intermediate_size``; wins over the proportion.

    Raises:
        ConfigError: more layers than the teacher, a width that no whole number of heads fills, an unknown
            setting.
    """
    n_layers = config_of_teacher.num_hidden_layers
    config = _with_layers(config_of_teacher, evenly_spaced(n_layers, num_hidden_layers or n_layers))
    known = config.to_dict()
    for name in overrides:
        if name not in known:
            raise ConfigError(
                f"{unknown_name('model setting', name, known)} The model would be built without it. Use a name "
                "of the teacher's config."
            )
    changes = {**_scaled(config_of_teacher, hidden_size), **overrides}
    if changes:
        logger.info("student settings that differ from the teacher's: %s", changes)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def _layer_stack(model: PreTrainedModel) -> tuple[str, int]:
    """Name and length of the list of layers."""
    n_layers = model.config.num_hidden_layers
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers and name.count(".") <= 2
    ]
    if len(stacks) != 1:
        raise ConfigError(
            f"cannot tell which part of a {type(model).__name__} is its stack of {n_layers} layers "
            f"(candidates: {stacks or 'none'}), so none can be dropped. Give the student as a model of its "
            "own (student.path)."
        )
    return stacks[0], n_layers


def _with_layers(config: PretrainedConfig, keep: Sequence[int]) -> PretrainedConfig:
    """A copy of the config for these layers; lists with one entry per layer keep the entries of theirs."""
    n_layers = config.num_hidden_layers
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == n_layers:
            setattr(config, name, [value[i] for i in keep])
    config.num_hidden_layers = len(keep)
    return config


def _scaled(config: PretrainedConfig, hidden_size: int | None) -> dict[str, int]:
    """Settings that follow from a new width."""
    if hidden_size is None or hidden_size == config.hidden_size:
        return {}
    old_heads, old_kv = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // old_heads
    # Some families (Qwen3, Gemma 3) have heads · head_dim ≠ hidden_size: only the proportion is kept.
    heads, rest = divmod(hidden_size * old_heads, config.hidden_size)
    if rest or heads < 1:
        step = config.hidden_size // old_heads
        raise ConfigError(
            f"hidden_size={hidden_size} gives no whole number of attention heads (the teacher has {old_heads} "
            f"for {config.hidden_size}). Give a multiple of {step}."
        )
    wanted = max(1, old_kv * heads // old_heads)
    kv_heads = next(n for n in range(wanted, 0, -1) if heads % n == 0)
    feed_forward = max(8, round(config.intermediate_size * hidden_size / config.hidden_size / 4) * 4)
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": feed_forward,
    }
