"""Which codec turns sound into codes: the model's own, one that is named, or the spectral one, learned from the clips.

All have the interface of transformers' HiggsAudioV2TokenizerModel. A codec is used as it is: in eval mode, in fp32, on
the plan's device, never trained and never changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import Config
from trimtab.config.voice import SPECTRAL
from trimtab.errors import RequestError, some_of
from trimtab.models.learned_codec import learned_folder
from trimtab.models.load import BUILT_IN, load_model_config, model_source, shapes_only
from trimtab.models.shape_codes import ShapeCodec
from trimtab.models.shape_names import is_shape
from trimtab.models.weight_files import check_folder
from trimtab.models.whole import say
from trimtab.reading import parse_json

if TYPE_CHECKING:
    from trimtab.data.voice_rows import VoiceRow
    from trimtab.placement import PlacementPlan

Codec = Any
"""A PreTrainedAudioTokenizerBase of transformers, with `encode` and `decode` over discrete codes."""

KEPT = "codec"
"""The folder of a run that keeps the codec which was learned for it."""
REAL = "higgs_audio_v2_tokenizer"
REAL_ID = "bosonai/higgs-audio-v2-tokenizer"


def codec_for(
    config: Config, plan: PlacementPlan, train_rows: Sequence[VoiceRow], say: Callable[[str], None]
) -> Codec:
    """The codec that the settings ask for, ready on the plan's device; the spectral one is learned from these rows."""
    if shapes_only():
        return ShapeCodec.of(load_model_config(config.model))
    if config.voice.codec == SPECTRAL:
        model = load_model_config(config.model)
        shape = {"num_quantizers": model.num_codebooks, "codebook_size": _entries(model)}
        source = str(learned_folder(train_rows, shape, config.seed, plan.device, say))
    else:
        source = _source(config)
    return _fitting(_loaded(config, plan, source), config)


def load_run_codec(config: Config, plan: PlacementPlan, run_folder: Path) -> Codec:
    """The codec of a run that has ended: the one that was learned for it, or the one that its settings name."""
    learned = config.voice.codec == SPECTRAL
    return _fitting(
        _loaded(config, plan, str(kept_codec(config, run_folder)) if learned else _source(config)), config
    )


def kept_codec(config: Config, run_folder: Path) -> str | None:
    """What `voice.codec` has to say so that the codec of a run that has ended is taken: the folder of a learned one."""
    folder = run_folder / KEPT
    if config.voice.codec != SPECTRAL:
        return config.voice.codec
    if not (folder / "config.json").is_file():
        raise RequestError.of(
            f"{run_folder}: the run keeps no codec",
            f"voice.codec={SPECTRAL} was learned from its clips, is kept in {folder}, and no other one reads its codes",
            "put the folder back, or train again",
        )
    return str(folder)


def identity(codec: Codec) -> str:
    """Sixty-four digits that two codecs share only where they give the same codes: class, settings and weights."""
    import torch

    settings = codec.config.to_dict()
    for told in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        settings.pop(told, None)
    whole = hashlib.sha256(json.dumps([type(codec).__name__, settings], sort_keys=True, default=str).encode())
    for name, tensor in sorted(codec.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        whole.update(plain.flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _source(config: Config) -> str:
    """Where the codec lies, as `from_pretrained` takes it."""
    if config.voice.codec is not None:
        folder = Path(config.voice.codec).expanduser()
        return str(folder) if folder.is_dir() else config.voice.codec
    name = config.model.name
    own = None if name in BUILT_IN or is_shape(name) else _named_by_processor(config)
    if own is None:
        raise RequestError.of(
            f"voice.codec is null, and model.name={name} names no codec of its own",
            "its processor_config.json has no `audio_tokenizer`, and without a codec sound has no codes",
            f"set voice.codec={REAL_ID} or a folder with it; voice.codec={SPECTRAL} learns one from the clips, for a "
            "model that was not trained on another one's codes",
        )
    return own


def _named_by_processor(config: Config) -> str | None:
    """The `audio_tokenizer` entry that transformers' processors are saved with."""
    from transformers.utils import AUDIO_TOKENIZER_NAME, PROCESSOR_NAME, cached_file

    source = model_source(config.model)
    for name in (AUDIO_TOKENIZER_NAME, PROCESSOR_NAME):
        with _readable_errors(config, source):
            path = cached_file(
                source, name, revision=config.model.revision, _raise_exceptions_for_missing_entries=False
            )
            said = parse_json(Path(path).read_text(encoding="utf-8")) if path else {}
            own = said if name == AUDIO_TOKENIZER_NAME else said.get("audio_tokenizer") or {}
            place = own.get("audio_tokenizer_name_or_path")
            if place and not isinstance(place, str):
                raise ValueError(f"{name}: audio_tokenizer_name_or_path is no text")
        if place:
            beside = Path(source, place)
            return str(beside) if beside.is_dir() else str(place)
    return None


def _loaded(config: Config, plan: PlacementPlan, source: str) -> Codec:
    import torch
    from transformers import PreTrainedConfig

    from trimtab.models.spectral_codec import SpectralCodec, SpectralCodecConfig

    with _readable_errors(config, source):
        kind = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
    if kind not in (REAL, SpectralCodecConfig.model_type):
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: {source} is {kind or 'of no known type'}",
            f"codes come from a HiggsAudioV2TokenizerModel ({REAL}) or a spectral codec that Trimtab kept",
            f"set voice.codec={REAL_ID}, a folder with it, or {SPECTRAL}",
        )
    with _readable_errors(config, source):
        if kind == REAL:
            from trimtab.models.higgs_codec import higgs_codec_class

            made = higgs_codec_class()
        else:
            made = SpectralCodec
        check_folder(Path(source), f"voice.codec={config.voice.codec}")
        codec, report = made.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    absent = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
    if unread := sorted(report["unexpected_keys"]):
        told = f"voice.codec={config.voice.codec}: the weights in {source} hold {some_of(unread, 3)}"
        if kind != REAL:
            raise RequestError.of(
                f"{told}, which the codec has no place for",
                "they are not those that its config.json was saved with",
                "put back the codec's folder as it was kept, or learn it again",
            )
        say(f"{told}, which {type(codec).__name__} has no place for: left out")
    if absent:
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: the weights in {source} lack {some_of(absent, 3)}, or have "
            "them in another shape",
            "those tensors would start from random numbers",
            "give the folder or hub id of a whole codec",
        )
    codec.requires_grad_(False)
    return codec.to(plan.device).eval()


def _entries(model: Any) -> int:
    """Codes that stand for sound, of the model's: the two others begin and end a stream."""
    return int(min(model.audio_stream_bos_id, model.audio_stream_eos_id, model.codebook_size - 2))


def _fitting(codec: Codec, config: Config) -> Codec:
    model = load_model_config(config.model)
    books, entries = codec.config.num_quantizers, codec.config.codebook_size
    if (books, entries) != (model.num_codebooks, _entries(model)):
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: {books} codebooks of {entries} entries, and model.name="
            f"{config.model.name} takes {model.num_codebooks} of {_entries(model)}",
            "each code is a row of the model's embedding and of its head",
            f"choose the codec that the model was made for, or voice.codec={SPECTRAL}, which is learned to fit",
        )
    return codec


@contextmanager
def _readable_errors(config: Config, source: str) -> Iterator[None]:
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        *(OSError, ValueError, ImportError, SafetensorError),
        # What a config of other kinds of values ends in, wherever it is used first.
        *(TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    ) as error:
        said = str(error).strip()
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: {source} could not be loaded",
            said.splitlines()[0] if said else type(error).__name__,
            f"check the name and the connection, download the codec and give its folder, or set voice.codec={SPECTRAL}",
        ) from error
