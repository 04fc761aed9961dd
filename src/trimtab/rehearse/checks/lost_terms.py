"""A term of the loss that comes from torch.autograd.grad without create_graph: it changes the loss, and trains nothing.

What autograd.grad gives is followed through the program's own operations as long as none of them has a graph. Speaks
where such a number is added to one that has a graph and the sum is sent backward: a weight that multiplies a loss, a
value that was detached, a log line are none of its business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.diagnose import graphs, rewrite, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub
from trimtab.virtual import functions

_MARK = "_trimtab_no_graph"
_SUMS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__"))
_MOST, _NEAR = 64, 8


class LostTerms(BaseCheck):
    """Marks what autograd.grad gives without a graph, and looks at the sums that go backward."""

    def install(self) -> None:
        self._sums: list[tuple[Any, Place]] = []
        """Nodes of sums one part of which has no graph, with the line of the autograd.grad that it comes from."""
        self._listens = False
        around(torch.autograd, "grad", self._grad)
        backward_hub().before.append(self._backward)

    def _grad(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        results = real(*args, **kwargs)
        place = places.here()
        asked = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        outputs = kwargs.get("outputs", args[0] if args else ())
        first = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs), None)
        if asked or place is None or first is None or not _reaches_parameters(first):
            return results
        for result in results:
            if isinstance(result, torch.Tensor):
                result.__dict__[_MARK] = place
        if not self._listens:
            self._listens = True
            functions.AFTER.append(self._after)
        return results

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if not isinstance(result, torch.Tensor) or name == "detach":
            return
        given = [a for a in args if isinstance(a, torch.Tensor)]
        lost = next((a.__dict__[_MARK] for a in given if _MARK in a.__dict__), None)
        if lost is None:
            return
        if not result.requires_grad:
            result.__dict__[_MARK] = lost
        elif any(a.requires_grad and (a.is_leaf or _MARK in _notes(a)) for a in given):
            _notes(result)[_MARK] = lost  # a weight that is stepped by hand, once or more
        elif name in _SUMS and result.dim() == 0 and len(self._sums) < _MOST:
            self._sums.append((result.grad_fn, lost))

    def _backward(self, roots: list[torch.Tensor], place: Place | None) -> None:
        sums, self._sums = self._sums, []
        if not sums:
            return
        # Near the loss it is a term of it; farther off, a weight that was stepped by hand.
        near = {n for root in roots for n, far in graphs.distances(root.grad_fn, 256).items() if far < _NEAR}
        lost = next((at for node, at in sums if node in near), None)
        if lost is None:
            return
        calls = [c for c in source.call_on(lost.file, lost.line) if source.called_name(c) == "grad"]
        edits = [rewrite.add_keyword(lost.file, call, "create_graph", "True") for call in calls[:1]]
        fix = f": {rewrite.shown(edits)}" if edits else ""
        self.report(
            "no-gradient",
            "A term of the loss has no graph and trains nothing: it comes from torch.autograd.grad without "
            "create_graph=True.",
            place,
            cause_at(lost, "this gives gradients without a graph, and the loss is computed from them"),
            fix=f"Keep the graph of the gradients{fix}.",
            op="autograd.grad",
            once="lost",
            edits=edits,
        )


def _reaches_parameters(root: torch.Tensor) -> bool:
    """Whether a value depends on weights, which its gradients would train."""
    return root.grad_fn is not None and any(
        isinstance(leaf, torch.nn.Parameter) for leaf in graphs.leaves(root)
    )


def _notes(tensor: torch.Tensor) -> dict[Any, Any]:
    """What is written beside the node of a graph."""
    node: Any = tensor.grad_fn
    notes: dict[Any, Any] = node.metadata
    return notes
