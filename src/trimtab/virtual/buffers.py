"""Which buffers the compiled form of a graph has, and when, where inductor cannot be asked: an account of its fusion.

Pointwise operations are computed where they are read, and have memory only where a kernel that cannot be fused reads
them, or too many others. What one fused kernel makes and reads itself has none. A buffer lives from its kernel to the
last one that reads it; a kernel may write over one that it is the last to read. Orders nothing anew.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from trimtab.launches import Launch
from trimtab.virtual.joint_graph import INSIDE, launch_op
from trimtab.virtual.wording import words

_MOST_READS, _MOST_READS_IF_SHARED, _MOST_OPERATIONS = 8, 4, 30
"""Inductor's own thresholds: what reads more, or computes more, gets a buffer."""
_REDUCTIONS = frozenset(
    words(
        "sum mean amax amin prod any all argmax argmin var var_mean std std_mean logsumexp norm linalg_vector_norm max "
        "min cumsum cumprod prepare_softmax_online median _softmax _log_softmax"
    )
)
_POINTWISE = frozenset(
    words(
        "clone copy copy_ _to_copy convert_element_type broadcast_in_dim full full_like zeros zeros_like ones "
        "ones_like empty empty_like empty_strided new_zeros new_ones new_full new_empty new_empty_strided "
        "scalar_tensor arange iota rand rand_like randn randn_like "
        "bernoulli index gather embedding index_select cat flip roll constant_pad_nd tril triu eye repeat where fma "
        "native_dropout slice_scatter select_scatter slice_backward select_backward empty_permuted lift_fresh_copy "
        "inductor_seeds inductor_lookup_seed inductor_random _unsafe_index _unsafe_masked_index"
    )
)
_VIEWS = frozenset(words("_unsafe_view reshape"))


@dataclass
class Account:
    """The buffers of a graph by number, in the order in which they come and go."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """A buffer and its bytes where it comes; where it goes, the complement (`~`) of its number, and 0."""
    results: list[int | str | None] = field(default_factory=list)
    """The buffer of each result; the name of the input that it is, or is a view of; None for what is no tensor."""
    launches: list[Launch] = field(default_factory=list)
    """Its kernels, where somebody counts them (work.py)."""


class Run(NamedTuple):
    """A kernel of a graph by what it does."""

    node: fx.Node | None
    """The one operation that it is; None where several are fused."""
    nbytes: int
    """What it reads from memory and writes there."""


@dataclass(eq=False)
class _Kernel:
    """One launch: operations that are fused, or a single one that cannot be."""

    place: int
    extern: bool
    domain: int
    """Over how many elements it runs."""
    makes: list[fx.Node] = field(default_factory=list)
    reads: set[fx.Node] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    inside: int = 0
    node: fx.Node | None = None
    """What it is, where it cannot be fused."""
    over: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What is written in the place of what, where that is read no more."""


def account(
    graph: fx.Graph, numbers: count[int], held: Mapping[str, int], *, own: int | None = None
) -> Account:
    """The buffers of a graph. `held`: inputs that it may free, by name, with the numbers of their buffers."""
    return _Accounting(graph, numbers, held).account()


def kernels(graph: fx.Graph) -> Iterator[Run]:
    """The kernels that a graph comes down to."""
    accounting = _Accounting(graph, count(), {})
    accounting.account()
    read_by: dict[fx.Node, set[_Kernel]] = {}
    for kernel in accounting.kernels:
        for value in kernel.reads:
            read_by.setdefault(value, set()).add(kernel)
    kept = set(accounting.results_of())
    for kernel in accounting.kernels:
        own = {
            value for value in kernel.makes if not kernel.extern and read_by.get(value, set()) <= {kernel}
        } - kept
        moved = [value for value in (*kernel.reads, *kernel.makes) if value not in own]
        yield Run(kernel.node, sum(map(_bytes, moved)))


class _Accounting:
    def __init__(self, graph: fx.Graph, numbers: count[int], held: Mapping[str, int]) -> None:
        self.numbers, self.held = numbers, held
        self.nodes = list(graph.nodes)
        self.results = next(node for node in reversed(self.nodes) if node.op == "output").args[0]
        self.kinds = {node: _kind(node) for node in self.nodes}
        self.roots: dict[fx.Node, fx.Node] = {}
        self.kernels: list[_Kernel] = []
        self.maker: dict[fx.Node, _Kernel] = {}
        self.inlined: dict[fx.Node, tuple[frozenset[fx.Node], int]] = {}

    def account(self) -> Account:
        for node in self.nodes:
            self.roots[node] = self._root(node)
        kept = self.results_of()
        for place, node in enumerate(self.nodes):
            self._place(place, node, kept)
        return self._in_order()

    def results_of(self) -> set[fx.Node]:
        """Whose memory the results are in."""
        return {self.roots[value] for value in self._kept()}

    def _kept(self) -> Iterator[fx.Node]:
        return (value for value in self.results if isinstance(value, fx.Node))

    def _root(self, node: fx.Node) -> fx.Node:
        """Whose memory a value is in."""
        of: Any = node.args[0] if node.args else None
        is_view = self.kinds[node] == "view" or (self.kinds[node] == "part" and self.kinds[of] == "view")
        return self.roots[of] if is_view else node

    def _place(self, place: int, node: fx.Node, kept: set[fx.Node]) -> None:
        kind = self.kinds[node]
        if kind in ("view", "input", "output", "part"):
            return
        reads, operations = self._read(node)
        if kind == "pointwise" and not self._realised(node, reads, operations, kept):
            self.inlined[node] = reads, operations
            return
        parts = [user for user in node.users if user.target is operator.getitem]
        made = [node] if isinstance(node.meta.get("val"), Tensor) else parts
        extern = kind == "extern"
        domain = (
            _elements(node) if kind != "reduction" else max(map(_elements, node.all_input_nodes), default=1)
        )
        kernel = None if extern else self._to_fuse_with(reads, domain, place)
        if kernel is None:
            kernel = _Kernel(place, extern, domain, node=node if extern else None)
            self.kernels.append(kernel)
        kernel.place, kernel.domain = place, max(kernel.domain, domain)
        kernel.sizes |= {domain, *map(_elements, made)}
        kernel.reads |= reads
        kernel.inside = max(kernel.inside, node.meta.get("custom", {}).get(INSIDE, 0) if extern else 0)
        if node.target is launch_op():
            given: Any = node.args[0]
            over = {part: self.roots[given[node.args[1][part.args[1]]]] for part in parts}  # type: ignore[index]
            kernel.over |= over
        if _name(node) != "copy_":
            kernel.makes += made
        for value in made:
            self.maker[value] = kernel

    def _read(self, node: fx.Node) -> tuple[frozenset[fx.Node], int]:
        """What a kernel with this operation reads from memory, and how much it computes."""
        found: set[fx.Node] = set()
        operations = 1
        for value in node.all_input_nodes:
            root = self.roots[value]
            if root in self.inlined:
                found |= self.inlined[root][0]
                operations += self.inlined[root][1]
            elif self.kinds[root] != "nothing":
                found.add(root)
        return frozenset(found), operations

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if self.roots[user] is self.roots[node] and self.kinds[user] != "output":
                yield from self._readers(user)
            else:
                yield user

    def _realised(
        self, node: fx.Node, reads: frozenset[fx.Node], operations: int, kept: set[fx.Node]
    ) -> bool:
        """Whether a pointwise result gets a buffer, as far as its readers tell."""
        if node in kept or _name(node) == "copy_":
            return True
        readers = list(self._readers(node))
        if any(self.kinds[reader] == "extern" for reader in readers):
            return True
        if len(reads) > _MOST_READS or operations > _MOST_OPERATIONS:
            return True
        return len(readers) > 1 and len(reads) > _MOST_READS_IF_SHARED

    def _to_fuse_with(self, reads: frozenset[fx.Node], domain: int, place: int) -> _Kernel | None:
        """A kernel before this one that it can be fused with: one that makes what it reads, over the same elements."""
        makers = {self.maker[value] for value in reads if value in self.maker}
        for kernel in sorted(makers, key=lambda kernel: -kernel.place):
            if kernel.extern or domain not in kernel.sizes:
                continue
            if not any(self._needs(other, kernel) for other in makers if other is not kernel):
                return kernel
        return None

    def _needs(self, kernel: _Kernel, other: _Kernel) -> bool:
        """Whether one kernel can only run after another."""
        seen, waiting = {kernel}, [kernel]
        while waiting:
            for value in waiting.pop().reads:
                maker = self.maker.get(value)
                if maker is other:
                    return True
                if maker is not None and maker not in seen:
                    seen.add(maker)
                    waiting.append(maker)
        return False

    def _in_order(self) -> Account:
        found = Account()
        kept = self.results_of()
        order = list(self._sorted())
        last: dict[fx.Node, _Kernel] = {}
        outside: set[fx.Node] = set(kept)
        for kernel in order:
            for value in kernel.reads:
                last[value] = kernel
                if self.maker.get(value) is not kernel:
                    outside.add(value)
        buffers = {
            node: self.held[node.name]
            for node in self.nodes
            if node.name in self.held and node.op == "placeholder"
        }
        for node, number in buffers.items():
            if node not in last and node not in kept:
                found.steps.append((~number, 0))
        for kernel in order:
            dying = {
                value
                for value in kernel.reads
                if last[value] is kernel and value in buffers and value not in kept
            }
            for value in kernel.makes:
                nbytes = _bytes(value)
                if not nbytes or (value not in outside and not kernel.extern):
                    continue
                taken = self._in_place(kernel, value, nbytes, dying)
                if taken is not None:
                    dying.discard(taken)
                    buffers[value] = buffers.pop(taken)
                    continue
                buffers[value] = next(self.numbers)
                found.steps.append((buffers[value], nbytes))
            if kernel.inside:
                extra = next(self.numbers)
                found.steps += [(extra, kernel.inside), (~extra, 0)]
            dead = {
                value
                for value in kernel.makes
                if value in buffers and value not in last and value not in kept
            }
            for value in dying | dead:
                found.steps.append((~buffers.pop(value), 0))
        for value in self.results:
            if not isinstance(value, fx.Node):
                found.results.append(None)
                continue
            root = self.roots[value]
            found.results.append(buffers.get(root, root.name if root.op == "placeholder" else None))
        return found

    def _in_place(self, kernel: _Kernel, value: fx.Node, nbytes: int, dying: set[fx.Node]) -> fx.Node | None:
        if kernel.extern:
            other = kernel.over.get(value)
            return other if other in dying and _bytes(other) == nbytes else None
        return next((other for other in dying if _same(other, value)), None)

    def _sorted(self) -> Iterator[_Kernel]:
        """The kernels, each after those whose results it reads."""
        waits: dict[_Kernel, int] = {}
        followers: dict[_Kernel, list[_Kernel]] = {kernel: [] for kernel in self.kernels}
        for kernel in self.kernels:
            before = {self.maker[value] for value in kernel.reads if value in self.maker} - {kernel}
            waits[kernel] = len(before)
            for other in before:
                followers[other].append(kernel)
        ready = [(kernel.place, kernel) for kernel in self.kernels if not waits[kernel]]
        heap = [(place, number, kernel) for number, (place, kernel) in enumerate(ready)]
        heapq.heapify(heap)
        ties = count(len(heap))
        while heap:
            _, _, kernel = heapq.heappop(heap)
            yield kernel
            for follower in followers[kernel]:
                waits[follower] -= 1
                if not waits[follower]:
                    heapq.heappush(heap, (follower.place, next(ties), follower))


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else ""


def _kind(node: fx.Node) -> str:
    if node.op == "placeholder" or node.op == "get_attr":
        return "input" if isinstance(node.meta.get("val"), Tensor) else "nothing"
    if node.op == "output":
        return "output"
    if node.target is operator.getitem:
        return "part"
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return "nothing"
    name = _name(node)
    if name in _VIEWS or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return "view"
    if name in _REDUCTIONS:
        return "reduction"
    if name in _POINTWISE or torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        return "pointwise"
    if schema.name.startswith("prims::") and name not in _REDUCTIONS:
        return "pointwise"
    return "extern"


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 1


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _same(one: fx.Node, other: fx.Node) -> bool:
    """Whether one buffer can be written in the place of another, element by element."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.numel() == b.numel() and a.element_size() == b.element_size()
