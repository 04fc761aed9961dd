"""What a trial's answer hangs on, as one checksum: by it an answer that is kept is found again, or not.

Everything that decides the answer is in it, and some that may not: the settings, the files that they name, the model's
files in the hub's folder here, Trimtab's own source, the versions of all installed packages, and the variables that the
libraries read. Nothing heavy is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.recipes.trial_step import Trial

OWN = Path(__file__).parent.parent
"""Trimtab's source."""
_READ_BY = (
    *("ACCELERATE", "BITSANDBYTES", "BNB", "CUBLAS", "CUDA", "CUDNN", "FLASH", "FSDP", "HF_", "HUGGINGFACE"),
    *("LIGER", "NCCL", "NVIDIA", "PEFT", "PYTHON", "PYTORCH", "TORCH", "TRANSFORMERS", "TRIMTAB", "TRITON"),
    *("TRL", "USE_", "XDG_"),
)
"""How the variables begin that Python, torch and the libraries beside it look at."""
_OF_NO_MATTER = ("TRIMTAB_CACHE", "TRIMTAB_DEBUG")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_LIBRARIES = (
    *("accelerate", "bitsandbytes", "datasets", "liger_kernel", "peft", "safetensors", "tokenizers", "torch"),
    *("transformers", "triton", "trl"),
)
_WHOLE = 32 * 2**20
"""A file up to this size is known by its bytes, a larger one (data, weights) by its size and time."""
_MOST_READ = 128 * 2**20
"""In a folder with more than this to read, all files are known by size and time (pictures, clips)."""
_MOST_FILES = 50_000


class Unknowable(Exception):
    """What decides the answer cannot be told: nothing is kept, and nothing kept is used."""


def of_model(config: Config) -> str:
    """Of what `know_model` finds."""
    return _sum({"asks": "model", **_of_config(config)})


def of_trial(trial: Trial) -> str:
    """Of what `execute` finds; how much memory the GPUs have it looks at where that is all
    there is (`snug`), and at the plan's reasons never."""
    if trial.rows:
        raise Unknowable("rows of the data are told by what was read")
    plan = replace(trial.plan, memory={}, reasons={}, notes=())
    gpus = [(gpu.name, gpu.model, gpu.capability) for gpu in trial.gpus]
    room = [gpu.free_bytes for gpu in trial.gpus] if trial.snug else None
    asked = {"asks": "trial", "plan": asdict(plan), "gpus": gpus, "counts": trial.counts, "room": room}
    return _sum(asked | _of_config(trial.config))


def _of_config(config: Config) -> dict[str, Any]:
    from trimtab.recipes.trial_step import only_the_steps

    if config.model.trust_remote_code:
        raise Unknowable("a model's own code may read anything")
    settings = only_the_steps(config).model_dump(mode="json")
    named = {text: _of_path(Path(text).expanduser()) for text in sorted(set(_texts(settings)))}
    return {
        "settings": settings,
        "files": {text: found for text, found in named.items() if found is not None},
        "hub": _of_hub(config.model.name),
        "variables": _variables(),
        **_installed(),
    }


def _texts(value: Any) -> Iterator[str]:
    """All texts of the settings: any of them may name a file."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _of_path(path: Path) -> Any:
    """A file, or all files of a folder; None where there is nothing."""
    if "\0" in str(path) or len(str(path)) > 1000 or not os.path.exists(path):
        return None
    return _of_file(path) if os.path.isfile(path) else _of_folder(path)


def _of_folder(folder: Path) -> dict[str, tuple[int, int | str]]:
    names = _files(folder)
    known = {name: _of_file(folder / name, most=-1) for name in names}
    if sum(size for size, _ in known.values() if size <= _WHOLE) > _MOST_READ:
        return known
    return {name: _of_file(folder / name) for name in names}


def _files(folder: Path, ends: str = "") -> list[str]:
    found: list[str] = []
    for where, _, names in os.walk(folder, followlinks=False):
        found += [os.path.relpath(os.path.join(where, name), folder) for name in names if name.endswith(ends)]
        if len(found) > _MOST_FILES:
            raise Unknowable(f"{folder} has too many files")
    return sorted(found)


def _of_file(path: Path, most: int = _WHOLE) -> tuple[int, int | str]:
    """By its bytes, up to so many. Links are followed, as who reads it does; one that leads nowhere counts as empty."""
    if not os.path.isfile(path):
        return 0, ""
    known = path.stat()
    if known.st_size > most or path.suffix == ".safetensors":
        return known.st_size, known.st_mtime_ns
    return known.st_size, hashlib.sha256(path.read_bytes()).hexdigest()


def _of_hub(model: str) -> Any:
    """What this machine has of a model of the hub, which nobody is asked for again."""
    if model.count("/") > 1 or os.path.isdir(Path(model).expanduser()):
        return None
    beside = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    hub = Path(os.environ.get("HF_HOME") or beside) / "hub"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    folder = Path(named or hub).expanduser() / f"models--{model.replace('/', '--')}"
    return [_of_path(folder / part) for part in ("refs", "snapshots")]


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_BY)
        and name not in _OF_NO_MATTER
        and not any(word in name for word in _SECRET)
    }


@cache
def _installed() -> dict[str, Any]:
    """What this process has imported, or would; looked at once."""
    return {
        "python": (sys.version, platform.platform()),
        "source": {name: _of_file(OWN / name) for name in _files(OWN, ".py")},
        "packages": sorted(_packages()),
        "elsewhere": {name: found for name in _LIBRARIES if (found := _elsewhere(name)) is not None},
    }


def _packages() -> Iterator[str]:
    """All that is installed, with its version, by the names of the folders that tell it."""
    for place in sys.path:
        if os.path.isdir(place or "."):
            yield from (
                name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))
            )


def _elsewhere(library: str) -> Any:
    """The source of a library that somebody works on where it is: its version does not tell."""
    spec = importlib.util.find_spec(library)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or {"site-packages", "dist-packages"} & set(folder.parts):
        return None
    return {name: (folder / name).stat().st_mtime_ns for name in _files(folder, ".py")}


def _sum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
