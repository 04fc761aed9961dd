"""The old tensor types, and recurrent networks, which read lengths on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trimtab.virtual.context import virtual_gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(2):
        yield


def test_old_types_make_tensors_on_the_current_gpu() -> None:
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2]
    with torch.cuda.device(1):
        made = torch.cuda.LongTensor(2, 3)
    assert (made.shape, made.dtype, made.device) == ((2, 3), torch.int64, torch.device("cuda:1"))
    assert isinstance(made, torch.cuda.LongTensor)
    assert not isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert torch.ones(1).type(torch.cuda.DoubleTensor).device.type == "cuda"
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert made.new(4).device == torch.device("cuda:1")
    assert made.new([7]).tolist() == [7]


def test_default_tensor_type() -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert torch.ones(1).device.type == "cuda"
        assert (torch.Tensor([[1.0, 2.0]]).cuda() + torch.Tensor(1, 2).zero_()).tolist() == [[1.0, 2.0]]
        assert torch.Tensor([1e10]).expand(3, 1).device.type == "cuda"
        host = torch.ones(2, device="cpu", dtype=torch.int64)
        assert (torch.Tensor(host).device.type, torch.Tensor(host).dtype) == ("cpu", torch.int64)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(1).device.type == "cpu"
    with torch.device("cuda"):
        assert torch.Tensor([1.0]).device.type == "cpu"


def test_packed_sequences_keep_their_lengths_on_the_cpu() -> None:
    batch = torch.rand(3, 2, 4)
    packed = pack_padded_sequence(batch.cuda(), torch.tensor([3, 2]))
    assert packed.data.device.type == "cuda"
    assert packed.batch_sizes.device.type == "cpu"
    network = torch.nn.LSTM(4, 5).cuda()
    out, lengths = pad_packed_sequence(network(packed)[0])
    expected, _ = pad_packed_sequence(network.cpu()(pack_padded_sequence(batch, torch.tensor([3, 2])))[0])
    torch.testing.assert_close(out.cpu(), expected)
    assert lengths.device.type == "cpu"
    with pytest.raises(RuntimeError, match="'lengths' argument should be a 1D CPU int64 tensor"):
        pack_padded_sequence(batch.cuda(), torch.tensor([3, 2], device="cuda"))


def test_profiling_the_gpu_records_the_host_only() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(4, device="cuda").sum()
    assert any("sum" in event.key for event in profile.key_averages())


def test_numbers_on_the_gpu_are_read_into_old_types_on_the_host() -> None:
    with virtual_gpus(1):
        one = torch.tensor(2.0, device="cuda")
        assert torch.FloatTensor([one, 3]).tolist() == [2.0, 3.0]
        assert torch.Tensor([[one], [one.long()]]).tolist() == [[2.0], [2.0]]
        assert torch.LongTensor([one.long()]).tolist() == [2]
        assert torch.BoolTensor([one > 1, one > 2]).tolist() == [True, False]
        assert torch.ones(1).new([one]).tolist() == [2.0]
        seen = []
        weight = torch.ones(2, device="cuda", requires_grad=True)
        weight.register_hook(lambda gradient: seen.append(torch.FloatTensor([gradient.norm()])))
        (weight * one).sum().backward()
        assert seen[0].tolist() == pytest.approx([8**0.5])
        with pytest.raises(TypeError, match="only integer tensors of a single element"):
            torch.LongTensor([one])
