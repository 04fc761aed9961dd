"""In which order kernels take and give back what they need for themselves, among their results.

The courses are those that an H200 with torch 2.11 showed (`benchmarks/op_memory.py`), here of smaller operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.virtual import virtual_gpus
from trimtab.virtual.course import NEXT, RESULT, Course, together
from trimtab.virtual.memory import Block

KIB = 1 << 10
BF16 = torch.bfloat16


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], list[float]]]:
    """The blocks of 1 KiB and more that some work takes, and gives back below nought, in KiB."""
    told: list[float] = []
    made, gone = Block.__init__, Block.__del__

    with virtual_gpus(1, name="NVIDIA H200", shapes=True) as machine:
        device = machine.at(0)
        torch.mm(full(8, 8, grad=False), full(8, 8, grad=False))  # cuBLAS takes its workspace

        def init(block: Block, where: Any, nbytes: int) -> None:
            made(block, where, nbytes)
            if block.device is device and nbytes >= KIB:
                told.append(nbytes / KIB)

        def delete(block: Block) -> None:
            if block.device is device and block.nbytes >= KIB:
                told.append(-block.nbytes / KIB)
            gone(block)

        monkeypatch.setattr(Block, "__init__", init)
        monkeypatch.setattr(Block, "__del__", delete)

        def watch(work: Callable[[], Any]) -> list[float]:
            told.clear()
            out = work()
            found = [*told]
            del out
            return found

        yield watch
        monkeypatch.undo()


def full(*size: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.full(size, 0.5, dtype=dtype, device="cuda").requires_grad_(grad)


def of_backward(out: Tensor) -> Callable[[], Any]:
    grad = torch.ones_like(out)
    return lambda: torch.autograd.backward(out, grad)


def test_a_course_is_gone_through_result_by_result() -> None:
    with virtual_gpus(1) as machine:
        torch.cuda.init()
        device = machine.at(0)
        course = Course((4 * KIB, NEXT, 8 * KIB, -8 * KIB, NEXT, 16 * KIB, RESULT, 2 * KIB), device)
        held = []
        for _ in range(4):
            held.append(torch.cuda.memory_allocated() // KIB)
            course.go_on()
        assert held == [4, 4, 20, 20]
        course.end()
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 22 * KIB


def test_one_block_or_none_is_a_number() -> None:
    assert together(0, 3, 0) == 3
    assert together(0, 0) == 0
    assert together(3, 0, 4) == (3, 4)


def attended(kernel: SDPBackend, heads: int = 2, groups: int = 2, first: bool = False) -> Tensor:
    def made(number: int) -> Tensor:
        if first:
            return full(1, number, 128, 64)
        return full(1, 128, number, 64, grad=False).transpose(1, 2).requires_grad_()

    with sdpa_kernel(kernel):
        return functional.scaled_dot_product_attention(
            made(heads), made(groups), made(groups), is_causal=True, enable_gqa=groups != heads
        )


def test_attention_takes_its_sums_behind_the_gradients(events: Any) -> None:
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    saved = [-1.0]  # the logarithms of the sums
    assert events(of_backward(attended(flash))) == [32, 32, 32, 1, 64, -64, -1, *saved]
    assert events(of_backward(attended(efficient)))[:7] == [32, 32, 32, 1, 64.0625, -1, -64.0625]
    assert events(of_backward(attended(SDPBackend.CUDNN_ATTENTION)))[:5] == [32, 32, 32, 65.25, -65.25]


def test_gradients_of_grouped_heads_are_spread_last(events: Any) -> None:
    found = events(of_backward(attended(SDPBackend.FLASH_ATTENTION, heads=4, groups=1)))
    assert found[:11] == [64, 16, 16, 2, 128, 64, 64, -64, -64, -128, -2]


def test_a_convolution_goes_back_gradient_by_gradient(events: Any) -> None:
    out = functional.conv2d(full(2, 8, 32, 32), full(16, 8, 3, 3), padding=1)
    found = events(of_backward(out))
    source, weight = 32, 2.25
    assert found[0] == source
    at = found.index(weight)
    assert at == 3
    assert found[1] == -found[2] > 0, "what the first takes is given back before the second is made"
    assert found[at + 1] == -found[at + 2] > 0


def test_an_embedding_sums_rows_behind_its_gradient(events: Any) -> None:
    table, words = full(5000, 64), torch.arange(4096, device="cuda")
    found = events(of_backward(functional.embedding(words, table)))
    grown = found.index(625)
    rows = (4096 // 10 + 4096) * 64 * 4 / KIB
    assert found.index(rows) > grown
    assert found[:3] == [32, 32, 32]


def test_sorting_comes_behind_its_results(events: Any) -> None:
    found = events(lambda: full(65536, dtype=torch.float32, grad=False).sort())
    assert found[:4] == [256, 256, 512, 512]
    assert events(lambda: torch.randperm(65536, device="cuda"))[0] == 512


def test_parts_of_a_reduction_come_behind_its_results(events: Any) -> None:
    x = full(1 << 16, 256, grad=False)
    places, parts, _ = events(lambda: x.max(0))
    assert places == 2
    assert parts > 512


def test_dropout_makes_its_mask_first(events: Any) -> None:
    x = full(512, 512)
    assert events(lambda: functional.dropout(x, 0.1)) == [256, 512]


def test_losses_of_elements_are_blocks_of_their_own(events: Any) -> None:
    x, y = full(512, 512, dtype=torch.float32, grad=False), full(512, 512, dtype=torch.float32, grad=False)
    found = events(lambda: functional.binary_cross_entropy_with_logits(x, y))
    assert found[:2] == [1024, 1024]


def test_math_that_drops_weights_holds_what_torch_holds(events: Any) -> None:
    """In C++ operands in 32 bits live until the end, and the weights are made in 16 before the result."""
    q = full(1, 1, 256, 64)
    with sdpa_kernel(SDPBackend.MATH):
        found = events(lambda: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1))
    q_wide, scores, mask, told = 64, 256, 64, 128
    ready = [q_wide] * 5
    softmax = [scores, scores, 64, -64, -scores]
    assert [e for e in found if abs(e) >= 32][: 5 + 5 + 3] == [*ready, *softmax, mask, scores, told]
