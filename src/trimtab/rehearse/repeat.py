"""Makes the torch call that failed once more, without virtual GPUs: on plain CPU copies of what it was given.

Fails it the same way again, the program is at fault, whatever the device. Does it work, the fault is the stand-in's or
ours. It never touches the program's own tensors, and leaves the random numbers as they were.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.rehearse import shield
from trimtab.rehearse.places import OURS
from trimtab.virtual import dispatch, functions, generators, origin, state
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.tensor import VIRTUAL, VirtualTensor

_MOST_BYTES = 1 << 30
_HALF = re.compile(r"not implemented for '(Half|BFloat16)'|not supported for (Half|BFloat16)")
_TRACING = re.compile(r"/torch/(?:_dynamo|_inductor|_subclasses|_export|export|fx/experimental)/")
_DEVICES = re.compile(r"cuda|\bcpu\b|device", re.IGNORECASE)
_ENTRIES: set[CodeType] = {
    functions.VirtualFunctions.__torch_function__.__code__,
    dispatch.VirtualMode.__torch_dispatch__.__code__,
    VirtualTensor.__torch_dispatch__.__func__.__code__,  # type: ignore[attr-defined]
}
_METHODS: dict[CodeType, str] = {
    function.__code__: name
    for name, function in vars(VirtualTensor).items()
    if isinstance(function, FunctionType) and hasattr(torch.Tensor, name)
}


@dataclass(frozen=True)
class Call:
    """A torch call that failed."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    below_autograd: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether a virtual GPU took part."""
        values = [*tree_leaves(self.args), *tree_leaves(self.kwargs)]
        return any(value.__class__ in VIRTUAL or _is_gpu(value) for value in values)

    @property
    def on_one_device(self) -> bool:
        """Whether all its tensors are on one device: only then nothing is lost by making them plain."""
        tensors = [
            v for v in (*tree_leaves(self.args), *tree_leaves(self.kwargs)) if isinstance(v, torch.Tensor)
        ]
        return len({str(tensor.device) for tensor in tensors}) < 2


@dataclass(frozen=True)
class Inner:
    """The inner end of a traceback: from the error out to the nearest line that is neither torch's nor ours."""

    calls: list[Call]
    """The torch calls there, outermost first; those of a backward pass without the pass itself."""
    innermost: FrameType
    line: int
    """Where the error was raised."""
    in_backward: bool
    traced: bool
    """Whether torch was tracing or exporting the program."""

    @property
    def in_our_frame(self) -> bool:
        """Whether the error was raised in our own code, or by what it calls in C."""
        return self.innermost.f_code.co_filename.startswith(OURS)


def inner_end(error: BaseException) -> Inner | None:
    """The inner end of an error's traceback."""
    walked = list(traceback.walk_tb(error.__traceback__))[::-1]
    calls: list[Call] = []
    in_backward = traced = False
    for frame, _ in walked:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) and not origin.is_plumbing(code.co_filename):
            break
        # What dynamo is told to leave alone (an optimizer's constructor) passes through it, and is not traced.
        left_alone = code.co_qualname.startswith("DisableContext.")
        traced |= _TRACING.search(code.co_filename) is not None and not left_alone
        if code.co_name == "_engine_run_backward":
            in_backward = True
        elif not in_backward and (call := _call_at(frame)) is not None:
            calls.insert(0, call)
    return Inner(calls, walked[0][0], walked[0][1], in_backward, traced) if walked else None


def _call_at(frame: FrameType) -> Call | None:
    code, here = frame.f_code, frame.f_locals
    if code in _ENTRIES:
        below = code.co_name == "__torch_dispatch__"
        return Call(here["func"], tuple(here["args"]), dict(here["kwargs"] or {}), below)
    if code in _METHODS:
        given = [here[name] for name in code.co_varnames[: code.co_argcount] if name in here]
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]
        more = tuple(here.get("args", ())) if "args" in rest else ()
        named = dict(here.get("kwargs", {})) if "kwargs" in rest else {}
        return Call(getattr(torch.Tensor, _METHODS[code]), (*given, *more), named)
    return None


Outcome = Literal["fails", "works", "unknown"]


def again(calls: list[Call], error: BaseException) -> Outcome:
    """Make the calls once more, the outermost first, until one tells: it fails in the same way, or it works."""
    for call in calls:
        if getattr(call.func, "__name__", "") in ("cuda", "pin_memory"):
            continue  # without virtual GPUs these would go to the real ones
        try:
            other = _attempt(call)
        except _CannotRepeat:
            continue
        if other is None:
            # Plain copies are all on the CPU: an error about devices does not come again.
            return "works" if call.on_one_device and not _DEVICES.search(str(error)) else "unknown"
        if _same(other, error):
            return "fails"
    return "unknown"


class _CannotRepeat(Exception):
    """What the call was given has no plain copy."""


def _attempt(call: Call) -> BaseException | None:
    """The error of the same call on plain copies; None when it works."""
    before = torch.random.get_rng_state()
    try:
        with shield.paused(), torch._C.DisableTorchFunction(), past_dispatch():
            other = _made(call, half=True)
            if other is not None and _HALF.search(str(other)):
                # The CPU has no such kernel: the same question in 32 bits.
                other = _made(call, half=False)
            return other
    finally:
        torch.random.set_rng_state(before)


def _made(call: Call, half: bool) -> BaseException | None:
    copier = _Copier(half=half, graph=not call.below_autograd)
    try:
        args, kwargs = tree_map(copier.copy, (call.args, call.kwargs))
    except RuntimeError as error:  # a tensor of a vmap that has ended, say
        raise _CannotRepeat from error
    try:
        call.func(*args, **kwargs)
    except Exception as error:
        return error
    return None


class _Copier:
    """Plain copies of arguments: what shared memory shares it again, strides are kept."""

    def __init__(self, half: bool, graph: bool) -> None:
        self._half = half
        self._graph = graph
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._bytes = 0

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Generator) or value.__class__.__name__ == "VirtualGenerator":
            made = torch._C.Generator()
            made.set_state(generators.source_of(value).get_state())
            return made
        if _is_gpu(value):
            return torch.device("cpu") if isinstance(value, torch.device) else "cpu"
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        virtual = tensor.__class__ in VIRTUAL
        plain: torch.Tensor = tensor.payload if virtual else tensor  # type: ignore[attr-defined]
        if type(plain) not in (torch.Tensor, torch.nn.Parameter) or plain.layout is not torch.strided:
            raise _CannotRepeat
        # A copy of what was made under inference mode must be refused by autograd as well.
        with torch._C._InferenceMode(tensor.is_inference()):
            made = plain.detach() if plain.is_meta else self._on_a_copied_storage(plain)
        if not self._half and made.dtype in (torch.float16, torch.bfloat16):
            made = made.float()
        if self._graph and tensor.requires_grad and not tensor.is_inference():
            made.requires_grad_()
            made = made if tensor.is_leaf else made.view_as(made)
        return made

    def _on_a_copied_storage(self, plain: torch.Tensor) -> torch.Tensor:
        storage = plain.untyped_storage()
        if storage._cdata not in self._storages:
            self._bytes += storage.nbytes()
            if self._bytes > _MOST_BYTES:
                raise _CannotRepeat
            self._storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=plain.dtype, device="cpu")
        return empty.set_(
            self._storages[storage._cdata], plain.storage_offset(), plain.size(), plain.stride()
        )


def _is_gpu(value: Any) -> bool:
    """Whether a value names a virtual GPU."""
    if isinstance(value, torch.device):
        return state.is_virtual_device(value)
    return isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) is not None


_SPOKEN = (
    (re.compile(r"torch\.(cuda|meta)\."), "torch."),
    (re.compile(r"\b(cuda|meta):\d+"), "cpu"),
    (re.compile(r"0x[0-9a-f]+"), ""),
)


def _same(one: BaseException, other: BaseException) -> bool:
    # What a wrong argument is called may differ: a handler of ours is named by another name.
    same = type(one).__name__ == type(other).__name__
    return same and (isinstance(one, TypeError) or _plain(one) == _plain(other))


def _plain(error: BaseException) -> str:
    text = str(error)
    for pattern, spoken in _SPOKEN:
        text = pattern.sub(spoken, text)
    return text.strip()
