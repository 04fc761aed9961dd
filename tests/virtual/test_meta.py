"""Meta tensors of the program's own on a machine of virtual GPUs: modules made without memory, filled afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trimtab.virtual import virtual_gpus

pytestmark = pytest.mark.filterwarnings("ignore:.*is a no-op:UserWarning")

MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(2),
    "synchronised batch norm": lambda: nn.SyncBatchNorm(2),
    "instance norm": lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
    "layer norm": lambda: nn.LayerNorm(2),
    "linear": lambda: nn.Linear(2, 2),
    "convolution": lambda: nn.ConvTranspose2d(2, 2, 1),
    "embedding": lambda: nn.Embedding(4, 2, padding_idx=0),
    "lstm": lambda: nn.LSTM(2, 2, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    "weights of classes": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_on_meta_is_filled_on_the_gpu(name: str) -> None:
    with virtual_gpus(2):
        with torch.device("meta"):
            net = MODULES[name]()
        held = net.state_dict()
        assert {value.device.type for value in held.values()} == {"meta"}
        values = {key: torch.ones(v.shape, dtype=v.dtype, device="cuda:1") for key, v in held.items()}
        net.load_state_dict(values)  # nothing is written, with a warning
        assert {value.device.type for value in net.state_dict().values()} == {"meta"}
        filled = copy.deepcopy(net).to_empty(device="cuda:1")
        filled.load_state_dict(values)
        net.load_state_dict(values, assign=True)
        for made in (filled, net):
            found = made.state_dict().values()
            assert {value.device for value in found} == {torch.device("cuda", 1)}
            assert all(bool((value == 1).all()) for value in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0], device="meta"),
        lambda: torch.as_tensor([1.0], device="meta"),
        lambda: torch.empty(2, device="meta").new_tensor([1.0]),
        lambda: torch.Tensor._make_subclass(Tensor, torch.ones(1, device="meta")),
        lambda: nn.init.trunc_normal_(torch.empty(1, 2, device="meta")).data[0],
    ],
)
def test_a_meta_tensor_of_the_program_takes_a_copy_and_gives_none(make: Callable[[], Tensor]) -> None:
    with virtual_gpus(1):
        shape = make()
        values = torch.ones(shape.shape, device="cuda")
        assert shape.copy_(values).is_meta
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
            values.copy_(shape)
        with pytest.raises(
            RuntimeError, match="same device, but found at least two devices, cuda:0 and meta"
        ):
            values + shape


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_sharded_module_made_on_meta_is_filled_from_the_first_rank() -> None:
    with virtual_gpus(2):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        try:
            whole = get_model_state_dict(_net(), options=StateDictOptions(full_state_dict=True))
            with torch.device("meta"):
                net = _net()
            fully_shard(net)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(net, dict(whole), options=options)
            assert {weight.device.type for weight in net.parameters()} == {"cuda"}
            weight, given = net.get_parameter("0.weight"), whole["0.weight"]
            assert isinstance(weight, DTensor)
            assert isinstance(given, Tensor)
            assert torch.equal(weight.full_tensor().cpu(), given)
        finally:
            dist.destroy_process_group()
