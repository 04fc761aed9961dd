"""The tasks of the GLUE+ benchmark by name: the nine of GLUE and eight more. `load.py` finds their rows."""

from __future__ import annotations

import re
from difflib import get_close_matches

from trimtab.data.tasks.glue import GLUE
from trimtab.data.tasks.plus import PLUS
from trimtab.data.tasks.task import Question, Task
from trimtab.errors import RequestError

__all__ = ["TASKS", "Question", "Task", "task"]

TASKS: dict[str, Task] = {task.name: task for task in (*GLUE, *PLUS)}

_ALIASES = {
    "sts": "stsb",
    "mnlim": "mnli",
    "multinli": "mnli",
    "quora": "qqp",
    "squad1": "squad",
    "wscfixed": "wsc",
}


def task(name: str) -> Task:
    """The task of a name, however it is written: `SST-2`, `sst_2` and `sst2` are one."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    plain = _ALIASES.get(plain, plain)
    if plain in TASKS:
        return TASKS[plain]
    near = get_close_matches(plain, [*TASKS, *_ALIASES], n=3, cutoff=0.5)
    meant = ", ".join(dict.fromkeys(_ALIASES.get(n, n) for n in near))
    raise RequestError.of(
        f"no task is called {name!r}",
        f"the tasks are {', '.join(TASKS)}",
        f"did you mean {meant}?" if meant else "name one of them",
    )
