"""The knob experiment: its cells, its verdicts, and a small grid run to its end."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stillroom.cli import main
from stillroom.config import GuardSpec, Options
from stillroom.errors import ConfigError
from stillroom.experiments.knob import TABLE, Grid, knob, read_cell
from stillroom.experiments.knob_config import METHODS, KnobConfig
from stillroom.experiments.knob_page import write_page
from stillroom.experiments.knob_report import ACCURACY, Done, figures_of, holm_over_methods, verdict
from stillroom.models import loading
from stillroom.pocket import assets, tokenizers
from stillroom.pocket.chains import style_of
from stillroom.types import Estimate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def small(folder: Path, **changes) -> KnobConfig:
    base = KnobConfig()
    calibrate = replace(
        base.calibrate,
        train=replace(base.calibrate.train, max_steps=2, prompts_per_step=4, num_generations=4),
        guard=GuardSpec(every_steps=2, max_examples=8, num_samples=1, floor_points=50),
        final_examples=16,
    )
    distill = replace(
        base.distill,
        data=replace(base.distill.data, max_rows=64, heldout_rows=4),
        train=replace(base.distill.train, max_steps=2, per_device_train_batch_size=16),
        score=replace(base.distill.score, max_examples=16, num_samples=2),
    )
    settings = {"methods": ("sft", "forward_kl"), "seeds": (0, 1)} | changes
    return KnobConfig(output_dir=str(folder), calibrate=calibrate, distill=distill, **settings)


def test_the_primary_comparison_comes_first_and_every_teacher_before_its_students() -> None:
    cells = list(Grid(KnobConfig()).cells())
    students = [c for c in cells if c.kind == "student"]
    primary = [
        c
        for c in students
        if c.method == "forward_kl" and c.teacher in ("original", "distillable@1", "undistillable@1")
    ]
    assert students[: len(primary)] == primary
    assert len(primary) == 3 * 6
    known: set[str] = set()
    for cell in cells:
        if cell.kind == "teacher":
            known.add(f"{cell.teacher} {cell.seed}")
        elif cell.kind == "student" and cell.teacher not in ("original", "gold", "gold smoothed"):
            assert f"{cell.teacher.removeprefix('matched ')} {cell.seed}" in known
    assert set(TABLE) == set(METHODS)


def test_a_cell_is_named_by_its_config_and_not_by_where_it_lies(tmp_path: Path) -> None:
    here, there = Grid(small(tmp_path / "a")), Grid(small(tmp_path / "b"))
    keys = [[c.key(grid.root) for c in grid.cells()] for grid in (here, there)]
    assert keys[0] == keys[1]
    other = Grid(small(tmp_path / "a", strengths=(2.0,)))
    assert set(keys[0]) & {c.key(other.root) for c in other.cells()}  # what does not change is not run again
    assert set(keys[0]) != {c.key(other.root) for c in other.cells()}


def done(teacher: str, method: str, values: list[float]) -> list[Done]:
    kind = "student"
    return [Done(kind, teacher, method, s, {"figures": {ACCURACY: v}}) for s, v in enumerate(values)]


def test_a_ratio_is_the_mean_of_log_ratios_over_seeds() -> None:
    cells = done("original", "sft", [0.4, 0.5, 0.4]) + done("distillable@1", "sft", [0.8, 0.8, 0.9])
    figures = figures_of(cells, "forward_kl")
    logs = [math.log(0.8 / 0.4), math.log(0.8 / 0.5), math.log(0.9 / 0.4)]
    mean = sum(logs) / 3
    half = 4.302653 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    ratio = figures["ratio/distillable@1/sft"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx(
        (math.exp(mean), math.exp(mean - half), math.exp(mean + half)), rel=1e-6
    )
    assert holm_over_methods(cells, "distillable@1", ["sft", "gkd"])["sft"] == pytest.approx(0.0233, abs=5e-3)


@pytest.mark.parametrize(
    ("teacher", "low", "value", "high", "said"),
    [
        ("distillable@1", 0.9, 1.5, 2.0, "not shown"),
        ("distillable@1", 1.1, 1.2, 1.3, "shown"),
        ("distillable@1", 1.1, 1.3, 1.5, "reached"),
        ("distillable@1", 1.3, 1.4, 1.5, "firm"),
        ("distillable@1", 0.3, 0.4, 0.5, "not shown"),
        ("undistillable@1", 0.3, 0.5, 1.1, "not shown"),
        ("undistillable@1", 0.4, 0.5, 0.9, "shown"),
        ("undistillable@1", 0.2, 0.35, 0.6, "reached"),
        ("undistillable@1", 0.2, 0.3, 0.4, "firm"),
        ("strength 0", 1.1, 1.2, 1.3, ""),
    ],
)
def test_shown_reached_and_firm_are_what_was_fixed_beforehand(teacher, low, value, high, said) -> None:
    assert verdict(teacher, Estimate(value, low, high, 0.95, 6, "ratio", "t")) == said


@pytest.mark.slow
def test_a_grid_runs_to_its_end_and_is_read_the_second_time(tmp_path: Path, capsys) -> None:
    config = small(tmp_path / "knob", methods=("forward_kl",))
    figures = knob(config, Options())
    assert "ratio/distillable@1/forward_kl" in figures
    grid = Grid(config)
    records = [read_cell(grid, c) for c in grid.cells()]
    assert None not in records
    files = list(tmp_path.rglob("cell.json"))
    assert len(files) == len(records)
    assert max(f.stat().st_size for f in files) < 4000
    gold = [json.loads(line) for line in (tmp_path / "knob" / "gold-seed0.jsonl").open()]
    styles = [style_of(r["completion"]) for r in gold]
    assert 0.2 < sum(s == 0 for s in styles) / len(styles) < 0.8
    capsys.readouterr()
    (tmp_path / "knob" / "results.json").unlink()
    times = {f: f.stat().st_mtime_ns for f in files}
    assert knob(config, Options(resume=True)) == figures
    assert times == {f: f.stat().st_mtime_ns for f in files}


def test_senseless_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match="forward_kl"):
        KnobConfig(methods=("foward_kl",))
    with pytest.raises(ConfigError, match="strength 0 is among"):
        KnobConfig(strengths=(0.0,))
    with pytest.raises(ConfigError, match="over seeds"):
        KnobConfig(seeds=(3,))


def test_the_shipped_calibrated_teachers_are_adapters_of_the_shipped_teacher_with_cards() -> None:
    assert assets.adapter_names() == ["chars-distillable", "chars-undistillable"]
    ids = torch.tensor([[1, *tokenizers.build("chars").encode("7acfbd=?", add_special_tokens=False)]])
    first = {}
    for name in ("chars-teacher", *assets.adapter_names()):
        logits = loading.load_model(f"pocket:{name}")(input_ids=ids).logits[0, -1]
        first[name] = logits.softmax(0)[
            tokenizers.build("chars").encode("#", add_special_tokens=False)[0]
        ].item()
    assert (
        first["chars-distillable"]
        < 0.05
        < 0.3
        < first["chars-teacher"]
        < 0.7
        < 0.95
        < first["chars-undistillable"]
    )
    for name in assets.adapter_names():
        card = json.loads((assets.model_path(name) / "card.json").read_text())
        assert card["teacher"] == "pocket:chars-teacher"
        assert card["figures"]["utility/difference"]["low"] > -0.02
        assert sum(f.stat().st_size for f in assets.model_path(name).iterdir()) < 5e5


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    cells = done("original", "forward_kl", [0.4, 0.5]) + done("distillable@1", "forward_kl", [0.8, 0.9])
    cells.append(Done("teacher", "distillable@1", "", 0, {"figures": {"kl_nats_per_token": 0.03}}))
    metrics = [{"step": 1, "kl": 0.0, "utility/mean": 0.9}, {"step": 2, "kl": 0.1}]
    page = write_page(tmp_path, cells, figures_of(cells, "forward_kl"), metrics, "forward_kl")
    text = page.read_text()
    assert "distillable@1" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


def test_the_knob_demo_says_what_it_would_do(tmp_path: Path, capsys) -> None:
    assert main(["demo", "knob", "--output_dir", str(tmp_path / "x"), "--dry-run"]) == 0
    assert "12 students" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()
    assert main(["demo", "knob", "--family", "charz", "--output_dir", str(tmp_path / "x")]) == 2
    assert "chars-distillable" in capsys.readouterr().err
