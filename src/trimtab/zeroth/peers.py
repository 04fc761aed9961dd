"""Ranks that stop together: what fails on one of them is told to all, so that none waits for one that is gone.

An error stays what it was on the rank where it was raised, with its own traceback; the others raise `PeerFailed`, which
names that rank. Nothing goes on after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.errors import TrimtabError

TEXT_LENGTH = 400
"""As much of an error's text as the other ranks show of it."""

T = TypeVar("T")


class PeerFailed(TrimtabError):
    """Another rank failed, so this one stopped."""


def own_rank() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def on_several_ranks() -> bool:
    return own_rank()[1] > 1


def gather(own: T) -> list[T]:
    """What every rank has."""
    rank, world = own_rank()
    every: list[T] = [own] * world
    try:
        with torch.inference_mode(False):
            dist.all_gather_object(every, own)
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {rank} of {world} lost the others: {str(error).splitlines()[0]}\n"
            "  why: another rank ended, or cannot be reached; a step needs the losses of all of them\n"
            "  change: see the first error in the output of the other ranks"
        ) from error
    return every


@contextmanager
def together(doing: str, made: list[Any] | None = None) -> Iterator[None]:
    """Work that each rank does by itself (or one of them for all): what fails on one ends it on all of them.

    Every rank has to enter it, and nothing inside may wait for another rank. One process is left alone. What the
    ranks put into `made` inside stands there afterwards on all of them, in the order of the ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if not on_several_ranks():
            raise
        failure = error  # raised again below, once the other ranks know
    if not on_several_ranks():
        return
    said = "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0][:TEXT_LENGTH]
    found = gather((said, made))
    rank, world = own_rank()
    if failure is not None:
        failure.add_note(f"This was rank {rank} of {world}, {doing}; the other ranks stop with it.")
        raise failure
    if failed := [peer for peer, (text, _) in enumerate(found) if text]:
        lines = "".join(f"  rank {peer}: {found[peer][0]}\n" for peer in failed)
        ranks = "rank " + str(failed[0]) if len(failed) == 1 else "ranks " + ", ".join(map(str, failed))
        raise PeerFailed(
            f"{ranks} of {world} failed, {doing}; rank {rank} stops with it\n{lines}"
            "  why: a step needs the losses of all ranks; its weights are those of the step before\n"
            f"  change: the traceback of {ranks} says where it failed"
        )
    if made is not None:
        made[:] = [one for _, part in found for one in part or ()]
