"""The virtual tensor as the program sees it: device, views, storage, parameters, copies."""

from __future__ import annotations

import copy
import io
import threading

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.tensor import VirtualParameter, device_of, is_virtual, payload_of


@pytest.fixture(autouse=True)
def _machine():
    with virtual_gpus(2) as machine:
        yield machine


def test_python_sees_a_cuda_tensor() -> None:
    tensor = torch.arange(3.0).to("cuda:1")
    assert tensor.device == torch.device("cuda", 1) == device_of(tensor)
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert not tensor.is_meta
    assert tensor.get_device() == 1
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert repr(tensor) == "tensor([0., 1., 2.], device='cuda:1')"
    assert repr(tensor.double()) == "tensor([0., 1., 2.], device='cuda:1', dtype=torch.float64)"
    assert f"{tensor.sum():.1f}" == "3.0"
    assert is_virtual(tensor)
    assert payload_of(tensor).device.type == "cpu"


def test_values_come_back_to_python() -> None:
    tensor = torch.tensor([1.5, 2.5], device="cuda")
    assert tensor.tolist() == [1.5, 2.5]
    assert tensor[0].item() == 1.5
    assert bool(tensor.sum() > 3)
    assert torch.tensor([tensor[0], tensor[1]]).tolist() == [1.5, 2.5]
    assert [float(value) for value in tensor] == [1.5, 2.5]


def test_numpy_refuses_as_torch_does() -> None:
    tensor = torch.ones(2, device="cuda")
    wording = (
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
    )
    with pytest.raises(TypeError, match=wording.replace("(", r"\(").replace(")", r"\)")):
        tensor.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(tensor)
    with pytest.raises(RuntimeError, match="requires grad"):
        tensor.requires_grad_().numpy()
    assert tensor.numpy(force=True).tolist() == [1, 1]


def test_to_the_same_device_is_the_same_tensor() -> None:
    tensor = torch.ones(2, device="cuda:1")
    assert tensor.to("cuda:1") is tensor
    assert tensor.cuda(1) is tensor
    assert tensor.to(torch.float32) is tensor
    assert tensor.to("cuda:0") is not tensor
    assert tensor.to(torch.empty(1, device="cuda:0")).device.index == 0


def test_views_alias_and_in_place_works_through_them() -> None:
    tensor = torch.zeros(4, device="cuda")
    part = tensor[1:3]
    part.add_(1)
    tensor.view(2, 2)[0].mul_(5)
    assert tensor.tolist() == [0, 5, 1, 0]
    assert part.data_ptr() == tensor.data_ptr() + 4
    assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor.untyped_storage().device == torch.device("cuda:0")
    first, _ = tensor.split(2)
    first.zero_()
    assert tensor.tolist() == [0, 0, 1, 0]


def test_shape_changes_in_place_keep_wrapper_and_payload_together() -> None:
    tensor = torch.zeros(2, 3, device="cuda")
    tensor.t_()
    assert tensor.shape == (3, 2) == payload_of(tensor).shape
    tensor.resize_(4, 4)
    tensor.unsqueeze_(0)
    assert tensor.shape == (1, 4, 4) == (tensor + 1).shape
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(2, 3, device="cuda"), 1, out=out)
    assert out.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_gradient_flows_through_in_place_on_a_view() -> None:
    tensor = torch.ones(4, device="cuda", requires_grad=True)
    doubled = tensor * 2
    doubled[1:3].mul_(3)
    doubled.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2, 6, 6, 2]
    assert tensor.grad.device == torch.device("cuda:0")


def test_data_has_a_version_of_its_own_and_detach_has_not() -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    loss = (weight * weight).sum()
    weight.data.mul_(2)
    loss.backward()
    assert weight.tolist() == [2, 2, 2]
    loss = (weight * weight).sum()
    with torch.no_grad():
        weight.detach().mul_(2)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.cuda.FloatTensor \[3\]\]"
    ):
        loss.backward()
    resized = weight.data.t().unsqueeze_(0)
    assert (weight.shape, resized.shape) == ((3,), (1, 3))


def test_parameter_is_a_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, VirtualParameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert repr(parameter).startswith(
        "Parameter containing:\ntensor([1., 1.], device='cuda:0', requires_grad=True)"
    )
    assert not isinstance(parameter * 2, nn.Parameter)


def test_a_parameter_is_rebuilt_from_its_type() -> None:
    kind = type(nn.Parameter(torch.ones(2, device="cuda")))
    plain = kind(torch.ones(2), requires_grad=False)
    assert type(plain) is nn.Parameter
    assert not plain.requires_grad
    there = kind(torch.ones(2, device="cuda:1"), requires_grad=True)
    assert isinstance(there, nn.Parameter)
    assert there.device.index == 1
    assert there.requires_grad


def test_data_is_assigned_between_devices_in_place() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for target in ("cuda:1", "cuda:0", "cpu", "cuda:0"):
        parameter.grad = None
        parameter.data = parameter.data.to(target)
        assert parameter.device == torch.device(target)
        assert isinstance(parameter, nn.Parameter)
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.device == torch.device(target)
        optimizer.step()
    assert parameter.tolist() == [-7, -7, -7]
    parameter.data = torch.ones(5, device="cuda:0", dtype=torch.float16)
    assert parameter.shape == (5,)
    assert parameter.dtype is torch.float16


def test_moving_a_module_keeps_parameters_tied_and_known_to_the_optimizer() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model["head"].to("cuda:1")
    assert model["embedding"].weight.device.index == 1
    model.to(0)
    assert model["embedding"].weight is model["head"].weight is optimizer.param_groups[0]["params"][0]
    assert model["head"].weight.device.index == 0
    model.cpu()
    assert type(model["head"].weight) is nn.Parameter


def test_gradients_and_buffers_move_with_a_module() -> None:
    model = nn.BatchNorm1d(3)
    model(torch.randn(4, 3)).sum().backward()
    model.cuda()
    assert model.weight.grad is not None
    assert model.weight.grad.is_cuda
    assert model.running_mean is not None
    assert model.running_mean.is_cuda
    model(torch.randn(4, 3, device="cuda")).sum().backward()


@pytest.mark.parametrize(
    "setting", ["set_overwrite_module_params_on_conversion", "set_swap_module_params_on_conversion"]
)
def test_module_conversion_settings(setting: str) -> None:
    getattr(torch.__future__, setting)(True)
    try:
        model = nn.Linear(3, 2)
        before = model.weight
        model.cuda()
        assert model.weight.is_cuda
        assert isinstance(model.weight, nn.Parameter)
        assert (model.weight is before) == ("swap" in setting)
        model(torch.ones(1, 3, device="cuda")).sum().backward()
        model.cpu()
        model(torch.ones(1, 3)).sum().backward()
    finally:
        getattr(torch.__future__, setting)(False)


def test_deepcopy_copies_values_and_keeps_the_device() -> None:
    model = nn.Linear(3, 2).cuda()
    model.twin = model.weight
    other = copy.deepcopy(model)
    assert other.weight.is_cuda
    assert other.twin is other.weight
    with torch.no_grad():
        other.weight.zero_()
    assert model.weight.abs().sum() > 0


def test_deepcopy_of_what_was_saved_before() -> None:
    state = nn.Linear(3, 2).cuda().state_dict()
    torch.save(state, io.BytesIO())
    kept = copy.deepcopy(state)
    state["weight"].zero_()
    assert kept["weight"].is_cuda
    assert kept["weight"].untyped_storage().clone().device == torch.device("cuda:0")
    assert kept["weight"].abs().sum() > 0


def test_a_thread_of_the_program_sees_the_gpus() -> None:
    seen: list[torch.device] = []
    thread = threading.Thread(target=lambda: seen.append((torch.zeros(2, device="cuda:1") + 1).device))
    thread.start()
    thread.join()
    assert seen == [torch.device("cuda:1")]


def test_meta_tensors_stay_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    assert model.weight.is_meta
    model.to_empty(device="cuda:1")
    assert model.weight.device == torch.device("cuda:1")
    assert isinstance(model.weight, nn.Parameter)
