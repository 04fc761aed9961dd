"""The stand-in for another BLAS does what it says: a row's last bits depend on how many rows there are, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import other_blas
import trimtab

ROWS = range(1, 9)


@pytest.fixture(autouse=True)
def _other_blas() -> Iterator[None]:
    before = str(torch.library.get_kernel("aten::mm", "CPU"))
    with other_blas.other_blas():
        yield
    assert str(torch.library.get_kernel("aten::mm", "CPU")) == before, "afterwards all is as it was"


def different(rows: list[Tensor]) -> int:
    return len({row.detach().cpu().numpy().tobytes() for row in rows})


def test_a_rows_bits_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    data, layer = torch.randn(8, 32), nn.Linear(32, 64)
    stack, other = torch.randn(8, 3, 32), torch.randn(8, 32, 16)
    kinds = {
        "addmm": [layer(data[:n])[0] for n in ROWS],
        "mm": [F.linear(data[:n], layer.weight)[0] for n in ROWS],
        "bmm": [torch.bmm(stack[:n], other[:n])[0] for n in ROWS],
        "baddbmm": [torch.baddbmm(torch.ones(1), stack[:n], other[:n])[0] for n in ROWS],
        "out": [torch.mm(data[:n], layer.weight.detach().T, out=torch.empty(n, 64))[0] for n in ROWS],
        "convolution": [F.conv1d(stack[:n].mT, torch.ones(4, 32, 1) / 3)[0] for n in ROWS],
    }
    with torch.inference_mode():
        kinds["inference"] = [layer(data[:n])[0] for n in ROWS]
    assert {name: different(rows) > 4 for name, rows in kinds.items()} == dict.fromkeys(kinds, True)
    for name, rows in kinds.items():
        for row in rows:
            torch.testing.assert_close(row, rows[0], msg=name)


def test_the_same_product_has_the_same_bits_and_the_right_value() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(7, 32), torch.randn(32, 5)
    assert torch.equal(left @ right, left @ right)
    torch.testing.assert_close(left @ right, (left.double() @ right.double()).float())
    # Summed in fp32 and rounded once, as a BLAS does it.
    half = left.bfloat16() @ right.bfloat16()
    assert torch.equal(half, (left.bfloat16().float() @ right.bfloat16().float()).bfloat16())
    start = torch.full((7, 5), torch.nan)
    torch.testing.assert_close(start.addmm_(left, right, beta=0, alpha=2), 2 * left @ right)
    assert (torch.arange(6).view(2, 3) @ torch.ones(3, 1, dtype=torch.long)).tolist() == [[3], [12]]


def test_gradients_go_through_it() -> None:
    torch.manual_seed(0)
    data, layer = torch.randn(8, 32), nn.Linear(32, 64)
    slopes = []
    for n in ROWS:
        some = data[:n].clone().requires_grad_()
        layer(some).square().sum().backward()
        slopes.append(some.grad[0] if some.grad is not None else some)
    assert different(slopes) > 4
    for slope in slopes:
        torch.testing.assert_close(slope, slopes[0])


def test_virtual_gpus_compute_with_it() -> None:
    torch.manual_seed(0)
    data, weight = torch.randn(8, 32), torch.randn(64, 32)
    here = [F.linear(data[:n], weight)[0] for n in ROWS]
    with trimtab.virtual_gpus(1):
        there = [F.linear(data.cuda()[:n], weight.cuda())[0].cpu() for n in ROWS]
        assert different(there) > 4
        assert all(map(torch.equal, here, there))


def test_a_process_that_a_test_starts_has_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mark = 'theirs'\n")
    program = (
        "import sys; print(sys.mark, 'torch' in sys.modules); import torch; torch.manual_seed(0);"
        "x, w = torch.randn(8, 32), torch.randn(32, 64);"
        "print(len({(x[:n] @ w)[0].numpy().tobytes() for n in range(1, 9)}) > 4)"
    )
    site = Path(other_blas.__file__).with_name("other_blas_in_children")
    paths = os.pathsep.join([str(site), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": paths, "TRIMTAB_OTHER_BLAS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["theirs", "False", "True"]
