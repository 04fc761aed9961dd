"""Scaled dot product attention: which kernels CUDA takes and refuses, and the values of those that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.nn.attention import SDPAParams, SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from trimtab.virtual import virtual_gpus
from trimtab.virtual.tensor import payload_of

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
BF16, HALF = torch.bfloat16, torch.float16
attend: Any = functional.scaled_dot_product_attention

# What an H200 answered (torch 2.11): the settings, and which of FLASH, EFFICIENT and CUDNN computed it.
SEEN: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "float": ({"dtype": torch.float32}, (0, 1, 0)),
    "double": ({"dtype": torch.float64}, (0, 0, 0)),
    "half": ({"dtype": HALF}, (1, 1, 1)),
    "bfloat16": ({}, (1, 1, 1)),
    "100 wide": ({"width": 100}, (1, 0, 0)),
    "256 wide": ({"width": 256}, (1, 1, 1)),
    "257 wide": ({"width": 257}, (0, 0, 0)),
    "264 wide": ({"width": 264}, (0, 1, 0)),
    "float, 36 wide": ({"dtype": torch.float32, "width": 36}, (0, 1, 0)),
    "float, 33 wide": ({"dtype": torch.float32, "width": 33}, (0, 0, 0)),
    "half, 4 wide": ({"dtype": HALF, "width": 4}, (1, 0, 0)),
    "mask": ({"mask": True}, (0, 1, 1)),
    "trained mask": ({"mask": True, "trained": True}, (0, 1, 0)),
    "causal": ({"is_causal": True}, (1, 1, 1)),
    "causal, few queries": ({"is_causal": True, "rows": 5}, (0, 1, 1)),
    "few queries": ({"rows": 5}, (1, 1, 1)),
    "dropout": ({"dropout_p": 0.1}, (1, 1, 1)),
    "groups": ({"heads": 2, "enable_gqa": True}, (1, 0, 1)),
    "float, groups": ({"dtype": torch.float32, "heads": 2, "enable_gqa": True}, (0, 0, 0)),
    "narrow values": ({"values": 32}, (0, 1, 1)),
    "no queries": ({"rows": 0}, (0, 0, 0)),
}


def operands(
    dtype: torch.dtype = BF16,
    width: int = 64,
    values: int = 0,
    heads: int = 4,
    rows: int = 16,
    mask: bool = False,
    trained: bool = False,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    sizes = ((2, 4, rows, width), (2, heads, 16, width), (2, heads, 16, values or width))
    made = [torch.randn(size).to(dtype) for size in sizes]
    if mask:
        options["attn_mask"] = torch.randn(rows, 16).to(dtype).requires_grad_(trained)
    return made, options


def on_gpu(made: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    moved = {
        k: v.detach().cuda().requires_grad_(v.requires_grad) for k, v in options.items() if k == "attn_mask"
    }
    return [tensor.cuda().requires_grad_() for tensor in made], {**options, **moved}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"mask": True, "trained": True}, {"is_causal": True, "scale": 0.3}, {"heads": 2, "enable_gqa": True}],
    ids=["mask", "causal", "groups"],
)
def test_math_that_drops_weights_has_the_cpus_values(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    made, options = operands(dtype=dtype, dropout_p=0.3, **settings)
    leaves = [tensor.clone().requires_grad_() for tensor in made]
    torch.manual_seed(5)
    with sdpa_kernel(MATH):
        expected = attend(*leaves, **options)
    expected.float().square().sum().backward()
    with virtual_gpus(1, name="NVIDIA H200"):
        qkv, there = on_gpu(made, options)
        torch.manual_seed(5)
        with sdpa_kernel(MATH):
            out = attend(*qkv, **there)
        out.float().square().sum().backward()
        assert torch.equal(payload_of(out), expected)
        for one, other in zip(qkv, leaves, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(payload_of(one.grad), other.grad)


@pytest.mark.parametrize("case", SEEN)
def test_kernels_by_name_are_taken_and_refused_as_on_an_h200(case: str) -> None:
    settings, taken = SEEN[case]
    made, options = operands(**settings)
    leaves = [tensor.clone().requires_grad_() for tensor in made]
    expected = attend(*leaves, **options)
    expected.float().sum().backward()
    with virtual_gpus(1, name="NVIDIA H200"):
        for backend, works in zip((FLASH, EFFICIENT, CUDNN), taken, strict=True):
            qkv, there = on_gpu(made, options)
            with sdpa_kernel(backend):
                if not works:
                    with (
                        pytest.warns(UserWarning, match="not used because"),
                        pytest.raises(RuntimeError) as error,
                    ):
                        attend(*qkv, **there)
                    assert str(error.value) == "No available kernel. Aborting execution."
                    continue
                out = attend(*qkv, **there)
            out.float().sum().backward()
            if not options.get("dropout_p"):
                assert torch.allclose(payload_of(out), expected, atol=2e-2), backend
                for one, other in zip(qkv, leaves, strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    assert torch.allclose(payload_of(one.grad), other.grad, atol=4e-2), backend
        qkv, there = on_gpu(made, options)
        with sdpa_kernel(MATH):
            attend(*qkv, **there)
        assert attend(*qkv, **there).shape == expected.shape


def test_lists_of_kernels_switches_and_questions() -> None:
    made, _ = operands(torch.float32)
    with virtual_gpus(1):
        q, k, v = (tensor.cuda() for tensor in made)
        with sdpa_kernel([FLASH, EFFICIENT], set_priority=True):
            assert attend(q, k, v).shape == q.shape
        params = SDPAParams(q, k, v, None, 0.0, False, False)
        asked = torch.backends.cuda
        assert not asked.can_use_flash_attention(params)
        assert asked.can_use_efficient_attention(params)
        assert not asked.can_use_cudnn_attention(params)
        assert asked.is_flash_attention_available()
        asked.enable_math_sdp(False)
        asked.enable_mem_efficient_sdp(False)
        try:
            with (
                pytest.raises(RuntimeError, match="No available kernel"),
                pytest.warns(UserWarning, match="not used because"),
            ):
                attend(q, k, v)
            layer = nn.MultiheadAttention(64, 4, batch_first=True).cuda()
            with (
                pytest.raises(RuntimeError, match="No available kernel"),
                pytest.warns(UserWarning, match="not used because"),
            ):
                layer(q[0], k[0], v[0], need_weights=False)
        finally:
            asked.enable_math_sdp(True)
            asked.enable_mem_efficient_sdp(True)
        with sdpa_kernel(EFFICIENT):
            assert layer(q[0], k[0], v[0], need_weights=False)[0].shape == (4, 16, 64)
        with pytest.raises(
            RuntimeError, match=r"same dtype, but got query\.dtype: float key\.dtype: c10::Half"
        ):
            attend(q, k.half(), v)


@pytest.mark.parametrize("shapes", [False, True])
def test_weights_dropped_inside_multi_head_attention_keep_a_byte_each(shapes: bool) -> None:
    """By one kernel, as CUDA drops them: beside the softmax there are a byte and what is multiplied, and no noise."""
    rows, heads = 512, 4
    kept = {}
    with virtual_gpus(1, shapes=shapes):
        torch.eye(2, device="cuda") @ torch.eye(2, device="cuda")  # cuBLAS takes its workspace
        for dropout in (0.0, 0.1):
            layer = nn.MultiheadAttention(64, heads, dropout=dropout).cuda()
            x = torch.randn(rows, 2, 64, device="cuda")
            before = torch.cuda.memory_allocated()
            out = layer(x, x, x, need_weights=True)[0]
            kept[dropout] = torch.cuda.memory_allocated() - before
            del out
    scores = 2 * heads * rows * rows
    assert abs(kept[0.1] - kept[0.0] - scores * (1 + 4)) <= 1 << 20  # what is left of a block is kept with it


def test_multi_head_attention_that_drops_has_the_values_of_the_cpu() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.5)
    x, bias = torch.randn(5, 2, 8), torch.randn(4, 5, 5)
    torch.manual_seed(7)
    expected, weights = layer(x, x, x, attn_mask=bias)
    expected.sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    with virtual_gpus(1):
        layer.cuda()
        torch.cuda.manual_seed(7)
        moved = x.cuda()
        out, seen = layer(moved, moved, moved, attn_mask=bias.cuda())
        out.sum().backward()
        assert torch.allclose(payload_of(out), expected, atol=1e-6)
        assert torch.allclose(payload_of(seen), weights, atol=1e-6)
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            assert parameter.grad is not None
            assert grad is not None
            assert torch.allclose(payload_of(parameter.grad), grad, atol=1e-5)


def test_older_gpus_have_fewer_kernels() -> None:
    made, _ = operands()
    with virtual_gpus(1, name="Tesla T4", capability=(7, 5)):
        qkv = [tensor.cuda() for tensor in made]
        for backend in (FLASH, EFFICIENT, CUDNN):
            with (
                sdpa_kernel(backend),
                pytest.raises(RuntimeError, match="No av"),
                pytest.warns(UserWarning, match="not used because"),
            ):
                attend(*qkv)
        with sdpa_kernel(EFFICIENT):
            assert attend(*[tensor.half() for tensor in qkv]).dtype is HALF


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases(bias: Any, dtype: torch.dtype) -> None:
    made, _ = operands(dtype, rows=5)
    leaves = [tensor.clone().requires_grad_() for tensor in made]
    expected = attend(*leaves, attn_mask=bias(5, 16)._materialize())
    expected.float().square().sum().backward()
    with virtual_gpus(1):
        qkv, _ = on_gpu(made, {})
        out = attend(*qkv, attn_mask=bias(5, 16))
        out.float().square().sum().backward()
        assert torch.allclose(payload_of(out), expected, atol=2e-2)
        for one, other in zip(qkv, leaves, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.allclose(payload_of(one.grad), other.grad, atol=1e-1)


def test_dropped_weights_are_the_same_in_backward() -> None:
    torch.manual_seed(1)
    with virtual_gpus(1):
        q, k, v = (torch.randn(1, 2, 8, 16, device="cuda", requires_grad=True) for _ in range(3))
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        out = op(q, k, v, None, True, 0.5)[0]
        out.sum().backward()
        # What is not dropped is multiplied: the gradient of the values is that of the weights that were used.
        assert v.grad is not None
        used = torch.linalg.lstsq(payload_of(v.detach()).double().mT, payload_of(out.detach()).double().mT)
        assert torch.allclose(
            payload_of((v.grad * v.detach()).sum()).double(),
            payload_of(out.detach().sum()).double(),
            atol=1e-4,
        )
        assert used.solution.shape == (1, 2, 8, 8)


@pytest.fixture
def _group() -> Iterator[None]:
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        torch.cuda.set_device(0)
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("options", [{"is_causal": True}, {}])
def test_sharded_heads(dtype: torch.dtype, options: dict[str, Any]) -> None:
    made, _ = operands(dtype)
    rows = [tensor.transpose(1, 2).flatten(2).contiguous() for tensor in made]
    leaves = [tensor.clone().requires_grad_() for tensor in rows]

    def through(parts: Any) -> Any:
        """As a model does: heads are split off by views, and put together again."""
        out = attend(*(part.view(2, 16, 4, 64).transpose(1, 2) for part in parts), **options)
        return out.transpose(1, 2).contiguous().view(2, 16, 256)

    expected = through(leaves)
    expected.float().sum().backward()
    mesh = init_device_mesh("cuda", (1,))
    whole = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in rows]
    out = through(whole)
    out.float().sum().backward()
    assert torch.allclose(payload_of(out.full_tensor()), expected, atol=2e-2)
    for one, other in zip(whole, leaves, strict=True):
        assert other.grad is not None
        assert torch.allclose(payload_of(one.grad.full_tensor()), other.grad, atol=4e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_sequences_attend_to_themselves(groups: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8) for heads in (4, 4 // groups, 4 // groups))
    ends = [0, 5, 12]
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    parts = []
    for start, end in itertools.pairwise(ends):
        one = [tensor[start:end].transpose(0, 1)[None] for tensor in leaves]
        parts.append(attend(*one, is_causal=True, enable_gqa=groups > 1)[0].transpose(0, 1))
    expected = torch.cat(parts)
    expected.sum().backward()
    with virtual_gpus(1):
        qkv = [tensor.to(torch.float32).cuda().requires_grad_() for tensor in (q, k, v)]
        at = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out = torch.ops.aten._flash_attention_forward(*qkv, at, at, 7, 7, 0.0, True, False)[0]
        out.sum().backward()
        assert torch.allclose(payload_of(out), expected, atol=1e-5)
        for one, other in zip(qkv, leaves, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.allclose(payload_of(one.grad), other.grad, atol=1e-5)
