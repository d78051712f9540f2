"""Rows from disk or from a Hugging Face dataset, read strictly.

A task says which file holds which split; this file finds it, checks every row, and names file, line, what
was found and what was expected when something is off. Nothing is skipped, repaired or guessed: a benchmark
with rows quietly missing gives a figure that cannot be compared with anybody else's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stillroom.errors import ConfigError, DataError, unknown_name
from stillroom.types import Example

HUB = "hf:"
"""Marks a data folder that is a Hugging Face dataset name instead, ``hf:NAME`` or ``hf:NAME:CONFIG``."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands."""

    where: str
    """File and line, for messages."""
    id: str
    """Task, split and row number, for data sets whose rows have no id of their own."""
    fields: Mapping[str, Any]

    def take(self, column: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a column, which must be there and of the stated type.

        Raises:
            DataError: it is missing, or of another type (a bool is no number).
        """
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in kinds)
        if column not in self.fields:
            self.refuse(
                f"the columns {', '.join(self.fields) or '(none)'}", f"a column {column!r} ({expected})"
            )
        value = self.fields[column]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(f"{column} = {value!r} ({type(value).__name__})", f"{column!r} to be {expected}")
        return value

    def nested(self, column: str) -> Row:
        """A column that holds an object, as a row of its own."""
        return Row(f"{self.where}, column {column!r}", self.id, self.take(column, dict))

    def refuse(self, found: str, expected: str) -> NoReturn:
        """Raise the DataError that says what this row holds and what it should hold."""
        raise DataError(
            f"{self.where}: found {found[:200]}, expected {expected}. The task cannot read this row, and leaving "
            "it out would change the figure. Correct the file, or use the published one."
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a task's rows come from: files below a folder, or a Hugging Face dataset."""

    task: str
    files: Mapping[str, str]
    """Split to file, relative to the folder."""
    location: str
    """The folder, or ``hf:NAME``."""

    def rows(self, split: str) -> Iterator[Row]:
        """All rows of a split, in the file's order.

        Raises:
            ConfigError: the folder has no such split (a Hugging Face dataset may have others).
            DataError: the file is missing, empty, or holds a row that is not a UTF-8 JSON object.
        """
        if self.location.startswith(HUB):
            return self._hub_rows(split)
        path = self._path(split)
        read = _json_list if path.suffix == ".json" else _json_lines
        return self._numbered(split, read(path, f"{self.task}: {self.files[split]}"))

    def text(self, split: str) -> str:
        """The whole file of a split as text.

        Raises:
            DataError: the file is missing, empty, or not UTF-8.
        """
        if self.location.startswith(HUB):
            raise ConfigError(
                f"{self.task} is read as plain text, so it needs a folder. Give --data-dir FOLDER."
            )
        path = self._path(split)
        # Read as bytes: text mode would turn \r\n into \n and change the count of bytes that we divide by.
        text = _decode(path.read_bytes(), f"{self.task}: {self.files[split]}")
        if not text.strip():
            raise DataError(f"{path} holds no text, so there is nothing to score. Download the file again.")
        return text

    def _path(self, split: str) -> Path:
        if split not in self.files:
            raise ConfigError(unknown_name(f"split of {self.task}", split, self.files))
        path = Path(self.location) / self.files[split]
        if not path.is_file():
            raise DataError(
                f"{self.task} reads {self.files[split]}, but {path} does not exist. "
                f"Give the folder that holds {self.files[split]} with --data-dir."
            )
        return path

    def _numbered(self, split: str, rows: Iterator[tuple[str, Any]]) -> Iterator[Row]:
        number = 0
        for where, value in rows:
            row = Row(where, f"{self.task}/{split}/{number}", value)
            if not isinstance(value, dict):
                row.refuse(f"{type(value).__name__} {value!r}", "a JSON object with named columns")
            yield row
            number += 1
        if number == 0:
            raise DataError(
                f"{self.task}: {self.files[split]} holds no rows, so there is nothing to read. Download it again."
            )

    def _hub_rows(self, split: str) -> Iterator[Row]:
        from datasets import load_dataset

        name, _, config = self.location.removeprefix(HUB).partition(":")
        try:
            rows = load_dataset(name, config or None, split=split)
        except (OSError, ValueError) as problem:
            raise DataError(
                f"{self.task}: split {split!r} of the Hugging Face dataset {name!r} cannot be loaded ({problem}). "
                "Check the name, its configuration (hf:NAME:CONFIG) and the network, or use --data-dir FOLDER."
            ) from problem
        return self._numbered(split, ((f"{name} [{split}], row {i}", row) for i, row in enumerate(rows)))


class RowTask:
    """What tasks made of rows have in common; a subclass adds ``score``.

    Args:
        source: its files.
        read: makes an example of a row.
    """

    version = "1"
    """Raised when prompts, order or scores change, so that figures of different versions are not compared."""

    def __init__(self, source: Source, read: Callable[[Row], Example]) -> None:
        self.name = source.task
        self.splits = tuple(source.files)
        self.source = source
        self._read = read

    def examples(self, split: str) -> Iterator[Example]:
        """The rows of the split's file, in its order.

        Raises:
            DataError: two rows have the same id, and all of `Source.rows`.
        """
        # Not a generator itself, so that a missing file is reported by this call and not by a later `next`.
        return self._unique(self.source.rows(split))

    def _unique(self, rows: Iterator[Row]) -> Iterator[Example]:
        seen: dict[str, str] = {}
        for row in rows:
            example = self._read(row)
            if example.id in seen:
                row.refuse(f"the id {example.id!r} again (first at {seen[example.id]})", "every id once")
            seen[example.id] = row.where
            yield example


def _json_lines(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    blank = 0
    with path.open("rb") as file:
        # Lines are split as bytes: str.splitlines would also cut at U+2028, which may stand inside JSON text.
        for number, line in enumerate(file, 1):
            where = f"{name}, line {number}"
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise DataError(
                    f"{name}, line {blank}: found an empty line with rows after it, expected one JSON object a line. "
                    "A row may have been lost there. Download the file again, or delete the line."
                )
            yield where, _parse(_decode(line, where), where)


def _json_list(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    items = _parse(_decode(path.read_bytes(), name), name)
    if not isinstance(items, list):
        raise DataError(
            f"{name}: found {type(items).__name__}, expected a JSON list of rows. Use the published file."
        )
    return ((f"{name}, item {number}", item) for number, item in enumerate(items, 1))


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{where}: found the byte 0x{raw[problem.start]:02x} at position {problem.start}, expected UTF-8. Read "
            "in another encoding the text would change in silence. Convert the file (iconv -t utf-8)."
        ) from problem


def _parse(text: str, where: str) -> Any:
    def no_constant(name: str) -> NoReturn:
        raise DataError(f"{where}: found {name}, expected JSON, which has no such number. Correct the row.")

    try:
        return json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{where}: found {text[max(problem.pos - 20, 0) : problem.pos + 20]!r}, expected JSON ({problem.msg}). "
            "The row cannot be read. Correct it, or download the file again."
        ) from problem
