"""Plain text for likelihood: WikiText-2 (arXiv:1609.07843) and tiny Shakespeare.

An example is one piece of the file: an article, or a run of speeches. Its prompt is empty and its
completion is the text. Joined in order the pieces of a split are the split's text to the byte, so no token
is lost between them; they are cut only because an interval needs independent units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from stillroom.data.tasks.reading import Source
from stillroom.errors import ConfigError
from stillroom.types import Example

_HEADING = re.compile(r"(?m)^ = [^=\n].* = $")
_PIECE_CHARACTERS = 2000
_TRAIN_TENTHS = 9


class PlainText:
    """Pieces of a text, without a verifier.

    Args:
        source: its files.
        cut: makes the pieces of (text of the file, split); joined they are the split's text.
    """

    version = "1"

    def __init__(self, source: Source, cut: Callable[[str, str], list[str]]) -> None:
        self.name = source.task
        self.splits = tuple(source.files)
        self.source = source
        self._cut = cut

    def examples(self, split: str) -> Iterator[Example]:
        """The pieces in order."""
        pieces = self._cut(self.source.text(split), split)
        return (
            Example(f"{self.name}/{split}/{number}", "", answer="", completion=piece)
            for number, piece in enumerate(pieces)
        )

    def score(self, example: Example, completion: str) -> float | None:
        """There is no verifier.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"task {self.name!r} is plain text without questions, so {example.id!r} has nothing to be scored "
            "against. Measure it by likelihood, or choose a task with a verifier (see `stillroom tasks`)."
        )


def wikitext2(source: Source) -> PlainText:
    """One piece an article: it begins at a heading `` = Title = ``; deeper headings have more signs."""

    def cut(text: str, split: str) -> list[str]:
        # What stands before the first heading (an empty line) belongs to the first article.
        starts = [match.start() for match in _HEADING.finditer(text)][1:]
        return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]

    return PlainText(source, cut)


def tinyshakespeare(source: Source) -> PlainText:
    """Runs of whole speeches of about 2,000 characters; nine tenths to train on, the last one held out."""

    def cut(text: str, split: str) -> list[str]:
        border = _next_speech(text, len(text) * _TRAIN_TENTHS // 10)
        part = text[:border] if split == "train" else text[border:]
        pieces, start = [], 0
        while start < len(part):
            end = _next_speech(part, start + _PIECE_CHARACTERS)
            pieces.append(part[start:end])
            start = end
        return pieces

    return PlainText(source, cut)


def _next_speech(text: str, at: int) -> int:
    """Where the first speech after a position begins, or the end of the text."""
    found = text.find("\n\n", at)
    return found + 2 if found >= 0 else len(text)
