"""A model is borrowed for sampling or scoring and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without activation checkpointing for the block.

    Afterwards every module is in the mode it was in, and checkpointing is on again if it was (field report
    63: with it on, models decode without a cache, slowly or wrongly).
    """
    modes = [(module, module.training) for module in model.modules()]
    was_checkpointing = model.is_activation_checkpointing
    if was_checkpointing:
        model.activation_checkpointing_disable()
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        if was_checkpointing:
            model.activation_checkpointing_enable()
