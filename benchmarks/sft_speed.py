"""LoRA SFT on one GPU: `trimtab train` beside HF Trainer + PEFT, with Liger, TRL and Unsloth, in one run.

    python benchmarks/sft_speed.py --alpaca alpaca.json --out benchmarks/results/sft-speed-h200
    python benchmarks/sft_speed.py --cells '8B/trimtab,8B/hf' --steps 100
    python benchmarks/sft_speed.py --tiny --device cpu --alpaca alpaca.json      # tries the whole benchmark

Random weights in Llama's shapes, r 16 on all seven projections, bf16, AdamW fused, constant learning rate. Every cell
is a process of its own; Trimtab's is the command line itself. All of a group read one config, one model folder and one
file of rows, in one order, with one start of the adapter. A step's time is when its loss is logged, for all of them;
tokens are counted without padding. A cell that fails is told with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sft_figures import curve_lines, markdown, table
from sft_groups import GROUPS, TRIMTAB, USUAL, Group
from sft_peer import NEEDS, PEERS, TOLD
from sft_stage import write_alpaca, write_rows

from trimtab.bench.ladder import FIRST, LAST, RUNGS, TITLES, start
from trimtab.bench.steady import Steps, figures_of, steps_of

HERE = Path(__file__).resolve().parent


@dataclass
class Whole:
    """All that was measured, written anew after every cell."""

    header: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)

    def save(self, out: Path | None) -> None:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            whole = {**self.header, "cells": self.cells}
            out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            out.with_suffix(".md").write_text(markdown(self.header, self.cells), encoding="utf-8")


def main() -> int:
    options = _options()
    chosen = _chosen(options)
    if options.list:
        print("\n".join(f"{group}/{cell}" for group, cells in chosen.items() for cell in cells))
        return 0
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    whole = Whole(_header(options))
    print(f"{whole.header['date']}, {whole.header['machine']}, torch {whole.header['torch']}", flush=True)
    for name, cells in chosen.items():
        group, started = GROUPS[name], time.time()
        config = _config(name, group, options)
        print(f"\n{name}: {group.title} (made ready in {time.time() - started:.0f} s)", flush=True)
        for cell in cells:
            found = _run(name, cell, config, options)
            whole.cells.append(found)
            whole.save(options.out)
            print(table([found], heading=cell is cells[0]), flush=True)
        mine = [found for found in whole.cells if found["group"] == name]
        for line in curve_lines(mine):
            print(line, flush=True)
        whole.save(options.out)
    return 1 if any(found["status"] == "failed" for found in whole.cells) else 0


def _run(group: str, cell: str, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One cell in a process of its own, or why there are no figures of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{group}-{cell}-".replace("/", "-"), dir=options.work))
    own, settings, title = _settings(cell, config, options)
    file, result = folder / "config.yaml", folder / "result.json"
    file.write_text(json.dumps(settings | {"output_dir": str(folder / "run")}), encoding="utf-8")
    command = [sys.executable, "-m", "trimtab", "train", str(file)]
    if own is not None:
        command = [sys.executable, str(HERE / "sft_peer.py"), own, str(file), str(result)]
    kept: dict[str, Any] = {
        "group": group,
        "cell": cell,
        "title": title,
        "rows_a_step": config["training"]["batch_size"],
        "length": config["data"]["max_length"],
    }
    environment = dict(os.environ)
    if cell.startswith("unsloth") and options.unsloth is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(options.unsloth), os.environ.get("PYTHONPATH", "")])
    elif cell in NEEDS and find_spec(NEEDS[cell]) is None:
        return kept | {"status": "left out", "seconds": 0.0, "reason": f"{NEEDS[cell]} is not installed here"}
    meter, started = _DeviceMeter(options.device), time.time()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=options.limit,
                env=environment,
            ).returncode
            reason = f"it ended with {done}: {_last_words(folder / 'log.txt')}" if done else None
        except subprocess.TimeoutExpired:
            reason = f"not done after {options.limit} s: {_last_words(folder / 'log.txt')}"
    kept |= {"seconds": time.time() - started, "device_gib": meter.end()}
    if reason is not None:
        return kept | {"status": "failed", "reason": reason}
    if own is None:
        steps = steps_of(folder / "run")
    else:
        found = json.loads(result.read_text(encoding="utf-8"))
        kept |= {"reserved_bytes": found["peak_reserved"], "packages": found["packages"]}
        steps = _steps_of_peer(found)
    figures = figures_of(steps, options.warm_up or GROUPS[group].warm_up)
    if options.device == "cpu":
        figures["peak_bytes"] = None  # of the process, which for Trimtab is another than for the peers
    curve = {"losses": steps.losses, "tokens": steps.tokens, "times": [t - steps.begun for t in steps.times]}
    return kept | {"status": "finished", "start_seconds": steps.begun - started, **figures, **curve}


def _settings(
    cell: str, config: dict[str, Any], options: argparse.Namespace
) -> tuple[str | None, dict[str, Any], str]:
    """Whose process it is (None: Trimtab's), its config, and how it is called."""
    if cell in PEERS:
        return cell, config, PEERS[cell]
    settings: dict[str, Any] = json.loads(json.dumps(config))
    words = [word.partition("=")[::2] for word in options.set]
    for key, value in [*_rung(cell).items(), *((key, _parsed(value)) for key, value in words)]:
        *path, last = key.split(".")
        at = settings
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    title = "Trimtab" if cell == TRIMTAB else f"Trimtab: {TITLES[cell]}"
    return None, settings, ", ".join([title, *options.set])


def _rung(cell: str) -> dict[str, Any]:
    """The settings of a row of the ladder: all that stands before it, and its own change."""
    if cell in (TRIMTAB, LAST):
        return {}
    settings = start("adamw_torch_fused")
    for rung in RUNGS[: [FIRST, *(rung.name for rung in RUNGS)].index(cell)]:
        settings[rung.setting] = rung.value
    return settings


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _steps_of_peer(found: dict[str, Any]) -> Steps:
    names = ("begun", "times", "losses", "tokens")
    return Steps(**{name: found[name] for name in names}, peak=found["peak_allocated"])


class _DeviceMeter:
    """The most memory of the GPU in use, as the driver tells it: caches and contexts included, alike for all."""

    def __init__(self, device: str) -> None:
        self.process: Any = None
        if device != "cpu":
            command = [
                "nvidia-smi",
                "--query-gpu=memory.used",
                "--format=csv,noheader,nounits",
                "-lms",
                "200",
            ]
            try:
                self.process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            except FileNotFoundError:
                return

    def end(self) -> float | None:
        if self.process is None:
            return None
        self.process.terminate()
        told = self.process.communicate()[0].split()
        return max((int(word) for word in told if word.isdecimal()), default=0) / 1024 or None


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-4:])[-600:]


def _config(name: str, group: Group, options: argparse.Namespace) -> dict[str, Any]:
    """The config of a group's cells, with its model folder and its rows made."""
    tiny, work = options.tiny, options.work
    shape = "tiny" if tiny else group.shape
    length = (128 if group.rows == "alpaca" else max(32, group.length // 64)) if tiny else group.length
    steps = _steps(group, options)
    model = work / f"model-{shape}"
    # In a process of its own: this one never touches the GPU, whose memory is what is measured.
    command = [sys.executable, str(HERE / "sft_stage.py"), str(model), shape, options.device]
    subprocess.run([*command, *([str(options.alpaca)] if options.alpaca else [])], check=True)
    if group.rows == "alpaca":
        data: dict[str, Any] = {"source": str(write_alpaca(options.alpaca, work / "alpaca.jsonl"))}
    else:
        rows = write_rows(work / f"{name}.jsonl", steps * group.batch, length)
        data = {"source": str(rows), "format": "text", "train_on": "all"}
    return {
        "recipe": "sft",
        "model": {"name": str(model), "quantize": group.quantize},
        "data": {**data, "max_length": length, "eval_fraction": 0.0},
        "method": "lora",
        "lora": {"r": 16, "alpha": 32, "targets": "all-linear"},
        "training": {
            "max_steps": steps,
            "batch_size": group.batch,
            "learning_rate": 2e-4,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "optimizer": "adamw_torch_fused",
            "gradient_checkpointing": group.checkpointing,
            "logging_steps": 1,
            "save_steps": 100000,
            "keep_best": False,
        },
        "device": options.device,
        "precision": "fp32" if tiny else "bf16",
        "monitor": {"progress": "none"},
        "seed": 0,
    }


def _steps(group: Group, options: argparse.Namespace) -> int:
    warm_up = options.warm_up or group.warm_up
    return warm_up + (options.steps or group.steps)


def _chosen(options: argparse.Namespace) -> dict[str, list[str]]:
    """The cells to run, by group and in the groups' order."""
    patterns = [part.strip() for part in options.cells.split(",") if part.strip()]
    found: dict[str, list[str]] = {}
    for name, group in GROUPS.items():
        if group.rows == "alpaca" and options.alpaca is None:
            continue
        usual = [c for c in group.cells if name in USUAL and c not in options.without.split(",")]
        named = [
            cell
            for cell in (*group.cells, *group.more)
            if any(
                fnmatch.fnmatch(f"{name}/{cell}", p) or (p == name and cell in group.cells) for p in patterns
            )
        ]
        if cells := (named if patterns else usual):
            found[name] = cells
    if not found:
        raise SystemExit(f"--cells {options.cells}: no such cell; --list tells which there are")
    return found


def _header(options: argparse.Namespace) -> dict[str, Any]:
    from trimtab.hardware.packages import installed_version

    machine = platform.processor() or platform.machine()
    if options.device != "cpu":
        asked = "import torch; print(torch.cuda.get_device_name())"
        machine = subprocess.run(
            [sys.executable, "-c", asked], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": machine.strip(),
        "command": " ".join(["python", "benchmarks/sft_speed.py", *sys.argv[1:]]),
        "torch": installed_version("torch"),
        "packages": {name: installed_version(name) for name in TOLD},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--cells", default="", help="names or patterns such as 8B, '*/hf', ladder; commas between"
    )
    parser.add_argument("--without", default="", help="cells to leave out of the usual ones, as trl,unsloth")
    parser.add_argument("--list", action="store_true", help="tell the cells that would be run")
    parser.add_argument("--steps", type=int, help="timed steps of every cell")
    parser.add_argument("--warm-up", type=int, help="steps before them")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a cell may take")
    parser.add_argument("--alpaca", type=Path, help="a JSON or JSONL file of real rows for the group alpaca")
    parser.add_argument(
        "--unsloth", type=Path, help="a folder with Unsloth and the packages that it wants older"
    )
    parser.add_argument("--set", action="append", default=[], help="a setting for Trimtab's cells: key=value")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark on a CPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "sft-speed")
    parser.add_argument("--out", type=Path, help="where the .json and the .md go, without an ending")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    return options


if __name__ == "__main__":
    sys.exit(main())
