"""Shows why the style of an answer decides what a student can learn from it.

The student's architecture is trained from scratch on gold answers to chains, on one style at a time: with
worked answers it learns to walk, with direct ones it stays at chance (one digit in ten), although it is
given more of them. `stillroom pocket asymmetry` runs it
for several seeds; two minutes a seed at most.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from stillroom.experiments.pocket_batches import BatchMaker, Mix
from stillroom.experiments.pocket_floors import chain_prefix, complete, load
from stillroom.experiments.pocket_models import ROLES, export, new_model, new_optimizers, update
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import LENGTHS, Chains
from stillroom.stats import wilson
from stillroom.types import Estimate

CHANCE = 0.1
STEPS = {"worked": 500, "direct": 1000}
"""Steps of 128 worked or 192 direct answers: 64,000 and 192,000 of them."""


def train_on_one_style(style: str, seed: int, family: str = "chars", n: int = 1000) -> dict[str, Estimate]:
    """Trains the student's architecture on gold of one style; returns its accuracy in that style.

    Args:
        style: ``worked`` or ``direct``.
        seed: of weights and data.
        family: tokenizer family.
        n: held-out walks measured.

    Returns:
        ``greedy`` and ``sampled`` (temperature 1) accuracy, the style forced by the first tokens, both
        measured on the float16 folder, with Wilson intervals over walks.
    """
    role, tokenizer = ROLES["student"], tokenizers.build(family)
    model = new_model(role, len(tokenizer), seed=1000 + seed)
    optimizers = new_optimizers(model, role)
    batches = BatchMaker(tokenizer, seed=1000 + seed)
    even = dict.fromkeys(LENGTHS, 1.0)
    mix = Mix(0, 128, 0, 0, 0, even) if style == "worked" else Mix(192, 0, 0, 0, 0, even)
    steps = STEPS[style]
    for step in range(steps):
        factor = min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        update(model, optimizers, role, batches.batch(mix, step), factor)
    with tempfile.TemporaryDirectory() as folder:
        _, sampler = load(export(model, tokenizer, Path(folder), {}))
    examples = Chains().sample("heldout", n, seed=2)
    prefixes = [chain_prefix(example, style) for example in examples]
    result = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = complete(sampler, examples, prefixes, temperature)
        right = sum(Chains().score(e, text) == 1 for e, text in zip(examples, texts, strict=True))
        result[name] = wilson(right, n, unit="accuracy")
    return result
