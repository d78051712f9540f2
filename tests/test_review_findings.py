"""Faults found by reading the house with suspicion, each held by the smallest case that showed it."""

from __future__ import annotations

import collections
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.test_trainer import TOKENIZER, VOCAB, rows, student, teacher, trainer
from tests.tiny import CHARACTERS, char_tokenizer, tiny_llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stillroom import runs
from stillroom.cli import main
from stillroom.config import DataSpec, EvaluateConfig, ModelSpec
from stillroom.data.batches import TrainingRow, collate
from stillroom.data.prepare import completed, select_rows, training_rows
from stillroom.errors import ConfigError, DataError, StillroomError
from stillroom.records import read_jsonl
from stillroom.runs import Run
from stillroom.sampling.sampler import HFSampler
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer
from stillroom.types import Prompt, Rollout


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def torchrun(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes, from the root of the repository so that it can import `tests`."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [sys.executable, *launch, str(script), *words],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((".", "src"))},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


# Resume.


def test_resuming_from_the_last_checkpoint_trains_no_further_step(tmp_path: Path) -> None:
    # 7 steps end inside an epoch of 4: a run killed while it measures the end comes back here.
    settings = {
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 7,
        "learning_rate": 0.1,
    }
    whole = trainer(tmp_path, student(), teacher(), **settings)
    whole.train()
    resumed = trainer(tmp_path, student(), teacher(), **settings)
    result = resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-7"))
    assert result.global_step == 7
    assert torch.equal(flat(whole.model), flat(resumed.model))


RESUME_ON_TWO = """
import sys
from pathlib import Path
import torch
from tests.test_trainer import TOKENIZER, rows, student, teacher
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer

out = Path(sys.argv[1])

def make(name):
    args = DistillationConfig(
        output_dir=str(out / name), per_device_train_batch_size=1, max_steps=6, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", save_strategy="steps", save_steps=5, disable_tqdm=True, use_cpu=True,
    )
    assert args.world_size == 2
    return DistillationTrainer(student(), teacher(), args, rows(), processing_class=TOKENIZER)

whole = make("whole")
whole.train()
resumed = make("resumed")
resumed.train(resume_from_checkpoint=str(out / "whole" / "checkpoint-5"))  # the second epoch begins at step 4
for key, value in whole.model.state_dict().items():
    assert torch.equal(value, resumed.model.state_dict()[key]), key
"""


@pytest.mark.slow
def test_two_workers_resumed_inside_a_later_epoch_go_on_in_that_epochs_order(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESUME_ON_TWO)
    done = torchrun(script, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_best_checkpoint_is_kept_for_load_best_model_at_end(tmp_path: Path) -> None:
    t = trainer(
        tmp_path,
        student(),
        teacher(),
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=rows(),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the first is the best
    )
    t.train()
    first = next(line["eval_loss"] for line in t.state.log_history if "eval_loss" in line)
    assert t.evaluate()["eval_loss"] == pytest.approx(first)


def test_arguments_can_be_used_for_two_trainers(tmp_path: Path) -> None:
    args = DistillationConfig(output_dir=str(tmp_path), use_cpu=True, save_total_limit=2)
    for _ in range(2):
        DistillationTrainer(student(), teacher(), args, rows(), processing_class=TOKENIZER)
    assert args.save_total_limit == 2


# Runs that would do nothing, or something else than asked.


def test_a_run_without_a_single_full_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StillroomError):
        trainer(tmp_path, student(), teacher(), data=[]).train()
    with pytest.raises(StillroomError):  # what several workers do with the last batch
        trainer(tmp_path, student(), teacher(), data=rows()[:3], dataloader_drop_last=True).train()


def test_evaluating_rows_without_completions_is_refused_and_not_a_loss_of_zero(tmp_path: Path) -> None:
    prompts = [{"prompt": f"{i}+1="} for i in range(8)]
    t = trainer(tmp_path, student(), teacher(), data=prompts, on_policy_fraction=1.0)
    with pytest.raises(StillroomError):
        t.evaluate(prompts)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_overlong": "eror"},  # was read as "drop"
        {"hard_label_weight": -1.0},
        {"hard_label_weight": float("nan")},
        {
            "loss": "cross_entropy",
            "on_policy_fraction": 0.5,
        },  # would repeat its own samples (field report 17)
        {"loss": "cross_entropy", "hard_label_weight": 0.5},
        {"loss": "cross_entropy", "top_k": 5},
        {"loss": "cross_entropy", "temperature": 2.0},
    ],
)
def test_arguments_that_contradict_or_do_nothing_are_refused_by_the_trainer_too(
    settings: dict, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        trainer(tmp_path, student(), teacher(), **settings)


def test_a_teacher_that_is_the_student_or_shares_its_tensors_is_refused(tmp_path: Path) -> None:
    model = student()
    with pytest.raises(ConfigError):
        trainer(tmp_path, model, model)
    large = teacher()
    small = tiny_llama(VOCAB, seed=3, hidden=24, layers=1)
    small.model.embed_tokens = large.model.embed_tokens  # would be frozen with the teacher
    with pytest.raises(ConfigError):
        trainer(tmp_path, small, large)


def test_adapters_start_from_the_seed_and_not_from_what_was_drawn_before(tmp_path: Path) -> None:
    from peft import LoraConfig

    starts = []
    for drawn in (1, 2):
        pupil, master = student(), teacher()
        torch.manual_seed(drawn)
        t = DistillationTrainer(
            pupil,
            master,
            DistillationConfig(output_dir=str(tmp_path), use_cpu=True, seed=0),
            rows(),
            processing_class=TOKENIZER,
            peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        starts.append(torch.cat([p.flatten() for n, p in t.model.named_parameters() if "lora_A" in n]))
    assert torch.equal(*starts)


def test_completions_with_tokens_that_the_teacher_does_not_have_are_refused(tmp_path: Path) -> None:
    wider = char_tokenizer()
    wider.add_tokens(["<tool>"])
    with pytest.raises(StillroomError):
        DistillationTrainer(
            tiny_llama(len(wider)),
            tiny_llama(VOCAB + 8, seed=7),  # padded, so that it reads an untrained row and says nothing
            DistillationConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no"),
            [{"prompt": f"{i}", "completion": "x<tool>"} for i in range(8)],
            processing_class=wider,
            teacher_processing_class=TOKENIZER,
        ).train()


def test_a_row_without_a_prompt_is_refused_and_not_scored_from_padding() -> None:
    with pytest.raises(DataError):
        collate([TrainingRow("a", (), (5, 2), (True, True)), TrainingRow("b", (1, 7), (9, 2), (True, True))])


# Rows.


def test_a_gold_completion_does_not_hide_that_a_written_one_has_no_room() -> None:
    row = {"prompt": "x" * 50, "completion": "ab"}
    with pytest.raises(DataError, match="room"):
        training_rows([row], TOKENIZER, TOKENIZER, student(), max_length=60, needs_completion=False, room=40)


def test_every_assistant_turn_is_a_prompt_when_the_student_writes() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    turns = [("user", "hi"), ("assistant", "A"), ("user", "yo"), ("assistant", "B")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rendered = training_rows(
        [{"messages": messages}], tokenizer, tokenizer, student(), max_length=100, needs_completion=False
    )
    assert len(rendered) == 2


def written(example_id: str, stop: str = "end", ids: tuple[int, ...] = (7, 8, 9)) -> Rollout:
    return Rollout(example_id, (1, 5), ids, (0.0,) * len(ids), stop, "teacher", text="abc")  # pyright: ignore[reportArgumentType]


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """The same characters under other ids."""
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS[::-1]]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")


def test_a_completion_that_was_cut_off_gets_no_end_token_when_it_is_rendered_again() -> None:
    row = TrainingRow("a", (1, 5), (), ())
    ended, cut = (
        completed([row], [written("a", stop)], TOKENIZER, foreign_tokenizer(), student())[0].completion_ids
        for stop in ("end", "length")
    )
    assert ended == (*cut, 2)


def test_completions_are_put_behind_the_prompts_that_they_were_written_for() -> None:
    with pytest.raises(DataError):
        completed(
            [TrainingRow("question 2", (1, 6), (), ())],
            [written("question 1")],
            TOKENIZER,
            TOKENIZER,
            student(),
        )


def test_equal_rows_stand_on_one_side_of_the_held_out_cut(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"question {i % 10}", "completion": "x"}) + "\n" for i in range(40)]
    file.write_text("".join(lines))
    train, heldout = select_rows(DataSpec(path=str(file), heldout_rows=5))
    assert not {row.prompt for row in train} & {row.prompt for row in heldout}


def test_the_split_of_a_dataset_folder_is_the_one_asked_for(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {
        name: Dataset.from_list([{"prompt": f"{name} {i}", "completion": name} for i in range(8)])
        for name in ("train", "validation")
    }
    DatasetDict(splits).save_to_disk(str(tmp_path / "data"))
    train, _ = select_rows(DataSpec(path=str(tmp_path / "data"), split="validation", heldout_rows=2))
    assert {row.completion for row in train} == {"validation"}


def test_more_rows_than_there_are_is_refused_for_files_as_for_tasks(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i), "completion": "x"}) + "\n" for i in range(8)))
    with pytest.raises(StillroomError):
        select_rows(DataSpec(path=str(file), max_rows=500, heldout_rows=2))


def test_settings_without_effect_or_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError):
        DataSpec(path="x.jsonl", num_generations=8)  # gold completions: nobody generates
    model = ModelSpec(path="x")
    for wrong in ({"max_examples": -5}, {"max_examples": 0}, {"batch_size": 0}, {"max_completion_length": 0}):
        with pytest.raises(ConfigError):
            EvaluateConfig(model=model, tasks=("pocket/facts",), **wrong)  # pyright: ignore[reportArgumentType]


# Sampling.


def test_ids_behind_a_gap_are_sampled_and_ids_inside_it_are_not() -> None:
    core = Tokenizer(models.WordLevel({"<bos>": 0, "<eos>": 1, "a": 2, "b": 9}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    prompts = [Prompt(f"p{i}", (0, 2)) for i in range(100)]
    model = tiny_llama(10)
    with torch.no_grad():
        model.lm_head.weight[9] = model.lm_head.weight[4]  # 4 is no token, and the likeliest id of this model
    rollouts = HFSampler(model, tokenizer).sample(prompts, max_completion_length=5, temperature=1.0, seed=0)
    sampled = {i for r in rollouts for i in r.completion_ids}
    assert 9 in sampled
    assert sampled <= {0, 1, 2, 9}


def test_sampling_leaves_the_settings_of_checkpointing_as_they_were() -> None:
    model = student().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    def settings() -> list[dict]:
        parts = [getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()]
        return [part.keywords for part in parts if part is not None]

    before = settings()
    assert before[0] == {"use_reentrant": True}
    HFSampler(model, TOKENIZER).sample(
        [Prompt("p", (1, 5))], max_completion_length=2, temperature=0.0, seed=0
    )
    assert settings() == before


# Run folders and what is shown.


def test_a_line_cut_inside_a_character_is_passed_over_too(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "caf\xc3')
    assert list(read_jsonl(file)) == [{"a": 1}]


def test_a_figure_that_is_no_number_gives_a_clear_error_or_a_line_that_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", command="distill", config={})
    try:
        run.log({"grad_norm": float("nan")}, step=1)
    except StillroomError:
        return
    assert json.loads((run.path / "metrics.jsonl").read_text())["grad_norm"] is None


def test_control_codes_in_data_do_not_reach_the_terminal() -> None:
    from rich.console import Console

    from stillroom.commands.display import show_example

    class Hostile:
        def decode(self, ids) -> str:
            return "\x1b]0;title\x07\x1b[2J"

    shown = io.StringIO()
    row = TrainingRow("a", (1,), (2,), (True,))
    show_example(Console(file=shown, force_terminal=True), Hostile(), row)  # pyright: ignore[reportArgumentType]
    assert "\x1b[2J" not in shown.getvalue()
    assert "\x1b]0;" not in shown.getvalue()


# The command.


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for name, tokenizer, seed in (
        ("teacher", TOKENIZER, 7),
        ("student", TOKENIZER, 1),
    ):
        tiny_llama(len(tokenizer), seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(lines))
    config = {
        "teacher": {"path": str(folder / "teacher")},
        "student": {"path": str(folder / "student")},
        "data": {"path": str(folder / "rows.jsonl"), "heldout_rows": 4, "max_length": 64},
        "sampling": {"max_completion_length": 6},
        "train": {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config))
    return folder / "recipe.yaml"


@pytest.mark.parametrize(
    "flags",
    [
        ["--score.tasks", "[gsmk]"],
        ["--score.tasks", "[pocket/facts]", "--score.max_examples", "100000"],
        ["--data.heldout_rows", "0"],
        ["--data.heldout_rows", "1"],
        ["--train.extra", "{eval_strategy: steps}"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_scored_is_refused_before_anything_is_written(
    recipe: Path, tmp_path: Path, flags: list[str]
) -> None:
    out = tmp_path / "out"
    assert main(["distill", str(recipe), "--output_dir", str(out), *flags]) == 2
    assert not out.exists()


def test_a_prompt_that_cannot_be_shown_does_not_cost_the_run(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    for name, seed in (("teacher", 7), ("student", 1)):
        tiny_llama(len(tokenizer), seed=seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "completion": "x"}) + "\n" for i in range(12))
    )
    words = ["--teacher.path", str(tmp_path / "teacher"), "--student.path", str(tmp_path / "student")]
    words += ["--data.path", str(tmp_path / "rows.jsonl"), "--data.heldout_rows", "4"]
    words += ["--train.max_steps", "1", "--score.sample_prompt", "", "--output_dir", str(tmp_path / "out")]
    code = main(["distill", *words])
    assert (code == 0) == (tmp_path / "out" / "results.json").exists()
    assert code == 0 or not (tmp_path / "out").exists()


def test_a_dry_run_refuses_what_the_run_would_refuse(recipe: Path, tmp_path: Path) -> None:
    for flags in (["--train.extra", "{adam_betta: 1}"], ["--score.tasks", "[gsmk]"]):
        words = ["distill", str(recipe), "--dry-run", "--output_dir", str(tmp_path / "out"), *flags]
        assert main(words) == 2, flags
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.txt").write_text("mine")
    assert main(["distill", str(recipe), "--dry-run", "--output_dir", str(tmp_path / "busy")]) == 2


def test_a_run_refused_for_lack_of_disk_can_be_started_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["distill", str(recipe), "--output_dir", str(tmp_path / "out"), "--train.max_steps", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(runs.shutil, "disk_usage", lambda _: collections.namedtuple("Usage", "free")(10))
        assert main(words) == 2
    assert main(words) == 0


def test_a_disk_that_fills_up_inside_a_checkpoint_gives_one_clear_error(recipe: Path, tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from stillroom.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"sys.exit(main(['distill', {str(recipe)!r}, '--output_dir', {str(tmp_path / 'out')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--resume" in done.stderr


def test_nobody_writes_beyond_the_positions_of_a_model(recipe: Path, tmp_path: Path) -> None:
    words = ["distill", str(recipe), "--data.completions", "teacher", "--data.max_length", "1024"]
    words += ["--sampling.max_completion_length", "200", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2  # both models have 128


def test_rows_that_changed_since_the_teacher_wrote_are_noticed_on_resume(
    recipe: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text((recipe.parent / "rows.jsonl").read_text())
    words = ["distill", str(recipe), "--data.path", str(data), "--data.completions", "teacher"]
    words += ["--output_dir", str(tmp_path / "out")]
    assert main(words) == 0
    (tmp_path / "out" / "results.json").unlink()  # as if killed just before the end
    data.write_text(data.read_text().replace('"prompt": "', '"prompt": "what is '))
    assert main([*words, "--resume"]) == 2


def test_an_output_inside_a_model_is_refused_however_it_is_spelt_and_by_every_command(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(recipe.parent))
    inside = recipe.parent / "teacher" / "run"
    assert main(["distill", str(recipe), "--teacher.path", "~/teacher", "--output_dir", str(inside)]) == 2
    words = ["--model.path", str(recipe.parent / "teacher"), "--tasks", "[pocket/facts]"]
    words += ["--max_examples", "2", "--num_samples", "0", "--max_completion_length", "2"]
    assert main(["evaluate", *words, "--output_dir", str(inside)]) == 2
    assert not inside.exists()


def test_an_evaluation_that_is_refused_leaves_no_folder_in_the_way(recipe: Path, tmp_path: Path) -> None:
    words = ["evaluate", "--model.path", str(recipe.parent / "teacher"), "--tasks", "[pocket/facts]"]
    words += ["--num_samples", "0", "--max_completion_length", "2", "--output_dir", str(tmp_path / "out")]
    assert main([*words, "--max_examples", "100000"]) == 2
    assert main([*words, "--max_examples", "2"]) == 0


def test_help_of_no_command_imports_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from stillroom.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([name, '--help'])\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_key_given_twice_in_a_recipe_is_refused(recipe: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text(recipe.read_text() + "loss: {name: reverse_kl}\nloss: {name: jsd}\n")
    assert main(["distill", str(twice), "--dry-run", "--output_dir", str(tmp_path / "out")]) == 2


# Several workers.

ONE_SILENT_WORKER = """
import sys
from tests.test_trainer import TOKENIZER, rows, student, teacher
from stillroom import seeds
from stillroom.data.batches import TrainingRow
from stillroom.training.config import DistillationConfig
from stillroom.training.distill import DistillationTrainer

data = [None, None]
first, second = seeds.permutation(2, 0, "shuffle", 0)
data[first], data[second] = rows()[4], TrainingRow("silent", (1, 5), (6, 7), (False, False))
args = DistillationConfig(
    output_dir=sys.argv[1], per_device_train_batch_size=1, max_steps=1, hard_label_weight=0.5, logging_steps=1,
    save_strategy="no", disable_tqdm=True, use_cpu=True, ddp_timeout=30,
)
trainer = DistillationTrainer(student(), teacher(), args, data, processing_class=TOKENIZER)
trainer.train()
assert trainer.state.log_history[0]["loss/hard_label_nats"] > 0
"""


@pytest.mark.slow
def test_workers_agree_on_what_they_log_when_one_has_nothing_to_learn_from(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_SILENT_WORKER)
    done = torchrun(script, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-2000:]
