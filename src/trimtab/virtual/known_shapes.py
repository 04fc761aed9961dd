"""Shapes of results, computed on meta tensors, each distinct question once: a network asks the same thousands of times.

It sees shapes only, never a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimtab.virtual.plans import INPLACE, Plan

_META = torch.device("meta")

_KNOWN: dict[Any, Any] = {}
"""By operation and shapes of operands."""
_MOST_KNOWN = 1 << 16


def compute(plan: Plan, func: Any, payloads: Any, named: Any) -> Any:
    """The operation on meta tensors in the place of these, which compute shapes; each distinct question once.

    NotImplementedError where torch has no rule for it.
    """
    key = None
    if plan.lasting:
        key = plan, _key(payloads), _key(tuple(named.items())) if named else None
        try:
            known = _KNOWN.get(key)
        except TypeError:  # an argument that cannot be a key
            key = known = None
        if known is not None:
            return payloads[0] if plan.kind == INPLACE else _made_like(known)
    back: dict[int, Tensor] = {}
    shapes = [shaped(value, back) for value in payloads]
    rule = _OWN.get(plan.name, func)
    made = rule(*shapes, **{name: shaped(value, back) for name, value in named.items()})
    if made.__class__ is Tensor and made.layout is not torch.strided:
        return made  # its size hangs on more than shapes
    if key is not None and len(_KNOWN) < _MOST_KNOWN and (plan.kind == INPLACE or not _shares(made, shapes)):
        _KNOWN[key] = True if plan.kind == INPLACE else _described(made)
    return _handed_back(made, back) if back else made


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """_grouped_mm as CUDA has it, in its words.

    Torch's rule takes bfloat16 alone, where the GPU multiplies group by group what the one kernel for all does not
    take, and it lets the rows of the result begin at multiples of 16 bytes in CUDA builds only.
    """
    flat, groups = (a.dim() == 2, b.dim() == 2), offs.size(0) if offs is not None else a.size(0)
    name = str(a.dtype).removeprefix("torch.")
    _require(a.dtype in _GROUPED, f"Expected mat_a to be Float32, BFloat16 or Float16 matrix, got {name}")
    _require(
        a.dtype is b.dtype, f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}"
    )
    _require(all(flat) or a.size(-1) == b.size(-2), "contraction dimension of mat_a and mat_b must match")
    for matrix in (a, b):
        _rows_apart(matrix)
    _require(
        (offs is not None) == any(flat),
        "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
    )
    _require(offs is None or offs.dtype is torch.int32, "Offsets have to be int32")
    _require(
        all(one.dim() == 2 or one.size(0) == groups for one in (a, b)), "matrix batch sizes have to match"
    )
    dtype = out_dtype or a.dtype
    rows, columns = a.size(-2), b.size(-1)
    apart = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    size, stride = [groups, rows, columns], [rows * apart, apart, 1]
    if flat[0] != flat[1]:
        del size[0], stride[0]
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def _rows_apart(matrix: Tensor) -> None:
    """Rows or columns of one piece, each of which begins at a multiple of 16 bytes."""
    (rows, columns), (far, near) = matrix.shape[-2:], matrix.stride()[-2:]
    upright = far == 1 and near >= max(1, rows)
    _require(
        upright or (near == 1 and far >= max(1, columns)),
        f"Invalid strides/sizes, got {list(matrix.stride())} for strides and {list(matrix.shape)} for sizes",
    )
    apart = (near if upright else far) * matrix.element_size()
    _require(apart % 16 == 0, "strides should be multiple of 16 bytes")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


_OWN = {"aten::_grouped_mm": _grouped_product}
"""Rules for shapes in the place of torch's, which are not those of CUDA's kernels."""


def shaped(value: Any, back: dict[int, Tensor] | None = None) -> Any:
    """A meta tensor in the place of each tensor; `back` is told whose place that is."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        if back is not None:
            back[id(made)] = value
        return made
    if value.__class__ is list or value.__class__ is tuple:
        return [shaped(item, back) for item in value]
    return value


def _handed_back(made: Any, back: dict[int, Tensor]) -> Any:
    """Results that are operands, as what they were before they were made shapes."""
    if isinstance(made, (list, tuple)):
        kept = [_handed_back(value, back) for value in made]
        return tuple(kept) if isinstance(made, tuple) else kept
    return back.get(id(made), made)


def _shares(made: Any, shapes: Any) -> bool:
    """Whether a result is memory of an operand, whatever the schema says: FSDP's own operations do not say so.

    The next such question is then asked again: an answer made anew would be memory of its own.
    """
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(shapes) if isinstance(leaf, Tensor)}
    return any(
        isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in given for leaf in tree_leaves(made)
    )


def _key(values: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is Tensor or isinstance(value, Tensor):
            found.append((value.size(), value.stride(), value.dtype))
        elif kind is list or kind is tuple:
            found.append(_key(value))
        else:
            found.append((kind, value))  # 1, 1.0 and True are equal, and make other types
    return tuple(found)


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
