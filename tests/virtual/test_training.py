"""Training on virtual GPUs gives the numbers of the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.virtual import virtual_gpus
from trimtab.virtual.observer import Observer

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(
    model: nn.Module, device: str, batch: Callable[[], Any], loss: Callable[[nn.Module, Any], Any]
) -> Result:
    model.to(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(20):
        value = loss(model, [part.to(device) for part in batch()])
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        losses.append(value.item())
    assert all(p.grad is not None and p.grad.device == torch.device(device) for p in trainable)
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def assert_equal(one: Result, two: Result) -> None:
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def mlp(device: str) -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    return train(
        model,
        device,
        lambda: (torch.randn(5, 8), torch.randint(0, 4, (5,))),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    )


def convolutional(device: str) -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return train(
        model,
        device,
        lambda: (torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    )


@pytest.mark.parametrize("task", [mlp, convolutional])
def test_numbers_are_those_of_the_cpu(task: Callable[[str], Result]) -> None:
    plain = task("cpu")
    with virtual_gpus(2):
        assert_equal(plain, task("cuda:1"))
    with virtual_gpus(2, observer=Observer(), on_fault="repair"):
        assert_equal(plain, task("cuda:0"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_qwen3_with_lora(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    def task(device: str) -> Result:
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
        )
        model = transformers.Qwen3ForCausalLM(config).to(dtype)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, 9:] = 0
        return train(
            peft.get_peft_model(model, lora),
            device,
            lambda: (torch.randint(0, 64, (2, 12)), mask),
            lambda m, b: m(input_ids=b[0], attention_mask=b[1], labels=b[0]).loss,
        )

    plain = task("cpu")
    with virtual_gpus(2):
        assert_equal(plain, task("cuda:1"))


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"mask": "bool"}, {"mask": "float"}, {"gqa": True}]
)
def test_attention_takes_the_cpus_kernel(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, other = torch.randn(1, 2, 5, 8), torch.randn(1, 1 if options.get("gqa") else 2, 5, 8)
    mask = {"bool": torch.ones(5, 5, dtype=torch.bool).tril(), "float": torch.randn(5, 5)}.get(
        options.get("mask", "")
    )

    def attend(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = query.clone().to(device).requires_grad_(), other.to(device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            k,
            attn_mask=None if mask is None else mask.to(device),
            is_causal=options.get("is_causal", False),
            enable_gqa=options.get("gqa", False),
        )
        out.sum().backward()
        assert q.grad is not None
        return out.detach().cpu(), q.grad.cpu()

    plain = attend("cpu")
    with virtual_gpus(1):
        there = attend("cuda:0")
    assert torch.equal(plain[0], there[0])
    assert torch.equal(plain[1], there[1])


def test_gradients_cross_devices() -> None:
    with virtual_gpus(2):
        leaf = torch.ones(2, requires_grad=True)
        (leaf.cuda(1) * 2).to("cuda:0").sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.device.type == "cpu"
        assert leaf.grad.tolist() == [2, 2]


def test_second_derivatives() -> None:
    with virtual_gpus(1):
        x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        gradient.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6, 12]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_with_the_same_dropout(reentrant: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ x, 0.5) * torch.tensor(2.0, device="cuda:1")

    with virtual_gpus(2):
        start = torch.randn(3, 3)
        grads = []
        for run in (lambda x: checkpoint(body, x, use_reentrant=reentrant), body):
            torch.manual_seed(3)
            x = start.to("cuda:1").requires_grad_()
            run(x).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_user_code_inside_backward_sees_the_gpus() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            assert grad.is_cuda
            assert x.is_cuda
            return grad * torch.tensor(2.0, device=grad.device)

    with virtual_gpus(1):
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(lambda g: g * torch.tensor([1.0, 3.0], device="cuda"))
        Double.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 6]


def test_data_parallel() -> None:
    with virtual_gpus(2):
        model = nn.DataParallel(nn.Linear(3, 2).cuda(), [0, 1])
        x = torch.randn(4, 3, device="cuda")
        out = model(x)
        out.sum().backward()
        assert out.device.index == 0
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.device.index == 0
        assert torch.allclose(out, model.module(x))


def test_modules_that_branch_on_the_device_run() -> None:
    with virtual_gpus(1):
        x = torch.randn(2, 3, 8, device="cuda")
        nn.LSTM(8, 4, batch_first=True).cuda()(x)[0].sum().backward()
        nn.GRU(8, 4, batch_first=True).cuda()(x)
        nn.MultiheadAttention(8, 2, batch_first=True).cuda()(x, x, x)
        layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).cuda()
        layer(x).sum().backward()
        layer.eval()
        with torch.no_grad():
            layer(x)


def test_a_lazy_layer_is_made_on_the_gpu_to_which_it_was_moved() -> None:
    with virtual_gpus(2):
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2)).to("cuda:1", torch.bfloat16)
        out = model(torch.ones(3, 2, 2, device="cuda:1", dtype=torch.bfloat16))
        weight = model[1].weight
        assert (str(weight.device), weight.dtype, tuple(weight.shape)) == ("cuda:1", torch.bfloat16, (2, 4))
        out.sum().backward()
        assert weight.grad is not None


def test_sparse_adam_steps_as_on_the_cpu() -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 1], device=device)).pow(2).sum().backward()
            optimizer.step()
        return table.weight.detach().cpu()

    on_cpu = run("cpu")
    with virtual_gpus(1):
        assert torch.equal(run("cuda"), on_cpu)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_traced_function_with_a_constant_runs(device: str) -> None:
    with virtual_gpus(1):
        traced = torch.jit.trace(lambda x: (x * 2).sqrt() + 1, torch.ones(3, device=device))
        assert torch.equal(traced(torch.full((2,), 2.0, device=device)).cpu(), torch.full((2,), 3.0))


class _Remade(nn.Module):
    """Keeps its weights in a list, and says so in a `parameters` of its own (as code for meta-learning does)."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])
        self.layer = nn.Linear(2, 2)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self.vars)

    def __eq__(self, other: object) -> bool:  # with this a class has no hash
        return isinstance(other, _Remade)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.vars[0]


def test_a_module_with_parameters_of_its_own_is_made_as_without() -> None:
    with virtual_gpus(1, observer=Observer()):
        model = _Remade().cuda()
        model.inner = model.layer  # registered twice
        assert model(torch.ones(1, 2, device="cuda")).device.type == "cuda"
