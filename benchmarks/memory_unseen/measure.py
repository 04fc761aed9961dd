"""Peak memory of the scripts beside this file: predicted by a rehearsal, measured on a GPU, and both in one table.

    python benchmarks/memory_unseen/measure.py predict --out predicted.json   # no GPU: rehearse --shapes-only
    python benchmarks/memory_unseen/measure.py measure --out measured.json    # on the GPU: the same scripts, plainly
    python benchmarks/memory_unseen/measure.py table predicted.json measured.json [mended.json]

The scripts are programs as people write them; none knows of this file, and none was rehearsed before it was written
down. Each is a process of its own and ends with a line of JSON, the result. One that fails is told with its error.
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

HERE = Path(__file__).resolve().parent
GIB = 2**30
FIGURES = ("max_memory_allocated", "max_memory_reserved")


def main() -> int:
    options = _options()
    if options.verb == "table":
        print(table(*(json.loads(path.read_text(encoding="utf-8")) for path in options.files)))
        return 0
    scripts = sorted(HERE.glob("[0-9]*.py"))
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
    report = folder / "report.json"
    rehearse = ["-m", "trimtab", "rehearse", "--shapes-only", "--gpus", options.gpu, "--json", str(report)]
    rehearse += ["--timeout", str(int(limit))]
    command = [*rehearse, str(script)] if options.verb == "predict" else [str(script)]
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
    lines = [line for line in output.splitlines() if line.strip(" │|").startswith('{"max_memory_allocated"')]
    if lines:
        return result | json.loads(lines[-1].strip(" │|"))
    return result | {"failed": output[-1500:]}


def table(predicted: dict[str, Any], measured: dict[str, Any], mended: dict[str, Any] | None = None) -> str:
    """Markdown: of each script both peaks, as predicted, as measured, and as predicted by the code that was mended."""
    extra = " mended | error |" if mended else ""
    lines = [
        f"| script | | predicted GiB | measured | error |{extra}",
        "|---|---|---|---|---|" + ("---|---|" if mended else ""),
    ]
    errors: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for name in predicted:
        for figure, word in zip(FIGURES, ("allocated", "reserved"), strict=True):
            seen = measured.get(name, {}).get(figure)
            told = predicted[name].get(figure)
            cells = [_gib(told), _gib(seen), _error(told, seen)]
            if told is not None and seen is not None:
                errors[figure].append(told / seen - 1)
            if mended:
                later = mended.get(name, {}).get(figure)
                cells += [_gib(later), _error(later, seen)]
            lines.append(f"| {name if word == 'allocated' else ''} | {word} | {' | '.join(cells)} |")
    for figure, kept in errors.items():
        if kept:
            mean, within = sum(map(abs, kept)) / len(kept), sum(abs(error) <= 0.02 for error in kept)
            lines.append(
                f"\n{figure}, as predicted: mean {mean:.1%}, worst {max(kept, key=abs):+.1%}; "
                f"{within} of {len(kept)} within 2 %"
            )
    return "\n".join(lines)


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.3f}"


def _error(told: int | None, seen: int | None) -> str:
    return "" if told is None or seen is None else f"{told / seen - 1:+.1%}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("predict", "measure", "table"))
    parser.add_argument(
        "files", nargs="*", type=Path, help="for table: predicted.json measured.json [mended.json]"
    )
    parser.add_argument("--only", help="numbers of scripts, by commas")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--limit", type=float, default=90, help="seconds that one script may take")
    parser.add_argument("--total", type=float, default=480, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("memory_unseen.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
