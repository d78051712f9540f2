"""The model card of a calibrated teacher: what was turned, how far, and what it cost."""

from __future__ import annotations

import json
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

The teacher `{teacher}`, made {direction} by `stillroom calibrate` with the reward `{reward}` \
against the proxy `{proxy}`. Its own skill was held by a KL anchor and a floor on utility; it was not the aim.

| figure | value | interval (95 %) | unit | n |
| --- | --- | --- | --- | --- |
{rows}

- mode: {mode}; strength: {strength:g}; preset: {preset}
- KL budget: {budget}; stopped by: {stopped}; weights of step {step}
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
        direction="more distillable" if config.mode == "distillable" else "less distillable",
        strength=config.strength,
        teacher=visible(config.teacher.path),
        reward=config.reward.name,
        proxy=", ".join(map(visible, (config.proxy.path, *config.more_proxies))),
        rows="\n".join(
            f"| {name} | {e.value:.4g} | {e.low:.4g} to {e.high:.4g} | {e.unit} | {e.n} |"
            for name, e in figures.items()
        ),
        preset=config.preset,
        budget="none" if config.train.kl_budget is None else f"{config.train.kl_budget:g} nats/token",
        stopped=ended["stop_reason"],
        step=ended["last_good_step"],
        alarms="; ".join(str(alarm) for alarm in ended["alarms"]) or "none",
        tasks=", ".join(map(visible, config.data.tasks)),
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
