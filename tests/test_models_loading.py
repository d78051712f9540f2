"""Loading: what comes in is complete, finite, frozen where it must be, and otherwise one clear error."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from stillroom.errors import ConfigError
from stillroom.models.loading import (
    check_distinct,
    load_model,
    load_student,
    load_teacher,
    load_tokenizer,
    num_parameters,
    resolve,
    warn_if_larger,
)
from stillroom.models.lora import add_lora
from tiny import tiny_llama
from tokenizers_in_code import byte_tokenizer

IDS = torch.arange(3, 15)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder."""
    path = tmp_path / "models" / "small-teacher"
    tiny_llama(261).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- roles ------------------------------------------------------------------------------------------


def test_a_model_comes_back_as_it_was_saved(folder):
    model = load_model(folder)
    assert torch.equal(logits(model), logits(tiny_llama(261)))
    assert not model.training
    assert model.dtype == torch.float32
    assert load_tokenizer(folder)("abc")["input_ids"] == byte_tokenizer()("abc")["input_ids"]


def test_report_56_the_teacher_is_deterministic_frozen_and_unchanged_by_training(folder):
    edit_config(folder, attention_dropout=0.5)
    teacher, student = load_teacher(folder), load_student(folder)
    assert student.training
    assert not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.requires_grad for p in student.parameters())
    before = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
    targets = teacher(IDS).logits
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        loss = (student.train()(IDS).logits - teacher(IDS).logits).square().mean()
        loss.backward()
        optimizer.step()
    assert torch.equal(teacher(IDS).logits, targets)
    assert all(torch.equal(before[key], tensor) for key, tensor in teacher.state_dict().items())
    assert any(not torch.equal(before[key], tensor) for key, tensor in student.state_dict().items())
    # Dropout would show: the student, in training mode, is not deterministic.
    assert not torch.equal(student.train()(IDS).logits, student(IDS).logits)


def test_a_student_larger_than_its_teacher_is_warned_about(caplog):
    small, large = tiny_llama(30), tiny_llama(30, layers=4)
    with caplog.at_level(logging.WARNING):
        warn_if_larger(small, large)
        warn_if_larger(small, small)
    assert not caplog.records
    warn_if_larger(large, small)
    assert f"{num_parameters(large):,}" in caplog.text


def test_bfloat16_on_a_cpu_is_warned_about(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_model(folder).dtype == torch.float32
        assert not caplog.records
        assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    if torch.cuda.is_available():
        assert not caplog.records
    else:
        assert "40 times slower" in caplog.text
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        load_model(folder, dtype="fp32")


# --- weights that cannot be used --------------------------------------------------------------------


def test_a_model_with_nan_weights_is_refused_by_the_tensors_name(folder):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
        tensors["model.norm.weight"][0] = float("inf")

    edit_weights(folder, spoil)
    for load in (load_teacher, load_student):
        with pytest.raises(ConfigError, match=r"2 tensors \(first: model.layers.1.mlp.up_proj.weight\)"):
            load(folder)


def test_a_model_that_lacks_a_tensor_is_refused_rather_than_left_random(folder):
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks 1 tensors.*q_proj"):
        load_model(folder)


def test_tensors_without_a_place_are_named(folder, caplog):
    edit_weights(folder, lambda tensors: tensors.update({"teacher.head.weight": torch.zeros(2)}))
    load_model(folder)
    assert "teacher.head.weight" in caplog.text


def test_a_half_written_weights_file_is_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(folder)


def test_weights_that_are_no_safetensors_are_not_read(folder):
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(folder)


def test_a_model_that_wants_to_run_its_own_code_is_refused(folder):
    edit_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (folder / "modeling_mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="Python code of its own"):
        load_model(folder)


# --- names ------------------------------------------------------------------------------------------


def test_a_missing_folder_names_its_near_matches_and_siblings(folder):
    (folder.parent / "other").mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean 'small-teacher'\? Known: other, small-teacher"):
        load_model(folder.parent / "small-teachr")
    with pytest.raises(ConfigError, match=r"exists up to .*models.*other, small-teacher"):
        load_model(folder.parent / "nowhere" / "at" / "all")


def test_a_relative_path_below_an_existing_folder_is_not_taken_for_a_hub_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    assert resolve("models/small-teacher") == "models/small-teacher"
    with pytest.raises(ConfigError, match="Did you mean 'small-teacher'"):
        resolve("models/small-teachers")
    assert resolve("some-org/some-model") == "some-org/some-model"


def test_a_name_that_is_not_cached_says_so_offline(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*Did you mean the folder 'small-teacher'"):
        load_model("small-teacherr")
    with pytest.raises(ConfigError, match="gives no tokenizer of that name"):
        load_tokenizer("nobody/nothing-here")


def test_a_folder_without_a_model_says_what_it_holds(folder):
    with pytest.raises(ConfigError, match=r"no config\.json.*Did you mean one inside it \(small-teacher\)"):
        load_model(folder.parent)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"It holds: .*model\.safetensors"):
        load_model(folder)


def test_a_file_an_empty_name_and_a_damaged_config_are_refused(folder):
    with pytest.raises(ConfigError, match="is a file"):
        load_model(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="path is empty"):
        load_model(" ")
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model(folder)


def test_a_folder_without_a_tokenizer_does_not_give_an_empty_one(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(folder)


def test_unknown_shipped_and_fetched_models_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown pocket model 'chars-teachr'"):
        resolve("pocket:chars-teachr")
    with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
        resolve("fetched:smollm")
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="Run `stillroom fetch smollm2` once"):
        resolve("fetched:smollm2")


def test_teacher_and_student_may_not_be_one_folder_also_through_a_link(folder):
    link = folder.parent / "student"
    link.symlink_to(folder)
    for student in (folder, link, folder.parent / "." / "small-teacher"):
        with pytest.raises(ConfigError, match="are the same model"):
            check_distinct(str(student), str(folder))
    other = folder.parent / "other"
    tiny_llama(261).save_pretrained(other)
    check_distinct(str(other), str(folder))
    with pytest.raises(ConfigError, match="are the same model"):
        check_distinct("org/name", "org/name")
    check_distinct("org/name", "org/name", student_revision="main", teacher_revision="v1")


# --- adapters ---------------------------------------------------------------------------------------


def test_lora_starts_at_the_model_and_trains_only_the_adapter():
    model = tiny_llama(40)
    before = logits(model)
    adapted = add_lora(model, r=2, alpha=4)
    assert torch.equal(logits(adapted), before)
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert len(trainable) == 2 * 7 * 2  # A and B of seven linear modules in two layers


def test_lora_targets_are_checked():
    with pytest.raises(ConfigError, match=r"Did you mean 'q_proj'.*Known: .*down_proj"):
        add_lora(tiny_llama(40), r=2, alpha=4, target_modules=["q_prj", "v_proj"])
    with pytest.raises(ConfigError, match="would change nothing"):
        add_lora(tiny_llama(40), r=0, alpha=4)
    adapted = add_lora(tiny_llama(40), r=2, alpha=4, target_modules="v_proj")
    assert all("v_proj" in name for name, p in adapted.named_parameters() if p.requires_grad)


def adapter_with_two_new_tokens(folder: Path) -> tuple[Path, torch.Tensor]:
    """Add two tokens, widen, adapt, train one step, save."""
    model, tokenizer = load_student(folder), load_tokenizer(folder)
    tokenizer.add_tokens(["<x>", "<y>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    adapted = add_lora(model, r=2, alpha=4)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    ids = torch.tensor([[262, 5, 9, 261, 4]])
    adapted(ids, labels=ids).loss.backward()
    optimizer.step()
    adapted.save_pretrained(folder.parent / "adapter")
    tokenizer.save_pretrained(folder.parent / "adapter")
    with torch.no_grad():
        return folder.parent / "adapter", adapted.eval()(ids).logits


def test_report_71_an_adapter_trained_with_added_tokens_loads_with_the_same_logits(folder):
    adapter, expected = adapter_with_two_new_tokens(folder)
    ids = torch.tensor([[262, 5, 9, 261, 4]])
    assert expected.shape[-1] == 263
    for model in (load_model(adapter), load_student(adapter).eval()):
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in load_teacher(adapter).parameters())
    assert any(p.requires_grad for p in load_student(adapter).parameters())
    assert len(load_tokenizer(adapter)) == 263
    # The step did something, so that a lost adapter would show.
    with torch.no_grad():
        assert (
            load_model(folder)(ids[:, 1:3]).logits - load_model(adapter)(ids[:, 1:3]).logits[..., :261]
        ).any()


@pytest.mark.slow
def test_report_71_also_in_a_new_process(folder):
    adapter, expected = adapter_with_two_new_tokens(folder)
    code = (
        "import sys, torch\n"
        "from stillroom.models.loading import load_model\n"
        "logits = load_model(sys.argv[1])(torch.tensor([[262, 5, 9, 261, 4]])).logits\n"
        "print(repr(logits.double().sum().item()), repr(logits.double().abs().max().item()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(adapter)], capture_output=True, text=True, check=True
    )
    total, largest = map(float, done.stdout.split())
    assert total == pytest.approx(expected.double().sum().item(), abs=1e-3)
    assert largest == pytest.approx(expected.double().abs().max().item(), abs=1e-5)


def test_an_adapter_that_names_no_base_or_has_no_weights_is_refused(folder):
    adapter, _ = adapter_with_two_new_tokens(folder)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="does not say which model"):
        load_model(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        load_model(adapter)


# --- workers ----------------------------------------------------------------------------------------


def test_report_78_workers_forked_after_tokenising_finish_in_silence(folder, monkeypatch, capfd):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    tokenizer = load_tokenizer(folder)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    rows = [len(ids) for ids in tokenizer(["some text"] * 100)["input_ids"]]
    capfd.readouterr()
    loader = DataLoader(rows, batch_size=10, num_workers=2, timeout=60)
    assert torch.cat(list(loader)).tolist() == [len("some text")] * 100
    assert capfd.readouterr().err == ""


def test_report_78_the_users_setting_is_respected(folder, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    load_tokenizer(folder)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
