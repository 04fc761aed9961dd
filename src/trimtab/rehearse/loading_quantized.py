"""Where shapes only are rehearsed: models that bitsandbytes quantizes while transformers loads them.

The order is that of transformers: room for all weights is asked for at once, then each comes to its device as it was
saved, is quantized there, and gives its place back; on one thread, on the stream that is selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def quantizer_for(name: Any, config: Any, asked: Any, device_map: Any) -> tuple[Any, Any]:
    """The quantizer that transformers takes, and the map that it makes of one; None and the map for weights that are
    plain once they are loaded."""
    inner = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    owners = [one for one in (config, inner) if getattr(one, "quantization_config", None) is not None]
    described = asked if asked is not None else owners[0].quantization_config if owners else None
    if described is None:
        return None, device_map
    method = _said(described, "quant_method")
    method = "bitsandbytes" if method is None else str(getattr(method, "value", method))
    by_bitsandbytes = method.startswith("bitsandbytes")
    # MXFP4 is taken apart where its kernels are not at hand; transformers finds out, and says so.
    if by_bitsandbytes or method == "mxfp4" or _said(described, "dequantize"):
        from transformers.quantizers.auto import get_hf_quantizer

        quantizer, _, device_map = get_hf_quantizer(config, asked, device_map, True, {})
        plain = quantizer is None or getattr(quantizer.quantization_config, "dequantize", False)
        if by_bitsandbytes or plain:
            for owner in owners if plain else ():
                vars(owner).pop("quantization_config", None)
            return (None if plain else quantizer), device_map
    from trimtab.virtual.state import NotSimulated

    raise NotSimulated(
        f"{name}: weights that {method} has quantized are not rehearsed by shapes alone; those of bitsandbytes are, "
        "and those that are loaded with dequantize=True"
    )


def _said(described: Any, what: str) -> Any:
    return described.get(what) if isinstance(described, dict) else getattr(described, what, None)


def lay_out(model: Any, quantizer: Any, device_map: Any, dtype: Any, max_memory: Any) -> None:
    """Quantize a model that was made from its config, and put its parts where they belong."""
    from transformers.integrations.accelerate import _get_device_map, accelerate_dispatch, expand_device_map
    from transformers.modeling_utils import caching_allocator_warmup

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = quantizer.pre_quantized
    quantizer.pre_quantized = (
        False  # what is stored quantized takes the same room in the end, and is not there to read
    )
    with _default(dtype):
        options = {"checkpoint_files": None, "use_kernels": False}
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=device_map, **options)
    devices = _get_device_map(model, device_map, max_memory, quantizer)
    saved = list(model.state_dict())
    places = expand_device_map(devices, saved)
    caching_allocator_warmup(model, places, quantizer)
    _fill(model, quantizer, places, dtype, shapes)
    made = [name for name, _ in model.named_buffers() if name not in places]
    for name, device in expand_device_map(devices, made).items():
        owner, leaf = _owner(model, name)
        owner._buffers[leaf] = owner._buffers[leaf].to(_loaded_to(device))
    model.tie_weights()
    if len(set(devices.values())) > 1 or "disk" in devices.values():
        accelerate_dispatch(model, quantizer, devices, None, None, False)
    quantizer.pre_quantized = stored
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _fill(model: Any, quantizer: Any, places: dict[str, Any], dtype: Any, shapes: dict[str, Any]) -> None:
    import torch
    from transformers.core_model_loading import dot_natural_key

    from trimtab.virtual import unknown

    quantize = quantizer.get_quantize_ops()
    for name in sorted(places, key=dot_natural_key):
        device = _loaded_to(places[name])
        owner, leaf = _owner(model, name)
        if quantizer.param_needs_quantization(model, name):
            weight = torch.empty(shapes[name], dtype=dtype, device=device)
            unknown.forget(weight)
            owner._parameters[leaf] = quantize.convert({name: weight}, model=model, full_layer_name=name)[
                name
            ]
            del weight
        elif (here := getattr(owner, leaf)).is_meta:  # a bias, made anew with its layer
            bias = torch.empty(here.shape, dtype=dtype, device=device)
            unknown.forget(bias)
            owner._parameters[leaf] = torch.nn.Parameter(bias, requires_grad=here.requires_grad)
        elif leaf in owner._parameters:
            here.data = here.data.to(device)
        else:
            owner._buffers[leaf] = here.to(device)


def _owner(model: Any, name: str) -> tuple[Any, str]:
    where, _, leaf = name.rpartition(".")
    return model.get_submodule(where), leaf


def _loaded_to(place: Any) -> Any:
    return "cpu" if place == "disk" else place


@contextmanager
def _default(dtype: Any) -> Iterator[None]:
    """New layers are made of this type, as transformers has them made."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
