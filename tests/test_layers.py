"""Imports go left only: the house has one direction."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "stillroom"

# From the cellar to the front door. Rooms in one entry may use each other's left neighbours only.
ORDER = (
    ("errors",),
    ("types", "seeds"),
    ("stats", "records", "progress"),
    ("runs",),
    ("config",),
    ("pocket",),
    ("models",),
    ("data",),
    ("losses",),
    ("sampling",),
    ("training",),
    ("evaluation",),
    ("diagnosis", "audit", "calibration"),
    ("report",),
    ("commands",),
    ("experiments",),  # tables of ordinary runs: may call every command
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FRONT_DOOR = {"__init__", "__main__"}


def _room(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Rooms that a file imports at run time; imports for typing only do not count."""
    rooms: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module] if node.module != "stillroom" else [f"stillroom.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        rooms.update(n.split(".")[1] for n in names if n.startswith("stillroom."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return rooms


def test_every_room_has_a_place_in_the_house() -> None:
    rooms = {_room(p) for p in SRC.rglob("*.py")} - FRONT_DOOR
    assert rooms <= set(RANK), f"give {rooms - set(RANK)} a place in ORDER"


def test_imports_go_left_only() -> None:
    wrong = [
        f"{path.relative_to(SRC)} imports {room}"
        for path in sorted(SRC.rglob("*.py"))
        if (here := _room(path)) not in FRONT_DOOR
        for room in sorted(_imports(path))
        if room != here and RANK.get(room, -1) >= RANK[here]
    ]
    assert not wrong, wrong


def test_the_check_would_see_a_door_to_the_right(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "def f():\n    from stillroom.training.distill import DistillationTrainer\n    return DistillationTrainer\n"
    )
    assert _imports(file) == {"training"}
