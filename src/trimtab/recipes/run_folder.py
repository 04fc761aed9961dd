"""The folder that a run keeps: what is in it, when it may be written to, and how a run that fails ends in it.

It never deletes without being asked.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config import Config, dump_config
from trimtab.config.problems import without_secrets
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.placement import PlacementPlan

OURS = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "summary.json",
    "baseline.json",
    "data.json",
    "stacks.txt",
    "trajectory.bin",
    "report.html",
)
OUR_FOLDERS = ("adapter", "model", "checkpoints", "export")
SUMMARY = "summary.json"
_ERROR_LINES = 30
_ERROR_CHARACTERS = 4000


@dataclass
class RunFolder:
    """Paths inside one run's folder, and how far the run has come."""

    path: Path
    opened: float = field(default_factory=time.time)
    begun: bool = False
    """Whether this process has written to the folder what the run is, or has begun to train."""
    step: int | None = None
    """The last whole step, once training has begun."""
    planned_steps: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def kept_folder(self, config: Config) -> Path:
        """Where the weights go that the run made."""
        return self.path / ("adapter" if config.method == "lora" else "model")

    def checkpoint_folders(self) -> dict[int, Path]:
        """The run's checkpoints by step, in order. A copy that somebody set aside (checkpoint-40-good) is theirs."""
        numbers = {f.name.removeprefix("checkpoint-"): f for f in self.checkpoints.glob("checkpoint-*")}
        return {int(number): numbers[number] for number in sorted(filter(str.isdecimal, numbers), key=int)}

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that was written whole (the trainer's state is its last file)."""
        whole = [f for f in self.checkpoint_folders().values() if (f / "trainer_state.json").is_file()]
        return whole[-1] if whole else None

    def write_request(self, config: Config, plan: PlacementPlan, data: dict[str, Any]) -> None:
        """What the run was asked for, where it runs, and the report on its data."""
        # Without `overwrite`, so that the kept config can resume this very run.
        kept = config.model_copy(update={"overwrite": False})
        (self.path / "config.yaml").write_text(dump_config(kept), encoding="utf-8")
        plan.save(self.path / "plan.json")
        self.write_json("data.json", data)
        self.begun = True

    def reached(self, step: int, planned_steps: int) -> None:
        """So many whole steps are done; told by a recipe at the latest when it fails."""
        self.begun, self.step, self.planned_steps = True, step, planned_steps

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Whole or as it was: written beside its place and renamed. NaN, which JSON lacks, becomes text."""
        from trimtab.monitor.metrics import plain_value

        text = json.dumps(plain_value(content), indent=2, ensure_ascii=False, allow_nan=False, default=str)
        scratch = self.path / f".{name}.{os.getpid()}"
        try:
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(self.path / name)
        finally:
            scratch.unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        return content


def default_folder(config: Config) -> str:
    """A new name under runs/, readable and in order of time."""
    model = config.model.name.rstrip("/").split("/")[-1]
    return f"runs/{config.recipe}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def open_run_folder(config: Config) -> RunFolder:
    """Make the run's folder, or go on in it. An earlier run is replaced only with `overwrite: true`."""
    try:
        run = _opened(config)
        writable = os.access(run.path, os.W_OK) or not run.path.exists()
        why = "" if writable else "you may not write to it"
    except OSError as error:
        why = str(error)
    if why:
        raise RequestError.of(
            f"output_dir={config.output_dir}: the folder cannot be used", why, "choose another output_dir"
        )
    return run


def _opened(config: Config) -> RunFolder:
    assert config.output_dir is not None
    run = RunFolder(Path(config.output_dir).expanduser())
    if run.path.exists() and not run.path.is_dir():
        raise RequestError.of(
            f"output_dir={config.output_dir}: this is a file",
            "a run is kept in a folder",
            "choose another output_dir",
        )
    held = [name for name in (*OURS, *OUR_FOLDERS) if (run.path / name).exists()]
    held += sorted(path.name for path in run.path.glob("stacks-rank*.txt"))
    if config.training.resume:
        return run
    # A run that failed before it began has left nothing but the reason.
    never_began = set(held) <= {SUMMARY, "report.html"} and _failed(run)
    if held and not config.overwrite and not never_began:
        resumable = run.newest_checkpoint() is not None
        raise RequestError.of(
            f"output_dir={config.output_dir} already holds a run ({', '.join(held[:4])})",
            "writing into it would mix two runs",
            ("training.resume=true goes on from its last checkpoint, " if resumable else "")
            + "overwrite=true replaces it, another output_dir keeps both",
        )
    for name in held:
        target = run.path / name
        # Of a link the link goes; what it points to is kept elsewhere, and not ours to remove.
        linked = target.is_symlink()
        shutil.rmtree(target) if target.is_dir() and not linked else target.unlink()
    run.path.mkdir(parents=True, exist_ok=True)
    return run


@contextmanager
def failure_kept(run: RunFolder, config: Config, plan: PlacementPlan, rank: int = 0) -> Iterator[None]:
    """A run that ends by an error says so in its folder, as `summary.json`; the error goes up as it is.

    Of several processes the first that fails writes: it knows the cause, which the others only feel.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            _keep_failure(run, config, plan, rank, error)
        except OSError as lost:
            error.add_note(f"The run's folder does not tell this failure: {lost}")
        raise


def _keep_failure(
    run: RunFolder, config: Config, plan: PlacementPlan, rank: int, error: BaseException
) -> None:
    # A request to go on that came to nothing leaves what the earlier run wrote, or another folder, as it is.
    mistaken = bool(config.training.resume) and not run.begun
    if mistaken or not run.path.is_dir() or _told(run):
        return
    checkpoint = run.newest_checkpoint()
    text = without_secrets(str(error))[:_ERROR_CHARACTERS]
    run.write_json(
        SUMMARY,
        {
            "status": "interrupted" if isinstance(error, KeyboardInterrupt) else "failed",
            "recipe": config.recipe,
            "error": {
                "kind": type(error).__name__,
                "message": "\n".join(text.splitlines()[:_ERROR_LINES]),
            },
            **({"rank": rank} if plan.processes > 1 else {}),
            "steps": run.step,
            "planned_steps": run.planned_steps,
            "checkpoint": str(checkpoint.relative_to(run.path)) if checkpoint is not None else None,
            "ended": round(time.time(), 3),
            "device": plan.device,
            "precision": plan.precision,
            "strategy": plan.strategy,
        },
    )


def _told(run: RunFolder) -> bool:
    """Whether this very run has told its end: another process failed first, or the result was kept before this."""
    summary = run.path / SUMMARY
    return summary.is_file() and summary.stat().st_mtime >= run.opened


def _failed(run: RunFolder) -> bool:
    """Whether the folder's summary is one that `failure_kept` wrote."""
    try:
        summary = run.read_json(SUMMARY)
    except (FileNotFoundError, ValueError):
        return False
    return "error" in summary


def checkpoint_to_resume(config: Config, run: RunFolder) -> Path | None:
    """The checkpoint that `training.resume` names, or None when the run starts afresh."""
    wanted = config.training.resume
    if wanted is False:
        return None
    if isinstance(wanted, str):
        path = Path(wanted).expanduser()
        if not (path / "trainer_state.json").is_file():
            raise RequestError.of(
                f"training.resume={wanted}: not a checkpoint",
                "a checkpoint folder holds trainer_state.json",
                "name a folder such as RUN/checkpoints/checkpoint-40, or use training.resume=true",
            )
        return path
    newest = run.newest_checkpoint()
    if newest is None:
        raise RequestError.of(
            f"training.resume=true, but {run.checkpoints} holds no checkpoint",
            "the earlier run ended before its first save, or output_dir names another folder",
            "check output_dir, or start afresh with training.resume=false",
        )
    return newest
