"""Peak memory of scripts and of Trimtab's own runs: predicted by a rehearsal, measured on a GPU, both in one table.

    python benchmarks/memory_unseen/measure.py predict --out predicted.json   # no GPU: rehearse --shapes-only
    python benchmarks/memory_unseen/measure.py measure --out measured.json    # on the GPU: the same scripts, plainly
    python benchmarks/memory_unseen/measure.py table predicted.json measured.json [mended.json]

The scripts are programs as people write them; none knows of this file, and none was rehearsed before it was written
down. Each is a process of its own and ends with a line of JSON, the result. One that fails is told with its error.
`--cases FOLDER` takes those of another folder; a case that is a JSON file there goes through `trimtab train`, of whose
model the rehearsal gets the config alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STRANGERS = HERE.parent / "memory_strangers"
sys.path.insert(0, str(STRANGERS))
from stage import stage  # noqa: E402

GIB = 2**30
FIGURES = ("max_memory_allocated", "max_memory_reserved")


def main() -> int:
    options = _options()
    if options.verb == "table":
        print(table(*(json.loads(path.read_text(encoding="utf-8")) for path in options.files)))
        return 0
    scripts = sorted(
        path for path in options.cases.resolve().glob("[0-9]*") if path.suffix in (".py", ".json")
    )
    if options.only:
        scripts = [path for path in scripts if path.stem.split("_")[0] in options.only.split(",")]
    found: dict[str, Any] = {}
    ends = time.monotonic() + options.total
    with ThreadPoolExecutor(options.parallel) as pool:
        results = pool.map(lambda path: run(path, options, ends), scripts)
        for path, result in zip(scripts, results, strict=True):
            found[path.stem] = result
            print(path.stem, json.dumps(result), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run(script: Path, options: argparse.Namespace, ends: float) -> dict[str, Any]:
    """What one script told of its peaks, or why it told nothing; of a rehearsal also its findings."""
    limit = min(options.limit, ends - time.monotonic())
    if limit <= 5:
        return {"failed": "no time was left for it"}
    folder = Path(tempfile.mkdtemp(prefix=f"memory-{script.stem}-"))
    try:
        return _ran(script, folder, options, limit)
    finally:
        if script.suffix == ".json" and options.verb == "measure":
            shutil.rmtree(folder)  # gigabytes of random weights


def _ran(script: Path, folder: Path, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    report = folder / "report.json"
    rehearse = ["-m", "trimtab", "rehearse", "--shapes-only", "--gpus", options.gpu, "--json", str(report)]
    rehearse += ["--timeout", str(int(limit))]
    started = time.monotonic()
    what = [str(script)]
    if script.suffix == ".json":
        config = str(stage(folder, script, weights=options.verb == "measure"))
        what = [config] if options.verb == "predict" else [str(STRANGERS / "train_told.py"), config]
    staged = round(time.monotonic() - started, 1)
    command = [*rehearse, *what] if options.verb == "predict" else what
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit + (30 if options.verb == "predict" else 0))
        except subprocess.TimeoutExpired:
            process.kill()
            return {"failed": f"not done after {limit:.0f} s"}
    result: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "exit": process.returncode}
    if script.suffix == ".json":
        result["staged_seconds"] = staged
    if report.exists():
        told = json.loads(report.read_text(encoding="utf-8"))
        result |= {
            "verdict": told["verdict"],
            "findings": [
                f"{found['severity']} {found['kind']}: {found['message'][:200]}" for found in told["findings"]
            ],
            "notes": told.get("notes", []),
        }
        if gpu := told["memory"].get("cuda:0"):
            result["report"] = {name: gpu[name] for name in ("peak_bytes", "reserved_bytes")}
            if script.suffix == ".json":
                # What a script of its own would print, a run's report tells.
                return result | dict(zip(FIGURES, result["report"].values(), strict=True))
    lines = [line for line in output.splitlines() if line.strip(" │|").startswith('{"max_memory_allocated"')]
    if lines:
        return result | json.loads(lines[-1].strip(" │|"))
    return result | {"failed": output[-1500:]}


def table(predicted: dict[str, Any], measured: dict[str, Any], mended: dict[str, Any] | None = None) -> str:
    """Markdown: of each script both peaks, as predicted, as measured, and as predicted by the code that was mended."""
    later = " | mended | error | reserved, mended | error" if mended else ""
    lines = [
        f"| script | verdict | predicted GiB | measured | error | reserved, predicted | measured | error{later} |",
        "|---|---|---|---|---|---|---|---|" + ("---|---|---|---|" if mended else ""),
    ]
    for name, told in predicted.items():
        seen, cells = measured.get(name, {}), [name, told.get("verdict", "none")]
        for figure in FIGURES:
            cells += [*map(_gib, (told.get(figure), seen.get(figure))), _error(told, seen, figure)]
        if mended:
            now = mended.get(name, {})
            for figure in FIGURES:
                cells += [_gib(now.get(figure)), _error(now, seen, figure)]
        lines.append(f"| {' | '.join(cells)} |")
    for word, found in (("as predicted", predicted), ("mended", mended or {})):
        lines += [_summary(word, found, measured, figure) for figure in FIGURES if found]
    return "\n".join(lines)


def _summary(word: str, found: dict[str, Any], measured: dict[str, Any], figure: str) -> str:
    both = [name for name, told in found.items() if figure in told and figure in measured.get(name, {})]
    errors = sorted((found[name][figure] / measured[name][figure] - 1 for name in both), key=abs)
    mean, within = sum(map(abs, errors)) / len(errors), sum(abs(error) <= 0.02 for error in errors)
    return (
        f"\n{word}, {figure}: {len(both)} of {len(measured)} have a figure, {within} within 2 %; "
        f"median {abs(errors[len(errors) // 2]):.2%}, mean {mean:.1%}, worst {errors[-1]:+.1%}"
    )


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.3f}"


def _error(told: dict[str, Any], seen: dict[str, Any], figure: str) -> str:
    return f"{told[figure] / seen[figure] - 1:+.1%}" if figure in told and figure in seen else ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("predict", "measure", "table"))
    parser.add_argument(
        "files", nargs="*", type=Path, help="for table: predicted.json measured.json [mended.json]"
    )
    parser.add_argument("--cases", type=Path, default=HERE, help="the folder of the cases")
    parser.add_argument("--only", help="numbers of scripts, by commas")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--limit", type=float, default=90, help="seconds that one script may take")
    parser.add_argument("--total", type=float, default=480, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("memory_unseen.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
