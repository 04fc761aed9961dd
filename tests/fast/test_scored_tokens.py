"""TRL's fused head in our way: TRL's numbers and gradients, and TRL's own head where ours is not sound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from tiny_models import TEXT
from trimtab.fast.scored_tokens import use_frozen_head

GEMMA = {**TEXT, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "gemma2": {**GEMMA, "final_logit_softcapping": 2.0},
    "cohere": {**TEXT, "logit_scale": 0.5},
    "granite": {**TEXT, "logits_scaling": 4.0},
    "phi": TEXT,
}


def causal(kind: str, **changes: Any) -> Any:
    torch.manual_seed(2)
    config = transformers.AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


def adapted(kind: str, targets: Any = ("q_proj", "v_proj"), **changes: Any) -> Any:
    model = causal(kind, **changes)
    torch.manual_seed(3)
    settings = LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(model, settings)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 120, (3, 13), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1, 9:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def scored(model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    out = model(**batch(), fused_lm_head=True)
    weights = torch.linspace(-1, 2, out.log_probs.numel(), dtype=out.log_probs.dtype).view_as(out.log_probs)
    (out.log_probs * weights).sum().backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
def test_the_numbers_and_gradients_are_trls(kind: str) -> None:
    model = adapted(kind)
    bare = model.get_base_model()
    add_fused_lm_head(bare, temperature=0.8, outputs=("log_probs", "entropy"))
    wanted, gradients = scored(model)
    assert use_frozen_head(bare, temperature=0.8) is None
    assert bare.training
    out, found = scored(model)
    assert torch.equal(out.label_mask, wanted.label_mask)
    # TRL's are sums in fp32 also of float64.
    for name in ("log_probs", "entropy", "loss"):
        torch.testing.assert_close(
            getattr(out, name).float(), getattr(wanted, name).float(), rtol=1e-4, atol=1e-5
        )
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: causal("llama"), "trained, adapted or sharded"),
        (lambda: adapted("llama", ("q_proj", "lm_head")).get_base_model(), "trained, adapted or sharded"),
    ],
    ids=["trained", "adapted"],
)
def test_a_head_that_learns_is_left_to_trl(make: Any, why: str) -> None:
    model = make()
    add_fused_lm_head(model)
    before = model.forward
    told = use_frozen_head(model)
    assert told is not None
    assert why in told
    assert model.forward == before


def test_a_forward_that_is_no_head_behind_a_body_is_found_out() -> None:
    model = adapted("llama").get_base_model()
    own = model.forward

    def bent(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = bent
    add_fused_lm_head(model)
    before = model.forward
    told = use_frozen_head(model)
    assert told is not None
    assert "not those of a head behind its body" in told
    assert model.forward == before


def test_generation_and_a_plain_pass_stay_as_they_are() -> None:
    model = adapted("llama").get_base_model().eval()
    add_fused_lm_head(model)
    asked = {"input_ids": batch()["input_ids"][:1]}
    logits = model(**asked).logits
    said = model.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert use_frozen_head(model) is None
    assert torch.equal(model(**asked).logits, logits)
    assert torch.equal(model.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=0), said)
