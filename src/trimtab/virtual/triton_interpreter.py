"""Runs one Triton kernel over its grid, on the CPU, on the memory that it is given.

The kernel's source becomes a Python function in which every assignment gives a value of the language, as Triton's own
interpreter does it; names are looked up in a copy of the kernel's module, so that nothing is left behind there. One
launch at a time: Triton's language is one for the whole process. Imported only when a kernel is launched.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import threading
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.virtual.triton_language import by_identity, least, most, patched
from trimtab.virtual.triton_memory import Builder
from trimtab.virtual.triton_numbers import Diverged, Memory, as_tensor

_lock = threading.RLock()
_FIRST, _MOST = 16, 4096
"""How many programs run together at first, and at most; by their size, so many that arrays have _ELEMENTS elements."""
_ELEMENTS = 1 << 19
_codes: WeakKeyDictionary[Callable[..., Any], types.CodeType] = WeakKeyDictionary()


class _Values(ast.NodeTransformer):
    """`x = 0` makes a value of the language of it, so that what is added to x later has a type."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        name = ast.Name("__to_tensor__", ast.Load())
        node.value = ast.Call(name, [node.value, ast.Constant(False)], [])
        return node


class Launch:
    """One launch of a kernel."""

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], tensors: list[torch.Tensor], budget: int
    ) -> None:
        """`arguments` by name, with tensors on the CPU; `tensors` is all memory that it may touch."""
        self._kernel = kernel
        self._arguments = arguments
        self.memory = Memory(tensors)
        self.builder = Builder(self.memory, budget)
        self._semantic = TritonSemantic(self.builder)
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._replaced: dict[int, Any] = {}

    def over(self, grid: tuple[int, ...]) -> None:
        """Run every program of the grid, many together; those that go different ways are run again apart."""
        sizes = (*grid, 1, 1)[:3]
        with _lock, np.errstate(all="ignore"):
            scope = patched(self.builder, self.call)
            try:
                self._replaced = by_identity(scope)
                given = {name: self._value(name, value) for name, value in self._arguments.items()}
                self.builder.set_grid_dim(*sizes)
                done, count = 0, math.prod(sizes)
                while done < count:
                    some = max(1, min(_MOST, _ELEMENTS // self.builder.widest)) if done else _FIRST
                    programs = np.arange(done, min(count, done + some))
                    self._together(given, sizes, programs)
                    done += some
            finally:
                scope.restore()

    def _together(self, given: dict[str, Any], sizes: tuple[int, ...], programs: Any) -> None:
        function = self._python(self._kernel)
        waiting = [programs]
        while waiting:
            some = waiting.pop()
            ids = np.unravel_index(some, sizes)
            self.builder.start(tuple(axis.astype(np.int32) for axis in ids))
            try:
                function(**given)
            except Diverged as apart:
                self.builder.take_back()
                ways, which = np.unique(apart.keys, return_inverse=True)
                # In the order of the grid; the last to wait is the first to run.
                parts = [some[which.reshape(-1) == way] for way in range(len(ways))]
                waiting += sorted(parts, key=lambda part: -int(part[0]))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that is written in Triton and called by a kernel."""
        kwargs = {name: value for name, value in kwargs.items() if name not in ("_semantic", "_generator")}
        return self._python(function)(*args, **kwargs)

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, tl.constexpr):
            value = value.value
        constant = next(param.is_constexpr for param in self._kernel.params if param.name == name)
        return value if constant else self._of_language(value)

    def _of_language(self, value: Any) -> Any:
        if isinstance(value, float):
            return as_tensor(np.array([value], np.float32), tl.float32)
        if isinstance(value, tuple):
            items = [self._of_language(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, TensorDescriptor):
            return self._semantic.make_tensor_descriptor(
                base=interpreter._implicit_cvt(value.base),
                shape=[interpreter._implicit_cvt(size) for size in value.shape],
                strides=[interpreter._implicit_cvt(s) for s in value.strides[:-1]] + [tl.constexpr(1)],
                block_shape=[tl.constexpr(size) for size in value.block_shape],
                padding_option=value.padding,
            )
        return interpreter._implicit_cvt(value)

    def _python(self, function: Any) -> Callable[..., Any]:
        """The Python function that computes what a function of the language says."""
        written = function.fn
        found = self._functions.get(written)
        if found is None:
            code = _codes.get(written)
            if code is None:
                code = _codes[written] = _compiled(function)
            names = {**written.__globals__, **inspect.getclosurevars(written).nonlocals}
            names = {name: self._replaced.get(id(value), value) for name, value in names.items()}
            names = {"min": least, "max": most, **names, "__to_tensor__": self._semantic.to_tensor}
            found = self._functions[written] = types.FunctionType(
                code, names, written.__name__, written.__defaults__
            )
        return found


def _compiled(function: Any) -> types.CodeType:
    """The code of a function of the language, with the lines of its file."""
    source = function.src
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    definition.args.defaults = []  # they are the function's own
    for argument in definition.args.args:
        argument.annotation = None
    tree = ast.fix_missing_locations(_Values().visit(tree))
    above = next((n for n, line in enumerate(function.raw_src) if re.match(r"\s*def\s", line)), 0)
    ast.increment_lineno(tree, function.starting_line_number + above - 1)
    module = compile(tree, inspect.getsourcefile(function.fn) or "<kernel>", "exec")
    return next(part for part in module.co_consts if isinstance(part, types.CodeType))
