"""What is relied on in TRL's GRPOTrainer, checked on the installed version, and what is asked of it."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tests.tiny import char_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from stillroom.calibration import grpo
from stillroom.calibration.judge import Asked, Judge
from stillroom.calibration.scoring import Scorer
from stillroom.config import CalibrateConfig, ModelSpec, RewardSpec, TuneSpec
from stillroom.data.tokens import encode_prompt, end_ids
from stillroom.errors import ConfigError
from stillroom.models.lora import lora_config
from stillroom.types import Example

TOKENIZER = char_tokenizer()
A, B = TOKENIZER.convert_tokens_to_ids(["a", "b"])


def config(tmp_path: Path, *, mode="distillable", strength=1.0, reward=None, **train) -> CalibrateConfig:
    settings = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 60}
    return CalibrateConfig(
        output_dir=str(tmp_path / "run"),
        mode=mode,
        strength=strength,
        teacher=ModelSpec("teacher"),
        proxy=ModelSpec("proxy"),
        reward=reward or RewardSpec(),
        train=TuneSpec(**(settings | train)),
    )


class Letters:
    """A task that likes texts with an even number of characters, so that completions of a random model differ."""

    name, version, splits = "letters", "1", ("train",)

    def examples(self, split):
        return iter(())

    def score(self, example: Example, completion: str) -> float | None:
        return 1.0 if len(completion) % 2 == 0 else 0.0


def two_token_policy(folder: Path, logits: tuple[float, float]):
    """A Llama whose next token is a or b with fixed logits, whatever it reads; only its head is trained."""
    model = tiny_llama(len(TOKENIZER), layers=1, hidden=16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            parameter.requires_grad_(name == "lm_head.weight")
            if "norm" in name:
                parameter.fill_(1.0)
        model.model.embed_tokens.weight[:, 0] = 1.0
    constant = model.model(torch.tensor([[1]])).last_hidden_state[0, 0, 0].item()
    with torch.no_grad():
        model.lm_head.weight[:, 0] = -40.0 / constant
        model.lm_head.weight[A, 0], model.lm_head.weight[B, 0] = (x / constant for x in logits)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), constant


def gradient_of_the_anchor(tmp_path: Path, *, corrected: bool) -> tuple[float, float]:
    """One step of plain gradient descent with equal rewards, on a and b in the policy's own proportions."""
    model, constant = two_token_policy(tmp_path / "anchor", (math.log(0.9), math.log(0.1)))
    with torch.no_grad():
        model.lm_head.weight[A, 0] = model.lm_head.weight[B, 0] = 0.0  # the policy is (0.5, 0.5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    args = grpo.arguments(
        config(tmp_path, beta=1.0, use_bias_correction_kl=corrected),
        tmp_path / "out",
        world_size=1,
        show_bar=False,
    )
    args.optim, args.learning_rate, args.max_grad_norm, args.save_strategy = "sgd", 1.0, 0.0, "no"
    args.reward_weights = None
    args.max_completion_length = 1

    def both_tokens(prompts, trainer):
        ids = [[A], [B]] * (len(prompts) // 2)
        return {"prompt_ids": [[1]] * len(prompts), "completion_ids": ids, "logprobs": [[0.0]] * len(prompts)}

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [1.0] * len(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x", "y"]}),
        processing_class=TOKENIZER,
        rollout_func=both_tokens,
    )
    trainer.train()
    head = model.lm_head.weight
    # dL/dlogit = −Δweight / constant, and Δlogit = constant·Δweight
    return tuple(-(head[token, 0].item()) / constant for token in (A, B))  # pyright: ignore[reportReturnType]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_report_49_the_anchors_gradient_is_that_of_kl_policy_to_original_when_corrected(
    tmp_path: Path,
) -> None:
    assert gradient_of_the_anchor(tmp_path, corrected=True) == pytest.approx((-0.5493, 0.5493), abs=2e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_report_49_and_of_kl_original_to_policy_when_not(tmp_path: Path) -> None:
    assert gradient_of_the_anchor(tmp_path, corrected=False) == pytest.approx((-0.4, 0.4), abs=2e-4)


def test_the_parts_of_trl_that_are_used_are_where_they_are_expected() -> None:
    wanted = {
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "processing_class",
        "peft_config",
        "callbacks",
    }
    assert wanted <= set(inspect.signature(GRPOTrainer.__init__).parameters)
    fields = set(GRPOConfig.__dataclass_fields__)
    assert {
        "scale_rewards",
        "multi_objective_aggregation",
        "reward_weights",
        "use_bias_correction_kl",
    } <= fields
    assert {"shuffle_dataset", "steps_per_generation", "mask_truncated_completions", "loss_type"} <= fields


def built(tmp_path: Path, cfg: CalibrateConfig, *, score=None):
    """A real trainer on a tiny policy with an adapter, and what its rewards were called with."""
    policy = tiny_llama(len(TOKENIZER), seed=3, scale=0.3)
    policy.save_pretrained(tmp_path / "policy")
    TOKENIZER.save_pretrained(tmp_path / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    proxy = tiny_llama(len(TOKENIZER), seed=4, scale=0.3)
    task = Letters()
    if score is not None:
        task.score = score
    asked = [
        Asked(f"letters/{p}", task, Example(p, p, "a"), p, encode_prompt(TOKENIZER, p))
        for p in ("one", "two", "three", "four")[: cfg.train.max_steps * cfg.train.prompts_per_step]
    ]
    judge = Judge(
        asked,
        TOKENIZER,
        end_ids(policy, TOKENIZER),
        [Scorer(proxy, TOKENIZER, reads_ids=True)],
        cfg.reward,
        group_size=cfg.train.num_generations,
        seed=0,
    )
    args = grpo.arguments(cfg, tmp_path / "out", world_size=1, show_bar=False)
    args.save_strategy = "no"
    trainer = grpo.build(
        policy, TOKENIZER, asked, judge, args, peft_config=lora_config(policy, 2, 4), callbacks=[]
    )
    return trainer, judge


def test_report_50_an_unchanged_policy_has_kl_zero_and_a_gradient_when_rewards_differ(tmp_path: Path) -> None:
    cfg = config(tmp_path, num_generations=8, reward=RewardSpec(gate="none"))
    trainer, _ = built(tmp_path, cfg)
    trainer.train()
    first = next(line for line in trainer.state.log_history if "kl" in line)
    assert first["kl"] == 0.0
    assert first["grad_norm"] > 0
    assert first["clip_ratio/region_mean"] == 0.0  # the ratio is 1


def test_report_50_without_anchor_no_kl_is_logged_at_all(tmp_path: Path) -> None:
    trainer, _ = built(
        tmp_path, config(tmp_path, beta=0.0, num_generations=8, reward=RewardSpec(gate="none"))
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines
    assert not any("kl" in line for line in lines)


def test_report_52_equal_rewards_move_nothing(tmp_path: Path) -> None:
    cfg = config(tmp_path, strength=0.0, beta=0.0, num_generations=4)
    trainer, _ = built(tmp_path, cfg, score=lambda example, completion: 1.0)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert before
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters() if n in before)


def test_report_51_the_anchor_is_the_policy_without_its_adapter(tmp_path: Path) -> None:
    trainer, _ = built(tmp_path, config(tmp_path))
    assert trainer.ref_model is None
    with trainer.model.disable_adapter():
        original = trainer.model(input_ids=torch.tensor([[1, 5, 6]])).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(
        input_ids=torch.tensor([[1, 5, 6]])
    ).logits
    torch.testing.assert_close(original, plain)


def test_the_advantages_are_those_of_equation_11(tmp_path: Path) -> None:
    """Utility and calibration normalised each in its own group, then added with the strength; not whitened again."""
    cfg = config(
        tmp_path, mode="undistillable", strength=0.7, num_generations=8, reward=RewardSpec(gate="none")
    )
    trainer, judge = built(tmp_path, cfg)
    seen: dict[str, list] = {}
    judge_utility, judge_calibration = judge.utility, judge.calibration

    def utility(**kwargs):
        seen["utility"] = judge_utility(**kwargs)
        return seen["utility"]

    def calibration(**kwargs):
        seen["calibration"] = judge_calibration(**kwargs)
        return seen["calibration"]

    trainer.reward_funcs = [utility, calibration]
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    advantages = trainer._prepare_inputs(batch)["advantages"]
    expected = [u - 0.7 * (c or 0.0) for u, c in zip(seen["utility"], seen["calibration"], strict=True)]
    assert any(abs(c or 0.0) > 0.1 for c in seen["calibration"])
    assert sorted(advantages.tolist()) == pytest.approx(sorted(expected), abs=1e-5)


def test_groups_that_would_be_torn_between_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be shared out among 4 processes"):
        grpo.arguments(config(tmp_path), tmp_path, world_size=4, show_bar=False)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        grpo.arguments(
            config(tmp_path, gradient_accumulation_steps=4), tmp_path, world_size=2, show_bar=False
        )


def test_the_weight_of_the_calibration_reward_says_the_mode(tmp_path: Path) -> None:
    for mode, sign in (("distillable", 1), ("undistillable", -1)):
        args = grpo.arguments(
            config(tmp_path, mode=mode, strength=0.5), tmp_path, world_size=1, show_bar=False
        )
        assert args.reward_weights == [1.0, sign * 0.5]
