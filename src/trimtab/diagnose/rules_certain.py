"""Rules that prove the cause of a placement fault: a tied weight, two settings that disagree."""

from __future__ import annotations

import ast

from trimtab.diagnose import holders, source
from trimtab.diagnose.rewrite import last_move_argument
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual.origin import Origin


def tied(scene: Scene, stray: Suspect) -> Verdict | None:
    """A weight that two modules share follows the last move of either."""
    for suspect in (stray, *scene.operands):
        owners = {id(a.module) for a in suspect.attributes if a.registered}
        if len(owners) < 2 or suspect.moved is None:
            continue
        names = [
            f"{holders.path_of(a.module, scene.modules)}.{a.name}" for a in suspect.attributes if a.registered
        ]
        if not _moves_one_of(suspect.moved, names):
            continue
        why = f"this moves a tied weight ({' = '.join(names)}): both modules follow the last move, to {suspect.device}"
        fix = "keep tied modules on one device (move both to the same one) and bring the activations there"
        return Verdict(source.cause(suspect.moved.file, suspect.moved.line, why), fix)
    return None


def _moves_one_of(moved: Origin, paths: list[str]) -> bool:
    """Whether a line moves one part of a model (`model.head.to(…)`) and so only one of the given parameters by name."""
    for call in source.call_on(moved.file, moved.line):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in source.MOVES:
            continue
        part = ast.unparse(call.func.value).split(".")[-1]
        if 0 < sum(part in path.split(".") for path in paths) < len(paths):
            return True
    return False


def placement_conflict(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch follows a setting, while a helper object (an accelerator, a trainer) moved the model elsewhere."""
    partner = scene.partner(stray)
    if partner is None or not partner.is_parameter or (moved := partner.moved) is None:
        return None
    chosen = last_move_argument(scene, stray)
    if chosen is None or not any(
        word in chosen.lower() for word in ("cfg", "conf", "args", "device", "opt", "setting")
    ):
        return None
    for call in source.call_on(moved.file, moved.line):
        if not isinstance(call.func, ast.Attribute) or call.func.attr in source.MOVES:
            continue
        maker = call.func.value
        made = (
            source.last_assignment(moved.file, moved.line, maker.id) if isinstance(maker, ast.Name) else None
        )
        if made is None or not isinstance(getattr(made, "value", None), ast.Call):
            continue
        why = f"{ast.unparse(maker)} chooses the device by itself ({partner.device}) while batches follow {chosen}"
        fix = f"let it obey the same setting as the batches ({chosen}), or send batches to {ast.unparse(maker)}.device"
        return Verdict(source.cause(moved.file, made.lineno, why), fix, "placement-conflict")
    return None
