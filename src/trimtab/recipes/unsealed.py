"""Checkpoints without a manifest, which earlier versions wrote: what can be told of them by looking.

Every file is there that a resume needs and can be read. Whether it is what was written, only a manifest tells.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trimtab.manifest import Damaged

TRAINER_STATE, OWN_STATE = "trainer_state.json", "state.json"
"""Where a run stands: as a trainer of Hugging Face keeps it, and as a loop of our own does."""
_OWN_WEIGHTS = "weights.safetensors"
_FSDP_WEIGHTS = "pytorch_model_fsdp.bin"
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""As the format itself sets it."""
_MOST_STEPS = 1 << 53


def check_unsealed(folder: Path, *, contents: bool = True) -> None:
    """Raise Damaged where the checkpoint cannot be resumed. Without `contents`, its state alone is looked at."""
    own = (folder / OWN_STATE).exists() or (folder / _OWN_WEIGHTS).exists()
    name = OWN_STATE if own and not (folder / TRAINER_STATE).exists() else TRAINER_STATE
    state = _json(folder / name)
    if not contents:
        return
    if own:
        _check_own(folder, name, state)
    else:
        _check_trainers(folder, state)


def _check_own(folder: Path, name: str, state: dict[str, Any]) -> None:
    for part in ("optimizer", "progress"):
        if not isinstance(state.get(part), dict):
            raise Damaged(f"{name} tells nothing of the {part}")
    if any(type(state["progress"].get(part, 0)) is not int for part in ("step", "taken")):
        raise Damaged(f"{name} does not tell its step")
    check_safetensors(folder / _OWN_WEIGHTS)
    for file in folder.glob("*.safetensors"):
        check_safetensors(file)


def _check_trainers(folder: Path, state: dict[str, Any]) -> None:
    if type(state.get("global_step")) is not int:
        raise Damaged(f"{TRAINER_STATE} does not tell its step")
    for name in ("epoch", "max_steps"):
        value = state.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < _MOST_STEPS):
            raise Damaged(f"{TRAINER_STATE}: {name} is no number that a run has")
    gathered = (folder / _FSDP_WEIGHTS).exists() or (folder / "optimizer.bin").exists()
    sharded = [child for child in folder.iterdir() if child.is_dir() and (child / ".metadata").exists()]
    if gathered:
        _check_archive(folder / _FSDP_WEIGHTS, loads=False)
        _check_archive(folder / "optimizer.bin", loads=False)
    elif not sharded:
        _check_weights(folder)
        _check_archive(folder / "optimizer.pt")
    elif len(sharded) < 2:
        raise Damaged("the shards of the model or of the optimizer are missing")
    _check_archive(folder / "scheduler.pt")
    states = sorted(folder.glob("rng_state*.pth"))
    for file in states or [folder / "rng_state.pth"]:
        _check_archive(file)
    if (folder / "scaler.pt").exists():
        _check_archive(folder / "scaler.pt")


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX).exists():
        listed = _json(folder / _INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise Damaged(f"{_INDEX} lists no files")
        names = sorted({Path(name).name for name in listed.values()})
    else:
        names = [n for n in ("adapter_model.safetensors", "model.safetensors") if (folder / n).exists()]
    for name in names or ["adapter_model.safetensors"]:
        check_safetensors(folder / name)


def check_safetensors(path: Path) -> None:
    """Raise Damaged unless header and size agree."""
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise Damaged(f"{path.name} is cut short, or not what its name says")
        header = file.read(length)
    try:
        found = json.loads(header)
        ends = [int(entry["data_offsets"][1]) for name, entry in found.items() if name != "__metadata__"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise Damaged(f"{path.name}: its header cannot be read") from None
    if 8 + length + max(ends, default=0) != size:
        raise Damaged(
            f"{path.name} has {size:,} bytes, and its header tells of {8 + length + max(ends, default=0):,}"
        )
    try:
        with safe_open(path, framework="np"):  # reads the header alone, as a resume will
            pass
    except SafetensorError as error:
        raise Damaged(f"{path.name}: its header cannot be read: {str(error)[:200]}") from None


def _check_archive(path: Path, *, loads: bool = True) -> None:
    """A file of torch.save is a zip archive with a checksum of each part; a pickle alone is not read here."""
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            if bad is None and not any(name.endswith("data.pkl") for name in archive.namelist()):
                raise Damaged(f"{path.name} holds no state")
    except (
        zipfile.BadZipFile,
        EOFError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        zipfile.LargeZipFile,
    ):
        raise Damaged(f"{path.name} is cut short, or not what its name says") from None
    if bad is not None:
        raise Damaged(f"{path.name}: its content has changed since it was written")
    if loads:
        _check_loads(path)


def _check_loads(path: Path) -> None:
    import torch
    from transformers.trainer_pt_utils import safe_globals

    try:
        with safe_globals():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
        EOFError,
        AttributeError,
        TypeError,
    ) as error:
        raise Damaged(
            f"{path.name} cannot be loaded: {(str(error).splitlines() or ['?'])[0][:200]}"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        empty = path.stat().st_size == 0
        raise Damaged(f"{path.name} {'is empty' if empty else 'is no JSON: cut short or changed'}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path.name} does not hold what it should")
    return found
