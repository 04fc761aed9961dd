"""How long `trimtab` takes to answer, to plan and to reach the first step of training, with cold and warm files.

Each command of each installation by turns. Cold: the system is asked to drop what it keeps of the files of Python's
packages before each start (it keeps what running processes have mapped). `train` is timed to the moment at which its
first step begins, with nothing held out, and ended there. Processor seconds tell where other work is on the machine.
Run: python benchmarks/start_up.py [--against OTHER/.venv/bin/trimtab] [--rounds 3] [--config examples/sft.yaml]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

FIRST_STEP = "first step on"
WORKER = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def drop_files(root: Path) -> None:
    """Ask the system to forget what it has read of all files there."""
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                number = os.open(path, os.O_RDONLY)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)


def timed(command: list[str], until: str | None) -> tuple[float, float]:
    """Seconds and processor seconds to the end, or to the line that holds `until`."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | WORKER
    )
    watched, spent, said = psutil.Process(process.pid), 0.0, []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        times = watched.cpu_times()
        spent = times.user + times.system
        if until is not None and until in line:
            seconds = time.perf_counter() - started
            process.send_signal(signal.SIGKILL)
            process.wait()
            return seconds, spent
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, "".join(said)
    assert until is None, "".join(said)
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, help="another installation's trimtab, timed by turns with this one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", default="examples/sft.yaml")
    parser.add_argument("--no-cold", action="store_true")
    asked = parser.parse_args()
    here = Path(sys.executable).parent / "trimtab"
    both = {"before": asked.against, "after": here} if asked.against else {"": here}
    import torch

    packages = Path(torch.__file__).parent.parent
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}" + "".join(f"{name:>24}" for name in both))
    with tempfile.TemporaryDirectory() as place:
        train = ["train", asked.config, "data.eval_fraction=0", "training.max_steps=1"]
        commands: dict[str, tuple[list[str], str | None]] = {
            "--help": (["--help"], None),
            "plan": (["plan", asked.config], None),
            "train to its first step": (train, FIRST_STEP),
        }
        for cold in (False,) if asked.no_cold else (True, False):
            for name, (words, until) in commands.items():
                found: dict[str, list[tuple[float, float]]] = {side: [] for side in both}
                for number in range(1 if cold else asked.rounds):
                    for side, program in both.items():
                        if cold:
                            drop_files(packages)
                        own = [f"output_dir={place}/{side}-{cold}-{number}"] if until else []
                        found[side].append(timed([str(program), *words, *own], until))
                print(
                    f"{name + (', cold' if cold else ', warm'):34}" + "".join(map(_shown, found.values())),
                    flush=True,
                )


def _shown(times: list[tuple[float, float]]) -> str:
    wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{wall:12.2f} s ({processor:5.2f} s)"


if __name__ == "__main__":
    main()
