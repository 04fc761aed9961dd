"""After a bad step: which process had it, what was wrong with its batch, and one message for all of them.

Every process comes here together, for the verdict was taken over all of them. The one that had the fault runs its batch
once more, by itself; the others wait for what it says. It goes no step further, whatever it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimtab.monitor.bad_batch import keep_batch
from trimtab.monitor.blame import Blame, bad_inputs, bad_weights, blame
from trimtab.monitor.health import NonFiniteError
from trimtab.monitor.record import Pass
from trimtab.monitor.verdict import History, reason

_IGNORED = -100


@dataclass(frozen=True)
class Scene:
    """What can be looked at on this process."""

    model: torch.nn.Module
    """Whose modules are told by name."""
    again: Callable[[Pass], torch.Tensor]
    """Computes the loss of a pass once more."""
    sharded: bool
    processor: Any
    history: History
    run_dir: Path
    owner: Callable[[int], int] | None = None
    """The rank that computed a pass, where one process looks at those of all."""


def inquest(error: NonFiniteError, scene: Scene, rank: int, processes: int) -> NonFiniteError:
    """The error with the reason that was found; the same on every process."""
    record = error.record
    if record is None:
        return error
    bad = record.bad_passes
    mine = (bad[0] if bad else -1, bool(bad), bool(record.own_gradients))
    everywhere = _gather(mine, processes)
    suspects = [r for r, (_, loss, _) in enumerate(everywhere) if loss][:1]
    # Gradients may have been exchanged before they were noted: then each of these is a suspect.
    suspects = suspects or [r for r, (_, _, gradients) in enumerate(everywhere) if gradients] or [0]
    for suspect in suspects[:1] if scene.sharded else suspects:
        which = everywhere[suspect][0]
        said: tuple[str, str, str, bool] | None = None
        if rank == suspect:
            said = _examined(error, scene, which, rank, processes)
        elif scene.sharded:
            _rerun(scene, _tried(record.passes, which)[:1])  # the other needs this process's part
        found, why, change, certain = _from(said, suspect, processes)
        if certain:
            break
    return NonFiniteError(found, why, change, error.standing, error.what, error.parameters, record)


def _examined(
    error: NonFiniteError, scene: Scene, which: int, rank: int, processes: int
) -> tuple[str, str, str, bool]:
    try:
        return _examine(error, scene, which, rank, processes)
    except Exception as failure:  # the others wait for a word, and the run's own error must not be lost
        lost = f"looking for the module failed ({type(failure).__name__}: {failure})"
        return error.found, f"{error.why}; {lost}", error.change, True


def _examine(
    error: NonFiniteError, scene: Scene, which: int, rank: int, processes: int
) -> tuple[str, str, str, bool]:
    """What was found, why, what to change, and whether that is certain."""
    assert error.record is not None
    passes = error.record.passes
    tried = _tried(passes, which)
    place = [f"rank {rank} of {processes}"] if processes > 1 else []
    weights = bad_weights(scene.model)
    if not tried:
        found = error.found + (f" ({place[0]})" if place else "")
        if weights:
            made = reason(Blame("weights"), scene.history, no_labels=False, bad_weights=weights)
            return found, made.why, made.change, True
        lost = "; the batch was too large to keep, so that the module is not known" if passes else ""
        return found, error.why + lost, error.change, False
    one, told = _seen(tried, weights) or _rerun(scene, tried[:1] if scene.sharded else tried)
    inputs = one.inputs or {}
    if scene.owner is not None and not weights:
        place.append(f"rank {scene.owner(passes.index(one))}")
    if len(passes) > 1 and not weights:
        place.append(f"pass {passes.index(one) + 1} of {len(passes)}")
    found = error.found + (f" ({', '.join(place)})" if place else "")
    if isinstance(told, str):
        why, change, cause = f"{error.why}; the batch could not be run again: {told}", error.change, "unknown"
    else:
        made = reason(told, scene.history, no_labels=_no_labels(inputs), bad_weights=weights)
        why, change, cause = made.why, made.change, made.cause
    about = {"step": error.step, "rank": rank, "found": found, "cause": cause, "why": why}
    try:
        path = keep_batch(scene.run_dir, error.step, rank, inputs, scene.processor, about)
        kept = f"the batch is kept in {path}"
    except OSError as lost_too:
        kept = f"the batch could not be kept ({lost_too})"
    return found, why, f"{change}; {kept}", cause != "unknown"


def _seen(tried: list[Pass], weights: list[tuple[str, int, int]]) -> tuple[Pass, Blame | str] | None:
    """What can be told without running anything: the weights, or a batch, are not finite themselves."""
    if weights:
        return tried[0], Blame("weights", weights[0][0])
    found = ((one, bad_inputs(one.inputs or {})) for one in tried)
    return next(((one, told) for one, told in found if told is not None), None)


def _tried(passes: list[Pass], which: int) -> list[Pass]:
    """The kept passes that may have been the bad one. Of gradients alone nobody knows which pass made them."""
    chosen = passes if which < 0 else passes[which : which + 1]
    return [each for each in chosen if each.inputs is not None]


def _rerun(scene: Scene, tried: list[Pass]) -> tuple[Pass, Blame | str]:
    """The first pass that is bad again, and where; or why that cannot be told."""
    told: Blame | str = Blame("nothing")
    for one in tried:
        try:
            told = blame(lambda one=one: scene.again(one), scene.model, backward=not scene.sharded)  # type: ignore[misc]
        except Exception as failure:  # the run has failed already, and its message says this too
            return one, f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
        if told.kind != "nothing":
            return one, told
    return tried[0], told


def _no_labels(inputs: Mapping[str, Any]) -> bool:
    for name in ("shift_labels", "labels"):
        labels = inputs.get(name)
        if isinstance(labels, torch.Tensor):
            told = labels if name == "shift_labels" else labels[..., 1:]
            sounds = inputs.get("audio_labels")
            quiet = not isinstance(sounds, torch.Tensor) or bool((sounds == _IGNORED).all())
            return bool((told == _IGNORED).all()) and quiet
    return False


def _gather(mine: Any, processes: int) -> list[Any]:
    if processes == 1 or not dist.is_initialized():
        return [mine]
    every: list[Any] = [None] * processes
    dist.all_gather_object(every, mine)
    return every


def _from(said: Any, culprit: int, processes: int) -> Any:
    if processes == 1 or not dist.is_initialized():
        return said
    box = [said]
    dist.broadcast_object_list(box, src=culprit)
    return box[0]
