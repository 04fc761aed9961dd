"""Whether this machine has the memory for a program's values. Where it has not, the rehearsal begins again with shapes.

Known before weights are loaded, from the size of their files; otherwise seen while the program runs, when the machine
has next to nothing left, or when an allocation fails. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.hardware.probe import probe_cpu
from trimtab.rehearse.memory_text import size
from trimtab.rehearse.system import belongs

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process
    from trimtab.virtual.state import Machine

_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_FETCHED = tuple(map(re.compile, (r"model(-\d+-of-\d+)?\.safetensors", r"pytorch_model(-\d+-of-\d+)?\.bin")))
"""Files of a repository that transformers fetches: those of the first kind, or else those of the second."""
_PATIENCE = 10.0
"""Seconds that the hub has to tell their sizes."""
_LEFT = 0.03
"""With less of the machine's memory left than this, the next large allocation ends a process."""
_OURS = 0.25
"""A rehearsal that has less than this of it is not what filled the memory."""
_EVERY = 0.5
"""Seconds between two looks."""


class ValuesDoNotFit(Exception):
    """The values of the program are more than this machine's memory holds."""


def _file(folder: Path) -> Path:
    return folder / "no-room"


def say(folder: Path, why: str) -> None:
    """Tell the parent: it ends what runs, so that all of it has to be there at once."""
    begun = _file(folder).with_suffix(f".{os.getpid()}")
    begun.write_text(why)
    begun.replace(_file(folder))


def said(folder: Path) -> str:
    """Why the values do not fit; nothing where they do."""
    file = _file(folder)
    return file.read_text() if file.exists() else ""


class Watch:
    """The parent's eye on the machine's memory, while a rehearsal with values runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def seen(self) -> bool:
        """Whether the values do not fit: somebody has said so, or next to nothing is left."""
        if _file(self._folder).exists():
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        cpu = probe_cpu()
        if cpu.free_bytes > _LEFT * cpu.total_bytes or _held(self._folder) < _OURS * cpu.total_bytes:
            return False
        say(self._folder, f"the program's values filled the memory of this machine ({size(cpu.total_bytes)})")
        return True


def _held(folder: Path) -> int:
    """What the processes of a rehearsal hold of the machine's memory."""
    total = 0
    for path in folder.glob("stands-*"):
        process = int(path.name.removeprefix("stands-"))
        if belongs(folder, process):
            with contextlib.suppress(OSError):  # it may just have ended
                pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def look_before_loading(process: Process, machine: Machine) -> None:
    """From now on, files of weights are held against the memory that is there before they are read."""
    import torch

    from trimtab.virtual import imports

    def checked(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load(file: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, str | os.PathLike) and os.path.isfile(file):
                check(process, os.fspath(file), os.path.getsize(file))
            return real(file, *args, **kwargs)

        return load

    def in_transformers(_: Any) -> None:
        owner = sys.modules["transformers.modeling_utils"].PreTrainedModel
        real = owner.from_pretrained.__func__

        @classmethod  # type: ignore[misc]
        @functools.wraps(real)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(name, str | os.PathLike):
                _look(process, os.fspath(name), kwargs.get("revision") or "main")
            return real(cls, name, *args, **kwargs)

        owner.from_pretrained = from_pretrained

    def in_safetensors(_: Any) -> None:
        module: Any = sys.modules["safetensors.torch"]
        module.load_file = checked(module.load_file)

    torch.load = checked(torch.load)
    settings = {"transformers.modeling_utils": in_transformers, "safetensors.torch": in_safetensors}
    imports.when_imported(machine, machine.undo, settings)


def _look(process: Process, name: str, revision: str) -> None:
    """Hold a model's weights, here or at the hub, against the memory; say where they are fetched for nothing."""
    here = weights_of(name)
    there = 0 if here else weights_at_the_hub(name, revision)
    check(process, name, here or there)
    if there and process.settings.apart:
        process.recorder.write(
            t="note",
            text=f"{size(there)} of {name} were fetched, and thrown away with what was written: "
            f"`hf download {name}` first keeps them here",
        )


def check(process: Process, name: str, wanted: int) -> None:
    """Begin again by shapes where so many bytes of weights are more than is free."""
    copies = max(1, process.settings.launched)
    free = probe_cpu().free_bytes
    if wanted * copies > free:
        say(process.folder, _too_much(name, wanted * copies, free, copies))
        process.give_up()


def known_before(arguments: Sequence[str], copies: int) -> str:
    """Why a config of ours surely has values that do not fit, by its model's files alone; nothing where they may fit.

    Only to spare a start that would find it out. An estimate has to be twice too large to count.
    """
    if tuple(arguments[:3]) != ("-m", "trimtab", "train"):
        return ""
    from trimtab.config import load_request
    from trimtab.errors import RequestError

    try:
        model = load_request(Path(arguments[3]), arguments[4:]).config.model
    except (RequestError, OSError):
        return ""  # the run itself says what is wrong with it
    if model.quantize is not None:
        return ""
    if "/" in model.name and not os.path.isdir(model.name):
        import huggingface_hub  # noqa: F401 — whose cache is looked through
    copies, free = max(1, copies), probe_cpu().free_bytes
    stored = weights_of(model.name)
    # What is stored in fp32 is loaded in bf16.
    if stored * copies > 2 * free:
        return _too_much(model.name, stored * copies, free, copies)
    least = 0 if stored else _at_least(model.name)
    if least > 2 * free:
        return f"{model.name} has more than {size(least)} of weights, and this machine {size(free)} of free memory"
    return ""


def _at_least(name: str) -> int:
    """What the two largest products of each layer take in 16 bits, by the config of a model without weights here."""
    file = _found(name, "config.json")
    try:
        told = json.loads(file.read_text()) if file is not None else {}
        told = told.get("text_config", told)
        sizes = [told.get(key) for key in ("num_hidden_layers", "hidden_size", "intermediate_size")]
    except (OSError, ValueError, AttributeError):
        return 0  # the run itself says what is wrong with it
    return 2 * 2 * math.prod(sizes) if all(isinstance(number, int) for number in sizes) else 0


def _too_much(name: str, wanted: int, free: int, copies: int) -> str:
    each = f" in each of {copies} ranks" if copies > 1 else ""
    return (
        f"{name} has {size(wanted // copies)} of weights{each}, and this machine {size(free)} of free memory"
    )


def weights_of(name: str) -> int:
    """The bytes of a model's weights, in a folder or in the hub's cache; 0 where they are not there."""
    for index in _INDEXES:
        file = _found(name, index)
        if file is not None:
            total = json.loads(file.read_text()).get("metadata", {}).get("total_size", 0)
            return int(total)
    for single in _SINGLE:
        if (file := _found(name, single)) is not None:
            return file.stat().st_size
    folder = Path(name)
    files = folder.iterdir() if folder.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.name.endswith(_ENDINGS))


def holds_weights(folder: str) -> bool:
    """Whether a folder has a file of weights, or an index of some."""
    return any(name.endswith((*_ENDINGS, ".index.json")) for name in os.listdir(folder or "."))


def weights_at_the_hub(name: str, revision: str) -> int:
    """The bytes of weights that would be fetched; 0 where the hub is not to be asked, or does not know: the program
    asks it next, and is told why."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE or os.path.isdir(name):
        return 0
    of_the_client: type[Exception] = HfHubHTTPError.__bases__[
        0
    ]  # another library's from one version to the next
    try:
        told = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_PATIENCE)
    except (OSError, ValueError, of_the_client):
        return 0
    sizes = {file.rfilename: file.size or 0 for file in told.siblings or ()}
    for pattern in _FETCHED:
        if total := sum(size for file, size in sizes.items() if pattern.fullmatch(file)):
            return total
    return 0


def _found(name: str, file: str) -> Path | None:
    if os.path.isdir(name):
        path = Path(name) / file
        return path if path.is_file() else None
    hub = sys.modules.get("huggingface_hub")
    cached = hub.try_to_load_from_cache(name, file) if hub is not None and name.count("/") <= 1 else None
    return Path(cached) if isinstance(cached, str) else None
