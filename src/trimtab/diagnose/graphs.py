"""The graph behind a tensor, as autograd keeps it: its nodes, nearest first. Looks only; keeps and changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

MOST = 4000
"""Nodes that are looked at: beyond them a graph says nothing new, and time runs."""


def distances(root: Any, most: int = MOST) -> dict[Any, int]:
    """The nodes behind a node of a graph, itself among them, with how far each is from it."""
    found: dict[Any, int] = {root: 0} if root is not None else {}
    queue = deque(found)
    while queue and len(found) < most:
        node = queue.popleft()
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found[following] = found[node] + 1
                queue.append(following)
    return found


def users(roots: list[torch.Tensor], most: int = MOST) -> dict[Any, list[Any]]:
    """The nodes that use a node's result, by that node, of what is behind these tensors."""
    found: dict[Any, list[Any]] = {}
    for node in {n for root in roots for n in distances(root.grad_fn, most)}:
        for following, _ in node.next_functions:
            found.setdefault(following, []).append(node)
    return found


def leaves(root: torch.Tensor, most: int = MOST) -> Iterator[torch.Tensor]:
    """The leaves that a backward pass from here would reach."""
    if root.grad_fn is None:
        yield root
    for node in distances(root.grad_fn, most):
        if hasattr(node, "variable"):
            yield node.variable
