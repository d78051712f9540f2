"""Figures that can be re-run.

Every figure that the project states is one line of ``docs/results/claims.jsonl``:

    {"id": "house.2/heldout_kl_after", "value": 1.7, "low": 1.6, "high": 1.8, "n": 32, "seeds": [0],
     "unit": "nats/token", "tolerance": 0.1, "command": "stillroom distill … --output_dir {out}",
     "run": "heldout/forward_kl_nats/after", "date": "2026-11-30"}

``command`` holds ``{out}`` where the run folder goes, ``run`` names the figure in that folder's
``results.json``, ``tolerance`` is how far a re-run may lie from ``value``. Then

    python -m tools.claims check ID…    run again, compare; exit status 1 if one is off
    python -m tools.claims record ID…   run again, write the new value (the line must exist)
    python -m tools.claims table        write the tables of docs/results/*.md from the file

so that no figure is typed twice. Claims that share a command share its run. A table stands in a page
between ``<!-- claims: PREFIX -->`` and ``<!-- /claims -->``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FIELDS = ("id", "value", "low", "high", "n", "seeds", "unit", "tolerance", "command", "run", "date")
_BLOCK = re.compile(r"(<!-- claims: (?P<prefix>\S+) -->\n).*?(<!-- /claims -->)", re.DOTALL)

Claim = dict[str, Any]


def load(path: Path = RESULTS / "claims.jsonl") -> list[Claim]:
    """All claims; raises ValueError for a line with a missing or foreign field, or a repeated id."""
    claims = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, claim in enumerate(claims, 1):
        if set(claim) != set(FIELDS):
            raise ValueError(
                f"line {number} of {path.name}: fields {sorted(set(claim) ^ set(FIELDS))} missing or unknown"
            )
    ids = [claim["id"] for claim in claims]
    if repeated := {i for i in ids if ids.count(i) > 1}:
        raise ValueError(f"{path.name}: id given twice: {', '.join(sorted(repeated))}")
    return claims


def save(claims: Iterable[Claim], path: Path = RESULTS / "claims.jsonl") -> None:
    lines = (json.dumps({f: claim[f] for f in FIELDS}, ensure_ascii=False) for claim in claims)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def measure(claims: Sequence[Claim]) -> dict[str, dict[str, Any]]:
    """Run each distinct command once in a fresh folder; figures by claim id."""
    found: dict[str, dict[str, Any]] = {}
    for command in dict.fromkeys(claim["command"] for claim in claims):
        with tempfile.TemporaryDirectory() as parent:
            out = Path(parent) / "run"
            words = [word.replace("{out}", str(out)) for word in shlex.split(command)]
            if words[0] in ("stillroom", "python"):  # the ones of this environment
                words = [
                    sys.executable,
                    *(["-m", "stillroom"] if words[0] == "stillroom" else []),
                    *words[1:],
                ]
            subprocess.run(words, cwd=ROOT, check=True)
            figures = json.loads((out / "results.json").read_text(encoding="utf-8"))["figures"]
        for claim in claims:
            if claim["command"] == command:
                found[claim["id"]] = figures[claim["run"]]
    return found


def select(claims: Sequence[Claim], ids: Sequence[str]) -> list[Claim]:
    """Claims by id or by what stands before a slash in it: ``house.2`` takes ``house.2/x`` and not ``house.20/x``."""
    chosen = [c for c in claims if not ids or any(_is_below(c["id"], i) for i in ids)]
    if not chosen:
        raise SystemExit(
            f"no claim is called {' or '.join(ids)}; known: {', '.join(c['id'] for c in claims)}"
        )
    return chosen


def _is_below(claim_id: str, prefix: str) -> bool:
    return claim_id == prefix or claim_id.startswith(prefix.rstrip("/") + "/")


def check(claims: Sequence[Claim]) -> bool:
    """Print one line a claim; True if all lie within tolerance."""
    figures = measure(claims)
    good = True
    for claim in claims:
        new = figures[claim["id"]]["value"]
        off = abs(new - claim["value"])
        holds = off <= claim["tolerance"]
        good &= holds
        verdict = "holds" if holds else "OFF"
        print(
            f"{verdict:<6}{claim['id']}: stated {claim['value']:.5g}, now {new:.5g} (tolerance {claim['tolerance']:g})"
        )
    return good


def table(claims: Sequence[Claim]) -> str:
    """Markdown rows."""
    lines = [
        "| id | value | interval | n | seeds | unit | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in claims:
        seeds = ", ".join(map(str, c["seeds"]))
        lines.append(
            f"| `{c['id']}` | {c['value']:.4g} | {c['low']:.4g} – {c['high']:.4g} | {c['n']} | {seeds} | {c['unit']} "
            f"| `{c['command']}` |"
        )
    return "\n".join(lines) + "\n"


def write_tables(claims: Sequence[Claim], folder: Path = RESULTS) -> list[Path]:
    """Fill every block of every page; returns the pages that changed."""
    changed = []
    for page in sorted(folder.glob("*.md")):
        old = page.read_text(encoding="utf-8")

        def fill(match: re.Match[str]) -> str:
            chosen = [c for c in claims if _is_below(c["id"], match["prefix"])]
            return match[1] + table(chosen) + match[3]

        new = _BLOCK.sub(fill, old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.claims", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["check", "record", "table"])
    parser.add_argument("ids", nargs="*", help="claim ids or prefixes; default all")
    args = parser.parse_args(argv)
    claims = load()
    if args.action == "table":
        for page in write_tables(claims):
            print(f"wrote {page.relative_to(ROOT)}")
        return 0
    chosen = select(claims, args.ids)
    if args.action == "check":
        return 0 if check(chosen) else 1
    for claim_id, figure in measure(chosen).items():
        claim = next(c for c in claims if c["id"] == claim_id)
        claim.update({k: figure[k] for k in ("value", "low", "high", "n", "unit")})
        claim["date"] = datetime.date.today().isoformat()
    save(claims)
    write_tables(claims)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
