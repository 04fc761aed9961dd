"""Changes that a rehearsal makes to a program to see what memory they save. Only where the parent asks for them.

General ones, for any script: layers that are checkpointed, batches of fewer rows, optimizers that go through their
tensors one by one. A Trimtab config has settings for them, and is never changed here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn

CHECKPOINTING = "checkpointing"
BATCH = "batch/"
"""With the divisor behind it."""
LOADED_ON_HOST = "loaded-on-host"
GATHERED_ON_HOST = "gathered-on-host"
ONE_BY_ONE = "one-by-one"
_MARK = "_trimtab_computed_again"


def put_in(changes: list[str]) -> None:
    """Make the changes in this process."""
    for change in changes:
        if change == CHECKPOINTING:
            _checkpoint()
        elif change.startswith(BATCH):
            _smaller_batches(int(change.removeprefix(BATCH)))
        elif change == LOADED_ON_HOST:
            _load_on_host()
        elif change == GATHERED_ON_HOST:
            _gather_on_host()
        elif change == ONE_BY_ONE:
            _step_one_by_one()
        else:
            raise ValueError(f"no such change to a program: {change!r}")


def _smaller_batches(divisor: int) -> None:
    """Loaders that are made from now on give so many times fewer rows at once; a step gathers as many more passes."""
    from torch.utils.data import BatchSampler, DataLoader

    inside = False

    def fewer(rows: Any) -> Any:
        return max(1, rows // divisor) if isinstance(rows, int) and not isinstance(rows, bool) else rows

    real_loader, real_sampler = DataLoader.__init__, BatchSampler.__init__

    @functools.wraps(real_loader)
    def loader(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        before, inside = inside, True
        try:
            real_loader(self, dataset, fewer(batch_size), *args, **kwargs)
        finally:
            inside = before

    @functools.wraps(real_sampler)
    def sampler(self: Any, sampler: Any, batch_size: Any, *args: Any, **kwargs: Any) -> None:
        real_sampler(self, sampler, batch_size if inside else fewer(batch_size), *args, **kwargs)

    DataLoader.__init__ = loader  # type: ignore[method-assign]
    BatchSampler.__init__ = sampler  # type: ignore[method-assign]
    _gather_passes(divisor)


def _gather_passes(passes: int) -> None:
    """Gradients are cleared after so many steps alone, as where a step gathers more passes: they lie beside what the
    next pass keeps. That the optimizer steps in between changes nothing of the memory."""
    from torch import nn
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    made: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        made[optimizer] = made.get(optimizer, 0) + 1

    @functools.wraps(of_optimizer)
    def optimizer_clears(self: Optimizer, set_to_none: bool = True) -> None:
        if made.get(self, 0) % passes == 0:
            of_optimizer(self, set_to_none)

    @functools.wraps(of_module)
    def module_clears(self: nn.Module, set_to_none: bool = True) -> None:
        if max(made.values(), default=0) % passes == 0:
            of_module(self, set_to_none)

    register_optimizer_step_post_hook(stepped)
    Optimizer.zero_grad = optimizer_clears  # type: ignore[method-assign]
    nn.Module.zero_grad = module_clears  # type: ignore[method-assign]


def _load_on_host() -> None:
    """What a program reads with torch.load comes into the host's memory, wherever it was saved from."""
    import torch

    real = torch.load

    @functools.wraps(real)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(f, "cpu", *args, **kwargs)

    torch.load = load


def _gather_on_host() -> None:
    """The whole state of a sharded model is put together in the host's memory."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    real = StateDictOptions.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.cpu_offload = True

    StateDictOptions.__init__ = init  # type: ignore[method-assign]


def _step_one_by_one() -> None:
    """torch's optimizers hold what they compute of one tensor at a time, not of all of them."""
    import torch

    def put(kind: type[Any], settings: dict[str, Any]) -> None:
        real = kind.__init__

        @functools.wraps(real)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            plain = kwargs.get("differentiable") or kwargs.get("fused")
            real(self, *args, **(kwargs if plain else kwargs | settings))

        kind.__init__ = init

    for kind in {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}:
        if issubclass(kind, torch.optim.Optimizer):
            taken = inspect.signature(kind.__init__).parameters
            if "fused" in taken:
                put(kind, {"fused": True, "foreach": None})
            elif "foreach" in taken:
                put(kind, {"foreach": False})


def _checkpoint() -> None:
    """The first model that runs with gradients keeps the inputs of its layers alone, and computes the rest again."""
    import torch

    done = False

    def before(module: nn.Module, _: Any) -> None:
        nonlocal done
        if not done and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            done = True
            _checkpointed(module)

    torch.nn.modules.module.register_module_forward_pre_hook(before)


def _checkpointed(model: nn.Module) -> None:
    from torch import nn

    for part in model.modules():
        if getattr(part, "supports_gradient_checkpointing", False):
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
            return
    layers = max(
        (part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)),
        key=len,
        default=None,
    )
    kinds = set()
    for layer in layers if layers is not None else ():
        if not any(True for _ in layer.parameters()):
            continue
        if "forward" in vars(layer):
            layer.forward = _computed_again(layer.forward)
        else:
            # A replica of DataParallel takes over what the layer holds: a bound method would run the layer itself.
            vars(layer)[_MARK] = True
            kinds.add(type(layer))
    for kind in kinds:
        kind.forward = _where_marked(kind.forward)


def _where_marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(forward, layer)
        return (_computed_again(bound) if _MARK in vars(layer) else bound)(*args, **kwargs)

    return call


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call
