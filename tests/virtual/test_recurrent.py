"""Recurrent layers on virtual GPUs: cuDNN goes back through them in training mode only."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import trimtab.virtual as virtual


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_backward_in_eval_mode_is_refused_as_by_cudnn(kind: type[nn.RNNBase], packed: bool) -> None:
    with virtual.virtual_gpus(1):
        layer = kind(3, 4).cuda()
        rows = torch.ones(2, 2, 3, device="cuda")
        given = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([2, 1])) if packed else rows

        def loss() -> torch.Tensor:
            made = layer(given)[0]
            return (made.data if packed else made).sum()

        loss().backward()
        layer.eval()
        with torch.no_grad():
            loss()
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            loss().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_kernels_do_not_mind(device: str) -> None:
    with virtual.virtual_gpus(1):
        layer = nn.LSTM(3, 4).to(device).eval()
        with torch.backends.cudnn.flags(enabled=False) if device == "cuda" else nullcontext():
            layer(torch.ones(2, 2, 3, device=device))[0].sum().backward()
        assert layer.weight_ih_l0.grad is not None


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 5), (nn.GRU, 6), (nn.RNN, 1)])
def test_a_layer_without_values_keeps_what_cudnn_keeps(kind: type[nn.RNNBase], gates: int) -> None:
    with virtual.virtual_gpus(1, shapes=True):
        layer = kind(256, 512, 2, batch_first=True, dropout=0.1).cuda()
        rows = torch.randn(64, 100, 256, device="cuda")
        before = torch.cuda.memory_allocated()
        out, state = layer(rows)
        assert out.shape == (64, 100, 512)
        unit = 64 * 100 * 512 * 4
        kept = torch.cuda.memory_allocated() - before
        # The result, the reserve, the rows with steps first, the states: small.
        least = unit * (1 + 2 * gates + 1) + unit // 2
        assert least <= kept <= least + (1 << 21)
        out.sum().backward()
        assert layer.weight_hh_l1.grad is not None
        del out, state
        layer.eval()
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            layer(rows)[0].sum().backward()
        packed = nn.utils.rnn.pack_padded_sequence(rows, torch.full((64,), 100), batch_first=True)
        layer.train()
        made, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        assert made.shape == (64, 100, 512)
        assert lengths.tolist() == [100] * 64
        made.sum().backward()


@pytest.mark.parametrize(
    ("kind", "dtype", "layers", "sizes", "drop", "expected"),
    [
        # As measured on an H200 (benchmarks/cudnn_memory.py): steps, rows, numbers in, units.
        (nn.LSTM, torch.float32, 1, (128, 128, 1024, 1024), 0.0, 450_364_672),
        (nn.LSTM, torch.float16, 1, (128, 128, 1024, 1024), 0.0, 765_461_760),
        (nn.LSTM, torch.float32, 3, (128, 128, 1024, 1024), 0.5, 611_321_088),
        (nn.LSTM, torch.float32, 1, (128, 128, 1024, 512), 0.0, 325_846_272),
        (nn.GRU, torch.float32, 1, (128, 128, 1024, 1024), 0.0, 438_830_336),
        (nn.RNN, torch.float16, 2, (100, 64, 256, 512), 0.0, 46_531_328),
    ],
)
def test_a_layer_without_values_takes_cudnns_workspace(
    kind: type[nn.RNNBase],
    dtype: torch.dtype,
    layers: int,
    sizes: tuple[int, int, int, int],
    drop: float,
    expected: int,
) -> None:
    steps, rows, into, hidden = sizes
    with virtual.virtual_gpus(1, shapes=True):
        layer = kind(into, hidden, layers, dropout=drop).to("cuda", dtype)
        given = torch.randn(steps, rows, into, device="cuda").to(dtype).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        layer(given)[0]
        out = layer(given)[0]
        workspace = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        assert workspace == pytest.approx(expected, rel=0.02)
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.ones_like(out))
        assert layer.weight_hh_l0.grad is not None


@pytest.mark.parametrize(
    ("kind", "sizes", "ways", "dtype", "workspace", "reserve"),
    [
        (nn.GRU, (512, 1024, 1), 1, torch.float32, 35963136, 16220416),
        (nn.GRU, (512, 1024, 2), 2, torch.float16, 105660672, 37503232),
        (nn.LSTM, (300, 256, 2), 2, torch.float32, 54083840, 15458560),
    ],
)
def test_packed_rows_take_what_they_have_steps_for(
    kind: type[nn.RNNBase],
    sizes: tuple[int, int, int],
    ways: int,
    dtype: torch.dtype,
    workspace: int,
    reserve: int,
) -> None:
    """One row of 96 steps and 47 of 12: measured on an H200 (`benchmarks/cudnn_memory.py`)."""
    lengths = [96] + [12] * 47
    with virtual.virtual_gpus(1, shapes=True):
        drops = 0.3 if sizes[2] > 1 else 0.0
        layer = kind(*sizes, dropout=drops, bidirectional=ways == 2).to("cuda", dtype)
        rows = torch.ones(96, 48, sizes[0], device="cuda", dtype=dtype)
        given = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor(lengths))
        torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats
        before = stats()["requested_bytes.all.current"]
        out = layer(given)
        states = sizes[2] * ways * 48 * sizes[1] * dtype.itemsize * (4 if kind is nn.LSTM else 2)
        made = sum(lengths) * sizes[1] * ways * dtype.itemsize + states
        most = stats()["requested_bytes.all.peak"] - before
        assert most == made + workspace + reserve
        out[0].data.sum().backward()


@pytest.mark.parametrize(("kind", "kept"), [(nn.GRUCell, 3 + 3 + 5 + 2), (nn.LSTMCell, 4 + 4 + 4 + 3)])
def test_a_step_without_values_keeps_what_cudas_kernel_keeps(kind: type[nn.RNNCellBase], kept: int) -> None:
    """Both products, what the kernel notes, the states before and after: as in a GRU's 48 steps on an H200."""
    with virtual.virtual_gpus(1, shapes=True):
        cell = kind(512, 1024).cuda()
        x = torch.randn(128, 512, device="cuda")
        cell(x)  # what libraries keep
        stats = torch.cuda.memory_stats
        before = stats()["requested_bytes.all.current"]
        found = cell(x)
        assert stats()["requested_bytes.all.current"] - before == kept * 128 * 1024 * 4
        state = found[0] if isinstance(found, tuple) else found
        assert state.shape == (128, 1024)
        state.sum().backward()
        assert cell.weight_hh.grad.shape == cell.weight_hh.shape
        assert cell.bias_ih.grad.shape == cell.bias_ih.shape
