"""flex_attention, TorchScript, eight-bit numbers and classes of tensors of a program's own, on virtual GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trimtab.virtual import virtual_gpus
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.tensor import is_virtual, payload_of

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_with_gradients(compiled: bool) -> None:
    torch.manual_seed(0)
    made = [torch.randn(1, 2, 32, 16) for _ in range(3)]
    bias = torch.randn(2, 32, 32)
    leaves = [tensor.clone().requires_grad_() for tensor in (*made, bias)]
    hidden = torch.zeros(32, 32).masked_fill(~torch.ones(32, 32).tril().bool(), float("-inf"))
    expected = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=leaves[3] + hidden)
    expected.square().sum().backward()
    with virtual_gpus(1):
        q, k, v, own = (tensor.cuda().requires_grad_() for tensor in (*made, bias))
        mask = create_block_mask(causal, None, None, 32, 32)
        assert mask.kv_num_blocks.is_cuda
        attend: Any = torch.compile(flex_attention) if compiled else flex_attention
        out = attend(q, k, v, score_mod=lambda s, b, h, i, j: s + own[h, i, j], block_mask=mask)
        out.square().sum().backward()
        assert torch.allclose(payload_of(out), expected, atol=1e-5)
        for one, other in zip((q, k, v, own), leaves, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.allclose(payload_of(one.grad), other.grad, atol=1e-4)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert flex_attention(q, k, v).dtype is torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_compiled_flex_attention_of_shapes_has_no_matrix_of_scores(compiled: bool) -> None:
    with virtual_gpus(1, shapes=True):
        q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", requires_grad=True) for _ in range(3))
        mask = create_block_mask(causal, None, None, 512, 512)
        attend: Any = torch.compile(flex_attention) if compiled else flex_attention
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(q, k, v, block_mask=mask)
        result, scores = 2 * 4 * 512 * 64 * 4, 2 * 4 * 512 * 512 * 4
        if compiled:
            assert torch.cuda.memory_allocated() - before == result + 2 * 4 * 512 * 4
        out.sum().backward()
        assert q.grad is not None
        assert (torch.cuda.max_memory_allocated() - before > scores) is not compiled


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_reads_a_bias_of_one_batch_for_all_as_its_compiled_kernel_does() -> None:
    torch.manual_seed(0)
    made, bias = torch.randn(3, 2, 16, 16), torch.randn(1, 16, 16)
    expected = scaled_dot_product_attention(made, made, made, attn_mask=bias)
    with virtual_gpus(1):
        x, own = made.cuda(), bias.cuda()
        out = torch.compile(flex_attention)(x, x, x, score_mod=lambda s, b, h, i, j: s + own[b][i, j])
        assert torch.allclose(payload_of(out), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_reads_a_bias_that_learns_by_one_index_after_the_other() -> None:
    torch.manual_seed(0)
    made, bias = torch.randn(3, 2, 16, 16), torch.randn(3, 1, 16, 16, requires_grad=True)
    expected = scaled_dot_product_attention(made, made, made, attn_mask=bias)
    expected.square().sum().backward()
    with virtual_gpus(1):
        x, own = made.cuda(), bias.detach().cuda().requires_grad_()
        out = torch.compile(flex_attention)(x, x, x, score_mod=lambda s, b, h, i, j: s + own[b][0][i][j])
        out.square().sum().backward()
        assert torch.allclose(payload_of(out.detach()), expected, atol=1e-5)
        assert own.grad is not None
        assert bias.grad is not None
        assert torch.allclose(payload_of(own.grad), bias.grad, atol=1e-4)


def test_a_tensor_inside_a_transform_of_torch_func_is_on_its_gpu() -> None:
    seen: list[Any] = []

    def summed(row: Tensor) -> Tensor:
        seen.append((row.device, row.is_cuda, row.is_cpu, row.is_meta, row.get_device()))
        return (row * torch.tensor([1.0, 2.0], device=row.device) + torch.arange(2, device=row.device)).sum()

    with virtual_gpus(2):
        rows = torch.ones(3, 2, device="cuda:1")
        out, gradients = torch.func.vmap(summed)(rows), torch.func.vmap(torch.func.grad(summed))(rows)
        assert payload_of(out).tolist() == [4.0] * 3
        assert payload_of(gradients).tolist() == [[1.0, 2.0]] * 3
    torch.func.vmap(summed)(torch.ones(3, 2))
    assert seen == [(torch.device("cuda:1"), True, False, False, 1)] * 2 + [
        (torch.device("cpu"), False, True, False, -1)
    ]


def test_operations_on_functions_say_that_they_are_not_simulated() -> None:
    with virtual_gpus(1), pytest.raises(NotSimulated, match="cond"):
        torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2, device="cuda"),))


def test_scripted_modules_move_and_are_loaded(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    x = torch.randn(3, 4)
    expected = net(x)
    with virtual_gpus(2):
        scripted = torch.jit.script(net)
        file = str(tmp_path / "net.pt")
        torch.jit.save(scripted, file)
        moved = scripted.to("cuda:1")
        out = moved(x.to("cuda:1"))
        assert out.device == torch.device("cuda", 1)
        assert torch.allclose(payload_of(out), expected)
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in moved.parameters())
        loaded = torch.jit.load(file, map_location="cuda")
        assert loaded(x.cuda()).is_cuda
        traced = torch.jit.trace(nn.Linear(4, 2).cuda(), x.cuda())
        assert traced(x.cuda()).shape == (3, 2)
        with pytest.raises(NotSimulated, match="save it from the CPU"):
            moved.save(file)


@pytest.mark.parametrize(
    ("refused", "does", "raises"),
    [
        ('"addmm_cuda" not implemented', lambda x, one: x @ x, NotImplementedError),
        ('"abs_cuda" not implemented', lambda x, one: x.abs(), NotImplementedError),
        pytest.param(
            "not implemented for 'Float8_e4m3fn'",
            lambda x, one: x.isfinite(),
            NotImplementedError,
            marks=pytest.mark.skipif(TORCH >= (2, 15), reason="there it is a comparison"),
        ),
        ("row-major and column-major", lambda x, one: torch._scaled_mm(x, x, one, one), RuntimeError),
        ("mat2 shape", lambda x, one: torch._scaled_mm(x, x[:8].t(), one, one), RuntimeError),
        (
            "two Float8_e5m2",
            lambda x, one: torch._scaled_mm(x.to(E5), x.to(E5).t(), one, one),
            ValueError,
        ),
        (
            "trailing dimension of mat1",
            lambda x, one: torch._scaled_mm(x[:, :8].contiguous(), x[:, :8].contiguous().t(), one, one),
            RuntimeError,
        ),
        ("Invalid scaling", lambda x, one: torch._scaled_mm(x, x.t(), one.half(), one.half()), RuntimeError),
    ],
)
def test_eight_bit_numbers_are_refused_as_on_an_h200(
    refused: str, does: Callable[[Tensor, Tensor], Any], raises: type[Exception]
) -> None:
    with virtual_gpus(1):
        x, one = torch.randn(32, 32, device="cuda").to(E4), torch.ones((), device="cuda")
        with pytest.raises(raises, match=refused):
            does(x, one)


def test_eight_bit_products() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, 32).to(E4), torch.randn(16, 32).to(E4)
    expected = a.float() @ b.float().t()
    with virtual_gpus(1):
        one, two = a.cuda(), b.cuda().t()
        scale = torch.full((), 2.0, device="cuda")
        out = torch._scaled_mm(one, two, scale, scale, out_dtype=torch.bfloat16)
        assert torch.allclose(payload_of(out).float(), expected * 4, rtol=1e-2, atol=1e-1)
        rows, columns = torch.rand(7, 1, device="cuda"), torch.rand(1, 16, device="cuda")
        out = torch._scaled_mm(one, two, rows, columns, out_dtype=torch.bfloat16)
        assert torch.allclose(
            payload_of(out).float(), expected * payload_of(rows * columns), rtol=1e-2, atol=1e-1
        )
        out = torch._scaled_mm(
            one, two, rows, columns, bias=torch.ones(16).cuda().bfloat16(), out_dtype=torch.bfloat16
        )
        assert torch.allclose(
            payload_of(out).float(), expected * payload_of(rows * columns) + 1, rtol=1e-2, atol=1e-1
        )
        assert torch.equal(one, one.clone())
        assert one.to(torch.float32).tolist() == a.float().tolist()
    with virtual_gpus(1, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)):
        one, scale = a.cuda(), torch.ones((), device="cuda")
        with pytest.raises(RuntimeError, match=r"compute capability >= 9\.0 or 8\.9"):
            torch._scaled_mm(one, b.cuda().t(), scale, scale)


class Named(Tensor):
    """A class of tensors of a program's own."""


def test_classes_of_a_programs_own_are_made_on_the_cpu() -> None:
    with virtual_gpus(1):
        for made in (Named([1.0, 2.0]), Named(3), Named(torch.ones(2)), torch.ones(2).as_subclass(Named)):
            assert type(made) is Named
            assert made.device.type == "cpu"
        assert (Named([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]
        x = torch.ones(2, device="cuda")
        assert is_virtual(x.as_subclass(Tensor))
        for make in (lambda: x.as_subclass(Named), lambda: Tensor._make_subclass(Named, x)):
            with pytest.raises(NotSimulated, match="Named"):
                make()
    assert Tensor([1.0]).tolist() == [1.0]
    assert "__new__" not in vars(Tensor)
