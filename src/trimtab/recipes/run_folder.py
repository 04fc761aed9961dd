"""The folder that a run keeps: what is in it, and when it may be written to. It never deletes without being asked."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config import Config, dump_config
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


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that was written whole (the trainer's state is its last file)."""
        found = [c for c in self.checkpoints.glob("checkpoint-*") if (c / "trainer_state.json").is_file()]
        return max(found, key=lambda c: int(c.name.split("-")[-1])) if found else None

    def write_request(self, config: Config, plan: PlacementPlan, data: dict[str, Any]) -> None:
        """What the run was asked for, where it runs, and the report on its data."""
        # Without `overwrite`, so that the kept config can resume this very run.
        kept = config.model_copy(update={"overwrite": False})
        (self.path / "config.yaml").write_text(dump_config(kept), encoding="utf-8")
        plan.save(self.path / "plan.json")
        self.write_json("data.json", data)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        (self.path / name).write_text(text + "\n", encoding="utf-8")

    def read_json(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        return content


def default_folder(config: Config) -> str:
    """A new name under runs/, readable and in order of time."""
    model = config.model.name.rstrip("/").split("/")[-1]
    return f"runs/{config.recipe}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def open_run_folder(config: Config) -> RunFolder:
    """Make the run's folder, or go on in it. An earlier run is replaced only with `overwrite: true`."""
    assert config.output_dir is not None
    run = RunFolder(Path(config.output_dir).expanduser())
    if run.path.exists() and not run.path.is_dir():
        raise RequestError.of(
            f"output_dir={config.output_dir}: this is a file",
            "a run is kept in a folder",
            "choose another output_dir",
        )
    held = [name for name in (*OURS, *OUR_FOLDERS) if (run.path / name).exists()]
    if config.training.resume:
        return run
    if held and not config.overwrite:
        resumable = run.newest_checkpoint() is not None
        raise RequestError.of(
            f"output_dir={config.output_dir} already holds a run ({', '.join(held[:4])})",
            "writing into it would mix two runs",
            ("training.resume=true goes on from its last checkpoint, " if resumable else "")
            + "overwrite=true replaces it, another output_dir keeps both",
        )
    for name in held:
        target = run.path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    run.path.mkdir(parents=True, exist_ok=True)
    return run


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
