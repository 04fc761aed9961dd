"""Which operands mix, what is said when they do not, and how a repaired run goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.faults import DeviceMismatch, Fault
from trimtab.virtual.observer import Observer

SAME = "Expected all tensors to be on the same device, but "
Work = Callable[[], object]


@pytest.fixture(autouse=True)
def _machine():
    with virtual_gpus(2) as machine:
        yield machine


def of(device: str) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


def ones(device: str = "cpu") -> torch.Tensor:
    return torch.ones(2, 3, device=device)


def gpu(index: int = 0) -> torch.Tensor:
    return of(f"cuda:{index}")


def number(value: float, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(value, device=device)


def after(tensor: torch.Tensor, index: object, value: object) -> torch.Tensor:
    tensor[index] = value
    return tensor


def written(work: Callable[..., object], tensor: torch.Tensor, other: object) -> torch.Tensor:
    work([tensor], other)
    return tensor


def drawn(tensor: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return tensor.bernoulli_(ones() / 2)


# Each mix as a function of two GPUs: given the CPU for both, it says what the values have to be.
LEGAL: dict[str, Callable[[str, str], object]] = {
    "0-dim cpu": lambda a, b: of(a) * number(2.0),
    "0-dim cpu first": lambda a, b: number(2.0) - of(a),
    "cpu index": lambda a, b: of(a)[torch.tensor([0])],
    "cpu mask index": lambda a, b: of(a)[torch.tensor([True, False])],
    "set by cpu index": lambda a, b: of(a).index_put_((torch.tensor([0]),), number(7.0)),
    "copy": lambda a, b: of(a).copy_(ones()),
    "copy between gpus": lambda a, b: ones(a).copy_(of(b)),
    "copy to cpu": lambda a, b: ones().copy_(of(a)),
    "slice from cpu": lambda a, b: after(of(a), (slice(None), 1), torch.zeros(2)),
    "where scalar": lambda a, b: torch.where(of(a) > 1, of(a), number(0.0)),
    "masked_fill scalar": lambda a, b: of(a).masked_fill(of(a) > 1, number(3.0)),
    "fill by another gpu": lambda a, b: of(a).fill_(number(1.0, b)),
    "fill a cpu tensor": lambda a, b: of("cpu").fill_(number(1.0, a)),
    "where 0-dim of another gpu": lambda a, b: torch.where(of(a) > 1, of(a), number(0.0, b)),
    "masked_fill by another gpu": lambda a, b: of(a).masked_fill(of(a) > 1, number(3.0, b)),
    "set by gpu value": lambda a, b: ones().index_put_((torch.tensor([0]),), number(7.0, a)),
    "probabilities from cpu": lambda a, b: drawn(of(a)),
    "index_fill by cpu value": lambda a, b: of(a).index_fill(0, of(a)[0, :1].long(), number(3.0)),
    "slice_scatter from cpu": lambda a, b: torch.slice_scatter(of(a), ones()[:1], 0, 0, 1),
    "allclose to 0-dim cpu": lambda a, b: torch.allclose(of(a), number(1.0)),
    "floor division": lambda a, b: of(a) // number(2.0),
    "comparison in place": lambda a, b: of(a).lt_(number(2.0)),
    "foreach copy": lambda a, b: written(torch._foreach_copy_, of(a), [ones()]),
    "foreach times cpu": lambda a, b: written(torch._foreach_mul_, of(a), number(2.0)),
    "list index": lambda a, b: of(a)[[1, 0]],
    "list index of another gpu": lambda a, b: of(b)[:, [True, False, True]],
    "range index": lambda a, b: of(a)[range(1)],
    "set by list index": lambda a, b: after(of(a), ([0, 1], [0, 2]), 5.0),
    "ctc lengths and targets on the cpu": lambda a, b: F.ctc_loss(
        torch.arange(24.0, device=a).view(4, 2, 3).log_softmax(-1),
        torch.ones(2, 2, dtype=torch.long),
        torch.tensor([4, 4]),
        target_lengths=torch.tensor([2, 1]),
    ),
    "foreach over devices": lambda a, b: torch._foreach_add([of(a), of(b)], [of(a), ones(b)]),
    "equal": lambda a, b: (torch.equal(of(a), of(a)), torch.equal(of(a), ones(a))),
}
ON_THE_CPU = ("copy to cpu", "fill a cpu tensor", "set by gpu value")
ON_THE_SECOND = ("list index of another gpu",)


@pytest.mark.parametrize("name", LEGAL)
def test_legal_mixes_give_the_values_of_the_cpu_on_the_right_device(name: str) -> None:
    found, plain = LEGAL[name]("cuda:0", "cuda:1"), LEGAL[name]("cpu", "cpu")
    if name == "foreach over devices":
        assert [tensor.device.index for tensor in found] == [0, 1]
    many = isinstance(found, (list, tuple))
    for ours, theirs in zip(found, plain, strict=True) if many else ((found, plain),):
        if not isinstance(theirs, torch.Tensor):
            assert ours is theirs
            continue
        assert torch.equal(ours.cpu(), theirs)
        assert ours.dtype is theirs.dtype
        assert ours.device.type == ("cpu" if name in ON_THE_CPU else "cuda")
        assert many or name in ON_THE_CPU or ours.device.index == (name in ON_THE_SECOND)


ILLEGAL: dict[str, tuple[Work, str]] = {
    "add": (lambda: gpu() + ones(), SAME + "found at least two devices, cuda:0 and cpu!"),
    "add reversed": (lambda: ones() + gpu(), SAME + "found at least two devices, cuda:0 and cpu!"),
    "add in place": (lambda: ones().add_(gpu()), SAME + "found at least two devices, cuda:0 and cpu!"),
    "two gpus": (lambda: gpu(0) * gpu(1), SAME + "found at least two devices, cuda:0 and cuda:1!"),
    "0-dim on another gpu": (
        lambda: gpu(0) * torch.tensor(2.0, device="cuda:1"),
        SAME + "found at least two devices, cuda:0 and cuda:1!",
    ),
    "cpu indexed by gpu": (
        lambda: ones()[torch.tensor([0], device="cuda")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "gpu indexed by another": (
        lambda: gpu()[torch.tensor([0], device="cuda:1")],
        "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)",
    ),
    "cat": (
        lambda: torch.cat([gpu(), ones()]),
        SAME + "got tensors is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_cat)",
    ),
    "stack": (lambda: torch.stack([gpu(0), gpu(1)]), SAME + "got tensors is on cuda:1, different from"),
    "embedding": (
        lambda: nn.Embedding(5, 3).cuda()(torch.tensor([1])),
        SAME + "got index is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA__index_select)",
    ),
    "linear": (
        lambda: nn.Linear(3, 2).cuda()(ones()),
        SAME + "got mat1 is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_addmm)",
    ),
    "mm": (
        lambda: gpu() @ ones().t(),
        SAME + "got mat2 is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_mm)",
    ),
    "cross entropy": (
        lambda: F.cross_entropy(gpu(), torch.tensor([0, 1])),
        SAME + "got target is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_nll_loss_forward)",
    ),
    "mse": (lambda: F.mse_loss(gpu(), ones()), SAME + "found at least two devices, cuda:0 and cpu!"),
    "gather": (
        lambda: gpu().gather(1, torch.zeros(2, 1, dtype=torch.long)),
        SAME + "got index is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_gather)",
    ),
    "layer norm": (
        lambda: F.layer_norm(gpu(), (3,), torch.ones(3), torch.ones(3)),
        SAME + "got weight is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA__native_layer_norm)",
    ),
    "masked_fill": (
        lambda: gpu().masked_fill(ones() > 0, 1.0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "where condition": (lambda: torch.where(ones() > 0, gpu(), gpu()), SAME + "found at least two devices"),
    "convolution": (
        lambda: nn.Conv2d(1, 2, 3).cuda()(torch.randn(1, 1, 5, 5)),
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(gpu()[None], ones()[None], ones()[None]),
        "Expected query, key, and value to have the same device type",
    ),
    "dtype": (
        lambda: F.linear(gpu().bfloat16(), torch.ones(4, 3, device="cuda")),
        "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    "integer product": (lambda: gpu().long() @ gpu().long().t(), "\"addmm_cuda\" not implemented for 'Long'"),
    "grad": (
        lambda: setattr(nn.Parameter(gpu()), "grad", ones()),
        "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'",
    ),
    "pin": (
        lambda: gpu().pin_memory(),
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    "index out of range": (
        lambda: nn.Embedding(5, 3).cuda()(torch.tensor([9], device="cuda")),
        "CUDA error: device-side assert triggered",
    ),
    "stack of 0-dim": (
        lambda: torch.stack([gpu().sum(), torch.tensor(0.0)]),
        SAME + "got tensors is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_cat)",
    ),
    "clamp by a 0-dim": (
        lambda: gpu().clamp(min=torch.tensor(1.0)),
        SAME + "got min is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_clamp_Tensor)",
    ),
    "logaddexp of a 0-dim": (
        lambda: torch.logaddexp(gpu(), torch.tensor(1.0)),
        SAME + "got other is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_logaddexp)",
    ),
    "isin a 0-dim": (
        lambda: torch.isin(gpu(), torch.tensor(1.0)),
        SAME + "got test_elements is on cpu, different from",
    ),
    "set by cpu values": (
        lambda: gpu().index_put_((torch.tensor([0, 1]),), ones()),
        SAME + "found at least two devices, cuda:0 and cpu!",
    ),
    "add cpu values": (
        lambda: gpu().index_put_((torch.tensor([0, 1]),), ones(), accumulate=True),
        "expected device cuda:0 but got device cpu for value tensor",
    ),
    "masked_fill of a cpu tensor": (
        lambda: ones().masked_fill(ones() > 0, torch.tensor(1.0, device="cuda")),
        "masked_fill_: Expected inputs to be on same device",
    ),
    "foreach plus a 0-dim": (
        lambda: torch._foreach_add([gpu()], torch.tensor(1.0), alpha=1.0),
        "scalar tensor expected to be on cuda:0 but is on cpu",
    ),
    "histogram": (
        lambda: torch.histogram(gpu(), 3),
        "Could not run 'aten::histogram.bin_ct' with arguments from the 'CUDA' backend.",
    ),
    "recurrent": (
        lambda: nn.LSTM(3, 2).cuda()(gpu(), (torch.zeros(1, 2), torch.zeros(1, 2))),
        "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden tensor at cpu",
    ),
    "foreach": (
        lambda: torch._foreach_add([gpu(0), gpu(0)], [gpu(0), ones()]),
        SAME + "found at least two devices, cuda:0 and cpu!",
    ),
    "unscale bfloat16": (
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [gpu().bfloat16()], torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        ),
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_mixes_say_what_hardware_says(name: str) -> None:
    work, wording = ILLEGAL[name]
    with pytest.raises(RuntimeError) as caught:
        work()
    assert str(caught.value).startswith(wording)


def test_foreach_results_stay_each_on_its_device() -> None:
    sums = torch._foreach_add([gpu(0), gpu(1)], 1.0)
    assert [s.device.index for s in sums] == [0, 1]


def test_optimizer_state_made_before_the_move_fails_at_the_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adagrad(model.parameters())
    model.cuda()
    model(gpu()).sum().backward()
    with pytest.raises(DeviceMismatch, match="found at least two devices, cuda:0 and cpu!"):
        optimizer.step()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}, {}])
def test_optimizer_variants_step(options: dict[str, bool]) -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0, **options)
    parameter.grad = torch.ones(3, device="cuda")
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9] * 3)


def test_a_fused_optimizer_takes_its_learning_rate_from_the_host() -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), weight_decay=0.0, fused=True)
    parameter.grad = torch.ones(3, device="cuda")
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9] * 3)


def test_values_by_list_index_are_those_of_the_cpu() -> None:
    there, here = gpu(), torch.arange(6.0).view(2, 3)
    for index in ([1, 0], ([0, 1], [2, 0]), (slice(None), [2, 1]), [True, False], [[0, 1], [1, 0]], []):
        assert torch.equal(there[index].cpu(), here[index])
    there[[1], [0, 2]] = torch.tensor([8.0, 9.0], device="cuda")
    assert there.tolist() == [[0, 1, 2], [8, 4, 9]]
    parts = torch.unravel_index(torch.tensor([5], device="cuda"), (2, 3))
    assert [(part.device.type, part.item()) for part in parts] == [("cuda", 1), ("cuda", 2)]


def test_half_precision_runs_where_only_cuda_has_a_kernel() -> None:
    half = torch.ones(4, 4, device="cuda", dtype=torch.float16)
    loss = F.multi_margin_loss(half, torch.zeros(4, device="cuda", dtype=torch.long))
    assert loss.dtype is torch.float16
    assert loss.item() == 0.75


class Listener(Observer):
    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, fault: Fault) -> None:
        self.faults.append(fault)


def test_repair_goes_on_and_reports_each_fault() -> None:
    listener = Listener()
    with virtual_gpus(2, observer=listener, on_fault="repair"):
        stray = ones()
        total = gpu(1) + stray
        assert total.device == torch.device("cuda:1")
        assert torch.equal(total.cpu(), gpu(1).cpu() + stray)
        model = nn.Linear(3, 2).to("cuda:0")
        output = model(gpu(1))
        assert output.device == torch.device("cuda:0")
        assert gpu()[:, 0].numpy().tolist() == [0, 3]
    assert [fault.kind for fault in listener.faults] == ["device-mismatch"] * 3
    first = listener.faults[0]
    assert first.op == "aten.add"
    assert [(o.name, o.device) for o in first.operands] == [("self", "cuda:1"), ("other", "cpu")]
    assert first.frame is not None
    assert first.frame.file == __file__
    assert first.frame.function == "test_repair_goes_on_and_reports_each_fault"


def test_a_repaired_forward_is_not_told_again_in_backward() -> None:
    listener = Listener()
    with virtual_gpus(1, observer=listener, on_fault="repair"):
        model = nn.Linear(3, 3).cuda()
        F.cross_entropy(model(gpu()), torch.tensor([0, 1])).backward()
        assert model.weight.grad is not None
    assert len(listener.faults) == 1


def test_raise_carries_the_fault() -> None:
    with pytest.raises(DeviceMismatch) as caught:
        gpu() + ones()
    assert caught.value.fault.kind == "device-mismatch"
    assert caught.value.fault.stack[0].function == "test_raise_carries_the_fault"
