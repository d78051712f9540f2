"""Questions with lettered options, scored in two ways.

*By generated letter*: the prompt lists the options and ends in ``Answer:``; `chosen_letter` finds the letter
in what the model writes. *By option log-likelihood* (`stillroom.evaluation.likelihood`): the prompt is
``meta["cloze"]``, the question without the list, and each option's text is scored as its continuation.
The second suits base models and small ones, which often know the answer and not the game of letters.

One class serves all data sets; a data set is one function that reads a row.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stillroom.data.tasks.reading import Row, RowTask, Source
from stillroom.types import Example


@dataclass(frozen=True, slots=True)
class Question:
    """What every data set's row comes down to."""

    id: str
    stem: str
    options: Sequence[str]
    answer: int
    """Index of the right option."""
    meta: dict[str, Any] = field(default_factory=dict)


class MultipleChoice(RowTask):
    """A multiple-choice data set.

    Args:
        source: its files.
        read: makes a `Question` of a row.
    """

    def __init__(self, source: Source, read: Callable[[Row], Question]) -> None:
        super().__init__(source, lambda row: _example(row, read(row)))

    def score(self, example: Example, completion: str) -> float | None:
        """1 for the right letter, 0 for a wrong one, None where no letter is found."""
        letter = chosen_letter(completion, example.options)
        return None if letter is None else float(letter == example.answer)


def _example(row: Row, question: Question) -> Example:
    options = tuple(question.options)
    if not 2 <= len(options) <= len(string.ascii_uppercase):
        row.refuse(f"{len(options)} options", "between 2 and 26")
    if not all(isinstance(option, str) and option.strip() for option in options):
        row.refuse(f"the options {options}", "texts, none of them empty")
    letters = string.ascii_uppercase[: len(options)]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, options, strict=True))
    # The prompt ends without a space and the completion begins with one: most tokenizers have " B" as one
    # token, and a prompt that ends in a lone space would put the model where it has never been.
    return Example(
        id=question.id,
        prompt=f"Question: {question.stem}\n{listed}\nAnswer:",
        answer=letters[question.answer],
        completion=f" {letters[question.answer]}",
        options=options,
        meta={"cloze": f"Question: {question.stem}\nAnswer:", **question.meta},
    )


def chosen_letter(completion: str, options: Sequence[str]) -> str | None:
    """The option that a completion chooses, or None if that cannot be told.

    In this order: a letter at the start (``B``, ``(b)``, ``**B**``, ``B. text``); the text of one option and
    nothing else; an upper-case letter at the start of a sentence; the last ``answer is B`` or ``Answer: B``;
    the only letter in brackets. ``A`` followed by a word is an article, not a choice.

    >>> options = ["ignore", "enforce"]
    >>> [chosen_letter(c, options) for c in (" B", "(a) ignore", "The answer is B.", "A dog barks", "C")]
    ['B', 'A', 'B', None, None]
    """
    letters = string.ascii_uppercase[: len(options)]
    text = completion.strip()
    either = f"[{letters}{letters.lower()}]"
    # Letters before texts: there are questions whose options are themselves single letters.
    if start := re.match(rf"[(\[*]*({either})(?=[)\].:,*\n]|$)", text):
        return start[1].upper()
    for letter, option in zip(letters, options, strict=True):
        if text.casefold().startswith(f"{letter} {option}".casefold()):
            return letter
    plain = [option.rstrip(".").casefold() for option in options]
    if plain.count(text.rstrip(".").casefold()) == 1:
        return letters[plain.index(text.rstrip(".").casefold())]
    # An upper-case letter that stands alone; A must not be an article.
    choice = rf"(?:(?!A)[{letters}](?![A-Za-z])|A(?![A-Za-z]|\s+(?!because|since)[a-z]))"
    if start := re.match(choice, text):
        return start[0]
    if stated := re.findall(rf"(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*[(\[*\"']*({choice})", text):
        return stated[-1]
    bracketed = set(re.findall(rf"\(([{letters}])\)", text))
    return bracketed.pop() if len(bracketed) == 1 else None


def _labelled(row: Row, labels: list[Any], key: str) -> int:
    """Position of the answer's label; official files number some options 1 to 4 instead of A to D."""
    if key not in labels:
        row.refuse(f"answerKey = {key!r}", f"one of the labels {labels}")
    return labels.index(key)


def _labels_and_texts(row: Row, choices: Row) -> tuple[list[Any], list[str]]:
    labels, texts = choices.take("label", list), choices.take("text", list)
    if len(labels) != len(texts) or not all(isinstance(text, str) for text in texts):
        row.refuse(f"{len(labels)} labels and the texts {texts}", "one text for each label")
    return labels, texts


def arc(source: Source) -> MultipleChoice:
    """ARC (arXiv:1803.05457) and OpenBookQA (arXiv:1809.02789), which come in one form."""

    def read(row: Row) -> Question:
        stem = row.take("question_stem" if "question_stem" in row.fields else "question", str)
        labels, texts = _labels_and_texts(row, row.nested("choices"))
        identity = row.take("id", str) if "id" in row.fields else row.id
        return Question(identity, stem, texts, _labelled(row, labels, row.take("answerKey", str)))

    return MultipleChoice(source, read)


def commonsenseqa(source: Source) -> MultipleChoice:
    """CommonsenseQA (arXiv:1811.00937): the authors' files nest the choices, the Hugging Face copy does not."""

    def read(row: Row) -> Question:
        if isinstance(row.fields.get("question"), str):
            stem = row.fields["question"]
            labels, texts = _labels_and_texts(row, row.nested("choices"))
        else:
            question = row.nested("question")
            stem = question.take("stem", str)
            choices = [Row(row.where, row.id, choice) for choice in question.take("choices", list)]
            labels, texts = [c.take("label", str) for c in choices], [c.take("text", str) for c in choices]
        return Question(row.take("id", str), stem, texts, _labelled(row, labels, row.take("answerKey", str)))

    return MultipleChoice(source, read)


def mmlu(source: Source) -> MultipleChoice:
    """MMLU (arXiv:2009.03300), here a part of its test questions."""

    def read(row: Row) -> Question:
        options, answer = row.take("choices", list), row.take("answer", int)
        if not 0 <= answer < len(options):
            row.refuse(f"answer = {answer}", f"an index below {len(options)}")
        subject = row.take("subject", str)
        return Question(row.id, row.take("question", str), options, answer, {"subject": subject})

    return MultipleChoice(source, read)


def aqua_rat(source: Source) -> MultipleChoice:
    """AQuA-RAT (arXiv:1705.04146): options carry their letters (``A)5``); the rationale is kept in meta."""

    def read(row: Row) -> Question:
        options: list[str] = row.take("options", list)
        letters = string.ascii_uppercase[: len(options)]
        for letter, option in zip(letters, options, strict=True):
            if not option.startswith(f"{letter})"):
                row.refuse(
                    f"option {option!r}", f"options that begin with {', '.join(f'{x})' for x in letters)}"
                )
        answer = _labelled(row, list(letters), row.take("correct", str))
        rationale = {"rationale": row.take("rationale", str)}
        return Question(
            row.id, row.take("question", str), [o[2:].strip() for o in options], answer, rationale
        )

    return MultipleChoice(source, read)
