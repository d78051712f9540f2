"""Students made from teachers."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from stillroom.errors import ConfigError
from stillroom.models.loading import load_model, num_parameters
from stillroom.models.shrink import drop_layers, evenly_spaced, random_student

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=4),
}
IDS = torch.arange(3, 23)[None]


@pytest.fixture(params=CONFIGS, name="teacher")
def a_teacher(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[request.param])).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def is_tied(model) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_student_with_dropped_layers_computes_what_the_teacher_does_without_them(teacher):
    keep = (0, 3, 5)
    student = drop_layers(teacher, keep)
    oracle = copy.deepcopy(teacher)
    oracle.model.layers = nn.ModuleList(oracle.model.layers[i] for i in keep)
    oracle.config.num_hidden_layers = oracle.model.config.num_hidden_layers = len(keep)
    if getattr(teacher.config, "layer_types", None):
        types = [teacher.config.layer_types[i] for i in keep]
        oracle.config.layer_types = oracle.model.config.layer_types = types
        assert student.config.layer_types == types
    assert torch.equal(logits(student), logits(oracle))
    assert not torch.equal(logits(student), logits(teacher))


def test_keeping_all_layers_is_a_copy(teacher):
    assert torch.equal(logits(drop_layers(teacher, range(6))), logits(teacher))


def test_gemma_keeps_the_attention_kind_of_each_layer():
    teacher = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["gemma3"]))
    assert set(teacher.config.layer_types) == {"sliding_attention", "full_attention"}
    student = drop_layers(teacher, (0, 5))
    assert student.config.layer_types == ["sliding_attention", "full_attention"]


def test_the_student_shares_no_memory_with_its_teacher(teacher):
    before = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
    teacher.requires_grad_(False)
    student = drop_layers(teacher, (0, 5))
    assert all(p.requires_grad for p in student.parameters())
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[key], tensor) for key, tensor in teacher.state_dict().items())
    assert teacher.config.num_hidden_layers == 6


def test_report_66_embeddings_are_tied_or_not_after_a_step_saving_and_loading(teacher, tmp_path):
    for widened in (False, True):
        student = drop_layers(teacher, (0, 5))
        if widened:
            student.resize_token_embeddings(70, mean_resizing=False)
        before = logits(student)
        student.train()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        student(IDS, labels=IDS).loss.backward()
        optimizer.step()
        folder = tmp_path / str(widened)
        student.save_pretrained(folder)
        loaded = load_model(folder)
        assert not torch.equal(logits(student), before)
        assert torch.equal(logits(loaded), logits(student))
        assert logits(loaded).shape[-1] == (70 if widened else 60)
        assert is_tied(loaded) == is_tied(student) == bool(teacher.config.tie_word_embeddings)


def test_report_70_nothing_but_the_student_is_saved(teacher, tmp_path):
    student = drop_layers(teacher, evenly_spaced(6, 2))
    student.save_pretrained(tmp_path / "student")
    plain = random_student(teacher.config, num_hidden_layers=2, seed=0)
    plain.save_pretrained(tmp_path / "plain")

    def size(folder: Path) -> int:
        return (folder / "model.safetensors").stat().st_size

    assert size(tmp_path / "student") == pytest.approx(size(tmp_path / "plain"), rel=0.05)
    teacher.save_pretrained(tmp_path / "teacher")
    assert size(tmp_path / "student") < 0.6 * size(tmp_path / "teacher")
    assert torch.equal(logits(load_model(tmp_path / "student")), logits(student))


def test_generation_settings_follow_and_the_dtype_stays():
    teacher = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["qwen3"])).to(torch.bfloat16)
    teacher.generation_config.eos_token_id = [5, 7]
    student = drop_layers(teacher, (0, 5))
    assert student.generation_config.eos_token_id == [5, 7]
    assert student.dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [(), (0, 6), (-1, 3), (3, 0), (0, 0, 1)])
def test_layers_that_are_not_part_of_the_teacher_are_refused(keep):
    teacher = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["qwen3"]))
    with pytest.raises(ConfigError, match="rising indices from 0 to 5"):
        drop_layers(teacher, keep)


def test_evenly_spaced_keeps_the_first_and_the_last():
    for n_from in range(1, 40):
        for n_to in range(1, n_from + 1):
            chosen = evenly_spaced(n_from, n_to)
            assert len(chosen) == n_to
            assert chosen[0] == 0
            assert chosen[-1] == (n_from - 1 if n_to > 1 else 0)
            steps = {after - before for before, after in itertools.pairwise(chosen)}
            assert min(steps, default=1) >= 1
            assert max(steps, default=1) - min(steps, default=1) <= 1
    with pytest.raises(ConfigError, match="from 1 to 4"):
        evenly_spaced(4, 5)
    with pytest.raises(ConfigError, match="from 1 to 4"):
        evenly_spaced(4, 0)


def test_a_random_student_has_the_teachers_shape_and_is_fixed_by_its_seed(teacher):
    one = random_student(teacher.config, num_hidden_layers=2, seed=0)
    again = random_student(teacher.config, num_hidden_layers=2, seed=0)
    other = random_student(teacher.config, num_hidden_layers=2, seed=1)
    assert type(one) is type(teacher)
    assert one.config.num_hidden_layers == 2
    assert is_tied(one) == is_tied(teacher)
    assert torch.equal(logits(one), logits(again))
    assert not torch.equal(logits(one), logits(other))


def test_making_students_leaves_the_global_random_state_alone(teacher):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    random_student(teacher.config, seed=0)
    drop_layers(teacher, (0,))
    assert torch.equal(torch.rand(1), expected)


def test_a_narrower_student_keeps_the_size_of_a_head(teacher, tmp_path):
    student = random_student(teacher.config, num_hidden_layers=3, hidden_size=16, seed=0)
    config = student.config
    assert (config.hidden_size, config.head_dim, config.num_attention_heads) == (16, 8, 2)
    assert (config.num_key_value_heads, config.intermediate_size) == (1, 24)
    assert student.get_input_embeddings().weight.shape == (60, 16)
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(student))
    wide_mlp = random_student(teacher.config, hidden_size=16, intermediate_size=40, seed=0)
    assert wide_mlp.config.intermediate_size == 40


def test_impossible_students_are_refused(teacher):
    with pytest.raises(ConfigError, match=r"no whole number of attention heads.*multiple of 8"):
        random_student(teacher.config, hidden_size=20, seed=0)
    with pytest.raises(ConfigError, match="Did you mean 'intermediate_size'"):
        random_student(teacher.config, seed=0, intermediate_sizes=3)
    with pytest.raises(ConfigError, match="from a teacher with 6 layers"):
        random_student(teacher.config, num_hidden_layers=7, seed=0)


def test_the_students_of_the_real_teacher_have_the_known_size(shared):
    folder = shared / "models" / "stories260k"
    student = random_student(AutoConfig.from_pretrained(folder), num_hidden_layers=2, seed=0)
    assert num_parameters(student) == 123_712
    assert num_parameters(drop_layers(load_model(folder), evenly_spaced(5, 2))) == 123_712
