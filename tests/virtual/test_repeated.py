"""A compiled layer that was met before is not run again by shapes, and nothing of the memory changes by that."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.virtual import kinds
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.memory import Block
from trimtab.virtual.state import Repeats, VirtualDevice

ROWS, WIDTH, LAYERS = 512, 256, 4
RAN: list[nn.Module] = []
"""The layers that were run, each as often as it was; of a module's own it would be a change that is seen."""


class Layer(nn.Module):
    """A gated layer with an adapter beside a frozen weight."""

    def __init__(self, number: int, settings: Any) -> None:
        super().__init__()
        self.number, self.settings = number, settings
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 300, bias=False), nn.Linear(300, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.scale, self.flag, self.kept = 2.0, False, []

    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        RAN.append(self)
        normed = self.norm(x)
        wide = self.up(normed) + self.scale * self.b(self.a(normed))
        if self.flag or self.settings.squares:
            wide = wide * torch.sigmoid(wide)
        return x + self.down(nn.functional.gelu(wide))


Change = Callable[[list[Layer], int], None]


def steps(
    repeats: Repeats,
    change: Change | None = None,
    *,
    checkpointed: bool = False,
    seen: list[VirtualDevice] | None = None,
) -> dict[str, Any]:
    """Some training steps over compiled layers, by shapes: what was held, and how many layers were run in each."""
    RAN.clear()
    gc.collect()  # what is known of layers goes with them, and these are held by themselves
    runs, states = [], []
    with virtual_gpus(1, shapes=True) as machine:
        machine.repeats = repeats
        if seen is not None:
            seen[:] = machine.devices
        undo = kinds.listen(machine)
        settings = SimpleNamespace(squares=False)
        layers = [Layer(number, settings) for number in range(LAYERS)]
        model = nn.ModuleList(layers).cuda()
        for layer in layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        for step in range(3):
            if change is not None:
                change(layers, step)
            before = len(RAN)
            x = torch.empty(ROWS, WIDTH, device="cuda").requires_grad_()
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            x.float().pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            states.append(torch.cuda.memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            runs.append(len(RAN) - before)
            states.append(torch.cuda.memory_allocated())
        held = [
            (peak.phase, peak.peak_bytes, peak.reserved_bytes, peak.kinds)
            for peak in machine.devices[0].ledger.peaks()
        ]
        momenta = [tuple(state["exp_avg"].shape) for state in optimizer.state.values()]
        undo()
    return {"runs": runs, "held": held, "states": states, "momenta": momenta}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_is_that_of_layers_that_run(checkpointed: bool) -> None:
    plain, own, alike = (steps(how, checkpointed=checkpointed) for how in ("", "own", "alike"))
    assert own | {"runs": plain["runs"]} == plain
    assert alike | {"runs": plain["runs"]} == plain
    times = 2 if checkpointed else 1  # in the forward pass, and when it is computed again
    assert plain["runs"] == [times * LAYERS] * 3
    assert own["runs"] == [LAYERS + times - 1, 0, 0]  # a layer that has run is not run to be computed again
    assert alike["runs"] == [times, 0, 0]  # another number, which a layer does not look at, is no other layer


@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_comes_and_goes_in_the_same_order(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which what the allocator reserves is the same."""
    events: list[tuple[int, int]] = []
    made, gone = Block.__init__, Block.__del__

    def init(block: Block, device: VirtualDevice, nbytes: int) -> None:
        made(block, device, nbytes)
        if block.nbytes and block.device in watched:
            events.append((block.serial, block.nbytes))

    def end(block: Block) -> None:
        if block.nbytes and block.device in watched:
            events.append((block.serial, -block.nbytes))
        gone(block)

    def told(how: Repeats) -> list[tuple[int, int]]:
        watched.clear()  # layers of the run before go when the next begins
        events.clear()
        steps(how, checkpointed=checkpointed, seen=watched)
        return list(events)

    watched: list[VirtualDevice] = []
    steps("", checkpointed=checkpointed)  # the plan is made, which uses a GPU too
    monkeypatch.setattr(Block, "__init__", init)
    monkeypatch.setattr(Block, "__del__", end)
    plain = told("")
    assert len(plain) > 500
    assert told("own") == plain


def test_gradients_reach_every_weight() -> None:
    assert len(steps("alike")["momenta"]) == 3 * LAYERS


class Joint(Layer):
    """Two weights in one product, of which each gets a part of one gradient."""

    def __init__(self, number: int, settings: Any) -> None:
        super().__init__(number, settings)
        self.c = nn.Linear(WIDTH, 300, bias=False)

    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        RAN.append(self)
        both = torch.nn.functional.linear(self.norm(x), torch.cat([self.a.weight, self.c.weight]))
        return x + self.down(self.b(both[:, :300]) + self.b(both[:, 300:]))


def test_gradients_that_are_parts_of_one_buffer_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Layer", Joint)
    plain, own, alike = (steps(how) for how in ("", "own", "alike"))
    assert own["runs"] == [LAYERS, 0, 0]
    assert alike["runs"] == [1, 0, 0]
    for known in (own, alike):
        assert known | {"runs": plain["runs"]} == plain


def attribute(layers: list[Layer], step: int) -> None:
    layers[2].scale = 2.0 if step == 0 else 3.0


def switch(layers: list[Layer], step: int) -> None:
    layers[1].flag = step > 0


def shared(layers: list[Layer], step: int) -> None:
    layers[0].settings.squares = step > 0


def mode(layers: list[Layer], step: int) -> None:
    layers[3].norm.train(step == 0)


def frozen(layers: list[Layer], step: int) -> None:
    layers[1].a.requires_grad_(step == 0)


def other_format(layers: list[Layer], step: int) -> None:
    if step == 1:
        layers[2].up.double()
        layers[2].up.weight.data = layers[2].up.weight.data.float()
        layers[2].up = nn.Linear(WIDTH, 3 * WIDTH, bias=True).requires_grad_(False).cuda()


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (attribute, [LAYERS, 1, 0]),
        (switch, [LAYERS, 1, 0]),
        (shared, [LAYERS, LAYERS, 0]),
        (mode, [LAYERS, 0, 0]),  # the norm does not ask for its mode
        (frozen, [LAYERS, 1, 0]),
        (other_format, [LAYERS, 1, 0]),
    ],
)
def test_what_is_looked_at_and_has_changed_has_it_run(change: Change, runs: list[int]) -> None:
    own = steps("own", change)
    assert own["runs"] == runs
    plain = steps("", change)
    assert own | {"runs": plain["runs"]} == plain


class Keeping(Layer):
    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        self.last = self.norm(x).detach()
        return super().forward(x)


class Growing(Layer):
    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        self.kept.append(1)
        return super().forward(x)


class Asking(Layer):
    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        return super().forward(x * x.abs().max().item())


@pytest.mark.parametrize("kind", [Keeping, Growing, Asking])
def test_a_layer_that_changes_something_or_asks_for_a_value_is_run_each_time(
    kind: type[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Layer", kind)
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph, real=torch.compile: real(model))
    assert steps("own")["runs"] == [LAYERS] * 3


def test_another_length_has_it_run() -> None:
    RAN.clear()
    with virtual_gpus(1, shapes=True) as machine:
        machine.repeats = "own"
        layer = Layer(0, SimpleNamespace(squares=False)).cuda()
        layer.forward = torch.compile(layer.forward, fullgraph=True)
        for rows in (512, 768, 512, 768):
            out = layer(torch.empty(rows, WIDTH, device="cuda").requires_grad_())
            assert out.shape == (rows, WIDTH)
            assert out.device.type == "cuda"
            out.sum().backward()
            assert layer.a.weight.grad.shape == layer.a.weight.shape
    assert len(RAN) == 2


def test_on_another_length_one_layer_is_run_of_those_that_ran_before() -> None:
    def run(repeats: Repeats) -> tuple[list[int], list[Any]]:
        RAN.clear()
        runs = []
        with virtual_gpus(1, shapes=True) as machine:
            machine.repeats = repeats
            settings = SimpleNamespace(squares=False)
            layers = [Layer(number, settings).cuda() for number in range(LAYERS)]
            for layer in layers:
                layer.forward = torch.compile(layer.forward, fullgraph=True)
            for rows, used in (
                (512, LAYERS - 1),
                (768, LAYERS - 1),
                (512, LAYERS),
                (1024, LAYERS),
                (768, LAYERS),
            ):
                before = len(RAN)
                x = torch.empty(rows, WIDTH, device="cuda").requires_grad_()
                for layer in layers[:used]:
                    x = layer(x)
                x.sum().backward()
                runs.append(len(RAN) - before)
            held = [(peak.peak_bytes, peak.reserved_bytes) for peak in machine.devices[0].ledger.peaks()]
        return runs, held

    (plain, every), (own, some) = run(""), run("own")
    assert plain == [LAYERS - 1, LAYERS - 1, LAYERS, LAYERS, LAYERS]
    assert own == [LAYERS - 1, 1, 1, 1, 0]  # the last layer by itself, when it comes for the first time
    assert some == every


def test_with_values_every_layer_is_run() -> None:
    RAN.clear()
    with virtual_gpus(1) as machine:
        machine.repeats = "alike"
        layer = Layer(0, SimpleNamespace(squares=False)).cuda()
        layer.forward = torch.compile(layer.forward, fullgraph=True)
        for _ in range(2):
            layer(torch.randn(8, WIDTH, device="cuda").requires_grad_()).sum().backward()
    assert len(RAN) == 2


def test_nothing_of_a_model_is_held() -> None:
    with virtual_gpus(1, shapes=True) as machine:
        machine.repeats = "alike"
        layer = Layer(0, SimpleNamespace(squares=False)).cuda()
        layer.forward = torch.compile(layer.forward, fullgraph=True)
        layer(torch.empty(ROWS, WIDTH, device="cuda").requires_grad_()).sum().backward()
        del layer
        RAN.clear()
        gc.collect()
        workspaces = sum(block.nbytes for block in machine.devices[0].workspaces.values())
        assert torch.cuda.memory_allocated() == workspaces
