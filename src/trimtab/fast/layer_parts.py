"""The parts of a decoder layer as a processor computes them in few passes: norm and products with their adapters,
rotated heads, the gated MLP. Each is one function of autograd, with its backward pass written out.

A pass over activations costs little where the cache still holds them, and a node of autograd more than a pass: so what
belongs together is one function, sums are made in their place, and layers that read the same input are one product.
Weights, biases and norms are frozen; only the adapters' factors, and what comes in, get a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trimtab.fast.reordered import Reordered, columns

Tensors = Sequence[torch.Tensor]
Gradients = tuple[torch.Tensor | None, ...]


class Norm(NamedTuple):
    """By the root of the mean square."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What it gives, and the mean square of each row."""
        mean = torch.linalg.vector_norm(x, dim=1, keepdim=True).square_().div_(x.shape[1]).add_(self.eps)
        return (x * mean.rsqrt()).mul_(self.weight), mean

    def back(self, gradient: torch.Tensor, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """In the place of what is given."""
        gradient.mul_(self.weight)
        scale = mean.rsqrt()
        # One, but NaN where the mean square is infinite: what overflows must show.
        one = (mean * scale).mul_(scale)
        along = torch.linalg.vecdot(gradient, x).unsqueeze_(1).mul_(one).mul_(scale.pow(3)).div_(x.shape[1])
        return gradient.mul_(scale).addcmul_(x, along, value=-1.0)


class Linears(NamedTuple):
    """Frozen weights that read the same input, each with its adapter: `x @ w.T + scale * x @ a.T @ b.T`."""

    weights: Tensors
    kept: Reordered
    scales: tuple[float, ...]
    biases: Tensors = ()

    def product(self, x: torch.Tensor, small: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """`small`: the factors a of all, then the factors b. And what lies between the two, scaled."""
        downs, ups = small[: len(self.weights)], small[len(self.weights) :]
        narrow = x @ _joined(downs).T
        self._scale(narrow, downs)
        out = self.kept.product(x, *self.weights)
        for part, thin, up in zip(columns(out, self.weights), columns(narrow, downs), ups, strict=True):
            part.addmm_(thin, up.T)
        if self.biases:
            out += torch.cat(tuple(self.biases))
        return out, narrow

    def back(
        self, gradient: torch.Tensor, x: torch.Tensor, narrow: torch.Tensor, small: Tensors, *, wanted: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The gradient of x, where it is wanted, and those of the factors."""
        downs, ups = small[: len(self.weights)], small[len(self.weights) :]
        parts, thin = columns(gradient, self.weights), torch.empty_like(narrow)
        for part, up, into in zip(parts, ups, columns(thin, downs), strict=True):
            torch.mm(part, up, out=into)
        self._scale(thin, downs)
        to_x = None
        if wanted:
            to_x = self.kept.back(gradient, *self.weights).addmm_(thin, _joined(downs))
        to_downs = (thin.T @ x).split([down.shape[0] for down in downs])
        # A processor takes longer for the first of two where that is wide and transposed.
        to_ups = [(n.T @ part).T.contiguous() for n, part in zip(columns(narrow, downs), parts, strict=True)]
        return to_x, [*to_downs, *to_ups]

    def _scale(self, narrow: torch.Tensor, downs: Tensors) -> None:
        if len(set(self.scales)) == 1:
            narrow *= self.scales[0]
        else:
            for part, scale in zip(columns(narrow, downs), self.scales, strict=True):
                part *= scale


def _joined(parts: Tensors) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class Read(torch.autograd.Function):
    """Products of what a norm makes of the rows; comes out in parts of the given widths."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: Norm, linears: Linears, widths: list[int], *small: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normed, mean = norm(x)
        out, narrow = linears.product(normed, small)
        ctx.save_for_backward(x, mean, normed, narrow, *small)
        ctx.norm, ctx.linears = norm, linears
        parts: tuple[torch.Tensor, ...] = out.split(widths, 1)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        x, mean, normed, narrow, *small = ctx.saved_tensors
        to_x, to_small = ctx.linears.back(
            torch.cat(grads, 1), normed, narrow, small, wanted=ctx.needs_input_grad[0]
        )
        if to_x is not None:
            to_x = ctx.norm.back(to_x, x, mean)
        return to_x, None, None, None, *to_small


class Added(torch.autograd.Function):
    """`before + linear(x)`."""

    @staticmethod
    def forward(
        ctx: Any, before: torch.Tensor, x: torch.Tensor, linears: Linears, *small: torch.Tensor
    ) -> torch.Tensor:
        out, narrow = linears.product(x, small)
        ctx.save_for_backward(x, narrow, *small)
        ctx.linears = linears
        return out.add_(before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        x, narrow, *small = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_x, to_small = ctx.linears.back(grad, x, narrow, small, wanted=ctx.needs_input_grad[1])
        return grad, to_x, None, *to_small


class Gated(torch.autograd.Function):
    """`x + down(silu(gate(norm(x))) * up(norm(x)))`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: Norm, opening: Linears, closing: Linears, *small: torch.Tensor
    ) -> torch.Tensor:
        normed, mean = norm(x)
        wide, narrow = opening.product(normed, small[:4])
        gate, up = columns(wide, opening.weights)
        open_ = F.silu(gate)
        both = open_ * up
        out, thin = closing.product(both, small[4:])
        ctx.save_for_backward(x, mean, normed, narrow, wide, open_, both, thin, *small)
        ctx.norm, ctx.opening, ctx.closing = norm, opening, closing
        return out.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        x, mean, normed, narrow, wide, open_, both, thin, *small = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_both, to_last = ctx.closing.back(grad, both, thin, small[4:], wanted=True)
        gate, up = columns(wide, ctx.opening.weights)
        slopes = torch.empty_like(wide)
        to_gate, to_up = columns(slopes, ctx.opening.weights)
        torch.mul(to_both, open_, out=to_up)
        torch.ops.aten.silu_backward.grad_input(to_both.mul_(up), gate, grad_input=to_gate)
        to_x, to_first = ctx.opening.back(slopes, normed, narrow, small[:4], wanted=ctx.needs_input_grad[0])
        if to_x is not None:
            to_x = ctx.norm.back(to_x, x, mean).add_(grad)
        return to_x, None, None, None, *to_first, *to_last


class Turned(torch.autograd.Function):
    """Heads rotated by their places: `x * cos + (-second half, first half) * sin`; x: [batch, tokens, heads, size]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1.0)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1.0)
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        return out, None, None
