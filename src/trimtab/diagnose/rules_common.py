"""What a rule says about a fault, and what several say: where a stray tensor should go, what it meets, who made it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.diagnose import source
from trimtab.diagnose.finding import Cause, Edit
from trimtab.diagnose.scene import Scene, Suspect


@dataclass
class Verdict:
    """What a rule says."""

    cause: Cause | None = None
    fix: str = ""
    kind: str = ""
    """Another kind than the fault's, when the cause shows one."""
    edits: list[Edit] = field(default_factory=list)
    """The fix as changes to the user's files, where it can be written as code that runs there."""


def target(scene: Scene, stray: Suspect) -> str:
    """The device to move to, as code: the partner's own name if it has one here."""
    partner = scene.partner(stray)
    if name := scene.expression_of(partner):
        return f"{name}.device"
    if partner is not None:
        return f'"{partner.device}"'
    return '"cuda"' if alone(scene) else "x.device"


def alone(scene: Scene) -> bool:
    """Whether what is wrong is no other tensor but the taker: NCCL, to which a tensor in host memory is given."""
    return {suspect.device for suspect in scene.operands} == {"cpu"}


def met(scene: Scene, stray: Suspect, subject: str = "it meets") -> str:
    """Why a tensor's place is wrong."""
    if alone(scene):
        return "what takes it works on the GPU alone"
    partner = scene.partner(stray)
    return f"{subject} a tensor on {partner.device if partner is not None else 'another device'}"


def construction(file: str, line: int, after: int) -> int:
    """From a line inside a class's __init__ out to the line that constructs it (behind `after`, if there is one)."""
    for _ in range(4):
        function, owner = source.function_at(file, line), source.class_at(file, line)
        if function is None or owner is None or function.name != "__init__":
            break
        lines = sorted(call.lineno for call in source.calls(file, owner.name))
        sites = [n for n in lines if not owner.lineno <= n <= (owner.end_lineno or 0)]
        if not sites:
            break
        line = next((n for n in sites if n > after), sites[0])
    return line
