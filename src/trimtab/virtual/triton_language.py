"""The language of Triton while a kernel is interpreted: what its interpreter leaves out, or does element by element.

Functions that are themselves written in Triton (`tl.sum`, a kernel's helpers), CUDA's mathematical library
(`libdevice`), reductions and scans over whole slices. It changes Triton's modules for the time of a launch, and puts
them back. Imported only when a kernel is launched: Triton may not be there.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from trimtab.virtual.triton_memory import Builder
from trimtab.virtual.triton_numbers import Unsupported, agreed, alike, as_tensor, narrowed, wide
from trimtab.virtual.wording import words

_LIBRARIES = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")
_SAME_NAMES = words(
    """
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt erf erfc
    erfinv floor ceil trunc round abs lgamma pow fmod atan2 hypot copysign nextafter isnan isinf isfinite signbit
    """
)
"""Functions of CUDA's mathematical library that torch has by the same name."""
_OTHER_NAMES = {
    "fabs": "abs",
    "rint": "round",
    "nearbyint": "round",
    "fast_pow": "pow",
    "finite": "isfinite",
    "isfinited": "isfinite",
    "div": "true_divide",
    "mul": "multiply",
    "add": "add",
    "sub": "subtract",
    "fast_divide": "true_divide",
    "tgamma": "tgamma",
    "rcp": "reciprocal",
}


def patched(builder: Builder, call: Callable[..., Any]) -> Any:
    """Change Triton's language to one that computes; the result's `restore()` puts it back.

    `call(function, args, kwargs)` carries out a function that is itself written in Triton.
    """
    holder = type("Holder", (), {})
    holder.__globals__ = {"tl": tl, "core": tl.core}  # type: ignore[attr-defined]
    native = interpreter.interpreter_builder
    interpreter.interpreter_builder = builder
    try:
        scope = interpreter._patch_lang(holder)
    finally:
        interpreter.interpreter_builder = native
    for module in (tl, tl.core):
        scope.set_attr(module, "reduce", _reduce)
        scope.set_attr(module, "associative_scan", _scan)
    scope.set_attr(tl.core.tensor, "__index__", lambda self: int(agreed(self.handle.data)))
    scope.set_attr(tl.core.tensor, "__bool__", _truth)
    scope.set_attr(tl.core.tensor, "T", property(_transposed))
    scope.set_attr(JITFunction, "__call__", lambda self, *args, **kwargs: call(self, args, kwargs))
    for name, member in list(vars(tl.core.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.core.tensor, name, _method(member))
    for library in _LIBRARIES:
        module = sys.modules.get(library)
        for name, function in list(vars(module).items()) if module is not None else ():
            if getattr(function, "__module__", None) == library:
                scope.set_attr(module, name, _of_library(name))
    return scope


def by_identity(scope: Any) -> dict[int, Any]:
    """What stands for each function that was changed: a kernel's module may have imported it by name."""
    return {id(original): getattr(owner, name) for owner, name, original in scope._changes}


def _method(function: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _slices(value: Any) -> tuple[bool, list[Any]]:
    several = isinstance(value, (tuple, list, tl.core.tuple))
    return several, list(value) if several else [value]


def _given(values: Any, several: bool) -> Any:
    return tuple(values) if several else values[0]


def _truth(tensor: Any) -> bool:
    return True if tensor.type.is_block() and tensor.numel.value > 1 else bool(agreed(tensor.handle.data))


def _transposed(tensor: Any) -> Any:
    return as_tensor(np.swapaxes(tensor.handle.data, -1, -2), tensor.dtype)


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """tl.reduce: the usual ones by numpy, others by joining neighbours until one is left."""
    axis, keep = _plain(axis), bool(_plain(keep_dims))
    several, inputs = _slices(input)
    rank = inputs[0].handle.data.ndim - 1
    at = 1 if axis is None else axis % rank + 1
    types = [one.dtype.scalar for one in inputs]
    quick = {
        tl.standard._sum_combine.fn: np.add,
        tl.standard._elementwise_max.fn: np.fmax,
        tl.standard._elementwise_min.fn: np.fmin,
    }.get(combine_fn.fn)
    if quick is not None:
        values = wide(inputs[0].handle)
        values = values.reshape(len(values), -1) if axis is None else values
        made = [narrowed(quick.reduce(values, axis=at), types[0])]
    else:
        made = [one.handle.data for one in inputs]
        made = [
            array.reshape(len(array), -1) if axis is None else np.moveaxis(array, at, 1) for array in made
        ]
        while made[0].shape[1] > 1:
            made = _combined(combine_fn, [m[:, 0::2] for m in made], [m[:, 1::2] for m in made], types)
        made = [array[:, 0] for array in made]
    if keep:
        made = [m.reshape(len(m), *(1,) * rank) if axis is None else np.expand_dims(m, at) for m in made]
    return _given([as_tensor(m, dtype) for m, dtype in zip(made, types, strict=True)], several)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """tl.associative_scan: each element joined with one at a distance of 1, 2, 4, …"""
    several, inputs = _slices(input)
    types = [one.dtype.scalar for one in inputs]
    at = _plain(axis) % (inputs[0].handle.data.ndim - 1) + 1
    made = [np.moveaxis(one.handle.data, at, 1) for one in inputs]
    if _plain(reverse):
        made = [array[:, ::-1] for array in made]
    distance, length = 1, made[0].shape[1]
    while distance < length:
        # Whole blocks, since the language has no others: what came around the end is not taken.
        shifted = [np.roll(array, distance, axis=1) for array in made]
        joined = _combined(combine_fn, shifted, made, types)
        made = [
            np.concatenate((np.broadcast_to(m, j.shape)[:, :distance], j[:, distance:]), 1)
            for m, j in zip(made, joined, strict=True)
        ]
        distance *= 2
    if _plain(reverse):
        made = [array[:, ::-1] for array in made]
    results = [np.ascontiguousarray(np.moveaxis(array, 1, at)) for array in made]
    return _given([as_tensor(m, dtype) for m, dtype in zip(results, types, strict=True)], several)


def _combined(function: Any, left: list[Any], right: list[Any], types: list[Any]) -> list[Any]:
    sides = [(array, dtype) for side in (left, right) for array, dtype in zip(side, types, strict=True)]
    _, made = _slices(function(*(as_tensor(np.ascontiguousarray(array), dtype) for array, dtype in sides)))
    return [
        np.broadcast_to(one.handle.data.astype(a.dtype, copy=False), (len(one.handle.data), *a.shape[1:]))
        for one, a in zip(made, left, strict=True)
    ]


def _of_library(name: str) -> Callable[..., Any]:
    """A function of CUDA's mathematical library, by torch's function of that name."""
    plain = re.sub(r"^fast_|_r[nzdu]$", "", name)
    plain = _OTHER_NAMES.get(plain, plain)
    # fast_expf, and the variants of isnan and its kin by type
    shorter = plain if plain in _SAME_NAMES or plain in _OTHER_NAMES.values() else re.sub(r"[fd]$", "", plain)
    if shorter not in _SAME_NAMES and shorter not in _OTHER_NAMES.values():
        return _missing(name)

    def compute(*args: Any, **_: Any) -> Any:
        dtype = next(arg.dtype.scalar for arg in args if isinstance(arg, tl.core.tensor))
        given = (wide(a.handle) if isinstance(a, tl.core.tensor) else np.array([_plain(a)]) for a in args)
        operands = (torch.from_numpy(np.array(array)) for array in alike(*given))
        made = _torch_function(shorter)(*operands).numpy()
        return as_tensor(made, tl.int1) if made.dtype == bool else as_tensor(narrowed(made, dtype), dtype)

    return compute


def _torch_function(name: str) -> Callable[..., torch.Tensor]:
    if name == "tgamma":
        return lambda x: torch.exp(torch.lgamma(x)) * torch.where((x < 0) & (torch.floor(x) % 2 != 0), -1, 1)
    return getattr(torch, name)  # type: ignore[no-any-return]


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unsupported(f"libdevice.{name} is not among the functions that are interpreted")

    return refuse


def least(*values: Any) -> Any:
    """`min` in a kernel: for each program its own."""
    return _chosen(min, tl.minimum, values)


def most(*values: Any) -> Any:
    """`max` in a kernel."""
    return _chosen(max, tl.maximum, values)


def _chosen(plainly: Callable[..., Any], by_language: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    if not any(isinstance(value, tl.core.tensor) for value in values):
        return plainly(*values)
    return functools.reduce(by_language, values)
