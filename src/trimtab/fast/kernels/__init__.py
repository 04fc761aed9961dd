"""Triton kernels of the fast parts, and whether they can be used on a tensor. Nothing here decides what is computed."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import nn

from trimtab.models.load import shapes_only

HALVES = (torch.bfloat16, torch.float16)


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable_on(tensor: torch.Tensor) -> bool:
    """Whether a kernel can run on this tensor: on a real GPU, where Triton is installed. With shapes only none computes
    anything, and each is taken for run."""
    real = type(tensor) in (torch.Tensor, nn.Parameter) or shapes_only()
    return tensor.is_cuda and real and triton_is_there()
