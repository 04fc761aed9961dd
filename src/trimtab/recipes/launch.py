"""How `train` becomes several processes (torchrun over the same command, told what this one is told), and quiet ones.

Trains nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.recipes.planning import Planned

SAVING_SECONDS = 600
_AT_ONCE_SECONDS = 8.0


def launch(arguments: list[str], config: Config, planned: Planned) -> int:
    """Start torchrun over this same command, one process per device."""
    count = planned.plan.processes
    env = dict(os.environ)
    for name in planned.hardware.launcher.stale:
        env.pop(name, None)
    # torchrun would give each process one thread; on the CPU that wastes the others.
    env.setdefault("OMP_NUM_THREADS", str(max(1, planned.hardware.cpu.cores // count)))
    # How long torchrun waits for processes that save a checkpoint before it kills them; 30 seconds by itself.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
    folder = str(config.output_dir)
    command = [
        sys.executable,
        "-m",
        "trimtab.recipes.agent",
        str(count),
        str(config.monitor.restarts),
        folder,
    ]
    command += ["train", *arguments]
    # Decided here once: each process would make up a folder, and judge by the memory that is free when it looks.
    command += [
        f"output_dir={folder}",
        f"sharding={str(planned.plan.strategy == 'sharded').lower()}",
    ]
    print(f"starting {count} processes with torchrun: {planned.plan.reasons['strategy']}", flush=True)
    ended = wait_for(command, env)
    return ended if ended in (0, 2) else 1


def is_first_of_all() -> bool:
    """Whether this process rehearses shapes for all ranks: it goes on as the first of them, and nobody is started."""
    from trimtab.virtual.state import machine

    in_force = machine()
    return in_force is not None and in_force.stands_for_all


def become_first(config: Config, planned: Planned) -> None:
    """Go on in this process as rank 0 of the processes that torchrun would start."""
    from trimtab.rehearse.one_rank import go_on_as_first

    count = planned.plan.processes
    for name in planned.hardware.launcher.stale:
        os.environ.pop(name, None)
    go_on_as_first(count)
    # As each of them is told.
    config.sharding = planned.plan.strategy == "sharded"
    reason = planned.plan.reasons["strategy"]
    print(f"rank 0 of {count} stands for the processes that torchrun would start: {reason}", flush=True)


def wait_for(command: list[str], env: dict[str, str]) -> int:
    """Run torchrun to its end and pass on what this process is told meanwhile; answers with its exit status.

    Its processes save a checkpoint when they are told to end, and would train on if only this one ended.
    """
    import psutil

    # In a group of its own: a terminal tells the whole of ours, and what is told twice ends without a checkpoint.
    launcher = psutil.Popen(command, env=env, process_group=0)
    told = 0

    def pass_on(number: int, frame: object) -> None:
        nonlocal told
        told += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            if told == 1:
                launcher.send_signal(number)
                return
            # torchrun waits for them by now, and would leave them behind if it were told again.
            for process in launcher.children():
                process.send_signal(number) if told == 2 else process.kill()
        if told == 2:
            # One that cannot hear (stopped, or inside a call that keeps Python's lock) would be waited for.
            killer = threading.Timer(_AT_ONCE_SECONDS, kill_all, [launcher])
            killer.daemon = True
            killer.start()

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored (nohup, a background job) stays ignored.
    heard = [n for n in map(signal.Signals.__getitem__, names) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        return int(launcher.wait())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_all(launcher: Any) -> None:
    """End the ranks and what they started, whatever they are doing."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


def quiet_libraries() -> None:
    """One progress display is enough: ours."""
    # Read by the datasets library when it is imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
