"""The models shipped in the package are what their cards say, and can do what they are for."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.errors import ConfigError
from stillroom.experiments.pocket_floors import measure
from stillroom.pocket import assets, tokenizers
from stillroom.pocket.chains import LENGTHS

NAMES = assets.model_names()


def test_every_family_ships_three_roles_and_all_of_them_stay_under_eight_megabytes():
    families = {name.rsplit("-", 1)[0] for name in NAMES}
    assert {f"{f}-{r}" for f in families for r in ("teacher", "student", "proxy")} == set(NAMES)
    assert "chars" in families
    size = sum(f.stat().st_size for name in NAMES for f in assets.model_path(name).iterdir())
    assert 1e5 < size < 8e6


def test_an_unknown_model_gets_near_matches_and_the_way_to_build_one():
    with pytest.raises(ConfigError, match=r"Did you mean 'chars-teacher'.*stillroom pocket train"):
        assets.model_path("chars-teechr")


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_loads_as_an_ordinary_llama_with_the_family_tokenizer(name):
    folder, card = assets.model_path(name), assets.card(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == card["parameters"]
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert tokenizer.get_vocab() == tokenizers.build(card["family"]).get_vocab()
    assert model.config.vocab_size == len(tokenizer)
    low, high = {"teacher": (6e5, 9e5), "student": (6e4, 9e4), "proxy": (2.5e4, 4.5e4)}[card["role"]]
    assert low < card["parameters"] < high


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_reaches_its_floors_within_the_noise_of_a_few_hundred_prompts(name):
    role = assets.card(name)["role"]
    measured = measure(assets.model_path(name), n=240, chains_only=role != "teacher")
    found = {key: estimate.value for key, estimate in measured.items()}
    assert all(f"chains/direct_{k}" in found for k in LENGTHS)
    if role == "teacher":
        assert found["chains/worked"] > 0.97
        assert found["chains/direct"] > 0.95
        assert 0.30 < found["chains/worked_share"] < 0.70
        assert found["facts/heldout"] > 0.90
        assert found["strings/heldout"] > 0.84
    elif role == "student":
        assert 0.22 < found["chains/sampled"] < 0.53
        assert found["chains/direct"] < 0.2
    else:
        assert found["chains/worked"] > 0.52
        assert found["chains/direct"] < 0.25
