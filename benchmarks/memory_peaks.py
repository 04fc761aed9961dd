"""Peak memory of a training step: rehearsed on a virtual GPU, then measured on a real one.

    python benchmarks/memory_peaks.py predict --out predicted.json         # no GPU: `trimtab rehearse --shapes-only`
    python benchmarks/memory_peaks.py measure --out measured.json          # on the GPU: the same script, plainly
    python benchmarks/memory_peaks.py table predicted.json measured.json [fitcheck.json]

Every case is a process of its own: `memory_step.py`, a plain script, or `trimtab train` on a model folder with random
weights; of the latter the rehearsal reads the config alone. A case that fails is told with its reason. `measure` takes
several cases at once (`--parallel`): what torch counts is of a process's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memory_cases import CASES, RUNS
from memory_stage import stage

HERE = Path(__file__).resolve().parent
GIB = 2**30


def main() -> int:
    options = _options()
    if options.verb == "table":
        print(table(*(json.loads(path.read_text(encoding="utf-8")) for path in options.files)))
        return 0
    every = [*CASES, *RUNS]
    names = options.only.split(",") if options.only else every
    if unknown := sorted(set(names) - set(every)):
        sys.exit(f"no such case: {', '.join(unknown)}; there are {', '.join(every)}")
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(options.parallel) as pool:
        for name, result in zip(names, pool.map(lambda name: run(name, options), names), strict=True):
            found[name] = result
            print(name, json.dumps(result), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any("failed" in result for result in found.values()) else 0


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The peaks of one case by phase, or why there are none."""
    folder = Path(tempfile.mkdtemp(prefix=f"memory-{name}-"))
    result, rehearsal = folder / "result.json", folder / "rehearsal.json"
    rehearse = ["-m", "trimtab", "rehearse", "--shapes-only", "--gpus", options.gpu, "--json", str(rehearsal)]
    rehearse += ["--timeout", str(options.limit)]
    predict = options.verb == "predict"
    if name in CASES:
        script = [str(HERE / "memory_step.py"), name, str(result)]
        command = [*rehearse, "--in-place", *script] if predict else script
    else:
        config = str(stage(folder, RUNS[name], weights=not predict))
        command = [*rehearse, "--max-steps", "3", config] if predict else ["-m", "trimtab", "train", config]
    started = time.time()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=options.limit + 60,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.limit + 60} s"}
    seconds = {"seconds": round(time.time() - started, 1)}
    if name in CASES and result.exists():
        return {"phases": json.loads(result.read_text(encoding="utf-8"))} | seconds
    if name in RUNS and (phases := run_figures(folder, predict)):
        return {"phases": phases} | seconds
    return {"failed": (done.stdout + done.stderr)[-1500:]} | seconds


def run_figures(folder: Path, predict: bool) -> dict[str, Any]:
    """What the rehearsal told of a run's GPU, or what the run's own logs did."""
    if predict:
        file = folder / "rehearsal.json"
        gpu = json.loads(file.read_text(encoding="utf-8"))["memory"]["cuda:0"] if file.exists() else {}
        lines = (
            [{"peak_memory_bytes": gpu["peak_bytes"], "peak_reserved_bytes": gpu["reserved_bytes"]}]
            if gpu
            else []
        )
    else:
        file = folder / "run" / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if file.exists()
            else []
        )
    told = [line for line in lines if line.get("peak_memory_bytes")]
    if not told:
        return {}
    names = {"allocated": "peak_memory_bytes", "reserved": "peak_reserved_bytes"}
    return {"run": {ours: max(line[name] for line in told) for ours, name in names.items()}}


def table(predicted: dict[str, Any], measured: dict[str, Any], formula: dict[str, int] | None = None) -> str:
    """Markdown: the highest peak of each case, predicted and measured, and what a formula says (`memory_peer.py`)."""
    lines = [
        "| case | | predicted GiB | measured | error | reserved, predicted | measured | error | fitcheck |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for name, case in (CASES | RUNS).items():
        both = [found.get(name, {}).get("phases") for found in (predicted, measured)]
        other = f"{formula[name] / GIB:.1f}" if formula and name in formula else ""
        known = "calibration" if case.calibration else ""
        cells = []
        for figure, kept in errors.items():
            told, seen = (
                max(phase[figure] for phase in phases.values()) if phases else None for phases in both
            )
            if told is not None and seen is not None:
                kept.append(told / seen - 1)
            error = f"{kept[-1]:+.1%}" if told is not None and seen is not None else ""
            cells += [*(f"{size / GIB:.2f}" if size is not None else "–" for size in (told, seen)), error]
        lines.append(f"| {name} | {known} | {' | '.join(cells)} | {other} |")
    for figure, kept in errors.items():
        if kept:
            mean = sum(map(abs, kept)) / len(kept)
            lines.append(
                f"\n{figure}: worst {max(kept, key=abs):+.1%}, mean {mean:.1%} over {len(kept)} cases"
            )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("predict", "measure", "table"))
    parser.add_argument("files", nargs="*", type=Path, help="for table: predicted.json measured.json")
    parser.add_argument("--only", help="cases, by commas")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a case may take")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
