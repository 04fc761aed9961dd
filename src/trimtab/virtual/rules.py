"""Which operands may mix, and what CUDA says when they may not. Decides; computes nothing.

A rule gets the operands of one operation when they are not all on one virtual device. It returns the device of the
result (None for the CPU). When the mix is illegal it reports a fault, which raises unless the machine repairs; then
it returns the device on which the operation goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import faults, generators
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import HOST, VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, device_of
from trimtab.virtual.wording import iterator_message, method_name, type_name, words

Slot = VirtualDevice | None
Rule = Callable[[Plan, Args, Kwargs, VirtualDevice], Slot]
Named = list[tuple[str, Tensor]]

_CROSSING = words(
    """
    copy_ copy _copy_from _copy_from_and_resize _to_copy set_ is_same_size is_set_to
    _has_compatible_shallow_copy_type resize_as_ _foreach_copy _foreach_copy_ fill fill_
    slice_scatter select_scatter diagonal_scatter as_strided_scatter
    """
)
_INDEXING = words("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")
# TensorIterator operations that do not carry the pointwise tag.
_ITERATOR = words(
    """
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy normal_ binary_cross_entropy_with_logits bernoulli dist kl_div
    soft_margin_loss soft_margin_loss_backward allclose floor_divide floor_divide_ rsub index_fill index_fill_
    eq_ ne_ lt_ le_ gt_ ge_ copysign_ heaviside_ __irshift__ __ilshift__ binomial
    """
)
# Elementwise operations whose CUDA kernels check their arguments first, and so refuse even a 0-dim CPU tensor: those
# without `device_check: NoCheck` in torch's native_functions.yaml.
_EXACT = words(
    """
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ gcd gcd_ lcm lcm_ igamma igamma_ igammac igammac_
    logaddexp logaddexp2 nextafter nextafter_ addr complex polar equal normal huber_loss
    binary_cross_entropy_backward mse_loss_backward native_dropout_backward gelu_backward logit_backward
    sigmoid_backward silu_backward tanh_backward threshold_backward
    """
)


# Arguments whose device does not matter: CUDA's kernels read them on the host.
_HOSTED = {
    "_pack_padded_sequence": ("lengths",),
    "_pack_padded_sequence_backward": ("batch_sizes",),
    "_ctc_loss": ("targets", "input_lengths", "target_lengths"),
    "_ctc_loss_backward": ("targets", "input_lengths", "target_lengths"),
    "tensor_split": ("tensor_indices_or_sections",),
    "index_fill": ("value",),
    "index_fill_": ("value",),
}


def operands(plan: Plan, args: Args, kwargs: Kwargs) -> Named:
    """The tensors of a call with the names that the schema gives them; the members of a list share its name."""
    found: Named = []
    for name, value in (*zip(plan.names, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, (list, tuple)):
            found.extend((name, item) for item in value if isinstance(item, Tensor))
    return found


def slot_of(tensor: Tensor) -> Slot:
    """The virtual device of a tensor, None for a plain one."""
    return tensor._slot if tensor.__class__ in VIRTUAL else None


def is_scalar(tensor: Tensor) -> bool:
    """A 0-dim tensor on the CPU, which CUDA takes beside any device."""
    return tensor.dim() == 0 and device_of(tensor).type == "cpu"


def distinct(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The devices of tensors, each once, in their order."""
    return list(dict.fromkeys(device_of(tensor) for tensor in tensors))


def winner(found: Named, plan: Plan) -> Slot:
    """Where a faulty operation goes on: where its output, its parameters, what has a gradient or most operands lie."""
    for name, tensor in found:
        if name in plan.writes:
            return slot_of(tensor)
    virtual = [t for _, t in found if t.__class__ in VIRTUAL]
    parameters = [t for t in virtual if isinstance(t, nn.Parameter)]
    grown = [t for t in virtual if t.requires_grad]
    counted = Counter(t._slot for t in parameters or grown or virtual)
    return counted.most_common(1)[0][0] if counted else None


def mismatch(
    message: str,
    plan: Plan,
    found: Named,
    kind: str = "device-mismatch",
    raises: type[Exception] | None = None,
) -> Slot:
    """Report an illegal mix; where the operation goes on if the machine repairs."""
    faults.report(kind, message, plan.name.replace("::", "."), found, raises)
    return winner(found, plan)


# What reads of a meta tensor its shape alone.
_SHAPE_READERS = words("is_same_size is_set_to _has_compatible_shallow_copy_type resize_as_")


def no_data(plan: Plan) -> None:
    """A meta tensor of the program's is to be read: computed on payloads, torch would take it for a shape and write
    nothing."""
    if plan.name.removeprefix("aten::") not in _SHAPE_READERS:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


def crossing(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """Copies go between any two devices; the result is where the first operand is."""
    return slot_of(args[0]) if args and isinstance(args[0], Tensor) else slot


def iterator(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """Elementwise operations: one device, save for 0-dim CPU tensors that are only read."""
    found = operands(plan, args, kwargs)
    hosted = _HOSTED.get(plan.name.removeprefix("aten::"), ())
    devices = distinct(t for n, t in found if n not in hosted and (n in plan.writes or not is_scalar(t)))
    return mismatch(iterator_message(devices), plan, found) if len(devices) > 1 else slot


def checked(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """All other kernels: the arguments are checked one after the other, 0-dim ones too, and the odd one is named."""
    found = operands(plan, args, kwargs)
    base = plan.name.removeprefix("aten::")
    hosted = _HOSTED.get(base)
    if hosted is not None:
        found = [(name, tensor) for name, tensor in found if name not in hosted]
    common: torch.device | None = None
    for name, tensor in found:
        device = device_of(tensor)
        if common is None:
            common = device
        elif device != common:
            method, spoken = method_name(base, plan.overload, name)
            message = (
                f"Expected all tensors to be on the same device, but got {spoken} is on {device}, different from "
                f"other tensors on {common} (when checking argument in method {method})"
            )
            return mismatch(message, plan, found)
    return slot


def indexing(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """A GPU tensor takes CPU indices; a CPU tensor takes no GPU indices; a 0-dim value may be anywhere."""
    source = args[0]
    own = device_of(source)
    found = operands(plan, args, kwargs)
    for name, tensor in found[1:]:
        device = device_of(tensor)
        if device == own:
            continue
        if name == "indices":
            if device.type == "cpu":
                continue
            message = f"indices should be either on cpu or on the same device as the indexed tensor ({own})"
            mismatch(message, plan, found, "index-device")
            break
        if tensor.dim():
            adds = own.type == "cuda" and True in (*args[3:4], kwargs.get("accumulate"))
            message = (
                f"expected device {own} but got device {device} for value tensor"
                if adds
                else iterator_message([own, device])
            )
            mismatch(message, plan, found)
            break
    else:
        return slot_of(source)
    return slot_of(source) if plan.writes else winner(found, plan)


def masked(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """masked_fill: the mask is where the tensor is; the value of a GPU tensor is read on the host."""
    found = operands(plan, args, kwargs)
    source, mask = args[0], args[1]
    if device_of(mask) != device_of(source):
        message = (
            f"expected self and mask to be on the same device, but got mask on {device_of(mask)} and self on "
            f"{device_of(source)}"
        )
        return mismatch(message, plan, found)
    if slot_of(source) is None:
        mismatch("masked_fill_: Expected inputs to be on same device", plan, found)
        return None
    return slot


def choice(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """where: 0-dim tensors are brought along from any device to that of the first GPU tensor."""
    found = operands(plan, args, kwargs)
    for name, tensor in found:
        if slot_of(tensor) is not slot and (tensor.dim() or name in plan.writes):
            message = iterator_message([slot.device, device_of(tensor)])
            return mismatch(message, plan, found)
    return slot


def probabilities(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """bernoulli_: a GPU tensor fetches its probabilities from anywhere."""
    return slot_of(args[0]) or iterator(plan, args, kwargs, slot)


def convolution(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """Convolutions compare type names, which hold the device."""
    found = operands(plan, args, kwargs)
    source = found[0][1]
    for name, tensor in found[1:]:
        if device_of(tensor) == device_of(source):
            continue
        if {device_of(tensor).type, device_of(source).type} == {"cuda"}:
            return checked(plan, args, kwargs, slot)
        message = f"Input type ({type_name(source)}) and {name} type ({type_name(tensor)}) should be the same"
        if device_of(source).type == "cpu" and name == "weight":
            message += " or input should be a MKLDNN tensor and weight is a dense tensor"
        return mismatch(message, plan, found)
    return slot


def foreach(plan: Plan, args: Args, kwargs: Kwargs, slot: VirtualDevice) -> Slot:
    """Lists are taken member by member: each index has one device; 0-dim CPU tensors mix as ever."""
    named = (*zip(plan.names, args, strict=False), *kwargs.items())
    lists = [(n, v) for n, v in named if isinstance(v, (list, tuple))]
    singles = [(n, v) for n, v in named if isinstance(v, Tensor)]
    fused = plan.name.startswith("aten::_fused")
    if plan.overload == "Tensor" and plan.name in ("aten::_foreach_add", "aten::_foreach_add_") and singles:
        first, scalar = lists[0][1][0], singles[0][1]
        if device_of(first) != device_of(scalar):
            message = f"scalar tensor expected to be on {device_of(first)} but is on {device_of(scalar)}"
            mismatch(message, plan, [(lists[0][0], first), singles[0]])
            return slot
    length = max((len(v) for _, v in lists), default=0)
    for index in range(length):
        row = [(n, v[index]) for n, v in lists if index < len(v) and isinstance(v[index], Tensor)] + singles
        # A fused optimizer takes its learning rate from the host; its other numbers are on the GPU.
        kept = (t for n, t in row if n in plan.writes or (fused and n != "lr") or not is_scalar(t))
        devices = distinct(kept)
        if len(devices) > 1:
            mismatch(iterator_message(devices), plan, row)
            break
    return slot


def generator(plan: Plan, named: dict[str, Any], slot: VirtualDevice | None) -> None:
    """A random generator belongs to a device."""
    on_gpu = slot is not None and slot.index != HOST
    wanted, given = "cuda" if on_gpu else "cpu", named["generator"]
    found = (generators.virtual_of(given) or given).device.type
    if found != wanted:
        message = f"Expected a '{wanted}' device type for generator but found '{found}'"
        mismatch(message, plan, [], "generator-device", RuntimeError)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_CROSSING, crossing),
    **dict.fromkeys(_INDEXING, indexing),
    **dict.fromkeys(_ITERATOR, iterator),
    **dict.fromkeys(words("convolution convolution_overrideable convolution_backward"), convolution),
    **dict.fromkeys(words("masked_fill masked_fill_"), masked),
    "where": choice,
    "bernoulli_": probabilities,
}


def rule_for(func: Any, name: str) -> Rule:
    """The rule of an operation, chosen once from its name and tags."""
    base = name.removeprefix("aten::")
    if base in _RULES:
        return _RULES[base]
    if base.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return foreach
    return iterator if torch.Tag.pointwise in func.tags and base not in _EXACT else checked
