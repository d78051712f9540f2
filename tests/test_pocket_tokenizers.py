"""The two tokenizer families read and write the whole world, and keep the symbols of chains apart."""

from __future__ import annotations

import pytest

from stillroom.errors import ConfigError
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import Chains, gold
from stillroom.pocket.facts import Facts
from stillroom.pocket.strings import Strings


@pytest.fixture(scope="module", params=tokenizers.FAMILIES)
def tokenizer(request):
    return tokenizers.build(request.param)


def test_special_tokens_have_the_ids_that_the_models_are_made_for(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.encode("7a=?")[0] == 1
    assert 1 not in tokenizer.encode("#4", add_special_tokens=False)


def test_the_whole_world_survives_a_round_trip(tokenizer):
    for task in (Chains(), Facts(), Strings()):
        for split in task.splits:
            for example in task.sample(split, 150, seed=9):
                for text in (example.prompt, example.completion):
                    ids = tokenizer.encode(text, add_special_tokens=False)
                    assert tokenizer.unk_token_id not in ids
                    assert tokenizer.decode(ids) == text


def test_every_symbol_of_a_chain_is_one_token(tokenizer):
    for example in Chains().sample("ood", 200, seed=4):
        path = example.meta["path"]
        for text in (example.prompt, *(gold(example.meta["start"], path, j) for j in range(len(path) + 1))):
            assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)) == list(
                text
            )


def test_a_chain_cut_anywhere_is_still_one_token_a_symbol(tokenizer):
    for text in ("7acfbd=?", "7a4;4c9;9f3#3"):
        for end in range(1, len(text)):
            assert len(tokenizer.encode(text[:end], add_special_tokens=False)) == end


def test_the_families_differ_where_they_may():
    chars, bpe = (tokenizers.build(f) for f in tokenizers.FAMILIES)
    assert 48 <= len(chars) <= 96
    assert 256 <= len(bpe) <= 512
    text = "say capital of land with code TH?"
    assert len(chars.tokenize(text)) == len(text) > 2 * len(bpe.tokenize(text))


def test_a_character_from_outside_the_world_is_unknown_to_chars_and_bytes_to_bpe():
    chars, bpe = (tokenizers.build(f) for f in tokenizers.FAMILIES)
    assert chars.encode("é", add_special_tokens=False) == [chars.unk_token_id]
    assert bpe.decode(bpe.encode("é", add_special_tokens=False)) == "é"


def test_building_a_tokenizer_twice_gives_the_same_ids():
    for family in tokenizers.FAMILIES:
        first, second = tokenizers.build(family), tokenizers.build(family)
        assert first.get_vocab() == second.get_vocab()
        assert first.encode("what capital has Peru?") == second.encode("what capital has Peru?")


def test_an_unknown_family_gets_a_near_match():
    with pytest.raises(ConfigError, match="Did you mean 'chars'"):
        tokenizers.build("char")
