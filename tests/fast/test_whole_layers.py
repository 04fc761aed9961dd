"""Decoder layers in few passes: losses and gradients are plain PEFT's, and what is not of their form is left alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_rows import CPU, SOUND, given, model
from torch import nn

from trimtab.data.collate import Collate
from trimtab.fast import whole_layers as whole
from trimtab.fast.answers import use_answers
from trimtab.fast.lora import use_fast_adapters
from trimtab.fast.reordered import use_reordered
from trimtab.fast.rows import lay_rows
from trimtab.fast.whole_layers import picks_answers, use_whole_layers, whole_layers
from trimtab.placement import bare_model as bare_of
from trimtab.placement.witness import Witness

OF_THE_FORM: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": SOUND["gemma3_text"],
    "cohere": SOUND["cohere"],
    "granite": {"residual_multiplier": 0.5},
    "llama": {"hidden_act": "gelu"},
    "deepseek_v3": SOUND["deepseek_v3"],
}
START = [7, 3, 50, 12, 9, 9, 41, 2, 30, 8]
ROWS: list[dict[str, Any]] = [
    {"input_ids": START + end, "labels": [-100] * (len(START) + 1) + [*end[1:-1], -100]}
    for end in ([5, 9, 33, 7], [8, 3, 1], [12, 4, 71, 70, 69, 3])
]


def bare_model(built: Any) -> Any:
    return bare_of(built)


def adapted(kind: str, changes: dict[str, Any], **lora: Any) -> Any:
    settings = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **lora)
    torch.manual_seed(3)
    built = get_peft_model(model(kind, **changes), settings)
    for name, parameter in built.named_parameters():
        if "lora_" in name or "bias" in name or "norm" in name:
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return built.train()


def fast(kind: str, changes: dict[str, Any], *, room: float = 0.0, **lora: Any) -> Any:
    built = adapted(kind, changes, **lora)
    use_fast_adapters(built)
    use_whole_layers(built)
    use_reordered(built, room)
    return built


def step(built: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states, and the gradients of a sum over them: where softmax ends, gradients would fade."""
    built.zero_grad()
    inputs = inputs or {"input_ids": torch.arange(26).view(2, 13) * 13 % 96}
    hidden = bare_model(built).base_model(**inputs, use_cache=False).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}


def assert_same(found: Any, due: Any) -> None:
    torch.testing.assert_close(found[0], due[0], rtol=1e-3, atol=1e-4)
    assert found[1].keys() == due[1].keys()
    for name, gradient in due[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("room", [0.0, 1e9])
@pytest.mark.parametrize("kind", OF_THE_FORM)
def test_what_comes_out_and_all_gradients_are_those_of_peft(kind: str, room: float) -> None:
    built = fast(kind, OF_THE_FORM[kind], room=room)
    assert len(list(whole_layers(built))) == 2
    assert_same(step(built), step(adapted(kind, OF_THE_FORM[kind])))


def test_copies_that_find_room_for_the_forward_product_alone_give_the_same() -> None:
    built = fast("llama", {})
    weights = [w for _, layer in whole_layers(built) for _, group in layer.kept() for w in group]
    head = bare_model(built).get_output_embeddings().weight
    use_reordered(built, room=sum(w.nbytes for w in [*weights, head]))
    assert_same(step(built), step(adapted("llama", {})))


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_form_stay_as_they_are(kind: str) -> None:
    built = fast(kind, OTHERS[kind])
    assert not list(whole_layers(built))
    assert_same(step(built), step(adapted(kind, OTHERS[kind])))


def test_layers_that_fail_their_trial_are_told_with_the_reason() -> None:
    built = adapted("llama", {})
    use_fast_adapters(built)
    first, second = bare_model(built).base_model.layers
    turned = first.mlp.act_fn
    first.mlp.act_fn = nn.Tanh()  # not the function that the few passes compute
    second.self_attn.register_forward_hook(lambda module, given, out: out[0][:0])
    changed, refused = use_whole_layers(built)
    assert changed == 0
    assert sum(refused.values()) == 2
    assert refused.pop("its results come out otherwise") == 1
    ((why, _),) = refused.items()
    assert why.startswith("tried, it fails (")
    first.mlp.act_fn = turned
    assert use_whole_layers(built)[0] == 1


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", OF_THE_FORM)
def test_losses_at_the_answers_are_those_of_each_row_alone(kind: str, shares: bool) -> None:
    due_model = adapted(kind, OF_THE_FORM[kind])
    built = fast(kind, OF_THE_FORM[kind], room=1e9)
    laid = lay_rows(built, CPU, packing=False, longest=64)
    use_answers(built, CPU)
    assert picks_answers(bare_model(built))
    batch = Collate(laid.layout, 0, shares=shares)(ROWS)
    assert ("computed" in batch) is shares
    told = built(**{n: v for n, v in given(batch).items() if n != "lengths"})
    told["loss"].backward()
    losses, count = [], 0
    for row in ROWS:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        logits = due_model(input_ids=ids, use_cache=False).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] >= 0).sum())
    due = torch.stack(losses).sum() / count
    due.backward()
    torch.testing.assert_close(told["loss"], due, rtol=1e-4, atol=1e-5)
    theirs = dict(due_model.named_parameters())
    for name, parameter in built.named_parameters():
        if parameter.requires_grad:
            wanted = theirs[name].grad
            assert (parameter.grad - wanted).norm() <= 1e-3 * wanted.norm() + 1e-6, name


def test_a_window_is_asked_for_as_the_layer_asks() -> None:
    built = fast("mistral", {"sliding_window": 4})
    assert [layer.asked["sliding_window"] for _, layer in whole_layers(built)] == [4, 4]


def test_whoever_listens_inside_of_a_layer_hears() -> None:
    built = fast("llama", {}, room=1e9)
    heard = []
    inside = bare_model(built).base_model.layers[1].mlp.up_proj
    handle = inside.register_forward_hook(lambda *given: heard.append(given[0]))
    due = step(adapted("llama", {}))
    assert_same(step(built), due)
    assert heard == [inside]
    handle.remove()
    assert_same(step(built), due)
    assert len(heard) == 1


def test_a_witness_looks_from_outside_so_that_a_first_step_is_rounded_as_any_other() -> None:
    built = fast("llama", {}, room=1e9)
    due, _ = step(built)
    witness = Witness(bare_model(built))
    assert witness.closed_around("model.layers.1.mlp.up_proj") == "model.layers.1"
    assert witness.closed["model.layers.1"] == "speed.adapters=plain"
    found, _ = step(built)
    assert witness.seen["model.layers.1"].answered
    witness.remove()
    assert torch.equal(found, due)


def test_answers_are_picked_also_where_a_layer_is_computed_plainly() -> None:
    built = fast("llama", {})
    lay_rows(built, CPU, packing=False, longest=64)
    use_answers(built, CPU)
    batch = {n: v for n, v in given(Collate("rows", 0, shares=True)(ROWS)).items() if n != "lengths"}
    before = built(**batch)["loss"].detach()
    bare_model(built).base_model.layers[1].mlp.register_forward_hook(lambda *given: None)
    torch.testing.assert_close(built(**batch)["loss"].detach(), before, rtol=1e-4, atol=1e-5)


def test_dropout_and_other_formats_take_the_layers_own_way() -> None:
    assert not list(whole_layers(fast("llama", {}, lora_dropout=0.5)))
    half = fast("llama", {}, room=1e9).bfloat16()
    hidden, _ = step(half)
    assert hidden.dtype is torch.bfloat16
    built = fast("llama", {}, room=1e9)
    with torch.autocast("cpu", torch.bfloat16):
        step(built)


def test_a_square_that_overflows_shows_on_the_way_back() -> None:
    built, due = fast("llama", {}), adapted("llama", {})
    for made in (built, due):
        bare_model(made).get_input_embeddings().weight.data[13] = 3e38
    for made in (built, due):
        _, gradients = step(made)
        assert any(not bool(gradient.isfinite().all()) for gradient in gradients.values())


def test_an_attention_of_the_models_own_is_left_to_it() -> None:
    built, due = fast("llama", {}), adapted("llama", {})
    for made in (built, due):
        bare_model(made).set_attn_implementation("eager")
    assert_same(step(built), step(due))


def test_merged_adapters_are_not_added_twice_and_merged_weights_are_seen() -> None:
    built, due = fast("llama", {}, room=1e9), adapted("llama", {})
    ids = torch.tensor([[5, 9, 33, 7]])
    wanted = due(input_ids=ids).logits
    built.merge_adapter()
    torch.testing.assert_close(built(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-3)
    built.unmerge_adapter()
    torch.testing.assert_close(built(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-3)
    with built.disable_adapter(), due.disable_adapter():
        torch.testing.assert_close(
            built(input_ids=ids).logits, due(input_ids=ids).logits, rtol=1e-3, atol=1e-3
        )


def test_a_model_that_writes_keeps_its_cache() -> None:
    built, due = fast("qwen3", {}, room=1e9).eval(), adapted("qwen3", {}).eval()
    for use_cache in (False, True):
        written = [
            made.generate(
                torch.tensor([[5, 9, 33, 7]]), max_new_tokens=9, do_sample=False, use_cache=use_cache
            ).tolist()
            for made in (built, due)
        ]
        assert written[0] == written[1]


def test_checkpointed_layers_give_the_same_gradients() -> None:
    built = fast("llama", {}, room=1e9)
    built.gradient_checkpointing_enable({"use_reentrant": False})
    built.enable_input_require_grads()
    assert_same(step(built), step(adapted("llama", {})))


def test_copies_and_pickles_have_plain_layers() -> None:
    built = fast("llama", {}, room=1e9)
    due = step(built)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert not list(whole_layers(other))
        assert_same(step(other), due)


def test_a_copy_that_computes_answers_computes_all_places() -> None:
    built = fast("llama", {})
    lay_rows(built, CPU, packing=False, longest=64)
    use_answers(built, CPU)
    batch = {n: v for n, v in given(Collate("rows", 0, shares=True)(ROWS)).items() if n != "lengths"}
    other = copy.deepcopy(built)
    assert not picks_answers(bare_model(other))
    torch.testing.assert_close(other(**batch)["loss"], built(**batch)["loss"], rtol=1e-4, atol=1e-5)


def test_the_trial_tells_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = whole.Turned.backward
    monkeypatch.setattr(whole.Turned, "backward", lambda ctx, grad: (right(ctx, grad * 1.01)[0], None, None))
    assert not list(whole_layers(fast("llama", {})))
