"""Runs a shell script inside a rehearsal. Every python in it that imports torch joins by itself.

The shell's own errors are no finding: what it ended with is told, and proves nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process


def run(words: list[str], here: Process) -> int:
    """The status of the shell."""
    from trimtab.rehearse import shim  # it reads lines and configs, which no script needs

    stand_ins = here.folder / f"bin-{os.getpid()}"
    shim.put_into(stand_ins)
    # `python`, `torchrun` and `accelerate` in the script are those beside the python that runs the rehearsal.
    path = [str(stand_ins), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    status = subprocess.call(words, env={**os.environ, "PATH": os.pathsep.join(path)})
    if status:
        text = f"{os.path.basename(words[0])} ended with status {status}: see what it says above"
        here.recorder.write(t="unproven", text=text)
    return 0
