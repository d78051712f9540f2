"""IFEval (arXiv:2311.07911): instructions whose following can be checked by a program.

Twenty of the published instructions are checked here exactly as their authors' program does. Five are not:
three need a language detector and two a sentence or word splitter trained on data, and an approximation of
them would give another benchmark under the same name. A prompt that holds any of the five is left out, and
`excluded` says how many were: of the 540 prompts at hand 386 remain. State figures as "IFEval, 386 of 540".

The score is the strict, prompt-level one: 1 if the completion follows every instruction of its prompt.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stillroom.data.tasks.reading import Row, RowTask, Source
from stillroom.types import Example

logger = logging.getLogger(__name__)

Check = Callable[[str, Mapping[str, Any]], bool]


def _holds(count: int, relation: str, bound: int) -> bool:
    return {"less than": count < bound, "at least": count >= bound}[relation]


def _highlights(text: str, a: Mapping[str, Any]) -> bool:
    single = [m.strip("*").strip() for m in re.findall(r"\*[^\n*]*\*", text)]
    double = [m[2:-2].strip() for m in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, single + double)) >= a["num_highlights"]


def _bullets(text: str, a: Mapping[str, Any]) -> bool:
    # A bullet of stars needs a character that is no star behind it; a dash stands alone.
    stars = re.findall(r"(?m)^\s*\*[^*].*$", text)
    dashes = re.findall(r"(?m)^\s*-.*$", text)
    return len(stars) + len(dashes) == a["num_bullets"]


def _parts(pieces: list[str]) -> list[str] | None:
    """The pieces that hold text; None if an inner one is empty (the first and the last may be)."""
    if any(not piece.strip() for piece in pieces[1:-1]):
        return None
    return [piece for piece in pieces if piece.strip()]


def _paragraphs(text: str, a: Mapping[str, Any]) -> bool:
    parts = _parts(re.split(r"\s?\*\*\*\s?", text))
    return parts is not None and len(parts) == a["num_paragraphs"]


def _two_responses(text: str, _: Mapping[str, Any]) -> bool:
    parts = _parts(text.split("******"))
    return parts is not None and len(parts) == 2 and parts[0].strip() != parts[1].strip()


def _first_word(text: str, a: Mapping[str, Any]) -> bool:
    paragraphs = text.split("\n\n")
    count, nth = sum(1 for p in paragraphs if p.strip()), a["nth_paragraph"]
    # The published program counts without the empty paragraphs but looks the n-th up among all of them.
    if nth > count or count != a["num_paragraphs"] or not paragraphs[nth - 1].strip():
        return False
    word = paragraphs[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == a["first_word"].lower()


def _postscript(text: str, a: Mapping[str, Any]) -> bool:
    marker: str = a["postscript_marker"].strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _is_json(text: str, _: Mapping[str, Any]) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


CHECKS: Mapping[str, Check] = {
    "punctuation:no_comma": lambda t, a: "," not in t,
    "length_constraints:number_words": lambda t, a: _holds(
        len(re.findall(r"\w+", t)), a["relation"], a["num_words"]
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "keywords:existence": lambda t, a: all(_occurrences(word, t) for word in a["keywords"]),
    "keywords:frequency": lambda t, a: _holds(_occurrences(a["keyword"], t), a["relation"], a["frequency"]),
    "keywords:forbidden_words": lambda t, a: (
        not any(re.search(rf"\b{re.escape(word)}\b", t, re.IGNORECASE) for word in a["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda t, a: _holds(
        t.lower().count(a["letter"].strip().lower()), a["let_relation"], a["let_frequency"]
    ),
    "combination:repeat_prompt": lambda t, a: (
        t.strip().lower().startswith(a["prompt_to_repeat"].strip().lower())
    ),
    "combination:two_responses": _two_responses,
    "startend:quotation": lambda t, a: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "startend:end_checker": lambda t, a: (
        t.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower())
    ),
    "detectable_content:number_placeholders": lambda t, a: (
        len(re.findall(r"\[.*?\]", t)) >= a["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:title": lambda t, a: any(
        title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", t)
    ),
    "detectable_format:multiple_sections": lambda t, a: (
        len(re.findall(rf"{re.escape(a['section_spliter'].strip())}\s?\d+", t)) >= a["num_sections"]
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:constrained_response": lambda t, a: any(
        f"My answer is {word}." in t for word in ("yes", "no", "maybe")
    ),
}
"""Instruction id to a check of (completion, the instruction's arguments)."""


class IFEval(RowTask):
    """The prompts all of whose instructions stand in `CHECKS`."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, _example)

    def examples(self, split: str) -> Iterator[Example]:
        """The prompts that can be checked, in the file's order; the number left out is logged."""
        everything = list(super().examples(split))
        kept = [example for example in everything if not _unsupported(example)]
        logger.warning(
            "ifeval: %d of %d prompts are kept; the others hold an instruction that is not checked here",
            len(kept),
            len(everything),
        )
        return iter(kept)

    def excluded(self, split: str) -> Counter[str]:
        """Prompts left out, by the instructions they were left out for (a prompt with two counts twice),
        and their number under ``"prompts"``.
        """
        lists = [missing for example in super().examples(split) if (missing := _unsupported(example))]
        return Counter({"prompts": len(lists)}) + Counter(name for missing in lists for name in missing)

    def score(self, example: Example, completion: str) -> float | None:
        """1 if every instruction is followed, else 0; an empty completion follows none."""
        instructions = zip(example.meta["instructions"], example.meta["arguments"], strict=True)
        return float(
            bool(completion.strip()) and all(CHECKS[name](completion, a) for name, a in instructions)
        )


def _example(row: Row) -> Example:
    instructions, arguments = row.take("instruction_id_list", list), row.take("kwargs", list)
    if len(instructions) != len(arguments) or not instructions:
        row.refuse(
            f"{len(instructions)} instructions with {len(arguments)} kwargs", "as many of each, at least one"
        )
    meta = {"instructions": tuple(instructions), "arguments": tuple(arguments)}
    return Example(f"ifeval/{row.take('key', int)}", row.take("prompt", str), answer="", meta=meta)


def _unsupported(example: Example) -> list[str]:
    return [name for name in example.meta["instructions"] if name not in CHECKS]


ifeval = IFEval
