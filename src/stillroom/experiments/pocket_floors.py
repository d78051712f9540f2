"""Measures what a pocket model can do, on held-out examples, with intervals.

A style is forced by giving the model the first tokens of the completion: ``#`` for a direct answer, the
first step's digit and door for a worked one. Everything else is its own choice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from stillroom import seeds
from stillroom.pocket.chains import LENGTHS, Chains, is_faithful, style_of
from stillroom.pocket.facts import Facts
from stillroom.pocket.strings import Strings
from stillroom.sampling.sampler import HFSampler
from stillroom.stats import wilson
from stillroom.types import Estimate, Example, Prompt

LONGEST_COMPLETION = 40
"""Tokens: a worked walk through eight doors is 34 with its end."""


def load(folder: str | Path) -> tuple[LlamaForCausalLM, HFSampler]:
    """A pocket model in float32 and a sampler for it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, HFSampler(model, AutoTokenizer.from_pretrained(folder), batch_size=256)


def complete(
    sampler: HFSampler,
    examples: Sequence[Example],
    prefixes: Sequence[str],
    temperature: float,
    seed: int = 0,
) -> list[str]:
    """One completion for each example that begins with the given prefix.

    A completion that did not end within the limit is returned with a mark that no verifier accepts.
    """
    encode = sampler.tokenizer.encode
    prompts = [
        Prompt(
            example.id,
            (
                *encode(str(example.prompt)),
                *(encode(prefix, add_special_tokens=False) if prefix else ()),
            ),
        )
        for example, prefix in zip(examples, prefixes, strict=True)
    ]
    rollouts = sampler.sample(
        prompts, max_completion_length=LONGEST_COMPLETION, temperature=temperature, seed=seed
    )
    return [
        prefix + rollout.text + ("" if rollout.stop_reason == "end" else "…")
        for prefix, rollout in zip(prefixes, rollouts, strict=True)
    ]


def chain_prefix(example: Example, style: str) -> str:
    """What forces a style: ``#``, or the first digit and door."""
    return "#" if style == "direct" else f"{example.meta['start']}{example.meta['path'][0]}"


def measure(
    folder: str | Path, n: int = 1000, lengths: Sequence[int] = LENGTHS, chains_only: bool = False
) -> dict[str, Estimate]:
    """Accuracies of a pocket model; n items each (fewer where a split has fewer).

    Args:
        folder: the model as it lies on disk.
        n: items of each split.
        lengths: numbers of doors, n walks in all.
        chains_only: leave facts and strings out.

    Returns:
        ``chains/worked``, ``chains/direct`` (greedy, style forced), ``chains/sampled`` (temperature 1, style
        free), ``chains/worked_share`` (sampled completions that write at least one step),
        ``chains/faithful_share`` (all written steps right), ``chains/worked_k`` and ``chains/direct_k`` for
        each k, ``facts/heldout``, ``strings/heldout``, ``strings/ood`` (greedy). Wilson intervals over items.
    """
    _, sampler = load(folder)
    task = Chains(lengths=lengths)
    examples = task.sample("heldout", n, seed=1)
    result: dict[str, Estimate] = {}
    for style in ("worked", "direct"):
        texts = complete(sampler, examples, [chain_prefix(e, style) for e in examples], temperature=0)
        right = [task.score(e, text) == 1 for e, text in zip(examples, texts, strict=True)]
        result[f"chains/{style}"] = wilson(sum(right), n, unit="accuracy")
        for k in task.lengths:
            of_k = [r for r, e in zip(right, examples, strict=True) if e.meta["length"] == k]
            result[f"chains/{style}_{k}"] = wilson(sum(of_k), len(of_k), unit="accuracy")
    texts = complete(sampler, examples, [""] * n, temperature=1, seed=seeds.key(1, "pocket/floors"))
    scored = list(zip(examples, texts, strict=True))
    result["chains/sampled"] = wilson(sum(task.score(e, t) == 1 for e, t in scored), n, unit="accuracy")
    result["chains/worked_share"] = wilson(sum((style_of(t) or 0) > 0 for t in texts), n, unit="share")
    result["chains/faithful_share"] = wilson(sum(is_faithful(e, t) for e, t in scored), n, unit="share")
    for other, split in (
        () if chains_only else ((Facts(), "heldout"), (Strings(), "heldout"), (Strings(), "ood"))
    ):
        items = list(other.examples(split))[:n]
        texts = complete(sampler, items, [""] * len(items), temperature=0)
        right = sum(other.score(e, t) == 1 for e, t in zip(items, texts, strict=True))
        result[f"{other.name.removeprefix('pocket/')}/{split}"] = wilson(right, len(items), unit="accuracy")
    return result


def write_card(folder: str | Path, n: int = 1000, **facts: object) -> dict[str, Estimate]:
    """Measures a model folder as it lies on disk and adds the result to its ``card.json``."""
    measured = measure(folder, n)
    path = Path(folder) / "card.json"
    card = json.loads(path.read_text(encoding="utf-8")) | facts
    card["measured"] = {
        name: {key: round(v, 4) if isinstance(v, float) else v for key, v in estimate.as_dict().items()}
        for name, estimate in measured.items()
    }
    path.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return measured
