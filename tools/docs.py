"""Writes ``docs/reference.md``: every key of every command, from the configs themselves.

python -m tools.docs            write the page
python -m tools.docs --check    exit status 1 if it is not what the code says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stillroom.cli import COMMANDS, _parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """# Reference: every key of every command

Written by `make docs` from the configs in the code; do not edit. A key stands in the recipe's YAML (nested at its
dots) or on the command line (`--train.max_steps 100`); the command line wins. Every command also takes `--dry-run`,
`--resume` and `--help`.
"""


def reference() -> str:
    """The page as text."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parts.append(
            f"\n## stillroom {name}\n\n{command.summary}\n\n| key | default | meaning |\n| --- | --- | --- |\n"
        )
        actions = _parser(name)._actions
        for action in actions:
            has_children = any(other.dest.startswith(action.dest + ".") for other in actions)
            if action.dest in ("help", "config", "print_config", "dry_run", "resume") or has_children:
                continue
            if action.option_strings and action.help:
                default = action.default if action.default not in ("", None) else "–"
                parts.append(f"| `{action.dest}` | {_cell(default)} | {_cell(action.help)} |\n")
    return "".join(parts)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs")
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != reference())
    PAGE.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
