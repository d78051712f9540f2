"""Text to ids: the one place where start and end tokens are added, found and counted.

`rendering` turns prompts, completions and conversations into text and uses these functions to turn the
text into ids. Nothing here knows about messages or chat templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stillroom.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Ids = tuple[int, ...]

_PROBES = ("a", "0", "A", ".")
# Texts put before a continuation so that the tokenizer does not take it for the start of a text. Several,
# because the first may merge with what follows.
_SENTINELS = ("\n", "\x1f", "|", "0", "a", ".")


def encode(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a text as it stands: special tokens written in it are read, none are added."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # pyright: ignore[reportArgumentType]


def encode_continuation(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a text that follows other text.

    SentencePiece-style tokenizers put a space before whatever they are given. At the start of a completion
    that would be a space that nobody wrote, learned as part of every answer; so the text is encoded behind
    a sentinel that is cut off again.
    """
    if not text:
        return ()
    first = tokenizer.convert_ids_to_tokens(list(encode(tokenizer, "a")))[:1]
    if not first or first[0][:1] not in ("▁", "Ġ"):
        return encode(tokenizer, text)
    for sentinel in _SENTINELS:
        head, whole = encode(tokenizer, sentinel), encode(tokenizer, sentinel + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    raise DataError(
        f"cannot tokenise {text[:60]!r} as the continuation of a text: this tokenizer merges its first "
        f"letter with each of {_SENTINELS}. Training on it would change the prompt's ids; leave the row out."
    )


def encode_prompt(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a text that begins a sequence, with exactly one start token where the tokenizer writes any.

    Raises:
        DataError: the text or template writes a second start token.
    """
    ids, start, bos = encode(tokenizer, text), start_ids(tokenizer), tokenizer.bos_token_id
    if ids[: len(start)] != start:
        ids = start + ids
    if bos is not None and ids[:2] == (bos, bos):
        raise DataError(
            f"the prompt begins with two start tokens ({tokenizer.bos_token!r}), which no model was trained "
            f"on. Remove one from the text or the chat template: {text[:60]!r}."
        )
    return ids


def start_ids(tokenizer: Tokenizer) -> Ids:
    """The ids that the tokenizer's default encoding puts before a text, usually the start token or none."""
    probe = next((text for text in _PROBES if encode(tokenizer, text)), "")
    bare = encode(tokenizer, probe)
    whole: Ids = tuple(tokenizer(probe, verbose=False)["input_ids"])  # pyright: ignore[reportArgumentType]
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at]
    return ()


def end_ids(model_or_config: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """All ids that end a completion: the tokenizer's end token and every one that the model declares.

    Args:
        model_or_config: a model, a generation config or a model config; ``eos_token_id`` may be an int, a
            list or None.
        tokenizer: its ``eos_token_id`` counts too.

    Returns:
        The set, empty if nothing declares an end.
    """
    declared = [tokenizer.eos_token_id, getattr(model_or_config, "eos_token_id", None)]
    for part in ("generation_config", "config"):
        declared.append(getattr(getattr(model_or_config, part, None), "eos_token_id", None))
    ids: set[int] = set()
    for entry in declared:
        ids.update(entry if isinstance(entry, list | tuple | set | frozenset) else [entry])
    return frozenset(i for i in ids if i is not None)


def closed(tokenizer: Tokenizer, ids: Ids, end_ids: frozenset[int]) -> Ids:
    """The ids with the tokenizer's end token behind them, unless they hold an end token already.

    Raises:
        DataError: no token is known to end a completion, or several are and the tokenizer prefers none.
    """
    if end_ids.intersection(ids):
        return ids
    if tokenizer.eos_token_id in end_ids:
        return (*ids, tokenizer.eos_token_id)
    if len(end_ids) == 1:
        return (*ids, *end_ids)
    raise DataError(
        f"cannot close a completion: the tokenizer names no end token and the model declares "
        f"{named(tokenizer, end_ids)}. A student trained without one never stops. Set tokenizer.eos_token, "
        "or end each completion with the right token."
    )


def through_end(tokenizer: Tokenizer, ids: Ids, end_ids: frozenset[int]) -> Ids:
    """The ids up to and including the first end token, which they must hold.

    Raises:
        DataError: more than blanks and special tokens would be cut off.
    """
    stop = next(at for at, token in enumerate(ids) if token in end_ids) + 1
    rest = str(tokenizer.decode(list(ids[stop:]), skip_special_tokens=True))
    if rest.strip():
        raise DataError(
            f"the completion holds the end token {named(tokenizer, ids[stop - 1 : stop])} before "
            f"{rest[:60]!r}: a model stops there, so what follows could not be learned. Remove the token "
            "from the text, or leave the row out."
        )
    return ids[:stop]


def named(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Ids with their strings, for messages."""
    return "(" + ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in sorted(ids)) + ")"
