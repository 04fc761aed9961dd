"""The spectral codec of a set of clips: learned once from the same contents, and kept in the cache as a folder.

Whichever process is first learns it, and all load what that one kept, so that the ranks of a run have one codec.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from trimtab.cache import cache_root
from trimtab.config.voice import SPECTRAL
from trimtab.errors import RequestError
from trimtab.models.builtin import made_once

if TYPE_CHECKING:
    from trimtab.data.clips import Clip
    from trimtab.data.voice_rows import VoiceRow

Say = Callable[[str], None]

MOST_SECONDS = 3600.0
"""Sound that a codec is learned from; of more, clips are drawn."""
# Raised when the same clips would give another codec, so that no old one is taken for it.
_LEARNING = 1


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


def learned_folder(rows: Sequence[VoiceRow], shape: dict[str, Any], seed: int, device: str, say: Say) -> Path:
    """The folder of the codec that is learned from the rows' clips; `shape` is what the model asks of it."""
    from filelock import FileLock

    from trimtab.models.spectral_codec import EACH, OFFSETS, SpectralCodecConfig

    clips = clips_by_content(rows)[1]
    made_of = SpectralCodecConfig(**shape)
    settings = {name: getattr(made_of, name) for name in SpectralCodecConfig.__annotations__}
    key = json.dumps([_LEARNING, EACH, OFFSETS, seed, sorted(clips), settings], sort_keys=True)
    folder = cache_root() / "codecs" / hashlib.sha256(key.encode()).hexdigest()
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise RequestError.of(
            f"voice.codec={SPECTRAL}: {folder.parent} cannot be written to",
            f"the codec is learned once and kept there ({error.strerror or error})",
            "set TRIMTAB_CACHE to a folder of yours",
        ) from error
    try:
        return made_once(SPECTRAL, folder, lambda scratch: _learn(clips, shape, seed, device, scratch, say))
    finally:
        lock.release()


def _learn(
    clips: dict[str, Clip], shape: dict[str, Any], seed: int, device: str, folder: Path, say: Say
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
            say(f"codec: codebook {book + 1} of {shape['num_quantizers']} learned")

    codec = SpectralCodec.learn(sounds, seed=seed, device=device, told=told, **shape)
    codec.save_pretrained(folder)
    entries = codec.entries.tolist()
    say(
        f"codec: spectral, learned from {len(sounds):,} of {len(clips):,} clips ({seconds:,.0f} s of sound) in "
        f"{time.monotonic() - started:.0f} s; {min(entries)} to {max(entries)} entries a codebook"
    )
