"""Files and Hugging Face datasets become plain records, strictly.

A record is a dict with the place it came from. A line that is not UTF-8, not JSON or not an object stops
the reading with its number: a data set that is quietly shorter than its file cannot be compared with it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.errors import DataError, unknown_name

Record = tuple[str, dict[str, Any]]
"""Where a record stands (for messages), and its columns."""

READERS = (".jsonl", ".ndjson", ".json", ".parquet")


def read_records(source: str | Path, split: str = "train") -> list[Record]:
    """All records of a data set.

    Args:
        source: a JSONL, JSON (a list of objects) or Parquet file; a dataset folder (saved by ``datasets``,
            or holding data files); or a Hugging Face dataset name.
        split: of a dataset folder or name; a single file has none.

    Raises:
        DataError: nothing there, an unknown format, a damaged line, or no records at all.
    """
    path = Path(source).expanduser()
    if path.is_file():
        records = list(_read_file(path))
    elif path.is_dir() or not _is_written_as_file(str(source), path):
        records = _read_dataset(str(source), path, split)
    else:
        raise _missing(path)
    if not records:
        raise DataError(
            f"data {str(source)!r} holds no rows, so there is nothing to train on. Check that it was written "
            "completely, or give another file."
        )
    return records


def _read_file(path: Path) -> Iterator[Record]:
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path)
    if path.suffix == ".json":
        return _json_list(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise DataError(
        f"{unknown_name('data format', path.suffix or '(none)', READERS)} The file {str(path)!r} cannot be "
        "read. Convert it to one of these."
    )


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path.name}, line {number}"
            if line.strip():
                yield where, _object(_parsed(_decoded(line, where), where), where)


def _json_list(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        # The failing byte's line, so that it can be found in an editor.
        raise _not_utf8(f"{path.name}, line {data[: problem.start].count(10) + 1}", problem) from problem
    value = _parsed(text, path.name)
    if not isinstance(value, list):
        raise DataError(
            f"{path.name} holds a JSON {type(value).__name__}, but rows are read from a list of objects. Write "
            "one list, or one object a line into a .jsonl file."
        )
    for number, item in enumerate(value, start=1):
        where = f"{path.name}, row {number}"
        yield where, _object(item, where)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(
            f"{path.name} cannot be read as Parquet ({problem}), so no row is safe. Write it again."
        ) from problem
    for number, row in enumerate(rows, start=1):
        yield f"{path.name}, row {number}", row


def _read_dataset(source: str, path: Path, split: str) -> list[Record]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path) if path.is_dir() else source)
    except (OSError, ValueError, DatasetsError) as problem:
        near = difflib.get_close_matches(source, [entry.name for entry in Path().iterdir()], n=3)
        hint = f" Did you mean {' or '.join(repr(name) for name in near)} here?" if near else ""
        raise DataError(
            f"data {source!r} is no file here and cannot be loaded as a dataset ({problem}).{hint} Give a JSONL, "
            "JSON or Parquet file, a dataset folder, or a dataset name that is cached or can be reached."
        ) from problem
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(
                f"{unknown_name(f'split of {source}', split, map(str, data))} Nothing was read. Choose one."
            )
        data = data[split]
    return [(f"{source} [{split}], row {number}", dict(row)) for number, row in enumerate(data, start=1)]


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _not_utf8(where, problem) from problem


def _not_utf8(where: str, problem: UnicodeDecodeError) -> DataError:
    byte = problem.object[problem.start]
    return DataError(
        f"{where}: byte 0x{byte:02x} is not UTF-8, and guessing another encoding would change the text. "
        "Convert the file to UTF-8 (iconv -f latin1 -t utf-8, if it is Latin-1)."
    )


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        line = f", line {problem.lineno}" if "line" not in where else ""
        raise DataError(
            f"{where}{line}: not valid JSON ({problem.msg} at column {problem.colno}): {text.strip()[:80]!r}. "
            "The rest of the file cannot be trusted; correct it or write it again."
        ) from problem


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: a {type(value).__name__}, but each row must be an object with named columns. Write it "
            'as {"prompt": ..., "completion": ...} or {"messages": [...]}.'
        )
    return value


def _is_written_as_file(source: str, path: Path) -> bool:
    return path.suffix in READERS or source[:1] in "./~\\" or source.count("/") > 1


def _missing(path: Path) -> DataError:
    parent = path.parent
    if not parent.is_dir():
        return DataError(f"folder {str(parent)!r} does not exist, so no data can be read. Correct the path.")
    names = sorted(entry.name for entry in parent.iterdir() if entry.suffix in READERS or entry.is_dir())[:20]
    return DataError(f"{unknown_name('data file', path.name, names)} No data can be read. Correct the path.")
