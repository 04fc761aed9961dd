"""The scene of a fault: its operands, the stray one among them, and who holds it. Asks; decides nothing.

Works while the failing operation is on the stack; afterwards the frames are gone and only the operands' origins speak.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from trimtab.diagnose import holders, owners, rewrite, source, spot
from trimtab.diagnose.holders import Kept
from trimtab.diagnose.owners import Attribute
from trimtab.virtual import faults, origin

if TYPE_CHECKING:
    from trimtab.virtual.faults import Fault, Operand
    from trimtab.virtual.origin import Origin


@dataclass
class Suspect:
    """An operand that may be the one in the wrong place."""

    operand: Operand
    tensor: torch.Tensor | None
    attributes: list[Attribute] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where it is."""
        return self.operand.device

    @property
    def is_parameter(self) -> bool:
        """Whether it is (a view of) a module's parameter."""
        return isinstance(self.tensor, nn.Parameter) or any(
            attribute.registered and attribute.name in attribute.module._parameters
            for attribute in self.attributes
        )

    @property
    def registered(self) -> Attribute | None:
        """The parameter or buffer of a module that it is."""
        return next((attribute for attribute in self.attributes if attribute.registered), None)

    @cached_property
    def held(self) -> torch.Tensor | None:
        """The tensor itself, or the parameter or buffer of which it is a view."""
        for attribute in self.attributes:
            value = getattr(attribute.module, attribute.name, None)
            if isinstance(value, torch.Tensor):
                return value
        return self.tensor

    @property
    def born(self) -> Origin | None:
        """Where it was made."""
        return (origin.born_of(self.held) if self.held is not None else None) or self.operand.origin

    @property
    def moved(self) -> Origin | None:
        """Where it was last moved."""
        return origin.moved_of(self.held) if self.held is not None else None

    @property
    def made_by(self) -> tuple[str, ast.expr] | None:
        """The expression that made it, and its file."""
        return self._span(0)

    @property
    def moved_by(self) -> tuple[str, ast.expr] | None:
        """The expression that last moved it, and its file."""
        return self._span(1)

    def _span(self, which: int) -> tuple[str, ast.expr] | None:
        span = origin.spans_of(self.held)[which] if self.held is not None else None
        node = source.node_at(*span) if span is not None else None
        return (span[0], node) if span is not None and node is not None else None

    @property
    def cast(self) -> Origin | None:
        """Where it was last given another dtype in place."""
        return origin.cast_of(self.held) if self.held is not None else None


@dataclass
class Sight:
    """A suspect as one of the user's frames sees it."""

    file: str
    line: int
    frame: FrameType
    name: str
    """The expression that reaches it."""

    @property
    def root(self) -> str:
        """The variable in it: `batch` for `batch['labels']`."""
        return self.name.split("[")[0].split(".")[0]

    @cached_property
    def made(self) -> ast.stmt | None:
        """The statement that last bound this variable."""
        return source.last_assignment(self.file, self.line, self.root)

    @cached_property
    def taken_from(self) -> str:
        """The variable that it came out of, back over lines that take, reshape or cast it."""
        name, made = self.root, self.made
        for _ in range(5):
            value = source.value_for(made, name) if made is not None else None
            before = source.root(value) if value is not None else ""
            if made is None or not before or before == name:
                break
            earlier = source.last_assignment(self.file, made.lineno, before)
            if earlier is None and before not in source.parameters(self.file, self.line):
                break  # no variable: a module such as torch
            name, made = before, earlier
        return name


class Scene:
    """A fault, looked at where it happens."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.frames: list[FrameType] = []
        for at in fault.stack:
            if (frame := holders.frame_at(at.file, at.line)) is not None and frame not in self.frames:
                self.frames.append(frame)
        self.modules = owners.modules_seen(self.frames[0] if self.frames else None)
        self.operands = [self._suspect(operand) for operand in fault.operands]

    def _suspect(self, operand: Operand) -> Suspect:
        tensor = operand.tensor() if operand.tensor is not None else None
        return Suspect(
            operand, tensor, owners.attributes_of(tensor, self.modules) if tensor is not None else []
        )

    @cached_property
    def several(self) -> bool:
        """Whether the program uses more GPUs than one."""
        tensors = [p for module in self.modules for p in module._parameters.values() if p is not None]
        devices = {str(p.device) for p in tensors} | {s.device for s in self.operands}
        return len({device for device in devices if device.startswith("cuda")}) > 1

    @cached_property
    def strays(self) -> list[Suspect]:
        """The operands that may be in the wrong place, the likeliest first."""
        real = [
            s for s in self.operands if s.operand.shape or not s.device.startswith("cpu")
        ] or self.operands
        if len({s.device for s in real}) < 2:
            return list(real)
        on_cpu = [s for s in real if s.device == "cpu"]
        ordered = (
            sorted(on_cpu, key=lambda s: not s.is_parameter) if on_cpu else sorted(real, key=self._innocence)
        )
        found = [ancestor for stray in ordered for ancestor in self._ancestors(stray)]
        return [one for suspect in found for one in (*self._kept_before(suspect), suspect)]

    def _innocence(self, suspect: Suspect) -> tuple[int, bool]:
        """Among GPUs: plain data is moved to weights and to what has a gradient, not the other way round."""
        tensor = suspect.tensor
        grown = suspect.is_parameter or (tensor is not None and tensor.requires_grad)
        rank = 3 if suspect.is_parameter else 2 if grown else 0 if self._kept(suspect) else 1
        return rank, not self._explicit(suspect)

    def _kept(self, suspect: Suspect) -> bool:
        """Whether it outlives the call: reached through self, a class or a global, as a cache is."""
        sight = next(self.sights(suspect), None)
        return sight is not None and (sight.root == "self" or sight.root not in sight.frame.f_locals)

    def _explicit(self, suspect: Suspect) -> bool:
        """Whether it was made with an explicit `device=`: the choice of the program rather than of its partner."""
        born = suspect.born
        return born is not None and any(
            source.keyword(call, "device") is not None for call in source.call_on(born.file, born.line)
        )

    def _ancestors(self, stray: Suspect) -> list[Suspect]:
        """What the failing line computed a nameless operand from: the tensors that it names on the same device.

        Of one that the function itself took out of what it was given: that, which its caller knows.
        """
        if stray.tensor is None or stray.attributes or not self.frames:
            return [stray]
        if (sight := next(self.sights(stray), None)) is not None:
            given = sight.frame.f_locals.get(sight.taken_from)
            passed = sight.taken_from in source.parameters(sight.file, sight.line)
            if not passed or given is stray.tensor or not isinstance(given, torch.Tensor):
                return [stray]
            same = str(given.device) == stray.device and given.dim()
            return [self._suspect(faults.operand(sight.taken_from, given)), stray] if same else [stray]
        frame, found = self.frames[0], []
        if not self._made_by_line(stray, frame):
            return [stray]
        part = spot.expression(stray.tensor, stray.device, frame)
        inside = {ast.unparse(n) for n in ast.walk(part)} if part is not None else set()
        for name, tensor in holders.expressions(frame.f_code.co_filename, frame.f_lineno, frame):
            if str(tensor.device) == stray.device and tensor.dim() and (name in inside or not inside):
                found.append(self._suspect(faults.operand(name, tensor)))
        return [*found, stray]

    def _kept_before(self, stray: Suspect) -> list[Suspect]:
        """Of what a function computed from tensors that its object keeps, and from nothing else: those tensors."""
        sight = next(self.sights(stray), None)
        made = sight.made if sight is not None else None
        value = source.value_for(made, sight.name) if sight is not None and made is not None else None
        if sight is None or value is None or sight.name != sight.root or stray.device != "cpu":
            return []
        chains = [n for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute)]
        named = {ast.unparse(n): v for n in chains if torch.is_tensor(v := holders.value_of(n, sight.frame))}
        if rewrite.has_factory(value) or not all(
            n.startswith("self.") and str(t.device) == stray.device for n, t in named.items()
        ):
            return []
        return [self._suspect(faults.operand(name, tensor)) for name, tensor in named.items()]

    def _made_by_line(self, stray: Suspect, frame: FrameType) -> bool:
        """Whether the failing statement itself computed it: what another line made has nothing of this one's names."""
        born, node = stray.born, source.statement(frame.f_code.co_filename, frame.f_lineno)
        if born is None or node is None:
            return True
        here = born.file == frame.f_code.co_filename
        return here and node.lineno <= born.line <= (node.end_lineno or node.lineno)

    def partner(self, stray: Suspect) -> Suspect | None:
        """An operand on the other device: where the stray one should have been."""
        others = [s for s in self.operands if s.device != stray.device and s.operand.shape]
        return next((s for s in others if s.is_parameter), others[0] if others else None)

    def sights(self, stray: Suspect) -> Iterator[Sight]:
        """How the user's frames reach a suspect, innermost first."""
        if stray.tensor is None:
            return
        for frame in self.frames:
            if name := holders.variable_of(stray.tensor, frame):
                yield Sight(frame.f_code.co_filename, frame.f_lineno, frame, name)

    def keepers(self, stray: Suspect) -> Iterator[Kept]:
        """The objects of the program's own classes that hold a suspect, or a view of it."""
        if (tensor := stray.tensor) is not None:
            yield from holders.kept_in(
                lambda value: isinstance(value, torch.Tensor) and holders.same(value, tensor), self.frames
            )

    def expression_of(self, suspect: Suspect | None) -> str | None:
        """How the failing line's own frame names an operand, for the code to write."""
        if suspect is None or suspect.tensor is None:
            return None
        for frame in self.frames[:1]:
            if name := holders.variable_of(suspect.tensor, frame):
                return name
            owner = frame.f_locals.get("self")
            for attribute in suspect.attributes:
                if attribute.module is owner:
                    return f"self.{attribute.name}"
                if isinstance(owner, nn.Module):
                    for name, child in owner._modules.items():
                        if child is attribute.module:
                            return f"self.{name}.{attribute.name}"
                for name, value in frame.f_locals.items():
                    if value is attribute.module:
                        return f"{name}.{attribute.name}"
        return None
