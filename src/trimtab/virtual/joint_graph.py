"""From what was written down of a piece and of its backward pass to the two graphs that a compiler makes of them.

The joint graph is made and cut by torch's own tools: inductor's decompositions, functionalisation, inductor's passes
over the joint graph, the min-cut partitioner with whatever settings are in force. What is kept for the backward pass is
what torch.compile would keep.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from trimtab.virtual import state
from trimtab.virtual.recorded import Entry, Kernel, Record, Ref, put
from trimtab.virtual.tensor import VIRTUAL

INSIDE = "virtual_inside"
"""In the annotations of a node: the bytes that its operation takes while it runs."""
CONSTANT = "virtual_constant"
"""In the notes of a node that stands for a constant: its value."""
_REGION = "virtual_region"
"""In the annotations of a node: the checkpoint that it was made under."""
_SKIPPED = ("aten::detach", "aten::alias", "aten::lift_fresh", "aten::detach_")


@dataclass(frozen=True)
class Cut:
    """The graphs, and what goes from one to the other."""

    forward: fx.Graph
    backward: fx.Graph | None
    outputs: int
    """How many of the forward graph's results are the piece's own; the others are kept for the backward graph."""


def cut(
    record: Record, outputs: Sequence[int], tangents: Sequence[int], gradients: Sequence[int | None]
) -> Cut:
    """The graphs of a piece. Without tangents there is no backward pass."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    primals = [number for number in record.inputs if number not in set(tangents)]
    joint = _traced(record, primals, tangents, [*outputs, *gradients])
    _pass_over(joint)
    if not tangents:
        joint.graph.set_codegen(fx.graph.CodeGen())
        joint.graph.eliminate_dead_code()
        return Cut(joint.graph, None, len(outputs))
    static = [
        place for place, number in enumerate(primals) if isinstance(record.inputs[number], torch.nn.Parameter)
    ]
    forward, backward = min_cut_rematerialization_partition(
        joint,
        None,
        compiler="inductor",
        num_fwd_outputs=len(outputs),
        static_lifetime_input_indices=static,
    )
    return Cut(forward.graph, backward.graph, len(outputs))


def plain(record: Record, outputs: Sequence[int], length: int) -> fx.GraphModule:
    """The forward pass as it was written down, for those who look at the graph before it is compiled."""
    graph = fx.Graph()
    nodes: dict[int, Any] = {}
    entries = record.entries[:length]
    used = {ref.number for entry in entries for ref in _refs((entry.args, entry.kwargs))}
    for number, value in record.inputs.items():
        if number in used:
            nodes[number] = graph.placeholder(f"input_{number}")
            nodes[number].meta["val"] = _shape(value)
    for entry in entries:
        if isinstance(entry.func, Kernel):
            graph.call_function(
                launch_op(), (put(entry.args, nodes), list(entry.func.written), entry.func.name)
            )
            continue
        made = graph.call_function(entry.func, tuple(put(entry.args, nodes)), _put_named(entry.kwargs, nodes))
        for place, number in (
            enumerate(entry.made) if isinstance(entry.made, tuple) else ((None, entry.made),)
        ):
            if isinstance(number, int):
                one = made if place is None else graph.call_function(operator.getitem, (made, place))
                nodes.setdefault(number, one)
    graph.output(tuple(nodes[number] for number in outputs if number in nodes))
    return fx.GraphModule(nn.Module(), graph)


def _refs(value: Any) -> Iterator[Ref]:
    if value.__class__ is Ref:
        yield value
    elif value.__class__ is tuple:
        for item in value:
            yield from _refs(item)


def _put_named(kwargs: Any, nodes: dict[int, Any]) -> dict[str, Any]:
    return {name: put(value, nodes) for name, value in kwargs}


def _traced(
    record: Record, primals: Sequence[int], tangents: Sequence[int], results: Sequence[int | None]
) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    numbers = [*primals, *tangents]

    def told(entry: Entry) -> Any:
        facts = {INSIDE: entry.inside or None, _REGION: entry.region}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        return traceback.annotate(known) if known else nullcontext()

    def replayed(*values: Any) -> list[Any]:
        made = record.replay(dict(zip(numbers, values, strict=True)), _launch, told)
        return [None if number is None else made[number] for number in results]

    def joint(primals: list[Any], tangents: list[Any]) -> list[Any]:
        done: list[Any] = torch.func.functionalize(replayed, remove="mutations")(*primals, *tangents)
        return done

    # One fake mode for all: by it operations are timed, where memory is scarce.
    with FakeTensorMode(), torch.no_grad(), traceback.preserve_node_meta():
        shapes = [[_shape(record.inputs[number]) for number in part] for part in (primals, tangents)]
        made = make_fx(joint, decomposition_table={**select_decomp_table(), **_own_decompositions()})(*shapes)
    for node in list(made.graph.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(made, node.target), torch.Tensor):
            # The graphs that are cut from this one lie in no module. Whatever its value, it takes the same room.
            node.meta[CONSTANT] = torch.ones_like(value, device="cpu") if value.is_meta else value
        if (region := node.meta.get("custom", {}).get(_REGION)) is not None:
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": region}
        same = _the_same(node)
        if same is not None:
            node.replace_all_uses_with(same)
            made.graph.erase_node(node)
    return made


def _own_decompositions() -> dict[Any, Any]:
    """What inductor makes of the operations of CUDA that are ours here."""
    from torch._decomp import decomposition_table

    aten, own = torch.ops.aten, torch.ops.trimtab_virtual
    if not hasattr(aten, "_fused_rms_norm"):
        return {}
    forward = decomposition_table.get(aten._fused_rms_norm.default)
    backward = decomposition_table.get(aten._fused_rms_norm_backward.default)
    if forward is None or backward is None:
        return {}

    def gradients(grad: Any, source: Any, shape: Any, weight: Any, factor: Any) -> Any:
        of_source, of_weight = backward(grad, source, shape, factor, weight, [True, weight is not None])
        return of_source, grad.new_empty(0) if of_weight is None else of_weight

    return {own.rms_norm.default: forward, own.rms_norm_backward.default: gradients}


def _pass_over(joint: fx.GraphModule) -> None:
    """Inductor's own passes over a joint graph: constants, attention written out, what is scattered into constants.

    They compute with small constants on the graph's device, which is therefore the CPU meanwhile.
    """
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    place(joint.graph, torch.device("cpu"))
    fakes = (node.meta.get("val") for node in joint.graph.nodes)
    mode = next((value.fake_mode for value in fakes if isinstance(value, FakeTensor)), None)
    with ExitStack() as undo:
        state.replace(undo, torch.cuda, "is_available", lambda: False)
        undo.enter_context(V.set_fake_mode(mode))
        compile_fx._recursive_joint_graph_passes(joint)


def make_patterns() -> None:
    """Have inductor make the patterns that its passes look for, which it does once in a process."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(), torch.no_grad():
        made = make_fx(lambda x: x + 1)(torch.empty(2))
    _pass_over(made)


def place(graph: fx.Graph, device: torch.device) -> None:
    """Let a graph be on a device."""

    def there(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = device
        node.args = fx.node.map_aggregate(node.args, there)
        node.kwargs = fx.node.map_aggregate(node.kwargs, there)


def _the_same(node: fx.Node) -> Any:
    """The value that a node merely gives on."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name in _SKIPPED:
        return node.args[0]
    if name == "aten::copy":
        source: Any = node.args[1]
        old, new = source.meta["val"], node.meta["val"]
        return source if (old.shape, old.dtype) == (new.shape, new.dtype) else None
    return None


def _shape(value: Any) -> Tensor:
    shown = value.payload if value.__class__ in VIRTUAL else value
    return torch.empty_strided(shown.size(), shown.stride(), dtype=shown.dtype, device="meta")


@cache
def launch_op() -> Any:
    """A launch of a kernel as an operation that nobody looks into: new tensors in the place of those written to."""
    library = torch.library.Library("trimtab_virtual", "FRAGMENT")
    # A kernel takes what it is given as it lies; for other operations inductor copies what it has not made yet.
    tags = (torch.Tag.flexible_layout,)
    library.define("launch(Tensor[] given, int[] written, str name) -> Tensor[]", tags=tags)
    torch.library.register_fake("trimtab_virtual::launch", _anew, lib=library)
    _LIBRARIES.append(library)
    return torch.ops.trimtab_virtual.launch.default


def _anew(given: list[Tensor], written: list[int], name: str) -> list[Tensor]:
    return [torch.empty_like(given[place]) for place in written]


_LIBRARIES: list[Any] = []


def _launch(kernel: Kernel, given: list[Any]) -> list[Any]:
    made: list[Any] = launch_op()(given, list(kernel.written), kernel.name)
    return made
