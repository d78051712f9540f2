"""Files that survive a crash: strict JSON lines, whole or absent files, one error for a full disk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stillroom.errors import RunFolderError
from stillroom.types import Rollout


def plain(value: Any) -> Any:
    """A config as dictionaries, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def rollout(record: Mapping[str, Any]) -> Rollout:
    """A line of ``rollouts.jsonl`` as the Rollout that it was; what was added beside it is left out."""
    fields: dict[str, Any] = {f.name: record[f.name] for f in dataclasses.fields(Rollout)}
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        fields[name] = tuple(fields[name])
    return Rollout(**fields)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file; a last line cut off by a crash is passed over, an earlier one is an error."""
    # Bytes, since a crash cuts characters too; and not splitlines, which also splits inside JSON strings.
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                return
            raise RunFolderError(
                f"line {number} of {str(path)!r} is not JSON ({error}). The file was edited or damaged."
            ) from error


def strict_json(line: Mapping[str, Any]) -> str:
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(line), ensure_ascii=False, allow_nan=False)


def _without_nan(value: Any) -> Any:
    """None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_unfinished_line(path: Path) -> None:
    """Remove a last line that a crash cut short, so that the next one is not appended to it."""
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, then rename: a reader sees the old file or the new one, never half."""
    with disk_errors(path):
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into one clear error, whoever's writing it ended.

    Raises:
        RunFolderError: an OSError, or what safetensors and torch make of one.
    """
    try:
        yield
    except Exception as error:
        reason = _refused_by_the_system(error)
        if reason is None:
            raise
        raise RunFolderError(
            f"cannot write under {str(path)!r}: {reason}. What was already written is kept. Free some disk or choose "
            "another `--output_dir`, then pass `--resume`."
        ) from error


def _refused_by_the_system(error: Exception) -> str | None:
    """The system's reason, or None if the error is of another kind."""
    if isinstance(error, OSError):
        return None if isinstance(error, ConnectionError | TimeoutError) else error.strerror or str(error)
    text = str(error)
    # safetensors quotes the system: "I/O error: No space left on device (os error 28)".
    if type(error).__name__ == "SafetensorError" and (quoted := re.search(r"([^:]+) \(os error \d+\)", text)):
        return quoted[1].strip()
    # torch.save finds fewer bytes in its archive than it wrote, and says no more than that.
    if isinstance(error, RuntimeError) and ("PytorchStreamWriter" in text or "inline_container" in text):
        return "a file of a checkpoint could not be written whole"
    return None
