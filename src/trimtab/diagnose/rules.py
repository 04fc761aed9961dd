"""The rules that lead from a placement fault to its cause, in their order. The first that applies speaks.

A rule gets the scene and a suspect and returns a verdict or None. Order matters: what is certain (a result thrown
away, state that was never registered) comes before what is likely (the line that last set the variable).
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.diagnose import rules_certain, rules_likely
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.diagnose.verdict import Verdict

Rule = Callable[[Scene, Suspect], Verdict | None]
CERTAIN: tuple[Rule, ...] = (
    rules_certain.optimizer_state,
    rules_certain.tied,
    rules_certain.dropped_move,
    rules_certain.loaded,
    rules_certain.unregistered,
    rules_certain.made_after_move,
    rules_certain.placement_conflict,
)
"""What the evidence proves, whichever operand it is found on."""
LIKELY: tuple[Rule, ...] = (
    rules_likely.not_prepared,
    rules_likely.made_before_move,
    rules_likely.mover,
    rules_likely.sibling,
    rules_likely.misplaced_layer,
    rules_likely.device_alias,
    rules_likely.assignment,
    rules_likely.birth,
)
"""What explains the likeliest stray operand best."""
