"""A step that finds no memory is made again of smaller batches, of which more are gathered: the same rows in one step.

Only where `training.halve_batch_on_oom` asks for it. A run of one process begins again by itself, from its last whole
checkpoint or from the start; of several the one that lacked memory writes the record and ends, and all find the record
when they are started again. The rows of a step, and so the effective batch, never change.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.placement import OutOfMemory
from trimtab.shortage import MemoryFault, memory_fault

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.recipes.run_folder import RunFolder

RECORD = "halved.json"
"""In the run's folder: what the batch was when the run began, each time it was made smaller, and what it is now."""


class StepOutOfMemory(Exception):
    """The passes of a step found no memory: it can be made again of smaller ones."""

    def __init__(self, lack: MemoryFault) -> None:
        super().__init__(lack.said)
        self.lack = lack


class Batch(NamedTuple):
    """How one process makes its rows of a step."""

    batch_size: int
    gradient_accumulation_steps: int

    @classmethod
    def of(cls, config: Config) -> Batch:
        return cls(config.training.batch_size, config.training.gradient_accumulation_steps)

    @property
    def rows(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    def smaller(self) -> Batch | None:
        """Half as many rows in a pass (of an odd number its next smaller divisor), or None where it is one."""
        size = next((n for n in range(self.batch_size // 2, 0, -1) if self.batch_size % n == 0), None)
        return None if size is None else Batch(size, self.rows // size)

    def __str__(self) -> str:
        return f"{self.batch_size} × {self.gradient_accumulation_steps}"


@contextmanager
def step_watched() -> Iterator[None]:
    """Around one step's forward and backward passes: their lack of memory goes up as `StepOutOfMemory`.

    Not that of a generation: it makes the completions of all gathered passes at once, however few are in each.
    """
    try:
        yield
    except Exception as error:
        lack = memory_fault(error)
        if lack is None or lack.where == "worker" or _while_generating(error):
            raise
        raise StepOutOfMemory(lack) from error


def _while_generating(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "generate":
            return True
        trace = trace.tb_next
    return False


def with_batch(config: Config, batch: Batch) -> Config:
    """The config with this batch in place of its own."""
    changes: dict[str, Any] = batch._asdict()
    if config.recipe == "grpo" and config.training.eval_batch_size is None:
        # An evaluation takes whole groups of completions, as many as before.
        changes["eval_batch_size"] = config.training.batch_size
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def made_smaller(config: Config, run: RunFolder, lack: MemoryFault) -> Config | None:
    """The config with the next smaller batch, after it is on record; None where a pass has one row already."""
    before, after = Batch.of(config), Batch.of(config).smaller()
    if after is None:
        return None
    record = read_record(run) or {"began_with": before._asdict(), "halvings": []}
    record["halvings"].append(
        {
            "after_step": run.step,
            "from": before._asdict(),
            "to": after._asdict(),
            "rank": int(os.environ.get("RANK", 0)),
            "time": round(time.time(), 3),
            "said": lack.said,
        }
    )
    run.write_json(RECORD, record | {"now": after._asdict()})
    return with_batch(config, after)


def as_recorded(config: Config, run: RunFolder, say: Callable[[str], None]) -> Config:
    """The config of a run that goes on, with the batch that it was left with, where its own asks for the same rows."""
    record = read_record(run) if run.goes_on(config) or run.again else None
    if record is None or not config.training.halve_batch_on_oom:
        return config
    asked, now = Batch.of(config), Batch(**record["now"])
    if asked.rows != now.rows or asked.batch_size <= now.batch_size:
        return config
    say(
        f"! training.batch_size × gradient_accumulation_steps {now} in place of {asked}: more found no memory before"
    )
    return with_batch(config, now)


def read_record(run: RunFolder) -> dict[str, Any] | None:
    """What is on record in the run's folder, or None where no batch was made smaller."""
    return run.read_json(RECORD) if (run.path / RECORD).is_file() else None


def announced(before: Config, after: Config, run: RunFolder, lack: MemoryFault) -> str:
    checkpoint = run.newest_checkpoint()
    start = f"from {checkpoint.name}" if checkpoint is not None else "from the start"
    at = f" in step {run.step + 1}" if run.step is not None else ""
    return (
        f"! out of memory{at} with training.batch_size={before.training.batch_size} ({lack.said})\n"
        f"  going on {start} with training.batch_size × gradient_accumulation_steps {Batch.of(after)} in place of "
        f"{Batch.of(before)}: the same {Batch.of(after).rows} rows a step (training.halve_batch_on_oom)"
    )


def to_be_started_again(before: Config, after: Config, run: RunFolder, lack: MemoryFault) -> OutOfMemory:
    """How one of several processes ends: the others wait for it, so that all have to be started again."""
    return OutOfMemory(
        f"{announced(before, after, run, lack)}\n"
        f"  why: all processes have to begin again for it; {RECORD} says with what\n"
        "  change: nothing where the launcher begins again (monitor.restarts); else start it with training.resume=true"
    )


def release() -> None:
    """Give back what the failed attempt held; its objects have no owner any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
