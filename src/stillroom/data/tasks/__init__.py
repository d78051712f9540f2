"""The table of tasks: one row each, found by name, imported only when asked for.

A task is a versioned set of examples with a verifier (`stillroom.types.Task`). Tasks with files are read
below ``--data-dir``; the pocket tasks are generated. To use a task of your own, pass the object: there is
nothing to register. ``docs/add_a_task.md`` says how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from stillroom.data.tasks.reading import HUB, Source
from stillroom.errors import ConfigError, DataError, unknown_name
from stillroom.types import Task

Family = Literal["pocket", "maths", "multiple choice", "instructions", "open-ended", "text"]
"""What kind of score a task has; open-ended and text have none and are measured by likelihood."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One row of `TASKS`."""

    factory: str
    """``module:name`` of what makes the task: called with a `Source`, or with nothing if it reads no files."""
    family: Family
    licence: str
    """Of the data."""
    summary: str
    test_split: str
    """The split that a figure is stated on unless another is asked for."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Split to file below the data folder; empty for tasks that are generated."""


def _files(folder: str, suffix: str, *splits: str) -> dict[str, str]:
    return {split: f"{folder}/{split}.{suffix}" for split in splits}


_HERE = "stillroom.data.tasks"

TASKS: Mapping[str, TaskSpec] = {
    "pocket/chains": TaskSpec(
        "stillroom.pocket.chains:Chains", "pocket", "Apache-2.0", "walks through permuting doors", "heldout"
    ),
    "pocket/facts": TaskSpec(
        "stillroom.pocket.facts:Facts", "pocket", "Apache-2.0", "one-hop and two-hop facts", "heldout"
    ),
    "pocket/strings": TaskSpec(
        "stillroom.pocket.strings:Strings", "pocket", "Apache-2.0", "string instructions", "heldout"
    ),
    "gsm8k": TaskSpec(
        f"{_HERE}.maths:gsm8k",
        "maths",
        "MIT",
        "grade-school word problems with worked solutions",
        "test",
        _files("gsm8k", "jsonl", "train", "test"),
    ),
    "svamp": TaskSpec(
        f"{_HERE}.maths:svamp",
        "maths",
        "MIT",
        "one-step word problems, varied to defeat short cuts",
        "test",
        {"test": "svamp/SVAMP.json"},
    ),
    "aqua_rat": TaskSpec(
        f"{_HERE}.multiple_choice:aqua_rat",
        "multiple choice",
        "Apache-2.0",
        "algebra word problems with five options and a rationale",
        "test",
        _files("aqua_rat", "jsonl", "validation", "test"),
    ),
    "commonsenseqa": TaskSpec(
        f"{_HERE}.multiple_choice:commonsenseqa",
        "multiple choice",
        "MIT (as published by its authors)",
        "common sense with five options; the labels of its test split are not public",
        "validation",
        _files("commonsenseqa", "jsonl", "train", "validation"),
    ),
    "arc_easy": TaskSpec(
        f"{_HERE}.multiple_choice:arc",
        "multiple choice",
        "CC BY-SA 4.0",
        "school science, the easy part",
        "test",
        _files("arc_easy", "jsonl", "train", "test"),
    ),
    "arc_challenge": TaskSpec(
        f"{_HERE}.multiple_choice:arc",
        "multiple choice",
        "CC BY-SA 4.0",
        "school science, the part that retrieval misses",
        "test",
        _files("arc_challenge", "jsonl", "train", "validation", "test"),
    ),
    "openbookqa": TaskSpec(
        f"{_HERE}.multiple_choice:arc",
        "multiple choice",
        "Apache-2.0",
        "science facts put to use, without the fact given",
        "test",
        _files("openbookqa", "jsonl", "train", "test"),
    ),
    "mmlu_subset": TaskSpec(
        f"{_HERE}.multiple_choice:mmlu",
        "multiple choice",
        "MIT",
        "9,143 of MMLU's 14,042 test questions; never to be stated as MMLU",
        "test",
        {"test": "mmlu/test.jsonl"},
    ),
    "ifeval": TaskSpec(
        f"{_HERE}.ifeval:ifeval",
        "instructions",
        "Apache-2.0",
        "verifiable instructions, those that need no language detector or sentence splitter",
        "test",
        {"test": "ifeval/input_data.jsonl"},
    ),
    "dolly": TaskSpec(
        f"{_HERE}.open_ended:dolly",
        "open-ended",
        "CC BY-SA 3.0",
        "1,000 closed-book-with-context questions of databricks-dolly-15k",
        "train",
        {"train": "dolly_subset/dolly.jsonl"},
    ),
    "self_instruct": TaskSpec(
        f"{_HERE}.open_ended:self_instruct",
        "open-ended",
        "Apache-2.0",
        "252 user-oriented instructions (test) and 175 seed tasks (train)",
        "test",
        {
            "train": "self_instruct/seed_tasks.jsonl",
            "test": "self_instruct/user_oriented_instructions.jsonl",
        },
    ),
    "vicuna": TaskSpec(
        f"{_HERE}.open_ended:vicuna",
        "open-ended",
        "Apache-2.0",
        "80 questions without reference answers",
        "test",
        {"test": "vicuna_bench/question.jsonl"},
    ),
    "wikitext2": TaskSpec(
        f"{_HERE}.text:wikitext2",
        "text",
        "CC BY-SA 3.0",
        "Wikipedia articles, tokenised, rare words as <unk>",
        "test",
        {"validation": "wikitext2/valid.txt", "test": "wikitext2/test.txt"},
    ),
    "tinyshakespeare": TaskSpec(
        f"{_HERE}.text:tinyshakespeare",
        "text",
        "public domain",
        "1.1 MB of Shakespeare; the last tenth is held out",
        "validation",
        {"train": "tinyshakespeare/input.txt", "validation": "tinyshakespeare/input.txt"},
    ),
}


def load_task(name: str, data_dir: Path | str | None = None) -> Task:
    """Make a task by name.

    Args:
        name: a key of `TASKS`.
        data_dir: the folder that holds the tasks' folders, or ``hf:NAME`` / ``hf:NAME:CONFIG`` for a Hugging
            Face dataset with the published columns. Not needed by tasks that are generated.

    Raises:
        ConfigError: the name is unknown, or a data folder is needed and none is given.
        DataError: the folder does not exist.
    """
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    spec = TASKS[name]
    module, _, attribute = spec.factory.partition(":")
    factory = getattr(import_module(module), attribute)
    if not spec.files:
        return factory()
    expected = " and ".join(dict.fromkeys(spec.files.values()))
    if data_dir is None:
        raise ConfigError(
            f"task {name!r} reads {expected}, and no data folder is given. "
            f"Give the folder that holds them with --data-dir FOLDER (in a distill recipe: data.data_dir), or a "
            f"dataset with --data-dir {HUB}NAME."
        )
    location = str(data_dir)
    if not location.startswith(HUB) and not Path(location).is_dir():
        raise DataError(
            f"--data-dir {location} is not a folder, so task {name!r} cannot read {expected} below it. "
            "Give the folder that holds them."
        )
    return factory(Source(name, spec.files, location))
