"""On a real GPU: a pass with all its lanes as one CUDA graph, captured once for each shape of batch and replayed.

While a graph is captured, the modules that own tuned tensors stand aside for others that make the weights of every
lane by Triton kernels and multiply by them lane by lane. A replay runs no Python at all. A rehearsal in shapes goes the
same way for its memory (`rehearsed.py`). The numbers are those of `lanes.py`; a model that has a part this file does
not know is told so (`NotCapturable`) and takes the plain way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.zeroth import kernels
from trimtab.zeroth.ahead import Ahead, OtherOrder
from trimtab.zeroth.kernels import Launch, Owed
from trimtab.zeroth.lane_modules import (
    JOINED,
    LaneEmbedding,
    LaneLinear,
    LaneNorm,
    Noisy,
    NotCapturable,
    Ready,
    Rescaled,
    joined_class,
    kind_of,
    may_join,
)
from trimtab.zeroth.lanes import evaluating
from trimtab.zeroth.objective import ScoreBatch, example_losses, places_in_table, position_ids
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.rehearsed import RehearsedGraph, capturing
from trimtab.zeroth.sweep import PROJECTION, Change, Directions, Ratios, by_kernels, shapes_alone

PAD_TO = 32
"""Rows are padded to a multiple of this many tokens: fewer shapes, fewer graphs."""
# Elements of changed weights that a product reads at a time: this share of the tuned ones, but never less than the
# floor. What is larger is done in runs of rows. The ring has room for as much.
_SCRATCH_SHARE = 64
_SCRATCH_FLOOR = 1 << 21
MAIN_PRIORITY = -2
"""Of the stream that passes are captured on."""
_SIDE = True
MOST_GRAPHS = 24
"""Each keeps its inputs and losses, and takes a moment to capture."""


@dataclass
class _StandIn:
    """What stands in for the tuned tensors in a pass with lanes."""

    modules: list[nn.Module]
    small: list[Callable[[], None]]
    """Makes the small tensors' copies, at the beginning of the pass."""
    ahead: Ahead | None = None
    """Makes the others', ahead of the products that read them."""


@dataclass
class _Graph:
    """A captured pass: where its inputs lie, and its losses."""

    graph: torch.cuda.CUDAGraph | RehearsedGraph
    inputs: Tensor
    staged: Tensor
    """The inputs on the way: pinned memory on the CPU. Free again once the losses have been read."""
    losses: Tensor
    stand_in: _StandIn
    """The graph reads its buffers by address, so it lives as long as the graph does."""


@dataclass(frozen=True)
class _Shape:
    """What makes two batches take the same graph."""

    rows: int
    length: int
    keep: int
    examples: int
    options: int
    scored: int

    @property
    def sizes(self) -> list[int]:
        cells, answers = self.rows * self.length, self.examples * self.options
        return [cells, cells, *[self.scored] * 5, answers, self.examples]


class CapturedPasses:
    """The passes of a model that lies whole on one GPU."""

    def __init__(
        self, model: nn.Module, tuned: Sequence[Tuned], compiled: bool, stochastic: bool = True
    ) -> None:
        """`compiled`: compile the layers first. `stochastic`: how rescaled weights are rounded."""
        self.model, self.tuned, self.compiled, self.stochastic = model, list(tuned), compiled, stochastic
        self.device = tuned[0].parameter.device
        self._rehearsed = shapes_alone(model.parameters())
        self._by_id = {id(t.parameter): t for t in tuned}
        elements = sum(t.parameter.numel() for t in tuned)
        self._scratch = max(_SCRATCH_FLOOR, elements // _SCRATCH_SHARE)
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._launches: dict[int, Launch] = {}
        self._ratios: dict[int, Tensor] = {}
        self._rounding = Launch(1, self.device)
        self._parameters = list(model.parameters())
        self._addresses: list[int] = []
        self._stream: Any = None
        self._sides: tuple[Any, Any] | None = None
        self._ring: Tensor | None = None
        self._pool: Any = None
        _check_model(model, self.device)
        for module in model.modules():
            if any(id(p) in self._by_id for p in module._parameters.values()):
                if module is model:
                    raise NotCapturable("the model itself owns tuned tensors")
                kind_of(module)

    def carries(self, change: Change, lanes: Sequence[int], batch: ScoreBatch) -> bool:
        """Whether a pass with these lanes writes an update that is owed, before it reads the weights."""
        self._check_addresses()
        key = (_mode(change), len(lanes), _shape_of(batch))
        return key in self._graphs and isinstance(change, Directions) and _one_line(change)

    def losses(
        self, change: Change | None, lanes: Sequence[int], batch: ScoreBatch, owed: Owed | None = None
    ) -> Tensor | None:
        """[lanes, examples], on the GPU; overwritten by the next replay. Without a change: the model as it is.

        None where the batch has a new shape and there are MOST_GRAPHS others: it takes the plain way. `owed`: the
        update of the step before, only where the pass `carries` it.
        """
        shape = _shape_of(batch)
        key = (_mode(change), len(lanes), shape)
        # Buffers that outlive a pass are no inference tensors, whatever the caller is in.
        with torch.inference_mode(False), torch.no_grad():
            self._fill(change, lanes, owed)
            if owed is None:  # else `carries` has looked just now
                self._check_addresses()
            if key not in self._graphs:
                if len(self._graphs) >= MOST_GRAPHS:
                    return None
                self._graphs[key] = self._capture(change, len(lanes), shape, batch)
            captured = self._graphs[key]
            captured.staged.copy_(_packed(batch, shape))
            captured.inputs.copy_(captured.staged, non_blocking=True)
            captured.graph.replay()
        return captured.losses

    def _check_addresses(self) -> None:
        """A graph reads weights by their address; elsewhere, it would read what lies there now."""
        if self._addresses != (addresses := [p.data_ptr() for p in self._parameters]):
            self.forget()
            self._addresses = addresses

    def forget(self) -> None:
        """Drop what was captured; the next pass of each shape is captured anew."""
        self._graphs.clear()

    def _fill(self, change: Change | None, lanes: Sequence[int], owed: Owed | None = None) -> None:
        count = len(lanes)
        if isinstance(change, Directions):
            if count not in self._launches:
                self._launches[count] = Launch(count, self.device)
            self._launches[count].fill(
                change.seed,
                change.step,
                [change.queries[i] for i in lanes],
                [change.coefficients[i] for i in lanes],
                owed,
            )
        elif isinstance(change, Ratios):
            order = sorted(change.anchors)
            if count not in self._ratios:
                self._ratios[count] = torch.empty(len(order), count, device=self.device)
            self._rounding.fill(change.seed, change.step, [PROJECTION], [0.0])
            table = torch.tensor([[change.lanes[i][t] for i in lanes] for t in order], dtype=torch.float32)
            self._ratios[count].copy_(table, non_blocking=True)

    def _capture(self, change: Change | None, lanes: int, shape: _Shape, batch: ScoreBatch) -> _Graph:
        inputs = torch.empty(sum(shape.sizes), dtype=torch.int64, device=self.device)
        inputs.copy_(_packed(batch, shape))
        with (
            torch.cuda.device(self.device),
            evaluating(self.model),
            self._installed(change, lanes) as stand_in,
        ):
            stream = torch.cuda.current_stream()
            if stream == torch.cuda.default_stream():
                # On the default one nothing can be captured; each stream has a workspace of cuBLAS of its own.
                self._stream = self._stream or torch.cuda.Stream(self.device, MAIN_PRIORITY)
                self._stream.wait_stream(stream)
                stream = self._stream
            self._pool = self._pool or (
                torch.cuda.MemPool() if self._rehearsed else torch.cuda.graph_pool_handle()
            )
            with torch.cuda.stream(stream):
                for _ in range(
                    2
                ):  # kernels are compiled, workspaces made and weights planned before the capture
                    self._pass(inputs, shape, lanes, stand_in)
            torch.cuda.synchronize()
            # What the trial left over would lie beside the graph's own memory.
            torch.cuda.empty_cache()
            graph: Any = RehearsedGraph() if self._rehearsed else torch.cuda.CUDAGraph()
            with capturing(graph, self._pool, stream):
                losses = self._pass(inputs, shape, lanes, stand_in)
        staged = torch.empty(inputs.numel(), dtype=torch.int64, pin_memory=True)
        return _Graph(graph, inputs, staged, losses, stand_in)

    def _pass(self, inputs: Tensor, shape: _Shape, lanes: int, stand_in: _StandIn) -> Tensor:
        try:
            with stand_in.ahead.running() if stand_in.ahead is not None else nullcontext():
                for make in stand_in.small:
                    make()
                return self._losses_of(inputs, shape, lanes)
        except OtherOrder as error:
            raise NotCapturable(str(error)) from None

    def _losses_of(self, inputs: Tensor, shape: _Shape, lanes: int) -> Tensor:
        ids, mask, row, position, token, candidate, place, length, label = inputs.split(shape.sizes)
        ids, mask = ids.view(shape.rows, shape.length), mask.view(shape.rows, shape.length)
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        output: Any = self.model(
            input_ids=ids.repeat(lanes, 1),
            attention_mask=_additive_mask(mask, dtype).repeat(lanes, 1, 1, 1),
            position_ids=position_ids(mask).repeat(lanes, 1),
            use_cache=False,
            logits_to_keep=shape.keep,
        )
        logits = output.logits.view(lanes, shape.rows, -1, output.logits.shape[-1])[:, :, -shape.keep :]
        chosen = logits[:, row, position, token].float() - kernels.logsumexp(logits)[:, row, position]
        # What fills up the scored tokens to a round number goes to a line that nobody reads.
        table = chosen.new_zeros(lanes, shape.examples * shape.options + 1, shape.keep)
        table[:, candidate, place] = chosen
        scores = table[:, :-1].sum(-1) / length.clamp(min=1)
        scores = scores.masked_fill(length == 0, -torch.inf)
        return example_losses(scores.view(lanes, shape.examples, shape.options), label)

    @contextmanager
    def _installed(self, change: Change | None, lanes: int) -> Iterator[_StandIn]:
        """The lane modules in place of those that own tuned tensors, and the repeated layers compiled."""
        stand_in = _StandIn([], [])
        with ExitStack() as undo:
            ready: dict[int, Ready] = {}
            if isinstance(change, Directions):
                ready = self._small_copies(change, lanes, stand_in)
                stand_in.ahead = self._ahead(change, lanes, ready)
            # The root is never swapped: it is a model.
            children = [
                (parent, *child) for parent in self.model.modules() for child in parent.named_children()
            ]
            for parent, name, module in children:
                made = None if change is None else self._lane_module(module, change, lanes, ready)
                if made is not None:
                    made.eval()
                    stand_in.modules.append(made)
                    undo.callback(parent._modules.__setitem__, name, module)
                    parent._modules[name] = made
            for parent in {id(parent): parent for parent, _, _ in children}.values():
                for names in JOINED:
                    if may_join([parent._modules.get(name) for name in names], self._scratch):
                        undo.callback(setattr, parent, "__class__", type(parent))
                        parent.__class__ = joined_class(type(parent), names)
            if self.compiled:
                # Every shape has code of its own: code for any shape is slow, and costs minutes to make.
                undo.enter_context(torch._dynamo.config.patch(recompile_limit=4 * MOST_GRAPHS))
                for layer in _repeated_layers(self.model):
                    before = layer._compiled_call_impl
                    undo.callback(setattr, layer, "_compiled_call_impl", before)
                    layer.compile(dynamic=False)
            yield stand_in

    def _ahead(self, change: Directions, lanes: int, ready: Collection[int]) -> Ahead:
        """For all tensors but those that are made at the beginning of the pass."""
        if self._ring is None:
            size = max(t.parameter.element_size() for t in self.tuned)
            self._ring = torch.empty(self._scratch * size, dtype=torch.uint8, device=self.device)
        if self._sides is None and self.device.type == "cuda" and _SIDE:
            # Products go first: what is made ahead takes what they leave, and updates what is left then.
            self._sides = (torch.cuda.Stream(self.device, -1), torch.cuda.Stream(self.device, 0))
        return Ahead(
            self._launches[lanes],
            [t for t in self.tuned if t.index not in ready],
            self._ring,
            self._sides,
            one_line=_one_line(change),
            signs=change.kind == "signs",
            stochastic=self.stochastic,
        )

    def _small_copies(self, change: Directions, lanes: int, stand_in: _StandIn) -> dict[int, Ready]:
        """Norms and biases, by index: too small for a launch each."""
        by_dtype: dict[torch.dtype, list[Tuned]] = {}
        for each in self.tuned:
            if each.parameter.dim() == 1:
                by_dtype.setdefault(each.parameter.dtype, []).append(each)
        ready: dict[int, Ready] = {}
        for some in by_dtype.values():
            small = kernels.PerturbedSmall(
                [(t.parameter.detach(), t.index, t.decays) for t in some],
                lanes,
                carry=_one_line(change),
                stochastic=self.stochastic,
            )
            stand_in.small.append(
                partial(small, self._launches[lanes], _one_line(change), change.kind == "signs")
            )
            ready |= {t.index: Ready(view) for t, view in zip(some, small.views, strict=True)}
        return ready

    def _lane_module(
        self, module: nn.Module, change: Change, lanes: int, ready: dict[int, Ready]
    ) -> nn.Module | None:
        made: dict[str, nn.Module] = {}
        for name, parameter in module._parameters.items():
            tuned = self._by_id.get(id(parameter))
            if tuned is None or not change.moves(tuned):
                continue
            if tuned.index in ready:
                made[name] = ready[tuned.index]
            elif isinstance(change, Directions):
                made[name] = Noisy(self._launches[lanes], tuned.index)
            else:
                ratios = self._ratios[lanes][sorted(change.anchors).index(tuned.index)]
                anchor = change.anchors[tuned.index]
                made[name] = Rescaled(self._rounding, tuned.index, anchor, ratios, self.stochastic)
        if not made:
            return None
        weight, bias, kind = made.get("weight"), made.get("bias"), kind_of(module)
        if kind == "embedding":
            if not isinstance(weight, Noisy):
                raise NotCapturable("an embedding is projected")
            return LaneEmbedding(module, weight)  # type: ignore[arg-type]
        if kind in ("linear", "conv1d"):
            return LaneLinear(module, kind == "conv1d", weight, bias, self._scratch)
        return LaneNorm(module, weight, bias, kind == "norm plus one")


def captured_passes(
    model: nn.Module, tuned: Sequence[Tuned], compiled: bool, stochastic: bool = True
) -> tuple[CapturedPasses | None, str]:
    """The passes of a model that lies whole on one real GPU and lets itself be captured, or None; and why."""
    device = tuned[0].parameter.device
    shapes = shapes_alone(model.parameters())
    if not by_kernels(tuned[0].parameter, shapes) or any(p.device != device for p in model.parameters()):
        return None, "uncaptured: the model does not lie on one GPU"
    try:
        made = CapturedPasses(model, tuned, compiled, stochastic)
    except NotCapturable as error:
        return None, f"uncaptured: {error}"
    layers = "compiled" if compiled else "as they are"
    return made, f"each shape of batch captured as one CUDA graph, its layers {layers}"


def _one_line(change: Directions) -> bool:
    """Whether all lanes lie on one line, so that one draw serves them all."""
    return len(set(change.queries)) == 1


def _mode(change: Change | None) -> Any:
    if isinstance(change, Directions):
        return change.kind
    return None if change is None else "ratios"


def _check_model(model: nn.Module, device: torch.device) -> None:
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    known = inspect.signature(type(inner).forward).parameters
    missing = [n for n in ("attention_mask", "position_ids", "logits_to_keep") if n not in known]
    if missing:
        raise NotCapturable(f"{type(inner).__name__}'s forward takes no {' and no '.join(missing)}")
    text = inner.config.get_text_config()
    # Without a list of kinds, a window is that of all layers; the mask of a captured pass has none.
    windowed = getattr(text, "sliding_window", None) is not None
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    if kinds != {"full_attention"}:
        raise NotCapturable(f"{type(inner).__name__} has layers of the kinds {', '.join(sorted(kinds))}")
    if getattr(text, "alibi", False):
        raise NotCapturable("its attention is biased by distances, which it counts in a mask of rows")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise NotCapturable("the model is dispatched over devices")
    if any(name in text.to_dict() for name in ("num_experts", "num_local_experts")):
        raise NotCapturable("its experts take as many rows as the router sends them")


def _repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest list of modules of one class. Compiled once, they share the code."""
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    return max(lists, key=len, default=[])


def _shape_of(batch: ScoreBatch) -> _Shape:
    rows, length = batch.input_ids.shape
    examples, options = batch.length.shape
    scored = -(-batch.token.numel() // 16) * 16
    return _Shape(rows, -(-length // PAD_TO) * PAD_TO, batch.keep, examples, options, scored)


def _packed(batch: ScoreBatch, shape: _Shape) -> Tensor:
    """The batch as one tensor of numbers, padded to its shape: one copy takes it to the GPU."""
    left = shape.length - batch.input_ids.shape[1]
    ids, mask = F.pad(batch.input_ids, (left, 0)), F.pad(batch.attention_mask, (left, 0))
    order, candidate, place = places_in_table(batch)
    more = shape.scored - order.numel()
    scored = [
        F.pad(values, (0, more), value=fill)
        for values, fill in (
            (batch.row[order], 0),
            (batch.position[order], 0),
            (batch.token[order], 0),
            (candidate, shape.examples * shape.options),
            (place, 0),
        )
    ]
    return torch.cat([ids.flatten(), mask.flatten().long(), *scored, batch.length.flatten(), batch.label])


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, 1, T, T]: 0 where a token may look, the lowest number where not. Padding looks at itself, not at nothing."""
    length = mask.shape[1]
    places = torch.arange(length, device=mask.device)
    causal = places[:, None] >= places[None, :]
    seen = (mask[:, None, :] != 0) & causal | (places[:, None] == places[None, :])
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(seen, torch.zeros_like(low), low)[:, None]
