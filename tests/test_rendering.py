"""Rendering: what is trained, behind which prompt, checked by decoding back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from stillroom.data.rendering import Rendered, end_ids, render_example, render_messages, render_prompt
from stillroom.data.tokens import encode, encode_continuation, start_ids
from stillroom.errors import DataError
from tokenizers_in_code import (
    BOS,
    CHATML,
    CHATML_WITH_START,
    CLOSES_ONLY_THE_LAST,
    DROPS_OLD_REASONING,
    EOS,
    IM_END,
    LOSES_ANSWERS,
    PROMPT_IS_NO_PREFIX,
    WITHOUT_END,
    byte_tokenizer,
)

ENDS = frozenset({EOS, IM_END})
ASK = [{"role": "user", "content": "Hi"}]
TWO_PAIRS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "uno"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "dos"},
]


def trained(tokenizer, sample: Rendered) -> str:
    ids = [i for i, on in zip(sample.completion_ids, sample.completion_mask, strict=True) if on]
    return tokenizer.decode(ids)


def prefixes_of_trained_runs(sample: Rendered) -> list[tuple[int, ...]]:
    """The ids that stand before each run of trained tokens."""
    mask = (False, *sample.completion_mask)
    starts = [at for at in range(len(mask) - 1) if mask[at + 1] and not mask[at]]
    return [sample.prompt_ids + sample.completion_ids[:at] for at in starts]


# --- start tokens -----------------------------------------------------------------------------------


def test_report_20_there_is_exactly_one_start_token_whoever_writes_it():
    adds = {"prepends_start": True}
    cases = [
        (byte_tokenizer(**adds), "plain text"),
        (byte_tokenizer(**adds), "<s>plain text that brings its own"),
        (byte_tokenizer(**adds), ""),
        (byte_tokenizer(template=CHATML_WITH_START, **adds), ASK),
        (byte_tokenizer(template=CHATML, **adds), ASK),
        (byte_tokenizer(template=CHATML_WITH_START), ASK),
    ]
    for tokenizer, prompt in cases:
        ids = render_prompt(tokenizer, prompt)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    # What report 20 saw: the template writes one and the tokenizer adds one.
    tokenizer = cases[3][0]
    twice = tokenizer(tokenizer.apply_chat_template(ASK, tokenize=False))["input_ids"]
    assert twice[:2] == [BOS, BOS]


def test_report_20_the_training_prompt_is_the_rollout_prompt():
    for prompt in ("plain", ASK):
        tokenizer = byte_tokenizer(template=CHATML_WITH_START, prepends_start=True)
        assert render_example(tokenizer, prompt, "yes", ENDS).prompt_ids == render_prompt(tokenizer, prompt)


def test_a_tokenizer_that_writes_no_start_token_by_default_gets_none():
    tokenizer = byte_tokenizer()
    assert tokenizer.bos_token_id == BOS
    assert start_ids(tokenizer) == ()
    assert tokenizer.decode(render_prompt(tokenizer, "abc")) == "abc"


def test_two_start_tokens_are_refused():
    with pytest.raises(DataError, match="two start tokens"):
        render_prompt(byte_tokenizer(), "<s><s>abc")


def test_a_real_tokenizer_gives_the_published_ids(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    assert render_prompt(tokenizer, "Once upon a time") == (1, 403, 407, 261, 378)
    assert render_prompt(tokenizer, "") == (1,)


# --- end tokens -------------------------------------------------------------------------------------


def test_report_19_all_declared_end_ids_count():
    tokenizer = byte_tokenizer()
    assert end_ids(GenerationConfig(eos_token_id=[5, 7]), tokenizer) == {EOS, 5, 7}
    assert end_ids(GenerationConfig(eos_token_id=7), tokenizer) == {EOS, 7}
    assert end_ids(GenerationConfig(), tokenizer) == {EOS}
    model = SimpleNamespace(
        generation_config=GenerationConfig(eos_token_id=[9]), config=SimpleNamespace(eos_token_id=8)
    )
    assert end_ids(model, tokenizer) == {EOS, 8, 9}
    tokenizer.eos_token = None
    assert end_ids(GenerationConfig(), tokenizer) == frozenset()


def test_report_19_a_completion_that_ends_with_another_declared_end_is_not_closed_twice():
    tokenizer = byte_tokenizer()
    sample = render_example(tokenizer, "q", "ab<|im_end|>", ENDS)
    assert tokenizer.decode(sample.completion_ids) == "ab<|im_end|>"
    assert sample.num_trained == 3


def test_report_18_the_end_token_is_trained_although_padding_shares_its_id():
    tokenizer = byte_tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    sample = render_example(tokenizer, "q", "ab", ENDS)
    assert sample.completion_ids[-1] == tokenizer.pad_token_id
    assert sample.completion_mask == (True, True, True)


def test_report_18_a_letter_whose_id_is_the_padding_id_is_trained():
    tokenizer = byte_tokenizer(pad="b")
    sample = render_example(tokenizer, "q", "abba", ENDS)
    assert tokenizer.pad_token_id in sample.completion_ids
    assert sample.num_trained == 5


def test_an_end_token_inside_a_completion_is_refused():
    tokenizer = byte_tokenizer(template=CHATML)
    for prompt in ("q", ASK):
        with pytest.raises(DataError, match="before 'then more"):
            render_example(tokenizer, prompt, "first</s>then more", ENDS)


def test_a_completion_without_any_known_end_token_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="cannot close a completion"):
        render_example(tokenizer, "q", "a", frozenset())
    with pytest.raises(DataError, match="cannot close a completion"):
        render_example(tokenizer, "q", "a", ENDS)
    assert render_example(tokenizer, "q", "a", frozenset({IM_END})).completion_ids[-1] == IM_END


def test_a_prompt_never_ends_with_an_end_token():
    tokenizer = byte_tokenizer(template=CHATML, prepends_start=True)
    for prompt in ("abc", ASK):
        assert render_prompt(tokenizer, prompt)[-1] not in ENDS


# --- conversations ----------------------------------------------------------------------------------


def test_report_21_the_turn_end_is_trained_after_every_assistant_turn_and_after_no_other():
    tokenizer = byte_tokenizer(template=CHATML)
    [sample] = render_messages(tokenizer, TWO_PAIRS, ENDS)
    assert trained(tokenizer, sample) == "uno<|im_end|>dos<|im_end|>"
    assert (sample.prompt_ids + sample.completion_ids).count(IM_END) == 4
    hole = [i for i, on in zip(sample.completion_ids, sample.completion_mask, strict=True) if not on]
    assert tokenizer.decode(hole) == "\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"


def test_report_21_a_sample_ends_with_its_last_trained_token():
    tokenizer = byte_tokenizer(template=CHATML)
    for sample in (*render_messages(tokenizer, TWO_PAIRS, ENDS), render_example(tokenizer, ASK, "a", ENDS)):
        assert sample.completion_mask[-1]
        assert sample.completion_ids[-1] == IM_END


def test_report_23_a_template_without_markers_trains_the_answer_and_its_end_and_nothing_else():
    tokenizer = byte_tokenizer(template=CHATML)
    messages = [*ASK, {"role": "assistant", "content": "Hello!"}]
    theirs = tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert sum(theirs["assistant_masks"]) == 0  # the silent zero of report 23
    [sample] = render_messages(tokenizer, messages, ENDS)
    assert sample.num_trained == len("Hello!") + 1
    assert sample.num_trained < len(sample.prompt_ids) + len(sample.completion_ids)


def test_report_23_nothing_to_train_is_an_error():
    tokenizer = byte_tokenizer(template=CHATML)
    with pytest.raises(DataError, match="no assistant turn"):
        render_messages(tokenizer, ASK, ENDS)
    with pytest.raises(DataError, match="no token of this sample is trained"):
        Rendered((1,), (2, 3), (False, False))
    for prompt in ("q", ASK):
        with pytest.raises(DataError, match="is empty"):
            render_example(tokenizer, prompt, "  ", ENDS)


def test_an_unanswered_last_turn_is_refused_rather_than_dropped():
    with pytest.raises(DataError, match="'user' turn that nothing answers"):
        render_messages(byte_tokenizer(template=CHATML), TWO_PAIRS[:3], ENDS)


def test_report_24_dropped_reasoning_gives_one_sample_a_turn_behind_the_served_prompt():
    tokenizer = byte_tokenizer(template=DROPS_OLD_REASONING)
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"q{turn}"})
        messages.append({"role": "assistant", "content": f"<think>r{turn}</think>a{turn}"})
    samples = render_messages(tokenizer, messages, ENDS)
    assert len(samples) == 3
    for turn, sample in enumerate(samples):
        assert sample.prompt_ids == render_prompt(tokenizer, messages[: 2 * turn + 1])
        assert trained(tokenizer, sample) == f"<think>r{turn}</think>a{turn}<|im_end|>"
        assert all(sample.completion_mask)
    # The old reasoning is gone from the last prompt: one joined sample would have shown it.
    assert "r0" not in tokenizer.decode(samples[2].prompt_ids)
    [joined] = render_messages(byte_tokenizer(template=CHATML), messages, ENDS)
    assert "r0" in trained(tokenizer, joined)


def test_report_24_a_template_that_closes_only_the_last_turn_is_split():
    tokenizer = byte_tokenizer(template=CLOSES_ONLY_THE_LAST)
    samples = render_messages(tokenizer, TWO_PAIRS, frozenset({IM_END}))
    assert [trained(tokenizer, s) for s in samples] == ["uno<|im_end|>", "dos<|im_end|>"]
    assert samples[1].prompt_ids == render_prompt(tokenizer, TWO_PAIRS[:3])


texts = st.text(alphabet="ab.m \n日é", min_size=1, max_size=6).filter(lambda text: text.strip())


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(st.tuples(texts, texts), min_size=1, max_size=3), merged=st.booleans())
def test_report_24_every_trained_turn_stands_behind_what_the_serving_path_renders(contents, merged):
    merges = [("a", "b"), (".", "m"), ("Ċ", "a")] if merged else []
    tokenizer = byte_tokenizer(template=CHATML, merges=merges, prepends_start=True)
    messages = []
    for question, answer in contents:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    samples = render_messages(tokenizer, messages, ENDS)
    served = [render_prompt(tokenizer, messages[: at + 1]) for at in range(0, len(messages), 2)]
    assert [prefix for sample in samples for prefix in prefixes_of_trained_runs(sample)] == served
    assert "".join(trained(tokenizer, s) for s in samples) == "".join(a + "<|im_end|>" for _, a in contents)


def test_report_25_messages_without_a_template_name_the_two_ways_out():
    with pytest.raises(DataError, match=r"no chat template.*Either set one.*plain text"):
        render_prompt(byte_tokenizer(), ASK)


def test_earlier_assistant_turns_of_a_prompt_are_not_trained():
    tokenizer = byte_tokenizer(template=CHATML)
    sample = render_example(tokenizer, TWO_PAIRS[:3], "dos", ENDS)
    assert "uno" in tokenizer.decode(sample.prompt_ids)
    assert trained(tokenizer, sample) == "dos<|im_end|>"


# --- the border between prompt and completion -------------------------------------------------------


def test_report_26_a_merge_across_the_border_changes_neither_prompt_nor_mask():
    tokenizer = byte_tokenizer(merges=[(".", "m")])
    assert len(encode(tokenizer, "x.my")) == 3  # x, .m, y: the merge would swallow the prompt's last id
    sample = render_example(tokenizer, "x.", "my", ENDS)
    assert sample.prompt_ids == render_prompt(tokenizer, "x.")
    assert tokenizer.decode(sample.prompt_ids + sample.completion_ids) == "x.my</s>"
    assert sample.num_trained == 3


def test_report_26_a_template_call_that_returns_a_mapping_does_not_shorten_the_prompt():
    tokenizer = byte_tokenizer(template=CHATML)
    assert len(tokenizer.apply_chat_template(ASK, add_generation_prompt=True)) == 2  # keys, not tokens
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_prompt(tokenizer, ASK) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(render_prompt(tokenizer, ASK)) == len("user\nHi\nassistant\n") + 3


def test_report_26_a_prompt_that_its_own_rendering_does_not_continue_is_refused():
    with pytest.raises(DataError, match="not a prefix"):
        render_example(byte_tokenizer(template=PROMPT_IS_NO_PREFIX), ASK, "yes", ENDS)


def test_a_completion_gets_no_space_that_nobody_wrote(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    for prompt, completion in [
        ("Once upon a time", ", there was a girl."),
        ("Once upon a ti", "me there was"),
        ("Once upon a time", " there\nwas\n\na dog"),
        ("", "Once upon a time"),
    ]:
        sample = render_example(tokenizer, prompt, completion, end_ids(None, tokenizer))
        assert sample.completion_ids[-1] == tokenizer.eos_token_id
        joined = sample.prompt_ids + sample.completion_ids
        assert tokenizer.decode(joined, skip_special_tokens=True) == prompt + completion
    # Encoded on its own, the completion would begin with the space that this tokenizer puts before a text.
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "me")[0]).startswith("▁")
    assert not tokenizer.convert_ids_to_tokens(encode_continuation(tokenizer, "me")[0]).startswith("▁")


def test_a_completion_behind_an_empty_prompt_begins_a_text_as_in_pretraining(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    sample = render_example(tokenizer, "", "Once upon a time", end_ids(None, tokenizer))
    assert sample.prompt_ids + sample.completion_ids == (1, 403, 407, 261, 378, 2)


# --- templates that cannot be used ------------------------------------------------------------------


def test_a_template_that_loses_the_answer_is_refused():
    tokenizer = byte_tokenizer(template=LOSES_ANSWERS)
    with pytest.raises(DataError, match="loses the answer: 'yes'"):
        render_example(tokenizer, ASK, "yes", ENDS)
    with pytest.raises(DataError, match="loses the answer: 'uno'"):
        render_messages(tokenizer, TWO_PAIRS, ENDS)


def test_a_template_that_trims_an_answer_does_not_lose_it():
    tokenizer = byte_tokenizer(template=CHATML.replace("m['content']", "m['content'] | trim"))
    assert trained(tokenizer, render_example(tokenizer, ASK, " yes \n", ENDS)) == "yes<|im_end|>"


def test_a_template_that_writes_no_end_token_is_refused():
    with pytest.raises(DataError, match="never learns to stop"):
        render_example(byte_tokenizer(template=WITHOUT_END), ASK, "yes", ENDS)


def test_a_template_that_refuses_a_role_says_so():
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match=r"roles \(user\).*System role not supported"):
        render_prompt(byte_tokenizer(template=template), ASK)


def test_contents_that_are_no_texts_are_refused():
    with pytest.raises(DataError, match="both texts"):
        render_prompt(byte_tokenizer(template=CHATML), [{"role": "user", "content": None}])


def test_an_empty_prompt_needs_a_start_token():
    assert render_example(byte_tokenizer(prepends_start=True), "", "a", ENDS).prompt_ids == (BOS,)
    with pytest.raises(DataError, match="prompt is empty"):
        render_example(byte_tokenizer(), "", "a", ENDS)
