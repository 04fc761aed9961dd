"""Operations whose result hangs on values, asked of a tensor that has none: what is answered, and who is told.

Also those that refuse a value that is known (a row that is not in the table), whatever the others are.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.virtual.plans import Args, Plan
from trimtab.virtual.unknown import asked, hint, is_unknown, stand_for, standing_for
from trimtab.virtual.wording import words

_META = torch.device("meta")


def _scalar(plan: Plan, payloads: Any, args: Args) -> Any:
    asked("value", plan.name)
    return hint(payloads[0])


def _same(plan: Plan, payloads: Any, args: Args) -> Any:
    asked("decision", plan.name)
    return payloads[0] is payloads[1]


def _nothing(plan: Plan, payloads: Any, args: Args) -> Any:
    asked("decision", plan.name)
    return ()


def _all_of(plan: Plan, payloads: Any, args: Args) -> Any:
    """nonzero and masked_select of an unknown mask: all of it, the most that can be."""
    mask = payloads[-1] if plan.name == "aten::masked_select" else payloads[0]
    if not is_unknown(args[len(payloads) - 1 if plan.name == "aten::masked_select" else 0]):
        count = int(mask.count_nonzero())
    else:
        asked("shape", plan.name)
        count = mask.numel()
    if plan.name == "aten::nonzero":
        return torch.empty((count, mask.dim()), dtype=torch.int64, device=_META)
    return torch.empty(count, dtype=payloads[0].dtype, device=_META)


def _bins(plan: Plan, payloads: Any, args: Args) -> Any:
    """bincount of unknown numbers: as many bins as are asked for, which a larger number would exceed."""
    if len(payloads) < 3 or not payloads[2]:
        return None
    weights, least = payloads[1:3]
    asked("shape", plan.name)
    if weights is not None:
        dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
        return torch.empty(least, dtype=dtype, device=_META)
    return _evenly(payloads[0].numel(), least, torch.int64)


def _histogram(plan: Plan, payloads: Any, args: Args) -> Any:
    """histc of unknown numbers, by which routers count the rows of each expert."""
    return _evenly(payloads[0].numel(), payloads[1] if len(payloads) > 1 else 100, payloads[0].dtype)


def _evenly(count: int, bins: int, dtype: torch.dtype) -> Any:
    """Counts that nobody knows, of so many numbers: they come to what was counted, or no split by them would fit."""
    made = torch.empty(bins, dtype=dtype, device=_META)
    place = torch.arange(bins, device="cpu")
    return stand_for(made, (count // bins + (place < count % bins)).to(dtype))


def _different(plan: Plan, payloads: Any, args: Args) -> Any:
    """unique of unknown numbers: each another one, the most that can be."""
    asked("shape", plan.name)
    source = payloads[0]
    if plan.name == "aten::unique_consecutive":
        given = dict(zip(("inverse", "counts", "dim"), payloads[1:], strict=False))
        dim, inverse, counts = given.get("dim"), given.get("inverse", False), given.get("counts", False)
    elif plan.name.startswith("aten::unique_dim"):
        named = dict(zip(plan.names, payloads, strict=False))
        dim = named["dim"]
        inverse, counts = named.get("return_inverse", False), named.get("return_counts", False)
    else:
        flags = (*payloads[2:4], False, False)
        dim, inverse, counts = None, flags[0], flags[1]
    found = source.numel() if dim is None else source.size(dim)
    shape = (found,) if dim is None else source.shape
    places = source.shape if dim is None else (found,)

    def numbers(size: Any, wanted: bool) -> Any:
        return torch.empty(size if wanted else 0, dtype=torch.int64, device=_META)

    made = torch.empty(shape, dtype=source.dtype, device=_META), numbers(places, inverse)
    return made if plan.name == "aten::_unique" else (*made, numbers(found, counts))


def _repeated(plan: Plan, payloads: Any, args: Args) -> Any:
    """repeat_interleave by unknown numbers: each once, unless what stands for them says otherwise."""
    repeats = payloads[0]
    size = payloads[1] if len(payloads) > 1 else None
    if size is None:
        asked("shape", plan.name)
        known = standing_for(repeats)
        size = repeats.numel() if known is None else int(known.sum())
    return torch.empty(size, dtype=repeats.dtype, device=_META)


def counted(indices: Any, given: Any) -> list[Any]:
    """Indices with every mask replaced by as many positions as it selects."""
    found: list[Any] = []
    for payload, value in zip(indices, given, strict=True):
        if payload is None or payload.dtype not in (torch.bool, torch.uint8):
            found.append(payload)
            continue
        if is_unknown(value):
            asked("shape", "aten::index")
            count = payload.numel()
        else:
            count = int(payload.count_nonzero())
        found += [torch.empty(count, dtype=torch.int64, device=_META) for _ in range(payload.dim())]
    return found


def _packed(plan: Plan, payloads: Any, args: Args) -> Any:
    """Rows of known lengths put together: how many steps there are, and how many rows at each."""
    source, lengths, batch_first = payloads
    if is_unknown(args[1]):
        return None
    small = torch.empty((*source.shape[:2], 1), device="cpu")
    data, counts = torch.ops.aten._pack_padded_sequence(small, lengths, batch_first)
    return torch.empty((data.size(0), *source.shape[2:]), dtype=source.dtype, device=_META), counts


def _rows_there(plan: Plan, payloads: Any, args: Args) -> None:
    """Known ids have to name rows of the table, whatever is in it."""
    table, ids = payloads[0], payloads[1]
    if ids.numel() and not ids.is_meta and not is_unknown(args[1]):
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= table.size(0):
            raise IndexError("index out of range in self")


def _classes_there(plan: Plan, payloads: Any, args: Args) -> None:
    """Known labels have to be among the classes, but for the one that does not count."""
    target, ignored = payloads[1], payloads[4]
    if target.is_meta or is_unknown(args[1]):
        return
    counted = target[target != ignored]
    if counted.numel():
        low, high = map(int, counted.aminmax())
        if low < 0 or high >= payloads[0].size(1 if payloads[0].dim() > 1 else 0):
            raise IndexError(f"Target {low if low < 0 else high} is out of bounds.")


RULES: dict[str, Any] = {
    "aten::embedding": _rows_there,
    "aten::nll_loss_forward": _classes_there,
    "aten::nll_loss2d_forward": _classes_there,
    "aten::_local_scalar_dense": _scalar,
    "aten::equal": _same,
    "aten::_assert_async": _nothing,
    "aten::bincount": _bins,
    "aten::histc": _histogram,
    "aten::repeat_interleave": _repeated,
    **dict.fromkeys(
        (
            f"aten::{name}"
            for name in words("_unique _unique2 unique_dim unique_dim_consecutive unique_consecutive")
        ),
        _different,
    ),
    "aten::_pack_padded_sequence": _packed,
    "aten::nonzero": _all_of,
    "aten::masked_select": _all_of,
}
