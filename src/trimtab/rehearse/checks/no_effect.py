"""Lines that ran and changed nothing: dropped results, methods not called, flags set on what does not know them.

That a line ran is shown by another one of its block that was seen running: a step, a layer's call, a walk over
parameters. What hangs on a condition of its own is let be.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import dead_lines, rewrite, source
from trimtab.diagnose.finding import cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, trained_by
from trimtab.virtual import origin, state

_LOOKS = 2000
"""Calls of layers of which the lines are looked at."""


class NoEffect(BaseCheck):
    """Looks at each line that steps, calls a layer or walks over parameters, once."""

    def install(self) -> None:
        self._seen: set[tuple[CodeType, int]] = set()
        self._dead: dict[tuple[str, int], dead_lines.Dead] = {}
        self._looks = self._steps = 0
        register_optimizer_step_pre_hook(self._step)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        around(nn.Module, "named_parameters", self._walked)
        around(nn.Module, "state_dict", self._walked, outermost=True)

    def _forward(self, module: nn.Module, args: Any) -> None:
        self._looks += 1
        if self._looks <= _LOOKS:
            self._look(sys._getframe(1), 8)

    def _walked(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._look(sys._getframe(1), 8)
        return real(*args, **kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps > 3:
            return
        for frame in places.frames():
            self._look(frame, 1)
        code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
        if self._steps == 2 and code is not None and source.is_user_file(code.co_filename):
            self._note(dead_lines.inside(code.co_filename, code.co_firstlineno))
        if self._steps == 2:
            self._flags(optimizer)

    def _look(self, frame: FrameType | None, deep: int) -> None:
        """At the innermost line of the program, at most so many frames up."""
        while frame is not None and deep:
            if not origin.of_library(frame) and source.is_user_file(frame.f_code.co_filename):
                key = (frame.f_code, frame.f_lineno)
                if key not in self._seen:
                    self._seen.add(key)
                    self._note(dead_lines.around(frame))
                return
            frame, deep = frame.f_back, deep - 1

    def _note(self, found: Iterator[dead_lines.Dead]) -> None:
        for dead in found:
            self._dead.setdefault((dead.place.file, dead.place.line), dead)

    def finish(self) -> None:
        for dead in self._dead.values() if self._steps else ():
            self.report(
                "no-effect",
                dead.message,
                dead.place,
                cause_at(dead.place, dead.why),
                fix=dead.fix,
                op="",
                edits=dead.edits,
            )

    def _flags(self, optimizer: torch.optim.Optimizer) -> None:
        """Flags that were to freeze or free something, and are a plain attribute of a module or tensor."""
        here = state.machine()
        for module in list(here.modules) if here is not None else ():
            flag = vars(module).get("requires_grad")
            if isinstance(flag, bool) and any(p.requires_grad is not flag for p in module.parameters()):
                self._flag("requires_grad", type(module).__name__, flag)
        for parameter in trained_by(optimizer):
            for name, flag in list(vars(parameter).items()):
                near = isinstance(flag, bool) and difflib.get_close_matches(name, ["requires_grad"], 1, 0.85)
                if near and parameter.requires_grad is not flag:
                    self._flag(name, "a parameter", flag)

    def _flag(self, name: str, owner: str, flag: bool) -> None:
        tops = [f.f_code.co_filename for f in places.frames()]
        files = dict.fromkeys([*tops, *(f for f in _files() if source.is_user_file(f))])
        found = [
            (file, node) for file in files for node in source.walk(file) if _sets(node, name, flag, file)
        ]
        # Who reads such a flag has given it a meaning of his own.
        if len(found) != 1 or any(_reads(node, name) for file in files for node in source.walk(file)):
            return
        file, node = found[0]
        assert isinstance(node, ast.Assign)
        target = node.targets[0]
        assert isinstance(target, ast.Attribute)
        text, whole = ast.unparse(target.value), name == "requires_grad"
        code = f"{text}.requires_grad_({flag})" if whole else f"{text}.requires_grad = {flag}"
        place = source.place(file, node.lineno)
        what = "of its parameters" if whole else "of a tensor"
        self.report(
            "no-effect",
            f"{name} = {flag} is set on {owner}, which does not pass it on: its parameters still have "
            f"requires_grad={not flag}.",
            place,
            cause_at(place, f"this only makes an attribute {name}; requires_grad {what} stays as it was"),
            fix=f"Set it on the parameters: {code}.",
            op="requires_grad",
            once=f"{file}:{node.lineno}",
            edits=[rewrite.in_place_of(file, node, code)],
        )


def _files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            yield file


def _reads(node: ast.AST, name: str) -> bool:
    """Whether a method reads such a flag of its own object; of a tensor everybody reads requires_grad."""
    if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.ctx, ast.Load):
        return False
    return name != "requires_grad" or ast.unparse(node.value) == "self"


def _sets(node: ast.AST, name: str, flag: bool, file: str) -> bool:
    """Whether a statement sets such a flag, other than on the variable of a loop over parameters."""
    if not isinstance(node, ast.Assign) or not source.is_constant(node.value, flag):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Attribute) or target.attr != name:
        return False
    loops = [n for n in source.above(file, node) if isinstance(n, ast.For)]
    walked = any(
        source.root(target) in source.bound(n) and "parameters" in ast.unparse(n.iter) for n in loops
    )
    return name != "requires_grad" or not walked
