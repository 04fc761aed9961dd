"""The LoRA alone as a GGUF adapter, to be loaded over the base model's own GGUF file.

It never merges: what is written is A and B as trained.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf

from trimtab.errors import RequestError
from trimtab.export.gguf_model import gguf_name, heads_to_interleave, shape_of, written_as
from trimtab.export.tensors import check_format, new_writer, write_gguf
from trimtab.export.weights import folder_entries
from trimtab.reading import read_json_object

_PATTERNS = ("alpha_pattern", "rank_pattern")
_MOST_SCALE = 1e9
LORA_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def write_adapter(
    target: Path, adapter: Path, config: Any, *, dtype: str, name: str, base_model: str, progress: bool
) -> list[str]:
    """Write a PEFT LoRA folder as a GGUF adapter for a model of `config`'s architecture. Returns notes."""
    check_format(dtype)
    shape = shape_of(config)
    settings = _settings(adapter / "adapter_config.json")
    _check_plain_lora(settings, adapter)
    alpha = float(settings["lora_alpha"])

    writer = new_writer(shape.arch, gguf.GGUFType.ADAPTER, dtype, name, base_model)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)

    tensors = []
    for entry in folder_entries(adapter):
        match = LORA_NAME.fullmatch(entry.name)
        if match is None:
            raise RequestError.of(
                f"{adapter}: tensor {entry.name} is not a LoRA matrix of a linear layer",
                "a GGUF adapter holds pairs A and B only",
                "merge it: --to gguf without --adapter-only",
            )
        module, side = match.groups()
        base_name = gguf_name(f"{module}.weight")
        if base_name == "token_embd.weight" or (base_name == "output.weight" and shape.tied):
            raise RequestError.of(
                f"{adapter}: an adapter on {module}",
                "llama.cpp cannot load it",
                "--to gguf without --adapter-only",
            )
        heads = heads_to_interleave(base_name, shape) if side == "B" else 0
        # llama.cpp scales by alpha / rank; whatever else PEFT multiplies by goes into B.
        factor = _scale(settings, module, alpha) if side == "B" else 1.0
        tensors.append(written_as(entry, f"{base_name}.lora_{side.lower()}", heads, factor))
    fell_back = write_gguf(target, writer, tensors, dtype, progress=progress)
    return [f"{len(fell_back)} of {len(tensors)} adapter matrices are f16, not q8_0"] if fell_back else []


def _settings(file: Path) -> dict[str, Any]:
    """What PEFT keeps of an adapter, with the numbers that its scale is made of."""
    change = "put back the file that training wrote"
    settings = read_json_object(file, "the adapter's settings", change)
    found = {
        f"{name} {key}": value for name in _PATTERNS for key, value in _table(settings, name, file).items()
    }
    found |= {name: settings.get(name) for name in ("r", "lora_alpha")}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_SCALE:
            raise RequestError.of(
                f"{file}: {name} is {str(value)[:60]}", "it must be a number above 0", change
            )
    return settings


def _table(settings: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    """A table of numbers by patterns of modules' names, each of which must be one."""
    table = settings.get(name) or {}
    try:
        for pattern in dict(table):
            re.compile(pattern)
    except (re.error, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise RequestError.of(
            f"{file}: {name} is no table of patterns ({error})",
            "it maps modules' names to numbers",
            "mend it",
        ) from None
    return dict(table)


def _scale(settings: dict[str, Any], module: str, alpha: float) -> float:
    """PEFT's scale of this module, relative to the alpha / rank that llama.cpp will apply."""
    own_alpha = float(_by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"]))
    rank = int(_by_pattern(settings.get("rank_pattern"), module, settings["r"]))
    wanted = own_alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return wanted * rank / alpha


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    fitting = (value for p, value in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module))
    return next(fitting, default)


def _check_plain_lora(settings: dict[str, Any], adapter: Path) -> None:
    extras = ("use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias")
    unusual = [key for key in extras if settings.get(key)]
    if settings.get("peft_type") != "LORA":
        unusual.append(f"peft_type={settings.get('peft_type')}")
    if settings.get("bias", "none") != "none":
        unusual.append(f"bias={settings['bias']}")
    if unusual:
        raise RequestError.of(
            f"{adapter / 'adapter_config.json'}: {', '.join(unusual)}",
            "a GGUF adapter holds plain LoRA matrices only",
            "merge it: --to gguf without --adapter-only",
        )
