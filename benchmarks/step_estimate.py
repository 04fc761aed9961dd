"""What `trimtab fit`'s estimate says of the steps of a script that trains, or what they take on a GPU.

    python benchmarks/step_estimate.py --virtual H200 vision_speed.py --only plain --workers 0    # anywhere, by shapes
    python benchmarks/step_estimate.py --json measured.json vision_speed.py --only plain          # on a GPU

A step is what lies between two steps of an optimizer. After so many (`--warm-up`) some are counted by
`trimtab.virtual.work` and told by `trimtab.recipes.roofline`, or timed and then, one further, looked at by torch's
profiler: how many kernels it has, how long the GPU works, and which kernels that is. The script ends there.
`--beside N`: so many of these commands run at once in one folder; all warm up and compile together, and are timed in
turn.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Told = dict[str, Any]


class Enough(BaseException):
    """All is known."""


class Counted:
    """On a virtual GPU: the kernels of one step, and what the estimate makes of them."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        from trimtab.gpu_models import MODELS
        from trimtab.recipes import roofline
        from trimtab.virtual.context import install
        from trimtab.virtual.work import Tally

        self.gpu = next(model for model in MODELS if model.key == wanted.virtual)
        major, minor = map(int, self.gpu.capability.split("."))
        machine = install(1, memory=1 << 50, name=self.gpu.name, capability=(major, minor), shapes=True)
        self.ops: dict[str, list[float]] = {}
        ops, gpu = self.ops, self.gpu

        class Named(Tally):
            """Knows what is launched one by one, too: by the operation, how often it ran, its kernels, seconds."""

            named = ""

            def _count(self, plan: Any, *args: Any) -> None:
                self.named = plan.name
                super()._count(plan, *args)

            def add(self, launch: Any, number: float = 1.0) -> None:
                if self.on and launch.by == "eager":
                    known = ops.setdefault(self.named, [0, 0, 0.0])
                    told = (1, number, number * roofline.on_gpu(gpu, launch))
                    known[:] = [a + b for a, b in zip(known, told, strict=True)]
                super().add(launch, number)

        self.tally, self.warm_up, self.told = Named(), wanted.warm_up, Told()
        self.tally.listen(machine)

    def stepped(self, number: int) -> None:
        if number == self.warm_up:
            self.tally.on = True
        elif number > self.warm_up:
            self.told = self._tell()
            raise Enough

    def _tell(self) -> Told:
        from trimtab.recipes import roofline

        work = self.tally.work()[""]
        alone = {
            kind: sum(
                roofline.on_gpu(self.gpu, one) * n for one, n in work.items() if (one.runs or "bytes") == kind
            )
            for kind in ("half", "attention", "single", "bytes")
        }
        launched = Counter[str]()
        for one, number in work.items():
            launched[one.by] += number  # type: ignore[assignment]
        longest = sorted(work.items(), key=lambda pair: -roofline.on_gpu(self.gpu, pair[0]) * pair[1])
        return {
            "estimated_s": roofline.seconds(self.gpu, work),
            "gpu_s": sum(alone.values()),
            "gpu_s_by_kind": alone,
            "kernels": sum(launched.values()),
            "launched_by": launched,
            "ops": dict(sorted(self.ops.items(), key=lambda pair: -pair[1][2])),
            "top": [[one._asdict(), n, roofline.on_gpu(self.gpu, one) * n] for one, n in longest[:40]],
        }


class Timed:
    """On a real GPU: steps by the clock, and one by the profiler."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.warm_up, self.timed, self.beside = wanted.warm_up, wanted.timed, wanted.beside
        self.told, self.began = Told(), 0.0
        self.turn: Any = None
        self.profile: Any = None

    def stepped(self, number: int) -> None:
        if number == self.warm_up:
            self._wait()
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        elif number == self.warm_up + self.timed:
            torch.cuda.synchronize()
            self.told["seconds_a_step"] = (time.perf_counter() - self.began) / self.timed
            self.told["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profile = torch.profiler.profile(activities=kinds)
            self.profile.__enter__()
        elif number == self.warm_up + self.timed + 1:
            torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)
            if self.turn is not None:
                self.turn.close()
            self._look()
            raise Enough

    def _wait(self) -> None:
        """Until all are warm, and then for the turn, which lasts as long as the file is open."""
        if self.beside == 1:
            return
        Path(f"warm-{os.getpid()}").touch()
        while len(list(Path().glob("warm-*"))) < self.beside:
            time.sleep(0.1)
        self.turn = open("turn", "w")  # noqa: SIM115
        fcntl.flock(self.turn, fcntl.LOCK_EX)

    def _look(self) -> None:
        on_gpu = [event for event in self.profile.events() if event.device_type.name == "CUDA"]
        # A range that was named covers kernels, and is none.
        named = ("Optimizer.", "ProfilerStep")
        events = [
            event for event in on_gpu if not event.is_user_annotation and not event.name.startswith(named)
        ]
        kernels, times = Counter[str](), Counter[str]()
        for event in events:
            kernels[event.name] += 1
            times[event.name] += event.device_time_total / 1e6
        calls = Counter(event.name for event in self.profile.events() if event.name.startswith("cu"))
        ops: dict[str, list[float]] = {}
        for event in self.profile.events():
            if event.kernels:
                known = ops.setdefault(event.name, [0, 0, 0.0])
                told = (1, len(event.kernels), sum(kernel.duration for kernel in event.kernels) / 1e6)
                known[:] = [a + b for a, b in zip(known, told, strict=True)]
        host = sorted(self.profile.key_averages(), key=lambda one: -one.self_cpu_time_total)
        self.told |= {
            "host": {one.key[:80]: [one.count, one.self_cpu_time_total / 1e6] for one in host[:40]},
            "kernels": len(events),
            "gpu_s": sum(times.values()),
            "calls": calls,
            "ops": dict(sorted(ops.items(), key=lambda pair: -pair[1][2])),
            "top": [[name[:120], kernels[name], seconds] for name, seconds in times.most_common(60)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", metavar="GPU", help="a model of the catalogue")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--timed", type=int, default=5)
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    wanted = parser.parse_args()
    watch: Counted | Timed = Counted(wanted) if wanted.virtual else Timed(wanted)
    made = 0

    def stepped(*_: Any) -> None:
        nonlocal made
        made += 1
        watch.stepped(made)

    register_optimizer_step_post_hook(stepped)
    script = wanted.script if wanted.script.exists() else Path(__file__).parent / wanted.script
    sys.argv = [str(script), *wanted.arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Enough:
        told = {"command": [script.name, *wanted.arguments], "torch": torch.__version__, **watch.told}
        text = json.dumps(told, indent=1)
        print(text)
        if wanted.json:
            wanted.json.write_text(text, encoding="utf-8")
        return
    sys.exit(f"the script ended after {made} steps of an optimizer")


if __name__ == "__main__":
    main()
