"""Trains the pocket models from their seeds: `stillroom pocket train`.

A plain loop, because the data are generated and the curriculum follows what the model has learned. The
teacher *climbs* from walks through two doors, getting one door more whenever it answers the longest walks
directly; most of its rows are direct, since worked answers come by themselves. Then it *broadens*, with
most rows facts and strings. Last it *settles* on as many worked as direct answers, while the learning rate
falls to zero. Student and proxy end as soon as they are as good as they should be.

Every batch is keyed by (seed, step), and a checkpoint holds all there is to know, so a run that was killed
goes on as if it had not been.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file

from stillroom.config import Options
from stillroom.errors import RunFolderError
from stillroom.experiments.pocket_batches import BatchMaker, Mix
from stillroom.experiments.pocket_config import PocketTrainConfig
from stillroom.experiments.pocket_floors import complete, write_card
from stillroom.experiments.pocket_models import ROLES, exact, export, new_model, new_optimizers, update
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import LENGTHS, Chains
from stillroom.pocket.facts import Facts
from stillroom.pocket.strings import Strings
from stillroom.runs import Run
from stillroom.sampling.sampler import HFSampler


def train(config: PocketTrainConfig, options: Options | None = None) -> Path:
    """Trains one model, measures it as it lies on disk, and returns the folder of the finished model.

    Raises:
        RunFolderError: the run folder is not empty and `resume` is off, or there is nothing to resume.
    """
    options = options or Options()
    training = _Training(config)
    if options.dry_run:
        mix, parameters = training.mix(), sum(p.numel() for p in training.model.parameters())
        Console().print(f"{config.family}-{config.role}: {parameters:,} parameters, first batches {mix}")
        return config.folder
    run = Run.create(config.folder, command="pocket train", config=config, resume=options.resume)
    if options.resume:
        training.load(config.folder)
        run.rewind(training.state["step"])
    training.go(run)
    folder = export(training.model, training.tokenizer, config.folder / "model", training.card())
    run.write_results(write_card(folder), model=str(folder))
    return folder


class _Training:
    """What one training holds: a model, its optimizers, and `state`, all that changes besides."""

    def __init__(self, config: PocketTrainConfig) -> None:
        self.config = config
        self.role = ROLES[config.role]
        self.teaching = config.role == "teacher"
        self.tokenizer = tokenizers.build(config.family)
        self.model = new_model(self.role, len(self.tokenizer), config.seed)
        self.optimizers = new_optimizers(self.model, self.role)
        seed = self.role.seed + config.seed
        self.batches = BatchMaker(self.tokenizer, seed, facts_split="train" if self.teaching else "gold")
        self.limit = 60 * (config.minutes or self.role.minutes)
        self.measure_every = config.measure_every or self.role.measure_every
        self.state: dict[str, Any] = {
            "step": 0,
            "examples": 0,
            "seconds": 0.0,
            "longest": 2 if self.teaching else config.longest,
            "phase": "climb",
            "phase_from": 0,
        }

    def go(self, run: Run) -> None:
        """Trains to the end."""
        state, config = self.state, self.config
        started = time.monotonic() - state["seconds"]
        saved = time.monotonic()
        with _progress() as progress:
            bar = progress.add_task(config.role, total=self.limit, completed=int(state["seconds"]), note="")
            while state["phase"] != "done":
                mix = self.mix()
                groups = self.batches.batch(mix, state["step"])
                loss = update(self.model, self.optimizers, self.role, groups, self.rate_factor())
                state["step"] += 1
                state["examples"] += mix.rows
                state["seconds"] = round(time.monotonic() - started, 1)
                measured = self.measure() if state["step"] % self.measure_every == 0 else {}
                if measured or state["step"] % config.log_every == 0:
                    line = {k: v for k, v in state.items() if k not in ("step", "phase", "phase_from")}
                    run.log({**line, "loss_nats_per_row": loss, **measured}, step=state["step"])
                    note = f"{state['phase']}, step {state['step']}, walks to {state['longest']}, loss {loss:.2f}"
                    progress.update(bar, completed=state["seconds"], note=note)
                self._advance(measured)
                if time.monotonic() - saved > 60 * config.checkpoint_minutes:
                    self.save(run.path)
                    saved = time.monotonic()
        self.save(run.path)

    def mix(self) -> Mix:
        """What the next batch holds."""
        longest: int = self.state["longest"]
        if not self.teaching:
            even = dict.fromkeys((k for k in LENGTHS if k <= longest), 1.0) or {longest: 1.0}
            if self.config.role == "student":
                return Mix(direct=0, worked=96, graded=0, facts=8, strings=8, length_weights=even)
            return Mix(direct=24, worked=72, graded=8, facts=8, strings=8, length_weights=even)
        newest_half = dict.fromkeys(range(1, longest), 0.5 / (longest - 1)) | {longest: 0.5}
        rows = {
            "climb": (224, 40, 8, 24, 24),
            "broaden": (48, 24, 48, 48, 88),
            "settle": (76, 76, 4, 32, 68),
        }
        return Mix(*rows[self.state["phase"]], length_weights=newest_half)

    def rate_factor(self) -> float:
        """The learning rates as a part of their peaks."""
        warm = min(1.0, (self.state["step"] + 1) / 100)
        if self.state["phase"] == "settle":
            return 0.5 * (1 - (self.state["step"] - self.state["phase_from"]) / self.role.settle_steps)
        return warm * (0.5 if self.state["phase"] == "broaden" else 1.0)

    def measure(self, n: int = 200) -> dict[str, float]:
        """Greedy accuracies on held-out examples (walks of one or two doors: on those seen)."""
        self.model.eval()
        result = {}
        lengths = range(1, self.state["longest"] + 1) if self.teaching else self.mix().length_weights
        for k in lengths:
            result[f"direct_{k}"] = exact(self.model, self.batches.chains_of("heldout", k, 0, n, 0), 1)
            result[f"worked_{k}"] = exact(self.model, self.batches.chains_of("heldout", k, k, n // 2, 0), 2)
        if self.teaching:
            for task, split in ((Facts(), "heldout"), (Strings(), "heldout"), (Strings(), "ood")):
                rows = self.batches.rows_of(task.sample(split, n, seed=0))
                result[f"{task.name.removeprefix('pocket/')}_{split}"] = exact(self.model, rows, 0)
        else:
            result["sampled"] = self._sampled(2 * n)
        self.model.train()
        return result

    def _sampled(self, n: int) -> float:
        """Accuracy at temperature 1 on held-out walks, the style left free."""
        task = Chains(lengths=tuple(self.mix().length_weights))
        examples = task.sample("heldout", n, seed=0)
        sampler = HFSampler(self.model, self.tokenizer, batch_size=n)
        texts = complete(sampler, examples, [""] * n, temperature=1)
        return sum(task.score(e, text) == 1 for e, text in zip(examples, texts, strict=True)) / n

    def _advance(self, measured: dict[str, float]) -> None:
        """Decides, mostly on what was measured, whether the training goes on differently."""
        state = self.state
        late = state["seconds"] > self.limit
        since = state["step"] - state["phase_from"]
        if not self.teaching:
            if late or measured.get("sampled", 0) >= self.role.good_from:
                state["phase"] = "done"
        elif state["phase"] == "settle":
            if since >= self.role.settle_steps:
                state["phase"] = "done"
        elif late or (state["phase"] == "broaden" and since >= self.role.broaden_steps):
            state |= {"phase": "settle", "phase_from": state["step"]}
        elif state["phase"] == "climb" and measured.get(f"direct_{state['longest']}", 0) >= 0.9:
            if state["longest"] < self.config.longest:
                state["longest"] += 1
            else:
                state |= {"phase": "broaden", "phase_from": state["step"]}

    def save(self, run_folder: Path) -> None:
        """Writes a checkpoint; ``COMPLETE`` comes last, and only then older ones go."""
        folder = run_folder / f"checkpoint-{self.state['step']}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(
            {n: p.detach().clone() for n, p in self.model.named_parameters()}, folder / "weights.safetensors"
        )
        save_file(
            {
                prefix + key: value
                for optimizer, name in self._by_name()
                for p, prefix in _prefixed(optimizer, name)
                for key, value in optimizer.state[p].items()
            },
            folder / "optimizers.safetensors",
        )
        (folder / "state.json").write_text(json.dumps(self.state), encoding="utf-8")
        (folder / "COMPLETE").touch()
        for old in run_folder.glob("checkpoint-*"):
            if old != folder:
                (old / "COMPLETE").unlink(missing_ok=True)
                shutil.rmtree(old)

    def load(self, run_folder: Path) -> None:
        """Takes up the newest complete checkpoint."""
        complete_ones = [path.parent for path in run_folder.glob("checkpoint-*/COMPLETE")]
        if not complete_ones:
            raise RunFolderError(
                f"{str(run_folder)!r} holds no complete checkpoint, so there is nothing to go on from. Remove the "
                "folder and start without `--resume`."
            )
        folder = max(complete_ones, key=lambda path: int(path.name.removeprefix("checkpoint-")))
        self.state |= json.loads((folder / "state.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "weights.safetensors")
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        tensors = load_file(folder / "optimizers.safetensors")
        for optimizer, name in self._by_name():
            for p, prefix in _prefixed(optimizer, name):
                mine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
                optimizer.state[p] = mine

    def _by_name(self) -> Iterator[tuple[torch.optim.Optimizer, str]]:
        return ((optimizer, name) for name, optimizer in self.optimizers.items())

    def card(self) -> dict[str, Any]:
        """What the model was made of."""
        return {
            "family": self.config.family,
            "role": self.config.role,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seed": self.role.seed + self.config.seed,
            "steps": self.state["step"],
            "examples": self.state["examples"],
            "seconds": round(self.state["seconds"]),
            "threads": torch.get_num_threads(),
            "longest_walk": self.state["longest"],
        }


def _prefixed(optimizer: torch.optim.Optimizer, name: str) -> Iterator[tuple[torch.Tensor, str]]:
    """The parameters of an optimizer, each with the prefix of its tensors in a checkpoint."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return ((p, f"{name}.{i}.") for i, p in enumerate(params))


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
