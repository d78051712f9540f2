"""A Llama-architecture GGUF file becomes an ordinary Hugging Face model and tokenizer.

transformers can read GGUF too, but takes a minute for a small model and returns one that refuses to be
saved. Here each tensor is dequantised once into a fresh model. Two things differ between the formats:

* names (``blk.3.attn_q`` is ``model.layers.3.self_attn.q_proj``), and
* the rows of the query and key projections: GGUF holds the two halves of each rotary pair side by side,
  Hugging Face holds all first halves of a head before all second halves.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stillroom.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # GGUF's token type for special tokens


def require_gguf() -> None:
    """Say early that the reader is missing, before anything is downloaded.

    Raises:
        MissingExtraError: the ``gguf`` package is not installed.
    """
    if find_spec("gguf") is None:
        raise MissingExtraError(
            "package 'gguf' is not installed, so a GGUF file cannot be read. Install it with "
            "`pip install 'stillroom[gguf]'`."
        )


def open_gguf(path: Path) -> GGUFReader:
    """A reader over the file; the same error as `require_gguf` without the package."""
    require_gguf()
    from gguf import GGUFReader

    return GGUFReader(path)


def convert_model(reader: GGUFReader) -> LlamaForCausalLM:
    """The model, in float32, with every tensor dequantised.

    Raises:
        DataError: the file holds another architecture, or tensors that do not fit it.
    """
    from gguf import dequantize

    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise DataError(
            f"the GGUF file holds architecture {architecture!r}, but only 'llama' is converted. Use the "
            "model's Hugging Face folder instead."
        )
    names = [tensor.name for tensor in reader.tensors]
    config = _config(reader, tied="output.weight" not in names)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if (kind := tensor.name.split(".")[-2]) in heads:
            values = halves_apart(values, heads[kind])
        state[_renamed(tensor.name)] = torch.from_numpy(values.copy())  # the file's own memory is read-only
        if done % 68 == 0 or done == len(names):
            logger.info("dequantised %d of %d tensors", done, len(names))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as problem:
        raise DataError(
            f"the tensors of the GGUF file do not fit its own description: {problem}. The file is not a plain "
            "Llama; use the model's Hugging Face folder instead."
        ) from problem
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def convert_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the file carries, with its chat template.

    Raises:
        DataError: the file holds another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DataError(
            f"the GGUF file holds a tokenizer of kind {kind}, but only ('gpt2', 'smollm') is rebuilt: another "
            "one would cut texts differently. Use the model's Hugging Face folder instead."
        )
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": every digit apart, then GPT-2's splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens(control)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def halves_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, per head from (a₀ b₀ a₁ b₁ …) to (a₀ a₁ … b₀ b₁ …).

    Args:
        values: ``[heads · head_dim, columns]``.
        heads: number of heads in it.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(reader: GGUFReader, *, tied: bool) -> LlamaConfig:
    heads = _field(reader, "llama.attention.head_count")
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        # GGUF stores it as a float32; 9.999999747e-06 means 1e-5.
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=tied,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _renamed(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INSIDE:
        return f"model.layers.{parts[1]}.{_INSIDE[parts[2]]}.{parts[3]}"
    raise DataError(
        f"the GGUF file holds a tensor {name!r} that a plain Llama has no place for, so the converted model "
        "would not be the same. Use the model's Hugging Face folder instead."
    )


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise DataError(
            f"the GGUF file does not state {name!r}, so the model cannot be rebuilt. Download it again, or use "
            "the model's Hugging Face folder."
        )
    return field.contents()
