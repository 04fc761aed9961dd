"""Puts a kept adapter on a model, whole: each of its tensors into its place, and none of the model's places empty.

PEFT leaves out what does not fit and goes on; here that is refused, with the names. Only safetensors are read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError, some_of
from trimtab.models.weight_files import file_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def with_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """The model with the adapter of a folder; `options` go to PEFT."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError

    _check_config(folder)
    stored = {name: held.shape for name, held in file_tensors(folder / WEIGHTS, f"adapter {folder}").items()}
    try:
        adapted = PeftModel.from_pretrained(model, str(folder), local_files_only=True, **options)
        # As it was saved: with the embeddings where they were adapted. By itself PEFT would ask the hub.
        embeddings = any("lora_" not in name for name in stored)
        made = get_peft_model_state_dict(adapted, save_embedding_layers=embeddings)
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ImportError,
        RuntimeError,
        re.error,
        SafetensorError,
    ) as error:
        told = [line.strip() for line in str(error).splitlines() if line.strip()]
        # torch says "Error(s) in loading state_dict for …:" first, and which tensor only then.
        why = " ".join(told[:2]) if told else type(error).__name__
        raise RequestError.of(
            f"adapter {folder}: it does not go on {type(model).__name__}",
            why[:400],
            "give the adapter the model that it was trained on, with its own adapter_config.json",
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in made.items()}
    _check_same(folder, stored, wanted, type(model).__name__)
    return adapted


def _check_same(
    folder: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], model: str
) -> None:
    extra, lacking = sorted(stored.keys() - wanted.keys()), sorted(wanted.keys() - stored.keys())
    if extra or lacking:
        found = [f"holds {some_of(extra, 3)}, which {model} has no place for"] if extra else []
        found += [f"lacks {some_of(lacking, 3)}"] if lacking else []
        raise RequestError.of(
            f"adapter {folder}: {WEIGHTS} {' and '.join(found)}",
            "what has no place would be left out, and what is lacking would do nothing or start anew",
            f"give the adapter the model that it was trained on, with the {CONFIG} that was saved with it",
        )
    if odd := [name for name in sorted(stored) if stored[name] != wanted[name]]:
        raise RequestError.of(
            f"adapter {folder}: {odd[0]} has the shape {stored[odd[0]]}, and the model takes {wanted[odd[0]]}",
            f"{CONFIG} says another rank than the file has, or the adapter is of another model",
            "put back the files that were saved together",
        )


def _check_config(folder: Path) -> None:
    """What PEFT would meet with an error of its own, or would look for elsewhere."""
    file = folder / CONFIG
    try:
        if not file.is_file():
            raise ValueError("there is no such file")
        said: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else str(error) or type(error).__name__
        )
        raise RequestError.of(
            f"adapter {folder}: {CONFIG} cannot be read",
            why.splitlines()[0][:300],
            "put back the file that was saved with the adapter",
        ) from None
    kind = said.get("peft_type") if isinstance(said, dict) else None
    rank = said.get("r") if isinstance(said, dict) else None
    base = said.get("base_model_name_or_path") if isinstance(said, dict) else None
    if (
        kind != "LORA"
        or not isinstance(base, str | None)
        or not isinstance(rank, int)
        or isinstance(rank, bool)
        or rank < 1
    ):
        raise RequestError.of(
            f"adapter {folder}: {CONFIG} says peft_type={str(kind)[:50]!r}, r={str(rank)[:50]!r} and "
            f"base_model_name_or_path={str(base)[:200]!r}",
            "Trimtab writes and reads LoRA adapters, whose rank is a whole number from 1 on and whose base has a name",
            "put back the file that was saved with the adapter",
        )
