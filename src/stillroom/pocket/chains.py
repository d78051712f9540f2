"""Chains: walking through doors. The world's mathematics, and the reason it has a hard and an easy way.

A state is a digit. Each door, ``a`` to ``f``, sends every digit to another by a fixed random permutation.
The prompt ``7acf=?`` asks where one ends who starts at 7 and walks through a, c and f. The answer can be
written *direct*, ``#3``, or *worked*, one step after the other, ``7a4;4c9;9f3#3``, or with only the last j
steps, so that style is an axis from 0 to k written steps rather than a switch.

The doors generate a group that is not solvable (checked below whenever they are made). A walk through
them has no short cut that a shallow network could learn instead, as it has for sums: worked answers need
one look-up a token, direct answers need k look-ups in a row inside one forward pass, and a network of two
layers does not have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from stillroom import seeds
from stillroom.errors import ConfigError, unknown_name
from stillroom.types import Example

STATES = "0123456789"
DOORS = "abcdef"
LENGTHS: tuple[int, ...] = (4, 5, 6)
"""Numbers of doors in the splits ``train`` and ``heldout``."""
OOD_LENGTHS: tuple[int, ...] = (7, 8)
"""Numbers of doors in the split ``ood``: longer than anything a pocket model was trained on."""
WORLD_SEED = 20261130
"""The written seed of the doors and of the hash split."""

_ALL_SEEN = 2
"""Walks of at most this many doors are all training data: there are only 10 · 6² = 360 of the longest."""
_HELD_OUT_IN = 10
"""One walk in this many is held out."""

Permutation = tuple[int, ...]


def group_order(generators: Sequence[Permutation]) -> int:
    """Number of elements of the group that the permutations generate.

    Furst, Hopcroft and Luks (1980): keep, for every point i, one element for each image of i among the
    elements that fix all points before i; sift products through this table until nothing new appears.

    >>> group_order([(1, 2, 0), (1, 0, 2)])
    6
    """
    n = len(generators[0])
    identity = tuple(range(n))
    table: list[dict[int, Permutation]] = [{i: identity} for i in range(n)]
    waiting = list(generators)
    while waiting:
        element = waiting.pop()
        for i in range(n):
            image = element[i]
            known = table[i].get(image)
            if known is None:
                others = [e for row in table for e in row.values()] + [element]
                table[i][image] = element
                waiting += [_compose(element, e) for e in others] + [_compose(e, element) for e in others]
                break
            element = _compose(element, _inverse(known))
    return math.prod(len(row) for row in table)


def _compose(first: Permutation, then: Permutation) -> Permutation:
    return tuple(then[x] for x in first)


def _inverse(p: Permutation) -> Permutation:
    inverse = [0] * len(p)
    for x, y in enumerate(p):
        inverse[y] = x
    return tuple(inverse)


@cache
def doors(seed: int = WORLD_SEED) -> dict[str, Permutation]:
    """The six doors, ``doors()["a"][7]`` being the digit behind door a for one who comes from 7.

    Raises:
        ConfigError: the seed gives doors that commute or generate a solvable group. Of the groups on ten
            points only the alternating and the symmetric group are accepted, neither of which is solvable.
    """
    made = {door: tuple(seeds.permutation(len(STATES), seed, "pocket/doors", door)) for door in DOORS}
    order = group_order(list(made.values()))
    if order not in (math.factorial(10), math.factorial(10) // 2):
        raise ConfigError(
            f"world seed {seed} gives doors that generate a group of order {order}, not 10! or 10!/2. "
            "Walks through it may have a short cut that small networks learn. Choose another seed."
        )
    return made


def door_table() -> np.ndarray:
    """The doors as an index tensor: ``table[door, digit]`` is the next digit; int64 ``[6, 10]``."""
    return np.array([doors()[door] for door in DOORS], dtype=np.int64)


def walk(start: int, path: str) -> list[int]:
    """The digits visited, the start included: ``k + 1`` of them for k doors."""
    states = [start]
    for door in path:
        states.append(doors()[door][states[-1]])
    return states


def held_out(length: int, index: np.ndarray) -> np.ndarray:
    """Whether walks are held out, by a hash of their index among the walks of the same length.

    Args:
        length: number of doors k.
        index: int64 ``[n]``, each in [0, 10 · 6^k): the digits of the walk in base 6 (last door lowest)
            plus the start digit times 6^k.

    Returns:
        bool ``[n]``; all False for k <= 2.
    """
    if length <= _ALL_SEEN:
        return np.zeros(index.shape, dtype=bool)
    x = index.astype(np.uint64) ^ np.uint64(seeds.key(WORLD_SEED, "pocket/chains/heldout", length))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) % np.uint64(_HELD_OUT_IN) == 0


def gold(start: int, path: str, written: int) -> str:
    """The completion that writes the last ``written`` steps: 0 is direct, ``len(path)`` is worked.

    Raises:
        ConfigError: ``written`` lies outside 0 … k.
    """
    if not 0 <= written <= len(path):
        raise ConfigError(
            f"written = {written} steps of a walk through {len(path)} doors. A completion can write 0 to "
            f"{len(path)} steps. Choose a number in that range."
        )
    states = walk(start, path)
    first = len(path) - written
    steps = [f"{states[i]}{path[i]}{states[i + 1]}" for i in range(first, len(path))]
    return ";".join(steps) + f"#{states[-1]}"


_COMPLETION = re.compile(r"(?:[0-9][a-f][0-9](?:;[0-9][a-f][0-9])*)?#[0-9]")


def style_of(completion: str) -> int | None:
    """Number of written steps, from 0 (direct) up; None for a text of another form."""
    if not _COMPLETION.fullmatch(completion):
        return None
    return completion.count(";") + 1 if completion[0] != "#" else 0


def is_faithful(example: Example, completion: str) -> bool:
    """Whether every written step is right, and together they are the last steps of the walk."""
    written = style_of(completion)
    path: str = example.meta["path"]
    return (
        written is not None
        and written <= len(path)
        and (completion == gold(example.meta["start"], path, written))
    )


class Chains:
    """The task ``pocket/chains``.

    Args:
        style: what ``Example.completion`` writes: ``"worked"`` (all steps), ``"direct"`` (none) or a
            number of last steps (at most the shortest length).
        lengths: numbers of doors in ``train`` and ``heldout``.
    """

    name = "pocket/chains"
    version = "1"
    splits = ("train", "heldout", "ood")

    def __init__(self, style: str | int = "worked", lengths: Sequence[int] = LENGTHS) -> None:
        if isinstance(style, str) and style not in ("worked", "direct"):
            raise ConfigError(unknown_name("style", style, ["worked", "direct"]))
        self.style = style
        self.lengths = tuple(lengths)

    def examples(self, split: str) -> Iterator[Example]:
        """Every example of a split once, in a fixed order that mixes starts and paths.

        The order steps through the walks by a stride prime to their number, so any first n of them are
        spread over the world.
        """
        for length in self._lengths(split):
            count = len(STATES) * len(DOORS) ** length
            stride = next(s for s in range(int(count * 0.618), count) if math.gcd(s, count) == 1)
            index = np.arange(count, dtype=np.int64) * stride % count
            if split != "ood":
                index = index[held_out(length, index) == (split == "heldout")]
            for i in index.tolist():
                yield self._example(length, i)

    def sample(self, split: str, n: int, seed: int) -> list[Example]:
        """Draws n distinct examples, lengths in turn; the same for the same (split, n, seed).

        Raises:
            ConfigError: the split holds fewer than n examples.
        """
        lengths = self._lengths(split)
        found: list[Example] = []
        for turn, length in enumerate(lengths):
            wanted = len(range(turn, n, len(lengths)))
            found += [self._example(length, i) for i in self._draw(split, length, wanted, seed)]
        order = seeds.permutation(n, seed, "pocket/chains/order", split)
        return [found[i] for i in order]

    def _draw(self, split: str, length: int, wanted: int, seed: int) -> list[int]:
        """Distinct walks of one length, by index."""
        count = len(STATES) * len(DOORS) ** length
        generator = np.random.default_rng(seeds.key(seed, "pocket/chains/sample", split, length))
        # Drawing with replacement and dropping repeats is far quicker than shuffling 10 · 6^8 walks.
        index = (
            generator.permutation(count)
            if count < 20_000
            else generator.integers(count, size=20 * wanted + 200)
        )
        if split != "ood":
            index = index[held_out(length, index) == (split == "heldout")]
        distinct = list(dict.fromkeys(index.tolist()))
        if len(distinct) < wanted:
            raise ConfigError(
                f"asked for {wanted} walks through {length} doors of split {split!r}, and {len(distinct)} were "
                "found. Examples must be distinct. Ask for fewer, or for more lengths."
            )
        return distinct[:wanted]

    def score(self, example: Example, completion: str) -> float | None:
        """1 if the completion ends in ``#`` and the right digit, whatever stands before; None without one."""
        if not re.fullmatch(r"[^#]*#[0-9]", completion, flags=re.DOTALL):
            return None
        return float(completion[-1] == example.answer)

    def _lengths(self, split: str) -> tuple[int, ...]:
        if split not in self.splits:
            raise ConfigError(unknown_name("split of pocket/chains", split, self.splits))
        return OOD_LENGTHS if split == "ood" else self.lengths

    def _example(self, length: int, index: int) -> Example:
        start, rest = divmod(index, len(DOORS) ** length)
        path = "".join(DOORS[rest // len(DOORS) ** i % len(DOORS)] for i in reversed(range(length)))
        written = self.style if isinstance(self.style, int) else length if self.style == "worked" else 0
        prompt = f"{start}{path}=?"
        completion = gold(start, path, written)
        return Example(
            id=prompt,
            prompt=prompt,
            answer=completion[-1],
            completion=completion,
            meta={"start": start, "path": path, "length": length},
        )
