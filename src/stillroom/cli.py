"""The front door: parse, load the config, call the command.

Each command is one typed config and one function. jsonargparse makes flags, YAML keys and help from
the config; it is used in this file only. Nothing heavy is imported before a command runs, so that
`stillroom --help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillroom.config import Options
from stillroom.errors import ConfigError, StillroomError, unknown_name

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


@dataclass(frozen=True)
class Command:
    """What stands after `stillroom`: one word or two."""

    target: str
    """``module:function``, called as function(config, options)."""
    config: str
    """``module:ConfigDataclass``."""
    summary: str
    positional: str | None = None
    """Key that a first word without dashes stands for; otherwise such a word is a YAML file."""


COMMANDS = {
    "distill": Command(
        "stillroom.commands.distill:distill",
        "stillroom.config:DistillConfig",
        "Distil a teacher into a student: off-policy, on-policy or mixed.",
    ),
    "calibrate": Command(
        "stillroom.commands.calibrate:calibrate",
        "stillroom.config:CalibrateConfig",
        "Make a teacher more or less distillable, and keep its skill.",
    ),
    "evaluate": Command(
        "stillroom.commands.evaluate:evaluate",
        "stillroom.config:EvaluateConfig",
        "Score a model on tasks, greedy and sampled, with intervals.",
    ),
    "demo": Command(
        "stillroom.experiments.demo:demo",
        "stillroom.config:DemoConfig",
        "Distil the shipped pocket teacher by four methods and compare, in a few minutes.",
    ),
    "knob": Command(
        "stillroom.experiments.knob:knob",
        "stillroom.experiments.knob_config:KnobConfig",
        "Calibrate a teacher both ways, distil from each, and compare the students.",
    ),
    "demo knob": Command(
        "stillroom.experiments.knob_demo:knob_demo",
        "stillroom.experiments.knob_config:KnobDemoConfig",
        "Distil from shipped calibrated teachers and from one calibrated live, and show what students learn.",
    ),
    "tasks": Command(
        "stillroom.commands.tasks:tasks",
        "stillroom.config:TasksConfig",
        "List the tasks that can be trained and scored on.",
    ),
    "pocket train": Command(
        "stillroom.experiments.pocket_train:train",
        "stillroom.experiments.pocket_config:PocketTrainConfig",
        "Rebuild a shipped pocket model from its seed.",
    ),
    "pocket measure": Command(
        "stillroom.experiments.pocket_claims:measure",
        "stillroom.experiments.pocket_claims:PocketMeasureConfig",
        "Measure a pocket model, each style of answer by itself.",
    ),
    "pocket asymmetry": Command(
        "stillroom.experiments.pocket_claims:asymmetry",
        "stillroom.experiments.pocket_claims:PocketAsymmetryConfig",
        "Show that a small student learns worked answers and not direct ones.",
    ),
    "fetch": Command(
        "stillroom.commands.fetch:fetch",
        "stillroom.config:FetchConfig",
        "Fetch and convert a small real model; the only command that uses the network.",
        positional="name",
    ),
}

_PLAIN_FLAGS = ("--help", "--dry-run", "--resume")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a mistake in what was asked, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from stillroom import __version__

        print(f"stillroom {__version__}")
        return 0
    try:
        name, rest = _command(words)
        config, options = parse(name, rest)
        _load(COMMANDS[name].target)(config, options)
    except StillroomError as error:
        if os.environ.get("STILLROOM_DEBUG"):
            raise
        print(f"stillroom: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stillroom: interrupted; complete checkpoints are kept, go on with --resume.", file=sys.stderr)
        return 130
    return 0


def _command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that the first words name (some are two words), and the words behind it."""
    for length in (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name, words[length:]
    raise ConfigError(unknown_name("command", words[0], COMMANDS))


def parse(name: str, words: Sequence[str]) -> tuple[Any, Options]:
    """Make a command's config from words of the command line.

    The first word may be a YAML file; flags override it.

    Raises:
        ConfigError: an unknown key or flag (with near matches), a wrong type, or a value out of range.
    """
    words = list(words)
    if words and not words[0].startswith("-"):
        key = COMMANDS[name].positional
        words = [f"--{key}" if key and not words[0].endswith((".yaml", ".yml")) else "--config", *words]
    for file in _config_files(words):
        _refuse_keys_given_twice(file)
    parser = _parser(name)
    words = _lists_in_words(_canonical_flags(words, _known_keys(parser)), parser)
    try:
        namespace = parser.parse_args(words)
        built = vars(parser.instantiate_classes(namespace))
    except StillroomError:
        raise
    except Exception as error:
        raise ConfigError(_explain(error, _known_keys(parser))) from error
    options = Options(dry_run=built.pop("dry_run"), resume=built.pop("resume"))
    built.pop("config")
    return _load(COMMANDS[name].config)(**built), options


def _config_files(words: Sequence[str]) -> list[str]:
    files = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return files + [after for word, after in itertools.pairwise(words) if word == "--config"]


def _refuse_keys_given_twice(file: str) -> None:
    """YAML readers take the last one without a word, so the recipe would not say what is run.

    Files that are missing or are no YAML are left to the parser, which refuses them.
    """
    import yaml

    try:
        root = yaml.compose(Path(file).expanduser().read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return
    waiting = [root]
    for node in waiting:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if (first := seen.setdefault(str(key.value), line)) != line:
                    raise ConfigError(
                        f"{file}: key {key.value!r} is given on line {first} and again on line {line}, and only one "
                        "of the two would count. Keep one."
                    )
                waiting.append(value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _parser(name: str) -> ArgumentParser:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    command = COMMANDS[name]
    parser = jsonargparse.ArgumentParser(
        prog=f"stillroom {name}",
        description=command.summary,
        exit_on_error=False,
        usage=f"stillroom {name} [RECIPE.yaml] [--key value ...] [--dry-run] [--resume]",
    )
    parser.add_argument("--config", action="config", help="YAML file; may also stand first, without the flag")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything but the weights, print what would run"
    )
    parser.add_argument("--resume", action="store_true", help="go on in an existing run folder")
    parser.add_class_arguments(_load(command.config), None)
    return parser


def _known_keys(parser: ArgumentParser) -> set[str]:
    keys = {action.dest for action in parser._actions if action.dest not in ("help", "==SUPPRESS==")}
    return {key for key in keys if not any(other.startswith(key + ".") for other in keys)}


def _canonical_flags(words: Sequence[str], known: set[str]) -> list[str]:
    """Flags as the parser knows them: ``--data-dir`` is ``--data_dir``; unknown ones are refused here."""
    canonical = []
    for word in words:
        if word.startswith("--") and word not in _PLAIN_FLAGS:
            flag, equals, value = word.partition("=")
            key = flag[2:].rstrip("+").replace("-", "_")
            if key != "print_config" and not _is_known(key, known):
                raise ConfigError(unknown_name("flag", key, known))
            word = f"--{key}{flag[len(flag.rstrip('+')) :]}{equals}{value}"
        canonical.append(word)
    return canonical


def _lists_in_words(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """``--tasks a,b`` for ``--tasks '[a, b]'``: keys that hold a list take words with commas between."""
    lists = {f"--{action.dest}" for action in parser._actions if isinstance(action.default, tuple)}
    spelt: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if equals and flag in lists and not value.startswith("["):
            word = f"{flag}={_as_list(value)}"
        elif spelt and spelt[-1] in lists and not word.startswith(("[", "--")):
            word = _as_list(word)
        spelt.append(word)
    return spelt


def _as_list(value: str) -> str:
    return "[" + ", ".join(part.strip() for part in value.split(",")) + "]"


def _is_known(key: str, known: set[str]) -> bool:
    return key in known or any(key.startswith(name + ".") for name in known)  # keys inside a free dictionary


def _explain(error: Exception, known: set[str]) -> str:
    """The message of jsonargparse, with near matches for the key that it does not know."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StillroomError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())
    # An unknown key of a nested section is named without its section.
    spellings = {key: key for key in known} | {key.rpartition(".")[2]: key for key in known}
    for part in text.replace('"', "'").split("'"):
        if any(key.startswith(f"{part}.") for key in known):
            continue  # the section, which is right
        near = difflib.get_close_matches(part, sorted(spellings), n=3, cutoff=0.6)
        if near and part not in spellings:
            return f"{text} Did you mean {' or '.join(dict.fromkeys(spellings[n] for n in near))}?"
    return text


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: stillroom COMMAND [RECIPE.yaml] [--key value ...]",
            "",
            "Knowledge distillation of language models, made predictable and controllable.",
            "",
            "commands:",
            *lines,
            "",
            "`stillroom COMMAND --help` lists every key. Keys stand in the YAML file or as flags; flags win.",
            "Every command takes --dry-run (check and print, load no weights) and --resume.",
        ]
    )
