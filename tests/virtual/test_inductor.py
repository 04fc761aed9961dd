"""Buffers of compiled code are those that inductor's generated code allocates, in graphs as torch.compile cuts them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import count
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trimtab.virtual import functions, held_modes, inductor, joint_graph
from trimtab.virtual.buffers import Account
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer

WORDS, WIDTH, ROWS = 4096, 64, 256


@pytest.fixture(autouse=True)
def without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS keeps is none of a compiler's business."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Language(nn.Module):
    """A language model with its loss, without attention."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits = self.head(x)
        return cross_entropy(logits.float(), ids), logits


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def graphs_of(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any]
) -> list[tuple[fx.Graph, int | None]]:
    """Forward and backward graphs of what a program compiles, as they come before they are lowered."""
    found: list[tuple[fx.Graph, int | None]] = []
    original = joint_graph.cut

    def cut(*args: Any) -> Any:
        made = original(*args)
        found.append((copy.deepcopy(made.forward), made.outputs))
        if made.backward is not None:
            found.append((copy.deepcopy(made.backward), None))
        return made

    monkeypatch.setattr(joint_graph, "cut", cut)
    program()
    return found


def train_language() -> None:
    ids = torch.randint(WORDS, (ROWS,)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = torch.compile(Language().cuda())(ids)
    loss.backward()


def train_mixed() -> None:
    @torch.compile
    def mixed(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        both = torch.cat([x.sin(), y], -1)
        one, other = (both @ both.t()).softmax(-1).chunk(2, -1)
        return (one * other).sum(0).cumsum(0).square().sum() + x[index].logsumexp(-1).sum() + both.std()

    x, y = (torch.randn(64, 128).cuda().requires_grad_() for _ in range(2))
    mixed(x, y, torch.arange(8).cuda()).backward()


def train_turned() -> None:
    """Rotary positions: the gradient of a slice is a copy into zeros."""

    @torch.compile
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x[..., :64], x[..., 64:]
        return x * cos + torch.cat([-other, one], -1) * sin

    x, cos, sin = (torch.randn(2, 8, 256, 128).cuda() for _ in range(3))
    turned(x.requires_grad_(), cos, sin).square().sum().backward()


def take_steps() -> None:
    net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    step = torch.compile(lambda: optimizer.step())
    for _ in range(2):
        net(torch.ones(2, 96).cuda()).sum().backward()
        step()


def peak_of(account: Account) -> int:
    now = most = 0
    sizes: dict[int, int] = {}
    for number, nbytes in account.steps:
        now += nbytes if number >= 0 else -sizes.get(~number, 0)
        sizes[number] = nbytes
        most = max(most, now)
    return most


_MADE = re.compile(r"(buf\d+) = empty_strided_cuda\((\(.*?\)), (\(.*?\)), (torch\.\w+)\)")
_REUSED = re.compile(r"(buf\d+) = (?:reinterpret_tensor\()?(\w+).*# reuse")
_FREED = re.compile(r"del (\w+)")


def course_of_code(code: str) -> tuple[list[int], int]:
    """What generated code allocates itself, in order, and what it holds of it at most."""
    now = most = 0
    made: list[int] = []
    sizes: dict[str, int] = {}
    for line in map(str.strip, code.splitlines()):
        if found := _MADE.match(line):
            name, shape, strides, dtype = found.groups()
            sizes[name] = extent(eval(shape), eval(strides)) * getattr(torch, dtype[6:]).itemsize
            made.append(sizes[name])
            now += sizes[name]
            most = max(most, now)
        elif found := _REUSED.match(line):
            sizes[found[1]] = sizes.pop(found[2], 0)
        elif found := _FREED.match(line):
            now -= sizes.pop(found[1], 0)
    return made, most


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if prod(shape)
        else 0
    )


PROGRAMS = (train_language, train_mixed, train_turned, take_steps)


@pytest.mark.parametrize("program", PROGRAMS)
def test_buffers_come_as_in_generated_code_and_as_much_is_held(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], None]
) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda", 0)
    with virtual_gpus(1):
        graphs = graphs_of(monkeypatch, program)
        assert graphs
        with functions.switched_off(), held_modes.taken_away():
            for graph, own in graphs:
                found = inductor.account(copy.deepcopy(graph), count(), {}, device, own=own)
                with inductor._lowered(copy.deepcopy(graph), {}, device, own) as lowered:
                    lowered.wrapper_code.push_codegened_graph(lowered)
                    lowered.scheduler.codegen()
                    code, _ = lowered.wrapper_code.generate(False)
                made = [nbytes for number, nbytes in found.steps if number >= 0]
                assert (made, peak_of(found)) == course_of_code(code.value)


def test_inductor_is_asked_for_every_graph() -> None:
    notes = Notes()
    with virtual_gpus(1, observer=notes, shapes=True):
        for program in PROGRAMS:
            program()
    assert not notes.notes


def test_a_loss_has_the_logits_and_their_gradients_alone() -> None:
    """No copy of the logits in fp32, and no softmax: both are computed where they are read."""
    with virtual_gpus(1, shapes=True):
        head = nn.Linear(WIDTH, 1 << 15, bias=False, dtype=torch.bfloat16, device="cuda")

        @torch.compile
        def loss(x: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(head(x).float(), labels)

        x = torch.zeros(2048, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        labels = torch.zeros(2048, dtype=torch.long, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        loss(x, labels).backward()
        logits = 2048 * (1 << 15) * 2
        assert 1 < torch.cuda.max_memory_allocated() / logits < 2.2


def kept_by_torch(model: nn.Module, ids: Tensor) -> int:
    """The bytes that torch's own compiler keeps for the backward pass, besides inputs and outputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    kept: list[int] = []

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            made = partition_fn(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
        results: Any = next(node for node in made[0].graph.nodes if node.op == "output").args[0]
        names = {node.name for node in results[:num_fwd_outputs]}
        saved = [n for n in results[num_fwd_outputs:] if n.op != "placeholder" and n.name not in names]
        kept.append(sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in saved))
        return made

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=cut, decompositions=select_decomp_table()
    )
    torch.compile(model, backend=backend, fullgraph=True)(ids)
    torch._dynamo.reset()
    (found,) = kept
    return found


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_whole_model_keeps_what_torch_keeps(checkpoints: bool) -> None:
    torch.manual_seed(0)
    model, ids = Language(checkpoints), torch.randint(WORDS, (ROWS,))
    expected = kept_by_torch(copy.deepcopy(model), ids)
    with virtual_gpus(1):
        there, here = torch.compile(model.cuda()), ids.cuda()
        before = torch.cuda.memory_allocated()
        loss, logits = there(here)
        given = loss.element_size() + logits.numel() * logits.element_size()
        kept = torch.cuda.memory_allocated() - before - given
    assert kept == pytest.approx(expected, rel=0.05)


def test_a_compiled_step_of_an_optimizer_leaves_its_state_behind() -> None:
    with virtual_gpus(1):
        weight = nn.Parameter(torch.ones(1 << 18, device="cuda"))
        optimizer = torch.optim.AdamW([weight], foreach=True)
        step = torch.compile(optimizer.step)
        taken = []
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            before = torch.cuda.memory_allocated()
            step()
            taken.append(torch.cuda.memory_allocated() - before)
        assert taken == [2 * 4 * (1 << 18) + 512, 0]
        assert optimizer.state[weight]["step"].item() == 2.0
        assert weight.max().item() < 1.0


def test_a_graph_that_inductor_refuses_is_estimated_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(inductor, "_lowered", refused)
    notes = Notes()
    with virtual_gpus(1, observer=notes):
        net = torch.compile(nn.Sequential(nn.Linear(24, 24), nn.ReLU()).cuda())
        net(torch.ones(2, 24, device="cuda")).sum().backward()
    (note,) = notes.notes
    assert "estimated" in note
    assert "no such thing" in note


def test_tensors_are_what_they_were_once_a_graph_was_lowered() -> None:
    with virtual_gpus(1, name="NVIDIA H200", shapes=True):
        compiled = torch.compile(lambda x: (x[1:] * 2).sum())
        compiled(torch.randn(300, 300, device="cuda", requires_grad=True)).backward()
    numbers = [torch.tensor(1.0), torch.tensor(2.0)]
    assert torch.tensor(numbers).tolist() == [1.0, 2.0]
