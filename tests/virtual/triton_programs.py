"""Triton kernels for tests: Triton reads a kernel's source from its file, so they stand in one of their own."""

import triton
import triton.language as tl
from triton.language import load
from triton.language.extra import libdevice

SCALE = tl.constexpr(3)


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    tl.store(out + at, tl.load(x + at, mask=live) + tl.load(y + at, mask=live), mask=live)


@triton.jit
def _scaled(x, shift):
    return x * SCALE + shift


@triton.jit
def rows(x, out, width, shift, BLOCK: tl.constexpr):
    """A helper, a library function, reductions by axis and whole, a scan, a method, a name that was imported."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    live = at < width
    values = load(x + row * width + at, mask=live, other=0.0).to(tl.float32)
    best = tl.argmax(tl.where(live, values, float("-inf")), axis=0)
    made = _scaled(values, shift) + libdevice.tanh(values) + tl.cumsum(values, axis=0) + values.sum() + best
    tl.store(out + row * width + at, made, mask=live)


@triton.jit
def apart(x, out, lengths, BLOCK: tl.constexpr):
    """Programs that go different ways, in place: a return, and loops of different lengths."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    at = tl.arange(0, BLOCK)
    before = tl.load(x + row * BLOCK + at)
    tl.store(x + row * BLOCK + at, before + 1)
    if length == 0:
        return
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(length):
        total += before
    tl.store(out + row * BLOCK + at, total)
    tl.atomic_add(out + tl.num_programs(0) * BLOCK, 1.0)


@triton.autotune(
    configs=[triton.Config({"BLOCK": size}) for size in (16, 32)], key=["n"], reset_to_zero=["out"]
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n, other=0.0)
    tl.atomic_add(out + at, values, mask=at < n)


@triton.jit
def product(a, b, out, m, n, k, SIZE: tl.constexpr):
    """Pointers to blocks."""
    row, column = tl.program_id(0), tl.program_id(1)
    left = tl.make_block_ptr(a, (m, k), (k, 1), (row * SIZE, 0), (SIZE, SIZE), (1, 0))
    right = tl.make_block_ptr(b, (k, n), (n, 1), (0, column * SIZE), (SIZE, SIZE), (1, 0))
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for _ in range(0, k, SIZE):
        one = tl.load(left, boundary_check=(0, 1), padding_option="zero")
        two = tl.load(right, boundary_check=(0, 1), padding_option="zero")
        total += tl.dot(one, two)
        left = tl.advance(left, (0, SIZE))
        right = tl.advance(right, (SIZE, 0))
    made = tl.make_block_ptr(out, (m, n), (n, 1), (row * SIZE, column * SIZE), (SIZE, SIZE), (1, 0))
    tl.store(made, total.to(out.dtype.element_ty), boundary_check=(0, 1))


@triton.jit
def described(source, target, SIZE: tl.constexpr):
    """Descriptors of tensors."""
    row = tl.program_id(0) * SIZE
    target.store([row, 0], source.load([row, 0]) * 2)


@triton.jit
def in_assembly(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    made = tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + at, made, mask=at < n)


@triton.jit
def beyond(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def for_ever(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    for _ in range(1_000_000_000):
        values += 1
    tl.store(out + at, values)
