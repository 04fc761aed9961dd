"""torch.compile on virtual GPUs: the same values, and the memory of what the compiler would keep."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from trimtab.virtual import pieces
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer
from trimtab.virtual.state import Machine

ROWS, WIDTH = 64, 128
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS keeps is none of a compiler's business."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with virtual_gpus(1) as made:
        yield made


class Gated(nn.Module):
    """A layer of a language model, without its attention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Attending(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.joint, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joint(self.norm(x))[None].unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        return x + self.out(mixed[0].transpose(0, 1).flatten(1))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(), Attending(), Gated())


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, x: torch.Tensor, step: Step | None = None) -> list[torch.Tensor]:
    out = step(model, x) if step else model(x)
    out.square().mean().backward()
    found = [out, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [tensor.detach().cpu() for tensor in found]


def one_by_one(model: Any) -> None:
    for layer in model:
        layer.compile()


def whole(model: Any) -> None:
    model.compile(fullgraph=True)


def through_checkpoints(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("compiled", [one_by_one, whole])
@pytest.mark.parametrize("step", [None, through_checkpoints])
def test_values_and_gradients_are_those_of_the_plain_code(
    machine: Machine, compiled: Callable[[Any], None], step: Step | None
) -> None:
    expected = trained(stack().cuda(), rows().cuda(), step)
    model = stack().cuda()
    compiled(model)
    for _ in range(2):
        model.zero_grad()
        for mine, theirs in zip(trained(model, rows().cuda(), step), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_nothing_is_left_behind(machine: Machine) -> None:
    model = stack().cuda()
    one_by_one(model)
    x = rows().cuda()
    gc.disable()
    try:
        trained(model, x)
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        trained(model, x)
        model.zero_grad()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def told_by_torch(model: nn.Module, x: torch.Tensor) -> int:
    """The bytes that torch's own compiler keeps on the CPU for the backward pass, besides inputs and outputs."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        made = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
        results: Any = next(node for node in made[0].graph.nodes if node.op == "output").args[0]
        saved = [node for node in results[num_fwd_outputs:] if node.op != "placeholder"]
        own = {node.meta["val"].untyped_storage()._cdata for node in results[:num_fwd_outputs]}
        storages = [node.meta["val"].untyped_storage() for node in saved]
        sizes = {one._cdata: one.nbytes() for one in storages if one._cdata not in own}
        kept.append(sum(-(-size // 512) * 512 for size in sizes.values()))
        return made

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=cut, decompositions=select_decomp_table()
    )
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    torch._dynamo.reset()
    (found,) = kept
    return found


@pytest.mark.parametrize(
    ("kind", "budget"), [(Gated, 1.0), (Gated, 0.5), (Gated, 0.0), (Attending, 1.0), (Attending, 0.0)]
)
def test_what_is_kept_is_what_torch_keeps(kind: type[nn.Module], budget: float) -> None:
    torch.manual_seed(0)
    model, x = kind(), rows().requires_grad_()
    with config.patch(activation_memory_budget=budget):
        expected = told_by_torch(copy.deepcopy(model), x)
        with virtual_gpus(1):
            there, here = model.cuda(), x.detach().cuda().requires_grad_()
            there.compile()
            before = torch.cuda.memory_allocated()
            out = there(here)
            kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    # CUDA's attention and norms keep other small numbers than the CPU's do.
    assert abs(kept - expected) <= 1024


def test_shapes_are_counted_as_values_are() -> None:
    def peak(shapes: bool) -> tuple[int, int]:
        with virtual_gpus(1, shapes=shapes) as machine:
            model = stack().cuda()
            one_by_one(model)
            x = rows().repeat(20, 1).cuda()
            for _ in range(2):
                model(x).square().mean().backward()
            return machine.devices[0].peak, machine.devices[0].allocated

    assert peak(True) == peak(False)


def test_fused_operations_take_no_memory(machine: Machine) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = (x * 2).sin() + 1
        return x

    x = torch.zeros(1 << 16, device="cuda")
    peaks = []
    for function in (chain, torch.compile(chain)):
        torch.cuda.reset_peak_memory_stats()
        function(x)
        peaks.append(torch.cuda.max_memory_allocated() - x.numel() * 4)
    assert peaks[1] == 4 << 16 < peaks[0]


def test_equal_layers_are_made_one_graph(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.virtual import joint_graph

    made, cut = [], joint_graph.cut
    monkeypatch.setattr(joint_graph, "cut", lambda *args: made.append(args) or cut(*args))
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(96) for _ in range(4))).cuda()
    one_by_one(model)
    x = torch.randn(32, 96).cuda().requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    assert len(made) == 1


def test_nobody_asks_who_allocates_inside_of_a_piece(machine: Machine) -> None:
    """What a piece makes while it is written down is counted aside; where that was is of no interest there."""
    device = machine.devices[0]
    with pieces.aside(device) as other:
        made = torch.empty(1 << 20, device="cuda")
    assert other.allocated == made.nbytes
    assert not other.ledger.places
    outside = torch.empty(1 << 20, device="cuda")
    assert device.allocated == outside.nbytes
    assert device.ledger.places["load"].op == "aten::empty"


def test_checkpointed_layers_keep_their_inputs_alone(machine: Machine) -> None:
    model = stack().cuda()
    one_by_one(model)
    x = rows().cuda().requires_grad_()
    before = torch.cuda.memory_allocated()
    out = through_checkpoints(model, x)
    assert torch.cuda.memory_allocated() - before == 3 * out.numel() * out.element_size()


class Scaled(nn.Module):
    """What its own result is kept for the gradient of."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1).tanh())


def test_checkpointed_passes_leave_nothing_behind(machine: Machine) -> None:
    layer = Scaled().cuda()
    compiled = torch.compile(layer)
    first = nn.Linear(WIDTH, WIDTH).cuda()
    held = []
    for _ in range(4):
        entering = first(torch.randn(ROWS, WIDTH, device="cuda"))
        checkpoint(compiled, entering, use_reentrant=False).sum().backward()
        del entering
        gc.collect()
        graphs = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.grad_fn is not None]
        held.append((torch.cuda.memory_allocated(), len(graphs)))
        del graphs
    assert held[1:] == held[1:2] * 3


class Asking(Gated):
    """Asks for a value in its midst, which no compiler knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        gated = nn.functional.silu(self.gate(normed))
        self.seen = gated.sum().tolist()
        return x + self.down(gated * self.up(normed))


def offloaded(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        for layer in model:
            x = layer(x)
    return x


@pytest.mark.parametrize("step", [through_checkpoints, offloaded])
def test_what_is_counted_as_it_runs_keeps_what_the_hooks_of_the_program_keep(
    machine: Machine, step: Step
) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Asking(), Asking(), Asking()).cuda()
        if compiled:
            one_by_one(model)
        x = rows().cuda().requires_grad_()
        before = torch.cuda.memory_allocated()
        out = step(model, x)
        kept = torch.cuda.memory_allocated() - before
        out.sum().backward()
        found.append((kept, [parameter.grad.cpu() for parameter in model.parameters()]))  # type: ignore[union-attr]
        del out, model, x
    (plain, expected), (kept, gradients) = found
    assert kept == plain
    assert all(map(torch.equal, gradients, expected))


def test_a_value_that_is_asked_for_breaks_the_graph_and_is_told() -> None:
    def asking(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    notes = Notes()
    with virtual_gpus(1, observer=notes):
        x = torch.ones(4, device="cuda")
        assert torch.compile(asking)(x).tolist() == [2.0] * 4
        (note,) = notes.notes
        assert "asking" in note
        assert "asks a tensor for its values" in note
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph=True"):
            torch.compile(asking, fullgraph=True)(x)


COLLECTING: ContextVar[list[Any] | None] = ContextVar("collecting", default=None)


def test_a_hook_that_asks_a_context_is_refused_as_torch_refuses_it() -> None:
    """As transformers collects what routers decide: layers with experts are compiled by nobody then."""

    def collect(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        if (found := COLLECTING.get()) is not None:
            found.append(out)

    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(collect)
    try:
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 8))
        traced = True  # as torch does from 2.15 on
    except torch._dynamo.exc.Unsupported:
        traced = False
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match="ContextVar")
    with virtual_gpus(1, observer=(notes := Notes())):
        with nullcontext() if traced else refused:
            torch.compile(model.cuda(), fullgraph=True)(torch.randn(2, 8, device="cuda"))
        assert bool(notes.notes) == traced
        torch.compile(model)(torch.randn(2, 8, device="cuda"))
        assert any("hooks inside of it" in note for note in notes.notes)


def test_a_step_that_calls_backward_is_counted_as_it_runs() -> None:
    notes = Notes()
    with virtual_gpus(1, observer=notes):
        model = Gated().cuda()

        @torch.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        step(rows().cuda())
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert ["backward()" in note for note in notes.notes] == [True]


def test_a_backend_that_calls_inductor_under_its_own_settings(machine: Machine) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    def frugal(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=0.0):
            return lookup_backend("inductor")(graph, inputs)

    def kept(**options: Any) -> int:
        model = torch.compile(Gated().cuda(), **options)
        x = rows().cuda().requires_grad_()
        before = torch.cuda.memory_allocated()
        out = model(x)
        return torch.cuda.memory_allocated() - before - out.numel() * out.element_size()

    assert kept(backend=frugal) < kept() // 4


def test_what_is_written_to_an_argument_stays(machine: Machine) -> None:
    def add(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach())
        x.mul_(3)
        return x + 1

    results = []
    for function in (add, torch.compile(add)):
        leaf, total = torch.ones(4, device="cuda", requires_grad=True), torch.zeros(4, device="cuda")
        x = leaf * 2
        function(x, total).sum().backward()
        results.append((leaf.grad.tolist(), total.tolist(), x.tolist()))  # type: ignore[union-attr]
    assert results[0] == results[1]


def test_methods_functions_and_modules_stay_what_they_are(machine: Machine) -> None:
    class Doubling(nn.Module):
        @torch.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Doc."""
            return x * 2

    assert Doubling()(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert Doubling.forward.__doc__ == "Doc."
    model = torch.compile(Gated().cuda())
    assert list(model.state_dict()) == [f"_orig_mod.{name}" for name in Gated().state_dict()]
    assert torch.compile(dynamic=True)(lambda x: x + 1)(torch.ones(1, device="cuda")).item() == 2.0


def test_a_kernel_of_the_program_is_one_step_of_the_graph() -> None:
    pytest.importorskip("triton")
    import triton_programs

    def summed(x: torch.Tensor) -> torch.Tensor:
        y, out = x + 1, torch.empty_like(x)
        triton_programs.add[(x.numel() // 1024,)](y, y, out, x.numel(), BLOCK=1024)
        return out * 3

    with virtual_gpus(1, shapes=True):
        x = torch.zeros(1 << 17, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        out = torch.compile(summed)(x)
        assert out.shape == x.shape
        assert (
            torch.cuda.max_memory_allocated() == 3 * 4 << 17
        )  # x, what is added to itself, and what is written


@torch.library.custom_op("trimtab_tests::into", mutates_args={"out"})
def into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    out.addmm_(left, right)


def test_an_operation_that_only_writes_is_taken_into_the_graph() -> None:
    """`mutates_args` and no result: torch cannot make such an operation anew, its compiler takes it as it is."""

    def step(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(left)
        into(out, left, right.detach())
        return (out * right).sum()

    notes = Notes()
    with virtual_gpus(1, observer=notes):
        left = torch.randn(WIDTH, WIDTH, device="cuda")
        right = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
        made = torch.compile(step)(left, right)
        made.backward()
        assert torch.equal(made.detach(), step(left, right).detach())
        assert right.grad is not None
        assert torch.allclose(right.grad, left @ right.detach())
    assert notes.notes == []


def test_launches_inside_an_operation_that_is_taken_into_a_graph() -> None:
    """The graph is made with tensors that have no memory: no fault of the program, whose tensors have some."""
    pytest.importorskip("triton")
    import triton_programs

    @torch.library.triton_op("trimtab_tests::twice", mutates_args={})
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(triton_programs.add)[(x.numel() // 1024,)](x, x, out, x.numel(), BLOCK=1024)
        return out

    notes = Notes()
    with virtual_gpus(1, observer=notes):
        x = torch.randn(ROWS, WIDTH, device="cuda")
        assert torch.equal(torch.compile(lambda x: twice(x) + 1)(x), x + x + 1)
        with (
            torch._subclasses.FakeTensorMode(),
            pytest.raises(RuntimeError, match="Cannot access data pointer"),
        ):
            triton_programs.add[(1,)](*[torch.empty(4) for _ in range(3)], 4, BLOCK=16)
    assert notes.notes == []


def test_lengths_that_are_read_are_counted_as_the_code_runs() -> None:
    """A tower that is told by a tensor where its pictures end: whether torch compiles it, the sizes decide, and no
    program is told that it fails."""

    def apart(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.square() for part in x.split(lengths.tolist())])

    notes = Notes()
    with virtual_gpus(1, shapes=True, observer=notes):
        x, lengths = torch.randn(8, 4, device="cuda"), torch.tensor([3, 5], device="cuda")
        assert torch.compile(apart, fullgraph=True)(x, lengths).shape == (8, 4)
    assert any("tolist" in note and "as it runs" in note for note in notes.notes)
