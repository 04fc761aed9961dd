"""What CUDA's kernels allocate for themselves while an operation runs: bytes that no tensor of the program holds.

Each rule follows from how the kernel works (ATen's sources, torch 2.11 to 2.13). What stays when an operation has ended
is in workspaces.py; attention's kernels are in sdp_memory.py. Never a figure that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import conv_memory, reduce_memory, sdp_memory, sort_memory, workspaces
from trimtab.virtual.course import RESULT, Course, Taken, together
from trimtab.virtual.memory import Block
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.sort_memory import INDEX
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.unknown import is_unknown
from trimtab.virtual.wording import words

Rule = Callable[[Plan, Args, Kwargs, VirtualDevice], Taken]
"""The memory that lives inside one operation only."""

LATER = object()
"""In the place of memory that an operation takes when its result is there."""
_STRUCTURED = (
    *("mm", "addmm", "bmm", "baddbmm", "addmv", "_softmax", "_log_softmax", "_softmax_backward_data"),
    *("_log_softmax_backward_data", "cumsum", "cumprod", *reduce_memory.AFTER),
)
"""Of these ATen makes the result before it calls the kernel (`structured` in native_functions.yaml): what it takes for
itself comes behind it, cuBLAS' workspace too, which stays where it was put."""
AFTER = frozenset(f"aten::{name}" for name in ("_safe_softmax", "convolution", *_STRUCTURED))
"""Operations that do."""


def taken_after(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> None:
    """What is taken behind the result, and given back at once."""
    rule: Rule | None = plan.temporary
    if rule is not None and (taken := rule(plan, args, kwargs, device)):
        if isinstance(taken, int):
            Block(device, taken)
        else:
            Course(taken, device).end()


def rule_for(name: str) -> Rule | None:
    """The rule of an operation; None for most, which need no more than their result."""
    return RULES.get(name.removeprefix("aten::"))


def size(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """The bytes of a dense copy."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def copies(*tensors: Any) -> list[int]:
    """The copies that a kernel makes of operands which do not lie in one piece."""
    return [size(t) for t in tensors if isinstance(t, Tensor) and not t.is_contiguous()]


def _wide(dtype: torch.dtype) -> int:
    """The bytes of a number in which sums of this type are kept."""
    return 8 if dtype is torch.float64 else 4


def _matrix(tensor: Tensor) -> int:
    """The copy of a matrix that cuBLAS cannot take as it lies: rows or columns of one piece, apart by a row or more."""
    rows, columns = tensor.shape[-2:]
    far, near = tensor.stride()[-2:]
    if near == 1 and far >= columns and far:
        return 0
    return 0 if far == 1 and near >= rows and near else size(tensor)


def _product(first: int, biased: bool = False) -> Rule:
    """Copies of operands; cuBLAS takes its workspace. `biased`: whether a bias may be added by cuBLASLt."""

    def rule(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
        workspaces.multiplied(device, biased and args[0].dim() == 1 and kwargs.get("beta", 1) == 1)
        one, other = _matrix(args[first]), _matrix(args[first + 1])
        target = _matrix(kwargs["out"]) if "out" in kwargs else 0
        return together(one, other, target) if one or other or target else 0

    return rule


def _times_vector(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    workspaces.multiplied(device)
    matrix, vector = args[-2:] if plan.name == "aten::mv" else args[1:3]
    return together(_matrix(matrix), size(vector) if vector.stride(0) == 0 else 0)


def _contiguous(*places: int) -> Rule:
    def rule(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
        return together(*copies(*[args[place] for place in places if place < len(args)]))

    return rule


def _embedding_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Few indices are added as they come. Many are sorted; then equal ones are summed, by rows in 32 bits."""
    grad, indices, words_, _, by_frequency = args[:5]
    number = indices.numel()
    dense = copies(grad, indices)
    if number <= 3072 and not by_frequency:
        return (*dense,)
    index = indices.element_size()
    parts = number // 10 + min(number, words_)  # ten equal ones at a time
    rows = parts * grad.size(-1) * _wide(grad.dtype)
    each = number * index  # first: the sorted ones, where they came from, and where they stood
    sorting = sort_memory.pairs(number, index, index, sort_memory.bits(words_))
    sorted_ = (each, each, each, sorting, -sorting, -each)
    return (*dense, *sorted_, RESULT, each, each, each, parts * index, rows)


def _index_put(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """With `accumulate` the indices are sorted, so that equal ones meet."""
    target, indices, values = args[:3]
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    extra = _masks(indices)
    if not adds:
        return extra
    shapes = [index.shape for index in indices if index is not None and index.dtype not in _MASKS]
    if not shapes:
        return extra
    number = math.prod(torch.broadcast_shapes(*shapes))
    count = sum(index is not None for index in indices)
    at = next(place for place, index in enumerate(indices) if index is not None)
    together = all(index is not None for index in indices[at : at + count])
    outer = [d for place, d in enumerate(target.shape) if place >= len(indices) or indices[place] is None]
    spread = number * math.prod(outer) * target.element_size()
    moved = 0 if together and at == 0 and target.is_contiguous() else size(target)
    whole = values.numel() * values.element_size() == spread and values.is_contiguous()
    sorting = sort_memory.pairs(number, INDEX, INDEX, sort_memory.bits(math.prod(target.shape)))
    each = number * INDEX  # the places as one number each, made from those of each dimension; then as above
    placed = (each, each, -each)
    return (extra, RESULT, *placed, 0 if whole else spread, moved, each, each, each, sorting)


_MASKS = (torch.bool, torch.uint8)


def _true(mask: Any) -> int:
    """How many elements of a mask are true; all of them where nobody knows."""
    return mask.numel() if is_unknown(mask) else int(payload_of(mask).count_nonzero())


def _masks(indices: Any) -> int:
    """A mask as an index becomes the places at which it is true."""
    return sum(
        _true(index) * max(index.dim(), 1) * INDEX
        for index in indices
        if isinstance(index, Tensor) and index.dtype in _MASKS
    )


def _index(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    return _masks(args[1])


def _masked_select(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    return _masks([args[1]])


def _masked_scatter(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """The place of each true element among the true ones, and the values in one piece."""
    return (RESULT, *copies(args[2]), args[0].numel() * INDEX)


def _multinomial(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """One draw, or draws that are not put back: the weights over an exponential number each, the largest win."""
    weights, draws = args[:2]
    again = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    return size(weights) if draws == 1 or not again else together(size(weights), size(weights))


def _layer_norm_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Weights of few columns under very many rows are summed by parts."""
    grad, source, shape = args[:3]
    columns = math.prod(shape)
    rows = source.numel() // max(columns, 1)
    wanted = args[7] if len(args) > 7 else kwargs.get("output_mask", (True, True, True))
    return (
        *copies(grad, source),
        RESULT,
        *norm_parts(rows, columns, sum(map(bool, wanted[1:])), grad, device),
    )


def norm_parts(rows: int, columns: int, weights: int, grad: Tensor, device: VirtualDevice) -> tuple[int, ...]:
    """The gradients of a norm's weights by blocks of 32 rows, where rows are very many and columns few; then one after
    the other they are added up."""
    if rows <= 64 * 1024 or columns // 32 >= reduce_memory.multiprocessors(device) // 2:
        return ()
    blocks, row = -(-rows // 32), columns * grad.element_size()
    parts, counters = reduce_memory.staged(torch.empty(blocks, columns, device="meta"), [0], 4, device)
    adding = (row, parts, counters, -counters, -parts, -row)
    return (blocks * row,) * weights + adding * weights


def _group_norm(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """A factor and a shift for each row and channel."""
    source, each = args[0], args[3] * args[4] * _wide(args[0].dtype)
    return (*copies(source), each, each)


def _group_norm_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    grad, source, each = args[0], args[1], args[5] * args[6] * _wide(args[1].dtype)
    return (*copies(grad, source), each, each, each, each)


def _foreach_norm(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """A sum for each piece of 65,536 elements, as many pieces for every tensor as the largest has."""
    tensors = args[0]
    pieces = max((-(-tensor.numel() // 65536) for tensor in tensors), default=0)
    return pieces * len(tensors) * 4


def _across(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """A copy from the host goes in one piece: to what lies otherwise it goes by way of another copy."""
    target, source = args[:2]
    alike = target.dtype is source.dtype and target.stride() == source.stride()
    return 0 if source.is_cuda or target.is_contiguous() or alike else size(target)


def _softmax_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """The gradient times the result, in whole."""
    return together(*copies(args[1]), size(args[1]))


def _safe_softmax(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Where a score is minus infinity, and for each row whether all are."""
    source = args[0]
    return (*copies(source), source.numel(), source.numel() // max(source.size(-1), 1))


def _loss(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """The losses of all elements, before they are summed."""
    return 0 if _reduction(plan, args, kwargs) == 0 else size(args[0])


def _bce(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    return together(*[size(args[0])] * (1 if _reduction(plan, args, kwargs) == 0 else 2))


def _ctc_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """The sums from behind, as many as those from the front."""
    return size(args[6])


def _reduction(plan: Plan, args: Args, kwargs: Kwargs) -> int:
    at = plan.names.index("reduction")
    return int(args[at] if at < len(args) else kwargs.get("reduction", 1))


def _softmax(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    return together(*copies(args[0]))


RULES: dict[str, Rule] = {
    **dict.fromkeys(words("mm bmm"), _product(0)),
    "addmm": _product(1, biased=True),
    **dict.fromkeys(words("addmm_ baddbmm baddbmm_"), _product(1)),
    **dict.fromkeys(words("mv addmv addmv_"), _times_vector),
    **dict.fromkeys(words("_softmax _log_softmax"), _softmax),
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _contiguous(0, 1),
    **dict.fromkeys(words("mse_loss smooth_l1_loss huber_loss"), _loss),
    "binary_cross_entropy_with_logits": _bce,
    **dict.fromkeys(words("nll_loss_forward nll_loss2d_forward"), _contiguous(0, 1, 2)),
    **dict.fromkeys(words("nll_loss_backward nll_loss2d_backward"), _contiguous(0, 1, 2, 3)),
    "_ctc_loss_backward": _ctc_backward,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(words("index_put index_put_ _index_put_impl_"), _index_put),
    **dict.fromkeys(words("index _unsafe_index"), _index),
    "masked_select": _masked_select,
    **dict.fromkeys(words("masked_scatter masked_scatter_"), _masked_scatter),
    "multinomial": _multinomial,
    "native_layer_norm": _contiguous(0, 2, 3),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_foreach_norm": _foreach_norm,
    "copy_": _across,
    **conv_memory.RULES,
    **reduce_memory.RULES,
    **sort_memory.RULES,
    **sdp_memory.RULES,
}
