"""Multiple choice by option log-likelihood, and the likelihood of reference answers and plain texts.

The cheapest scores there are: one forward pass and no sampling. Options are scored behind the question
without its lettered list, as plain text also for models with a chat template, which is how published figures
of this kind are made. `evaluate_likelihood` picks the measure by what the examples hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stillroom import stats
from stillroom.data.asking import as_sent
from stillroom.data.overlap import prompt_text
from stillroom.data.rendering import render_prompt
from stillroom.data.tokens import encode_continuation
from stillroom.errors import DataError
from stillroom.evaluation.continuations import Ids, continuation_nats, with_start
from stillroom.models.loading import longest_input
from stillroom.types import Estimate, Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Records = list[dict[str, Any]]


def option_loglikelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: str | None = None,
) -> list[tuple[float, ...]]:
    """``log p(" " + option | question)`` in nats, for every option of every example.

    The context is ``example.meta["cloze"]`` (the question without the lettered list) where there is one,
    else the prompt. All options of an example stand behind the same context ids.

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        examples: with at least two options each.
        batch_size: changes the speed, not the sums.
        progress: label of a progress bar, shown on a terminal only.

    Raises:
        DataError: an example without options, or one longer than the model can read.
        StillroomError: the model gives NaN.
    """
    pairs: list[tuple[Ids, Ids]] = []
    for example in examples:
        if len(example.options) < 2:
            raise DataError(
                f"example {example.id!r} has {len(example.options)} options, so there is nothing to choose from. "
                "Score it by generation, or give Example.options."
            )
        context = with_start(tokenizer, render_prompt(tokenizer, example.meta.get("cloze", example.prompt)))
        # The space belongs to the option: " cat" is one token where "cat" behind a space is two.
        pairs += [(context, encode_continuation(tokenizer, f" {option}")) for option in example.options]
    longest = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]), default=((), ()))
    length, limit = len(longest[0]) + len(longest[1]), longest_input(model)
    if limit is not None and length > limit:
        raise DataError(
            f"a question with its option has {length} tokens and the model reads {limit}, so part of it would go "
            f"unread ({tokenizer.decode(list(longest[0]))[:60]!r}). Leave it out."
        )
    # One window each: an option must be read behind its whole question.
    sums = iter(
        continuation_nats(
            model, tokenizer, pairs, batch_size=batch_size, window=max(length, 2), progress=progress
        )
    )
    return [tuple(-next(sums) for _ in example.options) for example in examples]


def multiple_choice_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: str | None = None,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], Records]:
    """Accuracy when the likeliest option is the answer; the first one where several are equally likely.

    Returns:
        Estimates ``acc`` (by the sum of log-probabilities, lm-evaluation-harness's ``acc``), ``acc_norm`` (by
        that sum per UTF-8 byte of the option: its ``acc_bytes``, and its ``acc_norm`` for ASCII options) and
        ``acc_chance`` (what guessing gives); and one record an example.

    Raises:
        DataError: no examples, and all of `option_loglikelihoods`.
    """
    if not examples:
        raise DataError("there are no examples to score; choose a split and a limit that leave some.")
    records: Records = []
    for example, sums in zip(
        examples,
        option_loglikelihoods(model, tokenizer, examples, batch_size=batch_size, progress=progress),
        strict=True,
    ):
        per_byte = [s / len(option.encode()) for s, option in zip(sums, example.options, strict=True)]
        gold = ord(example.answer) - ord("A") if len(example.answer) == 1 else -1
        if not 0 <= gold < len(example.options):
            raise DataError(
                f"example {example.id!r} has the answer {example.answer!r} and {len(example.options)} options; the "
                "answer must be the letter of an option, A for the first."
            )
        records.append(
            {
                "example_id": example.id,
                "mode": "loglikelihood",
                "prompt": example.meta.get("cloze", example.prompt),
                "answer": example.answer,
                "options_nats": list(sums),
                "acc": int(max(range(len(sums)), key=sums.__getitem__) == gold),
                "acc_norm": int(max(range(len(sums)), key=per_byte.__getitem__) == gold),
            }
        )
    n = len(records)
    chance = sum(1 / len(example.options) for example in examples) / n
    names = ("acc", "acc_norm")
    estimates = {
        name: stats.wilson(sum(r[name] for r in records), n, level, unit="accuracy") for name in names
    }
    return estimates | {"acc_chance": stats.exact(chance, n=n, unit="accuracy")}, records


def text_nats(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    prompts: Sequence[str | Sequence[Message]] | None = None,
    use_chat_template: bool | None = None,
    window: int | None = None,
    batch_size: int = 4,
    progress: str | None = None,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], Records]:
    """Nats per token and bits per byte of texts, on their own or behind prompts.

    ``Σ -log p(token | what stands before it in its window)`` over all texts, divided by their tokens (start
    and prompt tokens are read, not counted) or by ``ln 2`` times their UTF-8 bytes.

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        texts: at least two; they are the independent units of the interval.
        prompts: one for each text, or none.
        use_chat_template: as in `stillroom.evaluation.evaluate.evaluate_task`.
        window: most tokens read at once, default 1024 or the model's own limit; every token but the first
            half window of a text has at least half a window of context.
        batch_size: changes the speed, not the sums.
        progress: label of a progress bar, shown on a terminal only.
        seed: of the bootstrap over texts.
        level: coverage of the intervals.

    Raises:
        DataError: fewer than two texts, an empty text, or not as many prompts as texts.
        ConfigError: the window is below 2 or above what the model can read.
        StillroomError: the model gives NaN.
    """
    prompts = [""] * len(texts) if prompts is None else prompts
    if len(prompts) != len(texts):
        raise DataError(f"{len(prompts)} prompts for {len(texts)} texts; give one prompt for each text.")
    pairs: list[tuple[Ids, Ids]] = []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if not text:
            raise DataError(f"text {number} is empty, so it has no likelihood. Leave it out and say so.")
        if prompt:
            sent = as_sent(tokenizer, prompt, use_chat_template)
            pairs.append(
                (with_start(tokenizer, render_prompt(tokenizer, sent)), encode_continuation(tokenizer, text))
            )
        else:
            # Encoded from the start, because some tokenizers write the first word of a text differently.
            start, whole = render_prompt(tokenizer, ""), render_prompt(tokenizer, text)
            pairs.append((with_start(tokenizer, start), whole[len(start) :]))
    nats = continuation_nats(model, tokenizer, pairs, batch_size=batch_size, window=window, progress=progress)
    tokens = [len(ids) for _, ids in pairs]
    num_bytes = [len(text.encode()) for text in texts]
    bits = [n / math.log(2) for n in nats]
    estimates = {
        "nats_per_token": stats.bootstrap_ratio(nats, tokens, seed, level, unit="nats/token"),
        "bits_per_byte": stats.bootstrap_ratio(bits, num_bytes, seed, level, unit="bits/byte"),
    }
    columns = zip(prompts, nats, tokens, num_bytes, strict=True)
    return estimates, [
        {"mode": "likelihood", "prompt": prompt, "nats": n, "tokens": t, "bytes": b}
        for prompt, n, t, b in columns
    ]


def evaluate_likelihood(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    use_chat_template: bool | None = None,
    batch_size: int = 4,
    progress: str | None = None,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], Records]:
    """The likelihood measure that fits the examples.

    Options: `multiple_choice_accuracy`. Gold completions: `text_nats` of the completion behind its prompt.
    Neither (prompts without answers): `text_nats` of the prompt's own text.

    Raises:
        DataError: the examples are of different kinds, or none, and all of the two functions named.
    """
    kinds = {
        "options" if e.options else "prompts" if e.completion is None else "completions" for e in examples
    }
    if len(kinds) != 1:
        raise DataError(
            f"the examples hold {' and '.join(sorted(kinds)) or 'nothing'}, and one figure measures one kind. "
            "Give examples of one task and split."
        )
    if kinds == {"options"}:
        return multiple_choice_accuracy(
            model, tokenizer, examples, batch_size=batch_size, progress=progress, level=level
        )
    completions = [example.completion for example in examples if example.completion is not None]
    estimates, records = text_nats(
        model,
        tokenizer,
        completions or [prompt_text(example.prompt) for example in examples],
        prompts=[example.prompt for example in examples] if completions else None,
        use_chat_template=use_chat_template,
        batch_size=batch_size,
        progress=progress,
        seed=seed,
        level=level,
    )
    ids = [{"example_id": example.id} for example in examples]
    return estimates, [identity | record for identity, record in zip(ids, records, strict=True)]
