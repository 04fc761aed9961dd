"""Programs that need more than an H200 has, as they are and with each change that the rehearsal proposed, on the GPU.

    python benchmarks/memory_shortages/taken.py stage FOLDER      # the models of the configs, with random weights
    python benchmarks/memory_shortages/taken.py run FOLDER --out memory-shortages-measured.json

Each is a process of its own; two share the GPU only where both fit by a wide margin. One that ends by torch's
OutOfMemoryError is told as that, one that `trimtab train` refuses beforehand with its reason; any other failure with
its last lines. The pictures' last change is nobody's proposal: nearly the largest batch that the plan lets through.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STRANGERS = HERE.parent / "memory_strangers"
sys.path.insert(0, str(STRANGERS))
from stage import stage  # noqa: E402

MISTRAL, TRAINER = "01_sft_mistral_7b_8k", "02_trainer_full_llama_3b"
PICTURES, UNET = "03_vision_llava_many_pictures", "04_unet_of_pictures"
CHECKPOINTED = {"gradient_checkpointing": True}
ROUNDS: tuple[tuple[tuple[str, Any], ...], ...] = (
    ((MISTRAL, {}),),
    ((TRAINER, ()),),
    ((PICTURES, {}),),
    ((UNET, ()),),
    ((MISTRAL, CHECKPOINTED), (UNET, ("--batch-size", "10"))),
    ((PICTURES, CHECKPOINTED), (TRAINER, ("--quarter",))),
    ((UNET, ("--batch-size", "20")),),
    ((TRAINER, ("--checkpointing",)),),
    ((MISTRAL, {"batch_size": 3, "gradient_accumulation_steps": 2}),),
    ((PICTURES, {"batch_size": 48, "gradient_accumulation_steps": 2}),),
    ((PICTURES, {"batch_size": 59}),),
)
"""What is run together: a case with its `training` settings, or with its arguments."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("stage", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, default=Path("memory-shortages-measured.json"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.verb == "stage":
        for name in (MISTRAL, PICTURES):
            stage(options.folder / name, HERE / f"{name}.json", weights=True)
        return 0
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        for together in ROUNDS:
            for name, told in pool.map(lambda run: run_one(*run, options), together):
                found[name] = told
                print(name, json.dumps(told), flush=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run_one(case: str, change: Any, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The name of what was run, and how it ended."""
    if isinstance(change, dict):
        told = [f"training.{key}={json.dumps(value)}" for key, value in change.items()]
        folder = options.folder / case
        settings = json.loads((folder / "config.yaml").read_text(encoding="utf-8"))
        settings["training"] |= change
        label = "-".join(change) or "as-it-is"
        settings["output_dir"] = str(folder / f"run-{label}")
        file = folder / f"{label}.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")
        command = [str(STRANGERS / "train_told.py"), str(file)]
    else:
        folder, told = options.folder, list(change)
        command = [str(HERE / f"{case}.py"), *told]
    started = time.monotonic()
    result: dict[str, Any]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=options.limit,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        result = {"failed": f"not done after {options.limit:.0f} s"}
    else:
        lines = [line.strip(" │|") for line in done.stdout.splitlines()]
        peaks = [line for line in lines if line.startswith('{"max_memory_allocated"')]
        if peaks and not done.returncode:
            result = json.loads(peaks[-1])
        elif "OutOfMemoryError" in done.stdout or "out of memory" in done.stdout:
            said = next((line for line in lines if "CUDA out of memory" in line), "")
            result = {"out_of_memory": True, "exit": done.returncode, "said": said[:300]}
        elif done.returncode == 2 and "does not fit" in done.stdout:
            said = next(line for line in lines if line.startswith("why:"))
            result = {"refused": True, "said": said}
        else:
            result = {"failed": done.stdout[-1500:], "exit": done.returncode}
    result["seconds"] = round(time.monotonic() - started, 1)
    return " ".join([case, *told]), result


if __name__ == "__main__":
    sys.exit(main())
