"""The folder that a run keeps: what is in it, when it may be written to, and how a run that fails ends in it.

It deletes nothing. An earlier run is moved aside when that is asked for, by the list of what it wrote (run_mark.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config import Config, dump_config
from trimtab.config.problems import without_secrets
from trimtab.errors import RequestError, some_of
from trimtab.files import write_json_whole, write_whole
from trimtab.reading import read_json_object
from trimtab.recipes.checkpoints import newest
from trimtab.recipes.run_mark import Mark, claim, is_free, move_aside

if TYPE_CHECKING:
    from trimtab.placement import PlacementPlan

SUMMARY = "summary.json"
STARTS = "starts.json"
"""What the run began with, and what each later start changed (begun_with.py)."""
ALWAYS = (
    *("config.yaml", "plan.json", "data.json", STARTS, "metrics.jsonl", SUMMARY, "stacks.txt", "checkpoints"),
    *("halved.json", "nonfinite"),
)
"""What any run may write, whichever of its processes does; beside these, stacks-rankN.txt."""
EVALUATION = "evaluation.json"
NAMES = (
    *(*ALWAYS, "baseline.json", "trajectory.bin", "report.html", EVALUATION, "pictures", "clips", "codec"),
    *("adapter", "model", "export"),
)
"""What is in a run's folder."""
_ERROR_LINES = 30
_ERROR_CHARACTERS = 4000


@dataclass
class RunFolder:
    """Paths inside one run's folder, and how far the run has come."""

    path: Path
    opened: float = field(default_factory=time.time)
    begun: bool = False
    """Whether the folder is this run's by now, as far as this process knows."""
    step: int | None = None
    """The last whole step, once training has begun."""
    planned_steps: int | None = None
    needs: str = ""
    """What it will write at most, in words, once that is known."""
    again: bool = False
    """Whether the launcher that began the run here has started it again, after one of its processes died."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def kept_folder(self, config: Config) -> Path:
        """Where the weights go that the run made."""
        return self.path / ("adapter" if config.method == "lora" else "model")

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that looks whole; whether it is, a resume checks byte by byte."""
        return newest(self.checkpoints)

    def held(self) -> list[str]:
        """Names of a run's files that are taken, by whomever."""
        names = [*NAMES, *sorted(path.name for path in self.path.glob("stacks-rank*.txt"))]
        # A folder of somebody's in a file's place stands in the way also where it is empty.
        return [n for n in names if not is_free(self.path / n) or ("." in n and (self.path / n).is_dir())]

    def goes_on(self, config: Config) -> bool:
        """Whether the config resumes this very run."""
        wanted = config.training.resume
        return self.again or wanted is True or (isinstance(wanted, str) and _is_inside(wanted, self.path))

    def begin(
        self,
        config: Config,
        plan: PlacementPlan,
        data: dict[str, Any],
        say: Callable[[str], None] = print,
        starts: dict[str, Any] | None = None,
    ) -> None:
        """The run is ready to start: make room, then write what was asked for, where it runs, and what its data is.

        By the main process alone, before anything else writes to the folder. `starts`: what it is compared with when
        it goes on one day.
        """
        if not self.begun:  # else this process begins again in its own folder, with a smaller batch
            self._make_room(config, say)
        # Also what other processes write: one alone may change the list.
        claim(self.path, *ALWAYS, *(f"stacks-rank{rank}.txt" for rank in range(1, plan.processes)))
        if starts is not None:
            self.write_json(STARTS, starts)
        # Without `overwrite`, so that the kept config can resume this very run.
        write_whole(self.path / "config.yaml", dump_config(config.model_copy(update={"overwrite": False})))
        plan.save(self.path / "plan.json")
        self.write_json("data.json", data)

    def _make_room(self, config: Config, say: Callable[[str], None]) -> None:
        """Mark the folder as this run's, with an earlier one moved aside where `overwrite` asks for it."""
        check_room(self, config)
        mark = Mark.of(self.path)
        if self.goes_on(config) and self.held():
            # A run of a version that marked nothing stays without a mark: who wrote what is not known.
            mark = mark and dataclasses.replace(mark, began=True)
        elif mark is not None and mark.holds_a_run(self.path):
            aside = move_aside(self.path, mark)
            say(f"the earlier run is now {aside}; to free its room: rm -r {shlex.quote(str(aside))}")
            mark = Mark(began=True)
        else:
            mark = Mark(mark.entries if mark is not None else (), began=True)
        if mark is not None:
            dataclasses.replace(mark, started=time.time()).write(self.path)
        self.begun = True

    def claim(self, name: str) -> Path:
        """The place of something that this run is about to write: from now on it is on the run's list."""
        if Mark.of(self.path) is None and not self.held():
            Mark().write(self.path)
        claim(self.path, name)
        return self.path / name

    def reached(self, step: int, planned_steps: int) -> None:
        """So many whole steps are done; a recipe says so at the latest when it fails."""
        self.begun, self.step, self.planned_steps = True, step, planned_steps

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Whole or as it was. NaN, which JSON lacks, becomes text."""
        write_json_whole(self.claim(name), content)

    def read_json(self, name: str) -> dict[str, Any]:
        return read_json_object(self.path / name, f"the run's {name}", "put back the file that the run wrote")


def default_folder(config: Config) -> str:
    """A new name under runs/, readable and in order of time."""
    model = config.model.name.rstrip("/").split("/")[-1]
    return f"runs/{config.recipe}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def make_default_folder(config: Config) -> str:
    """A new folder of such a name, made at once, so that no other run takes it."""
    stem = default_folder(config)
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        try:
            Path(name).mkdir(parents=True)
        except FileExistsError:
            if not Path("runs").is_dir():
                break
            continue
        except OSError:
            break
        return name
    return stem  # what stands in the way is told when the folder is opened


def open_run_folder(config: Config, *, again: bool = False) -> RunFolder:
    """Check that the run may be kept in `output_dir`, and make the folder. Nothing that is in it is touched."""
    assert config.output_dir is not None
    run = RunFolder(Path(config.output_dir).expanduser(), again=again)
    try:
        if run.path.exists() and not run.path.is_dir():
            why = "it is a file, and a run is kept in a folder"
        elif run.path.is_symlink() and not run.path.exists():
            why = f"it is a link to {os.readlink(run.path)}, which is not there"
        else:
            check_inputs(run, config)
            check_room(run, config)
            run.path.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(run.path, os.W_OK) else "you may not write to it"
    except OSError as error:
        why = str(error)
    if why:
        raise RequestError.of(
            f"output_dir={config.output_dir}: the folder cannot be used", why, "choose another output_dir"
        )
    return run


def check_inputs(run: RunFolder, config: Config) -> None:
    """Refuse a run that would be kept where it reads from, unless it only goes on there."""
    inputs = {
        "model": config.model.name,
        "model.chat_template": config.model.chat_template,
        "data.source": config.data.source,
        "data.eval_source": config.data.eval_source,
    }
    for setting, name in inputs.items() if not run.goes_on(config) else ():
        if name and os.path.lexists(os.path.expanduser(name)) and _is_inside(name, run.path):
            raise RequestError.of(
                f"{setting}={name} lies inside output_dir={config.output_dir}",
                "a run is not kept where it reads from: what it writes would mix with what it reads",
                f"choose another output_dir, such as {run.path / 'run'}",
            )


def check_room(run: RunFolder, config: Config) -> None:
    """Refuse to mix with an earlier run, and to write over anything that is not known to be a run's."""
    mark, held, goes_on = Mark.of(run.path), run.held(), run.goes_on(config)
    if mark is None and goes_on and "plan.json" in held:
        return  # a run of a version that marked nothing
    others = [name for name in held if mark is None or name not in mark.entries]
    if others:
        raise RequestError.of(
            f"output_dir={config.output_dir} holds {some_of(others, 4)}, not known to be a run's",
            "a run would write there, and nothing is replaced that is not on the list of what a run wrote (a run of "
            "an earlier version has no list)",
            "choose another output_dir, or move them away",
        )
    if mark is not None and mark.holds_a_run(run.path) and not goes_on and not config.overwrite:
        resumable = run.newest_checkpoint() is not None
        raise RequestError.of(
            f"output_dir={config.output_dir} already holds a run ({some_of(mark.present(run.path), 4)})",
            "writing into it would mix two runs",
            ("training.resume=true goes on from its last checkpoint, " if resumable else "")
            + "overwrite=true moves it aside, another output_dir keeps both",
        )


def _is_inside(name: str, folder: Path) -> bool:
    """Whether the path leads into the folder, by its name or by way of links."""
    inner, outer = ({os.path.abspath(p), os.path.realpath(p)} for p in (os.path.expanduser(name), folder))
    return any(Path(path).is_relative_to(place) for path in inner for place in outer)


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
    summary = run.path / SUMMARY
    # Another process of this run failed first, or the result was kept before this.
    ended = summary.is_file() and summary.stat().st_mtime >= run.opened
    if not run.path.is_dir() or ended or not _is_this_runs(run, config):
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


def _is_this_runs(run: RunFolder, config: Config) -> bool:
    """Whether the folder is this run's by now, or nobody's; an earlier run, or whatever it is, stays as it is."""
    mark = Mark.of(run.path)
    if run.begun or (mark is not None and mark.started >= run.opened):
        return True
    holds = run.held() if mark is None else mark.holds_a_run(run.path)
    return not holds and not config.training.resume
