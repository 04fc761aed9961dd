"""How many operations the products of a kernel take: matrices, convolutions, attention. By the shapes of its operands.

Operands may be payloads or a tracer's fake tensors. Attention that is causal takes half. Operations of a program's own
take what it has told torch's flop counter. A kernel that is not known has none: element-wise work is told by the bytes
that it moves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.launches import Runs

_MATRICES = {
    "aten::mm": "self",
    "aten::addmm": "mat1",
    "aten::bmm": "self",
    "aten::baddbmm": "batch1",
    "aten::_scaled_mm": "self",
    "aten::_grouped_mm": "self",
    "aten::_scaled_grouped_mm": "self",
}
"""Products, with the name of their first matrix."""
_ATTENTION = ("aten::_scaled_dot_product_", "aten::_flash_attention_", "aten::_efficient_attention_")
_BACKWARD = 2.5
"""Attention's backward pass makes five products where the forward pass makes two."""


def operations(func: Any, given: Mapping[str, Any], made: Any) -> tuple[int, Runs]:
    """Of an operation with these arguments and this result (the first of several)."""
    name = func._schema.name.removesuffix("_")  # in place or not, it is the same product
    if name in _MATRICES:
        first = given[_MATRICES[name]]
        groups = (
            made.size(0) if made.dim() > first.dim() else 1
        )  # each sums over its own part of the inner extent
        return 2 * made.numel() * first.size(-1) // groups, _numbers(first)
    if name.startswith("aten::convolution"):
        return _convolution(name, given, made), _numbers(given["weight"])
    if name.startswith(_ATTENTION):
        numbers = _numbers(given["query"])
        return _attention(name, given), "attention" if numbers == "half" else numbers
    if not name.startswith("aten::") and (told := _registered().get(func._overloadpacket)) is not None:
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        return int(told(*given.values(), out_val=made)), _numbers(tensors[0])
    return 0, ""


def _registered() -> Mapping[Any, Any]:
    """What operations of a program's own take, as it has told torch's flop counter; which is dear to import."""
    counter = sys.modules.get("torch.utils.flop_counter")
    return counter.flop_registry if counter is not None else {}


def _numbers(tensor: Tensor) -> Runs:
    return "half" if tensor.dtype.itemsize <= 2 else "single"


def _convolution(name: str, given: Mapping[str, Any], made: Any) -> int:
    weight = given["weight"]
    each = 2 * weight.numel() // max(weight.size(0), 1)
    back = "backward" in name
    # Each output number is a sum over the filter; of a transposed one, each input number goes into as many.
    over = given["input"] if given["transposed"] else given["grad_output"] if back else made
    passes = sum(bool(wanted) for wanted in given["output_mask"][:2]) if back else 1
    return int(over.numel() * each * passes)


def _attention(name: str, given: Mapping[str, Any]) -> int:
    query, key, value = (given[part] for part in ("query", "key", "value"))
    causal = bool(given.get("is_causal") or given.get("custom_mask_type"))
    bounds = next((given[b] for b in ("cum_seq_q", "cu_seqlens_q") if given.get(b) is not None), None)
    if bounds is not None:
        # Rows end to end: [tokens, heads, size], or the same with a leading 1.
        heads, tokens = query.size(-2), query.size(-3)
        longest = given.get("max_q") or given.get("max_seqlen_q") or tokens
        known = not bounds.is_meta and type(bounds) is Tensor
        pairs = int(bounds.diff().square().sum()) if known else tokens * int(longest)
    else:
        by_rows = not name.startswith("aten::_scaled_dot")
        rows, heads = (query.size(1), query.size(2)) if by_rows else (query.size(2), query.size(1))
        pairs = query.size(0) * rows * key.size(1 if by_rows else 2)
        tokens = query.size(0) * rows
    pairs = pairs // 2 if causal else pairs
    window = given.get("window_size_left")
    if window is not None and window >= 0:
        pairs = min(pairs, tokens * (window + 1))
    forward = 2 * heads * (query.size(-1) + value.size(-1)) * pairs
    return int(forward * _BACKWARD) if "backward" in name else int(forward)
