"""The ledger: what memory was for, phase by phase, on a training loop whose sizes are known."""

from __future__ import annotations

import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.ledger import KINDS, Ledger, Peak
from trimtab.virtual.observer import Observer
from trimtab.virtual.origin import resolve
from trimtab.virtual.state import Machine

WIDE, NARROW, BATCH = 4096, 512, 1024
WEIGHT = WIDE * NARROW * 4  # 8 MiB
WIDE_ROWS, ROWS = BATCH * WIDE * 4, BATCH * NARROW * 4  # 16 MiB, 2 MiB
WORKSPACE = 32 << 20  # cuBLAS's on Hopper, for each thread that multiplies


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(NARROW, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, NARROW, bias=False))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(BATCH, NARROW, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_phase(ledger: Ledger) -> dict[str, Peak]:
    return {peak.phase: peak for peak in ledger.peaks()}


@pytest.mark.parametrize("shapes", [False, True])
def test_the_kinds_of_a_training_step(shapes: bool) -> None:
    with virtual_gpus(1, observer=Observer(), shapes=shapes) as machine:
        net = model().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for _ in range(3):
            step(net, optimizer)
        ledger = machine.devices[0].ledger
        peaks = by_phase(ledger)
        assert list(peaks) == ["load", "first step", "steady step"]
        assert peaks["load"].kinds["weights"] == 2 * WEIGHT
        steady = peaks["steady step"]
        # In the backward pass of the ReLU: its output, the gradients of its output and of its input, and that of the
        # weight behind it; the state of the optimizer was made in the first step.
        assert steady.kinds == dict.fromkeys(KINDS, 0) | {
            "weights": 2 * WEIGHT,
            "gradients": WEIGHT,
            "optimizer": 2 * WEIGHT,
            "activations": WIDE_ROWS + 2 * 512,  # the loss too, and the number 1 that its gradient is
            "temporary": 2 * WIDE_ROWS + steady.kinds["temporary"] % WIDE_ROWS,
            "workspace": 2 * WORKSPACE,
        }
        assert sum(steady.kinds.values()) == steady.peak_bytes
        assert max(peak.peak_bytes for peak in peaks.values()) == torch.cuda.max_memory_allocated()
        assert max(peak.reserved_bytes for peak in peaks.values()) == torch.cuda.max_memory_reserved()
        assert (steady.module, steady.op) == ("1", "aten::threshold_backward")
        where = resolve(steady.where)
        assert where is not None
        assert (where.file, where.function) == (__file__, "step")
        timeline = ledger.timeline("steady step", points=8)
        assert len(timeline.at) <= 8
        assert max(map(sum, zip(*timeline.kinds.values(), strict=True))) == steady.peak_bytes
        assert [name for _, name in timeline.marks] == ["forward", "backward", "optimizer"]
        assert timeline.at == sorted(timeline.at)


def test_memory_that_is_there_from_before_is_other_and_a_pass_that_ends_halfway_leaves_activations() -> None:
    with virtual_gpus(1, observer=Observer()) as machine:
        data = torch.ones(BATCH, NARROW, device="cuda")
        net = model().cuda()
        kept = net(data)
        peak = by_phase(machine.devices[0].ledger)["first step"]
        # In the ReLU: what it gives is kept for the backward pass, what it gets is not.
        assert peak.kinds == dict.fromkeys(KINDS, 0) | {
            "weights": 2 * WEIGHT,
            "other": ROWS,
            "activations": WIDE_ROWS,
            "temporary": WIDE_ROWS,
            "workspace": WORKSPACE,
        }
        assert (peak.module, peak.op) == ("1", "aten::relu")
        assert kept.shape == data.shape


def test_what_is_told_counts_and_phases_can_be_told() -> None:
    with virtual_gpus(2, observer=Observer()) as machine:
        ledger = machine.devices[1].ledger
        workspace = torch.empty(8 << 20, dtype=torch.uint8, device="cuda:1")
        ledger.tell(workspace, "workspace")
        ledger.begin("generate")
        scratch = torch.empty(4 << 20, dtype=torch.uint8, device="cuda:1")
        del scratch
        peaks = by_phase(ledger)
        assert peaks["load"].kinds["workspace"] == peaks["load"].peak_bytes == 8 << 20
        assert peaks["generate"].kinds["temporary"] == 4 << 20
        assert peaks["generate"].peak_bytes == 12 << 20
        assert machine.devices[0].ledger.peaks() == []


def test_a_cache_of_keys_and_values() -> None:
    class Output(SimpleNamespace):
        past_key_values: object = None

    class Decoder(nn.Module):
        def forward(self, x: torch.Tensor) -> Output:
            layer = SimpleNamespace(keys=x + 1, values=x + 2)
            return Output(logits=x * 2, past_key_values=SimpleNamespace(layers=[layer]))

    with virtual_gpus(1, observer=Observer()) as machine, torch.no_grad():
        ledger = machine.devices[0].ledger
        ledger.begin("generate")
        output = Decoder()(torch.ones(BATCH, NARROW, device="cuda"))
        del output
        assert by_phase(ledger)["generate"].kinds["cache"] == 2 * ROWS


def test_checkpointing_keeps_the_input_and_computes_the_rest_again() -> None:
    kept: dict[bool, list[int]] = {}
    for checkpointing in (False, True):
        with virtual_gpus(1, observer=Observer()) as machine:
            net = model().cuda()
            run = (
                partial(torch.utils.checkpoint.checkpoint, net, use_reentrant=False) if checkpointing else net
            )
            run(torch.ones(BATCH, NARROW, device="cuda", requires_grad=True)).sum().backward()
            timeline = machine.devices[0].ledger.timeline("first step")
            backward = next(at for at, name in timeline.marks if name == "backward")
            series = timeline.kinds["activations"]
            kept[checkpointing] = [series[timeline.at.index(backward)], max(series[backward:])]
    small = kept[False][0] % WIDE_ROWS
    assert kept[False] == [WIDE_ROWS + small, WIDE_ROWS + small]
    assert kept[True][0] == small
    assert kept[True][1] >= WIDE_ROWS


def test_weights_that_are_freed_and_made_again_stay_weights() -> None:
    with virtual_gpus(1, observer=Observer()) as machine:
        ledger = machine.devices[0].ledger
        weight = torch.ones(1 << 20, device="cuda")
        ledger.tell(weight, "weights")
        storage = weight.untyped_storage()
        storage.resize_(0)
        assert torch.cuda.memory_allocated() == 0
        ledger.begin("steady step")
        storage.resize_(4 << 20)
        assert by_phase(ledger)["steady step"].kinds["weights"] == 4 << 20


def test_gradients_that_are_accumulated_without_an_optimizer() -> None:
    with virtual_gpus(1, observer=Observer()) as machine:
        net = nn.Linear(NARROW, WIDE, bias=False).cuda()
        for _ in range(2):
            net(torch.ones(8, NARROW, device="cuda")).sum().backward()
        assert by_phase(machine.devices[0].ledger)["first step"].kinds["gradients"] >= WEIGHT
        torch._C._cuda_clearCublasWorkspaces()
        assert torch.cuda.memory_allocated() == 2 * WEIGHT


def test_a_long_run_takes_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.virtual.ledger.LONGEST", 100)
    with virtual_gpus(1) as machine:
        ledger = machine.devices[0].ledger
        kept = torch.ones(1 << 20, device="cuda")
        highest = torch.ones(2 << 20, device="cuda")
        del highest
        for _ in range(2000):
            torch.ones(64, device="cuda")
            if ledger.device.made % 50 == 0:
                ledger.settle()
        assert len(ledger.lap.events) < 400
        assert sum(len(lap.events) for lap in ledger.kept.values()) < 400
        (peak,) = ledger.peaks()
        assert peak.peak_bytes == 12 << 20
        assert kept.numel() == 1 << 20


def test_threads_and_the_ledger_agree() -> None:
    with virtual_gpus(1) as machine:
        device = machine.devices[0]

        def work() -> None:
            for number in range(300):
                torch.ones(1 + number, device="cuda")
                if number % 37 == 0:
                    device.ledger.step_ends()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert device.allocated == 0
        assert device.pool.number == device.made


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on() -> None:
    with virtual_gpus(1, on_fault="repair", observer=Observer()) as machine:
        kept = torch.ones(1 << 20, device="cuda")
        device = machine.devices[0]
        with device.pool.lock:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    torch.ones(1 << 20, device="cuda")
                    status = int(device.peak != 8 << 20)
                finally:
                    os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert device.allocated == kept.numel() * 4


def test_out_of_memory_is_found_at_the_request_and_a_repaired_one_is_counted() -> None:
    faults = []

    class Ear(Observer):
        def fault(self, fault: object) -> None:
            faults.append(fault)

    with virtual_gpus(1, memory="64MiB", on_fault="repair", observer=Ear(), shapes=True) as machine:
        torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        assert len(faults) >= 1
        assert machine.devices[0].peak == 100 << 20
        assert machine.devices[0].ledger.peaks()[0].peak_bytes == 100 << 20


def test_the_share_of_cuda_itself() -> None:
    small = Machine(1, total_bytes=1 << 30, name="NVIDIA H200", capability=(9, 0))
    assert small.devices[0].context_bytes == (1 << 30) // 8
    with virtual_gpus(1, memory="139GiB", name="NVIDIA H200") as machine:
        context = machine.devices[0].context_bytes
        assert context == 768 << 20
        assert torch.cuda.mem_get_info() == ((139 << 30) - context, 139 << 30)


def test_parts_that_are_never_called_hold_weights_too() -> None:
    """A layer that computes with the weights of its parts by itself, and was put on the GPU piece by piece."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(NARROW, WIDE, bias=False)
            self.inner.weight = nn.Parameter(torch.ones(WIDE, NARROW, device="cuda"))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows @ self.inner.weight.t()

    with virtual_gpus(1, observer=Observer()) as machine:
        net = Fused()
        net(torch.ones(BATCH, NARROW, device="cuda")).sum().backward()
        (*_, peak) = machine.devices[0].ledger.peaks()
        assert peak.kinds["weights"] == WEIGHT
