"""What single operations take of a GPU's memory while they run: measured on a GPU, or predicted on a virtual one.

    python benchmarks/op_memory.py --out measured.json                 # on a GPU: needs torch alone
    python benchmarks/op_memory.py --virtual --out predicted.json      # anywhere: on a virtual H200, shapes only
    python benchmarks/op_memory.py --virtual --compare measured.json   # the differences

Each case is made ready and run once for what libraries keep, made ready again, and measured: bytes that are there after
it and were not before (`kept`, below nought where a backward pass frees what was saved), the highest use while it ran
above what was there before (`peak`), and every allocation in its order (`events`: bytes, below nought when they are
given back), on which it hangs what is reserved. The requested bytes are taken, which the allocator's rounding does not
touch.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

Work = Callable[[], Any]
CASES: dict[str, Callable[[], Work]] = {}
BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(name: str, ready: Callable[[], Work]) -> None:
    """A case: `ready` makes the operands and gives what is measured."""
    assert name not in CASES, name
    CASES[name] = ready


def simple(name: str, function: Callable[..., Any], *operands: Callable[[], Any]) -> None:
    """An operation on operands that need no gradient."""

    def ready() -> Work:
        values = [make() for make in operands]
        return lambda: function(*values)

    case(name, ready)


def both(name: str, function: Callable[..., Any], *operands: Callable[[], Any]) -> None:
    """The forward pass and the backward pass of an operation, each by itself."""

    def forward() -> Work:
        values = [make() for make in operands]
        return lambda: function(*values)

    def backward() -> Work:
        values = [make() for make in operands]
        out = function(*values)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.backward(out, grad)

    case(name, forward)
    case(f"{name} | backward", backward)


def no(*size: int, dtype: torch.dtype = BF16) -> Callable[[], Tensor]:
    """A tensor without a gradient."""
    return lambda: torch.full(size, 0.5, dtype=dtype, device="cuda")


def yes(*size: int, dtype: torch.dtype = BF16) -> Callable[[], Tensor]:
    """A tensor that wants a gradient."""
    return lambda: torch.full(size, 0.5, dtype=dtype, device="cuda").requires_grad_()


def ids(high: int, *size: int) -> Callable[[], Tensor]:
    return lambda: (
        torch.arange(torch.Size(size).numel(), device="cuda").mul_(7919).remainder_(high).view(size)
    )


def products() -> None:
    simple("mm bf16", torch.mm, no(4096, 2048), no(2048, 8192))
    simple("mm fp32", torch.mm, no(4096, 2048, dtype=FP32), no(2048, 4096, dtype=FP32))
    simple("mm fp16", torch.mm, no(4096, 2048, dtype=HALF), no(2048, 4096, dtype=HALF))
    simple("mm left transposed", lambda a, b: torch.mm(a.t(), b), no(2048, 4096), no(2048, 4096))
    simple("mm right transposed", lambda a, b: torch.mm(a, b.t()), no(4096, 2048), no(4096, 2048))
    simple("mm both transposed", lambda a, b: torch.mm(a.t(), b.t()), no(2048, 4096), no(4096, 2048))
    simple("mm every second column", lambda a, b: torch.mm(a[:, ::2], b), no(4096, 4096), no(2048, 4096))
    simple("mm of a slice of columns", lambda a, b: torch.mm(a[:, :2048], b), no(4096, 4096), no(2048, 4096))
    simple("mm expanded rows", lambda a, b: torch.mm(a.expand(4096, 2048), b), no(1, 2048), no(2048, 4096))
    simple("mm expanded columns", lambda a, b: torch.mm(a.expand(4096, 2048), b), no(4096, 1), no(2048, 4096))
    simple("mm of odd sizes", torch.mm, no(4095, 2047), no(2047, 4093))
    simple(
        "mm out=",
        lambda a, b, c: torch.mm(a, b, out=c),
        no(4096, 2048),
        no(2048, 4096),
        no(4096, 4096),
    )
    simple(
        "mm out= transposed",
        lambda a, b, c: torch.mm(a, b, out=c.t()),
        no(4096, 2048),
        no(2048, 4096),
        no(4096, 4096),
    )
    simple("mv bf16", torch.mv, no(4096, 2048), no(2048))
    simple("dot fp32", torch.dot, no(1 << 20, dtype=FP32), no(1 << 20, dtype=FP32))
    simple("addmm bias bf16", torch.addmm, no(8192), no(4096, 2048), no(2048, 8192))
    simple(
        "addmm bias fp32",
        torch.addmm,
        no(4096, dtype=FP32),
        no(4096, 2048, dtype=FP32),
        no(2048, 4096, dtype=FP32),
    )
    simple("addmm matrix bf16", torch.addmm, no(4096, 4096), no(4096, 2048), no(2048, 4096))
    simple(
        "addmm bias times 2",
        lambda c, a, b: torch.addmm(c, a, b, beta=2),
        no(4096),
        no(4096, 2048),
        no(2048, 4096),
    )
    simple("addmm_ bf16", lambda c, a, b: c.addmm_(a, b), no(4096, 4096), no(4096, 2048), no(2048, 4096))
    simple("bmm bf16", torch.bmm, no(32, 1024, 128), no(32, 128, 1024))
    simple("bmm fp32", torch.bmm, no(32, 1024, 128, dtype=FP32), no(32, 128, 1024, dtype=FP32))
    simple("bmm transposed", lambda a, b: torch.bmm(a, b.mT), no(32, 1024, 128), no(32, 1024, 128))
    simple(
        "bmm heads in the middle",
        lambda a, b: torch.bmm(a.transpose(0, 1), b.permute(1, 2, 0)),
        no(1024, 32, 128),
        no(1024, 32, 128),
    )
    simple("bmm every second", lambda a, b: torch.bmm(a[..., ::2], b), no(32, 1024, 256), no(32, 128, 1024))
    simple(
        "bmm expanded batch",
        lambda a, b: torch.bmm(a, b.expand(32, 128, 1024)),
        no(32, 1024, 128),
        no(1, 128, 1024),
    )
    simple("baddbmm bf16", torch.baddbmm, no(32, 1024, 1024), no(32, 1024, 128), no(32, 128, 1024))
    simple("baddbmm one row", torch.baddbmm, no(1, 1, 1024), no(32, 1024, 128), no(32, 128, 1024))
    both("matmul 4d", torch.matmul, yes(2, 16, 1024, 128), yes(2, 16, 128, 1024))
    both("matmul 4d x 2d", torch.matmul, yes(2, 16, 1024, 128), yes(128, 512))
    both("linear bf16", F.linear, yes(4, 1024, 2048), yes(8192, 2048))
    both("linear bias bf16", F.linear, yes(4, 1024, 2048), yes(8192, 2048), yes(8192))
    both(
        "linear bias fp32",
        F.linear,
        yes(4, 1024, 2048, dtype=FP32),
        yes(4096, 2048, dtype=FP32),
        yes(4096, dtype=FP32),
    )
    both("linear bias 2d bf16", F.linear, yes(4096, 2048), yes(8192, 2048), yes(8192))
    both("linear frozen weight", F.linear, yes(4, 1024, 2048), no(8192, 2048))
    both(
        "linear of transposed rows",
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
        yes(1024, 4, 2048),
        yes(4096, 2048),
        yes(4096),
    )
    both(
        "einsum",
        lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b),
        yes(2, 16, 1024, 128),
        yes(2, 16, 1024, 128),
    )
    both("lm_head", F.linear, yes(1, 2048, 2048), yes(128256, 2048))
    both("weight expanded", lambda x, w: torch.mm(x, w.expand(2048, 2048)), yes(4096, 2048), yes(2048, 1))
    both(
        "weight transposed",
        lambda x, w: torch.mm(x, w),
        yes(4096, 2048),
        lambda: yes(4096, 2048)().detach().t().requires_grad_(),
    )


def casted() -> None:
    def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return F.linear(x, w, b)

    def twice(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return F.linear(F.linear(x, w), w)

    def normed(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return F.layer_norm(F.linear(x, w), (2048,)).softmax(-1)

    both(
        "autocast linear",
        linear,
        yes(4, 1024, 2048, dtype=FP32),
        yes(8192, 2048, dtype=FP32),
        yes(8192, dtype=FP32),
    )
    both("autocast one weight twice", twice, yes(4, 1024, 2048, dtype=FP32), yes(2048, 2048, dtype=FP32))
    both("autocast norm and softmax", normed, yes(4, 1024, 2048, dtype=FP32), yes(2048, 2048, dtype=FP32))


_KERNELS = {
    "": None,
    " flash": SDPBackend.FLASH_ATTENTION,
    " efficient": SDPBackend.EFFICIENT_ATTENTION,
    " cudnn": SDPBackend.CUDNN_ATTENTION,
    " math": SDPBackend.MATH,
}


def attend(kernel: SDPBackend | None, **options: Any) -> Callable[..., Tensor]:
    def work(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, *mask, **options)

    return work


def heads(batch: int, number: int, rows: int, size: int, dtype: torch.dtype = BF16) -> Callable[[], Tensor]:
    """Queries, keys or values as a transformer makes them: heads in the middle, seen as heads first."""
    return lambda: yes(batch, rows, number, size, dtype=dtype)().detach().transpose(1, 2).requires_grad_()


def attention() -> None:
    causal: dict[str, Any] = {"is_causal": True}
    qkv = [heads(2, 16, 2048, 128)] * 3
    for suffix, kernel in _KERNELS.items():
        both(f"attention causal{suffix}", attend(kernel, **causal), *qkv)
    dense = [yes(2, 16, 2048, 128)] * 3
    for suffix in (" flash", " efficient", " cudnn"):
        both(f"attention heads first{suffix}", attend(_KERNELS[suffix]), *dense)
    grouped = heads(2, 32, 2048, 128), heads(2, 8, 2048, 128), heads(2, 8, 2048, 128)
    for suffix in ("", " flash", " cudnn", " math"):
        both(f"attention grouped{suffix}", attend(_KERNELS[suffix], enable_gqa=True, **causal), *grouped)
    mask = lambda: torch.ones(2, 1, 1000, 1000, dtype=torch.bool, device="cuda").tril_()  # noqa: E731
    bias = no(2, 1, 1000, 1000)
    odd = [heads(2, 16, 1000, 64)] * 3
    for suffix in ("", " efficient", " cudnn", " math"):
        both(f"attention bool mask{suffix}", attend(_KERNELS[suffix]), *odd, mask)
    both("attention bias", attend(None), *odd, bias)
    both("attention bias efficient", attend(SDPBackend.EFFICIENT_ATTENTION), *odd, bias)
    both("attention bias with gradient", attend(None), *odd, yes(1, 16, 1000, 1000))
    both("attention odd rows", attend(None, **causal), *odd)
    both("attention odd rows flash", attend(SDPBackend.FLASH_ATTENTION, **causal), *odd)
    both("attention odd rows efficient", attend(SDPBackend.EFFICIENT_ATTENTION, **causal), *odd)
    for size in (72, 80, 96, 160, 192, 256):
        both(f"attention head {size}", attend(None, **causal), *[heads(2, 8, 1024, size)] * 3)
    for size in (80, 96, 192, 256):
        both(
            f"attention head {size} flash",
            attend(SDPBackend.FLASH_ATTENTION, **causal),
            *[heads(2, 8, 1024, size)] * 3,
        )
    both("attention head 60", attend(None, **causal), *[heads(2, 8, 1024, 60)] * 3)
    both("attention head 512", attend(None), *[heads(1, 8, 1024, 512)] * 3)
    both("attention fp32", attend(None, **causal), *[heads(2, 16, 1024, 64, FP32)] * 3)
    both("attention fp16", attend(None, **causal), *[heads(2, 16, 1024, 64, HALF)] * 3)
    both("attention dropout", attend(None, dropout_p=0.1), *[heads(2, 16, 1024, 64)] * 3)
    both(
        "attention dropout flash",
        attend(SDPBackend.FLASH_ATTENTION, dropout_p=0.1),
        *[heads(2, 16, 1024, 64)] * 3,
    )
    both(
        "attention dropout efficient",
        attend(SDPBackend.EFFICIENT_ATTENTION, dropout_p=0.1),
        *[heads(2, 16, 1024, 64)] * 3,
    )
    both("attention long", attend(None, **causal), *[heads(1, 16, 16384, 128)] * 3)
    both(
        "attention long flash", attend(SDPBackend.FLASH_ATTENTION, **causal), *[heads(1, 16, 16384, 128)] * 3
    )
    both(
        "attention long efficient",
        attend(SDPBackend.EFFICIENT_ATTENTION, **causal),
        *[heads(1, 16, 16384, 128)] * 3,
    )
    both(
        "attention value size",
        attend(None, **causal),
        heads(2, 16, 1024, 192),
        heads(2, 16, 1024, 192),
        heads(2, 16, 1024, 128),
    )
    both(
        "attention across",
        attend(None),
        heads(2, 16, 512, 64),
        heads(2, 16, 1500, 64),
        heads(2, 16, 1500, 64),
    )
    simple("attention decode", attend(None), no(8, 32, 1, 128), no(8, 32, 4096, 128), no(8, 32, 4096, 128))
    simple(
        "attention decode flash",
        attend(SDPBackend.FLASH_ATTENTION),
        no(8, 32, 1, 128),
        no(8, 32, 4096, 128),
        no(8, 32, 4096, 128),
    )
    simple(
        "attention decode grouped with mask",
        attend(None, enable_gqa=True),
        no(8, 32, 1, 128),
        no(8, 8, 4096, 128),
        no(8, 8, 4096, 128),
        lambda: torch.ones(8, 1, 1, 4096, dtype=torch.bool, device="cuda"),
    )
    simple("attention without gradient", attend(None, **causal), *[no(2, 16, 2048, 128)] * 3)
    simple(
        "attention without gradient flash",
        attend(SDPBackend.FLASH_ATTENTION, **causal),
        *[no(2, 16, 2048, 128)] * 3,
    )
    simple(
        "attention without gradient efficient",
        attend(SDPBackend.EFFICIENT_ATTENTION),
        *[no(2, 16, 2048, 128)] * 3,
    )
    ends = lambda: torch.tensor([0, 700, 1500, 4096], dtype=torch.int32, device="cuda")  # noqa: E731

    def packed(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        forward = torch.ops.aten._flash_attention_forward
        return forward(q, k, v, at, at, 2596, 2596, 0.0, True, False)[0]  # type: ignore[no-any-return]

    both("attention packed", packed, *[yes(4096, 16, 128)] * 3, ends)
    both("attention packed grouped", packed, yes(4096, 16, 128), yes(4096, 4, 128), yes(4096, 4, 128), ends)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return
    options: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in varlen_attn.__annotations__ else {"is_causal": True}
    )
    both(
        "varlen_attn",
        lambda q, k, v, at: varlen_attn(q, k, v, at, at, 2596, 2596, **options),
        *[yes(4096, 16, 128)] * 3,
        ends,
    )


def losses() -> None:
    logits = yes(4096, 128256, dtype=FP32)
    targets = ids(128256, 4096)
    both("cross entropy fp32", F.cross_entropy, logits, targets)
    both("cross entropy bf16", F.cross_entropy, yes(4096, 128256), targets)
    both(
        "cross entropy of bf16 as fp32",
        lambda x, y: F.cross_entropy(x.float(), y),
        yes(4096, 128256),
        targets,
    )
    both(
        "cross entropy smoothed",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        yes(4096, 32000, dtype=FP32),
        ids(32000, 4096),
    )
    both(
        "cross entropy by row",
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        yes(4096, 32000, dtype=FP32),
        ids(32000, 4096),
    )
    both("softmax bf16", lambda x: x.softmax(-1), yes(2, 16, 1024, 1024))
    both("softmax fp32", lambda x: x.softmax(-1), yes(2, 16, 1024, 1024, dtype=FP32))
    both("softmax of bf16 as fp32", lambda x: x.softmax(-1, dtype=FP32), yes(2, 16, 1024, 1024))
    both("softmax and back", lambda x: x.softmax(-1, dtype=FP32).to(BF16), yes(2, 16, 1024, 1024))
    both("softmax over dim 1", lambda x: x.softmax(1), yes(32, 1024, 1024))
    both("log_softmax fp32", lambda x: x.log_softmax(-1), yes(2048, 32000, dtype=FP32))
    both("logsumexp", lambda x: x.logsumexp(-1), yes(2048, 32000, dtype=FP32))
    both(
        "selective log softmax",
        lambda x, y: x.log_softmax(-1).gather(-1, y[:, None]),
        yes(2048, 32000, dtype=FP32),
        ids(32000, 2048),
    )
    both("mse", F.mse_loss, yes(1 << 22, dtype=FP32), no(1 << 22, dtype=FP32))
    both(
        "kl_div",
        lambda x, y: F.kl_div(x, y, log_target=True, reduction="batchmean"),
        yes(2048, 32000, dtype=FP32),
        no(2048, 32000, dtype=FP32),
    )
    both(
        "bce with logits",
        F.binary_cross_entropy_with_logits,
        yes(1 << 20, dtype=FP32),
        no(1 << 20, dtype=FP32),
    )


def indexing() -> None:
    both("embedding bf16", lambda i, w: F.embedding(i, w), ids(128256, 8, 1024), yes(128256, 2048))
    both("embedding few", lambda i, w: F.embedding(i, w), ids(128256, 512), yes(128256, 2048))
    both(
        "embedding padded",
        lambda i, w: F.embedding(i, w, padding_idx=0),
        ids(128256, 8, 1024),
        yes(128256, 2048),
    )
    both("embedding fp32", lambda i, w: F.embedding(i, w), ids(32000, 4, 1024), yes(32000, 1024, dtype=FP32))
    both("index rows", lambda x, i: x[i], yes(8192, 2048), ids(8192, 4096))
    both("index two", lambda x, i, j: x[i, j], yes(2048, 2048), ids(2048, 65536), ids(2048, 65536))
    both("index_select", lambda x, i: x.index_select(0, i), yes(8192, 2048), ids(8192, 4096))
    both("gather", lambda x, i: x.gather(-1, i), yes(2048, 32000), ids(32000, 2048, 16))
    both("masked_fill", lambda x, m: x.masked_fill(m, 0.0), yes(2048, 4096), lambda: no(2048, 4096)() > 1)
    both("where", lambda m, x: torch.where(m, x, 0.0), lambda: no(2048, 4096)() > 1, yes(2048, 4096))
    simple("index_put", lambda x, i, v: x.index_put((i,), v), no(8192, 2048), ids(8192, 4096), no(4096, 2048))
    simple(
        "index_put_ accumulate",
        lambda x, i, v: x.index_put_((i,), v, accumulate=True),
        no(8192, 2048),
        ids(8192, 4096),
        no(4096, 2048),
    )
    simple(
        "index_add_", lambda x, i, v: x.index_add_(0, i, v), no(8192, 2048), ids(8192, 4096), no(4096, 2048)
    )
    simple(
        "scatter_add_",
        lambda x, i, v: x.scatter_add_(0, i, v),
        no(4096, 64),
        ids(4096, 8192, 64),
        no(8192, 64),
    )
    simple(
        "masked_scatter",
        lambda x, m, v: x.masked_scatter(m, v),
        no(4096, 2048),
        lambda: ids(2, 4096, 2048)() > 0,
        no(4096, 2048),
    )
    simple("masked_select", lambda x: x[x > 0], ids(3, 1 << 20))
    simple("nonzero", lambda x: x.nonzero(), ids(2, 1 << 20))
    simple("where one argument", lambda x: torch.where(x > 1), ids(3, 4096, 256))
    simple("sort 1d", torch.sort, ids(1 << 20, 1 << 20))
    simple("sort rows of 128256 fp32", torch.sort, no(8, 128256, dtype=FP32))
    simple("sort rows of 1024", torch.sort, no(512, 1024, dtype=FP32))
    simple("sort rows of 8192", torch.sort, no(64, 8192, dtype=FP32))
    simple("argsort bf16", torch.argsort, no(8, 32000))
    simple("topk 50 of 128256", lambda x: x.topk(50), no(8, 128256, dtype=FP32))
    simple("topk 50 of 128256 bf16", lambda x: x.topk(50), no(1, 128256))
    simple("topk 8 of 128", lambda x: x.topk(8), no(8192, 128))
    simple("topk 2000 of 268569", lambda x: x.topk(2000), no(2, 268569, dtype=FP32))
    simple("argmax", lambda x: x.argmax(-1), no(8, 128256, dtype=FP32))
    simple("cumsum 1d", lambda x: x.cumsum(0), ids(9, 1 << 20))
    simple("cumsum rows", lambda x: x.cumsum(-1), no(8, 128256, dtype=FP32))
    simple("cumsum bool", lambda x: (x > 1).cumsum(-1), ids(3, 8, 4096))
    simple("unique", torch.unique, ids(5000, 1 << 20))
    simple(
        "unique with inverse",
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        ids(5000, 1 << 18),
    )
    simple("unique_consecutive", torch.unique_consecutive, ids(5000, 1 << 18))
    simple("bincount", lambda x: torch.bincount(x, minlength=128), ids(128, 65536))
    simple("multinomial", lambda x: torch.multinomial(x, 1), no(8, 128256, dtype=FP32))
    simple("multinomial several", lambda x: torch.multinomial(x, 4), no(8, 32000, dtype=FP32))
    simple("randperm", lambda: torch.randperm(1 << 20, device="cuda"))
    simple("repeat_interleave", lambda n: torch.repeat_interleave(n), ids(5, 65536))
    simple("one_hot", lambda x: F.one_hot(x, 128), ids(128, 16384))
    simple("isin", torch.isin, ids(5000, 65536), ids(5000, 64))
    simple("searchsorted", torch.searchsorted, lambda: torch.arange(4096, device="cuda"), ids(4096, 65536))
    simple("tril", torch.tril, no(4096, 4096))
    simple("roll", lambda x: x.roll(1, -1), no(4096, 4096))
    simple("flip", lambda x: x.flip(-1), no(4096, 4096))
    simple("cat", lambda a, b: torch.cat([a, b]), no(4096, 2048), no(4096, 2048))
    both("cat last", lambda a, b: torch.cat([a, b], -1), yes(4096, 2048), yes(4096, 2048))
    simple("stack", lambda a, b: torch.stack([a, b]), no(4096, 2048), no(4096, 2048))
    simple("pad", lambda x: F.pad(x, (0, 64)), no(4096, 2048))


def norms() -> None:
    for label, dtype in (("bf16", BF16), ("fp32", FP32)):
        w, b = yes(2048, dtype=dtype), yes(2048, dtype=dtype)
        both(
            f"layer_norm {label}",
            lambda x, w, b: F.layer_norm(x, (2048,), w, b),
            yes(4, 2048, 2048, dtype=dtype),
            w,
            b,
        )
        both(f"rms_norm {label}", lambda x, w: F.rms_norm(x, (2048,), w), yes(4, 2048, 2048, dtype=dtype), w)
    both(
        "layer_norm frozen",
        lambda x, w, b: F.layer_norm(x, (2048,), w, b),
        yes(4, 2048, 2048),
        no(2048),
        no(2048),
    )
    both(
        "layer_norm few rows",
        lambda x, w, b: F.layer_norm(x, (2048,), w, b),
        yes(64, 2048),
        yes(2048),
        yes(2048),
    )
    both(
        "layer_norm many rows",
        lambda x, w, b: F.layer_norm(x, (256,), w, b),
        yes(1 << 17, 256),
        yes(256),
        yes(256),
    )
    both(
        "layer_norm wide",
        lambda x, w, b: F.layer_norm(x, (8192,), w, b),
        yes(4096, 8192),
        yes(8192),
        yes(8192),
    )

    def llama(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    both("rms_norm by hand", llama, yes(4, 2048, 2048), yes(2048))
    both("group_norm", lambda x, w, b: F.group_norm(x, 32, w, b), yes(4, 320, 64, 64), yes(320), yes(320))
    both(
        "group_norm fp32",
        lambda x, w, b: F.group_norm(x, 32, w, b),
        yes(4, 320, 64, 64, dtype=FP32),
        yes(320, dtype=FP32),
        yes(320, dtype=FP32),
    )
    stats = no(256, dtype=FP32), no(256, dtype=FP32)
    affine = yes(256, dtype=FP32), yes(256, dtype=FP32)
    trained = lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True)  # noqa: E731
    both("batch_norm fp32", trained, yes(32, 256, 28, 28, dtype=FP32), *affine, *stats)
    both("batch_norm bf16", trained, yes(32, 256, 28, 28), *affine, *stats)
    both("batch_norm last", trained, last(yes(32, 256, 28, 28, dtype=FP32)), *affine, *stats)
    both(
        "batch_norm eval",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False),
        yes(32, 256, 28, 28, dtype=FP32),
        *affine,
        *stats,
    )


def last(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: make().detach().to(memory_format=torch.channels_last).requires_grad_()


def convolutions() -> None:
    both(
        "conv 3x3 fp32",
        lambda x, w: F.conv2d(x, w, padding=1),
        yes(32, 128, 28, 28, dtype=FP32),
        yes(128, 128, 3, 3, dtype=FP32),
    )
    both("conv 3x3 bf16", lambda x, w: F.conv2d(x, w, padding=1), yes(32, 128, 28, 28), yes(128, 128, 3, 3))
    both(
        "conv 3x3 last bf16",
        lambda x, w: F.conv2d(x, w, padding=1),
        last(yes(32, 128, 28, 28)),
        last(yes(128, 128, 3, 3)),
    )
    both("conv 1x1 bf16", F.conv2d, yes(32, 256, 28, 28), yes(512, 256, 1, 1))
    both(
        "conv 7x7 bf16",
        lambda x, w: F.conv2d(x, w, stride=2, padding=3),
        yes(32, 3, 224, 224),
        yes(64, 3, 7, 7),
    )
    both(
        "conv patches bf16",
        lambda x, w, b: F.conv2d(x, w, b, stride=14),
        yes(8, 3, 336, 336),
        yes(1024, 3, 14, 14),
        yes(1024),
    )
    both(
        "conv patches fp32",
        lambda x, w, b: F.conv2d(x, w, b, stride=16),
        yes(8, 3, 224, 224, dtype=FP32),
        yes(768, 3, 16, 16, dtype=FP32),
        yes(768, dtype=FP32),
    )
    both(
        "conv1d audio bf16",
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        yes(4, 80, 3000),
        yes(1280, 80, 3),
        yes(1280),
    )
    both(
        "conv1d audio wide",
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1),
        yes(4, 1280, 3000),
        yes(1280, 1280, 3),
        yes(1280),
    )
    both(
        "conv1d depthwise",
        lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=2048),
        yes(2, 2048, 2048),
        yes(2048, 1, 4),
        yes(2048),
    )
    both(
        "conv depthwise",
        lambda x, w: F.conv2d(x, w, padding=1, groups=256),
        yes(32, 256, 28, 28),
        yes(256, 1, 3, 3),
    )
    both(
        "conv3d patches",
        lambda x, w: F.conv3d(x, w, stride=(2, 14, 14)),
        yes(1024, 3, 2, 14, 14),
        yes(1280, 3, 2, 14, 14),
    )
    both(
        "conv transposed",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        yes(8, 128, 32, 32),
        yes(128, 64, 2, 2),
    )
    both("max_pool", lambda x: F.max_pool2d(x, 3, 2, 1), yes(32, 64, 112, 112))
    both("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, 1), yes(32, 2048, 7, 7))
    both(
        "interpolate bilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        yes(8, 64, 64, 64),
    )
    both(
        "interpolate bicubic fp32",
        lambda x: F.interpolate(x, size=(32, 32), mode="bicubic"),
        yes(1, 768, 24, 24, dtype=FP32),
    )


def pointwise() -> None:
    both("gelu", F.gelu, yes(4096, 8192))
    both("silu times", lambda a, b: F.silu(a) * b, yes(4096, 8192), yes(4096, 8192))
    both("dropout", lambda x: F.dropout(x, 0.1), yes(4096, 8192))
    both("add broadcast", torch.add, yes(4096, 2048), yes(2048))
    both("mul by a scalar tensor", torch.mul, yes(4096, 2048), yes(1, dtype=BF16))
    both(
        "rotary",
        lambda x, c: x * c + torch.cat((-x[..., 64:], x[..., :64]), -1) * c,
        yes(2, 16, 2048, 128),
        no(2048, 128),
    )
    both(
        "expand and reshape",
        lambda x: x[:, :, None].expand(2, 8, 4, 2048, 128).reshape(2, 32, 2048, 128),
        yes(2, 8, 2048, 128),
    )
    both("transpose and reshape", lambda x: x.transpose(1, 2).reshape(2, 2048, 2048), yes(2, 16, 2048, 128))
    both("chunk and multiply", lambda x: (lambda a, b: a * b)(*x.chunk(2, -1)), yes(4096, 8192))
    simple("to fp32", lambda x: x.float(), no(4096, 8192))
    simple("contiguous of transposed", lambda x: x.t().contiguous(), no(4096, 8192))
    simple("add_ of another type", lambda a, b: a.add_(b), no(4096, 2048, dtype=FP32), no(4096, 2048))
    simple("from the host", lambda x: x.cuda(), lambda: torch.zeros(1024, 4096))
    simple("from the host transposed", lambda x: x.t().cuda(), lambda: torch.zeros(1024, 4096))
    simple("from the host to bf16", lambda x: x.to("cuda", BF16), lambda: torch.zeros(1024, 4096))
    simple("to the host", lambda x: x.cpu(), no(1024, 4096))
    simple("to the host transposed", lambda x: x.t().cpu(), no(1024, 4096))
    simple("to the host as fp32", lambda x: x.to("cpu", FP32), no(1024, 4096))
    simple(
        "copy_ from the host to bf16",
        lambda x, y: x.copy_(y),
        no(1024, 4096),
        lambda: torch.zeros(1024, 4096),
    )
    simple("item", lambda x: x.sum().item(), no(1024))
    simple("equal", torch.equal, no(4096, 2048), no(4096, 2048))
    simple("allclose", torch.allclose, no(4096, 2048), no(4096, 2048))
    simple("isfinite all", lambda x: x.isfinite().all(), no(4096, 2048))


def reductions() -> None:
    both("sum of all fp32", torch.sum, yes(1 << 26, dtype=FP32))
    both("sum of all bf16", torch.sum, yes(4096, 8192))
    both("mean of all", torch.mean, yes(4096, 8192))
    both("sum over rows", lambda x: x.sum(0), yes(8192, 2048))
    both("sum over rows, few columns", lambda x: x.sum(0), yes(1 << 20, 16))
    both("sum over columns", lambda x: x.sum(-1), yes(8192, 2048))
    both("sum over two", lambda x: x.sum((0, 1)), yes(4, 2048, 8192))
    both("mean over columns fp32", lambda x: x.pow(2).mean(-1, keepdim=True), yes(4, 2048, 2048, dtype=FP32))
    both("norm of all", torch.linalg.vector_norm, yes(1 << 26))
    both("var", lambda x: x.var(-1), yes(4096, 2048, dtype=FP32))
    simple("sum bf16 in fp32", lambda x: x.sum(dtype=FP32), no(4096, 8192))
    simple("amax of all", lambda x: x.amax(), no(4096, 8192))
    simple("max over rows", lambda x: x.max(0), no(8192, 2048))
    simple("argmax of all", torch.argmax, no(4096, 8192))
    simple("any", torch.any, lambda: no(4096, 8192)() > 1)
    simple("std of all", torch.std, no(1 << 24, dtype=FP32))
    simple("all of rows", lambda x: x.all(-1), lambda: no(4096, 8192)() > 0)
    simple("count_nonzero", torch.count_nonzero, ids(2, 1 << 20))
    simple("foreach_norm", lambda *x: torch._foreach_norm(x), *[no(2048, 2048)] * 24)


def optimizers() -> None:
    def stepping(make: Callable[[Any], Any], dtype: torch.dtype, before: int) -> Callable[[], Work]:
        def ready() -> Work:
            weights = [yes(2048, 2048, dtype=dtype)() for _ in range(12)] + [yes(2048, dtype=dtype)()]
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer = make(weights)
            for _ in range(before):
                optimizer.step()
            return lambda: optimizer.step()

        return ready

    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    kinds: dict[str, Callable[[Any], Any]] = {
        "adamw": adamw,
        "adamw fused": lambda w: adamw(w, fused=True),
        "adamw for loop": lambda w: adamw(w, foreach=False),
        "sgd momentum": lambda w: sgd(w, 0.1, momentum=0.9),
        "adafactor": lambda w: torch.optim.Adafactor(w),
    }
    for name, make in kinds.items():
        case(f"{name} first step", stepping(make, FP32, 0))
        case(f"{name} step", stepping(make, FP32, 1))
    case("adamw bf16 step", stepping(adamw, BF16, 1))
    case("adamw fused bf16 step", stepping(kinds["adamw fused"], BF16, 1))

    def clipping(foreach: bool | None) -> Callable[[], Work]:
        def ready() -> Work:
            weights = [yes(2048, 2048)() for _ in range(12)]
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            return lambda: nn.utils.clip_grad_norm_(weights, 1.0, foreach=foreach)

        return ready

    case("clip_grad_norm_", clipping(None))
    case("clip_grad_norm_ for loop", clipping(False))

    def scaling() -> Work:
        weights = [yes(2048, 2048, dtype=FP32)() for _ in range(12)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = sgd(weights, 0.1)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(torch.ones((), device="cuda"))

        def work() -> None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        return work

    case("grad scaler", scaling)


def algebra() -> None:
    square = lambda: torch.eye(512, device="cuda") * 3 + 1  # noqa: E731
    simple("svd", torch.linalg.svd, square)
    simple("svdvals", torch.linalg.svdvals, square)
    simple("qr", torch.linalg.qr, square)
    simple("cholesky", lambda x: torch.linalg.cholesky(x), lambda: torch.eye(512, device="cuda"))
    simple("inv", torch.linalg.inv, square)
    simple("solve", torch.linalg.solve, square, no(512, 64, dtype=FP32))
    simple("eigh", torch.linalg.eigh, square)
    simple("matrix_norm", torch.linalg.matrix_norm, square)
    simple("rfft", torch.fft.rfft, no(64, 16000, dtype=FP32))
    simple("rfft2", torch.fft.rfft2, no(8, 64, 224, 224, dtype=FP32))
    simple(
        "stft",
        lambda x: torch.stft(x, 400, 160, window=torch.ones(400, device="cuda"), return_complex=True),
        no(4, 480000, dtype=FP32),
    )
    both("cdist", torch.cdist, yes(4, 512, 64, dtype=FP32), yes(4, 512, 64, dtype=FP32))
    both(
        "ctc",
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, torch.full((8,), 500), torch.full((8,), 60)),
        yes(500, 8, 64, dtype=FP32),
        lambda: ids(60, 8, 60)() + 1,
    )
    if hasattr(torch, "_grouped_mm"):
        simple(
            "grouped_mm",
            torch._grouped_mm,
            no(8192, 2048),
            no(8, 2048, 1024),
            lambda: torch.arange(1024, 8193, 1024, dtype=torch.int32, device="cuda"),
        )


class Block(nn.Module):
    """A decoder layer, written out."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        made: dict[str, Any] = {"bias": False, "dtype": dtype, "device": "cuda"}
        self.qkv, self.out = nn.Linear(width, 3 * width, **made), nn.Linear(width, width, **made)
        self.up, self.down = nn.Linear(width, 8 * width, **made), nn.Linear(4 * width, width, **made)
        self.one, self.two = (nn.RMSNorm(width, dtype=dtype, device="cuda") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        gate, up = self.up(self.two(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def steps() -> None:
    def training(
        dtype: torch.dtype, layers: int = 4, kept: bool = True, cast: bool = False, passes: int = 1
    ) -> Callable[[], Work]:
        def ready() -> Work:
            blocks = nn.ModuleList(Block(1024, 8, dtype) for _ in range(layers))
            words = nn.Embedding(32000, 1024, dtype=dtype, device="cuda")
            weights = [*blocks.parameters(), *words.parameters()]
            optimizer = torch.optim.AdamW(weights, fused=True)
            tokens = ids(32000, 4, 1024)()

            def once() -> None:
                with torch.autocast("cuda", BF16) if cast else nullcontext():
                    x = words(tokens)
                    for block in blocks:
                        x = block(x) if kept else checkpoint(block, x, use_reentrant=False)
                    logits = F.linear(x, words.weight).float()
                    loss = F.cross_entropy(logits.view(-1, 32000), tokens.view(-1))
                loss.backward()

            def work() -> None:
                for _ in range(passes):
                    once()
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()

            work()
            return work

        return ready

    case("step bf16", training(BF16))
    case("step fp32", training(FP32))
    case("step autocast", training(FP32, cast=True))
    case("step checkpointed", training(BF16, layers=8, kept=False))
    case("step of two passes", training(BF16, passes=2))

    def chain(free: bool) -> Callable[[], Work]:
        def ready() -> Work:
            weights = [yes(2048, 2048)() for _ in range(4)]
            x = no(2048, 2048)()
            out = x
            for weight in weights:
                out = torch.mm(out, weight).relu()
            grad = torch.ones_like(out)
            return lambda: torch.autograd.backward(out, grad, retain_graph=not free)

        return ready

    case("chain backward", chain(free=True))
    case("chain backward, graph kept", chain(free=False))

    def again() -> Work:
        x, w = no(4096, 2048)(), yes(2048, 2048)()
        w.grad = torch.zeros_like(w)
        out = torch.mm(x, w)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.backward(out, grad)

    case("gradient added to another", again)

    def decoding() -> Work:
        blocks = nn.ModuleList(Block(1024, 8, BF16) for _ in range(4))
        x = no(4, 1024, 1024)()

        def work() -> Tensor:
            with torch.no_grad():
                y = x
                for block in blocks:
                    y = block(y)
                return y

        return work

    case("forward without gradient", decoding)


FIRST: dict[str, Work] = {
    "first mm fp32": lambda: torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda"),
    "first mm bf16": lambda: no(64, 64)() @ no(64, 64)(),
    "first addmm with bias": lambda: F.linear(no(64, 64)(), no(64, 64)(), no(64)()),
    "first bmm": lambda: no(8, 64, 64)() @ no(8, 64, 64)(),
    "first backward": lambda: F.linear(yes(64, 64)(), yes(64, 64)(), yes(64)()).sum().backward(),
    "first conv": lambda: F.conv2d(no(1, 8, 16, 16)(), no(8, 8, 3, 3)()),
    "first svd": lambda: torch.linalg.svd(torch.eye(32, device="cuda")),
}
"""What libraries take once and keep, in this order: measured as what is there when nothing of the work is left."""


def requested(what: str) -> int:
    stats = torch.cuda.memory_stats()
    return int(stats.get(f"requested_bytes.all.{what}", stats[f"allocated_bytes.all.{what}"]))


BLOCKS: list[int] = []
"""What a virtual GPU's blocks did since the record was begun."""


def allocations(virtual: bool) -> list[int]:
    """What the caching allocator did since its record was begun."""
    if virtual:
        return [*BLOCKS]
    found = []
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            found.append(entry["size"])
        elif entry["action"] == "free_requested":
            found.append(-entry["size"])
    return found


def recorded(virtual: bool) -> None:
    if virtual:
        BLOCKS.clear()
    else:
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000)


def measured(ready: Callable[[], Work], virtual: bool) -> dict[str, Any]:
    ready()()  # what libraries keep
    gc.collect()
    work = ready()
    torch.cuda.synchronize()
    recorded(virtual)
    torch.cuda.reset_peak_memory_stats()
    before = requested("current"), torch.cuda.memory_allocated()
    out = work()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"kept": requested("current") - before[0], "peak": requested("peak") - before[0]}
    found["allocated_kept"] = torch.cuda.memory_allocated() - before[1]
    found["allocated_peak"] = torch.cuda.max_memory_allocated() - before[1]
    found["events"] = allocations(virtual)
    del out
    return found


def first(work: Work, virtual: bool) -> dict[str, Any]:
    recorded(virtual)
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    work()
    gc.collect()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"kept": requested("current") - before, "peak": requested("peak") - before}
    found["events"] = allocations(virtual)
    return found


def every_case() -> None:
    for group in (products, casted, attention, losses, indexing, norms, convolutions, pointwise, reductions):
        group()
    for group in (optimizers, algebra, steps):
        group()


def run(pattern: str, virtual: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    torch.zeros(1, device="cuda")
    gc.freeze()
    for name, work in FIRST.items():
        found[name] = first(work, virtual)
    for name, ready in CASES.items():
        if pattern not in name:
            continue
        try:
            found[name] = measured(ready, virtual)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            # A case that this torch or this GPU does not have is said, and the others go on.
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        gc.collect()
        if not virtual and torch.cuda.memory_reserved() > 40 << 30:
            torch.cuda.empty_cache()
    return found


@contextmanager
def virtual_gpu(model: str) -> Iterator[None]:
    from trimtab.gpu_models import nearest
    from trimtab.virtual import virtual_gpus

    sort = nearest(model, "9.0")
    major, minor = (int(part) for part in sort.capability.split("."))
    with virtual_gpus(1, memory="141GiB", name=sort.name, capability=(major, minor), shapes=True), noted():
        yield


@contextmanager
def noted() -> Iterator[None]:
    """Write down every block of a virtual GPU as it comes and goes."""
    from trimtab.virtual.memory import Block as Held
    from trimtab.virtual.state import machine

    made, gone = Held.__init__, Held.__del__

    def counted(block: Held) -> bool:
        """Whether it is on the GPU: not on the host, nor on a device aside, on which things are tried."""
        there = machine()
        return there is not None and block.device is there.at(0)

    def init(block: Held, device: Any, nbytes: int) -> None:
        made(block, device, nbytes)
        if block.nbytes and counted(block):
            BLOCKS.append(nbytes)

    def delete(block: Held) -> None:
        if block.nbytes and counted(block):
            BLOCKS.append(-block.nbytes)
        gone(block)

    Held.__init__, Held.__del__ = init, delete  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Held.__init__, Held.__del__ = made, gone  # type: ignore[method-assign]


LEAST = 1 << 20


def course(events: list[int]) -> list[int]:
    """The blocks that reserve memory of their own (1 MiB and more), as the allocator rounds them."""
    return [e // abs(e) * -(-abs(e) // 512) * 512 for e in events if abs(e) >= LEAST]


def compare(found: dict[str, Any], other: dict[str, Any], everything: bool, events: bool) -> int:
    """Print where the prediction is off by more than 2 % of the peak and 16 KiB; the number of such cases."""
    print(f"{'case':<44}{'kept':>14}{'measured':>14}{'peak':>14}{'measured':>14}{'of it':>8}")
    off, other_way = 0, []
    for name, there in other.items():
        here = found.get(name)
        if here is None:
            continue
        if "error" in here or "error" in there:
            off += ("error" in here) is not ("error" in there)
            print(f"{name:<44} here: {here.get('error', 'ran')}; there: {there.get('error', 'ran')}"[:200])
            continue
        bound = max(0.02 * there["peak"], 16 << 10)
        wrong = abs(here["peak"] - there["peak"]) > bound or abs(here["kept"] - there["kept"]) > bound
        off += wrong
        if "events" in here and "events" in there:
            other_way += [name] if course(here["events"]) != course(there["events"]) else []
        if wrong or everything:
            ratio = here["peak"] / there["peak"] if there["peak"] else 1.0
            print(
                f"{name:<44}{here['kept']:>14,}{there['kept']:>14,}{here['peak']:>14,}{there['peak']:>14,}{ratio:>8.3f}"
            )
    if events:
        for name in other_way:
            print(name)
            for where, told in (("here ", found[name]), ("there", other[name])):
                print(f"  {where} {' '.join(f'{e / LEAST:+.1f}' for e in course(told['events']))}")
    print(f"{off} of {len(other)} cases are off by more than 2 % and 16 KiB")
    print(f"{len(other_way)} take blocks of 1 MiB and more in another order or of other sizes (--events)")
    return off


def main(cases: Callable[[], None] = every_case) -> int:
    cases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--virtual", action="store_true", help="predict, on a virtual GPU")
    parser.add_argument("--gpu", default="NVIDIA H200", help="the model of the virtual GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a file that another run wrote")
    parser.add_argument(
        "--all", action="store_true", help="with --compare: every case, not only those that differ"
    )
    parser.add_argument("--events", action="store_true", help="with --compare: where blocks come otherwise")
    args = parser.parse_args()
    start = time.perf_counter()
    with ExitStack() as stack:
        if args.virtual:
            stack.enter_context(virtual_gpu(args.gpu))
        found = run(args.only, args.virtual)
        name = torch.cuda.get_device_name()
    taken = time.perf_counter() - start
    print(f"{len(found)} cases on {name}, torch {torch.__version__}, {taken:.1f} s", file=sys.stderr)
    if args.out:
        text = {"gpu": name, "torch": torch.__version__, "seconds": round(taken, 1), "cases": found}
        args.out.write_text(json.dumps(text, indent=1) + "\n")
    if args.compare:
        return min(compare(found, json.loads(args.compare.read_text())["cases"], args.all, args.events), 1)
    if not args.out:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
