"""Virtual GPUs for child processes: what to put into a child's environment so that it starts with the same machine.

The child's Python finds our sitecustomize first, which waits for `import torch` and then installs. Never touches a
child that does not import torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.virtual.state import Machine

VARIABLE = "TRIMTAB_VIRTUAL"
START = "TRIMTAB_START"
"""Names what a child calls ("package.module:function") before it reads its program."""
SITE = Path(__file__).parent / "site"


def environment(machine: Machine, setup: str | None = None) -> dict[str, str]:
    """Variables to add to a child's environment: the machine in words that survive a process boundary.

    `setup` ("package.module:function") is called with the child's machine; a rehearsal attaches its observer there.
    """
    from trimtab.virtual.state import VirtualDevice

    first = machine.devices[0] if machine.devices else VirtualDevice(0, "none", 1, (9, 0))
    described = {
        "count": len(machine.devices),
        "memory": first.total_bytes,
        "name": first.name,
        "capability": list(first.capability),
        "on_fault": machine.on_fault,
        "shapes": machine.shapes,
        "every_rank": not machine.stands_for_all,
        "visible_at_install": machine.visible_at_install,
        "setup": setup,
    }
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != SITE]
    return {VARIABLE: json.dumps(described), "PYTHONPATH": os.pathsep.join([str(SITE), *path])}
