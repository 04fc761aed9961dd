"""What a rule says about a fault, and what several say: where a stray tensor should go, what it meets, who made it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Cause, Edit
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual.origin import Origin


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


def birthplace(stray: Suspect) -> Origin | None:
    """The line that made a tensor; of one that was put together from a list, the line that made what is in it."""
    born = stray.born
    if born is None:
        return None
    for call in source.call_on(born.file, born.line):
        if source.called_name(call) not in ("cat", "stack", "concat", "hstack", "vstack") or not call.args:
            continue
        puts = [
            c for c in source.calls(born.file, "append") if c.args and _is_on(c, ast.unparse(call.args[0]))
        ]
        puts = [c for c in puts if source.function_at(born.file, c.lineno) is source.function_at(*born[:2])]
        if len(puts) == 1 and rewrite.factories(puts[0].args[0]):
            return born._replace(line=puts[0].lineno)
    return born


def _is_on(call: ast.Call, owner: str) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == owner


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
