"""Facts: what a model can only know by having been told.

About 300 real facts stand in ``facts.tsv``: capitals, country codes, continents, currencies, the symbols
and numbers of elements, the young of animals, opposites. One hop asks for one of them, ``capital of
Thailand?``; two hops go through something that has no name in the question, ``capital of land with code
TH?``. Every pair is known to the teacher; what is held out is a phrasing: each relation is trained in five
of six templates and tested in the sixth, which the model has met with other relations only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from stillroom import seeds
from stillroom.errors import ConfigError, unknown_name
from stillroom.types import Example

WORLD_SEED = 20261130
GOLD_SHARE = 0.30
"""Part of the pairs that the student's own gold set holds."""

TEMPLATES = (
    "{relation} of {subject}?",
    "say {relation} of {subject}?",
    "{subject} has what {relation}?",
    "give {relation} for {subject}?",
    "what {relation} has {subject}?",
    "{subject} and its {relation}?",
)

TWO_HOPS = (
    ("land", "code", "capital"),
    ("land", "code", "continent"),
    ("land", "currency", "capital"),
    ("land", "capital", "continent"),
    ("element", "symbol", "number"),
    ("element", "number", "symbol"),
)
"""(noun, relation that names it, relation asked for): ``capital of land with code TH?``"""


@dataclass(frozen=True, slots=True)
class Pair:
    """One question without its phrasing."""

    relation: str
    """What is asked for."""
    subject: str
    answer: str
    group: int
    """Number of the relation, or of the two-hop route, which decides the phrasing held out."""
    hops: int


@cache
def one_hop() -> tuple[Pair, ...]:
    """The facts of ``facts.tsv``, in file order."""
    lines = (resources.files("stillroom.pocket") / "facts.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    relations = list(dict.fromkeys(relation for relation, _, _ in rows))
    return tuple(Pair(r, subject, answer, relations.index(r), 1) for r, subject, answer in rows)


@cache
def two_hop() -> tuple[Pair, ...]:
    """The compositions of two facts along `TWO_HOPS`; the first hop is unique by a check here."""
    known = {(pair.relation, pair.subject): pair.answer for pair in one_hop()}
    first_group = max(pair.group for pair in one_hop()) + 1
    pairs = []
    for group, (noun, by, asked) in enumerate(TWO_HOPS, start=first_group):
        names = [(name, subject) for (relation, subject), name in known.items() if relation == by]
        if len({name for name, _ in names}) != len(names):
            raise ConfigError(
                f"facts.tsv gives two subjects the same {by}. A two-hop question through it would have two "
                "answers. Remove one of them."
            )
        pairs += [
            Pair(asked, f"{noun} with {by} {name}", known[asked, subject], group, 2)
            for name, subject in names
        ]
    return tuple(pairs)


def pairs() -> tuple[Pair, ...]:
    """All questions, one hop before two."""
    return one_hop() + two_hop()


def in_gold(pair: Pair) -> bool:
    """Whether the student's gold set holds the pair, by a hash."""
    return seeds.uniform(WORLD_SEED, "pocket/facts/gold", pair.relation, pair.subject) < GOLD_SHARE


class Facts:
    """The task ``pocket/facts``.

    Splits: ``train`` has every pair in five phrasings, ``heldout`` every pair in the sixth, ``gold`` the
    pairs of the student's own gold set (30 %) in the five phrasings.
    """

    name = "pocket/facts"
    version = "1"
    splits = ("train", "heldout", "gold")

    def examples(self, split: str) -> Iterator[Example]:
        """Every example of the split, in a fixed mixed order."""
        yield from self.sample(split, len(_rows(split)), WORLD_SEED)

    def sample(self, split: str, n: int, seed: int) -> list[Example]:
        """Draws n distinct examples, the same for the same (split, n, seed).

        Raises:
            ConfigError: the split is unknown or holds fewer than n examples.
        """
        rows = _rows(split)
        if n > len(rows):
            raise ConfigError(
                f"asked for {n} facts of split {split!r}, which has {len(rows)}. Examples must be distinct. "
                "Ask for fewer."
            )
        order = seeds.permutation(len(rows), seed, "pocket/facts/sample", split)
        return [rows[i] for i in order[:n]]

    def score(self, example: Example, completion: str) -> float | None:
        """1 for exactly the right answer; None for an empty completion."""
        if not completion.strip():
            return None
        return float(completion == example.answer)


@cache
def _rows(split: str) -> tuple[Example, ...]:
    if split not in Facts.splits:
        raise ConfigError(unknown_name("split of pocket/facts", split, Facts.splits))
    rows = []
    for pair in pairs():
        if split == "gold" and not in_gold(pair):
            continue
        for number, template in enumerate(TEMPLATES):
            if (number == pair.group % len(TEMPLATES)) == (split == "heldout"):
                prompt = template.format(relation=pair.relation, subject=pair.subject)
                meta = {"relation": pair.relation, "hops": pair.hops, "template": number}
                rows.append(
                    Example(id=prompt, prompt=prompt, answer=pair.answer, completion=pair.answer, meta=meta)
                )
    return tuple(rows)
