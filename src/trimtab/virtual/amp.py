"""Mixed precision on virtual GPUs: CUDA's autocast rules. (GradScaler needs nothing: its kernels are operations.)

Virtual tensors carry torch's AutocastCUDA key, so `torch.autocast("cuda")` itself switches these rules on and off,
in composite operations too, and they cost nothing outside it. Values are computed by the CPU's kernels in the dtype
that CUDA would use. Cast weights are kept until autocast ends, as CUDA's are: a weight is cast once, its copy stays.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.virtual.state import Machine, Patch
from trimtab.virtual.wording import words

# Virtual tensors are made with this extra key (tensor.py).
KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
HOST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
"""That of tensors on the host that have a shape only: to C++ they are on no CPU, and its kernels would pass them by."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.aside: list[str] = []


_here = _Here()


class _Aside:
    """Inside a kernel of ours its autocast is off, also for what a composite operation calls (`keys_on`)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        _here.aside.append(self.kind)
        self.guard = torch._C._ExcludeDispatchKeyGuard(KEY if self.kind == "cuda" else HOST_KEY)
        self.guard.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self.guard.__exit__(*failure)
        _here.aside.pop()


def keys_on() -> torch._C.DispatchKeySet:
    """The keys of autocast that have not done already what they do to the operation in which this thread is."""
    keys = KEY | HOST_KEY
    if "cuda" in _here.aside:
        keys -= KEY
    return keys - HOST_KEY if "cpu" in _here.aside else keys


# Which operations have a CUDA autocast rule is read from torch; which rule it is follows its documentation. What is in
# none of these lists runs in float32.
_LOWER = words(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu
    _scaled_dot_product_flash_attention scaled_dot_product_attention"""
)
_DTYPE_ARGUMENT = words(
    """prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm"""
)
_WIDEST = words(
    """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"""
)
# Recurrent layers run in cuDNN on a GPU, where autocast lowers them whole.
_CUDNN = tuple(
    f"aten::{name}.{form}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
# On the CPU; what has a rule there and is in neither list runs in float32.
_LOWER_ON_CPU = words(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d addmm
    _addmm_activation addbmm baddbmm bmm mm matmul linear linalg_vecdot prelu scaled_dot_product_attention
    _native_multi_head_attention mkldnn_rnn_layer"""
)
_WIDEST_ON_CPU = words("cat stack index_copy")
BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


@functools.cache  # one question for each of some three thousand operations
def rules(key: str = "AutocastCUDA") -> list[str]:
    """The operations that this torch autocasts on CUDA, or by another key, as `aten::name.overload`."""
    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )


def _eligible(value: Any, kind: str = "cuda") -> bool:
    return (
        isinstance(value, torch.Tensor)
        and (value.is_cuda if kind == "cuda" else value.is_cpu)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


class _Kept(threading.local):
    """Weights that were cast in this thread, with their copies: by identity, and holding them."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


_kept = _Kept()


def _cast(value: Any, dtype: torch.dtype, kind: str = "cuda") -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype, kind) for v in value)
    if not _eligible(value, kind) or value.dtype is dtype:
        return value
    lasting = (
        dtype is torch.get_autocast_dtype(kind)
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )
    if not lasting:
        return value.to(dtype)
    known = _kept.copies.get(id(value))
    if known is None or known[1].dtype is not dtype:
        with torch.enable_grad():  # a use under no_grad may be the first of several
            known = _kept.copies[id(value)] = value, value.to(dtype)
    return known[1]


def patches(machine: Machine) -> list[Patch]:
    """The end of the outermost autocast drops the copies."""
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _kept.copies.clear()
        original()

    return [(torch, "clear_autocast_cache", clear_autocast_cache)]


def _cast_kernel(
    op: Any, dtype_of: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype], kind: str = "cuda"
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _Aside(kind):
            dtype = dtype_of(args, kwargs)
            # The last first: so the compiler of torch's builds for Linux evaluates arguments. It decides in which order
            # copies are allocated, and in which their gradients come back.
            named = {name: _cast(kwargs[name], dtype, kind) for name in reversed(kwargs)}
            given = [_cast(value, dtype, kind) for value in reversed(args)]
            return op(*reversed(given), **named)

    return kernel


def _lower(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    tensors = filter(_eligible, tree_leaves((args, kwargs)))
    return torch.float32 if any(t.dtype is torch.float32 for t in tensors) else _lower(args, kwargs)


def _dtype_kernel(op: Any) -> Callable[..., Any]:
    """Sums and softmaxes compute in float32 through their own `dtype` argument, unless the caller gave one."""
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _Aside("cuda"):
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is not None or not _eligible(args[0]):
                return op(*args, **kwargs)
            if place < len(args):
                return op(*args[:place], torch.float32, *args[place + 1 :], **kwargs)
            return op(*args, **{**kwargs, "dtype": torch.float32})

    return kernel


def _norm_kernel(op: Any) -> Callable[..., Any]:
    """`norm` without a dtype becomes the overload that has one."""

    def kernel(self: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        with _Aside("cuda"):
            if not _eligible(self):
                return op(self, p) if dim is None else op(self, p, dim, keepdim)
            if dim is None:
                return torch.ops.aten.norm.ScalarOpt_dtype(self, p, dtype=torch.float32)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(self, p, dim, keepdim, dtype=torch.float32)

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(BANNED)


def _kernel_for(name: str, op: Any) -> Callable[..., Any]:
    if name == "norm":
        return _norm_kernel(op)
    if name in _DTYPE_ARGUMENT:
        return _dtype_kernel(op)
    if name == "binary_cross_entropy":
        return _banned
    return _cast_kernel(
        op, _lower if name in _LOWER else _widest if name in _WIDEST else lambda *_: torch.float32
    )


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    tensors = [t for t in tree_leaves((args, kwargs)) if _eligible(t, "cpu")]
    return torch.float32 if any(t.dtype is torch.float32 for t in tensors) else _on_cpu(args, kwargs)


def _kernel_on_cpu(name: str, op: Any) -> Callable[..., Any]:
    rule = _on_cpu if name in _LOWER_ON_CPU else _widest_on_cpu if name in _WIDEST_ON_CPU else None
    return _cast_kernel(op, rule or (lambda *_: torch.float32), "cpu")


def enter() -> Callable[[], None]:
    """Put our kernels in the place of torch's CUDA autocast kernels, which see no CUDA tensor here; gives the undo."""
    return _put_in("AutocastCUDA", (*rules(), *_CUDNN), _kernel_for)


def enter_on_host() -> Callable[[], None]:
    """The same of the CPU's, which see no CPU in tensors on the host that have a shape only."""
    return _put_in("AutocastCPU", rules("AutocastCPU"), _kernel_on_cpu)


def _put_in(key: str, names: Sequence[str], kernel_for: Callable[[str, Any], Any]) -> Callable[[], None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that a kernel is overridden
        for full in names:
            name, _, overload = full.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            library.impl(op, kernel_for(name, op), key)
    return library._destroy


def in_lower_precision(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of ours that stands for an operation of the lower-precision lists, as autocast would."""
    for kind, rule in (("cuda", _lower), ("cpu", _on_cpu)):
        if torch.is_autocast_enabled(kind):
            function = _cast_kernel(function, rule, kind)
    return function(*args, **kwargs)
