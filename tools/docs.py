"""Writes ``docs/reference.md``, every key of every command, from the configs themselves; and the tables of
``docs/pocket.md`` from the cards of the shipped models.

python -m tools.docs            write the pages
python -m tools.docs --check    exit status 1 if they are not what the code and the cards say
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from stillroom.cli import COMMANDS, _parser
from stillroom.pocket import assets

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
POCKET = PAGE.with_name("pocket.md")
_BLOCK = re.compile(r"(<!-- cards: (?P<family>\w+) -->\n).*?(<!-- /cards -->)", re.DOTALL)
ROLES = ("teacher", "student", "proxy")
MEASURED = {
    "chains/worked": "chains, worked, greedy",
    "chains/direct": "chains, direct, greedy",
    "chains/sampled": "chains, sampled, style free",
    "chains/worked_share": "sampled share that writes steps",
    "chains/faithful_share": "sampled and every step right",
    "facts/heldout": "facts, held-out phrasing",
    "strings/heldout": "strings, held-out words",
    "strings/ood": "strings, held-out compositions",
}
COUNTED = {
    "parameters": "parameters",
    "examples": "examples seen",
    "seconds": "training, seconds at 1 thread",
}
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


def pocket_page(text: str) -> str:
    """The page of the pocket world with its tables filled from the cards."""
    return _BLOCK.sub(lambda match: match[1] + cards(match["family"]) + match[3], text)


def cards(family: str) -> str:
    """What was measured of a family's models, as a table."""
    made = [assets.card(f"{family}-{role}") for role in ROLES]
    lines = [f"| `{family}` | {' | '.join(ROLES)} |", "| --- | --- | --- | --- |"]
    for key, name in MEASURED.items():
        found = [card["measured"][key] for card in made]
        lines.append(
            f"| {name} | "
            + " | ".join(f"{m['value']:.3f} [{m['low']:.3f}, {m['high']:.3f}]" for m in found)
            + " |"
        )
    lines += [
        f"| {name} | " + " | ".join(f"{card[key]:,}" for card in made) + " |" for key, name in COUNTED.items()
    ]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wrong = 0
    for page, text in ((PAGE, reference()), (POCKET, pocket_page(POCKET.read_text(encoding="utf-8")))):
        wrong |= page.read_text(encoding="utf-8") != text
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(wrong) if check else 0


if __name__ == "__main__":
    sys.exit(main())
