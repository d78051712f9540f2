"""What a person would notice when a policy goes wrong, as numbers with stated alarms.

A reward can be raised by text that nobody wants: endless, repetitive, in strange characters. Each monitor
compares the policy's completions with the original's on the same prompts. The thresholds leave room for a change
of style, which is what calibration is for: between the shipped teacher's worked and its direct answers the mean
length changes by a factor of 7 and the texts share few characters, and neither is an alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from stillroom.calibration.rollouts import Written
from stillroom.errors import ConfigError, DataError, unknown_name

NGRAM = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """How the completions of one policy look."""

    length: float
    """Mean number of tokens, end token left out."""
    longest_tenth: float
    """Length that nine completions in ten stay below."""
    repetition: float
    """Mean over completions of 1 − distinct / all 4-grams of ids; 0 for those too short to have two."""
    truncated: float
    """Share cut off at the length limit."""
    unparsed: float
    """Share that the task could not parse."""
    characters: Mapping[str, float]
    """Share of each character in all texts together."""
    entropy: float | None = None
    """Nats per token, as measured by the caller."""

    def figures(self) -> dict[str, float]:
        """For the log."""
        numbers = {
            "length_tokens": self.length,
            "repetition": self.repetition,
            "truncated": self.truncated,
            "unparsed": self.unparsed,
        }
        return numbers if self.entropy is None else numbers | {"entropy_nats_per_token": self.entropy}


def read(rows: Sequence[Written], entropy: float | None = None) -> Reading:
    """Read a policy's completions.

    Raises:
        DataError: there are none.
    """
    if not rows:
        raise DataError("there are no completions to look at. Ask the policy something first.")
    lengths = np.array([len(row.ids) for row in rows], dtype=float)
    characters = Counter(c for row in rows for c in row.text)
    total = max(sum(characters.values()), 1)
    return Reading(
        length=float(lengths.mean()),
        longest_tenth=float(np.quantile(lengths, 0.9)),
        repetition=float(np.mean([_repeated(row.ids) for row in rows])),
        truncated=float(np.mean([not row.ended for row in rows])),
        unparsed=float(np.mean([row.score is None for row in rows])),
        characters={c: n / total for c, n in characters.items()},
        entropy=entropy,
    )


def _repeated(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """A monitor, and the value from which it sounds."""

    value: Callable[[Reading, Reading], float | None]
    """Of (now, original); None where it cannot be said."""
    threshold: float
    meaning: str


def _new_characters(now: Reading, original: Reading) -> float:
    return sum(share for c, share in now.characters.items() if c not in original.characters)


def _entropy_ratio(now: Reading, original: Reading) -> float | None:
    if now.entropy is None or not original.entropy:
        return None
    return now.entropy / original.entropy


ALARMS: Mapping[str, Alarm] = MappingProxyType(
    {
        "length": Alarm(
            lambda now, original: now.length / max(original.longest_tenth, 1.0),
            1.5,
            "the mean length, as a multiple of what nine in ten of the original's completions stay below",
        ),
        "repetition": Alarm(
            lambda now, original: now.repetition - original.repetition,
            0.2,
            "the rise of the share of repeated 4-grams",
        ),
        "alphabet": Alarm(
            _new_characters, 0.02, "the share of characters that the original never wrote on these prompts"
        ),
        "truncated": Alarm(
            lambda now, original: now.truncated - original.truncated,
            0.1,
            "the rise of the share of completions that are cut off",
        ),
        "unparsed": Alarm(
            lambda now, original: now.unparsed - original.unparsed,
            0.1,
            "the rise of the share of completions that cannot be parsed",
        ),
        "entropy": Alarm(
            _entropy_ratio, 3.0, "the policy's entropy per token, as a multiple of the original's"
        ),
    }
)
"""A fall of entropy is no alarm: a policy that gives up one of two styles has less of it, and means to."""


def check_thresholds(thresholds: Mapping[str, float]) -> None:
    """Refuse thresholds for monitors that do not exist.

    Raises:
        ConfigError: with near matches.
    """
    for name in thresholds:
        if name not in ALARMS:
            raise ConfigError(unknown_name("monitor in guard.thresholds", name, ALARMS))


def alarms(now: Reading, original: Reading, thresholds: Mapping[str, float] | None = None) -> list[str]:
    """The alarms that sound, as sentences with value and threshold.

    Args:
        now: of the policy.
        original: of the original teacher on the same prompts.
        thresholds: by monitor, in place of the table's.
    """
    check_thresholds(thresholds or {})
    sounding = []
    for name, alarm in ALARMS.items():
        value = alarm.value(now, original)
        threshold = (thresholds or {}).get(name, alarm.threshold)
        if value is not None and value > threshold:
            sounding.append(f"{name}: {alarm.meaning} is {value:.3g}, above {threshold:g}")
    return sounding
