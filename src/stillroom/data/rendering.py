"""Prompts, completions and conversations become training samples here, and nowhere else.

This is the only file that calls a chat template (and, with `tokens`, the only one that adds a start or
end token), so that training, sampling, teacher scoring and evaluation read the same ids for the same
conversation, each model through its own tokenizer. Four decisions hold everywhere:

1. *One start token.* A prompt gets the start tokens that the tokenizer's own default encoding writes,
   unless the text already begins with them (many chat templates write their own). A tokenizer that
   writes none by default gets none. No end token is ever added to a prompt.
2. *Prompt and completion are tokenised apart and their ids joined*, because a sampler can only ever
   continue finished prompt ids: a merge across the border would show the student a prompt at training
   time that it never meets when it is asked to answer.
3. *Masks come from lengths.* A completion is trained up to and including the first end token of each
   assistant turn. Ids are never compared with the padding id, which many tokenizers share with the end.
4. *The serving path rules.* What stands before a trained turn equals what `render_prompt` gives for that
   prefix. Templates that render earlier turns differently later on (reasoning models drop old
   reasoning) therefore yield one sample per assistant turn instead of one per conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stillroom.data.tokens import (
    Ids,
    closed,
    encode,
    encode_continuation,
    encode_prompt,
    end_ids,
    named,
    through_end,
)
from stillroom.errors import DataError
from stillroom.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Rendered", "end_ids", "render_completion", "render_example", "render_messages", "render_prompt"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training sample: a prompt that is never trained, and a completion with a mask over its ids."""

    prompt_ids: Ids
    completion_ids: Ids
    """Ends with the last trained token, as a rollout does."""
    completion_mask: tuple[bool, ...]
    """True where a token is trained; later user turns of a conversation are holes."""

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.completion_mask)
        if not self.prompt_ids:
            raise DataError(
                "the prompt is empty and this tokenizer writes no start token, so nothing stands before the "
                "first trained token and no model can score it. Give a prompt, or move the first words of "
                "the completion into it."
            )
        if not any(self.completion_mask):
            raise DataError(
                "no token of this sample is trained, so it would cost time and teach nothing. Give it a "
                "completion, or leave the row out."
            )

    @property
    def num_trained(self) -> int:
        """Number of supervised tokens."""
        return sum(self.completion_mask)


def render_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> Ids:
    """The ids that a model reads before it answers.

    Args:
        tokenizer: of the model that will read them.
        prompt: a plain text, taken as it stands, or messages, rendered by the chat template up to and
            including the header of the answer.

    Returns:
        Ids with exactly one start token (none if the tokenizer's default encoding writes none and neither
        the text nor the template does), never a trailing end token. Empty only for an empty text and a
        tokenizer without a start token.

    Raises:
        DataError: messages without a chat template; a template that refuses them; two start tokens.
    """
    text = prompt if isinstance(prompt, str) else _apply(tokenizer, prompt, answer_follows=True)
    return encode_prompt(tokenizer, text)


def render_example(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], completion: str, end_ids: frozenset[int]
) -> Rendered:
    """A prompt and the completion to train on, with the end token supervised.

    Args:
        tokenizer: of the model that is trained.
        prompt: as in `render_prompt`; assistant turns inside it are not trained.
        completion: the answer's text. After a plain prompt it is closed with the tokenizer's end token
            unless it ends with an end token already; after messages the template closes it.
        end_ids: from `end_ids`.

    Raises:
        DataError: an empty completion, an end token in its middle, no end token at all, or a template that
            loses the completion or does not continue its own prompt.
    """
    if not isinstance(prompt, str):
        messages = [*prompt, {"role": "assistant", "content": completion}]
        return _one_turn(tokenizer, messages, len(prompt), end_ids)
    ids = render_completion(tokenizer, completion, end_ids, begins_text=not prompt)
    return Rendered(encode_prompt(tokenizer, prompt), ids, (True,) * len(ids))


def render_completion(
    tokenizer: Tokenizer, completion: str, end_ids: frozenset[int], *, begins_text: bool = False
) -> Ids:
    """A plain completion as trained ids, closed by an end token; what `render_example` puts behind a text.

    Args:
        tokenizer: of the model that is trained.
        completion: the answer's text.
        end_ids: from `end_ids`.
        begins_text: whether nothing but a start token stands before it, as behind an empty prompt.
            Tokenizers that put a space before every text do so then, as in their model's pretraining.

    Raises:
        DataError: an empty completion, an end token in its middle, or no end token at all.
    """
    _check_not_empty(completion)
    ids = encode(tokenizer, completion) if begins_text else encode_continuation(tokenizer, completion)
    return through_end(tokenizer, closed(tokenizer, ids, end_ids), end_ids)


def render_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], end_ids: frozenset[int]
) -> list[Rendered]:
    """A conversation as training samples: every assistant turn is trained, nothing else is.

    Args:
        tokenizer: of the model that is trained; needs a chat template, but no generation markers in it.
        messages: turns in order; the last one is the assistant's.
        end_ids: from `end_ids`; the token that closes each assistant turn must be among them.

    Returns:
        One sample with holes at the later user turns if the joined ids before every assistant turn equal
        `render_prompt` of that prefix; otherwise one sample per assistant turn, whose prompt is exactly that.

    Raises:
        DataError: no assistant turn, a last turn that nobody answers, and all of `render_example`.
    """
    turns = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise DataError(
            f"a conversation of {len(messages)} messages has no assistant turn, so nothing in it is trained. "
            "Give it an answer, or pass it as a prompt for the student or teacher to complete."
        )
    if turns[-1] != len(messages) - 1:
        raise DataError(
            f"a conversation ends with a {messages[-1].get('role')!r} turn that nothing answers, so that "
            "turn would be dropped. Remove it, or pass the conversation as a prompt."
        )
    if len(turns) > 1 and (joined := _joined(tokenizer, messages, turns, end_ids)):
        return [joined]
    return [_one_turn(tokenizer, messages, turn, end_ids) for turn in turns]


def _joined(
    tokenizer: Tokenizer, messages: Sequence[Message], turns: list[int], end_ids: frozenset[int]
) -> Rendered | None:
    """The whole conversation as one sample, or None if serving would render some prefix differently."""
    text = _apply(tokenizer, messages[: turns[0]], answer_follows=True)
    prompt = encode_prompt(tokenizer, text)
    ids: Ids = ()
    mask: tuple[bool, ...] = ()
    end = 0
    for turn in turns:
        before = _apply(tokenizer, messages[:turn], answer_follows=True)
        after = _apply(tokenizer, messages[: turn + 1], answer_follows=False)
        if not (before.startswith(text) and after.startswith(before)):
            return None
        hole = encode_continuation(tokenizer, before[len(text) :])
        ids, mask = ids + hole, mask + (False,) * len(hole)
        if prompt + ids != encode_prompt(tokenizer, before):
            return None
        text = after
        piece = encode_continuation(tokenizer, after[len(before) :])
        try:
            answer = _answer(tokenizer, piece, after[len(before) :], messages[turn]["content"], end_ids)
        except DataError:  # some templates close only the last turn: rendering turn by turn decides
            return None
        end = len(ids) + len(answer)
        ids, mask = ids + piece, mask + (True,) * len(answer) + (False,) * (len(piece) - len(answer))
    return Rendered(prompt, ids[:end], mask[:end])


def _one_turn(
    tokenizer: Tokenizer, messages: Sequence[Message], turn: int, end_ids: frozenset[int]
) -> Rendered:
    """Train assistant turn ``turn`` alone, behind the prompt that serving renders for it."""
    before = _apply(tokenizer, messages[:turn], answer_follows=True)
    after = _apply(tokenizer, messages[: turn + 1], answer_follows=False)
    content = messages[turn]["content"]
    _check_holds(after, content)
    if not after.startswith(before):
        raise DataError(
            f"the chat template renders a prompt (…{before[-60:]!r}) that is not a prefix of the same "
            "conversation with its answer, so the student would be trained behind another prompt than it is "
            "served. Fix the template, or give prompt and completion as plain text."
        )
    text = after[len(before) :]
    ids = _answer(tokenizer, encode_continuation(tokenizer, text), text, content, end_ids)
    return Rendered(encode_prompt(tokenizer, before), ids, (True,) * len(ids))


def _answer(tokenizer: Tokenizer, ids: Ids, text: str, content: str, end_ids: frozenset[int]) -> Ids:
    """The trained part of a rendered assistant turn: up to its end token, and holding its whole content."""
    _check_not_empty(content)
    _check_holds(text, content)
    if not end_ids.intersection(ids):
        raise DataError(
            f"the chat template closes an answer with {text[-20:]!r}, which holds none of the end tokens "
            f"{named(tokenizer, end_ids)}: a student trained on it never learns to stop. Declare the turn's "
            "closing token under eos_token_id in the model's generation_config.json, or use a template that "
            "writes an end token after every answer."
        )
    return through_end(tokenizer, ids, end_ids)


def _apply(tokenizer: Tokenizer, messages: Sequence[Message], *, answer_follows: bool) -> str:
    from jinja2.exceptions import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data holds messages, but this tokenizer has no chat template, so there is no agreed way to "
            "write them as text. Either set one (tokenizer.chat_template, or chat_template.jinja in the "
            "model folder), or give the prompts as plain text."
        )
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(
                f"a message must hold a 'role' and a 'content', both texts, but here is {dict(message)!r}. "
                "Other contents (tool calls, images) are not trained on; write them as text."
            )
    try:
        # Always as text: called for ids, templates return a mapping, and its length is not a token count.
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=answer_follows
        )
    except TemplateError as problem:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"the chat template refuses a conversation with the roles ({roles}): {problem}. Change the "
            "messages to what this model's template accepts, or give plain text."
        ) from problem
    return str(rendered)


def _check_not_empty(completion: str) -> None:
    if not completion.strip():
        raise DataError(
            f"the completion {completion!r} is empty, so only the end token would be learned. Give it a "
            "text, or leave the row out."
        )


def _check_holds(rendering: str, content: str) -> None:
    """Templates may trim or re-space an answer; they may not leave any of it out."""
    if "".join(content.split()) not in "".join(rendering.split()):
        raise DataError(
            f"the chat template loses the answer: {content[:60]!r} does not occur in what it renders "
            f"(…{rendering[-60:]!r}), so the student would be trained on something else. Fix the template, "
            "or give prompt and completion as plain text."
        )
