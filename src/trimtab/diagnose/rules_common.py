"""What several rules say: where a stray tensor should go, what it meets, and where a module is constructed."""

from __future__ import annotations

from trimtab.diagnose import source
from trimtab.diagnose.scene import Scene, Suspect


def target(scene: Scene, stray: Suspect) -> str:
    """The device to move to, as code: the partner's own name if it has one here."""
    partner = scene.partner(stray)
    if name := scene.expression_of(partner):
        return f"{name}.device"
    return f'"{partner.device}"' if partner is not None else "x.device"


def other(scene: Scene, stray: Suspect) -> str:
    partner = scene.partner(stray)
    return partner.device if partner is not None else "another device"


def construction(file: str, line: int, after: int) -> int:
    """From a line inside a class's __init__ out to the line that constructs it (behind `after`, if there is one)."""
    for _ in range(4):
        function, owner = source.function_at(file, line), source.class_at(file, line)
        if function is None or owner is None or function.name != "__init__":
            break
        sites = [
            n for n in source.calls(file, owner.name) if not owner.lineno <= n <= (owner.end_lineno or 0)
        ]
        if not sites:
            break
        line = next((n for n in sites if n > after), sites[0])
    return line
