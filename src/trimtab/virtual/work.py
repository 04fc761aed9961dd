"""What kernels virtual GPUs would launch, with the operations of each and the bytes it moves, to estimate a time by.

Bytes are what a kernel reads and writes once. Of compiled code it is the kernels that its graphs come down to
(buffers.py); of an operation that a compiler does not look into, what it was seen to do. Nothing is timed. While nobody
counts, none of this is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.launches import Launch, Runs, Work
from trimtab.virtual import buffers, dispatch, pieces, state, triton_kernels
from trimtab.virtual.buffers import Account
from trimtab.virtual.joint_graph import Cut
from trimtab.virtual.plans import VIEW, Args, Kwargs
from trimtab.virtual.products import operations
from trimtab.virtual.state import Machine, VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, payload_of
from trimtab.virtual.wording import words

_NO_KERNEL = frozenset(
    f"aten::{name}" for name in words("empty empty_like empty_strided new_empty new_empty_strided")
)
_PICKING = frozenset(
    f"aten::{name}" for name in words("embedding index index_select gather take _unsafe_index")
)
"""They read as much of their first operand as they make."""
_OVER = frozenset(f"aten::{name}" for name in words("copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_"))
"""They write over what was there, and do not read it."""
_SEVERAL = {
    "aten::nonzero": 5,
    "aten::masked_select": 6,
    "aten::masked_scatter": 5,
    "aten::masked_scatter_": 4,
    "aten::masked_scatter_backward": 8,
    "aten::slice_backward": 2,
    "aten::select_backward": 2,
    "aten::embedding_dense_backward": 8,
    "aten::_scaled_dot_product_cudnn_attention": 2,
    "aten::_scaled_dot_product_cudnn_attention_backward": 6,
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::_flash_attention_backward": 3,
}
"""Operations that are several launches on CUDA, as a profiler counts them (torch 2.11, an H200); all others are one."""
_OF_A_MASK, _ADDED_UP = 5, 8
"""A mask as an index is looked through first; values that may meet are sorted by their places."""

_listening: list[Tally] = []


def listening() -> Tally | None:
    """Who counts now, if anybody."""
    return _listening[-1] if _listening else None


class Tally:
    """Counts launches while it is `on`, in sections; `times` is what each of them stands for."""

    def __init__(self) -> None:
        self.on = False
        self.section = ""
        self.times = 1.0
        self.sections: dict[str, Counter[Launch]] = {}
        self._inside: list[tuple[int, Runs]] | None = None
        """The products of the operation of a program's own that is under way."""
        self._seen: dict[Any, tuple[int, Runs]] = {}
        """Those of operations that compilers do not look into, by their name and operands."""

    def listen(self, machine: Machine) -> None:
        """Be told of what is launched from now on, until the machine ends."""
        undo = machine.undo
        _listening.append(self)
        undo.callback(_listening.remove, self)
        state.replace(undo, dispatch, "work", self._operation(dispatch.work))
        state.replace(undo, pieces, "plan_of", self._planned(pieces.plan_of))
        state.replace(undo, pieces, "run_through", self._ran(pieces.run_through))
        state.replace(undo, triton_kernels, "launch", self._triton(triton_kernels.launch))

    def add(self, launch: Launch, number: float = 1.0) -> None:
        if self.on:
            self.sections.setdefault(self.section, Counter())[launch] += number * self.times  # type: ignore[assignment]

    @contextmanager
    def standing_for(self, section: str, times: float = 1.0) -> Iterator[None]:
        """Inside, launches belong to a section, and each stands for so many."""
        before = self.section, self.times
        self.section, self.times = section, times
        try:
            yield
        finally:
            self.section, self.times = before

    def work(self) -> dict[str, Work]:
        return {section: dict(counted) for section, counted in self.sections.items()}

    def _operation(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def work(func: Any, args: Args, kwargs: Kwargs) -> Any:
            plan = dispatch.PLANS.get(id(func)) or dispatch.plan_of(func)
            if plan.author is not None:
                return self._opaque(real, func, args, kwargs)
            made = real(func, args, kwargs)
            if plan.parts or plan.collective or plan.kind == VIEW or plan.name in _NO_KERNEL:
                return made
            if not plan.fresh and not plan.writes:
                return made  # several views
            given = dict(zip(plan.names, args, strict=False)) | kwargs
            slot = _slot((*given.values(), made))
            if slot is not None:
                self._count(plan, func, given, made, slot)
            return made

        return work

    def _count(self, plan: Any, func: Any, given: dict[str, Any], made: Any, slot: VirtualDevice) -> None:
        shown = {name: _shown(value) for name, value in given.items()}
        results = list(_tensors(_shown(made)))
        flops, runs = operations(func, shown, results[0]) if results else (0, "")
        if flops and self._inside is not None:
            self._inside.append((flops, runs))
        if slot.aside is not None:
            return  # a part of compiled code, which launches kernels of its own
        self.add(Launch(flops, _moved(plan, shown, results), runs, "eager"))
        if (more := _launches(plan.name, shown) - 1) > 0:
            self.add(Launch(0, 0, "", "eager"), more)

    def _opaque(self, real: Callable[..., Any], func: Any, args: Args, kwargs: Kwargs) -> Any:
        outer, self._inside = self._inside, []
        try:
            made = real(func, args, kwargs)
            inside = self._inside
        finally:
            self._inside = outer
        runs: Runs = next((kind for _, kind in inside), "")
        self._seen[_form(func, args)] = sum(flops for flops, _ in inside), runs
        return made

    def _planned(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def plan_of(cut: Cut, *args: Any) -> Any:
            graphs = (cut.forward, cut.backward)
            # Before inductor lowers them, which changes them.
            launched = [list(self._of_graph(graph)) if graph is not None else [] for graph in graphs]
            plan = real(cut, *args)
            for account, launches in zip((plan.forward, plan.backward), launched, strict=True):
                if account is not None:
                    account.launches = launches
            return plan

        return plan_of

    def _of_graph(self, graph: torch.fx.Graph) -> Iterator[Launch]:
        for kernel in buffers.kernels(graph):
            flops, runs = self._of_node(kernel.node) if kernel.node is not None else (0, "")
            yield Launch(flops, kernel.nbytes, runs, "compiled")

    def _of_node(self, node: torch.fx.Node) -> tuple[int, Runs]:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return 0, ""
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta.get("val"))
        if (seen := self._seen.get(_form(node.target, args))) is not None:
            return seen
        made = next(_tensors(node.meta.get("val")), None)
        names = [argument.name for argument in schema.arguments]
        if made is None:
            return 0, ""
        return operations(node.target, dict(zip(names, args, strict=False)) | dict(kwargs), made)

    def _ran(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run_through(account: Account, *args: Any) -> Any:
            if account.launches:
                self.add(Launch(0, 0, "", "entry"))
            for launch in account.launches:
                self.add(launch)
            return real(account, *args)

        return run_through

    def _triton(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def launch(spent: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = list({id(one): one for one in _tensors([*args, *kwargs.values()])}.values())
            slot = _slot(tensors)
            if slot is not None and slot.aside is None:
                self.add(Launch(0, sum(map(_bytes, map(_shown, tensors))), "", "eager"))
            return real(spent, kernel, args, kwargs)

        return launch


def _slot(values: Any) -> VirtualDevice | None:
    """The GPU that an operation runs on; none on the host, nor for what wraps the tensors of others."""
    for tensor in _tensors(values):
        if type(tensor) in VIRTUAL and tensor._slot.index != state.HOST:
            slot: VirtualDevice = tensor._slot
            return slot
    return None


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif value.__class__ is tuple or value.__class__ is list:
        for item in value:
            yield from _tensors(item)


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return payload_of(value)
    if value.__class__ is tuple or value.__class__ is list:
        return [_shown(item) for item in value]
    return value


def _form(func: Any, args: Any) -> Any:
    return func, *(tuple(tensor.shape) for tensor in _tensors(tuple(args)))


def _bytes(tensor: Tensor) -> int:
    """What lies behind a tensor: of an extent that is repeated, once."""
    number = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= extent if stride else min(extent, 1)
    return number


def _launches(name: str, given: dict[str, Any]) -> int:
    """How many an operation is."""
    number = _SEVERAL.get(name, 1)
    masks = [one for one in _tensors(given.get("indices")) if one.dtype in (torch.bool, torch.uint8)]
    added_up = _ADDED_UP - 1 if given.get("accumulate") else 0
    return number + _OF_A_MASK * len(masks) + added_up


def _moved(plan: Any, given: dict[str, Any], made: list[Tensor]) -> int:
    """What a kernel reads and writes."""
    fresh = sum(map(_bytes, made)) if plan.fresh else 0
    if plan.name in _PICKING:
        return 2 * fresh
    moved = fresh
    for name, value in given.items():
        here = sum(map(_bytes, _tensors(value)))
        written = name in plan.writes
        moved += here * (written + (not (written and plan.name in _OVER)))
    return moved
