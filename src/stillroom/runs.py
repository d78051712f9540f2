"""The run folder: the only thing that a command leaves behind, and all that reports read.

    config.yaml      what was asked, defaults filled in
    environment.json versions, commit, device, threads
    metrics.jsonl    one object a logged step, keys are paths with units
    rollouts.jsonl   completions that were written, with their provenance
    results.json     every figure as an Estimate, written last: its presence means the run is finished

Only the first worker writes. Text files are UTF-8; JSON is strict (a logged NaN is null).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from stillroom.errors import RunFolderError
from stillroom.records import (
    cut_unfinished_line,
    disk_errors,
    plain,
    read_jsonl,
    strict_json,
    write_atomically,
)
from stillroom.types import Estimate, Rollout

_RECORDED_PACKAGES = (
    "stillroom",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
    "numpy",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder: checked by `prepare`, made by `begin` (or both by `create`), read by `open`."""

    path: Path
    is_writer: bool = True
    config_text: str = dataclasses.field(default="", repr=False)

    @classmethod
    def prepare(cls, path: str | Path, *, command: str, config: Any, resume: bool = False) -> Run:
        """Check that a run may write here, and write nothing yet, so that a refusal later leaves no trace.

        Args:
            path: the folder, which may not exist yet.
            command: name of the command, kept in ``config.yaml``.
            config: a config dataclass; where to write is not compared on resume.
            resume: go on in an existing folder, which must hold the same config.

        Raises:
            RunFolderError: the folder is not empty and `resume` is not set, or the config differs. Empty
                folders inside it do not count: they are what a run leaves that was refused late.
        """
        path = Path(path).expanduser()
        text = yaml.safe_dump({"command": command, **plain(config)}, sort_keys=False, allow_unicode=True)
        run = cls(path, int(os.environ.get("RANK", "0")) == 0, text)
        if path.exists() and not path.is_dir():
            raise RunFolderError(
                f"{str(path)!r} is a file; a run needs a folder. Give another `--output_dir`."
            )
        if not run.is_writer or all(inside.is_dir() for inside in path.rglob("*")):
            return run
        if not resume:
            raise RunFolderError(
                f"the run folder {str(path)!r} is not empty, and a new run would mix its files with the old ones. "
                "Give another `--output_dir`, remove the folder, or pass `--resume` to go on in it."
            )
        config_file = path / "config.yaml"
        if not config_file.is_file():
            raise RunFolderError(
                f"{str(path)!r} holds files but no config.yaml, so it is not a run folder that can be resumed. "
                "Check `--output_dir`."
            )
        _refuse_changed_config(config_file.read_text(encoding="utf-8"), text)
        return run

    def require_disk(self, free_bytes: int) -> None:
        """Refuse to start with less free disk than this; writes nothing.

        Raises:
            RunFolderError: there is not enough.
        """
        place = next(p for p in (self.path, *self.path.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(place).free
        if self.is_writer and free < free_bytes:
            raise RunFolderError(
                f"only {free / 1e6:,.0f} MB are free under {str(self.path)!r}, and this run may write "
                f"{free_bytes / 1e6:,.0f} MB of checkpoints and samples. Free some disk, choose another "
                "`--output_dir`, or lower `train.save_total_limit`."
            )

    def begin(self, **facts: object) -> Run:
        """Make the folder with its config and environment, or re-enter it.

        Args:
            **facts: what the folder must have been started with if it is re-entered, such as a hash of the rows;
                kept in ``environment.json``.

        Raises:
            RunFolderError: a fact differs, or the folder cannot be written to.
        """
        if not self.is_writer:
            return self
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        found = environment() | facts
        if (self.path / "environment.json").is_file():
            _refuse_changed_facts(self.path, found, facts)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            cut_unfinished_line(self.path / name)
        write_atomically(self.path / "config.yaml", self.config_text)
        write_atomically(self.path / "environment.json", json.dumps(found, indent=1))
        return self

    @classmethod
    def create(cls, path: str | Path, *, command: str, config: Any, resume: bool = False) -> Run:
        """`prepare`, then `begin` at once."""
        return cls.prepare(path, command=command, config=config, resume=resume).begin()

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a folder for reading."""
        path = Path(path).expanduser()
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{str(path)!r} is not a run folder: it has no config.yaml. Check the path.")
        return cls(path, is_writer=False)

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))

    @property
    def is_finished(self) -> bool:
        return (self.path / "results.json").is_file()

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Append one line to ``metrics.jsonl``; a figure that is NaN or infinite becomes null."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`, because training goes on from there."""
        file = self.path / "metrics.jsonl"
        if self.is_writer and file.is_file():
            kept = [line for line in self.metrics() if line["step"] <= step]
            write_atomically(file, "".join(json.dumps(line) + "\n" for line in kept))

    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / "metrics.jsonl"))

    def add_rollouts(self, rollouts: Iterable[Rollout | Mapping[str, Any]], **extra: Any) -> None:
        """Append completions to ``rollouts.jsonl``, with what they were written for in `extra`."""
        self._append(
            "rollouts.jsonl",
            [{**extra, **(dataclasses.asdict(r) if isinstance(r, Rollout) else r)} for r in rollouts],
        )

    def replace_rollouts(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write all of ``rollouts.jsonl`` at once."""
        if self.is_writer:
            write_atomically(
                self.path / "rollouts.jsonl", "".join(strict_json(record) + "\n" for record in records)
            )

    def write_results(self, estimates: Mapping[str, Estimate], **notes: Any) -> None:
        """Write ``results.json``: the figures, and whatever else belongs beside them."""
        if self.is_writer:
            figures = {name: estimate.as_dict() for name, estimate in estimates.items()}
            text = json.dumps({"figures": figures, **notes}, indent=1, ensure_ascii=False, allow_nan=False)
            write_atomically(self.path / "results.json", text)

    def results(self) -> dict[str, Estimate]:
        """Read the figures back."""
        file = self.path / "results.json"
        if not file.is_file():
            raise RunFolderError(
                f"{str(self.path)!r} has no results.json: the run has not finished. Resume it first."
            )
        figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return {name: Estimate(**fields) for name, fields in figures.items()}

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        if not self.is_writer:
            return
        text = "".join(strict_json(line) + "\n" for line in lines)
        with disk_errors(self.path), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)


def environment() -> dict[str, Any]:
    """Versions, commit, machine: what is needed to run the same thing again."""
    packages = {}
    for name in _RECORDED_PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    threads = None
    if "torch" in sys.modules:
        threads = sys.modules["torch"].get_num_threads()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "commit": _commit(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": threads,
    }


def _commit() -> str | None:
    """Commit of the source tree this runs from, if it is one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _refuse_changed_config(old: str, new: str) -> None:
    def comparable(text: str) -> list[str]:
        loaded = yaml.safe_load(text)
        loaded.pop("output_dir", None)
        return yaml.safe_dump(loaded, sort_keys=True, allow_unicode=True).splitlines()

    before, after = comparable(old), comparable(new)
    if before != after:
        difference = "\n".join(
            difflib.unified_diff(before, after, "in the folder", "asked for now", lineterm="", n=0)
        )
        raise RunFolderError(
            "the config differs from the one this folder was started with, so a resumed run would be neither of the "
            f"two:\n{difference}\nResume with the old config, or start a new run in another `--output_dir`."
        )


def _refuse_changed_facts(path: Path, now: Mapping[str, Any], facts: Iterable[str]) -> None:
    """Refuse to go on among other facts; one that an older folder does not state is not compared."""
    before = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    changed = [name for name in facts if before.get(name, now[name]) != now[name]]
    if changed:
        differences = ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)
        raise RunFolderError(
            f"{str(path)!r} was started with something else ({differences}), so a resumed run would be neither of the "
            "two. Resume with the same rows, models and number of processes, or start a new run in another "
            "`--output_dir`."
        )
