"""What `model.quantize` means for loading: what the loader is given, what is refused, what a skeleton looks like.

Models that come quantised by bitsandbytes are refused, with the way out; those of other methods are left to
transformers and the package that they need. The way to NF4 itself is in `nf4_loading.py`, which imports transformers
and so is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError

_BITSANDBYTES = "bitsandbytes"


def loader_options(settings: ModelSettings) -> dict[str, Any]:
    """What `from_pretrained` gets beside the rest."""
    if settings.quantize is None:
        return {}
    from trimtab.models.nf4_loading import Nf4Config

    return {"quantization_config": Nf4Config()}


def check_stored(settings: ModelSettings, config: Any) -> None:
    """Refuse a model whose files are quantised already, where it is to be quantised again or cannot be read."""
    method = _stored_as(config)
    if method is None:
        return
    if settings.quantize is not None:
        raise RequestError.of(
            f"model.quantize={settings.quantize}: the weights of {settings.name} are quantised already ({method})",
            "what four bits left of them would be rounded once more",
            "name the unquantised model, which is quantised while it loads; or remove model.quantize",
        )
    if method == _BITSANDBYTES:
        raise RequestError.of(
            f"model.name={settings.name}: its weights were quantised by bitsandbytes",
            "Trimtab does not read that package's files: an adapter could not be merged into weights of four bits, and "
            "`export` would have no others",
            "name the model that they were made from and set model.quantize=nf4: it is quantised to the same four bits "
            "while it loads",
        )


def _stored_as(config: Any) -> str | None:
    """How a model's files are quantised, by its config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "by a method that config.json does not name")


def pack(settings: ModelSettings, model: Any, device_of: Callable[[str], str] | None = None) -> None:
    """The layers of a model without values as they will be, each on its device where that is told; refused where there
    are none to pack."""
    from trimtab.models.nf4_loading import pack_model

    if pack_model(model, device_of) == 0:
        raise RequestError.of(
            f"model.quantize={settings.quantize}: {type(model).__name__} has no layer that can be held in four bits",
            "those are linear layers of the language model's stack, with a multiple of 64 inputs",
            "remove model.quantize",
        )


def misshapen(model: Any) -> list[str]:
    """Tensors of another shape than the config says, which the loader does not look for while it quantises."""
    names: list[str] = model.hf_quantizer.misshapen(model)
    return names
