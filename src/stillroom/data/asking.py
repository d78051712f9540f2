"""What is asked: which examples of a task, and in what form a prompt is sent.

Training and evaluation use these two functions alike, so that a student is asked in the form that it was
trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stillroom import seeds
from stillroom.errors import ConfigError
from stillroom.types import Example, Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def select_examples(task: Task, split: str, limit: int | None = None, *, seed: int = 0) -> list[Example]:
    """The split's examples, or ``limit`` of them chosen by seed (files are often sorted by subject).

    Raises:
        ConfigError: the split holds fewer than ``limit``.
    """
    if limit is None:
        return list(task.examples(split))
    sample = getattr(task, "sample", None)  # generated tasks draw without listing millions of examples
    if sample is not None:
        return list(sample(split, limit, seed))
    examples = list(task.examples(split))
    if limit > len(examples):
        raise ConfigError(
            f"{limit} examples are asked for, and split {split!r} of {task.name!r} holds {len(examples)}. "
            "A figure over fewer would not be the one asked for. Ask for at most that many."
        )
    chosen = seeds.permutation(len(examples), seed, "evaluate/select", task.name, split)[:limit]
    return [examples[i] for i in sorted(chosen)]


def as_sent(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], use_chat_template: bool | None
) -> str | Sequence[Message]:
    """A text prompt as one user message for models that are talked to, as it stands for others.

    Args:
        tokenizer: decides when ``use_chat_template`` is None: a message if it has a template.
        prompt: messages are left alone.
        use_chat_template: True, False or None.
    """
    if not isinstance(prompt, str) or use_chat_template is False:
        return prompt
    if use_chat_template or getattr(tokenizer, "chat_template", None):
        # The line break that ends our text prompts is the template's business now.
        return [{"role": "user", "content": prompt.rstrip("\n")}]
    return prompt
