"""Which modules this rank has run in the present step, and the line that called each: told to the other ranks with
every collective, so that two ranks can be compared when they part. Records only.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.rehearse.places import OURS

Ran = dict[str, list[Any]]
"""The names of modules, each with the lines (file and number, innermost first) from its call to that of the module that
it is a part of."""
_DEEPEST = 8
_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
"""Names that torch puts between those of the program."""
_CALLS = os.path.join("nn", "modules", "module.py")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")

_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_with_parameters: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_seen: set[str] = set()
_new: Ran = {}
_steps = 0
_quiet = False
_counting = _watching = False


def watch(modules: bool) -> None:
    """From now on steps are counted, and the modules that run in each are remembered where there are ranks to tell."""
    global _counting, _watching
    _watching |= modules
    if not _counting:
        _counting = True
        register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    global _steps
    _steps += 1
    _seen.clear()
    _new.clear()


def called(module: nn.Module) -> None:
    """A module is about to run."""
    global _quiet
    if not _watching:
        return
    _quiet = not torch.is_grad_enabled()
    name = _names.get(module)
    if name is None:
        name = _name_all(module)
    if name in _seen or not _with_parameters.get(module):
        return
    _seen.add(name)
    _new[name] = _way()


def _way() -> list[list[Any]]:
    found: list[list[Any]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < _DEEPEST:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, *OURS)):
            found.append([file, frame.f_lineno])
        elif found and file.endswith(_CALLS):
            break
        frame = frame.f_back
    return found


def _name_all(root: nn.Module) -> str:
    """Names for a module that belongs to none that has run, and for all in it."""
    held = {name.rpartition(".")[0] for name, _ in root.named_parameters()}
    held |= {name[:end] for name in held for end, letter in enumerate(name) if letter == "."} | {""}
    for name, module in root.named_modules():
        bare = name.removeprefix("module.") if isinstance(root, DistributedDataParallel) else name
        bare = ".".join(part for part in bare.split(".") if part not in _WRAPPERS)
        _names[module] = bare or type(root).__name__
        _with_parameters[module] = name in held
    return _names[root]


def quiet() -> bool:
    """Whether the module that was called last runs without gradients."""
    return _quiet


def take() -> tuple[int, Ran]:
    """The number of the step, and what has run in it since this was last asked."""
    told = dict(_new)
    _new.clear()
    return _steps, told
