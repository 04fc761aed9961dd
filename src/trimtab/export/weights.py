"""Where exported weights come from: a safetensors folder, or the base model with its LoRA merged in.

Everything stays on the CPU; nothing here writes GGUF.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trimtab.config import Config
from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError, TrimtabError
from trimtab.export.files import whole_folder
from trimtab.export.tensors import Entry
from trimtab.models.weight_files import file_tensors, model_tensors
from trimtab.recipes.table import recipe_of

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Beside = Callable[[Path], None]
"""Writes what else belongs into a model's folder."""
TIED_PARTS = ("lm_head", "embed_tokens")


def folder_entries(folder: Path) -> list[Entry]:
    """Every tensor of a folder's safetensors files; values are read only when asked for."""
    held = model_tensors(folder, str(folder))
    if held is None:
        held = {}
        for file in sorted(folder.glob("*.safetensors")):
            held |= file_tensors(file, str(folder))
    if not held:
        raise RequestError.of(
            f"{folder}: no safetensors file", "there are no weights to export", "check the folder"
        )
    return [
        Entry(name=name, shape=stored.shape, load=partial(_read, stored.file, name))
        for name, stored in held.items()
    ]


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor


def model_entries(model: Any) -> list[Entry]:
    """Every tensor of a model in memory."""
    held = model.state_dict()
    return [Entry(name=name, shape=tuple(held[name].shape), load=held[name].detach) for name in held]


def tuned_model(config: Config, weights: Path, *, progress: bool) -> tuple[Any, torch.dtype]:
    """The model of a run in fp32 on the CPU, an adapter added in; and the number format the base is stored in."""
    from trimtab.models.kept_adapter import with_adapter
    from trimtab.models.load import read_weights

    tuned = None if config.method == "lora" else weights
    stored = read_config(config.model, tuned).dtype or torch.float32
    where = _place(config.model, tuned)
    recipe = recipe_of(config)
    settings = config.model if tuned is None else config.model.model_copy(update={"name": str(tuned)})
    # fp32 for the merge: adding a small update to a 16-bit weight would round much of it away.
    model: Any = read_weights(
        settings, recipe.family, where.pop("pretrained_model_name_or_path"), dtype=torch.float32, **where
    )
    model.eval()
    if recipe.fit is not None:
        # So that the exported config tells what the model was trained with.
        recipe.fit(config, model)
    if tuned is None:
        _check_tied(model, weights)
        _check_finite(weights)
        wrapped = with_adapter(model, weights, torch_device="cpu")
        model = wrapped.merge_and_unload(progressbar=progress and sys.stderr.isatty())
        model.config.use_cache = True
    return model, stored


def read_config(model: ModelSettings, tuned: Path | None = None) -> Any:
    """The transformers config of the base model, or of a `tuned` one; RequestError when it is not there any more."""
    from transformers import AutoConfig

    where = _place(model, tuned)
    try:
        return AutoConfig.from_pretrained(**where)
    except OSError as error:
        raise RequestError.of(
            f"the base model {where['pretrained_model_name_or_path']} could not be read",
            (str(error).strip() or type(error).__name__).splitlines()[0],
            "an adapter is exported with the model it was trained on: put it back, or download it again",
        ) from error


def _place(model: ModelSettings, tuned: Path | None) -> dict[str, Any]:
    from trimtab.models import model_source
    from trimtab.models.own_code import code_options

    source = str(tuned or model_source(model))
    where = {"pretrained_model_name_or_path": source}
    revision = {"revision": model.revision} if model.revision and tuned is None else {}
    return {**where, **revision, **code_options(model, source)}


def _check_tied(model: Any, adapter: Path) -> None:
    """A LoRA on one end of tied embeddings cannot be merged without changing the other end."""
    if not model.config.tie_word_embeddings:
        return
    names = [entry.name for entry in folder_entries(adapter)]
    found = [part for part in TIED_PARTS if any(f".{part}." in name for name in names)]
    if found:
        raise RequestError.of(
            f"{adapter}: the adapter changes {' and '.join(found)} of a model with tied embeddings",
            "merged, it would change both ends, which training did not",
            "train with lora.targets=all-linear (it leaves the head alone)",
        )


def _check_finite(adapter: Path) -> None:
    for entry in folder_entries(adapter):
        if not torch.isfinite(entry.load()).all():
            raise TrimtabError(
                f"{adapter}: tensor {entry.name} holds NaN or infinite values\n"
                "  why: the training run diverged; merged, the model would answer nothing sensible\n"
                "  change: train again with a lower training.learning_rate"
            )


def save_merged(
    target: Path, model: Any, processor: Any, *, dtype: str | None, stored: torch.dtype, beside: Beside
) -> None:
    """Save a model and its tokenizer or processor; in `dtype`, else in the number format the base was stored in."""
    with whole_folder(target) as scratch:
        model.to(TORCH_DTYPES[dtype] if dtype else stored).save_pretrained(scratch)
        processor.save_pretrained(scratch)
        beside(scratch)


def copy_model(target: Path, folder: Path, beside: Beside) -> None:
    """Copy a fully tuned model's folder as it is."""
    with whole_folder(target) as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        beside(scratch)


def check_merged_dtype(dtype: str | None) -> None:
    """Raise RequestError for a number format that safetensors export does not write."""
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise RequestError.of(
            f"--dtype {dtype} with --to merged: not a number format of a transformers model",
            "quantised formats belong to GGUF files",
            f"take one of {', '.join(TORCH_DTYPES)}, or leave --dtype out to keep the base model's",
        )
