"""Tiny models and a character tokenizer, built in code."""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = string.ascii_letters + string.digits + " .,:;=?!#+-*/()<>|\n"


def char_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One id per character; <pad> 0, <bos> 1, <eos> 2, <unk> 3."""
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    names = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        **special,
    }
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def tiny_llama(
    vocab_size: int = 84, *, seed: int = 0, hidden: int = 16, layers: int = 2, scale: float = 0.5
) -> LlamaForCausalLM:
    """A random Llama whose logits are far from uniform (weights drawn with standard deviation `scale`)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=scale,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()
