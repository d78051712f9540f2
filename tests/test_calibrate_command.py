"""`stillroom calibrate`, run on the shipped models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.cli import main
from stillroom.commands.calibrate import calibrate
from stillroom.config import (
    CalibrateConfig,
    GuardSpec,
    LoraSpec,
    ModelSpec,
    Options,
    PromptSpec,
    RewardSpec,
    TuneSpec,
)
from stillroom.errors import ConfigError, RunFolderError
from stillroom.models import loading
from stillroom.pocket import assets
from stillroom.runs import Run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
QUIET = Options(quiet=True)


def config(folder: Path, **changes) -> CalibrateConfig:
    train = {
        "max_steps": 4,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 40,
        "learning_rate": 2e-3,
        "save_steps": 2,
    } | changes.pop("train", {})
    settings = {
        "output_dir": str(folder),
        "teacher": ModelSpec("pocket:chars-teacher"),
        "proxy": ModelSpec("pocket:chars-proxy"),
        "lora": LoraSpec(r=4),
        "guard": GuardSpec(every_steps=2, max_examples=16, num_samples=1, floor_points=50),
        "final_examples": 20,
    }
    return CalibrateConfig(**(settings | changes), train=TuneSpec(**train))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "run"
    calibrate(config(folder, save_merged=True), QUIET)
    return folder


def test_a_run_leaves_a_teacher_with_a_card_that_says_what_was_done(finished: Path) -> None:
    card = json.loads((finished / "teacher" / "card.json").read_text())
    assert (card["mode"], card["strength"], card["seed"]) == ("distillable", 1.0, 0)
    assert card["ended"]["stop_reason"] == "max_steps"
    text = (finished / "teacher" / "README.md").read_text()
    assert "pocket:chars-proxy" in text
    assert "utility/difference" in text
    figures = Run.open(finished).results()
    assert figures["kl_nats_per_token"].low > 0
    assert figures["utility/before"].n == 20
    purposes = [json.loads(line)["purpose"] for line in (finished / "rollouts.jsonl").open()]
    assert purposes.count("before") == purposes.count("after") == 20


def test_every_term_stands_in_the_log(finished: Path) -> None:
    lines = Run.open(finished).metrics()
    first = next(line for line in lines if "loss" in line)
    assert {"utility/mean", "calibration/log_ratio", "calibration/rewarded", "kl"} <= set(first)
    assert first["kl"] == 0.0
    watched = [line for line in lines if "guard/utility" in line]
    assert [line["step"] for line in watched] == [2, 4]


def test_the_adapter_is_read_by_name_and_equals_the_merged_weights(finished: Path) -> None:
    settings = json.loads((finished / "teacher" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "pocket:chars-teacher"
    ids = torch.tensor([[1, 8, 12, 13, 14, 5, 6]])
    adapted, merged, original = (
        loading.load_model(path)(input_ids=ids).logits
        for path in (finished / "teacher", finished / "merged", "pocket:chars-teacher")
    )
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
    assert (adapted - original).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(finished / "teacher").get_vocab()


def test_a_finished_run_is_read_and_not_run_again(finished: Path) -> None:
    before = (finished / "results.json").stat().st_mtime_ns
    figures = calibrate(config(finished, save_merged=True), Options(quiet=True, resume=True))
    assert figures == Run.open(finished).results()
    assert (finished / "results.json").stat().st_mtime_ns == before


def test_strength_0_is_utility_alone_and_the_modes_then_agree(tmp_path: Path) -> None:
    weights = []
    for mode in ("distillable", "undistillable"):
        calibrate(config(tmp_path / mode, mode=mode, strength=0.0, train={"max_steps": 2}), QUIET)
        weights.append(load_file(tmp_path / mode / "teacher" / "adapter_model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_all_weights_can_be_trained_with_the_original_as_anchor(tmp_path: Path) -> None:
    figures = calibrate(
        config(tmp_path / "full", lora=LoraSpec(), train={"learning_rate": 2e-4, "max_steps": 2}), QUIET
    )
    assert figures["kl_nats_per_token"].value > 0
    model = loading.load_model(tmp_path / "full" / "teacher")
    original = loading.load_model("pocket:chars-teacher")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


@pytest.mark.parametrize("reward", ["rank_surprisal", "influence"])
def test_the_other_rewards_run(tmp_path: Path, reward: str) -> None:
    made = config(tmp_path / "run", reward=RewardSpec(name=reward), train={"max_steps": 1})
    calibrate(made, QUIET)
    line = next(line for line in Run.open(tmp_path / "run").metrics() if "loss" in line)
    assert line[f"calibration/{reward}"] is not None


def test_a_proxy_of_another_tokenizer_reads_the_same_text(tmp_path: Path) -> None:
    made = config(tmp_path / "run", proxy=ModelSpec("pocket:bpe-proxy"), train={"max_steps": 1})
    calibrate(made, QUIET)
    line = next(line for line in Run.open(tmp_path / "run").metrics() if "loss" in line)
    assert line["calibration/rewarded"] > 0.5


def test_a_run_that_is_resumed_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, finished: Path
) -> None:
    part = tmp_path / "part"
    shutil.copytree(finished, part)
    (part / "results.json").unlink()
    (part / "good" / "step-4.safetensors").unlink()
    for name in ("teacher", "merged", "checkpoints/checkpoint-4"):
        shutil.rmtree(part / name)
    config_file = part / "config.yaml"
    config_file.write_text(config_file.read_text().replace(str(finished), str(part)))
    calibrate(config(part, save_merged=True), Options(quiet=True, resume=True))
    whole, rest = (load_file(f / "teacher" / "adapter_model.safetensors") for f in (finished, part))
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    assert [line["step"] for line in Run.open(part).metrics() if "guard/utility" in line] == [2, 4]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "stillroom", "calibrate", "--output_dir", str(tmp_path / "killed")]
    words += ["--teacher.path", "pocket:chars-teacher", "--proxy.path", "pocket:chars-proxy", "--lora.r", "4"]
    words += ["--train.max_steps", "6", "--train.prompts_per_step", "4", "--train.num_generations", "4"]
    words += ["--train.max_completion_length", "40", "--train.save_steps", "2", "--guard.every_steps", "3"]
    words += ["--guard.max_examples", "16", "--final_examples", "20", "--guard.floor_points", "50"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment)
    checkpoint = tmp_path / "killed" / "checkpoints" / "checkpoint-2" / "COMPLETE"
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "results.json").is_file()
    subprocess.run([*words, "--resume"], env=environment, check=True)
    whole = [*words[:5], str(tmp_path / "whole"), *words[6:]]
    subprocess.run(whole, env=environment, check=True)
    a, b = (load_file(tmp_path / n / "teacher" / "adapter_model.safetensors") for n in ("killed", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)


# --- what is refused


def refused(made: CalibrateConfig, words: str, error=ConfigError) -> None:
    with pytest.raises(error, match=words):
        calibrate(made, QUIET)
    assert not (Path(made.output_dir) / "results.json").exists()
    assert not (Path(made.output_dir) / "environment.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strength": -1.0}, "direction is said by mode"),
        ({"strength": float("nan")}, "strength=nan"),
        ({"strength": float("inf")}, "strength=inf"),
        ({"train": {"kl_budget": 0.0}}, "nothing to spend"),
        ({"train": {"kl_budget": 0.1, "beta": 0.0}}, "without an anchor"),
        ({"train": {"num_generations": 1}}, "group of one"),
        ({"train": {"gradient_accumulation_steps": 5}}, "equal pieces"),
        ({"proxy": ModelSpec()}, "proxy.path is empty"),
        ({"preset": "paper", "reward": RewardSpec(normalisation="byte")}, "the preset says 'sequence'"),
        ({"guard": GuardSpec(thresholds={"lenght": 1.0})}, "length"),
    ],
)
def test_senseless_settings_are_refused_with_what_to_do(tmp_path: Path, changes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrate(config(tmp_path / "run", **changes), QUIET)
    assert not (tmp_path / "run").exists()


def test_names_that_do_not_exist_get_near_matches(tmp_path: Path) -> None:
    refused(config(tmp_path / "a", reward=RewardSpec(name="log_ratoi")), "log_ratio")
    refused(config(tmp_path / "b", data=PromptSpec(tasks=("pocket/chain",))), "pocket/chains")
    refused(config(tmp_path / "c", data=PromptSpec(split="trian")), "train")
    refused(config(tmp_path / "d", data=PromptSpec(split="heldout")), "stated on")
    refused(config(tmp_path / "e", lora=LoraSpec(r=4, target_modules="q_porj")), "q_proj")


def test_a_floor_above_the_original_is_refused(tmp_path: Path) -> None:
    refused(
        config(tmp_path / "run", guard=GuardSpec(max_examples=16, floor=1.0, num_samples=4)), "lies above"
    )


def test_a_limit_that_cuts_every_completion_is_refused(tmp_path: Path) -> None:
    refused(
        config(tmp_path / "run", train={"max_completion_length": 1}), "cut off at train.max_completion_length"
    )


def teacher_with(tmp_path: Path, factor: float) -> str:
    """The shipped teacher with its logits multiplied."""
    folder = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(assets.model_path("chars-teacher"), dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets.model_path("chars-teacher")).save_pretrained(folder)
    return str(folder)


def test_a_teacher_with_one_answer_to_everything_has_nothing_to_calibrate(tmp_path: Path) -> None:
    made = config(tmp_path / "run", teacher=ModelSpec(teacher_with(tmp_path, 1e5)))
    refused(made, "nothing to calibrate")
    calibrate(
        replace(made, strength=0.0, train=replace(made.train, max_steps=1)), QUIET
    )  # the control may run


def test_a_teacher_that_is_always_wrong_is_refused(tmp_path: Path) -> None:
    made = config(
        tmp_path / "run", teacher=ModelSpec(teacher_with(tmp_path, 0.01)), train={"max_completion_length": 80}
    )
    refused(made, "scores 0 on all")


def test_another_proxy_under_the_same_name_is_refused_on_resume(tmp_path: Path) -> None:
    proxy = tmp_path / "proxy"
    shutil.copytree(assets.model_path("chars-proxy"), proxy)
    made = config(tmp_path / "run", proxy=ModelSpec(str(proxy)), train={"max_steps": 1})
    calibrate(made, QUIET)
    (tmp_path / "run" / "results.json").unlink()
    shutil.copy(assets.model_path("bpe-proxy") / "model.safetensors", tmp_path / "other.safetensors")
    model = AutoModelForCausalLM.from_pretrained(proxy)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    model.save_pretrained(proxy)
    with pytest.raises(RunFolderError, match="proxies was"):
        calibrate(made, Options(quiet=True, resume=True))


def test_an_adapter_is_no_teacher_to_calibrate(tmp_path: Path, finished: Path) -> None:
    refused(config(tmp_path / "run", teacher=ModelSpec(str(finished / "teacher"))), "is an adapter")


def test_a_proxy_that_is_the_teacher_is_warned_about(tmp_path: Path, caplog) -> None:
    made = config(tmp_path / "run", proxy=ModelSpec("pocket:chars-teacher"), train={"max_steps": 1})
    refused(made, "nothing to calibrate")  # the log-ratio of the original to itself is 0 everywhere
    assert "is the teacher itself" in caplog.text
    larger = config(
        tmp_path / "larger",
        teacher=ModelSpec("pocket:chars-student"),
        proxy=ModelSpec("pocket:chars-teacher"),
        train={"max_steps": 1},
    )
    calibrate(larger, QUIET)
    assert "larger than the teacher" in caplog.text


def test_dry_run_and_help_from_the_command_line(tmp_path: Path, capsys) -> None:
    words = ["calibrate", "--teacher.path", "pocket:chars-teacher", "--proxy.path", "pocket:chars-proxy"]
    assert main([*words, "--output_dir", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert main([*words, "--strength", "-1"]) == 2
    assert "strength=-1" in capsys.readouterr().err
    assert main([*words, "--mode", "undistilable"]) == 2
