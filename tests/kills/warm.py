"""A process that has imported everything, and runs `trimtab train` in children of its own, killed as it is told.

Reads a line of JSON for each run: {"words", "folder", "at", "torn", "after", "output"}; answers with one: how the child
ended, how many file operations it made, how long it took. An interpreter takes ten times as long to start as to train.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fault_layer import FaultLayer

IMPORTED = (
    *("torch", "transformers", "trl", "peft", "datasets", "safetensors.torch", "accelerate", "trimtab.cli"),
    *(
        "trl.trainer.sft_trainer",
        "trl.trainer.grpo_trainer",
        "trimtab.recipes.run",
        "trimtab.recipes.planning",
    ),
    *("trimtab.recipes.trainer_driver", "trimtab.recipes.loop_driver", "trimtab.recipes.grpo_trainer"),
    *("trimtab.recipes.picture_trainer", "trimtab.recipes.voice_trainer", "trimtab.zeroth.optimizer"),
)


def child(job: dict[str, Any]) -> None:
    out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    layer = FaultLayer(Path(job["folder"]), job.get("at"), job.get("torn"))
    layer.install()
    sys.argv = ["trimtab", *job["words"]]
    code: Any = 1
    try:
        importlib.import_module("trimtab.cli").main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        Path(job["output"]).with_suffix(".count").write_text(str(layer.count))
        os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in a fork would write to all of these pages
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        count = Path(job["output"]).with_suffix(".count")
        count.unlink(missing_ok=True)
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(job)
        status = ended_by(pid, job.get("after"))
        made = int(count.read_text()) if count.exists() else None
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        print(
            json.dumps({"ended": ended, "operations": made, "seconds": time.monotonic() - begun}), flush=True
        )


def ended_by(pid: int, after: float | None) -> int:
    """How the child ended; killed after so many seconds, if it still runs then."""
    deadline = None if after is None else time.monotonic() + after
    while deadline is not None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    main()
