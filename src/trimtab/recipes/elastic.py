"""A run that is begun again by its launcher: is the folder this very run's, where does it go on, and with which step.

torchrun starts all processes anew when one of them dies, and with fewer where a machine is lost. They go on from the
last whole checkpoint although the config does not say so, provided that the same launch began the run in this folder;
before the first checkpoint they begin again there. The rows of a step stay the same with fewer processes, by more
accumulated passes, or it is refused. An error that came twice at the same step, or a wrong request, is not tried again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError, TrimtabError
from trimtab.monitor.board import FOLDER, Process, reports_in
from trimtab.monitor.last_words import OWN_AGENT
from trimtab.reading import parse_json

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.hardware import Launcher
    from trimtab.placement import PlacementPlan

_FAILURES = "failures.jsonl"


def restart_number() -> int:
    """How often the launcher has begun this run again."""
    counts = (os.environ.get(name, "") for name in (OWN_AGENT, "TORCHELASTIC_RESTART_COUNT"))
    return max((int(count) for count in counts if count.isdecimal()), default=0)


def begun_by_this_launch(config: Config) -> bool:
    """Whether the run in `output_dir` was begun by processes of the torchrun that started this one."""
    if config.output_dir is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    agent = Process.of(os.getppid())
    folder = Path(config.output_dir).expanduser() / FOLDER
    return any(report.agent is not None and report.agent.same(agent) for report in reports_in(folder))


def keep_the_step(config: Config, launcher: Launcher) -> str | None:
    """Let as many rows as before make a step, with another number of processes; says what was changed.

    The batches of an epoch are handed out in the same order whoever takes them, so that a step has the same rows.
    """
    run = Path(config.output_dir or "").expanduser()
    kept = _kept_before(run)
    if kept is None or kept[1] == launcher.world_size:
        return None
    before, processes, strategy = kept
    batch, world = before.training.batch_size, launcher.world_size
    rows = batch * processes * before.training.gradient_accumulation_steps
    change = f"start {processes} processes again, with training.resume=true"
    found = f"the run began with {processes} processes and is begun again with {world}"
    if strategy == "sharded" or config.recipe == "zeroth_order":
        what = "of a sharded model" if strategy == "sharded" else "of the recipe zeroth_order"
        raise RequestError.of(found, f"a checkpoint {what} is for that number of processes", change)
    if rows % (batch * world):
        why = f"a step took {rows} rows, which {world} × batch_size {batch} does not divide"
        raise RequestError.of(found, why, change)
    config.training.batch_size = batch
    config.training.gradient_accumulation_steps = rows // (batch * world)
    return (
        f"{found}: a step keeps its {rows} rows, with training.gradient_accumulation_steps="
        f"{config.training.gradient_accumulation_steps}"
    )


def _kept_before(run: Path) -> tuple[Config, int, str] | None:
    """The config, number of processes and strategy of the run so far; None before it has written them."""
    from trimtab.config import load_config

    try:
        plan = parse_json((run / "plan.json").read_text(encoding="utf-8"))
        return load_config(run / "config.yaml"), int(plan["processes"]), str(plan["strategy"])
    except (OSError, ValueError, TypeError, LookupError, OverflowError, TrimtabError):
        return None


def note_failure(run: Path, error: BaseException, rank: int, step: int | None) -> None:
    """Keep what ended this attempt, for the next one."""
    folder = run / FOLDER
    if not folder.is_dir() or getattr(error, "felt", False):
        return
    entry = {
        **{"attempt": restart_number(), "rank": rank, "step": step, "at": time.time()},
        **{"kind": type(error).__name__, "message": str(error)[:2000]},
        "refused": isinstance(error, RequestError),
    }
    with (folder / _FAILURES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")


def refuse_what_came_again(run: Path) -> None:
    """End at once what the launcher begins again although it would end in the same way."""
    attempt = restart_number()
    failures = _failures(run / FOLDER / _FAILURES)
    last = next((f for f in reversed(failures) if f.get("attempt") == attempt - 1), None)
    if attempt == 0 or last is None:
        return
    if last["refused"]:
        raise RequestError(f"{last['message']}\n  (not tried again: the request would be refused again)")
    same = [f for f in failures if f.get("attempt") == attempt - 2 and _alike(f, last)]
    if same:
        at = f"at step {last['step']}" if last["step"] is not None else "before its first step"
        raise TrimtabError(
            f"the run failed twice {at} with the same error ({last['kind']}: {last['message']})\n"
            "  why: it would come again from the same checkpoint\n"
            "  change: mend the cause; training.resume=true then goes on"
        )


def forget_failures(run: Path) -> None:
    """A first attempt has none behind it."""
    if restart_number() == 0:
        (run / FOLDER / _FAILURES).unlink(missing_ok=True)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("kind", "message", "step"))


def _failures(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [
            entry for entry in map(parse_json, lines) if {"refused", "kind", "message", "step"} <= set(entry)
        ]
    except (OSError, ValueError, TypeError):
        return []


def agree_on_checkpoint(checkpoint: Path | None, plan: PlacementPlan) -> None:
    """All ranks go on from the same step, or none does: without a common folder one would begin at 0."""
    from trimtab.rehearse.session import VARIABLE as REHEARSED

    # A rehearsed rank has no fellows that could see anything else.
    if plan.processes == 1 or REHEARSED in os.environ:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, checkpoint.name if checkpoint is not None else None)
    if len(set(found)) > 1:
        seen = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in list(enumerate(found))[:6])
        raise RequestError.of(
            f"the ranks see different checkpoints ({seen})",
            "all go on from one step, and each reads it from its own output_dir",
            "put output_dir on a disk that all machines share",
        )
