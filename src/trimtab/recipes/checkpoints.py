"""The checkpoints of a run: written whole, the newest whole one found again, the oldest removed.

A checkpoint is made in a folder of its own, sealed with a manifest and renamed into its place. Nothing is deleted but
what a manifest lists; what lies in the way is set aside under another name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import RequestError, TrimtabError
from trimtab.files import sync_file, sync_folder
from trimtab.manifest import (
    MANIFEST,
    Damaged,
    Part,
    is_sealed,
    only_listed,
    read_manifest,
    remove_listed,
    seal,
    verify,
)
from trimtab.recipes.run_mark import Mark
from trimtab.recipes.unsealed import OWN_STATE, TRAINER_STATE, check_unsealed
from trimtab.shortage import look_at_the_disk

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.recipes.run_folder import RunFolder

_SAVING = re.compile(r"\.saving-\d+\.partial")
_REMOVING = re.compile(r"\.removing-checkpoint-\d+\.partial")
_OURS = ".trimtab-saving"
"""In a folder where a checkpoint is being made: the sign that it may be cleared away."""


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int | None:
    """The step of a checkpoint by its name; None for a copy that somebody named."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isascii() and number.isdecimal() and number == str(int(number)) else None


def by_step(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints by step, in order. A copy that somebody set aside (checkpoint-40-good) is theirs."""
    numbered = ((step_of(folder), folder) for folder in checkpoints.glob("checkpoint-*"))
    return dict(sorted((step, folder) for step, folder in numbered if step is not None))


def fault(checkpoint: Path, run: Path | None = None, *, contents: bool = True) -> str | None:
    """Why the checkpoint is not whole; None where it is.

    `run` is the folder of the files that it relies on. Without `contents` a look that takes no time.
    """
    try:
        if not checkpoint.is_dir():
            raise Damaged("it is missing" if not os.path.lexists(checkpoint) else "it is no folder")
        if is_sealed(checkpoint):
            manifest = verify(checkpoint, contents=contents, beside=run)
            if step_of(checkpoint) not in (None, manifest.about.get("step")):
                raise Damaged(f"{MANIFEST} is of step {manifest.about.get('step')}")
        else:
            check_unsealed(checkpoint, contents=contents)
    except Damaged as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else 'it'} cannot be read: {error.strerror}"
    return None


def newest(checkpoints: Path) -> Path | None:
    """The last checkpoint that looks whole."""
    found = reversed(by_step(checkpoints).values())
    return next((folder for folder in found if fault(folder, contents=False) is None), None)


def checkpoint_to_resume(config: Config, run: RunFolder, say: Callable[[str], None] = print) -> Path | None:
    """The checkpoint that `training.resume` asks for, every byte of it checked; None when the run starts afresh."""
    wanted = config.training.resume
    found = by_step(run.checkpoints)
    if not (run.again and found):  # else its launcher has begun the run again: it goes on, whatever was asked
        if isinstance(wanted, str):
            return _named(Path(wanted).expanduser(), wanted, run, say)
        if wanted is False or run.again:
            return None
    reasons: list[str] = []
    for folder in reversed(found.values()):
        reason = fault(folder, run.path)
        if reason is None:
            for skipped in reasons:
                say(f"{skipped}; going on from {folder.name}")
            _say_unsealed(folder, say)
            return folder
        reasons.append(f"{folder.name} skipped: {reason}")
    if reasons:
        raise RequestError.of(
            f"training.resume=true, but no checkpoint in {run.checkpoints} is whole\n  "
            + "\n  ".join(reason.replace(" skipped", "") for reason in reasons),
            "going on from a damaged one would give other weights than the run's own",
            "put the files back from a copy, or start afresh with overwrite=true, which moves this run aside",
        )
    mark = Mark.of(run.path)
    if mark is not None and mark.began:
        say("the earlier run ended before its first checkpoint: beginning again")
        return None
    raise RequestError.of(
        f"training.resume=true, but {run.checkpoints} holds no checkpoint",
        "the earlier run ended before its first save, or output_dir names another folder",
        "check output_dir, or start afresh with training.resume=false",
    )


def _named(path: Path, wanted: str, run: RunFolder, say: Callable[[str], None]) -> Path:
    if not any(os.path.lexists(path / name) for name in (TRAINER_STATE, OWN_STATE, MANIFEST)):
        raise RequestError.of(
            f"training.resume={wanted}: not a checkpoint",
            f"a checkpoint folder holds {TRAINER_STATE} or {OWN_STATE}",
            "name a folder such as RUN/checkpoints/checkpoint-40, or use training.resume=true",
        )
    if reason := fault(path, run.path):
        raise RequestError.of(
            f"training.resume={wanted}: the checkpoint is damaged: {reason}",
            "going on from it would give other weights than the run's own",
            "name an older one, or use training.resume=true, which takes the newest that is whole",
        )
    _say_unsealed(path, say)
    return path


def _say_unsealed(folder: Path, say: Callable[[str], None]) -> None:
    if not is_sealed(folder):
        say(
            f"{folder.name} has no {MANIFEST} (an earlier version wrote it): its files can be read, but whether "
            "they are what was written cannot be told"
        )


def check_best(folder: Path, run: Path) -> None:
    """Raise TrimtabError where the checkpoint whose weights are to be kept is damaged."""
    if reason := fault(folder):
        raise TrimtabError(
            f"the best checkpoint, {folder}, is damaged: {reason}\n"
            "  why: its weights were to be kept, and are not what was trained\n"
            f"  change: put its files back from a copy; or go on from the last one ({run / 'config.yaml'} with "
            "training.resume=true), which looks for the best among what is whole"
        )


@contextmanager
def new_checkpoint(checkpoints: Path, step: int, beside: Mapping[str, Part] | None = None) -> Iterator[Path]:
    """Yield the folder in which a checkpoint is made; it gets its name when the block ends without an error."""
    place = begin_saving(checkpoints, step)
    try:
        (place / name_of(step)).mkdir()
        yield place / name_of(step)
        finish_saving(checkpoints, step, beside)
    except BaseException as error:
        look_at_the_disk(error, checkpoints)
        raise
    finally:
        stop_saving(checkpoints, step)


def saving_place(checkpoints: Path, step: int) -> Path:
    """The folder in which the checkpoint's folder is made, the same for all processes."""
    return checkpoints / f".saving-{step}.partial"


def begin_saving(checkpoints: Path, step: int) -> Path:
    """An empty place for a checkpoint in the making; what a kill left of an earlier attempt is cleared."""
    place = saving_place(checkpoints, step)
    _clear(place)
    place.mkdir(parents=True)
    (place / _OURS).touch()
    return place


def finish_saving(checkpoints: Path, step: int, beside: Mapping[str, Part] | None = None) -> Path:
    """Seal the checkpoint and give it its name."""
    made, target = saving_place(checkpoints, step) / name_of(step), checkpoints / name_of(step)
    if (metrics := checkpoints.parent / "metrics.jsonl").is_file():
        sync_file(metrics)  # its lines up to this step are not written again
    seal(made, {"kind": "checkpoint", "step": step}, beside)
    if os.path.lexists(target):
        _set_aside(target)
    made.rename(target)
    sync_folder(checkpoints)
    stop_saving(checkpoints, step)
    return target


def stop_saving(checkpoints: Path, step: int) -> None:
    """Clear away the place in which a checkpoint was made or was to be."""
    _clear(saving_place(checkpoints, step))


def rotate(checkpoints: Path, keep: int | None, best_step: int | None = None) -> None:
    """Remove the oldest checkpoints so that `keep` are left; the newest and the best stay in any case.

    Only what a manifest lists is removed: one that somebody put a file into stays, and one without a manifest.
    """
    if keep is None:
        return
    found = by_step(checkpoints)
    whole = [step for step, folder in found.items() if fault(folder, contents=False) is None]
    stays = {*whole[-1:], best_step} & set(whole)
    over = len(whole) - max(keep, len(stays))
    for step in [step for step in whole if step not in stays][: max(over, 0)]:
        doomed = checkpoints / f".removing-{name_of(step)}.partial"
        if only_listed(found[step]) and not found[step].is_symlink() and not os.path.lexists(doomed):
            # Under another name first: a kill half-way leaves nothing that looks like a checkpoint.
            found[step].rename(doomed)
            sync_folder(checkpoints)
            remove_listed(doomed)


def set_aside_later(checkpoints: Path, start: Path, say: Callable[[str], None] = print) -> None:
    """What lies after the checkpoint that a run goes on from is of another course: it gets another name."""
    step = read_manifest(start).about.get("step") if is_sealed(start) else step_of(start)
    for later, folder in by_step(checkpoints).items():
        if isinstance(step, int) and later > step:
            say(
                f"{folder.name} is later than the step that the run goes on from: now {_set_aside(folder).name}"
            )


def _set_aside(folder: Path) -> Path:
    names = (f"{folder.name}-set-aside" + (f"-{n}" if n > 1 else "") for n in range(1, 10_000))
    aside = next(p for p in (folder.with_name(name) for name in names) if not os.path.lexists(p))
    folder.rename(aside)
    sync_folder(folder.parent)
    return aside


def clear_leftovers(checkpoints: Path) -> None:
    """Clear away what a kill left half-made or half-removed, where it is known to be ours."""
    if not checkpoints.is_dir():
        return
    for path in sorted(checkpoints.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if _SAVING.fullmatch(path.name) and ((path / _OURS).is_file() or not any(path.iterdir())):
            _clear(path)
        elif _REMOVING.fullmatch(path.name):
            remove_listed(path)


def _clear(place: Path) -> None:
    """Remove the folder of a checkpoint in the making, its sign last: cut short, it is still known to be ours."""
    if not place.is_dir():
        return
    children = list(place.iterdir())
    if children and place / _OURS not in children:
        raise RequestError.of(
            f"{place}: a folder that no run is known to have made",
            "a checkpoint is made there before it gets its name, and nothing of yours is to be lost",
            "move it away",
        )
    for child in children:
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != _OURS:
            child.unlink()
    (place / _OURS).unlink(missing_ok=True)
    place.rmdir()
