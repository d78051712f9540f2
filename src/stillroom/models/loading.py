"""Models and tokenizers come in here: one function per role, and every check that needs the weights.

Weights are read from safetensors only and no model's own code is run. A checkpoint that would leave some
tensor random, or that holds NaN, is refused here rather than found out hours later. A folder with a LoRA
adapter loads like any other: its base first, widened where the adapter brought tokens of its own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stillroom.errors import ConfigError, unknown_name
from stillroom.models import lora
from stillroom.models.paths import check_distinct, near_folders, resolve

__all__ = [
    "check_distinct",
    "check_finite",
    "load_model",
    "load_student",
    "load_teacher",
    "load_tokenizer",
    "num_parameters",
    "resolve",
    "warn_if_larger",
]

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or name.

    Texts are tokenised one at a time, so the tokenizer's own threads bring nothing, and in some releases
    they make every later fork of a data loader warn or hang; they are switched off unless the user's
    environment says otherwise.

    Raises:
        ConfigError: no such model, or it has no tokenizer.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    source = resolve(str(path))
    folder = Path(source)
    # Without these files transformers builds an empty tokenizer from the model type, without a word.
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "(nothing)"
        raise ConfigError(
            f"model folder {source!r} has no tokenizer, so no text can be read with it. It holds: {held}. "
            "Save the tokenizer beside the model (tokenizer.save_pretrained), or name the folder that has it."
        )
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main")
    except (OSError, ValueError) as problem:
        raise _not_loadable("tokenizer", source, problem) from problem


def load_model(
    path: str | Path,
    dtype: str = "float32",
    revision: str | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """A causal language model, in evaluation mode, checked for missing and non-finite weights.

    Args:
        path: folder, Hugging Face name, ``pocket:NAME`` or ``fetched:NAME``; or a folder with a LoRA adapter.
        dtype: ``float32``, ``bfloat16`` or ``float16``: the format of the weights in memory.
        revision: branch, tag or commit of a Hugging Face name.
        device: where to put it; default the CPU.

    Raises:
        ConfigError: unknown dtype; no such model; weights missing, of another shape, NaN or infinite.
    """
    return _load(path, dtype, revision, device, trainable=False)


def load_teacher(
    path: str | Path,
    dtype: str = "float32",
    revision: str | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """`load_model`, frozen: evaluation mode and no parameter that could receive a gradient."""
    model = load_model(path, dtype, revision, device)
    model.requires_grad_(False)
    return model.eval()


def load_student(
    path: str | Path,
    dtype: str = "float32",
    revision: str | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """`load_model` for training: training mode; of an adapter folder, the adapter is trainable."""
    return _load(path, dtype, revision, device, trainable=True).train()


def check_finite(model: torch.nn.Module, name: str) -> None:
    """Refuse a model with NaN or infinite weights.

    Raises:
        ConfigError: names the first such tensor and counts them.
    """
    broken = [key for key, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ConfigError(
            f"{name!r} holds NaN or infinite weights in {len(broken)} tensors (first: {broken[0]}), so every "
            "loss would be NaN. The run that saved it diverged or its file is damaged; use an earlier "
            "checkpoint."
        )


def num_parameters(model: torch.nn.Module) -> int:
    """Number of weights; tied tensors count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def longest_input(model: torch.nn.Module) -> int | None:
    """Most tokens that the model can read, if its config says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)  # pyright: ignore


def warn_if_larger(student: torch.nn.Module, teacher: torch.nn.Module) -> None:
    """Say so if the student has more parameters than its teacher; legal, but rarely meant."""
    of_student, of_teacher = num_parameters(student), num_parameters(teacher)
    if of_student > of_teacher:
        logger.warning(
            "the student has %s parameters, more than its teacher's %s: are the two exchanged?",
            f"{of_student:,}",
            f"{of_teacher:,}",
        )


def _load(
    path: str | Path,
    dtype: str,
    revision: str | None,
    device: str | torch.device | None,
    *,
    trainable: bool,
) -> PreTrainedModel:
    if dtype not in DTYPES:
        raise ConfigError(f"{unknown_name('dtype', dtype, DTYPES)} Weights need one of these formats.")
    if dtype != "float32" and torch.device(device or "cpu").type == "cpu" and not torch.cuda.is_available():
        logger.warning(
            "%s is loaded as %s on a CPU, where that is about 40 times slower than float32 on most machines; "
            "use dtype float32",
            path,
            dtype,
        )
    source = resolve(str(path))
    if (Path(source) / "adapter_config.json").is_file():
        base, base_revision = lora.base_of(Path(source))
        model = _load_weights(resolve(base), DTYPES[dtype], base_revision)
        model = lora.attach(model, Path(source), trainable=trainable)
    else:
        model = _load_weights(source, DTYPES[dtype], revision)
    check_finite(model, str(path))
    return model.to(device) if device is not None else model  # pyright: ignore[reportArgumentType]


def _load_weights(source: str, dtype: torch.dtype, revision: str | None) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            source, dtype=dtype, revision=revision or "main", use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise _not_loadable("model", source, problem) from problem
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model {source!r} lacks {len(missing)} tensors that its config.json asks for (first: "
            f"{missing[0]}), which would start random. Save the model again, or correct its config."
        )
    if unexpected := sorted(info["unexpected_keys"]):
        logger.warning(
            "%s holds %d tensors that its config.json has no place for (first: %s); they are not used",
            source,
            len(unexpected),
            unexpected[0],
        )
    return model


def _not_loadable(what: str, source: str, problem: Exception) -> ConfigError:
    reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    if Path(source).is_dir():
        return ConfigError(
            f"the {what} in {source!r} cannot be loaded: {reason} Stillroom reads Hugging Face folders with "
            "safetensors weights and runs no code of theirs. Save or convert it again."
        )
    offline = " HF_HUB_OFFLINE is set, so only cached names can be found." if _is_offline() else ""
    near = near_folders(source)
    hint = f" Did you mean the folder {' or '.join(repr(name) for name in near)}?" if near else ""
    return ConfigError(
        f"{source!r} is no folder here, and Hugging Face gives no {what} of that name: {reason}{offline}{hint}"
        " Give an existing folder or a name that is in the cache or can be reached."
    )


def _is_offline() -> bool:
    return any(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
