"""Keyed randomness: every random choice is a pure function of (seed, purpose, indices).

Nothing here keeps state, so a run that is killed and resumed, or cut over several workers, makes the
same choices as an uninterrupted one. The mixing function is SplitMix64's finaliser (Steele, Lea and
Flood 2014, doi:10.1145/2660193.2660195), chosen because it is a few integer operations that give the
same bits on every device.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def key(seed: int, purpose: str, *indices: int | str) -> int:
    """A 63-bit key for one random choice.

    Args:
        seed: the run's seed.
        purpose: what the choice is for, such as ``"shuffle"``; different purposes never share numbers.
        indices: where the choice is made, e.g. step, row, position. Strings (example ids) are hashed.

    >>> key(0, "mix", 3) == key(0, "mix", 3), key(0, "mix", 3) == key(0, "mix", 4)
    (True, False)
    """
    state = _mix(seed & _MASK)
    for part in (purpose, *indices):
        state = _mix(state ^ (_text_hash(part) if isinstance(part, str) else part & _MASK))
    return state >> 1


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(seed: int, purpose: str, *indices: int | str) -> float:
    """One number in [0, 1) with 53 random bits, for the choice named by the arguments."""
    return (key(seed, purpose, *indices) >> 10) / (1 << 53)


def permutation(n: int, seed: int, purpose: str, *indices: int | str) -> list[int]:
    """A shuffle of ``range(n)``: rows are sorted by a key of their own (ties broken by row)."""
    base = key(seed, purpose, *indices)
    return sorted(range(n), key=lambda row: (_mix(base ^ row), row))


def _signed(x: int) -> int:
    """The same 64 bits as torch's int64."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copied sign bits are cut off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(_GAMMA)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def gumbel(row_keys: torch.Tensor, position: int, width: int) -> torch.Tensor:
    """Standard Gumbel noise, one row of ``width`` numbers for each key.

    ``argmax(logits / temperature + gumbel)`` is an exact sample of ``softmax(logits / temperature)``
    (Gumbel 1954). The noise depends only on (row key, position, column), so a row draws the same
    sample whatever batch it stands in.

    Args:
        row_keys: int64 ``[B]``, from `key`.
        position: index of the token in the completion.
        width: number of columns V.

    Returns:
        float32 ``[B, V]`` on the keys' device. Formed in float64 from 52 random bits, the most for which
        bits + 1/2 is exact, so the uniform number is never 0 or 1; with the 24 bits of a float32 the
        largest possible value (17.3) would be met too often at a vocabulary of 150,000.
    """
    import torch

    base = _mix_tensor(row_keys + _signed(_mix(position)))
    columns = torch.arange(width, device=row_keys.device, dtype=torch.int64)
    bits = _shift_right(_mix_tensor(base[:, None] ^ _mix_tensor(columns)[None, :]), 12)
    uniforms = (bits.double() + 0.5) / (1 << 52)
    return -torch.log(-torch.log(uniforms)).float()
