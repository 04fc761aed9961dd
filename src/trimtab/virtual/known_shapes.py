"""Shapes of results, computed on meta tensors, each distinct question once: a network asks the same thousands of times.

It sees shapes only, never a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimtab.virtual.plans import FRESH, GENERAL, INPLACE, Plan

_META = torch.device("meta")

_KNOWN: dict[Any, Any] = {}
"""By operation and shapes of operands."""
_MOST_KNOWN = 1 << 16


def compute(plan: Plan, func: Any, shaped: Any, named: Any) -> Any:
    """The operation on meta tensors, which compute shapes; each distinct question once.

    NotImplementedError where torch has no rule for it.
    """
    lasting = plan.kind in (FRESH, INPLACE) or (plan.kind == GENERAL and not plan.writes and plan.fresh)
    key = (func, _key(shaped), _key(tuple(named.items()))) if lasting else None
    if key is not None:
        try:
            known = _KNOWN.get(key)
        except TypeError:  # an argument that cannot be a key
            key = known = None
        if known is not None:
            return shaped[0] if plan.kind == INPLACE else _made_like(known)
    made = func(*shaped, **named)
    if made.__class__ is Tensor and made.layout is not torch.strided:
        return made  # its size hangs on more than shapes
    if key is not None and len(_KNOWN) < _MOST_KNOWN and (plan.kind == INPLACE or not _shares(made, shaped)):
        _KNOWN[key] = True if plan.kind == INPLACE else _described(made)
    return made


def _shares(made: Any, shaped: Any) -> bool:
    """Whether a result is memory of an operand, whatever the schema says: FSDP's own operations do not say so.

    The next such question is then asked again: an answer made anew would be memory of its own.
    """
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(shaped) if isinstance(leaf, Tensor)}
    return any(
        isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in given for leaf in tree_leaves(made)
    )


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if value.__class__ is list or value.__class__ is tuple:
        return tuple(_key(item) for item in value)
    return value.__class__, value  # 1, 1.0 and True are equal, and make other types


def _described(made: Any) -> Any:
    if isinstance(made, Tensor):
        return made.size(), made.stride(), made.dtype
    if isinstance(made, (list, tuple)):
        return [_described(value) for value in made]
    return None if made is None else (made,)


def _made_like(known: Any) -> Any:
    if known is None:
        return None
    if known.__class__ is list:
        return tuple(_made_like(value) for value in known)
    if len(known) == 1:
        return known[0]
    size, stride, dtype = known
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)
