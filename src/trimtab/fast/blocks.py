"""The layers of a language model, and of the towers beside it, under torch.compile, each by itself, in training.

What is compiled is a layer's own `forward`: hooks on the layer (FSDP2, the monitor), checkpointing and whatever wraps
the model stay outside. Evaluation, generation and passes without gradients take the plain forward, so that caches and
lengths of other passes never compile anything. Layers of one kind share their graphs. A kind that cannot be compiled
goes on plainly, and that is said once with its reason. Nothing that is saved changes: names and weights stay, and a
copy or a pickle of the model has plain layers.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.placement import bare_model
from trimtab.placement.stacks import find_stacks, language_root, tower_stacks

Say = Callable[[str], None]
_GRAPHS_OF_A_KIND = 16
"""A kind of layers that needs more graphs than this is compiled anew for ever: it goes on plainly."""


_BACKWARD_TOO = "force_non_lazy_backward_lowering"


class NotCompiled(TrimtabError):
    """Layers that were to be compiled, by request, cannot be."""


class Blocks:
    """The compiled layers of a model: how many there are, what it took, and what fell back."""

    def __init__(self, *, budget: float | None, say: Say | None, demanded: bool, backend: str) -> None:
        self.say = say
        self.note: Callable[[dict[str, Any]], None] | None = None
        """Gets the figures of `as_dict` whenever a pass has compiled something."""
        self.layers = 0
        self.graphs = 0
        self.plain: dict[Hashable, str] = {}
        """Kinds of layers that are computed plainly, and why."""
        self._kinds: dict[Hashable, int] = {}
        self._towers: set[Hashable] = set()
        self._budget, self._demanded, self._backend = budget, demanded, backend
        self._told, self._told_of_caches, self._began_passes = 0, False, False
        self._began = _seconds()
        self._virtual = _machine() is not None
        """Whether nothing is compiled: of each new length virtual GPUs ask the compiler what it would have kept."""
        self._fallen: dict[tuple[str, str], int] = {}
        """Layers of towers that have just fallen back, by class and reason: adapters make several kinds of a class."""

    def add(self, layer: nn.Module, dynamic: bool | None, *, tower: bool = False) -> None:
        """`tower`: beside the language model; it may be frozen, and goes on plainly where it cannot be compiled, also
        where compiled layers were asked for."""
        kind = (type(layer), *((name, type(part)) for name, part in layer.named_modules()))
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if tower:
            self._towers.add(kind)
        layer.forward = _Block(layer, self, kind, dynamic, first=self.layers == 0 and not tower)
        self.layers += 1

    def compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """The compiler behind torch.compile, counted. What of a graph is kept for its backward is decided in here."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        self.graphs += 1
        settings: dict[str, Any] = {"activation_memory_budget": 1.0 if self._budget is None else self._budget}
        if hasattr(config, _BACKWARD_TOO):
            # At once, where a failure is still met by the plain layer; later it would end the run.
            settings[_BACKWARD_TOO] = True
        with config.patch(settings):
            return lookup_backend(self._backend)(graph, inputs, **options)

    @property
    def seconds(self) -> float:
        """What compiling took so far, backward passes included."""
        return _seconds() - self._began

    @property
    def compiled(self) -> int:
        """Layers that are, or are to be, compiled."""
        return self.layers - sum(self._kinds[kind] for kind in self.plain)

    def tell(self) -> None:
        """The language model's part of a new pass begins: say what the towers fell back to, and what the pass before
        has compiled."""
        fallen, self._fallen = self._fallen, {}
        for (name, why), count in fallen.items():
            self._say_plain(name, why, count)
        first, self._began_passes = not self._began_passes, True
        if first or self.graphs == self._told:
            return
        if self._virtual:
            if not self._told and self.say is not None:
                self.say(
                    f"{self.compiled} layers count as compiled ones: nothing is compiled on virtual GPUs"
                )
            self._told = self.graphs
            return
        again = f", {self._told} of them before" if self._told else ""
        self._told = self.graphs
        if self.note is not None:
            self.note(self.as_dict())
        if self.say is not None and self.compiled:
            many = "graph" if self.graphs == 1 else "graphs"
            self.say(
                f"compiled {self.compiled} layers as {self.graphs} {many}{again} in {self.seconds:.0f} s"
            )

    def fall_back(self, kind: Hashable, layer: nn.Module, error: Exception) -> None:
        why = _first_lines(error)
        name = type(layer).__name__
        if self._demanded and kind not in self._towers:
            raise NotCompiled(
                f"speed.compile=true, and {name} cannot be compiled\n  why: {why}\n"
                "  change: set speed.compile: null, which computes such layers plainly"
            ) from error
        self.plain[kind] = why
        if kind in self._towers:
            self._fallen[name, why] = self._fallen.get((name, why), 0) + self._kinds[kind]
        else:
            self._say_plain(name, why, self._kinds[kind])

    def _say_plain(self, name: str, why: str, count: int) -> None:
        if self.say is not None:
            self.say(f"{count} layers ({name}) are computed plainly, not compiled: {why}")

    def met_a_cache(self) -> None:
        if not self._told_of_caches and self.say is not None:
            self.say("layers are computed plainly while the model keeps a cache (use_cache)")
        self._told_of_caches = True

    def as_dict(self) -> dict[str, Any]:
        """For the run's summary."""
        found: dict[str, Any] = {"layers": self.compiled}
        if not self._virtual:
            found |= {"graphs": self.graphs, "seconds": round(self.seconds, 1)}
        return found | ({"plain": sorted(set(self.plain.values()))} if self.plain else {})


class _Block:
    """Stands in a layer's own dictionary as its `forward`."""

    opened_by = "speed.compile=false"
    """By this mark a witness leaves the inside alone: its hooks would be compiled along."""

    def __init__(
        self, layer: nn.Module, blocks: Blocks, kind: Hashable, dynamic: bool | None, *, first: bool
    ) -> None:
        """`first`: whether it is the language model's first layer."""
        self._layer, self._blocks, self._kind = layer, blocks, kind
        self._plain: Any = layer.forward
        self._first = first
        self._compiled: Any = torch.compile(
            self._plain, fullgraph=True, dynamic=dynamic, backend=blocks.compile
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        blocks = self._blocks
        if not self._layer.training or not torch.is_grad_enabled() or self._kind in blocks.plain:
            return self._plain(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            blocks.met_a_cache()
            return self._plain(*args, **kwargs)
        if self._first:
            blocks.tell()
        try:
            entering, named = _entering(args, kwargs) if self._first else (args, kwargs)
            return self._compiled(*entering, **named)
        except _not_compilable() as error:
            # Raised while it was traced or compiled: nothing of it has run.
            blocks.fall_back(self._kind, self._layer, error)
        return self._plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain, memo)

    def __reduce__(self) -> Any:
        if isinstance(self._plain, types.MethodType):
            return bound, (self._plain.__func__, self._layer)
        return _itself, (self._plain,)


def compile_blocks(
    model: nn.Module,
    *,
    dynamic: bool | None = None,
    budget: float | None = None,
    say: Say | None = None,
    demanded: bool = False,
    _backend: str = "inductor",
) -> Blocks:
    """Have the layers of the model and its towers compiled when they first run in training. Before it is wrapped.

    `dynamic`: whether lengths differ from batch to batch (True), or a second length is to tell (None). `budget`: share
    of the activations that is kept. `demanded`: a layer that cannot be compiled is an error.
    """
    blocks = Blocks(budget=budget, say=say, demanded=demanded, backend=_backend)
    bare = bare_model(model)
    stacks = find_stacks(bare)
    towers = tower_stacks(stacks, language_root(bare, stacks))
    for name in sorted(stacks, key=towers.__contains__):
        for layer in bare.get_submodule(name).children():
            # Pictures are cut to one size as a rule, so that a second length is to tell.
            blocks.add(layer, None if name in towers else dynamic, tower=name in towers)
    if blocks.layers:
        _settle_compiler(len(blocks._kinds))
        _run_each_once()
    return blocks


def _run_each_once() -> None:
    """Where a rehearsal runs by shapes alone, a layer that it has run once gives the same again."""
    machine = _machine()
    if machine is not None and not machine.repeats:
        machine.repeats = "own"


def _machine() -> Any:
    """That of the virtual GPUs, where they are in force."""
    virtual = sys.modules.get("trimtab.virtual.state")
    return virtual.machine() if virtual is not None else None


def _settle_compiler(kinds: int) -> None:
    from torch._dynamo import config
    from torch.fx.experimental import _config as sizes

    # Layers of several kinds may be of one class, and share its code and so this limit. Past it there is an error,
    # which makes them plain: not a silent one.
    config.recompile_limit = max(config.recompile_limit, _GRAPHS_OF_A_KIND * kinds)
    # It would cut the graph of a layer where a bucket of DDP ends; layers one by one let gradients go early anyway.
    config.optimize_ddp = False
    # Floats in a layer (a scale, an epsilon) are constants. Taken for variables, they have each graph made twice.
    config.specialize_float = True
    # Else a first batch as long as a head is wide has both taken for one size, and the next one compiled anew.
    sizes.use_duck_shape = False


def _not_compilable() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _first_lines(error: Exception) -> str:
    """What the compiler says, in one line: its pages of advice are for those who write compilers."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "they would be compiled anew again and again (TORCH_LOGS=recompiles tells why)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def _seconds() -> float:
    """What compiling has taken in this process."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


class _WithGradient(torch.autograd.Function):
    """Has what enters the first layer require a gradient, which goes nowhere.

    The layers behind it get one that does, and a graph is for one or the other: so all of them share theirs. It costs
    the gradient of the first layer's queries, keys and values with respect to their input.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, wanting: torch.Tensor) -> torch.Tensor:
        return hidden.clone()  # a view would need a graph of its own again

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor) or hidden.requires_grad or not hidden.is_floating_point():
        return args, kwargs
    wanting = torch.empty(0, device=hidden.device, requires_grad=True)
    hidden = _WithGradient.apply(hidden, wanting)
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def bound(function: Any, layer: nn.Module) -> Any:
    return types.MethodType(function, layer)


def _itself(value: Any) -> Any:
    return value
