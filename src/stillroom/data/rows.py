"""Training rows: what may stand in a data set, read strictly, with an id that survives reordering.

Three layouts, recognised by their columns: ``messages``; ``prompt`` + ``completion``; ``prompt`` alone
(somebody still has to answer). A prompt is a text or a list of messages. Everything else in a row is kept
in ``extra`` and named in the log, because a reward or a report may want it. Ids and lengths are checked
here; turning rows into token ids is `rendering`'s work.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from stillroom.data.files import Record, read_records
from stillroom.errors import DataError
from stillroom.types import Example, Message, Task

logger = logging.getLogger(__name__)

LAYOUTS = (("messages",), ("prompt", "completion"), ("prompt",))
"""Required columns of each layout; the first that a data set has is the one that is read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: messages, or a prompt with or without its completion."""

    id: str
    """The data's own, or a hash of the content: never a position in the file."""
    prompt: str | tuple[Message, ...] | None = None
    completion: str | None = None
    messages: tuple[Message, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are not trained on."""


def load_rows(source: str | Path | Task, split: str = "train") -> list[Row]:
    """The rows of a file, a dataset or a task.

    Args:
        source: as in `read_records`, or a task.
        split: of a dataset or task; a file has none.

    Raises:
        DataError: missing columns (found and expected are listed), a value of the wrong type, duplicate
            ids, no rows, or a damaged file.
    """
    if isinstance(source, str | Path):
        return rows_of_records(read_records(source, split), str(source))
    return rows_of_task(source, split)


def rows_of_task(task: Task, split: str) -> list[Row]:
    """A task's examples as rows; the gold answer, options and the rest go to ``extra``."""
    return _checked([row_of_example(example) for example in task.examples(split)], f"{task.name} [{split}]")


def rows_of_records(records: Sequence[Record], source: str) -> list[Row]:
    """Records as rows, all in one layout.

    Raises:
        DataError: as in `load_rows`.
    """
    found = sorted({name for _, record in records for name, value in record.items() if value is not None})
    layout = next((columns for columns in LAYOUTS if set(columns) <= set(found)), None)
    if layout is None:
        expected = ", or ".join(" + ".join(columns) for columns in LAYOUTS)
        raise DataError(
            f"data {source!r} has the columns {', '.join(found) or '(none)'}, but training reads {expected}. "
            "Rename the columns that hold what is asked and what is answered."
        )
    extra = [name for name in found if name not in (*layout, "id")]
    if extra:
        logger.warning("%s: columns %s are kept but not trained on", source, ", ".join(extra))
    return _checked([_row(where, record, layout) for where, record in records], source)


class Sized(Protocol):
    """Anything with an id, prompt ids and completion ids."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def completion_ids(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=Sized)


def fit(
    samples: Sequence[S], max_length: int, *, on_overlong: Literal["error", "drop"] = "error", room: int = 1
) -> tuple[list[S], list[str]]:
    """Leave out whole samples that are too long; nothing is ever cut off.

    Args:
        samples: rendered rows; a completion may still be empty.
        max_length: most tokens of prompt and completion together.
        on_overlong: stop with an error, or drop such samples, count them and name them in the log.
        room: tokens that must be left for a completion that will be written, whatever stands there now.

    Returns:
        The samples that fit, in order, and the ids of those that were dropped.

    Raises:
        DataError: a sample does not fit and ``on_overlong`` is ``error``; or none fits.
    """
    fitting: list[S] = []
    overlong: list[S] = []
    for sample in samples:
        length = len(sample.prompt_ids) + max(len(sample.completion_ids), room)
        (fitting if length <= max_length else overlong).append(sample)
    if not overlong:
        return fitting, []
    first = overlong[0]
    prompt, completion = len(first.prompt_ids), len(first.completion_ids)
    if prompt + room > max_length:
        what = f"its prompt of {prompt} tokens leaves no room for a completion"
    else:
        what = f"{prompt} prompt and {completion} completion tokens"
    message = (
        f"{len(overlong)} of {len(samples)} rows are longer than max_length={max_length} tokens (first: "
        f"{first.id!r}, {what})"
    )
    if on_overlong == "error" or not fitting:
        rest = "" if fitting else ", and none would be left"
        raise DataError(
            f"{message}. Cutting them off would lose their answers{rest}. Raise max_length, shorten the rows, "
            "or set on_overlong to drop if some may be left out."
        )
    dropped = [s.id for s in overlong]
    logger.warning("%s and are left out: %s", message, ", ".join(dropped[:5]))
    return fitting, dropped


def content_id(prompt: object, completion: object, messages: object) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over what is trained on."""
    content = json.dumps([prompt, completion, messages], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _row(where: str, record: Mapping[str, Any], layout: tuple[str, ...]) -> Row:
    missing = [name for name in layout if record.get(name) is None]
    if missing:
        found = ", ".join(name for name, value in record.items() if value is not None) or "(none)"
        raise DataError(
            f"{where}: no {' and no '.join(map(repr, missing))}, which other rows have; found {found}, "
            f"expected {' + '.join(layout)}. Complete the row or take it out."
        )
    prompt: str | tuple[Message, ...] | None = None
    completion = messages = None
    if "messages" in layout:
        messages = _messages(record["messages"], where, "messages")
    else:
        prompt = _text_or_messages(record["prompt"], where, "prompt")
        if "completion" in layout:
            completion = _completion(record["completion"], where)
    own_id = record.get("id")
    return Row(
        id=str(own_id) if own_id is not None else "",
        prompt=prompt,
        completion=completion,
        messages=messages,
        extra={name: value for name, value in record.items() if name not in (*layout, "id")},
    )


def row_of_example(example: Example) -> Row:
    """A task's example as a row; the gold answer, the options and the rest go to ``extra``."""
    prompt = example.prompt if isinstance(example.prompt, str) else tuple(example.prompt)
    extra = {**example.meta, "answer": example.answer, "options": example.options}
    return Row(example.id, prompt, example.completion, None, extra)


def _checked(rows: list[Row], source: str) -> list[Row]:
    """Give ids to rows that have none, and refuse an empty set and ids that occur twice."""
    if not rows:
        raise DataError(
            f"{source} holds no rows, so there is nothing to train on. Choose another split or file."
        )
    copies: Counter[str] = Counter()
    named = []
    for row in rows:
        if row.id:
            named.append(row)
            continue
        name = content_id(row.prompt, row.completion, row.messages)
        copies[name] += 1
        # Equal rows are told apart by their number, so that a data set with repetitions keeps them all.
        suffix = f"-{copies[name]}" if copies[name] > 1 else ""
        named.append(Row(name + suffix, row.prompt, row.completion, row.messages, row.extra))
    twice = [name for name, times in Counter(row.id for row in named).items() if times > 1]
    if twice:
        raise DataError(
            f"{source}: {len(twice)} ids occur more than once (first: {', '.join(map(repr, twice[:5]))}), so "
            "cached signals and samples could not be told apart. Make them unique, or leave the column id out."
        )
    return named


def _text_or_messages(value: Any, where: str, column: str) -> str | tuple[Message, ...]:
    return value if isinstance(value, str) else _messages(value, where, column)


def _completion(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    messages = _messages(value, where, "completion")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise DataError(
            f"{where}: 'completion' holds {len(messages)} messages, but it is one answer: a text, or one "
            "assistant message. Put a longer conversation into one column 'messages'."
        )
    return messages[0]["content"]


def _messages(value: Any, where: str, column: str) -> tuple[Message, ...]:
    if (
        not isinstance(value, Iterable)
        or isinstance(value, str | Mapping)
        or not all(map(_is_message, value))
    ):
        raise DataError(
            f"{where}: {column!r} is {str(value)[:80]!r}, but it must be "
            f"{'a text or ' if column != 'messages' else ''}a list of messages, each with a 'role' and a "
            "'content' that are texts. Correct the row."
        )
    # Table formats fill the keys that other messages have with null; those are no part of the message.
    messages = tuple({k: v for k, v in message.items() if v is not None} for message in value)
    if not messages:
        raise DataError(f"{where}: {column!r} is an empty list, so nothing is asked. Take the row out.")
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(k), str) for k in ("role", "content"))
