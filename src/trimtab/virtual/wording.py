"""CUDA's own words: how torch names devices, types and methods in its error messages. No decisions here."""

from __future__ import annotations

import torch
from torch import Tensor


def words(text: str) -> frozenset[str]:
    """A set of names, written as a text."""
    return frozenset(text.split())


# Kernels generated from a structured definition name themselves differently.
_STRUCTURED = words(
    """
    addmm addmm_ mm bmm baddbmm baddbmm_ gather scatter scatter_ scatter_add scatter_add_ nll_loss_forward
    nll_loss_backward cat index_add index_add_ index_copy _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data addmv addmv_ topk sort linalg_vector_norm index_reduce triangular_solve
    linalg_cross
    """
)
# Operations that only call another kernel: its name and its names for the arguments are what the user sees.
_CALLED = {
    "embedding": ("index_select", "", {"indices": "index", "weight": "self"}),
    "index_put": ("_index_put_impl_", "", {}),
    "index_put_": ("_index_put_impl_", "", {}),
}


def method_name(base: str, overload: str, argument: str) -> tuple[str, str]:
    """The kernel that checks an operation's arguments, and what it calls the argument."""
    if base in _CALLED:
        base, overload, renamed = _CALLED[base]
        argument = renamed.get(argument, argument)
    if base in _STRUCTURED:
        return f"wrapper_CUDA_{base}" + (f"_{overload}" if overload else ""), argument
    return f"wrapper_CUDA_{overload}_{base}", argument


def iterator_message(devices: list[torch.device]) -> str:
    """TensorIterator names the first GPU, then the first operand that is elsewhere."""
    common = next((device for device in devices if device.type == "cuda"), devices[0])
    other = next(device for device in devices if device != common)
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{common} and {other}!"
    )


_LEGACY = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor",
    torch.int8: "CharTensor",
    torch.int16: "ShortTensor",
    torch.int32: "IntTensor",
    torch.int64: "LongTensor",
    torch.bool: "BoolTensor",
}
_SCALAR = {dtype: name.removesuffix("Tensor") for dtype, name in _LEGACY.items()}


def type_name(tensor: Tensor) -> str:
    """The legacy type name, such as torch.cuda.FloatTensor."""
    name = _LEGACY.get(tensor.dtype, "Tensor")
    return f"torch.cuda.{name}" if tensor.device.type == "cuda" else f"torch.{name}"


def scalar_name(dtype: torch.dtype) -> str:
    """C++'s name of a dtype: Float, Half, BFloat16, Long."""
    return _SCALAR.get(dtype, str(dtype).removeprefix("torch."))


DEVICE_ASSERT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
