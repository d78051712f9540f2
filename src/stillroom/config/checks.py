"""What a value must be: one wording for each kind of refusal."""

from __future__ import annotations

import math

from stillroom.errors import ConfigError


def require(condition: bool, what: str, why: str, do: str) -> None:
    if not condition:
        raise ConfigError(f"{what}: {why}. {do}")


def fraction(name: str, value: float) -> None:
    require(
        math.isfinite(value) and 0.0 <= value <= 1.0,
        f"{name}={value} is outside [0, 1]",
        "it is a share",
        "Give a number from 0 (none) to 1 (all).",
    )


def positive(name: str, value: float) -> None:
    require(
        math.isfinite(value) and value > 0,
        f"{name}={value} is not positive",
        "nothing would run",
        "Give a number above 0.",
    )


def at_least_zero(name: str, value: float) -> None:
    require(
        math.isfinite(value) and value >= 0,
        f"{name}={value} is negative or not finite",
        "it has no meaning below 0",
        "Give 0 or more.",
    )


def at_least_two(name: str, value: int) -> None:
    require(
        value >= 2,
        f"{name}={value} is below 2",
        "a figure over fewer has no interval",
        "Give 2 or more.",
    )
