"""Word problems whose answer is one number: GSM8K (arXiv:2110.14168) and SVAMP (arXiv:2103.07191).

A completion is scored by its final answer (`answers.final_answer`); how it got there is not judged. A
completion without a readable answer scores None: it is counted apart from wrong ones, because a model that
cannot reach the form and a model that cannot reckon need different cures.

Prompts are the question and a line break. Models with a chat template get it as a user's message (the
caller wraps it); for others the line break keeps question and answer apart.
"""

from __future__ import annotations

import math
import re

from stillroom.data.tasks.answers import equal_answers, final_answer, leading_number
from stillroom.data.tasks.reading import Row, RowTask, Source
from stillroom.types import Example

_CALCULATOR = re.compile(r"<<[^<>]*>>")


def score_number(answer: str, completion: str) -> float | None:
    r"""1 if the completion's final answer equals the gold number, units apart; None if it has no answer.

    Raises:
        MissingExtraError: Math-Verify is not installed.

    >>> score_number("18", "She earns 9 * 2 = $18 a day.\n#### $18.00 a day")
    1.0
    """
    given = final_answer(completion)
    # Called on an empty answer too: a missing extra must show before anything is generated.
    is_equal = equal_answers(answer, (leading_number(given) or given) if given else "")
    return None if is_equal is None else float(is_equal)


class WordProblems(RowTask):
    """Problems whose ``answer`` is a number in digits."""

    def score(self, example: Example, completion: str) -> float | None:
        """See `score_number`."""
        return score_number(example.answer, completion)


def gsm8k(source: Source) -> WordProblems:
    """Grade-school maths. ``completion`` is the worked solution without its ``<<3+4=7>>`` calculator marks,
    which are commands for a tool and not text that a student should write.
    """

    def read(row: Row) -> Example:
        solution: str = row.take("answer", str)
        _, marker, answer = solution.rpartition("####")
        if not marker or not answer.strip():
            row.refuse(f"answer = {solution[-60:]!r}", "a solution that ends with '#### NUMBER'")
        return Example(
            id=row.id,
            prompt=row.take("question", str) + "\n",
            answer=answer.strip().replace(",", ""),
            completion=_CALCULATOR.sub("", solution),
        )

    return WordProblems(source, read)


def svamp(source: Source) -> WordProblems:
    """One-step problems; the data holds an equation and an answer, and no text to train on."""

    def read(row: Row) -> Example:
        body, question = row.take("Body", str).strip(), row.take("Question", str).strip()
        answer = float(row.take("Answer", (int, float)))
        if not math.isfinite(answer):
            row.refuse(f"Answer = {answer}", "a finite number")
        if not body.endswith("."):
            body += "."  # most bodies lack it
        return Example(
            id=row.take("ID", str),
            prompt=f"{body} {question}\n",
            answer=str(int(answer)) if answer.is_integer() else repr(answer),
            meta={"equation": row.take("Equation", str), "type": row.take("Type", str)},
        )

    return WordProblems(source, read)
