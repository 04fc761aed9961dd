"""Loads models and what feeds them by name, of any family; never decides where they live (the plan does)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError, TrimtabError
from trimtab.models import builtin, quantized, tiny_vision, tiny_voice
from trimtab.models.chat import chat_template_for
from trimtab.models.families import CAUSAL_LM, ELSEWHERE, Family, families_of
from trimtab.models.folder_files import check_folder_files, has_tokenizer
from trimtab.models.own_code import code_options
from trimtab.models.shape_names import builtin_tokenizer, is_shape, shape_processor, shape_tokenizer
from trimtab.models.weight_files import check_folder
from trimtab.models.whole import check_whole
from trimtab.placement import default_stream, take_inputs
from trimtab.placement.stacks import under
from trimtab.rehearse.process import rehearsal_proves_not

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from trimtab.placement import PlacementPlan

BUILT_IN = {
    builtin.NAME: builtin.builtin_folder,
    tiny_vision.NAME: tiny_vision.tiny_vision_folder,
    tiny_voice.NAME: tiny_voice.tiny_voice_folder,
}
"""The models that need no folder and no hub, by the name that `model.name` has for them; the folders are made once."""


def model_source(settings: ModelSettings) -> str:
    """What `from_pretrained` gets: a local folder, or a hub id."""
    if settings.name in BUILT_IN:
        return str(BUILT_IN[settings.name]())
    folder = Path(settings.name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RequestError.of(
                f"model.name={settings.name}: the folder has no config.json",
                "a model folder holds config.json, safetensors weights and tokenizer files",
                "point model.name at the folder that `save_pretrained` wrote, or at a hub id",
            )
        check_folder_files(folder, trusted=settings.trust_remote_code)
        return str(folder)
    if settings.name.count("/") > 1 or settings.name.startswith((".", "~", "/")):
        raise RequestError.of(
            f"model.name={settings.name}: no such folder",
            "it reads as a path (a hub id is `owner/name`)",
            f"check the path, or use a built-in model: {' or '.join(BUILT_IN)}",
        )
    return settings.name


def make_built_in(settings: ModelSettings) -> None:
    """Make the folder of a built-in model, or of the one whose tokenizer a shape has, where it is not there yet."""
    if settings.name in BUILT_IN:
        model_source(settings)
    elif is_shape(settings.name):
        builtin.builtin_folder()


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template and a padding token always set."""
    try:
        tokenizer = shape_tokenizer(settings.name) if is_shape(settings.name) else _own_tokenizer(settings)
    except RequestError as error:
        if not shapes_only() or not _is_not_here(settings, error):
            raise
        tokenizer = _another_tokenizer(settings, error)
    tokenizer.chat_template = chat_template_for(settings, tokenizer)
    _pad(tokenizer)
    return tokenizer


def _own_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    source = model_source(settings)
    with _readable_errors(settings, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **_remote(settings))
        tokenizer("a")  # settings of another type than they should have are met only in use
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            # Some kinds are made from nothing where their files are not there.
            raise ValueError("it has special tokens only, and no words: its vocabulary is not there")
    return tokenizer


def _is_not_here(settings: ModelSettings, error: RequestError) -> bool:
    """Whether there is no tokenizer to be had; one that is damaged is another matter."""
    folder = Path(settings.name).expanduser()
    return not has_tokenizer(folder) if folder.is_dir() else isinstance(error.__cause__, OSError)


def _another_tokenizer(settings: ModelSettings, error: RequestError) -> PreTrainedTokenizerBase:
    """The built-in model's: what a step takes can be told of a config alone, too, but not how long its rows are."""
    words = getattr(load_model_config(settings).get_text_config(), "vocab_size", 0)
    try:
        tokenizer = builtin_tokenizer()
    except RequestError:
        raise error from None
    if words < len(tokenizer):
        raise error
    rehearsal_proves_not(
        f"the tokenizer of {settings.name} is not here, and `trimtab train` would end there: rows were read by that of "
        f"{builtin.NAME}, so how long they are is not proven"
    )
    return tokenizer


def load_processor(settings: ModelSettings, family: Family) -> PreTrainedTokenizerBase | ProcessorMixin:
    """What turns the family's rows into tensors: a tokenizer, or the model's own processor around one.

    Pictures are prepared by Pillow and numpy, so that they come out the same with and without torchvision.
    """
    if family.processor == "AutoTokenizer":
        return load_tokenizer(settings)
    config = load_model_config(settings)
    processor: ProcessorMixin
    if is_shape(settings.name):
        processor = shape_processor(config)
    else:
        kind = _processor_class(config)
        with _readable_errors(settings, "processor", family):
            pictures = {"backend": "pil"} if family.samples == "image" else {}
            processor = kind.from_pretrained(model_source(settings), **pictures, **_remote(settings))
    if settings.chat_template is not None:
        processor.chat_template = chat_template_for(settings, processor.tokenizer)
    _pad(processor.tokenizer)
    return processor


def _processor_class(config: Any) -> Any:
    """The model's own, without its part for videos: none are shown, and that part wants torchvision, not Pillow."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    own: Any = PROCESSOR_MAPPING.get(type(config), AutoProcessor)
    return own if own is AutoProcessor else _without_videos(own)


def _without_videos(own: Any) -> Any:
    """A processor's class that neither makes nor asks for the part that prepares videos; instances are picklable."""
    from transformers import Idefics3Processor, SmolVLMProcessor

    # SmolVLM's class is Idefics 3's with videos, which it demands, and a package that spells numbers for them.
    base: Any = Idefics3Processor if own is SmolVLMProcessor else own
    still = [part for part in base.get_attributes() if part != "video_processor"]

    def reduced(processor: Any) -> tuple[Any, ...]:
        return _revived, (own, processor.__dict__)

    return type(
        own.__name__, (base,), {"get_attributes": classmethod(lambda _: still), "__reduce__": reduced}
    )


def _revived(own: Any, parts: dict[str, Any]) -> Any:
    kind = _without_videos(own)
    processor = kind.__new__(kind)
    processor.__dict__.update(parts)
    return processor


def _pad(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        # Labels and attention masks are built explicitly, never from the pad id, so sharing EOS is harmless.
        tokenizer.pad_token = tokenizer.eos_token


def load_model(settings: ModelSettings, plan: PlacementPlan, family: Family = CAUSAL_LM) -> PreTrainedModel:
    """The model with its weights, on the plan's devices and in the plan's weight format."""
    config = load_model_config(settings)
    check_family(settings, config, family)
    if is_shape(settings.name) and not shapes_only():
        raise RequestError.of(
            f"model.name={settings.name}: a shape, without weights",
            "it stands for models of its size in `trimtab plan` and `trimtab rehearse --shapes-only`",
            "name a model that has weights, or rehearse with --shapes-only",
        )
    quantized.check_stored(settings, config)
    # With weights, each is packed as it is read, and no GPU ever holds them all unpacked.
    packed_here = shapes_only() and settings.quantize is not None
    model = read_weights(
        settings,
        family,
        model_source(settings),
        dtype=plan.torch_weight_dtype,
        device_map=None if packed_here else plan.load_device_map(),
        attn_implementation=settings.attn_implementation,
        **(_from_config_alone(config) if shapes_only() else quantized.loader_options(settings)),
        **_remote(settings),
    )
    if packed_here:
        quantized.pack(settings, model, plan.device_of)
        if plan.device_map:
            from accelerate import dispatch_model

            dispatch_model(model, device_map=plan.load_device_map())
        else:
            model.to(plan.device)  # type: ignore[arg-type]
    if is_shape(settings.name):
        # No repository has it: PEFT would ask the hub for its config each time an adapter is saved.
        model.config.name_or_path = model.name_or_path = ""
    model.config.use_cache = False
    take_inputs(model, plan)
    return model


def read_weights(settings: ModelSettings, family: Family, source: str, **options: Any) -> PreTrainedModel:
    """The model at `source`, filled by its files whole: nothing left to random numbers, and nothing left unread."""
    if not shapes_only():
        made = f"remove {source}: it is made again" if settings.name in BUILT_IN else None
        check_folder(Path(source), f"model.name={settings.name}", made)
    with _readable_errors(settings, "weights", family), default_stream():
        loaded: Any = family.auto.from_pretrained(
            source,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
            **family.options,
        )
    model: PreTrainedModel
    model, report = loaded
    if "quantization_config" in options:
        report["mismatched_keys"] = {*report["mismatched_keys"], *quantized.misshapen(model)}
    without = leave_out_absent(model, report["missing_keys"], family)
    check_whole(settings, model, report, family, without)
    return model


def _from_config_alone(config: Any) -> dict[str, Any]:
    """For a rehearsal of shapes: the model is built from this, no other file is opened, and nobody is asked."""
    return {"config": config, "local_files_only": True, "adapter_kwargs": {"local_files_only": True}}


def shapes_only() -> bool:
    """Whether this process rehearses shapes alone."""
    from trimtab.virtual.state import machine

    in_force = machine()
    return in_force is not None and in_force.shapes


def leave_out_absent(model: Any, missing: Iterable[str], family: Family) -> list[str]:
    """Parts that the checkpoint lacks and the family can do without are taken off, not left to random numbers."""
    absent = [
        part for part in family.may_lack if any(under(key, part) for key in missing) and getattr(model, part)
    ]
    for part in absent:
        setattr(model, part, None)
    return absent


def left_out(model: Any, family: Family) -> list[str]:
    """What a loaded model goes without, as one says it."""
    return [told for part, told in family.may_lack.items() if getattr(model, part, None) is None]


def load_skeleton(settings: ModelSettings, family: Family = CAUSAL_LM) -> PreTrainedModel:
    """The model's structure on the meta device: every parameter's name and shape, no weights read."""
    import torch

    config = load_model_config(settings)
    check_family(settings, config, family)
    quantized.check_stored(settings, config)
    with _readable_errors(settings, "architecture", family), torch.device("meta"):
        model: PreTrainedModel = family.auto.from_config(
            config, trust_remote_code=bool(settings.trust_remote_code), **family.options
        )
    if settings.quantize is not None:
        quantized.pack(settings, model)
    return model


def check_family(settings: ModelSettings, config: Any, family: Family) -> None:
    """Refuse a model of another family, with the name of its own where that is known."""
    if family.takes(config) or getattr(config, "auto_map", None):
        # What brings its own code is known to transformers alone, which says what it cannot do.
        if family.takes(config) and (unfit := family.unfit(config)) is not None:
            raise RequestError.of(f"model.name={settings.name}: {unfit.found}", unfit.why, unfit.change)
        return
    own = " or ".join(f"{other.name}s" for other in families_of(config))
    raise RequestError.of(
        f"model.name={settings.name}: {config.model_type} is no {family.name}",
        f"it is one of the {own}, and this recipe trains another kind"
        if own
        else "Trimtab knows no recipe for it",
        f"choose {family.wanted}{f'; or a recipe for {own}' if own else ''}",
    )


def load_model_config(settings: ModelSettings) -> Any:
    """The architecture's config: from the folder or the hub, or from a preset when the name is a known one."""
    from transformers import AutoConfig

    from trimtab.models.presets import preset_config

    if settings.name in BUILT_IN or not Path(settings.name).expanduser().is_dir():
        preset = preset_config(settings.name)
        if preset is not None:
            return preset
    with _readable_errors(settings, "config"):
        return AutoConfig.from_pretrained(model_source(settings), **_remote(settings))


def _remote(settings: ModelSettings) -> dict[str, Any]:
    options: dict[str, Any] = {**code_options(settings, model_source(settings))}
    if settings.revision and settings.name not in BUILT_IN:
        options["revision"] = settings.revision
    return options


@contextmanager
def _readable_errors(settings: ModelSettings, part: str, family: Family = CAUSAL_LM) -> Iterator[None]:
    """Turns the loader's errors about what is in a folder or on the hub into one message that names the setting."""
    from safetensors import SafetensorError

    try:
        yield
    except (TrimtabError, MemoryError):
        raise
    except Exception as error:
        # What a library raises over a config or a tokenizer is of any kind; over weights, some are the machine's.
        of_files = isinstance(error, OSError | ValueError | ImportError | SafetensorError)
        if not of_files and part == "weights":
            raise
        said = str(error).strip()
        kind = "" if of_files else f"{type(error).__name__}: "
        text = kind + " ".join(" ".join(said.splitlines()[: 1 if of_files else 3]).split())[:500]
        text = text if said else type(error).__name__
        folder = Path(settings.name).expanduser()
        local = folder.is_dir()
        change = "check the name and the connection, download the model and give its folder, or use `smollm2`"
        if local:
            change = f"mend the files of {settings.name}, or fetch the model again"
        if local and part in ("tokenizer", "processor") and not has_tokenizer(folder):
            text = "the folder has no tokenizer: no tokenizer.json, tokenizer.model or vocabulary"
            change = f"put the tokenizer's files beside {settings.name}/config.json, or fetch the model again"
        elif isinstance(error, SafetensorError):
            change = "fetch the weights again: a file is cut off, or only a pointer to it is there (`git lfs pull`)"
        elif "attn_implementation" in said or (
            isinstance(error, ImportError) and settings.attn_implementation
        ):
            change = "leave model.attn_implementation out, or set it to sdpa"
        elif isinstance(error, ImportError):
            change = "install the package that is named here"
        elif "Unrecognized configuration class" in said:
            change = f"choose {family.wanted}"
        elif (other := next((kind for kind in ELSEWHERE if f"`{kind}`" in said), None)) is not None:
            change = ELSEWHERE[other]
        elif "trust_remote_code" in said:
            change = f"read that code, and if you trust it add --trust-remote-code {settings.name}"
        elif "safetensors" in said:
            change = "convert the weights to safetensors: Trimtab does not unpickle weight files"
        elif "does not recognize this architecture" in said:
            change = "correct model_type in the model's config.json, or install a transformers that has it"
        found = f"model.name={settings.name}: its {part} could not be loaded"
        raise RequestError.of(found, text, change) from error
