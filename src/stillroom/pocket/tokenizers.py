"""The two tokenizer families of the pocket world.

``chars`` has one id for each character of the world's text; any other character becomes ``<unk>``.
``bpe`` is a byte-level BPE trained on the world's own text. It merges only words that start with a capital
or are followed by a space or a colon, which is to say the wording of questions; digits, doors, the symbols
of chains and the operands of string instructions stay one token each, whatever stands beside them, so that
a chain has the same number of tokens in both families.

Both put ``<bos>`` before a text when special tokens are asked for, as Llama's tokenizer does. A model reads
``<bos>`` prompt completion ``<eos>``, prompt and completion being encoded apart and joined.
"""

from __future__ import annotations

import string
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stillroom.errors import ConfigError, unknown_name
from stillroom.pocket.chains import Chains
from stillroom.pocket.facts import Facts
from stillroom.pocket.strings import Strings

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 in both families."""
CHARACTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase + " #;=?:"
BPE_SIZE = 448
MERGED_WORDS = "[A-Z][a-z]+| ?[a-z]+(?=[ :])|[\\s\\S]"
FAMILIES = ("chars", "bpe")


def build(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, made anew (deterministic; under a second).

    Raises:
        ConfigError: the family is unknown.
    """
    if family not in FAMILIES:
        raise ConfigError(unknown_name("tokenizer family", family, FAMILIES))
    tokenizer = _characters() if family == "chars" else _bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _characters() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(MERGED_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_world_text(), trainer)
    return tokenizer


def _world_text() -> Iterator[str]:
    for example in (
        *Chains().sample("train", 300, seed=0),
        *Facts().examples("train"),
        *Strings().sample("train", 1000, seed=0),
    ):
        yield str(example.prompt)
        yield str(example.completion)
