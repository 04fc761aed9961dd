"""Errors that cross from a worker to the process that waits for it: looked at in the worker, where the frames are.

The finding travels with the error; it is recorded only where the error ends the program, which may well catch it.
"""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing.pool
import sys
from typing import Any

import torch

from trimtab.diagnose.finding import CARRIED
from trimtab.rehearse import places
from trimtab.rehearse.errors import UNPROVEN, looked_at
from trimtab.rehearse.shield import around

_POOLS = (
    (multiprocessing.pool, "ExceptionWithTraceback"),
    (concurrent.futures.process, "_ExceptionWithTraceback"),
)


def install() -> None:
    """Put the hooks in: loaders' workers and replicas wrap an error as text, pools keep the object without frames."""
    around(torch._utils.ExceptionWrapper, "__init__", _wrapped)
    around(torch._utils.ExceptionWrapper, "reraise", _raised_again)
    for module, name in _POOLS:
        around(getattr(module, name), "__init__", _pooled)


def _looked_at(error: BaseException | None, where: str) -> dict[str, Any]:
    """What the error is to carry to the process that waits."""
    if not isinstance(error, Exception):
        return {}
    finding, unproven = looked_at(error)
    if finding is None:
        return {UNPROVEN: f"{unproven} ({where})"} if unproven else {}
    if places.first_own([finding.where] if finding.where is not None else []) is None:
        return {}  # no line of the program's own: the waiting process knows more
    message = f"{finding.message} ({where})" if where else finding.message
    return {CARRIED: {**finding.to_dict(), "message": message}}


def _hand_over(error: BaseException, found: dict[str, Any]) -> None:
    for name, value in found.items():
        setattr(error, name, value)


def _wrapped(real: Any, self: Any, exc_info: Any = None, where: str = "in background") -> None:
    found = exc_info or sys.exc_info()
    real(self, found, where)
    self.trimtab = _looked_at(found[1], where)


def _raised_again(real: Any, self: Any) -> None:
    try:
        real(self)
    except Exception as error:
        _hand_over(error, getattr(self, "trimtab", {}))
        raise


def _pooled(real: Any, self: Any, error: BaseException, traceback: Any) -> None:
    _hand_over(error, _looked_at(error, "in a worker process"))
    real(self, error, traceback)
