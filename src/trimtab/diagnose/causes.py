"""From a fault on virtual devices, or an exception, to a finding: the line that fails, the line to change, the fix.

Every rule is general: it looks at where tensors were made and moved, who holds them, and what the source says. None
knows a particular program. A rule gets the scene and a suspect, and says a verdict or nothing; the first that applies
speaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trimtab.diagnose import (
    owners,
    rules_aside,
    rules_batch,
    rules_dropped,
    rules_given,
    rules_held,
    rules_host,
    rules_late,
    rules_likely,
    rules_modules,
    rules_moves,
    rules_optimizer,
    rules_siblings,
    source,
)
from trimtab.diagnose.explain import match_message
from trimtab.diagnose.finding import KINDS, Finding, Place, TensorNote
from trimtab.diagnose.raised import diagnose_exception
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_generator import generator
from trimtab.diagnose.rules_launch import current_device
from trimtab.diagnose.rules_precision import dtype, refused
from trimtab.diagnose.rules_values import forked, host_only, no_room
from trimtab.diagnose.scene import Scene, Suspect

if TYPE_CHECKING:
    from trimtab.virtual.faults import Fault
    from trimtab.virtual.origin import Origin

__all__ = ["diagnose", "diagnose_exception"]

_Rule = Callable[[Scene, Suspect], Verdict | None]
_CERTAIN: tuple[_Rule, ...] = (
    rules_optimizer.optimizer_state,
    rules_aside.tied,
    rules_dropped.dropped_move,
    rules_moves.loaded,
    rules_host.picked_on_host,
    rules_moves.moved_away,
    rules_given.wrong_slot,
    rules_aside.kept_aside,
    rules_aside.passed_over,
    rules_held.unregistered,
    rules_late.made_in_forward,
    rules_late.placed_late,
    rules_modules.never_moved,
    rules_given.placement_conflict,
    rules_batch.handed_over,
)
"""What the evidence proves, whichever operand it is found on: these speak before what is only likely."""
_LIKELY: tuple[_Rule, ...] = (
    rules_modules.elsewhere,
    rules_batch.not_prepared,
    rules_modules.copied_before_move,
    rules_held.partly_moved,
    rules_given.device_given,
    rules_siblings.mover,
    rules_siblings.sibling,
    rules_likely.misplaced_layer,
    rules_moves.wrong_gpu,
    rules_likely.apart,
    rules_likely.device_alias,
    rules_given.never_asked,
    rules_held.kept,
    rules_likely.assignment,
    rules_likely.birth,
)
"""What explains the likeliest stray operand best."""
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def diagnose(fault: Fault) -> Finding:
    """The finding for a fault; the same one each time that it is asked about the same fault."""
    known: Finding | None = getattr(fault, "_finding", None)
    if known is None:
        known = _diagnose(fault)
        fault._finding = known  # type: ignore[attr-defined]
    return replace(known)


def _diagnose(fault: Fault) -> Finding:
    scene = Scene(fault)
    verdict = _judge(scene) or Verdict()
    where = _place(fault.frame)
    library = _library(fault)
    return Finding(
        kind=verdict.kind or (fault.kind if fault.kind in KINDS else "other-error"),
        message=fault.message,
        where=where or library,
        cause=verdict.cause,
        fix=(verdict.fix or known_fix(fault.message)) + _others(scene, verdict),
        op=fault.op,
        module=_module(scene),
        tensors=_notes(scene),
        library=library if where is not None else None,
        edits=verdict.edits,
    )


def _judge(scene: Scene) -> Verdict | None:
    """What the rules for this kind of fault say; the first that applies speaks."""
    kind = scene.fault.kind
    if kind == "worker-uses-gpu" and (verdict := forked(scene)):
        return verdict
    if kind == "out-of-memory":
        return no_room(scene)
    if kind == "generator-device":
        return generator(scene)
    if kind == "placement-conflict":
        return current_device(scene)
    if kind in ("device-mismatch", "pin-of-gpu-tensor") and len(scene.operands) == 1:
        return host_only(scene)
    if kind == "dtype-mismatch":
        return dtype(scene)
    if kind == "backend-unsupported" and (verdict := refused(scene)):
        return verdict
    placement = kind in ("device-mismatch", "index-device", "unmoved-state")
    pairs = [(rule, stray) for rule in _CERTAIN for stray in scene.strays] if placement else []
    pairs += [(rule, stray) for stray in scene.strays for rule in (_LIKELY if placement else _LIKELY[-1:])]
    return next((verdict for rule, stray in pairs if (verdict := rule(scene, stray))), None)


def _others(scene: Scene, verdict: Verdict) -> str:
    """What else of the operation stayed on the CPU: a run would stop there next."""
    cause = verdict.cause
    left = [s for s in scene.operands if s.device == "cpu" and s.operand.shape and s.born is not None]
    places = {(s.born.file, s.born.line): s for s in left if s.born is not None}
    if cause is None or (cause.file, cause.line) not in places or len(left) == len(scene.operands):
        return ""
    mended = {(cause.file, cause.line), *((edit.file, edit.start[0]) for edit in verdict.edits)}
    more = [
        f"{scene.expression_of(s) or s.operand.name}, made at line {line}"
        for (file, line), s in places.items()
        if (file, line) not in mended
    ]
    return f"; the same for {' and '.join(more)}" if more else ""


def _module(scene: Scene) -> str:
    held = (s.attributes[0].module for s in scene.operands if s.attributes)
    return next((path for module in held if (path := owners.path_of(module, scene.modules))), "")


def _notes(scene: Scene) -> list[TensorNote]:
    return [
        TensorNote(
            name=scene.expression_of(suspect) or operand.name,
            device=operand.device,
            dtype=operand.dtype,
            shape=tuple(operand.shape),
            born=_place(suspect.born),
        )
        for suspect in scene.operands
        if (operand := suspect.operand)
    ]


def _library(fault: Fault) -> Place | None:
    """The innermost line outside torch, when it is not the user's own: the library that the user's line led to."""
    for frame in fault.frames:
        if frame.file.startswith((_TORCH, "<")):
            continue
        return None if fault.frame is not None and frame == fault.frame else _place(frame)
    return None


def _place(origin: Origin | None) -> Place | None:
    return source.place(origin.file, origin.line) if origin is not None else None


def known_fix(message: str) -> str:
    """What to do by the message alone."""
    if known := match_message(message):
        pattern, fields = known
        return pattern.fix.format_map(fields)
    return ""
