"""The pocket models: their sizes, their optimizers, their loss, and the folder they are stored in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stillroom import seeds
from stillroom.experiments.muon import Muon
from stillroom.experiments.pocket_batches import IGNORED, Rows


@dataclass(frozen=True, slots=True)
class Role:
    """What one of the models is made of, how fast it learns and when it is done."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    seed: int
    minutes: float
    """Time limit: a teacher then enters its last phase, the others end."""
    muon_rate: float
    """Peak learning rate of Muon for the weight matrices; 0 leaves them to AdamW."""
    adamw_rate: float
    """Peak learning rate of AdamW for everything else."""
    measure_every: int
    """Steps between measurements."""
    broaden_steps: int = 0
    """Steps of a teacher's second phase, mostly facts and strings."""
    settle_steps: int = 0
    """Steps of a teacher's last phase, in which the learning rate falls to zero."""
    good_from: float = 1.0
    """Sampled accuracy on held-out walks at which the training of a student or proxy ends."""


ROLES = {
    "teacher": Role(
        layers=6,
        width=96,
        heads=4,
        feed_forward=256,
        seed=1,
        minutes=150,
        muon_rate=0.02,
        adamw_rate=0.004,
        measure_every=100,
        broaden_steps=1200,
        settle_steps=700,
    ),
    "student": Role(
        layers=2,
        width=48,
        heads=4,
        feed_forward=160,
        seed=2,
        minutes=10,
        muon_rate=0,
        adamw_rate=0.002,
        measure_every=5,
        good_from=0.35,
    ),
    "proxy": Role(
        layers=2,
        width=32,
        heads=2,
        feed_forward=96,
        seed=3,
        minutes=10,
        muon_rate=0,
        adamw_rate=0.004,
        measure_every=10,
        good_from=0.55,
    ),
}
"""``teacher`` is distilled, ``student`` is the undistilled start, ``proxy`` stands in for students unknown."""


def new_model(role: Role, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A Llama of the role's size with random weights that depend on ``role.seed + seed`` alone."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=role.width,
        intermediate_size=role.feed_forward,
        num_hidden_layers=role.layers,
        num_attention_heads=role.heads,
        num_key_value_heads=role.heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.key(role.seed + seed, "pocket/weights") % 2**32)
        return LlamaForCausalLM(config).float()


def new_optimizers(model: LlamaForCausalLM, role: Role) -> dict[str, torch.optim.Optimizer]:
    """AdamW, and Muon for the weight matrices where the role wants it; by name, for the checkpoint."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if role.muon_rate and p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if not (role.muon_rate and p.ndim == 2 and "embed" not in n)]
    made: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(others, role.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    }
    if matrices:
        made["muon"] = Muon(matrices, lr=role.muon_rate, weight_decay=0.05)
    return made


def update(
    model: LlamaForCausalLM,
    optimizers: dict[str, torch.optim.Optimizer],
    role: Role,
    groups: list[Rows],
    rate_factor: float,
) -> float:
    """One step on the mean over rows of each row's summed loss; returns that mean, in nats."""
    peaks = {"muon": role.muon_rate, "adamw": role.adamw_rate}
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = peaks[name] * rate_factor
        optimizer.zero_grad(set_to_none=True)
    rows = sum(len(ids) for ids, _ in groups)
    total = 0.0
    for group in groups:
        loss = row_loss(model, group) / rows
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers.values():
        optimizer.step()
    return total


def row_loss(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """Cross-entropy summed over the supervised positions, in nats; logits are made at these only."""
    ids, labels = rows
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    kept = labels != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[kept]), labels[kept], reduction="sum")


@torch.no_grad()
def exact(model: LlamaForCausalLM, rows: Rows, forced: int) -> float:
    """Share of rows whose completion greedy decoding writes, once its first ``forced`` tokens are given.

    Greedy decoding writes the gold text exactly when each of its tokens is the likeliest after the gold
    tokens before it, so one forward pass is enough.
    """
    ids, labels = rows
    guess = model(input_ids=ids[:, :-1], use_cache=False).logits.argmax(-1)
    labels = labels[:, 1:]
    free = (labels != IGNORED) & ((labels != IGNORED).cumsum(1) > forced)
    return ((guess == labels) | ~free).all(1).float().mean().item()


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, card: dict[str, Any]
) -> Path:
    """Writes a model folder: float16 weights, the tokenizer and ``card.json``."""
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)
    return folder
