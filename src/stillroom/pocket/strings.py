"""Strings: small instructions to be followed to the letter.

``reverse:brick?`` asks for ``kcirb``; ``reverse then upper:brick?`` asks for ``KCIRB``. Words are random
letters, so that nothing can be known by heart. One word in ten is held out (split ``heldout``), and five
of the compositions never occur in training at all (split ``ood``), although each of their parts does.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator

from stillroom import seeds
from stillroom.errors import ConfigError, unknown_name
from stillroom.types import Example

WORD_LENGTHS = (3, 4, 5)
WORLD_SEED = 20261130

TO_STRING: dict[str, Callable[[str], str]] = {
    "reverse": lambda s: s[::-1],
    "sort": lambda s: "".join(sorted(s)),
    "upper": str.upper,
    "repeat": lambda s: s + s,
    "swap": lambda s: s[-1] + s[1:-1] + s[0],
}
"""Operations that another operation can follow; ``swap`` exchanges the first and the last letter."""

TO_SYMBOL: dict[str, Callable[[str], str]] = {
    "first": lambda s: s[0],
    "last": lambda s: s[-1],
    "count": lambda s: str(len(s)),
}
"""Operations that end in one letter or a number."""

OPERATIONS = TO_STRING | TO_SYMBOL
SINGLES: tuple[tuple[str, ...], ...] = tuple((name,) for name in OPERATIONS)
PAIRS: tuple[tuple[str, ...], ...] = tuple((a, b) for a in TO_STRING for b in OPERATIONS if a != b)
HELD_OUT_PAIRS: tuple[tuple[str, ...], ...] = tuple(
    PAIRS[i] for i in sorted(seeds.permutation(len(PAIRS), WORLD_SEED, "pocket/strings/pairs")[:5])
)
TRAINED: tuple[tuple[str, ...], ...] = SINGLES + tuple(p for p in PAIRS if p not in HELD_OUT_PAIRS)


def apply(operations: tuple[str, ...], word: str) -> str:
    """The operations from left to right.

    >>> apply(("reverse", "upper"), "brick")
    'KCIRB'
    """
    for name in operations:
        word = OPERATIONS[name](word)
    return word


def word_held_out(word: str) -> bool:
    """Whether a word is kept out of training, by a hash: one in ten."""
    return seeds.key(WORLD_SEED, "pocket/strings/heldout", word) % 10 == 0


class Strings:
    """The task ``pocket/strings``: ``heldout`` has new words, ``ood`` new compositions (and new words)."""

    name = "pocket/strings"
    version = "1"
    splits = ("train", "heldout", "ood")

    def examples(self, split: str) -> Iterator[Example]:
        """A stream of 2,000 distinct examples of the split; `sample` draws others."""
        yield from self.sample(split, 2000, WORLD_SEED)

    def sample(self, split: str, n: int, seed: int) -> list[Example]:
        """Draws n distinct examples, the same for the same (split, n, seed)."""
        if split not in self.splits:
            raise ConfigError(unknown_name("split of pocket/strings", split, self.splits))
        instructions = HELD_OUT_PAIRS if split == "ood" else TRAINED
        found: dict[str, Example] = {}
        draw = 0
        while len(found) < n:
            state = seeds.key(seed, "pocket/strings/sample", split, draw)
            draw += 1
            state, which = divmod(state, len(instructions))
            word = _word(state)
            if word_held_out(word) == (split != "train"):
                example = _example(instructions[which], word)
                found.setdefault(example.id, example)
        return list(found.values())

    def score(self, example: Example, completion: str) -> float | None:
        """1 for exactly the right string; None for a completion with anything but letters and digits."""
        if not (completion.isascii() and completion.isalnum()):
            return None
        return float(completion == example.answer)


def _word(state: int) -> str:
    state, length = divmod(state, len(WORD_LENGTHS))
    letters = []
    for _ in range(WORD_LENGTHS[length]):
        state, letter = divmod(state, 26)
        letters.append(string.ascii_lowercase[letter])
    return "".join(letters)


def _example(operations: tuple[str, ...], word: str) -> Example:
    prompt = f"{' then '.join(operations)}:{word}?"
    answer = apply(operations, word)
    return Example(
        id=prompt, prompt=prompt, answer=answer, completion=answer, meta={"operations": operations}
    )
