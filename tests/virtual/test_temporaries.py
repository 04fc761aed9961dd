"""What CUDA's kernels allocate inside an operation: figures that follow from how the kernels work.

Peaks are above what was there before, in bytes; a virtual GPU of an H200's kind unless another is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.virtual import virtual_gpus
from trimtab.virtual.state import Machine
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.workspaces import cublas_bytes

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["values", "shapes"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with virtual_gpus(1, name="NVIDIA H200", shapes=request.param) as made:
        # The workspaces of both threads are there before anything is counted.
        weight = torch.ones(8, 8, device="cuda", requires_grad=True)
        functional.linear(weight, weight, weight[0]).sum().backward()
        del weight
        yield made


def peak(work: Callable[[], Any]) -> tuple[int, int]:
    """What is kept of the work, and the most that it held."""
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    out = work()
    kept, most = requested("current"), requested("peak")
    del out
    return kept - before, most - before


def requested(what: str) -> int:
    """Bytes as they were asked for: the allocator rounds them up."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def full(*size: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.full(size, 0.5, dtype=dtype, device="cuda").requires_grad_(grad)


def test_a_workspace_is_taken_once_by_each_thread_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    for capability, size in (((9, 0), 32 * MIB), ((8, 0), 8519680)):
        with virtual_gpus(1, capability=capability):
            weight = torch.ones(8, 8, device="cuda", requires_grad=True)
            before = requested("current")
            torch.mm(weight.detach(), weight.detach())
            torch.mm(weight.detach(), weight.detach())
            assert requested("current") - before == size
            torch.addmm(weight.detach()[0], weight.detach(), weight.detach())
            assert requested("current") - before == size + MIB
            torch.mm(weight, weight).sum().backward()
            weight.grad = None
            assert requested("current") - before == 2 * size + MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert cublas_bytes((9, 0)) == 8519680


def test_operands_that_cublas_cannot_take_are_copied(machine: Machine) -> None:
    left, right = full(512, 256), full(256, 128)
    result = 512 * 128 * 2
    assert peak(lambda: left @ right) == (result, result)
    assert peak(lambda: left.t().contiguous().t() @ right)[0] == result
    every = full(512, 512)[:, ::2]
    assert peak(lambda: every @ right) == (result, result + 512 * 256 * 2)
    row = full(1, 256).expand(512, 256)
    assert peak(lambda: row @ right) == (result, result + 512 * 256 * 2)
    part = full(512, 512)[:, :256]
    assert peak(lambda: part @ right) == (result, result)


def test_sums_over_rows_leave_their_parts_in_memory(machine: Machine) -> None:
    # 4 results a thread, 32 threads wide and 4 high; 16 blocks of results, each shared by 128 blocks of 16 elements a
    # thread; every thread of a block has 4 places of 4 bytes for each of 2048 results.
    rows = full(8192, 2048)
    assert peak(lambda: rows.sum(0)) == (4096, 4096 + 4 * 2048 * 128 * 32 * 4 + 4 * 16)
    # Along the rows one block sums each row by itself.
    assert peak(lambda: rows.sum(1)) == (16384, 16384)
    # A value and its place are 16 bytes.
    assert peak(lambda: rows.max(0))[1] == 4096 + 16384 + 16 * 2048 * 128 * 32 * 4 + 4 * 16


def test_a_mask_is_summed_as_whole_numbers(machine: Machine) -> None:
    mask = full(64, 1024) > 0
    kept, most = peak(lambda: mask.sum(-1))
    assert (kept, most) == (512, 512 + 64 * 1024 * 8)


def test_softmax_goes_back_by_a_product_and_log_softmax_does_not(machine: Machine) -> None:
    size = 64 * 2048 * 4
    for function, extra in ((torch.softmax, size), (torch.log_softmax, 0)):
        x = full(64, 2048, dtype=FP32, grad=True)
        out = function(x, -1)
        grad = torch.ones_like(out)
        assert peak(lambda: out.backward(grad))[1] == size + extra  # noqa: B023


def test_the_gradient_of_an_embedding_sorts_many_indices(machine: Machine) -> None:
    for number, rows in ((2000, 0), (4000, 4400)):
        table = full(5000, 256, grad=True)
        out = functional.embedding(torch.arange(number, device="cuda"), table)
        grad = torch.ones_like(out)
        _, most = peak(lambda: out.backward(grad))  # noqa: B023
        sums = rows * 256 * 4
        assert sums <= most - 5000 * 256 * 2 < sums + 100 * number, number


def test_gradients_are_added_and_written_in_place(machine: Machine) -> None:
    size = 512 * 512 * 4
    x, w = full(512, 512, dtype=FP32, grad=True), full(512, 512, dtype=FP32)
    y = x * 1.0
    out = y + y @ w
    grad = torch.ones_like(out)
    # The product's gradient, into which the other is added: no third tensor.
    assert peak(lambda: out.backward(grad))[1] == 2 * size
    x.grad = None
    rows = torch.arange(256, device="cuda")
    picked = x[rows]
    grad = torch.ones_like(picked)
    assert peak(lambda: picked.backward(grad))[1] < size + 256 * 100


def test_dropout_keeps_a_byte_an_element(machine: Machine) -> None:
    x = full(512, 512, grad=True)
    size = x.numel()
    assert peak(lambda: functional.dropout(x, 0.1)) == (3 * size, 3 * size)
    kept, most = peak(lambda: nn.functional.dropout(x, 0.1, training=False))
    assert kept == most == 0


def test_rms_norm_keeps_a_number_a_row(machine: Machine) -> None:
    x, w = full(512, 512, grad=True), full(512, grad=True)
    size = x.numel() * 2
    assert peak(lambda: functional.rms_norm(x, (512,), w)) == (size + 512 * 4, size + 512 * 4)


def test_adamw_takes_the_kernels_for_lists(machine: Machine) -> None:
    weights = [full(256, 256, dtype=FP32, grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights)
    optimizer.step()
    # The roots of all second moments at once; one after the other it would be three tensors of one weight.
    assert peak(optimizer.step) == (0, 3 * 256 * 256 * 4)
    fused = torch.optim.AdamW(weights, fused=True)
    fused.step()
    assert peak(fused.step) == (0, 0)


def test_weights_that_a_step_changed_are_known_to_be_changed(machine: Machine) -> None:
    weights = [full(8, 8, dtype=FP32, grad=True) for _ in range(2)]
    loss = (weights[0] @ weights[1]).relu().sum()
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(weights, 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_casts_a_weight_once_and_keeps_it(machine: Machine) -> None:
    x, w = full(64, 256), full(256, 256, dtype=FP32, grad=True)
    before = requested("current")
    with torch.no_grad(), torch.autocast("cuda", BF16):
        torch.mm(x, w)
        torch.mm(x, w)
        assert requested("current") - before == 256 * 256 * 2
    assert requested("current") == before


B, H, S, D = 2, 4, 256, 64
OUT, LSE = B * H * S * D * 2, B * H * S * 4
# Above the three gradients: sums in 32 bits for each query, and for each row; locks of 16 bytes for each tile of 64.
BACK = {
    SDPBackend.CUDNN_ATTENTION: B * H * S * (D + 1) * 4,
    SDPBackend.FLASH_ATTENTION: B * H * S * (D + 1) * 4,
    SDPBackend.EFFICIENT_ATTENTION: B * H * S * (D + 1) * 4 + B * H * (S // 64) * 16,
}


def heads(number: int = H, rows: int = S) -> Tensor:
    return full(B, rows, number, D).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("kernel", BACK, ids=lambda kernel: kernel.name)
def test_attention_counts_what_its_kernel_keeps_and_takes(machine: Machine, kernel: SDPBackend) -> None:
    q, k, v = heads(), heads(), heads()
    attend = functional.scaled_dot_product_attention
    with sdpa_kernel(kernel):
        kept, most = peak(lambda: attend(q, k, v, is_causal=True))
        assert OUT + LSE <= kept == most <= OUT + LSE + 2048
        out = attend(q, k, v, is_causal=True)
    grad = torch.ones_like(q)
    _, most = peak(lambda: out.backward(grad))
    assert abs(most - 3 * OUT - BACK[kernel]) <= 1024


def test_attention_that_drops_weights_keeps_no_scores(machine: Machine) -> None:
    q, k, v = heads(), heads(), heads()
    attend = functional.scaled_dot_product_attention
    kept, most = peak(lambda: attend(q, k, v, dropout_p=0.1))
    assert OUT + LSE <= kept <= most <= OUT + LSE + 2048
    out = attend(q, k, v, dropout_p=0.1)
    grad = torch.ones_like(q)
    _, most = peak(lambda: out.backward(grad))
    assert abs(most - 3 * OUT - BACK[SDPBackend.CUDNN_ATTENTION]) <= 1024


def test_math_that_drops_weights_keeps_a_byte_for_each(machine: Machine) -> None:
    q, k, v = heads(), heads(), heads()
    with sdpa_kernel(SDPBackend.MATH):
        whole, _ = peak(lambda: functional.scaled_dot_product_attention(q, k, v))
        kept, _ = peak(lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    assert abs(kept - whole - B * H * S * S * (4 + 1)) <= 1024


def test_grouped_heads_are_spread_in_the_backward_pass(machine: Machine) -> None:
    q, k, v = heads(), heads(2), heads(2)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grad = torch.ones_like(q)
    _, most = peak(lambda: out.backward(grad))
    assert abs(most - 2 * OUT - BACK[SDPBackend.CUDNN_ATTENTION] - 2 * OUT) <= 1024


def test_rows_and_heads_are_rounded_by_flash_attention(machine: Machine) -> None:
    q, k, v = (full(B, 100, H, 40).transpose(1, 2).requires_grad_() for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(q, k, v)
    grad = torch.ones_like(q)
    _, most = peak(lambda: out.backward(grad))
    assert abs(most - 3 * B * H * 100 * 40 * 2 - B * H * 128 * (64 + 1) * 4) <= 2048


def test_dropout_and_rms_norm_have_the_values_of_the_cpu() -> None:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 6, 32).to(dtype).to(device).requires_grad_()
        w = torch.randn(32).to(dtype).to(device).requires_grad_()
        out = functional.dropout(functional.rms_norm(x, (32,), w, 1e-5), 0.25)
        (out * torch.arange(32, device=device)).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [payload_of(tensor.detach()) for tensor in (out, x.grad, w.grad)]

    for dtype in (BF16, FP32):
        expected = run("cpu", dtype)
        with virtual_gpus(1):
            found = run("cuda", dtype)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), dtype


@pytest.mark.parametrize("free", [True, False])
def test_a_backward_pass_frees_what_was_saved_as_it_goes(machine: Machine, free: bool) -> None:
    size = 512 * 512 * 2
    weights = [full(512, 512, grad=True) for _ in range(3)]
    out = full(512, 512)
    for weight in weights:
        out = (out @ weight).relu()
    grad = torch.ones_like(out)
    kept, most = peak(lambda: out.backward(grad, retain_graph=not free))
    # A gradient for each weight; what was saved goes, the input and two results. The last is still held here.
    assert kept == (3 - 3 if free else 3) * size
    # The gradients of a layer's result, of its product and of its weight.
    assert most == (3 if free else 4) * size


def test_a_second_gradient_is_added_in_place(machine: Machine) -> None:
    x, w = full(512, 512), full(512, 512, grad=True)
    w.grad = torch.zeros_like(w)
    out = x @ w
    grad = torch.ones_like(out)
    assert peak(lambda: out.backward(grad)) == (0, 512 * 512 * 2)


def test_views_and_operations_in_place_allocate_nothing(machine: Machine) -> None:
    x, y = full(512, 512), full(512, 512)
    assert peak(lambda: x.t().unsqueeze(0).expand(4, 512, 512)) == (0, 0)
    assert peak(lambda: x.add_(y).mul_(2).relu_()) == (0, 0)
    assert peak(lambda: x.copy_(y)) == (0, 0)


@pytest.mark.parametrize(
    ("size", "weight", "stride", "dtype", "last", "forward", "backward"),
    [
        # As measured on an H200 (benchmarks/cudnn_memory.py), without the result that the pass leaves.
        ((64, 64, 56, 56), (64, 64, 3, 3), 1, FP32, False, 102_908_051, 104_972_967),
        ((64, 64, 56, 56), (64, 64, 3, 3), 1, FP32, True, 131, 2_065_047),
        ((12, 3, 256, 256), (48, 3, 3, 3), 1, FP32, False, 0, 0),
        ((128, 1024, 14, 14), (512, 1024, 1, 1), 1, FP32, False, 400, 162_529_839),
        ((64, 64, 56, 56), (256, 64, 1, 1), 1, FP32, False, 400, 4_194_704),
        ((128, 256, 56, 56), (512, 256, 1, 1), 2, FP32, False, 411_566_096, 624_951_951),
        ((64, 192, 56, 56), (192, 1, 7, 7), 1, FP32, True, 0, 1_253_002_303),
        ((128, 128, 56, 56), (128, 128, 3, 3), 2, BF16, True, 131, 7_668_375),
        ((4, 32, 96, 96, 96), (32, 32, 3, 3, 3), 1, FP32, False, 906_080_403, 916_175_511),
    ],
)
def test_a_convolution_takes_what_cudnn_takes(
    size: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int,
    dtype: torch.dtype,
    last: bool,
    forward: int,
    backward: int,
) -> None:
    with virtual_gpus(1, name="NVIDIA H200", shapes=True):
        x, w = full(*size, dtype=dtype), full(*weight, dtype=dtype)
        if last:
            x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
        x.requires_grad_(), w.requires_grad_()
        function = functional.conv2d if len(size) == 4 else functional.conv3d
        groups, padding = size[1] // weight[1], weight[-1] // 2
        kept, most = peak(lambda: function(x, w, None, stride, padding, groups=groups))
        assert most - kept == pytest.approx(forward, rel=0.05, abs=MIB)
        out = function(x, w, None, stride, padding, groups=groups)
        grad = torch.ones_like(out)
        kept, most = peak(lambda: torch.autograd.backward(out, grad))
        assert most - kept == pytest.approx(backward, rel=0.05, abs=MIB)


def test_a_large_product_of_pixels_is_turned_around() -> None:
    """As a U-Net's shortcut took it on an H200: both operands once more, with the channels of a pixel together."""
    with virtual_gpus(1, name="NVIDIA H200", shapes=True):
        x, w = full(10, 384, 512, 512, dtype=torch.float16), full(128, 384, 1, 1, dtype=torch.float16)
        kept, most = peak(lambda: functional.conv2d(x, w))
        assert most - kept == pytest.approx(2_684_354_707, abs=MIB)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_linear_layer_adds_its_bias_to_the_product(machine: Machine, grad: bool, by_name: bool) -> None:
    """Where the rows do not lie in one piece no kernel does both: the sum is made in place all the same."""
    x, weight, bias = full(4, 64, 128), full(4096, 128, grad=grad), full(4096, grad=grad)
    last = x[:, -32:]

    def work() -> Tensor:
        if by_name:
            return functional.linear(input=last, weight=weight, bias=bias)
        return functional.linear(last, weight, bias)

    result = 4 * 32 * 4096 * 2
    # One product of all rows, whose weight learns; else one for each of the four.
    copied = last.numel() * 2 * grad
    assert peak(work) == (result + copied, result + copied)
    # A sum of the program's own is another tensor.
    assert peak(lambda: functional.linear(last, weight) + bias)[1] == 2 * result + copied


def test_the_bias_of_a_linear_layer_learns_where_it_is_added_in_place(machine: Machine) -> None:
    x, weight = full(4, 64, 128, dtype=FP32), full(256, 128, dtype=FP32, grad=True)
    bias = full(256, dtype=FP32, grad=True)
    functional.linear(x[:, ::2], weight, bias).sum().backward()
    assert bias.grad is not None
    assert weight.grad is not None
    if not machine.shapes:
        assert (bias.grad == 4 * 32).all()
        assert (weight.grad == 4 * 32 * 0.5).all()
