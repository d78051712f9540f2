"""Training rows of the pocket world, made as they are needed.

A batch is a few groups of rows of like length, each right-padded on its own, so that the short direct
answers do not pay for the long worked ones. Chains are drawn and written with index tables, without a loop
over rows. What a batch holds depends on (seed, step) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from stillroom import seeds
from stillroom.pocket import chains
from stillroom.pocket.facts import Facts
from stillroom.pocket.strings import Strings
from stillroom.types import Example

IGNORED = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows of each kind in one batch, and how long the chains are."""

    direct: int
    worked: int
    graded: int
    """Chains that write some but not all of their steps."""
    facts: int
    strings: int
    length_weights: dict[int, float]
    """Relative frequency of each number of doors."""

    @property
    def rows(self) -> int:
        return self.direct + self.worked + self.graded + self.facts + self.strings


Row = tuple[list[int], int]
"""Ids of a row, and the number of them that are start token and prompt."""

Rows = tuple[Tensor, Tensor]
"""Ids and labels, int64 ``[B, T]``, labels not shifted."""


class BatchMaker:
    """Makes the batches of one run.

    Args:
        tokenizer: of the model to be trained.
        seed: the run's seed.
        facts_split: ``train`` for a model that is told all facts, ``gold`` for the student's part of them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, facts_split: str = "train", stream: str = "train"
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.stream = stream
        self._door_table = chains.door_table()
        self._digits = self._ids_of(chains.STATES)
        self._doors = self._ids_of(chains.DOORS)
        self._hash, self._semicolon, self._equals, self._question = self._ids_of("#;=?").tolist()
        self._facts = self._encoded(list(Facts().examples(facts_split)))

    def _ids_of(self, symbols: str) -> np.ndarray:
        return np.array([self.tokenizer.encode(c, add_special_tokens=False)[0] for c in symbols])

    def batch(self, mix: Mix, step: int) -> list[Rows]:
        """The groups of rows of one step."""
        generator = np.random.default_rng(seeds.key(self.seed, "pocket/batch", self.stream, step))
        lengths = np.array(list(mix.length_weights))
        weights = np.array(list(mix.length_weights.values()))
        groups: list[Rows] = []
        if mix.direct:
            groups.append(_padded(self._chain_rows(generator, mix.direct, lengths, weights, "direct")))
        if mix.worked:
            groups.append(_padded(self._chain_rows(generator, mix.worked, lengths, weights, "worked")))
        if mix.graded:
            groups.append(_padded(self._chain_rows(generator, mix.graded, lengths, weights, "graded")))
        if mix.facts:
            chosen = generator.integers(len(self._facts), size=mix.facts)
            groups += _short_and_long([self._facts[i] for i in chosen])
        if mix.strings:
            drawn = Strings().sample("train", mix.strings, int(generator.integers(2**62)))
            groups += _short_and_long(self._encoded(drawn))
        return groups

    def chains_of(self, split: str, length: int, written: int, n: int, seed: int) -> Rows:
        """Draws n chains of one length and one style from a split, for measuring."""
        generator = np.random.default_rng(seeds.key(seed, "pocket/measure", split, length))
        index = self._drawn(generator, length, n, wanted=(split == "heldout") and length > 2)
        return _padded(self._written(length, index, np.full(len(index), written)))

    def rows_of(self, examples: Sequence[Example]) -> Rows:
        """Any examples with a gold completion, for measuring."""
        return _padded(self._encoded(examples))

    def _encoded(self, examples: Sequence[Example]) -> list[Row]:
        """``<bos>`` prompt completion ``<eos>`` of each example, prompt and completion encoded apart."""
        prompts, completions = (
            self.tokenizer([str(text) for text in texts], add_special_tokens=False)["input_ids"]
            for texts in ([e.prompt for e in examples], [e.completion for e in examples])
        )
        return [([1, *p, *c, 2], 1 + len(p)) for p, c in zip(prompts, completions, strict=True)]

    def _drawn(self, generator: np.random.Generator, length: int, n: int, wanted: bool) -> np.ndarray:
        """Draws n indices of walks of a length, held out or not."""
        found = np.zeros(0, dtype=np.int64)
        while len(found) < n:
            count = len(chains.STATES) * len(chains.DOORS) ** length
            index = generator.integers(count, size=2 * n if not wanted else 14 * n)
            found = np.concatenate([found, index[chains.held_out(length, index) == wanted]])
        return found[:n]

    def _chain_rows(
        self, generator: np.random.Generator, n: int, lengths: np.ndarray, weights: np.ndarray, style: str
    ) -> list[Row]:
        drawn = generator.choice(lengths, size=n, p=weights / weights.sum())
        rows: list[Row] = []
        for length in np.unique(drawn).tolist():
            index = self._drawn(generator, length, int((drawn == length).sum()), wanted=False)
            if style == "graded":
                written = generator.integers(min(1, length - 1), max(2, length), size=len(index))
            else:
                written = np.full(len(index), 0 if style == "direct" else length)
            rows += self._written(length, index, written)
        return rows

    def _written(self, length: int, index: np.ndarray, written: np.ndarray) -> list[Row]:
        """The ids of walks with their last ``written`` steps, and the length of each prompt."""
        n = len(index)
        powers = len(chains.DOORS) ** np.arange(length - 1, -1, -1)
        path = index[:, None] // powers % len(chains.DOORS)
        states = np.empty((n, length + 1), dtype=np.int64)
        states[:, 0] = index // len(chains.DOORS) ** length
        for i in range(length):
            states[:, i + 1] = self._door_table[path[:, i], states[:, i]]
        full = np.empty((n, 4 * length), dtype=np.int64)
        full[:, 0::4], full[:, 1::4] = self._digits[states[:, :-1]], self._doors[path]
        full[:, 2::4], full[:, 3::4] = self._digits[states[:, 1:]], self._semicolon
        full[:, -1] = self._hash
        head = np.column_stack(
            [
                np.full(n, 1),
                self._digits[states[:, 0]],
                self._doors[path],
                np.full(n, self._equals),
                np.full(n, self._question),
            ]
        )
        tail = np.column_stack([self._digits[states[:, -1]], np.full(n, 2)])
        rows = []
        for h, f, t, w in zip(head.tolist(), full.tolist(), tail.tolist(), written.tolist(), strict=True):
            steps = f[4 * (length - w) :] if w else [self._hash]
            rows.append((h + steps + t, length + 4))
        return rows


def _short_and_long(rows: list[Row]) -> list[Rows]:
    """Two groups, padded apart: half of the padding of one."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    half = len(rows) // 2
    return [_padded(part) for part in (rows[:half], rows[half:]) if part]


def _padded(rows: list[Row]) -> Rows:
    width = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
    for i, (row, prompt) in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, prompt : len(row)] = row[prompt:]
    return torch.from_numpy(ids), torch.from_numpy(labels)
