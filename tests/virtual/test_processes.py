"""Forked workers, spawned children, threads and pinned memory around virtual GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer
from trimtab.virtual.processes import BAD_FORK


@pytest.fixture
def _gpus() -> Iterator[None]:
    with virtual_gpus(2):
        yield


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def to_gpu(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows).to("cuda")


@pytest.mark.usefixtures("_gpus")
def test_workers_that_stay_on_the_cpu() -> None:
    torch.ones(1, device="cuda")
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    batches = list(loader)
    assert [b[:, 0].tolist() for b in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(b.device.type == "cpu" and b.is_pinned() for b in batches)


@pytest.mark.usefixtures("_gpus")
def test_a_worker_that_uses_the_gpu_after_a_fork() -> None:
    torch.ones(1, device="cuda")
    loader = DataLoader(
        Rows(), batch_size=2, num_workers=1, collate_fn=to_gpu, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        next(iter(loader))


def in_child(work) -> str:  # type: ignore[no-untyped-def]
    """What a forked child says: the text that `work` returns or the error that it raises."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.usefixtures("_gpus")
def test_a_fork_before_initialisation_may_use_the_gpu() -> None:
    assert in_child(lambda: torch.ones(2, device="cuda").sum().item()) == "2.0"


@pytest.mark.usefixtures("_gpus")
def test_what_a_forked_child_may_still_do() -> None:
    held = torch.ones(1, device="cuda")
    assert in_child(torch.cuda.device_count) == "2"
    assert in_child(torch.cuda.is_initialized) == "False"
    assert in_child(lambda: torch.manual_seed(3).initial_seed()) == "3"
    for use in (
        torch.cuda.current_device,
        torch.cuda.get_rng_state,
        lambda: torch.ones(1).cuda(),
        lambda: torch.ones(1, device="cuda"),
    ):
        assert BAD_FORK in in_child(use)
    assert "CUDA error: initialization error" in in_child(lambda: held + 1)
    assert in_child(lambda: held[0].shape) == "torch.Size([])"  # a view touches no GPU
    assert held.item() == 1  # the parent goes on


def test_a_repairing_machine_goes_on_in_the_child_and_tells() -> None:
    faults = []

    class Listener(Observer):
        def fault(self, fault) -> None:  # type: ignore[no-untyped-def]
            faults.append(fault.kind)

    with virtual_gpus(1, observer=Listener(), on_fault="repair"):
        torch.ones(1, device="cuda")
        said = in_child(lambda: (torch.ones(2, device="cuda").sum().item(), faults))
    assert said == "(2.0, ['worker-uses-gpu'])"


@pytest.mark.usefixtures("_gpus")
def test_pinned_memory() -> None:
    host = torch.ones(3)
    assert not host.is_pinned()
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert pinned.pin_memory() is pinned
    assert pinned[1:].is_pinned()
    assert not pinned.clone().is_pinned()
    assert pinned.to("cuda", non_blocking=True).device.type == "cuda"
    assert torch.empty(2, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, device="cuda").pin_memory()
    assert str(caught.value) == "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
    assert caught.value.fault.kind == "pin-of-gpu-tensor"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_gpus")
def test_threads_see_the_gpus() -> None:
    seen = []

    def work() -> None:
        torch.cuda.set_device(1)
        seen.append(torch.ones(1).cuda().device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [torch.device("cuda:1")]
    assert torch.cuda.current_device() == 0  # the current device belongs to a thread


def _spawned(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    total = torch.arange(3.0, device=device).sum()
    Path(folder, str(rank)).write_text(f"{torch.cuda.device_count()} {total.device} {total.item()}")


@pytest.mark.usefixtures("_gpus")
@pytest.mark.slow
def test_spawned_children_get_the_same_machine(tmp_path: Path) -> None:
    torch.ones(1, device="cuda")
    torch.multiprocessing.spawn(_spawned, args=(str(tmp_path),), nprocs=2)
    assert (tmp_path / "1").read_text() == "2 cuda:1 3.0"


@pytest.mark.usefixtures("_gpus")
def test_a_started_program_gets_the_same_machine() -> None:
    program = "import torch; print(torch.cuda.device_count(), torch.ones(2, device='cuda:1').sum().item())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2.0"]


@pytest.mark.usefixtures("_gpus")
def test_a_started_program_keeps_its_own_sitecustomize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mark = 'theirs'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)]))
    program = "import sys; print(sys.mark, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["theirs", "False"]


@pytest.mark.usefixtures("_gpus")
def test_a_tensor_that_is_handed_to_another_process_shares_its_memory() -> None:
    model = torch.nn.Linear(2, 1).to("cuda:1").share_memory()
    there = ForkingPickler.loads(ForkingPickler.dumps(model))
    assert isinstance(there.weight, torch.nn.Parameter)
    assert there.weight.device == torch.device("cuda", 1)
    with torch.no_grad():
        there.weight.fill_(3)
    assert model.weight.tolist() == [[3.0, 3.0]]
    part = torch.arange(6.0, device="cuda:0")[2:4]
    ForkingPickler.loads(ForkingPickler.dumps(part)).zero_()
    assert part.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        ForkingPickler.dumps(model.weight * 2)
