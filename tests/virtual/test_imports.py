"""What is set in a library that is imported while virtual GPUs are in force: then, and put back with them."""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from trimtab.virtual.imports import when_imported
from trimtab.virtual.state import NotSimulated

LIBRARY = """
class BNBNativeLibrary:
    def __getattr__(self, name):
        return lambda: name

lib = BNBNativeLibrary()
"""
MODULES = """
import torch

class Params(torch.nn.Parameter):
    def __new__(cls, data=None, requires_grad=True):
        return torch.Tensor._make_subclass(cls, data, requires_grad)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the classes through which bitsandbytes reaches a GPU past torch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "bitsandbytes"
    (package / "nn").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("cextension", LIBRARY),
        ("nn/__init__", ""),
        ("nn/modules", MODULES),
    ):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("library")
def test_a_library_of_cuda_is_refused_whenever_it_is_imported() -> None:
    with trimtab.virtual_gpus(1):
        assert importlib.util.find_spec("bitsandbytes.cextension") is not None
        lib = importlib.import_module("bitsandbytes.cextension").lib
        params = importlib.import_module("bitsandbytes.nn.modules").Params
        with pytest.raises(NotSimulated, match=r"bitsandbytes' function cget_managed_ptr .* not simulated"):
            lib.cget_managed_ptr()
        assert lib.cquantize_cpu() == "cquantize_cpu"
        assert params(torch.ones(2)).tolist() == [1.0, 1.0]
        assert params(torch.ones(2, device="cuda")).is_cuda
    assert lib.cget_managed_ptr() == "cget_managed_ptr"
    with trimtab.virtual_gpus(1), pytest.raises(NotSimulated, match="is not simulated"):
        lib.cget_managed_ptr()
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        del sys.modules[name]


def test_nothing_waits_for_an_import_afterwards() -> None:
    before = list(sys.meta_path)
    with trimtab.virtual_gpus(1), trimtab.virtual_gpus(2):
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before


@pytest.mark.usefixtures("library")
def test_two_that_wait_for_one_module_are_both_told() -> None:
    told: list[str] = []
    with trimtab.virtual_gpus(1) as machine:
        for name in ("first", "second"):
            settings = {"bitsandbytes.nn.modules": lambda _, name=name: told.append(name)}
            when_imported(machine, machine.undo, settings)
        importlib.import_module("bitsandbytes.nn.modules")
    assert sorted(told) == ["first", "second"]


def test_a_module_whose_import_is_under_way_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a library which was the first to import torch, and so has the virtual GPUs come in its midst."""
    (tmp_path / "imports_torch_first.py").write_text("import begins_here\ndef late(): return 1\n")
    (tmp_path / "begins_here.py").write_text("begin()\n")
    monkeypatch.syspath_prepend(tmp_path)
    told: list[Any] = []
    with trimtab.virtual_gpus(1) as machine:

        def begin() -> None:
            for name in ("first", "second"):

                def setting(_: Any, name: str = name) -> None:
                    told.append((name, sys.modules["imports_torch_first"].late()))

                when_imported(machine, machine.undo, {"imports_torch_first": setting})
            assert not told

        monkeypatch.setattr(builtins, "begin", begin, raising=False)
        module = importlib.import_module("imports_torch_first")
    assert told == [("first", 1), ("second", 1)]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    for name in ("imports_torch_first", "begins_here"):
        del sys.modules[name]
