"""A machine comes into force and leaves nothing behind; it remembers where tensors come from."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trimtab.virtual import functions, install, machine, origin, uninstall, virtual_gpus
from trimtab.virtual.observer import Observer

PATCHED = (
    (torch, "compile"),
    (torch, "Generator"),
    (torch.serialization, "default_restore_location"),
    (torch._utils, "_rebuild_tensor"),
    (nn.Module, "to"),
    (nn.Module, "_apply"),
    (torch.autograd, "_engine_run_backward"),
    (threading.Thread, "_bootstrap_inner"),
    (torch.cuda, "_lazy_init"),
    (torch.UntypedStorage, "cuda"),
)


def snapshot() -> list[object]:
    names = sorted(name for name in vars(torch._C) if "cuda" in name or "accelerator" in name)
    return [
        *(vars(target).get(name) for target, name in PATCHED),
        names,
        dict(functions.HANDLERS),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    ]


def test_nothing_is_left_behind() -> None:
    before = snapshot()
    with virtual_gpus(2):
        assert snapshot() != before
        kept = torch.ones(2, device="cuda:1")
    assert snapshot() == before
    assert machine() is None
    assert (kept + 1).tolist() == [2, 2]
    assert kept.cpu().tolist() == [1, 1]


def test_nothing_is_left_behind_after_an_error() -> None:
    before = snapshot()
    with pytest.raises(KeyError), virtual_gpus(2):
        raise KeyError
    assert snapshot() == before


def test_contexts_nest() -> None:
    with virtual_gpus(2) as outer:
        with virtual_gpus(4, memory="1GiB") as inner:
            assert machine() is inner
            assert torch.cuda.device_count() == 4
            torch.ones(1, device="cuda:3")
        assert machine() is outer
        assert torch.cuda.device_count() == 2
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:3")


def test_install_and_uninstall() -> None:
    made = install(3, name="NVIDIA H200", capability=(9, 0))
    try:
        assert torch.cuda.device_count() == 3
        assert made.devices[2].name == "NVIDIA H200"
    finally:
        uninstall()
    with pytest.raises(RuntimeError, match="no virtual machine"):
        uninstall()


def test_bad_requests_are_refused() -> None:
    for arguments in ({"count": -1}, {"memory": "much"}, {"on_fault": "ignore"}):
        with pytest.raises(ValueError, match=r"virtual|memory|on_fault"):
            install(**arguments)  # type: ignore[arg-type]
    assert machine() is None


def test_compile_runs_eagerly() -> None:
    with virtual_gpus(1):
        doubled = torch.compile(lambda x: x * 2)
        assert doubled(torch.ones(1, device="cuda")).item() == 2

        @torch.compile(dynamic=True)
        def tripled(x: torch.Tensor) -> torch.Tensor:
            return x * 3

        assert tripled(torch.ones(1, device="cuda")).item() == 3


def line_of(found: origin.Origin | None) -> int:
    assert found is not None
    assert found.file == __file__
    return found.line


def test_origins() -> None:
    first = test_origins.__code__.co_firstlineno
    with virtual_gpus(2, observer=Observer()):
        plain = torch.ones(3)
        result = plain * 2
        moved = result.to("cuda:1")
        summed = moved.sum()
        data = torch.tensor([1.0])
        view = plain[1:]
    assert line_of(origin.born_of(plain)) == first + 3
    assert line_of(origin.born_of(result)) == first + 4
    assert line_of(origin.born_of(moved)) == first + 4
    assert line_of(origin.moved_of(moved)) == first + 5
    assert line_of(origin.copied_of(result)) == first + 5
    assert origin.moved_of(result) is None
    assert line_of(origin.born_of(summed)) == first + 6
    assert line_of(origin.born_of(data)) == first + 7
    assert line_of(origin.born_of(view)) == first + 3


def test_origins_of_parameters_and_modules() -> None:
    first = test_origins_of_parameters_and_modules.__code__.co_firstlineno
    with virtual_gpus(1, observer=Observer()) as made:
        model = nn.Linear(2, 2)
        model.to("cuda")
        model(torch.ones(1, 2, device="cuda"))
        assert model in made.modules
    assert line_of(origin.born_of(model.weight)) == first + 3
    assert line_of(origin.moved_of(model.weight)) == first + 4
    assert origin.copied_of(model.weight) is None


def test_without_an_observer_nothing_is_remembered() -> None:
    with virtual_gpus(1):
        tensor = torch.ones(2, device="cuda") + 1
    assert origin.born_of(tensor) is None


def test_observer_hears_operations_only_when_it_wants_to() -> None:
    class Ears(Observer):
        wants_ops = True

        def __init__(self) -> None:
            self.names: list[str] = []

        def op(self, name: str) -> None:
            self.names.append(name)

    ears = Ears()
    with virtual_gpus(1, observer=ears):
        torch.ones(2) + 1
    assert "aten::add" in ears.names
