"""`stillroom evaluate` on real models and data: figures with intervals, every sample kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import char_tokenizer, tiny_llama

from stillroom.cli import main
from stillroom.records import read_jsonl
from stillroom.runs import Run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = char_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_pocket_task_gives_greedy_and_sampled_accuracy_and_keeps_every_completion(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "evaluate",
        "--model.path",
        "pocket:chars-student",
        "--tasks",
        "[pocket/chains]",
        "--output_dir",
        str(out),
    ]
    assert main([*words, "--max_examples", "30", "--num_samples", "2", "--max_completion_length", "32"]) == 0
    figures = Run.open(out).results()
    greedy, sampled = (figures[f"pocket/chains/accuracy_{mode}"] for mode in ("greedy", "sampled"))
    assert greedy.n == 30
    assert greedy.method.startswith("wilson")
    assert 0 < sampled.low < sampled.value < sampled.high < 1
    records = list(read_jsonl(out / "rollouts.jsonl"))
    assert len(records) == 30 * (1 + 2)
    shares = [r["score"] for r in records if r["mode"] == "greedy"]
    assert sum(shares) / 30 == pytest.approx(greedy.value)
    assert records[0]["prompt"].startswith("<bos>")
    assert records[0]["task_version"]


def test_real_multiple_choice_and_open_text_are_scored_by_likelihood(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "evaluate",
        "--model.path",
        str(shared / "models" / "stories260k"),
        "--tasks",
        "[arc_easy, dolly]",
    ]
    words += [
        "--data-dir",
        str(shared / "data"),
        "--output_dir",
        str(out),
        "--max_examples",
        "12",
        "--split",
        "train",
    ]
    assert main(words) == 0
    figures = Run.open(out).results()
    assert figures["arc_easy/acc"].n == 12
    assert figures["arc_easy/acc_chance"].value == pytest.approx(0.25, abs=0.03)
    # This teller of children's stories knows little of closed-book answers, but more than uniform bytes do.
    assert 1 < figures["dolly/bits_per_byte"].value < 8
    assert len(list(read_jsonl(out / "rollouts.jsonl"))) == 24


def test_a_dry_run_names_what_it_would_do_and_writes_nothing(tiny: str, tmp_path: Path, capsys) -> None:
    words = [
        "evaluate",
        "--model.path",
        tiny,
        "--tasks",
        "[pocket/facts]",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--dry-run"]) == 0
    assert "would score" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "[pocket/chain]"], "Did you mean 'pocket/chains'"),
        (["--tasks", "[gsm8k]"], "--data-dir"),
        (["--tasks", "[gsm8k]", "--data-dir", "no/such"], "is not a folder"),
        (["--tasks", "[pocket/chains]", "--split", "test"], "split of task"),
        (["--tasks", "[pocket/chains]", "--model.path", "pocket:chars-techer"], "chars-teacher"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_error_and_leaves_no_run(
    tiny: str, tmp_path: Path, capsys, flags, message
) -> None:
    words = ["evaluate", "--model.path", tiny, "--output_dir", str(tmp_path / "run"), *flags]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert not (tmp_path / "run").exists()
