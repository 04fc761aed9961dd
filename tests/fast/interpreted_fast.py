"""The Triton kernels of the fast parts against plain code in fp64; run by Triton's interpreter or on a GPU."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.fast.kernels.cross_entropy import cross_entropy
from trimtab.fast.kernels.nf4 import unpack
from trimtab.fast.lora import Adapter
from trimtab.fast.mlp import _Weights, fused_mlp
from trimtab.models import nf4


def close(found: torch.Tensor, expected: torch.Tensor, off: float) -> None:
    apart = float((found.double() - expected).norm() / expected.norm())
    assert apart < off, f"{apart} of its size apart"


def check_mlp(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    ways: tuple[bool, ...] = (True, False),
) -> None:
    """`sizes`: rows, width, columns and rank; `ways`: with both weights in one piece, or each by itself."""
    rows, width, columns, rank = sizes
    off = 2e-3 if dtype == torch.float16 else 2e-2
    for joined in ways:
        frozen = [torch.randn(columns, width) / width**0.5 for _ in range(2)]
        frozen.append(torch.randn(width, columns) / columns**0.5)
        frozen = [weight.to(device, dtype) for weight in frozen]
        small = [
            (
                torch.randn(rank, weight.shape[1], device=device) * 0.1,
                torch.randn(len(weight), rank, device=device),
            )
            for weight in frozen
        ]
        x, slope = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))

        wide = x.double().requires_grad_()
        pairs = [tuple(part.double().requires_grad_() for part in pair) for pair in small]

        def layer(
            v: torch.Tensor, which: int, frozen: list[torch.Tensor] = frozen, pairs: list = pairs
        ) -> torch.Tensor:
            a, b = pairs[which]
            return v @ frozen[which].double().T + 0.5 * (v @ a.T) @ b.T

        expected = layer(F.silu(layer(wide, 0)) * layer(wide, 1), 2)
        expected.backward(slope.double())

        ours = x.clone().requires_grad_()
        adapters = [
            Adapter(a.clone().requires_grad_(), b.clone().requires_grad_(), 0.5, nn.Identity())
            for a, b in small
        ]
        both = torch.cat(frozen[:2]) if joined else None
        made = fused_mlp(ours, _Weights(frozen[0], frozen[1], frozen[2], both), adapters)
        made.backward(slope)
        close(made, expected, off)
        assert ours.grad is not None
        assert wide.grad is not None
        close(ours.grad, wide.grad, off)
        for adapter, pair in zip(adapters, pairs, strict=True):
            for found, wanted in zip((adapter.a, adapter.b), pair, strict=True):
                close(found.grad, wanted.grad, off)


def check_cross_entropy(device: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    logits = (torch.randn(rows, columns, device=device) * 2).to(dtype)
    labels = torch.randint(0, columns, (rows,), device=device)
    labels[0] = -100
    labels[1] = logits[1].argmax()
    for softcap in (None, 3.0):
        exact = logits.double().requires_grad_()
        scores = exact * 0.7
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        expected = F.cross_entropy(scores, labels, reduction="none", ignore_index=-100)
        expected.sum().backward()
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1) * (labels >= 0)
        slopes = logits.clone()
        losses, correct, found = cross_entropy(slopes, labels, scale=0.7, softcap=softcap, gradient=True)
        close(losses, expected, 1e-5)
        close(found, entropy, 1e-5)
        assert exact.grad is not None
        close(slopes, exact.grad, 1e-2)
        assert torch.equal(correct.bool(), (scores.argmax(-1) == labels))
        kept = logits.clone()
        again, *_ = cross_entropy(kept, labels, scale=0.7, softcap=softcap, gradient=False)
        assert torch.equal(kept, logits)
        assert torch.equal(again, losses)


def check_nf4(device: str, rows: int, columns: int) -> None:
    packed = nf4.pack(torch.randn(rows, columns, device=device) * 0.02)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        exact = nf4.unpack(packed, torch.float32)
        # Triton's interpreter cuts to bf16 where a GPU rounds.
        torch.testing.assert_close(unpack(packed, dtype).float(), exact, rtol=1e-2, atol=1e-6)
    close(unpack(packed, torch.float32), exact.double(), 1e-6)


def main(device: str) -> None:
    torch.manual_seed(0)
    on_gpu = device != "cpu"
    mlp = {(33, 24, 140, 16): (True, False), (20, 16, 40, 3): (True,), (18, 16, 40, 48): (False,)}
    for sizes, ways in mlp.items():
        if on_gpu:
            check_mlp(device, torch.float16, sizes)
            check_mlp(device, torch.bfloat16, sizes)
        else:  # interpreted: it takes seconds for each, and has no products in bf16
            check_mlp(device, torch.float16, sizes, ways)
    if on_gpu:
        check_mlp(device, torch.bfloat16, (2051, 512, 1408, 16))
    check_cross_entropy(device, torch.bfloat16, 5, 5000)
    check_cross_entropy(device, torch.float16, 3, 100)
    for rows, columns in ((3, 64), (37, 192)):
        check_nf4(device, rows, columns)
    print("all agree")


if __name__ == "__main__":
    main(sys.argv[1])
