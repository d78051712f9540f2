"""What can go wrong, in six names.

Every message has three parts: what is wrong with which value, why it matters, what to do.
Each leaf also inherits the standard class it stands for, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StillroomError(Exception):
    """Base of every error that Stillroom raises on purpose."""


class ConfigError(StillroomError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class VocabularyError(StillroomError, ValueError):
    """Two models do not mean the same strings by the same token ids."""


class DataError(StillroomError, ValueError):
    """A data row or file cannot be used as asked."""


class RunFolderError(StillroomError, RuntimeError):
    """A run folder cannot be created, resumed or read."""


class MissingExtraError(StillroomError, ImportError):
    """A feature needs an optional package that is not installed."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """One wording for every unknown name: near matches first, then the whole list.

    >>> unknown_name("loss", "forwrd_kl", ["forward_kl", "reverse_kl"])
    "unknown loss 'forwrd_kl'. Did you mean 'forward_kl'? Known: forward_kl, reverse_kl."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or '(none)'}."
