"""Are two mathematical answers the same? Three outcomes: yes, no, and "could not read it".

Plain numbers are compared exactly, as fractions. Everything else goes through Math-Verify, but only as a
whole: its default is to fall back on the first number it finds when a formula does not parse, so that
``3x-y+13=0`` and ``3x+4y+14=0`` are both read as 0 and judged equal (field report 81). Here a text that
does not parse from its first to its last character has not been read, which is counted apart from wrong.

Known limits, held by a fixed list in ``tests/test_tasks_answers.py``: of 42 equal pairs one is not found
(``2x+3=0`` against ``4x+6=0``: equations are not scaled), and of 42 different pairs none is called equal.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from typing import Any

from stillroom.errors import MissingExtraError

_TIMEOUT_S = 3
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?P<sign>[-+−]?)\s*[$€£]?(?P<minus>-?)(?P<digits>{_DIGITS})")
_NUMBER_OR_FRACTION = re.compile(rf"(?<![\w.])[-−]?[$€£]?(?:{_DIGITS})(?:\s*/\s*(?:{_DIGITS}))?")
_FUNCTIONS = "sin|cos|tan|log|ln|sqrt|pi|infty"


def final_answer(completion: str) -> str | None:
    r"""The part of a completion that states its answer; None if there is none.

    In this order: what follows the first ``####`` on its line (a model that runs on into a question of its
    own writes later ones); the last ``\boxed{…}``; the last number or fraction.

    >>> final_answer("She has 3 + 4 = 7 apples.\n#### 7"), final_answer("so it is 1/2."), final_answer("?")
    ('7', '1/2', None)
    """
    if "####" in completion:
        return completion.split("####", 1)[1].strip().partition("\n")[0].strip() or None
    boxed = completion.rfind("\\boxed{")
    if boxed >= 0:
        return _braced(completion[boxed + len("\\boxed") :])
    numbers = _NUMBER_OR_FRACTION.findall(completion)
    return numbers[-1] if numbers else None


def leading_number(text: str) -> str | None:
    """The number that an answer begins with, if what follows it is a unit or nothing, else None.

    >>> leading_number("$1,080.00 in all"), leading_number("3/4"), leading_number("2x")
    ('1080.00', None, None)
    """
    match = _NUMBER.match(text.strip())
    if not match:
        return None
    rest = text.strip()[match.end() :]
    if not re.fullmatch(r"\.?|\s+(?!pi\b)[A-Za-z][^\d=+*^\\]*", rest):
        return None
    return _digits(match)


def equal_answers(gold: str, given: str) -> bool | None:
    """Whether two answers mean the same; None if one of them could not be read.

    Args:
        gold: the right answer: a number, a formula in plain text or LaTeX.
        given: the answer to judge. ``x = 5`` equals ``5``, and ``50%`` equals both ``50`` and ``0.5``.

    Returns:
        True or False, or None: not a formula, an undefined value such as 1/0, or a comparison that did not
        finish in time. Outside the main thread Math-Verify has no time limit, so powers and factorials,
        which can run for hours, are left unread there.

    Raises:
        MissingExtraError: Math-Verify is not installed (also where plain numbers would not have needed it,
            so that a run does not fail at its first formula).
    """
    _require_math_verify()
    if _tidy(gold) == _tidy(given) and _tidy(gold):
        return True
    numbers = _plain_number(gold), _plain_number(given)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    sides = _parsed(gold), _parsed(given)
    if sides[0] is None or sides[1] is None:
        return None
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        return bool(verify(sides[0], sides[1], timeout_seconds=_time_limit(), raise_on_error=True))
    # TimeoutException derives from BaseException; whatever else sympy raises means that it cannot tell.
    except (Exception, TimeoutException):
        return None


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as problem:
        raise MissingExtraError(
            "mathematical answers need Math-Verify, which is not installed, so no score can be given. "
            "Install it with: pip install 'stillroom[maths]'."
        ) from problem


def _time_limit() -> int | None:
    # Math-Verify measures time by signal.alarm, which only the main thread may set.
    return _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def _tidy(text: str) -> str:
    text = text.strip().rstrip(".").strip()
    for left, right in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    return text


def _plain_number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(_tidy(text))
    return Fraction(_digits(match)) if match else None


def _digits(match: re.Match[str]) -> str:
    is_negative = match["sign"] in ("-", "−") or match["minus"] == "-"
    return ("-" if is_negative else "") + match["digits"].replace(",", "")


def _braced(text: str) -> str | None:
    """What stands inside the braces that the text begins with."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:at].strip() or None
    return None


def _latex(text: str) -> str | None:
    """Plain formulas rewritten as LaTeX; None for prose, and for what no formula can hold."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*\{[^{}]*\}|\\[,;! ]|\\left|\\right", "", _tidy(text))
    if not text or ":" in text:  # Math-Verify reads 12:00 as a division by zero
        return None
    if "\\" not in text:
        text = re.sub(r"\bexp\(([^()]*)\)", r"e^{\1}", text)
        text = re.sub(r"\bsqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
        text = re.sub(r"\^\(([^()]*)\)|\*\*", lambda m: f"^{{{m[1]}}}" if m[1] is not None else "^", text)
        text = re.sub(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 ", text)
    words = re.sub(r"\\[A-Za-z]+", " ", text)
    return None if re.search(r"[A-Za-z]{3}", words) else text


def _parsed(text: str) -> Any:
    latex, limit = _latex(text), _time_limit()
    if latex is None or (limit is None and re.search(r"[\^!]", latex)):
        return None
    from math_verify import LatexExtractionConfig, parse
    from sympy import nan, zoo

    found = parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=limit,  # type: ignore[arg-type]  # None is documented, the annotation lacks it
    )
    return found[0] if found and not found[0].has(nan, zoo) else None
