"""The codes of the rows' clips: computed once for each content and codec, and kept in the cache.

Each clip is encoded alone, since a codec's answer may depend on the silence that a batch would put behind it. What is
done is kept at once and whole, so an interruption costs the clip at hand; several processes share the work, and what
another one is at is waited for. A file that is damaged is computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cache import cache_root
from trimtab.errors import RequestError
from trimtab.files import write_whole
from trimtab.models.codec import Codec, identity
from trimtab.models.learned_codec import clips_by_content
from trimtab.models.shape_codes import ShapeCodec

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from trimtab.data.clips import Clip
    from trimtab.data.voice_collate import CodedRow
    from trimtab.data.voice_rows import VoiceRow
    from trimtab.placement import PlacementPlan

SHARES = 64
"""Locks of one codec: a process takes a share of the clips at a time, so that others can take theirs."""
_TENSOR = "codes"


def coded(
    rows: Sequence[VoiceRow], codec: Codec, plan: PlacementPlan, say: Callable[[str], None]
) -> list[CodedRow]:
    """The rows with their clips as codes, (frames, codebooks), which lie on the CPU whatever the plan."""
    from trimtab.data.voice_collate import CodedRow

    keys, clips = clips_by_content(rows)
    if isinstance(codec, ShapeCodec):
        codes = {key: codec.codes(clip) for key, clip in clips.items()}
    else:
        codes = codes_of(clips, codec, say)

    def of(clip: Clip | None) -> Tensor | None:
        return None if clip is None else codes[keys[clip.path]]

    return [CodedRow(row, reference=of(row.reference), target=of(row.target)) for row in rows]


def codes_of(clips: dict[str, Clip], codec: Codec, say: Callable[[str], None]) -> dict[str, Tensor]:
    """The codes of clips by their content's key, from the cache or computed now."""
    folder = cache_root() / "codes" / identity(codec)
    found = {key: kept for key in clips if (kept := _kept(folder / f"{key}.safetensors", codec)) is not None}
    missing = {key: clip for key, clip in clips.items() if key not in found}
    if missing:
        computed = 0
        with _bar(len(missing)) as bar:
            for key, codes, now in _made(folder, missing, codec):
                found[key] = codes
                computed += now
                bar.advance(bar.task_ids[0])
        waited = len(missing) - computed
        say(
            f"codes: {computed:,} of {len(clips):,} clips encoded, the others taken from {folder.parent}"
            if waited or computed < len(clips)
            else f"codes: {computed:,} clip{'' if computed == 1 else 's'} encoded, kept in {folder.parent}"
        )
    return found


def encoded(clip: Clip, codec: Codec) -> Tensor:
    """The clip's codes, (frames, codebooks), on the CPU."""
    import torch

    sound = torch.from_numpy(clip.sound(codec.config.sample_rate)).to(codec.device, torch.float32)
    with torch.no_grad():
        codes: Tensor = codec.encode(sound[None, None]).audio_codes
    return codes[0].T.to("cpu", torch.long).contiguous()


def _made(folder: Path, missing: dict[str, Clip], codec: Codec) -> Iterator[tuple[str, Tensor, bool]]:
    """Each clip with its codes, and whether this process computed them."""
    shares: dict[int, dict[str, Clip]] = {}
    for key, clip in missing.items():
        shares.setdefault(int(key[:8], 16) % SHARES, {})[key] = clip
    later = []
    for share in shares:
        with _locked(folder, share, wait=False) as mine:
            if mine:
                yield from _share(folder, shares[share], codec)
            else:
                later.append(share)
    for share in later:
        with _locked(folder, share, wait=True):
            yield from _share(folder, shares[share], codec)


def _share(folder: Path, clips: dict[str, Clip], codec: Codec) -> Iterator[tuple[str, Tensor, bool]]:
    from safetensors.torch import save

    for key, clip in clips.items():
        path = folder / f"{key}.safetensors"
        # Another process may have been at it since it was looked for.
        codes = _kept(path, codec)
        now = codes is None
        if codes is None:
            codes = encoded(clip, codec)
            with _writable(folder):
                write_whole(path, save({_TENSOR: codes.int()}))
        yield key, codes, now


def _kept(path: Path, codec: Codec) -> Tensor | None:
    """The codes in a file; None where it is not there, or is not what was written."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, SafetensorError):
        return None
    codes = tensors.get(_TENSOR)
    whole = (
        codes is not None
        and codes.dtype == torch.int32
        and codes.ndim == 2
        and codes.shape[1] == codec.config.num_quantizers
        and bool(((codes >= 0) & (codes < codec.config.codebook_size)).all())
    )
    return codes.long() if codes is not None and whole else None


@contextmanager
def _locked(folder: Path, share: int, wait: bool) -> Iterator[bool]:
    """Whether the share is this process's; the lock goes with the process, also where it is killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".{share}.lock", timeout=-1 if wait else 0)
    try:
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    from filelock import Timeout

    try:
        yield
    except Timeout:  # which is an OSError, and no fault of the folder's
        raise
    except OSError as error:
        raise RequestError.of(
            f"{folder} cannot be written to ({error.strerror or error})",
            "the codes of clips are computed once and kept there",
            "make room, or set TRIMTAB_CACHE to a folder of yours",
        ) from error


def _bar(count: int) -> Progress:
    """A bar that tells how far it is, where a person looks on."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    bar.add_task(f"encoding {count:,} clips", total=count)
    return bar
