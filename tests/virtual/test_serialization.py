"""Checkpoints written on virtual GPUs, and where they are read to."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.observer import Observer


def saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


MAPS: dict[str, tuple[Any, str]] = {
    "none": (None, "cuda:1"),
    "cpu": ("cpu", "cpu"),
    "other": ("cuda:0", "cuda:0"),
    "device": (torch.device("cuda", 0), "cuda:0"),
    "dict": ({"cuda:1": "cuda:0"}, "cuda:0"),
    "callable that stays": (lambda storage, location: storage, "cpu"),
    "callable that moves": (lambda storage, location: storage.cuda(0), "cuda:0"),
}


@pytest.mark.parametrize("name", MAPS)
def test_map_location(name: str) -> None:
    location, expected = MAPS[name]
    with virtual_gpus(2):
        model = nn.Linear(3, 2).cuda(1)
        state = torch.load(saved(model.state_dict()), map_location=location)
        assert state["weight"].device == torch.device(expected)
        assert torch.equal(state["weight"].cpu(), model.weight.detach().cpu())
        (state["weight"] * 2).sum()


def test_a_device_that_is_not_there_is_refused_in_torchs_words() -> None:
    with virtual_gpus(4):
        buffer = saved(torch.ones(2, device="cuda:3"))
    with (
        virtual_gpus(2),
        pytest.raises(RuntimeError, match=r"on CUDA device 3 but torch.cuda.device_count\(\) is 2"),
    ):
        torch.load(buffer)


def test_without_virtual_gpus_it_is_an_ordinary_checkpoint() -> None:
    with virtual_gpus(1):
        buffer = saved(
            {"a": torch.arange(3.0, device="cuda"), "p": nn.Parameter(torch.ones(2, device="cuda"))}
        )
    state = torch.load(buffer, map_location="cpu", weights_only=True)
    assert state["a"].tolist() == [0, 1, 2]
    assert type(state["p"]) is nn.Parameter
    buffer.seek(0)
    if not torch.cuda.is_available():  # noqa: TID251 - on a machine with a GPU it would load
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
            torch.load(buffer)


def test_shared_storage_stays_shared() -> None:
    with virtual_gpus(1):
        whole = torch.zeros(4, device="cuda")
        loaded, part = torch.load(saved([whole, whole[1:]]))
        part.fill_(1)
        assert loaded.tolist() == [0, 1, 1, 1]
        model = nn.Linear(3, 2).cuda()
        parameter = torch.load(saved(model.weight))
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad


def test_pickle() -> None:
    with virtual_gpus(2):
        tensor = torch.arange(3, device="cuda:1")
        again = pickle.loads(pickle.dumps(tensor))
        assert again.device == tensor.device
        assert torch.equal(again, tensor)


def test_where_a_tensor_was_born_is_not_written() -> None:
    with virtual_gpus(1, observer=Observer()):
        plain = torch.ones(2) * 2
        buffer = saved({"plain": plain, "virtual": plain.cuda(), "parameter": nn.Parameter(plain)})
        assert b"_trimtab" not in buffer.getvalue()
        torch.load(buffer, weights_only=True)


def test_optimizer_state_round_trip() -> None:
    with virtual_gpus(2):
        model = nn.Linear(3, 2).cuda(1)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3, device="cuda:1")).sum().backward()
        optimizer.step()
        state = torch.load(saved(optimizer.state_dict()), map_location="cpu")
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(state)
        assert other.state[model.weight]["exp_avg"].device == torch.device("cuda:1")
        other.step()


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    with virtual_gpus(2):
        tensor = torch.arange(6.0, device="cuda:1").view(2, 3)
        save_file({"a": tensor}, tmp_path / "a.safetensors")
        for device in ("cuda:0", "cuda:1", 1, "cpu"):
            loaded = load_file(tmp_path / "a.safetensors", device=device)["a"]
            assert loaded.device == torch.device(device)
            assert torch.equal(loaded.cpu(), tensor.cpu())
        with safetensors.safe_open(tmp_path / "a.safetensors", "pt", device="cuda:1") as file:
            assert file.get_slice("a")[0:1].device == torch.device("cuda:1")
