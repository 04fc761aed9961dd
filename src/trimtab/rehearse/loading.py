"""Where shapes only are rehearsed: `from_pretrained` of transformers builds the model from its config alone.

Put in when the program imports transformers. It never downloads weights, and never looks whether they are there.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trimtab.virtual import imports
from trimtab.virtual.wording import words

if TYPE_CHECKING:
    from trimtab.virtual.state import Machine

_MODULE = "transformers.modeling_utils"
_STOPPING = "transformers.generation.stopping_criteria"
# What says where weights come from and how they are read; the rest is for the config or for the model's class.
_OF_LOADING = words(
    """
    state_dict proxies tqdm_class _from_pipeline _from_auto max_memory offload_folder offload_buffers subfolder
    _commit_hash variant adapter_kwargs adapter_name generation_config gguf_file distributed_config device_mesh
    tp_plan tp_size trust_remote_code allow_all_kernels use_kernels kernel_config key_mapping mirror _fast_init
    low_cpu_mem_usage from_tf from_flax offload_state_dict cache_dir ignore_mismatched_sizes force_download
    local_files_only token revision use_safetensors weights_only disable_mmap fusion_config
    """
)
_OF_FINDING = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def build_from_configs(machine: Machine) -> None:
    """From now on models are built from their configs alone."""
    from trimtab.rehearse import unread_files

    unread_files.leave_unread()
    changes = {
        _MODULE: _replace,
        "safetensors": _safe_open,
        "safetensors.torch": _safetensors,
        _STOPPING: _go_on,
    }
    settings = {name: _changing(name, change) for name, change in changes.items()}
    imports.when_imported(machine, machine.undo, settings)


def _changing(name: str, change: Callable[[Any], None]) -> imports.Setting:
    early = name in sys.modules  # whoever is here before torch may have taken its functions by name

    def put_in(_: Any) -> None:
        module = sys.modules[name]
        before = dict(vars(module))
        change(module)
        if early:
            for held, real in before.items():
                if (new := getattr(module, held)) is not real:
                    imports.call_by_name(real, new)

    return put_in


def _go_on(module: Any) -> None:
    """What a model generates is as long as it may be: no token that nobody computed ends it."""

    def unless_unknown(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def ended(self: Any, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            import torch

            from trimtab.virtual import unknown

            if unknown.is_unknown(input_ids):
                return input_ids.new_zeros(input_ids.shape[0], dtype=torch.bool)
            return real(self, input_ids, scores, **kwargs)

        return ended

    for name in ("EosTokenCriteria", "StopStringCriteria", "ConfidenceCriteria"):
        if (criteria := getattr(module, name, None)) is not None:
            criteria.__call__ = unless_unknown(criteria.__call__)


def _safetensors(module: Any) -> None:
    from trimtab.rehearse import hollow_weights, unread_files

    unread_files.leave_safetensors_unread(module)
    hollow_weights.read_and_write_shapes(module)


def _safe_open(module: Any) -> None:
    from trimtab.rehearse import hollow_weights

    hollow_weights.open_shapes(module)


def _replace(module: Any) -> None:
    real = module.PreTrainedModel.from_pretrained

    @classmethod  # type: ignore[misc]
    @functools.wraps(real.__func__)
    def from_pretrained(cls: Any, name: Any, *model_args: Any, config: Any = None, **kwargs: Any) -> Any:
        return _built(cls, name, model_args, config, kwargs)

    module.PreTrainedModel.from_pretrained = from_pretrained


def _built(cls: Any, name: Any, model_args: tuple[Any, ...], config: Any, kwargs: dict[str, Any]) -> Any:
    """A model as `from_pretrained` returns it, but for its values."""
    import torch
    from transformers import PretrainedConfig
    from transformers.integrations.accelerate import check_and_set_device_map

    from trimtab.rehearse import collecting, loading_quantized
    from trimtab.virtual import deeds, generators, state, unknown

    machine = state.machine()
    collecting.resume(models=machine is None or machine.initialised or deeds.any_module())
    finding = {key: kwargs[key] for key in _OF_FINDING if kwargs.get(key) is not None}
    told = kwargs.pop("output_loading_info", False)
    device_map = check_and_set_device_map(kwargs.pop("device_map", None))
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
    attention = kwargs.pop("attn_implementation", None)
    quantized = kwargs.pop("quantization_config", None)
    own = {key: value for key, value in kwargs.items() if key not in _OF_LOADING}
    if isinstance(config, PretrainedConfig):
        config = copy.deepcopy(config)
    else:
        source = config if config is not None else name
        config, own = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **finding, **own)
    quantizer, device_map = loading_quantized.quantizer_for(name, config, quantized, device_map)
    config.name_or_path = str(name)
    options = own | ({"attn_implementation": attention} if attention is not None else {})
    options["dtype"] = _dtype(config, dtype)
    # Made on the device, a head would lie beside the table that it is tied to; where weights are read, it never does.
    # Where weights are read, none are drawn.
    with torch.device("cpu"), generators.undrawn():
        model = cls._from_config(config, *model_args, **options)
    for parameter in model.parameters():
        unknown.forget(parameter)
    model.eval()
    if quantizer is not None:
        loading_quantized.lay_out(model, quantizer, device_map, options["dtype"], kwargs.get("max_memory"))
    elif device_map is not None:
        _lay_out(model, _laid_out(model, device_map, kwargs.get("max_memory")))
    nothing: dict[str, Any] = {
        key: [] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    return (model, nothing) if told else model


def _dtype(config: Any, asked: Any) -> Any:
    """What `dtype` asks for; "auto" and nothing are what the config says, float32 where it says nothing."""
    import torch

    if asked in (None, "auto"):
        asked = getattr(config, "dtype", None)
    if isinstance(asked, str):
        asked = getattr(torch, asked.removeprefix("torch."))
    return asked if asked is not None else torch.float32


def _laid_out(model: Any, device_map: Any, max_memory: Any) -> dict[str, Any]:
    """The device of each part, as transformers finds it, with accelerate."""
    if isinstance(device_map, dict):
        return dict(device_map)
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    kept = getattr(model, "_no_split_modules", None)
    kept = list(kept) if kept else None
    if device_map != "sequential":
        low = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, kept, low_zero=low)
    return dict(infer_auto_device_map(model, max_memory, kept))


def _lay_out(model: Any, devices: dict[str, Any]) -> None:
    """Put the parts where they belong, as transformers does: all the memory asked for at once, on the stream that is
    selected, then filled by threads, which work on the default one (unless HF_DEACTIVATE_ASYNC_LOAD says not to)."""
    from transformers.integrations.accelerate import expand_device_map
    from transformers.modeling_utils import caching_allocator_warmup
    from transformers.utils import is_env_variable_true

    from trimtab.virtual import streams

    places = expand_device_map(devices, list(model.state_dict()))
    caching_allocator_warmup(model, places, None)
    by_threads = not is_env_variable_true("HF_DEACTIVATE_ASYNC_LOAD") and "disk" not in devices.values()
    with streams.default_ones() if by_threads else nullcontext():
        _fill(model, places)
        if list(devices) == [""]:
            model.to(devices[""])
        else:
            from accelerate import dispatch_model

            dispatch_model(model, device_map=devices)


def _fill(model: Any, places: dict[str, Any]) -> None:
    """Weights come in the order of their names, not of the code: on it hangs which of them lie side by side."""
    from transformers.core_model_loading import dot_natural_key

    for name in sorted(places, key=dot_natural_key):
        device = places[name]
        if device not in ("cpu", "disk"):
            owner = model.get_submodule(name.rpartition(".")[0])
            owner._apply(lambda tensor, device=device: tensor.to(device), recurse=False)
