"""The front door: fast, strict, and helpful when it refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stillroom import cli
from stillroom.cli import COMMANDS, main, parse
from stillroom.errors import ConfigError

RECIPE = """
teacher: {path: a}
student: {path: b}
data: {path: rows.jsonl}
train: {max_steps: 9, learning_rate: 0.01}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return str(tmp_path / "recipe.yaml")


def test_help_and_import_are_fast_and_do_not_import_torch() -> None:
    program = (
        "import sys, stillroom, stillroom.cli; code = stillroom.cli.main(['--help']); "
        "assert 'torch' not in sys.modules and 'jsonargparse' not in sys.modules; sys.exit(code)"
    )
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - started)
    assert all(name in done.stdout for name in COMMANDS)
    assert min(times) < 0.5


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_every_key_without_importing_torch(name: str) -> None:
    program = f"import sys; from stillroom.cli import main; main({[*name.split(), '--help']!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parser = cli._parser(name)
    for key in cli._known_keys(parser) - {"dry_run"}:
        assert f"--{key}" in done.stdout, key
        action = next(a for a in parser._actions if a.dest == key)
        assert action.help, f"{name}: {key} has no help"


def test_flags_override_yaml_and_both_spellings_work(recipe: str) -> None:
    config, options = parse(
        "distill", [recipe, "--train.max_steps", "3", "--loss.options.weight=0.2", "--resume"]
    )
    assert config.train.max_steps == 3
    assert config.train.learning_rate == 0.01
    assert config.loss.options == {"weight": 0.2}
    assert options.resume
    assert (
        parse("evaluate", ["--model.path", "m", "--tasks", "[gsm8k]", "--data-dir", "d"])[0].data_dir == "d"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["distil"], "Did you mean 'distill'"),
        (["distill", "--teacher.pth", "x"], "Did you mean 'teacher.path'"),
        (["distill", "no/such.yaml"], "no/such.yaml"),
        (["evaluate", "--model.path", "m"], "tasks is empty"),
        (["distill", "--train.max_steps", "many"], "train.max_steps"),
        (["pocket"], "pocket train"),
        (["tasks", "--family", "math"], "Did you mean 'maths'"),
        (["demo", "--seeds", "[0]"], "seeds=[0]"),
        (["demo", "--seeds", "[1, 1]"], "each once"),
        (["evaluate", "--model.path", "m", "--tasks", "gsm8k", "--max_examples", "-5"], "max_examples=-5"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_with_the_way_out(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [
        ["--tasks", "gsm8k,pocket/chains"],
        ["--tasks=gsm8k,pocket/chains"],
        ["--tasks", "[gsm8k, pocket/chains]"],
    ],
)
def test_a_list_may_be_written_with_commas(words: list[str]) -> None:
    assert parse("evaluate", ["--model.path", "m", *words])[0].tasks == ("gsm8k", "pocket/chains")
    assert parse("evaluate", ["--model.path", "m", "--tasks", "lm-eval:arc"])[0].tasks == ("lm-eval:arc",)


def test_a_key_given_twice_is_refused_with_both_lines_also_inside_a_section(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE + "sampling:\n  temperature: 1\n  temperature: 2\n")
    for words in ([str(file)], ["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(ConfigError, match=r"'temperature' is given on line 7 and again on line 8"):
            parse("distill", words)
    file.write_text(RECIPE + "sampling: {temperature: 1}\nloss: {temperature: 2}\n")
    assert parse("distill", [str(file)])[0].loss.temperature == 2


def test_the_name_of_a_command_in_one_word_leaves_the_flags_behind_it_alone() -> None:
    assert cli._command(["pocket train", "--help"]) == cli._command(["pocket", "train", "--help"])


def test_an_unknown_key_in_yaml_gets_near_matches(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("learning_rate", "learning_rat"))
    with pytest.raises(ConfigError, match=r"learning_rat.*train\.learning_rate"):
        parse("distill", [str(tmp_path / "r.yaml")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--student.num_hidden_layers", "2"], "exactly one of the two"),
        (["--data.tasks", "[gsm8k]"], "exactly one of them"),
        (["--loss.name", "cross_entropy", "--sampling.on_policy_fraction", "0.5"], "repeat its own samples"),
        (["--loss.name", "cross_entropy", "--loss.top_k", "5"], "loss.top_k"),
        (["--loss.temperature", "0"], "loss.temperature=0"),
        (["--loss.temperature", ".nan"], "loss.temperature=nan"),
        (["--train.max_steps", "0"], "train.max_steps=0"),
        (["--sampling.on_policy_fraction", "-0.1"], "on_policy_fraction=-0.1"),
    ],
)  # fmt: skip
def test_contradictions_are_found_before_anything_is_read(
    recipe: str, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("distill", [recipe, *flags])


def test_every_default_of_every_command_can_be_built(recipe: str) -> None:
    assert parse("demo", [])[0].seeds == (0, 1, 2)
    assert parse("fetch", [])[0].name == "smollm2"
    assert parse("fetch", ["smollm2"])[0].name == "smollm2"
    assert parse("pocket train", ["--family", "bpe"])[0].family == "bpe"
    assert main(["tasks"]) == 0
