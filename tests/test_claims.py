"""Stated figures are lines of one file, and the cheap ones are checked here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools import claims

WRITE = (
    "import json, pathlib; out = pathlib.Path('{out}'); out.mkdir(); "
    "figure = {'value': 0.505, 'low': 0.4, 'high': 0.6, 'n': 11, 'unit': 'share'}; "
    "(out / 'results.json').write_text(json.dumps({'figures': {'acc': figure}}))"
)
CHEAP = {
    "id": "x.1/accuracy",
    "value": 0.5,
    "low": 0.4,
    "high": 0.6,
    "n": 10,
    "seeds": [0],
    "unit": "share",
    "tolerance": 0.01,
    "command": f'python -c "{WRITE}"',
    "run": "acc",
    "date": "2026-11-30",
}


def test_every_stated_claim_is_well_formed_and_holds_its_value() -> None:
    stated = claims.load()
    assert stated
    for claim in stated:
        assert claim["low"] <= claim["value"] <= claim["high"], claim["id"]
        assert "{out}" in claim["command"], claim["id"]
        assert claim["id"].split("/")[0].split(".")[0] in ("house", "knob", "diagnosis", "speed")


def test_the_tables_in_the_pages_are_those_of_the_file() -> None:
    assert claims.write_tables(claims.load()) == [], "run `make docs`"


def test_the_table_of_the_readme_is_made_of_claims() -> None:
    text = (claims.ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0]
    stated = {
        f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"
        for c in claims.load()
        if c["id"].startswith("knob.demo/")
    }
    figures = re.findall(r"\d\.\d{3} \[[^]]*\]", table)
    assert len(figures) == 5
    assert set(figures) <= stated


def test_a_claim_is_run_again_and_compared_within_its_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.check([CHEAP])
    assert not claims.check([{**CHEAP, "tolerance": 0.001}])
    out = capsys.readouterr().out
    assert "holds x.1/accuracy: stated 0.5, now 0.505" in out
    assert "OFF" in out


def test_a_page_is_filled_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "house.md"
    page.write_text("before\n<!-- claims: x.1 -->\nold\n<!-- /claims -->\nafter\n")
    assert claims.write_tables([CHEAP, {**CHEAP, "id": "y.1/other"}], tmp_path) == [page]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- /claims -->\nafter\n")
    assert "`x.1/accuracy`" in text
    assert "y.1" not in text
    assert claims.write_tables([CHEAP], tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{**CHEAP, "extra": 1}], "extra"),
        ([CHEAP, CHEAP], "given twice"),
        ([{"id": "x"}], "missing or unknown"),
    ],
)
def test_damaged_claims_are_refused(lines: list[dict], message: str, tmp_path: Path) -> None:
    file = tmp_path / "claims.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message):
        claims.load(file)


def test_a_prefix_ends_at_a_slash() -> None:
    twenty = {**CHEAP, "id": "x.10/accuracy"}
    assert claims.select([CHEAP, twenty], ["x.1"]) == [CHEAP]
    assert claims.select([CHEAP, twenty], ["x.10/accuracy"]) == [twenty]


def test_an_unknown_id_lists_those_that_are_known() -> None:
    with pytest.raises(SystemExit, match=r"x\.1/accuracy"):
        claims.select([CHEAP], ["z.9"])


def test_the_cheap_claims_hold_when_they_are_run_again(shared: Path) -> None:
    # Real input: a pretrained teacher into a random student, half a minute; and a shipped model, some seconds.
    ids = ["house.2/heldout_kl_before", "house.2/heldout_kl_after", "house.7/chars_student_chains_sampled"]
    chosen = claims.select(claims.load(), ids)
    assert len(chosen) == 3
    assert claims.check(chosen)
    kl = {c["id"]: c["value"] for c in chosen}
    assert kl["house.2/heldout_kl_before"] > 4.5
    assert kl["house.2/heldout_kl_after"] < 1.9
