"""Mixed precision on virtual GPUs: CUDA's autocast lists and GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.virtual import amp
from trimtab.virtual.context import virtual_gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(2):
        yield


UNSCALE_BFLOAT16 = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_products_run_in_the_lower_precision(dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype=dtype):
        assert (x(2, 3) @ x(3, 4)).dtype is dtype
        assert F.linear(x(2, 3), x(4, 3), x(4)).dtype is dtype
        assert torch.bmm(x(2, 3, 4), x(2, 4, 5)).dtype is dtype
        assert F.conv2d(x(1, 3, 8, 8), x(2, 3, 3, 3)).dtype is dtype
        assert torch.einsum("ij,jk->ik", x(2, 3), x(3, 2)).dtype is dtype
        assert F.scaled_dot_product_attention(x(1, 2, 4, 8), x(1, 2, 4, 8), x(1, 2, 4, 8)).dtype is dtype
    assert (x(2, 3) @ x(3, 4)).dtype is torch.float32


def test_recurrent_layers_are_lowered_whole() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, (hidden, _) = nn.LSTM(4, 4, batch_first=True).cuda()(x(2, 3, 4))
        assert (out.dtype, hidden.dtype) == (torch.bfloat16, torch.bfloat16)
        assert nn.GRU(4, 4).cuda()(x(3, 2, 4))[0].dtype is torch.bfloat16


def test_the_default_lower_precision_is_half() -> None:
    with torch.autocast("cuda"):
        assert (x(2, 3) @ x(3, 4)).dtype is torch.float16


def test_losses_and_norms_run_in_float32() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = x(4, 8, dtype=torch.bfloat16)
        assert half.softmax(-1).dtype is torch.float32
        assert F.layer_norm(half, (8,)).dtype is torch.float32
        assert F.cross_entropy(half, torch.zeros(4, dtype=torch.long, device="cuda")).dtype is torch.float32
        assert F.mse_loss(half, half).dtype is torch.float32
        assert half.exp().dtype is torch.float32
        assert half.sum().dtype is torch.float32
        assert half.norm().dtype is torch.float32
        assert half.norm(dim=1).dtype is torch.float32
        assert torch.softmax(half, -1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert half.relu().dtype is torch.bfloat16


def test_mixed_operands_take_the_widest() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low, full = x(3, dtype=torch.bfloat16), x(3)
        assert torch.addcmul(low, low, low).dtype is torch.bfloat16
        assert torch.addcmul(low, low, full).dtype is torch.float32
        assert torch.dot(low, full).dtype is torch.float32


def test_double_is_left_alone_and_cpu_tensors_too() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x(2, 3, dtype=torch.float64) @ x(3, 4, dtype=torch.float64)).dtype is torch.float64
        assert (torch.rand(2, 3) @ torch.rand(3, 4)).dtype is torch.float32


def test_autocast_for_the_cpu_does_nothing_on_a_gpu() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        left, right = x(2, 3), x(3, 4)
        product = left @ right
        assert product.dtype is torch.float32
        assert (left.cpu() @ right.cpu()).dtype is torch.bfloat16
    torch.testing.assert_close(product.cpu(), left.cpu() @ right.cpu(), rtol=0, atol=0)


def test_binary_cross_entropy_is_refused() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x(3), x(3))


def test_every_rule_of_this_torch_has_a_kernel() -> None:
    assert len(amp.rules()) > 100
    known = {name.removeprefix("aten::").partition(".")[0] for name in amp.rules()}
    assert {"linear", "mm", "softmax", "layer_norm", "addcmul", "binary_cross_entropy"} <= known


def test_values_are_those_of_the_cpu_kernels_in_that_dtype() -> None:
    left, right = x(8, 16), x(16, 8)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = left @ right
    assert torch.equal(got.cpu(), left.cpu().bfloat16() @ right.cpu().bfloat16())


def test_gradients_come_back_in_the_parameters_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x(3, 4))
        assert out.dtype is torch.bfloat16
        loss = out.float().pow(2).mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="the order is the compiler's")
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.linear, [(4, 8), (6, 8), (6,)]),
        (torch.matmul, [(4, 8), (8, 6)]),
        (F.conv1d, [(2, 3, 8), (4, 3, 3), (4,)]),
    ],
)
def test_operands_are_cast_in_the_order_of_torchs_own_autocast(
    function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    """By it their gradients come back, and memory is handed out, in the order of a GPU."""

    def order(device: str) -> list[int]:
        weights = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        with torch.autocast(device, dtype=torch.bfloat16):
            function(*weights).sum().backward()
            made = function(*weights)
        found: dict[int, int] = {}
        waiting = [made.grad_fn]
        while waiting:
            node = waiting.pop()
            for above, _ in node.next_functions:
                if above.name().endswith("AccumulateGrad"):
                    place = next(n for n, w in enumerate(weights) if w is above.variable)
                    found[place] = node._sequence_nr()
                elif above is not None:
                    waiting.append(above)
        return sorted(found, key=found.__getitem__)

    assert order("cuda") == order("cpu")


def test_custom_functions_follow_autocast() -> None:
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            seen.append((value.dtype, torch.is_autocast_enabled("cuda")))
            return value * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * 2

    with torch.autocast("cuda"):
        value = x(2, dtype=torch.float16).requires_grad_()
        Double.apply(value).sum().backward()
    assert seen == [(torch.float32, False)]
    assert value.grad is not None


def step(model: nn.Module, scaler: torch.amp.GradScaler, loss: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_grad_scaler_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).cuda()
    before = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with torch.autocast("cuda"):
        loss = model(x(3, 4)).float().mean()
    step(model, scaler, loss)
    assert scaler.get_scale() == 1024.0
    assert not torch.equal(before, model.weight)


def test_grad_scaler_skips_a_step_that_overflows() -> None:
    model = nn.Linear(4, 1).cuda()
    before = model.weight.detach().clone()
    scaler = torch.cuda.amp.GradScaler(init_scale=1024.0)
    step(model, scaler, model(x(3, 4)).mean() * float("inf"))
    assert scaler.get_scale() == 512.0
    assert torch.equal(before, model.weight)


def test_half_gradients_are_refused() -> None:
    model = nn.Linear(4, 1).cuda().half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step(model, torch.amp.GradScaler("cuda"), model(x(3, 4, dtype=torch.float16)).float().mean())


def test_bfloat16_gradients_are_refused() -> None:
    model = nn.Linear(4, 1).cuda().bfloat16()
    with pytest.raises(NotImplementedError) as caught:
        step(model, torch.amp.GradScaler("cuda"), model(x(3, 4, dtype=torch.bfloat16)).float().mean())
    assert str(caught.value) == UNSCALE_BFLOAT16
    assert caught.value.fault.kind == "scaler-misuse"  # type: ignore[attr-defined]


def test_a_loss_without_a_graph_leaves_nothing_to_scale() -> None:
    model = nn.Linear(4, 1).cuda()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        step(model, torch.amp.GradScaler("cuda"), torch.tensor(1.0, device="cuda", requires_grad=True))
