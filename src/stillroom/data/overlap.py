"""How much of the evaluation set stands in the training set: a measured fact, not a verdict.

Synthetic training data is often made from the very questions it is later tested on. Three looks, each
seeing all that the one before sees: the same text; the same but for case and spacing; the same but for its
numbers. The last is the one that word n-grams miss: ``Tom has 3 apples`` and ``Tom has 5 apples`` differ in
a word, and a model that learned one has learned the method of the other.

Time and memory grow with the number of characters read: every text is hashed once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stillroom import stats
from stillroom.errors import DataError
from stillroom.types import Estimate, Message

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def normalised(text: str) -> str:
    r"""Without differences of case, spacing and Unicode form.

    >>> normalised(" Tom  HAS\t3 apples ")
    'tom has 3 apples'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def numbers_masked(text: str) -> str:
    """`normalised`, with every number in digits replaced by one sign.

    >>> numbers_masked("Tom has 3 apples and 1,250.50 pears")
    'tom has # apples and # pears'
    """
    return _NUMBER.sub("#", normalised(text))


LEVELS: Mapping[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "normalised": normalised,
    "numbers_masked": numbers_masked,
}
"""From strict to loose; a match at one level is a match at all that follow."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Counts by level of `LEVELS`."""

    num_train: int
    num_eval: int
    train_rows: Mapping[str, int]
    """Training rows whose text is that of some evaluation item."""
    eval_items: Mapping[str, int]
    """Evaluation items whose text is that of some training row."""
    evidence: tuple[tuple[int, int], ...]
    """The first pairs found, as (position of the evaluation item, position of the training row)."""

    def estimates(self) -> dict[str, Estimate]:
        """Shares of the evaluation items that stand in the training set, for results.json."""
        return {
            f"overlap_{level}": stats.exact(count / self.num_eval, n=self.num_eval, unit="share of items")
            for level, count in self.eval_items.items()
        }


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """A prompt's words: the text, or the contents of its messages one after the other."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def overlap(train: Iterable[str], evaluation: Sequence[str], *, num_evidence: int = 20) -> Overlap:
    """Compare two sets of texts.

    Args:
        train: training texts, read once (may be a stream).
        evaluation: evaluation texts; compare like with like, prompts with prompts.
        num_evidence: pairs kept to look at.

    Raises:
        DataError: there are no evaluation texts.
    """
    if not evaluation:
        raise DataError("there are no evaluation texts, so no share of them can overlap. Give at least one.")
    # One table a level: what the text becomes -> the items that become it.
    tables: dict[str, dict[str, list[int]]] = {level: {} for level in LEVELS}
    for item, text in enumerate(evaluation):
        for level, reduce in LEVELS.items():
            tables[level].setdefault(reduce(text), []).append(item)
    train_rows = dict.fromkeys(LEVELS, 0)
    found: dict[str, dict[str, int]] = {level: {} for level in LEVELS}
    evidence: list[tuple[int, int]] = []
    num_train = 0
    for row, text in enumerate(train):
        num_train += 1
        for level, reduce in LEVELS.items():
            key = reduce(text)
            if key in tables[level]:
                train_rows[level] += 1
                found[level].setdefault(key, row)
                if level == "numbers_masked" and len(evidence) < num_evidence:
                    evidence.append((tables[level][key][0], row))
    eval_items = {level: sum(len(tables[level][key]) for key in keys) for level, keys in found.items()}
    return Overlap(num_train, len(evaluation), train_rows, eval_items, tuple(evidence))
