"""A run that ends for want of room, on a disk or in memory: what it says, what it had kept, and how it goes on.

The error is the same whichever library met the lack, and in whichever phase. Nothing is freed or deleted here; what
could be is named, with its size.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.cache import cache_root
from trimtab.config import Config, keeps_best
from trimtab.errors import TrimtabError
from trimtab.file_system import amount, file_system_of, nearest, size_of
from trimtab.placement import PlacementPlan, host_out_of_memory, out_of_memory
from trimtab.recipes.checkpoints import by_step
from trimtab.recipes.recipe import Recipe
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.smaller_batches import StepOutOfMemory
from trimtab.shortage import MemoryFault, NoRoomOnDisk, WriteFault, in_words, memory_fault, write_fault


@contextmanager
def shortages_told(recipe: Recipe, config: Config, plan: PlacementPlan, run: RunFolder) -> Iterator[None]:
    """An error that means "no room" goes up as one of ours, with what was kept; any other as it is."""
    try:
        yield
    except StepOutOfMemory:
        raise  # the page of the run decides first whether it goes on
    except Exception as error:
        if (lack := memory_fault(error)) is not None:
            raise memory_error(lack, recipe, config, plan, run) from error
        if (fault := write_fault(error, written_places(run))) is not None:
            raise disk_error(fault, config, run) from error
        raise


def memory_error(
    lack: MemoryFault, recipe: Recipe, config: Config, plan: PlacementPlan, run: RunFolder
) -> TrimtabError:
    """Of a device by the plan's figures, of the machine by what it has."""
    ending = [kept(config, run), go_on(config, run)]
    settings, held, ways = recipe.need(config)
    changes = [way for way in ways if config.training.batch_size > 1 or not way.startswith("halve ")]
    if config.training.batch_size > 1 and not config.training.halve_batch_on_oom:
        changes.append("have it found out (training.halve_batch_on_oom=true)")
    if lack.where == "device" and plan.kind != "cpu":
        return out_of_memory(plan, settings, held, changes, also=ending)
    changes = changes if plan.kind == "cpu" and lack.where != "worker" else []
    workers = config.training.dataloader_workers
    settings = {**settings, "training.dataloader_workers": workers} if workers else settings
    changes = [*(["lower training.dataloader_workers"] if workers else []), *changes]
    changes.append("give the process more memory, or end other programs")
    return host_out_of_memory(lack, settings, changes, also=ending)


def disk_error(fault: WriteFault, config: Config, run: RunFolder) -> NoRoomOnDisk:
    """What is full or closed, what the run had kept, what to free or set."""
    folder = nearest(fault.path.parent if fault.path is not None else run.path)
    found, why, change = in_words(fault, folder, _room_to_make(config, run, folder))
    ours = fault.kind in ("full", "quota", "unknown") and folder.is_relative_to(nearest(run.path))
    needs = f"; of the run {run.needs}" if run.needs and ours else ""
    return NoRoomOnDisk(
        f"{found}\n  why: {why}{needs}; {kept(config, run)}\n  change: {change}; then {go_on(config, run)}"
    )


def kept(config: Config, run: RunFolder) -> str:
    """What is safe of the run so far."""
    checkpoint = newest_readable(run)
    if checkpoint is not None:
        return f"{checkpoint.name} is whole and kept in {run.checkpoints}"
    if (run.path / "summary.json").is_file() and run.kept_folder(config).is_dir() and run.step:
        return f"what was trained is kept in {run.kept_folder(config)}"
    return "no checkpoint was saved before"


def go_on(config: Config, run: RunFolder) -> str:
    """The command that takes the run up again."""
    if (run.begun or config.training.resume) and (run.path / "config.yaml").is_file():
        how = "go on" if newest_readable(run) is not None else "begin again"
        return f"{how} with: trimtab train {shlex.quote(str(run.path / 'config.yaml'))} training.resume=true"
    return "start again with the same command"


def newest_readable(run: RunFolder) -> Path | None:
    """The newest whole checkpoint; None also where the folder may not be read."""
    try:
        return run.newest_checkpoint()
    except OSError:
        return None


def written_places(run: RunFolder) -> list[Path]:
    """Where a run writes: its folder, and what is kept to be made only once."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    named = [
        os.environ[name] for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "TMPDIR") if os.environ.get(name)
    ]
    return [run.path, cache_root(), home, *map(Path, named), Path(tempfile.gettempdir())]


def _room_to_make(config: Config, run: RunFolder, folder: Path) -> str:
    """What could be freed or set, with sizes. Of another folder than the run's only its name is known."""
    if not folder.is_relative_to(nearest(run.path)):
        return f"free room in {folder}, or set {_variable_of(folder)} to a folder with room"
    ways = []
    older = sorted(run.path.glob("replaced-*"))
    ways += [f"remove {path} ({amount(size_of(path))}, an earlier run)" for path in older if path.is_dir()]
    newest, folders = newest_readable(run), list(by_step(run.checkpoints).values())
    # Which of the older ones is the best, only the run knows.
    spare = [] if keeps_best(config) else [path for path in folders if path != newest and size_of(path)]
    if spare and newest is not None:
        ways.append(f"remove {spare[0]} ({amount(size_of(spare[0]))})")
    limit = config.training.save_total_limit
    if limit is None or limit > 1 + keeps_best(config):
        ways.append("set training.save_total_limit=1")
    ways.append(f"free room on {file_system_of(folder).mount}")
    return ", or ".join(ways)


def _variable_of(folder: Path) -> str:
    """The setting that decides where this folder lies."""
    if folder.is_relative_to(cache_root()) or nearest(cache_root()) == folder:
        return "TRIMTAB_CACHE"
    if folder.is_relative_to(tempfile.gettempdir()):
        return "TMPDIR"
    return "HF_HOME"
