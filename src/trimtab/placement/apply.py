"""Carries a plan out: prepares the process, places models, moves batches. It decides nothing.

`place` and `move` are for anybody's own training loop; `prepare_process` and `bind_arguments` serve the trainers
of Hugging Face, which would otherwise look for devices themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.hardware import Launcher, detect_launcher
from trimtab.hardware.launcher import RANK_VARIABLES
from trimtab.placement.plan import PlacementPlan
from trimtab.placement.profile import bare_model
from trimtab.placement.stacks import layer_classes

if TYPE_CHECKING:
    import torch
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch")

ACCELERATE_VARIABLES = (
    "ACCELERATE_TORCH_DEVICE",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
)
"""By these the environment would choose device, precision or strategy past the plan."""


def prepare_process(plan: PlacementPlan, launcher: Launcher | None = None) -> None:
    """Make this process's environment agree with the plan, before any library reads it."""
    import torch

    launcher = launcher or detect_launcher()
    # Accelerate takes any LOCAL_RANK for a distributed run: a single process, also torchrun's only one, has none.
    for name in RANK_VARIABLES if plan.processes == 1 else launcher.stale:
        os.environ.pop(name, None)
    if plan.processes > 1:
        os.environ.update(launcher.exports)
    asked = {name: os.environ.pop(name, "") for name in ACCELERATE_VARIABLES}
    overruled = [name for name, value in asked.items() if value.lower() not in ("", "0", "no", "false")]
    if overruled:
        logging.getLogger(__name__).warning("ignoring %s: the plan decides", ", ".join(overruled))
    if plan.kind == "cuda":
        torch.cuda.set_device(torch.device(plan.device))


def trainer_options(plan: PlacementPlan, model: nn.Module | None = None) -> dict[str, Any]:
    """The device and precision part of `TrainingArguments`, from the plan alone.

    With the model at hand its own layers are sharded one by one. Accelerate would look for every layer that the model's
    parts name, and refuse a SigLIP tower for want of SigLIP's text layers.
    """
    options: dict[str, Any] = {
        "use_cpu": plan.kind == "cpu",
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "ddp_find_unused_parameters": plan.unused_parameters,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "dataloader_pin_memory": plan.kind == "cuda",
        # From pinned memory a batch travels while the host goes on.
        "accelerator_config": {"non_blocking": plan.kind == "cuda"},
    }
    if plan.strategy == "sharded":
        options["fsdp"] = True
        options["fsdp_config"] = {"version": 2}
        if model is not None:
            options["fsdp_config"]["transformer_layer_cls_to_wrap"] = layer_classes(bare_model(model))
    return options


def checkpoint_plainly(model: nn.Module) -> list[str]:
    """Take re-entrant checkpointing from a model that switched it on by itself; returns the names of the modules.

    Re-entrant segments drop the gradients of a tower, whose pixels require none, and let DDP see a tensor ready twice.
    """
    changed = []
    for name, module in model.named_modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(function, functools.partial) and function.keywords.get("use_reentrant", True):
            options = {**function.keywords, "use_reentrant": False}
            module._gradient_checkpointing_func = functools.partial(function.func, *function.args, **options)
            changed.append(name)
    return changed


def bind_arguments(arguments: Any, plan: PlacementPlan) -> None:
    """Tell `TrainingArguments`, and Accelerate behind them, the plan's device.

    By themselves they take `cuda:0` and count every visible GPU, which would wrap the model in DataParallel. Of
    several processes each finds its own device by its rank, which is how the plan chose it too.
    """
    import torch

    if plan.processes > 1:
        return
    device = torch.device(plan.device)
    arguments.__dict__["_setup_devices"] = device
    # Shared by every Accelerator until the next TrainingArguments are made: batches go where this says.
    arguments.distributed_state.device = device
    arguments._n_gpu = 0 if plan.kind == "cpu" else 1
    if plan.kind == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def own_stream(plan: PlacementPlan) -> Iterator[None]:
    """On CUDA, work on a stream that is not the default one, on which nothing else can be captured as a graph.

    What is captured inside shares the stream's workspace with all other work, where a second stream would have its own.
    """
    import torch

    if plan.kind != "cuda" or plan.strategy != "single":
        yield
        return
    with torch.cuda.device(plan.device), torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


@contextmanager
def default_stream() -> Iterator[None]:
    """On CUDA, load weights on the default stream, whichever stream the work around is on.

    Libraries set a GPU's memory aside here and fill it from threads, and a thread begins on the default stream: what
    was set aside on another one is never filled, and lost until the process ends.
    """
    import torch

    if not torch.cuda.is_initialized():
        yield
        return
    around, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    with torch.cuda.stream(default):
        yield
    around.wait_stream(default)


def place(model: Model, plan: PlacementPlan) -> Model:
    """Put a model where the plan says: on one device, or split over several. What is to be sharded stays on the CPU."""
    if plan.device_map is None:
        return model.to(plan.load_device)
    from accelerate import dispatch_model
    from accelerate.utils import set_module_tensor_to_device

    # The map knows the model's own names, not those of PEFT around it.
    bare = bare_model(model)
    modules = {name for name, _ in bare.named_modules()}
    for name, device in plan.device_map.items():
        if name not in modules:
            # A tensor of its own beside the modules (LLaVA's image_newline), which accelerate would leave behind.
            set_module_tensor_to_device(bare, name, device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following device_map keys do not match any submodules")
        dispatch_model(bare, device_map=dict(plan.device_map), main_device=plan.device)
    return model


def move(batch: Batch, device: str | torch.device | PlacementPlan) -> Batch:
    """A copy of `batch` with every tensor on `device`; strings, numbers and other objects pass through.

    Takes tensors, mappings (also BatchEncoding and ModelOutput), lists, tuples, named tuples and dataclasses. The
    batch itself stays as it was; a tensor that occurs twice in it is moved once.
    """
    target = device.device if isinstance(device, PlacementPlan) else device
    moved: Batch = _move(batch, target, {})
    return moved


def _move(item: Any, device: Any, seen: dict[int, Any]) -> Any:
    import torch
    from torch.nn.utils.rnn import PackedSequence

    if isinstance(item, torch.Tensor):
        if id(item) not in seen:
            seen[id(item)] = item.to(device)
        return seen[id(item)]
    if isinstance(item, PackedSequence):
        # Its batch sizes have to stay on the CPU, which its own method knows.
        return item.to(device)
    if isinstance(item, MutableMapping):
        # A copy keeps what a mapping knows besides its items (BatchEncoding, ModelOutput, defaultdict).
        clone = copy.copy(item)
        for key, value in item.items():
            clone[key] = _move(value, device, seen)
        return clone
    if isinstance(item, Mapping):
        return type(item)({key: _move(value, device, seen) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        values = [_move(value, device, seen) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        # Not `replace`: it would run __post_init__ again and leave out fields that __init__ does not take.
        twin = copy.copy(item)
        # A field without a default that nobody has set is not there.
        for field in (f for f in dataclasses.fields(item) if hasattr(item, f.name)):
            object.__setattr__(twin, field.name, _move(getattr(item, field.name), device, seen))
        return twin
    return item
