"""The real command in real processes: resumed, killed, and cut over two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.tiny import char_tokenizer, tiny_llama

from stillroom.cli import main, parse
from stillroom.commands.assemble import Tokenizers, load_pair
from stillroom.data.asking import select_examples
from stillroom.data.rows import content_id
from stillroom.data.tasks import TASKS, load_task
from stillroom.records import read_jsonl
from stillroom.runs import Run

OFF_POLICY = ("--sampling.on_policy_fraction", "0")
ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(6) for b in range(6)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe on tiny models in folders of their own: mixed policy, hard labels, an epoch border in between."""
    folder = tmp_path_factory.mktemp("recipe")
    tokenizer = char_tokenizer()
    for name, model in (
        ("teacher", tiny_llama(len(tokenizer), seed=7, layers=3)),
        ("student", tiny_llama(len(tokenizer))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "teacher": {"path": str(folder / "teacher")},
        "student": {"path": str(folder / "student")},
        "data": {"path": str(folder / "rows.jsonl"), "heldout_rows": 4, "max_length": 64},
        "loss": {"name": "jsd", "hard_label_weight": 0.1},
        "sampling": {"on_policy_fraction": 0.5, "max_completion_length": 6},
        "train": {
            "max_steps": 20,
            "save_steps": 4,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config))
    return folder / "recipe.yaml"


def words(recipe: Path, out: Path, *more: str) -> list[str]:
    return ["distill", str(recipe), "--output_dir", str(out), *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "student" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(recipe, out)) == 0
    return out


def test_a_run_leaves_a_student_figures_metrics_and_nothing_of_the_teacher(recipe: Path, whole: Path) -> None:
    figures = Run.open(whole).results()
    assert figures["heldout/forward_kl_nats/after"].value < figures["heldout/forward_kl_nats/before"].value
    assert figures["heldout/forward_kl_nats/after"].method.startswith("bootstrap")
    steps = [line["step"] for line in Run.open(whole).metrics() if "loss/jsd_nats" in line]
    assert steps == list(range(1, 21))
    assert sum(v.numel() for v in weights(whole).values()) < sum(
        p.numel() for p in tiny_llama(84, layers=3).parameters()
    )
    assert Run.open(whole).config["train"]["save_steps"] == 4
    assert json.loads((whole / "environment.json").read_text())["world_size"] == 1


def test_a_run_that_is_killed_anywhere_ends_with_the_weights_of_one_that_was_not(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "stillroom", *words(recipe, out)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "checkpoint-8" / "COMPLETE").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "results.json").exists(), "it was too fast to be killed"
    # A checkpoint that the kill cut short must not count, however whole it looks.
    half = out / "checkpoints" / "checkpoint-19"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert main(words(recipe, out, "--resume")) == 0
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(out)[name]), name
    kept = [
        {k: v for k, v in m.items() if "runtime" not in k and "per_second" not in k}
        for m in Run.open(out).metrics()
    ]
    steps = [m for m in kept if "loss/jsd_nats" in m]
    assert [m["step"] for m in steps] == list(range(1, 21))
    assert steps == [m for m in Run.open(whole).metrics() if "loss/jsd_nats" in m]


def test_report_72_two_workers_equal_one(recipe: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    settings = ("--train.max_steps", "6", "--train.per_device_train_batch_size")
    # The last batch of an epoch is dropped with two workers; 32 rows fill all batches of 4.
    assert main(words(recipe, one, *settings, "4")) == 0
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "stillroom",
    ]
    subprocess.run(
        [*launch, *words(recipe, two, *settings, "2")],
        check=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert json.loads((two / "environment.json").read_text())["world_size"] == 2
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-4, atol=1e-6)
    mine, theirs = ([m for m in Run.open(out).metrics() if "loss/jsd_nats" in m] for out in (one, two))
    assert {m["train/on_policy_row_share"] for m in mine} == {0.0, 1.0}
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "loss/jsd_nats", "train/supervised_tokens_per_step", "train/on_policy_row_share"):
            assert b[key] == pytest.approx(a[key], rel=1e-4), key


def test_a_finished_run_is_not_run_again(
    recipe: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "results.json").read_bytes()
    assert main(words(recipe, whole, "--resume")) == 0
    assert "is finished" in capsys.readouterr().out
    assert (whole / "results.json").read_bytes() == before


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(recipe, tmp_path / "dry", "--dry-run", "--train.max_steps", "7")) == 0
    out = capsys.readouterr().out
    assert "max_steps: 7" in out
    assert "32 rows" in out
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss.name", "foward_kl"], "Did you mean 'forward_kl'"),
        (["--train.max_stepz", "3"], "Did you mean 'train.max_steps'"),
        (["--sampling.on_policy_fraction", "1.2"], "outside [0, 1]"),
        (["--loss.top_k", "500"], "top_k=500"),
        (["--teacher.path", "{teacher}x"], "Did you mean 'teacher'"),
        (["--student.path", "{teacher}"], "are the same model"),
        (["--output_dir", "{teacher}/run"], "lies inside the teacher's folder"),
        (["--data.path", "{empty}"], "no rows"),
        (["--data.path", "{latin}"], "UTF-8"),
        (["--data.path", "{columns}"], "answer, question"),
        (["--data.path", "{twice}"], "more than once"),
        (["--data.max_length", "5"], "max_length=5"),
        (["--train.extra", "{{adam_betta: 1}}"], "adam_betta"),
        (["--train.extra", "{{loss: jsd}}"], "asked under loss.name"),
        (["--train.extra", "{{max_steps: 4}}"], "asked under train.max_steps"),
        (["--train.extra", "{{output_dir: elsewhere}}"], "asked under output_dir"),
        (["--train.extra", "{{data_seed: 1}}"], "no effect"),
        (["--score.teacher", "true"], "score.teacher without score.tasks"),
        (["--score.tasks", "[pocket/chain]"], "Did you mean 'pocket/chains'"),
        ([*OFF_POLICY, "--sampling.max_completion_length", "125", "--score.tasks", "[pocket/facts]"], "128 positions"),
        (["--lora.lora_alpha", "32"], "lora.r=0"),
        (["--student.random_init", "true"], "student.random_init with student.path"),
        (["--train.extra", "{{dataloader_drop_last: true}}", "--train.per_device_train_batch_size", "64"], "one step"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_error_and_leaves_no_half_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    files = {
        "empty": b"",
        "latin": '{"prompt": "caf\xe9", "completion": "x"}\n'.encode("latin-1"),
        "columns": b'{"question": "a", "answer": "b"}\n',
        "twice": b'{"id": "a", "prompt": "x", "completion": "y"}\n' * 2,
    }
    names = {"teacher": str(recipe.parent / "teacher")}
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        names[name] = str(tmp_path / f"{name}.jsonl")
    flags = [flag.format(**names) for flag in flags]
    out = [] if "--output_dir" in flags else ["--output_dir", str(tmp_path / "out")]
    assert main(["distill", str(recipe), *out, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err.replace("\n", " "), err
    assert err.count("stillroom:") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_run_says_how_much_of_a_task_it_trained_on_and_how_much_the_teacher_left_open(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--data.path", str(tmp_path / "rows.jsonl"), "--data.completions", "teacher"]
    flags += ["--train.max_steps", "1", "--sampling.on_policy_fraction", "0"]
    flags += ["--score.tasks", "[pocket/facts]", "--score.max_examples", "4", "--score.num_samples", "1"]
    task = load_task("pocket/facts")
    asked = [e.prompt for e in select_examples(task, TASKS["pocket/facts"].test_split, 4, seed=0)]
    rows = [*asked[:2], *(f"{i}+1=" for i in range(40))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    assert main(words(recipe, out, *flags)) == 0
    figures = Run.open(out).results()
    written = list(read_jsonl(out / "rollouts.jsonl"))
    ids = {content_id(prompt, None, None) for prompt in asked[:2]}
    trained_on = ids & {r["example_id"] for r in written if r["purpose"] == "train"}
    assert trained_on
    assert figures["pocket/facts/overlap_exact"].value == len(trained_on) / 4
    assert "pocket/facts/accuracy_sampled/after" in figures
    assert "pocket/facts/overlap_exact/after" not in figures
    printed = " ".join(capsys.readouterr().out.split())
    assert "items stand among the training prompts" in printed
    cut_off = sum(r["purpose"] == "train" and r["stop_reason"] == "length" for r in written)
    assert f"train: {cut_off} of 38 completions by the teacher were cut off" in printed
    assert cut_off > 0


def test_another_number_of_processes_is_noticed_on_resume(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(recipe, out, "--train.max_steps", "1")) == 0
    (out / "results.json").unlink()  # as if killed just before the end
    environment = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps(environment | {"world_size": 2}))
    assert main(words(recipe, out, "--train.max_steps", "1", "--resume")) == 2
    assert "world_size was 2 and is 1" in capsys.readouterr().err


def test_a_student_made_from_the_teacher_has_the_number_format_that_was_asked(recipe: Path) -> None:
    flags = ["--student.path", "", "--student.num_hidden_layers", "1", "--student.dtype", "bfloat16"]
    config, _ = parse("distill", [str(recipe), *flags])
    pair = load_pair(config, Tokenizers.load(config), torch.device("cpu"))
    assert pair.student.dtype == torch.bfloat16
    assert pair.teacher.dtype == torch.float32
