"""A completion as rewards and guards see it.

Rewards score ids and not texts that were cleaned up for display: what the proxy reads is, byte for byte,
what the policy wrote, cut at the end token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stillroom.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Written:
    """One completion by the policy, with what its task says of it."""

    example_id: str
    prompt: str | Sequence[Message]
    """As it is sent: a text as it stands, or messages."""
    prompt_ids: tuple[int, ...]
    """As the policy read them."""
    ids: tuple[int, ...]
    """The policy's ids, without the end token."""
    text: str
    """Decoded from the ids; special tokens inside are kept as text."""
    end_id: int | None
    """The end token that the policy wrote; None if the completion was cut off at the length limit."""
    score: float | None
    """Task utility in [0, 1]; None if the task could not parse the text."""

    @property
    def ended(self) -> bool:
        """Whether it came to an end by itself."""
        return self.end_id is not None


def through_first_end(ids: Sequence[int], end_ids: Collection[int]) -> tuple[tuple[int, ...], int | None]:
    """The ids before the first end token, and that token (None if there is none)."""
    for at, token in enumerate(ids):
        if token in end_ids:
            return tuple(ids[:at]), token
    return tuple(ids), None


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids with nothing removed, added or tidied."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
