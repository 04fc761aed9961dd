"""torch.inference_mode on virtual GPUs: what plain CPU tensors do is the truth that they are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.tensor import is_virtual


@pytest.fixture(autouse=True)
def _machine():
    with virtual_gpus(2) as machine:
        yield machine


def _numbers(device: str) -> Tensor:
    return torch.arange(1.0, 33.0).view(8, 4).to(device, copy=True)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.is_inference(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        tensor.stride(),
        tensor.tolist(),
    )


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t[:4],
    "view": lambda t: t.view(-1),
    "chunk": lambda t: t.chunk(2)[1],
    "split": lambda t: t.split(3)[2],
    "unbind": lambda t: t.unbind(0)[1],
    "detach": lambda t: t.detach(),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "reshape": lambda t: t.reshape(4, 8),
    "flatten": lambda t: t.flatten(),
    "expand": lambda t: t[None].expand(2, 8, 4),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "tensor_split": lambda t: t.tensor_split(3)[0],
    "other dtype": lambda t: t.view(torch.int32),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda t: t.clone(),
    "compare": lambda t: t != 0,
    "view of a comparison": lambda t: (t != 0).view(-1),
    "dtype": lambda t: t.to(torch.float64),
    "product": lambda t: F.linear(t, t[:2]),
    "reshape that copies": lambda t: t.t().reshape(-1),
    "contiguous that copies": lambda t: t.t().contiguous(),
    "several results": lambda t: t.max(0)[1],
    "mask": lambda t: t[t > 5],
}


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
@pytest.mark.parametrize("parameter", [True, False])
def test_results_inside_are_what_they_are_on_the_cpu(name: str, parameter: bool) -> None:
    make = (VIEWS | COPIES)[name]
    seen = []
    for device in ("cpu", "cuda"):
        source = nn.Parameter(_numbers(device)) if parameter else _numbers(device)
        with torch.inference_mode():
            result = make(source)
            inside = _facts(result), result.device.type == device
        seen.append((inside, _facts(result), result.is_inference()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "other dtype"])
def test_views_of_inference_tensors_are_inference_tensors_outside_too(name: str) -> None:
    seen = []
    for device in ("cpu", "cuda"):
        with torch.inference_mode():
            source = _numbers(device)
        result = VIEWS[name](source)
        assert result.is_inference()
        assert result.data_ptr() == source.data_ptr() + result.storage_offset() * 4
        seen.append(_facts(result))
    assert seen[0] == seen[1]


def test_moving_with_a_dtype_makes_a_copy_with_values() -> None:
    plain = torch.ones(3)
    with torch.inference_mode():
        mask = (plain != 0).to("cuda", torch.float32)
        moved = plain.to("cuda:1", torch.bfloat16)
        named = plain.to(dtype=torch.float64, device="cuda")
        same = plain.to("cuda")
        like = (plain != 0).to(moved)
        assert mask.sum().item() == moved.sum().item() == named.sum().item() == like.sum().item() == 3
        assert all(is_virtual(t) and t.is_inference() for t in (mask, moved, named, same, like))
        assert like.device == moved.device == torch.device("cuda", 1)
        same.zero_()
        back = moved.cpu()
        assert back.device.type == "cpu"
        back.zero_()
    assert plain.tolist() == [1, 1, 1]
    assert moved.tolist() == [1, 1, 1]


def test_a_reshape_that_copies_is_counted_and_one_that_views_is_not() -> None:
    with torch.inference_mode():
        base = torch.zeros(1024, 256, device="cuda")
        before = torch.cuda.memory_allocated()
        view = base.reshape(-1)
        assert torch.cuda.memory_allocated() == before
        copied = base.t().reshape(-1)
        assert torch.cuda.memory_allocated() == before + 1024 * 256 * 4
    assert view.numel() == copied.numel()


def test_writes_through_views_reach_the_base() -> None:
    weight = nn.Parameter(torch.ones(3, 2, device="cuda"))
    with torch.inference_mode():
        weight[1:].mul_(3)
        weight.flatten()[0] = 9
        fresh = torch.zeros(4, device="cuda")
        fresh.view(2, 2)[1].fill_(5)
        fresh.unsqueeze_(0)
        assert fresh.tolist() == [[0, 0, 5, 5]]
    assert weight.tolist() == [[9, 1], [3, 3], [3, 3]]
    assert weight._version == 2
    assert not weight.is_inference()


def _made_inside(device: str) -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 2, device=device)


def _write_outside(device: str) -> Any:
    return _made_inside(device).add_(1)


def _write_by_another_name_outside(device: str) -> Any:
    return _made_inside(device).multiply_(2)  # made of mul_


def _write_view_outside(device: str) -> Any:
    return _made_inside(device)[1:].zero_()


def _save_for_backward(device: str) -> Any:
    return _made_inside(device) * torch.ones(3, 2, device=device, requires_grad=True)


def _require_grad(device: str) -> Any:
    return _made_inside(device).requires_grad_()


def _write_outside_through_view_from_inside(device: str) -> Any:
    weight = torch.ones(3, 2, device=device, requires_grad=True) * 2
    with torch.inference_mode():
        view = weight.flatten()
    return view.add_(1)


def _write_in_an_island(device: str) -> Any:
    with torch.inference_mode():
        tensor = torch.ones(2, device=device)
        with torch.inference_mode(False):
            return tensor.add_(1)


def _version(device: str) -> Any:
    return _made_inside(device)._version


@pytest.mark.parametrize(
    "act",
    [
        _write_outside,
        _write_by_another_name_outside,
        _write_view_outside,
        _save_for_backward,
        _require_grad,
        _write_outside_through_view_from_inside,
        _write_in_an_island,
        _version,
    ],
)
def test_what_torch_forbids_is_forbidden_in_its_words(act: Callable[[str], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"[Ii]nference") as plain:
        act("cpu")
    with pytest.raises(RuntimeError) as virtual:
        act("cuda")
    assert str(virtual.value).splitlines()[0] == str(plain.value).splitlines()[0]


def test_a_clone_leaves_inference_mode() -> None:
    tensor = _made_inside("cuda")
    copied = tensor.clone()
    assert tensor.is_inference()
    assert not copied.is_inference()
    weight = torch.full((3, 2), 2.0, device="cuda", requires_grad=True)
    (copied * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == tensor.tolist()
    assert (tensor + weight).requires_grad  # nothing is saved for this one


def test_an_island_of_training_inside() -> None:
    with torch.inference_mode():
        with torch.inference_mode(False):
            weight = torch.ones(3, device="cuda", requires_grad=True)
            (weight * 2).sum().backward()
        assert torch.is_inference_mode_enabled()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2, 2, 2]
        assert not weight.grad.is_inference()
        assert (weight * 2).is_inference()


def test_as_a_decorator() -> None:
    @torch.inference_mode()
    def count(tensor: Tensor) -> tuple[Tensor, bool]:
        return (tensor != 0).view(-1).sum(), torch.is_inference_mode_enabled()

    total, enabled = count(torch.ones(3, 2, device="cuda:1"))
    assert enabled
    assert not torch.is_inference_mode_enabled()
    assert total.item() == 6
    assert total.is_inference()
    assert total.device == torch.device("cuda", 1)


@pytest.mark.parametrize("inside", [False, True])
def test_data_is_assigned_between_inference_and_ordinary_tensors(inside: bool) -> None:
    seen = []
    for device in ("cpu", "cuda"):
        ordinary, made = torch.zeros(3, 2, device=device), _made_inside(device)
        first, second = (ordinary, made) if inside else (made, ordinary)
        first.data = second
        seen.append((first.tolist(), first.is_inference()))
    assert seen[0] == seen[1]


def test_a_module_moved_or_loaded_inside() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        module.to("cuda")
        module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
        assert module(torch.ones(1, 2, device="cuda")).tolist() == [[3, 3]]
    assert all(p.requires_grad and p.device.type == "cuda" for p in module.parameters())


def test_a_parameter_of_a_parameter_shares_its_storage() -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    again = nn.Parameter(weight, requires_grad=False)
    assert isinstance(again, nn.Parameter)
    assert again is not weight
    assert not again.requires_grad
    with torch.inference_mode():
        assert nn.Parameter(weight).data_ptr() == weight.data_ptr()


def test_composite_operations_keep_the_rules_of_their_parts() -> None:
    values, labels = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        with pytest.raises(NotImplementedError, match="addmm_cuda"):
            labels @ labels
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            F.linear(values, values.bfloat16())
        with pytest.raises(RuntimeError, match="same device"):
            F.linear(values, values.to("cuda:1"))


def test_autocast_inside_is_autocast_without_gradients() -> None:
    layer = nn.Linear(4, 4).to("cuda")
    values, labels = _numbers("cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(values)
            results = (
                out,
                torch.einsum("ij,kj->ik", values, values),
                F.cross_entropy(out, labels),
                F.cosine_similarity(out, values),
                torch.cdist(values, values),
            )
        seen.append([(r.dtype, r.tolist()) for r in results])
    assert [dtype for dtype, _ in seen[0]][:3] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert seen[0] == seen[1]
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.inference_mode():
            layer(values)
        layer(values).sum().backward()  # nothing of the inside is kept for this
    assert layer.weight.grad is not None


def _model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def _generate(model: Any, device: str) -> Any:
    ids = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6]]).to(device)
    mask = (ids != 0).to(device, torch.long)
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False).tolist()


def test_generate_on_one_and_on_two_gpus() -> None:
    wanted = _generate(_model(), "cpu")
    assert _generate(_model().to("cuda:1"), "cuda:1") == wanted
    accelerate = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    assert _generate(accelerate.dispatch_model(_model(), places), "cuda:0") == wanted
