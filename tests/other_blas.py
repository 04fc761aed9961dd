"""Another BLAS, for tests: products on the CPU are summed in an order that depends on the number of rows.

A BLAS promises a product, not its last bits: which kernel it takes, and so in which order it adds, may depend on the
processor, on the threads, and on how many rows there are. Some processors show none of this, and a test that leans on
their bits passes there and nowhere else. With TRIMTAB_OTHER_BLAS=1 every machine is one that shows it: each sum is cut
in two at a place that the number of rows decides, as a BLAS with other blocks would cut it. The same product of the
same shapes still has the same bits each time, and no value is off by more than its own rounding.

It sits under the dispatcher, below autograd, so it also reaches what virtual GPUs compute, and processes that a test
starts have it too (`other_blas_in_children`). Fused attention on the CPU keeps its own order; it goes head by head,
whatever the batch is. Nothing here knows of Trimtab.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_on: list[Any] = []


def install() -> None:
    """For the rest of this process and for those that it starts."""
    if not _on:
        _on.append(_library())
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys(
            [str(Path(__file__).with_name("other_blas_in_children")), *filter(None, before)]
        )
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@contextmanager
def other_blas() -> Iterator[None]:
    """In this process, for as long as it lasts."""
    library = None if _on else _library()
    try:
        yield
    finally:
        if library is not None:
            library._destroy()


def _library() -> Any:
    plain_mm, plain_bmm, plain_convolution = (_kernel(name) for name in ("mm", "bmm", "convolution"))

    def mm(left: Tensor, right: Tensor) -> Tensor:
        return _cut(plain_mm, left, right).to(left.dtype)

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        return _cut(plain_bmm, left, right).to(left.dtype)

    def added(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def add(start: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
            product = _cut(plain, left, right)
            product = product if alpha == 1 else product * alpha
            if beta == 0:  # what it would be multiplied by may be anything, also no number
                return product.to(left.dtype)
            return (start.to(product.dtype) * beta + product).to(left.dtype)

        return add

    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
        transposed: bool, output_padding: Any, groups: int,
    ) -> Tensor:  # fmt: skip
        rest = (stride, padding, dilation, transposed, output_padding, groups)
        channels = input.shape[1]
        if transposed or groups > 1 or channels < 2 or input.dtype.itemsize < 4:
            return plain_convolution(input, weight, bias, *rest)
        at = _place(input.shape[0], channels)
        parts = zip(input.tensor_split([at], 1), weight.tensor_split([at], 1), (bias, None), strict=True)
        first, second = (plain_convolution(x.contiguous(), w.contiguous(), b, *rest) for x, w, b in parts)
        return first + second

    made = {"mm": mm, "bmm": bmm, "addmm": added(plain_mm), "baddbmm": added(plain_bmm)}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, function in made.items():
            library.impl(name, function, "CPU", allow_override=True)
            library.impl(f"{name}.out", _into(function), "CPU", allow_override=True)
        for name in ("addmm_", "baddbmm_"):
            library.impl(name, _in_place(made[name[:-1]]), "CPU", allow_override=True)
        library.impl("convolution", convolution, "CPU", allow_override=True)
    return library


def _kernel(name: str) -> Callable[..., Tensor]:
    """What the operation is without us."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args: kernel.call_boxed(keys, *args)


def _place(rows: int, length: int) -> int:
    return 1 + rows % (length - 1)


def _cut(plain: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
    """The product, in fp32 at least: a BLAS rounds its sum once, however many parts it has."""
    length = left.shape[-1]
    if length < 2 or left.numel() == 0 or right.numel() == 0 or not left.is_floating_point():
        return plain(left, right)
    if left.dtype.itemsize < 4:
        left, right = left.float(), right.float()
    at = _place(left.numel() // length, length)
    lefts, rights = left.tensor_split([at], -1), right.tensor_split([at], -2)
    first, second = (
        plain(one.contiguous(), two.contiguous()) for one, two in zip(lefts, rights, strict=True)
    )
    return first + second


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, out: Tensor, **options: Any) -> Tensor:
        made = function(*args, **options)
        return (out if out.shape == made.shape else out.resize_(made.shape)).copy_(made)

    return call


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda target, *args, **options: target.copy_(function(target, *args, **options))
