"""No write is lost: what C++ or a class of tensors makes inside an operation has values, or it is an error of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

from trimtab.virtual import virtual_gpus
from trimtab.virtual.held_modes import past_dispatch, taken_away
from trimtab.virtual.state import InternalError
from trimtab.virtual.tensor import payload_of


def put(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


# Each gets a tensor of 4 × 3, a mask of that shape, and indices; numbers, masks and lists become tensors in C++.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mask number": lambda x, m, i: put(x, m, 0),
    "mask float": lambda x, m, i: put(x, m, 2.5),
    "index number": lambda x, m, i: put(x, i, 3),
    "pair number": lambda x, m, i: put(x, (i, slice(0, 2)), -1),
    "slice number": lambda x, m, i: put(x, (slice(1, 3), 0), 7),
    "slice tensor": lambda x, m, i: put(x, slice(0, 2), x[2:].clone()),
    "ellipsis": lambda x, m, i: put(x, (..., -1), 5),
    "mask of rows": lambda x, m, i: put(x, m[:, 0], 1),
    "mask negated": lambda x, m, i: put(x, ~m, x.sum()),
    "row": lambda x, m, i: put(x, 1, 9.0),
    "fill_": lambda x, m, i: x.fill_(3),
    "zero_": lambda x, m, i: x.zero_(),
    "masked_fill_": lambda x, m, i: x.masked_fill_(m, -4),
    "masked_fill": lambda x, m, i: x.masked_fill(m, float("inf")),
    "masked_scatter_": lambda x, m, i: x.masked_scatter_(m, x * 2),
    "index_fill_": lambda x, m, i: x.index_fill_(0, i, 6),
    "index_copy_": lambda x, m, i: x.index_copy_(0, i, x[:2] * 3),
    "index_add_": lambda x, m, i: x.index_add_(0, i, x[:2].clone(), alpha=2),
    "index_put_": lambda x, m, i: x.index_put_((i,), x[0].clone(), accumulate=True),
    "scatter_ number": lambda x, m, i: x.scatter_(0, i.view(1, 2), 4.0),
    "scatter_ reduce": lambda x, m, i: x.scatter_(0, i.view(1, 2), 4.0, reduce="multiply"),
    "scatter_add_": lambda x, m, i: x.scatter_add_(0, i.view(1, 2), x[:1, :2].clone()),
    "where number": lambda x, m, i: torch.where(m, x, 0.5),
    "where numbers": lambda x, m, i: torch.where(m, 1.0, 0.5),
    "clamp_": lambda x, m, i: x.clamp_(min=0.1, max=0.9),
    "add_ number": lambda x, m, i: x.add_(2, alpha=3),
    "addcmul_": lambda x, m, i: x.addcmul_(x.clone(), x.clone(), value=0.5),
    "pow": lambda x, m, i: 2**x,
    "remainder": lambda x, m, i: 7 % (x.abs() + 1),
    "lerp_": lambda x, m, i: x.lerp_(torch.ones_like(x), 0.25),
    "cumsum_": lambda x, m, i: x.cumsum_(0),
    "tril_": lambda x, m, i: x.tril_(-1),
    "fill_diagonal_": lambda x, m, i: x.fill_diagonal_(8),
    "nan_to_num_": lambda x, m, i: (x / 0).nan_to_num_(1, 2, 3),
    "eq_": lambda x, m, i: x.eq_(0),
    "logical_not_": lambda x, m, i: x.logical_not_(),
    "out number": lambda x, m, i: torch.add(x, 2, out=torch.empty_like(x)),
    "out where": lambda x, m, i: torch.where(m, x, x * 2, out=torch.empty_like(x)),
    "full_like": lambda x, m, i: torch.full_like(x, 3).add_(x),
    "new_full": lambda x, m, i: x.new_full((2,), 1.5),
    "bucketize": lambda x, m, i: torch.bucketize(x, x.new_tensor([0.0, 0.5])),
    "one_hot": lambda x, m, i: nn.functional.one_hot(i, 4),
    "copy_": lambda x, m, i: x.copy_(torch.tensor(5)),
    "foreach_add_": lambda x, m, i: (torch._foreach_add_([x, x.clone()], 1.5), x)[1],
    "foreach_mul_": lambda x, m, i: (torch._foreach_mul_([x], [2.0]), x)[1],
}


class Reached(TorchDispatchMode):
    """A mode of a program's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plainly": nullcontext,
    "no subclasses": torch._C.DisableTorchFunctionSubclass,
    "below a mode": Reached,
    "inference": torch.inference_mode,
}


def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.arange(12.0).view(4, 3).sub(5).div(4)
    return x.to(device), (x > 0).to(device), torch.tensor([2, 0]).to(device)


@pytest.mark.parametrize("region", REGIONS)
def test_every_write_arrives(region: str) -> None:
    expected = {name: write(*operands("cpu")) for name, write in WRITES.items()}
    with virtual_gpus(1), REGIONS[region]():
        for name, write in WRITES.items():
            made = write(*operands("cuda"))
            assert made.device.type == "cuda", name
            assert torch.equal(payload_of(made), expected[name]), name


class Boxed(Tensor):
    """A class of tensors that a program may have: it holds another, and writes to it in its own rules."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.held = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def opened(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            held = value.held.clone()
            held[held < 0] = 0
            held[[0]] = 1
            return held + torch.tensor(1.0, device="cuda")

        made = func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))
        wrapped = tree_map(lambda value: cls(value) if isinstance(value, Tensor) else value, made)
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


def test_a_class_of_the_programs_own_writes_inside_its_rules() -> None:
    with virtual_gpus(1):
        made = Boxed(torch.tensor([-3.0, -2.0, 4.0], device="cuda")) * 2
        assert made.held.tolist() == [4.0, 2.0, 10.0]


def test_a_shape_of_the_programs_is_refused_as_cuda_does() -> None:
    with virtual_gpus(1):
        shape, scalar = torch.ones(1, 3, device="meta")[0], torch.ones((), device="meta")
        weight = nn.Linear(3, 1, device="meta").weight
        x = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and meta!"):
            x.add_(shape)
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and meta!"):
            x.mul_(scalar)
        for write in (
            lambda: put(x, x > 0, scalar),
            lambda: x.copy_(weight.view(-1).detach()),
            lambda: x.copy_(weight.view(-1)),
            lambda: x.copy_(copy.deepcopy(shape)),
            lambda: x.copy_(shape),
            lambda: x.fill_(scalar),
            lambda: torch.where(x > 0, x, scalar),
        ):
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
                write()
        assert shape.copy_(x) is shape
        assert torch.zeros_like(shape, device="cuda").tolist() == [0.0, 0.0, 0.0]
        assert x.resize_as_(shape).tolist() == [0.0, 0.0, 0.0]


def test_what_was_made_without_values_is_an_error_of_ours() -> None:
    with virtual_gpus(1):
        x = torch.zeros(3, device="cuda")
        with past_dispatch():
            made = torch.ops.aten.full.default([], 1.0, device=torch.device("meta", 0))
        try:
            with taken_away():
                put(x, x == 0, 1.0)
        except InternalError:
            assert x.tolist() == [0.0, 0.0, 0.0]
        else:
            assert x.tolist() == [1.0, 1.0, 1.0]  # from torch 2.15 on its number comes with its value
        x.zero_()
        for use in (lambda: x + made, lambda: x.fill_(made), lambda: put(x, 0, made), lambda: x + (made + 1)):
            with pytest.raises(InternalError, match="not of the program"):
                use()


@pytest.fixture
def _group() -> Iterator[None]:
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_an_embedding_sharded_by_rows_trains_as_the_whole_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10))
    ids = torch.arange(10).view(2, 5)
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    wanted = net[0].weight.grad
    assert isinstance(wanted, Tensor)
    net.zero_grad()
    plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(use_local_output=False)}
    parallelize_module(net.cuda(), init_device_mesh("cuda", (1,)), plan)
    with loss_parallel():
        sharded = nn.functional.cross_entropy(net(ids.cuda()).flatten(0, 1), ids.flatten().cuda())
        sharded.backward()
    assert torch.allclose(payload_of(sharded.full_tensor()), loss.detach())  # type: ignore[attr-defined]
    grad = net[0].weight.grad
    assert isinstance(grad, DTensor)
    assert torch.allclose(payload_of(grad.full_tensor()), wanted)


def test_a_rank_zeroes_the_rows_of_the_others() -> None:
    """A backend that does nothing leaves what rank 1 of 2 gives to the sum: its own rows, and noughts for the rest."""
    with virtual_gpus(2):
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            torch.cuda.set_device(1)
            table = torch.arange(20.0).view(10, 2) + 1
            split = distribute_tensor(table, init_device_mesh("cuda", (2,)), [Shard(0)], src_data_rank=None)
            ids = distribute_tensor(torch.arange(10), split.device_mesh, [Replicate()], src_data_rank=None)
            made = nn.functional.embedding(ids, split).redistribute(placements=[Replicate()])
            assert isinstance(made, DTensor)
            assert torch.equal(payload_of(made.to_local()), torch.cat([torch.zeros(5, 2), table[5:]]))
        finally:
            dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_two_sharded_tensors_are_compared() -> None:
    one = distribute_tensor(torch.ones(4, 2), init_device_mesh("cuda", (1,)), [Shard(0)])
    assert torch.equal(one, one.clone())
    assert not torch.equal(one, one * 2)
