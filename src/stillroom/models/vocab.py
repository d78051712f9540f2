"""Do two models mean the same strings by the same ids, and which logit columns do they share?

These are two separate questions. *Id agreement* compares the tokenizers: every id that both own must
name the same string. *Width* compares the heads: families pad their embeddings to different multiples,
so a 0.5 B and a 7 B model with one tokenizer may have 151,936 and 152,064 columns for about 151,700
tokens. The surplus columns name no token; they are cut off before the softmax, on both sides, so that
they carry exactly no mass and no gradient (a zero logit is not zero probability).

No ``from __future__ import annotations`` here: it would defeat the shape checks.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillroom.errors import VocabularyError

logger = logging.getLogger(__name__)

_BY_TEXT = (
    "Choose a student of the teacher's family, or distil by text, which needs no shared ids "
    "(`completions: teacher`, sequence-level distillation)"
)


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The ids that student and teacher agree on: 0 … num_shared - 1."""

    num_shared: int
    student_width: int
    """Logit columns of the student's head; at least ``num_shared``."""
    teacher_width: int
    student_extra: int
    """Real tokens that only the student has; they cannot occur in shared text."""
    teacher_extra: int
    """Real tokens that only the teacher has; their mass is removed and the rest renormalised."""
    same_tokenizer: bool
    """Equal fingerprints. If False, the ids agree but a text may be cut into different ones."""

    def require(self, ids: Iterable[int]) -> None:
        """Refuse ids that lie outside the shared part.

        Raises:
            VocabularyError: some id is not below ``num_shared``.
        """
        outside = sorted({i for i in ids if not 0 <= i < self.num_shared})
        if outside:
            raise VocabularyError(
                f"{len(outside)} ids (first: {outside[:5]}) lie outside the {self.num_shared} that student "
                "and teacher share, so one of the models gives them no probability. Remove the rows that use "
                f"these tokens. {_BY_TEXT}."
            )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A SHA-256 over everything that decides which ids a text becomes.

    Covers the id → token table, the special tokens and the serialised pipeline (normaliser, splitter,
    merges, post-processor); leaves out what only shapes batches (padding, truncation, the name) and the
    chat template, which has its own hash.

    Returns:
        64 hexadecimal digits.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pipeline = json.loads(backend.to_str()) if backend is not None else {}
    # Calling a tokenizer with padding or truncation leaves traces here that change no id.
    pipeline.pop("padding", None)
    pipeline.pop("truncation", None)
    return _sha256(
        {
            "tokens": sorted((i, token) for token, i in tokenizer.get_vocab().items()),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "pipeline": pipeline,
        }
    )


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A SHA-256 over the chat template: 64 hexadecimal digits, also when there is none."""
    return _sha256(getattr(tokenizer, "chat_template", None))


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shared_vocabulary(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    student_width: int,
    teacher_width: int,
) -> SharedVocabulary:
    """Compare two vocabularies id by id, and their heads by width.

    Args:
        student_tokenizer: names the student's ids.
        teacher_tokenizer: names the teacher's ids.
        student_width: columns of the student's logits.
        teacher_width: columns of the teacher's logits.

    Returns:
        The shared part: all ids up to the last one that both tokenizers own. Extra tokens at the end of
        either side, and padded columns, are counted and logged.

    Raises:
        VocabularyError: an id below ``num_shared`` names different strings, or a tokenizer has more ids
            than its model has columns.
    """
    student = _tokens(student_tokenizer, student_width, "student")
    teacher = _tokens(teacher_tokenizer, teacher_width, "teacher")
    num_shared = min(max(student), max(teacher)) + 1
    conflicts = [i for i in range(num_shared) if student.get(i) != teacher.get(i)]
    if conflicts:
        shown = ", ".join(
            f"id {i}: student {student.get(i)!r}, teacher {teacher.get(i)!r}" for i in conflicts[:3]
        )
        raise VocabularyError(
            f"{len(conflicts)} of {num_shared} ids name different strings ({shown}), so the teacher would "
            f"score other words than the student writes. {_BY_TEXT}."
        )
    shared = SharedVocabulary(
        num_shared=num_shared,
        student_width=student_width,
        teacher_width=teacher_width,
        student_extra=sum(i >= num_shared for i in student),
        teacher_extra=sum(i >= num_shared for i in teacher),
        same_tokenizer=fingerprint(student_tokenizer) == fingerprint(teacher_tokenizer),
    )
    _log(shared, unnamed=num_shared - sum(i < num_shared for i in student))
    return shared


def restrict(logits: Float[Tensor, "*rows width"], shared: SharedVocabulary) -> Float[Tensor, "*rows shared"]:
    """The shared columns, to be cut *before* the softmax: p(i) = exp(z_i) / Σ_{j < num_shared} exp(z_j).

    Args:
        logits: of either model, at its full width or already restricted.
        shared: from `shared_vocabulary`.

    Returns:
        A view of the first ``num_shared`` columns; dtype and device stay as they are.

    Raises:
        VocabularyError: the width belongs to neither model.
    """
    width = logits.shape[-1]
    if width not in (shared.student_width, shared.teacher_width, shared.num_shared):
        raise VocabularyError(
            f"logits with {width} columns belong to neither the student ({shared.student_width}) nor the "
            f"teacher ({shared.teacher_width}), so their ids are unknown. Compare the vocabularies again, "
            "with the width of the model that made them."
        )
    return logits[..., : shared.num_shared]


def _tokens(tokenizer: PreTrainedTokenizerBase, width: int, role: str) -> dict[int, str]:
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    if not tokens:
        raise VocabularyError(
            f"the {role}'s tokenizer has no tokens, so no text can be read. Check the files in its folder."
        )
    beyond = sum(i >= width for i in tokens)
    if beyond:
        raise VocabularyError(
            f"the {role}'s tokenizer has {beyond} ids that its model has no logit column for (ids up to "
            f"{max(tokens)}, columns {width}), so texts that use them cannot be scored. Resize the "
            "embeddings (model.resize_token_embeddings), or use the tokenizer that belongs to this model."
        )
    return tokens


def _log(shared: SharedVocabulary, unnamed: int) -> None:
    if shared.student_extra or shared.teacher_extra:
        logger.warning(
            "distilling on the %d tokens that both models have; %d are the student's only, %d the teacher's "
            "only, and get no mass",
            shared.num_shared,
            shared.student_extra,
            shared.teacher_extra,
        )
    if unnamed:
        logger.warning(
            "%d of the shared ids name no token in either tokenizer; they stay in the loss", unnamed
        )
    if not shared.same_tokenizer:
        logger.warning(
            "ids agree but the tokenizers differ elsewhere (special tokens, merges or normalisation): "
            "the teacher reads texts cut the student's way"
        )
