"""A model is borrowed for sampling or scoring and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for the block; afterwards every module is in the mode it was in.

    Activation checkpointing, which would switch the key-value cache off (field report 63), acts in training
    mode only, so it need not be touched.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
