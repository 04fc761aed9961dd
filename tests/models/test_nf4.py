"""NF4 against its publication, and against bitsandbytes where that is installed."""

from __future__ import annotations

import pytest
import torch

from trimtab.models import nf4


def test_the_values_are_the_quantiles_that_the_paper_names() -> None:
    """Eight above zero, seven below, zero itself; the outermost at 1 - (1/32 + 1/30) / 2 of a normal distribution."""
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    expected /= expected.abs().max()
    torch.testing.assert_close(torch.tensor(nf4.VALUES, dtype=torch.float64), expected, rtol=0, atol=2e-6)


def test_the_codes_of_scales_are_256_values_from_minus_one_to_one() -> None:
    values = torch.tensor(nf4.scale_values())
    assert len(set(nf4.scale_values())) == 256
    assert values[-1] == 1.0
    assert bool((values.diff() > 0).all())
    assert 0.0 in nf4.scale_values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    weight = (torch.randn(129, 192, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    packed = nf4.pack(weight)
    again = nf4.unpack(packed, torch.float32)
    assert [tensor.shape for tensor in packed] == [torch.Size(s) for s in nf4.sizes(129, 192)]
    exact = weight.float().view(129, -1, nf4.BLOCK).abs().amax(-1, keepdim=True)
    scales = nf4.unpack_scales(packed.scales, packed.groups).view_as(exact)
    # A scale is off by at most half the widest step between its codes, of the largest in its group.
    assert float((scales - exact).abs().max()) <= 0.01 * float(exact.max())
    step = max(b - a for a, b in zip(nf4.VALUES, nf4.VALUES[1:], strict=False)) / 2
    off = (again - weight.float()).abs().view(129, -1, nf4.BLOCK)
    assert bool((off <= step * exact + (scales - exact).abs() + 1e-6).all())
    assert float((again - weight.float()).norm() / weight.float().norm()) < 0.1


def test_the_first_of_two_weights_lies_in_the_upper_half_of_their_byte() -> None:
    weight = torch.zeros(1, 64)
    weight[0, :2] = torch.tensor([1.0, -1.0])
    codes = nf4.pack(weight).codes
    assert codes[0, 0].item() == 0xF0
    assert set(codes[0, 1:].tolist()) == {0x77}


def test_zeros_stay_zeros_and_a_nan_stays_to_be_seen() -> None:
    assert not nf4.unpack(nf4.pack(torch.zeros(2, 128)), torch.float32).any()
    weight = torch.ones(2, 128)
    weight[1, 5] = float("nan")
    assert nf4.unpack(nf4.pack(weight), torch.float32).isnan().any()


def test_large_matrices_are_turned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 128, generator=torch.Generator().manual_seed(1))
    whole = nf4.pack(weight)
    made = nf4.unpack(whole, torch.bfloat16)
    monkeypatch.setattr(nf4, "_AT_ONCE", 1000)
    parts = nf4.pack(weight)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(nf4.unpack(parts, torch.bfloat16), made)


def test_only_rows_of_whole_blocks_are_packed() -> None:
    assert nf4.packs(3, 64)
    assert not nf4.packs(3, 96)
    assert not nf4.packs(0, 64)


def test_bitsandbytes_holds_the_same() -> None:
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    codes, state = theirs.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    packed = nf4.pack(weight)
    assert torch.equal(codes.flatten(), packed.codes.flatten())
    assert torch.equal(state.state2.code, torch.tensor(nf4.scale_values()))
    # Half-way between two codes of a scale either may be taken.
    assert int((state.absmax.int() - packed.scales.int()).abs().max()) <= 1
    torch.testing.assert_close(
        theirs.dequantize_4bit(codes, state), nf4.unpack(packed, torch.float32), rtol=0.02, atol=0
    )
