"""Which codec turns sound into codes: the model's own, one that is named, or the spectral one, learned from the clips.

All have the interface of transformers' HiggsAudioV2TokenizerModel. A codec is used as it is: in eval mode, in fp32, on
the plan's device, never trained and never changed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from trimtab.cache import cache_root
from trimtab.config.schema import Config
from trimtab.config.voice import SPECTRAL
from trimtab.errors import RequestError, some_of
from trimtab.models.builtin import made_once
from trimtab.models.load import BUILT_IN, load_model_config, model_source, shapes_only
from trimtab.models.shape_codes import ShapeCodec
from trimtab.models.shape_names import is_shape

if TYPE_CHECKING:
    from trimtab.data.clips import Clip
    from trimtab.data.voice_rows import VoiceRow
    from trimtab.placement import PlacementPlan

Codec = Any
"""A PreTrainedAudioTokenizerBase of transformers, with `encode` and `decode` over discrete codes."""

KEPT = "codec"
"""The folder of a run that keeps the codec which was learned for it."""
REAL = "higgs_audio_v2_tokenizer"
REAL_ID = "bosonai/higgs-audio-v2-tokenizer"
MOST_SECONDS = 3600.0
"""Sound that a codec is learned from; of more, clips are drawn."""
# Raised when the same clips would give another codec, so that no old one is taken for it.
_LEARNING = 1


def codec_for(
    config: Config, plan: PlacementPlan, train_rows: Sequence[VoiceRow], say: Callable[[str], None]
) -> Codec:
    """The codec that the settings ask for, ready on the plan's device; the spectral one is learned from these rows."""
    if shapes_only():
        return ShapeCodec.of(load_model_config(config.model))
    if config.voice.codec == SPECTRAL:
        codec = _learned(config, plan, train_rows, say)
    else:
        codec = _loaded(config, plan, _source(config))
    return _fitting(codec, config)


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


def clips_by_content(rows: Sequence[VoiceRow]) -> tuple[dict[Path, str], dict[str, Clip]]:
    """The content's key of each file that the rows name, and one clip for each key, in the order of the rows."""
    keys: dict[Path, str] = {}
    clips: dict[str, Clip] = {}
    for row in rows:
        for clip in (row.reference, row.target):
            if clip is not None and clip.path not in keys:
                keys[clip.path] = clip.key
                clips.setdefault(keys[clip.path], clip)
    return keys, clips


def _learned(
    config: Config, plan: PlacementPlan, rows: Sequence[VoiceRow], say: Callable[[str], None]
) -> Codec:
    """Learned once from the same clips, whichever process is first; all others load what that one kept."""
    from filelock import FileLock

    model = load_model_config(config.model)
    settings = {"num_quantizers": model.num_codebooks, "codebook_size": _entries(model)}
    clips = clips_by_content(rows)[1]
    key = json.dumps([_LEARNING, config.seed, sorted(clips), settings], sort_keys=True)
    folder = cache_root() / "codecs" / hashlib.sha256(key.encode()).hexdigest()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        raise RequestError.of(
            f"voice.codec={SPECTRAL}: {folder.parent} cannot be written to",
            f"the codec is learned once and kept there ({error.strerror})",
            "set TRIMTAB_CACHE to a folder of yours",
        ) from error
    try:
        made_once(SPECTRAL, folder, lambda scratch: _learn(clips, config.seed, plan, settings, scratch, say))
    finally:
        lock.release()
    return _loaded(config, plan, str(folder))


def _learn(
    clips: dict[str, Clip],
    seed: int,
    plan: PlacementPlan,
    settings: dict[str, int],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    from trimtab.models.spectral_codec import SpectralCodec, SpectralCodecConfig

    started = said = time.monotonic()
    rate = SpectralCodecConfig().sample_rate
    # By content, so that neither the order of the rows nor where the files lie matters.
    keys = sorted(clips)
    Random(seed).shuffle(keys)
    sounds, seconds = [], 0.0
    for key in keys:
        if seconds >= MOST_SECONDS:
            break
        sounds.append(clips[key].sound(rate))
        seconds += len(sounds[-1]) / rate

    def told(book: int) -> None:
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"codec: codebook {book + 1} of {settings['num_quantizers']} learned")

    codec = SpectralCodec.learn(sounds, seed=seed, device=plan.device, told=told, **settings)
    codec.save_pretrained(folder)
    entries = codec.entries.tolist()
    say(
        f"codec: spectral, learned from {len(sounds):,} of {len(clips):,} clips ({seconds:,.0f} s of sound) in "
        f"{time.monotonic() - started:.0f} s; {min(entries)} to {max(entries)} entries a codebook"
    )


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
            said = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        own = said if name == AUDIO_TOKENIZER_NAME else said.get("audio_tokenizer") or {}
        if place := own.get("audio_tokenizer_name_or_path"):
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
        codec, report = made.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    absent = sorted(report["missing_keys"])
    if absent:
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: the weights in {source} lack {some_of(absent, 3)}",
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
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        said = str(error).strip()
        raise RequestError.of(
            f"voice.codec={config.voice.codec}: {source} could not be loaded",
            said.splitlines()[0] if said else type(error).__name__,
            f"check the name and the connection, download the codec and give its folder, or set voice.codec={SPECTRAL}",
        ) from error
