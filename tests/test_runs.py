"""The run folder: refused when it would mix two runs, whole whatever happens, strict JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors import SafetensorError

from stillroom import records
from stillroom.errors import RunFolderError
from stillroom.records import disk_errors
from stillroom.runs import Run
from stillroom.types import Estimate, Rollout


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclass(frozen=True)
class Config:
    output_dir: str = "x"
    names: tuple[str, ...] = ("a", "b")
    inner: Inner = field(default_factory=Inner)


def test_a_fresh_folder_holds_config_and_environment(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "deep" / "run", command="distill", config=Config())
    assert run.config == {
        "command": "distill",
        "output_dir": "x",
        "names": ["a", "b"],
        "inner": {"rate": 0.1},
    }
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert not run.is_finished


def test_a_folder_that_is_not_empty_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"not empty.*--output_dir.*--resume"):
        Run.create(tmp_path, command="distill", config=Config())
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        Run.create(tmp_path, command="distill", config=Config(), resume=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_resume_with_the_same_config_is_allowed_and_with_another_shows_the_difference(tmp_path: Path) -> None:
    Run.create(tmp_path, command="distill", config=Config())
    Run.create(tmp_path, command="distill", config=Config(output_dir="elsewhere"), resume=True)
    with pytest.raises(RunFolderError, match=r"(?s)-\s*rate: 0\.1.*\+\s*rate: 0\.2"):
        Run.create(tmp_path, command="distill", config=Config(inner=Inner(0.2)), resume=True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        Run.create(tmp_path / "run", command="distill", config=Config())


def test_too_little_free_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = Run.prepare(tmp_path / "deep" / "run", command="distill", config=Config())
    run.require_disk(1)
    with pytest.raises(RunFolderError, match=r"MB are free.*save_total_limit"):
        run.require_disk(1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_empty_folders_is_what_a_refused_run_leaves_and_does_not_block_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for resume in (False, True):
        Run.prepare(tmp_path / "run", command="distill", config=Config(), resume=resume)
    (tmp_path / "run" / "checkpoints" / "weights").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        Run.prepare(tmp_path / "run", command="distill", config=Config())


def test_resume_compares_the_facts_that_a_run_began_with(tmp_path: Path) -> None:
    def begin(resume: bool = True, **facts: object) -> Run:
        return Run.prepare(tmp_path / "run", command="distill", config=Config(), resume=resume).begin(**facts)

    begin(resume=False, rows="abc", world_size=1)
    begin(rows="abc", world_size=1)
    begin(rows="abc", world_size=1, told_by_newer_versions=3)
    with pytest.raises(RunFolderError, match=r"rows was 'abc' and is 'abd'"):
        begin(rows="abd", world_size=1)
    with pytest.raises(RunFolderError, match=r"world_size was 1 and is 2"):
        begin(rows="abc", world_size=2)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["rows"] == "abc"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Run.create("~/run", command="distill", config=Config())
    assert Run.open("~/run").path == tmp_path / "run"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "No space left on device",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:659] . unexpected pos 64 vs 0"),
            "could not be written",
        ),
    ],
)
def test_a_full_disk_is_one_error_whoever_met_it(error: Exception, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=rf"{reason}.*--resume"), disk_errors(tmp_path):
        raise error


@pytest.mark.parametrize(
    "error", [ConnectionResetError("peer"), RuntimeError("size mismatch"), KeyError("x")]
)
def test_other_errors_are_not_taken_for_a_full_disk(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)), disk_errors(tmp_path):
        raise error


def test_preparing_a_run_writes_nothing(tmp_path: Path) -> None:
    Run.prepare(tmp_path / "run", command="distill", config=Config())
    assert not (tmp_path / "run").exists()


def test_a_disk_that_refuses_to_write_gives_one_clear_error(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    (run.path / "metrics.jsonl").mkdir()  # the system refuses to open it for writing
    with pytest.raises(RunFolderError, match=r"cannot write under.*--resume"):
        run.log({"loss": 1.0}, step=1)


def test_metrics_after_the_checkpoint_are_forgotten_on_resume(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    for step in (1, 2, 3):
        run.log({"loss": step / 2}, step=step)
    run.rewind(2)
    assert [m["step"] for m in run.metrics()] == [1, 2]


def test_a_line_cut_off_by_a_crash_is_passed_over_but_damage_in_the_middle_is_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    run.log({"loss": 1.0}, step=1)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [m["step"] for m in run.metrics()] == [1]
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        run.metrics()


def test_a_resumed_run_does_not_append_to_a_line_that_a_crash_cut_short(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    run.add_rollouts([{"text": "whole"}])
    with (run.path / "rollouts.jsonl").open("a") as file:
        file.write('{"text": "ha')
    run = Run.create(tmp_path / "run", command="distill", config=Config(), resume=True)
    run.add_rollouts([{"text": "next"}])
    assert [r["text"] for r in records.read_jsonl(run.path / "rollouts.jsonl")] == ["whole", "next"]


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    estimate = Estimate(0.5, 0.4, 0.6, 0.95, 100, "share", "wilson")
    run.write_results({"accuracy": estimate}, sample="é <b>")
    again = Run.open(run.path)
    assert again.results() == {"accuracy": estimate}
    assert again.is_finished
    with pytest.raises(ValueError, match="JSON"):
        run.write_results({"accuracy": Estimate(float("nan"), 0, 0, 0.95, 1, "share", "none")})


def test_rollouts_keep_untrusted_text_as_text(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    run.add_rollouts(
        [Rollout("a", (1,), (2, 3), (-0.1, -0.2), "end", "student", 'x\n{"y": 1}\u2028')], step=4
    )
    lines = list(records.read_jsonl(run.path / "rollouts.jsonl"))
    assert len(lines) == 1
    assert lines[0]["text"] == 'x\n{"y": 1}\u2028'
    assert lines[0]["step"] == 4


def test_only_the_first_worker_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run = Run.create(tmp_path / "run", command="distill", config=Config())
    run.log({"loss": 1.0}, step=1)
    assert not (tmp_path / "run").exists()


def test_an_estimate_whose_interval_misses_its_value_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        Estimate(0.7, 0.1, 0.2, 0.95, 10, "share", "wilson")
