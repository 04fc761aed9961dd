"""Ranks that stop together: what fails on one of them is told to all, so that none waits for one that is gone.

An error stays what it was on the rank where it was raised, with its own traceback; the others raise `PeerFailed`, which
names that rank. Nothing goes on after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError

TEXT_BYTES = 400
"""As much of an error's text as the other ranks show of it."""


class PeerFailed(TrimtabError):
    """Another rank failed, so this one stopped."""


def on_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def exchange_device() -> torch.device:
    """Where tensors have to be that ranks exchange."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


def gather(own: Tensor) -> list[Tensor]:
    """Every rank's tensor; they all have one shape."""
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(every, own)
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {dist.get_rank()} of {dist.get_world_size()} lost the others: {str(error).splitlines()[0]}\n"
            "  why: another rank ended, or cannot be reached; a step needs the losses of all of them\n"
            "  change: see the first error in the output of the other ranks"
        ) from error
    return every


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Work that each rank does by itself (or one of them for all): what fails on one ends it on all of them.

    Every rank has to enter it, and nothing inside may wait for another rank. One process is left alone.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if not on_several_ranks():
            raise
        failure = error  # raised again in `stop_all`, once the other ranks know
    if on_several_ranks():
        with torch.inference_mode(False):
            flags = gather(torch.tensor(int(failure is not None), device=exchange_device()))
        if failed := [rank for rank, flag in enumerate(flags) if flag]:
            stop_all(failed, failure, doing)


def stop_all(failed: Sequence[int], error: Exception | None, doing: str) -> NoReturn:
    """Raise on every rank, once all know which ones `failed`; `error` is this rank's own, if it is one of them."""
    with torch.inference_mode(False):
        texts = [t.cpu() for t in gather(_packed(error))]
    world = dist.get_world_size()
    if error is not None:
        error.add_note(f"This was rank {dist.get_rank()} of {world}, {doing}; the other ranks stop with it.")
        raise error
    lines = "".join(f"  rank {rank}: {_unpacked(texts[rank])}\n" for rank in failed)
    ranks = "rank " + str(failed[0]) if len(failed) == 1 else "ranks " + ", ".join(map(str, failed))
    raise PeerFailed(
        f"{ranks} of {world} failed, {doing}; rank {dist.get_rank()} stops with it\n{lines}"
        "  why: a step needs the losses of all ranks; its weights are those of the step before\n"
        f"  change: the traceback of {ranks} says where it failed"
    )


def _packed(error: Exception | None) -> Tensor:
    """The first line of an error as bytes, in a tensor whose size every rank knows."""
    text = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
    data = text.encode()[:TEXT_BYTES]
    return torch.tensor(list(data.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device=exchange_device())


def _unpacked(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
