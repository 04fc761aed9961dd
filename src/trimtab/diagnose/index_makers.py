"""Where numbers that are out of range come from, and where the size that they exceed was decided.

Evidence for `raised_index`: the data set's own tensors, the variables of the failing frames, the layer whose width it
is. Looks at live objects and reads source; computes nothing but extremes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from trimtab.diagnose import rows, source, trace
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import own_frames
from trimtab.virtual import origin
from trimtab.virtual.tensor import payload_of

_WIDTHS = {
    "Linear": ("out_features", 1),
    "LazyLinear": ("out_features", 0),
    "Bilinear": ("out_features", 2),
    "Embedding": ("num_embeddings", 0),
    "EmbeddingBag": ("num_embeddings", 0),
    **{f"Conv{n}d": ("out_channels", 1) for n in (1, 2, 3)},
}
"""For layers: the argument that decides how many rows its weight has, and its place."""


def extremes(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The least and the largest of a tensor's whole numbers; None where it has none."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or not tensor.numel():
        return None
    values = payload_of(tensor)
    return None if values.is_meta else (int(values.min()), int(values.max()))


def numbers_made(error: BaseException, bad: int) -> Place | None:
    """The line that made the numbers among which this one is: of a data set's tensor, else of the largest such tensor
    in the program's variables, the outermost first."""
    found: list[torch.Tensor] = []
    for data in rows.data_sets(error):
        kept = getattr(data, "__dict__", {}).values()
        found += [t for value in kept for t in _tensors(value) if bad in (extremes(t) or ())]
    frames = [frame for frame, _ in own_frames(error)][::-1]
    held = [t for frame in frames for value in list(frame.f_locals.values()) for t in _tensors(value)]
    held = [t for t in held if bad in (extremes(t) or ())]
    found += sorted(held, key=lambda t: -t.numel())
    places = (born_at(tensor) for tensor in found)
    return next((place for place in places if place is not None), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in (
        value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
    ):
        if isinstance(item, torch.Tensor):
            yield item


def born_at(tensor: torch.Tensor) -> Place | None:
    """The line of the program that made a tensor."""
    born = origin.born_of(tensor)
    return source.place(born.file, born.line) if born is not None and source.is_user_file(born.file) else None


def width_decided(scores: torch.Tensor, size: int) -> tuple[Place, ast.expr] | None:
    """Where the number of a layer's outputs was decided: of the first layer behind scores whose weight has so many
    rows."""
    queue: list[Any] = [scores.grad_fn]
    seen: set[Any] = set()
    while queue and len(seen) < 60:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        weight: Any = getattr(node, "variable", None)
        wide = isinstance(weight, torch.Tensor) and weight.dim() > 0 and weight.shape[0] == size
        if wide and (found := rows_decided(weight)) is not None:
            return found
        queue += [up for up, _ in node.next_functions]
    return None


def rows_decided(weight: torch.Tensor) -> tuple[Place, ast.expr] | None:
    """Where the number of rows of a layer's weight was decided: by its constructor's argument, followed back."""
    given = rows_given(weight)
    return trace.decided(given[0].file, given[0].line, given[1]) if given is not None else None


def rows_given(weight: torch.Tensor) -> tuple[Place, ast.expr] | None:
    """What a layer's constructor was given for the number of its weight's rows."""
    born = origin.born_of(weight)
    if born is None or not source.is_user_file(born.file):
        return None
    for call in source.call_on(born.file, born.line):
        name, position = _WIDTHS.get(source.called_name(call), ("", 0))
        given = source.keyword(call, name) or (call.args[position] if len(call.args) > position else None)
        if name and given is not None:
            return source.place(born.file, born.line), given
    return None
