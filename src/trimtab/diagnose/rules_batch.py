"""A rule about batches that a library hands to the program: what it cannot look into, it does not move."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import source
from trimtab.diagnose.finding import Cause
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect


def handed_over(scene: Scene, stray: Suspect) -> Verdict | None:
    """The tensor lies in an object of the program's own class, which came from a library as an argument, not moved."""
    if stray.device != "cpu" or stray.is_parameter or stray.moved is not None:
        return None
    for sight in scene.sights(stray):
        if sight.taken_from not in source.parameters(sight.file, sight.line):
            continue
        # The object itself is given, or lies in a dict that is.
        held = (sight.frame.f_locals.get(name) for name in (sight.taken_from, sight.root))
        batch = next((value for value in held if _is_opaque(value)), None)
        if batch is None:
            continue
        giver = _library_before(sight.frame)
        made = _made_at(type(batch).__name__, [frame.f_code.co_filename for frame in scene.frames])
        if giver is None or made is None:
            continue
        kind = type(batch).__name__
        why = (
            f"{giver} moves dicts, lists and tuples of tensors, and what has a `to` method; {kind} is neither, so the "
            f"batch made here is handed over as it is, on {stray.device}"
        )
        fix = f"make the batch a dict, or give {kind} a method to(self, device) that moves all its tensors"
        return Verdict(Cause(made[0], made[1], source.place(*made).code, why), fix)
    return None


def _is_opaque(batch: Any) -> bool:
    """An object with tensors among its attributes that no general mover knows."""
    known = (torch.Tensor, nn.Module, Mapping, list, tuple, set, str, type)
    if isinstance(batch, known) or hasattr(batch, "to") or not hasattr(batch, "__dict__"):
        return False
    return any(isinstance(value, torch.Tensor) for value in vars(batch).values())


def _library_before(frame: FrameType) -> str | None:
    """The library whose code called this function; None where the program did so itself."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
        caller = caller.f_back
    if caller is None or source.is_user_file(caller.f_code.co_filename):
        return None
    name: str = caller.f_globals.get("__name__", "").partition(".")[0]
    return name or None


def _made_at(kind: str, files: list[str]) -> tuple[str, int] | None:
    """Where an object of this class is made, outside the class itself; else where the class is defined."""
    defined = None
    for file in dict.fromkeys(files):
        own = [n for n in source.walk(file) if isinstance(n, ast.ClassDef) and n.name == kind]
        defined = defined or next(((file, node.lineno) for node in own), None)
        for call in source.calls(file, kind):
            if not any(node.lineno <= call.lineno <= (node.end_lineno or 0) for node in own):
                return file, call.lineno
    return defined
