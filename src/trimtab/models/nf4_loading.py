"""Reads a model's weights straight into NF4: each matrix is packed on its device as it comes off the disk.

Which layers those are is decided here, from the structure alone: the linear layers of the language model's own stack.
Embeddings, heads, norms, routers, towers and connectors stay in the plan's format. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trimtab.models.nf4 import pack, packs
from trimtab.models.nf4_linear import Nf4Linear, pack_layer
from trimtab.placement.stacks import find_stacks, language_root, tower_stacks, under

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "trimtab_nf4"
_ROUTER = re.compile(r"router|gate|\w+_gate")
"""What weighs experts or streams: small, and a small error of it goes far."""


def nf4_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers that are held in NF4."""
    stacks = find_stacks(model)
    towers = tower_stacks(stacks, language_root(model, stacks))
    own = [stack for stack in stacks if stack not in towers]
    tied = _tensors_of_several(model)
    exact = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and any(under(name, stack) for stack in own)
        and packs(module.out_features, module.in_features)
        and id(module.weight) not in tied
        and not _ROUTER.fullmatch(name.rpartition(".")[2])
        and not any(f".{part}." in f".{name}." for part in exact)
    ]


def _tensors_of_several(model: nn.Module) -> set[int]:
    seen: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {tensor for tensor, count in seen.items() if count > 1}


def pack_model(model: nn.Module, device_of: Callable[[str], str] | None = None) -> int:
    """Put every such layer of a loaded model, or of one without values, into NF4; returns how many there are.

    `device_of`: where each layer goes before it is packed, by its name."""
    names = nf4_layers(model)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if device_of is not None:
            layer.to(device_of(name))
        empty = layer.weight.device.type == "meta"
        model.set_submodule(name, Nf4Linear(layer) if empty else pack_layer(layer))
    return len(names)


@register_quantization_config(METHOD)
class Nf4Config(QuantizationConfigMixin):
    """What `from_pretrained(quantization_config=…)` is given; it has no settings."""

    def __init__(self, **unused: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]


@register_quantizer(METHOD)
class Nf4Quantizer(HfQuantizer):
    """The loader's way to packed layers."""

    is_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **unused: Any) -> None:
        self.shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
        """Of all parameters as the files should have them: with a quantizer the loader compares no shapes."""
        for name in nf4_layers(model):
            layer: Any = model.get_submodule(name)
            packed = Nf4Linear(layer)
            # The loader casts what it reads to the format of what is there.
            packed.weight = layer.weight
            model.set_submodule(name, packed)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **unused: Any) -> bool:
        owner, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(owner), Nf4Linear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes a number, by which the loader asks for memory beforehand."""
        return 0.52 if self.param_needs_quantization(model, param_name) else float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack()

    def misshapen(self, model: PreTrainedModel) -> list[str]:
        """Parameters that the files have in another shape than the config says."""
        found = dict(model.named_parameters())
        return [
            name
            for name, shape in self.shapes.items()
            if name in found and found[name].dtype != torch.uint8 and found[name].shape != shape
        ]


class _Pack(ConversionOps):
    """From the weight that the files hold to the three tensors that stand for it."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, **unused: Any
    ) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            layer = model.get_submodule(name.rpartition(".")[0])
            if tuple(weight.shape) != (layer.out_features, layer.in_features):
                made[name] = weight  # left as it is, for `misshapen` to tell
                continue
            packed = pack(weight)
            made |= {name: packed.codes, f"{name}_scales": packed.scales, f"{name}_groups": packed.groups}
        return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in made.items()}
