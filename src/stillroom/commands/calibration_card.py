"""The model card of a calibrated teacher: what was turned, how far, and what it cost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.commands.display import visible
from stillroom.config import CalibrateConfig
from stillroom.records import write_atomically
from stillroom.types import Estimate

_CARD = """---
base_model: {base}
tags: [stillroom, calibrated, {mode}]
---
# A calibrated teacher: {mode}, strength {strength:g}

The teacher {teacher}, {direction} by `stillroom calibrate` with the reward `{reward}` \
against the proxy {proxy}. {guarded}

| figure | value | interval (95 %) | unit | n |
| --- | --- | --- | --- | --- |
{rows}

- mode: {mode}; strength: {strength:g}; preset: {preset}
- KL budget: {budget}; stopped by: {stopped}; weights of step {step}
- reward: gate {gate}, normalisation {normalisation}, clip {clip}, sign {sign}
- breaches of the floor: {breaches}
- alarms: {alarms}
- tasks: {tasks}; seed: {seed}

A log-ratio to a proxy is a stand-in for teaching value: what a student gains from it is measured by distilling
(`stillroom distill`), not by this card. Teachers that are hard to copy for the students tried may still
be copied by others.
"""


def write_card(
    config: CalibrateConfig, run_folder: Path, figures: Mapping[str, Estimate], ended: Mapping[str, Any]
) -> None:
    """Write ``README.md`` and ``card.json`` beside the calibrated weights (and the merged ones)."""
    text = _CARD.format(
        base=json.dumps(config.teacher.path),
        mode=config.mode,
        direction=_direction(config),
        guarded=_GUARDED[config.guard.on_breach],
        gate=config.reward.gate,
        normalisation=config.reward.normalisation,
        clip=config.reward.clip,
        sign=config.reward.sign,
        breaches=", ".join(f"step {b['step']}" for b in ended["breaches"]) or "none",
        strength=config.strength,
        teacher=_code(config.teacher.path),
        reward=config.reward.name,
        proxy=", ".join(map(_code, (config.proxy.path, *config.more_proxies))),
        rows="\n".join(
            f"| {name} | {e.value:.4g} | {e.low:.4g} to {e.high:.4g} | {e.unit} | {e.n} |"
            for name, e in figures.items()
        ),
        preset=config.preset,
        budget="none" if config.train.kl_budget is None else f"{config.train.kl_budget:g} nats/token",
        stopped=ended["stop_reason"],
        step=ended["last_good_step"],
        alarms="; ".join(f"step {alarm['step']}: {alarm['alarm']}" for alarm in ended["alarms"]) or "none",
        tasks=", ".join(map(_code, config.data.tasks)),
        seed=config.train.seed,
    )
    card = {
        "mode": config.mode,
        "strength": config.strength,
        "preset": config.preset,
        "teacher": config.teacher.path,
        "proxies": [config.proxy.path, *config.more_proxies],
        "reward": config.reward.name,
        "kl_budget": config.train.kl_budget,
        "seed": config.train.seed,
        "figures": {name: estimate.as_dict() for name, estimate in figures.items()},
        "ended": dict(ended),
    }
    for name in ("teacher", "merged"):
        if (run_folder / name).is_dir():
            write_atomically(run_folder / name / "README.md", text)
            write_atomically(run_folder / name / "card.json", json.dumps(card, indent=1, ensure_ascii=False))


_GUARDED = {
    "roll_back": "A KL anchor and a floor on utility held its own skill, which was not the aim.",
    "warn": "A guard watched its utility and did not act: read the figures and the breaches below.",
}


def _direction(config: CalibrateConfig) -> str:
    if config.strength == 0:
        return "trained for utility alone (strength 0, the control)"
    if config.reward.sign == "random":
        return "pushed in random directions (a control)"
    return "made more distillable" if config.mode == "distillable" else "made less distillable"


def _code(text: str) -> str:
    """A name as Markdown code, whatever it holds."""
    text = visible(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return f"`{text}`" if not longest else f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}"
