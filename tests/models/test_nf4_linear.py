"""A layer in NF4 against the plain layer of its unpacked weight: product, gradient, what is kept, and a compiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.models.nf4 import unpack
from trimtab.models.nf4_linear import Nf4Linear, pack_layer


def _pair(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Nf4Linear, nn.Linear]:
    """A packed layer, and a plain one with the weight that it stands for."""
    torch.manual_seed(0)
    plain = nn.Linear(128, 96, bias=bias, dtype=dtype).requires_grad_(False)
    packed = pack_layer(plain)
    plain.weight.data = unpack(packed.packed, dtype)
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradient_are_those_of_the_unpacked_weight(bias: bool, dtype: torch.dtype) -> None:
    packed, plain = _pair(bias, dtype)
    x = torch.randn(2, 5, 128, dtype=dtype)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    made, expected = packed(one), plain(other)
    grad = torch.randn_like(made)
    made.backward(grad)
    expected.backward(grad)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made, expected, **close)
    torch.testing.assert_close(one.grad, other.grad, **close)


def test_nothing_unpacked_is_kept_for_the_backward_pass() -> None:
    packed, _ = _pair()
    kept: list[torch.Tensor] = []
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed(x).sum().backward()
    assert kept
    assert not any(
        t.is_floating_point() and t.numel() >= packed.out_features * packed.in_features for t in kept
    )


def test_an_autocast_makes_the_product_in_its_format() -> None:
    packed, plain = _pair()
    x = torch.randn(3, 128)
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = packed(x), plain(x)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)


def test_casting_a_model_leaves_what_is_packed() -> None:
    packed, _ = _pair()
    before = packed.packed
    packed.to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(before, packed.packed, strict=True))
    assert packed.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_block_gives_the_same_and_keeps_no_unpacked_weight(checkpointed: bool) -> None:
    packed, _ = _pair()
    scale = torch.ones(128, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(packed(x * scale)).square()

    def run(way: object) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = checkpoint(way, x, use_reentrant=False) if checkpointed else way(x)
        out.sum().backward()
        return out.detach(), x.grad

    kept: list[torch.Tensor] = []
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = run(compiled)
    for one, other in zip(found, run(block), strict=True):
        torch.testing.assert_close(one, other)
    assert not any(
        t.is_floating_point() and t.numel() >= packed.out_features * packed.in_features for t in kept
    )


def test_torch_finds_the_operation_whole() -> None:
    packed, _ = _pair()
    x = torch.randn(4, 128, requires_grad=True)
    torch.library.opcheck(
        torch.ops.trimtab.nf4_linear.default,
        (x, *packed.packed),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
