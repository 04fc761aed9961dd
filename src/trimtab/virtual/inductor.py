"""Which buffers the compiled form of a graph has, and when: as inductor itself decides it.

Inductor lowers the graph for a CUDA device and schedules it: what is fused, in which order kernels run, what is written
in place of what. From there on it would write the kernels; here their buffers are noted instead. Nothing is compiled,
and no GPU is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import fake_tensor

from trimtab.virtual import state
from trimtab.virtual.buffers import Account
from trimtab.virtual.joint_graph import CONSTANT, INSIDE, launch_op, place
from trimtab.virtual.unguarded import unguarded

REFUSED = (
    ImportError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, LookupError, AssertionError
)  # fmt: skip
"""What inductor raises where it cannot take a graph, or where its parts are called otherwise in another torch."""


def account(
    graph: fx.Graph, numbers: count[int], held: Mapping[str, int], device: torch.device, *, own: int | None
) -> Account:
    """The buffers of a graph. `held`: inputs that it may free, by name, with the numbers of their buffers.

    `own`: how many of the results are the program's own, in a forward graph; None in a backward graph.
    """
    with _lowered(graph, held, device, own) as lowered:
        return _Accounting(lowered, numbers, held).account()


@contextmanager
def _lowered(graph: fx.Graph, held: Collection[str], device: torch.device, own: int | None) -> Iterator[Any]:
    """The graph in inductor's own form, scheduled."""
    from torch._inductor import codecache, compile_fx, scheduler, select_algorithm
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    place(graph, device)
    constants = {node.target: node.meta[CONSTANT] for node in graph.nodes if node.op == "get_attr"}
    module = fx.GraphModule(constants, graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = [node.meta["val"] for node in inputs]
    results = next(node for node in graph.nodes if node.op == "output")
    results.meta["user_visible_output_idxs"] = [
        number for number in range(own or 0) if isinstance(results.args[0][number], fx.Node)
    ]
    compile_fx._recursive_record_original_output_strides(module)
    mode = values[0].fake_mode if values else None
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        undo.enter_context(unguarded())
        # A CUDA build of torch would reach for the driver where a pass makes a tensor without values.
        state.replace(undo, fake_tensor, "init_gpu_context", lambda device: None)
        # Triton is for those who write the kernels.
        state.replace(undo, scheduler, "has_triton", lambda: True)
        # It names a file for timings by a sum over all of Triton, which takes half a second; nothing is timed here.
        state.replace(undo, codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": ""}))
        state.replace(undo, select_algorithm, "_ALGORITHM_SELECTOR_CACHE", None)
        undo.enter_context(DebugContext())
        undo.enter_context(V.set_fake_mode(mode))
        view_to_reshape(module)
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
        lowered = GraphLowering(module, example_inputs=values, is_backward=own is None)
        lowered.bw_donated_idxs = [number for number, node in enumerate(inputs) if node.name in held]
        undo.enter_context(V.set_graph_handler(lowered))
        undo.enter_context(V.set_extern_kernel_nodes([]))
        lowered.run(*values)
        lowered.init_wrapper_code()
        lowered._update_scheduler()
        yield lowered


class _Accounting:
    """Walks through the kernels as inductor does when it writes them, and notes what it would allocate and free."""

    def __init__(self, graph: Any, numbers: count[int], held: Mapping[str, int]) -> None:
        self.graph, self.scheduler, self.numbers = graph, graph.scheduler, numbers
        self.found = Account()
        self.buffers = {name: number for name, number in held.items() if name in graph.graph_inputs}
        self.names = {number: {name} for name, number in self.buffers.items()}
        """By the number of a buffer, under which names it lives."""
        self.renamed = self.scheduler.mutation_real_name
        """Names of what a buffer is after it was written to, with its own."""
        self.kept = {self.renamed.get(name, name) for name in graph.get_output_names()}
        self.reuse = _Reuse(graph)

    def account(self) -> Account:
        for number, node in enumerate(self.scheduler.nodes):
            self.reuse.place = number
            self._run(node)
        self.found.steps = [step for at, step in enumerate(self.found.steps) if at not in self.reuse.undone]
        for result in self.graph.graph_outputs:
            name = result.get_name() if result.has_tensor_output() else ""
            name = self.renamed.get(name, name)
            is_input = name in self.graph.graph_inputs
            self.found.results.append(self.buffers.get(name, name if is_input else None))
        return self.found

    def _run(self, node: Any) -> None:
        parts = node.get_nodes()
        is_one = node.is_extern() or node.is_template()
        in_place = {} if is_one else self._in_place(parts)
        inside = 0
        operations = node.get_operation_names()
        for part in parts:
            for buffer in part.get_outputs():
                name = buffer.get_name()
                if name in in_place and in_place[name] in self.buffers:
                    self._give(in_place[name], name)
                elif is_one or not self._is_local(name, operations):
                    self._make(buffer)
            if is_one:
                inside = max(inside, _inside(part.node))
        if inside:
            extra = next(self.numbers)
            self.found.steps += [(extra, inside), (~extra, 0)]
        self._free(node, parts)
        self.scheduler.available_buffer_names.update(node.get_buffer_names())
        self.scheduler.completed_operations.update(operations)

    def _in_place(self, parts: Any) -> dict[str, str]:
        """What the parts of a kernel write in place of what."""
        from torch._inductor.codegen.common import Kernel
        from torch._inductor.virtualized import V

        kernel = Kernel(increase_kernel_count=False)
        with V.set_kernel_handler(kernel):
            for part in parts:
                part.decide_inplace_update()
        return dict(kernel.inplace_update_buffers)

    def _is_local(self, name: str, operations: Any) -> bool:
        """Whether a buffer is made and read by one kernel alone, so that it needs no memory."""
        if not self.scheduler.can_buffer_be_removed_through_fusion(name, operations):
            return False
        self.graph.removed_buffers.add(name)
        return True

    def _give(self, old: str, new: str) -> None:
        number = self.buffers[new] = self.buffers.pop(old)
        self.names[number].discard(old)
        self.names[number].add(new)
        self.graph.wrapper_code.freed.add(old)

    def _make(self, buffer: Any) -> None:
        from torch._inductor import ir

        node = buffer.node
        name, layout = node.get_name(), node.get_output_spec()
        if name in self.buffers or name in self.renamed:
            return
        if isinstance(layout, ir.NonOwningLayout):
            base = layout.view.get_name()
            if base in self.scheduler.name_to_buf:
                self._make(self.scheduler.name_to_buf[base])
            self._alias(base, name)
        elif isinstance(layout, ir.MultiOutputLayout):
            for user in buffer.users:
                for part in user.node.get_outputs() if hasattr(user.node, "get_outputs") else ():
                    if isinstance(part.node, ir.MultiOutput):
                        self._make_part(buffer, part)
        elif isinstance(layout, ir.Layout) and not isinstance(layout, ir.NoneLayout):
            if aliased := [other for other in node.get_inputs_that_alias_output() if other in self.buffers]:
                self._alias(aliased[0], name)
            elif not node.get_mutation_names() and layout.device.type != "cpu":
                self._new(node, layout)

    def _make_part(self, whole: Any, part: Any) -> None:
        """One of the results of an operation. A launch of the program's own writes over what nobody reads any more."""
        node = whole.node
        if getattr(node, "op_overload", None) is launch_op():
            (given, written, _), _ = node.unflatten_args(node.inputs, node.constant_args)
            over = given[written[part.node.indices[0][1]]].get_name()
            if over in self.buffers and over in whole.defining_op.last_usage and over not in self.kept:
                self._give(over, part.get_name())
                return
        self._make(part)

    def _new(self, node: Any, layout: Any) -> None:
        nbytes = int(layout.storage_size()) * layout.dtype.itemsize
        if not nbytes:
            return
        name = node.get_name()
        number = self.reuse.taken(node, nbytes)
        if number is None:
            number = next(self.numbers)
            self.found.steps.append((number, nbytes))
            self.reuse.made(number, node, nbytes)
        self.buffers[name] = number
        self.names[number] = {name}

    def _alias(self, base: str, name: str) -> None:
        if base in self.buffers:
            number = self.buffers[name] = self.buffers[base]
            self.names[number].add(name)

    def _free(self, node: Any, parts: Any) -> None:
        for name in sorted(node.last_usage):
            self.graph.wrapper_code.freed.add(name)
            if name in self.kept or name not in self.buffers:
                continue
            number = self.buffers.pop(name)
            self.names[number].discard(name)
            if not self.names[number]:
                self.reuse.freed(number, len(self.found.steps))
                self.found.steps.append((~number, 0))


class _Reuse:
    """Buffers that inductor does not free, as one of their type and size is wanted later: it takes their place.

    So it is only where the graph takes no more at most for it. Results that an operation of torch makes for itself take
    nobody's place.
    """

    def __init__(self, graph: Any) -> None:
        from torch._inductor.codegen import wrapper

        self.graph = graph
        self.place = 0
        """The number of the kernel that is written."""
        self.undone: set[int] = set()
        """Which of the steps of the account, by number, are none: the buffer was not freed."""
        estimate = getattr(wrapper, "EfficientPeakEstimate", None)
        self._peak = estimate() if estimate is not None else None
        """Before torch 2.9 nobody asked what it makes of the peak."""
        self._keys: dict[int, Any] = {}
        self._free: dict[Any, list[_Freed]] = {}

    def _key(self, node: Any, nbytes: int) -> Any:
        return node.get_device(), node.get_dtype(), nbytes, node.get_name() in self.graph.unaligned_buffers

    def made(self, number: int, node: Any, nbytes: int) -> None:
        self._keys[number] = self._key(node, nbytes)

    def freed(self, number: int, step: int) -> None:
        """A buffer is read no more; an input of the graph is not among those that were made."""
        if number in self._keys:
            self._free.setdefault(self._keys[number], []).append(_Freed(number, step, self.place))

    def taken(self, node: Any, nbytes: int) -> int | None:
        """The buffer whose place a new one takes."""
        from torch._inductor import config, ir

        own = isinstance(node.get_defining_op(), (ir.ExternKernelAlloc, ir.MultiOutput))
        free = self._free.get(self._key(node, nbytes))
        if not free or not config.allow_buffer_reuse or (own and not node.should_allocate()):
            return None
        last = free[-1]
        between = last.place + 1, self.place - 1
        if self._peak is not None and last.place + 1 != self.place:
            tree = self._peak.segmented_tree
            if tree.summarize_range(*between) + nbytes > self._peak.overall_peak_memory:
                return None
            tree.update_range(*between, nbytes)
        self.undone.add(last.step)
        return free.pop().number


class _Freed(NamedTuple):
    number: int
    step: int
    """Where it is freed in the account."""
    place: int
    """The number of the kernel that reads it last."""


def _inside(operation: Any) -> int:
    """The bytes that an operation of torch takes while it runs."""
    origin = operation.get_origin_node() if operation is not None else None
    told: int = origin.meta.get("custom", {}).get(INSIDE, 0) if origin is not None else 0
    return told
