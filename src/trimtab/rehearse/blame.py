"""Whose an error is that ended the program: the program's (and whether that was proven), ours, or this machine's.

"The program fails here whatever the device" is said only of what failed again without virtual GPUs (repeat.py), or of
Python that no virtual GPU had a part in. What cannot be told is unproven, with the reason.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.diagnose import source
from trimtab.diagnose.finding import UNKNOWN
from trimtab.rehearse import lacking

if TYPE_CHECKING:
    from trimtab.rehearse.repeat import Inner

Whose = Literal["simulated", "proven", "python", "unproven", "open"]
"""simulated: raised on purpose, as CUDA would; proven: fails again on plain CPU tensors; python: raised by Python, no
virtual GPU had a part; unproven: not the program's, or not to be told; open: only what is known of its words tells."""

NO_ROOM = (
    "the memory of this machine was used up, which says nothing about the GPUs': rehearse with --shapes-only (no "
    "values), with GPUs that have less memory (--gpus T4), or a smaller model and batch"
)
_MISTAKES = (AttributeError, AssertionError, KeyError, NameError, RecursionError, ImportError)
"""Errors of code itself: raised in our own frames, the code is ours."""


@dataclass(frozen=True)
class Blame:
    """The judgement on one error."""

    whose: Whose
    why: str = ""

    @property
    def fix(self) -> str:
        """What to do about an error of whose words nothing more is known."""
        if self.whose == "proven":
            return "the same call fails on plain CPU tensors, without virtual GPUs: " + UNKNOWN
        return "raised by Python code, not by an operation on a GPU: " + UNKNOWN


def judge(error: BaseException) -> Blame:
    """Judge an error by itself (for what it was raised from, see `chain`)."""
    if getattr(error, "fault", None) is not None:
        return Blame("simulated")
    if _no_room(error):
        return Blame("unproven", NO_ROOM)
    if why := lacking.of_the_build(error):
        return Blame("unproven", why)
    if "torch" not in sys.modules:
        return Blame("python")
    import torch

    from trimtab.rehearse import repeat
    from trimtab.virtual.state import NotSimulated

    if isinstance(error, NotSimulated):
        return Blame("unproven", "virtual GPUs do not simulate this")
    if isinstance(error, torch.OutOfMemoryError):
        return Blame("simulated")
    inner = repeat.inner_end(error)
    if inner is None:
        return Blame("python")
    on_gpu = any(call.on_gpu for call in inner.calls)
    if inner.in_our_frame and not lacking.of_the_shell(error) and _on_purpose(inner):
        return Blame("simulated")
    if on_gpu and (why := lacking.of_the_stand_in(error)):
        return Blame("unproven", why)
    if why := lacking.of_the_transport(error, _in_a_collective(inner)):
        return Blame("unproven", why)
    if _in_a_collective(inner):
        # No rank can repeat one by itself. What torch's own Python checks before, it checks for NCCL too.
        return Blame("python" if _on_purpose(inner) else "open")
    if lacking.of_the_shell(error) and (on_gpu or not inner.calls):
        return Blame("unproven", "virtual GPUs of Trimtab do not hold here: a limit of the rehearsal")
    if inner.traced:
        return Blame("unproven", "tracing and exporting are not simulated on virtual GPUs")
    if not inner.calls and not inner.in_our_frame:
        return Blame("open" if inner.in_backward else "python")
    return _by_trial(error, inner)


def _by_trial(error: BaseException, inner: Inner) -> Blame:
    from trimtab.rehearse import repeat

    outcome = repeat.again(inner.calls, error)
    if outcome == "works":
        return Blame("unproven", "the same call works on plain CPU tensors: a mistake of virtual GPUs")
    if outcome == "fails" and not inner.in_backward:
        return Blame("proven")
    if inner.in_our_frame and isinstance(error, _MISTAKES):
        return Blame("unproven", "this is a mistake of virtual GPUs")
    if outcome == "unknown" and not inner.in_our_frame:
        return Blame("python")
    return Blame("open", "it could not be repeated without virtual GPUs")


def chain(error: BaseException) -> list[BaseException]:
    """An error and those that it was raised from, the outermost first.

    An error that was merely being handled counts if the new one was raised by the very function that handled it: what
    fails in a call made while handling (a second way) is an error of its own. A group stands for its members.
    """
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        last = waiting.pop(0)
        if any(last is one for one in found):
            continue
        found.append(last)
        if isinstance(last, BaseExceptionGroup):
            waiting += last.exceptions
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is not None and (last.__cause__ is not None or _raised_by_handler(last, before)):
            waiting.append(before)
    return found


def everything_before(error: BaseException) -> list[BaseException]:
    """An error and all that it was raised from, or while handling, hidden ones too."""
    found = [error]
    for last in found:
        members = last.exceptions if isinstance(last, BaseExceptionGroup) else ()
        for before in (last.__cause__, last.__context__, *members):
            if before is not None and not any(before is one for one in found):
                found.append(before)
    return found


def not_ours_to_tell(error: BaseException) -> str:
    """Why an error that was handled makes all that came of it unproven: virtual GPUs refused there, or erred."""
    if "torch" not in sys.modules or getattr(error, "fault", None) is not None:
        return ""
    from trimtab.rehearse import repeat
    from trimtab.virtual.state import NotSimulated

    if isinstance(error, NotSimulated):
        return "virtual GPUs do not simulate this"
    inner = repeat.inner_end(error)
    if inner is None or not inner.in_our_frame or _on_purpose(inner):
        return ""
    said = judge(error)
    return said.why if said.whose == "unproven" else ""


def _raised_by_handler(error: BaseException, handled: BaseException) -> bool:
    raised, stack = error.__traceback__, handled.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    while stack is not None:
        if raised is not None and stack.tb_frame is raised.tb_frame:
            return True
        stack = stack.tb_next
    return False


def _no_room(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError) and error.errno == 12:  # ENOMEM
        return True
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "std::bad_alloc" in text


def _on_purpose(inner: Inner) -> bool:
    """Whether the innermost line says `raise` with an error of its own making: of ours, what CUDA would say."""
    for node in source.walk(inner.innermost.f_code.co_filename):
        if isinstance(node, ast.Raise) and node.lineno <= inner.line <= (node.end_lineno or node.lineno):
            return isinstance(node.exc, ast.Call)
    return False


def _in_a_collective(inner: Inner) -> bool:
    return any(
        "c10d" in str(getattr(call.func, "namespace", ""))
        or str(getattr(call.func, "__module__", "")).startswith("torch.distributed")
        for call in inner.calls
    )
