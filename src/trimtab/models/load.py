"""Loads tokenizers and causal language models by name; never decides where they live (the plan does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.models import builtin
from trimtab.models.chat import chat_template_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trimtab.placement import PlacementPlan


def model_source(settings: ModelSettings) -> str:
    """What `from_pretrained` gets: a local folder, or a hub id."""
    if settings.name == builtin.NAME:
        return str(builtin.builtin_folder())
    folder = Path(settings.name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RequestError.of(
                f"model.name={settings.name}: the folder has no config.json",
                "a model folder holds config.json, safetensors weights and tokenizer files",
                "point model.name at the folder that `save_pretrained` wrote, or at a hub id",
            )
        return str(folder)
    if settings.name.count("/") > 1 or settings.name.startswith((".", "~", "/")):
        raise RequestError.of(
            f"model.name={settings.name}: no such folder",
            "it reads as a path (a hub id is `owner/name`)",
            "check the path, or use the built-in `smollm2`",
        )
    return settings.name


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template and a padding token always set."""
    from transformers import AutoTokenizer

    source = model_source(settings)
    with _readable_errors(settings, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, **_remote(settings))
    tokenizer.chat_template = chat_template_for(settings, tokenizer)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        # Labels and attention masks are built explicitly, never from the pad id, so sharing EOS is harmless.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(settings: ModelSettings, plan: PlacementPlan) -> PreTrainedModel:
    """The model with its weights, on the plan's devices and in the plan's weight format."""
    from transformers import AutoModelForCausalLM

    source = model_source(settings)
    with _readable_errors(settings, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=plan.torch_weight_dtype,
            device_map=plan.load_device_map(),
            attn_implementation=settings.attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_remote(settings),
        )
    model: PreTrainedModel
    model, report = loaded
    _check_whole(settings, report)
    model.config.use_cache = False
    return model


def _check_whole(settings: ModelSettings, report: Mapping[str, Iterable[Any]]) -> None:
    """The loader fills what the files lack, or have in another shape, with random numbers, and goes on."""
    misshapen = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    absent = sorted({*report["missing_keys"], *misshapen})
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise RequestError.of(
            f"model.name={settings.name}: its weights lack {', '.join(absent[:3])}{more}, or have them in another "
            "shape than its config.json says",
            "those tensors would start from random numbers",
            "give the folder or hub id of a whole causal language model, with the config.json that belongs to it",
        )


def load_skeleton(settings: ModelSettings) -> PreTrainedModel:
    """The model's structure on the meta device: every parameter's name and shape, no weights read."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_model_config(settings)
    with _readable_errors(settings, "architecture"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=settings.trust_remote_code
        )
    return model


def load_model_config(settings: ModelSettings) -> Any:
    """The architecture's config: from the folder or the hub, or from a preset when the name is a known one."""
    from transformers import AutoConfig

    from trimtab.models.presets import preset_config

    if settings.name == builtin.NAME or not Path(settings.name).expanduser().is_dir():
        preset = preset_config(settings.name)
        if preset is not None:
            return preset
    with _readable_errors(settings, "config"):
        return AutoConfig.from_pretrained(model_source(settings), **_remote(settings))


def _remote(settings: ModelSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.revision and settings.name != builtin.NAME:
        options["revision"] = settings.revision
    return options


class _readable_errors:
    """Turns the loader's errors about what is in a folder or on the hub into one message that names the setting."""

    def __init__(self, settings: ModelSettings, part: str) -> None:
        self.settings, self.part = settings, part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        from safetensors import SafetensorError

        if not isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
            return
        said = str(error).strip()
        text = said.splitlines()[0] if said else type(error).__name__
        change = "check the name and the connection, download the model and give its folder, or use `smollm2`"
        if isinstance(error, SafetensorError):
            change = "fetch the weights again: a file is cut off, or only a pointer to it is there (`git lfs pull`)"
        elif "attn_implementation" in said or (
            isinstance(error, ImportError) and self.settings.attn_implementation
        ):
            change = "leave model.attn_implementation out, or set it to sdpa"
        elif isinstance(error, ImportError):
            change = "install the package that is named here"
        elif "Unrecognized configuration class" in said:
            change = "choose a causal language model: a decoder that continues a text, such as Qwen3 or Llama"
        elif "trust_remote_code" in said:
            change = "read that code, and if you trust it set model.trust_remote_code=true"
        elif "safetensors" in said:
            change = "convert the weights to safetensors: Trimtab does not unpickle weight files"
        raise RequestError.of(
            f"model.name={self.settings.name}: its {self.part} could not be loaded", text, change
        ) from error
