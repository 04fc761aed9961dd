"""What is known of an operation from its schema, read once. Carries out nothing: see dispatch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from trimtab.virtual.authors import kernel_on_cuda

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Positional and named arguments of an operation."""

FRESH, VIEW, INPLACE, GENERAL = range(4)
NUMBERS = frozenset((int, float, bool, complex))
"""What may stand in the place of a tensor, where an operation is called by its schema."""

_COLLECTIVES = ("c10d::", "_c10d_functional::")
# Operations whose result shares the storage of their input without saying so in the schema.
_SILENT_VIEWS = frozenset(
    ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "_c10d_functional::wait_tensor")
)


class Plan:
    """What is known of an operation from its schema."""

    author: Any
    """What gives the kernel of an operation that was written in Python; None for all others."""
    parts: bool
    """Whether it is carried out by its parts."""
    rule: Any
    """What says which operands may mix: see rules.py."""
    before: Any
    """What a kernel on CUDA would refuse: see kernels.py; None for most."""
    compute: Any
    """What computes it on payloads: the operation itself, or a kernel of ours in the place of the CPU's (fused.py)."""
    temporary: Any
    """What a kernel on CUDA allocates for itself: see temporaries.py; None for most."""
    reuses: Any
    """What says whose memory the result takes over where CUDA works in place: see reused.py; None for most."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name: str = schema.name
        self.overload: str = schema.overload_name
        self.names = [argument.name for argument in schema.arguments]
        self.writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.collective = self.name.startswith(_COLLECTIVES) and self.name not in _SILENT_VIEWS
        self.composite = _composite(func)
        self.author = kernel_on_cuda(func)
        self.parts = self.composite or self.author is not None
        self.factory = "device" in self.names
        self.seeded = "generator" in self.names
        self.draws = self.seeded or torch.Tag.nondeterministic_seeded in func.tags
        self.pointwise = torch.Tag.pointwise in func.tags
        self.fresh = all(result.alias_info is None for result in schema.returns)
        self.foreach = self.name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach"))
        self.kind = self._kind(func, schema)
        self.views = self.kind == GENERAL and not self.writes and not self.fresh
        """Whether it gives several results that are memory of its operand: split, unbind and their like."""
        self.lasting = self.kind in (FRESH, INPLACE) or (
            self.kind == GENERAL and not self.writes and self.fresh
        )
        """Whether what it makes of shapes can be told again: no result is memory of an operand, or it is the first."""
        # OpOverload's own method, in Python, only hands its arguments on.
        self.kernel: Any = func._op if func.__class__ is OpOverload else func
        self.binding: Any = _BINDINGS.get(func.name(), self.kernel)
        """The same, in the way that costs least; it takes no number in the place of the first tensor."""

    def _kind(self, func: Any, schema: Any) -> int:
        returns = schema.returns
        if len(returns) != 1 or str(returns[0].type) != "Tensor":
            return GENERAL
        alias = returns[0].alias_info
        if alias is None:
            return VIEW if self.name in _SILENT_VIEWS else FRESH
        if not self.writes:
            return VIEW
        first = schema.arguments[0]
        plain_inplace = self.writes == [first.name] and torch.Tag.inplace_view not in func.tags
        return INPLACE if plain_inplace else GENERAL


def _bindings(form: str, names: str) -> dict[str, Any]:
    return {
        f"aten::{name}{form}": getattr(torch, name, None) or getattr(torch.Tensor, name)
        for name in names.split()
    }


_BINDINGS = {
    **_bindings("", "t detach view expand unsqueeze mm bmm cat neg rsqrt"),
    **_bindings(".int", "transpose select"),
    **_bindings(".Tensor", "add sub mul div"),
    **_bindings(".memory_format", "empty"),
}
"""Operations of which a network has very many, by the functions that torch has for them in Python: these call the same
kernels with the same arguments, and take half as long as to call any operation by its schema."""


def _composite(func: Any) -> bool:
    """Whether an operation is made of others, with no kernel of its own (`chunk` has one that keeps its views)."""
    if func.namespace == "prim":
        return False  # TorchScript's own, which a tracer passes on: the dispatcher does not know them
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has(name, "CompositeImplicitAutograd") and not (has(name, "CPU") or has(name, "ADInplaceOrView"))
