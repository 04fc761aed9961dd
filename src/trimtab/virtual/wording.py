"""CUDA's own words: how torch names devices, types and methods in its error messages. No decisions here."""

from __future__ import annotations

import re

import torch
from torch import Tensor


def words(text: str) -> frozenset[str]:
    """A set of names, written as a text."""
    return frozenset(text.split())


# Kernels generated from a structured definition name themselves differently.
_STRUCTURED = words(
    """
    addmm addmm_ addmv addmv_ baddbmm baddbmm_ bmm mm cat clamp clamp_ clamp_max clamp_max_ clamp_min
    clamp_min_ elu_backward gather gcd gcd_ gelu_backward hardshrink_backward hardsigmoid_backward igamma
    igamma_ igammac igammac_ index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ isin lcm
    lcm_ leaky_relu_backward linalg_cross linalg_lu_solve linalg_vector_norm logaddexp logaddexp2
    logit_backward nextafter nextafter_ nll_loss_backward nll_loss_forward scatter scatter_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ sigmoid_backward silu_backward softplus_backward
    softshrink_backward sort tanh_backward threshold_backward topk triangular_solve _linalg_solve_ex
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _addmm_activation
    max_pool2d_with_indices_backward
    """
)
# Operations that only call another kernel: its name and its names for the arguments are what the user sees.
_CALLED = {
    "embedding": ("index_select", "", {"indices": "index", "weight": "self"}),
    "stack": ("cat", "", {}),
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


LEGACY = {
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
_SCALAR = {dtype: name.removesuffix("Tensor") for dtype, name in LEGACY.items()}


def type_name(tensor: Tensor) -> str:
    """The legacy type name, such as torch.cuda.FloatTensor."""
    name = LEGACY.get(tensor.dtype, "Tensor")
    return f"torch.cuda.{name}" if tensor.device.type == "cuda" else f"torch.{name}"


def scalar_name(dtype: torch.dtype) -> str:
    """C++'s name of a dtype: Float, Half, BFloat16, Long."""
    found = _SCALAR.get(dtype) or str(dtype).removeprefix("torch.")
    return found.replace("float8", "Float8")


AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
"""What the CUDA runtime's errors are in this torch."""


def runtime_error(what: str) -> str:
    """The text of an error of the CUDA runtime."""
    return (
        f"CUDA error: {what}\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
        "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


_META = (
    (re.compile(r"\bmeta:(\d+)"), r"cuda:\1"),
    (re.compile(r"\btorch\.meta\."), "torch.cuda."),
    (re.compile(r"\[Meta(\w+)Type\b"), r"[torch.cuda.\1Tensor"),
)


def in_cuda_words(error: BaseException) -> None:
    """What C++ calls meta:1 is the program's cuda:1."""
    if len(error.args) == 1 and isinstance(error.args[0], str) and "eta" in error.args[0]:
        text = error.args[0]
        for pattern, spoken in _META:
            text = pattern.sub(spoken, text)
        error.args = (text,)
