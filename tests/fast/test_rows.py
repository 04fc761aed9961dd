"""Rows laid end to end: each comes out as it does alone, by the same loss and gradients, or the layout is refused."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.data.collate import Collate
from trimtab.errors import RequestError
from trimtab.fast import attention
from trimtab.fast.answers import use_answers
from trimtab.fast.rows import Means, hidden_states, lay_rows

CPU = Means(torch.device("cpu"), gpu=None, half=None)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
SOUND: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        **{
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 4,
        },
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
        **{"topk_group": 1, "num_key_value_heads": 4, "head_dim": 8},
    },
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gemma3_text capped": {"final_logit_softcapping": 2.0, "sliding_window": 64},
}
MIXED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "outside of attention"),
    "gemma2": ({"attn_logit_softcapping": 5.0}, "eager|softcap"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "eager|s_aux"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "attention"),
}
ROWS = [[5, 9, 33, 7, 11, 60, 2], [8, 3, 3, 90], [12, 4, 71, 70, 69, 3, 2, 9, 9, 21]]


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind.split()[0], **{**TEXT, **changes})
    built = AutoModelForCausalLM.from_config(config)
    for p in built.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    return built.eval()


def examples() -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in ROWS]


def given(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in batch.items()
        if name not in ("row_lengths", "tokens", "items", "labels")
    }


def own_loss(built: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """By transformers alone: padded, with its own mask and loss."""
    batch = Collate("padded", 0)(examples())
    names = ("input_ids", "attention_mask", "labels")
    loss = built(**{name: batch[name] for name in names}).loss
    loss.backward()
    return loss.detach(), gradients(built)


def gradients(built: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}
    built.zero_grad()
    return found


@pytest.mark.parametrize("kind", SOUND)
def test_loss_and_gradients_are_those_of_padded_rows(kind: str) -> None:
    built = model(kind, **SOUND[kind])
    loss, slopes = own_loss(built)
    laid = lay_rows(built, CPU, packing=False, longest=64)
    assert laid.layout == "rows", laid.reason
    way = use_answers(built, CPU)
    assert way == "frozen"
    batch = Collate("rows", 0)(examples())
    assert batch["input_ids"].shape == (1, sum(map(len, ROWS)))
    told = built(**given(batch))
    assert int(told["tokens"]) == batch["items"] == sum(len(row) - 2 for row in ROWS)
    assert told["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    told["loss"].backward()
    ours = gradients(built)
    assert ours.keys() == slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(ours[name], slope, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
def test_the_balance_of_experts_is_that_of_padded_rows(kind: str) -> None:
    experts = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    built = model(kind, **experts, shared_expert_intermediate_size=16, router_aux_loss_coef=0.5)
    batch = Collate("padded", 0)(examples())
    names = ("input_ids", "attention_mask", "labels")
    padded = built(**{name: batch[name] for name in names}, output_router_logits=True)
    assert lay_rows(built, CPU, packing=False, longest=64).layout == "rows"
    assert use_answers(built, CPU) == "own"
    told = built(**given(Collate("rows", 0)(examples())))
    assert told["aux_loss"].item() == pytest.approx(0.5 * padded.aux_loss.item(), rel=1e-5)
    assert told["loss"].item() == pytest.approx((padded.loss - 0.5 * padded.aux_loss).item(), rel=1e-4)
    assert not built.base_model._forward_pre_hooks  # nothing is left behind


def test_a_model_that_tells_no_balance_trains_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """GraniteMoe of transformers 5.17 keeps no router's logits, and gives a plain 0 for their balance."""
    built = model("mixtral", num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5)
    own = type(built).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(self, *args, **kwargs)
        made["aux_loss"] = 0
        return made

    monkeypatch.setattr(built, "forward", types.MethodType(forward, built))
    assert use_answers(built, CPU) == "own"
    told = built(**given(Collate("padded", 0)(examples())))
    assert "aux_loss" not in told
    assert told["loss"].item() > 0


@pytest.mark.parametrize("kind", MIXED)
def test_rows_of_other_architectures_are_padded(kind: str) -> None:
    changes, why = MIXED[kind]
    built = model(kind, **changes)
    before = built.config._attn_implementation
    laid = lay_rows(built, CPU, packing=False, longest=64)
    assert laid.layout == "padded"
    assert re.search(why, laid.reason)
    assert built.config._attn_implementation == before


def test_what_no_config_tells_shows_in_the_trial() -> None:
    """An attention block that also looks at the token before it, by a way of its own."""
    built = model("llama")
    layer = built.model.layers[0]
    mlp = layer.mlp.forward
    layer.mlp.forward = lambda x: mlp(x + x.roll(1, 1))
    laid = lay_rows(built, CPU, packing=False, longest=64)
    assert laid.layout == "padded"
    assert "differ" in laid.reason
    with pytest.raises(RequestError, match=r"data.packing=true with LlamaForCausalLM"):
        lay_rows(built, CPU, packing=True, longest=64)


def test_logits_that_are_more_than_the_config_tells_are_the_models_own() -> None:
    built = model("llama")
    own = built.forward
    built.forward = lambda *args, **kwargs: _doubled(own(*args, **kwargs))
    assert use_answers(built, CPU) == "own"
    batch = Collate("padded", 0)(examples())
    told = built(**given(batch))
    logits = 2 * model("llama")(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1)[batch["head_rows"]], batch["head_labels"])
    torch.testing.assert_close(told["loss"], loss)


def _doubled(out: Any) -> Any:
    out.logits = 2 * out.logits
    return out


def test_packing_keeps_a_model_with_a_mask_of_its_own() -> None:
    built = model("llama", attention_dropout=0.1)
    laid = lay_rows(built, CPU, packing=True, longest=64)
    assert laid.layout == "positions"
    assert "drops out attention" in laid.reason


def test_a_window_that_no_layer_tells_is_found() -> None:
    """Rows of the trial are shorter than a long window: that each layer asks for it is looked at instead."""
    built = model("mistral", sliding_window=300)
    assert lay_rows(built, CPU, packing=False, longest=200).layout == "rows"
    built = model("mistral", sliding_window=300)
    real = attention.rows_attention

    def forgetful(*args: Any, sliding_window: Any = None, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "rows_attention", forgetful)
        laid = lay_rows(built, CPU, packing=False, longest=400)
    assert laid.layout == "padded"
    assert "window of 300" in laid.reason


def test_rows_of_one_length_need_no_bounds() -> None:
    built = model("mistral", sliding_window=4)
    rows = [{"input_ids": row[:4], "labels": row[:4]} for row in ROWS]
    batch = Collate("rows", 0)(rows)
    assert batch["input_ids"].shape == (3, 4)
    assert "cu_seq_lens_q" not in batch
    alone = hidden_states(built, {"input_ids": torch.tensor([[7] * 9, [8] * 9])})
    assert lay_rows(built, CPU, packing=False, longest=64).layout == "rows"
    # Longer than the window, side by side.
    torch.testing.assert_close(hidden_states(built, {"input_ids": torch.tensor([[7] * 9, [8] * 9])}), alone)


def test_other_batches_of_the_same_model_are_what_they_were() -> None:
    """Padded batches, and generation with its cache, go on by transformers' own mask."""
    built = model("llama")
    batch = Collate("padded", 0)(examples())
    names = ("input_ids", "attention_mask")
    before = built(**{name: batch[name] for name in names}).logits
    written = built.generate(torch.tensor([ROWS[0]]), max_new_tokens=6, do_sample=False)
    assert lay_rows(built, CPU, packing=False, longest=64).layout == "rows"
    use_answers(built, CPU)
    assert torch.equal(built(**{name: batch[name] for name in names}).logits, before)
    assert torch.equal(built.generate(torch.tensor([ROWS[0]]), max_new_tokens=6, do_sample=False), written)
    assert not built.training


def test_shapes_that_wait_on_the_host_for_their_gpu_are_not_cast_there() -> None:
    """Of a model that is to be sharded: autocast has no rules for shapes on the host, and would cast a part of them."""
    for device, tried, cast in (("cpu", False, False), ("cpu", True, True), ("cuda", False, True)):
        means = Means(
            torch.device(device), torch.device("cuda:0"), torch.bfloat16, tried=tried, rehearsed=True
        )
        assert isinstance(means.autocast(), torch.autocast) == cast
