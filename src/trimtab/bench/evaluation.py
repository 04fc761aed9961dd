"""The evaluation of a kept run as one document: figures measured again beside those of the run's summary.

It is kept as `evaluation.json` in the run's folder, the only file there that an evaluation writes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.bench.voices import Say, aligned, judge_voice, voice_lines
from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.files import write_json_whole
from trimtab.reading import parse_json, read_json_object, read_text
from trimtab.recipes.evaluate import evaluate
from trimtab.recipes.run_folder import EVALUATION, SUMMARY
from trimtab.recipes.run_lock import refuse_if_running
from trimtab.recipes.run_mark import claim, is_free

KIND = "trimtab evaluation"
LOSS = "held-out loss"
_PART = re.compile(r"_\d+$")
"""How a figure's name ends that is one of many parts, such as a codebook's loss: JSON has them."""


def evaluated(
    config: Config, folder: Path, weights: Path, *, data: str | None, rows: int | None, say: Say
) -> dict[str, Any]:
    """Measure a run again, and its voice where it has one; the figures of its summary stand beside."""
    check_place(folder)
    started = time.perf_counter()
    measured = evaluate(config, folder, weights, data=data, rows=rows, say=say)
    now = ({} if measured.loss is None else {LOSS: measured.loss}) | measured.metrics
    # Figures on other data have no counterpart in the run.
    then = _of_the_run(folder) if data is None else {}
    found = {
        "kind": KIND,
        "run": str(folder),
        "recipe": config.recipe,
        "data": data,
        "held_out_rows": measured.held_rows,
        "device": measured.plan.device,
        "precision": measured.plan.precision,
        "figures": {name: {**then.get(name, {}), "now": value} for name, value in now.items()},
    }
    if measured.takes is not None:
        found["voice"] = judge_voice(measured.takes, say)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def _of_the_run(folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of its summary, before training and after, by their names."""
    change = "put back the file that the run wrote"
    summary = read_json_object(folder / SUMMARY, "the run's summary", change)
    metrics = summary.get("metrics")
    told = {LOSS: summary.get("eval_loss"), **(metrics if isinstance(metrics, dict) else {})}
    return {name: each for name, each in told.items() if isinstance(each, dict)}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The evaluation for people."""
    where = found["data"] or "what the run held out"
    out = [f"{found['recipe']} run {found['run']}, on {found['held_out_rows']:,} rows: {where}"]
    figures: dict[str, dict[str, Any]] = found["figures"]
    columns = [name for name in ("before", "after") if any(name in each for each in figures.values())]
    if figures:
        heads = {"before": "before training", "after": "after", "now": "measured now"}
        table = [["", *(heads[name] for name in (*columns, "now"))]]
        for name, each in figures.items():
            if _PART.search(name):
                continue
            table.append([name, *(_told(each.get(column)) for column in (*columns, "now"))])
        out += aligned(table)
    return out + (["", *voice_lines(found["voice"])] if "voice" in found else [])


def _told(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def check_place(folder: Path) -> None:
    """Refuse before anything is computed where the file's name is taken by something that no evaluation wrote."""
    refuse_if_running(folder, "evaluate")
    target = folder / EVALUATION
    if is_free(target) or _is_ours(target):
        return
    raise RequestError.of(
        f"{target}: not written by an evaluation",
        "the figures would be kept there, and only an earlier evaluation is replaced",
        "move it away",
    )


def _is_ours(target: Path) -> bool:
    try:
        kept = parse_json(read_text(target))
    except (OSError, ValueError, RequestError):
        return False
    return isinstance(kept, dict) and kept.get("kind") == KIND


def keep(folder: Path, found: Mapping[str, Any]) -> Path:
    """Write the evaluation into the run's folder, whole or not at all."""
    check_place(folder)
    target = folder / EVALUATION
    try:
        claim(folder, EVALUATION)
        write_json_whole(target, found)
    except OSError as error:
        raise RequestError.of(
            f"{target}: cannot be written ({error.strerror})",
            "the figures above are kept beside what they tell of",
            "make the run's folder writable, or keep what --json prints",
        ) from None
    return target
